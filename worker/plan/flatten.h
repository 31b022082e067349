/* flatten.h: nested state dict ↔ one flat dict with dotted keys and the paths to go back: flatten_state_dict and
 * unflatten_state_dict. */
#pragma once
#include "plan/traverse.h"

FALLIBLE enum err flatten_rule_parse(struct str text, enum flatten_rule *out);   /* "utils", "dcp", "dcp-2.3" */

struct flat {
	uint64_t count;
	struct str *keys;                /* "a.b.0" */
	struct tree_path *paths;
	struct tree **values;
};

/* Everything is allocated in `arena`; values stay where they are. ERR_DUPLICATE_KEY: "duplicated flatten key a.b". */
FALLIBLE enum err flatten(const struct tree *root, enum flatten_rule rule, struct arena *arena, struct flat *out);
/* unflatten_state_dict: a dict. Tuples come back as lists and empty containers not at all, as in PyTorch. */
FALLIBLE enum err flatten_undo(const struct flat *flat, struct arena *arena, struct tree **out);
