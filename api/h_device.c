/* h_device.c: device memory: of trainers, by descriptors that are handed over and copies between it and segments; and device images. */
#include <strings.h>

#include "api/h_common.h"
#include "api/handlers.h"
#include "base/jval.h"
#include "base/log.h"
#include "server/descriptors.h"
#include "server/device_copy.h"
#include "server/device_image.h"
#include "server/parts.h"
#include "server/state_dict.h"
#include "tensor/dtype.h"

#define PROTOCOL_NAME "dcpd-descriptors"

enum { ALLOCATIONS_MAX = 4096, CASTS_MAX = 64, HANDLE_TEXT = 88, UUID_MAX = 47, RECORD_MAX = 4096, TTL_MAX_S = 366 * 86400 };

static void on_upgraded(struct req *r, int *socket)
{
	struct principal who = req_principal(r);

	if (descriptors_open(r->core->descriptors, socket, &who) != OK)
		log_err("a client's descriptors are not taken", NULL);
}

FALLIBLE enum err h_descriptors(struct req *r)
{
	const char *upgrade = req_head(r, MHD_HTTP_HEADER_UPGRADE);
	struct principal who = req_principal(r);

	if (!r->caller.over_unix)
		return ERR(INVALID_REQUEST, "descriptors travel over the Unix socket only");
	if (!upgrade || strcasecmp(upgrade, PROTOCOL_NAME) != 0 || strcmp(r->method, "GET") != 0 || !r->is_http_1_1)
		return ERR(INVALID_REQUEST, "this resource is a GET with the headers Connection: Upgrade and Upgrade: " PROTOCOL_NAME);
	TRY(descriptors_check(r->core->descriptors, &who)); /* once it is upgraded, a refusal can only be an end */
	return http_upgrade(r, PROTOCOL_NAME, on_upgraded);
}

/* A legacy handle is no capability: who can guess the numbers in it can open another user's memory. So it is taken from those only whose
 * memory dcpd may read anyway. A descriptor was given by somebody who has the memory. */
static FALLIBLE enum err check_allocation(const struct req *r, const struct jval *one)
{
	struct jval handle = jval_get(one, "handle"), number = jval_get(one, "descriptor"), bytes = jval_get(one, "bytes");
	struct str text;
	int64_t n;

	TRY(jval_only(one, (const char *const[]){ "handle", "descriptor", "bytes", NULL }));
	TRY(jval_integer(&bytes, 1, INT64_MAX, &n));
	if ((handle.j != NULL) == (number.j != NULL))
		return jval_fail(one, ERR_VALIDATION_FAILED, "has a handle, or a descriptor");
	if (number.j)
		return jval_integer(&number, 0, DESCRIPTORS_MAX - 1, &n);
	TRY(jval_string(&handle, &text));
	if (text.n != HANDLE_TEXT)
		return jval_fail(&handle, ERR_VALIDATION_FAILED, "a handle is 64 bytes in base64: %d characters", HANDLE_TEXT);
	if (!r->caller.admin)
		return jval_fail(&handle, ERR_FORBIDDEN, "handles of cuIpcGetMemHandle are taken from dcpd's own uid and from root only: "
				 "hand over descriptors (PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True), or copy yourself");
	return OK;
}

static FALLIBLE enum err check_allocations(const struct req *r, const struct jval *list)
{
	size_t n;

	TRY(jval_array(list, ALLOCATIONS_MAX, &n));
	if (!n)
		return jval_fail(list, ERR_VALIDATION_FAILED, "names one allocation at least");
	for (size_t i = 0; i < n; i++) {
		struct jval one = jval_at(list, i);
		TRY(check_allocation(r, &one));
	}
	return OK;
}

static FALLIBLE enum err check_table(const struct jval *table)
{
	struct jval offset = jval_get(table, "offset"), count = jval_get(table, "count");
	int64_t n;

	TRY(jval_only(table, (const char *const[]){ "offset", "count", NULL }));
	TRY(jval_integer(&offset, 8, INT64_MAX, &n));
	if (n % 8)
		return jval_fail(&offset, ERR_VALIDATION_FAILED, "is a multiple of 8");
	return jval_integer(&count, 1, INT64_MAX, &n);
}

static FALLIBLE enum err check_casts(const struct jval *list)
{
	static const char *const sides[] = { "slot", "device", NULL };
	enum dtype dtype;
	struct str text;
	size_t n;

	TRY(jval_array(list, CASTS_MAX, &n));
	for (size_t i = 0; i < n; i++) {
		struct jval one = jval_at(list, i);
		TRY(jval_only(&one, sides));
		for (size_t k = 0; sides[k]; k++) {
			struct jval side = jval_get(&one, sides[k]);
			TRY(jval_string(&side, &text));
			if (dtype_parse(text, &dtype) != OK)
				return jval_fail(&side, ERR_VALIDATION_FAILED, "is a dtype, such as bfloat16");
		}
	}
	return OK;
}

static FALLIBLE enum err read_uuid(const struct jval *root, const char **out)
{
	struct jval device = jval_get(root, "device");
	struct str text;

	TRY(jval_string(&device, &text));
	if (!str_starts(text, "GPU-") || text.n > UUID_MAX || memchr(text.p, 0, text.n))
		return jval_fail(&device, ERR_VALIDATION_FAILED, "is a GPU's uuid as nvidia-smi -L prints it: GPU-…");
	*out = text.p;
	return OK;
}

static void on_copied(void *user, enum err e, const json_t *ok, int *)
{
	req_done(user, e ? e : req_json_doc(user, 200, ok));
}

