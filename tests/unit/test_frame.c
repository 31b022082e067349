/* test_frame.c: control frames, between two honest ends and against hostile ones. */
#include "lib/t_dir.h"

#include <fcntl.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/mem.h"
#include "ctl/frame.h"

struct pair {
	struct frame_conn *a, *b;
	int ends[2];           /* a's, which is the test's when a is NULL; b's */
	int fds_before;
};

static struct pair pair_new(bool raw)
{
	struct pair p = { .fds_before = t_count_fds() };

	assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, p.ends), 0);
	if (!raw)
		T_OK(frame_conn_new(p.ends[0], &p.a));
	T_OK(frame_conn_new(p.ends[1], &p.b));
	return p;
}

static void hang_up(struct pair *p)
{
	frame_conn_free(p->a);
	p->a = NULL;
	close(p->ends[0]);
	p->ends[0] = -1;
}

static void pair_end(struct pair *p)
{
	frame_conn_free(p->a);
	frame_conn_free(p->b);
	if (p->ends[0] >= 0)
		close(p->ends[0]);
	close(p->ends[1]);
	assert_int_equal(t_count_fds(), p->fds_before);
}

/* The head of a frame; each test spoils one field. */
struct raw_head {
	const char *magic;
	uint16_t version, type;
	uint32_t json_bytes, fd_count;
	uint64_t generation;
};

static void put_head(unsigned char out[24], struct raw_head h)
{
	memcpy(out, h.magic, 4);
	memcpy(out + 4, &h.version, 2);
	memcpy(out + 6, &h.type, 2);
	memcpy(out + 8, &h.json_bytes, 4);
	memcpy(out + 12, &h.fd_count, 4);
	memcpy(out + 16, &h.generation, 8);
}

static void send_with_fds(int to, const void *bytes, size_t n, int fd, int times)
{
	char room[CMSG_SPACE(253 * sizeof(int))] __attribute__((aligned(8))) = { 0 };
	struct iovec iov = { (void *)(uintptr_t)bytes, n };
	struct msghdr m = { .msg_iov = &iov, .msg_iovlen = 1, .msg_control = room,
			    .msg_controllen = CMSG_SPACE((size_t)times * sizeof(int)) };
	struct cmsghdr *h = (struct cmsghdr *)(void *)room;

	h->cmsg_level = SOL_SOCKET;
	h->cmsg_type = SCM_RIGHTS;
	h->cmsg_len = CMSG_LEN((size_t)times * sizeof(int));
	for (int i = 0; i < times; i++)
		memcpy(CMSG_DATA(h) + (size_t)i * sizeof fd, &fd, sizeof fd);
	assert_int_equal(sendmsg(to, &m, 0), n);
}

static void test_round_trip(void **state)
{
	struct pair p = pair_new(false);
	struct frame f;
	bool got, closed;

	(void)state;
	T_OK(frame_read(p.b, &f, &got, &closed));
	assert_false(got || closed);
	T_OK(frame_send(p.a, FRAME_JOB, 7, STR("{\"job\":\"x\"}"), NULL, 0));
	T_OK(frame_send(p.a, FRAME_CANCEL, 8, STR(""), NULL, 0));
	assert_false(frame_wants_write(p.a));
	T_OK(frame_read(p.b, &f, &got, &closed));
	assert_true(got);
	assert_int_equal(f.type, FRAME_JOB);
	assert_int_equal(f.generation, 7);
	assert_true(str_is(f.json, "{\"job\":\"x\"}"));
	T_OK(frame_read(p.b, &f, &got, &closed));
	assert_true(got && f.type == FRAME_CANCEL && f.json.n == 0 && f.generation == 8);
	T_OK(frame_read(p.b, &f, &got, &closed));
	assert_false(got || closed);
	hang_up(&p);
	T_OK(frame_read(p.b, &f, &got, &closed));
	assert_true(closed && !got);
	pair_end(&p);
}

static ino_t inode(int fd)
{
	struct stat st;

	assert_int_equal(fstat(fd, &st), 0);
	return st.st_ino;
}

