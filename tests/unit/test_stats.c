/* Statistics of a run of elements, and of the difference of two. */
#include "lib/t.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tensor/stats_impl.h"

static struct stats of(enum dtype d, const void *p, uint64_t n, uint64_t *bins)
{
	struct stats s = { 0 };

	if (bins)
		memset(bins, 0, STATS_BINS * sizeof *bins);
	stats_run(d, p, n, &s, bins);
	return s;
}

static double key_value(enum dtype d, uint64_t key)
{
	double v = 0;

	(void)stats_key_value(d, key, &v);
	return v;
}

static void test_counts(void **state)
{
	float v[1200] = { 0 };
	uint64_t bins[STATS_BINS], sum = 0;

	(void)state;
	v[3] = NAN;
	v[700] = INFINITY;
	v[1199] = -INFINITY;
	v[5] = -0.0f;
	v[9] = 1e-45f;
	v[11] = -3.5f;
	struct stats s = of(DT_FLOAT32, v, 1200, bins);
	assert_int_equal(s.count, 1200);
	assert_int_equal(s.nan_count, 1);
	assert_int_equal(s.inf_count, 2);
	assert_int_equal(s.zero_count, 1195);
	assert_true(key_value(DT_FLOAT32, ~s.min_key) == -3.5 && key_value(DT_FLOAT32, s.max_key) == 1.401298464324817e-45);
	assert_int_equal(bins[0], 1); /* beyond the range of exponents */
	assert_int_equal(bins[STATS_EXPONENTS + 1 - STATS_FIRST], 1);
	for (int b = 0; b < STATS_BINS; b++)
		sum += bins[b];
	assert_int_equal(sum, 2);
	stats_run(DT_FLOAT32, v, 0, &s, NULL);
	assert_int_equal(s.count, 1200);
}

static void test_parts_and_integers(void **state)
{
	double c[6] = { 0, NAN, INFINITY, 1, 3, -4 }, real;
	int64_t n[3] = { 0, INT64_MIN, (1ll << 53) + 1 };
	uint64_t u[2] = { UINT64_MAX, 7 }, bins[STATS_BINS];
	unsigned char packed[3] = { 0, 0x70, 0x19 };

	(void)state;
	struct stats s = of(DT_COMPLEX128, c, 3, bins);
	assert_int_equal(s.count, 3);
	assert_int_equal(s.nan_count, 1);
	assert_int_equal(s.inf_count, 1);
	assert_true(s.sums.real == 3 && s.sums.imag == -4 && s.sums.squares == 25);
	assert_int_equal(bins[2 - STATS_FIRST], 1); /* 4 <= |3 - 4i| < 8 */
	s = of(DT_INT64, n, 3, NULL);
	assert_int_equal(s.zero_count, 1);
	assert_true(stats_key_value(DT_INT64, ~s.min_key, &real) == INT64_MIN && stats_key_value(DT_INT64, s.max_key, &real) == n[2]);
	s = of(DT_UINT64, u, 2, NULL);
	assert_true((uint64_t)stats_key_value(DT_UINT64, s.max_key, &real) == UINT64_MAX);
	assert_true(stats_key_value(DT_UINT64, ~s.min_key, &real) == 7);
	s = of(DT_FLOAT4_E2M1FN_X2, packed, 3, NULL); /* 0 0, 0 6, -0.5 0.5 */
	assert_int_equal(s.count, 6);
	assert_int_equal(s.zero_count, 3);
	assert_true(s.sums.real == 6 && s.sums.squares == 36.5L);
}

/* The table path (many elements of few bits) gives the same statistics as the arithmetic path (few elements). */
static void test_many_as_few(void **state)
{
	enum { MANY = 200000, FEW = 1000 };
	static const enum dtype dtypes[] = { DT_FLOAT16, DT_BFLOAT16, DT_INT16, DT_UINT16, DT_INT8, DT_UINT8, DT_FLOAT8_E4M3FN,
					     DT_FLOAT8_E5M2, DT_FLOAT4_E2M1FN_X2, DT_FLOAT32 };
	unsigned char *p = malloc(MANY * 4);
	uint64_t seed = 1, all[STATS_BINS], some[STATS_BINS];

	(void)state;
	for (size_t i = 0; i < MANY * 4; i++) {
		seed = seed * 6364136223846793005u + 1442695040888963407u;
		p[i] = (unsigned char)(seed >> 56);
	}
	for (size_t k = 0; k < sizeof dtypes / sizeof *dtypes; k++) {
		uint32_t bytes = dtype_bytes(dtypes[k]);
		struct stats a = of(dtypes[k], p, MANY, all), b = { 0 };
		memset(some, 0, sizeof some);
		for (size_t at = 0; at < MANY; at += FEW)
			stats_run(dtypes[k], p + at * bytes, FEW, &b, some);
		assert_true(a.count == b.count && a.nan_count == b.nan_count && a.inf_count == b.inf_count && a.zero_count == b.zero_count);
		assert_true(a.min_key == b.min_key && a.max_key == b.max_key);
		assert_memory_equal(all, some, sizeof all);
		assert_true(fabsl(a.sums.squares - b.sums.squares) <= 1e-14L * a.sums.squares);
		assert_true(fabsl(a.sums.real - b.sums.real) <= 1e-14L * sqrtl(a.sums.squares) * 1000);
	}
	free(p);
}

