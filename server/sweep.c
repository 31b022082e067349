/* sweep.c: see sweep.h.
 *
 * Sweeps of one job wait in a list, because a worker may yet be at it: an overwrite's old checkpoint is removed gently behind the job's
 * back (worker/store/trash.h), for as long as the job's answer said. The list is not in the journal: a start walks everything.
 *
 * A job that writes one rank's part of a save (worker/runner/hosts.h) leaves the place where that lies to the save that moves it into a
 * checkpoint. If that save never comes, the place has no other owner than the slot it was written from: it is removed when the rank fills
 * that anew or is gone, and no job of the same target is at work here. Taken or not, nobody tells: a place that was taken is no more.
 *
 * Several daemons may share a storage. Another daemon's staging is abandoned once it has not changed for OTHERS_MS: between two sweeps so
 * long apart by our service time. Comparing times of files with a clock would take live saves for old after a jump of either. */
#include "server/sweep.h"

#include <stdio.h>

#include "base/log.h"
#include "base/mem.h"
#include "server/service_clock.h"
#include "server/job_impl.h"
#include "server/lookup.h"
#include "server/loop.h"
#include "server/storage.h"

enum {
	TICK_MS = 1000, FIRST_MS = 2000, PART_MS = 3000, AGAIN_MS = 2000, AGAIN_MAX_MS = 600000, LATER_MAX_MS = 3600000,
	PENDING_MAX = 1000, OTHERS_MS = 3600000,
};

struct pending {
	struct pending *next;
	char storage[STORAGE_NAME_MAX + 1], job[JOB_ID_LEN + 1];
	int attempt;                    /* that ended; a retry's is none of this sweep's business */
	char *name;                     /* of the target */
	char *part, *holder;            /* id of the place of a part, NULL: none; the state dict it was written from, NULL: given up */
	int64_t holder_generation;
	int64_t due_ms, again_ms;       /* monotone clock; the pause after a failure */
	bool asked;
	int64_t moved_from;             /* another node has it: this one's turn (worker/store/fence.h); -1: none has */
	bool expected;                  /* the job succeeded: its trash or receipt goes unheard */
};

struct sweeps {
	struct sweep_parts parts;
	struct pending *first, **last;
	uint32_t count;
	struct loop_timer *tick;
};

/* ---- a whole storage ---- */

struct sweep {
	struct sweeps *all;
	char storage[STORAGE_NAME_MAX + 1];
};

static void log_removed(const json_t *ok)
{
	json_int_t n = json_integer_value(json_object_get(ok, "removed"));
	char removed[24];

	snprintf(removed, sizeof removed, "%jd", (intmax_t)n);
	if (n > 0)
		log_warn("left-over staging removed", "count", removed, NULL);
}

bool sweep_is_due(const struct storage *st)
{
	return st->others && clock_service_ms() - st->others_ms >= OTHERS_MS;
}

static void on_swept(void *user, enum err e, const json_t *ok, int *)
{
	struct sweep *sw = user;
	const json_t *others = json_object_get(ok, "others");
	struct storage *st;

	if (storage_find(sw->all->parts.storages, str_of(sw->storage), &st) == OK) {
		st->sweep_due |= e && err_retryable(e);
		if (!st->others && json_object_size(others)) {
			st->others = json_deep_copy(others);
			st->others_ms = clock_service_ms();
		}
	}
	mem_free(sw);
	log_removed(ok);
}

