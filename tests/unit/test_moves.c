/* The lives of jobs, slots and gangs: each legal move passes, each other one is refused, and asserted. */
#include <signal.h>
#include <sqlite3.h>
#include <sys/wait.h>
#include <unistd.h>

#include "lib/t_server.h"
#include "server/gang.h"
#include "server/job_impl.h"
#include "server/state_dict_impl.h"

struct pair {
	int from, to;
};

static bool listed(const struct pair *pairs, size_t n, int from, int to)
{
	for (size_t i = 0; i < n; i++)
		if (pairs[i].from == from && pairs[i].to == to)
			return true;
	return false;
}

#define LISTED(pairs, from, to) listed(pairs, sizeof(pairs) / sizeof *(pairs), from, to)

/* In a process of its own: must() ends it with SIGABRT. */
static bool aborts(void (*fn)(void *), void *arg)
{
	int status = 0;
	pid_t pid = fork();

	assert_true(pid >= 0);
	if (pid == 0) {
		if (!freopen("/dev/null", "w", stderr))
			_exit(0);
		signal(SIGABRT, SIG_DFL); /* not the test library's */
		fn(arg);
		_exit(0);
	}
	assert_int_equal(waitpid(pid, &status, 0), pid);
	assert_true((WIFEXITED(status) && WEXITSTATUS(status) == 0) || (WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT));
	return WIFSIGNALED(status);
}

/* ---- slots ---- */

static const struct pair slot_moves[] = {
	{ SLOT_FREE, SLOT_OPEN }, { SLOT_FREE, SLOT_MAKING }, { SLOT_OPEN, SLOT_OPEN },
	{ SLOT_OPEN, SLOT_MAKING }, { SLOT_OPEN, SLOT_SEALING }, { SLOT_OPEN, SLOT_LEAVING },
	{ SLOT_OPEN, SLOT_FREEING }, { SLOT_SEALED, SLOT_LEAVING }, { SLOT_SEALED, SLOT_FREEING },
	{ SLOT_LEAVING, SLOT_FREEING }, { SLOT_MAKING, SLOT_OPEN }, { SLOT_MAKING, SLOT_FILLING },
	{ SLOT_MAKING, SLOT_FREE }, { SLOT_SEALING, SLOT_SEALED }, { SLOT_SEALING, SLOT_OPEN },
	{ SLOT_FREEING, SLOT_FREE }, { SLOT_FREEING, SLOT_LEAVING }, { SLOT_FILLING, SLOT_SEALED },
	{ SLOT_FILLING, SLOT_FREE },
};

struct slot_case {
	struct slot slot;
	enum slot_state to;
};

static void move_slot(void *user)
{
	struct slot_case *c = user;

	slot_move(&c->slot, c->to);
	assert_int_equal(c->slot.state, c->to);
}

static void test_slot_moves(void **state)
{
	static const int states[] = { SLOT_FREE,   SLOT_OPEN,    SLOT_SEALED,  SLOT_LEAVING,
				      SLOT_MAKING, SLOT_SEALING, SLOT_FREEING, SLOT_FILLING };

	(void)state;
	for (size_t i = 0; i < sizeof states / sizeof *states; i++)
		for (size_t k = 0; k < sizeof states / sizeof *states; k++) {
			struct slot_case c = { .slot = { .state = (uint8_t)states[i] }, .to = (enum slot_state)states[k] };
			bool legal = LISTED(slot_moves, states[i], states[k]);
			if (slot_may_move(&c.slot, c.to) != legal || aborts(move_slot, &c) == legal)
				T_FAIL("slot %d -> %d", states[i], states[k]);
		}
}

/* ---- gangs ---- */

static void test_gang_moves(void **state)
{
	static const struct pair legal[] = { { GANG_STARTING, GANG_BUSY }, { GANG_IDLE, GANG_BUSY },   { GANG_BUSY, GANG_IDLE },
					     { GANG_STARTING, GANG_ENDING }, { GANG_IDLE, GANG_ENDING }, { GANG_BUSY, GANG_ENDING } };

	(void)state;
	for (int from = 0; from < GANG_STATES; from++)
		for (int to = 0; to < GANG_STATES; to++)
			if (gang_may_move((enum gang_state)from, (enum gang_state)to) != LISTED(legal, from, to))
				T_FAIL("gang %d -> %d", from, to);
}

/* ---- jobs ---- */

static const struct pair step_moves[] = {
	{ STEP_NONE, STEP_AWAITING }, { STEP_NONE, STEP_WAITING }, { STEP_NONE, STEP_RECOVERING },
	{ STEP_NONE, STEP_ENDING }, { STEP_AWAITING, STEP_AWAITING }, { STEP_AWAITING, STEP_WAITING },
	{ STEP_AWAITING, STEP_ENDING }, { STEP_WAITING, STEP_WAITING }, { STEP_WAITING, STEP_AWAITING },
	{ STEP_WAITING, STEP_ON_GANG }, { STEP_WAITING, STEP_RECOVERING }, { STEP_WAITING, STEP_ENDING },
	{ STEP_RECOVERING, STEP_WAITING }, { STEP_RECOVERING, STEP_ENDING }, { STEP_ON_GANG, STEP_ON_GANG },
	{ STEP_ON_GANG, STEP_MAKING }, { STEP_ON_GANG, STEP_WAITING }, { STEP_MAKING, STEP_MAKING },
	{ STEP_MAKING, STEP_ON_GANG }, { STEP_MAKING, STEP_WAITING }, { STEP_ENDING, STEP_ENDING },
	{ STEP_ENDING, STEP_NONE },
};