/* More descriptors than one message may carry, from two files in turn; one is taken, the rest must be closed. */
static void test_thousand_fds(void **state)
{
	struct pair p = pair_new(false);
	struct frame f;
	bool got = false, closed, empty;
	int kinds[2] = { open("/dev/null", O_RDONLY), open("/dev/zero", O_RDONLY) };
	int *many = mem_alloc(1000 * sizeof *many), before = t_count_fds();

	(void)state;
	for (int i = 0; i < 1000; i++)
		many[i] = kinds[i % 3 == 0];
	T_OK(frame_send(p.a, FRAME_SEGMENTS, 1, STR("{}"), many, 1000));
	T_OK(frame_send(p.a, FRAME_CANCEL, 1, STR("{}"), NULL, 0));
	for (int i = 0; i < 100 && !got; i++) {
		T_OK(frame_flush(p.a, &empty));
		T_OK(frame_read(p.b, &f, &got, &closed));
	}
	assert_true(got);
	assert_int_equal(f.fd_count, 1000);
	for (int i = 0; i < 1000; i++)
		assert_int_equal(inode(f.fds[i]), inode(kinds[i % 3 == 0]));
	assert_true(fcntl(f.fds[999], F_GETFD) & FD_CLOEXEC);
	int mine = f.fds[17];
	f.fds[17] = -1;
	T_OK(frame_flush(p.a, &empty));
	T_OK(frame_read(p.b, &f, &got, &closed));
	assert_true(got && f.type == FRAME_CANCEL && f.fd_count == 0);
	assert_int_equal(t_count_fds(), before + 1);
	assert_int_equal(inode(mine), inode(kinds[0]));
	close(mine);
	close(kinds[0]);
	close(kinds[1]);
	mem_free(many);
	pair_end(&p);
}

/* A body larger than the socket's buffer: the writer queues, keeps copies of the descriptors, and goes on when it can. */
static void test_large_body(void **state)
{
	struct pair p = pair_new(false);
	struct frame f;
	size_t n = 5 << 20;
	char *body = mem_alloc(n);
	bool got = false, closed, empty = false;
	int fd = open("/dev/null", O_RDONLY);

	(void)state;
	for (size_t i = 0; i < n; i++)
		body[i] = (char)(i * 7 % 127);
	T_OK(frame_send(p.a, FRAME_JOB, 1, (struct str){ body, n }, &fd, 1));
	close(fd);
	assert_true(frame_wants_write(p.a));
	while (!got) {
		T_OK(frame_flush(p.a, &empty));
		T_OK(frame_read(p.b, &f, &got, &closed));
	}
	assert_true(empty && f.json.n == n && f.fd_count == 1);
	assert_memory_equal(f.json.p, body, n);
	assert_true(fcntl(f.fds[0], F_GETFD) >= 0);
	mem_free(body);
	pair_end(&p);
}

static void test_one_byte_at_a_time(void **state)
{
	struct pair p = pair_new(true);
	unsigned char bytes[24 + 5];
	struct frame f;
	bool got = false, closed;
	int null = open("/dev/null", O_RDONLY);

	(void)state;
	put_head(bytes, (struct raw_head){ "DCPD", 1, FRAME_DONE, 5, 2, 3 });
	memcpy(bytes + 24, "[1,2]", 5);
	for (size_t i = 0; i < sizeof bytes; i++) {
		T_OK(frame_read(p.b, &f, &got, &closed));
		assert_false(got || closed);
		assert_int_equal(send(p.ends[0], bytes + i, 1, 0), 1);
	}
	T_OK(frame_read(p.b, &f, &got, &closed));
	assert_false(got);
	send_with_fds(p.ends[0], "", 1, null, 2);
	T_OK(frame_read(p.b, &f, &got, &closed));
	assert_true(got && str_is(f.json, "[1,2]") && f.fd_count == 2);
	close(null);
	pair_end(&p);
}

static void expect_refused(struct raw_head h, const char *text)
{
	struct pair p = pair_new(true);
	unsigned char bytes[24];
	struct frame f;
	bool got, closed;

	put_head(bytes, h);
	assert_int_equal(send(p.ends[0], bytes, 24, 0), 24);
	T_ERR(PROTOCOL, frame_read(p.b, &f, &got, &closed));
	assert_non_null(strstr(err_last()->text, text));
	T_ERR(PROTOCOL, frame_read(p.b, &f, &got, &closed));
	pair_end(&p);
}

