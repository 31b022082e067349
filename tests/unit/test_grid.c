/* test_grid.c: what is a grid and what only looks like one. That joins find all pairs, in grids or not, is test_overlap.c's. */
#include "lib/t.h"

#include <stdlib.h>

#include "plan/grid.h"

enum { ROWS = 30, COLUMNS = 40, N = ROWS * COLUMNS };

static int64_t dims[N][4];
static struct overlap_box boxes[N];

/* Cell i at place order(i): rows of 3, columns of 5 with a hole of 2 behind each. */
static void cells(uint64_t step)
{
	for (uint64_t i = 0; i < N; i++) {
		uint64_t at = i * step % N;
		int64_t r = (int64_t)(i / COLUMNS), c = (int64_t)(i % COLUMNS);
		dims[at][0] = r * 3;
		dims[at][1] = c * 7;
		dims[at][2] = 3;
		dims[at][3] = 5;
		boxes[at] = (struct overlap_box){ dims[at], (uint32_t)(1000000 + at) };
	}
}

static bool is_grid(uint64_t count, struct grid *g)
{
	bool yes;

	T_OK(grid_make(2, 2, (const uint32_t[]){ 0, 1 }, boxes, count, g, &yes));
	assert_true(yes == (g->cells != NULL));
	return yes;
}

static void in_any_order(void **state)
{
	static const uint64_t steps[] = { 1, N - 1, 7, 1009, 599, COLUMNS + 1 }; /* no common factor with N */

	(void)state;
	for (size_t s = 0; s < sizeof steps / sizeof *steps; s++) {
		CLEANUP(grid_free) struct grid g = { 0 };
		cells(steps[s]);
		assert_true(is_grid(N, &g));
		assert_int_equal(g.counts[0], ROWS);
		assert_int_equal(g.counts[1], COLUMNS);
		for (uint64_t i = 0; i < N; i++)
			assert_int_equal(g.cells[i], i * steps[s] % N);
	}
}

static void not_a_grid(void **state)
{
	CLEANUP(grid_free) struct grid g = { 0 };

	(void)state;
	cells(7);
	assert_false(is_grid(N - 1, &g)); /* a cell is missing */
	dims[5][2]++;
	assert_false(is_grid(N, &g)); /* into the next row */
	cells(7);
	dims[5][1]++;
	assert_false(is_grid(N, &g));
	cells(7);
	boxes[9].dims = dims[8];
	assert_false(is_grid(N, &g)); /* one twice, one missing */
	cells(7);
	for (uint64_t i = 0; i < N; i++)
		dims[i][2] = 4;
	assert_false(is_grid(N, &g)); /* rows that overlap */
	for (uint64_t i = 0; i < N; i++)
		dims[i][0] = (int64_t)(i * 7 % 1201);
	assert_false(is_grid(N, &g)); /* more cuts than cells */
}

struct found {
	uint32_t ids[8];
	uint64_t count, stop_at;
};

static enum err note(void *ctx, uint32_t a, uint32_t b)
{
	struct found *f = ctx;

	assert_int_equal(a < b ? a : b, 3);
	f->ids[f->count++] = a > b ? a : b;
	return f->count == f->stop_at ? ERR_CANCELLED : OK;
}

static void joins_look_up(void **state)
{
	CLEANUP(grid_free) struct grid g = { 0 };
	const int64_t two_by_two[] = { 2, 4, 2, 4 }, in_the_hole[] = { 0, 5, 90, 2 }, far[] = { 90, 0, 9, 9 };
	const struct overlap_box a[] = { { two_by_two, 3 }, { in_the_hole, 3 }, { far, 3 } };
	struct found f = { 0 };

	(void)state;
	cells(1);
	assert_true(is_grid(N, &g));
	T_OK(grid_join(&g, a, 3, false, note, &f));
	assert_int_equal(f.count, 4);
	assert_int_equal(f.ids[0], 1000000);
	assert_int_equal(f.ids[1], 1000001);
	assert_int_equal(f.ids[2], 1000000 + COLUMNS);
	assert_int_equal(f.ids[3], 1000001 + COLUMNS);
	f = (struct found){ .stop_at = 3 };
	assert_int_equal(grid_join(&g, a, 3, true, note, &f), ERR_CANCELLED);
	assert_int_equal(f.count, 3);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(in_any_order),
		cmocka_unit_test(not_a_grid),
		cmocka_unit_test(joins_look_up),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
