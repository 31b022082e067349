/* job_run.c: attempts: what a gang is told and tells, retries, recovery, stalls.
 *
 * A job that may have committed without our knowing (a worker or we ourselves died) is not run again blindly: a look-up worker asks
 * the storage first (`recover`). */
#include <stdio.h>

#include "base/jtext.h"
#include "base/jval.h"
#include "base/log.h"
#include "base/mem.h"
#include "server/service_clock.h"
#include "server/config.h"
#include "server/errdoc.h"
#include "server/events.h"
#include "server/job_impl.h"
#include "server/lookup.h"
#include "server/parts.h"
#include "server/storage.h"
#include "server/takeover.h"
#include "server/verdict.h"

enum { RETRY_MS = 500, RECOVER_AGAIN_MS = 1000, RECOVER_FOR_MS = 20000, SILENT_MS = 1000 };

/* ---- an attempt ---- */

/* A callback that comes back later names the attempt it belongs to: the job may have moved on meanwhile. */
struct ticket {
	struct server *server;
	char id[JOB_ID_LEN + 1];
	int attempt;
};

static struct ticket *new_ticket(const struct job *j)
{
	struct ticket *t = mem_sure(sizeof *t);

	t->server = j->server;
	memcpy(t->id, j->id, sizeof t->id);
	t->attempt = j->attempt;
	return t;
}

static struct job *take_ticket(struct ticket *t)
{
	struct job *j = map_object(&t->server->jobs->table, str_of(t->id));
	bool valid = j && j->attempt == t->attempt;

	mem_free(t);
	return valid ? j : NULL;
}

static void on_state(void *user, const json_t *body)
{
	struct job *j = user;
	const char *state = json_string_value(json_object_get(body, "state"));
	const char *stage = json_string_value(json_object_get(body, "stage"));
	const json_t *plan = json_object_get(body, "plan"), *total = json_object_get(body, "bytes_total");
	const char *identity = json_string_value(json_object_get(body, "identity"));
	const char *followed = json_string_value(json_object_get(body, "checkpoint"));
	enum job_state to = j->state;

	if (state && strcmp(state, "running") == 0 && j->state == JOB_PLANNING)
		to = JOB_RUNNING;
	if (identity && strlen(identity) < sizeof j->identity)
		memcpy(j->identity, identity, strlen(identity) + 1);
	if (followed) {
		mem_free(j->followed);
		j->followed = mem_strdup(followed);
	}
	if (json_is_integer(total) && json_integer_value(total) >= 0)
		j->bytes_total = (uint64_t)json_integer_value(total);
	if (plan && !j->dry_run) {
		char *text = jtext_of(plan);
		struct journal_txn *t = journal_txn_new(j->server->journal);
		if (text)
			journal_put_plan(t, j->id, str_of(text));
		journal_commit(j->server->journal, t, NULL, NULL);
		mem_free(j->plan);
		j->plan = text;
	}
	j->alive_ms = clock_service_ms();
	j->stalled = false;
	job_set_state(j, j->step, to, stage ? stage : job_state_text(to), to != j->state);
}

static json_t *few_ranks(const json_t *ranks)
{
	if (json_array_size(ranks) <= JOB_RANKS_SHOWN)
		return json_incref((json_t *)ranks);
	json_t *some = json_array();
	for (size_t i = 0; some && i < JOB_RANKS_SHOWN; i++)
		json_array_append(some, json_array_get(ranks, i));
	return some;
}

