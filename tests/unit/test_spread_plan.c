/* The plan of a load by several hosts: each byte that two hosts need has one owner among them and one place in one window. */
#include "lib/t.h"

#include "base/num.h"
#include "runner/spread.h"

enum { U = SPREAD_UNIT };

static const uint64_t files[] = { 40ull * U, 3ull * U + 17 };

static void plan(const struct spread_range *const *ranges, const uint64_t *counts, uint32_t hosts, struct spread_plan *out)
{
	assert_int_equal(spread_plan_make(ranges, counts, hosts, files, 2, out), OK);
}

static void test_all_need_all(void **state)
{
	const struct spread_range all[] = { { 4096, files[0], 0 }, { 0, files[1], 1 } }, *const ranges[] = { all, all, all };
	uint64_t owned[3] = { 0 }, sum = 0;
	struct spread_plan p;
	(void)state;

	plan(ranges, (const uint64_t[]){ 2, 2, 2 }, 3, &p);
	assert_int_equal(p.units.n, 44);
	assert_int_equal(p.windows.n, num_div_up(44, SPREAD_WINDOW_UNITS));
	each(w, p.windows.v, p.windows.n) {
		uint64_t at = 0;
		assert_true(w->all && w->bytes <= p.widest);
		for (uint32_t i = 0; i < w->count; i++) {
			const struct spread_unit *u = &p.units.v[w->first + i];
			assert_int_equal(u->at, at);
			assert_true(i == 0 || u->owner >= u[-1].owner);
			sum += u->hi - u->lo;
			at += (u->hi - u->lo + 4095) & ~4095ull; /* O_DIRECT reads to whole pages */
			owned[u->owner] += u->hi - u->lo;
		}
		assert_int_equal(at, w->bytes);
	}
	assert_int_equal(sum, files[0] - 4096 + files[1]);
	for (uint32_t h = 0; h < 3; h++)
		assert_true(owned[h] > sum / 4);
	spread_plan_free(&p);
}

static void test_some_need_some(void **state)
{
	const struct spread_range first[] = { { 0, 2ull * U, 0 } }, second[] = { { U / 2, 10ull * U, 0 } };
	const struct spread_range third[] = { { 9ull * U, 12ull * U, 0 } };
	const struct spread_range *const ranges[] = { first, second, third };
	struct spread_plan p;
	(void)state;

	plan(ranges, (const uint64_t[]){ 1, 1, 1 }, 3, &p);
	assert_int_equal(p.units.n, 3); /* 0 and 1 of hosts 0 and 1; 9 of hosts 1 and 2; the rest is one host's */
	each(u, p.units.v, p.units.n) {
		assert_int_equal(u->needers, u->number == 9 ? 6 : 3);
		assert_true(u->needers >> u->owner & 1);
		assert_int_equal(u->lo, u->number * U);
		assert_false(p.windows.v[u->window].all);
	}
	spread_plan_free(&p);
}

static void test_ranges_that_cannot_be(void **state)
{
	const struct spread_range good[] = { { 0, U, 0 } };
	const struct spread_range bad[] = { { 0, files[0] + 1, 0 }, { 5, 5, 0 }, { 9, 5, 1 }, { 0, 1, 2 }, { 0, UINT64_MAX, 1 },
					    { 0, 1, UINT64_MAX } };
	struct spread_plan p;
	(void)state;

	each(b, bad, sizeof bad / sizeof *bad) {
		const struct spread_range *const ranges[] = { good, b };
		assert_int_equal(spread_plan_make(ranges, (const uint64_t[]){ 1, 1 }, 2, files, 2, &p), ERR_COMM_PROTOCOL);
		assert_int_equal(err_last()->rank, 1);
		spread_plan_free(&p);
	}
}

/* A peer that names all of a file as often as it may does not keep this host busy for hours. */
static void test_ranges_that_overlap_too_often(void **state)
{
	struct spread_range *often = mem_zalloc(SPREAD_RANGES_MAX, sizeof *often);
	const struct spread_range good[] = { { 0, U, 0 } }, *const ranges[] = { good, often };
	struct spread_plan p;
	(void)state;

	assert_non_null(often);
	for (uint64_t i = 0; i < SPREAD_RANGES_MAX; i++)
		often[i] = (struct spread_range){ 0, files[0], 0 };
	assert_int_equal(spread_plan_make(ranges, (const uint64_t[]){ 1, SPREAD_RANGES_MAX }, 2, files, 2, &p), ERR_LIMIT_EXCEEDED);
	assert_int_equal(err_last()->rank, 1);
	spread_plan_free(&p);
	mem_free(often);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_all_need_all),
		cmocka_unit_test(test_some_need_some),
		cmocka_unit_test(test_ranges_that_cannot_be),
		cmocka_unit_test(test_ranges_that_overlap_too_often),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
