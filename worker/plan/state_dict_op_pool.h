/* state_dict_op_pool.h: all boxes of one tensor with everybody who holds them, and who of them gives what to a target's box. */
#pragma once
#include "plan/state_dict_op_impl.h"

struct pool_entry {
	const int64_t *dims;
	uint32_t rank, shard;
	const struct tree *node;
	uint32_t group;                  /* replicas are told apart by it; the members of one group together give the value (Partial) */
};

struct pool_box {
	const int64_t *dims;
	uint64_t volume;
	uint32_t first, count;           /* entries: groups in a row */
};

struct pool {
	const struct tree *like;         /* any rank's */
	struct pool_entry *entries;
	struct pool_box *boxes;          /* sorted, disjoint, tiling the tensor */
	uint32_t entry_count, box_count;
	uint32_t members;                /* entries per group: 1, or more for Partial */
	int32_t line;                    /* boxes follow each other in this dim and are alike in the others; -1: a grid or so */
	bool choice;                     /* some box has more than one group */
	enum reduce_op op;
	uint16_t divisor;
};

/* Ranks must agree on kind, shape, dtype, mesh and placements; boxes must tile the tensor, equal ones are replicas. Errors name the
 * rank; the caller adds the path. */
FALLIBLE enum err pool_make(struct state_dict_op_build *b, const struct iterate_place *places, uint32_t count, struct pool *out);
/* The moves that fill all shards of `to`, a tensor of the same shape of a rank. */
FALLIBLE enum err pool_fill(struct state_dict_op_build *b, const struct pool *p, uint32_t rank, const struct tree *to);
