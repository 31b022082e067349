/* h_locate.c: POST /v1/checkpoints/{storage}/{name}:locate: where the bytes of boxes lie, for a client that reads them itself. The boxes
 * are checked here, so that what a worker gets is well formed; what they mean is the worker's to say. */
#include <stdio.h>

#include "api/h_common.h"
#include "api/handlers.h"
#include "base/jval.h"
#include "server/lookup.h"
#include "server/verdict.h"
#include "server/parts.h"
#include "server/state_dict.h"

enum { BOXES_MAX = 10000, DIMS_MAX = 64 };

/* A list of `dims` numbers that are not negative. */
static FALLIBLE enum err check_list(const struct jval *box, const char *key, size_t dims)
{
	struct jval list = jval_get(box, key);
	int64_t v;
	size_t n;

	TRY(jval_array(&list, DIMS_MAX, &n));
	if (n != dims)
		return jval_fail(&list, ERR_VALIDATION_FAILED, "has %zu numbers, \"shape\" has %zu", n, dims);
	for (size_t i = 0; i < n; i++) {
		struct jval one = jval_at(&list, i);
		TRY(jval_integer(&one, 0, INT64_MAX, &v));
	}
	return OK;
}

static int64_t number_at(const json_t *box, const char *key, size_t i)
{
	return json_integer_value(json_array_get(json_object_get(box, key), i));
}

static FALLIBLE enum err check_box(const struct jval *box)
{
	struct jval sizes = jval_get(box, "sizes");
	struct str text;

	TRY(jval_only(box, (const char *const[]){ "fqn", "dtype", "shape", "offsets", "sizes", NULL }));
	TRY(jval_must_text(box, "fqn", &text));
	TRY(jval_must_text(box, "dtype", &text));
	size_t dims = json_array_size(json_object_get(box->j, "shape"));
	TRY(check_list(box, "shape", dims));
	TRY(check_list(box, "offsets", dims));
	TRY(check_list(box, "sizes", dims));
	for (size_t i = 0; i < dims; i++)
		if (number_at(box->j, "offsets", i) > number_at(box->j, "shape", i) - number_at(box->j, "sizes", i))
			return jval_fail(&sizes, ERR_VALIDATION_FAILED, "the box is not inside the tensor in dim %zu", i);
	return OK;
}

static FALLIBLE enum err answer_located(struct req *r, const json_t *ok, int *fd)
{
	const char *etag = json_string_value(json_object_get(ok, "etag"));
	char detail[VERDICT_DETAIL_MAX], warning[VERDICT_DETAIL_MAX + sizeof VERDICT_WARNING + 2];

	TRY(h_pass_fd(r, "application/json", ok, fd, NULL));
	TRY(h_tell_served(r));
	const char *name = json_string_value(json_object_get(r->note, "name")); /* of the checkpoint that an alias led to */
	if (!etag || !verdict_warns(r->core->journal, r->parts[2], str_of(name), etag, detail))
		return OK;
	snprintf(warning, sizeof warning, "%s; %s", VERDICT_WARNING, detail);
	return req_header(r, "Dcpd-Warning", warning);
}

static void on_located(void *user, enum err e, const json_t *ok, int *fd)
{
	req_done(user, e ? e : answer_located(user, ok, fd));
}

FALLIBLE enum err h_checkpoint_locate(struct req *r)
{
	struct jval root = JVAL_ROOT(r->body), boxes = jval_get(&root, "boxes");
	CLEANUP(state_dict_memory_drop) struct state_dict_memory memory = { 0 };
	struct ref checkpoint = { .kind = REF_CHECKPOINT, .storage = r->parts[2], .name = r->parts[3], .generation = -1 };
	CLEANUP(jval_drop) json_t *q = NULL;
	bool verify = true;
	size_t n;

	TRY(h_question(r, "locate", &q));
	TRY(jval_only(&root, (const char *const[]){ "boxes", "verify", NULL }));
	TRY(jval_opt_bool(&root, "verify", &verify));
	TRY(jval_array(&boxes, BOXES_MAX, &n));
	for (size_t i = 0; i < n; i++) {
		struct jval box = jval_at(&boxes, i);
		TRY(check_box(&box));
	}
	TRY(state_dict_memory_find(r->core->state_dicts, &checkpoint, &memory));
	if (memory.list && json_object_set(q, "memory", memory.list) != 0)
		return ERR(NO_MEMORY, "cannot ask");
	if (json_object_set(q, "boxes", boxes.j) != 0 || json_object_set_new(q, "verify", json_boolean(verify)) != 0)
		return ERR(NO_MEMORY, "cannot ask");
	r->note = json_incref(q);
	h_ask_either(r, move(q), memory.fds.v, (uint32_t)memory.fds.n, on_located);
	return OK;
}
