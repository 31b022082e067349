/* catalogue.c: see catalogue.h. What is known of the checkpoints is kept by a look-up worker (catalogue_ask.c); here verdicts are added. */
#include <stdio.h>

#include "base/clock.h"
#include "base/jtext.h"
#include "base/mem.h"
#include "server/catalogue_impl.h"
#include "server/lookup.h"
#include "server/parts.h"
#include "server/runs.h"
#include "server/storage.h"
#include "server/tier.h"
#include "server/verdict.h"
#include "spec/checkpoint_query.h"

enum { WAIT_MS = 30000 };

/* ---- lists ---- */

/* A list on its way. */
struct listing {
	struct server *server;
	char storage[STORAGE_NAME_MAX + 1];
	bool is_run;
	double mtbf_s;
	catalogue_fn fn;
	void *user;
};

/* Puts what the coordinator has seen of the run beside what lies there. */
static FALLIBLE enum err put_course(const struct listing *l, json_t *page)
{
	const json_t *lost = json_object_get(page, "lost_work"), *step = json_object_get(lost, "step");
	const char *since = json_string_value(json_object_get(lost, "since")), *run = json_string_value(json_object_get(page, "run"));
	struct run_newest newest = { .since = since ? since : "", .step = json_is_integer(step) ? json_integer_value(step) : -1 };
	CLEANUP(buf_free) struct buf text = BUF_INIT(1 << 16);
	CLEANUP(json_decrefp) json_t *course = NULL;

	(void)clock_of_text(newest.since, &newest.since_ms);
	buf_putc(&text, '{');
	run_put_course(l->server->runs, l->storage, str_of(run ? run : ""), &newest, l->mtbf_s ? l->mtbf_s : CATALOGUE_MTBF_S, &text);
	buf_putc(&text, '}');
	TRY(buf_status(&text));
	TRY(jtext_parse((struct str){ (const char *)text.p, text.len }, 0, &course));
	return json_object_update(page, course) == 0 ? OK : ERR(NO_MEMORY, "cannot list");
}

static void on_page(void *user, enum err e, json_t *page)
{
	struct listing *l = user;
	json_t *items = json_object_get(page, "checkpoints"), *item;
	size_t i;

	json_array_foreach(items, i, item) {
		verdict_put(l->server->journal, l->storage, item);
		tier_put(l->server->tiers, l->storage, item);
		if (!e && json_object_set_new(item, "storage", json_string(l->storage)) != 0)
			e = ERR(NO_MEMORY, "cannot list");
	}
	if (!e && l->is_run)
		e = put_course(l, page);
	l->fn(l->user, e, e ? NULL : page);
	mem_free(l);
}

static FALLIBLE enum err put_text(json_t *q, const char *key, struct str text)
{
	if (text.n && json_object_set_new(q, key, json_stringn(text.p, text.n)) != 0)
		return ERR(NO_MEMORY, "cannot ask");
	return OK;
}

/* Takes `q`. */
static void ask_page(struct server *s, const char *storage, const struct catalogue_wish *w, json_t *q, catalogue_fn fn, void *user)
{
	struct listing *l = mem_sure(sizeof *l);
	enum err e = q ? OK : ERR(NO_MEMORY, "cannot ask");

	*l = (struct listing){ .server = s, .mtbf_s = w->mtbf_s, .fn = fn, .user = user };
	l->is_run = json_is_true(json_object_get(q, "whole"));
	snprintf(l->storage, sizeof l->storage, "%s", storage);
	e = e ?: put_text(q, "run", w->run);
	e = e ?: put_text(q, "prefix", w->prefix);
	e = e ?: put_text(q, "filter", w->filter);
	e = e ?: put_text(q, "sort", w->sort);
	e = e ?: put_text(q, "after", w->after);
	if (e) {
		json_decref(q);
		q = NULL;
	}
	catalogue_ask(s, storage, q, WAIT_MS, on_page, l);
}

