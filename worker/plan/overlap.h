/* overlap.h: which boxes of two sets, or of one set, share an element. It serves validation (no two chunks overlap), read planning
 * (which stored chunks feed a target chunk) and the check that boxes tile a tensor.
 *
 * A trie of intervals or a sweep line is fast for tensors cut along one dim only; checkpoints are cut along two and more. Boxes
 * that form a grid, as most layouts do, are looked up in it (grid.h). Of others each set becomes a balanced tree of bounding boxes
 * over the dims in which boxes differ, and the two trees are walked together: O(n log n) to build, and for boxes that tile a tensor
 * little more than the pairs that are found. */
#pragma once
#include "base/err.h"

struct overlap_box {
	const int64_t *dims;             /* offsets then sizes; not empty, offset + size fits int64 */
	uint32_t id;
};

/* Called once per overlapping pair, in no particular order; anything but OK ends the walk and is its result. */
typedef enum err overlap_visit(void *ctx, uint32_t a_id, uint32_t b_id);

/* Pairs of a box of `a` and a box of `b`. ERR_LIMIT_EXCEEDED if the boxes lie so that the search would take too long. */
FALLIBLE enum err overlap_join(uint32_t ndim, const struct overlap_box *a, uint64_t a_count,
			       const struct overlap_box *b, uint64_t b_count, overlap_visit *visit, void *ctx);
/* Pairs within one set, each once, never a box with itself. */
FALLIBLE enum err overlap_self(uint32_t ndim, const struct overlap_box *boxes, uint64_t count,
			       overlap_visit *visit, void *ctx);
/* Drops all but the first of equal boxes, in place, keeping the order. */
FALLIBLE enum err overlap_drop_equal(uint32_t ndim, struct overlap_box *boxes, uint64_t *count);
