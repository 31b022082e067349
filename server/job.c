/* job.c: see job.h. Records: in memory while live, from the journal afterwards, and as JSON text.
 *
 * The text is made once per change and kept: what a thousand pollers ask for is a memcpy. The same text is the journal's document,
 * so that a record reads the same after a restart. */
#include "server/job.h"

#include <stdio.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>

#include "base/jtext.h"
#include "base/jval.h"
#include "base/mem.h"
#include "base/num.h"
#include "server/service_clock.h"
#include "server/config.h"
#include "server/job_impl.h"
#include "server/journal.h"
#include "server/parts.h"
#include "server/runs.h"

enum { TEXT_MAX = 32 << 20 };

const char *const job_state_names[JOB_STATE_COUNT + 1] = { "queued",	"planning", "running",	"committing",
					   "succeeded", "failed",   "cancelled" };

const char *job_state_text(enum job_state state)
{
	return job_state_names[state];
}

bool job_state_ended(enum job_state state)
{
	return state >= JOB_SUCCEEDED;
}

bool job_record_ended(const json_t *record)
{
	const char *state = jval_text(record, "state");

	for (int i = 0; i < JOB_STATE_COUNT; i++)
		if (strcmp(state, job_state_names[i]) == 0)
			return job_state_ended((enum job_state)i);
	return false;
}

void job_id_mark(const struct journal *journal, char mark[JOB_MARK_LEN + 1])
{
	uint64_t id = journal_id(journal);

	for (int i = 0; i < JOB_MARK_LEN; i++, id >>= 5)
		mark[i] = job_id_digits[id & 31];
	mark[JOB_MARK_LEN] = '\0';
}

/* The last id's time and random bits. */
static struct {
	uint64_t ms;
	unsigned char bits[7];
} last_id;

static void begin_ids(uint64_t ms)
{
	last_id.ms = ms;
	must(getrandom(last_id.bits, sizeof last_id.bits, 0) == (ssize_t)sizeof last_id.bits);
	last_id.bits[0] &= 0x7f; /* room to count */
}

/* Lists and sweeps go by the order of ids, so the ids of a daemon whose clock was set back follow those that its journal has. */
FALLIBLE enum err job_ids_resume(struct journal *journal)
{
	char id[JOB_ID_LEN + 1];

	TRY(journal_read_newest_id(journal, id));
	int64_t ms = job_id_ms(str_of(id));
	if (ms >= (int64_t)last_id.ms)
		begin_ids((uint64_t)ms + 1);
	return OK;
}

/* 50 of the bits behind the time are random: ids sort by time of birth. */
void job_new_id(const struct journal *journal, char id[JOB_ID_LEN + 1])
{
	uint64_t ms = (uint64_t)clock_wall_ms();
	unsigned char *bits = last_id.bits;

	if (ms > last_id.ms)
		begin_ids(ms);
	else /* the same millisecond, or a clock set back: count on */
		for (int i = 5; i >= 0 && ++bits[i] == 0; i--)
			;
	ms = last_id.ms;
	for (int i = 9; i >= 0; i--, ms >>= 5)
		id[i] = job_id_digits[ms & 31];
	for (int i = 0; i < 10; i++) {
		int bit = i * 5, at = bit / 8, shift = 11 - bit % 8;
		unsigned pair = (unsigned)bits[at] << 8 | (at + 1 < 7 ? bits[at + 1] : 0);
		id[10 + i] = job_id_digits[pair >> shift & 31];
	}
	job_id_mark(journal, id + JOB_ID_LEN - JOB_MARK_LEN);
}

struct principal job_owner(const struct job *j)
{
	return principal_of(j->uid);
}

/* ---- memory ---- */

FALLIBLE enum err job_alloc(struct server *s, enum job_kind kind, const json_t *spec, uid_t uid, struct job **out)
{
	struct job *j = mem_zalloc(1, sizeof *j);

	NEED(j, "cannot keep a job");
	j->server = s;
	j->kind = kind;
	j->uid = uid;
	j->attempt = 1;
	j->text = BUF_INIT(TEXT_MAX);
	j->request = json_deep_copy(spec);
	field_fallbacks(&j->spec);
	j->created_ms = clock_wall_ms();
	j->begun_ms = clock_mono_ms();
	j->version = ++s->jobs->versions;
	job_new_id(s->journal, j->id);
	if (!j->request) {
		job_free(j);
		return ERR(NO_MEMORY, "cannot keep a job");
	}
	*out = j;
	return OK;
}

