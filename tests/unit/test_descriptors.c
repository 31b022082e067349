/* test_descriptors.c: descriptors that a client hands over: held by its token as long as its connection is open, for its own user only. */
#include "server/descriptors.h"

#include <event2/event.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include "lib/t.h"

static struct event_base *base;
static struct loop *loop;
static struct descriptors *all;

static int set_up(void **)
{
	base = event_base_new();
	assert_non_null(base);
	assert_int_equal(loop_new(base, &loop), OK);
	assert_int_equal(descriptors_new(loop, &all), OK);
	return 0;
}

static int tear_down(void **)
{
	descriptors_free(all);
	loop_free(loop);
	event_base_free(base);
	return 0;
}

static void turn(void)
{
	event_base_loop(base, EVLOOP_NONBLOCK);
}

/* A client's connection; its token. */
static int open_client(uid_t uid, char token[DESCRIPTORS_TOKEN_MAX])
{
	char line[128] = "";
	int pair[2];

	assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM, 0, pair), 0);
	assert_int_equal(descriptors_open(all, &pair[0], &(struct principal){ .uid = uid }), OK);
	assert_int_equal(pair[0], -1);
	assert_true(read(pair[1], line, sizeof line - 1) > 0);
	assert_int_equal(sscanf(line, "{\"descriptors\":\"%32[0-9a-f]\"}\n", token), 1);
	return pair[1];
}

/* false: the client was cut off. */
static bool send_copies(int client, int fd, int count)
{
	union {
		struct cmsghdr head;
		char room[CMSG_SPACE(250 * sizeof(int))];
	} control;
	struct iovec v = { "x", 1 };
	struct msghdr m = { .msg_iov = &v, .msg_iovlen = 1, .msg_control = &control,
			    .msg_controllen = CMSG_SPACE((size_t)count * sizeof fd) };

	memset(&control, 0, sizeof control);
	control.head = (struct cmsghdr){ .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS,
					 .cmsg_len = CMSG_LEN((size_t)count * sizeof fd) };
	for (int i = 0; i < count; i++)
		memcpy(CMSG_DATA(&control.head) + (size_t)i * sizeof fd, &fd, sizeof fd);
	return sendmsg(client, &m, MSG_NOSIGNAL) == 1;
}

static enum err hold(uid_t uid, const char *token, struct descriptors_park **out)
{
	return descriptors_hold(all, &(struct principal){ .uid = uid }, str_of(token), out);
}

/* A pipe's reading end tells whether all copies of its writing end are closed. */
static void test_life(void **)
{
	struct descriptors_park *p;
	char token[DESCRIPTORS_TOKEN_MAX], byte;
	int pipe_fds[2], client = open_client(7, token);
	uint32_t n;

	assert_int_equal(pipe2(pipe_fds, O_NONBLOCK | O_CLOEXEC), 0);
	assert_true(send_copies(client, pipe_fds[1], 3));
	close(pipe_fds[1]);
	assert_int_equal(hold(8, token, &p), ERR_NOT_FOUND);
	assert_int_equal(hold(7, "0", &p), ERR_NOT_FOUND);
	assert_int_equal(hold(7, token, &p), OK); /* before the loop has looked at the connection */
	assert_non_null(descriptors_of(p, &n));
	assert_int_equal(n, 3);
	close(client);
	turn();
	struct descriptors_park *none;
	assert_int_equal(hold(7, token, &none), ERR_NOT_FOUND);
	assert_int_equal(read(pipe_fds[0], &byte, 1), -1);
	assert_int_equal(errno, EAGAIN); /* somebody still uses them */
	descriptors_drop(&p);
	assert_null(p);
	descriptors_drop(&p);
	assert_int_equal(read(pipe_fds[0], &byte, 1), 0);
	close(pipe_fds[0]);
}

