/* iterate.h: the one walk over state dicts that every operation is built on: _iterate_state_dict.
 *
 * PyTorch runs it on each rank, and what the ranks have in common shows only when a collective hangs. Here the trees of all ranks
 * are walked in step: a row is one path with everybody who has it, so that an operation sees at once who holds what of a
 * tensor, and a rank that differs has a name.
 *
 * iterate() gives each rank a result of its own: the function for the node's kind makes each tensor's. iterate_rows() is the walk
 * itself, for operations whose result follows the target instead of the source. */
#pragma once
#include "plan/traverse.h"

/* A rank that has the row's path. */
struct iterate_place {
	const struct tree *node;         /* a visitor sets it to NULL: do not go below it */
	uint32_t rank;
	uint32_t parent;                 /* its container is the parent row's place of this number, on the same side … */
	uint32_t index;                  /* … and it is that container's child of this number */
};

struct iterate_row {
	struct iterate_row *parent;      /* NULL: the root */
	struct tree_key key;             /* within the parent */
	bool in_list;
	uint32_t depth;
	uint64_t number;                 /* rows are numbered as they come */
	struct iterate_place *source, *companion; /* in the order of ranks */
	uint32_t source_count, companion_count;
	void *state;                     /* the visitor's */
};

/* Called for each row, a container before what it holds: keys in the order of the first side, first seen first, then what the
 * other side adds. */
typedef enum err iterate_visit(void *ctx, struct iterate_row *row);

/* Each side: count trees; a NULL tree takes no part. scratch holds the rows; it grows with the trees, 100 bytes a node. */
struct iterate_side {
	struct tree *const *trees;
	uint32_t count;
};
FALLIBLE enum err iterate_rows(struct iterate_side source, struct iterate_side companion, bool companion_first,
			       struct arena *scratch, iterate_visit *visit, void *ctx);

/* "a.b.0"; empty for the root. */
FALLIBLE enum err iterate_path(const struct iterate_row *row, struct arena *a, struct str *out);
/* The error, with rank and FQN. */
enum err iterate_error(enum err e, const struct iterate_row *row, int64_t rank);

/* A tensor of one rank. */
struct iterate_leaf {
	struct iterate_row *row;
	uint32_t rank;
	const struct tree *node, *companion; /* companion: NULL if there is none */
	bool listed;                     /* this rank gets a result */
};

/* *out: the rank's result (with a companion: what becomes of the companion). Not looked at if the rank is not listed. */
typedef enum err iterate_fn(void *ctx, const struct iterate_leaf *leaf, struct tree **out);

/* The structures differ here; NULL: not there. OK goes on without this part; the result is not complete then. ctx: the functions'. */
typedef enum err iterate_differ(void *ctx, const struct iterate_row *row, uint32_t rank, const struct tree *source,
				const struct tree *companion);

struct iterate_options {
	const uint32_t *group;           /* the ranks that take part, in group order; NULL: all */
	uint32_t group_count;
	const uint32_t *ranks_only;      /* numbers within the group that get a result; none: all */
	uint32_t ranks_only_count;
	struct tree *const *companion;   /* a tree for each rank that gets a result; NULL: none */
	bool cpu_offload;                /* new tensors are on the CPU; ignored with a companion */
	bool type_check;                 /* TREE_OPAQUE is ERR_VALUE_TYPE; false: it is copied */
	bool non_blocking;               /* how the copies are done; nothing to a plan */
	iterate_differ *differ;          /* NULL: ERR_COMPANION_MISMATCH, naming the first path that differs */
};

struct iterate_fns {
	iterate_fn *sharded, *dtensor, *tensor;
	iterate_fn *value;               /* NULL: the result is the source's */
	void *ctx;
};

/* results: `world` entries. A rank that takes no part gets NULL; one that is not listed gets {} if its tree is a dict, else NULL
 * (None). A tuple stays one; a list and a tuple match each other. Values are those of the source. */
FALLIBLE enum err iterate(const struct iterate_fns *fns, const struct iterate_options *options, struct tree *const *trees,
			  uint32_t world, struct arena *arena, struct arena *scratch, struct tree **results);
