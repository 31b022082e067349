/* exec.h: one worker's part of a run: takes tasks until none is left, several at a time, so that reading, hashing and writing overlap.
 *
 *   dst-driven:  sources ──reads──► block in memory ──CRC32, XXH3──► write ──► (last block: archive head and tail, fsync)
 *   src-driven:  source range ──read──► digest compared ──► scattered into segments
 *
 * What a block needs lies contiguous in a segment already? Then it is hashed and written from there: no copy. */
#pragma once
#include "io/engine.h"
#include "runner/read_plan.h"

/* Called several times a second and between tasks; an error ends the run (ERR_CANCELLED). */
typedef enum err (*exec_tick_fn)(void *user);

struct exec_spec {
	struct run *run;
	const struct stores *stores;
	const int *fds;                /* segments and spools of the run, by fd_index */
	uint32_t fd_count;
	struct io_engine *io;
	uint32_t index, count;         /* this worker of so many */
	uint64_t memory_bytes;         /* for buffers, this worker's share */
	struct seg_leavings *leavings; /* takes the segments' mappings; NULL: unmapped at the end */
	exec_tick_fn tick;
	void *user;
};

FALLIBLE enum err exec_run(const struct exec_spec *spec);
