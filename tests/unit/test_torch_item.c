/* test_torch_item.c: items written, read, cut and damaged. What PyTorch writes is in tests/interop/test_items.py. */
#include "lib/t.h"

#include <string.h>

#include <isa-l/crc.h>

#include "base/mem.h"
#include "format/torch_item.h"
#include "format/zip.h"

enum { MAX = 1 << 22 };

/* A whole item of counting bytes. */
static struct buf item(enum dtype dtype, uint32_t ndim, const int64_t *sizes, uint32_t align)
{
	struct buf b = BUF_INIT(MAX), payload = BUF_INIT(MAX);
	struct item_layout l;

	T_OK(item_layout_tensor(dtype, ndim, sizes, align, &l));
	for (uint64_t i = 0; i < l.payload_bytes; i++)
		buf_putc(&payload, (unsigned char)(i * 7));
	uint32_t crc = crc32_gzip_refl(0, payload.p, payload.len);
	T_OK(item_put_head(&b, dtype, ndim, sizes, align, crc));
	assert_int_equal(b.len, l.payload_off);
	buf_put(&b, payload.p, payload.len);
	buf_fill(&b, 0, l.tail_off - b.len);
	T_OK(item_put_tail(&b, dtype, ndim, sizes, align, crc));
	assert_int_equal(b.len, l.length);
	buf_free(&payload);
	return b;
}

static FALLIBLE enum err read_tensor(const void *p, size_t n, struct item_tensor *t)
{
	struct str bytes = { p, n };
	struct item_source src = source_memory(&bytes);

	return item_read_tensor(&src, t);
}

static FALLIBLE enum err check_crc(const struct buf *b, bool skip, uint64_t *checked, uint64_t *unknown)
{
	struct str bytes = { (char *)b->p, b->len };
	struct item_source src = source_memory(&bytes);

	return item_check_crc(&src, skip, checked, unknown);
}

static void written_is_read(void **state)
{
	static const int64_t sizes[] = { 3, 5, 7, 1, 2 };

	(void)state;
	for (unsigned d = 0; d < DT_COUNT; d++) {
		for (uint32_t ndim = 0; ndim <= 5; ndim++) {
			for (uint32_t align = 64; align <= 4096; align *= 64) {
				CLEANUP(buf_free) struct buf b = item((enum dtype)d, ndim, sizes, align);
				struct item_tensor t;
				uint64_t checked, unknown;
				T_OK(read_tensor(b.p, b.len, &t));
				assert_int_equal(t.dtype, d);
				assert_int_equal(t.ndim, ndim);
				assert_memory_equal(t.sizes, sizes, ndim * sizeof *sizes);
				assert_int_equal(t.payload_off % align, 0);
				assert_true(t.c_order && t.crc_known && !t.deflated && !t.conj && !t.big_endian);
				assert_int_equal(b.p[t.payload_off + (t.payload_bytes > 1)], t.payload_bytes > 1 ? 7 : 0);
				T_OK(check_crc(&b, false, &checked, &unknown));
				assert_int_equal(checked, 4);
				assert_int_equal(unknown, 0);
				b.p[t.payload_off] ^= 1;
				T_OK(check_crc(&b, true, &checked, &unknown));
				T_ERR(DIGEST_MISMATCH, check_crc(&b, false, &checked, &unknown));
			}
		}
	}
}

static void large_items_have_zeros_before_the_tail(void **state)
{
	static const int64_t sizes[] = { 5000 };
	struct item_layout l;

	(void)state;
	T_OK(item_layout_tensor(DT_UINT8, 1, sizes, 4096, &l));
	assert_int_equal(l.payload_off, 4096);
	assert_int_equal(l.tail_off, 12288);
	T_OK(item_layout_tensor(DT_UINT8, 1, sizes, 64, &l));
	assert_int_equal(l.tail_off, l.payload_off + 5000);
}

static void layouts_that_do_not_fit(void **state)
{
	static const int64_t huge[] = { INT64_MAX, 2 }, wide[] = { INT64_MAX / 2 + 1 }, empty[] = { 0, INT64_MAX, INT64_MAX };
	static const int64_t big[] = { 1ll << 40 };
	struct item_layout l;

	(void)state;
	T_ERR(LIMIT_EXCEEDED, item_layout_tensor(DT_UINT8, 2, huge, 64, &l));
	T_ERR(LIMIT_EXCEEDED, item_layout_tensor(DT_COMPLEX128, 1, wide, 64, &l));
	T_ERR(LIMIT_EXCEEDED, item_layout_tensor(DT_FLOAT32, 3, empty, 64, &l));
	T_OK(item_layout_tensor(DT_FLOAT64, 1, big, 4096, &l));
	assert_int_equal(l.payload_bytes, 8ull << 40);
}

