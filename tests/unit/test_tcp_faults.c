/* test_tcp_faults.c: what can go wrong over tcp: strangers at the port, members that die, stop, come late, call something else, or send
 * what is no message. All members that are left must fail within the deadline, with one code that names one rank. */
#include "lib/t_comm.h"

#include <fcntl.h>
#include <stdlib.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include "comm/comm.h"
#include "comm/tcp_impl.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { SLOWER = 4 };
#else
enum { SLOWER = 1 };
#endif

enum { SIZE = 4, BAD = 2, DEADLINE_MS = 1500, BYTES = 3 << 20, LONG_MS = 60000, LONGER_MS = 100000 };

/* ---- one member does wrong in the middle of a stream of calls ---- */

struct wrong {
	const char *what;
	int (*act)(struct t_group *g, struct comm *c);    /* of member BAD; its exit code */
	enum err want, or_else;
	bool any_rank;                 /* two members accuse each other: which of them is named is not ours to say */
};

static enum err work(struct comm *c)
{
	unsigned char *p = malloc(BYTES), *all = malloc(SIZE * BYTES);
	enum err e = OK;

	memset(p, 7, BYTES);
	for (int i = 0; !e && i < 4; i++) {
		e = comm_broadcast(c, p, BYTES, (uint32_t)i);
		if (!e)
			e = comm_all_gather(c, p, BYTES, all);
		if (!e)
			e = comm_barrier(c);
	}
	free(p);
	free(all);
	return e;
}

static int member(struct t_group *g, struct comm *c)
{
	const struct wrong *w = g->arg;

	/* The first work may still go on here when it is over there. */
	enum err e = work(c);
	double since = t_now();
	if (g->rank == BAD)
		return e ? 1 : w->act(g, c);
	e = t_say(g, e ? e : work(c), since);
	/* A group that failed stays so, at once. */
	if (!e || comm_barrier(c) != e || err_last()->rank != g->shared->said[g->rank].rank)
		return 2;
	return T_ENDED;
}

static void check(const struct wrong *w)
{
	/* Faults that are no matter of the deadline are found long before it, or they would be reported as a timeout. */
	uint32_t deadline_ms = w->want == ERR_PEER_TIMEOUT ? DEADLINE_MS * SLOWER : LONG_MS;
	struct t_group g = { .spec = { .size = SIZE, .inside = COMM_TCP, .deadline_ms = deadline_ms }, .body = member, .arg = w };
	enum err first = OK;
	int64_t rank = -1;

	t_group_start(&g);
	for (uint32_t r = 0; r < SIZE; r++) {
		int status;
		if (r == BAD)
			continue;
		waitpid(g.shared->pids[r], &status, 0);
		const struct t_said *s = &g.shared->said[r];
		if (!WIFEXITED(status) || WEXITSTATUS(status) != T_ENDED)
			T_FAIL("%s: member %u ended with %#x: %s", w->what, r, (unsigned)status, s->text);
		if (!first) {
			first = s->code;
			rank = s->rank;
		}
		if ((s->code != w->want && s->code != w->or_else) || s->code != first)
			T_FAIL("%s: member %u got %s, not %s: %s", w->what, r, err_code_name(s->code), err_code_name(w->want), s->text);
		if (s->rank != rank || (!w->any_rank && rank != BAD))
			T_FAIL("%s: member %u names rank %lld: %s", w->what, r, (long long)s->rank, s->text);
	}
	kill(g.shared->pids[BAD], SIGKILL);
	waitpid(g.shared->pids[BAD], &g.end[BAD], 0);
	t_group_free(&g);
}

static int die(struct t_group *g, struct comm *c)
{
	(void)g;
	(void)c;
	return raise(SIGKILL);
}

static int stop(struct t_group *g, struct comm *c)
{
	(void)g;
	(void)c;
	return raise(SIGSTOP);
}

static int come_late(struct t_group *g, struct comm *c)
{
	(void)g;
	t_sleep_ms(LONGER_MS);
	return work(c) ? 0 : 1;
}