static void on_progress(void *user, const json_t *body)
{
	struct job *j = user;
	json_int_t done = json_integer_value(json_object_get(body, "bytes_done"));
	json_int_t total = json_integer_value(json_object_get(body, "bytes_total"));
	const json_t *ranks = json_object_get(body, "ranks");
	int64_t now = clock_mono_ms();

	if (done < 0 || total < 0)
		return;
	if ((uint64_t)done > j->bytes_done || j->state == JOB_PLANNING) {
		double seconds = (double)(now - j->rate_at_ms) / 1000;
		if (seconds >= 0.05 && (uint64_t)done > j->bytes_done) {
			double sample = (double)((uint64_t)done - j->bytes_done) / seconds;
			j->rate = j->rate > 0 ? j->rate * 0.7 + sample * 0.3 : sample;
			j->rate_at_ms = now;
		}
		j->alive_ms = clock_service_ms();
		if (j->stalled)
			log_info("job goes on", "job", j->id, NULL);
		j->stalled = false;
	}
	j->bytes_done = (uint64_t)done;
	if (total)
		j->bytes_total = (uint64_t)total;
	if (json_is_array(ranks)) {
		json_decref(j->progress_ranks);
		j->progress_ranks = few_ranks(ranks);
	}
	job_changed(j);
	if (j->dry_run)
		return;
	json_t *doc = json_pack("{s:s, s:{s:I, s:I, s:f, s:O*}}", "job", j->id, "progress", "bytes_done", done, "bytes_total",
				(json_int_t)j->bytes_total, "rate", j->rate, "ranks", j->progress_ranks);
	events_emit(j->server->events, "job.progress", j->id, doc);
}

/* Several workers tell their shares one after the other: the time since the job's last share counts once. */
static void count_share(struct job *j, uint32_t storage, bool written, json_int_t bytes)
{
	int64_t now = clock_mono_ns(), *last = &j->moved_ns[storage][written], begun = j->stage_since_ms * 1000000;
	struct storage *st;

	if (bytes <= 0 || storage_find(j->server->storages, str_of(j->storages[storage]), &st) != OK)
		return;
	storage_count_stage(st, job_stage_label(j), written, (uint64_t)bytes, now - (*last > begun ? *last : begun));
	*last = now;
}

static void on_moved(void *user, const json_t *body)
{
	struct job *j = user;

	for (uint32_t i = 0; i < j->storage_count; i++) {
		const json_t *pair = json_object_get(body, j->storages[i]);
		count_share(j, i, false, json_integer_value(json_array_get(pair, 0)));
		count_share(j, i, true, json_integer_value(json_array_get(pair, 1)));
	}
}

/* ---- the target's segments ---- */

static void on_made(void *user, enum err e, struct state_dict_use *use)
{
	struct job *j = take_ticket(user);

	if (!j || !j->gang || j->step != STEP_MAKING) {
		if (!e)
			state_dict_drop(&use);
		return;
	}
	job_move(j, STEP_ON_GANG, j->state);
	if (e) {
		gang_fail(j->gang, e);
		return;
	}
	json_t *ranks = json_array();
	CLEANUP(mem_free_ptr) int *fds = mem_zalloc(use->world_size, sizeof *fds);
	bool bad = !fds;
	j->made_use = use;
	for (uint32_t r = 0; !bad && r < use->world_size; r++) {
		fds[r] = use->ranks[r].fd;
		bad = json_array_append_new(ranks, json_pack("{s:i, s:i, s:I}", "rank", (int)r, "fd", (int)r, "bytes",
							     (json_int_t)use->ranks[r].bytes)) != 0;
	}
	CLEANUP(json_decrefp) json_t *body = json_pack("{s:o}", "ranks", ranks);
	if (bad || !body)
		gang_abort(j->gang, ERR(NO_MEMORY, "cannot pass segments on"));
	else
		gang_send_segments(j->gang, body, fds, use->world_size);
}

