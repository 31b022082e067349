/* test_delta.c: frames of deltas in blocks of all sizes, frames that are damaged, the index of a delta, and the content digest. */
#include <zstd.h>

#include "format/delta.h"
#include "io/content.h"
#include "lib/t.h"

enum { BYTES = 300000 };

static unsigned char base[BYTES], now[BYTES], got[BYTES], blob[BYTES * 6];
static size_t blob_n;

/* Every `every`-th byte or so differs. */
static void fill(uint32_t seed, uint32_t every)
{
	for (size_t i = 0; i < BYTES; i++) {
		seed = seed * 1664525 + 1013904223;
		base[i] = (unsigned char)(seed >> 24);
		now[i] = base[i];
		if ((seed >> 8) % every == 0)
			now[i] ^= (unsigned char)(1 + seed % 255);
	}
}

static void flush(struct delta_out *to)
{
	memcpy(blob + blob_n, to->p, to->n);
	blob_n += to->n;
	to->n = 0;
}

/* In blocks of `block` bytes, by an output buffer of `room`. */
static void encode(enum delta_encoding encoding, size_t n, size_t block, size_t room)
{
	unsigned char out[4096];
	struct delta_out to = { out, 0, room };
	struct delta_encoder *e = NULL;
	bool more;

	blob_n = 0;
	assert_int_equal(delta_encoder_new(&e), OK);
	assert_int_equal(delta_encode_begin(e, encoding, n, delta_count(base, now, n)), OK);
	for (unsigned pass = 0; pass < (encoding == DELTA_XOR ? 1 : 2); pass++)
		for (size_t at = 0; at < n; at += block)
			do {
				size_t size = n - at < block ? n - at : block;
				assert_int_equal(delta_encode(e, pass, at, base + at, now + at, size, &to, &more), OK);
				if (more)
					flush(&to);
			} while (more);
	do {
		assert_int_equal(delta_encode_end(e, &to, &more), OK);
		flush(&to);
	} while (more);
	delta_encoder_free(e);
}

static void feed(struct delta_decoder *d, size_t piece)
{
	for (unsigned i = 0; i < DELTA_CURSORS; i++) {
		size_t want = delta_wants(d, i);
		want = want < piece ? want : piece;
		if (!want)
			continue;
		memcpy(d->cursors[i].input, blob + d->cursors[i].taken, want);
		delta_took(d, i, want);
	}
}

static enum delta_fault decode(enum delta_encoding encoding, size_t n, size_t block, size_t piece)
{
	struct delta_decoder d;
	bool more = false;

	memcpy(got, base, n);
	assert_int_equal(delta_decoder_open(&d), OK);
	delta_decode_begin(&d, encoding, n, blob_n);
	for (size_t at = 0; at < n && !d.fault; at += block)
		do {
			size_t size = n - at < block ? n - at : block;
			delta_decode(&d, at, got + at, size, &more);
			if (more)
				feed(&d, piece);
		} while (more);
	if (!d.fault)
		do {
			delta_decode_end(&d, &more);
			if (more)
				feed(&d, piece);
		} while (more);
	assert_non_null(delta_fault_text(d.fault, d.fault_code));
	delta_decoder_free(&d);
	return d.fault;
}

static void test_round_trips(void **state)
{
	static const uint32_t every[] = { 2, 50, 10000, UINT32_MAX };
	static const size_t sizes[] = { BYTES, 100000, 4097, 65, 64, 1 };

	(void)state;
	for (unsigned e = DELTA_XOR; e <= DELTA_OVERWRITE; e++)
		for (size_t i = 0; i < 4; i++)
			for (size_t k = 0; k < 6; k++) {
				uint64_t most;
				fill((uint32_t)(i + k), every[i]);
				encode((enum delta_encoding)e, sizes[k], 1000 + 7777 * k, 17 + 1000 * (k % 3));
				assert_int_equal(delta_bound((enum delta_encoding)e, sizes[k], &most), OK);
				assert_true(blob_n <= most);
				assert_int_equal(decode((enum delta_encoding)e, sizes[k], 3000 * k + 1, k % 2 ? 7 : DELTA_INPUT),
						 DELTA_FINE);
				assert_memory_equal(got, now, sizes[k]);
			}
}

/* The frame says how long it is: readers ask for it. */
static void test_frame(void **state)
{
	(void)state;
	fill(1, 100);
	encode(DELTA_XOR, 5000, 5000, 4096);
	assert_int_equal(ZSTD_getFrameContentSize(blob, blob_n), 5000);
	encode(DELTA_OVERWRITE, 5000, 600, 4096);
	assert_int_equal(ZSTD_getFrameContentSize(blob, blob_n), 4 + 5 * delta_count(base, now, 5000));
	assert_int_equal(ZSTD_findFrameCompressedSize(blob, blob_n), blob_n);
}

