/* test_box.c: arithmetic on boxes at its edges. */
#include "lib/t.h"

#include <string.h>

#include "tensor/box.h"

#define V(...) ((const int64_t[]){ __VA_ARGS__ })

static void numel_counts_and_refuses(void **state)
{
	uint64_t n;

	(void)state;
	T_OK(box_numel(0, NULL, &n));
	assert_int_equal(n, 1);
	T_OK(box_numel(3, V(2, 3, 4), &n));
	assert_int_equal(n, 24);
	T_OK(box_numel(3, V(INT64_MAX, INT64_MAX, 0), &n));
	assert_int_equal(n, 0);
	T_OK(box_numel(1, V(INT64_MAX), &n));
	assert_true(n == INT64_MAX);
	T_ERR(LIMIT_EXCEEDED, box_numel(2, V(INT64_MAX, 2), &n));
	T_ERR(LIMIT_EXCEEDED, box_numel(3, V(1LL << 32, 1LL << 32, 1), &n));
	T_ERR(LIMIT_EXCEEDED, box_numel(2, V(4, -1), &n));
	T_ERR(LIMIT_EXCEEDED, box_numel(2, V(0, -1), &n));
}

static void check_knows_bounds(void **state)
{
	(void)state;
	T_OK(box_check(2, V(4, 0), V(4, 8), V(8, 8)));
	T_OK(box_check(1, V(8), V(0), V(8)));
	T_OK(box_check(0, NULL, NULL, NULL));
	T_ERR(PLAN_INVALID, box_check(2, V(4, 0), V(5, 8), V(8, 8)));
	assert_string_equal(err_last()->text, "chunk [4, 0]+[5, 8] is outside of [8, 8]");
	T_ERR(PLAN_INVALID, box_check(1, V(9), V(0), V(8)));
	T_ERR(PLAN_INVALID, box_check(1, V(-1), V(1), V(8)));
	T_ERR(PLAN_INVALID, box_check(1, V(0), V(-1), V(8)));
	T_ERR(PLAN_INVALID, box_check(1, V(INT64_MAX), V(INT64_MAX), V(8)));
	T_ERR(PLAN_INVALID, box_check(1, V(1), V(INT64_MAX), V(INT64_MAX)));
}

static void intersections(void **state)
{
	int64_t off[2], size[2];

	(void)state;
	assert_true(box_intersect(2, V(0, 0), V(4, 4), V(2, 3), V(4, 4), off, size));
	assert_memory_equal(off, V(2, 3), sizeof off);
	assert_memory_equal(size, V(2, 1), sizeof size);
	assert_false(box_intersect(2, V(0, 0), V(4, 4), V(4, 0), V(4, 4), off, size));
	assert_false(box_intersect(2, V(0, 0), V(4, 4), V(1, 1), V(0, 2), off, size));
	assert_true(box_intersect(0, NULL, NULL, NULL, NULL, NULL, NULL));
	assert_true(box_equal(0, NULL, NULL, NULL, NULL));
	assert_true(box_equal(1, V(1), V(2), V(1), V(2)));
	assert_false(box_equal(1, V(1), V(2), V(1), V(3)));
	assert_false(box_empty(0, NULL));
	assert_true(box_empty(2, V(3, 0)));
}

static void print_fits(void **state)
{
	char text[24];
	int64_t many[NDIM_MAX];

	(void)state;
	assert_string_equal(box_print(2, V(4, 0), text, sizeof text), "[4, 0]");
	assert_string_equal(box_print(0, NULL, text, sizeof text), "[]");
	for (int i = 0; i < NDIM_MAX; i++)
		many[i] = INT64_MIN;
	box_print(NDIM_MAX, many, text, sizeof text);
	assert_string_equal(text, "[...]");
	many[0] = 7;
	box_print(NDIM_MAX, many, text, sizeof text);
	assert_string_equal(text, "[7...]");
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(numel_counts_and_refuses),
		cmocka_unit_test(check_knows_bounds),
		cmocka_unit_test(intersections),
		cmocka_unit_test(print_fits),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