static FALLIBLE enum err read_wanted(const json_t *body, uint32_t world, uint64_t *bytes, uint64_t *image_bytes)
{
	const json_t *one;
	size_t i;

	json_array_foreach(json_object_get(body, "ranks"), i, one) {
		json_int_t rank = json_integer_value(json_object_get(one, "rank"));
		json_int_t b = json_integer_value(json_object_get(one, "bytes"));
		json_int_t image = json_integer_value(json_object_get(one, "image_bytes"));
		if (rank < 0 || rank >= (json_int_t)world || bytes[rank] || b <= 0 || image <= 0)
			return ERR(PROTOCOL, "a worker asked for segments that cannot be");
		bytes[rank] = (uint64_t)b;
		image_bytes[rank] = (uint64_t)image;
	}
	return OK;
}

/* The role of a replica's state dict (state_dict.h); NULL: the job makes none. */
static FALLIBLE enum err replica_role(const struct job *j, json_t **out)
{
	const struct spec_replica *r = &j->spec.replica;

	*out = NULL;
	if (!r->job.p)
		return OK;
	*out = json_pack("{s:{s:s, s:s, s:s, s:s, s:s, s:b}}", "replica", "job", r->job.p, "storage", r->of.storage.p, "name", r->of.name.p,
			 "node", j->spec.source.node.p, "state_dict", j->spec.source.name.p, "part", r->is_part);
	NEED(*out, "cannot describe a replica");
	if (r->hosts.n && json_object_set_new(json_object_get(*out, "replica"), "hosts", json_string(r->hosts.p)) != 0)
		return ERR(NO_MEMORY, "cannot describe a replica");
	return OK;
}

static int64_t source_generation(const struct job *j)
{
	int64_t generation = j->source_use ? j->source_use->generation : j->spec.source.generation;

	return generation > 0 ? generation : 0;
}

static void on_want_segments(void *user, const json_t *body)
{
	struct job *j = user;
	const struct ref *target = &j->spec.target;
	json_int_t world = json_integer_value(json_object_get(body, "world_size"));
	bool next = job_spec_makes_next(j), makes = next || (job_spec_loads(j) && !j->target_use);

	if (target->kind != REF_STATE_DICT || !makes || j->made_use || j->dry_run || j->step != STEP_ON_GANG || world < 1 ||
	    world > STATE_DICT_WORLD_MAX || json_array_size(json_object_get(body, "ranks")) != (size_t)world) {
		gang_abort(j->gang, ERR(PROTOCOL, "a worker asked for segments that do not fit the job"));
		return;
	}
	uint64_t *bytes = mem_zalloc((size_t)world, sizeof *bytes), *images = mem_zalloc((size_t)world, sizeof *images);
	CLEANUP(json_decrefp) json_t *role = NULL;
	enum err e = bytes && images ? read_wanted(body, (uint32_t)world, bytes, images) : ERR(NO_MEMORY, "cannot make segments");
	e = e ? e : replica_role(j, &role);
	if (e) {
		gang_abort(j->gang, e);
	} else {
		struct state_dict_make m = { .name = target->name, .world_size = (uint32_t)world, .bytes = bytes,
					     .image_bytes = images, .who = job_owner(j), .job = j->id,
					     .lease_ms = 1000 * j->spec.lease_seconds, .replica = role, .next_generation = next,
					     .at_least = next ? source_generation(j) : 0 };
		job_move(j, STEP_MAKING, j->state);
		j->alive_ms = clock_service_ms();
		state_dict_make(j->server->state_dicts, &m, on_made, new_ticket(j));
	}
	mem_free(bytes);
	mem_free(images);
}

/* ---- commit ---- */

static void on_may_commit(void *user, enum err e)
{
	struct job *j = take_ticket(user);

	if (!j || !j->gang)
		return;
	j->commit_allowed = !e;
	if (e)
		gang_abort(j->gang, e);
	else
		gang_commit_ok(j->gang);
}

bool job_commit_waits(const struct job *j)
{
	return j->commit_asked && !j->commit_allowed && journal_may_write(j->server->journal) != OK;
}

static void begin_commit(struct job *j)
{
	job_set_state(j, j->step, JOB_COMMITTING, "commit", false);
	struct journal_txn *t = journal_txn_new(j->server->journal);
	job_put_row(t, j, j->state);
	journal_txn_wait(t, mem_free);
	journal_commit(j->server->journal, t, on_may_commit, new_ticket(j));
}

