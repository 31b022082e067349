/* job_move.c: the only place where a job's state and step change, by a table of legal moves. A move that is not in the table is an error of
 * the daemon's own: it ends rather than write a record that cannot be. */
#include "server/job_impl.h"

#define B(x) (1u << (x))

enum {
	LIVE = B(JOB_QUEUED) | B(JOB_PLANNING) | B(JOB_RUNNING) | B(JOB_COMMITTING),
	RUNS = B(JOB_PLANNING) | B(JOB_RUNNING) | B(JOB_COMMITTING),
	ENDED = B(JOB_SUCCEEDED) | B(JOB_FAILED) | B(JOB_CANCELLED),
};

/* The legal moves of a job. Back to the queue: its attempt failed, or the daemon was restarted. */
static const uint8_t state_moves[JOB_STATE_COUNT] = {
	[JOB_QUEUED] = B(JOB_QUEUED) | B(JOB_PLANNING) | B(JOB_FAILED) | B(JOB_CANCELLED),
	[JOB_PLANNING] = LIVE | ENDED,
	[JOB_RUNNING] = B(JOB_QUEUED) | B(JOB_RUNNING) | B(JOB_COMMITTING) | ENDED,
	[JOB_COMMITTING] = B(JOB_QUEUED) | B(JOB_COMMITTING) | ENDED,
	[JOB_FAILED] = B(JOB_QUEUED),           /* a retry */
	[JOB_CANCELLED] = B(JOB_QUEUED),
};

static const uint8_t step_moves[STEP_COUNT] = {
	[STEP_NONE] = B(STEP_AWAITING) | B(STEP_WAITING) | B(STEP_RECOVERING) | B(STEP_ENDING),
	[STEP_AWAITING] = B(STEP_AWAITING) | B(STEP_WAITING) | B(STEP_ENDING),
	[STEP_WAITING] = B(STEP_WAITING) | B(STEP_AWAITING) | B(STEP_RECOVERING) | B(STEP_ON_GANG) | B(STEP_ENDING),
	[STEP_RECOVERING] = B(STEP_WAITING) | B(STEP_ENDING),
	[STEP_ON_GANG] = B(STEP_ON_GANG) | B(STEP_MAKING) | B(STEP_WAITING),
	[STEP_MAKING] = B(STEP_MAKING) | B(STEP_ON_GANG) | B(STEP_WAITING),
	[STEP_ENDING] = B(STEP_ENDING) | B(STEP_NONE),      /* once more, if the journal could not be written */
};

/* The states that a job may be in at a step it goes to. */
static const uint8_t step_states[STEP_COUNT] = {
	[STEP_NONE] = ENDED,
	[STEP_AWAITING] = B(JOB_QUEUED),
	[STEP_WAITING] = LIVE,
	[STEP_RECOVERING] = RUNS,
	[STEP_ON_GANG] = RUNS,
	[STEP_MAKING] = RUNS,
	[STEP_ENDING] = LIVE,
};

bool job_may_move(const struct job *j, enum job_step step, enum job_state state)
{
	return state_moves[j->state] & B(state) && step_moves[j->step] & B(step) && step_states[step] & B(state);
}

void job_move(struct job *j, enum job_step step, enum job_state state)
{
	must(job_may_move(j, step, state));
	j->step = step;
	j->state = state;
}

void job_take_up(struct job *j, enum job_state state)
{
	must(j->step == STEP_NONE && j->state == JOB_QUEUED);
	j->state = state;
}
