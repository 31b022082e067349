/* h_checkpoints.c: /v1/checkpoints. What is on a disk is asked of a look-up worker; the answers pass through. */
#include <stdio.h>
#include <stdlib.h>

#include "api/h_common.h"
#include "api/handlers.h"
#include "api/jval.h"
#include "api/problem.h"
#include "api/spec.h"
#include "base/mem.h"
#include "base/near.h"
#include "server/errdoc.h"
#include "server/job.h"
#include "server/lookup.h"
#include "server/storage.h"
#include "server/verdict.h"

enum { SLICE_MAX = 1024 };

/* A list under way: one question per storage. */
struct listing {
	struct req *req;
	struct h_page page;
	unsigned waiting;
	bool one;                     /* a single storage: its error is the answer's */
	enum err failed;
	struct err_info why;
	json_t *found, *problems;     /* arrays */
};

struct asked {
	struct listing *list;
	char storage[STORAGE_NAME_MAX + 1];
};

static const char *text_in(const json_t *object, const char *key)
{
	const char *text = json_string_value(json_object_get(object, key));

	return text ? text : "";
}

static int by_name(const void *a, const void *b)
{
	const json_t *x = *(json_t *const *)a, *y = *(json_t *const *)b;
	int c = strcmp(text_in(x, "storage"), text_in(y, "storage"));

	return c ? c : strcmp(text_in(x, "name"), text_in(y, "name"));
}

/* Is the item beyond the token "storage:name"? */
static bool beyond(const json_t *item, struct str token)
{
	const char *storage = text_in(item, "storage"), *name = text_in(item, "name");
	const char *colon = memchr(token.p, ':', token.n);
	struct str s = { token.p, colon ? (size_t)(colon - token.p) : token.n };
	struct str n = { colon ? colon + 1 : "", colon ? token.n - s.n - 1 : 0 };
	int c = str_cmp(str_of(storage), s);

	return c > 0 || (c == 0 && str_cmp(str_of(name), n) > 0);
}

static FALLIBLE enum err answer_list(struct listing *l)
{
	CLEANUP(buf_free) struct buf b = BUF_INIT(64 << 20);
	size_t n = json_array_size(l->found), shown = 0, i = 0;
	CLEANUP(mem_free_ptr) json_t **sorted = mem_zalloc(n + 1, sizeof *sorted);

	if (!sorted)
		return ERR(NO_MEMORY, "cannot list");
	for (i = 0; i < n; i++)
		sorted[i] = json_array_get(l->found, i);
	qsort(sorted, n, sizeof *sorted, by_name);
	buf_puts(&b, "{\"checkpoints\":[");
	for (i = 0; i < n && shown < l->page.size; i++) {
		if (l->page.token.n && !beyond(sorted[i], l->page.token))
			continue;
		if (shown++)
			buf_putc(&b, ',');
		verdict_put(l->req->core, text_in(sorted[i], "storage"), sorted[i]);
		TRY(jval_dump(sorted[i], &b));
	}
	buf_putc(&b, ']');
	if (i < n && i > 0) {
		CLEANUP(buf_free) struct buf token = BUF_INIT(8192);
		buf_printf(&token, "%s:%s", text_in(sorted[i - 1], "storage"), text_in(sorted[i - 1], "name"));
		TRY(buf_status(&token));
		buf_puts(&b, ",\"next_page_token\":");
		buf_json_str(&b, (struct str){ (char *)token.p, token.len });
	}
	if (json_array_size(l->problems) > 0) {
		buf_puts(&b, ",\"problems\":");
		TRY(jval_dump(l->problems, &b));
	}
	buf_putc(&b, '}');
	return req_json(l->req, 200, &b);
}

static void listing_release(struct listing *l)
{
	if (--l->waiting > 0)
		return;
	if (l->failed)
		err_restore(&l->why);
	req_done(l->req, l->failed ? l->failed : answer_list(l));
	json_decref(l->found);
	json_decref(l->problems);
	mem_free(l);
}

static void list_failed(struct listing *l, enum err e)
{
	l->failed = e;
	l->why = *err_last();
}

static void on_listed(void *user, enum err e, const json_t *ok, int *fd)
{
	struct asked *a = user;
	struct listing *l = a->list;
	json_t *items = json_object_get(ok, "checkpoints"), *item, *problem;
	size_t i;

	(void)fd;
	if (e && l->one) {
		list_failed(l, e);
	} else if (e) {
		problem = errdoc_of(e);
		if (json_object_set_new(problem, "storage", json_string(a->storage)) != 0 || json_array_append(l->problems, problem) != 0)
			list_failed(l, ERR(NO_MEMORY, "cannot list"));
		json_decref(problem);
	}
	json_array_foreach(items, i, item) {
		if (json_object_set_new(item, "storage", json_string(a->storage)) != 0 || json_array_append(l->found, item) != 0)
			list_failed(l, ERR(NO_MEMORY, "cannot list"));
	}
	mem_free(a);
	listing_release(l);
}

