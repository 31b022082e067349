/* strided.h: copies an N-D box between two layouts in memory. This is where the bytes of a reshard pass through: a piece of a
 * source chunk goes to its place in a destination chunk. Strides are in bytes, may be 0 in the source, never negative.
 *
 *     struct strided s;
 *     strided_init(&s, ndim, sizes, dst_strides, src_strides, elem_bytes);
 *     strided_copy(&s, dst, src);                dst and src: the box's first element on each side
 *
 * Dims that lie behind one another on both sides are merged first, so that a box of whole rows is one memcpy. The caller has
 * checked that the box lies inside both sides; nothing overlaps. */
#pragma once
#include "tensor/box.h"

struct strided {
	uint32_t ndim;                   /* after merging; the last dim is the fastest of the destination */
	size_t elem_bytes;               /* of a run that is contiguous on both sides */
	int64_t sizes[NDIM_MAX], dst[NDIM_MAX], src[NDIM_MAX];
	bool empty;
};

void strided_init(struct strided *s, uint32_t ndim, const int64_t *sizes, const int64_t *dst_strides,
		  const int64_t *src_strides, size_t elem_bytes);
void strided_copy(const struct strided *s, void *dst, const void *src);

/* C-order strides in bytes of a chunk of these sizes. */
void strided_c_order(uint32_t ndim, const int64_t *sizes, size_t elem_bytes, int64_t *strides_out);
