/* test_spawn.c: what a child gets, how it ends, and that it ends with its parent. The program runs itself as the child. */
#include "lib/t.h"

#include <dirent.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "os/spawn.h"

static char self[4096];

static struct spawn_child start(const char *mode)
{
	char *argv[] = { self, (char *)(uintptr_t)mode, NULL };
	struct spawn_spec spec = { .path = self, .argv = argv, .log_fd = -1 };
	struct spawn_child c = SPAWN_NONE;

	T_OK(spawn_start(&spec, &c));
	return c;
}

static struct spawn_exit finish(struct spawn_child *c)
{
	struct spawn_exit how = { 0 };
	bool ended = false;

	T_OK(spawn_reap(c->pidfd, 10000, &ended, &how));
	assert_true(ended);
	spawn_release(c);
	return how;
}

/* ---- the child ---- */

/* Answers with the descriptors it has, its blocked and ignored signals, and its process group. */
static int child_report(void)
{
	char text[4096] = "";
	size_t n = 0;
	sigset_t mask;
	DIR *d = opendir("/proc/self/fd");
	struct dirent *e;

	while (d && (e = readdir(d)))
		if (e->d_name[0] != '.' && strtol(e->d_name, NULL, 10) != dirfd(d))
			n += (size_t)snprintf(text + n, sizeof text - n, "%s ", e->d_name);
	if (d)
		closedir(d);
	sigprocmask(SIG_BLOCK, NULL, &mask);
	struct sigaction pipe_action;
	sigaction(SIGPIPE, NULL, &pipe_action);
	n += (size_t)snprintf(text + n, sizeof text - n, "blocked %d ignored %d leader %d env %s",
			      sigismember(&mask, SIGTERM), pipe_action.sa_handler == SIG_IGN, getpgrp() == getpid(),
			      getenv("SPAWN_TEST") ? getenv("SPAWN_TEST") : "none");
	return write(3, text, n) == (ssize_t)n ? 7 : 1;
}

static int child_until_closed(void)
{
	char c;

	return read(3, &c, 1) == 0 ? 0 : 1;
}

/* Starts a grandchild, tells its pid and waits to be killed. */
static int child_with_grandchild(void)
{
	struct spawn_child c = start("forever");
	pid_t pid = c.pid;

	if (write(3, &pid, sizeof pid) != sizeof pid)
		return 1;
	pause();
	return 1;
}

/* ---- tests ---- */

static void test_clean_child(void **state)
{
	char text[4096] = "";
	char *envp[] = { (char *)(uintptr_t) "SPAWN_TEST=yes", NULL };
	char *argv[] = { self, (char *)(uintptr_t) "report", NULL };
	struct spawn_spec spec = { .path = self, .argv = argv, .envp = envp, .log_fd = -1 };
	struct spawn_child c;
	sigset_t term, before;

	(void)state;
	int leak = dup(0);             /* without CLOEXEC: must not reach the child */
	sigemptyset(&term);
	sigaddset(&term, SIGTERM);
	sigprocmask(SIG_BLOCK, &term, &before);
	signal(SIGPIPE, SIG_IGN);
	T_OK(spawn_start(&spec, &c));
	sigprocmask(SIG_SETMASK, &before, NULL);
	assert_true(read(c.control_fd, text, sizeof text - 1) > 0);
	assert_string_equal(text, "0 1 2 3 blocked 0 ignored 0 leader 1 env yes");
	struct sigaction still;
	sigaction(SIGPIPE, NULL, &still);
	assert_ptr_equal(still.sa_handler, SIG_IGN);
	signal(SIGPIPE, SIG_DFL);
	struct spawn_exit how = finish(&c);
	assert_false(how.signalled);
	assert_int_equal(how.code, 7);
	close(leak);
}

static void test_missing_program(void **state)
{
	struct spawn_spec spec = { .path = "/no/such/program", .log_fd = -1 };
	struct spawn_child c;

	(void)state;
	T_ERR(SYSTEM, spawn_start(&spec, &c));
	assert_non_null(strstr(err_last()->text, "cannot start '/no/such/program': cannot run: No such file"));
	assert_int_equal(waitpid(-1, NULL, WNOHANG), -1);
	assert_int_equal(errno, ECHILD);
}

static void test_kill_and_reap(void **state)
{
	struct spawn_child c = start("forever");
	struct spawn_exit how;
	bool ended = true;

	(void)state;
	T_OK(spawn_reap(c.pidfd, 0, &ended, &how));
	assert_false(ended);
	T_OK(spawn_reap(c.pidfd, 20, &ended, &how));
	assert_false(ended);
	T_OK(spawn_kill(c.pidfd, SIGKILL));
	struct pollfd p = { .fd = c.pidfd, .events = POLLIN };
	assert_int_equal(poll(&p, 1, 10000), 1);
	assert_int_equal(spawn_find_ended(), c.pid);
	assert_int_equal(spawn_find_ended(), c.pid); /* looking collects nothing */
	T_OK(spawn_reap(c.pidfd, 0, &ended, &how));
	assert_true(ended && how.signalled);
	assert_int_equal(how.code, SIGKILL);
	T_OK(spawn_kill(c.pidfd, SIGKILL));
	T_ERR(SYSTEM, spawn_reap(c.pidfd, 0, &ended, &how));
	assert_int_equal(spawn_find_ended(), 0);
	assert_true(fcntl(c.pidfd, F_GETFD) >= 0); /* whoever watches the pidfd closes it */
	spawn_release(&c);
	spawn_release(&c);
}