void sweep_storage(struct sweeps *all, const char *name)
{
	const struct sweep_parts *s = &all->parts;
	json_t *keep = json_array();
	struct sweep *sw = mem_sure(sizeof *sw);
	char before[JOB_ID_LEN + 1]; /* ids grow: jobs that come while the sweep runs are none of its business */
	char mark[JOB_MARK_LEN + 1];
	struct storage *st;

	sw->all = all;
	snprintf(sw->storage, sizeof sw->storage, "%s", name);
	job_new_id(s->journal, before);
	job_id_mark(s->journal, mark);
	for (const struct job *j = s->jobs->live; j; j = j->live_next)
		if (json_array_append_new(keep, json_string(j->id)) != 0) {
			json_decref(keep); /* without one of them, its staging would go: nothing is asked, and the sweep is due again */
			keep = NULL;
			break;
		}
	json_t *question = json_pack("{s:s, s:s, s:o, s:s, s:s}", "op", "sweep", "storage", name, "keep", keep, "before", before,
				    "mark", mark);
	if (storage_find(s->storages, str_of(name), &st) == OK && sweep_is_due(st)) {
		json_object_set_new(question, "watched", st->others);
		st->others = NULL;
	}
	lookup_ask(s->lookups, name, question, NULL, 0, on_swept, sw);
}

/* ---- one job's ---- */

static struct pending *find(struct sweeps *all, const char *job, int attempt)
{
	for (struct pending *p = all->first; p; p = p->next)
		if (p->attempt == attempt && strcmp(p->job, job) == 0)
			return p;
	return NULL;
}

static void drop(struct pending *p)
{
	if (!p)
		return;
	mem_free(p->name);
	mem_free(p->part);
	mem_free(p->holder);
	mem_free(p);
}

static void forget(struct sweeps *all, struct pending *p)
{
	struct pending **at = &all->first;

	while (*at != p)
		at = &(*at)->next;
	*at = p->next;
	if (!*at)
		all->last = at;
	all->count--;
	drop(p);
}

struct asked {
	struct sweeps *all;
	char job[JOB_ID_LEN + 1];
	int attempt;
};

static void on_job_swept(void *user, enum err e, const json_t *ok, int *)
{
	struct asked a = *(struct asked *)user;
	struct pending *p = find(a.all, a.job, a.attempt);

	mem_free(user);
	if (!p)
		return;
	int64_t later_ms = json_integer_value(json_object_get(ok, "later_ms"));
	if (!p->expected)
		log_removed(ok);
	if (!e && later_ms > 0) { /* requests of a worker that is gone may be on their way to an object storage */
		p->asked = false;
		p->due_ms = clock_mono_ms() + (later_ms < LATER_MAX_MS ? later_ms : LATER_MAX_MS);
		return;
	}
	if (!e || e == ERR_NOT_FOUND) { /* nothing stays, or the storage is none of ours any more */
		forget(a.all, p);
		return;
	}
	if (p->again_ms == AGAIN_MS)
		log_err("what a job left cannot be removed; tried again", "job", p->job, "storage", p->storage, NULL);
	p->asked = false;
	p->due_ms = clock_mono_ms() + p->again_ms;
	p->again_ms = p->again_ms * 2 < AGAIN_MAX_MS ? p->again_ms * 2 : AGAIN_MAX_MS;
}

static void ask(struct sweeps *all, struct pending *p)
{
	struct asked *a = mem_zalloc(1, sizeof *a);
	char mark[JOB_MARK_LEN + 1];

	if (!a)
		return; /* at the next tick */
	a->all = all;
	job_id_mark(all->parts.journal, mark); /* another node may have the job by now, and be at it */
	memcpy(a->job, p->job, sizeof a->job);
	a->attempt = p->attempt;
	p->asked = true;
	json_t *turn = p->moved_from < 0 ? NULL : json_integer(p->moved_from);
	lookup_ask(all->parts.lookups, p->storage,
		   json_pack("{s:s, s:s, s:s, s:s, s:s, s:i, s:s*, s:o*}", "op", "sweep", "storage", p->storage, "name", p->name, "job",
			     p->job, "mark", mark, "attempt", p->attempt, "part", p->part, "moved_from", turn), NULL, 0, on_job_swept, a);
}

/* A part that may still be taken. */
static bool is_held(const struct sweeps *all, const struct pending *p)
{
	if (!p->holder)
		return false;
	if (state_dict_is_latest(all->parts.state_dicts, str_of(p->holder), p->holder_generation))
		return true;
	for (const struct job *j = all->parts.jobs->live; j; j = j->live_next)
		if (!j->spec.hosts.part && str_is(j->spec.target.storage, p->storage) && str_is(j->spec.target.name, p->name))
			return true;
	return false;
}

