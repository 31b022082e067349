/* h_device.c: device memory of trainers: descriptors that are handed over, and copies between it and segments. */
#include <strings.h>

#include "api/h_common.h"
#include "api/handlers.h"
#include "base/jval.h"
#include "base/log.h"
#include "server/descriptors.h"
#include "server/device_copy.h"
#include "server/parts.h"
#include "server/state_dict.h"
#include "tensor/dtype.h"

#define PROTOCOL_NAME "dcpd-descriptors"

enum { ALLOCATIONS_MAX = 4096, CASTS_MAX = 64, HANDLE_TEXT = 88, UUID_MAX = 47 };

static void on_upgraded(struct req *r, int *socket)
{
	struct principal who = req_principal(r);

	if (descriptors_open(r->core->descriptors, socket, &who) != OK)
		log_err("a client's descriptors are not taken", NULL);
}

FALLIBLE enum err h_descriptors(struct req *r)
{
	const char *upgrade = req_head(r, MHD_HTTP_HEADER_UPGRADE);

	if (!r->caller.over_unix)
		return ERR(INVALID_REQUEST, "descriptors travel over the Unix socket only");
	if (!upgrade || strcasecmp(upgrade, PROTOCOL_NAME) != 0 || strcmp(r->method, "GET") != 0 || !r->is_http_1_1)
		return ERR(INVALID_REQUEST, "this resource is a GET with the headers Connection: Upgrade and Upgrade: " PROTOCOL_NAME);
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

static FALLIBLE enum err read_uuid(const struct jval *root, struct device_copy_request *rq)
{
	struct jval device = jval_get(root, "device");
	struct str text;

	TRY(jval_string(&device, &text));
	if (!str_starts(text, "GPU-") || text.n > UUID_MAX || memchr(text.p, 0, text.n))
		return jval_fail(&device, ERR_VALIDATION_FAILED, "is a GPU's uuid as nvidia-smi -L prints it: GPU-…");
	rq->device = text.p;
	return OK;
}

static void on_copied(void *user, enum err e, const json_t *ok)
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
	TRY(read_uuid(&root, &rq));
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
