/* layout_rules.h: checks the layout rules of a request, as far as that is possible without a tensor. */
#pragma once
#include "base/jval.h"

enum { LAYOUT_RULES_MAX = 1024, LAYOUT_WORLD_MAX = 65536, LAYOUT_MESH_DIMS_MAX = 8 };

/* v: the array, or absent. *world is 0 when the request gives none; it becomes the product of the meshes if they fix it. */
FALLIBLE enum err layout_rules_check(const struct jval *v, int64_t *world);
/* The same for operations on state dicts in memory: "Partial(sum)", "P(max)" are allowed, too. */
FALLIBLE enum err layout_rules_check_in_memory(const struct jval *v, int64_t *world);
/* "Shard(0)", "S(-1)", "Replicate()", "R", "_StridedShard(dim=0, sf=2)"; Partial is refused: it cannot be stored. */
FALLIBLE enum err layout_rules_placement(struct str text);