void job_free(struct job *j)
{
	if (!j)
		return;
	must(!j->source_use && !j->target_use && !j->other_use && !j->part_uses && !j->made_use && !j->waiters && !j->await);
	loop_timer_stop(&j->timer);
	json_decref(j->request);
	spec_free(&j->spec);
	json_decref(j->progress_ranks);
	json_decref(j->stages);
	json_decref(j->replicas);
	json_decref(j->copies);
	mem_free(j->replicas_short);
	json_decref(j->trace);
	json_decref(j->result);
	json_decref(j->error);
	json_decref(j->error_more);
	json_decref(j->served_from);
	json_decref(j->parent);
	json_decref(j->taken);
	mem_free(j->followed);
	mem_free(j->plan);
	mem_free(j->target);
	buf_free(&j->text);
	mem_free(j);
}

void job_live_add(struct job *j)
{
	struct jobs *all = j->server->jobs;

	j->live_prev = NULL;
	j->live_next = all->live;
	if (all->live)
		all->live->live_prev = j;
	all->live = j;
	all->live_count++;
	all->dry_count += j->dry_run;
}

void job_live_remove(struct job *j)
{
	struct jobs *all = j->server->jobs;

	if (j->live_prev)
		j->live_prev->live_next = j->live_next;
	else
		all->live = j->live_next;
	if (j->live_next)
		j->live_next->live_prev = j->live_prev;
	j->live_prev = j->live_next = NULL;
	all->live_count--;
	all->dry_count -= j->dry_run;
}

void job_cache_remove(struct job *j)
{
	struct jobs *all = j->server->jobs;

	if (j->cache_prev)
		j->cache_prev->cache_next = j->cache_next;
	else
		all->cache_first = j->cache_next;
	if (j->cache_next)
		j->cache_next->cache_prev = j->cache_prev;
	else
		all->cache_last = j->cache_prev;
	j->cache_prev = j->cache_next = NULL;
	all->cached--;
}

/* Ended jobs that were used of late; the one unused for longest goes. Called when j is in the table already. */
void job_cache_add(struct job *j)
{
	struct jobs *all = j->server->jobs;

	j->cache_prev = NULL;
	j->cache_next = all->cache_first;
	if (all->cache_first)
		all->cache_first->cache_prev = j;
	else
		all->cache_last = j;
	all->cache_first = j;
	if (++all->cached > JOBS_CACHED) {
		struct job *old = all->cache_last;
		job_cache_remove(old);
		map_remove(&all->table, str_of(old->id));
		job_free(old);
	}
}

void job_revive(struct job *j)
{
	job_cache_remove(j);
	job_live_add(j);
}

/* ---- records as text ---- */

static void put_time(struct buf *b, const char *key, int64_t ms)
{
	char stamp[CLOCK_TEXT_MAX];

	if (ms)
		buf_printf(b, ",\"%s\":\"%s\"", key, clock_text(ms, stamp));
	else
		buf_printf(b, ",\"%s\":null", key);
}

/* A record without one of its fields is none: out of memory fails the buffer. */
static void put_json(struct buf *b, const char *key, const json_t *v)
{
	if (!v)
		return;
	CLEANUP(mem_free_ptr) char *text = jtext_of(v);
	if (!text)
		b->failed = ERR(NO_MEMORY, "cannot describe a job");
	buf_printf(b, ",\"%s\":", key);
	buf_puts(b, text ? text : "");
}

static void put_progress(const struct job *j, bool ended, struct buf *b)
{
	int64_t took = j->started_ms && j->finished_ms > j->started_ms ? j->finished_ms - j->started_ms : 0;
	double rate = !ended ? j->rate : took ? (double)j->bytes_done * 1000 / (double)took : 0; /* in the end: of all of it */

	buf_printf(b, ",\"progress\":{\"bytes_done\":%ju,\"bytes_total\":%ju", (uintmax_t)j->bytes_done, (uintmax_t)j->bytes_total);
	if (rate > 0) {
		buf_printf(b, ",\"rate\":%.0f", rate);
		if (!ended && j->bytes_total > j->bytes_done)
			buf_printf(b, ",\"eta_s\":%.1f", (double)(j->bytes_total - j->bytes_done) / rate);
	}
	put_json(b, "ranks", j->progress_ranks);
	buf_puts(b, "}");
}

