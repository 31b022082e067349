/* placement.h: what DTensor does with a tensor along one dim of a device mesh. */
#pragma once
#include "base/err.h"
#include "base/str.h"

enum placement_kind { PLACE_REPLICATE, PLACE_SHARD, PLACE_STRIDED_SHARD, PLACE_PARTIAL };

struct placement {
	enum placement_kind kind;
	int32_t dim;                     /* may be negative: counted from the end of the tensor's dims */
	int64_t split_factor;            /* _StridedShard */
};

/* "Shard(0)", "Shard(dim=0)", "S(0)", "Replicate()", "R", "Partial()", "_StridedShard(dim=0, sf=2)"; spaces do not matter. */
FALLIBLE enum err placement_parse(struct str text, struct placement *out);
