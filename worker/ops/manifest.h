/* manifest.h: `.dcpd.json`, dcpd's own page in a checkpoint: which job made it, every file's size, and the digests of every item.
 * PyTorch ignores it. A checkpoint without one is as good, but can only be verified by the CRC32s in its archives. Ranks that save without
 * collectives have one each, `.dcpd.3.json` beside `__3.metadata`: each speaks for what its rank wrote.
 *
 *   {"dcpd":1,"job":"01J…","attempt":1,"kind":"save","created_at":"…","generation":7,"world_size":2,"bytes":…,
 *    "metadata":{"name":".metadata","bytes":…,"xxh3_128":"…"},
 *    "files":[{"name":"__0_0.distcp","bytes":…,"items":[[offset,length,"crc32","xxh3_128",[end,"xxh3_128",…],true],…]}]}
 *
 * An item's digest is the XXH3-128 of its payload, or of all its bytes if `true` stands at the end (values, transformed items, whole
 * safetensors files). What was written in several blocks has the list [end of block, digest of block, …], and the item's digest is the
 * XXH3-128 of the blocks' digests. */
#pragma once
#include "base/buf.h"
#include "base/arena.h"
#include "base/map.h"
#include "base/vec.h"
#include "ops/run.h"

struct manifest_item {
	uint32_t file;
	uint32_t digest_count, crc32;
	unsigned char xxh3_128[16];            /* of the item, also if it has blocks */
	uint64_t offset, length, digest_at;    /* into digests; one entry for an item of one block */
	bool raw;                              /* digests are of all its bytes, not of the payload in an archive */
};

struct manifest_file {
	struct str name;
	uint64_t bytes;
	uint64_t first_item, item_count;       /* sorted by offset */
};

struct manifest {
	char job[64];
	char kind[32];
	char created_at[40];
	uint64_t attempt, generation, world_size, bytes, metadata_bytes;
	bool has_generation;
	char metadata_name[64];
	unsigned char metadata_xxh3[16];
	struct arena *arena;
	struct vec(struct manifest_file) files;
	struct vec(struct manifest_item) items;
	struct vec(struct run_digest) digests;
	struct map names;
};

enum { MANIFEST_MAX = 1 << 30 };
#define MANIFEST_NAME ".dcpd.json"
enum { MANIFEST_NAME_MAX = 64 };

/* The manifest that belongs to a metadata file: ".dcpd.3.json" to "__3.metadata", ".dcpd.json" to any other. */
void manifest_name(const char *metadata, char out[MANIFEST_NAME_MAX]);
/* Is this the name of one? *rank_out: -1 in a manifest of all ranks. */
bool manifest_is(const char *name, int64_t *rank_out);

/* ERR_FORMAT_MANIFEST with the offset. */
FALLIBLE enum err manifest_parse(const void *json, uint64_t n, struct manifest **out);
void manifest_free(struct manifest *m);
void manifest_free_ptr(struct manifest **m);
/* Adds another one's files; one that m lists already stays as it is. */
FALLIBLE enum err manifest_join(struct manifest *m, const struct manifest *from);
/* NULL: not listed. */
const struct manifest_item *manifest_find(const struct manifest *m, struct str file, uint64_t offset, uint64_t length);

/* The raw item that these bytes are, or are a part of; NULL: there is none. */
const struct manifest_item *manifest_covering(const struct manifest *m, struct str file, uint64_t offset, uint64_t length);

/* What a writer knows besides the run's results. */
struct manifest_head {
	const char *job, *kind, *created_at, *metadata_name;
	uint64_t attempt, generation, world_size, metadata_bytes;
	bool has_generation;
	unsigned char metadata_xxh3[16];
};
/* The manifest of a finished run's target files. */
FALLIBLE enum err manifest_put(struct buf *b, const struct manifest_head *head, const struct run *run);
