/* job_lane.c: lanes: which job runs when.
 *
 * A lane runs one job at a time, in order; it is named by what kind of work it is and which storages it touches. So a save waits
 * for saves to the same storage only, never for a long reshard, and a storage that hangs holds up its own lane. */
#include <stdio.h>

#include "base/log.h"
#include "base/mem.h"
#include "server/job_impl.h"
#include "server/journal.h"

enum { NO_GANG_MS = 1000 };

struct lane {
	struct lane *next;
	struct server *server;
	char key[JOB_LANE_MAX];
	struct job *first, **last, *running;
	uint64_t moves;             /* changes of first and running */
	struct loop_timer *timer;
};

static void start_next(struct lane *lane);

static FALLIBLE enum err lane_of(struct job *j, struct lane **out)
{
	struct jobs *all = j->server->jobs;
	char key[JOB_LANE_MAX];
	size_t n = (size_t)snprintf(key, sizeof key, "%s:", j->dry_run ? "plan" : kind_of(j->kind)->lane);

	for (uint32_t i = 0; i < j->storage_count && n < sizeof key; i++)
		n += (size_t)snprintf(key + n, sizeof key - n, "%s,", j->storages[i]);
	/* Saves by several hosts wait for each other's parts: those of two trainings in one lane could wait for ever. */
	const char *source = job_spec_ref(j->spec, "source").state_dict;
	if (source && json_object_get(json_object_get(j->spec, "hosts"), "ranks") && n < sizeof key)
		snprintf(key + n, sizeof key - n, "@%s", source);
	for (struct lane *l = all->lanes; l; l = l->next)
		if (strcmp(l->key, key) == 0) {
			*out = l;
			return OK;
		}
	struct lane *l = mem_zalloc(1, sizeof *l);
	if (!l)
		return ERR(NO_MEMORY, "cannot make a lane");
	memcpy(l->key, key, sizeof key);
	l->server = j->server;
	l->last = &l->first;
	l->next = all->lanes;
	all->lanes = l;
	*out = l;
	return OK;
}

void job_lanes_free(struct jobs *all)
{
	for (struct lane *l = all->lanes, *next; l; l = next) {
		next = l->next;
		loop_timer_stop(&l->timer);
		mem_free(l);
	}
}

static bool waits(const struct job *j)
{
	return j->lane && j->step == STEP_WAITING && j->lane->running != j;
}

uint64_t job_lane_moves(const struct job *j)
{
	return waits(j) ? j->lane->moves : 0;
}

void job_lane_put(const struct job *j, struct buf *out)
{
	uint32_t ahead = 0;
	const struct job *next;

	if (!waits(j))
		return;
	next = j->lane->running ? j->lane->running : j->lane->first;
	for (const struct job *other = j->lane->first; other && other != j; other = other->lane_next)
		ahead++;
	ahead += j->lane->running != NULL;
	if (ahead == 0)
		return;
	buf_printf(out, ",\"waits_for\":{\"job\":\"%s\",\"kind\":\"%s\"", next->id, kind_of(next->kind)->name);
	if (next->target && next->target[0]) {
		buf_puts(out, ",\"target\":");
		buf_json_str(out, str_of(next->target));
	}
	buf_printf(out, ",\"ahead\":%u}", ahead);
}

void job_lane_take_out(struct job *j)
{
	struct lane *l = j->lane;

	l->moves++;
	for (struct job **at = &l->first; *at; at = &(*at)->lane_next)
		if (*at == j) {
			*at = j->lane_next;
			if (!*at)
				l->last = at;
			j->lane_next = NULL;
			j->lane = NULL;
			return;
		}
}

void job_lane_leave(struct job *j)
{
	struct lane *l = j->lane;

	if (!l)
		return;
	j->lane = NULL;
	l->moves++;
	if (l->running == j)
		l->running = NULL;
	start_next(l);
}

static void start_later(void *user, enum err e)
{
	(void)e;
	start_next(user);
}

void job_lanes_wake(struct server *s)
{
	for (struct lane *l = s->jobs->lanes; l; l = l->next)
		loop_later(s->loop, start_later, l, OK);
}

void job_queue(struct job *j)
{
	struct lane *l;

	if (job_await_holds(j))
		return;
	enum err e = lane_of(j, &l);
	if (e) {
		job_fail(j, e);
		return;
	}
	j->step = STEP_WAITING;
	j->queued_ms = clock_mono_ms();
	j->lane = l;
	j->lane_next = NULL;
	*l->last = j;
	l->last = &j->lane_next;
	job_set_state(j, JOB_QUEUED, "waiting", false);
	loop_later(j->server->loop, start_later, l, OK);
}

static void on_gang_time(void *user)
{
	struct lane *l = user;

	l->timer = NULL;
	start_next(l);
}

static void start_next(struct lane *l)
{
	struct job *j = l->first;

	if (l->running || !j || l->server->draining || l->timer || journal_may_write(l->server->journal) != OK)
		return;
	job_lane_take_out(j);
	j->lane = l;
	l->running = j;
	l->moves++;
	enum err e = job_start_attempt(j);
	if (!e)
		return;
	l->running = NULL;
	l->moves++;
	if (e == ERR_TOO_MANY_JOBS) { /* back to the head of the queue */
		j->lane_next = l->first;
		if (!l->first)
			l->last = &j->lane_next;
		l->first = j;
		if (strcmp(j->stage, "waiting_for_workers") != 0)
			job_set_state(j, JOB_QUEUED, "waiting_for_workers", false);
		loop_timer_start(l->server->loop, NO_GANG_MS, on_gang_time, l, &l->timer);
		return;
	}
	if (j->dry_run)
		job_end_dry_run(j, e, NULL);
	else
		job_fail(j, e);
	if (l->first)
		loop_later(l->server->loop, start_later, l, OK);
}
