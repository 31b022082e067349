/* delta_code.h: what a delta stores of a tensor: how its bytes differ from the base's, compressed, in one zstd frame that states its size.
 *
 *   xor         the bytes of both, xor'ed: as many as the tensor has, most of them zeros
 *   overwrite   u32 count, count u32 positions of bytes, ascending, count new bytes (little-endian)
 *
 * Both ways work on blocks of the tensor, one after the other, in memory that depends on neither tensor nor frame. The count and the
 * positions of an overwrite stand in front of its values, so that the tensor is passed over three times (to count, for positions, for
 * values), and two decoders read the same frame: one gives positions, the other one values. */
#pragma once
#include "base/err.h"
#include "spec/fields.h"

enum { DELTA_OVERWRITE_SHIFT = 32 };   /* an overwrite is of at most 2^32 bytes: positions have 32 bits */

/* How many of the bytes differ. */
uint64_t delta_count(const unsigned char *base, const unsigned char *now, size_t n);
/* The most that the frame of a tensor of so many bytes has. ERR_LIMIT_EXCEEDED. */
FALLIBLE enum err delta_bound(enum delta_encoding encoding, uint64_t bytes, uint64_t *out);

/* Memory that is filled piece by piece. */
struct delta_out {
	unsigned char *p;
	size_t n, cap;
};

struct delta_encoder;
FALLIBLE enum err delta_encoder_new(struct delta_encoder **out);
void delta_encoder_free(struct delta_encoder *e);
/* Begins the frame of a tensor. changed: of an overwrite, how many bytes differ. */
FALLIBLE enum err delta_encode_begin(struct delta_encoder *e, enum delta_encoding encoding, uint64_t bytes, uint64_t changed);
/* Takes a block of a pass (0; of an overwrite 0: positions, then 1: values), which is at `at` in the tensor. *more_out: `to` is full; call
 * again with the same block and room. */
FALLIBLE enum err delta_encode(struct delta_encoder *e, unsigned pass, uint64_t at, const unsigned char *base, const unsigned char *now,
			       size_t n, struct delta_out *to, bool *more_out);
FALLIBLE enum err delta_encode_end(struct delta_encoder *e, struct delta_out *to, bool *more_out);

/* A frame's fault. It is no error at once: on another base all of it may be in order. */
enum delta_fault {
	DELTA_FINE,
	DELTA_ZSTD,                    /* zstd's own error */
	DELTA_WINDOW,                  /* the frame needs more memory than any reader must have (8 MiB, RFC 8878) */
	DELTA_SHORT, DELTA_LONG,       /* it gives fewer or more bytes than it must */
	DELTA_TRAILING,                /* bytes behind the frame */
	DELTA_COUNT,                   /* of positions: more than the tensor has bytes */
	DELTA_POSITION,                /* not ascending, or outside of the tensor */
	DELTA_CHECKSUM,                /* set by the caller: the new bytes are others than the delta says */
};
/* code: zstd's of DELTA_ZSTD. */
const char *delta_fault_text(enum delta_fault fault, unsigned code);

enum { DELTA_INPUT = 128 << 10, DELTA_CURSORS = 2 };

/* The place of a decoder in the stored frame. */
struct delta_cursor {
	void *zstd;
	unsigned char *input;          /* DELTA_INPUT bytes */
	size_t at, n;
	uint64_t taken;                /* of the frame, by `input` */
	bool done;
};

struct delta_decoder {
	struct delta_cursor cursors[DELTA_CURSORS];
	enum delta_encoding encoding;
	uint64_t bytes, blob_bytes;    /* of the tensor, of the frame */
	enum delta_fault fault;
	unsigned fault_code;
	unsigned char *room;           /* a piece of the decompressed frame */
	struct { size_t at, n; } pieces[DELTA_CURSORS];
	uint64_t count, positions, values, skip; /* of an overwrite: in all; given so far; bytes in front of the values */
	bool has_count, has_position;
	uint32_t position, value_of;   /* the next position */
	size_t filled;                 /* of the block */
};

/* The caller frees *d (delta_decoder_free), after an error too. Input buffers may be read into while a cursor wants input. */
FALLIBLE enum err delta_decoder_open(struct delta_decoder *d);
void delta_decoder_free(struct delta_decoder *d);
void delta_decode_begin(struct delta_decoder *d, enum delta_encoding encoding, uint64_t bytes, uint64_t blob_bytes);
/* Does the i-th cursor want input now? Then its next bytes are those from `taken` on: so many go to `input` (delta_took). */
size_t delta_wants(const struct delta_decoder *d, unsigned cursor);
void delta_took(struct delta_decoder *d, unsigned cursor, size_t n);
/* Makes the base's block, which begins at `at` in the tensor, the new one. *more_out: a cursor wants input first; call again with the same
 * block. A fault ends it: the block is of no use then. */
void delta_decode(struct delta_decoder *d, uint64_t at, unsigned char *block, size_t n, bool *more_out);
/* After the last block: is the frame at its end, too? */
void delta_decode_end(struct delta_decoder *d, bool *more_out);
