/* layout.h: how logical tensors are cut over a world: rules → boxes per rank. Semantics are DTensor's (tensor/dtensor.h),
 * ChunkShardingSpec's and EnumerableShardingSpec's; forms and deviations: api/layouts.md.
 *
 * The first rule whose pattern matches the FQN *and* whose dims the tensor has wins. Without a match: Shard(0) over the world for
 * tensors of one or more dims, one copy (rank 0) for 0-d tensors. */
#pragma once
#include "spec/layout_rules.h"

struct layout {
	const struct layout_rule *rules;
	uint32_t rule_count;
	uint32_t world_size;
};

/* Checks what does not depend on a tensor: mesh products against the world, ranks in range and once, placements per mesh dim … */
FALLIBLE enum err layout_check(const struct layout *l);
/* The same for state dicts in memory: Partial is allowed, too. Each rank then holds all that the other placements leave it, not yet
 * reduced; which reduction is in the placement. */
FALLIBLE enum err layout_check_in_memory(const struct layout *l);

/* Has a tensor of so many dims those that the rule names? True for rules that name none. */
bool layout_has_dims(const struct layout_rule *r, uint32_t ndim);

/* Appends the chunks of `tensor` (an index into `out`, which must be its latest tensor) for every rank, replicas included, in rank
 * order, a rank's own in the order of its local tensor; empty shards are listed, too. matched_out: the rule's index, or UINT32_MAX
 * for the default. */
FALLIBLE enum err layout_apply(const struct layout *l, struct sdict *out, uint32_t tensor, uint32_t *matched_out);
