/* h_checkpoints.c: /v1/checkpoints. A look-up worker reads the disk; its answers pass through. */
#include <stdio.h>
#include <unistd.h>
#include <xxhash.h>

#include "api/accept.h"
#include "api/h_common.h"
#include "api/handlers.h"
#include "base/jval.h"
#include "base/log.h"
#include "server/parts.h"
#include "server/service_clock.h"
#include "spec/spec.h"
#include "base/mem.h"
#include "base/near.h"
#include "base/num.h"
#include "server/catalogue.h"
#include "server/errdoc.h"
#include "server/lineage.h"
#include "server/lookup.h"
#include "server/storage.h"
#include "server/tier.h"
#include "server/verdict.h"

enum { SLICE_ETAG_MAX = 24, SLICE_MAX = 1024, LIST_MS = 5000 };
enum { HOLD_REASON_MAX = 1000 }; /* a longer one is not kept (worker/store/notes.h) */

/* A list under way. Storages are asked one after the other, in the order of their names, until the page is full or the time is up. */
struct listing {
	struct req *req;
	struct buf out;               /* the answer so far */
	json_t *prefix, *after, *problems;
	char storage[STORAGE_NAME_MAX + 1];  /* being asked, for what comes after `after` */
	uint32_t left, shown;
	int64_t end_ms;
	bool one;                     /* a single storage: its error is the answer's */
	bool finds;                   /* with a wish, else all in the order of their names */
	struct catalogue_wish wish;
};

static void listing_end(struct listing *l, enum err e)
{
	struct req *r = l->req;

	e = e ?: req_json(r, 200, &l->out);
	buf_free(&l->out);
	json_decref(l->prefix);
	json_decref(l->after);
	json_decref(l->problems);
	mem_free(l);
	req_done(r, e);
}

/* more: the page token is where the next page goes on. */
static void listing_answer(struct listing *l, bool more)
{
	CLEANUP(buf_free) struct buf token = BUF_INIT(8192);
	enum err e = OK;

	buf_putc(&l->out, ']');
	if (more) {
		buf_printf(&token, "%s:%s", l->storage, json_string_value(l->after));
		e = buf_status(&token);
		buf_json_member(&l->out, ",\"next_page_token\":", (struct str){ (char *)token.p, token.len });
	}
	if (!e && json_array_size(l->problems) > 0) {
		buf_puts(&l->out, ",\"problems\":");
		e = jval_dump(l->problems, &l->out);
	}
	buf_putc(&l->out, '}');
	listing_end(l, e);
}

static void on_listed(void *user, enum err e, const json_t *ok, int *fd);

static void on_found(void *user, enum err e, json_t *page)
{
	on_listed(user, e, page, NULL);
}

static void listing_ask(struct listing *l)
{
	if (l->finds) {
		l->wish.after = str_of(json_string_value(l->after));
		l->wish.size = l->left;
		catalogue_find(l->req->core, l->storage, &l->wish, on_found, l);
		return;
	}
	struct storage *st;
	json_t *q = NULL;
	enum err e = storage_find(l->req->core->storages, str_of(l->storage), &st);

	if (!e)
		q = json_pack("{s:s, s:s, s:O, s:O, s:I, s:I}", "op", "list", "storage", l->storage, "prefix", l->prefix, "after",
			      l->after, "page_size", (json_int_t)l->left, "commits", (json_int_t)st->commits);
	if (!e && !q)
		e = ERR(NO_MEMORY, "cannot ask");
	if (e)
		listing_end(l, e);
	else
		lookup_ask(l->req->core->lookups, l->storage, q, NULL, 0, on_listed, l);
}

/* The first storage whose name is not before this, or not this one either. NULL: none. */
static const struct storage *storage_from(const struct server *s, const char *name, bool beyond)
{
	for (uint32_t i = 0; i < storage_count(s->storages); i++)
		if (strcmp(storage_at(s->storages, i)->name, name) >= beyond)
			return storage_at(s->storages, i);
	return NULL;
}

static void listing_next_storage(struct listing *l)
{
	const struct storage *st = l->one ? NULL : storage_from(l->req->core, l->storage, true);

	if (!st) {
		listing_answer(l, false);
		return;
	}
	snprintf(l->storage, sizeof l->storage, "%s", st->name);
	if (json_string_set(l->after, "") != 0)
		listing_end(l, ERR(NO_MEMORY, "cannot list"));
	else if (clock_mono_ms() >= l->end_ms)
		listing_answer(l, true);
	else
		listing_ask(l);
}

