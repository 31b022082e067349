/* sdop_impl.h: what the operations share while a plan is made. Not for users of sdop.h. */
#pragma once
#include "base/vec.h"
#include "plan/iterate.h"
#include "plan/sdop.h"

struct sdop_build {
	const struct sdop_request *rq;
	struct tree *const *source, *const *companion;
	const uint32_t *hosts;
	struct arena *arena, *scratch;
	struct sdop_plan *out;
	struct vec(struct sdop_move) moves;
	struct vec(struct sdop_note) notes;
	struct vec(struct sdop_difference) differences;
	uint8_t *member;                 /* per rank of the world: in the group */
	uint8_t *wanted;                 /* its moves are asked for */
	uint64_t *load;                  /* bytes that a rank gives where there was a choice */
	uint32_t reduces;                /* the latest number */
	uint64_t path_row;               /* the row of `path`, for notes about many ranks */
	bool has_path;
	struct str path;
};

/* Adds a move, if it is wanted. */
FALLIBLE enum err sdop_move_add(struct sdop_build *b, struct sdop_move move);
/* Adds the moves of a rank's own shards, one to one, from a tensor to one of the same layout. */
FALLIBLE enum err sdop_move_own(struct sdop_build *b, uint32_t rank, const struct tree *from, const struct tree *to);
FALLIBLE enum err sdop_note_add(struct sdop_build *b, enum sdop_what what, const struct iterate_row *row, uint32_t rank,
				struct str from, struct str to);
/* dtypes may differ if a cast is known; that is a note. */
FALLIBLE enum err sdop_cast(struct sdop_build *b, const struct iterate_row *row, uint32_t rank, const struct tree *from,
			    const struct tree *to);
FALLIBLE enum err sdop_path(struct sdop_build *b, const struct iterate_row *row, struct str *out);
/* The box of a shard that says "whole". */
FALLIBLE enum err sdop_whole_dims(struct sdop_build *b, const struct tree_tensor *t, const int64_t **out);
/* A tensor of a rank that is not there yet: the same boxes, dtype and placements. */
FALLIBLE enum err sdop_made(struct sdop_build *b, uint32_t rank, const struct tree *like, struct tree **out);
/* A whole one of like's shape and dtype. */
FALLIBLE enum err sdop_made_whole(struct sdop_build *b, uint32_t rank, const struct tree *like, struct tree **out);
/* "Size mismatch between source [4, 2] and target [4, 3]" unless shapes are equal. */
FALLIBLE enum err sdop_same_size(const struct tree *source, const struct tree *target);
/* "float32 [4, 2]" */
FALLIBLE enum err sdop_describe(struct arena *a, const struct tree *tensor, struct str *out);
struct iterate_options sdop_iterate_options(const struct sdop_build *b);

FALLIBLE enum err sdop_local(struct sdop_build *b);    /* create, copy, offload */
FALLIBLE enum err sdop_compare(struct sdop_build *b);
FALLIBLE enum err sdop_gather(struct sdop_build *b);
FALLIBLE enum err sdop_fill(struct sdop_build *b);     /* broadcast, distribute, redistribute */
