/* policy_run.c: when policies are looked at, and how what they remove goes.
 *
 * Looking costs a list of all storages, so that it comes seldom enough to take a tenth of the time at most. Of the removals that come of it
 * one is a job at a time in each storage, and rests between them hold the bytes that are unlinked behind the jobs to what a slow disk frees
 * beside saves (worker/store/trash.h). A job that fails ends the list: what it was decided by may have changed. Its checkpoint is left
 * alone for a while. */
#include <stdio.h>

#include "base/log.h"
#include "base/mem.h"
#include "base/num.h"
#include "server/events.h"
#include "server/job_refs.h"
#include "server/metrics.h"
#include "server/parts.h"
#include "server/audit.h"
#include "server/policy_impl.h"
#include "server/runs.h"
#include "server/service_clock.h"

enum { TICK_MS = 250, EVERY_MS = 60000, COST_FACTOR = 10, FAILED_S = 600, JOB_WAIT_MS = 3600000, AGAIN_MS = 5000,
       KEYS_BYTES_MAX = 16 << 20, FREED_PER_MS = 256 << 10 };

static void look_soon(struct policies *all, int64_t in_ms)
{
	int64_t due = clock_mono_ms() + in_ms;

	if (!all->is_due || due < all->due_ms)
		all->due_ms = due;
	all->is_due = true;
}

/* ---- removals that failed ---- */

static FALLIBLE enum err put_failed_key(struct arena *a, struct str storage, struct str name, struct str etag, struct str *out)
{
	return arena_printf(a, out, "%.*s:%.*s:%.*s", (int)storage.n, storage.p, (int)name.n, name.p, (int)etag.n, etag.p);
}

static void forget_failed(struct policies *all)
{
	map_free(&all->failed);
	all->failed = (struct map){ 0 };
	arena_free(all->failed_keys);
	all->failed_keys = NULL;
}

static void note_failed(struct policies *all, const char *storage, const struct removal *r)
{
	struct str key;

	if (!all->failed_keys)
		all->failed_keys = arena_new(KEYS_BYTES_MAX);
	enum err e = all->failed_keys ? put_failed_key(all->failed_keys, str_of(storage), str_of(r->name), str_of(r->etag), &key)
				      : ERR_NO_MEMORY;
	e = e ?: map_put(&all->failed, key, (uint32_t)(clock_mono_ms() / 1000) + FAILED_S);
	if (e) /* then it is only tried again sooner */
		forget_failed(all);
	err_clear();
}

bool policy_removal_failed(const struct server *s, struct str storage, struct str name, struct str etag)
{
	const struct policies *all = s->policies;
	char key[8192];
	int n = snprintf(key, sizeof key, "%.*s:%.*s:%.*s", (int)storage.n, storage.p, (int)name.n, name.p, (int)etag.n, etag.p);
	uint32_t until = all->failed_keys ? map_get(&all->failed, (struct str){ key, (size_t)n }) : MAP_NONE;

	return until != MAP_NONE && clock_mono_ms() / 1000 < until;
}

/* ---- the removals of a storage ---- */

static void removal_free(struct removal *r)
{
	if (!r)
		return;
	mem_free(r->name);
	mem_free(r->etag);
	json_decref(r->present);
	mem_free(r);
}

static void drop_queue(struct remover *m)
{
	for (struct removal *r = m->queue, *next; r; r = next) {
		next = r->next;
		removal_free(r);
	}
	m->queue = NULL;
}

static struct remover *remover_of(struct policies *all, struct str storage)
{
	for (struct remover *m = all->removers; m; m = m->next)
		if (str_is(storage, m->storage))
			return m;
	struct remover *m = mem_zalloc(1, sizeof *m);
	if (!m)
		return NULL;
	m->server = all->server;
	snprintf(m->storage, sizeof m->storage, "%.*s", (int)storage.n, storage.p);
	m->next = all->removers;
	all->removers = m;
	return m;
}

static json_t *spec_of(const struct remover *m, const struct removal *r)
{
	char trash[32];
	json_t *spec = json_pack("{s:s, s:{s:s, s:s}, s:{s:{s:s, s:O, s:b}}, s:{s:s, s:s}}", "kind", "delete", "target", "storage",
				 m->storage, "name", r->name, "options", "only_if", "etag", r->etag, "present", r->present, "unaliased", 1,
				 "labels", "policy", r->policy, "why", retention_whys[r->why]);

	snprintf(trash, sizeof trash, "%jds", (intmax_t)((r->trash_ms + 999) / 1000));
	if (r->trash_ms && (!spec || json_object_set_new(json_object_get(spec, "options"), "trash", json_string(trash)) != 0)) {
		json_decref(spec); /* it must not go for good for want of memory */
		return NULL;
	}
	return spec;
}

