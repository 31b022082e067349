/* linear.h: a range of a tensor's elements in C order, as the fewest boxes (at most 2 * ndim - 1 of them). Blocks of a payload are cut
 * at byte positions that suit the disk, not at rows; this says which boxes such a block is. */
#pragma once
#include "tensor/box.h"

struct linear {
	uint32_t ndim;
	const int64_t *sizes;
	uint64_t at, end;              /* elements not yet given out */
};

/* [begin, end) must lie inside the tensor's elements. */
static inline struct linear linear_range(uint32_t ndim, const int64_t *sizes, uint64_t begin, uint64_t end)
{
	return (struct linear){ ndim, sizes, begin, end };
}
/* The next box, in order; false when the range is used up. */
bool linear_next(struct linear *l, int64_t *offsets_out, int64_t *sizes_out);
/* Is the box [off, off + size) of a C-order tensor one run of elements? *first_out: its first element. */
bool linear_is_run(uint32_t ndim, const int64_t *shape, const int64_t *off, const int64_t *size, uint64_t *first_out);
/* The same of a box that lies with these strides, in elements: does its next element, in C order, always lie behind the one before? */
bool linear_is_packed(uint32_t ndim, const int64_t *strides, const int64_t *size);
