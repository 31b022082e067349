/* read_plan.h: brings boxes of tensors from their sources (items of files, segments) into memory, in bounded memory.
 *
 * A job is one box of one source chunk that goes to one target chunk. Where the box is one run of bytes on both sides it is read
 * straight to its place. Otherwise what is needed is read in spans (with small gaps, without large ones) and copied by strides; a box
 * that does not fit the memory is read in several rounds.
 *
 *     read_plan_begin(g);  read_plan_add(g, dst, begin, end, mem) …
 *     while (read_plan_more(g)) { read_plan_fill(g, &wave); (run the wave) read_plan_copy(g, &wave); }
 *
 * One read plan belongs to one slot of one worker. */
#pragma once
#include "runner/sources.h"
#include "runner/wave.h"

enum {
	READ_PLAN_SMALL_ITEM = 64 << 10,  /* items up to this are read whole, header and all */
	READ_PLAN_HOLE = 8 << 10,         /* a gap worth not reading */
	READ_PLAN_DIRECT_MIN = 64 << 10,  /* runs from here on are read straight to their place */
};

struct read_plan_job {
	uint32_t src, dst;
	uint64_t dims_at;              /* in g->dims: src offsets, dst offsets, sizes, counter (ndim each) */
	unsigned char *mem;            /* where the target's byte `mem_at` is */
	uint64_t mem_at;
	uint32_t split;                /* dims (in storage order) that are walked one index at a time */
	int64_t step;                  /* indices of dim order[split] taken at once; 0: not yet decided */
	bool done;
};

struct read_plan_sub {
	uint32_t job, read;
	bool whole_item, direct;
	uint64_t dims_at;              /* in g->sub_dims: offsets in the job's box, sizes */
	uint64_t first, span;          /* bytes of the storage, as elements */
};

struct read_plan {
	struct sources *sources;
	struct vec(struct read_plan_job) jobs;
	struct vec(int64_t) dims;
	struct vec(struct read_plan_sub) subs;
	struct vec(int64_t) sub_dims;
	uint64_t next_job;
	struct vec(float) floats;      /* elements of blocks */
};

void read_plan_free(struct read_plan *g);
void read_plan_begin(struct read_plan *g);
/* The bytes [begin, end) of dst's payload go to mem (byte `begin` at mem). Their source boxes become jobs. */
FALLIBLE enum err read_plan_add(struct read_plan *g, uint32_t dst, uint64_t begin, uint64_t end, unsigned char *mem);
/* Adds the intersection of both chunks, to be read from src into dst's memory (mem: byte 0 of its payload). */
FALLIBLE enum err read_plan_add_pair(struct read_plan *g, uint32_t src, uint32_t dst, unsigned char *mem);
static inline bool read_plan_more(const struct read_plan *g) { return g->next_job < g->jobs.n; }
/* Adds reads until the wave is full or no job is left; what lies in segments is copied at once. */
FALLIBLE enum err read_plan_fill(struct read_plan *g, struct wave *w);
FALLIBLE enum err read_plan_copy(struct read_plan *g, struct wave *w);

/* Copies the box (offsets in src's chunk, offsets in dst's chunk, sizes) from `from`, the address of the box's first element in a
 * memory laid out by `info`, to dst's memory; casts, conjugates and negates as needed. */
FALLIBLE enum err read_plan_place(const struct run *run, const struct src_info *info, uint32_t dst, const int64_t *dst_off,
			       const int64_t *size, const unsigned char *from, unsigned char *dst_mem, uint64_t mem_at);
