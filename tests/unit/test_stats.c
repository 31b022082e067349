/* What a run of elements is like, and how two differ. */
#include "lib/t.h"

#include <math.h>
#include <string.h>

#include "tensor/stats.h"

static void test_counts(void **state)
{
	float v[1200] = { 0 };
	struct stats s = { 0 };

	(void)state;
	v[3] = NAN;
	v[700] = INFINITY;
	v[1199] = -INFINITY;
	v[5] = -0.0f;
	v[9] = 1e-45f;
	stats_run(DT_FLOAT32, v, 1200, &s);
	assert_int_equal(s.nan_count, 1);
	assert_int_equal(s.inf_count, 2);
	assert_int_equal(s.nonzero_count, 4);
	stats_run(DT_FLOAT32, v, 0, &s);
	assert_int_equal(s.nonzero_count, 4);
}

static void test_parts_and_integers(void **state)
{
	double c[4] = { 0, NAN, INFINITY, NAN };
	int64_t n[2] = { 0, INT64_MIN };
	unsigned char packed[3] = { 0, 0x70, 1 };
	struct stats s = { 0 };

	(void)state;
	stats_run(DT_COMPLEX128, c, 2, &s);
	assert_int_equal(s.nan_count, 2);
	assert_int_equal(s.inf_count, 1);
	s = (struct stats){ 0 };
	stats_run(DT_INT64, n, 2, &s);
	assert_int_equal(s.nonzero_count, 1);
	s = (struct stats){ 0 };
	stats_run(DT_FLOAT4_E2M1FN_X2, packed, 3, &s);
	assert_int_equal(s.nonzero_count, 2);
}

static struct stats_diff compare(enum dtype d, const void *a, const void *b, uint64_t n, double rtol, double atol)
{
	struct stats_diff diff = { 0 };

	stats_compare(d, a, b, n, rtol, atol, 1000, &diff);
	return diff;
}

static void test_first_and_largest(void **state)
{
	double a[1500], b[1500];

	(void)state;
	for (int i = 0; i < 1500; i++)
		a[i] = b[i] = i;
	assert_int_equal(compare(DT_FLOAT64, a, b, 1500, 0, 0).count, 0);
	b[600] += 0.5;
	b[1400] -= 7;
	struct stats_diff d = compare(DT_FLOAT64, a, b, 1500, 0, 0);
	assert_int_equal(d.count, 2);
	assert_int_equal(d.first, 1600);
	assert_true(d.max_abs == 7.0);
	assert_true(fabs(d.max_rel - 7.0 / 1393.0) < 1e-12);
	assert_int_equal(compare(DT_FLOAT64, a, b, 1500, 0, 0.5).count, 1);
	assert_int_equal(compare(DT_FLOAT64, a, b, 1500, 0.01, 0).count, 0);
}

/* numpy.isclose: an infinity is near itself only, whatever the tolerance; NaN near nothing but its own bits. */
static void test_infinity(void **state)
{
	double a[4] = { INFINITY, 1, INFINITY, NAN }, b[4] = { INFINITY, INFINITY, -INFINITY, 1 };

	(void)state;
	struct stats_diff d = compare(DT_FLOAT64, a, b, 4, 0.5, 0.5);
	assert_int_equal(d.count, 3);
	assert_int_equal(d.first, 1001);
	assert_true(isnan(d.max_abs));
	double x = NAN, y = NAN;
	assert_int_equal(compare(DT_FLOAT64, &x, &y, 1, 0, 0).count, 0);
}

static void test_equal_but_for_bits(void **state)
{
	double zero = 0.0, minus = -0.0;
	int64_t a = (1ll << 60) + 1, b = 1ll << 60;

	(void)state;
	assert_int_equal(compare(DT_FLOAT64, &zero, &minus, 1, 0, 0).count, 0);
	assert_int_equal(compare(DT_INT64, &a, &b, 1, 0, 0).count, 1);
	assert_true(compare(DT_INT64, &a, &b, 1, 0, 0).max_abs >= 1.0);
	assert_int_equal(compare(DT_INT64, &a, &b, 1, 0, 1).count, 0);
	assert_int_equal(compare(DT_INT64, &a, &b, 1, 1e-6, 0).count, 0);
}

static void test_complex_counts_elements(void **state)
{
	float a[8] = { 0 }, b[8] = { 0 };

	(void)state;
	b[7] = 1; /* the imaginary part of element 3 */
	struct stats_diff d = compare(DT_COMPLEX64, a, b, 4, 0, 0);
	assert_int_equal(d.count, 1);
	assert_int_equal(d.first, 1003);
	b[6] = 2;
	assert_int_equal(compare(DT_COMPLEX64, a, b, 4, 0, 0).first, 1003);
}

static void test_adds_up(void **state)
{
	int32_t a[2] = { 1, 2 }, b[2] = { 1, 3 };
	struct stats_diff d = { 0 };

	(void)state;
	stats_compare(DT_INT32, a, b, 2, 0, 0, 10, &d);
	stats_compare(DT_INT32, a, b, 2, 0, 0, 20, &d);
	assert_int_equal(d.count, 2);
	assert_int_equal(d.first, 11);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_counts),
		cmocka_unit_test(test_parts_and_integers),
		cmocka_unit_test(test_first_and_largest),
		cmocka_unit_test(test_infinity),
		cmocka_unit_test(test_equal_but_for_bits),
		cmocka_unit_test(test_complex_counts_elements),
		cmocka_unit_test(test_adds_up),
	};

	return cmocka_run_group_tests_name("stats", tests, NULL, NULL);
}
