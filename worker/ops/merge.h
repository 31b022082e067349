/* merge.h: what makes a reshard a merge: tensors that are the weighted average of the same tensors in several checkpoints, each cut and
 * stored in its own way. Nothing is held whole: a block's elements are read from every checkpoint, added up, rounded once and written. */
#pragma once
#include "ops/convert_rules.h"
#include "runner/target.h"

struct merge {
	struct job *job;
	struct arena *arena;
	uint32_t count;                /* of checkpoints; 0: the job is no merge */
	struct input *others;          /* all but the first */
	struct spec_view *views;       /* of each of them: what takes part */
	struct convert_rules *rules;   /* what the job's rules make of each; NULL: there are none */
	struct spec_view *alike;       /* with rules: the first one's tensors and values, with the other's bytes */
	bool *averages;                /* is tensor i of what is written an average? */
	uint32_t **file_maps;
	struct sdict *averaged;        /* the target's tensors that are averages, but for tied ones */
	double weights[RUN_LEGS_MAX];
	struct build_merge build;
};

/* Opens the other checkpoints of a merge; of the first, `stored` takes part, and the rules make `view` of it. The average comes first: its
 * elements are added up as they are stored, and rounded once to the dtype that the rules give them. ERR_MISSING_KEY, ERR_KIND_MISMATCH,
 * ERR_SIZE_MISMATCH where the others' tensors are not those of the first. The caller frees *out, after an error too. */
FALLIBLE enum err merge_open(struct job *j, const struct spec_view *stored, struct convert_rules *rules, const struct spec_view *view,
			     struct merge *out);
/* target_tie of the first checkpoint and, if the job is a merge, of the others. */
FALLIBLE enum err merge_tie(const struct merge *m, const struct target_ties *first, struct sdict *target);
/* Plans the averages of `target` and adds the sources of the others to the run. first_src: run source of chunk 0 of `first`. */
FALLIBLE enum err merge_sources(struct merge *m, const struct sdict *first, const struct sdict *target, struct run_build *b,
				uint32_t first_src);
/* Adds "averaged" and "first_only", counts of tensors, to a result. */
void merge_report(const struct merge *m, const struct sdict *target, json_t *result);
void merge_free(struct merge *m);