static void count_end(struct remover *m, const struct removal *r, bool ok)
{
	struct follower *f = follower_find(m->server->policies->list, str_of(r->policy));
	struct policy_entry *p = f ? policy_of(f) : NULL;

	if (!p)
		return;
	p->removed += ok;
	p->removed_bytes += ok ? r->bytes : 0;
	p->failed += !ok;
}

static void go_on(struct remover *m);

/* The removal in hand has come to its end. */
static void end_one(struct remover *m, bool ok)
{
	struct policies *all = m->server->policies;
	struct removal *r = m->running;

	m->running = NULL;
	m->job[0] = '\0';
	count_end(m, r, ok);
	if (!ok) {
		metrics_add(m->server->metrics, "dcpd_policy_removals_failed_total", "", 1);
		if (!m->is_stale)
			note_failed(all, m->storage, r);
		drop_queue(m);
		look_soon(all, m->is_stale ? 0 : AGAIN_MS);
	}
	removal_free(r);
	if (ok && !m->queue) /* there may be more than were decided at once */
		look_soon(all, 0);
	go_on(m);
}

static void on_waited(void *user, enum err e)
{
	struct remover *m = user;
	enum job_state state = JOB_FAILED;

	e = e ?: job_state_of(m->server, str_of(m->job), &state);
	if (!e && !job_state_ended(state)) {
		job_wait(m->server, str_of(m->job), JOB_WAIT_MS, on_waited, m);
		return;
	}
	if (!m->running->trash_ms)
		m->rest_until_ms = clock_mono_ms() + (int64_t)(m->running->bytes / FREED_PER_MS);
	end_one(m, !e && state == JOB_SUCCEEDED);
}

static void on_made(void *user, enum err e, const char *id, bool)
{
	struct remover *m = user;
	char subject[AUDIT_SUBJECT_MAX];

	if (e) {
		log_err("a removal by a policy is refused", "policy", m->running->policy, "storage", m->storage, "name",
			m->running->name, NULL);
		end_one(m, false);
		return;
	}
	snprintf(m->job, sizeof m->job, "%s", id);
	snprintf(subject, sizeof subject, "%s:%s", m->storage, m->running->name);
	audit_add(m->server, &(struct audit_entry){ .uid = m->running->uid, .token = "", .policy = m->running->policy, .job = m->job,
						    .action = "checkpoint.delete", .subject = subject }, NULL, NULL);
	job_wait(m->server, str_of(m->job), JOB_WAIT_MS, on_waited, m);
}

static void go_on(struct remover *m)
{
	struct removal *r = m->queue;

	if (m->running || !r || m->server->draining || clock_mono_ms() < m->rest_until_ms)
		return;
	CLEANUP(json_decrefp) json_t *spec = spec_of(m, r);
	if (!spec)
		return; /* at the next tick */
	m->queue = r->next;
	m->running = r;
	m->is_stale = false;
	job_create(m->server, &(struct job_request){ .kind = JOB_DELETE, .spec = spec, .who = { .uid = r->uid } }, on_made, m);
}

FALLIBLE enum err policy_check_removal(const struct server *s, const char *job, const char *name)
{
	for (const struct remover *m = s->policies->removers; m; m = m->next)
		if (m->is_stale && strcmp(m->job, job) == 0)
			return ERR(STATE_CONFLICT, "%s stays: since its removal was decided a delta was made, perhaps to it, or it was "
				   "verified, or its run found damaged", name);
	return OK;
}

/* ---- what is found out meanwhile ---- */

static bool concerns(const struct policies *all, struct str storage, struct str name)
{
	if (storage.p && name.p)
		followers_each(const struct policy_entry, p, all->list)
			if (policy_matches(&p->policy, storage, run_of(name.p)))
				return true;
	return false;
}

enum { DOUBT_BYTES = 8192 };

static void doubt_key(char key[DOUBT_BYTES], bool of_run, struct str storage, struct str name)
{
	struct str of = of_run ? run_of(name.p) : name;

	snprintf(key, DOUBT_BYTES, "%c:%.*s:%.*s", of_run ? 'r' : 'n', (int)storage.n, storage.p, (int)of.n, of.p);
}

static bool is_doubted(const struct policies *all, struct str storage, struct str name)
{
	char one[DOUBT_BYTES], run[DOUBT_BYTES];

	if (!all->doubted)
		return false;
	doubt_key(one, false, storage, name);
	doubt_key(run, true, storage, name);
	return json_object_get(all->doubted, one) || json_object_get(all->doubted, run);
}

static void drop_doubted(struct policies *all, struct remover *m)
{
	for (struct removal **at = &m->queue, *r; (r = *at);) {
		if (!is_doubted(all, str_of(m->storage), str_of(r->name))) {
			at = &r->next;
			continue;
		}
		*at = r->next;
		removal_free(r);
	}
	if (m->running && is_doubted(all, str_of(m->storage), str_of(m->running->name)))
		m->is_stale = true;
}

