/* catalogue.c: see catalogue.h. The list's answers are made short at once: of 100,000 checkpoints 40 MB stay, not 150. */
#include "server/catalogue.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/jtext.h"
#include "base/jval.h"
#include "base/map.h"
#include "base/mem.h"
#include "base/vec.h"
#include "server/lookup.h"
#include "server/parts.h"
#include "server/runs.h"
#include "server/storage.h"
#include "server/verdict.h"

enum { ASKED_AT_ONCE = 1000, CHECKPOINTS_MAX = 1000000, ANSWER_MAX = 64 << 20 };

struct entry {
	char *name, *text;             /* its record; NULL where only runs are wanted */
	struct str run;                /* in name, or "-" */
	char modified_at[24];          /* "": not known */
	int64_t step;                  /* -1: none */
	uint64_t bytes;
	bool is_held, is_verified;
};

struct walk {
	struct server *server;
	char storage[STORAGE_NAME_MAX + 1];
	char *run;                     /* NULL: all runs */
	struct catalogue_page page;
	json_t *prefix, *after;
	json_t *aliases;               /* people's own of the run; NULL: not asked for yet */
	char *problem;                 /* why they cannot be read; NULL: they can */
	struct vec(struct entry) entries;
	catalogue_fn fn;
	void *user;
};

static void walk_end(struct walk *w, enum err e, struct buf *out)
{
	struct err_info info = *err_last();

	for (uint64_t i = 0; i < w->entries.n; i++) {
		mem_free(w->entries.v[i].name);
		mem_free(w->entries.v[i].text);
	}
	vec_free(&w->entries);
	json_decref(w->prefix);
	json_decref(w->after);
	json_decref(w->aliases);
	mem_free(w->problem);
	mem_free(w->run);
	err_restore(&info);
	w->fn(w->user, e, out);
	mem_free(w);
}

/* ---- what was listed ---- */

static FALLIBLE enum err take(struct walk *w, json_t *item)
{
	const char *name = json_string_value(json_object_get(item, "name"));
	const char *at = json_string_value(json_object_get(item, "modified_at"));
	struct entry *e;

	if (!name)
		return ERR(PROTOCOL, "a list holds what is no checkpoint");
	if (w->run && !str_is(run_of(name), w->run))
		return OK; /* of a run whose name begins with this one's */
	if (w->entries.n >= CHECKPOINTS_MAX)
		return ERR(LIMIT_EXCEEDED, "storage %s has more than %d checkpoints", w->storage, CHECKPOINTS_MAX);
	TRY(vec_push(&w->entries, &e));
	*e = (struct entry){ .name = mem_strdup(name), .step = run_step(name, -1),
			     .bytes = (uint64_t)json_integer_value(json_object_get(item, "bytes")),
			     .is_held = json_is_object(json_object_get(item, "hold")) };
	NEED(e->name, "cannot list runs");
	e->run = run_of(e->name);
	snprintf(e->modified_at, sizeof e->modified_at, "%s", at ? at : "");
	if (!w->run)
		return OK;
	verdict_put(w->server->journal, w->storage, item);
	const char *state = json_string_value(json_object_get(json_object_get(item, "verified"), "state"));
	e->is_verified = state && strcmp(state, "verified") == 0;
	if (json_object_set_new(item, "storage", json_string(w->storage)) != 0 ||
	    json_object_set_new(item, "step", e->step < 0 ? json_null() : json_integer(e->step)) != 0)
		return ERR(NO_MEMORY, "cannot list runs");
	e->text = jtext_of(item);
	NEED(e->text, "cannot list runs");
	return OK;
}

/* The newest one first: the time counts, for a run that was set back to an earlier step goes on from there. Times are seconds. */
static int newest_first(const void *a, const void *b)
{
	const struct entry *x = a, *y = b;
	int by_time = strcmp(y->modified_at, x->modified_at);

	if (by_time)
		return by_time;
	return x->step != y->step ? (x->step < y->step ? 1 : -1) : strcmp(y->name, x->name);
}

static int by_run(const void *a, const void *b)
{
	const struct entry *x = a, *y = b;
	int c = str_cmp(x->run, y->run);

	return c ? c : newest_first(a, b);
}

/* ---- answers ---- */

