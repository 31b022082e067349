/* Retries of jobs beside other jobs: what is in the way of a new job is in the way of a retry. */
#include "lib/t_trained.h"

#include <sqlite3.h>
#include <string.h>

static enum err retry(const char *id)
{
	struct t_answer r = { 0 };

	job_retry(t.s, &t.me, str_of(id), t_done, &r);
	t_server_until(&t, &r.called);
	err_restore(&r.info);
	return r.e;
}

static void fails(const char *spec, char id[27])
{
	t_job(&t, spec, id);
	assert_int_equal(t_job_end(&t, id), JOB_FAILED);
}

/* A retry follows the rule for new jobs: what a dry run would write is free, what lies inside another job's target is not. */
static void test_retry_and_busy_targets(void **state)
{
	json_t *spec = json_loads("{\"kind\":\"save\",\"source\":{\"state_dict\":\"train\"},\"target\":{\"storage\":\"main\","
				  "\"name\":\"run/a\"}}", 0, NULL);
	struct job_request rq = { .kind = JOB_SAVE, .spec = spec, .who = t.me };
	char inner[27], outer[27], busy[27];
	struct t_answer planned = { 0 };

	(void)state;
	fails(SAVE("run/a", FAKE("fail:digest_mismatch")), inner);
	fails(SAVE("run", FAKE("fail:digest_mismatch")), outer);
	job_dry_run(t.s, &rq, t_planned, &planned);
	assert_int_equal(jobs_live(t.s), 1);
	T_OK(retry(inner));
	assert_int_equal(t_job_end(&t, inner), JOB_FAILED);
	T_UNTIL(&t, planned.called);
	t_job(&t, SAVE("run", FAKE("slow:60000")), busy);
	T_ERR(TARGET_BUSY, retry(inner));
	T_ERR(TARGET_BUSY, retry(outer));
	cancel(busy);
	t_job(&t, SAVE("run/a/b", FAKE("slow:60000")), busy);
	T_ERR(TARGET_BUSY, retry(outer));
	cancel(busy);
	json_decref(planned.doc);
	json_decref(spec);
}

/* The same of a source: what a load is filling is no snapshot. */
static void test_retry_and_busy_sources(void **state)
{
	char again[27], load[27];

	(void)state;
	fails(SAVE("a", FAKE("fail:digest_mismatch")), again);
	t_job(&t, SAVE("src", ""), load);
	assert_int_equal(t_job_end(&t, load), JOB_SUCCEEDED);
	t_job(&t, "{'kind':'load','source':{'storage':'main','name':'src'},'target':{'state_dict':'train'}" FAKE("slow:60000") "}", load);
	T_ERR(STATE_DICT_BUSY, retry(again));
	cancel(load);
}

/* Adds a member to the request in a job's row. */
static void edit(sqlite3 *db, const char *target, const char *member)
{
	char sql[256];

	snprintf(sql, sizeof sql, "UPDATE jobs SET doc = replace(doc, '\"kind\":\"save\",\"source\"', '\"kind\":\"save\",%s,\"source\"')"
		 " WHERE target = '%s'", member, target);
	assert_int_equal(sqlite3_exec(db, sql, NULL, NULL, NULL), SQLITE_OK);
	assert_int_equal(sqlite3_changes(db), 1);
}

/* Rows of an older daemon: it kept notes of its own in the request, and knew fields that are gone. */
static void test_requests_of_an_older_daemon(void **state)
{
	char noted[27], strange[27], path[128];
	sqlite3 *db;

	(void)state;
	fails(SAVE("a", FAKE("fail:digest_mismatch")), noted);
	fails(SAVE("b", FAKE("fail:digest_mismatch")), strange);
	t_server_stop(&t);
	snprintf(path, sizeof path, "%s/state/journal.db", t.dir);
	assert_int_equal(sqlite3_open(path, &db), SQLITE_OK);
	edit(db, "main:a", "\"like_storages\":[\"main\"]");
	edit(db, "main:b", "\"colour\":1");
	sqlite3_close(db);
	t_server_start(&t, NULL);
	json_t *doc = t_job_doc(&t, noted), *other = t_job_doc(&t, strange);
	assert_null(json_object_get(json_object_get(doc, "spec"), "like_storages"));
	assert_non_null(json_object_get(json_object_get(other, "spec"), "colour")); /* shown as it is */
	T_ERR(UNKNOWN_FIELD, retry(strange));
	T_OK(retry(noted));
	assert_int_equal(t_job_end(&t, noted), JOB_FAILED);
	json_decref(other);
	json_decref(doc);
}

#define T(fn) cmocka_unit_test_setup_teardown(fn, setup, teardown)

int main(void)
{
	const struct CMUnitTest tests[] = { T(test_retry_and_busy_targets), T(test_retry_and_busy_sources),
					    T(test_requests_of_an_older_daemon) };

	return cmocka_run_group_tests(tests, NULL, NULL);
}