static void every_truncation_fails(void **state)
{
	static const int64_t sizes[] = { 4, 3 };
	CLEANUP(buf_free) struct buf b = item(DT_FLOAT32, 2, sizes, 64);
	struct item_tensor t;

	(void)state;
	for (size_t n = 0; n < b.len; n++) {
		enum err e = read_tensor(b.p, n, &t);
		assert_true(e == ERR_FORMAT_ZIP || e == ERR_FORMAT_ITEM);
	}
}

/* Whatever a damaged item says: what is returned lies inside the item. */
static void every_flipped_byte_is_survived(void **state)
{
	static const int64_t sizes[] = { 4, 3 };
	CLEANUP(buf_free) struct buf b = item(DT_UINT16, 2, sizes, 64);

	(void)state;
	for (size_t i = 0; i < b.len; i++) {
		for (unsigned v = 0; v < 256; v += 5) {
			unsigned char was = b.p[i];
			struct item_tensor t;
			b.p[i] = (unsigned char)v;
			if (read_tensor(b.p, b.len, &t) == OK)
				assert_true(t.payload_off + t.stored_bytes <= b.len);
			b.p[i] = was;
		}
	}
}

/* An archive around a data.pkl, with a storage record of n bytes. */
static struct buf archive(const char *pickle, size_t pickle_n, size_t n, const char *version, const char *order)
{
	struct buf b = BUF_INIT(MAX);
	struct zip_writer w = { 0 };

	zip_put_local(&w, &b, b.len, "x/data.pkl", pickle_n, 0, 1);
	buf_put(&b, pickle, pickle_n);
	zip_put_local(&w, &b, b.len, "x/data/0", n, 0, 64);
	buf_fill(&b, 1, n);
	if (version) {
		zip_put_local(&w, &b, b.len, "x/version", strlen(version), 0, 1);
		buf_puts(&b, version);
	}
	if (order) {
		zip_put_local(&w, &b, b.len, "x/byteorder", strlen(order), 0, 1);
		buf_puts(&b, order);
	}
	zip_put_tail(&w, &b, b.len);
	return b;
}

/* data.pkl in protocol 2, by its parts. */
static struct buf tensor_pickle(const char *cls, const char *count, struct str rest)
{
	struct buf b = BUF_INIT(MAX);
	static const char *const texts[] = { "storage", "0", "cpu" };

	buf_puts(&b, "\x80\x02" "ctorch._utils\n_rebuild_tensor_v2\n((");
	for (int i = 0; i < 3; i++) {
		buf_putc(&b, 'X');
		buf_le32(&b, (uint32_t)strlen(texts[i]));
		buf_puts(&b, texts[i]);
		if (i == 0)
			buf_puts(&b, cls);
	}
	buf_puts(&b, count);
	buf_puts(&b, "tQ");
	buf_put(&b, rest.p, rest.n);
	return b;
}

#define HOOKS "\x89" "ccollections\nOrderedDict\n)R"
#define RAW(literal) { literal, sizeof(literal) - 1 }
#define FLOAT "ctorch\nFloatStorage\n"

static enum err read_pickled(const char *cls, const char *count, struct str rest, size_t n, struct item_tensor *t)
{
	CLEANUP(buf_free) struct buf p = tensor_pickle(cls, count, rest);
	CLEANUP(buf_free) struct buf b = archive((char *)p.p, p.len, n, "3", NULL);

	return read_tensor(b.p, b.len, t);
}