static void on_own(void *user, enum err e)
{
	struct job *j = take_ticket(user);

	if (!j || !j->gang)
		return;
	if (e)
		gang_abort(j->gang, e);
	else if (!j->cancel_wanted)
		begin_commit(j);
}

static void on_want_commit(void *user)
{
	struct job *j = user;

	if (j->commit_asked || j->cancel_wanted || j->dry_run)
		return;
	if (j->await) {
		gang_abort(j->gang, ERR(PROTOCOL, "a worker would commit what is not sealed yet"));
		return;
	}
	enum err e = j->server->hooks->may_commit(j);
	if (e) {
		gang_abort(j->gang, e);
		return;
	}
	j->commit_asked = true;
	j->commit_allowed = false;
	if (j->shared)
		j->server->hooks->confirm(j, on_own, new_ticket(j));
	else
		begin_commit(j);
}

/* ---- the end of an attempt ---- */

static void on_retry_time(void *user)
{
	struct job *j = user;

	j->timer = NULL;
	job_queue(j);
}

/* problem: of the attempt that has just failed; NULL: another one begins. */
static void note_more(struct job *j, const json_t *problem)
{
	json_decref(j->error_more);
	j->error_more = errdoc_more(problem);
}

/* e: how the attempt before ended; OK: with the daemon. */
static void begin_again(struct job *j, enum err e)
{
	if (j->spec.ring) {
		job_fail(j, job_ring_lost(e));
		return;
	}
	note_more(j, NULL);
	j->attempt++;
	j->commit_asked = j->stalled = false;
	j->bytes_done = 0;
	j->rate = 0;
	if (j->made_use) /* by the failed attempt */
		state_dict_drop(&j->made_use);
	e = job_use_target(j);
	if (e) {
		job_fail(j, e);
		return;
	}
	job_set_state(j, STEP_WAITING, JOB_QUEUED, "retry", true);
	if (j->server->draining)
		return; /* the next start takes it up */
	loop_timer_start(j->server->loop, RETRY_MS << (j->attempt < 6 ? j->attempt - 2 : 4), on_retry_time, j, &j->timer);
}

static void fail_or_retry(struct job *j, enum err e)
{
	if (e == ERR_CANCELLED && j->cancel_wanted) {
		json_decref(j->error);
		j->error = errdoc_sure(e);
		job_end(j, JOB_CANCELLED);
	} else if (e == ERR_CANCELLED && j->server->draining) {
		begin_again(j, e);
	} else if ((e == ERR_NOT_SEALED && job_await_rests(j)) || job_retry_from_tier(j, e)) {
		begin_again(j, e);
	} else if (err_blast(e) == ERR_BLAST_GANG && (j->retries_left > 0 || j->spec.ring) && !j->cancel_wanted) {
		j->retries_left -= j->retries_left > 0;
		log_err("job will be tried again", "job", j->id, NULL);
		begin_again(j, e);
	} else {
		job_fail(j, e);
	}
}

struct recovery {
	struct ticket *ticket;
	enum err e;                 /* how the attempt ended; OK: the daemon was restarted */
	struct err_info info;
	int64_t began_ms;
	bool restart;
};

static void ask_recover(struct job *j, struct recovery *r);

static void again_later(void *user)
{
	struct recovery *r = user;
	struct job *j = map_object(&r->ticket->server->jobs->table, str_of(r->ticket->id));

	if (j) {
		j->timer = NULL;
		ask_recover(j, r);
	}
}

