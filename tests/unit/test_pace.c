/* test_pace.c: how much CPU time a background job gets, over clocks of our own. */
#include "lib/t.h"

#include "io/pace.h"

#define MS 1000000ll

enum { SHARE_MS = PACE_PERIOD_MS * PACE_BACKGROUND_PERMILLE / 1000 };

/* Works in blocks of block_ns whenever it may; CPU time used after so many periods. start_ns: where in a period it begins. */
static int64_t used(struct pace *p, int64_t start_ns, int64_t block_ns, int periods)
{
	int64_t now = start_ns, cpu = 7 * MS, end = start_ns + periods * PACE_PERIOD_MS * MS;

	*p = (struct pace){ .kind = PACE_BACKGROUND, .cpu_ns = cpu, .period = now / (PACE_PERIOD_MS * MS) };
	while (now < end) {
		int64_t rest = pace_rest_at(p, now, cpu);
		assert_in_range(rest, 0, PACE_PERIOD_MS * MS);
		if (rest > 0) {
			now += rest;
			assert_int_equal(now % (PACE_PERIOD_MS * MS), 0); /* all processes wake at the same instants */
			continue;
		}
		now += block_ns;
		cpu += block_ns;
	}
	return cpu - 7 * MS;
}

static void test_share(void **state)
{
	static const int64_t blocks[] = { MS / 100, MS / 2, 2 * MS - 3, SHARE_MS * MS, 7 * MS, 450 * MS };
	struct pace p;

	(void)state;
	for (size_t i = 0; i < sizeof blocks / sizeof *blocks; i++) {
		int64_t allowed = 1000 * SHARE_MS * MS, got = used(&p, 12345 * PACE_PERIOD_MS * MS + 42 * MS, blocks[i], 1000);
		assert_in_range(got, allowed - blocks[i] - SHARE_MS * MS, allowed + blocks[i] + SHARE_MS * MS);
	}
}

static void test_nothing_is_saved_up(void **state)
{
	struct pace p;
	int64_t at = 99 * PACE_PERIOD_MS * MS;

	(void)state;
	(void)used(&p, 0, MS, 10);
	int64_t cpu = p.cpu_ns;
	assert_int_equal(pace_rest_at(&p, at, cpu), 0); /* a minute later */
	assert_int_equal(pace_rest_at(&p, at + SHARE_MS * MS, cpu + SHARE_MS * MS), (PACE_PERIOD_MS - SHARE_MS) * MS);
}

static void test_full(void **state)
{
	struct pace p = { .left_ns = -1 };

	(void)state;
	pace_begin(&p, PACE_FULL, 0, 1);
	assert_int_equal(pace_rest_ms(&p), 0);
	pace_begin(&p, PACE_BACKGROUND, 0, 1);
	assert_in_range(pace_rest_ms(&p), 0, PACE_PERIOD_MS);
}

/* Workers share no core that they need not share. */
static void test_cores(void **state)
{
	static const unsigned some[] = { 0, 3, 4, 17, 1023 };
	cpu_set_t all, seen;

	(void)state;
	CPU_ZERO(&all);
	assert_int_equal(pace_core(&all, 0, 1), -1);
	for (size_t n = 0; n < sizeof some / sizeof *some; n++) {
		CPU_SET(some[n], &all);
		for (uint32_t count = 1; count < 12; count++) {
			CPU_ZERO(&seen);
			for (uint32_t i = 0; i < count; i++) {
				int core = pace_core(&all, i, count);
				assert_in_range(core, 0, CPU_SETSIZE - 1);
				assert_true(CPU_ISSET((unsigned)core, &all));
				CPU_SET((unsigned)core, &seen);
			}
			assert_int_equal(CPU_COUNT(&seen), count < n + 1 ? count : n + 1);
		}
	}
}

static void test_no_core_is_kept(void **state)
{
	cpu_set_t before, after;
	struct pace p;

	(void)state;
	assert_int_equal(sched_getaffinity(0, sizeof before, &before), 0);
	for (uint32_t i = 0; i < 3; i++) {
		pace_begin(&p, PACE_BACKGROUND, i, 3);
		while (pace_rest_ms(&p) == 0)
			;
		assert_int_equal(sched_getaffinity(0, sizeof after, &after), 0);
		assert_true(CPU_EQUAL(&before, &after));
	}
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_share),
		cmocka_unit_test(test_nothing_is_saved_up),
		cmocka_unit_test(test_full),
		cmocka_unit_test(test_cores),
		cmocka_unit_test(test_no_core_is_kept),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