static void compress(const void *p, size_t n)
{
	blob_n = ZSTD_compress(blob, sizeof blob, p, n, 1);
	assert_false(ZSTD_isError(blob_n));
}

static void test_faults(void **state)
{
	static unsigned char zeros[BYTES];
	unsigned char over[64] = { 2, 0, 0, 0, 5, 0, 0, 0, 9, 0, 0, 0, 'a', 'b' };

	(void)state;
	fill(3, 20);
	for (unsigned e = DELTA_XOR; e <= DELTA_OVERWRITE; e++) {
		encode((enum delta_encoding)e, 20000, 20000, 4096);
		size_t whole = blob_n;
		for (size_t n = 0; n < whole; n += 1 + n / 7) {
			blob_n = n;
			assert_int_equal(decode((enum delta_encoding)e, 20000, 3000, 512), DELTA_SHORT);
		}
		blob[whole] = 0;
		blob_n = whole + 1;
		assert_int_equal(decode((enum delta_encoding)e, 20000, 3000, 512), DELTA_TRAILING);
		blob_n = whole;
		blob[0] ^= 1;
		assert_int_equal(decode((enum delta_encoding)e, 20000, 3000, 512), DELTA_ZSTD);
	}
	compress(zeros, 101);
	assert_int_equal(decode(DELTA_XOR, 100, 30, 8), DELTA_LONG);
	assert_int_equal(decode(DELTA_XOR, 102, 30, 8), DELTA_SHORT);
	compress(zeros, BYTES); /* a bomb: a thousand times its bytes */
	assert_int_equal(decode(DELTA_XOR, 10, 10, DELTA_INPUT), DELTA_LONG);
	compress(over, 14);
	assert_int_equal(decode(DELTA_OVERWRITE, 10, 6, 8), DELTA_FINE);
	assert_true(got[5] == 'a' && got[9] == 'b' && got[6] == base[6]);
	assert_int_equal(decode(DELTA_OVERWRITE, 9, 6, 8), DELTA_POSITION);
	compress(over, 15);
	assert_int_equal(decode(DELTA_OVERWRITE, 10, 6, 8), DELTA_LONG);
	compress(over, 13);
	assert_int_equal(decode(DELTA_OVERWRITE, 10, 6, 8), DELTA_SHORT);
	over[8] = 5; /* not behind the one before */
	compress(over, 14);
	assert_int_equal(decode(DELTA_OVERWRITE, 10, 6, 8), DELTA_POSITION);
	over[0] = 11;
	compress(over, 59);
	assert_int_equal(decode(DELTA_OVERWRITE, 10, 6, 8), DELTA_COUNT);
}

/* A frame may not ask for more memory than any reader must have. */
static void test_window(void **state)
{
	ZSTD_CCtx *z = ZSTD_createCCtx();
	ZSTD_inBuffer in = { base, 100, 0 };
	ZSTD_outBuffer out = { blob, sizeof blob, 0 };

	(void)state;
	ZSTD_CCtx_setParameter(z, ZSTD_c_windowLog, 27);
	assert_int_equal(ZSTD_compressStream2(z, &out, &in, ZSTD_e_flush), 0); /* its size is not known yet */
	assert_int_equal(ZSTD_compressStream2(z, &out, &in, ZSTD_e_end), 0);
	blob_n = out.pos;
	assert_int_equal(decode(DELTA_XOR, 100, 100, 100), DELTA_WINDOW);
	ZSTD_freeCCtx(z);
}

static void test_bound(void **state)
{
	uint64_t most;

	(void)state;
	assert_int_equal(delta_bound(DELTA_OVERWRITE, 1ull << 32, &most), OK);
	assert_int_equal(delta_bound(DELTA_OVERWRITE, (1ull << 32) + 1, &most), ERR_LIMIT_EXCEEDED);
	assert_int_equal(delta_bound(DELTA_XOR, UINT64_MAX, &most), ERR_LIMIT_EXCEEDED);
}

#define OTHER(checksum) \
	"{\"metadata\":{\"delta_encoding\":\"xor\",\"compression_format\":\"zstd\",\"checksum_format\":\"" checksum "\"}}"
#define META "\"delta_encoding\":\"xor\",\"compression_format\":\"zstd\",\"checksum_format\":\"adler32\""

#define VALUE(path) "{\"metadata\":{" META "},\"values\":{\"a\":{\"path\":" path "}}}"

static enum err read_index(const char *json, struct delta_index *out)
{
	struct arena *arena = arena_new(UINT64_MAX);
	enum err e = delta_index_read(str_of(json), arena, out);

	vec_free(&out->values);
	arena_free(arena);
	return e;
}

