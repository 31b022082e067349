/* test_zip.c: the directory of an archive against damage of every kind, and what transform.h undoes. */
#include "lib/t.h"

#include <zlib.h>
#include <zstd.h>

#include <isa-l/crc.h>

#include "base/mem.h"
#include "format/source.h"
#include "format/transform.h"
#include "format/zip.h"

enum { MAX = 1 << 20 };

static void put_le(struct buf *b, size_t at, uint64_t v, int n)
{
	for (int i = 0; i < n; i++)
		b->p[at + (size_t)i] = (unsigned char)(v >> 8 * i);
}

static size_t find(const struct buf *b, const char *sig, size_t n, size_t from)
{
	for (size_t i = from; i + n <= b->len; i++)
		if (memcmp(b->p + i, sig, n) == 0)
			return i;
	return SIZE_MAX;
}

static size_t central(const struct buf *b, int k)
{
	size_t at = find(b, "PK\1\2", 4, 0);

	while (k-- > 0)
		at = find(b, "PK\1\2", 4, at + 4);
	assert_true(at != SIZE_MAX);
	return at;
}

static size_t end_at(const struct buf *b)
{
	return b->len - 22;
}

/* a/version "3\n", a/data.pkl "hello" */
static struct buf make(void)
{
	struct buf b = BUF_INIT(MAX);
	struct zip_writer w = { 0 };

	zip_put_local(&w, &b, 0, "a/version", 2, crc32_gzip_refl(0, (const unsigned char *)"3\n", 2), 1);
	buf_puts(&b, "3\n");
	zip_put_local(&w, &b, b.len, "a/data.pkl", 5, crc32_gzip_refl(0, (const unsigned char *)"hello", 5), 64);
	buf_puts(&b, "hello");
	zip_put_tail(&w, &b, b.len);
	T_OK(buf_status(&b));
	return b;
}

/* Opens, finds and reads everything that a reader would. */
static FALLIBLE enum err read_all(const struct buf *b)
{
	struct str bytes = { (char *)b->p, b->len };
	struct item_source src = source_memory(&bytes);
	struct zip *z CLEANUP(zip_free_ptr) = NULL;
	CLEANUP(buf_free) struct buf out = BUF_INIT(MAX);
	const struct zip_record *r;

	TRY(zip_open(&src, &z));
	for (uint64_t i = 0; i < z->count; i++)
		TRY(zip_check(z, &z->records[i]));
	TRY(zip_find(z, STR("data.pkl"), &r));
	if (!r)
		return ERR(NOT_FOUND, "no data.pkl");
	TRY(zip_read(z, r, MAX, &out));
	return out.len == 5 && memcmp(out.p, "hello", 5) == 0 ? OK : ERR(INTERNAL, "other bytes");
}

static void reads_a_record_without_bytes(void **state)
{
	CLEANUP(buf_free) struct buf b = BUF_INIT(MAX), none = BUF_INIT(MAX);
	struct zip_writer w = { 0 };
	struct zip *z CLEANUP(zip_free_ptr) = NULL;
	const struct zip_record *r;

	(void)state;
	zip_put_local(&w, &b, 0, "a/empty", 0, 0, 1);
	zip_put_tail(&w, &b, b.len);
	struct str bytes = { (char *)b.p, b.len };
	struct item_source src = source_memory(&bytes);
	T_OK(zip_open(&src, &z));
	T_OK(zip_find(z, STR("empty"), &r));
	T_OK(zip_read(z, r, MAX, &none));
	assert_int_equal(none.len, 0);
}

