/* safetensors.h: the safetensors header: 8-byte little-endian length, JSON, data without holes. A strict streaming parser with the
 * checks of the reference implementation (tensor.rs): bounds, order, no holes, no overlap, product against size, duplicate names. */
#pragma once
#include "base/arena.h"
#include "base/buf.h"
#include "tensor/box.h"
#include "tensor/dtype.h"

enum {
	SFT_HEADER_MAX = 100 << 20,
	SFT_ENTRY_MIN = 49,              /* bytes of the shortest entry: "":{"dtype":"U8","shape":[],"data_offsets":[0,0]} */
	SFT_META_MAX = 1 << 16,          /* keys of __metadata__; PyTorch and dcpd write one or two */
};

struct sft_entry {
	struct str name;
	enum dtype dtype;
	uint32_t ndim;
	const int64_t *shape;
	uint64_t begin, end;             /* relative to data_off */
};

struct sft {
	struct sft_entry *entries;       /* in data order */
	uint64_t entry_count;
	struct { struct str key, value; } *meta; /* __metadata__, values unescaped */
	uint64_t meta_count;
	uint64_t data_off, data_bytes;   /* in the file */
};

/* The header length from the first 8 bytes of a file of file_bytes. */
FALLIBLE enum err sft_header_bytes(const unsigned char first8[8], uint64_t file_bytes, uint64_t *json_bytes_out);
/* json: the header's JSON; everything is allocated in `arena`. */
FALLIBLE enum err sft_parse(struct str json, uint64_t file_bytes, struct arena *arena, struct sft *out);

/* Appends the 8 length bytes and the JSON, padded with spaces so that data starts at a multiple of `align` (a power of two >= 8).
 * Entries must be in data order without holes. */
FALLIBLE enum err sft_put_header(struct buf *b, const struct sft_entry *entries, uint64_t count,
				 const struct str (*meta)[2], uint64_t meta_count, uint32_t align);