FALLIBLE enum err h_rank_copy(struct req *r)
{
	struct jval root = JVAL_ROOT(r->body), gen_at = jval_get(&root, "generation"), list = jval_get(&root, "allocations");
	struct jval casts = jval_get(&root, "casts"), table = jval_get(&root, "table"), token = jval_get(&root, "descriptors");
	struct device_copy_request rq = { .who = req_principal(r), .name = r->parts[2], .allocations = list.j, .table = table.j,
					   .casts = casts.j };

	TRY(h_rank(r, &rq.rank));
	TRY(jval_only(&root, (const char *const[]){ "generation", "device", "to_device", "allocations", "table", "descriptors", "casts",
						    NULL }));
	TRY(jval_integer(&gen_at, 0, INT64_MAX, &rq.generation));
	TRY(read_uuid(&root, &rq.device));
	TRY(jval_opt_bool(&root, "to_device", &rq.to_device));
	TRY(check_table(&table));
	TRY(check_allocations(r, &list));
	if (casts.j)
		TRY(check_casts(&casts));
	if (token.j)
		TRY(jval_string(&token, &rq.descriptors));
	TRY(device_copy_start(r->core->device_copies, &rq, on_copied, r));
	req_hold(r);
	return OK;
}

/* ---- device images ---- */

static FALLIBLE enum err take(struct req *r, enum err e, struct buf *b)
{
	if (!e)
		return req_json(r, 200, b);
	buf_free(b);
	return e;
}

FALLIBLE enum err h_device_images_list(struct req *r)
{
	struct buf b = BUF_INIT(64 << 20);
	struct principal who = req_principal(r);
	struct str of = { 0 };
	bool there;

	TRY(req_query(r, "state_dict", &of, &there));
	if (there)
		TRY(ref_check_state_dict(of));
	return take(r, device_images_list(r->core->device_images, &who, of, &b), &b);
}

/* The audit's subject is STATE_DICT:ID. */
static FALLIBLE enum err note_subject(struct req *r, const struct buf *record)
{
	CLEANUP(jval_drop) json_t *doc = NULL;

	TRY(jval_parse((struct str){ (const char *)record->p, record->len }, &doc));
	snprintf(r->audit_subject, sizeof r->audit_subject, "%s:%s", json_string_value(json_object_get(doc, "state_dict")),
		 json_string_value(json_object_get(doc, "id")));
	return OK;
}

static void on_kept(void *user, enum err e, const struct buf *record)
{
	struct buf b = BUF_INIT(RECORD_MAX);

	e = e ?: note_subject(user, record);
	if (!e)
		buf_put(&b, record->p, record->len);
	req_done(user, take(user, e ?: buf_status(&b), &b));
}

FALLIBLE enum err h_device_images_create(struct req *r)
{
	struct jval root = JVAL_ROOT(r->body), name = jval_get(&root, "state_dict"), device = jval_get(&root, "device");
	struct device_image_request rq = { .who = req_principal(r), .generation = -1, .ttl_ms = -1 };
	struct buf there = BUF_INIT(RECORD_MAX);
	int64_t ttl_s = -1;
	bool changes;

	TRY(jval_only(&root, (const char *const[]){ "state_dict", "rank", "generation", "device", "ttl_seconds", NULL }));
	TRY(jval_string(&name, &rq.state_dict));
	TRY(jval_failed(&name, ref_check_state_dict(rq.state_dict)));
	TRY(jval_opt_integer(&root, "rank", 0, STATE_DICT_WORLD_MAX - 1, &rq.rank));
	TRY(jval_opt_integer(&root, "generation", 0, INT64_MAX, &rq.generation));
	TRY(jval_opt_integer(&root, "ttl_seconds", 0, TTL_MAX_S, &ttl_s));
	rq.ttl_ms = ttl_s < 0 ? -1 : ttl_s * 1000;
	if (device.j)
		TRY(read_uuid(&root, &rq.device));
	enum err e = device_image_keep(r->core->device_images, &rq, on_kept, r, &there, &changes);
	if (!changes)
		r->audit = NULL; /* it was there, or is another request's */
	if (!e && there.len)
		e = note_subject(r, &there);
	if (e || there.len)
		return take(r, e, &there);
	req_hold(r);
	return OK;
}

FALLIBLE enum err h_device_image_get(struct req *r)
{
	struct buf b = BUF_INIT(RECORD_MAX);
	struct principal who = req_principal(r);

	return take(r, device_image_put(r->core->device_images, &who, r->parts[2], &b), &b);
}

FALLIBLE enum err h_device_image_attach(struct req *r)
{
	struct jval root = JVAL_ROOT(r->body);
	struct buf b = BUF_INIT(RECORD_MAX);
	struct principal who = req_principal(r);
	struct str token;

	TRY(jval_only(&root, (const char *const[]){ "descriptors", NULL }));
	TRY(jval_must_text(&root, "descriptors", &token));
	return take(r, device_image_attach(r->core->device_images, &who, r->parts[2], token, &b), &b);
}

FALLIBLE enum err h_device_image_drop(struct req *r)
{
	struct principal who = req_principal(r);
	struct buf b = BUF_INIT(RECORD_MAX);

	enum err e = device_image_put(r->core->device_images, &who, r->parts[2], &b);
	e = e ?: note_subject(r, &b);
	buf_free(&b);
	TRY(e);
	TRY(device_image_drop(r->core->device_images, &who, r->parts[2]));
	return req_empty(r, 204);
}