static void what_pickles_say_is_checked(void **state)
{
	struct item_tensor t;

	(void)state;
	T_ERR(FORMAT_PICKLE, read_pickled(FLOAT, "K\14", STR(""), 48, &t));
	T_OK(read_pickled(FLOAT, "K\14", STR("K\1K\2K\3\x86K\4K\1\x86" HOOKS "tR."), 48, &t));
	assert_int_equal(t.storage_offset, 1);
	assert_int_equal(t.strides[0], 4);
	assert_false(t.c_order);
	T_OK(read_pickled(FLOAT, "K\14", STR("K\0K\4K\3\x86K\1K\4\x86" HOOKS "tR."), 48, &t));
	assert_false(t.c_order); /* transposed */
	T_OK(read_pickled(FLOAT, "K\14", STR("K\0K\1K\3\x86K\x09K\1\x86" HOOKS "tR."), 48, &t));
	assert_true(t.c_order); /* the stride of a dim of 1 says nothing */
	static const struct { const char *cls, *count; struct str rest; enum err code; } bad[] = {
		{ FLOAT, "K\14", RAW("K\1K\4K\3\x86K\3K\1\x86" HOOKS "tR."), ERR_FORMAT_ITEM },   /* one element too far */
		{ FLOAT, "K\15", RAW("K\0K\4K\3\x86K\3K\1\x86" HOOKS "tR."), ERR_FORMAT_ITEM },   /* record of another size */
		{ FLOAT, "K\14", RAW("J\377\377\377\377K\4K\3\x86K\3K\1\x86" HOOKS "tR."), ERR_FORMAT_ITEM },
		{ FLOAT, "K\14", RAW("K\1J\377\377\377\377K\3\x86K\3K\1\x86" HOOKS "tR."), ERR_FORMAT_ITEM },
		{ FLOAT, "K\14", RAW("K\1K\2K\3\x86J\377\377\377\377K\1\x86" HOOKS "tR."), ERR_FORMAT_ITEM },
		{ FLOAT, "K\14", RAW("K\0K\4K\3\x86K\1\x85" HOOKS "tR."), ERR_FORMAT_ITEM },        /* sizes and strides differ */
		{ FLOAT, "K\14", RAW("K\0K\4K\1K\1\x86" HOOKS "tR."), ERR_FORMAT_ITEM },            /* size is an int */
		{ "ctorch\nQInt8Storage\n", "K\14", RAW("K\0K\4\x85K\1\x85" HOOKS "tR."), ERR_DTYPE_UNSUPPORTED },
		{ "cos\nFloatStorage\n", "K\14", RAW("K\0K\4\x85K\1\x85" HOOKS "tR."), ERR_FORMAT_ITEM },
		{ FLOAT, "K\14", RAW("K\0\x8a\7\377\377\377\377\377\377\177\x8a\7\377\377\377\377\377\377\177\x86"
				     "K\1K\1\x86" HOOKS "tR."),
		  ERR_LIMIT_EXCEEDED },
		{ FLOAT, "K\14", RAW("K\0K\2\x85\x8a\x08\377\377\377\377\377\377\377\177\x85" HOOKS "tR."), ERR_LIMIT_EXCEEDED },
		{ FLOAT, "K\14", RAW("K\0K\4\x85K\1\x85" HOOKS "tRq"), ERR_FORMAT_PICKLE },
	};
	for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
		enum err e = read_pickled(bad[i].cls, bad[i].count, bad[i].rest, 48, &t);
		if (e != bad[i].code && !(bad[i].code == ERR_LIMIT_EXCEEDED && e == ERR_FORMAT_ITEM))
			T_FAIL("case %zu: %s %s", i, err_code_name(e), err_last()->text);
	}
}

static void version_and_byteorder(void **state)
{
	static const struct { const char *version, *order; enum err code; } cases[] = {
		{ "1", NULL, OK }, { "10\n", "little", OK }, { "3\n", "big", OK }, { NULL, NULL, ERR_FORMAT_ITEM },
		{ "0", NULL, ERR_FORMAT_ITEM }, { "11", NULL, ERR_FORMAT_ITEM }, { "x", NULL, ERR_FORMAT_ITEM },
		{ "3", "middle", ERR_FORMAT_ITEM },
	};
	CLEANUP(buf_free) struct buf p = tensor_pickle(FLOAT, "K\1", STR("K\0))" HOOKS "tR."));

	(void)state;
	for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
		CLEANUP(buf_free) struct buf b = archive((char *)p.p, p.len, 4, cases[i].version, cases[i].order);
		struct item_tensor t;
		assert_int_equal(read_tensor(b.p, b.len, &t), cases[i].code);
		if (cases[i].code == OK)
			assert_int_equal(t.big_endian, cases[i].order && cases[i].order[0] == 'b');
	}
}

static void value_is(const struct buf *b, enum item_value_kind kind, const char *text)
{
	struct str bytes = { (char *)b->p, b->len };
	struct item_source src = source_memory(&bytes);
	CLEANUP(item_value_free) struct item_value v = { 0 };

	T_OK(item_read_value(&src, &v));
	assert_int_equal(v.kind, kind);
	assert_int_equal(v.text.len, strlen(text));
	assert_memory_equal(v.text.p, text, v.text.len);
}

