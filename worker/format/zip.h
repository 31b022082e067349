/* zip.h: the little of zip that torch.save archives need: a central directory (zip64 too) with stored or deflated records, and a
 * writer of stored ones. Not a general zip library, on purpose: what has no place in a checkpoint (encryption, several disks,
 * records that overlap, sizes beyond the archive) is refused.
 *
 *     archive   [ local header | payload ] …  [ central directory ] [ zip64 end record, locator ] [ end record ]
 *
 * The local headers are looked at only for the records that are read: their lengths may differ from the directory's. */
#pragma once
#include "base/arena.h"
#include "base/buf.h"
#include "format/source.h"

enum { ZIP_RECORDS_MAX = 1 << 20 };

struct zip_record {
	struct str name;
	uint64_t header_off;             /* of the local header */
	uint64_t limit;                  /* where the next record's header or the directory begins */
	uint64_t packed_bytes, bytes;
	uint32_t crc32;                  /* 0 may mean "not computed" */
	bool deflated;
	struct str comment;
};

struct zip {
	const struct item_source *src;
	struct arena *arena;
	struct zip_record *records;      /* in directory order */
	uint64_t count;
	struct str prefix;               /* "archive/", of the first record; zip_open_any: none */
};

FALLIBLE enum err zip_open(const struct item_source *src, struct zip **out);
/* Of other writers, too: records need not be in one folder, there is no prefix, and there may be no record. */
FALLIBLE enum err zip_open_any(const struct item_source *src, struct zip **out);
void zip_free(struct zip *z);
void zip_free_ptr(struct zip **z);

/* The record called prefix + name; NULL if there is none. Two of them: ERR_FORMAT_ZIP. */
FALLIBLE enum err zip_find(const struct zip *z, struct str name, const struct zip_record **out);
/* Reads the local header; where the stored bytes begin. */
FALLIBLE enum err zip_locate(const struct zip *z, const struct zip_record *r, uint64_t *data_off_out);
/* Appends the record's bytes, unpacked, at most `max` of them. */
FALLIBLE enum err zip_read(const struct zip *z, const struct zip_record *r, uint64_t max, struct buf *into);
/* Streams the record's bytes, unpacked, and compares the CRC if it is known. ERR_DIGEST_MISMATCH. */
FALLIBLE enum err zip_check(const struct zip *z, const struct zip_record *r);

/* Writing, record by record; `at` positions count from the start of the archive. Sizes and positions of 4 GiB or more get zip64 fields. */
struct zip_entry {
	struct str name;
	uint64_t header_off, bytes;
	uint32_t crc32;
	struct str comment;
};
enum { ZIP_LOCAL_CRC = 14, ZIP_CENTRAL_CRC = 16 /* where the CRC-32 is in a record's local header and in its directory entry */ };
/* The local header at `at`, which becomes e->header_off, with an FB field of padding so that the payload starts at a multiple of align (1:
 * no field). The name has at most ZIP_NAME_MAX bytes. */
enum { ZIP_NAME_MAX = 65535 };
void zip_put_local_entry(struct buf *b, uint64_t at, struct zip_entry *e, uint32_t align);
void zip_put_central_entry(struct buf *b, const struct zip_entry *e);
/* The end records behind a directory of `count` entries, `bytes` of them, that begins at `at`. */
void zip_put_end(struct buf *b, uint64_t count, uint64_t bytes, uint64_t at);

/* The same for archives of few records: put them one after the other into the same zip_writer, then the tail. */
enum { ZIP_OUT_MAX = 4 };
struct zip_writer {
	struct zip_entry out[ZIP_OUT_MAX];
	uint32_t count;
};

/* The local header at `at`, with an FB field of padding so that the payload starts at a multiple of align (1: no field). */
void zip_put_local(struct zip_writer *w, struct buf *b, uint64_t at, const char *name, uint64_t bytes, uint32_t crc32,
		   uint32_t align);
/* Central directory and end records; `at`: where they begin. */
void zip_put_tail(const struct zip_writer *w, struct buf *b, uint64_t at);