static void settle(struct job *j, struct recovery *r, bool committed, const json_t *ok)
{
	struct err_info info = r->info;
	enum err e = r->e;
	bool restart = r->restart;

	mem_free(r);
	if (committed) {
		json_decref(j->result);
		j->result = json_object_get(ok, "result") ? json_incref(json_object_get(ok, "result")) : json_object();
		log_info("job had committed", "job", j->id, NULL);
		job_end(j, JOB_SUCCEEDED);
	} else if (restart && j->cancel_wanted) {
		fail_or_retry(j, ERR(CANCELLED, "cancelled"));
	} else if (restart) {
		begin_again(j, OK);
	} else {
		err_restore(&info);
		fail_or_retry(j, e);
	}
}

static void recovered(struct job *j, struct recovery *r, enum err e, const json_t *ok)
{
	if (j->moved || e == ERR_JOB_MOVED || (!e && r->e == ERR_JOB_MOVED)) {
		struct takeover_outcome o = { .failed = true, .fenced = j->moved || e == ERR_JOB_MOVED, .was_asked = !e,
					      .committed = json_is_true(json_object_get(ok, "committed")) };
		if (takeover_end(&o) != TAKEOVER_SUCCEEDED) {
			mem_free(r->ticket);
			mem_free(r);
			job_fail(j, ERR(JOB_MOVED, "another node has the job"));
			return;
		}
	}
	if (e && err_retryable(e) && clock_mono_ms() - r->began_ms < RECOVER_FOR_MS && !j->server->draining) {
		loop_timer_start(j->server->loop, RECOVER_AGAIN_MS, again_later, r, &j->timer);
		return;
	}
	if (e && j->server->draining) { /* nothing is known: the next start asks again */
		mem_free(r->ticket);
		mem_free(r);
		job_move(j, STEP_WAITING, j->state);
		return;
	}
	mem_free(r->ticket);
	j->takes = j->takes && e;
	if (e && (r->restart || r->e == OK || j->state == JOB_COMMITTING)) {
		bool may = j->takes ? e != ERR_STATE_CONFLICT /* which is an answer */ : j->state == JOB_COMMITTING;
		bool in_doubt = may && (r->e == OK || r->info.in_doubt || err_blast(r->e) == ERR_BLAST_GANG);
		struct err_info info = *err_last();
		mem_free(r);
		err_restore(&info);
		j->outcome_unknown = in_doubt;
		if (in_doubt)
			e = ERR(NOT_DURABLE, "whether '%s' was written or removed is not known: %.600s", j->spec.target.name.p, info.text);
		job_fail(j, e);
		return;
	}
	settle(j, r, !e && json_is_true(json_object_get(ok, "committed")), ok);
}

static struct job *job_recovering(const struct recovery *r)
{
	struct job *j = map_object(&r->ticket->server->jobs->table, str_of(r->ticket->id));

	must(j && j->step == STEP_RECOVERING);
	return j;
}

static void on_compared(void *user, enum err e)
{
	struct recovery *r = user;

	recovered(job_recovering(r), r, e, NULL);
}

static void on_recovered(void *user, enum err e, const json_t *ok, int *)
{
	struct recovery *r = user;
	struct job *j = job_recovering(r);
	const char *other = jval_text(ok, "other");

	if (!e && other[0])
		j->server->hooks->compare(j, other, on_compared, r);
	else
		recovered(j, r, e, ok);
}

static void ask_recover(struct job *j, struct recovery *r)
{
	const struct ref *target = &j->spec.target;
	json_t *q = json_pack("{s:s, s:s, s:s, s:s, s:s}", "op", "recover", "storage", target->storage.p, "name", target->name.p, "job",
			      j->id, "kind", kind_of(j->kind)->name);
	char mark[JOB_MARK_LEN + 1];

	job_id_mark(j->server->journal, mark);
	if (q && j->shared &&
	    (json_object_set_new(q, "mark", json_string(mark)) != 0 || json_object_set_new(q, "turn", json_integer(job_turn(j))) != 0 ||
	     json_object_set_new(q, "takes", json_boolean(j->takes)) != 0)) {
		json_decref(q);
		q = NULL;
	}
	lookup_ask(j->server->lookups, target->storage.p, q, NULL, 0, on_recovered, r);
}

