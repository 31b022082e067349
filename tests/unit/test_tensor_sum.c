/* The digest of a tensor's content: the parts of any cut, in any order and in pieces of any size, add up to that of the whole. */
#include "lib/t.h"

#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "io/tensor_sum.h"

static uint64_t seed = 88172645463325252ull;

static uint64_t draw(uint64_t below)
{
	seed ^= seed << 13;
	seed ^= seed >> 7;
	seed ^= seed << 17;
	return seed % below;
}

/* CRC-64/XZ, bit by bit. */
static uint64_t reference(const unsigned char *p, size_t n)
{
	uint64_t crc = ~0ull;

	for (size_t i = 0; i < n; i++) {
		crc ^= p[i];
		for (int k = 0; k < 8; k++)
			crc = crc & 1 ? crc >> 1 ^ 0xC96C5795D7870F42ull : crc >> 1;
	}
	return ~crc;
}

static void test_the_check_value(void **state)
{
	const int64_t shape[] = { 9 }, dims[] = { 0, 9 };
	struct tensor_sum c;

	(void)state;
	assert_true(tensor_sum_begin(&c, 1, dims, shape, 1, 0));
	tensor_sum_add(&c, "123456789", 9);
	assert_true(tensor_sum_finish(tensor_sum_end(&c), 9) == 0x995DC9BBDF1939FAull);
	assert_true(tensor_sum_finish(0, 0) == 0);
}

struct tensor {
	uint32_t ndim, item;
	int64_t shape[4];
	unsigned char *bytes;
	uint64_t n;
};

/* Copies a box's elements, in its own C order. */
static unsigned char *box_of(const struct tensor *t, const int64_t *dims, uint64_t *n_out)
{
	uint64_t n = box_volume(t->ndim, dims + t->ndim);
	unsigned char *out = mem_alloc(n * t->item + 1);

	for (uint64_t i = 0; i < n; i++) {
		uint64_t rest = i, at = 0, stride = 1;
		for (uint32_t d = t->ndim; d-- > 0;) {
			at += ((uint64_t)dims[d] + rest % (uint64_t)dims[t->ndim + d]) * stride;
			rest /= (uint64_t)dims[t->ndim + d];
			stride *= (uint64_t)t->shape[d];
		}
		memcpy(out + i * t->item, t->bytes + at * t->item, t->item);
	}
	*n_out = n * t->item;
	return out;
}

/* The sum of a box that is taken in parts of any size, each in pieces of any size. */
static uint64_t sum_of(const struct tensor *t, const int64_t *dims)
{
	uint64_t n, sum = 0;
	unsigned char *bytes = box_of(t, dims, &n);

	for (uint64_t begin = 0, end; begin < n; begin = end) {
		struct tensor_sum c;
		end = begin + 1 + draw(n - begin);
		assert_true(tensor_sum_begin(&c, t->ndim, dims, t->shape, t->item, begin));
		for (uint64_t at = begin, piece; at < end; at += piece) {
			piece = 1 + draw(end - at);
			tensor_sum_add(&c, bytes + at, piece);
		}
		sum ^= tensor_sum_end(&c);
	}
	mem_free(bytes);
	return sum;
}

/* Cuts the box in two along some dim, again and again. */
static uint64_t cut(const struct tensor *t, const int64_t *dims, int depth)
{
	uint32_t d = t->ndim ? (uint32_t)draw(t->ndim) : 0;
	int64_t a[8], b[8];

	if (depth == 0 || t->ndim == 0 || dims[t->ndim + d] < 2)
		return sum_of(t, dims);
	int64_t at = 1 + (int64_t)draw((uint64_t)dims[t->ndim + d] - 1);
	memcpy(a, dims, 2 * t->ndim * sizeof *dims);
	memcpy(b, dims, 2 * t->ndim * sizeof *dims);
	a[t->ndim + d] = at;
	b[d] += at;
	b[t->ndim + d] -= at;
	return cut(t, b, depth - 1) ^ cut(t, a, depth - 1);
}

static void test_any_cut(void **state)
{
	(void)state;
	for (int round = 0; round < 300; round++) {
		struct tensor t = { .ndim = (uint32_t)draw(5), .item = 1u << draw(5), .n = 1 };
		int64_t dims[8] = { 0 };
		for (uint32_t d = 0; d < t.ndim; d++) {
			t.shape[d] = dims[t.ndim + d] = 1 + (int64_t)draw(9);
			t.n *= (uint64_t)t.shape[d];
		}
		t.n *= t.item;
		t.bytes = mem_alloc(t.n);
		for (uint64_t i = 0; i < t.n; i++)
			t.bytes[i] = (unsigned char)draw(256);
		assert_true(tensor_sum_finish(cut(&t, dims, 5), t.n) == reference(t.bytes, t.n));
		mem_free(t.bytes);
	}
}

static void test_sizes_that_do_not_fit(void **state)
{
	const int64_t big = INT64_MAX, shape[] = { big, big }, dims[] = { 0, 0, 1, 1 };
	struct tensor_sum c;

	(void)state;
	assert_false(tensor_sum_begin(&c, 2, dims, shape, 8, 0));
}

static void test_an_empty_box(void **state)
{
	const int64_t shape[] = { 4, 4 }, dims[] = { 0, 4, 0, 0 }, rows[] = { 2, 0, 0, 4 };
	const int64_t wide[] = { 0, 1 << 30, 1ll << 32 }, all[] = { 0, 0, 0, 0, 1 << 30, 1ll << 32 }; /* with other sizes that do not fit */
	struct tensor_sum c;

	(void)state;
	assert_true(tensor_sum_begin(&c, 2, dims, shape, 8, 0));
	assert_true(tensor_sum_begin(&c, 2, rows, shape, 8, 0));
	assert_true(tensor_sum_begin(&c, 3, all, wide, 8, 0));
	tensor_sum_add(&c, NULL, 0);
	assert_true(tensor_sum_end(&c) == 0);
}

static void test_what_is_cheap(void **state)
{
	const int64_t shape[] = { 1 << 20, 4096 }, rows[] = { 0, 0, 100, 4096 },
		      halves[] = { 0, 0, 1 << 20, 2048 }, column[] = { 0, 5, 1 << 20, 1 },
		      few[] = { 0, 5, 16, 1 };

	(void)state;
	assert_true(tensor_sum_is_cheap(2, rows, shape, 2));
	assert_true(tensor_sum_is_cheap(2, halves, shape, 2));
	assert_false(tensor_sum_is_cheap(2, column, shape, 16));
	assert_true(tensor_sum_is_cheap(2, few, shape, 2));
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_the_check_value), cmocka_unit_test(test_any_cut), cmocka_unit_test(test_sizes_that_do_not_fit),
		cmocka_unit_test(test_an_empty_box), cmocka_unit_test(test_what_is_cheap),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