static void test_extremes(void **state)
{
	double huge[2] = { 1e300, -1e300 }, tiny[2] = { 1e-300, 1e-300 };

	(void)state;
	struct stats s = of(DT_FLOAT64, huge, 2, NULL);
	assert_true(s.sums.real == 0 && fabsl(sqrtl(s.sums.squares) / 1.4142135623730951e300L - 1) < 1e-15L);
	s = of(DT_FLOAT64, tiny, 2, NULL);
	assert_true(fabsl(sqrtl(s.sums.squares) / 1.4142135623730951e-300L - 1) < 1e-15L);
}

static struct stats_diff compare(enum dtype d, const void *a, const void *b, uint64_t n, double rtol, double atol)
{
	const struct stats_near near = { rtol, atol, false };
	struct stats_diff diff = { 0 };

	stats_compare(d, a, b, n, &near, 1000, &diff);
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
	const struct stats_near near = { .sums = true };
	int32_t a[2] = { 1, 2 }, b[2] = { 1, 3 };
	struct stats_diff d = { 0 }, more = { 0 };

	(void)state;
	stats_compare(DT_INT32, a, b, 2, &near, 10, &d);
	stats_compare(DT_INT32, a, b, 2, &near, 20, &d);
	assert_int_equal(d.count, 2);
	assert_int_equal(d.first, 11);
	assert_true(d.aa == 10 && d.bb == 20 && d.ab == 14 && d.dd == 2 && d.max_abs == 1);
	assert_int_equal(d.bits, 2); /* 2 and 3 */
	more.max_abs = NAN;
	stats_diff_add(&d, &more);
	stats_diff_add(&d, &(struct stats_diff){ .max_abs = 9, .count = 1, .odd = 1 });
	assert_true(isnan(d.max_abs));
	assert_true(d.count == 3 && d.odd == 1);
}

static struct stats_diff summed(enum dtype d, const void *a, const void *b, uint64_t n)
{
	const struct stats_near near = { .sums = true };
	struct stats_diff diff = { 0 };

	stats_compare(d, a, b, n, &near, 0, &diff);
	return diff;
}

static bool is_near(long double a, long double b)
{
	return fabsl(a - b) <= 1e-12L * (fabsl(b) + 1e-300L);
}

/* Every dtype, any length: what lanes add up is what a plain loop does; a run that is alike has sums, too. */
static void test_sums_of_every_dtype(void **state)
{
	enum { N = 1500 };
	unsigned char a[N * 16], b[N * 16];
	double va[2 * N], vb[2 * N];
	uint64_t seed = 7;

	(void)state;
	for (int d = 0; d < DT_COUNT; d++) {
		uint64_t n = (uint64_t)N - (uint64_t)d, bytes = dtype_bytes((enum dtype)d), parts = 0;
		long double aa = 0, bb = 0, ab = 0, dd = 0;
		for (size_t i = 0; i < n * bytes; i++) {
			seed = seed * 6364136223846793005u + 1442695040888963407u;
			a[i] = (unsigned char)(seed >> 40) & 0x3F; /* no NaN, no large exponents */
			b[i] = (unsigned char)(seed >> 56) & 0x3F;
		}
		memcpy(b + n * bytes / 2, a + n * bytes / 2, n * bytes - n * bytes / 2);
		for (uint64_t i = 0; i < n; i += 100)
			parts += stats_to_double((enum dtype)d, a + i * bytes, n - i < 100 ? n - i : 100, va + parts);
		parts = 0;
		for (uint64_t i = 0; i < n; i += 100)
			parts += stats_to_double((enum dtype)d, b + i * bytes, n - i < 100 ? n - i : 100, vb + parts);
		for (uint64_t i = 0; i < parts; i++) {
			aa += (long double)va[i] * va[i];
			bb += (long double)vb[i] * vb[i];
			ab += (long double)va[i] * vb[i];
			dd += ((long double)va[i] - vb[i]) * ((long double)va[i] - vb[i]);
		}
		struct stats_diff got = summed((enum dtype)d, a, b, n);
		assert_true(got.count > 0 && got.odd == 0 && got.bits > 0);
		assert_true(is_near(got.aa, aa) && is_near(got.bb, bb) && is_near(got.ab, ab) && is_near(got.dd, dd));
		got = summed((enum dtype)d, a, a, n);
		assert_true(got.count == 0 && got.bits == 0 && got.max_abs == 0 && got.dd == 0);
		assert_true(is_near(got.aa, aa) && got.bb == got.aa && got.ab == got.aa);
	}
}

