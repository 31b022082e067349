/* sources.h: where the elements of a run's sources lie, as the heads of stored items say, cached per worker; and whether a stored item is
 * the one that was written. */
#pragma once
#include "format/torch_item.h"
#include "runner/files.h"
#include "runner/run.h"

/* An item's header, as far as reads need it. */
struct src_info {
	uint32_t src;                  /* UINT32_MAX: empty */
	bool conj, neg, deflated, dense;   /* dense: the storage holds the box's elements, each once */
	bool q8_0;                     /* the storage holds blocks; payload_bytes, offset and strides are of their float32 elements */
	uint8_t dtype, cast_count;
	uint8_t casts[VIEW_CASTS_MAX]; /* see run_src */
	uint64_t payload_off, payload_bytes, stored_bytes, storage_offset;
	int64_t strides[NDIM_MAX];     /* in elements */
	uint8_t order[NDIM_MAX];       /* dims by stride, largest first: the order of the storage */
};

enum {
	SRC_CACHE = 1024,              /* a power of two */
	SOURCES_INFLATE_MAX = 64 << 20, /* a deflated record must fit memory */
};

/* Shared by the slots of one worker. */
struct sources {
	struct run *run;
	struct files *files;
	struct src_info *cache;
	uint64_t read_bytes;           /* by blocking reads, less those of heads */
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
 * record too if asked. *known_out: there was something to compare it with. ERR_DIGEST_MISMATCH, …. */
FALLIBLE enum err sources_check_item(struct sources *s, uint32_t src, bool payload, bool *known_out);
/* The same of its payload, and counts it in the run's verified_bytes, or as `unverified`. Not for parts of an item. */
FALLIBLE enum err sources_check_all(struct sources *s, uint32_t src);
/* Compares the payload of an item whose digests are those of its blocks (run_src.by_blocks), by blocking reads. Errors name the block. */
FALLIBLE enum err sources_check_blocks(struct sources *s, uint32_t src, const struct src_info *info);
/* Reads bytes of the item's file, from `offset` in the item on. */
FALLIBLE enum err sources_read(struct sources *s, uint32_t src, uint64_t offset, void *into, uint64_t n);
/* Elements from the first to behind the last one of a box when only the dims order[k] and further are walked, in bytes. */
uint64_t sources_span(const struct src_info *info, uint32_t ndim, const int64_t *size, uint32_t k);
/* An item that has digests of its payload and is as long as one that dcpd writes of this box is laid out like that: no byte of it is read
 * to know, and what its head says does not matter. sizes: of the box. False: it is not such a one. */
bool sources_layout(const struct run_src *src, const int64_t *sizes, struct item_layout *out);

/* The part of a source for a box of a tensor, if that is one run of bytes in the storage and in the box's own memory (in C order), and is
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
