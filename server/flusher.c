/* flusher.c: see flusher.h. Each storage with another one behind it has a flusher: it lists both, then copies what waits. */
#include "server/flusher.h"

#include <stdio.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/jval.h"
#include "base/log.h"
#include "base/mem.h"
#include "server/catalogue.h"
#include "server/events.h"
#include "server/job_impl.h"
#include "server/parts.h"
#include "server/runs.h"
#include "server/tier.h"

enum { TICK_MS = 500, SCAN_MS = 60000, SCAN_AGAIN_MS = 5000, REST_MS = 1000, REST_MAX_MS = 60000,
       SCAN_RESTS = 20 };               /* a storage is not listed for so many times as long as that takes */

struct flusher {
	struct server *server;
	struct tier *tier;
	bool scanning, asking;         /* asking: a job is being made */
	bool ready;                    /* both storages were listed once */
	uint64_t scans;
	int64_t scan_ms, begun_ms;     /* monotone clock: the next scan; when the last one began */
	int64_t rest_ms, next_ms;      /* monotone clock: of the storage behind: how long, until when */
	char copying[JOB_ID_LEN + 1];  /* the job; "": none */
	char *name;                    /* … and of which checkpoint */
};

struct flushers {
	struct flusher v[CONFIG_LIST_MAX];
	uint32_t count;
	struct loop_timer *timer;
};

static void copy_text(char *to, size_t max, const char *text)
{
	snprintf(to, max, "%s", text);
}

/* ---- what waits ---- */

/* Older ones of the same run are given up, if the tier has but a few to wait. */
static void bound(struct flusher *f, const struct tier_entry *fresh)
{
	struct tier *t = f->tier;
	struct str run = run_of(fresh->name);

	while (t->how->newest && t->how->behind) {
		struct tier_entry *oldest = NULL;
		uint64_t count = 0;
		for (struct tier_entry *e = t->waiting; e; e = e->next) {
			if (e->state != TIER_WAITING || !str_eq(run_of(e->name), run))
				continue;
			count++;
			oldest = !oldest || e->since_ms < oldest->since_ms ? e : oldest;
		}
		if (count <= t->how->behind)
			return;
		log_info("superseded before it was copied", "storage", t->how->storage, "name", oldest->name, NULL);
		tier_move(t, oldest, TIER_SKIPPED);
	}
}

static void enqueue(struct flusher *f, struct tier_entry *e)
{
	e->tries = 0;
	e->next_ms = 0;
	tier_move(f->tier, e, TIER_WAITING);
	bound(f, e);
}

/* The next one whose rest is over; NULL: there is none. */
static struct tier_entry *choose(const struct flusher *f, int64_t now)
{
	struct tier_entry *best = NULL;

	for (struct tier_entry *e = f->tier->waiting; e; e = e->next) {
		bool newer = best && e->since_ms > best->since_ms;
		if (e->next_ms <= now && (!best || newer == f->tier->how->newest))
			best = e;
	}
	return best;
}

/* ---- lists ---- */

static void on_fast(void *user, const struct catalogue_item *item)
{
	struct flusher *f = user;
	const char *etag = jval_text(item->record, "etag");
	const json_t *made_by = json_object_get(item->record, "made_by");
	struct tier_entry *e = tier_entry(f->tier, item->name);

	if (!e)
		return; /* the next scan has memory, perhaps */
	e->scan = f->scans;
	if (e->state == TIER_WAITING || e->state == TIER_COPYING)
		f->tier->waiting_bytes += item->bytes - e->bytes;
	e->bytes = item->bytes;
	e->since_ms = item->at_ms ? item->at_ms : e->since_ms;
	if (e->etag[0] && strcmp(e->etag, etag) != 0 && e->state != TIER_COPYING)
		tier_move(f->tier, e, TIER_UNKNOWN); /* another content by now */
	copy_text(e->etag, sizeof e->etag, etag);
	copy_text(e->job, sizeof e->job, jval_text(made_by, "job"));
	const json_t *uid = json_object_get(made_by, "uid");
	e->uid = json_is_integer(uid) ? (uint32_t)json_integer_value(uid) : UINT32_MAX;
	if (e->state == TIER_REPLICATED)
		tier_move(f->tier, e, TIER_UNKNOWN); /* is it still there? */
}

