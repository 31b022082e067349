/* commit.h: checkpoints that go, and what jobs that never ended left behind. How they come: staging.h. */
#pragma once
#include "ops/staging.h"

/* Moves a checkpoint to trash and removes it. ERR_NOT_FOUND. */
FALLIBLE enum err commit_delete(struct worker *w, const json_t *ref, const char *job);
/* After a crash: is the job's checkpoint there? If not, what it left is removed. */
FALLIBLE enum err commit_recover(struct worker *w, const json_t *question, bool *committed_out, struct manifest **manifest_out);
/* Removes what earlier attempts of this job left beside its target, before another one begins. */
FALLIBLE enum err commit_clear(int parent, const char *job);
/* Removes staging and trash of all jobs but those listed and those whose id does not sort before `before` (NULL: all). */
FALLIBLE enum err commit_sweep(struct worker *w, uint32_t root, const json_t *keep, const char *before, uint64_t *removed_out);
