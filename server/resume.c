/* resume.c: see resume.h. */
#include "server/resume.h"

#include <stdio.h>

#include "base/jval.h"
#include "base/mem.h"
#include "base/vec.h"
#include "server/catalogue.h"
#include "server/journal.h"
#include "server/lookup.h"
#include "server/parts.h"
#include "server/resume_choice.h"
#include "server/runs.h"
#include "server/service_clock.h"
#include "server/storage.h"

enum { ANSWER_MAX = 1 << 20, WHY_MAX = ERR_TEXT_MAX + ERR_FQN_MAX + ERR_FILE_MAX + 32 };

struct resume {
	struct server *server;
	char storage[STORAGE_NAME_MAX + 1];
	char *run;
	int64_t attempts_max, now_ms;
	bool is_attempt;
	json_t *question;              /* of a look, without the name */
	json_t *unwanted;              /* {name: why} */
	json_t *page;                  /* the catalogue's answer; what candidates name lies here, or in `copies` */
	json_t *copies;                /* what nodes have in memory of the run; NULL: nothing */
	char silent[65];               /* a node that was asked for them, and has not answered */
	struct principal who;
	struct vec(struct resume_candidate) all;
	struct vec(char *) texts;      /* why some of them are skipped */
	size_t chosen;
	resume_fn fn;
	void *user;
};

static void resume_end(struct resume *x, enum err e, struct buf *out)
{
	struct err_info info = *err_last();

	each(text, x->texts.v, x->texts.n)
		mem_free(*text);
	vec_free(&x->texts);
	vec_free(&x->all);
	json_decref(x->question);
	json_decref(x->unwanted);
	json_decref(x->page);
	json_decref(x->copies);
	mem_free(x->run);
	err_restore(&info);
	x->fn(x->user, e, out);
	mem_free(x);
}

/* ---- what is known of each ---- */

static FALLIBLE enum err keep_text(struct resume *x, const char *text, const char **out)
{
	char **kept;

	TRY(vec_push(&x->texts, &kept));
	*kept = mem_strdup(text);
	NEED(*kept, "cannot say why a checkpoint is skipped");
	*out = *kept;
	return OK;
}

struct tried {
	const char *identity;
	struct resume_candidate *of;
};

static enum err take_attempts(void *user, const struct journal_attempts *row)
{
	const struct tried *t = user;

	if (strcmp(row->identity, t->identity) == 0) {
		t->of->attempts = row->count;
		t->of->attempted_ms = row->at_ms;
	}
	return OK;
}

static FALLIBLE enum err take_record(struct resume *x, const json_t *record)
{
	const json_t *verified = json_object_get(record, "verified");
	struct resume_candidate *c;
	char why[WHY_MAX];

	TRY(vec_push(&x->all, &c));
	c->name = jval_text(record, "name");
	if (!clock_of_text(jval_text(record, "durable_at"), &c->durable_ms))
		(void)clock_of_text(jval_text(record, "modified_at"), &c->durable_ms);
	c->unwanted = json_string_value(json_object_get(x->unwanted, c->name));
	if (strcmp(jval_text(verified, "state"), "damaged") == 0) {
		snprintf(why, sizeof why, "found damaged at %s: `dcpctl job %s` lists what", jval_text(verified, "at"),
			 jval_text(verified, "job"));
		TRY(keep_text(x, why, &c->damaged));
	}
	return journal_read_attempts(x->server->journal, str_of(x->storage), str_of(c->name), take_attempts,
				     &(struct tried){ jval_text(record, "etag"), c });
}

/* NULL: the catalogue has none. */
static const json_t *find_record(const struct resume *x, const char *name)
{
	const json_t *record;
	size_t i;

	json_array_foreach(json_object_get(x->page, "checkpoints"), i, record)
		if (strcmp(jval_text(record, "name"), name) == 0)
			return record;
	return NULL;
}

static const json_t *record_of(const struct resume *x, size_t i)
{
	return find_record(x, x->all.v[i].name);
}

/* Tells the content of a candidate apart from others of that name. */
static const char *identity_of(const struct resume *x, size_t i)
{
	return x->all.v[i].copy ? jval_text(x->all.v[i].copy, "job") : jval_text(record_of(x, i), "etag");
}

/* Adds a copy of a save that never became durable, in its place by time. Of several the first counts; parts are no checkpoints, and only
 * a save of the caller's own may stand for one (job_create.c). */