/* A replica is of the content that lies in the fast storage if its page or its manifest says so; one file has neither. */
static bool is_replica(const struct tier *t, const struct tier_entry *e, const struct catalogue_item *item)
{
	const json_t *record = item->record;
	const json_t *from = json_object_get(record, "copied_from"), *made_by = json_object_get(record, "made_by");
	bool page = strcmp(jval_text(from, "storage"), t->how->storage) == 0 && strcmp(jval_text(from, "name"), e->name) == 0;
	bool same_bytes = item->bytes == e->bytes;

	if (page && strcmp(jval_text(from, "etag"), e->etag) == 0)
		return true;
	if (e->job[0] && made_by)
		return same_bytes && strcmp(jval_text(made_by, "job"), e->job) == 0;
	return !from && !made_by && !e->job[0] && same_bytes && item->at_ms >= e->since_ms;
}

static void on_behind(void *user, const struct catalogue_item *item)
{
	struct flusher *f = user;
	struct tier_entry *e = tier_find(f->tier, str_of(item->name));

	if (e && e->scan == f->scans && is_replica(f->tier, e, item) && e->state != TIER_COPYING)
		tier_move(f->tier, e, TIER_REPLICATED);
}

static void scanned(struct flusher *f, enum err e)
{
	struct tier_entry *entry;

	f->scanning = false;
	int64_t now = clock_mono_ms(), rest = SCAN_RESTS * (now - f->begun_ms);
	f->scan_ms = now + (e ? SCAN_AGAIN_MS : SCAN_MS > rest ? SCAN_MS : rest);
	if (e) {
		log_warn("a storage with a tier, or the one behind it, cannot be listed", "storage", f->tier->how->storage, NULL);
		return;
	}
	f->ready = true;
	map_each(&f->tier->entries, entry) {
		if (entry->scan < f->scans && entry->state != TIER_COPYING && entry->state != TIER_WAITING)
			tier_forget(f->tier, entry); /* gone from the fast storage; its replica stays, and nobody waits for it */
		else if (entry->state == TIER_UNKNOWN)
			enqueue(f, entry);
	}
}

static void on_behind_listed(void *user, enum err e)
{
	scanned(user, e);
}

static void on_fast_listed(void *user, enum err e)
{
	struct flusher *f = user;

	if (e)
		scanned(f, e);
	else
		catalogue_each(f->server, f->tier->how->target, "*", on_behind, on_behind_listed, f);
}

static void scan(struct flusher *f)
{
	f->scanning = true;
	f->begun_ms = clock_mono_ms();
	f->scans++;
	catalogue_each(f->server, f->tier->how->storage, "*", on_fast, on_fast_listed, f);
}

/* ---- copies ---- */

static void rest(struct flusher *f, struct tier_entry *e)
{
	int64_t now = clock_mono_ms();
	unsigned shift = e && e->tries < 6 ? e->tries : 6;

	f->rest_ms = f->rest_ms ? f->rest_ms * 2 : REST_MS;
	f->rest_ms = f->rest_ms > REST_MAX_MS ? REST_MAX_MS : f->rest_ms;
	f->next_ms = now + f->rest_ms;
	if (e) {
		e->tries++;
		e->next_ms = now + ((int64_t)REST_MS << shift);
	}
}

static void tell_state(struct flusher *f, const char *state)
{
	const struct tier *t = f->tier;

	events_emit(f->server->events, "tier.state", NULL,
		    json_pack("{s:s, s:s, s:s, s:s*, s:s*}", "storage", t->how->storage, "to", t->how->target, "state", state, "code",
			      t->failing ? t->problem : NULL, "detail", t->failing ? t->detail : NULL));
}