static void put_text(struct buf *b, const char *key, const char *text)
{
	buf_printf(b, "\"%s\":", key);
	if (text && text[0])
		buf_json_str(b, str_of(text));
	else
		buf_puts(b, "null");
}

static void put_newest(struct buf *b, const struct entry *e, const char *time_key)
{
	put_text(b, time_key, e->modified_at);
	if (e->step >= 0)
		buf_printf(b, ",\"step\":%jd", (intmax_t)e->step);
	else
		buf_puts(b, ",\"step\":null");
}

static void put_next(struct buf *b, uint64_t shown_to, uint64_t all)
{
	if (shown_to < all)
		buf_printf(b, ",\"next_page_token\":\"%ju\"", (uintmax_t)shown_to);
}

/* A run as JSON: it has the entries [i, end) of the list, newest first. */
static void put_run(const struct walk *w, uint64_t i, uint64_t end, struct buf *b)
{
	uint64_t bytes = 0, holds = 0;

	for (uint64_t k = i; k < end; k++) {
		bytes += w->entries.v[k].bytes;
		holds += w->entries.v[k].is_held;
	}
	buf_puts(b, "{");
	put_text(b, "storage", w->storage);
	buf_puts(b, ",\"run\":");
	buf_json_str(b, w->entries.v[i].run);
	buf_printf(b, ",\"checkpoints\":%ju,\"bytes\":%ju,\"holds\":%ju,", (uintmax_t)(end - i), (uintmax_t)bytes, (uintmax_t)holds);
	put_text(b, "latest", w->entries.v[i].name);
	buf_puts(b, ",");
	put_newest(b, &w->entries.v[i], "modified_at");
	buf_puts(b, "}");
}

static FALLIBLE enum err answer_runs(const struct walk *w, struct buf *b)
{
	uint64_t n = w->entries.n, at = 0, shown = 0;

	buf_puts(b, "{\"runs\":[");
	for (uint64_t i = 0, end; i < n; i = end, at++) {
		for (end = i + 1; end < n && str_eq(w->entries.v[end].run, w->entries.v[i].run); end++)
			;
		if (at < w->page.from || shown == w->page.size)
			continue;
		buf_puts(b, shown++ ? "," : "");
		put_run(w, i, end, b);
	}
	buf_puts(b, "]");
	put_next(b, w->page.from + shown, at);
	buf_puts(b, "}");
	return buf_status(b);
}

/* An alias to what is no checkpoint any more dangles. */
static FALLIBLE enum err put_aliases(const struct walk *w, const char *verified, struct buf *b)
{
	CLEANUP(map_free) struct map missing = { 0 }; /* names that aliases lead to, less the checkpoints */
	const char *alias, *comma = "";
	json_t *name;

	json_object_foreach(w->aliases, alias, name)
		TRY(map_put(&missing, str_of(json_string_value(name)), 0));
	for (uint64_t i = 0; i < w->entries.n; i++)
		if (map_get(&missing, str_of(w->entries.v[i].name)) != MAP_NONE)
			map_remove(&missing, str_of(w->entries.v[i].name));
	buf_puts(b, ",\"aliases\":{");
	put_text(b, "latest", w->entries.v[0].name);
	buf_puts(b, ",");
	put_text(b, "latest-verified", verified);
	json_object_foreach(w->aliases, alias, name) {
		buf_puts(b, ",");
		buf_json_str(b, str_of(alias));
		buf_puts(b, ":");
		buf_json_str(b, str_of(json_string_value(name)));
	}
	buf_puts(b, "},\"dangling\":[");
	json_object_foreach(w->aliases, alias, name) {
		if (map_get(&missing, str_of(json_string_value(name))) == MAP_NONE)
			continue;
		buf_puts(b, comma);
		buf_json_str(b, str_of(alias));
		comma = ",";
	}
	buf_puts(b, "],");
	put_text(b, "aliases_problem", w->problem);
	return OK;
}

