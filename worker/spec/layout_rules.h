/* layout_rules.h: checks the layout rules of a request, as far as that is possible without a tensor. */
#pragma once
#include "spec/fields.h"

enum { LAYOUT_MESH_DIMS_MAX = 8 };

/* v: the array, or absent. in_memory: of an operation on state dicts, where "Partial(sum)", "P(max)" are allowed, too. *world is 0 when the
 * request gives none; it becomes the product of the meshes if they fix it. */
FALLIBLE enum err layout_rules_check(const struct jval *v, bool in_memory, int64_t *world);
/* "Shard(0)", "S(-1)", "Replicate()", "R", "_StridedShard(dim=0, sf=2)"; Partial is refused: it cannot be stored. */
FALLIBLE enum err layout_rules_placement(struct str text, bool in_memory);