void policy_note_verdict(struct server *s, const char *storage, const char *name, bool is_damaged)
{
	struct policies *all = s->policies;
	char key[DOUBT_BYTES];

	if (!concerns(all, str_of(storage), str_of(name)))
		return;
	all->doubted = all->doubted ? all->doubted : json_object();
	doubt_key(key, is_damaged, str_of(storage), str_of(name));
	if (json_object_set_new(all->doubted, key, json_true()) == 0) {
		for (struct remover *m = all->removers; m; m = m->next)
			drop_doubted(all, m);
	} else { /* no memory: as if all were */
		all->is_overtaken = true;
		policy_changed(s);
	}
	look_soon(all, 0);
}

/* ---- what is removed ---- */

struct plan {
	struct policies *all;
	const struct policy_records *records;
	const struct retention *result;
	const struct policy *policies;
	struct arena *keys;
	struct map newest;             /* "storage:run" → array of the names that stay as its newest ones */
};

static void plan_free(struct plan *p)
{
	json_t *names;

	map_each(&p->newest, names)
		json_decref(names);
	map_free(&p->newest);
	arena_free(p->keys);
}

static FALLIBLE enum err run_key(struct plan *p, const struct retention_record *r, struct str *out)
{
	return arena_printf(p->keys, out, "%.*s:%.*s", (int)r->storage.n, r->storage.p, (int)r->run.n, r->run.p);
}

static FALLIBLE enum err find_newest(struct plan *p)
{
	const unsigned newest = RETAIN_BIT(NEWEST) | RETAIN_BIT(NEWEST_VERIFIED);

	p->keys = arena_new(256 << 20);
	NEED(p->keys, "no memory for runs");
	for (uint64_t i = 0; i < p->records->list.n; i++) {
		const struct retention_record *r = &p->records->list.v[i];
		struct str key;
		if (!(p->result->verdicts[i].kept & newest))
			continue;
		TRY(run_key(p, r, &key));
		json_t *names = map_object(&p->newest, key);
		if (!names) {
			names = json_array();
			NEED(names, "no memory for runs");
			enum err e = map_add(&p->newest, key, names);
			if (e)
				json_decref(names);
			TRY(e);
		}
		if (json_array_append_new(names, json_stringn(r->name.p, r->name.n)) != 0)
			return ERR(NO_MEMORY, "no memory for runs");
	}
	return OK;
}

static FALLIBLE enum err queue_one(struct plan *p, uint32_t record)
{
	const struct retention_record *r = &p->records->list.v[record];
	const struct retention_verdict *v = &p->result->verdicts[record];
	const struct policy *by = &p->policies[v->policy];
	const struct follower *entry = follower_find(p->all->list, by->name);

	if (is_doubted(p->all, r->storage, r->name))
		return OK; /* the next look, which is due, decides */
	struct remover *m = remover_of(p->all, r->storage);
	struct removal *one = mem_zalloc(1, sizeof *one), **last = m ? &m->queue : NULL;
	struct str key;

	enum err e = one && m ? run_key(p, r, &key) : ERR(NO_MEMORY, "no memory for a removal");
	json_t *present = e ? NULL : map_object(&p->newest, key);
	if (!e && !present) /* its run has none that stays: it should not have been decided */
		e = ERR(INTERNAL, "a run would lose its newest checkpoint");
	if (e) {
		mem_free(one);
		return e;
	}
	*one = (struct removal){ .name = mem_strndup(r->name.p, r->name.n), .why = v->why, .uid = entry->uid, .trash_ms = by->trash_ms,
				 .bytes = r->bytes, .present = json_incref(present),
				 .etag = mem_strndup(p->records->etags.v[record].p, p->records->etags.v[record].n) };
	snprintf(one->policy, sizeof one->policy, "%s", entry->name);
	while (*last)
		last = &(*last)->next;
	if (!one->name || !one->etag) {
		removal_free(one);
		return ERR(NO_MEMORY, "no memory for a removal");
	}
	*last = one;
	return OK;
}

enum { QUEUED_MAX = 256 }; /* more come of the next look: a long list grows old */

static FALLIBLE enum err queue_all(struct plan *p)
{
	for (struct remover *m = p->all->removers; m; m = m->next)
		drop_queue(m);
	if (p->result->removal_count == 0)
		return OK;
	TRY(find_newest(p));
	for (uint64_t i = 0; i < p->result->removal_count && i < QUEUED_MAX; i++)
		TRY(queue_one(p, p->result->removals[i]));
	return OK;
}