static void put_cluster(const struct job *j, struct buf *b)
{
	const char *node = j->moved && j->moved_to[0] ? j->moved_to : j->server->config->node;

	buf_printf(b, ",\"node\":\"%s\",\"nodes\":[\"%s\"]", node, node);
	if (j->moved)
		buf_printf(b, ",\"moved_to\":\"%s\"", j->moved_to);
	if (j->token)
		buf_printf(b, ",\"ownership\":%jd", (intmax_t)j->token);
	put_json(b, "taken_over", j->taken);
}

static FALLIBLE enum err make_text(struct job *j, enum job_state state)
{
	struct buf *b = &j->text;
	static const char *const shown[] = { "source", "target", "a", "b", "labels" };
	char stamp[CLOCK_TEXT_MAX];

	buf_free(b);
	*b = BUF_INIT(TEXT_MAX);
	buf_printf(b, "{\"id\":\"%s\",\"kind\":\"%s\",\"state\":\"%s\",\"stage\":", j->id, kind_of(j->kind)->name,
		   job_state_names[state]);
	buf_json_str(b, str_of(j->stalled ? "stalled" : j->stage));
	if (j->server->config->cluster)
		put_cluster(j, b);
	buf_printf(b, ",\"attempt\":%d,\"retries_left\":%d,\"uid\":%u", j->attempt, j->retries_left, j->uid);
	if (j->cancel_wanted && !job_state_ended(state))
		buf_puts(b, ",\"cancelling\":true");
	job_lane_put(j, b);
	put_time(b, "created_at", j->created_ms);
	put_time(b, "started_at", j->started_ms);
	put_time(b, "finished_at", j->finished_ms);
	buf_printf(b, ",\"milestones\":{\"accepted\":\"%s\"", clock_text(j->created_ms, stamp));
	put_time(b, "snapshotted", j->snapshotted_ms);
	put_time(b, "durable", j->durable_ms);
	if (j->replicated_ms)
		put_time(b, "replicated", j->replicated_ms);
	buf_puts(b, "}");
	put_progress(j, job_state_ended(state), b);
	for (size_t i = 0; i < sizeof shown / sizeof *shown; i++)
		put_json(b, shown[i], json_object_get(j->request, shown[i]));
	put_json(b, "replicas", j->replicas);
	put_json(b, "stages", j->stages);
	put_json(b, "parent", j->parent);
	put_json(b, "trace", j->trace);
	put_json(b, "spec", j->request);
	if (job_state_ended(state)) { /* while it ends, they are there but not yet on disk */
		put_json(b, "result", j->result);
		put_json(b, "error", j->error);
	}
	buf_puts(b, "}");
	return buf_status(b);
}

/* The reason why a queued job waits changes without the job. */
static void refresh(struct job *j)
{
	uint64_t moves = job_lane_moves(j);

	if (moves != j->lane_moves)
		job_changed(j);
	j->lane_moves = moves;
}

static FALLIBLE enum err text_of(struct job *j, enum job_state state, struct str *out)
{
	refresh(j);
	if (j->text.len == 0) {
		enum err e = make_text(j, state);
		if (e) {
			buf_free(&j->text); /* half of it is not to be shown */
			return e;
		}
	}
	*out = (struct str){ (const char *)j->text.p, j->text.len };
	return OK;
}

void job_snapshotted(struct job *j)
{
	j->snapshotted_ms = clock_wall_ms();
	j->sealed_ms = clock_mono_ms();
	job_note_seen(j);
}

int64_t job_step(const struct job *j, int64_t generation)
{
	uint64_t step;

	for (size_t i = 0; i < j->spec.labels.n; i++)
		if (str_is(j->spec.labels.v[i].left, "step") && str_to_u64(j->spec.labels.v[i].right, &step) && step <= INT64_MAX)
			generation = (int64_t)step;
	return run_step(j->spec.target.name.p, generation);
}

void job_note_seen(const struct job *j)
{
	const struct state_dict_use *u = job_saved_use(j);
	const struct ref *target = &j->spec.target;

	if (j->kind == JOB_SAVE && u && j->snapshotted_ms && !j->dry_run)
		run_note_seen(j->server->runs, target->storage.p, target->name.p, job_step(j, u->generation),
			      j->snapshotted_ms, u->name);
}

void job_changed(struct job *j)
{
	j->version = ++j->server->jobs->versions;
	j->text.len = 0;
}

