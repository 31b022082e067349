/* wave.h: a batch of reads that a task needs before it can go on. The reads are sorted by file and offset, neighbours are read
 * together (one large read instead of many small ones), and what several of them share is read once.
 *
 *     wave_begin(w, memory, bytes)    and, where the reads may go past the page cache, w->pages = true
 *     wave_add(w, &read) …        until it says that the memory is full, or all are in
 *     wave_plan(w)                → w->ops: give them to the engine
 *     (all ops done) wave_find(w, &read) → where its bytes lie */
#pragma once
#include "io/digest.h"
#include "io/engine.h"
#include "runner/files.h"

enum { WAVE_PAGE = 4096, WAVE_GAP = 4096, WAVE_READS_MIN = 64, WAVE_READS_MAX = 8192, WAVE_RANGES = 16 };

struct wave_read {
	uint32_t file;
	uint32_t op;                   /* set by wave_plan */
	uint64_t offset, bytes;        /* of whole pages if the wave reads such */
	unsigned char *into;           /* straight to its place, or NULL: into the wave's memory */
	uint16_t skip, slack;          /* bytes of whole pages before and behind what was asked for */
	uint8_t which;                 /* digests that the store may compute of it as it comes, if it has a place of its own; 0: none */
};

struct wave_op {
	struct io_op io;
	uint32_t file;
	uint16_t digest;               /* 1 + its entry of wave.digests, once the read is done; 0: its bytes are not hashed as they come */
	uint8_t which;                 /* digests that are wanted of a read with a place of its own; 0: none */
	bool pinned : 1;
	bool past_cache : 1;           /* read by O_DIRECT */
	bool failed : 1;               /* of a file that the run does without (run_file.spare): its bytes did not come */
};

/* Reads of the wave that overlap, or nearly: they become one. */
struct wave_range {
	uint32_t file;
	uint64_t begin, end;
};

struct wave {
	unsigned char *memory;
	uint64_t bytes, used;
	bool pages;                    /* reads without a place of their own are of whole pages, on page boundaries of `memory` */
	struct wave_range ranges[WAVE_RANGES]; /* the latest ones, in turn: what a read adds to one of them is all that it costs */
	uint32_t range_count;
	struct vec(struct wave_read) reads;
	struct vec(uint32_t) order;
	struct vec(struct wave_op) ops;
	struct vec(struct digest) digests;
	uint64_t read_bytes;           /* asked of the storage, for the over-read ratio */
};

/* How many reads a wave of so much memory takes at most, those with a place of their own included: its tables are a twentieth of it. */
static inline uint64_t wave_reads_max(uint64_t bytes)
{
	uint64_t n = bytes / WAVE_GAP;

	return n < WAVE_READS_MIN ? WAVE_READS_MIN : n > WAVE_READS_MAX ? WAVE_READS_MAX : n;
}

/* How many of them are hashed as they come: small reads, of which there are more, are hashed when they are there. */
static inline uint64_t wave_digests_max(uint64_t bytes)
{
	return wave_reads_max(bytes) / 8;
}

/* The most that its tables take, for budgets: they grow by half, but for that of digests. */
static inline uint64_t wave_table_bytes(uint64_t bytes)
{
	uint64_t n = wave_reads_max(bytes);

	return (n + n / 2) * (sizeof(struct wave_read) + sizeof(uint32_t) + sizeof(struct wave_op)) +
	       wave_digests_max(bytes) * sizeof(struct digest);
}

void wave_begin(struct wave *w, unsigned char *memory, uint64_t bytes);
void wave_free(struct wave *w);
/* *index_out: the read's number in this wave. *full_out: not added, run the wave first (never for the first read of a wave unless it is
 * larger than the memory: ERR_INTERNAL). */
FALLIBLE enum err wave_add(struct wave *w, uint32_t file, uint64_t offset, uint64_t bytes, unsigned char *into,
			   uint32_t *index_out, bool *full_out);
FALLIBLE enum err wave_plan(struct wave *w, void *user);
/* Gives an op that is not under way yet a place for its digest, which a store computes as the bytes come, unless there are too many. */
FALLIBLE enum err wave_hash(struct wave *w, struct wave_op *op);
unsigned char *wave_data(struct wave *w, uint32_t index);
static inline const struct wave_op *wave_op(const struct wave *w, uint32_t index)
{
	return &w->ops.v[w->reads.v[index].op];
}
/* The digest of the op's bytes; NULL: they are not hashed as they come. */
static inline struct digest *wave_digest(const struct wave *w, const struct wave_op *op)
{
	return op->digest ? &w->digests.v[op->digest - 1] : NULL;
}