static void reads_what_it_wrote(void **state)
{
	CLEANUP(buf_free) struct buf b = make();
	struct str bytes = { (char *)b.p, b.len };
	struct item_source src = source_memory(&bytes);
	struct zip *z CLEANUP(zip_free_ptr) = NULL;
	CLEANUP(buf_free) struct buf out = BUF_INIT(MAX);
	const struct zip_record *r;
	uint64_t off;

	(void)state;
	T_OK(read_all(&b));
	T_OK(zip_open(&src, &z));
	assert_int_equal(z->count, 2);
	assert_true(str_is(z->prefix, "a/"));
	T_OK(zip_find(z, STR("data.pkl"), &r));
	T_OK(zip_locate(z, r, &off));
	assert_int_equal(off % 64, 0);
	assert_memory_equal(b.p + off, "hello", 5);
	T_ERR(LIMIT_EXCEEDED, zip_read(z, r, 4, &out));
	T_OK(zip_find(z, STR("nothing"), &r));
	assert_null(r);
}

static void junk_behind_is_a_comment(void **state)
{
	CLEANUP(buf_free) struct buf b = make();

	(void)state;
	buf_fill(&b, 'x', 2000); /* more than the first look */
	T_OK(read_all(&b));
	buf_fill(&b, 'x', 66000);
	T_ERR(FORMAT_ZIP, read_all(&b));
}

static void every_truncation_fails(void **state)
{
	CLEANUP(buf_free) struct buf b = make();
	size_t whole = b.len;

	(void)state;
	for (b.len = 0; b.len < whole; b.len++) {
		enum err e = read_all(&b);
		assert_true(e == ERR_FORMAT_ZIP || e == ERR_FORMAT_ITEM);
	}
}

/* No byte may crash it; most changes are found, those in names, dates and padding need not be. */
static void every_flipped_byte_is_survived(void **state)
{
	CLEANUP(buf_free) struct buf b = make();
	unsigned found = 0;

	(void)state;
	for (size_t i = 0; i < b.len; i++) {
		for (unsigned bit = 1; bit < 256; bit <<= 1) {
			b.p[i] ^= (unsigned char)bit;
			found += read_all(&b) != OK;
			b.p[i] ^= (unsigned char)bit;
		}
	}
	assert_true(found > b.len * 3);
	T_OK(read_all(&b));
}

static void lies_are_refused(void **state)
{
	static const struct { int record; size_t field; uint64_t value; int n; } lies[] = {
		{ 0, 8, 1, 2 },                  /* encrypted */
		{ 0, 10, 12, 2 },                /* bzip2 */
		{ 0, 20, 3, 4 },                 /* two sizes */
		{ 1, 34, 1, 2 },                 /* another disk */
		{ 0, 38, 0x10, 4 },              /* a directory */
		{ 1, 42, 0, 4 },                 /* both records at one place */
		{ 1, 42, 0xFFFFFFF0, 4 },        /* beyond the archive */
		{ 1, 28, 0xFFFF, 2 },            /* a name longer than the directory */
		{ 0, 42, 0xFFFFFFFF, 4 },        /* zip64 without its field */
	};

	(void)state;
	for (size_t i = 0; i < sizeof lies / sizeof *lies; i++) {
		CLEANUP(buf_free) struct buf b = make();
		put_le(&b, central(&b, lies[i].record) + lies[i].field, lies[i].value, lies[i].n);
		T_ERR(FORMAT_ZIP, read_all(&b));
	}
}

static void sizes_that_reach_into_the_next_record(void **state)
{
	CLEANUP(buf_free) struct buf b = make();

	(void)state;
	put_le(&b, central(&b, 0) + 20, 40, 4);
	put_le(&b, central(&b, 0) + 24, 40, 4);
	T_ERR(FORMAT_ZIP, read_all(&b));
	put_le(&b, central(&b, 0) + 20, 0xFFFFFF00, 4);
	put_le(&b, central(&b, 0) + 24, 0xFFFFFF00, 4);
	T_ERR(FORMAT_ZIP, read_all(&b));
}