void job_put_row(struct journal_txn *t, struct job *j, enum job_state state)
{
	struct journal_job row = { .kind = j->kind,
				   .state = (int)state,
				   .attempt = j->attempt,
				   .ended = job_state_ended(state),
				   .uid = j->uid,
				   .target = j->target ? j->target : "",
				   .created_ms = j->created_ms,
				   .finished_ms = job_state_ended(state) ? clock_service_ms() : 0 };

	memcpy(row.id, j->id, sizeof row.id);
	enum err e = text_of(j, state, &row.doc);
	if (e)
		journal_txn_fail(t, e);
	else
		journal_put_job(t, &row);
}

void job_write(struct job *j, done_fn fn, void *user)
{
	struct journal_txn *t = journal_txn_new(j->server->journal);

	job_put_row(t, j, j->state);
	journal_commit(j->server->journal, t, fn, user);
}

/* ---- records from the journal ---- */

/* "2026-11-21T09:36:08.120Z", as clock_text wrote it. */
static int64_t read_time(const json_t *o, const char *key)
{
	const char *text = json_string_value(json_object_get(o, key));
	int64_t ms = 0;

	return text && clock_of_text(text, &ms) ? ms : 0;
}

static uint64_t read_number(const json_t *o, const char *key)
{
	json_int_t v = json_integer_value(json_object_get(o, key));

	return v > 0 ? (uint64_t)v : 0;
}

static void read_doc(struct job *j, const json_t *doc)
{
	const char *stage = json_string_value(json_object_get(doc, "stage"));
	const json_t *milestones = json_object_get(doc, "milestones"), *progress = json_object_get(doc, "progress");

	snprintf(j->stage, sizeof j->stage, "%s", stage ? stage : "");
	j->started_ms = read_time(doc, "started_at");
	j->finished_ms = read_time(doc, "finished_at");
	j->snapshotted_ms = read_time(milestones, "snapshotted");
	j->durable_ms = read_time(milestones, "durable");
	j->replicated_ms = read_time(milestones, "replicated");
	j->bytes_done = read_number(progress, "bytes_done");
	j->bytes_total = read_number(progress, "bytes_total");
	j->rate = json_number_value(json_object_get(progress, "rate"));
	j->progress_ranks = json_incref(json_object_get(progress, "ranks"));
	j->result = json_incref(json_object_get(doc, "result"));
	j->error = json_incref(json_object_get(doc, "error"));
	j->parent = json_incref(json_object_get(doc, "parent"));
	j->stages = json_incref(json_object_get(doc, "stages"));
	j->replicas = json_incref(json_object_get(doc, "replicas"));
	j->trace = json_incref(json_object_get(doc, "trace"));
	j->cancel_wanted = json_is_true(json_object_get(doc, "cancelling"));
	j->taken = json_incref(json_object_get(doc, "taken_over"));
	j->takes = json_array_size(j->taken) > 0; /* perhaps not yet fenced by the daemon that was here before */
	j->token = jval_int(doc, "ownership");
	j->moved = json_object_get(doc, "moved_to") != NULL;
	snprintf(j->moved_to, sizeof j->moved_to, "%s", jval_text(doc, "moved_to"));
	if (json_is_integer(json_object_get(doc, "retries_left")))
		j->retries_left = (int)read_number(doc, "retries_left");
}

enum err job_load_row(void *user, const struct journal_job *row)
{
	struct job_load *l = user;
	CLEANUP(json_decrefp) json_t *doc = NULL;
	enum err e = jtext_parse(row->doc, JSON_ALLOW_NUL, &doc); /* FQNs may have NULs */
	json_t *spec = json_object_get(doc, "spec");

	if (e == ERR_NO_MEMORY)
		return e;
	if (row->kind < 0 || row->kind >= JOB_KIND_COUNT || row->state < 0 || row->state >= JOB_STATE_COUNT || !json_is_object(spec))
		return ERR(JOURNAL, "the journal's record of job %s cannot be read", row->id);
	TRY(job_alloc(l->server, (enum job_kind)row->kind, spec, row->uid, &l->job));
	struct job *j = l->job;
	(void)json_object_del(j->request, "like_storages"); /* of an older daemon, which kept its own notes there */
	if (spec_read(j->request, &j->spec))
		err_clear(); /* shown as it is; job_spec_resolve says why it cannot be run */
	memcpy(j->id, row->id, sizeof j->id);
	job_take_up(j, (enum job_state)row->state);
	j->attempt = row->attempt;
	j->created_ms = row->created_ms;
	j->in_journal = true;
	read_doc(j, doc);
	j->target = mem_strdup(row->target);
	return j->target ? OK : ERR(NO_MEMORY, "cannot read a job");
}

