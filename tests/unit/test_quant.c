/* test_quant.c: blocks of Q8_0, against the definition; parts of blocks are the same bytes as whole ones. */
#include "lib/t.h"

#include <math.h>
#include <string.h>

#include "tensor/cast.h"
#include "tensor/quant.h"

enum { BLOCKS = 40, BYTES = BLOCKS * QUANT_Q8_0_BYTES };

static float values[BLOCKS * QUANT_Q8_0_FLOATS];

static void fill(void)
{
	uint32_t seed = 7;

	for (size_t i = 0; i < sizeof values / sizeof *values; i++) {
		seed = seed * 1664525 + 1013904223;
		values[i] = ldexpf((float)(int32_t)seed, (int)(i / QUANT_Q8_0_FLOATS) * 4 - 100);
	}
	memset(values, 0, QUANT_Q8_0_FLOATS * sizeof *values);
	values[QUANT_Q8_0_FLOATS + 3] = NAN;
	values[2 * QUANT_Q8_0_FLOATS + 3] = -INFINITY;
}

static void test_definition(void **state)
{
	unsigned char out[BYTES];

	(void)state;
	fill();
	quant_q8_0_part(out, values, 0, BYTES);
	for (size_t b = 3; b < BLOCKS; b++) {
		const float *x = values + b * QUANT_Q8_0_FLOATS;
		float most = 0, scale;
		uint16_t half;
		for (int i = 0; i < QUANT_Q8_0_FLOATS; i++)
			most = fmaxf(most, fabsf(x[i]));
		scale = most / 127.0f;
		assert_int_equal(cast_run(&half, DT_FLOAT16, &scale, DT_FLOAT32, 1), OK);
		assert_memory_equal(out + b * QUANT_Q8_0_BYTES, &half, 2);
		for (int i = 0; i < QUANT_Q8_0_FLOATS; i++)
			assert_int_equal((int8_t)out[b * QUANT_Q8_0_BYTES + 2 + (size_t)i], (int)roundf(x[i] * (1.0f / scale)));
	}
	for (size_t b = 0; b < 3; b++) /* zeros, and what no int8 can be made of */
		for (size_t i = 2; i < QUANT_Q8_0_BYTES; i++)
			assert_int_equal(out[b * QUANT_Q8_0_BYTES + i], 0);
}

static void test_parts(void **state)
{
	unsigned char whole[BYTES], part[BYTES];

	(void)state;
	fill();
	quant_q8_0_part(whole, values, 0, BYTES);
	for (uint32_t begin = 0; begin < 3 * QUANT_Q8_0_BYTES; begin++)
		for (uint32_t end = begin; end <= BYTES; end += 29) {
			size_t block = begin / QUANT_Q8_0_BYTES;
			memset(part, 0xEE, sizeof part);
			quant_q8_0_part(part, values + block * QUANT_Q8_0_FLOATS, begin % QUANT_Q8_0_BYTES, end - begin);
			assert_memory_equal(part, whole + begin, end - begin);
			assert_true(end - begin == BYTES || part[end - begin] == 0xEE);
		}
}

int main(void)
{
	const struct CMUnitTest tests[] = { cmocka_unit_test(test_definition), cmocka_unit_test(test_parts) };

	return cmocka_run_group_tests(tests, NULL, NULL);
}