static void test_wrong_heads(void **state)
{
	(void)state;
	expect_refused((struct raw_head){ "DCPE", 1, 1, 0, 0, 0 }, "magic");
	expect_refused((struct raw_head){ "DCPD", 2, 1, 0, 0, 0 }, "version 2");
	expect_refused((struct raw_head){ "DCPD", 1, 1, FRAME_JSON_MAX + 1u, 0, 0 }, "bytes of JSON");
	expect_refused((struct raw_head){ "DCPD", 1, 1, UINT32_MAX, 0, 0 }, "bytes of JSON");
	expect_refused((struct raw_head){ "DCPD", 1, 1, 2, FRAME_FDS_MAX + 1u, 0 }, "descriptors");
}

/* 64 MiB are announced, 10 bytes come: little is allocated, and the end is an end, not an error. */
static void test_half_frame_then_close(void **state)
{
	struct pair p = pair_new(true);
	unsigned char bytes[34] = { 0 };
	struct frame f;
	bool got, closed;
	struct rlimit old;

	(void)state;
	put_head(bytes, (struct raw_head){ "DCPD", 1, FRAME_DONE, FRAME_JSON_MAX, FRAME_FDS_MAX, 3 });
	assert_int_equal(send(p.ends[0], bytes, sizeof bytes, 0), sizeof bytes);
	assert_int_equal(getrlimit(RLIMIT_DATA, &old), 0);
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
	struct rlimit small = { .rlim_cur = 32 << 20, .rlim_max = old.rlim_max };
	assert_int_equal(setrlimit(RLIMIT_DATA, &small), 0);
#endif
	T_OK(frame_read(p.b, &f, &got, &closed));
	assert_false(got || closed);
	assert_int_equal(setrlimit(RLIMIT_DATA, &old), 0);
	hang_up(&p);
	T_OK(frame_read(p.b, &f, &got, &closed));
	assert_true(closed && !got);
	pair_end(&p);
}

/* Descriptors with the head, with the body, too many and too few in a batch, a batch with a byte that is not zero. */
static void test_fd_floods(void **state)
{
	static const struct {
		int with_head, with_body, with_batch;
		const char *byte;
	} cases[] = { { 200, 0, 0, "" }, { 0, 200, 0, "" }, { 0, 0, 253, "" }, { 0, 0, 1, "" }, { 0, 0, 3, "x" } };

	(void)state;
	for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
		struct pair p = pair_new(true);
		unsigned char bytes[24];
		struct frame f;
		bool got = false, closed;
		int null = open("/dev/null", O_RDONLY);

		put_head(bytes, (struct raw_head){ "DCPD", 1, FRAME_JOB, 2, 3, 1 });
		if (cases[i].with_head)
			send_with_fds(p.ends[0], bytes, 24, null, cases[i].with_head);
		else
			assert_int_equal(send(p.ends[0], bytes, 24, 0), 24);
		if (cases[i].with_body)
			send_with_fds(p.ends[0], "{}", 2, null, cases[i].with_body);
		else
			assert_int_equal(send(p.ends[0], "{}", 2, 0), 2);
		if (cases[i].with_batch)
			send_with_fds(p.ends[0], cases[i].byte, 1, null, cases[i].with_batch);
		T_ERR(PROTOCOL, frame_read(p.b, &f, &got, &closed));
		assert_int_equal(t_count_fds(), p.fds_before + 3);
		close(null);
		pair_end(&p);
	}
}

/* With the table of open files full, the batch is lost: that ends the connection with a reason, and closes what came. */
static void test_no_room_for_fds(void **state)
{
	struct pair p = pair_new(true);
	unsigned char bytes[26];
	struct frame f;
	bool got, closed;
	struct rlimit old, tight;
	int null = open("/dev/null", O_RDONLY);

	(void)state;
	put_head(bytes, (struct raw_head){ "DCPD", 1, FRAME_JOB, 2, 100, 1 });
	memcpy(bytes + 24, "{}", 2);
	assert_int_equal(send(p.ends[0], bytes, 26, 0), 26);
	send_with_fds(p.ends[0], "", 1, null, 100);
	assert_int_equal(getrlimit(RLIMIT_NOFILE, &old), 0);
	tight = old;
	tight.rlim_cur = (rlim_t)null + 20;
	assert_int_equal(setrlimit(RLIMIT_NOFILE, &tight), 0);
	enum err e = frame_read(p.b, &f, &got, &closed);
	assert_int_equal(setrlimit(RLIMIT_NOFILE, &old), 0);
	assert_int_equal(e, ERR_SYSTEM);
	assert_non_null(strstr(err_last()->text, "limit on open files"));
	close(null);
	pair_end(&p);
}

