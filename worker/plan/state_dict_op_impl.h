/* state_dict_op_impl.h: what the operations share while a plan is made. Not for users of state_dict_op.h. */
#pragma once
#include "base/vec.h"
#include "plan/iterate.h"
#include "plan/state_dict_op.h"

struct state_dict_op_build {
	const struct state_dict_op_request *rq;
	struct tree *const *source, *const *companion;
	const uint32_t *hosts;
	struct arena *arena, *scratch;
	struct state_dict_op_plan *out;
	struct vec(struct state_dict_op_move) moves;
	struct vec(struct state_dict_op_note) notes;
	struct vec(struct state_dict_op_difference) differences;
	uint8_t *member;                 /* per rank of the world: in the group */
	uint8_t *wanted;                 /* its moves are asked for */
	uint64_t *load;                  /* bytes that a rank gives where there was a choice */
	uint32_t reduces;                /* the latest number */
	uint64_t path_row;               /* the row of `path`, for notes about many ranks */
	bool has_path;
	struct str path;
};

/* Does the rank get a result? A rank beyond the target's world only gives. */
static inline bool state_dict_op_takes(const struct state_dict_op_build *b, uint32_t rank)
{
	return b->member[rank] && (!b->rq->target_world || rank < b->rq->target_world);
}

/* Adds a move, if it is wanted. */
FALLIBLE enum err state_dict_op_move_add(struct state_dict_op_build *b, struct state_dict_op_move move);
/* Adds the moves of a rank's own shards, one to one, from a tensor to one of the same layout. */
FALLIBLE enum err state_dict_op_move_own(struct state_dict_op_build *b, uint32_t rank, const struct tree *from, const struct tree *to);
FALLIBLE enum err state_dict_op_note_add(struct state_dict_op_build *b, enum state_dict_op_what what, const struct iterate_row *row,
					 uint32_t rank,
				struct str from, struct str to);
/* dtypes may differ if a cast is known; that is a note. */
FALLIBLE enum err state_dict_op_cast(struct state_dict_op_build *b, const struct iterate_row *row, uint32_t rank, const struct tree *from,
			    const struct tree *to);
FALLIBLE enum err state_dict_op_path(struct state_dict_op_build *b, const struct iterate_row *row, struct str *out);
/* The box of a shard that says "whole". */
FALLIBLE enum err state_dict_op_whole_dims(struct state_dict_op_build *b, const struct tree_tensor *t, const int64_t **out);
/* A tensor of a rank that is not there yet: the same boxes, dtype and placements. */
FALLIBLE enum err state_dict_op_made(struct state_dict_op_build *b, uint32_t rank, const struct tree *like, struct tree **out);
/* A whole one of like's shape and dtype. */
FALLIBLE enum err state_dict_op_made_whole(struct state_dict_op_build *b, uint32_t rank, const struct tree *like, struct tree **out);
/* "Size mismatch between source [4, 2] and target [4, 3]" unless shapes are equal. */
FALLIBLE enum err state_dict_op_same_size(const struct tree *source, const struct tree *target);
/* "float32 [4, 2]" */
FALLIBLE enum err state_dict_op_describe(struct arena *a, const struct tree *tensor, struct str *out);
struct iterate_options state_dict_op_iterate_options(const struct state_dict_op_build *b);

FALLIBLE enum err state_dict_op_local(struct state_dict_op_build *b);    /* create, copy, offload */
FALLIBLE enum err state_dict_op_compare(struct state_dict_op_build *b);
FALLIBLE enum err state_dict_op_gather(struct state_dict_op_build *b);
FALLIBLE enum err state_dict_op_fill(struct state_dict_op_build *b);     /* broadcast, distribute, redistribute */
