/* optim.h: optimizer state, cut the way a model's ranks need it: what PyTorch's load_sharded_optimizer_state_dict does, for all ranks
 * at once.
 *
 * A checkpoint does not say how FSDP will want its optimizer state; the model's state dict does. Two cases:
 *
 *   1-D   no tensor of the model is nested: every optimizer tensor is cut on dim 0 over the world, as torch.chunk cuts.
 *   2-D   FSDP over tensor parallelism: a parameter's shard (its TP slice) is sharded again over a data-parallel group. The optimizer
 *         tensors of that parameter are the same slice, cut on dim 0 over that group; others are cut whole over the group.
 *
 * Tensors of one element are whole on every rank, values are on every rank.
 *
 *     struct optim_model *m;
 *     TRY(optim_model_new(world_size, &m));
 *     for each rank, in order, for each entry of its image:
 *             TRY(optim_model_add(m, rank, fqn, path, ndim, shape, outer));
 *     TRY(optim_model_done(m));
 *     TRY(optim_plan_make(source, dtypes, m, key, arena, &plan)); */
#pragma once
#include "plan/tree.h"
#include "tensor/sdict.h"

struct optim_model;

FALLIBLE enum err optim_model_new(uint32_t world_size, struct optim_model **out);
void optim_model_free(struct optim_model *m);
/* Rank by rank, ascending. The arguments must live as long as the model. outer NULL: the tensor is not nested on this rank. Refused in
 * PyTorch's words: several outer shards on a rank, DTensors in or around what is nested. */
FALLIBLE enum err optim_model_add(struct optim_model *m, uint32_t rank, struct str fqn, struct sd_path path, uint32_t ndim,
				  const int64_t *shape, const struct sd_outer *outer);
/* Finds every rank's data-parallel group: that which its nested tensors name, else the ranks whose nested tensors have all the same
 * slices. Groups that contradict each other are ERR_PLAN_INVALID, naming rank and FQN. */
FALLIBLE enum err optim_model_done(struct optim_model *m);
/* For DTensors: the slice that mesh dims of the name "tp" leave a rank of the mesh, with its group. *out NULL: no such dim, or the rank
 * is not in the mesh. */
FALLIBLE enum err optim_mesh_slice(const struct tree_mesh *mesh, const struct placement *placements, uint32_t rank, uint32_t ndim,
				   const int64_t *shape, struct arena *a, const struct sd_outer **out);

struct optim_plan {
	struct sdict *sd;              /* the target, boxes in the whole tensors; values point where those of the source lie */
	bool *plain;                   /* per tensor: not sharded, whole on each rank */
	const struct sd_outer **outers;/* per chunk: the slice that it is a part of, or NULL. Its ranks are the group */
	uint64_t unmatched;            /* 2-D: tensors that belong to no tensor of the model: cut whole */
};

/* Everything in `source` whose key path begins with `key` (its parts joined by dots; without paths: whose FQN does). dtypes: per tensor of
 * source, the one wanted. Nothing found: ERR_MISSING_KEY, which says what keys there are. plain and outers live in `a`, out->sd is the
 * caller's (sdict_free). */
FALLIBLE enum err optim_plan_make(const struct sdict *source, const enum dtype *dtypes, const struct optim_model *m, struct str key,
				  struct arena *a, struct optim_plan *out);
