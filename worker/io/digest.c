/* digest.c: the two checksums of a block, in one pass over memory (see digest.h).
 *
 * The zip format wants CRC32; XXH3-128 is ours because 32 bits are too few to compare terabytes by. Each runs at about the
 * speed of memory, so the second one over the same piece should find it in the L2 cache. That works in one order only: ISA-L
 * reads with non-temporal prefetches, which pass L2 by, so XXH3 goes first and CRC32 finds what it left there. */
#include "io/digest.h"

#include <isa-l/crc.h>
#include <sodium.h>
#include <string.h>
/* The state's size, so that it can live in the caller's memory. */
#define XXH_STATIC_LINKING_ONLY
#if defined(__x86_64__)
#include <xxh_x86dispatch.h>
#else
#include <xxhash.h>
#endif
#include <zlib.h>

enum { PIECE_BYTES = 64 << 10 };

_Static_assert(sizeof(XXH3_state_t) <= sizeof((struct digest_stream){ 0 }.xxh), "digest_stream holds the state");

static XXH3_state_t *state_of(struct digest_stream *s)
{
	return (XXH3_state_t *)(void *)s->xxh;
}

void digest_begin(struct digest_stream *s)
{
	digest_begin_one(s, DIGEST_BOTH);
}

void digest_begin_one(struct digest_stream *s, unsigned which)
{
	s->crc32 = 0;
	s->which = which;
	memset(s->xxh, 0, sizeof s->xxh);
	(void)XXH3_128bits_reset(state_of(s));
}

void digest_add(struct digest_stream *s, const void *p, size_t n)
{
	const unsigned char *at = p;

	while (n > 0) {
		size_t piece = n < PIECE_BYTES ? n : PIECE_BYTES;
		if (s->which & DIGEST_XXH3)
			(void)XXH3_128bits_update(state_of(s), at, piece);
		if (s->which & DIGEST_CRC32)
			s->crc32 = digest_crc32(s->crc32, at, piece);
		at += piece;
		n -= piece;
	}
}

static void finish(XXH128_hash_t hash, uint32_t crc32, struct digest *out)
{
	XXH128_canonical_t canonical;

	XXH128_canonicalFromHash(&canonical, hash);
	memcpy(out->xxh3_128, canonical.digest, sizeof out->xxh3_128);
	out->crc32 = crc32;
}

void digest_end(struct digest_stream *s, struct digest *out)
{
	finish(XXH3_128bits_digest(state_of(s)), s->crc32, out);
}

void digest_block(const void *p, size_t n, struct digest *out)
{
	struct digest_stream s;

	if (n <= PIECE_BYTES) {
		XXH128_hash_t hash = XXH3_128bits(p, n);
		finish(hash, digest_crc32(0, p, n), out);
		return;
	}
	digest_begin(&s);
	digest_add(&s, p, n);
	digest_end(&s, out);
}

void digest_block_also(const void *p, size_t n, struct digest *out, digest_also_fn also, void *user)
{
	const unsigned char *at = p;
	struct digest_stream s;

	digest_begin(&s);
	while (n > 0) {
		size_t piece = n < PIECE_BYTES ? n : PIECE_BYTES;
		digest_add(&s, at, piece);
		also(user, at, piece);
		at += piece;
		n -= piece;
	}
	digest_end(&s, out);
}

void digest_xxh3(const void *p, size_t n, unsigned char xxh3_128_out[16])
{
	XXH128_canonical_t canonical;

	XXH128_canonicalFromHash(&canonical, XXH3_128bits(p, n));
	memcpy(xxh3_128_out, canonical.digest, sizeof canonical.digest);
}

uint32_t digest_crc32(uint32_t before, const void *p, size_t n)
{
	return n ? crc32_gzip_refl(before, p, n) : before;
}

uint32_t digest_crc32_combine(uint32_t a, uint32_t b, uint64_t b_bytes)
{
	return (uint32_t)crc32_combine(a, b, (z_off_t)b_bytes);
}

uint32_t digest_crc32_behind(uint64_t bytes)
{
	return (uint32_t)crc32_combine_gen((z_off_t)bytes);
}

uint32_t digest_crc32_move(uint32_t crc32, uint32_t behind)
{
	return (uint32_t)crc32_combine_op(crc32, 0, behind);
}

void digest_hex(const unsigned char xxh3_128[16], char hex_out[33])
{
	sodium_bin2hex(hex_out, 33, xxh3_128, 16);
}
