/* state_dict_op_trees.h: the images of a state dict's segments → each rank's own tree (plan/tree.h), for the state-dict operations.
 *
 * A tree_shard's `at` is a number of ours: an index into the places, which say where the shard's bytes are. Places of several state
 * dicts of one job are numbered together, so that a move's source is found whichever of them it comes from. */
#pragma once
#include "base/map.h"
#include "plan/tree.h"
#include "runner/input.h"

enum { STATE_DICT_OP_SIDES = 2 };               /* source (or a), and companion (or b) */

struct state_dict_op_place {
	struct str fqn;
	enum dtype dtype;
	uint32_t ndim, rank, dict;     /* dict: which state dict of the job */
	const int64_t *dims;           /* global offsets, then sizes */
	uint64_t offset, bytes;        /* in the rank's segment */
};
struct state_dict_op_places vec(struct state_dict_op_place);
struct state_dict_op_rules;

struct state_dict_op_trees {
	struct tree **ranks;           /* world_size; NULL: that rank has none */
	struct image **images;
	uint32_t world_size;
	struct vec(struct state_dict_op_rules *) rules;
	struct map lists;              /* paths ("a.b") at which a rank's image has a list as one value; keys live in the arena */
};

FALLIBLE enum err state_dict_op_trees_begin(uint32_t world_size, struct arena *a, struct state_dict_op_trees *out);
/* The tree of one rank. It lives in `a`, its strings in the image, which must stay. w: for messages only, NULL in libdcp. */
FALLIBLE enum err state_dict_op_trees_add(struct image *im, uint32_t rank, uint32_t dict, struct arena *a,
				 struct state_dict_op_places *places, struct state_dict_op_trees *t);
/* Both, for all ranks of a state dict of the job. */
FALLIBLE enum err state_dict_op_trees_read(struct job *j, const struct rank_segments *s, uint32_t dict, uint32_t world_size,
					    struct arena *a, struct state_dict_op_places *places, struct state_dict_op_trees *out);
void state_dict_op_trees_free(struct state_dict_op_trees *t);
