/* test_comm_shm.c: groups of real processes over shared memory: every collective, and every way to be a bad member.
 * Kills at random moments: test_comm_kills.c. */
#include "lib/t_hurt.h"

#include "comm/comm_impl.h"

static void every_collective(void **state)
{
	static const uint32_t sizes[] = { 1, 2, 3, 4, 6 };

	(void)state;
	for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
		t_group_run(COMM_SHM, sizes[i], t_every_collective, NULL);
}

/* ---- windows ---- */

enum { PART = 3000000 };

/* Parts lie in memory that all know: nothing is copied but to where it must be. One member's does not, and goes through blocks. */
static enum err use_windows(struct comm *c, struct t_group *g)
{
	unsigned char *shared = (unsigned char *)(uintptr_t)g->arg;
	uint32_t me = comm_rank(c), size = comm_size(c);
	unsigned char *mine = shared + (size_t)me * PART, *out = malloc((size_t)size * PART), *all = malloc((size_t)size * PART);
	uint64_t parts[T_RANKS];

	T_CHECK(out && all);
	for (uint64_t i = 0; i < PART; i++)
		mine[i] = t_byte(me, 1, i);
	TRY(comm_window_add(c, 77, shared, (uint64_t)size * PART));
	uint64_t before = comm_counts(c).copied_bytes;
	unsigned char *in = me == 1 ? memcpy(all, mine, PART) : mine;
	TRY(comm_all_gather(c, in, PART, out));
	T_CHECK(comm_counts(c).copied_bytes - before == (uint64_t)(size - 1) * PART);
	for (uint32_t r = 0; r < size; r++)
		T_CHECK(t_is(out + (size_t)r * PART, r, 1, 0, PART));
	TRY(comm_broadcast(c, me == 2 ? mine : out, PART, 2));
	T_CHECK(t_is(me == 2 ? mine : out, 2, 1, 0, PART));
	for (uint32_t r = 0; r < size; r++)
		parts[r] = PART - r;
	TRY(comm_gather(c, mine, parts, out, 0));
	for (uint64_t r = 0, at = 0; me == 0 && r < size; at += parts[r++])
		T_CHECK(t_is(out + at, (uint32_t)r, 1, 0, parts[r]));
	for (uint32_t r = 0; r < size; r++)
		parts[r] = 20000 + r;
	TRY(comm_scatter(c, me == 3 ? shared : NULL, parts, out, 3));
	uint64_t at = me * 20000 + me * (me - 1) / 2;
	T_CHECK(memcmp(out, shared + at, parts[me]) == 0);
	free(out);
	free(all);
	return comm_barrier(c);
}

static void windows(void **state)
{
	void *shared = mmap(NULL, (size_t)4 * PART, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);

	(void)state;
	assert_true(shared != MAP_FAILED);
	t_group_run(COMM_SHM, 4, use_windows, shared);
	munmap(shared, (size_t)4 * PART);
}

/* ---- failures: all members end with the same error and rank ---- */

static void expect_all(struct t_group *g, uint32_t but, enum err code, int64_t rank)
{
	t_group_start(g);
	assert_int_equal(t_group_wait(g), 0);
	for (uint32_t r = 0; r < g->spec.size; r++)
		if (r != but)
			t_group_expect(g, r, code, rank);
	t_group_end(g);
}

static enum err mismatch(struct comm *c, struct t_group *g)
{
	unsigned char data[4096] = { 0 }, out[4 * 4096];

	switch (*(const int *)g->arg) {
	case 0:
		return comm_broadcast(c, data, comm_rank(c) == 2 ? 100 : 101, 0);
	case 1:
		return comm_broadcast(c, data, 10, comm_rank(c) == 2);
	case 2:
		return comm_rank(c) == 2 ? comm_barrier(c) : comm_all_gather(c, data, 4096, out);
	case 3:
		return comm_all_reduce(c, data, data, 4, comm_rank(c) == 2 ? DT_INT32 : DT_FLOAT32, REDUCE_SUM);
	default:
		return comm_all_reduce(c, data, data, 4, DT_INT32, comm_rank(c) == 2 ? REDUCE_MIN : REDUCE_MAX);
	}
}

static void mismatches(void **state)
{
	(void)state;
	for (int kind = 0; kind < 5; kind++) {
		struct t_group g;
		t_group_init(&g, COMM_SHM, 4, mismatch);
		g.arg = &kind;
		expect_all(&g, UINT32_MAX, ERR_COLLECTIVE_MISMATCH, -2);
	}
}

static enum err unsupported(struct comm *c, struct t_group *g)
{
	unsigned char data[16] = { 0 };

	(void)g;
	T_CHECK(comm_all_reduce(c, data, data, 4, DT_FLOAT4_E2M1FN_X2, REDUCE_SUM) == ERR_DTYPE_UNSUPPORTED);
	T_CHECK(comm_reduce(c, data, data, 1, DT_COMPLEX64, REDUCE_MAX, 0) == ERR_DTYPE_UNSUPPORTED);
	T_CHECK(comm_broadcast(c, data, 1, comm_size(c)) == ERR_INVALID_REQUEST);
	return comm_barrier(c); /* the group is as good as before */
}

