/* tiling.h: do boxes tile a tensor: all inside it, no two overlapping, volumes adding up? Problems are collected in PyTorch's words
 * (_validate_global_plan), so that one answer names them all. */
#pragma once
#include "base/buf.h"
#include "plan/overlap.h"

struct tiling {
	struct buf text;                 /* problems, separated by "; ", cut when full */
	uint32_t problems;
	bool holes_only;                 /* every problem is a hole: all that is there is right */
	struct str first_key;            /* of the first problem */
	struct overlap_box *scratch;
	uint64_t scratch_cap;
};

enum { TILING_PROBLEMS_MAX = 16 };

void tiling_init(struct tiling *t);
void tiling_free(struct tiling *t);      /* for CLEANUP too */
bool tiling_full(const struct tiling *t); /* enough problems: look no further */
/* `count` entries to fill for tiling_check; valid until the next call. */
FALLIBLE enum err tiling_boxes(struct tiling *t, uint64_t count, struct overlap_box **out);
/* boxes may be empty or out of bounds; ids are ignored. An error is about resources only: problems are counted in `t`. */
FALLIBLE enum err tiling_check(struct tiling *t, struct str key, uint32_t ndim, const int64_t *shape,
			       struct overlap_box *boxes, uint64_t count);