static void end_record_lies(void **state)
{
	static const struct { size_t field; uint64_t value; int n; } lies[] = {
		{ 4, 1, 2 }, { 8, 1, 2 }, { 10, 3, 2 }, { 12, 0xFFFFFFF0, 4 }, { 16, 0xFFFFFFF0, 4 }, { 16, 0xFFFFFFFF, 4 },
		{ 10, 0xFFFF, 2 },
	};

	(void)state;
	for (size_t i = 0; i < sizeof lies / sizeof *lies; i++) {
		CLEANUP(buf_free) struct buf b = make();
		put_le(&b, end_at(&b) + lies[i].field, lies[i].value, lies[i].n);
		T_ERR(FORMAT_ZIP, read_all(&b));
	}
	CLEANUP(buf_free) struct buf b = make();
	put_le(&b, end_at(&b) + 8, 0, 4);
	T_ERR(FORMAT_ZIP, read_all(&b)); /* empty */
	put_le(&b, end_at(&b) + 8, 60000 | 60000u << 16, 4);
	T_ERR(FORMAT_ZIP, read_all(&b)); /* more records than fit */
}

static void a_wrong_crc_is_found_and_none_is_accepted(void **state)
{
	CLEANUP(buf_free) struct buf b = make();

	(void)state;
	put_le(&b, central(&b, 1) + 16, 0x12345678, 4);
	T_ERR(DIGEST_MISMATCH, read_all(&b));
	assert_string_equal(err_last()->expected, "12345678");
	assert_string_equal(err_last()->actual, "3610a686");
	put_le(&b, central(&b, 1) + 16, 0, 4);
	T_OK(read_all(&b));
}

static void names_twice_or_without_a_folder(void **state)
{
	CLEANUP(buf_free) struct buf b = BUF_INIT(MAX), c = BUF_INIT(MAX);
	struct zip_writer w = { 0 };

	(void)state;
	for (int i = 0; i < 2; i++) {
		zip_put_local(&w, &b, b.len, "a/data.pkl", 5, 0, 1);
		buf_puts(&b, "hello");
	}
	zip_put_tail(&w, &b, b.len);
	T_ERR(FORMAT_ZIP, read_all(&b));
	w = (struct zip_writer){ 0 };
	zip_put_local(&w, &c, 0, "data.pkl", 5, 0, 1);
	buf_puts(&c, "hello");
	zip_put_tail(&w, &c, c.len);
	T_ERR(FORMAT_ZIP, read_all(&c));
}

/* One deflated record; `claim` is the size that the directory claims. */
static struct buf make_deflated(const char *text, size_t n, uint64_t claim, size_t extra)
{
	struct buf b = BUF_INIT(MAX);
	unsigned char packed[4096];
	z_stream z = { 0 };
	struct zip_writer w = { 0 };

	assert_int_equal(deflateInit2(&z, 9, Z_DEFLATED, -15, 8, Z_DEFAULT_STRATEGY), Z_OK);
	z.next_in = (unsigned char *)(uintptr_t)text;
	z.avail_in = (uInt)n;
	z.next_out = packed;
	z.avail_out = sizeof packed;
	assert_int_equal(deflate(&z, Z_FINISH), Z_STREAM_END);
	size_t got = sizeof packed - z.avail_out + extra;
	deflateEnd(&z);
	zip_put_local(&w, &b, 0, "a/data.pkl", got, crc32_gzip_refl(0, (const unsigned char *)text, n), 1);
	put_le(&b, 8, 8, 2);
	buf_put(&b, packed, got);
	zip_put_tail(&w, &b, b.len);
	put_le(&b, central(&b, 0) + 10, 8, 2);
	put_le(&b, central(&b, 0) + 24, claim, 4);
	return b;
}

static void deflated_records(void **state)
{
	CLEANUP(buf_free) struct buf good = make_deflated("hello", 5, 5, 0), more = make_deflated("hello", 5, 6, 0);
	CLEANUP(buf_free) struct buf less = make_deflated("hello", 5, 4, 0), bomb = make_deflated("hello", 5, 1 << 20, 0);
	CLEANUP(buf_free) struct buf tail = make_deflated("hello", 5, 5, 3);

	(void)state;
	T_OK(read_all(&good));
	T_ERR(FORMAT_ZIP, read_all(&more));
	T_ERR(FORMAT_ZIP, read_all(&less));
	T_ERR(FORMAT_ZIP, read_all(&bomb));
	T_ERR(FORMAT_ZIP, read_all(&tail));
	for (size_t i = 40; i < central(&good, 0); i++) { /* damaged streams end, somehow */
		good.p[i] ^= 0x55;
		assert_true(read_all(&good) != OK);
		good.p[i] ^= 0x55;
	}
}

