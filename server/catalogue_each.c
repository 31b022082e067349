/* catalogue_each.c: all checkpoints of some runs, one after the other (see catalogue.h): some with a question, so that the loop
 * turns in between. */
#include <stdio.h>

#include "base/clock.h"
#include "base/jval.h"
#include "base/mem.h"
#include "server/catalogue_impl.h"
#include "server/parts.h"
#include "server/runs.h"
#include "server/storage.h"
#include "server/tier.h"
#include "server/verdict.h"

enum { ASKED_AT_ONCE = 2000 };

struct walk {
	struct server *server;
	char storage[STORAGE_NAME_MAX + 1];
	char *pattern;
	catalogue_item_fn fn;
	done_fn done;
	void *user;
	json_t *page;                  /* to be told while the worker makes the next one */
};

static void walk_end(void *user, enum err e)
{
	struct walk *w = user;

	w->done(w->user, e);
	mem_free(w->pattern);
	mem_free(w);
}

static int64_t time_of(const json_t *record)
{
	int64_t ms = 0;

	return clock_of_text(jval_text(record, "durable_at"), &ms) || clock_of_text(jval_text(record, "modified_at"), &ms) ? ms : 0;
}

static void tell(const struct walk *w, json_t *record)
{
	const char *name = jval_text(record, "name");
	const json_t *step = json_object_get(record, "step");
	struct catalogue_item item = { .name = name, .run = run_of(name), .at_ms = time_of(record), .record = record,
				       .step = json_is_integer(step) ? json_integer_value(step) : -1,
				       .bytes = (uint64_t)json_integer_value(json_object_get(record, "bytes")),
				       .is_held = json_is_object(json_object_get(record, "hold")),
				       .metrics = json_object_get(record, "metrics"), .aliases = json_object_get(record, "aliases") };

	if (json_is_true(json_object_get(record, "verdict")))
		verdict_put(w->server->journal, w->storage, record);
	tier_put(w->server->tiers, w->storage, record);
	item.verified = jval_text(json_object_get(record, "verified"), "state");
	w->fn(w->user, &item);
}

static void walk_ask(struct walk *w, const json_t *after);

static void tell_page(void *user, enum err)
{
	struct walk *w = user;
	json_t *page = move(w->page), *item;
	size_t i;

	json_array_foreach(json_object_get(page, "checkpoints"), i, item)
		tell(w, item);
	json_decref(page);
}

/* The end is posted, too: whatever was posted of the walk has run by then. */
static void on_page(void *user, enum err e, json_t *page)
{
	struct walk *w = user;
	const json_t *next = json_object_get(page, "next");
	struct err_info info = *err_last();

	tell_page(w, OK); /* the one before, if the answer was faster than the loop */
	w->page = json_incref(page);
	if (json_is_string(next)) {
		walk_ask(w, next);
		loop_later(w->server->loop, tell_page, w, OK);
		return;
	}
	tell_page(w, OK);
	err_restore(&info);
	loop_later(w->server->loop, walk_end, w, e);
}

static void walk_ask(struct walk *w, const json_t *after)
{
	json_t *q = w->pattern ? json_pack("{s:s, s:s, s:s, s:i, s:b}", "op", "find", "runs", w->pattern, "after",
					   after ? json_string_value(after) : "", "page_size", ASKED_AT_ONCE, "brief", true) : NULL;

	catalogue_ask(w->server, w->storage, q, 0, on_page, w);
}

void catalogue_each(struct server *s, const char *storage, const char *run_pattern, catalogue_item_fn fn, done_fn done, void *user)
{
	struct walk *w = mem_sure(sizeof *w);

	*w = (struct walk){ .server = s, .pattern = mem_strdup(run_pattern), .fn = fn, .done = done, .user = user };
	snprintf(w->storage, sizeof w->storage, "%s", storage);
	walk_ask(w, NULL);
}
