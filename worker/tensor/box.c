/* box.c: arithmetic on boxes (see box.h). Sums are checked where boxes come from outside (box_check, box_numel); the rest may then
 * add without fear. */
#include "tensor/box.h"

#include <stdio.h>
#include <string.h>

enum err box_numel(uint32_t ndim, const int64_t *sizes, uint64_t *numel_out)
{
	uint64_t n = 1;
	bool overflow = false;

	for (uint32_t d = 0; d < ndim; d++) {
		if (sizes[d] < 0)
			return ERR(LIMIT_EXCEEDED, "a size is negative: %jd", (intmax_t)sizes[d]);
		if (sizes[d] == 0) {
			*numel_out = 0; /* whatever the other dims say */
			for (d++; d < ndim; d++)
				if (sizes[d] < 0)
					return ERR(LIMIT_EXCEEDED, "a size is negative: %jd",
						   (intmax_t)sizes[d]);
			return OK;
		}
		overflow |= __builtin_mul_overflow(n, (uint64_t)sizes[d], &n);
		overflow |= n > INT64_MAX;
	}
	if (overflow) {
		char text[128];
		return ERR(LIMIT_EXCEEDED, "a tensor of shape %s has too many elements",
			   box_print(ndim, sizes, text, sizeof text));
	}
	*numel_out = n;
	return OK;
}

bool box_inside(uint32_t ndim, const int64_t *offsets, const int64_t *sizes, const int64_t *shape)
{
	for (uint32_t d = 0; d < ndim; d++)
		if (offsets[d] < 0 || sizes[d] < 0 || offsets[d] > shape[d] ||
		    sizes[d] > shape[d] - offsets[d])
			return false;
	return true;
}

enum err box_check(uint32_t ndim, const int64_t *offsets, const int64_t *sizes, const int64_t *shape)
{
	char o[192], s[192], t[192];

	if (box_inside(ndim, offsets, sizes, shape))
		return OK;
	return ERR(PLAN_INVALID, "chunk %s+%s is outside of %s", box_print(ndim, offsets, o, sizeof o),
		   box_print(ndim, sizes, s, sizeof s), box_print(ndim, shape, t, sizeof t));
}

bool box_intersect(uint32_t ndim, const int64_t *a_off, const int64_t *a_size, const int64_t *b_off,
		   const int64_t *b_size, int64_t *off_out, int64_t *size_out)
{
	for (uint32_t d = 0; d < ndim; d++) {
		int64_t a_end = a_off[d] + a_size[d], b_end = b_off[d] + b_size[d];
		int64_t start = a_off[d] > b_off[d] ? a_off[d] : b_off[d];
		int64_t end = a_end < b_end ? a_end : b_end;

		if (start >= end)
			return false;
		off_out[d] = start;
		size_out[d] = end - start;
	}
	return true;
}

bool box_equal(uint32_t ndim, const int64_t *a_off, const int64_t *a_size, const int64_t *b_off, const int64_t *b_size)
{
	return ndim == 0 || (memcmp(a_off, b_off, ndim * sizeof *a_off) == 0 &&
			     memcmp(a_size, b_size, ndim * sizeof *a_size) == 0);
}

bool box_same_shape(uint32_t a_ndim, const int64_t *a, uint32_t b_ndim, const int64_t *b)
{
	return a_ndim == b_ndim && (a_ndim == 0 || memcmp(a, b, a_ndim * sizeof *a) == 0);
}

bool box_empty(uint32_t ndim, const int64_t *sizes)
{
	for (uint32_t d = 0; d < ndim; d++)
		if (sizes[d] == 0)
			return true;
	return false;
}

const char *box_print(uint32_t ndim, const int64_t *v, char *buf, size_t max)
{
	size_t used = 0;

	must(max > 8);
	buf[used++] = '[';
	for (uint32_t d = 0; d < ndim; d++) {
		char one[32];
		int n = snprintf(one, sizeof one, "%s%jd", d ? ", " : "", (intmax_t)v[d]);

		if (used + (size_t)n + 6 > max) { /* room for "...]" and the end */
			memcpy(buf + used, "...", 3);
			used += 3;
			break;
		}
		memcpy(buf + used, one, (size_t)n);
		used += (size_t)n;
	}
	buf[used++] = ']';
	buf[used] = '\0';
	return buf;
}