static FALLIBLE enum err put_item(struct listing *l, json_t *item)
{
	if (!json_is_object(item))
		return ERR(PROTOCOL, "a list holds what is no checkpoint");
	if (json_object_set_new(item, "storage", json_string(l->storage)) != 0)
		return ERR(NO_MEMORY, "cannot list");
	if (!l->finds) {
		verdict_put(l->req->core->journal, l->storage, item);
		tier_put(l->req->core->tiers, l->storage, item);
	}
	buf_puts(&l->out, l->shown++ ? "," : "");
	l->left -= l->left > 0;
	return jval_dump(item, &l->out);
}

static FALLIBLE enum err put_problem(struct listing *l, enum err of)
{
	json_t *problem = errdoc_of(of);

	bool is_kept = json_object_set_new(problem, "storage", json_string(l->storage)) == 0 &&
		       json_array_append(l->problems, problem) == 0;
	json_decref(problem);
	return is_kept ? OK : ERR(NO_MEMORY, "cannot list");
}

static void on_listed(void *user, enum err e, const json_t *ok, int *)
{
	struct listing *l = user;
	json_t *items = json_object_get(ok, "checkpoints"), *next = json_object_get(ok, "next"), *item;
	size_t i;

	if (e && !l->one) {
		e = put_problem(l, e);
		if (e)
			listing_end(l, e);
		else
			listing_next_storage(l);
		return;
	}
	json_array_foreach(items, i, item)
		e = e ?: put_item(l, item);
	if (e) {
		listing_end(l, e);
	} else if (!json_is_string(next)) {
		listing_next_storage(l);
	} else {
		json_decref(l->after);
		l->after = json_incref(next);
		if (l->left == 0 || clock_mono_ms() >= l->end_ms)
			listing_answer(l, true);
		else
			listing_ask(l);
	}
}

/* Takes the token "storage:name" apart. only: the storage's name; empty: all. *left_out: there is a storage to ask. */
static FALLIBLE enum err listing_begin(struct listing *l, struct str only, struct str token, bool *left_out)
{
	const struct req *r = l->req;
	const char *colon = token.n ? memchr(token.p, ':', token.n) : NULL;
	struct str from = { token.p, colon ? (size_t)(colon - token.p) : token.n };
	char name[STORAGE_NAME_MAX + 1];

	snprintf(name, sizeof name, "%.*s", (int)num_min(from.n, STORAGE_NAME_MAX), from.p ? from.p : "");
	if (l->one) {
		snprintf(l->storage, sizeof l->storage, "%.*s", (int)only.n, only.p);
	} else {
		const struct storage *st = storage_from(r->core, name, false);
		if (st)
			snprintf(l->storage, sizeof l->storage, "%s", st->name);
	}
	*left_out = l->storage[0] && strcmp(l->storage, name) >= 0;
	if (colon && strcmp(l->storage, name) == 0 && json_string_setn(l->after, colon + 1, token.n - from.n - 1) != 0)
		return ERR(NO_MEMORY, "cannot list");
	l->wish.after = str_of(json_string_value(l->after));
	return l->finds ? catalogue_check(&l->wish) : OK;
}

/* Reads the query. *finds: it wants more than the names' order. *only: the storage; empty: all. */
static FALLIBLE enum err read_wish(struct req *r, struct catalogue_wish *w, struct str *only, bool *finds)
{
	bool by_run = false, filtered = false, sorted = false, there;

	TRY(req_query(r, "storage", only, &there));
	if (r->part_count == 3)
		*only = r->parts[2];
	TRY(req_query(r, "prefix", &w->prefix, &there));
	TRY(req_query(r, "run", &w->run, &by_run));
	TRY(req_query(r, "filter", &w->filter, &filtered));
	TRY(req_query(r, "sort", &w->sort, &sorted));
	if (only->n)
		TRY(ref_check_storage(*only));
	if (by_run && !str_is(w->run, "-"))
		TRY(ref_check_name(w->run));
	if (!str_utf8(w->prefix))
		return ERR(VALIDATION_FAILED, "prefix is not UTF-8");
	if (w->sort.n && !str_is(w->sort, "name") && only->n == 0)
		return ERR(INVALID_REQUEST, "the query's \"sort\" needs \"storage\": only names have an order over several storages");
	*finds = by_run || w->filter.n || w->sort.n;
	return catalogue_check(w);
}