static FALLIBLE enum err ask_list(struct listing *l, const char *storage, struct str prefix)
{
	CLEANUP(jval_drop) json_t *q = json_pack("{s:s,s:s}", "op", "list", "storage", storage);
	struct asked *a;

	if (!q)
		return ERR(NO_MEMORY, "cannot ask");
	TRY(h_set_text(q, "prefix", prefix));
	a = mem_zalloc(1, sizeof *a);
	if (!a)
		return ERR(NO_MEMORY, "cannot ask");
	a->list = l;
	snprintf(a->storage, sizeof a->storage, "%s", storage);
	l->waiting++;
	lookup_ask(l->req->core, storage, move(q), NULL, 0, on_listed, a);
	return OK;
}

static FALLIBLE enum err ask_lists(struct listing *l, struct str prefix)
{
	struct req *r = l->req;
	struct storage *st;

	if (l->one) {
		TRY(storage_find(r->core, r->parts[2], &st));
		return ask_list(l, st->name, prefix);
	}
	for (uint32_t i = 0; i < storage_count(r->core); i++)
		TRY(ask_list(l, storage_at(r->core, i)->name, prefix));
	return OK;
}

FALLIBLE enum err h_checkpoints_list(struct req *r)
{
	struct str prefix = { 0 };
	struct listing *l;
	struct h_page page;
	bool there;

	TRY(req_query_only(r, (const char *const[]){ "page_size", "page_token", "prefix", NULL }));
	TRY(h_page_query(r, &page));
	TRY(req_query(r, "prefix", &prefix, &there));
	l = mem_zalloc(1, sizeof *l);
	if (!l)
		return ERR(NO_MEMORY, "cannot list");
	*l = (struct listing){ .req = r, .page = page, .waiting = 1, .one = r->part_count == 3,
			       .found = json_array(), .problems = json_array() };
	req_hold(r);
	enum err e = l->found && l->problems ? ask_lists(l, prefix) : ERR(NO_MEMORY, "cannot list");
	if (e) {
		l->failed = e;
		l->why = *err_last();
	}
	listing_release(l);
	return OK;
}

static void on_shown(void *user, enum err e, const json_t *ok, int *fd)
{
	struct req *r = user;

	if (!e)
		verdict_put(r->core, r->parts[2].p, (json_t *)(uintptr_t)ok);
	h_pass_on(r, e, ok, fd);
}

FALLIBLE enum err h_checkpoint_get(struct req *r)
{
	json_t *q = NULL;

	TRY(req_query_only(r, (const char *const[]){ NULL }));
	TRY(h_question(r, "show", &q));
	req_hold(r);
	lookup_ask(r->core, r->parts[2].p, q, NULL, 0, on_shown, r);
	return OK;
}

FALLIBLE enum err h_checkpoint_files(struct req *r)
{
	json_t *q = NULL;

	TRY(req_query_only(r, (const char *const[]){ NULL }));
	TRY(h_question(r, "files", &q));
	req_hold(r);
	lookup_ask(r->core, r->parts[2].p, q, NULL, 0, h_pass_on, r);
	return OK;
}

FALLIBLE enum err h_checkpoint_tensors(struct req *r)
{
	CLEANUP(jval_drop) json_t *q = NULL;
	struct str prefix = { 0 };
	struct h_page page;
	bool there;

	TRY(req_query_only(r, (const char *const[]){ "page_size", "page_token", "prefix", NULL }));
	TRY(h_page_query(r, &page));
	TRY(req_query(r, "prefix", &prefix, &there));
	TRY(h_question(r, "tensors", &q));
	TRY(h_set_text(q, "prefix", prefix));
	TRY(h_set_text(q, "page_token", page.token));
	if (json_object_set_new(q, "page_size", json_integer(page.size)) != 0)
		return ERR(NO_MEMORY, "cannot ask");
	req_hold(r);
	lookup_ask(r->core, r->parts[2].p, move(q), NULL, 0, h_pass_on, r);
	return OK;
}

/* The forms of a tensor's bytes. */
static const struct {
	const char *name, *content_type;
} tensor_forms[] = {
	{ "raw", "application/octet-stream" },
	{ "npy", "application/x-npy" },
	{ "safetensors", "application/x-safetensors" },
	{ NULL, NULL },
};

