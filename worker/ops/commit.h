/* commit.h: checkpoints that go, and what jobs that never ended left behind. How they come: staging.h. */
#pragma once
#include "ops/staging.h"

/* Moves a checkpoint to trash and removes it. ERR_NOT_FOUND. */
FALLIBLE enum err commit_delete(struct worker *w, const json_t *ref, const char *job);
/* After a crash: is the job's checkpoint there? If not, what it left is removed. */
FALLIBLE enum err commit_recover(struct worker *w, const json_t *question, bool *committed_out, struct manifest **manifest_out);
/* Removes what earlier attempts of this job left beside its target, before another one begins. */
FALLIBLE enum err commit_clear(int parent, const char *job);
/* What a sweep leaves alone. */
struct commit_keep {
	const json_t *jobs;            /* these; NULL: none */
	const char *before;            /* those whose id does not sort before this; NULL: none */
	const char *mark;              /* those whose id does not end so, until nothing of theirs has changed for a day: they are another
					* daemon's, which sees the same storage. NULL: all are ours */
};

/* Removes staging and trash of all other jobs, but never the one copy of a checkpoint that a job had put away (beside.h). */
FALLIBLE enum err commit_sweep(struct worker *w, uint32_t root, const struct commit_keep *keep, uint64_t *removed_out);
