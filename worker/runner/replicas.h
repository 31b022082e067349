/* replicas.h: parts of a state dict that several ranks hold. One of them is written; the others are hashed as they lie in their
 * segments, and those that differ are reported: PyTorch keeps one of them and says nothing. */
#pragma once
#include "runner/build.h"
#include "session/job.h"

struct replicas {
	struct sdict *sd;              /* the chunks that are not written; locs in their segments */
	uint32_t *plan_chunk;          /* per chunk of sd: the chunk of the plan that is written instead */
	uint64_t count;
	const struct sdict *plan;
	struct job *job;
	uint32_t first_src;            /* set when the sources are added to a run */
	bool fail;                     /* options.on_divergence is "fail" */
	json_t *list;                  /* what differs, as `result.divergent` shows it */
};

/* Values are compared while they are read: what of them differs is listed, or ERR_DIVERGENT. Comes first. */
FALLIBLE enum err replicas_values(const struct sdict *held, struct replicas *out);

/* held: all ranks' chunks. Tensors whose dtype is changed on the way are left out: their bytes cannot be compared. */
FALLIBLE enum err replicas_find(struct job *j, const struct sdict *held, const struct sdict *plan, const enum dtype *dtypes,
				struct replicas *out);
void replicas_free(struct replicas *r);
/* For write_spec.after_run: r->list has what differs, or ERR_DIVERGENT. user: the replicas. */
enum err replicas_compare(void *user, const struct run *run, const struct build_place *places);
