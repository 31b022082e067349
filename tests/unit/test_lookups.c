/* Questions to workers for look-ups (server/lookup.h), over fake workers. */
#include "lib/t_trained.h"

#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "server/lookup.h"
#include "server/storage.h"
#include "server/worker.h"

static int setup_deadline(void **state)
{
	static const char *const options[] = { "--lookup-deadline", "3s", NULL };

	(void)state;
	return t_server_train(&t, options);
}

static void test_a_worker_hangs(void **state)
{
	struct t_answer a;
	char path[256], id[27];

	(void)state;
	snprintf(path, sizeof path, "%s/main/.hang", t.dir);
	close(open(path, O_CREAT | O_WRONLY, 0644));
	T_ERR(STORAGE_STALLED, t_job_try(&t, SAVE("a", ""), &a));
	struct storage *st;
	T_OK(storage_find(t.s->storages, STR("main"), &st));
	assert_int_equal(st->state, STORAGE_STATE_STALLED);
	T_ERR(STORAGE_STALLED, t_job_try(&t, SAVE("a", ""), &a)); /* at once now */
	t_job(&t, "{'kind':'save','source':{'state_dict':'train'},'target':{'storage':'other','name':'c'}}", id);
	assert_int_equal(t_job_end(&t, id), JOB_SUCCEEDED);
	unlink(path);
	T_UNTIL(&t, st->state == STORAGE_OK); /* a probe finds out */
}

static void on_answer(void *user, enum err e, const json_t *ok, int *fd)
{
	struct t_answer *a = user;

	assert_int_equal(*fd, -1);
	t_done(a, e);
	a->doc = ok ? json_deep_copy(ok) : NULL;
}

/* Questions about segments go to a worker without any root; workers are kept warm and listed. */
static void test_workers_of_questions(void **state)
{
	struct t_answer a = { 0 }, b = { 0 };
	struct buf text = BUF_INIT(1 << 20);
	char id[27];

	(void)state;
	state_dict_ask(t.s->state_dicts, &t.me, STR("train"), -1, json_pack("{s:s}", "op", "tensors"), on_answer, &a);
	t_server_until(&t, &a.called);
	T_OK(a.e);
	const json_t *echo = json_object_get(a.doc, "echo");
	assert_int_equal(json_array_size(json_object_get(echo, "ranks")), 2);
	assert_int_equal(json_integer_value(json_object_get(echo, "generation")), 7);
	json_decref(a.doc);
	state_dict_ask(t.s->state_dicts, &t.me, STR("none"), -1, json_pack("{s:s}", "op", "tensors"), on_answer, &b);
	t_server_until(&t, &b.called);
	assert_int_equal(b.e, ERR_NOT_FOUND);
	t_job(&t, SAVE("w1", ""), id);
	t_job_end(&t, id);
	assert_int_equal(workers_count(t.s->workers, "gang", "idle"), 2);
	t_job(&t, SAVE("w2", ""), id);
	t_job_end(&t, id);
	assert_int_equal(workers_count(t.s->workers, "gang", NULL), 2); /* the same ones */
	T_OK(worker_put_page(t.s->workers, 1000, UINT64_MAX, &text));
	buf_putc(&text, 0);
	assert_non_null(strstr((char *)text.p, "\"role\":\"gang\",\"index\":1,\"state\":\"idle\""));
	buf_free(&text);
}

/* Of those workers for look-ups that are in this state. */
static int signal_workers(const char *in, int signal)
{
	struct buf text = BUF_INIT(1 << 20);
	json_error_t error;
	siginfo_t gone;
	const json_t *w;
	int n = 0;
	size_t i;

	T_OK(worker_put_page(t.s->workers, 1000, UINT64_MAX, &text));
	json_t *page = json_loadb((char *)text.p, text.len, 0, &error);
	json_array_foreach(json_object_get(page, "workers"), i, w) {
		pid_t pid = (pid_t)json_integer_value(json_object_get(w, "pid"));
		if (strcmp(json_string_value(json_object_get(w, "role")), "lookup") != 0 ||
		    strcmp(json_string_value(json_object_get(w, "state")), in) != 0)
			continue;
		assert_int_equal(kill(pid, signal), 0);
		if (signal == SIGKILL)
			assert_int_equal(waitid(P_PID, (id_t)pid, &gone, WEXITED | WNOWAIT), 0);
		n++;
	}
	json_decref(page);
	buf_free(&text);
	return n;
}

static void ask_tensors(struct t_answer *a)
{
	*a = (struct t_answer){ 0 };
	state_dict_ask(t.s->state_dicts, &t.me, STR("train"), -1, json_pack("{s:s}", "op", "tensors"), on_answer, a);
}

static void assert_answered(struct t_answer *a)
{
	t_server_until(&t, &a->called);
	T_OK(a->e);
	json_decref(a->doc);
}

/* Both workers of a pool die before the daemon knows of either: who asks meanwhile does not hear of it. */
static void test_all_workers_die(void **state)
{
	static struct t_answer a, b; /* a question may outlive a test that fails */

	(void)state;
	ask_tensors(&a);
	ask_tensors(&b);
	assert_answered(&a);
	assert_answered(&b);
	assert_true(signal_workers("idle", SIGSTOP) > 1);
	ask_tensors(&a);
	T_UNTIL(&t, signal_workers("busy", SIGKILL) == 1);
	assert_true(signal_workers("idle", SIGKILL) > 0);
	assert_answered(&a);
}

static void kill_resting_workers(void)
{
	T_UNTIL(&t, (signal_workers("idle", SIGKILL), workers_count(t.s->workers, "lookup", NULL) == 0));
}

/* A worker that is killed while it starts is started again; a pool whose workers all die in their start says so in the end. A killed worker
 * may have said before that it is ready: such a worker counts as lost with its question, and the pool counts anew. */
static void test_workers_die_while_they_start(void **state)
{
	enum { POOLS = 2, TRIES = 3 }; /* questions about segments: those of callers, and looks at what was sealed */
	static struct t_answer a;
	int killed = 0;

	(void)state;
	ask_tensors(&a);
	assert_answered(&a);
	kill_resting_workers();
	for (ask_tensors(&a); signal_workers("starting", SIGKILL) == 0; t_server_run(&t, 0))
		assert_false(a.called);
	assert_answered(&a);
	kill_resting_workers();
	for (ask_tensors(&a); !a.called; t_server_run(&t, 0))
		killed += signal_workers("starting", SIGKILL);
	assert_int_equal(a.e, ERR_WORKER_LOST);
	assert_in_range(killed, 2, POOLS * TRIES * TRIES);
}

#define WITH(begin, fn) cmocka_unit_test_setup_teardown(fn, begin, teardown)
int main(void)
{
	const struct CMUnitTest tests[] = {
		WITH(setup_deadline, test_a_worker_hangs),
		WITH(setup, test_workers_of_questions),
		WITH(setup, test_all_workers_die),
		WITH(setup, test_workers_die_while_they_start),
	};

	return cmocka_run_group_tests_name("lookups", tests, NULL, NULL);
}
