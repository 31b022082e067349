/* tensor_sum.h: a digest of a tensor's logical bytes, its elements in C order over its whole shape, however the tensor is cut: each piece
 * of a box adds its part by itself, in any order, on any worker, and the sum (exclusive or) of the parts is the digest of the whole. So a
 * checkpoint of another layout or format proves itself equal without a tensor being held, or read in a row.
 *
 * CRC-64/XZ (ECMA-182, reflected, as in xz files). A CRC is linear: the CRC of the whole is the sum of its runs' CRCs, each multiplied by x
 * to the number of bits that follow the run (zlib's crc32_combine). A polynomial hash would compose as well, but one that is byte granular,
 * as the rows of a column of bfloat16 need it, is several times slower. 64 bits tell accidents apart, not adversaries. */
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "tensor/box.h"

/* Runs shorter than this make the digest dear: a tensor with a larger chunk than this that is cut so has none (tensor_sum_is_cheap). */
enum { TENSOR_SUM_RUN_MIN = 64, TENSOR_SUM_SMALL_BYTES = 4 << 20 };

/* A box of a tensor whose bytes come in the box's own C order. */
struct tensor_sum {
	uint32_t outer;                /* dims [0, outer) are stepped through; the rest of the box is runs */
	uint64_t run;                  /* bytes that lie in a row in the tensor, too */
	uint64_t strides[NDIM_MAX];    /* of the tensor, in bytes */
	int64_t sizes[NDIM_MAX], at[NDIM_MAX];
	uint64_t start, in_run;        /* of the run in hand, in the tensor; bytes of it that are taken */
	uint64_t total, end;           /* bytes of the tensor; where the bytes taken so far end in it */
	uint64_t sum;
	uint64_t delta[2], factor[2];  /* the latest shifts */
};

/* dims: ndim offsets, then sizes, within shape. Begins at byte `begin` of the box. False: the sizes do not fit 64 bits. */
bool tensor_sum_begin(struct tensor_sum *c, uint32_t ndim, const int64_t *dims, const int64_t *shape, uint32_t item_bytes, uint64_t begin);
/* Is the box cut so that its digest costs no more than its other checksums? */
bool tensor_sum_is_cheap(uint32_t ndim, const int64_t *dims, const int64_t *shape, uint32_t item_bytes);
void tensor_sum_add(struct tensor_sum *c, const void *bytes, size_t n);
/* The part of the tensor's sum that the bytes are. */
uint64_t tensor_sum_end(const struct tensor_sum *c);

/* CRC-64/XZ of a tensor of so many bytes, whose parts' sum is this. */
uint64_t tensor_sum_finish(uint64_t sum, uint64_t tensor_bytes);
