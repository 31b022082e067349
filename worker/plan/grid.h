/* grid.h: boxes that form a grid: each dim is cut at the same places all over, and every cell is one box. Nearly all layouts are
 * grids. No two boxes of a grid meet, and those that meet a given box are found by looking its ends up in every dim: a million
 * boxes need no tree. */
#pragma once
#include "plan/overlap.h"
#include "tensor/box.h"

struct grid_cut {
	int64_t start, end;
};

struct grid {
	uint32_t ndim, k;                /* k dims matter: in the others all boxes are alike */
	uint32_t dims[NDIM_MAX];
	uint64_t counts[NDIM_MAX];       /* cuts of each of the k dims, ascending, not overlapping; holes may lie between */
	struct grid_cut *cuts[NDIM_MAX];
	uint32_t *cells;                 /* row by row: index into boxes */
	const struct overlap_box *boxes; /* borrowed */
};

/* *is_grid_out: `out` can be used; else it holds nothing. dims: those in which boxes differ. */
FALLIBLE enum err grid_make(uint32_t ndim, uint32_t k, const uint32_t *dims, const struct overlap_box *boxes, uint64_t count,
			    struct grid *out, bool *is_grid_out);
/* Calls visit(box, cell) for the pairs of one of `boxes` and a cell that share an element; swapped: visit(cell, box). */
FALLIBLE enum err grid_join(const struct grid *g, const struct overlap_box *boxes, uint64_t count, bool swapped,
			    overlap_visit *visit, void *ctx);
void grid_free(struct grid *g);                  /* for CLEANUP too */
