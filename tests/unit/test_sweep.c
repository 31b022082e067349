/* When the coordinator has what a job left beside its target removed: soon after a job that may have left something, until it is gone. */
#include "lib/t_server.h"

#include <fcntl.h>
#include <string.h>
#include <unistd.h>

#include "server/sweep.h"

static struct t_server t;

static int setup(void **state)
{
	(void)state;
	memset(&t, 0, sizeof t);
	t_server_start(&t, NULL);
	t_state_dict(&t, "train", 2);
	t_seal_all(&t, "train", 2, 7);
	return 0;
}

static int teardown(void **state)
{
	(void)state;
	t_server_remove(&t);
	return 0;
}

#define SAVE(name, more) "{'kind':'save','source':{'state_dict':'train'},'target':{'storage':'main','name':'" name "'}" more "}"

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
	char plain[27], replacing[27], failed[27], doubtful[27], deleted[27];

	(void)state;
	run(SAVE("a", ""), JOB_SUCCEEDED, plain);
	run(SAVE("b", ",'labels':{'fake':'fail:storage_io'}"), JOB_FAILED, failed);
	run(SAVE("c", ",'labels':{'fake':'fail:not_durable'}"), JOB_FAILED, doubtful);
	run(SAVE("a", ",'options':{'overwrite':true}"), JOB_SUCCEEDED, replacing);
	run("{'kind':'delete','target':{'storage':'main','name':'a'}}", JOB_SUCCEEDED, deleted);
	T_UNTIL(&t, swept(replacing) && swept(failed) && swept(deleted));
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

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test_setup_teardown(test_jobs_that_leave_something, setup, teardown),
		cmocka_unit_test_setup_teardown(test_until_it_is_gone, setup, teardown),
	};

	return cmocka_run_group_tests_name("sweep", tests, NULL, NULL);
}