FALLIBLE enum err catalogue_check(const struct catalogue_wish *w)
{
	struct checkpoint_query query;
	struct checkpoint_place place;

	TRY(checkpoint_query_read(w->filter, w->sort, &query));
	return w->after.n ? checkpoint_query_read_token(&query, w->after, &place) : OK;
}

void catalogue_find(struct server *s, const char *storage, const struct catalogue_wish *w, catalogue_fn fn, void *user)
{
	ask_page(s, storage, w, json_pack("{s:s, s:I}", "op", "find", "page_size", (json_int_t)w->size), fn, user);
}

void catalogue_run(struct server *s, const char *storage, const struct catalogue_wish *w, catalogue_fn fn, void *user)
{
	ask_page(s, storage, w, json_pack("{s:s, s:I, s:b}", "op", "find", "page_size", (json_int_t)w->size, "whole", true), fn, user);
}

void catalogue_runs(struct server *s, const char *storage, struct str after, uint32_t size, catalogue_fn fn, void *user)
{
	json_t *q = json_pack("{s:s, s:I, s:s%}", "op", "runs", "page_size", (json_int_t)size, "after", after.n ? after.p : "", after.n);

	catalogue_ask(s, storage, q, WAIT_MS, fn, user);
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

/* No checkpoint is called so: "-@best" is an alias, or nothing. */
static bool is_of_one_component(const struct resolution *x)
{
	return strcmp(x->run, "-") == 0;
}

/* name NULL: as it was. */
static void resolution_end(struct resolution *x, enum err e, const char *name)
{
	if (!e && !name && x->run && is_of_one_component(x))
		e = ERR(NOT_FOUND, "there is no checkpoint '%s'", x->name);
	x->fn(x->user, e, name ? name : x->name);
	mem_free(x->name);
	mem_free(x->run);
	mem_free(x);
}

static void on_run(void *user, enum err e, json_t *run)
{
	struct resolution *x = user;

	resolution_end(x, e == ERR_NOT_FOUND ? OK : e, json_string_value(json_object_get(json_object_get(run, "aliases"), x->alias)));
}

static void on_own(void *user, enum err e, const json_t *ok, int *)
{
	struct resolution *x = user;
	const char *name = json_string_value(json_object_get(json_object_get(ok, "aliases"), x->alias));
	bool computed = strcmp(x->alias, "latest") == 0 || strcmp(x->alias, "latest-verified") == 0;

	if (e || name || !computed)
		resolution_end(x, e, name);
	else
		catalogue_run(x->server, x->storage, &(struct catalogue_wish){ .run = str_of(x->run), .size = 1 }, on_run, x);
}

static void ask_aliases(struct resolution *x)
{
	json_t *q = json_pack("{s:s, s:s, s:s}", "op", "aliases", "storage", x->storage, "run", x->run);

	lookup_ask(x->server->lookups, x->storage, q, NULL, 0, on_own, x);
}

static void on_exact(void *user, enum err e, const json_t *ok, int *)
{
	if (e || json_is_true(json_object_get(ok, "exists")))
		resolution_end(user, e, NULL);
	else
		ask_aliases(user);
}

void catalogue_resolve(struct server *s, const char *storage, const char *name, catalogue_name_fn fn, void *user)
{
	struct resolution *x = mem_sure(sizeof *x);

	*x = (struct resolution){ .server = s, .name = mem_strdup(name), .run = mem_strdup(name), .fn = fn, .user = user };
	snprintf(x->storage, sizeof x->storage, "%s", storage);
	if (!x->name || !x->run) {
		resolution_end(x, ERR(NO_MEMORY, "cannot find what an alias stands for"), "");
		return;
	}
	char *at = strrchr(x->run, '@');
	*at = '\0';
	x->alias = at + 1;
	if (is_of_one_component(x))
		ask_aliases(x);
	else
		lookup_ask(s->lookups, storage,
			   json_pack("{s:s, s:s, s:s, s:i}", "op", "exists", "storage", storage, "name", name, "uid", 0), NULL, 0,
			   on_exact, x);
}