static void not_every_dtype(void **state)
{
	(void)state;
	t_group_run(COMM_SHM, 3, unsupported, NULL);
}

static enum err cancel_in_tick(void *user)
{
	struct t_group *g = user;

	/* Not the first time: a tick comes back. */
	return g->spec.rank == 1 && atomic_fetch_add(&g->shared->flags[1], 1) == 3 ? ERR(CANCELLED, "the job was cancelled") : OK;
}

/* Rank 0 comes when the others have failed; if it were early, they would not. */
static enum err come_when_all_is_over(struct comm *c, struct t_group *g)
{
	for (uint32_t r = 1; comm_rank(c) == 0 && r < g->spec.size; r++)
		while (g->shared->ends[r].code == -1)
			t_sleep_ms(1);
	return comm_barrier(c);
}

static void a_tick_that_fails(void **state)
{
	struct t_group g;

	(void)state;
	t_group_init(&g, COMM_SHM, 4, come_when_all_is_over);
	g.spec.tick = cancel_in_tick;
	expect_all(&g, UINT32_MAX, ERR_CANCELLED, 1);
}

static enum err abort_it(struct comm *c, struct t_group *g)
{
	(void)g;
	if (comm_rank(c) == 3) {
		t_sleep_ms(50);
		comm_abort(c, err_at_fqn(ERR(SHM_EXHAUSTED, "no room here"), "model.w", 7));
	}
	enum err e = comm_barrier(c);
	T_CHECK(strcmp(err_last()->fqn, "model.w") == 0 && strcmp(err_last()->text, "no room here") == 0);
	T_CHECK(comm_barrier(c) == e);
	return e;
}

static void an_abort(void **state)
{
	struct t_group g;

	(void)state;
	t_group_init(&g, COMM_SHM, 4, abort_it);
	expect_all(&g, UINT32_MAX, ERR_SHM_EXHAUSTED, 3);
}

/* A failure in a subgroup is the group's, and the other way round. */
static enum err fail_in_subgroup(struct comm *c, struct t_group *g)
{
	int64_t mesh[2] = { 2, 2 };
	struct comm *sub;
	enum err e;

	TRY(comm_split_mesh(c, mesh, 2, 1, &sub));
	if (comm_rank(c) == 2)
		_exit(1);
	if (*(const int *)g->arg == 0)
		e = comm_rank(c) == 3 ? comm_barrier(sub) : comm_barrier(c);
	else
		e = comm_rank(c) == 3 ? comm_barrier(c) : OK;
	while (!e) {
		t_sleep_ms(5);
		e = comm_barrier(sub);
	}
	comm_close(sub);
	return e;
}

static void subgroups_fail_together(void **state)
{
	(void)state;
	for (int kind = 0; kind < 2; kind++) {
		struct t_group g;
		t_group_init(&g, COMM_SHM, 4, fail_in_subgroup);
		g.arg = &kind;
		expect_all(&g, 2, ERR_PEER_LOST, 2);
	}
}

/* ---- members that are gone, stopped, late, or strangers ---- */

static void one_never_joins(void **state)
{
	(void)state;
	for (uint32_t r = 0; r < 3; r += 2) {
		struct t_group g;
		t_group_init(&g, COMM_SHM, 3, come_when_all_is_over);
		g.absent = 1u << r;
		g.spec.deadline_ms = 1000;
		expect_all(&g, r, ERR_PEER_TIMEOUT, r);
	}
}

static void one_is_late(void **state)
{
	struct t_group g;

	(void)state;
	t_group_init(&g, COMM_SHM, 3, come_when_all_is_over);
	g.spec.deadline_ms = 300;
	expect_all(&g, UINT32_MAX, ERR_PEER_TIMEOUT, 0);
}

static void another_arena(void **state)
{
	struct t_group g;
	int fd = memfd_create("other", 0);

	(void)state;
	t_group_init(&g, COMM_SHM, 2, come_when_all_is_over);
	g.spec.arena_fd = fd; /* not sealed, not an arena */
	expect_all(&g, UINT32_MAX, ERR_BACKEND_UNAVAILABLE, -1);
	close(fd);
}

/* A rank that has done everything may leave: watching the group does not fail for that, waiting for the rank does. */
static enum err leave_early(struct comm *c, struct t_group *g)
{
	if (comm_rank(c) == 1)
		return OK;
	while (*(volatile int *)&g->shared->ends[1].code != 0)
		t_sleep_ms(1);
	t_sleep_ms(100);
	TRY(c->ops->poll(c));
	T_CHECK(comm_barrier(c) == ERR_PEER_LOST && err_last()->rank == 1);
	return OK;
}

static void leaving_is_no_failure(void **state)
{
	(void)state;
	t_group_run(COMM_SHM, 2, leave_early, NULL);
}

static void hurt(uint32_t size, uint32_t victim, int signal_number, long after_us, enum err code, uint32_t deadline_ms)
{
	struct t_group g;

	t_group_init(&g, COMM_SHM, size, t_churn);
	g.spec.deadline_ms = deadline_ms;
	t_hurt(&g, victim, signal_number, after_us, code);
}

