/* test_cast.c: conversions whose results are known; all pairs are compared with PyTorch's own in tests/interop/test_items.py. */
#include "lib/t.h"

#include <math.h>
#include <string.h>

#include "base/mem.h"
#include "tensor/cast.h"

static void check(enum dtype from, const void *src, enum dtype to, const void *want, size_t n)
{
	unsigned char got[512];

	T_OK(cast_run(got, to, src, from, n));
	assert_memory_equal(got, want, n * dtype_bytes(to));
}

static void floats_round_to_even(void **state)
{
	const float f[] = { 1.0f, -0.0f, 65504.0f, 65519.0f, 65520.0f, 0x1p-24f, 0x1p-25f, 0x1.8p-25f, 1.00048828125f, INFINITY };
	const uint16_t h[] = { 0x3C00, 0x8000, 0x7BFF, 0x7BFF, 0x7C00, 1, 0, 1, 0x3C00, 0x7C00 };
	const float g[] = { 1.0f, 0x1.01p0f, 0x1.03p0f, -0x1.018p0f, 3.4028235e38f };
	const uint16_t b[] = { 0x3F80, 0x3F80, 0x3F82, 0xBF81, 0x7F80 };

	(void)state;
	check(DT_FLOAT32, f, DT_FLOAT16, h, 10);
	check(DT_FLOAT32, g, DT_BFLOAT16, b, 5);
	for (unsigned code = 0; code < 65536; code++) { /* there and back, but for NaN */
		uint16_t in = (uint16_t)code, out;
		float wide;
		if ((code & 0x7FFF) > 0x7C00)
			continue;
		T_OK(cast_run(&wide, DT_FLOAT32, &in, DT_FLOAT16, 1));
		T_OK(cast_run(&out, DT_FLOAT16, &wide, DT_FLOAT32, 1));
		assert_int_equal(in, out);
	}
}

static void eight_bit_floats(void **state)
{
	const float f[] = { 448.0f, 465.0f, INFINITY, 0x1p-9f, 0x1p-10f, -1.0f, 0.0f };
	const uint8_t e4m3[] = { 0x7E, 0x7E, 0x7E, 0x01, 0x00, 0xB8, 0x00 };
	const uint8_t e5m2[] = { 0x5F, 0x5F, 0x7C, 0x18, 0x14, 0xBC, 0x00 };
	const uint8_t fnuz[] = { 0x80, 0x80, 0x80, 0x02, 0x01, 0xC0, 0x00 };
	const uint8_t e8m0[] = { 0x88, 0x88, 0xFF, 0x76, 0x75, 0x7F, 0x00 };
	const float minus_zero = -0.0f;
	const uint8_t zero = 0;

	(void)state;
	check(DT_FLOAT32, f, DT_FLOAT8_E4M3FN, e4m3, 7);
	check(DT_FLOAT32, f, DT_FLOAT8_E5M2, e5m2, 7);
	check(DT_FLOAT32, f, DT_FLOAT8_E4M3FNUZ, fnuz, 7);
	check(DT_FLOAT32, f, DT_FLOAT8_E8M0FNU, e8m0, 7);
	check(DT_FLOAT32, &minus_zero, DT_FLOAT8_E5M2FNUZ, &zero, 1);
}

static void integers(void **state)
{
	const int64_t big[] = { 9007199254740993, -1, 16777217, INT64_MIN };
	const float f[] = { 0x1p53f, -1.0f, 16777216.0f, -0x1p63f };
	const double d[] = { 9007199254740992.0, -1.0, 16777217.0, -0x1p63 };
	const uint8_t low[] = { 1, 255, 1, 0 };
	const uint64_t u[] = { UINT64_MAX, 1ull << 63 };
	const float uf[] = { 0x1p64f, 0x1p63f };
	const float in[] = { 1.9f, -1.9f, 255.0f, 0.5f };
	const int32_t out[] = { 1, -1, 255, 0 };
	const uint8_t truth[] = { 1, 1, 1, 1 };

	(void)state;
	check(DT_INT64, big, DT_FLOAT32, f, 4);
	check(DT_INT64, big, DT_FLOAT64, d, 4);
	check(DT_INT64, big, DT_UINT8, low, 4);
	check(DT_UINT64, u, DT_FLOAT32, uf, 2);
	check(DT_FLOAT32, in, DT_INT32, out, 4);
	check(DT_FLOAT32, in, DT_BOOL, truth, 4);
}

static void complex_parts(void **state)
{
	const float c[] = { 1.5f, 2.0f, 0.0f, 3.0f, 0.0f, 0.0f };
	const double real[] = { 1.5, 0.0, 0.0 }, wide[] = { 1.5, 2.0, 0.0, 3.0, 0.0, 0.0 };
	const uint8_t truth[] = { 1, 1, 0 };
	const float r[] = { 7.0f, 8.0f }, spread[] = { 7.0f, 0.0f, 8.0f, 0.0f };

	(void)state;
	check(DT_COMPLEX64, c, DT_FLOAT64, real, 3);
	check(DT_COMPLEX64, c, DT_COMPLEX128, wide, 3);
	check(DT_COMPLEX64, c, DT_BOOL, truth, 3);
	check(DT_FLOAT32, r, DT_COMPLEX64, spread, 2);
}

