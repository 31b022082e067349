/* Saves that are made before their source is sealed, over a gang of fake workers: they do not wait for the seal, so that what is tested is
 * what the coordinator makes of them. */
#include "lib/t_server.h"

#include <string.h>
#include <sys/stat.h>

#include "server/storage.h"

enum { IMAGE = 9000, ROOM = 16384 };

static struct t_server t;

static int setup(void **state)
{
	static const char *const options[] = { "--stall-after", "300ms", "--stall-deadline", "5s", NULL };

	(void)state;
	memset(&t, 0, sizeof t);
	t_server_start(&t, options);
	t_state_dict(&t, "train", 2);
	return 0;
}

static int teardown(void **state)
{
	(void)state;
	t_server_remove(&t);
	return 0;
}

#define SAVE(name, more) "{'kind':'save','source':{'state_dict':'train','generation':7,'await_seal':true}," \
			 "'target':{'storage':'main','name':'" name "'}" more "}"

static void reserve(int64_t rank)
{
	struct t_answer a = { 0 };

	state_dict_reserve(t.s->state_dicts, &t.me, STR("train"), rank, ROOM, 7, 0, t_reserved, &a);
	t_server_until(&t, &a.called);
	T_OK(a.e);
}

static void fill(void)
{
	for (int64_t rank = 0; rank < 2; rank++) {
		reserve(rank);
		T_OK(state_dict_fill(t.s->state_dicts, &t.me, STR("train"), rank, 7, IMAGE, NULL));
	}
}

/* A job that reads what is being filled. */
static void stream(const char *spec, char *id)
{
	fill();
	t_job(&t, spec, id);
	t_job_runs(&t, id);
}

static void seal(int64_t rank)
{
	struct t_answer a = { 0 };

	state_dict_seal(t.s->state_dicts, &t.me, STR("train"), rank, 7, IMAGE, NULL, NULL, t_done, &a);
	t_server_until(&t, &a.called);
	T_OK(a.e);
}

static bool is_visible(const char *name)
{
	char path[256];
	struct stat st;

	snprintf(path, sizeof path, "%s/main/%s", t.dir, name);
	return stat(path, &st) == 0;
}

static void check(const char *id, const char *state, const char *stage, int attempt, const char *code)
{
	json_t *doc = t_job_doc(&t, id);

	assert_string_equal(json_string_value(json_object_get(doc, "state")), state);
	if (stage)
		assert_string_equal(json_string_value(json_object_get(doc, "stage")), stage);
	assert_int_equal(json_integer_value(json_object_get(doc, "attempt")), attempt);
	if (code)
		assert_string_equal(json_string_value(json_object_get(json_object_get(doc, "error"), "code")), code);
	json_decref(doc);
}

static int attempt_of(const char *id)
{
	json_t *doc = t_job_doc(&t, id);
	int attempt = (int)json_integer_value(json_object_get(doc, "attempt"));

	json_decref(doc);
	return attempt;
}

static bool is_in(const char *id, enum job_state want)
{
	enum job_state st;

	T_OK(job_state_of(t.s, str_of(id), &st));
	return st == want;
}

static void test_runs_before_the_seal_and_commits_after(void **state)
{
	char id[27];

	(void)state;
	t_job(&t, SAVE("a", FAKE("slow:800")), id);
	check(id, "queued", "awaiting seals of ranks 0, 1", 1, NULL);
	fill();
	t_job_runs(&t, id);
	seal(0);
	seal(1);
	assert_false(is_visible("a"));
	assert_int_equal(t_job_end(&t, id), JOB_SUCCEEDED);
	check(id, "succeeded", NULL, 1, NULL);
}

/* A worker is not trusted: what would commit too early is no worker of ours. */
static void test_no_commit_before_the_seal(void **state)
{
	char id[27];

	(void)state;
	fill();
	t_job(&t, SAVE("a", ""), id);
	assert_int_equal(t_job_end(&t, id), JOB_FAILED);
	check(id, "failed", NULL, 2, "protocol");
	assert_false(is_visible("a"));
}

static void test_waiting_is_no_stall(void **state)
{
	struct storage *st;
	char id[27];

	(void)state;
	stream(SAVE("a", FAKE("stall:4000")), id);
	t_server_run(&t, 2500);
	check(id, "running", "copy", 1, NULL);
	T_OK(storage_find(t.s->storages, STR("main"), &st));
	assert_int_equal(st->state, STORAGE_OK);
	seal(0);
	seal(1);
	assert_int_equal(t_job_end(&t, id), JOB_SUCCEEDED);
}