static FALLIBLE enum err take_copy(struct resume *x, const json_t *copy)
{
	struct resume_candidate c = { .name = jval_text(copy, "name"), .copy = copy, .is_looked_at = true }, *last;
	uint64_t at = 0;

	if (json_is_true(json_object_get(copy, "part")) || jval_int(copy, "uid") != (json_int_t)x->who.uid || find_record(x, c.name))
		return OK;
	each(other, x->all.v, x->all.n)
		if (strcmp(other->name, c.name) == 0)
			return OK;
	(void)clock_of_text(jval_text(copy, "created_at"), &c.durable_ms);
	c.unwanted = json_string_value(json_object_get(x->unwanted, c.name));
	TRY(journal_read_attempts(x->server->journal, str_of(x->storage), str_of(c.name), take_attempts,
				  &(struct tried){ jval_text(copy, "job"), &c }));
	while (at < x->all.n && x->all.v[at].durable_ms > c.durable_ms)
		at++;
	TRY(vec_push(&x->all, &last));
	memmove(&x->all.v[at + 1], &x->all.v[at], (x->all.n - 1 - at) * sizeof c);
	x->all.v[at] = c;
	return OK;
}

/* ---- the answer ---- */

static void put_fate(const struct resume *x, size_t i, struct buf *b)
{
	const struct resume_candidate *c = &x->all.v[i];
	char tried[160];

	snprintf(tried, sizeof tried, "tried %jd times, and no newer checkpoint has become durable since",
		 (intmax_t)resume_attempts(x->all.v, i, x->now_ms));
	switch (resume_fate_of(x->all.v, i, x->attempts_max, x->now_ms)) {
	case RESUME_UNWANTED: buf_json_str(b, str_of(c->unwanted)); break;
	case RESUME_DAMAGED: buf_json_str(b, str_of(c->damaged)); break;
	case RESUME_UNLOADABLE: buf_json_str(b, str_of(c->unloadable)); break;
	default: buf_json_str(b, str_of(tried));
	}
}

static void put_skipped(const struct resume *x, struct buf *b)
{
	buf_puts(b, ",\"skipped\":[");
	for (size_t i = 0; i < x->chosen; i++) {
		buf_json_member(b, i ? ",{\"name\":" : "{\"name\":", str_of(x->all.v[i].name));
		buf_puts(b, ",\"why\":");
		put_fate(x, i, b);
		buf_puts(b, "}");
	}
	buf_puts(b, "]");
}

/* The answer where none is left: says why. */
static void say_none(const struct resume *x, char *why, size_t size)
{
	json_int_t count = json_integer_value(json_object_get(x->page, "count"));
	size_t n = x->all.n, exhausted = 0;

	for (size_t i = 0; i < n; i++)
		exhausted += resume_fate_of(x->all.v, i, x->attempts_max, x->now_ms) == RESUME_EXHAUSTED;
	if (exhausted)
		snprintf(why, size, "none is left: %zu of %zu could be loaded and %s tried %jd times without progress; attempts_max=0 "
				    "lifts the limit", exhausted, n, exhausted == 1 ? "was" : "were", (intmax_t)x->attempts_max);
	else if ((json_int_t)n < count)
		snprintf(why, size, "none of the newest %zu checkpoints can be loaded; older ones were not looked at", n);
	else
		snprintf(why, size, "none of the run's %zu checkpoint%s can be loaded", n, n == 1 ? "" : "s");
}

/* The answer with a checkpoint: says what vouches for it. */
static void say_chosen(const struct resume *x, char *why, size_t size)
{
	const json_t *verified = json_object_get(record_of(x, x->chosen), "verified");
	const char *state = jval_text(verified, "state");
	char rank[96] = "the newest durable checkpoint";
	const json_t *copy = x->all.v[x->chosen].copy;

	if (copy)
		snprintf(rank, sizeof rank, "the newest checkpoint");
	if (x->chosen)
		snprintf(rank, sizeof rank, "the newest that can be loaded, behind %zu skipped", x->chosen);
	if (copy)
		snprintf(why, size, "%s; its save has not become durable: it lies in the memory of node \"%.64s\"", rank,
			 jval_text(copy, "node"));
	else if (strcmp(state, "verified") == 0)
		snprintf(why, size, "%s; its bytes were verified (%.20s) at %.40s", rank, jval_text(verified, "level"),
			 jval_text(verified, "at"));
	else if (strcmp(state, "unverified") == 0)
		snprintf(why, size, "%s; its structure is whole, and a verify (%.20s) at %.40s had no digests to compare with", rank,
			 jval_text(verified, "level"), jval_text(verified, "at"));
	else
		snprintf(why, size, "%s; its structure is whole, its bytes were not verified: a load compares them", rank);
}

