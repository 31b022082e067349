/* manifest.h: `.dcpd.json`, dcpd's own page in a checkpoint: which job made it, every file's size, and the digests of every item.
 * PyTorch ignores it. A checkpoint without one is as good, but can only be verified by the CRC32s in its archives. Ranks that save without
 * collectives have one each, `.dcpd.3.json` beside `__3.metadata`: each speaks for what its rank wrote.
 *
 *   {"dcpd":1,"record":{…},"record_xxh3_128":"…",        (record.h; not in the manifests of versions before)
 *    "job":"01J…","attempt":1,"kind":"save","created_at":"…","uid":1000,"generation":7,"world_size":2,"bytes":…,
 *    "hosts":["…"],"sync":false,
 *    "metadata":{"name":".metadata","bytes":…,"xxh3_128":"…","save_id":"…"},
 *    "files":[{"name":"__0_0.distcp","bytes":…,"mtime_ns":…,
 *              "items":[[offset,length,"crc32","xxh3_128",[end,"xxh3_128",…],true],…],
 *              "edges":["xxh3_128",…]}],
 *    "self_xxh3_128":"…"}
 *
 * hosts has the ids (`hosts.id`) of a save by several hosts, each of which has a job of its own: `job` is that of the one who committed.
 * sync is there if files were not fsynced.
 * An item's digest is the XXH3-128 of its payload, or of all its bytes if `true` stands at the end (values, transformed items, whole
 * safetensors files). An item written in several blocks has the list [end of block, digest of block, …], and the item's digest is the
 * XXH3-128 of the blocks' digests. `edges` has an entry per item, in the order of `items`: the XXH3-128 of the archive around the payload
 * (all bytes of the item but the payload's); "" for items whose digest covers all their bytes. Bytes between items are zeros.
 * `self_xxh3_128`, always the last member, is the digest of all text in front of it. Older manifests lack edges, mtime_ns, save_id and
 * the own digest: heads are then compared by the CRC32s of their records. */
#pragma once
#include "base/buf.h"
#include "base/arena.h"
#include "base/map.h"
#include "base/vec.h"
#include "io/digest.h"

enum { MANIFEST_MAX = 1 << 30, MANIFEST_NAME_MAX = 64, MANIFEST_SAVE_ID = 37 };
#define MANIFEST_NAME ".dcpd.json"
#define MANIFEST_SELF ",\"self_xxh3_128\":\""   /* then the hex digits and `"}\n`, the end of the text */

struct manifest_item {
	uint32_t file;
	uint32_t digest_count, crc32;
	unsigned char xxh3_128[16];            /* of the item, also if it has blocks */
	unsigned char edges[16];               /* of the archive around the payload, if has_edges */
	uint64_t offset, length, digest_at;    /* into digests; one entry for an item of one block */
	bool raw;                              /* digests are of all its bytes, not of the payload in an archive */
	bool has_edges;
};

struct manifest_file {
	struct str name;
	uint64_t bytes;
	int64_t mtime_ns;                      /* when the writer had closed the file; 0: not recorded */
	uint64_t first_item, item_count;       /* sorted by offset */
};

struct manifest {
	char job[64];
	char kind[32];
	char created_at[40];
	uint64_t attempt, generation, world_size, bytes, metadata_bytes, uid;
	bool has_generation, has_uid, has_edges;
	bool unsynced;                         /* files were not fsynced: no checkpoint that is may rely on them */
	char metadata_name[64];
	char save_id[MANIFEST_SAVE_ID];        /* "": not recorded */
	unsigned char metadata_xxh3[16];
	struct arena *arena;
	struct vec(struct str) hosts;
	struct vec(struct manifest_file) files;
	struct vec(struct manifest_item) items;
	struct vec(struct block_digest) digests;
	struct map names;
};

/* The manifest that belongs to a metadata file: ".dcpd.3.json" to "__3.metadata", ".dcpd.json" to any other. */
void manifest_name(const char *metadata, char out[MANIFEST_NAME_MAX]);
/* Is this the name of one? *rank_out: -1 in a manifest of all ranks. */
bool manifest_is(const char *name, int64_t *rank_out);

/* ERR_FORMAT_MANIFEST with the offset; ERR_CHECKPOINT_DAMAGED if the text is not what was written. */
FALLIBLE enum err manifest_parse(const void *json, uint64_t n, struct manifest **out);
void manifest_free(struct manifest *m);
void manifest_free_ptr(struct manifest **m);
/* Was the file, as stat() tells it, made for that row: of its size, and not written to since? */
struct stat;
bool manifest_is_of(const struct manifest_file *f, const struct stat *st);
/* Adds another one's files; one that m lists already stays as it is. */
FALLIBLE enum err manifest_join(struct manifest *m, const struct manifest *from);
/* Appends the manifest `text` with other metadata: their digest takes the place of the one that is in it. */
struct manifest_metadata {
	const char *name, *save_id;
	uint64_t bytes;
	unsigned char xxh3_128[16];
};
FALLIBLE enum err manifest_renew(struct str text, const struct manifest_metadata *metadata, struct buf *out);
void manifest_put_metadata(struct buf *b, const struct manifest_metadata *metadata);
/* The same with another record: its members as record_put() appends them. */
FALLIBLE enum err manifest_renew_record(struct str text, struct str record, struct buf *out);
/* Ends the text that begins at b->p with its own digest. */
FALLIBLE enum err manifest_put_self(struct buf *b);
/* NULL: not listed. */
const struct manifest_item *manifest_find(const struct manifest *m, struct str file, uint64_t offset, uint64_t length);

/* The raw item that these bytes are, or are a part of; NULL: there is none. */
const struct manifest_item *manifest_covering(const struct manifest *m, struct str file, uint64_t offset, uint64_t length);

/* Bytes of a stored file, of which a manifest may know digests. */
struct manifest_range {
	const struct manifest *manifest;       /* NULL: nothing is known */
	struct str file;
	uint64_t offset, length;
};
/* Do the digests on record say that two ranges hold the same elements? Both are items with digests of their payloads, or lie at the same
 * place of items with digests of all bytes; blocks are cut alike. False: they differ, or the digests cannot say. Nothing is read. */
bool manifest_same(const struct manifest_range *a, const struct manifest_range *b);

/* The save_id of a `.metadata` in memory, without parsing it; "" if there is none. */
void manifest_save_id(const void *metadata, uint64_t n, char out[MANIFEST_SAVE_ID]);

/* Compares bytes that come in pieces with the digests of a raw item (manifest_item.raw), block by block. */
struct manifest_check {
	const struct block_digest *digests;
	uint32_t count, at;
	uint64_t pos;
	struct digest_stream stream;
};
void manifest_check_begin(struct manifest_check *c, const struct block_digest *digests, uint32_t count);
/* ERR_DIGEST_MISMATCH with the block's offset in the item. The last piece must end the item: `last`. */
FALLIBLE enum err manifest_check_add(struct manifest_check *c, const void *bytes, uint64_t n, bool last);