static void zip64_only_where_it_is_needed(void **state)
{
	CLEANUP(buf_free) struct buf b = BUF_INIT(MAX), tail = BUF_INIT(MAX);
	struct zip_writer w = { 0 };

	(void)state;
	zip_put_local(&w, &b, 0, "a/data/0", 0xFFFFFFFE, 0, 64);
	zip_put_tail(&w, &tail, 64 + 0xFFFFFFFEull);
	assert_true(find(&tail, "PK\6\6", 4, 0) != SIZE_MAX); /* the directory lies beyond 4 GiB … */
	assert_int_equal(b.p[28], 64 - 30 - 8); /* … but the record needs no wide field */
	tail.len = 0;
	w = (struct zip_writer){ 0 };
	zip_put_local(&w, &b, 0, "a/data/0", 5, 0, 64);
	zip_put_tail(&w, &tail, 64 + 5);
	assert_true(find(&tail, "PK\6\6", 4, 0) == SIZE_MAX);
}

/* A zip64 end record beside a classic one must say the same. */
static void end_records_that_disagree(void **state)
{
	CLEANUP(buf_free) struct buf b = make();
	size_t dir = central(&b, 0), n = end_at(&b) - dir;
	unsigned char end[22];

	(void)state;
	memcpy(end, b.p + end_at(&b), 22);
	b.len = end_at(&b);
	size_t at = b.len;
	buf_le32(&b, 0x06064b50);
	buf_le64(&b, 44);
	buf_le32(&b, 0);
	buf_le64(&b, 0);
	buf_le64(&b, 2);
	buf_le64(&b, 2);
	buf_le64(&b, n);
	buf_le64(&b, dir);
	buf_le32(&b, 0x07064b50);
	buf_le32(&b, 0);
	buf_le64(&b, at);
	buf_le32(&b, 1);
	buf_put(&b, end, 22);
	T_OK(read_all(&b));
	put_le(&b, end_at(&b) - 20, 0, 1); /* without its locator nothing would be compared with it */
	T_ERR(FORMAT_ZIP, read_all(&b));
	put_le(&b, end_at(&b) - 20, 'P', 1);
	put_le(&b, end_at(&b) + 10, 0xFFFFu << 16 | 0xFFFF, 4);
	put_le(&b, end_at(&b) + 8, 0xFFFF, 2);
	put_le(&b, end_at(&b) + 12, 0xFFFFFFFF, 4);
	put_le(&b, end_at(&b) + 16, 0xFFFFFFFF, 4);
	T_OK(read_all(&b)); /* saturated: the wide one counts */
	put_le(&b, end_at(&b) + 16, dir + 1, 4);
	T_ERR(FORMAT_ZIP, read_all(&b));
}

/* ------------------------------------------------------------------------------------------------------ transforms */

static FALLIBLE enum err undo(struct transform *t, struct str in, size_t in_step, size_t out_step, struct buf *out)
{
	char some[4096];
	size_t at = 0;
	struct str rest = { in.p, 0 };

	while (!transform_done(t)) {
		size_t had, n;
		if (rest.n == 0 && at < in.n) {
			rest = (struct str){ in.p + at, in.n - at < in_step ? in.n - at : in_step };
			at += rest.n;
		}
		had = rest.n;
		TRY(transform_feed(t, &rest, some, out_step, &n));
		buf_put(out, some, n);
		if (n == 0 && had == rest.n && at == in.n)
			TRY(transform_end(t));
	}
	return OK;
}

