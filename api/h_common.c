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
#include "server/tier.h"
#include "server/verdict.h"

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

FALLIBLE enum err h_answer_created(struct req *r, const char *id, bool existing)
{
	struct buf b = BUF_INIT(64 << 20);
	char location[64];
	struct str text;

	TRY(job_text(r->core, str_of(id), &text));
	buf_put(&b, text.p, text.n);
	snprintf(r->audit_job, sizeof r->audit_job, "%s", id);
	if (existing)
		r->audit = NULL; /* the first request is in the audit */
	TRY(req_json(r, 202, &b));
	snprintf(location, sizeof location, "/v1/jobs/%s", id);
	TRY(req_header(r, MHD_HTTP_HEADER_LOCATION, location));
	return existing ? req_header(r, "Idempotency-Replayed", "true") : OK;
}

static void on_created(void *user, enum err e, const char *id, bool existing)
{
	req_done(user, e ? e : h_answer_created(user, id, existing));
}

FALLIBLE enum err h_job_request(struct req *r, const json_t *doc, enum job_kind kind, struct job_request *out)
{
	*out = (struct job_request){ .kind = kind, .spec = doc, .who = req_principal(r), .traceparent = req_head(r, "traceparent"),
				     .request_id = r->id };
	return h_idempotency(r, &out->idem);
}

FALLIBLE enum err h_submit(struct req *r, const json_t *doc, enum job_kind kind)
{
	struct job_request rq;

	TRY(h_job_request(r, doc, kind, &rq));
	req_hold(r);
	job_create(r->core, &rq, on_created, r);
	return OK;
}

FALLIBLE enum err h_storage(struct req *r, enum err (*check)(struct str name), struct storage **out)
{
	TRY(ref_check_storage(r->parts[2]));
	if (check)
		TRY(check(r->parts[3]));
	return storage_find(r->core->storages, r->parts[2], out);
}

FALLIBLE enum err h_check_run(struct str name)
{
	return str_is(name, "-") ? OK : ref_check_name(name);
}

FALLIBLE enum err h_no_body(const struct req *r)
{
	struct jval root = JVAL_ROOT(r->body);

	return r->body ? jval_only(&root, (const char *const[]){ NULL }) : OK;
}

void h_pass_nothing(void *user, enum err e)
{
	req_done(user, e ? e : req_empty(user, 204));
}

void h_pass_text(void *user, enum err e, struct buf *out)
{
	req_done(user, e ? e : req_json(user, 200, out));
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
	TRY(h_storage(r, ref_check_meant, &st));
	TRY(h_set_text(q, "storage", r->parts[2]));
	TRY(h_set_text(q, "name", r->parts[3]));
	*out = move(q);
	return OK;
}

/* A question that waits for its name, or for its answer. */
struct asking {
	struct req *r;
	json_t *question;
	json_t *behind;                /* the same for the storage behind; NULL: the first answer is the answer */
	lookup_fn fn;
};

static void asking_end(struct asking *a, enum err e, const json_t *ok, int *fd)
{
	a->fn(a->r, e, ok, fd);
	json_decref(a->behind);
	mem_free(a);
}

static const char *name_of(const struct asking *a)
{
	return json_string_value(json_object_get(a->behind, "name"));
}

static void on_behind(void *user, enum err e, const json_t *ok, int *fd)
{
	struct asking *a = user;
	const char *target = tier_of(a->r->core->tiers, a->r->parts[2])->how->target;

	if (e == ERR_NOT_FOUND)
		e = ERR(NOT_FOUND, "there is no checkpoint '%s', and no copy of it in %s", name_of(a), target);
	a->r->served_from = e ? NULL : target;
	asking_end(a, e, ok, fd);
}

/* Whoever asks for what is not there asks the storage behind; damage sends nobody to what is not known to be a copy. */
static bool wants_behind(const struct asking *a, enum err e)
{
	if (!a->behind || e == ERR_NOT_FOUND)
		return a->behind;
	return verdict_is_damage(e) && tier_has(a->r->core->tiers, a->r->parts[2], str_of(name_of(a)));
}

static void on_first(void *user, enum err e, const json_t *ok, int *fd)
{
	struct asking *a = user;
	struct server *s = a->r->core;

	if (e && wants_behind(a, e))
		lookup_ask(s->lookups, tier_of(s->tiers, a->r->parts[2])->how->target, json_incref(a->behind), NULL, 0, on_behind, a);
	else
		asking_end(a, e, ok, fd);
}

static void on_name(void *user, enum err e, const char *name)
{
	struct asking *a = user;
	int none = -1;

	if (!e && (json_object_set_new(a->question, "name", json_string(name)) != 0 ||
		   (a->behind && json_object_set_new(a->behind, "name", json_string(name)) != 0)))
		e = ERR(NO_MEMORY, "cannot ask");
	if (!e) {
		lookup_ask(a->r->core->lookups, a->r->parts[2].p, a->question, NULL, 0, on_first, a);
		return;
	}
	json_decref(a->question);
	asking_end(a, e, NULL, &none);
}

/* fds: of a question that has its name. */
static void ask(struct asking *a, const int *fds, uint32_t fd_count)
{
	struct req *r = a->r;
	const char *name = json_string_value(json_object_get(a->question, "name"));

	req_hold(r);
	if (catalogue_is_alias(name))
		catalogue_resolve(r->core, r->parts[2].p, name, on_name, a);
	else
		lookup_ask(r->core->lookups, r->parts[2].p, a->question, fds, fd_count, on_first, a);
}

static struct asking *asking_new(struct req *r, json_t *question, lookup_fn fn)
{
	struct asking *a = mem_sure(sizeof *a);

	*a = (struct asking){ .r = r, .question = question, .fn = fn };
	return a;
}

void h_ask(struct req *r, json_t *question, lookup_fn fn)
{
	ask(asking_new(r, question, fn), NULL, 0);
}

/* ---- either copy ---- */

void h_ask_either(struct req *r, json_t *question, const int *fds, uint32_t fd_count, lookup_fn fn)
{
	const struct tier *t = tier_of(r->core->tiers, r->parts[2]);
	struct asking *a = asking_new(r, question, fn);

	if (t) {
		a->behind = json_copy(question);
		(void)json_object_del(a->behind, "memory"); /* segments have what was saved to the fast storage */
		if (json_object_set_new(a->behind, "storage", json_string(t->how->target)) != 0) {
			json_decref(a->behind); /* no memory for a second question */
			a->behind = NULL;
		}
	}
	ask(a, fds, fd_count);
}

FALLIBLE enum err h_tell_served(struct req *r)
{
	return r->served_from ? req_header(r, "Dcpd-Served-From", r->served_from) : OK;
}

static FALLIBLE enum err answer_either(struct req *r, const json_t *ok)
{
	TRY(req_json_doc(r, 200, ok));
	return h_tell_served(r);
}

void h_pass_either(void *user, enum err e, const json_t *ok, int *)
{
	req_done(user, e ? e : answer_either(user, ok));
}