static int leave(struct t_group *g, struct comm *c)
{
	(void)g;
	comm_close(c);
	_exit(0);
}

static int die_half_way(struct t_group *g, struct comm *c)
{
	/* Another thread would do; a timer is simpler. */
	(void)g;
	alarm(0);
	struct timespec t = { 0, 3000000 };
	pid_t me = getpid(), killer = fork();
	if (killer == 0) {
		nanosleep(&t, NULL);
		kill(me, SIGKILL);
		_exit(0);
	}
	for (;;)
		if (work(c))
			return 0;
}

static int other_kind(struct t_group *g, struct comm *c)
{
	(void)g;
	return comm_barrier(c) == ERR_COLLECTIVE_MISMATCH ? 0 : 1;
}

static int other_bytes(struct t_group *g, struct comm *c)
{
	unsigned char *p = calloc(1, BYTES);

	(void)g;
	return comm_broadcast(c, p, BYTES - 1, 0) == ERR_COLLECTIVE_MISMATCH ? 0 : 1;
}

static int other_root(struct t_group *g, struct comm *c)
{
	unsigned char *p = calloc(1, BYTES);

	(void)g;
	return comm_broadcast(c, p, BYTES, 3) == ERR_COLLECTIVE_MISMATCH ? 0 : 1;
}

static int abort_all(struct t_group *g, struct comm *c)
{
	(void)g;
	comm_abort(c, ERR(CANCELLED, "enough of it"));
	return 0;
}

/* ---- frames that are none ---- */

static struct tcp_head good_head(struct comm *c)
{
	const struct tcp_group *g = c->impl;

	return (struct tcp_head){ .type = TCP_DATA, .channel = g->channel, .call = { .number = c->call.number + 1 } };
}

/* Sends n bytes to all others on a link, then waits to be killed. */
static int send_all(struct comm *c, uint32_t index, const void *p, size_t n)
{
	struct tcp_group *g = c->impl;

	for (uint32_t r = 0; r < SIZE; r++)
		if (r != BAD)
			(void)!send(watch_fd(tcp_link_of(g->mesh, r, index)->watch), p, n, MSG_NOSIGNAL);
	t_sleep_ms(LONGER_MS);
	return 0;
}

static int garbage(struct t_group *g, struct comm *c)
{
	static const char request[] = "GET / HTTP/1.1\r\nHost: x\r\nAccept: all kinds of things, so that this is longer than the head of "
				      "a frame is, even of one that fills two cache lines\r\n\r\n";
	_Static_assert(sizeof request > TCP_HEAD_BYTES, "a whole head is looked at");

	(void)g;
	return send_all(c, 1, request, sizeof request - 1);
}

static int send_head(struct comm *c, uint32_t index, const struct tcp_head *h, int group, int generation)
{
	struct tcp_group *g = c->impl;
	struct tcp_identity id = { g->mesh->id.group_id + (unsigned)group, g->mesh->id.generation + (unsigned)generation };
	unsigned char raw[TCP_HEAD_BYTES + 64] = { 0 };

	tcp_head_put(&id, h, raw);
	return send_all(c, index, raw, sizeof raw);
}

static int wrong_group(struct t_group *g, struct comm *c)
{
	struct tcp_head h = good_head(c);

	(void)g;
	return send_head(c, 1, &h, 1, 0);
}

static int wrong_generation(struct t_group *g, struct comm *c)
{
	struct tcp_head h = good_head(c);

	(void)g;
	return send_head(c, 0, &h, 0, 1);
}

static int too_long(struct t_group *g, struct comm *c)
{
	struct tcp_head h = good_head(c);

	(void)g;
	h.length = TCP_BODY_MAX + 1;
	return send_head(c, 1, &h, 0, 0);
}

static int old_call(struct t_group *g, struct comm *c)
{
	struct tcp_head h = good_head(c);

	(void)g;
	h.call = c->call;
	return send_head(c, 1, &h, 0, 0);
}