static void note_sums(struct policies *all, const struct retention *result)
{
	const struct retention_sum *sum = result->sums;

	followers_each(struct policy_entry, p, all->list) {
		if (sum->over && sum->over != p->sum.over) {
			log_warn("a policy's budget cannot be met", "policy", p->base.name, NULL);
			metrics_add(all->server->metrics, "dcpd_policy_unmet_total", "", 1);
			events_emit(all->server->events, "policy.unmet", NULL,
				    json_pack("{s:s, s:s, s:I, s:I, s:I}", "policy", p->base.name, "storage", p->policy.storage.p, "budget",
					      (json_int_t)p->policy.bytes, "bytes", (json_int_t)(sum->bytes - sum->removed_bytes),
					      "over_bytes", (json_int_t)sum->over));
		}
		p->sum = *sum++;
		p->looked_ms = clock_wall_ms();
	}
}

static FALLIBLE enum err decide(struct policies *all, const struct policy_records *records)
{
	CLEANUP(retention_free) struct retention result = { 0 };
	struct retention_now now = { clock_wall_ms(), clock_wall_is_sane() };
	struct policy policies[FOLLOWERS_MAX];
	uint32_t n = 0;

	followers_each(const struct policy_entry, p, all->list)
		if (n < FOLLOWERS_MAX)
			policies[n++] = p->policy;
	TRY(retention_evaluate(records->list.v, records->list.n, policies, n, &now, &result));
	note_sums(all, &result);
	CLEANUP(plan_free) struct plan plan = { .all = all, .records = records, .result = &result, .policies = policies };
	enum err e = queue_all(&plan);
	for (struct remover *m = all->removers; m && e; m = m->next)
		drop_queue(m);
	return e;
}

static void on_records(void *user, enum err e, const struct policy_records *records)
{
	struct policies *all = user;
	int64_t now = clock_mono_ms();
	bool had_problem = all->problem[0];

	if (!e && !all->is_overtaken) /* else the next look, which is due, decides */
		e = decide(all, records);
	all->is_looking = false;
	all->cost_ms = now - all->looked_ms;
	all->looked_ms = now;
	all->problem[0] = '\0';
	if (e) {
		snprintf(all->problem, sizeof all->problem, "nothing is removed: %.370s", err_last()->text);
		if (!had_problem)
			log_err("policies remove nothing", NULL);
		for (struct remover *m = all->removers; m; m = m->next)
			drop_queue(m);
		look_soon(all, AGAIN_MS);
	}
	for (struct remover *m = all->removers; m; m = m->next)
		go_on(m);
}

/* ---- when ---- */

static void on_tick(void *user)
{
	struct policies *all = user;
	struct server *s = all->server;
	int64_t now = clock_mono_ms();

	for (struct remover *m = all->removers; m; m = m->next)
		go_on(m);
	if (all->list->count && !all->is_due && now - all->looked_ms >= EVERY_MS)
		look_soon(all, 0);
	if (!all->is_due || all->is_looking || s->draining || now < all->due_ms || now - all->looked_ms < all->cost_ms * COST_FACTOR)
		return;
	all->is_due = false;
	if (all->list->count == 0) {
		for (struct remover *m = all->removers; m; m = m->next)
			drop_queue(m);
		return;
	}
	all->is_looking = true;
	all->is_overtaken = false;
	json_decref(all->doubted);
	all->doubted = NULL;
	all->looked_ms = now;
	policy_records_gather(&(struct policy_gathering){ s, on_records, policy_removal_failed, all });
}

void policy_changed(struct server *s)
{
	struct policies *all = s->policies;

	for (struct remover *m = all->removers; m; m = m->next)
		drop_queue(m);
	look_soon(all, 0);
}

void policy_note_delta(struct server *s)
{
	struct policies *all = s->policies;

	for (struct remover *m = all->removers; m; m = m->next)
		m->is_stale = true;
	all->is_overtaken = true;
	policy_changed(s);
}

void policy_note(struct server *s, enum job_kind kind, const struct ref *target)
{
	struct policies *all = s->policies;

	if (target->kind == REF_CHECKPOINT && concerns(all, target->storage, target->name))
		look_soon(all, 0);
	if (kind_is(kind, KIND_HAS_BASE))
		policy_note_delta(s);
}

FALLIBLE enum err policy_all_start(struct server *s)
{
	look_soon(s->policies, 0);
	return loop_every(s->loop, TICK_MS, on_tick, s->policies, &s->policies->tick);
}

void policy_all_stop(struct policies *all)
{
	loop_timer_stop(&all->tick);
	for (struct remover *m = all->removers, *next; m; m = next) {
		next = m->next;
		drop_queue(m);
		removal_free(m->running);
		mem_free(m);
	}
	json_decref(all->doubted);
	forget_failed(all);
}