/* The same bits are equal, NaN too; a NaN that another one was is not, and no sum has either. */
static void test_sums_leave_out_nan(void **state)
{
	float a[5] = { 1, NAN, INFINITY, 2, NAN }, b[5] = { 1, 3, INFINITY, 4, NAN };
	uint32_t quiet = 0x7FC00001;

	(void)state;
	struct stats_diff d = summed(DT_FLOAT32, a, b, 5);
	assert_true(d.count == 2 && d.odd == 1 && d.first == 1 && isnan(d.max_abs));
	assert_true(d.aa == 5 && d.bb == 17 && d.ab == 9 && d.dd == 4);
	memcpy(&b[4], &quiet, sizeof quiet);
	d = summed(DT_FLOAT32, a, b, 5);
	assert_true(d.count == 3 && d.odd == 2);
	d = summed(DT_FLOAT32, a, a, 5);
	assert_true(d.count == 0 && d.odd == 0 && d.aa == 5 && d.ab == 5);
}

static void test_sums_of_extremes(void **state)
{
	double huge[2] = { 1e300, 1e300 }, other[2] = { 1e300, -1e300 }, tiny[2] = { 1e-300, 0 }, none[2] = { 0 };
	int64_t large[2] = { INT64_MAX, INT64_MIN }, next[2] = { INT64_MAX - 1, INT64_MAX };

	(void)state;
	struct stats_diff d = summed(DT_FLOAT64, huge, other, 2);
	assert_true(is_near(sqrtl(d.dd), 2e300L) && d.ab == 0 && d.max_abs == 2e300);
	d = summed(DT_FLOAT64, tiny, none, 2);
	assert_true(is_near(sqrtl(d.aa), 1e-300L) && is_near(sqrtl(d.dd), 1e-300L));
	d = summed(DT_INT64, large, next, 2);
	assert_true(d.count == 2 && d.max_abs == 18446744073709551615.0);
	d = summed(DT_INT64, large, next, 1);
	assert_true(d.count == 1 && d.max_abs == 1.0 && d.dd == 1.0L);
}

/* A complex number is as far from another as its modulus says; of two numbers in a byte each counts. */
static void test_sums_of_parts(void **state)
{
	float a[4] = { 3, 4, 0, 0 }, b[4] = { 0, 0, 0, 0 };
	unsigned char x[2] = { 0x10, 0x77 }, y[2] = { 0x10, 0x76 };

	(void)state;
	struct stats_diff d = summed(DT_COMPLEX64, a, b, 2);
	assert_true(d.count == 1 && d.max_abs == 5 && d.aa == 25 && d.dd == 25);
	d = summed(DT_FLOAT4_E2M1FN_X2, x, y, 2); /* 0 .5, 6 6 and 0 .5, 4 6 */
	assert_true(d.count == 1 && d.first == 1 && d.max_abs == 2 && d.bits == 1 && d.aa == 72.25L && d.bb == 52.25L);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_counts),
		cmocka_unit_test(test_parts_and_integers),
		cmocka_unit_test(test_many_as_few),
		cmocka_unit_test(test_extremes),
		cmocka_unit_test(test_first_and_largest),
		cmocka_unit_test(test_infinity),
		cmocka_unit_test(test_equal_but_for_bits),
		cmocka_unit_test(test_complex_counts_elements),
		cmocka_unit_test(test_adds_up),
		cmocka_unit_test(test_sums_of_every_dtype),
		cmocka_unit_test(test_sums_leave_out_nan),
		cmocka_unit_test(test_sums_of_extremes),
		cmocka_unit_test(test_sums_of_parts),
	};

	return cmocka_run_group_tests_name("stats", tests, NULL, NULL);
}