static int data_on_control(struct t_group *g, struct comm *c)
{
	struct tcp_head h = good_head(c);

	(void)g;
	return send_head(c, 0, &h, 0, 0);
}

static int bad_note(struct t_group *g, struct comm *c)
{
	struct tcp_head h = { .type = TCP_ABORT, .length = 64 };
	unsigned char zeros[64] = { 0 };

	(void)g;
	h.check = tcp_check(zeros, sizeof zeros);
	return send_head(c, 0, &h, 0, 0);
}

/* The right chunk at the right time, but for one bit. */
static int damaged(struct t_group *g, struct comm *c)
{
	enum { CHUNK = BYTES / 16 };
	struct tcp_head h = good_head(c);
	unsigned char *raw = malloc(TCP_HEAD_BYTES + CHUNK);

	(void)g;
	memset(raw, 7, TCP_HEAD_BYTES + CHUNK);
	h.call.kind = COMM_BROADCAST;
	h.call.bytes = BYTES;
	h.length = CHUNK;
	h.check = tcp_check(raw, CHUNK);
	raw[TCP_HEAD_BYTES + 1000] ^= 4;
	tcp_head_put(&((struct tcp_group *)c->impl)->mesh->id, &h, raw);
	return send_all(c, 1, raw, TCP_HEAD_BYTES + CHUNK);
}

static int half_close_data(struct t_group *g, struct comm *c)
{
	struct tcp_group *t = c->impl;

	(void)g;
	for (uint32_t r = 0; r < SIZE; r++)
		if (r != BAD)
			shutdown(watch_fd(tcp_link_of(t->mesh, r, 1)->watch), SHUT_WR);
	t_sleep_ms(LONGER_MS);
	return 0;
}

static int half_close_control(struct t_group *g, struct comm *c)
{
	struct tcp_group *t = c->impl;

	(void)g;
	for (uint32_t r = 0; r < SIZE; r++)
		if (r != BAD)
			shutdown(watch_fd(tcp_link_of(t->mesh, r, 0)->watch), SHUT_WR);
	t_sleep_ms(LONGER_MS);
	return 0;
}

/* Frames of a call that is far ahead, as fast as the sockets take them: they stay in the sockets. */
static int flood(struct t_group *g, struct comm *c)
{
	struct tcp_group *t = c->impl;
	struct tcp_head h = good_head(c);
	size_t n = TCP_HEAD_BYTES + (1 << 20);
	unsigned char *raw = calloc(1, n);

	(void)g;
	h.call.number += 1000;
	h.length = 1 << 20;
	tcp_head_put(&t->mesh->id, &h, raw);
	for (double end = t_now() + LONGER_MS / 1000; t_now() < end;) {
		for (uint32_t r = 0; r < SIZE; r++)
			if (r != BAD)
				(void)!send(watch_fd(tcp_link_of(t->mesh, r, 1)->watch), raw, n, MSG_NOSIGNAL | MSG_DONTWAIT);
		t_sleep_ms(1);
	}
	return 0;
}