/* Blocks must join without a seam. */
static void long_runs(void **state)
{
	static float in[5000], back[5000];
	static double wide[10000];

	(void)state;
	for (int i = 0; i < 5000; i++)
		in[i] = (float)i * 0.5f;
	T_OK(cast_run(wide, DT_COMPLEX128, in, DT_FLOAT32, 5000));
	T_OK(cast_run(back, DT_FLOAT32, wide, DT_COMPLEX128, 5000));
	assert_memory_equal(in, back, sizeof in);
	T_OK(cast_run(wide, DT_FLOAT64, in, DT_FLOAT32, 0));
}

/* Long runs take other ways than single elements: tables, hardware, no block between. Any bits, at odd addresses, to the same bits. */
static void long_runs_are_their_elements(void **state)
{
	enum { N = 65536 + 13 };
	unsigned char *in = mem_alloc(16 * N + 1), *run = mem_alloc(16 * N + 1), *one = mem_alloc(16 * N + 1);

	(void)state;
	srandom(1);
	for (uint32_t i = 0; i < 16 * N + 1; i++)
		in[i] = (unsigned char)random();
	for (uint32_t pair = 0; pair < DT_COUNT * DT_COUNT; pair++) {
		enum dtype from = (enum dtype)(pair / DT_COUNT), to = (enum dtype)(pair % DT_COUNT);
		uint32_t a = dtype_bytes(from), b = dtype_bytes(to), n = from == DT_FLOAT16 || from == DT_BFLOAT16 ? N : 5001;
		if (to == from || cast_check(to, from) != OK)
			continue;
		for (uint16_t code = 0; n == N && code < 0xFFFF; code++)
			memcpy(in + 1 + 2 * code, &code, 2);
		for (uint32_t i = 0; from == DT_FLOAT32 && i < n; i += 3) /* half-way between two of fewer bits */
			memcpy(in + 1 + 4 * i, (const uint16_t[]){ 0x8000, (uint16_t)(0x3000 + i * 8) }, 4);
		T_OK(cast_run(run + 1, to, in + 1, from, n));
		for (uint32_t i = 0; i < n; i++)
			T_OK(cast_run(one + 1 + i * b, to, in + 1 + i * a, from, 1));
		if (memcmp(run + 1, one + 1, (size_t)n * b) != 0)
			T_FAIL("%s to %s", dtype_name(from), dtype_name(to));
	}
	mem_free(in);
	mem_free(run);
	mem_free(one);
}

static void float4_goes_nowhere(void **state)
{
	uint8_t in[3] = { 1, 2, 3 }, out[16];

	(void)state;
	T_ERR(DTYPE_UNSUPPORTED, cast_run(out, DT_FLOAT32, in, DT_FLOAT4_E2M1FN_X2, 3));
	T_ERR(DTYPE_UNSUPPORTED, cast_check(DT_FLOAT4_E2M1FN_X2, DT_UINT8));
	check(DT_FLOAT4_E2M1FN_X2, in, DT_FLOAT4_E2M1FN_X2, in, 3);
}

static void lazy_bits(void **state)
{
	float c[] = { 1.0f, 2.0f, -3.0f, -0.0f };
	const float conj[] = { 1.0f, -2.0f, -3.0f, 0.0f }, neg[] = { -1.0f, 2.0f, 3.0f, -0.0f };
	int16_t i[] = { 1, -32768, 256, 0 };
	const int16_t minus[] = { -1, -32768, -256, 0 };

	(void)state;
	T_OK(cast_conj(c, DT_COMPLEX64, 2));
	assert_memory_equal(c, conj, sizeof c);
	T_OK(cast_neg(c, DT_COMPLEX64, 2));
	assert_memory_equal(c, neg, sizeof c);
	T_OK(cast_neg(i, DT_INT16, 4));
	assert_memory_equal(i, minus, sizeof i);
	T_OK(cast_conj(i, DT_INT16, 4));
	assert_memory_equal(i, minus, sizeof i);
	T_ERR(DTYPE_UNSUPPORTED, cast_neg(i, DT_BOOL, 8));
	T_ERR(DTYPE_UNSUPPORTED, cast_neg(i, DT_FLOAT8_E4M3FNUZ, 8));
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(floats_round_to_even),
		cmocka_unit_test(eight_bit_floats),
		cmocka_unit_test(integers),
		cmocka_unit_test(complex_parts),
		cmocka_unit_test(long_runs),
		cmocka_unit_test(long_runs_are_their_elements),
		cmocka_unit_test(float4_goes_nowhere),
		cmocka_unit_test(lazy_bits),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
