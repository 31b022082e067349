/* test_watch.c: events reach a watch, and the next descriptor that gets the number of a closed one is watched like any other. */
#include "lib/t.h"

#include <event2/event.h>
#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include "os/watch.h"

struct end {
	struct event_base *base;
	struct watch *watch;
	int peer, number, reads, writes;
	struct end *next;                  /* opened in this one's on_read, after this one was closed */
};

static void open_end(struct end *n, struct event_base *base);

static void on_read(void *user)
{
	struct end *n = user;
	char c;

	n->reads++;
	assert_int_equal(read(watch_fd(n->watch), &c, 1), 1);
	if (n->next) {
		watch_free(&n->watch);
		open_end(n->next, n->base);
	}
}

static void on_write(void *user)
{
	struct end *n = user;

	n->writes++;
	T_OK(watch_writes(n->watch, false));
}

static void open_end(struct end *n, struct event_base *base)
{
	int sv[2];

	assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sv), 0);
	n->base = base;
	n->number = sv[0];
	n->peer = sv[1];
	T_OK(watch_new(base, &sv[0], on_read, on_write, n, &n->watch));
	assert_int_equal(sv[0], -1);
	assert_int_equal(watch_fd(n->watch), n->number);
	T_OK(watch_reads(n->watch, true));
}

static void turn(struct event_base *base)
{
	event_base_loop(base, EVLOOP_NONBLOCK);
}

static void test_number_is_used_again(void **state)
{
	struct event_base *base = event_base_new();
	struct end chain[20] = { 0 };
	const size_t count = sizeof chain / sizeof *chain;

	(void)state;
	for (size_t i = 0; i + 1 < count; i++)
		chain[i].next = &chain[i + 1];
	open_end(&chain[0], base);
	for (size_t i = 0; i < count; i++) {
		assert_int_equal(write(chain[i].peer, "x", 1), 1);
		turn(base);
		assert_int_equal(chain[i].reads, 1);
		assert_int_equal(chain[i].number, chain[0].number);
	}
	watch_free(&chain[count - 1].watch);
	for (size_t i = 0; i < count; i++)
		close(chain[i].peer);
	event_base_free(base);
}

static void test_on_and_off(void **state)
{
	struct event_base *base = event_base_new();
	struct end n = { 0 };

	(void)state;
	open_end(&n, base);
	assert_false(watch_is_writing(n.watch));
	T_OK(watch_writes(n.watch, true));
	T_OK(watch_writes(n.watch, true));
	assert_true(watch_is_writing(n.watch));
	turn(base);
	turn(base);
	assert_int_equal(n.writes, 1);
	T_OK(watch_reads(n.watch, false));
	assert_int_equal(write(n.peer, "x", 1), 1);
	turn(base);
	assert_int_equal(n.reads, 0);
	T_OK(watch_reads(n.watch, true));
	turn(base);
	assert_int_equal(n.reads, 1);
	int fd = watch_take(&n.watch);
	assert_int_equal(fd, n.number);
	assert_null(n.watch);
	assert_int_equal(watch_fd(n.watch), -1);
	assert_int_equal(write(n.peer, "x", 1), 1);
	turn(base);
	assert_int_equal(n.reads, 1);
	T_OK(watch_reads(n.watch, false));
	T_ERR(INTERNAL, watch_writes(n.watch, true));
	watch_free(&n.watch);
	assert_true(fcntl(fd, F_GETFD) >= 0);
	close(fd);
	close(n.peer);
	event_base_free(base);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_number_is_used_again),
		cmocka_unit_test(test_on_and_off),
	};
	return cmocka_run_group_tests_name("watch", tests, NULL, NULL);
}
