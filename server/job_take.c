/* job_take.c: jobs of a cluster that change their node: which may, how one comes here, how one goes. Who decides is etcd (cluster_jobs.c,
 * takeover.h); here a job becomes part of this daemon's journal, or ends in it. */
#include <stdio.h>

#include "base/jtext.h"
#include "base/jval.h"
#include "base/log.h"
#include "base/mem.h"
#include "server/config.h"
#include "server/errdoc.h"
#include "server/job_impl.h"
#include "server/parts.h"
#include "server/service_clock.h"
#include "server/storage.h"

/* ---- which ---- */

/* Chains, policies and tiers are each node's own, and wait for the end of their jobs there. */
static bool is_of_this_node(const struct job *j)
{
	static const char *const owners[] = { "chain", "policy", "tier" };
	bool is = j->parent != NULL;

	for (size_t i = 0; i < j->spec.labels.n; i++)
		for (size_t k = 0; k < sizeof owners / sizeof *owners; k++)
			is = is || str_is(j->spec.labels.v[i].left, owners[k]);
	return is;
}

bool job_may_be_shared(const struct job *j)
{
	static const enum job_kind kinds[] = { JOB_RESHARD, JOB_VERIFY, JOB_DIFF,  JOB_DELETE, JOB_STATS,
					       JOB_MERGE,   JOB_INSPECT, JOB_DELTA, JOB_APPLY,  JOB_REPLICATE };
	const struct ref *const refs[] = { &j->spec.source, &j->spec.target, &j->spec.a, &j->spec.b, &j->spec.base };
	bool is = false;

	if (!j->server->config->cluster || j->dry_run || j->spec.in_place != IN_PLACE_NEVER || j->spec.only_if.is_given ||
	    j->spec.hosts.part || j->spec.hosts.count || is_of_this_node(j))
		return false;
	for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
		is = is || j->kind == kinds[i];
	for (size_t i = 0; i < sizeof refs / sizeof *refs; i++)
		is = is && refs[i]->kind != REF_STATE_DICT;
	for (size_t i = 0; i < j->spec.sources.n; i++)
		is = is && j->spec.sources.v[i].kind != REF_STATE_DICT;
	return is;
}

json_t *job_storage_ids(const struct job *j)
{
	json_t *ids = json_object();
	struct storage *st;

	for (uint32_t i = 0; ids && i < j->storage_count; i++) {
		bool there = storage_find(j->server->storages, str_of(j->storages[i]), &st) == OK;
		const char *id = there ? json_string_value(json_object_get(st->probe, "id")) : NULL;
		if (!there)
			err_clear();
		if (!id || json_object_set_new(ids, j->storages[i], json_string(id)) != 0) {
			json_decref(ids);
			ids = NULL;
		}
	}
	return ids;
}

/* ---- it comes ---- */

struct taking {
	struct server *server;
	struct job *job;
	done_fn fn;
	void *user;
};

static void on_taken(void *user, enum err e)
{
	struct taking *t = user;
	struct job *j = t->job;

	if (e) { /* etcd says that it is this node's: the next look takes it up once more */
		struct err_info info = *err_last();
		map_remove(&t->server->jobs->table, str_of(j->id));
		job_live_remove(j);
		job_free(j);
		err_restore(&info);
	} else {
		j->in_journal = true;
		log_info("job taken over", "job", j->id, "kind", kind_of(j->kind)->name, "target", j->target, NULL);
		job_begin_taken(j);
	}
	t->fn(t->user, e);
	mem_free(t);
}

/* A row as this daemon would have written it, of a job that has begun. */
static FALLIBLE enum err load(struct server *s, const json_t *record, struct job **out)
{
	CLEANUP(mem_free_ptr) char *text = jtext_of(record);
	const char *id = jval_text(record, "id");
	const json_t *target = json_object_get(record, "target");
	struct job_load l = { .server = s };
	char shown[4096 + 64] = "";
	enum job_kind kind;
	int64_t created = 0;

	NEED(text, "cannot take a job over");
	if (!job_id_ok(str_of(id)) || !kind_parse(jval_str(record, "kind"), &kind))
		return ERR(CLUSTER_UNAVAILABLE, "etcd holds a job's record that is none of dcpd's");
	if (target)
		snprintf(shown, sizeof shown, "%s:%s", jval_text(target, "storage"), jval_text(target, "name"));
	(void)clock_of_text(jval_text(record, "created_at"), &created);
	bool writes = kind_of(kind)->writes & REF_CHECKPOINT;
	struct journal_job row = { .kind = kind, .state = writes ? JOB_PLANNING : JOB_QUEUED, .attempt = (int)jval_int(record, "attempt"),
				   .uid = (uid_t)jval_int(record, "uid"), .target = shown, .created_ms = created, .doc = str_of(text) };
	memcpy(row.id, id, sizeof row.id);
	enum err e = job_load_row(&l, &row);
	*out = l.job;
	return e;
}

