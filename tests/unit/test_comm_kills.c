/* test_comm_kills.c: kill -9 of a member at any moment of any collective, over each back end: all others end, and know who it was.
 * DCPD_FULL=1: a hundred kills over each; DCPD_KILLS=n: as many. */
#include "lib/t_hurt.h"

static uint32_t seed;

static uint32_t next(void)
{
	return seed = seed * 1664525 + 1013904223;
}

static void kills(enum comm_backend inside, const uint32_t *hosts)
{
	const char *wanted = getenv("DCPD_KILLS"), *from = getenv("DCPD_SEED");
	long count = wanted ? strtol(wanted, NULL, 10) : getenv("DCPD_FULL") ? 100 : 6;

	seed = from ? (uint32_t)strtoul(from, NULL, 10) : (uint32_t)time(NULL);
	print_message("seed %u, %ld kills\n", seed, count);
	for (long i = 0; i < count; i++) {
		struct t_group g;
		uint32_t victim = next() >> 30;
		t_group_init(&g, inside, 4, t_churn);
		g.spec.deadline_ms = 60000;
		if (hosts) {
			g.spec.hosts = hosts;
			g.spec.between = COMM_TCP;
			T_OK(comm_arena_new(4, &g.arena2));
		}
		t_hurt(&g, victim, SIGKILL, (long)(next() >> 8 & 0x3FFFF), ERR_PEER_LOST);
	}
}

static void over_shm(void **state)
{
	(void)state;
	kills(COMM_SHM, NULL);
}

static void over_tcp(void **state)
{
	(void)state;
	kills(COMM_TCP, NULL);
}

static void over_both(void **state)
{
	static const uint32_t hosts[] = { 0, 0, 1, 1 };

	(void)state;
	kills(COMM_SHM, hosts);
}

int main(void)
{
	const struct CMUnitTest tests[] = { cmocka_unit_test(over_shm), cmocka_unit_test(over_tcp), cmocka_unit_test(over_both) };
	const char *only = getenv("BACKEND");

	if (only)
		cmocka_set_test_filter(only);
	return cmocka_run_group_tests(tests, NULL, NULL);
}