static FALLIBLE enum err answer_run(const struct walk *w, struct buf *b)
{
	uint64_t n = w->entries.n, bytes = 0, from = w->page.from < n ? w->page.from : n;
	uint64_t end = n - from < w->page.size ? n : from + w->page.size;
	const char *verified = NULL, *comma = "";

	for (uint64_t i = 0; i < n; i++) {
		bytes += w->entries.v[i].bytes;
		if (!verified && w->entries.v[i].is_verified)
			verified = w->entries.v[i].name;
	}
	buf_puts(b, "{");
	put_text(b, "storage", w->storage);
	buf_puts(b, ",");
	put_text(b, "run", w->run);
	buf_printf(b, ",\"count\":%ju,\"bytes\":%ju", (uintmax_t)n, (uintmax_t)bytes);
	TRY(put_aliases(w, verified, b));
	buf_puts(b, ",\"lost_work\":{");
	put_newest(b, &w->entries.v[0], "since");
	buf_puts(b, "},\"holds\":[");
	for (uint64_t i = 0; i < n; i++) {
		if (!w->entries.v[i].is_held)
			continue;
		buf_puts(b, comma);
		buf_json_str(b, str_of(w->entries.v[i].name));
		comma = ",";
	}
	buf_puts(b, "],\"checkpoints\":[");
	for (uint64_t i = from; i < end; i++) {
		buf_puts(b, i > from ? "," : "");
		buf_puts(b, w->entries.v[i].text);
	}
	buf_puts(b, "]");
	put_next(b, end, n);
	buf_puts(b, "}");
	return buf_status(b);
}

static void on_aliases(void *user, enum err e, const json_t *ok, int *);

/* True: they are on their way. */
static bool ask_aliases(struct walk *w)
{
	json_t *q = w->run && !w->aliases && !w->problem && w->entries.n
			    ? json_pack("{s:s, s:s, s:s}", "op", "aliases", "storage", w->storage, "run", w->run) : NULL;

	if (q)
		lookup_ask(w->server->lookups, w->storage, q, NULL, 0, on_aliases, w);
	return q;
}

static void walk_answer(struct walk *w)
{
	if (ask_aliases(w))
		return;
	CLEANUP(buf_free) struct buf out = BUF_INIT(ANSWER_MAX);

	if (w->run && w->entries.n == 0) {
		walk_end(w, ERR(NOT_FOUND, "there is no checkpoint of a run %s:%s", w->storage, w->run), NULL);
		return;
	}
	if (w->entries.n)
		qsort(w->entries.v, w->entries.n, sizeof *w->entries.v, w->run ? newest_first : by_run);
	enum err e = (w->run ? answer_run : answer_runs)(w, &out);
	walk_end(w, e, e ? NULL : &out);
}

static void on_aliases(void *user, enum err e, const json_t *ok, int *)
{
	struct walk *w = user;

	w->aliases = e ? NULL : json_incref(json_object_get(ok, "aliases"));
	if (e && e != ERR_STATE_CONFLICT)
		walk_end(w, e, NULL);
	else if ((e && !(w->problem = mem_strdup(err_last()->text))) || (!e && !w->aliases))
		walk_end(w, ERR(NO_MEMORY, "cannot list aliases"), NULL);
	else
		walk_answer(w);
}

/* ---- page by page ---- */

static void walk_ask(struct walk *w);

static void on_listed(void *user, enum err e, const json_t *ok, int *)
{
	struct walk *w = user;
	json_t *next = json_object_get(ok, "next"), *item;
	size_t i;

	json_array_foreach(json_object_get(ok, "checkpoints"), i, item)
		if (!e)
			e = take(w, item);
	if (e) {
		walk_end(w, e, NULL);
	} else if (json_is_string(next)) {
		json_decref(w->after);
		w->after = json_incref(next);
		walk_ask(w);
	} else {
		walk_answer(w);
	}
}

static void walk_ask(struct walk *w)
{
	struct storage *st;
	json_t *q = NULL;
	enum err e = storage_find(w->server->storages, str_of(w->storage), &st);

	if (!e)
		q = json_pack("{s:s, s:s, s:O, s:O, s:i, s:I}", "op", "list", "storage", w->storage, "prefix", w->prefix, "after", w->after,
			      "page_size", ASKED_AT_ONCE, "commits", (json_int_t)st->commits);
	if (!e && !q)
		e = ERR(NO_MEMORY, "cannot ask");
	if (e)
		walk_end(w, e, NULL);
	else
		lookup_ask(w->server->lookups, w->storage, q, NULL, 0, on_listed, w);
}

