/* dcp_ops.h: torch.distributed._state_dict_utils for C programs: the state-dict operations of the daemon without the daemon. Every process
 * is a rank of a group (comm/comm.h); all call the same function with the same options.
 *
 *     struct tree *mine;                       plan/tree.h; a shard's `at` is the address of its bytes, dense, in C order
 *     struct dcp_state_dict full = { 0 };
 *     TRY(dcp_gather(c, mine, &(struct dcp_options){ .ranks_only = …, .type_check = true }, &full));
 *     … full.tree (NULL: None), whose shards' `at` are addresses, too …
 *     dcp_free(&full);
 *
 * As in PyTorch, and unlike the daemon's jobs, a companion is written in place: new memory is taken only for tensors that it
 * lacks. An error is an error on all ranks, and names rank and FQN; then the group can only be closed. Values that are no
 * tensors travel as the segment image writes them: dict keys become text, requires_grad is not told. */
#pragma once
#include "comm/comm.h"
#include "plan/state_dict_op.h"

struct dcp_options {
	const uint32_t *ranks_only;    /* none: all */
	uint32_t ranks_only_count;
	uint32_t root;
	bool type_check, strict, cpu_offload, values;
	double rtol, atol;             /* dcp_compare with values */
	const struct layout *layout;   /* dcp_distribute, dcp_broadcast without a companion, dcp_redistribute */
};

struct dcp_state_dict {
	struct tree *tree;
	uint64_t moved_bytes;          /* that came to this rank from others */
	uint64_t needed_bytes;         /* that ranks do not hold already, all ranks together */
	struct arena *arena;           /* what the tree is made of, and */
	struct state_dict_op_trees *kept;
	void **blocks;                 /* the new tensors' memory */
	uint64_t block_count;
};
void dcp_free(struct dcp_state_dict *s);

FALLIBLE enum err dcp_create(struct comm *c, const struct tree *source, const struct dcp_options *o, struct dcp_state_dict *out);
FALLIBLE enum err dcp_offload(struct comm *c, const struct tree *source, const struct dcp_options *o, struct dcp_state_dict *out);
FALLIBLE enum err dcp_gather(struct comm *c, const struct tree *source, const struct dcp_options *o, struct dcp_state_dict *out);
FALLIBLE enum err dcp_redistribute(struct comm *c, const struct tree *source, const struct dcp_options *o, struct dcp_state_dict *out);
/* into: this rank's companion; of broadcast and distribute it may be NULL (on all ranks alike). source: used at the root only there. */
FALLIBLE enum err dcp_copy(struct comm *c, const struct tree *source, const struct tree *into, const struct dcp_options *o,
			   struct dcp_state_dict *out);
FALLIBLE enum err dcp_broadcast(struct comm *c, const struct tree *source, const struct tree *into, const struct dcp_options *o,
				struct dcp_state_dict *out);
FALLIBLE enum err dcp_distribute(struct comm *c, const struct tree *source, const struct tree *into, const struct dcp_options *o,
				 struct dcp_state_dict *out);
/* Structure, dtypes and sizes; with o->values also what they hold. The same answer on all ranks. */
FALLIBLE enum err dcp_compare(struct comm *c, const struct tree *a, const struct tree *b, const struct dcp_options *o, bool *equal_out);
