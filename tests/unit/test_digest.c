/* test_digest.c: known values, pieces, and combining. */
#include "lib/t.h"

#include <string.h>
#include <xxhash.h>
#include <zlib.h>

#include "base/mem.h"
#include "io/copy.h"

static void assert_digest(const char *text, uint32_t crc, const char *hex)
{
	struct digest d;
	char got[33];

	digest_block(text, strlen(text), &d);
	digest_hex(d.xxh3_128, got);
	assert_string_equal(got, hex);
	assert_int_equal(d.crc32, crc);
}

static void test_known_values(void **state)
{
	(void)state;
	/* The check value of CRC-32/ISO-HDLC; the XXH3-128 of nothing, from the xxHash specification. */
	assert_digest("", 0, "99aa06d3014798d86001c324468d497f");
	assert_int_equal(digest_crc32(0, "123456789", 9), 0xCBF43926u);
	assert_digest("abc", 0x352441C2u, "06b05ab6733a618578af5f94892f3950");
}

/* Every length around the boundaries, at odd addresses, against the plain libraries. */
static void test_against_libraries(void **state)
{
	static const size_t lengths[] = { 1, 15, 16, 17, 128, 240, 241, 1000, 65535, 65536, 65537, 131072, 1 << 20, 3333333 };
	unsigned char *bytes = mem_alloc(3333340);
	uint64_t x = 88172645463325252ull;

	(void)state;
	for (size_t i = 0; i < 3333340; i++) {
		x ^= x << 13, x ^= x >> 7, x ^= x << 17;
		bytes[i] = (unsigned char)x;
	}
	for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++)
		for (size_t odd = 0; odd < 4; odd += 3) {
			struct digest d, s;
			struct digest_stream stream;
			XXH128_canonical_t want;
			size_t n = lengths[i], cut = n / 3;
			digest_block(bytes + odd, n, &d);
			XXH128_canonicalFromHash(&want, XXH3_128bits(bytes + odd, n));
			assert_memory_equal(d.xxh3_128, want.digest, 16);
			assert_int_equal(d.crc32, crc32(0, bytes + odd, (unsigned)n));
			digest_xxh3(bytes + odd, n, s.xxh3_128);
			assert_memory_equal(s.xxh3_128, d.xxh3_128, 16);
			digest_begin(&stream);
			digest_add(&stream, bytes + odd, cut);
			digest_add(&stream, bytes + odd + cut, n - cut);
			digest_end(&stream, &s);
			assert_memory_equal(&s, &d, sizeof d);
			uint32_t a = digest_crc32(0, bytes + odd, cut), b = digest_crc32(0, bytes + odd + cut, n - cut);
			assert_int_equal(digest_crc32_combine(a, b, n - cut), d.crc32);
			assert_int_equal(digest_crc32(a, bytes + odd + cut, n - cut), d.crc32);
			assert_int_equal(digest_crc32_move(a, digest_crc32_behind(n - cut)) ^ b, d.crc32);
			bytes[odd + n / 2] ^= 1;
			digest_block(bytes + odd, n, &s);
			assert_memory_not_equal(s.xxh3_128, d.xxh3_128, 16);
			assert_int_not_equal(s.crc32, d.crc32);
		}
	mem_free(bytes);
}

/* More than 4 GiB may follow: the combination takes 64-bit lengths. */
static void test_combine_long(void **state)
{
	static unsigned char zeros[1 << 20];
	uint32_t whole = digest_crc32(0, "x", 1), tail = 0;

	(void)state;
	for (int i = 0; i < 4097; i++) {
		whole = digest_crc32(whole, zeros, sizeof zeros);
		tail = digest_crc32(tail, zeros, sizeof zeros);
	}
	assert_int_equal(digest_crc32_combine(digest_crc32(0, "x", 1), tail, 4097ull << 20), whole);
	assert_int_equal(digest_crc32_combine(whole, 0, 0), whole);
}

/* Copies of any length to and from any address have exactly the bytes, and the digests of what was written. */
static void test_copy_hashed(void **state)
{
	static const size_t lengths[] = { 0, 1, 15, 16, 63, 64, 65, 79, 80, 1000, 16383, 16384, 16385, 100000 };
	static unsigned char from[100100], to[100100], want[100100];

	(void)state;
	for (size_t i = 0; i < sizeof from; i++)
		from[i] = (unsigned char)(i * 2654435761u >> 11);
	for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++)
		for (unsigned k = 0; k < 64; k++) {
			size_t n = lengths[i], a = k % 8 * 9, b = k / 8 * 7;
			unsigned which = k % 4;
			struct digest_stream stream;
			struct digest got, plain;
			memset(to, 0xa5, sizeof to);
			memset(want, 0xa5, sizeof want);
			memcpy(want + b, from + a, n);
			digest_begin_one(&stream, which);
			copy_hashed(&stream, to + b, from + a, n);
			assert_memory_equal(to, want, sizeof to);
			digest_end(&stream, &got);
			digest_block(from + a, n, &plain);
			if (which & DIGEST_XXH3)
				assert_memory_equal(got.xxh3_128, plain.xxh3_128, sizeof plain.xxh3_128);
			if (which & DIGEST_CRC32)
				assert_int_equal(got.crc32, plain.crc32);
		}
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_known_values),
		cmocka_unit_test(test_against_libraries),
		cmocka_unit_test(test_combine_long), cmocka_unit_test(test_copy_hashed),
	};
	return cmocka_run_group_tests_name("digest", tests, NULL, NULL);
}