FALLIBLE enum err h_checkpoints_list(struct req *r)
{
	struct catalogue_wish wish = { .size = 1 };
	struct str only = STR("");
	struct storage *st;
	struct listing *l;
	struct h_page page;
	bool finds = false, left = false;

	TRY(h_page_query(r, &page));
	TRY(read_wish(r, &wish, &only, &finds));
	if (!str_utf8(page.token))
		return ERR(VALIDATION_FAILED, "page_token is not UTF-8");
	if (only.n)
		TRY(storage_find(r->core->storages, only, &st));
	l = mem_zalloc(1, sizeof *l);
	NEED(l, "cannot list");
	*l = (struct listing){ .req = r, .out = BUF_INIT(64 << 20), .one = only.n > 0, .left = page.size, .finds = finds,
			       .wish = wish, .end_ms = clock_mono_ms() + LIST_MS,
			       .prefix = json_stringn(wish.prefix.p ? wish.prefix.p : "", wish.prefix.n),
			       .after = json_string(""), .problems = json_array() };
	req_hold(r);
	buf_puts(&l->out, "{\"checkpoints\":[");
	enum err e = l->prefix && l->after && l->problems ? OK : ERR(NO_MEMORY, "cannot list");
	e = e ?: listing_begin(l, only, page.token, &left);
	if (e)
		listing_end(l, e);
	else if (left)
		listing_ask(l);
	else
		listing_answer(l, false);
	return OK;
}

static void on_shown(void *user, enum err e, const json_t *ok, int *fd)
{
	struct req *r = user;

	if (!e) {
		verdict_put(r->core->journal, r->parts[2].p, (json_t *)(uintptr_t)ok);
		tier_put(r->core->tiers, r->parts[2].p, (json_t *)(uintptr_t)ok);
	}
	h_pass_on(r, e, ok, fd);
}

FALLIBLE enum err h_checkpoint_get(struct req *r)
{
	json_t *q = NULL;

	TRY(h_question(r, "show", &q));
	h_ask(r, q, on_shown);
	return OK;
}

FALLIBLE enum err h_checkpoint_files(struct req *r)
{
	json_t *q = NULL;

	TRY(h_question(r, "files", &q));
	h_ask(r, q, h_pass_on);
	return OK;
}

static void on_file(void *user, enum err e, const json_t *ok, int *fd)
{
	struct req *r = user;
	char unverified[32];

	snprintf(unverified, sizeof unverified, "%jd", (intmax_t)json_integer_value(json_object_get(ok, "unverified_bytes")));
	e = e ?: h_pass_fd(r, "application/octet-stream", ok, fd, NULL);
	req_done(r, e ?: req_header(r, "Dcpd-Unverified-Bytes", unverified));
}

static FALLIBLE enum err set_count(struct req *r, json_t *q, const char *key)
{
	struct str text;
	uint64_t n;
	bool there;

	TRY(req_query(r, key, &text, &there));
	if (!there)
		return OK;
	if (!str_to_u64(text, &n) || n > INT64_MAX)
		return ERR(RANGE_INVALID, "the query's \"%s\" must be a count of bytes", key);
	return json_object_set_new(q, key, json_integer((json_int_t)n)) == 0 ? OK : ERR(NO_MEMORY, "cannot ask");
}

FALLIBLE enum err h_checkpoint_file(struct req *r)
{
	CLEANUP(jval_drop) json_t *q = NULL;

	TRY(h_question(r, "file", &q));
	TRY(h_set_text(q, "file", r->parts[5]));
	TRY(set_count(r, q, "offset"));
	TRY(set_count(r, q, "bytes"));
	h_ask(r, move(q), on_file);
	return OK;
}