static const struct wrong wrongs[] = {
	{ "a member is killed", die, ERR_PEER_LOST, 0, false },
	{ "a member is killed half way", die_half_way, ERR_PEER_LOST, 0, false },
	{ "a member leaves", leave, ERR_PEER_LOST, 0, false },
	{ "a member is stopped", stop, ERR_PEER_TIMEOUT, 0, false },
	{ "a member is late", come_late, ERR_PEER_TIMEOUT, 0, false },
	{ "another kind of call", other_kind, ERR_COLLECTIVE_MISMATCH, 0, true },
	{ "other bytes", other_bytes, ERR_COLLECTIVE_MISMATCH, 0, true },
	{ "another root", other_root, ERR_COLLECTIVE_MISMATCH, 0, true },
	{ "a member aborts", abort_all, ERR_CANCELLED, 0, false },
	{ "garbage", garbage, ERR_COMM_PROTOCOL, 0, false },
	{ "another group", wrong_group, ERR_COMM_PROTOCOL, 0, false },
	{ "another generation", wrong_generation, ERR_COMM_PROTOCOL, 0, false },
	{ "a frame that is too long", too_long, ERR_COMM_PROTOCOL, 0, false },
	{ "a frame of an old call", old_call, ERR_COMM_PROTOCOL, 0, false },
	{ "data on the control link", data_on_control, ERR_COMM_PROTOCOL, 0, false },
	{ "an ABORT that says nothing", bad_note, ERR_COMM_PROTOCOL, 0, false },
	{ "a damaged body", damaged, ERR_COMM_PROTOCOL, 0, false },
	{ "a data link closed half way", half_close_data, ERR_PEER_LOST, 0, false },
	{ "the control link closed half way", half_close_control, ERR_PEER_LOST, 0, false },
	{ "a flood", flood, ERR_PEER_TIMEOUT, ERR_PEER_LOST, false },
};

static void test_members_that_do_wrong(void **state)
{
	const char *only = getenv("WRONG");

	(void)state;
	for (size_t i = 0; i < sizeof wrongs / sizeof *wrongs; i++)
		if (!only || strstr(wrongs[i].what, only))
			check(&wrongs[i]);
}

/* ---- who is to blame, when the others begin, or run, at different times ---- */

/* A chain from `root` on, member by member. Milliseconds from when all are there, in which member BAD hangs. */
struct course {
	const char *what;
	uint32_t root;
	long begins[SIZE];             /* the call */
	uint32_t sleeper;              /* this one is kept from running */
	long sleeps, wakes;
	long stops;                    /* BAD is stopped in the call; 0: it never calls */
};

static double all_there, called;
static const struct tcp_mesh *mesh;

static void sleep_until_ms(long ms)
{
	double left = all_there + (double)(ms * SLOWER) / 1000 - t_now();

	if (left > 0)
		t_sleep_ms((long)(left * 1000) + 1);
}

static enum err follow_course(void *user)
{
	const struct t_group *g = user;
	const struct course *k = g->arg;
	double ms = (t_now() - all_there) * 1000 / SLOWER;

	/* Not before it has said that it waits. */
	if (called == 0 || (double)mesh->said_ns * 1e-9 < called)
		return OK;
	if (g->rank == BAD && k->stops && ms > (double)k->stops)
		raise(SIGSTOP);
	if (g->rank == k->sleeper && ms > (double)k->sleeps)
		sleep_until_ms(k->wakes);
	return OK;
}

static int course_member(struct t_group *g, struct comm *c)
{
	const struct course *k = g->arg;
	unsigned char *p = calloc(1, BYTES);
	enum err e = comm_barrier(c);

	if (e)
		return 1;
	all_there = t_now();
	if (g->rank == BAD && !k->stops)
		raise(SIGSTOP);
	sleep_until_ms(k->begins[g->rank]);
	mesh = ((struct tcp_group *)c->impl)->mesh;
	called = t_now();
	t_say(g, comm_broadcast(c, p, BYTES, k->root), t_now());
	if (!g->shared->said[g->rank].code)
		t_say(g, comm_barrier(c), t_now());
	free(p);
	return T_ENDED;
}

/* last: fails the test. Where members are not run for a whole deadline, another course was taken. */
static bool course_ends_right(const struct course *k, bool last)
{
	struct t_group g = { .spec = { .size = SIZE, .inside = COMM_TCP, .deadline_ms = DEADLINE_MS * SLOWER, .tick = follow_course },
			     .body = course_member, .arg = k };
	bool right = true;

	t_group_start(&g);
	for (uint32_t r = 0; r < SIZE; r++) {
		const struct t_said *s = &g.shared->said[r];
		if (r == BAD)
			continue;
		waitpid(g.shared->pids[r], &g.end[r], 0);
		if (WIFEXITED(g.end[r]) && s->code == ERR_PEER_TIMEOUT && s->rank == BAD)
			continue;
		right = false;
		if (last)
			T_FAIL("%s: member %u: %s, rank %lld: %s", k->what, r, err_code_name(s->code), (long long)s->rank, s->text);
	}
	kill(g.shared->pids[BAD], SIGKILL);
	waitpid(g.shared->pids[BAD], &g.end[BAD], 0);
	t_group_free(&g);
	return right;
}