static void test_too_many(void **)
{
	struct descriptors_park *p;
	char token[DESCRIPTORS_TOKEN_MAX], byte;
	int pipe_fds[2], client = open_client(7, token);

	assert_int_equal(pipe2(pipe_fds, O_NONBLOCK | O_CLOEXEC), 0);
	for (int sent = 0; sent <= DESCRIPTORS_MAX && send_copies(client, pipe_fds[1], 250); sent += 250)
		turn();
	close(pipe_fds[1]);
	assert_int_equal(hold(7, token, &p), ERR_NOT_FOUND);
	turn();
	assert_int_equal(read(pipe_fds[0], &byte, 1), 0);
	while (read(client, &byte, 1) > 0)
		;
	close(client);
	close(pipe_fds[0]);
}

/* Bytes mean nothing: whoever sends them without end would keep the loop from everybody else. */
static void test_too_many_bytes(void **)
{
	static const char bytes[4096];
	struct descriptors_park *p;
	char token[DESCRIPTORS_TOKEN_MAX];
	int client = open_client(7, token);

	assert_int_equal(send(client, bytes, 100, MSG_NOSIGNAL), 100);
	assert_int_equal(hold(7, token, &p), OK);
	descriptors_drop(&p);
	for (size_t sent = 0; sent < 128 << 10; sent += sizeof bytes) {
		(void)send(client, bytes, sizeof bytes, MSG_NOSIGNAL | MSG_DONTWAIT);
		turn();
	}
	assert_int_equal(hold(7, token, &p), ERR_NOT_FOUND);
	assert_int_equal(send(client, bytes, 1, MSG_NOSIGNAL), -1);
	close(client);
}

static void test_too_many_clients(void **)
{
	enum { HALF = DESCRIPTORS_PARKS_MAX / 2 };
	int pair[2], clients[HALF];
	char token[DESCRIPTORS_TOKEN_MAX];

	for (int i = 0; i < HALF; i++)
		clients[i] = open_client(7, token);
	assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM, 0, pair), 0);
	assert_int_equal(descriptors_open(all, &pair[0], &(struct principal){ .uid = 7 }), ERR_BUSY);
	close(pair[0]);
	close(pair[1]);
	for (uid_t other = 8; other < 12; other++)
		close(open_client(other, token));
	for (int i = 0; i < HALF; i++)
		close(clients[i]);
	turn();
	close(open_client(7, token));
}

/* Of 300 that the daemon takes. */
static void test_one_user_leaves_descriptors_to_others(void **)
{
	char tokens[3][DESCRIPTORS_TOKEN_MAX];
	struct descriptors_park *own, *other;
	struct rlimit was, few;
	uint32_t n;

	assert_int_equal(getrlimit(RLIMIT_NOFILE, &was), 0);
	few = (struct rlimit){ 1200, was.rlim_max };
	assert_int_equal(setrlimit(RLIMIT_NOFILE, &few), 0);
	tear_down(NULL);
	set_up(NULL);
	int clients[] = { open_client(7, tokens[0]), open_client(7, tokens[1]), open_client(8, tokens[2]) };
	assert_true(send_copies(clients[0], STDERR_FILENO, 100));
	assert_int_equal(hold(7, tokens[0], &own), OK);
	assert_true(send_copies(clients[1], STDERR_FILENO, 51));
	assert_int_equal(hold(7, tokens[1], &other), ERR_NOT_FOUND); /* 151 are more than half */
	assert_true(send_copies(clients[2], STDERR_FILENO, 100));
	assert_int_equal(hold(8, tokens[2], &other), OK);
	assert_non_null(descriptors_of(other, &n));
	assert_int_equal(n, 100);
	descriptors_drop(&own);
	descriptors_drop(&other);
	for (int i = 0; i < 3; i++)
		close(clients[i]);
	assert_int_equal(setrlimit(RLIMIT_NOFILE, &was), 0);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test_setup_teardown(test_life, set_up, tear_down),
		cmocka_unit_test_setup_teardown(test_too_many, set_up, tear_down),
		cmocka_unit_test_setup_teardown(test_too_many_bytes, set_up, tear_down),
		cmocka_unit_test_setup_teardown(test_too_many_clients, set_up, tear_down),
		cmocka_unit_test_setup_teardown(test_one_user_leaves_descriptors_to_others, set_up, tear_down),
	};

	return cmocka_run_group_tests_name("descriptors", tests, NULL, NULL);
}