static void recover(struct job *j, enum err e, bool restart)
{
	struct recovery *r = mem_sure(sizeof *r);

	r->ticket = new_ticket(j);
	r->e = e;
	r->restart = restart;
	if (e)
		r->info = *err_last();
	r->began_ms = clock_mono_ms();
	job_move(j, STEP_RECOVERING, j->state);
	snprintf(j->stage, sizeof j->stage, "recover");
	job_changed(j);
	ask_recover(j, r);
}

static void on_ended(void *user, enum err e, const json_t *body)
{
	struct job *j = user;
	const json_t *result = json_object_get(body, "result");
	struct err_info info = *err_last();

	j->gang = NULL;
	if (j->dry_run) {
		job_end_dry_run(j, e, body);
		return;
	}
	job_lane_leave(j);
	if (j->step == STEP_MAKING)
		state_dict_make_stop(j->server->state_dicts, j->spec.target.name);
	job_move(j, STEP_WAITING, j->state);
	j->stalled = false;
	err_restore(&info);
	if (!e) {
		j->trash_ms = json_integer_value(json_object_get(body, "trash_ms"));
		json_decref(j->result);
		j->result = result ? json_incref((json_t *)result) : json_object();
		verdict_warn(j);
		job_note_served(j);
		job_note_tensors(j);
		job_end(j, JOB_SUCCEEDED);
	} else if (e != ERR_NOT_DURABLE && /* a recovery's fsync would prove nothing */
		   (kind_of(j->kind)->writes & REF_CHECKPOINT) &&
		   (j->commit_asked || err_blast(e) == ERR_BLAST_GANG || e == ERR_STORAGE_STALLED || j->shared)) {
		if (e != ERR_CANCELLED)
			note_more(j, body);
		recover(j, e, false);
	} else {
		if (e != ERR_CANCELLED)
			note_more(j, body);
		fail_or_retry(j, e);
	}
}

static bool on_meet(void *user, const json_t *body)
{
	struct job *j = user;

	if (j->kind != JOB_LOAD || !j->spec.spread_nodes.n)
		return false;
	j->server->hooks->spread_meet(j, body);
	return true;
}

static const struct gang_ops gang_calls = { .state = on_state, .meet = on_meet, .progress = on_progress, .moved = on_moved,
					    .want_segments = on_want_segments, .want_commit = on_want_commit, .ended = on_ended };

FALLIBLE enum err job_start_attempt(struct job *j)
{
	struct jobs *all = j->server->jobs;
	json_t *body = NULL;
	int *fds = NULL;
	struct gang_run run = { .job = j->id, .generation = j->server->boot << 32 | (++all->attempts & 0xffffffff),
				.network = job_state_dict_op_network(j) || j->spec.spread_nodes.n,
				.device = job_state_dict_op_device(j), .ops = &gang_calls, .user = j };

	TRY(job_body(j, run.generation, &body, &fds, &run.fd_count));
	run.body = body;
	run.fds = fds;
	if (job_spec_loads(j) && j->target_use && !j->dry_run)
		state_dict_rewrite(j->target_use);
	enum err e = gang_start_run(j->server->gangs, j->storages, j->storage_count, &run, &j->gang);
	json_decref(body);
	mem_free(fds);
	if (e)
		return e;
	j->commit_asked = false;
	j->identity[0] = '\0';
	mem_free(j->followed);
	j->followed = NULL;
	j->streamed = j->await != NULL;
	if (j->spec.ring && !j->await) /* all of it is in the rings already */
		gang_sealed(j->gang);
	j->alive_ms = clock_service_ms();
	j->rate_at_ms = clock_mono_ms();
	if (!j->started_ms) {
		j->started_ms = clock_wall_ms();
		j->begun_ms = clock_mono_ms();
	}
	job_set_state(j, STEP_ON_GANG, JOB_PLANNING, "starting", true);
	return OK;
}

