/* test_average.c: weighted sums of elements. */
#include "lib/t.h"
#include "tensor/average.h"

static void test_reals(void **state)
{
	float a[5] = { 1, 2, -3, 0, 8 }, b[5] = { 3, 0, 5, 0, 1 }, sum[5];
	double c[3] = { 1, -1, 0.5 };

	(void)state;
	average_add(sum, a, DT_FLOAT32, 5, 0.25, true);
	average_add(sum, b, DT_FLOAT32, 5, 0.75, false);
	for (int i = 0; i < 5; i++)
		assert_true(sum[i] == 0.25f * a[i] + 0.75f * b[i]);
	average_add(c, c, DT_FLOAT64, 3, 0.1, true); /* in its place */
	assert_true(c[0] == 0.1 && c[1] == -0.1 && c[2] == 0.5 * 0.1);
	average_add(sum, a, DT_FLOAT32, 0, 1, true);
}

/* A weight of 32 bits for elements of 32 bits, as torch has it. */
static void test_weights(void **state)
{
	float a = 3, sum;

	(void)state;
	average_add(&sum, &a, DT_FLOAT32, 1, 0.1, true);
	assert_true(sum == 0.1f * 3.0f);
}

static void test_complex(void **state)
{
	float z[4] = { 1, 2, 3, 4 }, sum[4] = { 0 };
	double w[2] = { 1, 2 }, wide[2] = { 5, 5 };

	(void)state;
	average_add(sum, z, DT_COMPLEX64, 2, 0.5, true);
	assert_true(sum[0] == 0.5f && sum[3] == 2);
	average_add(wide, w, DT_COMPLEX128, 1, 2, false);
	assert_true(wide[0] == 7 && wide[1] == 9);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_reals),
		cmocka_unit_test(test_weights),
		cmocka_unit_test(test_complex),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