static void one_is_stopped(void **state)
{
	(void)state;
	hurt(4, 2, SIGSTOP, 20000, ERR_PEER_TIMEOUT, 1500);
	hurt(3, 0, SIGSTOP, 33333, ERR_PEER_TIMEOUT, 1500);
}

/* Rank 3 waits for rank 2 in a subgroup; the others wait for rank 3, which makes the next one, and are late first: 2 is to blame. */
static enum err wait_for_one_that_waits(struct comm *c, struct t_group *g)
{
	uint32_t last_first[4] = { 3, 2, 1, 0 };
	int64_t mesh[2] = { 2, 2 };
	struct comm *sub;

	(void)g;
	if (comm_rank(c) == 2)
		for (;;)
			pause();
	if (comm_rank(c) == 3)
		t_sleep_ms(500);
	TRY(comm_split_mesh(c, mesh, 2, 1, &sub));
	comm_close(sub);
	TRY(comm_split(c, last_first, 4, &sub));
	comm_close(sub);
	return OK;
}

static void one_waits_for_another(void **state)
{
	struct t_group g;

	(void)state;
	t_group_init(&g, COMM_SHM, 4, wait_for_one_that_waits);
	g.spec.deadline_ms = 1500;
	t_hangs(&g, 2);
}

/* Rank 0 hangs while it packs; rank 1 still sends to 2, slowly, when its deadline is over, which is first: 0 is to blame. */
static enum err pack_slowly(void *user, uint64_t index, void *out)
{
	const struct t_group *g = user;

	(void)index;
	memset(out, 1, COMM_BLOCK_MAX);
	while (g->spec.rank == 0)
		pause();
	t_sleep_ms(300);
	return OK;
}

static enum err unpack_nothing(void *user, uint64_t index, const void *in)
{
	(void)user;
	(void)index;
	(void)in;
	return OK;
}

static enum err move_beside_one_that_hangs(struct comm *c, struct t_group *g)
{
	struct comm_message list[20] = { { 0, 2, COMM_BLOCK_MAX } };
	const struct comm_exchange x = { list, 20, pack_slowly, unpack_nothing, g };

	for (int i = 1; i < 20; i++)
		list[i] = (struct comm_message){ 1, 2, COMM_BLOCK_MAX };
	if (comm_rank(c) != 1)
		t_sleep_ms(500);
	return comm_exchange(c, &x);
}

static void one_hangs_beside_others(void **state)
{
	struct t_group g;

	(void)state;
	t_group_init(&g, COMM_SHM, 3, move_beside_one_that_hangs);
	g.spec.deadline_ms = 1500;
	t_hangs(&g, 0);
}

/* One member writes at random into all that it can reach in the arena: the others end, with whatever, and do not crash. */
static enum err go_mad(struct comm *c, struct t_group *g)
{
	static unsigned char noise[8192];
	uint32_t seed = *(const uint32_t *)g->arg;

	if (comm_rank(c) != 1)
		return t_churn(c, g);
	while (!atomic_load(&g->shared->flags[0]))
		t_sleep_ms(1);
	for (int i = 0; i < 2000; i++) {
		seed = seed * 1664525 + 1013904223;
		for (size_t k = 0; k < sizeof noise; k++)
			noise[k] = (unsigned char)(seed >> (k % 24));
		/* The arena's head, and the region's head and members behind it. */
		if (pwrite(g->arena, noise, 1 + (seed >> 16) % 64, 4096 + (off_t)(seed >> 8) % (4096 * 5)) < 0)
			break;
		if (i % 50 == 0)
			t_sleep_ms(1);
	}
	_exit(0);
}

static void a_mad_member(void **state)
{
	(void)state;
	for (uint32_t seed = 1; seed <= 4; seed++) {
		struct t_group g;
		t_group_init(&g, COMM_SHM, 4, go_mad);
		g.arg = &seed;
		g.spec.deadline_ms = 700;
		t_group_start(&g);
		assert_int_equal(t_group_wait(&g), 0);
		for (uint32_t r = 0; r < 4; r++)
			if (!WIFEXITED(g.status[r]))
				T_FAIL("seed %u: rank %u crashed, status %x", seed, r, g.status[r]);
		t_group_end(&g);
	}
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(every_collective), cmocka_unit_test(windows), cmocka_unit_test(mismatches),
		cmocka_unit_test(not_every_dtype), cmocka_unit_test(a_tick_that_fails), cmocka_unit_test(an_abort),
		cmocka_unit_test(subgroups_fail_together), cmocka_unit_test(one_never_joins), cmocka_unit_test(one_is_late),
		cmocka_unit_test(another_arena), cmocka_unit_test(leaving_is_no_failure),
		cmocka_unit_test(one_is_stopped),
		cmocka_unit_test(one_waits_for_another), cmocka_unit_test(one_hangs_beside_others),
		cmocka_unit_test(a_mad_member),
	};

	if (getenv("ONLY"))
		cmocka_set_test_filter(getenv("ONLY"));
	return cmocka_run_group_tests(tests, NULL, NULL);
}
