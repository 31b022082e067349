/* apply.h: what makes a reshard, or a load, the application of a delta: the tensors that the delta changes are made first, in a spool,
 * each compared with its checksum; all others are the base's. Before a byte of the target is written, the base's content digest is compared
 * with the one that the delta is of. */
#pragma once
#include "ops/delta.h"

struct apply {
	struct job *job;
	struct arena *arena;           /* NULL: the job applies no delta */
	struct checkpoint *delta;
	struct delta_index index;
	void *index_text;
	struct delta_side base;
	struct run_build build;
	struct sdict *applied;         /* the base with the tensors of the delta */
	struct str *checksums;         /* per tensor of the delta, hex */
	uint64_t *changed;             /* per tensor of the base: 1 + the delta's, or 0 */
	struct str missing;            /* a tensor of the delta that the base lacks; p NULL: none */
	unsigned char base_content[16], content[16];
};

/* The reference of the checkpoint or state dict that a reshard reads: a delta's base, or spec.source. */
const struct ref *apply_source(const struct job *j);
/* Of JOB_APPLY: base shows the result from now on. Nothing to do: nothing is done. ERR_BASE_MISMATCH: the delta is of another base;
 * ERR_DIGEST_MISMATCH, ERR_FORMAT_TRANSFORM with FQN, file and offset. The caller frees *a (apply_free) after base was used, after an error
 * too. */
FALLIBLE enum err apply_open(struct job *j, struct input *base, struct apply *a);
/* Adds the content digests, the versions and "changed_tensors" to a result. */
void apply_report(const struct apply *a, json_t *result);
void apply_free(struct apply *a);
