/* events.c: see events.h. A ring: a slow reader loses the oldest events and is told so; nobody makes the daemon keep more. */
#include "server/events.h"

#include <stdio.h>

#include "base/jtext.h"
#include "base/list.h"
#include "base/mem.h"
#include "server/service_clock.h"

const char *const event_told_names[TOLD_COUNT + 1] = {
	[TOLD_DURABLE] = "checkpoint.durable", [TOLD_VERIFIED] = "checkpoint.verified", [TOLD_DAMAGED] = "checkpoint.damaged",
	[TOLD_REMOVED] = "checkpoint.removed", [TOLD_REPLICATED] = "checkpoint.replicated", [TOLD_JOB_FAILED] = "job.failed",
	[TOLD_CHAIN_DONE] = "chain.done", [TOLD_CHAIN_FAILED] = "chain.failed", [TOLD_TEST] = "webhook.test",
};

struct kept {
	struct event_record record;
	char *text;
};

struct events_listener {
	struct events_listener *next;
	loop_fn fn;
	void *user;
	bool gone;
};

struct events {
	struct loop *loop;
	struct kept ring[EVENTS_KEPT];
	uint64_t first_id, last_id;       /* last_id < first_id: none yet */
	uint64_t dropped;
	struct events_listener *listeners;
	bool posted, calling;
};

FALLIBLE enum err events_new(struct loop *loop, uint64_t boot, struct events **out)
{
	struct events *ev = mem_zalloc(1, sizeof *ev);

	NEED(ev, "cannot keep events");
	ev->loop = loop;
	ev->first_id = (boot << 32) + 1;
	ev->last_id = boot << 32;
	*out = ev;
	return OK;
}

void events_free(struct events *ev)
{
	if (!ev)
		return;
	for (int i = 0; i < EVENTS_KEPT; i++)
		mem_free(ev->ring[i].text);
	list_each(l, ev->listeners)
		mem_free(l);
	mem_free(ev);
}

static void sweep_listeners(struct events *ev)
{
	list_each(l, ev->listeners)
		if (l->gone) {
			list_remove(&ev->listeners, l);
			mem_free(l);
		}
}

static void tell(void *user)
{
	struct events *ev = user;

	ev->posted = false;
	ev->calling = true;
	for (struct events_listener *l = ev->listeners; l; l = l->next)
		if (!l->gone)
			l->fn(l->user);
	ev->calling = false;
	sweep_listeners(ev);
}

void events_emit(struct events *ev, const char *type, const char *job, json_t *data)
{
	int64_t now = clock_wall_ms();
	char stamp[CLOCK_TEXT_MAX];

	(void)json_object_set_new(data, "at", json_string(clock_text(now, stamp))); /* data NULL: refused, and dropped below */
	char *text = jtext_of(data);
	json_decref(data);
	if (!text || strlen(text) > EVENTS_DATA_MAX) {
		mem_free(text);
		ev->dropped++;
		return;
	}
	struct kept *k = &ev->ring[++ev->last_id % EVENTS_KEPT];
	mem_free(k->text);
	*k = (struct kept){ .text = text };
	k->record = (struct event_record){ .id = ev->last_id, .wall_ms = now, .type = type, .data = str_of(text) };
	snprintf(k->record.job, sizeof k->record.job, "%s", job ? job : "");
	if (ev->last_id - ev->first_id >= EVENTS_KEPT)
		ev->first_id = ev->last_id - EVENTS_KEPT + 1;
	if (!ev->posted && ev->listeners) {
		ev->posted = true;
		loop_post(ev->loop, tell, ev);
	}
}

uint64_t events_last_id(const struct events *ev)
{
	return ev->last_id;
}

bool events_next(const struct events *ev, uint64_t after, const char *job, struct event_record *out, bool *lost_out)
{
	bool lost = after != 0 && after + 1 < ev->first_id;
	uint64_t id = after + 1 < ev->first_id ? ev->first_id : after + 1;

	for (; id <= ev->last_id; id++) {
		const struct kept *k = &ev->ring[id % EVENTS_KEPT];
		if (job && strcmp(job, k->record.job) != 0)
			continue;
		*out = k->record;
		*lost_out = lost;
		return true;
	}
	return false;
}

FALLIBLE enum err events_listen(struct events *ev, loop_fn fn, void *user, struct events_listener **out)
{
	struct events_listener *l = mem_zalloc(1, sizeof *l);

	NEED(l, "cannot listen to events");
	*l = (struct events_listener){ ev->listeners, fn, user, false };
	ev->listeners = l;
	*out = l;
	return OK;
}

void events_unlisten(struct events *ev, struct events_listener **l)
{
	if (!*l)
		return;
	(*l)->gone = true;
	*l = NULL;
	if (!ev->calling)
		sweep_listeners(ev);
}
