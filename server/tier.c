/* tier.c: see tier.h. What is known of the checkpoints of storages with another one behind them; flusher.c acts on it. */
#include "server/tier.h"

#include <stdio.h>

#include "base/buf.h"
#include "base/clock.h"
#include "base/mem.h"
#include "server/metrics.h"
#include "server/service_clock.h"

FALLIBLE enum err tiers_new(const struct config *config, struct tiers **out)
{
	struct tiers *all = *out = mem_zalloc(1, sizeof *all);

	NEED(all, "cannot keep tiers");
	all->count = config->tier_count;
	for (uint32_t i = 0; i < all->count; i++)
		all->v[i].how = &config->tiers[i];
	return OK;
}

static void entry_free(struct tier_entry *e)
{
	mem_free(e->name);
	mem_free(e);
}

void tiers_free(struct tiers *all)
{
	struct tier_entry *e;

	if (!all)
		return;
	for (uint32_t i = 0; i < all->count; i++) {
		map_each(&all->v[i].entries, e)
			entry_free(e);
		map_free(&all->v[i].entries);
	}
	mem_free(all);
}

struct tier *tier_of(struct tiers *all, struct str storage)
{
	for (uint32_t i = 0; i < all->count; i++)
		if (str_is(storage, all->v[i].how->storage))
			return &all->v[i];
	return NULL;
}

struct tier_entry *tier_find(const struct tier *t, struct str name)
{
	return map_object(&t->entries, name);
}

struct tier_entry *tier_entry(struct tier *t, const char *name)
{
	struct tier_entry *e = tier_find(t, str_of(name));

	if (e)
		return e;
	e = mem_zalloc(1, sizeof *e);
	if (!e)
		return NULL;
	e->name = mem_strdup(name);
	e->uid = UINT32_MAX;
	if (!e->name || map_add(&t->entries, str_of(e->name), e)) {
		entry_free(e);
		return NULL;
	}
	return e;
}

static bool waits(enum tier_state state)
{
	return state == TIER_WAITING || state == TIER_COPYING;
}

void tier_move(struct tier *t, struct tier_entry *e, enum tier_state state)
{
	if (waits(state) && !waits(e->state)) {
		e->prev = NULL;
		e->next = t->waiting;
		if (t->waiting)
			t->waiting->prev = e;
		t->waiting = e;
		t->waiting_count++;
		t->waiting_bytes += e->bytes;
	} else if (!waits(state) && waits(e->state)) {
		*(e->prev ? &e->prev->next : &t->waiting) = e->next;
		if (e->next)
			e->next->prev = e->prev;
		t->waiting_count--;
		t->waiting_bytes -= e->bytes;
	}
	t->skipped_total += state == TIER_SKIPPED && e->state != TIER_SKIPPED;
	e->state = state;
}

void tier_forget(struct tier *t, struct tier_entry *e)
{
	tier_move(t, e, TIER_UNKNOWN);
	map_remove(&t->entries, str_of(e->name));
	entry_free(e);
}

bool tier_has(struct tiers *all, struct str storage, struct str name)
{
	const struct tier *t = tier_of(all, storage);
	const struct tier_entry *e = t ? tier_find(t, name) : NULL;

	return e && e->state == TIER_REPLICATED;
}

bool tier_wants(struct tiers *all, struct str storage, struct str name, struct str etag)
{
	const struct tier *t = tier_of(all, storage);
	const struct tier_entry *e = t ? tier_find(t, name) : NULL;
	bool is_there = e && e->state == TIER_REPLICATED && (!e->etag[0] || str_is(etag, e->etag));

	return t && !is_there && !(e && e->state == TIER_SKIPPED);
}

void tier_put(struct tiers *all, const char *storage, json_t *record)
{
	const struct tier *t = tier_of(all, str_of(storage));
	const char *name = json_string_value(json_object_get(record, "name")), *etag = json_string_value(json_object_get(record, "etag"));
	const struct tier_entry *e = t && name ? tier_find(t, str_of(name)) : NULL;
	bool same = e && e->state == TIER_REPLICATED && etag && (!e->etag[0] || strcmp(e->etag, etag) == 0);
	char at[CLOCK_TEXT_MAX];

	if (!t)
		return;
	json_t *doc = same ? json_pack("{s:s, s:s*}", "storage", t->how->target, "at", e->at_ms ? clock_text(e->at_ms, at) : NULL) : NULL;
	(void)json_object_set_new(record, "replicated", doc ? doc : json_null());
}

/* Since when the oldest of those that wait is durable, in seconds. */
static double lag_seconds(const struct tier *t)
{
	int64_t now = clock_wall_ms(), oldest = now;

	for (const struct tier_entry *e = t->waiting; e; e = e->next)
		oldest = e->since_ms && e->since_ms < oldest ? e->since_ms : oldest;
	return (double)(now - oldest) / 1000;
}

static const char *state_text(const struct tier *t)
{
	if (t->failing || !t->waiting_count)
		return t->failing ? "failing" : "ok";
	return t->how->behind && t->waiting_count > t->how->behind ? "behind" : "copying";
}

void tier_put_state(struct tiers *all, struct str storage, struct buf *out)
{
	const struct tier *t = tier_of(all, storage);

	if (!t)
		return;
	buf_printf(out, ",\"tier\":{\"storage\":\"%s\",\"state\":\"%s\",\"waiting\":%ju,\"bytes\":%ju,\"seconds\":%.3f,\"skipped\":%ju",
		   t->how->target, state_text(t), (uintmax_t)t->waiting_count, (uintmax_t)t->waiting_bytes, lag_seconds(t),
		   (uintmax_t)t->skipped_total);
	if (t->failing) {
		buf_printf(out, ",\"error\":{\"code\":\"%s\",\"detail\":", t->problem);
		buf_json_str(out, str_of(t->detail));
		buf_puts(out, "}");
	}
	buf_puts(out, "}");
}

void tier_fill(const struct tiers *all, struct metrics *m)
{
	char labels[160];

	for (uint32_t i = 0; i < all->count; i++) {
		const struct tier *t = &all->v[i];
		snprintf(labels, sizeof labels, "storage=\"%s\",to=\"%s\"", t->how->storage, t->how->target);
		metrics_set(m, "dcpd_tier_waiting", labels, (double)t->waiting_count);
		metrics_set(m, "dcpd_tier_waiting_bytes", labels, (double)t->waiting_bytes);
		metrics_set(m, "dcpd_tier_lag_seconds", labels, lag_seconds(t));
		metrics_set(m, "dcpd_tier_failing", labels, t->failing);
		metrics_set(m, "dcpd_tier_failures_total", labels, (double)t->failures);
		metrics_set(m, "dcpd_tier_skipped_total", labels, (double)t->skipped_total);
	}
}