static FALLIBLE enum err put_answer(const struct resume *x, int64_t attempts, struct buf *b)
{
	bool found = x->chosen < x->all.n;
	const json_t *copy = found ? x->all.v[x->chosen].copy : NULL, *record = found ? record_of(x, x->chosen) : NULL;
	const json_t *step = json_object_get(record, "step"), *verified = json_object_get(record, "verified");
	char why[400];

	(found ? say_chosen : say_none)(x, why, sizeof why);
	buf_printf(b, "{\"storage\":\"%s\"", x->storage);
	buf_json_member(b, ",\"run\":", str_of(x->run));
	buf_puts(b, ",\"checkpoint\":");
	if (found) {
		buf_printf(b, "{\"storage\":\"%s\"", x->storage);
		buf_json_member(b, ",\"name\":", str_of(x->all.v[x->chosen].name));
		buf_puts(b, "}");
	} else {
		buf_puts(b, "null");
	}
	buf_puts(b, ",\"step\":");
	int64_t of_name = copy ? run_step(x->all.v[x->chosen].name, -1) : -1;
	if (of_name >= 0)
		buf_printf(b, "%jd", (intmax_t)of_name);
	else
		TRY(jval_dump(json_is_integer(step) ? step : json_null(), b));
	buf_json_member(b, ",\"why\":", str_of(why));
	buf_puts(b, ",\"verified\":");
	TRY(jval_dump(verified ? verified : json_null(), b));
	if (copy) {
		buf_json_member(b, ",\"copy\":{\"node\":", str_of(jval_text(copy, "node")));
		buf_json_member(b, ",\"state_dict\":", str_of(jval_text(copy, "state_dict")));
		buf_printf(b, ",\"generation\":%jd}", (intmax_t)jval_int(copy, "generation"));
	}
	buf_printf(b, ",\"attempts\":%jd,\"attempts_max\":%jd", (intmax_t)attempts, (intmax_t)x->attempts_max);
	put_skipped(x, b);
	buf_puts(b, "}");
	return buf_status(b);
}

static void answer(struct resume *x, int64_t attempts)
{
	CLEANUP(buf_free) struct buf out = BUF_INIT(ANSWER_MAX);

	enum err e = put_answer(x, attempts, &out);
	resume_end(x, e, e ? NULL : &out);
}

/* ---- the search ---- */

static void on_counted(void *user, enum err e)
{
	struct resume *x = user;

	if (e)
		resume_end(x, e, NULL);
	else
		answer(x, resume_attempts(x->all.v, x->chosen, x->now_ms) + 1);
}

static void count_attempt(struct resume *x)
{
	struct journal_txn *t = journal_txn_new(x->server->journal);
	const struct resume_candidate *c = &x->all.v[x->chosen];

	journal_put_attempt(t, &(struct journal_attempts){ .storage = x->storage, .name = c->name, .at_ms = x->now_ms,
							   .identity = identity_of(x, x->chosen) },
			    resume_attempts(x->all.v, x->chosen, x->now_ms) > 0);
	journal_commit(x->server->journal, t, on_counted, x);
}

/* Is that error one of the moment, which says nothing of the checkpoint? */
static bool is_of_the_moment(enum err e)
{
	return e == ERR_BUSY || e == ERR_DRAINING || e == ERR_STORAGE_STALLED || e == ERR_STORAGE_GONE || e == ERR_NO_MEMORY;
}

static FALLIBLE enum err keep_refusal(struct resume *x)
{
	const struct err_info *info = err_last();
	char why[WHY_MAX];

	snprintf(why, sizeof why, "%s%s%s%s%s", info->text, info->fqn[0] ? ", at " : "", info->fqn, info->file[0] ? ", in " : "",
		 info->file);
	return keep_text(x, why, &x->all.v[x->chosen].unloadable);
}

static void choose(struct resume *x);

