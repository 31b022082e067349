/* save_plan.h: from what every rank holds to what every rank writes: PyTorch's create_global_save_plan.
 *
 * `held` lists for every tensor the chunks of every rank, replicas included (equal boxes of different ranks), and for every value
 * each rank that holds it. The plan keeps one writer per distinct box. */
#pragma once
#include "spec/fields.h"
#include "tensor/sdict.h"

struct save_plan_stats {
	uint64_t bytes_total;            /* to write */
	uint64_t bytes_saved;            /* not written because another rank does */
	uint64_t chunk_count;
};

/* Dedup with balancing: distinct boxes go to the candidate rank with the least bytes so far (ties: the lowest). The result's
 * chunks carry the writer's rank, the `loc` of that rank's chunk in `held`, and are ordered as PyTorch orders `.metadata`
 * (rank 0's first, then new ones of rank 1, …). Empty boxes are dropped unless the tensor itself is empty (then one is kept).
 * Values: one writer each. */
FALLIBLE enum err save_plan_make(const struct sdict *held, enum dedup how, uint64_t arena_cap_bytes,
				 struct sdict **plan_out, struct save_plan_stats *stats_out);

/* Every chunk inside its tensor, no two overlapping, volumes add up: PyTorch's _validate_global_plan. ERR_PLAN_INVALID names the
 * FQN; holes are ERR_COVERAGE_HOLE. O(n log n). All problems up to a limit are in the text. */
FALLIBLE enum err save_plan_validate(const struct sdict *plan);
