/* sdop.h: the state-dict operations as pure functions: the trees of all ranks and the request → the trees of the target and what has to
 * move. torch.distributed._state_dict_utils with one difference: nothing is copied here, so that the same plan is carried out
 * through shared memory, TCP or NCCL, by a gang of workers or by a program that links libdcp.
 *
 * All operations are built on one walk (iterate.h). Every rank plans the same: the plan depends on its arguments only. */
#pragma once
#include "plan/layout.h"
#include "plan/tree.h"

enum sdop_kind {
	SDOP_CREATE, SDOP_COPY, SDOP_OFFLOAD, SDOP_GATHER, SDOP_BROADCAST, SDOP_DISTRIBUTE, SDOP_COMPARE, SDOP_REDISTRIBUTE, SDOP_KINDS
};

struct sdop_request {
	enum sdop_kind kind;
	const uint32_t *group;         /* ranks of the world that take part, in group order; NULL: all */
	uint32_t group_count;
	const uint32_t *ranks_only;    /* ranks in the group that get a result; none: all */
	uint32_t ranks_only_count;
	uint32_t root;                 /* in the group: broadcast, and distribute's holder of the full state dict */
	bool type_check, strict, cpu_offload, pin_memory, share_memory, values;
	const struct layout *layout;   /* distribute into a new target, redistribute */
	uint32_t world_size;           /* of source and target */
};

/* One box on its way. Where two sources could give it, the target rank's own is taken, then the nearest by `host`. */
struct sdop_move {
	uint32_t from_rank, to_rank;
	const struct tree *from, *to;  /* tensors of the source and target trees */
	uint32_t from_shard, to_shard;
	const int64_t *dims;           /* global offsets, then sizes, of the box */
	uint32_t reduce;               /* moves with the same number > 0 in a row give one box: reduced by `op` */
	uint8_t op;                    /* enum placement's Partial op */
};

struct sdop_note {
	enum { SDOP_NOTE_CAST, SDOP_NOTE_RESIZED, SDOP_NOTE_MISSING, SDOP_NOTE_DROPPED } what;
	uint32_t rank;
	struct str path, from, to;
};

/* First differences are enough for compare's `equal`; all are listed up to a limit. */
struct sdop_difference {
	uint32_t rank;
	struct str path, what, a, b;
};

struct sdop_plan {
	struct tree **target;          /* world_size; NULL: this rank has no result (None) */
	struct sdop_move *moves;       /* ordered by (to_rank, target order) */
	uint64_t move_count;
	struct sdop_note *notes;
	uint64_t note_count;
	struct sdop_difference *differences;
	uint64_t difference_count;
	bool equal;                    /* compare */
	uint64_t bytes_total;          /* of all boxes */
	uint64_t bytes_needed;         /* of boxes that the target's rank does not hold already */
};

/* source: world_size trees (NULL: that rank takes no part). companion: the target's present trees, or NULL: there is none yet.
 * All results live in `arena`. Errors name rank and FQN: ERR_COMPANION_MISMATCH (the first differing path), ERR_VALUE_TYPE,
 * ERR_SIZE_MISMATCH, ERR_COVERAGE_HOLE, ERR_PLAN_INVALID (overlap; ranks whose structures differ), ERR_LAYOUT_INVALID. */
FALLIBLE enum err sdop_plan(const struct sdop_request *rq, struct tree *const *source, struct tree *const *companion,
			    const uint32_t *hosts, struct arena *arena, struct sdop_plan *out);