static void on_looked(void *user, enum err e, const json_t *, int *)
{
	struct resume *x = user;

	x->all.v[x->chosen].is_looked_at = true;
	if (e && !is_of_the_moment(e))
		e = keep_refusal(x);
	if (e)
		resume_end(x, e, NULL);
	else
		choose(x);
}

static void look(struct resume *x)
{
	json_t *q = json_copy(x->question);

	if (!q || json_object_set_new(q, "name", json_string(x->all.v[x->chosen].name)) != 0) {
		json_decref(q);
		resume_end(x, ERR(NO_MEMORY, "cannot look at a checkpoint"), NULL);
		return;
	}
	lookup_ask(x->server->lookups, x->storage, q, NULL, 0, on_looked, x);
}

static void choose(struct resume *x)
{
	x->chosen = resume_choose(x->all.v, x->all.n, x->attempts_max, x->now_ms);
	if (x->chosen == x->all.n)
		answer(x, 0);
	else if (!x->all.v[x->chosen].is_looked_at)
		look(x);
	else if (x->is_attempt)
		count_attempt(x);
	else
		answer(x, resume_attempts(x->all.v, x->chosen, x->now_ms));
}

static void on_run(void *user, enum err e, json_t *run)
{
	struct resume *x = user;
	json_t *record;
	size_t i;

	x->page = json_incref(run);
	if (e == ERR_NOT_FOUND && json_array_size(x->copies)) { /* the run has nothing else */
		err_clear();
		e = OK;
	}
	json_array_foreach(json_object_get(x->page, "checkpoints"), i, record)
		if (!e)
			e = take_record(x, record);
	json_array_foreach(x->copies, i, record)
		if (!e)
			e = take_copy(x, record);
	if (!e && !x->all.n)
		e = ERR(NOT_FOUND, "run \"%s\" has no checkpoint", x->run);
	if (e == ERR_NOT_FOUND && x->silent[0]) /* a trainer that is told "none" begins anew */
		e = ERR(CLUSTER_UNAVAILABLE, "run \"%s\" has no checkpoint, but maybe in the memory of node \"%s\", which does not answer",
			x->run, x->silent);
	if (e)
		resume_end(x, e, NULL);
	else
		choose(x);
}

static FALLIBLE enum err begin(struct resume *x, const struct resume_wish *w)
{
	const json_t *one;
	size_t i;

	x->run = mem_strndup(w->run.p, w->run.n);
	x->unwanted = json_object();
	x->question = json_pack("{s:s, s:s, s:I, s:b, s:O*}", "op", "loadable", "storage", w->storage, "world_size",
				(json_int_t)w->world_size, "any_optimizer", w->any_optimizer, "layout", w->layout);
	NEED(x->run && x->unwanted && x->question, "cannot find what to resume from");
	json_array_foreach(w->unwanted, i, one)
		if (json_object_set(x->unwanted, jval_text(one, "name"), json_object_get(one, "why")) != 0)
			return ERR(NO_MEMORY, "cannot find what to resume from");
	return OK;
}

static void ask_catalogue(struct resume *x)
{
	catalogue_run(x->server, x->storage,
		      &(struct catalogue_wish){ .run = str_of(x->run), .sort = STR("-time"), .size = RESUME_LOOKED_MAX }, on_run, x);
}

static void on_copies(void *user, const json_t *list, const char *silent)
{
	struct resume *x = user;

	snprintf(x->silent, sizeof x->silent, "%s", silent ? silent : "");
	x->copies = json_incref((json_t *)(uintptr_t)list);
	ask_catalogue(x);
}

void resume_find(struct server *s, const struct resume_wish *wish, resume_fn fn, void *user)
{
	struct resume *x = mem_sure(sizeof *x);

	*x = (struct resume){ .server = s, .attempts_max = wish->attempts_max, .now_ms = clock_wall_ms(), .is_attempt = wish->is_attempt,
			      .who = wish->who, .fn = fn, .user = user };
	snprintf(x->storage, sizeof x->storage, "%s", wish->storage);
	enum err e = begin(x, wish);
	if (e)
		resume_end(x, e, NULL);
	else if (s->cluster)
		s->hooks->find_replicas(s, &(struct ref){ .storage = str_of(x->storage), .name = str_of(x->run) }, true, &x->who,
					on_copies, x);
	else
		ask_catalogue(x);
}
