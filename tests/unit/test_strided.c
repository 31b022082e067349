/* test_strided.c: boxes copied between layouts, each against a copy element by element. */
#include "lib/t.h"

#include <string.h>

#include "tensor/strided.h"

static uint32_t seed = 1;

static uint32_t rnd(uint32_t n)
{
	seed = seed * 1664525 + 1013904223;
	return (seed >> 8) % n;
}

/* The expected copy: one element after the other, by coordinates. */
static void naive(uint32_t ndim, const int64_t *sizes, const int64_t *ds, const int64_t *ss, size_t elem, unsigned char *dst,
		  const unsigned char *src)
{
	int64_t total = 1;

	for (uint32_t d = 0; d < ndim; d++)
		total *= sizes[d];
	for (int64_t i = 0; i < total; i++) {
		int64_t rest = i, a = 0, b = 0;
		for (uint32_t d = ndim; d-- > 0;) {
			a += rest % sizes[d] * ds[d];
			b += rest % sizes[d] * ss[d];
			rest /= sizes[d];
		}
		memcpy(dst + a, src + b, elem);
	}
}

/* Strides of a dense layout whose dims lie in memory in a random order, with room around. */
static void random_layout(uint32_t ndim, const int64_t *sizes, size_t elem, int64_t *strides)
{
	uint32_t order[8];
	int64_t run = (int64_t)elem;

	for (uint32_t d = 0; d < ndim; d++)
		order[d] = d;
	for (uint32_t d = ndim; d > 1; d--) {
		uint32_t k = rnd(d), v = order[k];
		order[k] = order[d - 1];
		order[d - 1] = v;
	}
	for (uint32_t k = 0; k < ndim; k++) {
		strides[order[k]] = run;
		run *= sizes[order[k]] + rnd(2);
	}
}

static void like_one_by_one(void **state)
{
	static const size_t elems[] = { 1, 2, 4, 8, 16 };
	static unsigned char src[1 << 20], got[1 << 20], want[1 << 20];

	(void)state;
	for (size_t i = 0; i < sizeof src; i++)
		src[i] = (unsigned char)rnd(256);
	for (int round = 0; round < 3000; round++) {
		uint32_t ndim = rnd(6);
		size_t elem = elems[rnd(5)];
		int64_t sizes[8], ds[8], ss[8];
		struct strided s;
		for (uint32_t d = 0; d < ndim; d++)
			sizes[d] = ndim <= 2 && rnd(4) == 0 ? 70 : 1 + rnd(5);
		random_layout(ndim, sizes, elem, ds);
		if (rnd(2))
			random_layout(ndim, sizes, elem, ss);
		else
			strided_c_order(ndim, sizes, elem, ss);
		if (ndim && rnd(8) == 0)
			ss[rnd(ndim)] = 0; /* an expanded source */
		memset(got, 0xEE, sizeof got / 4);
		memset(want, 0xEE, sizeof want / 4);
		strided_init(&s, ndim, sizes, ds, ss, elem);
		strided_copy(&s, got, src);
		naive(ndim, sizes, ds, ss, elem, want, src);
		if (memcmp(got, want, sizeof got / 4) != 0)
			T_FAIL("round %d: another result", round);
	}
}

static void merges_what_is_one_run(void **state)
{
	const int64_t sizes[] = { 3, 4, 5 }, c[] = { 80, 20, 4 }, wide[] = { 800, 20, 4 };
	struct strided s;

	(void)state;
	strided_init(&s, 3, sizes, c, c, 4);
	assert_int_equal(s.ndim, 0);
	assert_int_equal(s.elem_bytes, 240);
	strided_init(&s, 3, sizes, wide, c, 4);
	assert_int_equal(s.ndim, 1);
	assert_int_equal(s.elem_bytes, 80);
	assert_int_equal(s.sizes[0], 3);
}

static void empty_and_scalar(void **state)
{
	const int64_t sizes[] = { 3, 0 }, strides[] = { 4, 4 };
	unsigned char a[4] = { 1, 2, 3, 4 }, b[4] = { 0 };
	struct strided s;

	(void)state;
	strided_init(&s, 2, sizes, strides, strides, 4);
	strided_copy(&s, b, a);
	assert_int_equal(b[0], 0);
	strided_init(&s, 0, NULL, NULL, NULL, 4);
	strided_copy(&s, b, a);
	assert_memory_equal(a, b, 4);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(like_one_by_one),
		cmocka_unit_test(merges_what_is_one_run),
		cmocka_unit_test(empty_and_scalar),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
