/* job_all.c: all jobs: those of the journal are taken up at the start; each second stalls are looked for, and old records go. */
#include "base/log.h"
#include "base/mem.h"
#include "base/num.h"
#include "server/service_clock.h"
#include "server/config.h"
#include "server/job_impl.h"
#include "server/parts.h"

enum { TICK_MS = 1000, PRUNE_MS = 60000, KEYS_KEPT_MS = 48 * 3600000, RECALLED_SAVES = 256 };

static enum err take_row(void *user, const struct journal_job *row)
{
	struct job_load l = { .server = user };
	enum err e = job_load_row(&l, row);

	e = e ?: map_add(&l.server->jobs->table, (struct str){ l.job->id, JOB_ID_LEN }, l.job);
	if (e == ERR_NO_MEMORY) { /* its staging would be swept as nobody's: rather no start than one without it */
		job_free(l.job);
		return e;
	}
	if (e) { /* one record that cannot be read must not keep the daemon down */
		log_err("a job cannot be taken up", "job", row->id, NULL);
		job_free(l.job);
		return OK;
	}
	job_live_add(l.job);
	return OK;
}

/* A record that the journal no longer has must not be served from memory either. */
static void on_pruned(void *user, enum err)
{
	struct jobs *all = user;

	while (all->cache_last) {
		struct job *old = all->cache_last;
		job_cache_remove(old);
		map_remove(&all->table, str_of(old->id));
		job_free(old);
	}
}

/* Once a minute, or sooner where many end: then no more than a few above the limit are ever kept. */
static bool prune_due(const struct server *s, int64_t now)
{
	return now - s->jobs->pruned_ms >= PRUNE_MS || s->jobs->ended > s->config->keep_jobs / 32;
}

/* Rows of jobs whose end other nodes have not heard stay: what they are told is read from there. */
static void prune(struct server *s, int64_t now)
{
	struct journal_txn *t = journal_txn_new(s->journal);
	uint64_t untold = s->hooks->jobs_untold(s), keep;

	s->jobs->pruned_ms = now;
	s->jobs->ended = 0;
	if (num_add(s->config->keep_jobs, untold, &keep)) {
		err_clear();
		keep = UINT64_MAX;
	}
	int64_t before_ms = now - s->config->keep_jobs_ms;
	if (untold)
		before_ms = num_min(before_ms, journal_noted_ms(s->journal)); /* what ended before that is told */
	journal_prune(t, keep, before_ms, now - KEYS_KEPT_MS);
	journal_put_service(t, now);
	journal_commit(s->journal, t, on_pruned, s->jobs);
}

static void on_tick(void *user)
{
	struct server *s = user;
	int64_t now = clock_service_ms();

	job_watch(s);
	if (prune_due(s, now))
		prune(s, now);
}

FALLIBLE enum err jobs_new(struct server *s)
{
	s->jobs = mem_zalloc(1, sizeof *s->jobs);
	NEED(s->jobs, "cannot keep jobs");
	s->jobs->start = job_start_attempt;
	return job_ids_resume(s->journal);
}

/* A record that cannot be read costs a load from memory, no more. */
static enum err recall_save(void *user, const struct journal_job *row)
{
	struct job_load l = { .server = user };

	if (job_load_row(&l, row) == OK) {
		const struct state_dict_save save = job_spec_as_save(l.job);
		state_dict_recall(l.server->state_dicts, &l.job->spec.source, &save);
		for (size_t i = 0; i < l.job->spec.parts.n; i++)
			state_dict_recall(l.server->state_dicts, &l.job->spec.parts.v[i], &save);
	}
	err_clear();
	job_free(l.job);
	return OK;
}

FALLIBLE enum err jobs_recover(struct server *s)
{
	static const struct journal_filter saves = { .state = JOB_SUCCEEDED, .kind = JOB_SAVE };

	TRY(journal_read_unended(s->journal, take_row, s));
	TRY(journal_read_jobs(s->journal, &saves, RECALLED_SAVES, recall_save, s));
	for (struct job *j = s->jobs->live, *next; j; j = next) {
		next = j->live_next;
		j->held = j->shared = job_may_be_shared(j);
		if (!j->held)
			job_recover(j);
	}
	s->hooks->jobs_loaded(s);
	state_dicts_settle(s->state_dicts);
	return loop_every(s->loop, TICK_MS, on_tick, s, &s->jobs->tick);
}

void jobs_free(struct jobs *all)
{
	struct job *j;

	if (!all)
		return;
	loop_timer_stop(&all->tick);
	map_each(&all->table, j) {
		for (struct waiter *w = j->waiters, *after; w; w = after) {
			after = w->next;
			loop_timer_stop(&w->timer);
			mem_free(w);
		}
		j->waiters = NULL;
		job_drop_uses(j);
		job_free(j);
	}
	job_lanes_free(all);
	map_free(&all->keys);
	map_free(&all->table);
	mem_free(all);
}