/* Workers that waited too long say not_sealed: the job goes on with the seals; without any it would have failed. */
static void test_rests(void **state)
{
	char id[27];

	(void)state;
	fill();
	t_job(&t, SAVE("a", FAKE("fail:not_sealed")), id);
	T_UNTIL(&t, attempt_of(id) == 2);
	t_server_run(&t, 1500);
	check(id, "queued", "awaiting seals of ranks 0, 1", 2, NULL);
	seal(0);
	check(id, "queued", "awaiting seal of rank 1", 2, NULL);
	seal(1);
	assert_int_equal(t_job_end(&t, id), JOB_FAILED);
	check(id, "failed", NULL, 2, "not_sealed");
}

/* The last seal comes when the workers have given up, and have not all said so. */
static void test_sealed_while_workers_give_up(void **state)
{
	char id[27];

	(void)state;
	stream(SAVE("a", FAKE("slow:800+fail:not_sealed")), id);
	seal(0);
	seal(1);
	assert_int_equal(t_job_end(&t, id), JOB_SUCCEEDED);
	check(id, "succeeded", NULL, 2, NULL);
}

static void test_lost(void **state)
{
	struct t_answer a = { 0 };
	char id[27];

	(void)state;
	stream(SAVE("a", FAKE("slow:60000")), id);
	state_dict_delete(t.s->state_dicts, &t.me, STR("train"), t_done, &a);
	t_server_until(&t, &a.called);
	T_ERR(STATE_DICT_BUSY, a.e);
	assert_int_equal(t_job_end(&t, id), JOB_FAILED);
	check(id, "failed", NULL, 1, "not_sealed");
	a = (struct t_answer){ 0 };
	state_dict_delete(t.s->state_dicts, &t.me, STR("train"), t_done, &a);
	t_server_until(&t, &a.called);
	T_OK(a.e);
}

static void test_a_sealed_source_keeps_the_state_dict(void **state)
{
	struct t_answer a = { 0 };
	char sealed[27], filling[27];

	(void)state;
	t_seal_all(&t, "train", 2, 6);
	t_job(&t, "{'kind':'save','source':{'state_dict':'train','generation':6},'target':{'storage':'main','name':'s'}"
	      FAKE("slow:60000") "}", sealed);
	fill();
	t_job(&t, "{'kind':'save','source':{'state_dict':'train','generation':7,'await_seal':true},'target':{'storage':'other','name':'f'}"
	      FAKE("slow:60000") "}", filling);
	t_job_runs(&t, sealed);
	t_job_runs(&t, filling);
	state_dict_delete(t.s->state_dicts, &t.me, STR("train"), t_done, &a);
	t_server_until(&t, &a.called);
	T_ERR(STATE_DICT_BUSY, a.e); /* refused: it changes nothing */
	t_server_run(&t, 200);
	assert_true(is_in(sealed, JOB_RUNNING) && is_in(filling, JOB_RUNNING));
	for (int i = 0; i < 2; i++) {
		a = (struct t_answer){ 0 };
		job_cancel(t.s, &t.me, str_of(i ? sealed : filling), t_done, &a);
		t_server_until(&t, &a.called);
		assert_int_equal(t_job_end(&t, i ? sealed : filling), JOB_CANCELLED);
	}
}

static void test_crash_of_a_worker(void **state)
{
	char id[27];

	(void)state;
	fill();
	t_job(&t, SAVE("a", FAKE("crash:running+slow:2000")), id); /* slow: the seals come before the second attempt commits */
	T_UNTIL(&t, attempt_of(id) == 2);
	seal(0);
	seal(1);
	assert_int_equal(t_job_end(&t, id), JOB_SUCCEEDED);
	check(id, "succeeded", NULL, 2, NULL);
}

static void test_restart(void **state)
{
	char id[27];

	(void)state;
	stream(SAVE("a", FAKE("slow:60000")), id);
	t_server_crash(&t);
	t_server_start(&t, NULL);
	T_UNTIL(&t, is_in(id, JOB_QUEUED));
	t_server_run(&t, 1500);
	check(id, "queued", "awaiting seals of ranks 0, 1", 2, NULL);
	assert_true(jobs_live(t.s) == 1);
	struct t_answer a = { 0 };
	job_cancel(t.s, &t.me, str_of(id), t_done, &a);
	t_server_until(&t, &a.called);
	assert_int_equal(t_job_end(&t, id), JOB_CANCELLED);
}

int main(void)
{
#define T(f) cmocka_unit_test_setup_teardown(f, setup, teardown)
	const struct CMUnitTest tests[] = {
		T(test_runs_before_the_seal_and_commits_after), T(test_no_commit_before_the_seal), T(test_waiting_is_no_stall),
		T(test_rests), T(test_sealed_while_workers_give_up), T(test_lost), T(test_a_sealed_source_keeps_the_state_dict),
		T(test_crash_of_a_worker), T(test_restart),
	};
#undef T

	return cmocka_run_group_tests(tests, NULL, NULL);
}
