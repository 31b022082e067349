/* state_dict_op.h: the state-dict operations as pure functions: the trees of all ranks and the request → the trees of the target and what
 * has to move. torch.distributed._state_dict_utils with one difference: nothing is copied here, so that the same plan is carried out
 * through shared memory, TCP or NCCL, by a gang of workers or by a program that links libdcp. api/state-dict-ops.md describes each
 * operation, and where it differs from PyTorch.
 *
 * All operations are built on one walk (iterate.h). Every rank plans the same: the plan depends on its arguments only. A worker that
 * serves some ranks asks for their moves only (plan_for): gathering to all of n ranks has n times as many moves as there are shards. */
#pragma once
#include "plan/layout.h"
#include "plan/tree.h"
#include "spec/kinds.h"

enum {
	STATE_DICT_OP_DIFFERENCES_MAX = 1000,   /* kept; all are counted */
	STATE_DICT_OP_MOVES_MAX = 1 << 23,      /* ERR_LIMIT_EXCEEDED beyond: plan for fewer ranks at a time */
};

struct layout_use;

struct state_dict_op_request {
	enum job_kind kind;
	const uint32_t *group;         /* ranks of the world that take part, in group order; NULL: all */
	uint32_t group_count;
	const uint32_t *ranks_only;    /* gather, offload: numbers within the group that get a result; none: all */
	uint32_t ranks_only_count;
	uint32_t root;                 /* in the group: broadcast, and distribute's holder of the full state dict */
	bool type_check, strict, cpu_offload, pin_memory, share_memory, values;
	bool has_device;               /* `device` is where new tensors go; else they stay where the source's are */
	enum tree_device device;
	const struct layout *layout;   /* a target that is not there yet, of broadcast, distribute, redistribute; NULL: see there */
	struct layout_use *layout_use; /* is told what becomes of its rules, and a rule that is a slip is an error; NULL: neither */
	uint32_t world_size;           /* of source and target: of the larger one */
	uint32_t target_world;         /* redistribute: ranks from here on get nothing; 0: all ranks get a result */
	const uint32_t *plan_for;      /* ranks of the world whose moves are wanted; NULL: all. Trees and notes are made for all */
	uint32_t plan_for_count;
};

/* One box on its way. Of several holders the target's rank itself is taken, then one of its host, then the one that gives least. */
struct state_dict_op_move {
	uint32_t from_rank, to_rank;
	const struct tree *from, *to;  /* tensors of the source and target trees */
	uint32_t from_shard, to_shard;
	const int64_t *dims;           /* global offsets, then sizes, of the box; shared between moves */
	uint32_t reduce;               /* moves with the same number > 0 in a row give one box: reduced by `op` */
	uint16_t divisor;              /* REDUCE_AVG: the sum is divided by it (sum and avg may be mixed over the dims of a mesh) */
	uint8_t op;                    /* enum reduce_op */
};

enum state_dict_op_what {
	STATE_DICT_OP_NOTE_CAST,                /* the dtype changes: from, to */
	STATE_DICT_OP_NOTE_RESIZED,             /* a plain target took the source's size or dtype: "float32 [4, 2]" */
	STATE_DICT_OP_NOTE_MISSING, /* the source lacks this key of the target: it keeps what it has; with strict it was taken out */
	STATE_DICT_OP_NOTE_DROPPED,             /* the target lacks this key of the source, which was left out */
};

struct state_dict_op_note {
	enum state_dict_op_what what;
	uint32_t rank;
	struct str path, from, to;
};

struct state_dict_op_difference {
	uint32_t rank;
	struct str path, what, a, b;   /* what: "missing in a", "missing in b", "kind", "length", "dtype", "size", "layout", "value" */
};

struct state_dict_op_plan {
	struct tree **target;          /* world_size; NULL: this rank has no result (None). compare: all NULL */
	uint64_t *made;                /* world_size: shards that have no bytes yet (tree_shard.made): `at` 0 .. made - 1 */
	struct state_dict_op_move *moves; /* ordered by to_rank, then as the walk goes. compare with `values`: from a to b, to compare */
	uint64_t move_count;
	struct state_dict_op_note *notes;       /* in the order of the walk */
	uint64_t note_count;
	struct state_dict_op_difference *differences;
	uint64_t difference_count;     /* of those kept */
	uint64_t difference_total;
	bool equal;                    /* compare: structure, dtypes, sizes, and with `values` the values that are no tensors */
	uint64_t bytes_total;          /* of all moves' boxes, in the source's dtype */
	uint64_t bytes_needed;         /* of those that come from another rank */
};

/* source: world_size trees (NULL: that rank takes no part). companion: the target's present trees, or NULL: there is none yet.
 * compare: a is `source`, b is `companion`. hosts: a number for each rank's host, or NULL: all one. New tensors are zeroed bytes
 * until the moves fill them. Results live in `arena` and refer to the trees given.
 *
 * Errors name rank and FQN: ERR_COMPANION_MISMATCH (the first differing path), ERR_VALUE_TYPE, ERR_SIZE_MISMATCH, ERR_COVERAGE_HOLE,
 * ERR_PLAN_INVALID (overlap; ranks whose structures differ), ERR_KIND_MISMATCH, ERR_MISSING_KEY, ERR_DTYPE_UNSUPPORTED,
 * ERR_LAYOUT_INVALID, ERR_INVALID_REQUEST (the request itself: root, group, a companion that is needed). */
FALLIBLE enum err state_dict_op_plan(const struct state_dict_op_request *rq, struct tree *const *source, struct tree *const *companion,
				     const uint32_t *hosts, struct arena *arena, struct state_dict_op_plan *out);