static void test_index(void **state)
{
	static const char *const bad[] = {
		VALUE("[\"a\"],\"archive\":\"?\""), VALUE("[-1],\"archive\":\"\""), VALUE("{},\"archive\":\"\""), VALUE("[\"a\"]"),
		VALUE("[\"a\"],\"archive\":7"), "{\"metadata\":{" META "},\"values\":[]}",
		"{\"values\":{},\"values\":{},\"metadata\":{" META "}}",
		"{}", "[]", "{\"metadata\":{}}", "{\"metadata\":{" META ",\"delta_encoding\":\"xor\"}}",
		"{\"metadata\":{" META ",\"version\":7}}",
		"{\"metadata\":{" META ",\"content_digest\":\"00\"}}", "{\"metadata\":{" META "}",
	};
	struct delta_index ix;
	struct delta_head head = { .encoding = DELTA_OVERWRITE, .version = 7, .base_version = 6, .base_content = { 0xAB } };
	CLEANUP(buf_free) struct buf b = BUF_INIT(4096);

	(void)state;
	assert_int_equal(read_index("{\"weight_map\":{},\"metadata\":{\"x\":[1,{}]," META ",\"version\":\"000007\"}}", &ix), OK);
	assert_true(ix.encoding == DELTA_XOR && ix.checksum == DELTA_ADLER32 && str_is(ix.version, "000007") && !ix.content.p);
	for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
		assert_int_equal(read_index(bad[i], &ix), ERR_FORMAT_SAFETENSORS);
	assert_int_equal(read_index(OTHER("blake3"), &ix), ERR_FORMAT_UNSUPPORTED);
	err_clear();
	buf_puts(&b, "{\"metadata\":{");
	delta_put_metadata(&b, &head);
	buf_puts(&b, "},\"weight_map\":{");
	assert_true(delta_index_is(b.p, b.len)); /* the text ends early */
	buf_puts(&b, "}}");
	assert_int_equal(buf_status(&b), OK);
	buf_put(&b, "", 1);
	assert_int_equal(read_index((const char *)b.p, &ix), OK);
	assert_true(ix.encoding == DELTA_OVERWRITE && str_is(ix.base_version, "000006") && ix.base_content.n == 32);
	assert_false(delta_index_is("{\"metadata\":{\"total_size\":1},\"weight_map\":{\"delta_encoding\":\"a\"}}", 65));
	assert_false(delta_index_is("{\"weight_map\":{}}", 17));
	assert_false(delta_index_is("", 0));
}

static void root_of(const struct sdict *sd, const unsigned char (*leaves)[16], char hex[33])
{
	unsigned char root[16];

	assert_int_equal(content_digest(sd, leaves, root), OK);
	digest_hex(root, hex);
}

/* The order of tensors says nothing; FQN, dtype, shape and bytes do. */
static void test_content(void **state)
{
	static const struct { const char *fqn; enum dtype dtype; int64_t shape[2]; unsigned char leaf; }
		other = { "b", DT_INT8, { 4, 1 }, 2 };
	static const struct { const char *fqn; enum dtype dtype; int64_t shape[2]; unsigned char leaf; bool last; } one[6] = {
		{ "a", DT_FLOAT32, { 2, 3 }, 1, false }, { "a", DT_FLOAT32, { 2, 3 }, 1, true }, { "c", DT_FLOAT32, { 2, 3 }, 1, false },
		{ "a", DT_INT32, { 2, 3 }, 1, false },   { "a", DT_FLOAT32, { 3, 2 }, 1, true }, { "a", DT_FLOAT32, { 2, 3 }, 3, false },
	};
	char roots[6][33];

	(void)state;
	for (size_t i = 0; i < 6; i++) {
		unsigned char leaves[2][16] = { { one[i].last ? other.leaf : one[i].leaf }, { one[i].last ? one[i].leaf : other.leaf } };
		struct sdict *sd = NULL;
		uint32_t index;
		assert_int_equal(sdict_new(UINT64_MAX, &sd), OK);
		for (size_t k = 0; k < 2; k++)
			if ((k == 1) == one[i].last)
				assert_int_equal(sdict_add_tensor(sd, str_of(one[i].fqn), one[i].dtype, 2, one[i].shape, &index), OK);
			else
				assert_int_equal(sdict_add_tensor(sd, str_of(other.fqn), other.dtype, 2, other.shape, &index), OK);
		root_of(sd, (const unsigned char(*)[16])leaves, roots[i]);
		sdict_free(sd);
	}
	assert_string_equal(roots[0], roots[1]);
	for (size_t i = 2; i < 6; i++)
		for (size_t k = 0; k < i; k++)
			assert_string_not_equal(roots[i], roots[k]);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_round_trips), cmocka_unit_test(test_frame), cmocka_unit_test(test_faults),
		cmocka_unit_test(test_window), cmocka_unit_test(test_bound), cmocka_unit_test(test_index), cmocka_unit_test(test_content),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