FALLIBLE enum err job_check_take(struct server *s, const json_t *record)
{
	struct job *j = NULL;

	enum err e = load(s, record, &j);
	e = e ?: job_spec_resolve(j);
	struct err_info info = *err_last();
	job_free(j);
	if (e)
		err_restore(&info);
	return e;
}

/* A job that came back after it was given up has an ended row here, which goes. A job that ended here, which etcd does not know, has ended:
 * etcd is told, and *told_out set. ERR_STATE_CONFLICT: it is still being given up. */
static FALLIBLE enum err take_back(struct server *s, const char *id, int64_t token, bool *told_out)
{
	struct job *j;

	*told_out = false;
	if (job_find(s, str_of(id), &j) != OK) {
		err_clear();
		return OK;
	}
	if (j->step != STEP_NONE)
		return ERR(STATE_CONFLICT, "job %s is still being given up", id);
	*told_out = !j->moved;
	if (j->moved) {
		job_cache_remove(j);
		map_remove(&s->jobs->table, str_of(j->id));
		job_free(j);
	} else {
		j->shared = true;
		j->token = j->noted = token;
		s->hooks->job_noted(j);
	}
	return OK;
}

void job_take(struct server *s, const json_t *record, int64_t token, done_fn fn, void *user)
{
	struct taking *t = mem_sure(sizeof *t);
	struct job *j = NULL;

	bool told;

	*t = (struct taking){ .server = s, .fn = fn, .user = user };
	enum err e = take_back(s, jval_text(record, "id"), token, &told);
	if (!e && told) {
		loop_later(s->loop, fn, user, OK);
		mem_free(t);
		return;
	}
	e = e ?: load(s, record, &j);
	e = e ?: map_add(&s->jobs->table, (struct str){ j->id, JOB_ID_LEN }, j);
	if (e) {
		struct err_info info = *err_last();
		job_free(j);
		err_restore(&info);
		loop_later(s->loop, fn, user, e);
		mem_free(t);
		return;
	}
	t->job = j;
	j->shared = j->takes = true;
	j->moved = false;
	j->moved_to[0] = '\0';
	j->token = j->noted = token;
	j->started_ms = j->finished_ms = 0;
	job_live_add(j);
	struct journal_txn *txn = journal_txn_new(s->journal);
	job_put_row(txn, j, j->state);
	for (size_t i = 0; i < j->spec.labels.n; i++)
		journal_put_label(txn, j->id, j->spec.labels.v[i].left, j->spec.labels.v[i].right);
	journal_commit(s->journal, txn, on_taken, t);
}

/* ---- it goes, or stays ---- */

void job_resume(struct job *j)
{
	if (!j->held)
		return;
	j->held = false;
	job_recover(j);
}

static void note_mover(struct job *j, const char *to)
{
	j->moved = true;
	snprintf(j->moved_to, sizeof j->moved_to, "%s", to);
	job_changed(j);
}

void job_give_up(struct job *j, const char *to)
{
	bool known = j->moved && strcmp(j->moved_to, to) == 0;

	if (known)
		return;
	log_warn("job was taken over by another node", "job", j->id, "node", to, NULL);
	note_mover(j, to);
	j->held = false;
	if (j->gang)
		gang_abort(j->gang, ERR(JOB_MOVED, "node \"%s\" has the job", to));
	else if (j->step == STEP_NONE && job_state_ended(j->state)) {
		job_write(j, NULL, NULL); /* its end gives way to the new owner's */
		j->server->hooks->job_gone(j);
	} else if (j->step == STEP_NONE || j->step == STEP_WAITING) {
		if (j->lane)
			job_lane_take_out(j);
		loop_timer_stop(&j->timer);
		job_fail(j, ERR(JOB_MOVED, "node \"%s\" has the job", to));
	}
}
