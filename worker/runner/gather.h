/* gather.h: brings boxes of tensors from their sources (items of files, segments) into memory, in bounded memory.
 *
 * A job is one box of one source chunk that goes to one target chunk. Where the box is one run of bytes on both sides it is read
 * straight to its place. Otherwise what is needed is read in spans (with small gaps, without large ones) and copied by strides; a box
 * that does not fit the memory is read in several rounds.
 *
 *     gather_begin(g);  gather_add(g, dst, begin, end, mem) …
 *     while (gather_more(g)) { gather_fill(g, &wave); (run the wave) gather_copy(g, &wave); }
 *
 * One gather belongs to one slot of one worker. */
#pragma once
#include "format/torch_item.h"
#include "runner/wave.h"

enum {
	GATHER_SMALL_ITEM = 64 << 10,  /* items up to this are read whole, header and all */
	GATHER_HOLE = 8 << 10,         /* a gap worth not reading */
	GATHER_DIRECT_MIN = 64 << 10,  /* runs from here on are read straight to their place */
	GATHER_INFLATE_MAX = 64 << 20, /* a deflated record must fit memory */
};

/* What was learnt from an item's header. */
struct src_info {
	uint32_t src;                  /* UINT32_MAX: empty */
	bool conj, neg, deflated, dense;   /* dense: the storage holds the box's elements, each once */
	uint8_t dtype;
	uint64_t payload_off, payload_bytes, stored_bytes, storage_offset;
	int64_t strides[NDIM_MAX];     /* in elements */
	uint8_t order[NDIM_MAX];       /* dims by stride, largest first: the order of the storage */
};

enum { SRC_CACHE = 1024 };         /* a power of two */

/* Shared by the slots of one worker. */
struct sources {
	struct run *run;
	struct files *files;
	struct src_info *cache;
};
FALLIBLE enum err sources_open(struct run *run, struct files *files, struct sources *out);
void sources_close(struct sources *s);
/* Known already, a segment, or a large item whose header is read now (blocking, a few KiB). */
FALLIBLE enum err sources_info(struct sources *s, uint32_t src, struct src_info **out);
/* From an item in memory (all of it). */
FALLIBLE enum err sources_parse(struct sources *s, uint32_t src, const unsigned char *item, struct src_info **out);
/* Is its info at hand, so that sources_info() reads nothing? */
bool sources_known(struct sources *s, uint32_t src);
/* Compares all of a stored item, by blocking reads: with the manifest's digest of all its bytes, else each record's CRC32; the payload's
 * record too if asked. *known_out: there was something to compare it with. *read_out: raised by what was read. ERR_DIGEST_MISMATCH, …. */
FALLIBLE enum err sources_check_item(struct sources *s, uint32_t src, bool payload, bool *known_out, uint64_t *read_out);
/* Reads bytes of the item's file, from `offset` in the item on. */
FALLIBLE enum err sources_read(struct sources *s, uint32_t src, uint64_t offset, void *into, uint64_t n);
/* An item that has digests of its payload and is as long as one that dcpd writes of this box is laid out like that: no byte of it is read
 * to know, and what its head says does not matter. sizes: of the box. False: it is not such a one. */
bool sources_layout(const struct run_src *src, const int64_t *sizes, struct item_layout *out);

/* What a source has for a box of a tensor, if that is one run of bytes in the storage and in the box's own memory (in C order), and is
 * taken as it is: no cast, no lazy bits, not deflated. */
struct src_row {
	uint64_t from, bytes;          /* of the storage */
	uint64_t at;                   /* of the box */
};
/* dims: the box's offsets, then sizes. False: it is not, or they have nothing in common. */
bool sources_row(const struct run *run, const struct run_src *src, const struct src_info *info, enum dtype dtype,
		 const int64_t *dims, struct src_row *out);
/* Adds what is known of a source to an error. */
enum err sources_at(const struct run *run, uint32_t src, enum err e);

struct gather_job {
	uint32_t src, dst;
	uint64_t dims_at;              /* in g->dims: src offsets, dst offsets, sizes, counter (ndim each) */
	unsigned char *mem;            /* where the target's byte `mem_at` is */
	uint64_t mem_at;
	uint32_t split;                /* dims (in storage order) that are walked one index at a time */
	int64_t step;                  /* indices of dim order[split] taken at once; 0: not yet decided */
	bool done;
};

struct gather_sub {
	uint32_t job, read;
	bool whole_item, direct;
	uint64_t dims_at;              /* in g->sub_dims: offsets in the job's box, sizes */
};

struct gather {
	struct sources *sources;
	struct vec(struct gather_job) jobs;
	struct vec(int64_t) dims;
	struct vec(struct gather_sub) subs;
	struct vec(int64_t) sub_dims;
	uint64_t next_job;
};

void gather_free(struct gather *g);
void gather_begin(struct gather *g);
/* The bytes [begin, end) of dst's payload go to mem (byte `begin` at mem). Their source boxes become jobs. */
FALLIBLE enum err gather_add(struct gather *g, uint32_t dst, uint64_t begin, uint64_t end, unsigned char *mem);
/* One box of src into dst's memory (mem: byte 0 of its payload): the intersection of both chunks. */
FALLIBLE enum err gather_add_pair(struct gather *g, uint32_t src, uint32_t dst, unsigned char *mem);
static inline bool gather_more(const struct gather *g) { return g->next_job < g->jobs.n; }
/* Adds reads until the wave is full or no job is left; what lies in segments is copied at once. */
FALLIBLE enum err gather_fill(struct gather *g, struct wave *w);
FALLIBLE enum err gather_copy(struct gather *g, struct wave *w);

/* Copies the box (offsets in src's chunk, offsets in dst's chunk, sizes) from `from`, the address of the box's first element in a
 * memory laid out by `info`, to dst's memory; casts, conjugates and negates as needed. */
FALLIBLE enum err gather_place(const struct run *run, const struct src_info *info, uint32_t dst, const int64_t *dst_off,
			       const int64_t *size, const unsigned char *from, unsigned char *dst_mem, uint64_t mem_at);
