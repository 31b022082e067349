/* job_end.c: changes of state, and the end of a job: on disk first, then seen by others. */
#include <stdio.h>

#include "base/log.h"
#include "base/mem.h"
#include "server/service_clock.h"
#include "server/errdoc.h"
#include "server/events.h"
#include "server/job_impl.h"
#include "server/metrics.h"
#include "server/parts.h"
#include "server/runs.h"
#include "server/storage.h"
#include "server/verdict.h"

void job_emit_state(const struct job *j)
{
	if (j->dry_run)
		return;
	json_t *doc = json_pack("{s:s, s:s, s:s, s:s, s:i}", "job", j->id, "kind", kind_of(j->kind)->name, "state",
				job_state_text(j->state), "stage", j->stalled ? "stalled" : j->stage, "attempt", j->attempt);
	if (doc && j->error && job_state_ended(j->state))
		json_object_set_new(doc, "error", errdoc_brief(j->error));
	events_emit(j->server->events, "job.state", j->id, doc);
	j->server->hooks->job_noted(j);
}

/* A label's value that others chose: no quotes to escape, and short. */
static bool is_plain(const char *text)
{
	size_t n = text ? strlen(text) : 0;

	return n > 0 && n <= 64 && strspn(text, "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._:/-") == n;
}

/* Stages come from workers: beside words ("copy") there are sentences ("waiting for the other hosts"). */
const char *job_stage_label(const struct job *j)
{
	return is_plain(j->stage) && strlen(j->stage) < STORAGE_STAGE_MAX ? j->stage : "other";
}

static void leave_stage(struct job *j)
{
	int64_t now = clock_mono_ms(), since = j->stage_since_ms;
	char labels[128];

	j->stage_since_ms = now;
	if (!since || j->dry_run || !j->stage[0])
		return;
	snprintf(labels, sizeof labels, "kind=\"%s\",stage=\"%s\"", kind_of(j->kind)->name, job_stage_label(j));
	metrics_observe(j->server->metrics, "dcpd_job_stage_duration_seconds", labels, (double)(now - since) / 1000);
}

/* Notes when the job came to its stage: the record tells how long each one took. */
static void enter_stage(struct job *j)
{
	enum { STAGES_KEPT = 32 };
	char stamp[CLOCK_TEXT_MAX];

	if (j->dry_run || !is_plain(j->stage) || json_array_size(j->stages) >= STAGES_KEPT)
		return;
	if (!j->stages)
		j->stages = json_array();
	json_array_append_new(j->stages, json_pack("{s:s, s:s}", "stage", j->stage, "at", clock_text(clock_wall_ms(), stamp)));
}

void job_set_state(struct job *j, enum job_step step, enum job_state state, const char *stage, bool write)
{
	bool new_state = j->state != state, new_stage = strcmp(j->stage, stage) != 0;

	if (new_stage)
		leave_stage(j);
	job_move(j, step, state);
	snprintf(j->stage, sizeof j->stage, "%s", stage);
	if (new_stage)
		enter_stage(j);
	job_changed(j);
	if (new_state && !j->dry_run)
		log_info("job state", "job", j->id, "state", job_state_text(state), "trace", job_trace_id(j), NULL);
	job_emit_state(j);
	if (write && j->in_journal)
		job_write(j, NULL, NULL);
}

static void count_durable(struct job *j)
{
	struct metrics *m = j->server->metrics;
	json_int_t saved = json_integer_value(json_object_get(j->result, "dedup_bytes_saved"));

	if (saved > 0)
		metrics_add(m, "dcpd_dedup_bytes_saved_total", "", (double)saved);
	if (j->kind == JOB_SAVE && j->sealed_ms)
		metrics_observe(m, "dcpd_save_lag_seconds", "", (double)(clock_mono_ms() - j->sealed_ms) / 1000);
}

