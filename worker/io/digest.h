/* digest.h: CRC32 (the zip's) and XXH3-128 (ours) of a block while it is hot in cache. CRC32 by ISA-L, combined by zlib's rule;
 * XXH3 by xxHash, both with the widest vectors that the CPU has. Segments may shrink: call them inside seg_guard (os/seg.h). */
#pragma once
#include <stddef.h>
#include <stdint.h>

struct digest {
	unsigned char xxh3_128[16];      /* canonical (big-endian) form */
	uint32_t crc32;
};

/* Of one block of a payload. */
struct block_digest {
	uint64_t end;                    /* in the payload; the block begins where the one before ends */
	unsigned char xxh3_128[16];
};

/* Both over the same bytes in one pass over pieces that fit the L2 cache. */
void digest_block(const void *p, size_t n, struct digest *out);
/* The same; `also` gets each piece after them, while it is in the cache. */
typedef void (*digest_also_fn)(void *user, const void *p, size_t n);
void digest_block_also(const void *p, size_t n, struct digest *out, digest_also_fn also, void *user);

/* The same for bytes that come in pieces. */
enum { DIGEST_CRC32 = 1, DIGEST_XXH3 = 2, DIGEST_BOTH = 3 };
struct digest_stream {
	_Alignas(64) unsigned char xxh[576];
	uint32_t crc32;
	unsigned which;
};
void digest_begin(struct digest_stream *s);
void digest_begin_one(struct digest_stream *s, unsigned which);  /* a checker needs only the one that was stored */
void digest_add(struct digest_stream *s, const void *p, size_t n);
void digest_end(struct digest_stream *s, struct digest *out);

/* Either digest alone. */
void digest_xxh3(const void *p, size_t n, unsigned char xxh3_128_out[16]);
uint32_t digest_crc32(uint32_t before, const void *p, size_t n);       /* continues; 0 to begin */
uint32_t digest_crc32_combine(uint32_t a, uint32_t b, uint64_t b_bytes);
/* The same for many ranges of one length: a number for `bytes` behind a range (dear), and the range's CRC32 with so many zeros behind it.
 * The CRC32 of a whole is the exclusive or of its ranges' CRC32s, each with as many zeros behind it as the whole has bytes there (zlib). */
uint32_t digest_crc32_behind(uint64_t bytes);
uint32_t digest_crc32_move(uint32_t crc32, uint32_t behind);
void digest_hex(const unsigned char xxh3_128[16], char hex_out[33]);
