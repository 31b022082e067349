/* delta.h: what a delta and its application share: checkpoints and state dicts that are read tensor by tensor, as streams (exec_stream.c),
 * whatever their layouts and formats. A result whose size nobody knows before goes to a spool first, a sparse file without a name, and from
 * there to its place as every other source does. */
#pragma once
#include "format/delta.h"
#include "runner/build.h"
#include "runner/input.h"

/* A side whose tensors are read: what it holds, without replicas. */
struct delta_side {
	const struct ref *ref;
	struct input *in;
	struct sdict *plan;
	uint32_t *file_map, first_src;
};

/* Plans the side and adds its files and sources to the run. The caller frees *out (delta_side_free), after an error too. */
FALLIBLE enum err delta_side_open(const struct ref *ref, struct input *in, struct run_build *b, struct delta_side *out);
void delta_side_free(struct delta_side *side);
/* "main:run1/step-1" or "shm:train", and the generation, for messages. */
void delta_side_name(const struct ref *ref, char *out, size_t max);

/* Makes a spool that holds `bytes` at most, as a file of the run. *fd_index_out: of the job. */
FALLIBLE enum err delta_spool(struct job *j, struct run_build *b, uint64_t bytes, uint32_t *file_out, uint32_t *fd_index_out);
/* The content digest of a side, of which the i-th tensor's stream is number first + i. */
FALLIBLE enum err delta_content(const struct sdict *plan, const struct run *run, bool now, unsigned char out[16]);
/* Shares the tables and does the run. The build is free then; *run: run_detach, after an error too. */
FALLIBLE enum err delta_streams(struct job *j, struct run_build *b, const char *stage, struct run *run);
