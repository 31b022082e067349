/* tree.h: one rank's state dict as the tree that a framework hands over: dicts, lists, tuples; tensors whole, sharded by boxes
 * (ShardedTensor) or by mesh and placements (DTensor); values. torch.distributed._state_dict_utils walks such trees.
 *
 * sdict.h is the flat structure of all ranks together; a tree is one rank's own, keeps what flattening loses (empty containers,
 * tuples, int keys) and allows ranks to differ. No tensor bytes: a shard says where its bytes are by a number of the owner's.
 * A tree lives in one arena and is not changed once it is built, but for traverse_set_element (traverse.h).
 *
 *     TRY(tree_new(arena, TREE_DICT, &root));
 *     TRY(tree_whole(arena, DT_FLOAT32, 2, shape, at, &w));
 *     TRY(tree_put(arena, root, tree_key_str(STR("weight")), w)); */
#pragma once
#include "base/arena.h"
#include "base/table.h"
#include "tensor/placement.h"
#include "tensor/dtype.h"

enum tree_kind { TREE_DICT, TREE_LIST, TREE_TUPLE, TREE_TENSOR, TREE_SHARDED, TREE_DTENSOR, TREE_VALUE };

enum tree_value_kind {
	TREE_JSON,                     /* None, bool, int, float, str (and lists of them): JSON text */
	TREE_BYTES,                    /* bytes, BytesIO */
	TREE_OPAQUE,                   /* a pickle: of a class outside DCP's list, named in `type` */
};

enum tree_device { TREE_CPU, TREE_CUDA };

/* Containers nest so deep at most; the walks recurse. */
enum { TREE_DEPTH_MAX = 128 };

/* A mesh over the state dict's ranks. */
struct tree_mesh {
	uint32_t ndim;
	const int64_t *sizes;
	const uint32_t *ranks;         /* product of sizes, row-major */
	const struct str *names;       /* ndim, or NULL */
};

/* One box, dense. A DTensor whose part is not one box (_StridedShard) has a shard for each. */
struct tree_shard {
	const int64_t *dims;           /* global offsets, then sizes; NULL for a whole tensor */
	uint64_t at;                   /* the owner's: offset in the rank's segment, or an index */
	bool made;                     /* an operation's result, there are no bytes yet: `at` is 0, 1, … within the rank, each once */
};

struct tree_tensor {
	enum dtype dtype;
	enum tree_device device;
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
	bool is_int;                   /* a dict key that is an int, or a list position: `index`; flattening makes text of it */
};

struct tree {
	enum tree_kind kind;
	uint32_t count;                /* of children */
	uint32_t cap;                  /* tree.c's own */
	struct tree **children;
	struct tree_key *keys;         /* TREE_DICT: count, in insertion order, each once */
	struct table(struct table_item) index; /* tree.c's own, in the arena: over the keys of a large dict */
	union {
		struct tree_tensor tensor;
		struct {
			enum tree_value_kind kind;
			struct str bytes;
			struct str type;       /* TREE_OPAQUE: "collections.deque", or empty */
		} value;
	};
};

static inline struct tree_key tree_key_str(struct str s) { return (struct tree_key){ .text = s }; }
static inline struct tree_key tree_key_int(int64_t i) { return (struct tree_key){ .index = i, .is_int = true }; }
static inline bool tree_is_list(const struct tree *t) { return t->kind == TREE_LIST || t->kind == TREE_TUPLE; }
static inline bool tree_is_container(const struct tree *t) { return t->kind <= TREE_TUPLE; }
static inline bool tree_is_tensor(const struct tree *t) { return t->kind >= TREE_TENSOR && t->kind <= TREE_DTENSOR; }
static inline bool tree_is_sharded(const struct tree *t) { return t->kind == TREE_SHARDED || t->kind == TREE_DTENSOR; }
bool tree_is_none(const struct tree *t);                           /* the JSON text `null` */
bool tree_key_eq(const struct tree_key *a, const struct tree_key *b);
const char *tree_kind_name(enum tree_kind kind);                   /* "dict", "list", "tuple", "tensor", "ShardedTensor", … */

/* Building. Arguments (strings, shapes, shards, meshes) are borrowed and must live as long as the tree. */
FALLIBLE enum err tree_new(struct arena *a, enum tree_kind container, struct tree **out);
/* Sets dict[key], as Python does: a key that is there keeps its place. */
FALLIBLE enum err tree_put(struct arena *a, struct tree *dict, struct tree_key key, struct tree *child);
FALLIBLE enum err tree_append(struct arena *a, struct tree *list, struct tree *child);     /* a list or tuple */
/* A container of the same kind and keys; the children are NULL, to be set. */
FALLIBLE enum err tree_shell(struct arena *a, const struct tree *like, struct tree **out);
FALLIBLE enum err tree_value(struct arena *a, enum tree_value_kind kind, struct str bytes, struct tree **out);
FALLIBLE enum err tree_none(struct arena *a, struct tree **out);
/* kind says how shards are read; `tensor` is copied. The caller fills shape, shards, mesh …; tree_check looks at them. */
FALLIBLE enum err tree_tensor_new(struct arena *a, enum tree_kind kind, const struct tree_tensor *tensor, struct tree **out);
FALLIBLE enum err tree_whole(struct arena *a, enum dtype dtype, uint32_t ndim, const int64_t *shape, uint64_t at,
			     struct tree **out);

/* Reading. */
struct tree *tree_get(const struct tree *dict, struct tree_key key);   /* NULL if absent, or no dict */
/* A shard's box: global offsets, then sizes, in `scratch` (2 * NDIM_MAX) if the shard says "whole". */
const int64_t *tree_shard_dims(const struct tree_tensor *t, const struct tree_shard *s, int64_t *scratch);
/* The place of a rank in a mesh: ndim coordinates; false if the mesh lacks it. */
bool tree_mesh_coord(const struct tree_mesh *mesh, uint32_t rank, int64_t *coord_out);
uint64_t tree_mesh_size(const struct tree_mesh *mesh);

/* Is this a tree that the walks can trust: depth, counts, shapes and volumes that fit, boxes inside their tensor, meshes that are
 * whole and within `world_size`, a placement per mesh dim? For trees from outside, once. The error names rank and FQN. */
FALLIBLE enum err tree_check(const struct tree *t, uint32_t rank, uint32_t world_size);
/* The same structure, tensors (dtype, shape, boxes, mesh, placements) and values? `at`, device and requires_grad do not count. */
bool tree_equal(const struct tree *a, const struct tree *b);
bool tree_same_shape(const struct tree *a, const struct tree *b);  /* of two tensors */
bool tree_same_mesh(const struct tree *a, const struct tree *b);   /* of two of the same kind; true unless they are DTensors */
bool tree_same_layout(const struct tree *a, const struct tree *b); /* kind, the ranks' boxes, mesh and placements */
