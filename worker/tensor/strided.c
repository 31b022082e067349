/* strided.c: see strided.h. After merging there are three cases: one run (memcpy), rows of runs (a loop of memcpy), and elements that
 * are far apart on one side. The last one goes by tiles, so that a cache line fetched for one element is still there for its
 * neighbours. */
#include "tensor/strided.h"

#include <string.h>

enum { TILE = 32 };

void strided_c_order(uint32_t ndim, const int64_t *sizes, size_t elem_bytes, int64_t *strides_out)
{
	int64_t run = (int64_t)elem_bytes;

	for (uint32_t d = ndim; d-- > 0;) {
		strides_out[d] = run;
		if (sizes[d] > 0 && __builtin_mul_overflow(run, sizes[d], &run))
			run = INT64_MAX; /* an empty chunk: nobody will go that far */
	}
}

static void swap_dims(struct strided *s, uint32_t a, uint32_t b)
{
	int64_t *const fields[] = { s->sizes, s->dst, s->src };

	for (int f = 0; f < 3; f++) {
		int64_t v = fields[f][a];
		fields[f][a] = fields[f][b];
		fields[f][b] = v;
	}
}

/* The destination is written in the order of its memory: largest stride first. Few dims: insertion sort, stable. */
static void sort_dims(struct strided *s)
{
	for (uint32_t i = 1; i < s->ndim; i++)
		for (uint32_t k = i; k > 0 && s->dst[k] > s->dst[k - 1]; k--)
			swap_dims(s, k, k - 1);
}

static void drop_dim(struct strided *s, uint32_t d)
{
	for (uint32_t k = d; k + 1 < s->ndim; k++)
		swap_dims(s, k, k + 1);
	s->ndim--;
}

static void merge_dims(struct strided *s)
{
	for (uint32_t d = s->ndim; d-- > 1;) {
		bool chained = s->dst[d - 1] == s->dst[d] * s->sizes[d] && s->src[d - 1] == s->src[d] * s->sizes[d];
		if (!chained)
			continue;
		s->sizes[d] *= s->sizes[d - 1];
		drop_dim(s, d - 1);
	}
	while (s->ndim) {
		uint32_t last = s->ndim - 1;
		int64_t run = (int64_t)s->elem_bytes;
		if (s->dst[last] != run || s->src[last] != run)
			break;
		s->elem_bytes *= (size_t)s->sizes[last];
		s->ndim--;
	}
}

void strided_init(struct strided *s, uint32_t ndim, const int64_t *sizes, const int64_t *dst_strides,
		  const int64_t *src_strides, size_t elem_bytes)
{
	must(ndim <= NDIM_MAX && elem_bytes > 0);
	*s = (struct strided){ .elem_bytes = elem_bytes };
	for (uint32_t d = 0; d < ndim; d++) {
		must(sizes[d] >= 0 && dst_strides[d] >= 0 && src_strides[d] >= 0);
		s->empty |= sizes[d] == 0;
		if (sizes[d] == 1)
			continue;
		s->sizes[s->ndim] = sizes[d];
		s->dst[s->ndim] = dst_strides[d];
		s->src[s->ndim++] = src_strides[d];
	}
	if (s->empty)
		return;
	sort_dims(s);
	merge_dims(s);
}

#define ELEMENTS(type)                                                        \
	for (int64_t i = 0; i < n; i++)                                       \
		memcpy(dst + i * dst_step, src + i * src_step, sizeof(type)); \
	return

/* n elements of a row; the sizes that dtypes have become single moves. */
static void copy_row(unsigned char *dst, int64_t dst_step, const unsigned char *src, int64_t src_step, size_t bytes, int64_t n)
{
	switch (bytes) {
	case 1: ELEMENTS(uint8_t);
	case 2: ELEMENTS(uint16_t);
	case 4: ELEMENTS(uint32_t);
	case 8: ELEMENTS(uint64_t);
	case 16: ELEMENTS(struct { uint64_t half[2]; });
	default:
		for (int64_t i = 0; i < n; i++)
			memcpy(dst + i * dst_step, src + i * src_step, bytes);
	}
}

/* The last two dims. If the source runs fast in the outer one, a row at a time would fetch a line for every element: tiles. */
static void copy_plane(const struct strided *s, unsigned char *dst, const unsigned char *src)
{
	uint32_t inner = s->ndim - 1, outer = inner - 1;
	int64_t rows = s->sizes[outer], n = s->sizes[inner];
	bool tiled = s->elem_bytes <= 16 && s->src[outer] < s->src[inner];
	int64_t high = tiled ? TILE : 1, wide = tiled ? TILE : n;

	for (int64_t r0 = 0; r0 < rows; r0 += high) {
		int64_t r1 = r0 + high < rows ? r0 + high : rows;
		for (int64_t c = 0; c < n; c += wide) {
			int64_t some = n - c < wide ? n - c : wide;
			for (int64_t r = r0; r < r1; r++)
				copy_row(dst + r * s->dst[outer] + c * s->dst[inner], s->dst[inner],
					 src + r * s->src[outer] + c * s->src[inner], s->src[inner],
					 s->elem_bytes, some);
		}
	}
}

void strided_copy(const struct strided *s, void *dst, const void *src)
{
	int64_t at[NDIM_MAX] = { 0 };
	unsigned char *d = dst;
	const unsigned char *f = src;

	if (s->empty)
		return;
	if (s->ndim == 0) {
		memcpy(d, f, s->elem_bytes);
		return;
	}
	if (s->ndim == 1) {
		copy_row(d, s->dst[0], f, s->src[0], s->elem_bytes, s->sizes[0]);
		return;
	}
	for (;;) {
		copy_plane(s, d, f);
		uint32_t k = s->ndim - 2;
		while (k > 0) { /* the next position of the outer dims, as an odometer */
			k--;
			d += s->dst[k];
			f += s->src[k];
			if (++at[k] < s->sizes[k])
				break;
			d -= s->dst[k] * s->sizes[k];
			f -= s->src[k] * s->sizes[k];
			at[k] = 0;
			if (k == 0)
				return;
		}
		if (s->ndim == 2)
			return;
	}
}
