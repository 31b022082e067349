/* placement.h: what DTensor does with a tensor along one dim of a device mesh. */
#pragma once
#include "base/err.h"
#include "base/str.h"

enum { MESH_DIMS_MAX = 8 };

enum placement_kind { PLACE_REPLICATE, PLACE_SHARD, PLACE_STRIDED_SHARD, PLACE_PARTIAL };
enum reduce_op { REDUCE_SUM, REDUCE_AVG, REDUCE_MIN, REDUCE_MAX, REDUCE_PRODUCT, REDUCE_OPS };

struct placement {
	enum placement_kind kind;
	int32_t dim;                     /* may be negative: counted from the end of the tensor's dims */
	int64_t split_factor;            /* _StridedShard */
	enum reduce_op reduce;           /* Partial */
};

/* "Shard(0)", "Shard(dim=0)", "S(0)", "Replicate()", "R", "Partial()", "Partial(max)", "P(avg)", "_StridedShard(dim=0, sf=2)",
 * "_S(0, 2)"; spaces between words do not matter. */
FALLIBLE enum err placement_parse(struct str text, struct placement *out);
const char *placement_reduce_name(enum reduce_op op);   /* "sum" */

/* May both stand in one mesh? Sums and averages may, as in PyTorch; the order of other reductions would matter. */
static inline bool placement_may_mix(enum reduce_op a, enum reduce_op b)
{
	return a == b || (a <= REDUCE_AVG && b <= REDUCE_AVG);
}

static inline bool placement_cuts(const struct placement *p)
{
	return p->kind == PLACE_SHARD || p->kind == PLACE_STRIDED_SHARD;
}