static const struct pair state_moves[] = {
	{ JOB_QUEUED, JOB_QUEUED }, { JOB_QUEUED, JOB_PLANNING }, { JOB_QUEUED, JOB_FAILED },
	{ JOB_QUEUED, JOB_CANCELLED }, { JOB_PLANNING, JOB_QUEUED }, { JOB_PLANNING, JOB_PLANNING },
	{ JOB_PLANNING, JOB_RUNNING }, { JOB_PLANNING, JOB_COMMITTING }, { JOB_PLANNING, JOB_SUCCEEDED },
	{ JOB_PLANNING, JOB_FAILED }, { JOB_PLANNING, JOB_CANCELLED }, { JOB_RUNNING, JOB_QUEUED },
	{ JOB_RUNNING, JOB_RUNNING }, { JOB_RUNNING, JOB_COMMITTING }, { JOB_RUNNING, JOB_SUCCEEDED },
	{ JOB_RUNNING, JOB_FAILED }, { JOB_RUNNING, JOB_CANCELLED }, { JOB_COMMITTING, JOB_QUEUED },
	{ JOB_COMMITTING, JOB_COMMITTING }, { JOB_COMMITTING, JOB_SUCCEEDED }, { JOB_COMMITTING, JOB_FAILED },
	{ JOB_COMMITTING, JOB_CANCELLED }, { JOB_FAILED, JOB_QUEUED }, { JOB_CANCELLED, JOB_QUEUED },
};

/* The state of a job at a step, whatever the way there. */
static bool fits(int step, int state)
{
	if (step == STEP_NONE)
		return state >= JOB_SUCCEEDED;
	if (step == STEP_AWAITING)
		return state == JOB_QUEUED;
	if (step == STEP_WAITING || step == STEP_ENDING)
		return state < JOB_SUCCEEDED;
	return state > JOB_QUEUED && state < JOB_SUCCEEDED;
}

struct job_case {
	struct job job;
	enum job_step step;
	enum job_state state;
};

static void move_job(void *user)
{
	struct job_case *c = user;

	job_move(&c->job, c->step, c->state);
	assert_true(c->job.step == c->step && c->job.state == c->state);
}

static void check_job(int step, int state, int to_step, int to_state)
{
	struct job_case c = { .job = { .step = (enum job_step)step, .state = (enum job_state)state },
			      .step = (enum job_step)to_step, .state = (enum job_state)to_state };
	bool legal = LISTED(step_moves, step, to_step) && LISTED(state_moves, state, to_state) && fits(to_step, to_state);

	if (job_may_move(&c.job, c.step, c.state) != legal)
		T_FAIL("job: step %d state %d -> step %d state %d", step, state, to_step, to_state);
	/* A process for each of 2,401 would take long: those that are refused one at a time, for each pair of steps. */
	if ((legal || (state == JOB_RUNNING && to_state == JOB_RUNNING)) && aborts(move_job, &c) == legal)
		T_FAIL("job_move: step %d state %d -> step %d state %d", step, state, to_step, to_state);
}

static void test_job_moves(void **state)
{
	(void)state;
	for (int step = 0; step < STEP_COUNT; step++)
		for (int from = 0; from < JOB_STATE_COUNT; from++)
			for (int to_step = 0; to_step < STEP_COUNT; to_step++)
				for (int to = 0; to < JOB_STATE_COUNT; to++)
					check_job(step, from, to_step, to);
}

/* ---- a job that would have ended twice ---- */

static void in_journal(const struct t_server *t, const char *sql)
{
	char path[128];
	sqlite3 *db;

	snprintf(path, sizeof path, "%s/state/journal.db", t->dir);
	assert_int_equal(sqlite3_open(path, &db), SQLITE_OK);
	sqlite3_busy_timeout(db, 10000);
	assert_int_equal(sqlite3_exec(db, sql, NULL, NULL, NULL), SQLITE_OK);
	sqlite3_close(db);
}

/* The retry cannot be written down, and the job is cancelled meanwhile. */
static void test_cancel_of_a_retry_that_fails(void **state)
{
	struct t_answer retried = { 0 }, cancelled = { 0 };
	struct t_server t = { 0 };
	char id[27];

	(void)state;
	t_server_start(&t, NULL);
	t_state_dict(&t, "train", 1);
	t_seal_all(&t, "train", 1, 1);
	t_job(&t, "{'kind':'save','source':{'state_dict':'train'},'target':{'storage':'main','name':'a'},"
		  "'labels':{'fake':'fail:digest_mismatch'}}", id);
	assert_int_equal(t_job_end(&t, id), JOB_FAILED);
	in_journal(&t, "ALTER TABLE jobs RENAME TO away");
	job_retry(t.s, &t.me, str_of(id), t_done, &retried);
	job_cancel(t.s, &t.me, str_of(id), t_done, &cancelled);
	t_server_until(&t, &retried.called);
	assert_int_equal(retried.e, ERR_JOURNAL);
	in_journal(&t, "ALTER TABLE away RENAME TO jobs");
	t_server_until(&t, &cancelled.called);
	T_OK(cancelled.e);
	assert_int_equal(t_job_end(&t, id), JOB_CANCELLED);
	t_server_run(&t, 1500); /* so long an end waits that could not be written */
	assert_int_equal(jobs_live(t.s), 0);
	t_job(&t, "{'kind':'save','source':{'state_dict':'train'},'target':{'storage':'main','name':'b'}}", id);
	assert_int_equal(t_job_end(&t, id), JOB_SUCCEEDED);
	t_server_remove(&t);
}

int main(void)
{
	static const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_slot_moves),
		cmocka_unit_test(test_gang_moves),
		cmocka_unit_test(test_job_moves),
		cmocka_unit_test(test_cancel_of_a_retry_that_fails),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
