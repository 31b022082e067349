/* view.h: a box of a tensor whose elements lie, by strides, in a stored chunk of another: what permute, reshape, slices and the like make
 * of stored chunks without moving a byte. A tensor that conversion rules made is a list of views, which the read plan takes as its chunks.
 *
 * Strides count elements of the chunk in C order; how the chunk itself lies in its file is known only when its head is read
 * (runner/sources.c puts both together). All that a function makes lies in the arena. */
#pragma once
#include "base/arena.h"
#include "tensor/box.h"
#include "tensor/dtype.h"

enum { VIEW_CASTS_MAX = 4 };
#define VIEW_ZEROS UINT32_MAX

struct view {
	uint32_t source;               /* number of the stored chunk; VIEW_ZEROS: elements are zeros, strides and first mean nothing */
	uint8_t cast_count;
	uint8_t casts[VIEW_CASTS_MAX]; /* enum dtype: what the stored elements become, one after the other */
	int64_t first;                 /* element of the chunk that is the box's first */
	int64_t *dims;                 /* offsets in the tensor, sizes, strides: ndim of each */
};

struct views {
	struct view *v;
	uint64_t n;
};

/* All elements of a chunk. dims: offsets, then sizes. */
FALLIBLE enum err view_of_chunk(struct arena *a, uint32_t ndim, const int64_t *dims, uint32_t source, struct view *out);
/* Zeros. dims: as above. */
FALLIBLE enum err view_of_zeros(struct arena *a, uint32_t ndim, const int64_t *dims, struct view *out);

/* Dim i of the result is dim order[i] of the tensor. */
FALLIBLE enum err views_permute(struct arena *a, struct views in, uint32_t ndim, const int64_t *order, struct views *out);
/* Crops views to a box; the result's coordinates begin at the box's offsets less `shift` (NULL: zeros). */
FALLIBLE enum err views_crop(struct arena *a, struct views in, uint32_t ndim, const int64_t *offsets, const int64_t *sizes,
			     const int64_t *shift, struct views *out);
/* A new dim in front of dim `dim`, in which the box has the one index `at`. */
FALLIBLE enum err views_add_dim(struct arena *a, struct views in, uint32_t ndim, uint32_t dim, int64_t at, struct views *out);
/* Without dim `dim`, in which every box has one index. */
FALLIBLE enum err views_drop_dim(struct arena *a, struct views in, uint32_t ndim, uint32_t dim, struct views *out);
/* torch.reshape to a shape of as many elements. A box that is none in the new shape becomes several: ERR_LIMIT_EXCEEDED beyond `max`. */
FALLIBLE enum err views_reshape(struct arena *a, struct views in, uint32_t ndim, const int64_t *shape, uint32_t to_ndim,
				const int64_t *to_shape, uint64_t max, struct views *out);
/* One more cast. from: the elements' dtype so far. ERR_DTYPE_UNSUPPORTED: no such cast; ERR_LIMIT_EXCEEDED: VIEW_CASTS_MAX were there. */
FALLIBLE enum err views_cast(struct arena *a, struct views in, enum dtype from, enum dtype to, struct views *out);
