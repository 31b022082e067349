/* test_comm_tcp.c: the collectives over tcp: 2 to 5 processes, one and several connections, IPv4 and IPv6; splits; every message
 * pattern of exchange. What goes wrong is in test_tcp_faults.c. */
#include "lib/t_comm.h"

#include <stdlib.h>

#include "comm/comm.h"

/* A text that repeats after a prime number of bytes: a chunk at a wrong place differs. Another rank's begins elsewhere. */
enum { PERIOD = 65521 };

static size_t begin_of(uint32_t rank)
{
	return (size_t)rank * 997 % PERIOD;
}

static const unsigned char *text(void)
{
	static unsigned char t[PERIOD];

	if (!t[0])
		for (unsigned i = 0; i < PERIOD; i++)
			t[i] = (unsigned char)((i * 2654435761U) >> 13 | 1);
	return t;
}

static void fill(unsigned char *p, uint64_t n, uint32_t rank)
{
	for (uint64_t done = 0, at = begin_of(rank), k; done < n; done += k, at = 0) {
		k = PERIOD - at < n - done ? PERIOD - at : n - done;
		memcpy(p + done, text() + at, k);
	}
}

static bool holds(const unsigned char *p, uint64_t n, uint32_t rank)
{
	for (uint64_t done = 0, at = begin_of(rank), k; done < n; done += k, at = 0) {
		k = PERIOD - at < n - done ? PERIOD - at : n - done;
		if (memcmp(p + done, text() + at, k) != 0)
			return false;
	}
	return true;
}

