/* Workers as the coordinator sees them: the end of each is noticed, whatever number its descriptors have. */
#include "lib/t_server.h"

#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/wait.h>
#include <unistd.h>

#include "os/watch.h"
#include "server/service_clock.h"
#include "server/worker.h"

/* The second look is every 2 s: what is noticed sooner was noticed by its pidfd. */
enum { AT_ONCE_MS = 1500, GENERATIONS = 5 };

struct line {
	struct t_server *t;
	struct worker *worker;
	pid_t pid;
	int started, ended;
	bool up, again;                    /* again: the end of one starts the next, from within ops->ended */
};

static void start_next(struct line *l);

static void on_ready(struct worker *w, enum err e, const json_t *hello)
{
	struct line *l = w->owner;

	assert_true(json_is_object(hello));
	T_OK(e);
	l->up = true;
}

static void on_frame(struct worker *w, const struct frame *f, const json_t *body)
{
	(void)w;
	(void)f;
	(void)body;
}

static void on_ended(struct worker *w, enum err e)
{
	struct line *l = w->owner;

	assert_int_equal(e, ERR_WORKER_LOST);
	l->ended++;
	l->worker = NULL;
	if (l->again)
		start_next(l);
}

static const struct worker_ops calls = { .ready = on_ready, .frame = on_frame, .ended = on_ended };

static void start_next(struct line *l)
{
	struct worker_spec spec = { .role = "gang", .count = 1, .memory_bytes = 64 << 20, .ops = &calls, .owner = l };

	l->up = false;
	T_OK(worker_start(l->t->s->workers, &spec, &l->worker));
	l->pid = l->worker->child.pid;
	l->started++;
}

/* A gang that is started when a worker of the last one has just died gets the descriptors' numbers of that worker. */
static void test_end_is_noticed_when_its_number_was_used_before(void **state)
{
	struct t_server t = { 0 };
	struct line l = { .t = &t, .again = true };

	(void)state;
	t_server_start(&t, NULL);
	start_next(&l);
	for (int i = 0; i < GENERATIONS; i++) {
		T_UNTIL(&t, l.up);
		int64_t from = clock_mono_ms();
		kill(l.pid, SIGKILL);
		while (l.ended == i && clock_mono_ms() - from < AT_ONCE_MS)
			t_server_run(&t, 5);
		if (l.ended == i)
			T_FAIL("the end of worker %d was not noticed in %d ms", i, AT_ONCE_MS);
	}
	l.again = false;
	assert_int_equal(l.started, GENERATIONS + 1);
	T_UNTIL(&t, l.up);
	kill(l.pid, SIGKILL);
	T_UNTIL(&t, !l.worker);
	t_server_remove(&t);
}

/* Takes a descriptor out of every epoll set of this process, as if the loop had never asked for it. */
static void lose(int fd)
{
	DIR *d = opendir("/proc/self/fd");
	struct dirent *e;
	char path[64], what[64];
	int lost = 0;

	while ((e = readdir(d))) {
		snprintf(path, sizeof path, "/proc/self/fd/%.16s", e->d_name);
		ssize_t n = readlink(path, what, sizeof what - 1);
		what[n > 0 ? n : 0] = '\0';
		if (strcmp(what, "anon_inode:[eventpoll]") == 0)
			lost += epoll_ctl((int)strtol(e->d_name, NULL, 10), EPOLL_CTL_DEL, fd, NULL) == 0;
	}
	closedir(d);
	assert_int_equal(lost, 1);
}

static int pidfd_of(pid_t pid)
{
	char path[64], line[256];
	int found = -1;

	for (int fd = 3; fd < 1024 && found < 0; fd++) {
		snprintf(path, sizeof path, "/proc/self/fdinfo/%d", fd);
		FILE *f = fopen(path, "r");
		while (f && fgets(line, sizeof line, f))
			if (strncmp(line, "Pid:", 4) == 0 && strtol(line + 4, NULL, 10) == pid)
				found = fd;
		if (f)
			fclose(f);
	}
	return found;
}

static void test_second_look_finds_an_end_that_no_event_told(void **state)
{
	struct t_server t = { 0 };
	struct line l = { .t = &t };

	(void)state;
	t_server_start(&t, NULL);
	start_next(&l);
	T_UNTIL(&t, l.up);
	lose(pidfd_of(l.pid));
	kill(l.pid, SIGSTOP);              /* its socket stays open until it is dead */
	lose(watch_fd(l.worker->control));
	kill(l.pid, SIGKILL);
	int64_t from = clock_mono_ms();
	T_UNTIL(&t, !l.worker);
	assert_in_range(clock_mono_ms() - from, 0, 15000);
	t_server_remove(&t);
}

/* Of a child whose start failed halfway, or that came to us as to an init process, no event tells. */
static void test_second_look_collects_a_child_that_is_no_worker(void **state)
{
	struct t_server t = { 0 };

	(void)state;
	t_server_start(&t, NULL);
	t_server_run(&t, 100);
	pid_t pid = fork();
	if (pid == 0)
		_exit(0);
	assert_true(pid > 0);
	siginfo_t info;
	T_UNTIL(&t, waitid(P_PID, (id_t)pid, &info, WEXITED | WNOHANG | WNOWAIT) < 0 && errno == ECHILD);
	t_server_remove(&t);
}

/* Whoever is told of the end may write where the worker wrote. */
static void test_a_killed_worker_is_awaited(void **state)
{
	struct t_server t = { 0 };
	struct line l = { .t = &t };
	siginfo_t info = { 0 };

	(void)state;
	t_server_start(&t, NULL);
	start_next(&l);
	T_UNTIL(&t, l.up);
	assert_false(worker_await_end(l.worker, 1));
	worker_disown(l.worker);
	assert_true(worker_await_end(l.worker, T_HUNG_MS));
	assert_int_equal(waitid(P_PID, (id_t)l.pid, &info, WEXITED | WNOHANG | WNOWAIT), 0);
	assert_int_equal(info.si_pid, l.pid);
	t_server_remove(&t);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_end_is_noticed_when_its_number_was_used_before),
		cmocka_unit_test(test_second_look_finds_an_end_that_no_event_told),
		cmocka_unit_test(test_second_look_collects_a_child_that_is_no_worker),
		cmocka_unit_test(test_a_killed_worker_is_awaited),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}