static void test_courses(void **state)
{
	static const struct course all[] = {
		{ "who has nothing for a member yet does not wait for it", BAD, { 0, 400, 0, 400 }, SIZE, 0, 0, 0 },
		{ "a member that waits is kept from running, and from saying so", BAD, { 500, 0, 0, 500 }, 0, 900, 3000, 0 },
		{ "one was away, and hears what the late one said before it was stopped", 1, { 0, 600, 0, 600 }, 0, 100, 1700, 300 },
	};

	(void)state;
	for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
		if (getenv("WRONG") && !strstr(all[i].what, getenv("WRONG")))
			continue;
		bool right = false;
		for (int left = 3; !right; left--)
			right = course_ends_right(&all[i], left == 1);
	}
}

/* ---- away while it happened ---- */

/* Member 0 sends something that BAD does not read any more, and goes away; meanwhile BAD aborts and goes: that its links were reset is
 * the first that member 0 finds, what was said about it lies in another one: it must not accuse BAD. */
static int away(struct t_group *g, struct comm *c)
{
	unsigned char *p = calloc(1, BYTES);
	enum err e = comm_barrier(c);

	if (e)
		return 1;
	if (g->rank == BAD) {
		while (atomic_load(&g->shared->flags[0]) < SIZE - 1)
			t_sleep_ms(1);
		comm_abort(c, err_at_rank(ERR(PEER_LOST, "it is the last one's fault"), SIZE - 1));
		atomic_store(&g->shared->flags[BAD], 1);
	} else {
		if (g->rank != 0)
			atomic_fetch_add(&g->shared->flags[0], 1);
		e = comm_broadcast(c, p, 60000, 0);
		if (g->rank == 0 && e)
			return 2;
		if (g->rank == 0)
			atomic_fetch_add(&g->shared->flags[0], 1);
		while (!atomic_load(&g->shared->flags[BAD]))
			t_sleep_ms(1);
		t_sleep_ms(100L * SLOWER);
		t_say(g, e ? e : comm_broadcast(c, p, 60000, 0), t_now());
	}
	free(p);
	return 0;
}

static void test_away(void **state)
{
	struct t_group g = { .spec = { .size = SIZE, .inside = COMM_TCP, .deadline_ms = LONG_MS }, .body = away };

	(void)state;
	t_group_start(&g);
	t_group_wait(&g);
	for (uint32_t r = 0; r < SIZE; r++) {
		const struct t_said *s = &g.shared->said[r];
		if (g.end[r] || (r != BAD && (s->code != ERR_PEER_LOST || s->rank != SIZE - 1)))
			T_FAIL("member %u ended with %d: %s, rank %lld: %s", r, g.end[r], err_code_name(s->code), (long long)s->rank,
			       s->text);
	}
	t_group_free(&g);
}

/* ---- opening ---- */

static int greet_and_work(struct t_group *g, struct comm *c)
{
	(void)g;
	return work(c) ? 1 : 0;
}

static int connect_to(const struct tcp_card *card, const void *p, size_t n)
{
	int fd = socket(card->at.ss_family, SOCK_STREAM, 0);

	if (fd < 0 || connect(fd, (const struct sockaddr *)&card->at, sizeof(struct sockaddr_in6)) < 0)
		return -1;
	if (n)
		(void)!send(fd, p, n, MSG_NOSIGNAL);
	return fd;
}

