/* catalogue_ask.c: questions to the look-up worker that knows a storage's checkpoints (worker/query/lookup_find.c).
 *
 * The worker lives as long as it is asked now and then; a new one knows what was kept (worker/query/lookup_kept.h), if anything. So a
 * question may have to be asked again: until the worker has looked at all checkpoints, some each time, and until it knows all verdicts,
 * which are in the journal: each question brings those that are newer than what the worker is thought to know, and a worker that knows less
 * says so. */
#include <stdio.h>

#include "base/clock.h"
#include "base/mem.h"
#include "server/catalogue_impl.h"
#include "server/journal.h"
#include "server/lookup.h"
#include "server/parts.h"
#include "server/storage.h"

enum { VERDICTS_AT_ONCE = 500 };

struct asking {
	struct server *server;
	char storage[STORAGE_NAME_MAX + 1];
	json_t *question;
	int64_t end_ms;                /* monotone; 0: it may take as long as it takes */
	uint64_t told;                 /* the verdict up to which the worker knows all, once it has answered */
	catalogue_fn fn;
	void *user;
};

static void ask(struct asking *a);

static void asking_end(struct asking *a, enum err e, json_t *answer)
{
	struct err_info info = *err_last();

	json_decref(a->question);
	err_restore(&info);
	a->fn(a->user, e, answer);
	mem_free(a);
}

static void end_later(void *user, enum err e)
{
	asking_end(user, e, NULL);
}

/* ---- verdicts ---- */

struct news {
	json_t *rows;
	uint64_t last;
};

static enum err take_news(void *user, const char *name, const char *identity, const char *state, uint64_t number)
{
	struct news *news = user;

	news->last = number;
	return json_array_append_new(news->rows, json_pack("[s, s, s]", name, identity, state)) == 0 ? OK
													: ERR(NO_MEMORY, "cannot ask");
}

/* With more verdicts than go into one question the worker is to take those and wait for the next question. */
static FALLIBLE enum err put_verdicts(struct asking *a, const struct storage *st)
{
	struct news news = { .rows = json_array() };
	uint64_t newest = 0, from = st->verdicts_told;
	CLEANUP(json_decrefp) json_t *rows = news.rows;

	NEED(rows, "cannot ask");
	TRY(journal_read_verdict_news(a->server->journal, str_of(a->storage), from, VERDICTS_AT_ONCE, &newest, take_news, &news));
	bool all = json_array_size(rows) < VERDICTS_AT_ONCE;
	a->told = all && newest > news.last ? newest : news.last;
	a->told = a->told > from ? a->told : from;
	if (json_object_set_new(a->question, "only_verdicts", json_boolean(!all)) != 0 ||
	    json_object_set_new(a->question, "verdicts", json_pack("{s:I, s:I, s:O}", "from", (json_int_t)from, "to", (json_int_t)a->told,
								   "rows", rows)) != 0)
		return ERR(NO_MEMORY, "cannot ask");
	return OK;
}

/* ---- again and again ---- */

static enum err too_long(const struct asking *a, const json_t *ok)
{
	return ERR(BUSY, "all checkpoints of storage %s have to be looked at: %jd are by now, ask again", a->storage,
		   (intmax_t)json_integer_value(json_object_get(ok, "found")));
}

static void on_answer(void *user, enum err e, const json_t *ok, int *)
{
	struct asking *a = user;
	const json_t *behind = json_object_get(ok, "behind");
	struct storage *st;

	if (e || (e = storage_find(a->server->storages, str_of(a->storage), &st))) {
		asking_end(a, e, NULL);
		return;
	}
	st->verdicts_told = behind ? (uint64_t)json_integer_value(behind) : a->told > st->verdicts_told ? a->told : st->verdicts_told;
	if (!behind && !json_is_true(json_object_get(ok, "more")))
		asking_end(a, OK, (json_t *)(uintptr_t)ok);
	else if (a->end_ms && clock_mono_ms() >= a->end_ms)
		asking_end(a, too_long(a, ok), NULL);
	else
		ask(a);
}

static void ask(struct asking *a)
{
	struct storage *st;
	enum err e = storage_find(a->server->storages, str_of(a->storage), &st);

	e = e ?: put_verdicts(a, st);
	if (!e && json_object_set_new(a->question, "commits", json_integer((json_int_t)st->commits)) != 0)
		e = ERR(NO_MEMORY, "cannot ask");
	json_t *q = e ? NULL : json_copy(a->question);
	if (!e && !q)
		e = ERR(NO_MEMORY, "cannot ask");
	if (e)
		loop_later(a->server->loop, end_later, a, e);
	else
		lookup_ask(a->server->lookups, a->storage, q, NULL, 0, on_answer, a);
}

void catalogue_ask(struct server *s, const char *storage, json_t *question, int64_t wait_ms, catalogue_fn fn, void *user)
{
	struct asking *a = mem_sure(sizeof *a);

	*a = (struct asking){ .server = s, .question = question, .fn = fn, .user = user };
	a->end_ms = wait_ms ? clock_mono_ms() + wait_ms : 0;
	snprintf(a->storage, sizeof a->storage, "%s", storage);
	if (!question || json_object_set_new(question, "storage", json_string(storage)) != 0)
		loop_later(s->loop, end_later, a, ERR(NO_MEMORY, "cannot ask"));
	else
		ask(a);
}
