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

static inline uint64_t num_min(uint64_t a, uint64_t b) { return a < b ? a : b; }
static inline uint64_t num_max(uint64_t a, uint64_t b) { return a > b ? a : b; }
static inline uint64_t num_div_up(uint64_t a, uint64_t b) { return a / b + (a % b != 0); }

/* Does [off, off+len) lie inside [0, size)? */
static inline bool num_inside(uint64_t off, uint64_t len, uint64_t size)
{
	return off <= size && len <= size - off;
}