static void test_peer_that_does_not_read(void **state)
{
	struct pair p = pair_new(true);
	enum err e = OK;
	int sent = 0;

	(void)state;
	while (!e && sent < 100000) {
		e = frame_send(p.b, FRAME_PROGRESS, 1, STR("{\"bytes_done\":1}"), NULL, 0);
		sent++;
	}
	assert_int_equal(e, ERR_LIMIT_EXCEEDED);
	hang_up(&p);
	bool empty;
	T_ERR(WORKER_LOST, frame_flush(p.b, &empty));
	assert_false(frame_wants_write(p.b));
	T_ERR(WORKER_LOST, frame_send(p.b, FRAME_PROGRESS, 1, STR("{}"), NULL, 0));
	pair_end(&p);
}

/* The last messages of a peer that died are heard even after a send to it failed. */
static void test_last_words(void **state)
{
	struct pair p = pair_new(false);
	struct frame f;
	bool got, closed;

	(void)state;
	T_OK(frame_send(p.a, FRAME_FAILED, 4, STR("{\"code\":\"storage_full\"}"), NULL, 0));
	hang_up(&p);
	T_ERR(WORKER_LOST, frame_send(p.b, FRAME_CANCEL, 4, STR("{}"), NULL, 0));
	T_OK(frame_wait(p.b, 1000, &f, &got, &closed));
	assert_true(got && f.type == FRAME_FAILED && f.json.n == 23);
	T_OK(frame_wait(p.b, 1000, &f, &got, &closed));
	assert_true(closed);
	pair_end(&p);
}

static void test_wait_times_out(void **state)
{
	struct pair p = pair_new(false);
	struct frame f;
	bool got, closed;

	(void)state;
	T_OK(frame_wait(p.b, 20, &f, &got, &closed));
	assert_false(got || closed);
	T_OK(frame_send(p.a, FRAME_HELLO, 0, STR("{}"), NULL, 0));
	T_OK(frame_wait(p.b, -1, &f, &got, &closed));
	assert_true(got);
	T_ERR(LIMIT_EXCEEDED,
	      frame_send(p.a, FRAME_HELLO, 0, (struct str){ "", FRAME_JSON_MAX + 1u }, NULL, 0));
	pair_end(&p);
}

static void test_out_of_memory(void **state)
{
	(void)state;
	for (uint64_t nth = 1; nth < 20; nth++) {
		struct pair p = pair_new(false);
		struct frame f;
		bool got = false, closed;
		int null = open("/dev/null", O_RDONLY);

		mem_fail_at(nth);
		enum err e = frame_send(p.a, FRAME_HELLO, 0, STR("{}"), &null, 1);
		if (!e)
			e = frame_read(p.b, &f, &got, &closed);
		mem_fail_at(0);
		assert_true(e == ERR_NO_MEMORY || (e == OK && got));
		close(null);
		pair_end(&p);
	}
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_round_trip),
		cmocka_unit_test(test_thousand_fds),
		cmocka_unit_test(test_large_body),
		cmocka_unit_test(test_one_byte_at_a_time),
		cmocka_unit_test(test_wrong_heads),
		cmocka_unit_test(test_half_frame_then_close),
		cmocka_unit_test(test_fd_floods),
		cmocka_unit_test(test_no_room_for_fds),
		cmocka_unit_test(test_peer_that_does_not_read),
		cmocka_unit_test(test_last_words),
		cmocka_unit_test(test_wait_times_out),
		cmocka_unit_test(test_out_of_memory),
	};
	return cmocka_run_group_tests_name("frame", tests, NULL, NULL);
}
