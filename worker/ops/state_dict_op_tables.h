/* state_dict_op_tables.h: a planned state-dict operation as tables that all workers share: places are sources, slots of new segments are
 * targets, moves are cut into pieces of a task's size. */
#pragma once
#include "ops/state_dict_op_images.h"
#include "plan/state_dict_op.h"
#include "runner/build.h"

struct state_dict_op_tables {
	const struct rank_segments *dicts[STATE_DICT_OP_SIDES];         /* NULL: none */
	const struct rank_segments *made;      /* the new segments; NULL: compare */
	uint32_t memories;                     /* libdcp: so many processes and no segments; offsets of places and slots are addresses */
	const struct state_dict_op_places *places;
	struct state_dict_op_images *images;            /* NULL: compare */
	const struct state_dict_op_plan *plan;
	bool by_digest;                /* each move is one piece, with two entries of `digests`: see state_dict_op_delta.h */
};
/* The caller sets the options of b that are not set here. ERR_COVERAGE_HOLE if moves bring a part of a shard only. */
FALLIBLE enum err state_dict_op_tables_make(const struct state_dict_op_tables *t, struct run_build *b);