static void fail(struct flusher *f, struct tier_entry *e, const char *code, const char *detail)
{
	struct tier *t = f->tier;
	bool before = t->failing;

	t->failures++;
	t->failing = true;
	copy_text(t->problem, sizeof t->problem, code);
	copy_text(t->detail, sizeof t->detail, detail);
	rest(f, e);
	if (e) {
		tier_move(t, e, TIER_WAITING);
		bound(f, e); /* newer ones may have come meanwhile */
	}
	log_warn("a checkpoint could not be copied behind", "storage", t->how->storage, "to", t->how->target, "name", e ? e->name : "",
		 "code", code, NULL);
	if (!before)
		tell_state(f, "failing");
}

static void note_milestone(struct flusher *f, const struct tier_entry *e)
{
	struct job *j;

	if (!e->job[0] || job_find(f->server, str_of(e->job), &j) || j->step != STEP_NONE) {
		err_clear();
		return;
	}
	j->replicated_ms = j->replicated_ms ? j->replicated_ms : e->at_ms; /* neighbours may have had it before */
	job_changed(j);
	job_write(j, NULL, NULL);
	job_emit_state(j);
}

static void succeed(struct flusher *f, struct tier_entry *e, const struct job *copy)
{
	struct tier *t = f->tier;
	bool before = t->failing;

	t->failing = false;
	f->rest_ms = f->next_ms = 0;
	e->at_ms = copy->finished_ms;
	copy_text(e->etag, sizeof e->etag, copy->identity);
	tier_move(t, e, TIER_REPLICATED);
	note_milestone(f, e);
	events_emit(f->server->events, "checkpoint.replicated", copy->id,
		    json_pack("{s:s, s:s, s:s, s:s}", "storage", t->how->storage, "name", e->name, "to", t->how->target, "job", copy->id));
	if (before)
		tell_state(f, "ok");
}

/* The end of a copy to the storage behind, whoever asked for it. */
static void on_copied(struct flusher *f, const struct job *j)
{
	struct tier_entry *e = tier_find(f->tier, j->spec.source.name);
	const char *code = jval_text(j->error, "code");

	if (strcmp(f->copying, j->id) == 0)
		f->copying[0] = '\0';
	if (!e)
		return;
	copy_text(e->copy, sizeof e->copy, j->state == JOB_FAILED ? j->id : "");
	if (j->state == JOB_SUCCEEDED)
		succeed(f, e, j);
	else if (strcmp(code, "not_found") == 0) /* removed before it was copied */
		tier_forget(f->tier, e);
	else if (strcmp(code, "checkpoint_replaced") == 0)
		enqueue(f, e);
	else
		fail(f, e, code[0] ? code : "cancelled", jval_text(j->error, "detail"));
}

static void on_created(void *user, enum err err, const char *id, bool)
{
	struct flusher *f = user;
	struct tier_entry *e = tier_find(f->tier, str_of(f->name));

	f->asking = false;
	if (!err)
		copy_text(f->copying, sizeof f->copying, id);
	else if (err == ERR_NOT_FOUND && e)
		tier_forget(f->tier, e);
	else
		fail(f, e, err_code_name(err), err_last()->text);
	mem_free(f->name);
	f->name = NULL;
}

static void on_retried(void *user, enum err err)
{
	struct flusher *f = user;
	struct tier_entry *e = tier_find(f->tier, str_of(f->name));

	f->asking = false;
	if (e && err) {
		tier_move(f->tier, e, TIER_WAITING);
		bound(f, e);
	} else if (e)
		copy_text(f->copying, sizeof f->copying, e->copy);
	if (e)
		e->copy[0] = '\0'; /* refused: the next turn makes another job */
	mem_free(f->name);
	f->name = NULL;
}