/* Looks at all ports that are open, in every way, until the group is there; keeps what it has open. */
static void bother(struct t_group *g)
{
	struct tcp_identity id = { g->spec.group_id, g->spec.generation };
	unsigned char hello[TCP_HELLO_BYTES], mine[TCP_HELLO_BYTES + TCP_MAC_BYTES] = { 0 };
	struct tcp_hello h = { .rank = SIZE - 1, .link = 1 };
	struct tcp_card card;
	int held = 0;

	while (atomic_load(&g->shared->met[0]) < SIZE)
		t_sleep_ms(1);
	tcp_hello_put(&id, &h, hello);
	memcpy(mine, hello, sizeof hello);
	for (int turn = 0; turn < 150; turn++)
		for (uint32_t r = 0; r < SIZE; r++) {
			if (tcp_card_get(g->shared->cards[0][r], &card))
				_exit(1);
			int fds[] = { connect_to(&card, NULL, 0), connect_to(&card, "SSH-2.0-x\r\n", 11),
				      connect_to(&card, hello, sizeof hello), connect_to(&card, mine, sizeof mine) };
			for (size_t i = 0; i < sizeof fds / sizeof *fds; i++) {
				held += fds[i] >= 0;
				if (fds[i] >= 0 && (turn + (int)i) % 3 == 0)
					close(fds[i]);
			}
		}
	_exit(held > 100 ? 0 : 1);
}

static void test_strangers(void **state)
{
	struct t_group g = { .spec = { .size = SIZE, .inside = COMM_TCP, .group_id = 3, .secret = "of members", .deadline_ms = LONG_MS },
			     .body = greet_and_work, .lingerer = SIZE - 1, .linger_ms = 400 };
	int status;

	(void)state;
	t_group_start(&g);
	pid_t stranger = fork();
	if (stranger == 0)
		bother(&g);
	t_group_wait(&g);
	for (uint32_t r = 0; r < SIZE; r++)
		if (g.end[r])
			T_FAIL("member %u ended with %d: %s", r, g.end[r], g.shared->said[r].text);
	assert_int_equal(waitpid(stranger, &status, 0), stranger);
	assert_int_equal(status, 0);
	t_group_free(&g);
}

static void alter_secret(struct t_group *g, uint32_t rank)
{
	if (rank == 1)
		g->spec.secret[5] ^= 1;
}

static void alter_group(struct t_group *g, uint32_t rank)
{
	if (rank == 1)
		g->spec.group_id++;
}

static void stay_away(struct t_group *g, uint32_t rank)
{
	unsigned char all[SIZE * COMM_RENDEZVOUS_BYTES], mine[COMM_RENDEZVOUS_BYTES];
	struct tcp_card card = { .connections = 1, .at = { .ss_family = AF_INET } };

	if (rank != 1)
		return;
	/* It has an address, where nobody is. */
	((struct sockaddr_in *)(void *)&card.at)->sin_port = htons(1);
	((struct sockaddr_in *)(void *)&card.at)->sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	tcp_card_put(&card, mine);
	_exit(t_comm_rendezvous(g, mine, all) ? 1 : T_ENDED);
}

static void cannot_listen(struct t_group *g, uint32_t rank)
{
	if (rank == 1)
		g->spec.listen = "no-such-interface";
}

static int nothing(struct t_group *g, struct comm *c)
{
	(void)g;
	(void)c;
	return 0;
}

