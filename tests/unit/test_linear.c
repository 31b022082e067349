/* test_linear.c: every range of small tensors, against counting. */
#include "lib/t.h"

#include "tensor/linear.h"

static void check_range(uint32_t ndim, const int64_t *sizes, uint64_t begin, uint64_t end)
{
	struct linear l = linear_range(ndim, sizes, begin, end);
	int64_t off[NDIM_MAX], size[NDIM_MAX];
	uint64_t at = begin, boxes = 0;

	while (linear_next(&l, off, size)) {
		uint64_t numel = 0, first = 0;
		T_OK(box_numel(ndim, size, &numel));
		assert_true(linear_is_run(ndim, sizes, off, size, &first));
		assert_int_equal(first, at);
		assert_true(numel > 0);
		at += numel;
		boxes++;
	}
	assert_int_equal(at, end);
	assert_true(boxes <= (ndim ? 2 * ndim - 1 : 1));
}

static void test_all_ranges(void **state)
{
	static const int64_t shapes[][4] = { { 7, 0, 0, 0 }, { 3, 5, 0, 0 }, { 1, 6, 1, 0 }, { 2, 3, 4, 0 }, { 2, 2, 3, 2 } };
	static const uint32_t ndims[] = { 1, 2, 3, 3, 4 };

	(void)state;
	for (size_t s = 0; s < sizeof ndims / sizeof *ndims; s++) {
		uint64_t numel = 0;
		T_OK(box_numel(ndims[s], shapes[s], &numel));
		for (uint64_t b = 0; b <= numel; b++)
			for (uint64_t e = b; e <= numel; e++)
				check_range(ndims[s], shapes[s], b, e);
	}
}

static void test_scalar(void **state)
{
	struct linear l = linear_range(0, NULL, 0, 1);
	int64_t none[1];

	(void)state;
	assert_true(linear_next(&l, none, none));
	assert_false(linear_next(&l, none, none));
}

static void test_is_run(void **state)
{
	static const int64_t shape[] = { 4, 6 };
	uint64_t first = 0;

	(void)state;
	assert_false(linear_is_run(2, shape, (int64_t[]){ 0, 0 }, (int64_t[]){ 2, 3 }, &first));
	assert_true(linear_is_run(2, shape, (int64_t[]){ 1, 2 }, (int64_t[]){ 1, 3 }, &first));
	assert_int_equal(first, 8);
	assert_true(linear_is_run(2, shape, (int64_t[]){ 2, 0 }, (int64_t[]){ 2, 6 }, &first));
	assert_int_equal(first, 12);
}

/* Dims of one element do not matter, wherever their strides lead. */
static void test_is_packed(void **state)
{
	(void)state;
	assert_true(linear_is_packed(0, NULL, NULL));
	assert_true(linear_is_packed(2, (int64_t[]){ 6, 1 }, (int64_t[]){ 4, 6 }));
	assert_true(linear_is_packed(2, (int64_t[]){ 6, 1 }, (int64_t[]){ 1, 3 }));
	assert_false(linear_is_packed(2, (int64_t[]){ 6, 1 }, (int64_t[]){ 2, 3 }));
	assert_false(linear_is_packed(2, (int64_t[]){ 1, 4 }, (int64_t[]){ 4, 6 }));
	assert_true(linear_is_packed(3, (int64_t[]){ 8, 77, 1 }, (int64_t[]){ 4, 1, 8 }));
	assert_false(linear_is_packed(1, (int64_t[]){ 2 }, (int64_t[]){ 2 }));
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_all_ranges),
		cmocka_unit_test(test_scalar),
		cmocka_unit_test(test_is_run),
		cmocka_unit_test(test_is_packed),
	};

	return cmocka_run_group_tests_name("linear", tests, NULL, NULL);
}
