/* test_comm_hier.c: groups over several hosts, played by processes of one: shm inside each, tcp on loopback between them. */
#include "lib/t_hurt.h"

/* Each host has an arena of its own. */
static void with_hosts(struct t_group *g, uint32_t size, const uint32_t *hosts, enum err (*fn)(struct comm *c, struct t_group *g))
{
	t_group_init(g, COMM_SHM, size, fn);
	g->spec.between = COMM_TCP;
	g->spec.hosts = hosts;
	for (uint32_t r = 0; r < size; r++)
		if (hosts[r] >= 2)
			T_FAIL("two hosts have arenas here");
	T_OK(comm_arena_new(size, &g->arena2));
}

static void every_collective(void **state)
{
	static const uint32_t placed[][6] = { { 0, 0, 1, 1 }, { 0, 1, 0, 1 }, { 1, 0, 0, 0, 0, 1 } };
	static const uint32_t sizes[] = { 4, 4, 6 };

	(void)state;
	for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
		struct t_group g;
		with_hosts(&g, sizes[i], placed[i], t_every_collective);
		t_group_start(&g);
		assert_int_equal(t_group_wait(&g), 0);
		for (uint32_t r = 0; r < sizes[i]; r++)
			if (!WIFEXITED(g.status[r]) || WEXITSTATUS(g.status[r]) != 0)
				T_FAIL("case %zu, rank %u: status %x, error %d: %s", i, r, g.status[r], g.shared->ends[r].code,
				       g.shared->ends[r].text);
		t_group_end(&g);
	}
}

/* Data that every rank needs crosses between hosts once per host. */
static enum err count_bytes(struct comm *c, struct t_group *g)
{
	enum { BYTES = 2000000 };
	unsigned char *data = t_bytes(comm_rank(c), 0, BYTES), *out = malloc((size_t)4 * BYTES);

	(void)g;
	T_CHECK(out);
	struct comm_counts before = comm_counts(c);
	TRY(comm_broadcast(c, data, BYTES, 1));
	struct comm_counts after = comm_counts(c);
	T_CHECK(after.received_bytes - before.received_bytes == (comm_rank(c) == 2 ? BYTES : 0));
	before = after;
	TRY(comm_all_gather(c, data, BYTES, out));
	after = comm_counts(c);
	T_CHECK(after.received_bytes - before.received_bytes == (comm_rank(c) % 2 == 0 ? 2 * BYTES : 0));
	free(data);
	free(out);
	return comm_barrier(c);
}

static void bytes_cross_once(void **state)
{
	static const uint32_t hosts[] = { 0, 0, 1, 1 };
	struct t_group g;

	(void)state;
	with_hosts(&g, 4, hosts, count_bytes);
	t_group_start(&g);
	assert_int_equal(t_group_wait(&g), 0);
	for (uint32_t r = 0; r < 4; r++)
		if (g.shared->ends[r].code != 0 || !WIFEXITED(g.status[r]))
			T_FAIL("rank %u: %s, status %x", r, g.shared->ends[r].text, g.status[r]);
	t_group_end(&g);
}

static void hurt(uint32_t victim, int signal_number, enum err code, uint32_t deadline_ms)
{
	static const uint32_t hosts[] = { 0, 0, 1, 1 };
	struct t_group g;

	with_hosts(&g, 4, hosts, t_churn);
	g.spec.deadline_ms = deadline_ms;
	t_hurt(&g, victim, signal_number, 3000, code);
}

static void all_hear_of_a_death(void **state)
{
	(void)state;
	for (uint32_t victim = 0; victim < 4; victim++)
		hurt(victim, SIGKILL, ERR_PEER_LOST, 60000);
}

static void all_name_the_stopped_one(void **state)
{
	(void)state;
	hurt(3, SIGSTOP, ERR_PEER_TIMEOUT, 2000);
	hurt(0, SIGSTOP, ERR_PEER_TIMEOUT, 2000);
}

/* Member 3 hangs, 2 waits for it on its own host, 0 for 2 from the other host, and 1 for 0. Whoever is late first names 3. */
static enum err begin_apart(struct comm *c, struct t_group *g)
{
	const long *begins = g->arg;

	TRY(comm_barrier(c));
	if (comm_rank(c) == 3)
		for (;;)
			pause();
	t_sleep_ms(begins[comm_rank(c)]);
	return comm_barrier(c);
}

static void the_late_one_is_behind_others(void **state)
{
	static const uint32_t hosts[] = { 0, 0, 1, 1 };
	static const long begins[][3] = { { 400, 0, 800 }, { 0, 800, 600 }, { 800, 800, 0 } };

	(void)state;
	for (size_t i = 0; i < sizeof begins / sizeof *begins; i++) {
		struct t_group g;
		with_hosts(&g, 4, hosts, begin_apart);
		g.spec.deadline_ms = 2000;
		g.arg = begins[i];
		t_hangs(&g, 3);
	}
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(every_collective), cmocka_unit_test(bytes_cross_once), cmocka_unit_test(all_hear_of_a_death),
		cmocka_unit_test(all_name_the_stopped_one), cmocka_unit_test(the_late_one_is_behind_others),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