static void test_opening(void **state)
{
	static const struct {
		const char *what;
		void (*before)(struct t_group *, uint32_t);
		enum err others, other, its;
	} cases[] = {
		{ "another secret", alter_secret, ERR_PEER_TIMEOUT, ERR_COMM_PROTOCOL, OK },
		{ "another group", alter_group, ERR_PEER_TIMEOUT, ERR_PEER_LOST, OK },
		{ "a member that never comes", stay_away, ERR_PEER_TIMEOUT, ERR_PEER_LOST, OK },
		{ "a member that cannot listen", cannot_listen, ERR_PEER_LOST, OK, ERR_BACKEND_UNAVAILABLE },
	};

	(void)state;
	for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
		struct t_group g = { .spec = { .size = SIZE, .inside = COMM_TCP, .deadline_ms = DEADLINE_MS * SLOWER }, .body = nothing,
				     .before = cases[i].before };
		t_group_start(&g);
		t_group_wait(&g);
		for (uint32_t r = 0; r < SIZE; r++) {
			const struct t_said *s = &g.shared->said[r];
			bool named = r == 1 || s->rank == 1;
			bool its = !cases[i].its || s->code == cases[i].its;
			bool code = r == 1 ? its : s->code == cases[i].others || s->code == cases[i].other;
			if (g.end[r] != T_ENDED || !code || !named)
				T_FAIL("%s: member %u ended with %d: %s, rank %lld: %s", cases[i].what, r, g.end[r],
				       err_code_name(s->code), (long long)s->rank, s->text);
		}
		t_group_free(&g);
	}
}

/* ---- callbacks ---- */

static enum err tick(void *user)
{
	struct t_group *g = user;

	return g->rank == BAD && atomic_load(&g->shared->flags[0]) ? ERR(CANCELLED, "no more") : OK;
}

static enum err pack_fails(void *user, uint64_t index, void *out)
{
	(void)user;
	(void)out;
	return index == 3 ? ERR(MISSING_KEY, "nothing to pack") : OK;
}

static enum err unpack_any(void *user, uint64_t index, const void *in)
{
	(void)user;
	(void)index;
	(void)in;
	return OK;
}

static int callbacks(struct t_group *g, struct comm *c)
{
	const struct comm_message list[] = { { 0, 1, 100 }, { 1, 3, 5 }, { 3, 0, 9 }, { BAD, 1, 10 }, { 0, 3, 1 << 20 } };
	const struct comm_exchange x = { list, 5, pack_fails, unpack_any, NULL };

	if (g->arg) {
		atomic_fetch_add(&g->shared->flags[1], 1);
		while (atomic_load(&g->shared->flags[1]) < SIZE) /* else the tick ends what others still open */
			t_sleep_ms(1);
		atomic_store(&g->shared->flags[0], 1);
		if (g->rank != 0)
			t_say(g, comm_barrier(c), t_now());
		if (g->rank == BAD)
			atomic_store(&g->shared->flags[BAD], 1);
		while (g->rank == 0 && !atomic_load(&g->shared->flags[BAD]))
			t_sleep_ms(1);
		if (g->rank == 0)
			t_say(g, comm_barrier(c), t_now());
		return 0;
	}
	enum err e = comm_exchange(c, &x);
	t_say(g, e ? e : comm_barrier(c), t_now());
	return 0;
}

static void test_callbacks(void **state)
{
	(void)state;
	for (int with_tick = 0; with_tick < 2; with_tick++) {
		struct t_group g = { .spec = { .size = SIZE, .inside = COMM_TCP, .deadline_ms = LONG_MS, .tick = tick }, .body = callbacks,
				     .arg = with_tick ? "" : NULL };
		t_group_start(&g);
		t_group_wait(&g);
		for (uint32_t r = 0; r < SIZE; r++) {
			const struct t_said *s = &g.shared->said[r];
			if (s->code != (with_tick ? ERR_CANCELLED : ERR_MISSING_KEY) || s->rank != BAD)
				T_FAIL("member %u: %s, rank %lld: %s", r, err_code_name(s->code), (long long)s->rank, s->text);
		}
		t_group_free(&g);
	}
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_members_that_do_wrong),
		cmocka_unit_test(test_courses),
		cmocka_unit_test(test_away),
		cmocka_unit_test(test_strangers),
		cmocka_unit_test(test_opening),
		cmocka_unit_test(test_callbacks),
	};
	if (getenv("ONLY"))
		cmocka_set_test_filter(getenv("ONLY"));
	return cmocka_run_group_tests_name("tcp_faults", tests, NULL, NULL);
}