/* The job that failed is tried again, so that a storage that is gone for days does not fill the list of jobs. */
static void submit(struct flusher *f, struct tier_entry *e)
{
	const struct config_tier *how = f->tier->how;
	uid_t own = geteuid(), uid = e->uid == UINT32_MAX ? own : e->uid;
	CLEANUP(json_decrefp) json_t *spec =
		json_pack("{s:s, s:{s:s, s:s}, s:{s:s, s:s}, s:{s:b, s:s, s:i}, s:{s:s}}", "kind", kind_of(JOB_REPLICATE)->name, "source",
			  "storage", how->storage, "name", e->name, "target", "storage", how->target, "name", e->name, "options",
			  "overwrite", 1, "pace", how->background ? "background" : "full", "retries", 0, "labels", "tier", how->storage);
	struct job_request rq = { .kind = JOB_REPLICATE, .spec = spec, .who = principal_of(uid) };

	f->name = mem_strdup(e->name);
	if (!spec || !f->name) {
		mem_free(f->name);
		f->name = NULL;
		return;
	}
	f->asking = true;
	tier_move(f->tier, e, TIER_COPYING); /* from now on: what is asked for is not superseded */
	if (e->copy[0]) {
		const struct principal daemon = { .uid = own, .admin = true };
		job_retry(f->server, &daemon, str_of(e->copy), on_retried, f);
		return;
	}
	job_create(f->server, &rq, on_created, f);
}

static void go_on(struct flusher *f)
{
	int64_t now = clock_mono_ms();

	if (f->server->draining || f->scanning || f->asking || f->copying[0])
		return;
	if (now >= f->scan_ms) {
		scan(f);
		return;
	}
	struct tier_entry *e = now >= f->next_ms ? choose(f, now) : NULL;
	if (e)
		submit(f, e);
}

static void on_tick(void *user)
{
	struct flushers *all = user;

	for (uint32_t i = 0; i < all->count; i++)
		go_on(&all->v[i]);
}

static void on_saved(struct flusher *f, const struct job *j)
{
	struct tier_entry *e = tier_entry(f->tier, j->spec.target.name.p);
	json_int_t bytes = json_integer_value(json_object_get(j->result, "bytes"));

	if (!e)
		return;
	if (e->state != TIER_COPYING)
		tier_move(f->tier, e, TIER_UNKNOWN);
	e->etag[0] = '\0';
	e->since_ms = j->durable_ms;
	copy_text(e->job, sizeof e->job, j->id);
	e->uid = j->uid;
	if (e->state != TIER_COPYING) {
		e->bytes = bytes > 0 ? (uint64_t)bytes : 0;
		enqueue(f, e);
	}
}

void flushers_note(struct flushers *all, struct job *j)
{
	const struct ref *source = &j->spec.source, *target = &j->spec.target;

	for (uint32_t i = 0; all && i < all->count && target->kind == REF_CHECKPOINT; i++) {
		struct flusher *f = &all->v[i];
		const struct config_tier *how = f->tier->how;
		if (j->kind == JOB_REPLICATE && str_is(source->storage, how->storage) && str_is(target->storage, how->target) &&
		    str_eq(source->name, target->name))
			on_copied(f, j);
		if (str_is(target->storage, how->storage) && j->state == JOB_SUCCEEDED && j->durable_ms && job_spec_writes_checkpoint(j))
			on_saved(f, j);
		go_on(f);
	}
}

FALLIBLE enum err flushers_new(struct server *s, struct flushers **out)
{
	struct flushers *all = *out = mem_zalloc(1, sizeof *all);

	NEED(all, "cannot keep flushers");
	all->count = s->tiers->count;
	for (uint32_t i = 0; i < all->count; i++)
		all->v[i] = (struct flusher){ .server = s, .tier = &s->tiers->v[i] };
	return all->count ? loop_every(s->loop, TICK_MS, on_tick, all, &all->timer) : OK;
}

void flushers_free(struct flushers *all)
{
	if (!all)
		return;
	loop_timer_stop(&all->timer);
	for (uint32_t i = 0; i < all->count; i++)
		mem_free(all->v[i].name);
	mem_free(all);
}