static void begin(struct server *s, const char *storage, struct str run, struct catalogue_page page, catalogue_fn fn, void *user)
{
	struct walk *w = mem_sure(sizeof *w);
	bool in_folder = run.p && !str_is(run, "-");

	*w = (struct walk){ .server = s, .page = page, .fn = fn, .user = user, .after = json_string(""),
			    .prefix = json_pack("s%+", run.p ? run.p : "", in_folder ? run.n : 0, in_folder ? "/" : "") };
	snprintf(w->storage, sizeof w->storage, "%s", storage);
	w->run = run.p ? mem_strndup(run.p, run.n) : NULL;
	if (!w->after || !w->prefix || (run.p && !w->run))
		walk_end(w, ERR(NO_MEMORY, "cannot list runs"), NULL);
	else
		walk_ask(w);
}

void catalogue_runs(struct server *s, const char *storage, struct catalogue_page page, catalogue_fn fn, void *user)
{
	begin(s, storage, (struct str){ 0 }, page, fn, user);
}

void catalogue_run(struct server *s, const char *storage, struct str run, struct catalogue_page page, catalogue_fn fn, void *user)
{
	begin(s, storage, run, page, fn, user);
}

/* ---- aliases ---- */

/* A name on its way to what it stands for. */
struct resolution {
	struct server *server;
	char storage[STORAGE_NAME_MAX + 1];
	char *name, *run;              /* run ends where '@' was; the alias stands behind it */
	const char *alias;
	catalogue_name_fn fn;
	void *user;
};

bool catalogue_is_alias(const char *name)
{
	const char *at = strrchr(name, '@');

	return at && at > name && at[1] && !strchr(at, '/');
}

/* name NULL: as it was. */
static void resolution_end(struct resolution *x, enum err e, const char *name)
{
	x->fn(x->user, e, name ? name : x->name);
	mem_free(x->name);
	mem_free(x->run);
	mem_free(x);
}

static void on_run(void *user, enum err e, struct buf *out)
{
	struct resolution *x = user;
	CLEANUP(jval_drop) json_t *doc = NULL;

	if (!e)
		e = jval_parse((struct str){ (char *)out->p, out->len }, &doc);
	resolution_end(x, e == ERR_NOT_FOUND ? OK : e, json_string_value(json_object_get(json_object_get(doc, "aliases"), x->alias)));
}

static void on_own(void *user, enum err e, const json_t *ok, int *)
{
	struct resolution *x = user;
	const char *name = json_string_value(json_object_get(json_object_get(ok, "aliases"), x->alias));
	bool computed = strcmp(x->alias, "latest") == 0 || strcmp(x->alias, "latest-verified") == 0;

	if (e || name || !computed)
		resolution_end(x, e, name);
	else
		catalogue_run(x->server, x->storage, str_of(x->run), (struct catalogue_page){ .size = 1 }, on_run, x);
}

static void on_exact(void *user, enum err e, const json_t *ok, int *)
{
	struct resolution *x = user;
	json_t *q = NULL;

	if (!e && !json_is_true(json_object_get(ok, "exists")))
		q = json_pack("{s:s, s:s, s:s}", "op", "aliases", "storage", x->storage, "run", x->run);
	if (q)
		lookup_ask(x->server->lookups, x->storage, q, NULL, 0, on_own, x);
	else
		resolution_end(x, e, NULL);
}

void catalogue_resolve(struct server *s, const char *storage, const char *name, catalogue_name_fn fn, void *user)
{
	struct resolution *x = mem_sure(sizeof *x);

	*x = (struct resolution){ .server = s, .name = mem_strdup(name), .run = mem_strdup(name), .fn = fn, .user = user };
	snprintf(x->storage, sizeof x->storage, "%s", storage);
	json_t *q = json_pack("{s:s, s:s, s:s, s:i}", "op", "exists", "storage", storage, "name", name, "uid", 0);
	if (!x->name || !x->run || !q) {
		json_decref(q);
		resolution_end(x, ERR(NO_MEMORY, "cannot find what an alias stands for"), "");
		return;
	}
	char *at = strrchr(x->run, '@');
	*at = '\0';
	x->alias = at + 1;
	lookup_ask(s->lookups, storage, q, NULL, 0, on_exact, x);
}
