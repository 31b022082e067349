/* num.h: checked arithmetic on sizes and offsets. Each returns ERR_LIMIT_EXCEEDED instead of wrapping around.
 * Out-parameters are written on success only. */
#pragma once
#include "base/err.h"

#define NUM_OVERFLOW() ERR(LIMIT_EXCEEDED, "a size does not fit 64 bits")

static inline FALLIBLE enum err num_add(uint64_t a, uint64_t b, uint64_t *sum_out)
{
	uint64_t sum;

	if (__builtin_add_overflow(a, b, &sum))
		return NUM_OVERFLOW();
	*sum_out = sum;
	return OK;
}

static inline FALLIBLE enum err num_mul(uint64_t a, uint64_t b, uint64_t *product_out)
{
	uint64_t product;

	if (__builtin_mul_overflow(a, b, &product))
		return NUM_OVERFLOW();
	*product_out = product;
	return OK;
}

/* Rounds up to a multiple of `align`, a power of two. */
static inline FALLIBLE enum err num_align(uint64_t a, uint64_t align, uint64_t *out)
{
	uint64_t sum;

	if (__builtin_add_overflow(a, align - 1, &sum))
		return NUM_OVERFLOW();
	*out = sum & ~(align - 1);
	return OK;
}

/* Negative, 0 or positive, as a comparison for qsort: num_order(a->rank, b->rank) ?: num_order(a->at, b->at). */
#define num_order(a, b) (((a) > (b)) - ((a) < (b)))

/* The same of two rows of numbers, the first that differ. */
static inline int num_order_rows(const int64_t *a, const int64_t *b, uint32_t n)
{
	uint32_t i = 0;

	while (i < n && a[i] == b[i])
		i++;
	return i < n ? num_order(a[i], b[i]) : 0;
}

/* For qsort and bsearch of uint32_t. */
static inline int num_cmp_u32(const void *a, const void *b)
{
	return num_order(*(const uint32_t *)a, *(const uint32_t *)b);
}

static inline uint64_t num_min(uint64_t a, uint64_t b) { return a < b ? a : b; }
static inline uint64_t num_max(uint64_t a, uint64_t b) { return a > b ? a : b; }
static inline uint64_t num_div_up(uint64_t a, uint64_t b) { return a / b + (a % b != 0); }

/* Does [off, off+len) lie inside [0, size)? */
static inline bool num_inside(uint64_t off, uint64_t len, uint64_t size)
{
	return off <= size && len <= size - off;
}