/* A copy that stays within its run is no progress of the training. */
static bool is_progress(const struct job *j)
{
	const struct ref *source = &j->spec.source, *target = &j->spec.target;

	return j->kind == JOB_SAVE || source->kind != REF_CHECKPOINT || !str_eq(source->storage, target->storage) ||
	       !str_eq(run_of(source->name.p), run_of(target->name.p));
}

/* A training whose saves are all alike does not train, or saves a copy that nobody renews. */
void job_note_tensors(struct job *j)
{
	const struct ref *target = &j->spec.target;
	const char *digest = json_string_value(json_object_get(j->result, "tensors_digest"));
	char detail[4096], *before;

	if (j->kind == JOB_SAVE && digest && run_note_tensors(j->server->runs, target->storage.p, target->name.p, digest, &before)) {
		snprintf(detail, sizeof detail, "every tensor is what %s%s was saved with: is the state dict the one that is trained?",
			 strcmp(before, target->name.p) == 0 ? "the former " : "", before);
		errdoc_warn(j->result, STALE_SAVE, detail);
		(void)json_object_set_new(j->result, "same_tensors_as",
					  json_pack("{s:s, s:s}", "storage", target->storage.p, "name", before));
		log_warn("stale save", "job", j->id, "name", target->name.p, "before", before, NULL);
		mem_free(before);
	}
	json_object_del(j->result, "tensors_digest");
}

/* A save that another daemon began is measured from nowhere. */
static void note_cost(const struct job *j)
{
	const struct state_dict_use *u = job_saved_use(j);
	int64_t begun = j->kind == JOB_SAVE && j->sealed_ms && j->attempt == 1 && u ? state_dict_begun_ms(u) : 0;

	if (begun)
		run_note_cost(j->server->runs, j->spec.target.storage.p, j->spec.target.name.p, clock_mono_ms() - begun,
			      j->sealed_ms > begun ? j->sealed_ms - begun : 0);
}

static void note_run(struct job *j, struct journal_txn *t)
{
	const struct ref *source = &j->spec.source, *target = &j->spec.target;
	const json_t *generation = json_object_get(j->result, "generation");

	note_cost(j);
	if (j->durable_ms && target->kind == REF_CHECKPOINT && is_progress(j))
		run_note(j->server->runs, t, RUN_DURABLE, target->storage.p, target->name.p,
			 job_step(j, json_is_integer(generation) ? json_integer_value(generation) : -1), j->finished_ms);
	bool whole = j->kind == JOB_VERIFY && source->kind == REF_CHECKPOINT && !job_spec_selects(j);
	if (whole)
		run_note(j->server->runs, t, RUN_VERIFIED_STRUCTURE + j->spec.level, source->storage.p, source->name.p, -1, j->finished_ms);
}

static void count_verify_failure(struct job *j)
{
	char labels[96];

	snprintf(labels, sizeof labels, "level=\"%s\"", field_word(&j->spec, &j->spec.level));
	metrics_add(j->server->metrics, "dcpd_verify_failures_total", labels, 1);
}

static void count_moved(struct job *j)
{
	const char *backend = json_string_value(json_object_get(j->result, "backend"));
	json_int_t moved = json_integer_value(json_object_get(j->result, "moved_bytes"));
	char labels[96];

	snprintf(labels, sizeof labels, "kind=\"%s\",backend=\"%s\"", kind_of(j->kind)->name, is_plain(backend) ? backend : "");
	if (moved >= 0)
		metrics_add(j->server->metrics, "dcpd_comm_bytes_total", labels, (double)moved);
}

static void announce_stale(struct job *j)
{
	const json_t *before = json_object_get(j->result, "same_tensors_as");
	const struct ref *target = &j->spec.target;

	if (!before)
		return;
	metrics_add(j->server->metrics, "dcpd_stale_saves_total", "", 1);
	events_emit(j->server->events, "checkpoint.stale", j->id,
		    json_pack("{s:s, s:s, s:s, s:O}", "storage", target->storage.p, "name", target->name.p, "job", j->id,
			      "same_tensors_as", before));
}