static void on_tick(void *user)
{
	struct sweeps *all = user;
	int64_t now = clock_mono_ms();

	all->tick = NULL;
	for (struct pending *p = all->first; p; p = p->next) {
		if (is_held(all, p))
			p->due_ms = now + PART_MS;
		else if (!p->asked && p->due_ms <= now)
			ask(all, p);
	}
	if (all->first)
		loop_timer_start(all->parts.loop, TICK_MS, on_tick, all, &all->tick);
}

static bool note_part(struct pending *p, const struct job *j)
{
	const struct ref *from = j->spec.parts.n ? &j->spec.parts.v[0] : &j->spec.source;

	p->part = mem_strdup(j->spec.hosts.id.p);
	if (j->state != JOB_SUCCEEDED)
		return p->part;
	p->holder = mem_strdup(from->name.p);
	p->holder_generation = from->generation;
	return p->part && p->holder;
}

/* Left-overs that cannot be noted here are left to the next start. A receipt that no worker is at any more goes at once. */
static void note(struct sweeps *all, const struct job *j, const struct ref *target, int64_t trash_ms)
{
	struct pending *p = all->count < PENDING_MAX ? mem_zalloc(1, sizeof *p) : NULL;
	bool whole = p && (p->name = mem_strdup(target->name.p));

	if (whole && j->spec.hosts.part)
		whole = note_part(p, j);
	if (!whole) {
		drop(p);
		return;
	}
	snprintf(p->storage, sizeof p->storage, "%s", target->storage.p);
	memcpy(p->job, j->id, sizeof p->job);
	p->attempt = j->attempt;
	p->expected = j->state == JOB_SUCCEEDED;
	p->moved_from = j->moved ? (int64_t)job_turn(j) : -1;
	bool at_once = p->expected && !trash_ms && !p->part && !j->moved;
	p->due_ms = clock_mono_ms() + (at_once ? 0 : FIRST_MS + trash_ms);
	p->again_ms = AGAIN_MS;
	*all->last = p;
	all->last = &p->next;
	all->count++;
	if (at_once)
		ask(all, p);
	if (!all->tick)
		loop_timer_start(all->parts.loop, TICK_MS, on_tick, all, &all->tick);
}

void sweep_after(struct sweeps *all, struct job *j)
{
	const struct ref *target = &j->spec.target;
	const char *code = json_string_value(json_object_get(j->error, "code"));
	bool part = j->spec.hosts.part;
	bool file = spec_target_is_file(&j->spec) || j->kind == JOB_REPLICATE; /* a copy may be one: its worker knows */
	bool repairs = kind_is(j->kind, KIND_REPAIRS); /* in a staging directory beside its target, which its worker may not have removed */
	bool leaves = part || j->spec.overwrite || j->kind == JOB_DELETE || repairs || file; /* a part, trash, or a receipt */
	bool replaced = j->state == JOB_SUCCEEDED && leaves, failed = j->state != JOB_SUCCEEDED && j->started_ms;
	/* its worker found that out; where nobody could look, a sweep looks */
	bool in_doubt = code && strcmp(code, err_code_name(ERR_NOT_DURABLE)) == 0 && !j->outcome_unknown;

	if (target->kind != REF_CHECKPOINT || !(kind_of(j->kind)->writes & REF_CHECKPOINT))
		return;
	if ((replaced || failed || j->moved) && !in_doubt)
		note(all, j, target, replaced ? j->trash_ms : 0);
}

FALLIBLE enum err sweeps_new(const struct sweep_parts *parts, struct sweeps **out)
{
	struct sweeps *all = *out = mem_zalloc(1, sizeof *all);

	NEED(all, "cannot keep sweeps");
	all->parts = *parts;
	all->last = &all->first;
	return OK;
}

void sweeps_free(struct sweeps *all)
{
	if (!all)
		return;
	while (all->first)
		forget(all, all->first);
	loop_timer_stop(&all->tick);
	mem_free(all);
}
