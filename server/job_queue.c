/* job_queue.c: which job runs when: a job takes its place in its lane, the first one of a lane starts when the one before has left.
 *
 * A save whose source is not sealed has no place yet (job_await.c). Starting is job_run.c's, which stands above: see struct jobs. */
#include "server/service_clock.h"
#include "server/job_impl.h"
#include "server/parts.h"

enum { NO_GANG_MS = 1000 };

static void start_next(struct lane *lane);

bool job_await_wanted(const struct job *j)
{
	return j->kind == JOB_SAVE && !j->dry_run && j->spec.await_seal;
}

void job_show_missing(struct job *j)
{
	char text[JOB_STAGE_MAX];

	state_dict_await_missing(j->await, text, sizeof text);
	if (strcmp(text, j->stage) != 0)
		job_set_state(j, STEP_AWAITING, JOB_QUEUED, text, false);
}

static bool awaits(struct job *j)
{
	if (!job_await_wanted(j) || (job_await_has_use(j) && !j->lost.code && !(j->await && j->resting)))
		return false;
	if (j->lost.code) {
		err_restore(&j->lost);
		job_fail(j, j->lost.code);
		return true;
	}
	job_move(j, STEP_AWAITING, JOB_QUEUED);
	job_show_missing(j);
	return true;
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

static void start_later(void *user, enum err)
{
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

	if (awaits(j))
		return;
	enum err e = job_lane_of(j, &l);
	if (e) {
		job_fail(j, e);
		return;
	}
	j->queued_ms = clock_mono_ms();
	j->lane = l;
	j->lane_next = NULL;
	*l->last = j;
	l->last = &j->lane_next;
	job_set_state(j, STEP_WAITING, JOB_QUEUED, "waiting", false);
	loop_later(j->server->loop, start_later, l, OK);
}

void job_end_dry_run(struct job *j, enum err e, const json_t *body)
{
	job_planned_fn fn = j->planned;
	void *user = j->planned_user;
	struct err_info info = *err_last();

	job_lane_leave(j);
	job_drop_uses(j);
	job_live_remove(j);
	job_free(j);
	err_restore(&info);
	if (!e && !json_object_get(body, "plan"))
		e = ERR(PROTOCOL, "a dry run ended without a plan");
	fn(user, e, e ? NULL : json_object_get(body, "plan"));
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
	enum err e = l->server->jobs->start(j);
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
			job_set_state(j, STEP_WAITING, JOB_QUEUED, "waiting_for_workers", false);
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