static void count_removal(struct job *j)
{
	const char *by = "request";
	char labels[64];

	for (size_t i = 0; i < j->spec.labels.n; i++)
		by = str_is(j->spec.labels.v[i].left, "policy") ? "policy" : by;
	snprintf(labels, sizeof labels, "by=\"%s\",to=\"%s\"", by, j->spec.trash_ms ? "trash" : "nowhere");
	metrics_add(j->server->metrics, "dcpd_checkpoints_removed_total", labels, 1);
	metrics_add(j->server->metrics, "dcpd_checkpoint_removed_bytes_total", labels,
		    (double)json_integer_value(json_object_get(j->result, "bytes")));
}

static void announce(struct job *j)
{
	struct server *s = j->server;
	char labels[96];
	double seconds = (double)(clock_mono_ms() - j->begun_ms) / 1000;
	const struct ref *target = &j->spec.target;

	log_info("job ended", "job", j->id, "kind", kind_of(j->kind)->name, "state", job_state_text(j->state), "code",
		 j->error ? json_string_value(json_object_get(j->error, "code")) : "ok", "trace", job_trace_id(j), NULL);
	snprintf(labels, sizeof labels, "kind=\"%s\",outcome=\"%s\"", kind_of(j->kind)->name,
		 j->moved ? "moved" : job_state_text(j->state));
	metrics_add(s->metrics, "dcpd_jobs_total", labels, 1);
	snprintf(labels, sizeof labels, "kind=\"%s\"", kind_of(j->kind)->name);
	metrics_observe(s->metrics, "dcpd_job_duration_seconds", labels, seconds);
	job_emit_state(j);
	if (j->moved) /* the node that has it tells of its end */
		return;
	job_tell_stream(j);
	if (j->state == JOB_FAILED && j->kind == JOB_VERIFY)
		count_verify_failure(j);
	if (j->state != JOB_SUCCEEDED)
		return;
	if (job_spec_writes_checkpoint(j)) {
		if (j->durable_ms)
			count_durable(j);
		events_emit(s->events, "checkpoint.committed", j->id,
			    json_pack("{s:s, s:s, s:s}", "storage", target->storage.p, "name", target->name.p, "job", j->id));
		announce_stale(j);
	}
	if (kind_is(j->kind, KIND_REMOVES))
		count_removal(j);
	metrics_add(s->metrics, "dcpd_job_bytes_total", labels, (double)j->bytes_done);
	if (job_state_dict_op_is(j))
		count_moved(j);
}

static void on_end_time(void *user)
{
	struct job *j = user;

	j->timer = NULL;
	job_end(j, j->end_state);
}

static void on_end_journalled(void *user, enum err e)
{
	struct job *j = user;

	if (e) { /* the end must not be seen before it is on disk */
		log_err("the end of a job cannot be journalled", "job", j->id, NULL);
		loop_timer_start(j->server->loop, 1000, on_end_time, j, &j->timer);
		return;
	}
	job_move(j, STEP_NONE, j->end_state);
	if (j->made_use)
		state_dict_announce(j->made_use);
	state_dict_unuse(&j->made_use);
	job_drop_sources(j);
	mem_free(j->plan);
	mem_free(j->replicas_short);
	j->plan = j->replicas_short = NULL;
	j->in_journal = true;
	job_changed(j);
	job_live_remove(j);
	job_cache_add(j);
	j->server->jobs->ended++;
	announce(j);
	if (j->moved)
		j->server->hooks->job_gone(j);
	else
		j->server->hooks->job_ended(j);
	job_wake(j);
}

/* A list that is asked for from now on sees what the job did, whatever the file system's times say. */
static void note_commit(const struct job *j)
{
	struct storage *st;

	if (j->spec.target.storage.p && storage_find(j->server->storages, j->spec.target.storage, &st) == OK)
		st->commits++;
}

