/* linear.c: see linear.h. Each step takes the largest box that begins at the current element: whole slabs of the outermost dim whose
 * inner coordinates are all zero. */
#include "tensor/linear.h"

bool linear_next(struct linear *l, int64_t *offsets_out, int64_t *sizes_out)
{
	uint64_t left = l->end - l->at, rest = l->at, slab = 1;
	uint32_t d = l->ndim;

	if (l->at >= l->end)
		return false;
	for (uint32_t i = l->ndim; i-- > 0;) {
		offsets_out[i] = (int64_t)(rest % (uint64_t)l->sizes[i]);
		rest /= (uint64_t)l->sizes[i];
	}
	/* grow the slab outwards while everything inside begins at 0 and a whole slab is left */
	while (d > 1 && offsets_out[d - 1] == 0 && slab * (uint64_t)l->sizes[d - 1] <= left) {
		slab *= (uint64_t)l->sizes[d - 1];
		sizes_out[d - 1] = l->sizes[d - 1];
		d--;
	}
	uint64_t count = 1;
	if (d > 0) {
		count = left / slab;
		uint64_t room = (uint64_t)(l->sizes[d - 1] - offsets_out[d - 1]);
		count = count < room ? count : room;
		sizes_out[d - 1] = (int64_t)count;
		for (uint32_t i = 0; i + 1 < d; i++)
			sizes_out[i] = 1;
	}
	l->at += count * slab;
	return true;
}

bool linear_is_run(uint32_t ndim, const int64_t *shape, const int64_t *off, const int64_t *size, uint64_t *first_out)
{
	uint64_t first = 0;
	bool whole = true; /* all dims further in are whole */

	for (uint32_t i = ndim; i-- > 0;) {
		if (!whole && size[i] != 1)
			return false;
		whole = whole && size[i] == shape[i];
	}
	for (uint32_t i = 0; i < ndim; i++)
		first = first * (uint64_t)shape[i] + (uint64_t)off[i];
	*first_out = first;
	return true;
}

bool linear_is_packed(uint32_t ndim, const int64_t *strides, const int64_t *size)
{
	int64_t stride = 1;

	for (uint32_t i = ndim; i-- > 0;) {
		if (size[i] != 1 && strides[i] != stride)
			return false;
		stride *= size[i];
	}
	return true;
}
