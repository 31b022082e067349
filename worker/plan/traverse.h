/* traverse.h: paths through one tree: PyTorch's torch.distributed.checkpoint._traverse and _nested_dict, and the flattening of
 * torch.distributed._state_dict_utils, which differ in what they walk into:
 *
 *     rule       walks into
 *     utils      dicts, lists, tuples, always; empty ones vanish
 *     dcp        dicts always; lists that hold a tensor, a dict or such a list; tuples never. Empty dicts vanish
 *     dcp-2.3    dicts and lists that hold a tensor or such a container, directly or below; tuples never */
#pragma once
#include "plan/tree.h"

enum flatten_rule { FLATTEN_UTILS, FLATTEN_DCP, FLATTEN_DCP_2_3 };

/* A path: dict keys are text (ints have become their decimal text), list positions ints. */
struct tree_path {
	const struct tree_key *parts;
	uint32_t count;
};

/* Calls visit for each terminal value. The path lives until visit returns. */
typedef enum err traverse_visit(void *ctx, struct tree_path path, struct tree *value);
FALLIBLE enum err traverse(const struct tree *root, enum flatten_rule rule, traverse_visit *visit, void *ctx);

/* root[path[0]][path[1]]… = value, making dicts for text and lists for ints on the way, lists filled up with None. Python's TypeError is
 * ERR_KIND_MISMATCH. Containers that are on the path must be in arena `a`. */
FALLIBLE enum err traverse_set_element(struct arena *a, struct tree *root, struct tree_path path, struct tree *value);
/* NULL: not there. (PyTorch raises IndexError for a list's length as index; that is not there either.) */
struct tree *traverse_get_element(const struct tree *root, struct tree_path path);
/* "a.b.0" */
FALLIBLE enum err traverse_path_text(struct arena *a, struct tree_path path, struct str *out);