static void end_marked(struct job *j)
{
	job_end(j, j->end_state);
}

static void end_moved(struct job *j)
{
	json_decref(j->error);
	j->error = errdoc_sure(ERR(JOB_MOVED, "job %s was taken over by %s%s%s while this one was away", j->id,
				     j->moved_to[0] ? "node \"" : "another node", j->moved_to, j->moved_to[0] ? "\"" : ""));
	job_end(j, JOB_FAILED);
}

static void on_confirmed(void *user, enum err e)
{
	struct job *j = user;

	j->confirmed = true;
	j->moved = j->moved || e == ERR_JOB_MOVED;
	if (j->moved)
		end_moved(j);
	else
		job_end(j, j->end_state);
}

void job_end(struct job *j, enum job_state state)
{
	job_move(j, STEP_ENDING, j->state);
	j->end_state = state;
	if (j->shared && !j->moved && !j->confirmed) {
		j->server->hooks->confirm(j, on_confirmed, j);
		return;
	}
	if (state == JOB_SUCCEEDED && job_marks_put(j, end_marked))
		return;

	struct journal_txn *t = journal_txn_new(j->server->journal);
	uint64_t failures = mem_failures();
	const struct state_dict_save save = job_spec_as_save(j);
	enum err e = OK;
	j->finished_ms = clock_wall_ms();
	leave_stage(j);
	j->stage[0] = '\0';
	j->stalled = false;
	job_note_seen(j);
	if (state == JOB_SUCCEEDED) {
		json_decref(j->error);
		j->error = NULL;
		bool unsynced = !j->spec.sync_files;
		if (job_spec_writes_checkpoint(j) && !unsynced)
			j->durable_ms = j->finished_ms;
		if (j->replicas_short)
			errdoc_warn(j->result, JOB_NOT_REPLICATED, j->replicas_short);
		if (j->kind == JOB_SAVE && j->source_use)
			state_dict_saved(j->source_use, &save);
		for (uint32_t i = 0; j->kind == JOB_SAVE && i < j->part_count; i++)
			state_dict_saved(j->part_uses[i], &save);
		if (j->bytes_total > j->bytes_done)
			j->bytes_done = j->bytes_total;
		if (j->made_use)
			e = state_dict_keep(j->made_use, t);
		job_state_dict_op_note_result(j);
		note_run(j, t);
	} else if (j->made_use) {
		state_dict_drop(&j->made_use);
	}
	if (j->kind == JOB_SAVE && state != JOB_SUCCEEDED && j->snapshotted_ms)
		run_put(j->server->runs, t, j->spec.target.storage.p, j->spec.target.name.p);
	if (e)
		log_err("cannot keep what a job made", "job", j->id, NULL);
	note_commit(j);
	if (j->identity[0])
		errdoc_set(state == JOB_SUCCEEDED ? j->result : j->error, "identity", json_string(j->identity));
	job_changed(j);
	job_put_row(t, j, state);
	if (!j->moved) {
		j->verdict = verdict_note(t, j);
		job_tell_followers(t, j);
	}
	if (mem_failures() != failures) /* something may be missing: it ends again in a moment */
		journal_txn_fail(t, ERR(NO_MEMORY, "no memory to describe the end of a job"));
	job_changed(j);
	journal_txn_wait(t, NULL);
	journal_commit(j->server->journal, t, on_end_journalled, j);
}

void job_fail(struct job *j, enum err e)
{
	if (e == ERR_JOB_MOVED) {
		j->moved = true;
		end_moved(j);
		return;
	}
	json_decref(j->error);
	j->error = errdoc_sure(e);
	errdoc_add(j->error, j->error_more);
	json_decref(j->error_more);
	j->error_more = NULL;
	log_err("job failed", "job", j->id, NULL);
	job_end(j, JOB_FAILED);
}