FALLIBLE enum err h_checkpoint_tensors(struct req *r)
{
	CLEANUP(jval_drop) json_t *q = NULL;
	struct str prefix = { 0 };
	struct h_page page;
	bool there;

	TRY(h_page_query(r, &page));
	TRY(req_query(r, "prefix", &prefix, &there));
	TRY(h_question(r, "tensors", &q));
	TRY(h_set_text(q, "prefix", prefix));
	TRY(h_set_text(q, "page_token", page.token));
	if (json_object_set_new(q, "page_size", json_integer(page.size)) != 0)
		return ERR(NO_MEMORY, "cannot ask");
	h_ask_either(r, move(q), NULL, 0, h_pass_either);
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

/* The form by ?format=, else the one that Accept wants most. */
static FALLIBLE enum err choose_form(struct req *r, size_t *out)
{
	const char *accept = req_head(r, MHD_HTTP_HEADER_ACCEPT);
	struct str format = { 0 };
	int best = 0;
	bool there;

	TRY(req_query(r, "format", &format, &there));
	if (there)
		return find_form(format, out);
	for (size_t i = 0; tensor_forms[i].name; i++) {
		int quality = accept_quality(accept, tensor_forms[i].content_type);
		if (quality > best) {
			best = quality;
			*out = i;
		}
	}
	return best ? OK :
		      ERR(NOT_ACCEPTABLE, "a tensor comes as application/octet-stream, application/x-npy or application/x-safetensors");
}

/* Changes with the checkpoint's files, the box and the form. */
static FALLIBLE enum err slice_etag(const struct req *r, const json_t *ok, char out[SLICE_ETAG_MAX])
{
	CLEANUP(buf_free) struct buf all = BUF_INIT(64 << 10);
	const char *identity = jval_text(ok, "etag");

	out[0] = '\0';
	if (!identity[0])
		return OK;
	buf_puts(&all, identity);
	TRY(jval_dump(r->note, &all));
	snprintf(out, SLICE_ETAG_MAX, "\"%016jx\"", (uintmax_t)XXH3_64bits(all.p, all.len));
	return OK;
}

static FALLIBLE enum err answer_slice(struct req *r, const json_t *ok, int *fd)
{
	CLEANUP(buf_free) struct buf shape = BUF_INIT(4096);
	const json_t *dims = json_object_get(ok, "shape");
	const char *dtype = jval_text(ok, "dtype");
	char unverified[32], etag[SLICE_ETAG_MAX];
	size_t form = 0;

	for (const char *p = dtype; *p; p++)
		if ((*p | 0x20) < 'a' && *p != '_' && (*p < '0' || *p > '9'))
			return ERR(PROTOCOL, "the look-up's answer has a bad dtype");
	TRY(jval_dump(dims ? dims : json_null(), &shape));
	buf_putc(&shape, '\0');
	TRY(buf_status(&shape));
	TRY(find_form(str_of(jval_text(r->note, "format")), &form));
	TRY(slice_etag(r, ok, etag));
	TRY(h_pass_fd(r, tensor_forms[form].content_type, ok, fd, etag[0] ? etag : NULL));
	snprintf(unverified, sizeof unverified, "%jd", (intmax_t)json_integer_value(json_object_get(ok, "unverified_bytes")));
	TRY(req_header(r, "Dcpd-Unverified-Bytes", unverified));
	TRY(req_header(r, "X-Dcpd-Dtype", dtype));
	TRY(h_tell_served(r));
	return req_header(r, "X-Dcpd-Shape", (const char *)shape.p);
}

/* A look-up tells the two apart, so that a checkpoint that lacks the tensor is not asked for behind; to the client both are 404. */
static FALLIBLE enum err no_tensor(void)
{
	struct err_info info = *err_last();

	return ERR(NOT_FOUND, "%s", info.text);
}

static void on_slice(void *user, enum err e, const json_t *ok, int *fd)
{
	e = e == ERR_MISSING_KEY ? no_tensor() : e;
	req_done(user, e ? e : answer_slice(user, ok, fd));
}

FALLIBLE enum err h_checkpoint_tensor(struct req *r)
{
	CLEANUP(jval_drop) json_t *q = NULL;
	struct str slice = { 0 }, verify = STR("digest");
	size_t form = 0;
	bool there;

	TRY(req_query(r, "slice", &slice, &there));
	TRY(req_query(r, "verify", &verify, &there));
	TRY(choose_form(r, &form));
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
	h_ask_either(r, move(q), NULL, 0, on_slice);
	return OK;
}

FALLIBLE enum err h_checkpoint_delete(struct req *r)
{
	CLEANUP(jval_drop) json_t *doc = json_object();
	CLEANUP(jval_drop) json_t *target = json_object();
	CLEANUP(spec_free) struct spec spec = { 0 };
	struct str trash = { 0 };
	bool there;

	if (!doc || !target || json_object_set_new(doc, "kind", json_string("delete")) != 0)
		return ERR(NO_MEMORY, "cannot delete");
	TRY(h_set_text(target, "storage", r->parts[2]));
	TRY(h_set_text(target, "name", r->parts[3]));
	TRY(req_query(r, "trash", &trash, &there));
	if (json_object_set(doc, "target", target) != 0 ||
	    (there && json_object_set_new(doc, "options", json_pack("{s:s%}", "trash", trash.p, trash.n)) != 0))
		return ERR(NO_MEMORY, "cannot delete");
	TRY(spec_read(doc, &spec));
	return h_submit(r, doc, JOB_DELETE);
}

/* ---- lineage ---- */

static void on_lineage_name(void *user, enum err e, const char *name)
{
	struct req *r = user;

	if (e)
		req_done(r, e);
	else
		lineage_find(r->core, r->parts[2].p, name, h_pass_text, r);
}

FALLIBLE enum err h_checkpoint_lineage(struct req *r)
{
	struct storage *st;

	TRY(h_storage(r, ref_check_meant, &st));
	req_hold(r);
	if (catalogue_is_alias(r->parts[3].p))
		catalogue_resolve(r->core, st->name, r->parts[3].p, on_lineage_name, r);
	else
		lineage_find(r->core, st->name, r->parts[3].p, h_pass_text, r);
	return OK;
}

/* ---- holds ---- */

static void on_held(void *user, enum err e, const json_t *ok, int *)
{
	struct req *r = user;

	if (!e) {
		log_info(json_is_object(json_object_get(ok, "hold")) ? "checkpoint held" : "hold lifted", "storage", r->parts[2].p, "name",
			 jval_text(ok, "name"), NULL);
		if (json_object_set_new((json_t *)(uintptr_t)ok, "storage", json_string(r->parts[2].p)) != 0)
			e = ERR(NO_MEMORY, "cannot answer");
	}
	h_pass_on(r, e, ok, NULL);
}

/* The hold that the body asks for, in the caller's name; the token's holder is dcpd's own user. */
static FALLIBLE enum err read_hold(const struct req *r, const struct principal *who, json_t **out)
{
	struct jval root = JVAL_ROOT(r->body), at = jval_get(&root, "reason");
	char since[CLOCK_TEXT_MAX];
	struct str reason = STR("");

	if (r->body)
		TRY(jval_only(&root, (const char *const[]){ "reason", NULL }));
	if (at.j)
		TRY(jval_string(&at, &reason));
	if (reason.n > HOLD_REASON_MAX)
		return jval_fail(&at, ERR_VALIDATION_FAILED, "has more than %d bytes", HOLD_REASON_MAX);
	*out = json_pack("{s:I, s:s%, s:s}", "owner", (json_int_t)who->uid, "reason", reason.p, reason.n, "since",
			 clock_text(clock_wall_ms(), since));
	NEED(*out, "cannot hold");
	return OK;
}

/* Takes `hold`; NULL: no hold. */
static FALLIBLE enum err ask_hold(struct req *r, const struct principal *who, json_t *hold)
{
	CLEANUP(jval_drop) json_t *q = NULL;

	enum err e = h_question(r, "hold", &q);
	if (e)
		json_decref(hold);
	TRY(e);
	if (json_object_set_new(q, "hold", hold ? hold : json_null()) != 0 ||
	    json_object_set_new(q, "uid", json_integer(who->uid)) != 0 || json_object_set_new(q, "admin", json_boolean(who->admin)) != 0)
		return ERR(NO_MEMORY, "cannot hold");
	h_ask(r, move(q), on_held);
	return OK;
}

FALLIBLE enum err h_checkpoint_hold(struct req *r)
{
	struct principal who = req_principal(r);
	json_t *hold = NULL;

	who.uid = who.admin && who.uid ? geteuid() : who.uid;
	TRY(read_hold(r, &who, &hold));
	return ask_hold(r, &who, hold);
}

FALLIBLE enum err h_checkpoint_unhold(struct req *r)
{
	const struct principal who = req_principal(r);

	return ask_hold(r, &who, NULL);
}
