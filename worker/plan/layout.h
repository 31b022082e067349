/* layout.h: how logical tensors are cut over a world: rules → boxes per rank. Semantics are DTensor's (plan/dtensor.h),
 * ChunkShardingSpec's and EnumerableShardingSpec's; forms and deviations: api/layouts.md.
 *
 * The first rule whose pattern matches the FQN *and* whose dims the tensor has wins. Without a match: Shard(0) over the world for
 * tensors of one or more dims, one copy (rank 0) for 0-d tensors. */
#pragma once
#include "tensor/placement.h"
#include "tensor/sdict.h"

enum layout_kind { LAYOUT_MESH, LAYOUT_CHUNKS, LAYOUT_BOXES, LAYOUT_LIKE };

struct layout_box {
	uint32_t rank;
	uint32_t ndim;
	const int64_t *dims;             /* offsets then sizes */
};

struct layout_rule {
	struct str match;
	bool optional;                   /* no error if no tensor that it matches has the dims: layout_use.h */
	enum layout_kind kind;
	uint32_t mesh_ndim;              /* LAYOUT_MESH; 0: 1-D mesh over the world */
	const int64_t *mesh;             /* sizes */
	const struct str *dim_names;     /* one per mesh dim, or NULL */
	const uint32_t *ranks;           /* rank_count of them, row-major over the mesh; NULL: 0..product-1 */
	uint32_t rank_count;
	const struct placement *placements; /* one per mesh dim */
	uint32_t placement_count;
	int32_t chunk_dim;               /* LAYOUT_CHUNKS; ranks above */
	const struct layout_box *boxes;  /* LAYOUT_BOXES */
	uint32_t box_count;
	const struct sdict *like;        /* LAYOUT_LIKE: that checkpoint's boxes and ranks */
};

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