static void zstd_once_and_twice(void **state)
{
	static char text[300000], packed[400000], again[400000];

	(void)state;
	for (size_t i = 0; i < sizeof text; i++)
		text[i] = (char)(i * i >> 7);
	size_t n = ZSTD_compress(packed, sizeof packed, text, sizeof text, 3);
	size_t m = ZSTD_compress(again, sizeof again, packed, n, 3);
	static const size_t steps[][2] = { { 1, 4096 }, { 4096, 1 }, { 1000, 777 }, { 400000, 4096 } };
	for (size_t i = 0; i < 4; i++) {
		for (int twice = 0; twice < 2; twice++) {
			struct transform *t CLEANUP(transform_free_ptr) = NULL;
			CLEANUP(buf_free) struct buf out = BUF_INIT(MAX);
			T_OK(transform_new(twice ? STR("stream.zstd/1 stream.zstd") : STR("stream.zstd@torch/1.2"), &t));
			T_OK(undo(t, (struct str){ twice ? again : packed, twice ? m : n }, steps[i][0], steps[i][1],
				  &out));
			assert_int_equal(out.len, sizeof text);
			assert_memory_equal(out.p, text, sizeof text);
		}
	}
	for (size_t cut = 0; cut < n; cut += n / 37) {
		struct transform *t CLEANUP(transform_free_ptr) = NULL;
		CLEANUP(buf_free) struct buf out = BUF_INIT(MAX);
		T_OK(transform_new(STR("stream.zstd/1"), &t));
		T_ERR(FORMAT_TRANSFORM, undo(t, (struct str){ packed, cut }, 999, 999, &out));
	}
	packed[0] ^= 1;
	struct transform *t CLEANUP(transform_free_ptr) = NULL;
	CLEANUP(buf_free) struct buf out = BUF_INIT(MAX);
	T_OK(transform_new(STR("stream.zstd/1"), &t));
	T_ERR(FORMAT_TRANSFORM, undo(t, (struct str){ packed, n }, 999, 999, &out));
}

static void unknown_transforms(void **state)
{
	static const char *const names[] = { "", "stream.lz4/1", "stream.zstd/2", "stream.zstd/10", "zstd/1",
					     "stream.zstd/1 stream.x/1",
					     "stream.zstd stream.zstd stream.zstd stream.zstd stream.zstd" };

	(void)state;
	for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
		struct transform *t CLEANUP(transform_free_ptr) = NULL;
		T_ERR(FORMAT_TRANSFORM, transform_new(str_of(names[i]), &t));
		assert_null(t);
	}
}

static void running_out_of_memory(void **state)
{
	CLEANUP(buf_free) struct buf b = make();

	(void)state;
	for (uint64_t n = 1; n < 30; n++) {
		mem_fail_at(n);
		enum err e = read_all(&b);
		mem_fail_at(0);
		assert_true(e == OK || e == ERR_NO_MEMORY);
		if (n == 1)
			assert_int_equal(e, ERR_NO_MEMORY);
	}
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(reads_what_it_wrote),
		cmocka_unit_test(reads_a_record_without_bytes),
		cmocka_unit_test(junk_behind_is_a_comment),
		cmocka_unit_test(every_truncation_fails),
		cmocka_unit_test(every_flipped_byte_is_survived),
		cmocka_unit_test(lies_are_refused),
		cmocka_unit_test(sizes_that_reach_into_the_next_record),
		cmocka_unit_test(end_record_lies),
		cmocka_unit_test(a_wrong_crc_is_found_and_none_is_accepted),
		cmocka_unit_test(names_twice_or_without_a_folder),
		cmocka_unit_test(deflated_records),
		cmocka_unit_test(zip64_only_where_it_is_needed),
		cmocka_unit_test(end_records_that_disagree),
		cmocka_unit_test(zstd_once_and_twice),
		cmocka_unit_test(unknown_transforms),
		cmocka_unit_test(running_out_of_memory),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