static void values_there_and_back(void **state)
{
	static const char *const same[] = { "null", "true", "0", "-1", "256", "9223372036854775807", "1.0", "-0.0", "0.1", "1e+300",
					    "\"x\\\"\\n\"", "[]", "{}", "[1,[2.0,{\"a\":null}]]", "{\"a\":1,\"b\":[false]}" };

	(void)state;
	for (size_t i = 0; i < sizeof same / sizeof *same; i++) {
		CLEANUP(buf_free) struct buf b = BUF_INIT(MAX);
		struct str json = str_of(same[i]);
		T_OK(item_put_value_json(&b, json));
		assert_true(item_is_archive(b.p, b.len));
		if (strchr(same[i], '\n') == NULL && same[i][0] == '"')
			value_is(&b, ITEM_VALUE_JSON, "\"x\\\"\\u000a\"");
		else
			value_is(&b, ITEM_VALUE_JSON, same[i]);
	}
	CLEANUP(buf_free) struct buf bytes = BUF_INIT(MAX), big = BUF_INIT(MAX), pickle = BUF_INIT(MAX), bad = BUF_INIT(MAX);
	T_OK(item_put_value_bytes(&bytes, "a\x80\xff", 3));
	value_is(&bytes, ITEM_VALUE_BYTES, "a\x80\xff");
	T_OK(item_put_value_json(&big, STR("-9223372036854775809")));
	value_is(&big, ITEM_VALUE_OPAQUE, "int");
	T_OK(item_put_value_pickle(&pickle, "\x80\x02K\1\x85.", 6));
	value_is(&pickle, ITEM_VALUE_OPAQUE, "tuple");
	T_ERR(FORMAT_IMAGE, item_put_value_json(&bad, STR("[1,")));
	T_ERR(FORMAT_IMAGE, item_put_value_json(&bad, STR("1e999")));
}

/* Lists of the list before, twice: 2^60 elements in 200 bytes. */
static void a_value_that_is_endless_as_text_stays_opaque(void **state)
{
	CLEANUP(buf_free) struct buf p = BUF_INIT(MAX), b = BUF_INIT(MAX);

	(void)state;
	buf_puts(&p, "\x80\x02]");
	for (int i = 0; i < 60; i++) { /* [x, x] with x from the memo */
		buf_putc(&p, 'q');
		buf_putc(&p, (unsigned char)i);
		buf_puts(&p, "0](h");
		buf_putc(&p, (unsigned char)i);
		buf_putc(&p, 'h');
		buf_putc(&p, (unsigned char)i);
		buf_putc(&p, 'e');
	}
	buf_putc(&p, '.');
	T_OK(item_put_value_pickle(&b, p.p, p.len));
	value_is(&b, ITEM_VALUE_OPAQUE, "list");
}

static void what_is_an_archive(void **state)
{
	static const unsigned char stream[] = { 0x80, 2, 0x8a, 10, 0x6c, 0xfc, 0x9c, 0x46, 0xf9, 0x20, 0x6a, 0xa8, 0x50, 0x19, 0x2e };
	CLEANUP(buf_free) struct buf b = BUF_INIT(MAX);

	(void)state;
	assert_true(item_is_archive(stream, sizeof stream));
	assert_false(item_is_archive(stream, sizeof stream - 1));
	assert_false(item_is_archive("PK\3\4", 4));
	assert_false(item_is_archive("", 0));
	T_OK(item_put_value_json(&b, STR("1")));
	assert_false(item_is_archive(b.p, b.len - 1));
	assert_false(item_is_archive(b.p + 1, b.len - 1));
}

static void running_out_of_memory(void **state)
{
	static const int64_t sizes[] = { 4, 3 };
	CLEANUP(buf_free) struct buf b = item(DT_FLOAT32, 2, sizes, 64);
	struct item_tensor t;

	(void)state;
	for (uint64_t n = 1; n < 60; n++) {
		mem_fail_at(n);
		enum err e = read_tensor(b.p, b.len, &t);
		mem_fail_at(0);
		assert_true(e == OK || e == ERR_NO_MEMORY);
	}
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(written_is_read),
		cmocka_unit_test(large_items_have_zeros_before_the_tail),
		cmocka_unit_test(layouts_that_do_not_fit),
		cmocka_unit_test(every_truncation_fails),
		cmocka_unit_test(every_flipped_byte_is_survived),
		cmocka_unit_test(what_pickles_say_is_checked),
		cmocka_unit_test(version_and_byteorder),
		cmocka_unit_test(values_there_and_back),
		cmocka_unit_test(a_value_that_is_endless_as_text_stays_opaque),
		cmocka_unit_test(what_is_an_archive),
		cmocka_unit_test(running_out_of_memory),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