static void test_collect_without_a_pidfd(void **state)
{
	struct spawn_child c = start("until-closed");
	pid_t pid = c.pid;

	(void)state;
	assert_int_equal(spawn_find_ended(), 0);
	spawn_collect(pid);                /* it runs: nothing happens */
	assert_int_equal(kill(pid, 0), 0);
	spawn_release(&c);
	for (int i = 0; i < T_HUNG_MS / 10 && spawn_find_ended() != pid; i++)
		usleep(10000);
	spawn_collect(pid);
	assert_int_equal(spawn_find_ended(), 0);
	assert_int_equal(kill(pid, 0), -1);
}

static void test_ends_with_socket(void **state)
{
	struct spawn_child c = start("until-closed");

	(void)state;
	close(c.control_fd);
	c.control_fd = -1;
	struct spawn_exit how = finish(&c);
	assert_false(how.signalled);
	assert_int_equal(how.code, 0);
}

static void test_dies_with_parent(void **state)
{
	struct spawn_child c = start("grandparent");
	pid_t grandchild = 0;

	(void)state;
	assert_int_equal(read(c.control_fd, &grandchild, sizeof grandchild), sizeof grandchild);
	assert_int_equal(kill(grandchild, 0), 0);
	T_OK(spawn_kill(c.pidfd, SIGKILL));
	finish(&c);
	for (int i = 0; i < T_HUNG_MS / 10; i++) {
		char path[64], line[256] = "";
		snprintf(path, sizeof path, "/proc/%d/stat", (int)grandchild);
		int fd = open(path, O_RDONLY);
		if (fd < 0)
			return;
		ssize_t n = read(fd, line, sizeof line - 1);
		close(fd);
		if (n > 0 && strstr(line, ") Z "))
			return;
		usleep(10000);
	}
	T_FAIL("the grandchild outlived its parent");
}

static void *start_some(void *arg)
{
	struct spawn_child *c = arg;

	for (int i = 0; i < 8; i++)
		c[i] = start("report");
	/* The children get SIGKILL when this thread ends, so they are collected here. */
	for (int i = 0; i < 8; i++) {
		struct spawn_exit how = { 0 };
		bool ended = false;
		if (spawn_reap(c[i].pidfd, 10000, &ended, &how) || !ended || how.signalled || how.code != 7)
			return arg;
		spawn_release(&c[i]);
	}
	return NULL;
}

static void test_from_many_threads(void **state)
{
	pthread_t t[4];
	struct spawn_child c[4][8];

	(void)state;
	for (int i = 0; i < 4; i++)
		assert_int_equal(pthread_create(&t[i], NULL, start_some, c[i]), 0);
	for (int i = 0; i < 4; i++) {
		void *failed;
		pthread_join(t[i], &failed);
		assert_null(failed);
	}
}

static void test_log_goes_where_told(void **state)
{
	char *argv[] = { self, (char *)(uintptr_t) "log", NULL }, text[16] = "";
	int log[2];

	(void)state;
	assert_int_equal(pipe2(log, O_CLOEXEC), 0);
	struct spawn_spec spec = { .path = self, .argv = argv, .log_fd = log[1] };
	struct spawn_child c;
	T_OK(spawn_start(&spec, &c));
	close(log[1]);
	assert_int_equal(read(log[0], text, sizeof text), 5);
	assert_memory_equal(text, "hello", 5);
	close(log[0]);
	finish(&c);
}

int main(int argc, char **argv)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_clean_child),
		cmocka_unit_test(test_missing_program),
		cmocka_unit_test(test_kill_and_reap),
		cmocka_unit_test(test_collect_without_a_pidfd),
		cmocka_unit_test(test_ends_with_socket),
		cmocka_unit_test(test_dies_with_parent),
		cmocka_unit_test(test_from_many_threads),
		cmocka_unit_test(test_log_goes_where_told),
	};

	if (readlink("/proc/self/exe", self, sizeof self - 1) < 0)
		return 1;
	if (argc == 2 && strcmp(argv[1], "report") == 0)
		return child_report();
	if (argc == 2 && strcmp(argv[1], "until-closed") == 0)
		return child_until_closed();
	if (argc == 2 && strcmp(argv[1], "grandparent") == 0)
		return child_with_grandchild();
	if (argc == 2 && strcmp(argv[1], "log") == 0)
		return write(1, "hello", 5) == 5 ? 0 : 1;
	if (argc == 2 && strcmp(argv[1], "forever") == 0)
		return pause();
	return cmocka_run_group_tests_name("spawn", tests, NULL, NULL);
}
