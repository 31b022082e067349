/* h_common.c: see h_common.h. */
#include "api/h_common.h"

#include <stdio.h>

#include "base/jval.h"
#include "base/mem.h"
#include "server/catalogue.h"
#include "server/parts.h"
#include "spec/ref.h"
#include "server/job.h"
#include "server/lookup.h"
#include "server/storage.h"

enum { TOKEN_MAX = 4096 }; /* a storage and a checkpoint's name, however long */

FALLIBLE enum err h_page_query(struct req *r, struct h_page *out)
{
	uint64_t size = H_PAGE_DEFAULT;
	bool there;

	*out = (struct h_page){ 0 };
	TRY(req_query_u64(r, "page_size", UINT32_MAX, &size));
	if (size == 0)
		return ERR(INVALID_REQUEST, "the query's \"page_size\" must be at least 1");
	out->size = size < H_PAGE_MAX ? (uint32_t)size : H_PAGE_MAX;
	TRY(req_query(r, "page_token", &out->token, &there));
	if (out->token.n > TOKEN_MAX)
		return ERR(INVALID_REQUEST, "the query's \"page_token\" is none of ours");
	return OK;
}

FALLIBLE enum err h_tasks_query(struct req *r, struct follower_page *out)
{
	struct h_page page;

	TRY(h_page_query(r, &page));
	*out = (struct follower_page){ page.token, page.size };
	if (page.token.n && !job_id_ok(page.token))
		return ERR(INVALID_REQUEST, "the query's \"page_token\" is none of ours");
	return OK;
}

FALLIBLE enum err h_idempotency(struct req *r, struct idempotency *out)
{
	const char *key = req_head(r, "Idempotency-Key");

	*out = (struct idempotency){ .body = { (const char *)r->raw.p, r->raw.len } };
	if (!key)
		return OK;
	out->key = str_of(key);
	if (out->key.n == 0 || out->key.n > 255)
		return ERR(INVALID_REQUEST, "an Idempotency-Key has 1 to 255 bytes");
	return OK;
}

static FALLIBLE enum err answer_created(struct req *r, const char *id, bool existing)
{
	struct buf b = BUF_INIT(64 << 20);
	char location[64];
	struct str text;

	TRY(job_text(r->core, str_of(id), &text));
	buf_put(&b, text.p, text.n);
	TRY(req_json(r, 202, &b));
	snprintf(location, sizeof location, "/v1/jobs/%s", id);
	TRY(req_header(r, MHD_HTTP_HEADER_LOCATION, location));
	return existing ? req_header(r, "Idempotency-Replayed", "true") : OK;
}

static void on_created(void *user, enum err e, const char *id, bool existing)
{
	req_done(user, e ? e : answer_created(user, id, existing));
}

FALLIBLE enum err h_submit(struct req *r, const json_t *doc, enum job_kind kind)
{
	struct job_request rq = { .kind = kind, .spec = doc, .who = req_principal(r) };

	TRY(h_idempotency(r, &rq.idem));
	req_hold(r);
	job_create(r->core, &rq, on_created, r);
	return OK;
}

void h_pass_on(void *user, enum err e, const json_t *ok, int *)
{
	req_done(user, e ? e : req_json_doc(user, 200, ok));
}

FALLIBLE enum err h_pass_fd(struct req *r, const char *content_type, const json_t *ok, int *fd, const char *etag)
{
	const json_t *bytes = json_object_get(ok, "bytes");
	uint64_t held = *fd >= 0 ? lookup_fd_bytes(*fd) : 0;

	/* The size that a worker names is checked against the memfd: a wrong one would send bytes that are not there. */
	if (!json_is_integer(bytes) || *fd < 0 || json_integer_value(bytes) < 0 || (uint64_t)json_integer_value(bytes) > held)
		return ERR(PROTOCOL, "the look-up's answer has not the bytes that it announces");
	int taken = *fd;
	*fd = -1;
	return req_fd(r, content_type, taken, (uint64_t)json_integer_value(bytes), held, etag);
}

FALLIBLE enum err h_set_text(json_t *question, const char *key, struct str text)
{
	if (text.n == 0)
		return OK;
	if (!str_utf8(text))
		return ERR(VALIDATION_FAILED, "%s is not UTF-8", key);
	if (json_object_set_new(question, key, json_stringn(text.p, text.n)) != 0)
		return ERR(NO_MEMORY, "cannot ask");
	return OK;
}

FALLIBLE enum err h_question(struct req *r, const char *op, json_t **out)
{
	CLEANUP(jval_drop) json_t *q = json_pack("{s:s}", "op", op);
	struct storage *st;

	NEED(q, "cannot ask");
	TRY(ref_check_storage(r->parts[2]));
	TRY(ref_check_meant(r->parts[3]));
	TRY(storage_find(r->core->storages, r->parts[2], &st));
	TRY(h_set_text(q, "storage", r->parts[2]));
	TRY(h_set_text(q, "name", r->parts[3]));
	*out = move(q);
	return OK;
}

/* A question that waits for its name. */
struct asking {
	struct req *r;
	json_t *question;
	lookup_fn fn;
};

static void on_name(void *user, enum err e, const char *name)
{
	struct asking *a = user;
	struct req *r = a->r;
	int none = -1;

	if (!e && json_object_set_new(a->question, "name", json_string(name)) != 0)
		e = ERR(NO_MEMORY, "cannot ask");
	if (e) {
		json_decref(a->question);
		a->fn(r, e, NULL, &none);
	} else {
		lookup_ask(r->core->lookups, r->parts[2].p, a->question, NULL, 0, a->fn, r);
	}
	mem_free(a);
}

void h_ask(struct req *r, json_t *question, lookup_fn fn)
{
	const char *name = json_string_value(json_object_get(question, "name"));

	req_hold(r);
	if (!catalogue_is_alias(name)) {
		lookup_ask(r->core->lookups, r->parts[2].p, question, NULL, 0, fn, r);
		return;
	}
	struct asking *a = mem_sure(sizeof *a);
	*a = (struct asking){ .r = r, .question = question, .fn = fn };
	catalogue_resolve(r->core, r->parts[2].p, name, on_name, a);
}
