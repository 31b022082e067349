/* When the coordinator has what a job left beside its target removed: soon after a job that may have left something, until it is gone. */
#include "lib/t_trained.h"

#include <fcntl.h>
#include <string.h>
#include <unistd.h>

#include "server/storage.h"
#include "server/sweep.h"

static void run(const char *spec, enum job_state want, char id[27])
{
	t_job(&t, spec, id);
	assert_int_equal(t_job_end(&t, id), want);
}

static int fd_of(const char *name, int flags)
{
	char path[256];

	snprintf(path, sizeof path, "%s/main/%s", t.dir, name);
	return open(path, flags | O_CLOEXEC, 0644);
}

/* How often it was asked for. */
static int swept(const char *id)
{
	static char text[65536];
	int fd = fd_of(".swept", O_RDONLY), times = 0;
	ssize_t n = fd < 0 ? 0 : read(fd, text, sizeof text - 1);

	if (fd >= 0)
		close(fd);
	text[n > 0 ? n : 0] = '\0';
	for (const char *p = text; (p = strstr(p, id)); p++)
		times++;
	return times;
}

static void test_jobs_that_leave_something(void **state)
{
	char plain[27], replacing[27], failed[27], doubtful[27], deleted[27], file[27];

	(void)state;
	run(SAVE("a", ""), JOB_SUCCEEDED, plain);
	run(SAVE("b", ",'labels':{'fake':'fail:storage_io'}"), JOB_FAILED, failed);
	run(SAVE("c", ",'labels':{'fake':'fail:not_durable'}"), JOB_FAILED, doubtful);
	run(SAVE("a", ",'options':{'overwrite':true}"), JOB_SUCCEEDED, replacing);
	run("{'kind':'reshard','source':{'storage':'main','name':'a'},"
	    "'target':{'storage':'main','name':'a.pt','format':'torch'}}", JOB_SUCCEEDED, file);
	run("{'kind':'delete','target':{'storage':'main','name':'a'}}", JOB_SUCCEEDED, deleted);
	T_UNTIL(&t, swept(replacing) && swept(failed) && swept(deleted) && swept(file));
	char of_this_daemon[40]; /* another node of a cluster may be at the same job by then */
	snprintf(of_this_daemon, sizeof of_this_daemon, "%s %s\n", failed, failed + 20);
	assert_int_equal(swept(of_this_daemon), swept(failed));
	assert_int_equal(swept(plain), 0);
	assert_int_equal(swept(doubtful), 0); /* it may be the only one on the disk */
}

static void test_until_it_is_gone(void **state)
{
	char id[27];

	(void)state;
	close(fd_of(".stuck", O_CREAT | O_WRONLY));
	run(SAVE("b", ",'labels':{'fake':'fail:storage_io'}"), JOB_FAILED, id);
	T_UNTIL(&t, swept(id) >= 2);
	char path[256];
	snprintf(path, sizeof path, "%s/main/.stuck", t.dir);
	assert_int_equal(unlink(path), 0);
	int so_far = swept(id);
	T_UNTIL(&t, swept(id) > so_far);
	so_far = swept(id);
	t_server_run(&t, 1500);
	assert_int_equal(swept(id), so_far);
	run(SAVE("c", ",'labels':{'fake':'fail:storage_io'}"), JOB_FAILED, id); /* still waits at the end */
}

/* A worker dies behind its commit, and its storage refuses the look that would tell: either may be so, and a sweep looks once it can. */
static void test_an_outcome_that_nobody_could_look_up(void **state)
{
	char id[27], path[256];

	(void)state;
	close(fd_of(".stuck", O_CREAT | O_WRONLY));
	run(SAVE("d", ",'labels':{'fake':'crash:committed'}"), JOB_FAILED, id);
	json_t *doc = t_job_doc(&t, id), *error = json_object_get(doc, "error");
	assert_string_equal(json_string_value(json_object_get(error, "code")), "not_durable");
	assert_non_null(strstr(json_string_value(json_object_get(error, "detail")), "'d' was written or removed is not known"));
	json_decref(doc);
	snprintf(path, sizeof path, "%s/main/.stuck", t.dir);
	assert_int_equal(unlink(path), 0);
	int so_far = swept(id);
	T_UNTIL(&t, swept(id) > so_far);
}

static bool is_there(const char *name)
{
	char path[256];

	snprintf(path, sizeof path, "%s/main/%s", t.dir, name);
	return access(path, F_OK) == 0;
}

/* A start sees what another daemon has in the storage; an hour later it is asked for again. */
static void test_others_are_watched_for_an_hour(void **state)
{
	struct storage *st;
	int fd = fd_of(".others", O_CREAT | O_WRONLY);

	(void)state;
	assert_int_equal(write(fd, "1", 1), 1);
	T_OK(storage_find(t.s->storages, STR("main"), &st));
	T_UNTIL(&t, st->state == STORAGE_OK);
	st->sweep_due = true;
	T_UNTIL(&t, st->others);
	assert_int_equal(pwrite(fd, "2", 1, 0), 1); /* it has changed */
	int64_t seen = st->others_ms;
	sweep_storage(t.s->sweeps, "main"); /* a worker died: too early to say */
	t_server_run(&t, 300);
	assert_true(st->others && st->others_ms == seen);
	assert_false(sweep_is_due(st));
	st->others_ms -= 3600000;
	assert_true(sweep_is_due(st));
	T_UNTIL(&t, st->others && st->others_ms >= seen); /* seen anew, as it is now */
	assert_true(is_there(".others"));
	st->others_ms -= 3600000;
	T_UNTIL(&t, !is_there(".others"));
	T_UNTIL(&t, !st->others);
	close(fd);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test_setup_teardown(test_jobs_that_leave_something, setup, teardown),
		cmocka_unit_test_setup_teardown(test_until_it_is_gone, setup, teardown),
		cmocka_unit_test_setup_teardown(test_an_outcome_that_nobody_could_look_up, setup, teardown),
		cmocka_unit_test_setup_teardown(test_others_are_watched_for_an_hour, setup, teardown),
	};

	return cmocka_run_group_tests_name("sweep", tests, NULL, NULL);
}