static FALLIBLE enum err find_form(struct str name, size_t *out)
{
	struct near near = near_begin(name);
	char hint[NEAR_HINT_MAX];

	for (size_t i = 0; tensor_forms[i].name; i++) {
		near_try(&near, str_of(tensor_forms[i].name));
		if (str_is(name, tensor_forms[i].name)) {
			*out = i;
			return OK;
		}
	}
	return ERR(INVALID_REQUEST, "the query's \"format\" must be raw, npy or safetensors%s", near_text(&near, hint));
}

static FALLIBLE enum err answer_slice(struct req *r, const json_t *ok, int *fd)
{
	CLEANUP(buf_free) struct buf shape = BUF_INIT(4096);
	const json_t *dims = json_object_get(ok, "shape");
	const char *dtype = text_in(ok, "dtype");
	char unverified[32];
	size_t form = 0;

	for (const char *p = dtype; *p; p++)
		if ((*p | 0x20) < 'a' && *p != '_' && (*p < '0' || *p > '9'))
			return ERR(PROTOCOL, "the look-up's answer has a bad dtype");
	TRY(jval_dump(dims ? dims : json_null(), &shape));
	buf_putc(&shape, '\0');
	TRY(buf_status(&shape));
	TRY(find_form(str_of(text_in(r->note, "format")), &form));
	TRY(h_pass_fd(r, tensor_forms[form].content_type, ok, fd));
	snprintf(unverified, sizeof unverified, "%jd", (intmax_t)json_integer_value(json_object_get(ok, "unverified_bytes")));
	TRY(req_header(r, "Dcpd-Unverified-Bytes", unverified));
	TRY(req_header(r, "X-Dcpd-Dtype", dtype));
	return req_header(r, "X-Dcpd-Shape", (const char *)shape.p);
}

static void on_slice(void *user, enum err e, const json_t *ok, int *fd)
{
	req_done(user, e ? e : answer_slice(user, ok, fd));
}

FALLIBLE enum err h_checkpoint_tensor(struct req *r)
{
	CLEANUP(jval_drop) json_t *q = NULL;
	struct str slice = { 0 }, format = STR("raw"), verify = STR("digest");
	size_t form = 0;
	bool there;

	TRY(req_query_only(r, (const char *const[]){ "slice", "format", "verify", NULL }));
	TRY(req_query(r, "slice", &slice, &there));
	TRY(req_query(r, "format", &format, &there));
	TRY(req_query(r, "verify", &verify, &there));
	TRY(find_form(format, &form));
	if (!str_is(verify, "digest") && !str_is(verify, "none"))
		return ERR(INVALID_REQUEST, "the query's \"verify\" must be digest or none");
	if (slice.n > SLICE_MAX)
		return ERR(RANGE_INVALID, "a slice has at most %d characters", SLICE_MAX);
	for (size_t i = 0; i < slice.n; i++)
		if (!strchr("0123456789:,- ", slice.p[i]))
			return ERR(RANGE_INVALID, "a slice is start:stop per dim, such as 0:128,:");
	TRY(h_question(r, "slice", &q));
	TRY(h_set_text(q, "fqn", r->parts[5]));
	TRY(h_set_text(q, "slice", slice));
	TRY(h_set_text(q, "format", str_of(tensor_forms[form].name)));
	if (json_object_set_new(q, "verify", json_boolean(str_is(verify, "digest"))) != 0)
		return ERR(NO_MEMORY, "cannot ask");
	r->note = json_incref(q);
	req_hold(r);
	lookup_ask(r->core, r->parts[2].p, move(q), NULL, 0, on_slice, r);
	return OK;
}

FALLIBLE enum err h_checkpoint_delete(struct req *r)
{
	CLEANUP(jval_drop) json_t *doc = json_object();
	CLEANUP(jval_drop) json_t *target = json_object();
	struct spec spec;

	TRY(req_query_only(r, (const char *const[]){ NULL }));
	if (!doc || !target || json_object_set_new(doc, "kind", json_string("delete")) != 0)
		return ERR(NO_MEMORY, "cannot delete");
	TRY(h_set_text(target, "storage", r->parts[2]));
	TRY(h_set_text(target, "name", r->parts[3]));
	if (json_object_set(doc, "target", target) != 0)
		return ERR(NO_MEMORY, "cannot delete");
	TRY(spec_check(doc, &spec));
	return h_submit(r, doc, JOB_DELETE);
}