FALLIBLE enum err job_find(struct server *s, struct str id, struct job **out)
{
	struct job_load l = { .server = s };
	struct job *j = map_object(&s->jobs->table, id);

	if (!j && job_id_ok(id)) {
		enum err e = journal_read_job(s->journal, id, job_load_row, &l);
		if (!e && l.job)
			e = map_add(&s->jobs->table, (struct str){ l.job->id, JOB_ID_LEN }, l.job);
		if (e) {
			job_free(l.job);
			return e;
		}
		j = l.job;
		if (j)
			job_cache_add(j);
	} else if (j && j->step == STEP_NONE && job_state_ended(j->state) && s->jobs->cache_first != j) { /* else it is held */
		job_cache_remove(j);
		job_cache_add(j);
	}
	if (!j || !j->in_journal) /* its row is on its way: it may still be refused */
		return ERR(NOT_FOUND, "there is no job \"%.*s\"", (int)num_min(id.n, 64), id.p);
	*out = j;
	return OK;
}

FALLIBLE enum err job_text(struct server *s, struct str id, struct str *out)
{
	struct job *j;

	TRY(job_find(s, id, &j));
	return text_of(j, j->state, out);
}

uint64_t job_version(struct server *s, struct str id)
{
	struct job *j = map_object(&s->jobs->table, id);

	if (j)
		refresh(j);
	return j ? j->version : 0;
}

FALLIBLE enum err job_state_of(struct server *s, struct str id, enum job_state *out)
{
	struct job *j;

	TRY(job_find(s, id, &j));
	*out = j->state;
	return OK;
}

const char *job_moved_to(struct server *s, struct str id, bool *is_here_out)
{
	struct job *j;

	*is_here_out = job_find(s, id, &j) == OK;
	if (!*is_here_out)
		err_clear();
	return *is_here_out && j->moved ? j->moved_to : NULL;
}

FALLIBLE enum err job_kind_of(struct server *s, struct str id, enum job_kind *out)
{
	struct job *j;

	TRY(job_find(s, id, &j));
	*out = j->kind;
	return OK;
}

FALLIBLE enum err job_plan(struct server *s, struct str id, struct buf *out)
{
	struct job *j;
	bool found = false;

	TRY(job_find(s, id, &j));
	if (j->plan) {
		buf_puts(out, j->plan);
		return buf_status(out);
	}
	TRY(journal_read_plan(s->journal, id, out, &found));
	return found ? OK : ERR(NOT_FOUND, "job %s has no plan yet", j->id);
}

uint32_t jobs_live(const struct server *s)
{
	return s->jobs->live_count;
}

bool jobs_use_storage(const struct server *s, const char *storage)
{
	for (const struct job *j = s->jobs->live; j; j = j->live_next)
		for (uint32_t i = 0; i < j->storage_count; i++)
			if (strcmp(j->storages[i], storage) == 0)
				return true;
	return false;
}

/* ---- waiting ---- */

static void answer_waiter(void *user, enum err e)
{
	struct waiter *w = user;

	w->fn(w->user, e);
	mem_free(w);
}

static void on_wait_over(void *user)
{
	struct waiter *w = user, **at = &w->job->waiters;

	while (*at != w)
		at = &(*at)->next;
	*at = w->next;
	w->timer = NULL;
	answer_waiter(w, OK);
}

void job_wake(struct job *j)
{
	while (j->waiters) {
		struct waiter *w = j->waiters;
		j->waiters = w->next;
		loop_timer_stop(&w->timer);
		loop_later(w->server->loop, answer_waiter, w, OK);
	}
}

void job_wait(struct server *s, struct str id, int64_t timeout_ms, done_fn fn, void *user)
{
	struct waiter *w = mem_sure(sizeof *w);

	*w = (struct waiter){ .server = s, .fn = fn, .user = user };
	enum err e = job_find(s, id, &w->job);
	if (!e && !job_state_ended(w->job->state) && timeout_ms > 0) {
		loop_timer_start(s->loop, timeout_ms, on_wait_over, w, &w->timer);
		w->next = w->job->waiters;
		w->job->waiters = w;
		return;
	}
	loop_later(s->loop, answer_waiter, w, e);
}
