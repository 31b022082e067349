/* dtensor.h: which part of a tensor one rank of a device mesh holds under DTensor placements, and where it lies in that rank's
 * local tensor.
 *
 * PyTorch describes a rank's part as one box (compute_local_shape_and_global_offset). That is right until a _StridedShard leaves a
 * rank with rows that are not neighbours; then its box is not what the rank holds. Here a part is as many exact boxes as it
 * takes. The local tensor has a rank's rows in the order of the whole tensor, whatever the placements are.
 *
 *     CLEANUP(dtensor_part_free) struct dtensor_part part = { 0 };
 *     TRY(dtensor_part_make(ndim, shape, mesh_ndim, mesh, coord, placements, &part));
 *     for (uint64_t i = 0; i < part.count; i++)
 *             dtensor_part_box(&part, i, dims, local_offsets); */
#pragma once
#include "tensor/placement.h"
#include "tensor/box.h"

/* Rows start..start+length-1 of a dim; `local`: where they begin in the local tensor. */
struct dtensor_run {
	int64_t start, length, local;
};

struct dtensor_part {
	uint32_t ndim;
	bool empty;                      /* no element: one box of size 0, pinned to the end of its empty dims as PyTorch does */
	uint64_t count;                  /* boxes, at least one: the product of the runs per dim */
	int64_t sizes[NDIM_MAX];         /* of the local tensor */
	uint32_t run_count[NDIM_MAX];
	struct dtensor_run whole[NDIM_MAX];      /* the run of a dim that has one */
	struct dtensor_run *runs[NDIM_MAX];      /* of a dim that has more */
};

/* A rank holds at most so many boxes of one tensor; more is ERR_LIMIT_EXCEEDED, before memory is taken. */
enum { DTENSOR_BOXES_MAX = 1 << 20 };

/* `out` is zeroed or was made before. coord: the rank's place in each mesh dim. Partial is as Replicate: the whole, unreduced. A
 * dim that the tensor lacks is ERR_LAYOUT_INVALID. Sizes are not negative, mesh sizes and split factors at least 1, mesh dims at most
 * MESH_DIMS_MAX. */
FALLIBLE enum err dtensor_part_make(uint32_t ndim, const int64_t *shape, uint32_t mesh_ndim, const int64_t *mesh,
				    const int64_t *coord, const struct placement *placements, struct dtensor_part *out);
/* Box i, in the order of the local tensor. dims_out: ndim offsets, then ndim sizes. local_out: ndim offsets in the local tensor,
 * or NULL. */
void dtensor_part_box(const struct dtensor_part *p, uint64_t i, int64_t *dims_out, int64_t *local_out);
void dtensor_part_free(struct dtensor_part *p);          /* for CLEANUP too */

/* torch.chunk: piece i of n: pieces of ceil(size / n), the last ones shorter or empty. */
void dtensor_chunk(int64_t size, int64_t n, int64_t i, int64_t *start_out, int64_t *length_out);