#define CHECK(cond)                                                                          \
	do {                                                                                 \
		if (!(cond)) {                                                               \
			fprintf(stderr, "rank %u, line %d: %s: %s\n", g->rank, __LINE__, #cond, err_last()->text); \
			return 1;                                                            \
		}                                                                            \
	} while (0)

static const uint64_t sizes[] = { 0, 1, 1000, 65536, 65537, 300001, 1 << 20, (5 << 20) + 3 };
enum { SIZES = sizeof sizes / sizeof *sizes, LARGEST = (5 << 20) + 3 };

static int broadcasts(struct t_group *g, struct comm *c)
{
	unsigned char *p = malloc(LARGEST);

	for (uint32_t root = 0; root < comm_size(c); root++)
		for (int s = 0; s < SIZES; s++) {
			memset(p, 0xee, LARGEST);
			if (root == comm_rank(c))
				fill(p, sizes[s], root);
			CHECK(comm_broadcast(c, p, sizes[s], root) == OK);
			CHECK(holds(p, sizes[s], root));
			CHECK(sizes[s] == LARGEST || p[sizes[s]] == 0xee);
		}
	CHECK(comm_barrier(c) == OK);
	free(p);
	return 0;
}

static int gathers(struct t_group *g, struct comm *c)
{
	uint32_t n = comm_size(c), me = comm_rank(c);
	unsigned char *in = malloc(LARGEST), *out = malloc((uint64_t)n * LARGEST + 1);
	uint64_t bytes[T_MEMBERS_MAX], at;

	for (int s = 0; s < SIZES; s++) {
		fill(in, sizes[s], me);
		out[n * sizes[s]] = 0xee;
		CHECK(comm_all_gather(c, in, sizes[s], out) == OK && out[n * sizes[s]] == 0xee);
		for (uint32_t r = 0; r < n; r++)
			CHECK(holds(out + r * sizes[s], sizes[s], r));
		/* Uneven, one of them empty, `in` in its place. */
		at = 0;
		for (uint32_t r = 0; r < n; r++)
			bytes[r] = r == 1 ? 0 : sizes[s] * (r + 1) / n;
		for (uint32_t r = 0; r < me; r++)
			at += bytes[r];
		memset(out, 0, n * sizes[s]);
		fill(out + at, bytes[me], me);
		CHECK(comm_all_gather_v(c, out + at, bytes, out) == OK);
		at = 0;
		for (uint32_t r = 0; r < n; at += bytes[r++])
			CHECK(holds(out + at, bytes[r], r));
		for (uint32_t root = 0; root < n; root += n > 1 ? n - 1 : 1) {
			fill(in, bytes[me], me);
			memset(out, 0, n * sizes[s]);
			CHECK(comm_gather(c, in, bytes, root == me ? out : NULL, root) == OK);
			at = 0;
			for (uint32_t r = 0; root == me && r < n; at += bytes[r++])
				CHECK(holds(out + at, bytes[r], r));
			/* The root's result goes back to the buffer that it came from. */
			memset(in, 0, LARGEST);
			CHECK(comm_scatter(c, root == me ? out : NULL, bytes, in, root) == OK);
			CHECK(holds(in, bytes[me], me));
		}
	}
	free(in);
	free(out);
	return 0;
}

static int reductions(struct t_group *g, struct comm *c)
{
	enum { COUNT = 100003 };
	uint32_t n = comm_size(c), me = comm_rank(c);
	int64_t *in = malloc(n * COUNT * sizeof *in), *out = malloc(COUNT * sizeof *out);

	for (uint64_t i = 0; i < n * (uint64_t)COUNT; i++)
		in[i] = (int64_t)i * (me + 1);
	CHECK(comm_all_reduce(c, in, out, COUNT, DT_INT64, REDUCE_SUM) == OK);
	for (int64_t i = 0; i < COUNT; i++)
		CHECK(out[i] == i * n * (n + 1) / 2);
	CHECK(comm_reduce(c, in, out, COUNT, DT_INT64, REDUCE_MAX, n - 1) == OK);
	for (int64_t i = 0; me == n - 1 && i < COUNT; i++)
		CHECK(out[i] == i * n);
	CHECK(comm_reduce_scatter(c, in, out, COUNT, DT_INT64, REDUCE_SUM) == OK);
	for (int64_t i = 0; i < COUNT; i++)
		CHECK(out[i] == (i + (int64_t)me * COUNT) * n * (n + 1) / 2);
	free(in);
	free(out);
	return 0;
}

/* ---- exchange ---- */

struct mail {
	struct t_group *g;
	const struct comm_message *messages;
	uint64_t next_in[T_MEMBERS_MAX], next_out[T_MEMBERS_MAX], unpacked; /* per pair: the order is kept */
	bool bad;
};

static enum err pack(void *user, uint64_t index, void *out)
{
	struct mail *m = user;
	const struct comm_message *msg = &m->messages[index];

	m->bad = m->bad || msg->from != m->g->rank || index < m->next_out[msg->to];
	m->next_out[msg->to] = index + 1;
	fill(out, msg->bytes, (uint32_t)index);
	return OK;
}

static enum err unpack(void *user, uint64_t index, const void *in)
{
	struct mail *m = user;
	const struct comm_message *msg = &m->messages[index];

	m->bad = m->bad || msg->to != m->g->rank || index < m->next_in[msg->from] || !holds(in, msg->bytes, (uint32_t)index);
	m->next_in[msg->from] = index + 1;
	m->unpacked++;
	return OK;
}

static int exchange_once(struct t_group *g, struct comm *c, const struct comm_message *messages, uint64_t count)
{
	struct mail m = { .g = g, .messages = messages };
	const struct comm_exchange x = { messages, count, pack, unpack, &m };
	uint64_t mine = 0;

	for (uint64_t i = 0; i < count; i++)
		mine += messages[i].to == comm_rank(c);
	CHECK(comm_exchange(c, &x) == OK);
	CHECK(!m.bad && m.unpacked == mine);
	return 0;
}

static int exchanges(struct t_group *g, struct comm *c)
{
	enum { MANY = 1500 };
	static struct comm_message list[MANY];
	uint32_t n = comm_size(c);
	unsigned seed = 7;

	for (int round = 0; round < 5; round++) {
		uint64_t count = round == 4 ? 0 : round == 3 ? MANY : 120;
		for (uint64_t i = 0; i < count; i++) {
			uint32_t a = (uint32_t)rand_r(&seed), b = (uint32_t)rand_r(&seed);
			/* Anything; all to one; one to all; many small ones. */
			list[i].from = round == 2 ? 1 % n : a % n;
			list[i].to = round == 1 ? 0 : b % n;
			list[i].bytes = round == 3 ? a % 3000 : a % 5 == 0 ? 0 : a % 7 == 0 ? COMM_BLOCK_MAX : b % 200000;
		}
		CHECK(exchange_once(g, c, list, count) == 0);
	}
	/* Both at once, far more than any socket holds. */
	for (int i = 0; i < 200; i++)
		list[i] = (struct comm_message){ (uint32_t)i % n, (uint32_t)(i + 1) % n, COMM_BLOCK_MAX };
	CHECK(exchange_once(g, c, list, 60) == 0);
	return 0;
}

/* ---- splits ---- */

static int splits(struct t_group *g, struct comm *c)
{
	uint32_t n = comm_size(c), me = comm_rank(c), ranks[T_MEMBERS_MAX], count = 0;
	struct comm *half, *again, *turned;
	unsigned char *p = malloc(2 << 20);
	unsigned char all[T_MEMBERS_MAX];

	for (uint32_t r = me % 2; r < n; r += 2)
		ranks[count++] = r;
	CHECK(comm_split(c, ranks, count, &half) == OK && comm_split(c, ranks, count, &again) == OK);
	for (uint32_t r = 0; r < n; r++)
		ranks[r] = n - 1 - r;
	CHECK(comm_split(c, ranks, n, &turned) == OK && comm_rank(turned) == n - 1 - me);
	for (int i = 0; i < 3; i++) {
		if (comm_rank(half) == 0)
			fill(p, 2 << 20, me % 2);
		CHECK(comm_broadcast(half, p, 2 << 20, 0) == OK && holds(p, 2 << 20, me % 2));
		/* A member that is done there may be in the next group's call already. */
		unsigned char mine = (unsigned char)me;
		CHECK(comm_all_gather(turned, &mine, 1, all) == OK && all[0] == n - 1 && all[n - 1] == 0);
		CHECK(comm_all_gather(again, &mine, 1, all) == OK && all[0] == me % 2);
		CHECK(comm_all_gather(c, &mine, 1, all) == OK && all[0] == 0);
		CHECK(comm_barrier(half) == OK);
	}
	comm_close(half);
	comm_close(again);
	comm_close(turned);
	CHECK(comm_barrier(c) == OK);
	free(p);
	return 0;
}

/* ---- all of them, over all shapes ---- */

static int everything(struct t_group *g, struct comm *c)
{
	CHECK(comm_barrier(c) == OK);
	return broadcasts(g, c) || gathers(g, c) || reductions(g, c) || exchanges(g, c) || (comm_size(c) > 1 && splits(g, c));
}

static void test_sizes(void **state)
{
	(void)state;
	for (uint32_t n = 1; n <= 5; n++) {
		struct t_group g = { .spec = { .size = n, .inside = COMM_TCP, .group_id = 5, .generation = 9 }, .body = everything };
		t_group_run(&g);
	}
}

static void test_connections(void **state)
{
	(void)state;
	for (uint32_t k = 2; k <= 3; k++) {
		struct t_group g = { .spec = { .size = 3, .inside = COMM_TCP, .connections = k, .listen = k == 2 ? "::1" : "lo" },
				     .body = everything };
		t_group_run(&g);
	}
}

/* More members than are dealt with directly: the ring, the deeper tree. */
static int few_calls(struct t_group *g, struct comm *c)
{
	uint32_t n = comm_size(c);
	unsigned char *all = malloc(n * 300000UL), *mine = malloc(300000);

	fill(mine, 300000, comm_rank(c));
	CHECK(comm_all_gather(c, mine, 300000, all) == OK);
	for (uint32_t r = 0; r < n; r++)
		CHECK(holds(all + r * 300000UL, 300000, r));
	for (uint32_t root = 0; root < n; root += 5) {
		fill(mine, 1000, root == comm_rank(c) ? root : 99);
		CHECK(comm_broadcast(c, mine, 1000, root) == OK && holds(mine, 1000, root));
	}
	CHECK(comm_barrier(c) == OK);
	CHECK(comm_counts(c).received_bytes >= (n - 1) * 300000UL && comm_counts(c).sent_bytes >= (n - 1) * 300000UL);
	CHECK(comm_counts(c).received_bytes <= (n - 1) * 300000UL + 5000);
	free(all);
	free(mine);
	return 0;
}

static void test_many_members(void **state)
{
	struct t_group g = { .spec = { .size = 11, .inside = COMM_TCP }, .body = few_calls };

	(void)state;
	t_group_run(&g);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_sizes),
		cmocka_unit_test(test_connections),
		cmocka_unit_test(test_many_members),
	};
	return cmocka_run_group_tests_name("comm_tcp", tests, NULL, NULL);
}
