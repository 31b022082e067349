/* box.h: a box of a tensor: offsets and sizes in every dim. One intersection serves every operation.
 *
 * Boxes are given as (ndim, offsets, sizes); ndim 0 is a scalar, whose box holds one element. All values are >= 0 and
 * offset + size <= INT64_MAX once box_check() has passed. */
#pragma once
#include "base/err.h"

enum { NDIM_MAX = 64 };

/* Product of sizes; ERR_LIMIT_EXCEEDED if it does not fit int64. A 0-d box has one element; any 0 size gives 0. */
FALLIBLE enum err box_numel(uint32_t ndim, const int64_t *sizes, uint64_t *numel_out);
/* The same product for sizes that are known to fit: a box inside a tensor, a checked mesh. */
static inline uint64_t box_volume(uint32_t ndim, const int64_t *sizes)
{
	uint64_t n = 1;

	for (uint32_t d = 0; d < ndim; d++)
		n *= (uint64_t)sizes[d];
	return n;
}
/* offsets and sizes not negative, offset + size <= shape; the message says "chunk [..]+[..] is outside of [..]". */
FALLIBLE enum err box_check(uint32_t ndim, const int64_t *offsets, const int64_t *sizes, const int64_t *shape);
bool box_inside(uint32_t ndim, const int64_t *offsets, const int64_t *sizes, const int64_t *shape); /* the same, no message */
/* True if the boxes share at least one element (0-d boxes always do, empty boxes never); then writes the intersection. */
bool box_intersect(uint32_t ndim, const int64_t *a_off, const int64_t *a_size, const int64_t *b_off,
		   const int64_t *b_size, int64_t *off_out, int64_t *size_out);
bool box_equal(uint32_t ndim, const int64_t *a_off, const int64_t *a_size, const int64_t *b_off, const int64_t *b_size);
bool box_same_shape(uint32_t a_ndim, const int64_t *a, uint32_t b_ndim, const int64_t *b);
bool box_empty(uint32_t ndim, const int64_t *sizes);
/* "[4, 0]" into buf, cut to fit; returns buf. */
const char *box_print(uint32_t ndim, const int64_t *v, char *buf, size_t max);