void job_stop(struct job *j)
{
	j->cancel_wanted = true;
	job_changed(j);
	if (j->gang) {
		gang_cancel(j->gang);
	} else if (j->step == STEP_WAITING || j->step == STEP_AWAITING) {
		if (j->lane)
			job_lane_take_out(j);
		loop_timer_stop(&j->timer);
		fail_or_retry(j, ERR(CANCELLED, "cancelled while it waited"));
	}
}

/* ---- after a restart ---- */

void job_begin_taken(struct job *j)
{
	enum err e = job_spec_resolve(j);

	j->shared = true;
	e = e ?: job_take_uses(j);
	if (e)
		job_fail(j, e);
	else if (kind_of(j->kind)->writes & REF_CHECKPOINT)
		recover(j, OK, true);
	else {
		j->attempt++;
		job_queue(j);
	}
}

void job_recover(struct job *j)
{
	bool may_have_committed = j->state != JOB_QUEUED && (kind_of(j->kind)->writes & REF_CHECKPOINT);
	enum err e = job_spec_resolve(j);

	if (!e && !may_have_committed)
		e = job_take_uses(j);
	if (!e && may_have_committed && job_take_uses(j) != OK)
		log_err("the source of a job is gone", "job", j->id, NULL); /* it matters only if the job has not committed */
	if (e) {
		job_fail(j, e);
		return;
	}
	if (may_have_committed) {
		recover(j, OK, true);
		return;
	}
	j->attempt++; /* whatever the last daemon left behind has another name */
	if (j->cancel_wanted)
		fail_or_retry(j, ERR(CANCELLED, "cancelled"));
	else
		job_queue(j);
}

/* ---- stalls ---- */

/* Once in each silence. Of several storages one may be alive: each is asked, and found stalled if it does not answer. */
static void mark_storages(struct job *j)
{
	if (j->marked_ms == j->alive_ms)
		return;
	j->marked_ms = j->alive_ms;
	for (uint32_t i = 0; i < j->storage_count; i++) {
		struct storage *st;
		if (storage_find(j->server->storages, str_of(j->storages[i]), &st) != OK)
			continue;
		if (j->storage_count > 1 && !st->probing)
			storage_probe(j->server->storages, j->server->lookups, st, NULL, NULL);
		else if (j->storage_count == 1)
			storage_set_state(j->server->storages, st, STORAGE_STATE_STALLED);
	}
}

void job_watch(struct server *s)
{
	int64_t now = clock_service_ms();

	for (struct job *j = s->jobs->live, *next; j; j = next) {
		next = j->live_next;
		if (j->step != STEP_ON_GANG || !j->gang)
			continue;
		if (j->await || job_commit_waits(j)) /* for its trainer or the journal, not for its storage */
			j->alive_ms = now;
		if (job_state_dict_op_is(j)) /* planning says little */
			gang_give_up_silent(j->gang, j->server->config->comm_deadline_ms * (j->state == JOB_PLANNING ? 4 : 1));
		int64_t silent = now - j->alive_ms;
		if (silent > s->config->stall_ms && !j->stalled) {
			j->stalled = true;
			job_changed(j);
			log_warn("job is stalled", "job", j->id, "stage", j->stage, NULL);
			job_emit_state(j);
		}
		/* A long calculation is not the storage's fault: a stalled one keeps a worker in one system call. */
		if (silent > SILENT_MS && gang_hangs(j->gang) && j->stalled)
			mark_storages(j);
		if (silent > s->config->stall_deadline_ms) {
			j->alive_ms = now;
			gang_abort(j->gang, ERR(STORAGE_STALLED, "no progress in %jd s, in stage %s",
						(intmax_t)(s->config->stall_deadline_ms / 1000), j->stage));
		}
	}
}
