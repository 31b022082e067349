/* tree.h: one rank's state dict as the tree that a framework hands over: dicts, lists, tuples; tensors whole, sharded by boxes
 * (ShardedTensor) or by mesh and placements (DTensor); values. What torch.distributed._state_dict_utils walks.
 *
 * sdict.h is the flat structure of all ranks together; a tree is one rank's own, keeps what flattening loses (empty containers,
 * tuples, int keys) and allows ranks to differ. No tensor bytes: a shard says where its bytes are by a number of the owner's.
 * A tree lives in one arena and is not changed once it is built, but for tree_set_element. */
#pragma once
#include "base/arena.h"
#include "base/str.h"
#include "plan/placement.h"
#include "tensor/dtype.h"

enum tree_kind { TREE_DICT, TREE_LIST, TREE_TUPLE, TREE_TENSOR, TREE_SHARDED, TREE_DTENSOR, TREE_VALUE };

enum tree_value_kind {
	TREE_JSON,                     /* None, bool, int, float, str (and lists of them): JSON text */
	TREE_BYTES,                    /* bytes, BytesIO */
	TREE_OPAQUE,                   /* a pickle: of a class outside DCP's list */
};

/* A mesh over the state dict's ranks. */
struct tree_mesh {
	uint32_t ndim;
	const int64_t *sizes;
	const uint32_t *ranks;         /* product of sizes, row-major */
	const struct str *names;       /* ndim, or NULL */
};

struct tree_shard {
	const int64_t *dims;           /* global offsets, then sizes; NULL for a whole tensor */
	uint64_t at;                   /* the owner's: offset in the rank's segment, or an index */
};

struct tree_tensor {
	enum dtype dtype;
	bool requires_grad;
	uint32_t ndim;
	const int64_t *shape;          /* global */
	const struct tree_shard *shards;   /* of this rank: 1 for TREE_TENSOR, any number for the others */
	uint32_t shard_count;
	const struct tree_mesh *mesh;  /* TREE_DTENSOR */
	const struct placement *placements; /* mesh->ndim */
};

struct tree_key {
	struct str text;
	int64_t index;
	bool is_int;                   /* a dict key that is an int: `index`; flattening makes text of it */
};

struct tree {
	enum tree_kind kind;
	uint32_t count;                /* of children */
	struct tree **children;
	struct tree_key *keys;         /* TREE_DICT: count, in insertion order, each once */
	union {
		struct tree_tensor tensor;
		struct {
			enum tree_value_kind kind;
			struct str bytes;
		} value;
	};
};
