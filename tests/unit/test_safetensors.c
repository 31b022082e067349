/* test_safetensors.c: headers good and bad, and the JSON scanner beneath. */
#include "lib/t.h"

#include "base/mem.h"
#include "format/jscan.h"
#include "format/safetensors.h"

static FALLIBLE enum err parse(struct str json, uint64_t data_bytes, struct arena *a, struct sft *out)
{
	return sft_parse(json, 8 + json.n + data_bytes, a, out);
}

static enum err try_parse(const char *json, uint64_t data_bytes)
{
	struct arena *a CLEANUP(arena_free_ptr) = arena_new(1 << 20);
	struct sft s;

	return parse(str_of(json), data_bytes, a, &s);
}

#define T1 "\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]"

static void reads_a_header(void **state)
{
	struct arena *a CLEANUP(arena_free_ptr) = arena_new(1 << 20);
	struct sft s;

	(void)state;
	T_OK(parse(STR("{\"b\":{\"data_offsets\":[8,12],\"shape\":[2,2],\"dtype\":\"U8\"},\"__metadata__\":{\"k\":\"v\\n\"},"
		       "\"\\u0061\":{" T1 "},\"e\":{\"dtype\":\"I64\",\"shape\":[0,3],\"data_offsets\":[8,8]}}  \n"),
		   12, a, &s));
	assert_int_equal(s.entry_count, 3);
	assert_true(str_is(s.entries[0].name, "a") && str_is(s.entries[1].name, "e") && str_is(s.entries[2].name, "b"));
	assert_int_equal(s.entries[0].dtype, DT_FLOAT32);
	assert_int_equal(s.entries[2].ndim, 2);
	assert_int_equal(s.entries[2].shape[1], 2);
	assert_int_equal(s.meta_count, 1);
	assert_true(str_is(s.meta[0].value, "v\n"));
	assert_int_equal(s.data_bytes, 12);
	T_OK(try_parse("{}", 0));
	T_OK(try_parse("{\"s\":{\"dtype\":\"F64\",\"shape\":[],\"data_offsets\":[0,8]}}", 8));
}

/* Whatever address an escaped name has: pages of a list are made by several processes. */
static void empty_entries_have_one_order(void **state)
{
	static const char *const names[][3] = { { "z", "\\u0061", "m" }, { "\\u007a", "m", "a" }, { "m", "\\u0061", "\\u007a" } };
	static const char none[] = "{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]}";
	char json[512];

	(void)state;
	for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
		struct arena *a CLEANUP(arena_free_ptr) = arena_new(1 << 20);
		struct sft s;
		snprintf(json, sizeof json, "{\"%s\":%s,\"%s\":%s,\"%s\":%s}", names[i][0], none, names[i][1], none, names[i][2], none);
		T_OK(parse(str_of(json), 0, a, &s));
		assert_true(str_is(s.entries[0].name, "a") && str_is(s.entries[1].name, "m") && str_is(s.entries[2].name, "z"));
	}
}

static void refuses(void **state)
{
	static const struct { const char *json; uint64_t bytes; enum err code; } bad[] = {
		{ "{\"a\":{" T1 "}}", 7, ERR_FORMAT_SAFETENSORS },             /* beyond the file */
		{ "{\"a\":{" T1 "}}", 9, ERR_FORMAT_SAFETENSORS },             /* bytes that nobody owns */
		{ "{}", 1, ERR_FORMAT_SAFETENSORS },
		{ "{\"a\":{" T1 "},\"a\":{" T1 "}}", 8, ERR_FORMAT_SAFETENSORS },
		{ "{\"a\":{" T1 "},\"b\":{" T1 "}}", 8, ERR_FORMAT_SAFETENSORS },  /* overlap */
		{ "{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[1,2]}}", 2, ERR_FORMAT_SAFETENSORS }, /* hole */
		{ "{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[2,1]}}", 2, ERR_FORMAT_SAFETENSORS },
		{ "{\"a\":{\"dtype\":\"F32\",\"shape\":[3],\"data_offsets\":[0,8]}}", 8, ERR_FORMAT_SAFETENSORS },
		{ "{\"a\":{\"dtype\":\"U8\",\"shape\":[-1],\"data_offsets\":[0,0]}}", 0, ERR_FORMAT_SAFETENSORS },
		{ "{\"a\":{\"dtype\":\"U8\",\"shape\":[1.0],\"data_offsets\":[0,1]}}", 1, ERR_FORMAT_SAFETENSORS },
		{ "{\"a\":{\"dtype\":\"U8\",\"shape\":[4294967296,4294967296,4294967296],\"data_offsets\":[0,0]}}", 0,
		  ERR_LIMIT_EXCEEDED },
		{ "{\"a\":{\"dtype\":\"I64\",\"shape\":[2305843009213693952],\"data_offsets\":[0,0]}}", 0,
		  ERR_LIMIT_EXCEEDED },
		{ "{\"a\":{\"dtype\":\"F99\",\"shape\":[0],\"data_offsets\":[0,0]}}", 0, ERR_DTYPE_UNSUPPORTED },
		{ "{\"a\":{\"dtype\":\"U8\",\"shape\":[0]}}", 0, ERR_FORMAT_SAFETENSORS },
		{ "{\"a\":{" T1 ",\"x\":1}}", 8, ERR_FORMAT_SAFETENSORS },
		{ "{\"a\":{" T1 ",\"shape\":[2]}}", 8, ERR_FORMAT_SAFETENSORS },
		{ "{\"a\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0,0]}}", 0, ERR_FORMAT_SAFETENSORS },
		{ "{\"__metadata__\":{\"k\":1}}", 0, ERR_FORMAT_SAFETENSORS },
		{ "{\"__metadata__\":{\"k\":\"\",\"k\":\"\"}}", 0, ERR_FORMAT_SAFETENSORS },
		{ "{\"__metadata__\":{},\"__metadata__\":{}}", 0, ERR_FORMAT_SAFETENSORS },
		{ "{\"_\\u005fmetadata__\":{}}", 0, ERR_FORMAT_SAFETENSORS },
		{ " {}", 0, ERR_FORMAT_SAFETENSORS },
		{ "{} x", 0, ERR_FORMAT_SAFETENSORS },
		{ "[]", 0, ERR_FORMAT_SAFETENSORS },
		{ "{\"a\":[]}", 0, ERR_FORMAT_SAFETENSORS },
	};

	(void)state;
	for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
		enum err e = try_parse(bad[i].json, bad[i].bytes);
		if (e != bad[i].code)
			T_FAIL("%s: %s", bad[i].json, err_code_name(e));
	}
	assert_int_equal(try_parse("{\"model.w\":{" T1 "},\"b\":{" T1 "}}", 8), ERR_FORMAT_SAFETENSORS);
	err_clear();
	(void)!try_parse("{\"model.w\":{\"dtype\":\"F99\",\"shape\":[0],\"data_offsets\":[0,0]}}", 0);
	assert_string_equal(err_last()->fqn, "model.w");
}

static void every_truncation_fails(void **state)
{
	static const char json[] = "{\"__metadata__\":{\"k\":\"\\u00e9\"},\"a\":{" T1 "}}";

	(void)state;
	for (size_t n = 0; n < sizeof json - 1; n++) {
		struct arena *a CLEANUP(arena_free_ptr) = arena_new(1 << 20);
		struct sft s;
		assert_int_equal(parse((struct str){ json, n }, 8, a, &s), ERR_FORMAT_SAFETENSORS);
	}
}

static void header_length(void **state)
{
	unsigned char first[8] = { 2 };
	uint64_t n;

	(void)state;
	T_OK(sft_header_bytes(first, 10, &n));
	assert_int_equal(n, 2);
	T_ERR(FORMAT_SAFETENSORS, sft_header_bytes(first, 9, &n));
	T_ERR(FORMAT_SAFETENSORS, sft_header_bytes(first, 7, &n));
	first[0] = 1;
	T_ERR(FORMAT_SAFETENSORS, sft_header_bytes(first, 100, &n));
	first[7] = 0x80;
	T_ERR(FORMAT_SAFETENSORS, sft_header_bytes(first, UINT64_MAX, &n));
}

static void writes_what_it_reads(void **state)
{
	const int64_t shape[] = { 2, 3 }, none[] = { 0 };
	const struct sft_entry in[] = { { STR("a\"\n"), DT_BFLOAT16, 2, shape, 0, 12 }, { STR("b"), DT_BOOL, 1, none, 12, 12 } };
	const struct str meta[1][2] = { { STR("format"), STR("pt\\") } };

	(void)state;
	for (uint32_t align = 8; align <= 4096; align *= 512) {
		CLEANUP(buf_free) struct buf b = BUF_INIT(1 << 16);
		struct arena *a CLEANUP(arena_free_ptr) = arena_new(1 << 20);
		struct sft s;
		uint64_t json;
		buf_fill(&b, 'x', 3); /* the header need not be at the start of the buffer */
		T_OK(sft_put_header(&b, in, 2, meta, 1, align));
		assert_int_equal((b.len - 3) % align, 0);
		T_OK(sft_header_bytes(b.p + 3, b.len - 3 + 12, &json));
		T_OK(sft_parse((struct str){ (char *)b.p + 11, json }, b.len - 3 + 12, a, &s));
		assert_int_equal(s.entry_count, 2);
		assert_true(str_eq(s.entries[0].name, in[0].name) && s.entries[0].dtype == DT_BFLOAT16);
		assert_true(str_is(s.meta[0].value, "pt\\"));
		assert_int_equal(s.data_off % align, 0);
	}
}

static enum err scan(const char *text, size_t n)
{
	struct jscan js = jscan_of((struct str){ text, n }, ERR_FORMAT_IMAGE);
	struct jscan_token t;

	do
		TRY(jscan_next(&js, &t));
	while (t.kind != JSCAN_END);
	return OK;
}

static void json_good_and_bad(void **state)
{
	static const char *const good[] = { "null", " [1,-0,0.5e-7,1E+9,\"\",{}] ", "{\"a\":{\"b\":[true,false]},\"c\":[]}",
					    "\"\\ud83d\\ude00 \\ud800 \\u0000\"", "123456789012345678901234567890" };
	static const char *const bad[] = { "", " ", "nul", "nulll", "[1 2]", "[,]", "[1,]", "{,}", "{\"a\"}", "{\"a\":}",
					   "{\"a\":1,}", "{1:2}", "[}", "{]", "]", "01", "-", "+1", ".5", "1.", "1e", "NaN",
					   "Infinity", "\"\t\"", "\"\\x\"", "\"\\u12g4\"", "\"\\", "\"\xff\"", "\"\xed\xa0\x80\"",
					   "'a'", "[1]]", "1 1", "/**/1", "tru\0e", "\xef\xbb\xbf{}" };

	(void)state;
	for (size_t i = 0; i < sizeof good / sizeof *good; i++)
		T_OK(scan(good[i], strlen(good[i])));
	for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
		if (scan(bad[i], strlen(bad[i])) != ERR_FORMAT_IMAGE)
			T_FAIL("accepted: %s", bad[i]);
	char deep[2 * JSCAN_DEPTH_MAX + 2];
	memset(deep, '[', sizeof deep);
	memset(deep + JSCAN_DEPTH_MAX, ']', JSCAN_DEPTH_MAX);
	T_OK(scan(deep, 2 * JSCAN_DEPTH_MAX));
	memset(deep, '[', sizeof deep);
	T_ERR(FORMAT_IMAGE, scan(deep, sizeof deep));
}

static void numbers_and_strings(void **state)
{
	static const struct { const char *text; bool is_i64; int64_t i; double d; } numbers[] = {
		{ "9223372036854775807", true, INT64_MAX, 0x1p63 }, { "-9223372036854775808", true, INT64_MIN, -0x1p63 },
		{ "9223372036854775808", false, 0, 0x1p63 }, { "-0", true, 0, -0.0 }, { "1.0", false, 0, 1.0 },
		{ "1e2", false, 0, 100.0 },
	};
	struct arena *a CLEANUP(arena_free_ptr) = arena_new(1 << 16);
	struct jscan_token t;
	struct str s;
	double d;
	int64_t i;

	(void)state;
	for (size_t k = 0; k < sizeof numbers / sizeof *numbers; k++) {
		struct jscan js = jscan_of(str_of(numbers[k].text), ERR_FORMAT_IMAGE);
		T_OK(jscan_expect(&js, JSCAN_NUMBER, &t));
		assert_int_equal(jscan_i64(&t, &i), numbers[k].is_i64);
		assert_true(!numbers[k].is_i64 || i == numbers[k].i);
		assert_true(jscan_double(&t, &d) && d == numbers[k].d);
	}
	static const enum jscan_kind no_numbers[] = { JSCAN_ARRAY, JSCAN_OBJECT, JSCAN_END }; /* tokens without text */
	for (size_t k = 0; k < sizeof no_numbers / sizeof *no_numbers; k++) {
		t = (struct jscan_token){ .kind = no_numbers[k] };
		assert_false(jscan_i64(&t, &i) || jscan_double(&t, &d));
	}
	struct jscan js = jscan_of(STR("[\"\\ud83d\\ude00\\ud800x\\u0000\\/\",1e999]"), ERR_FORMAT_IMAGE);
	T_OK(jscan_next(&js, &t));
	T_OK(jscan_next(&js, &t));
	T_OK(jscan_str(&js, &t, a, &s));
	assert_int_equal(s.n, 10);
	assert_memory_equal(s.p, "\xf0\x9f\x98\x80\xed\xa0\x80x\0/", 10);
	T_OK(jscan_next(&js, &t));
	assert_false(jscan_double(&t, &d));
	CLEANUP(buf_free) struct buf b = BUF_INIT(1000);
	T_OK(jscan_put_str(&b, s));
	buf_putc(&b, 0);
	assert_string_equal((char *)b.p, "\"\xf0\x9f\x98\x80\\ud800x\\u0000/\"");
	T_ERR(FORMAT_IMAGE, jscan_put_str(&b, STR("\xff")));
	static const double doubles[] = { 0.1, 1.0, -0.0, 5e-324, 1e300, 1.0 / 3.0, 123456789.125 };
	for (size_t k = 0; k < sizeof doubles / sizeof *doubles; k++) {
		b.len = 0;
		jscan_put_double(&b, doubles[k]);
		buf_putc(&b, 0);
		assert_true(strtod((char *)b.p, NULL) == doubles[k] && strpbrk((char *)b.p, ".e"));
	}
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(reads_a_header),
		cmocka_unit_test(empty_entries_have_one_order),
		cmocka_unit_test(refuses),
		cmocka_unit_test(every_truncation_fails),
		cmocka_unit_test(header_length),
		cmocka_unit_test(writes_what_it_reads),
		cmocka_unit_test(json_good_and_bad),
		cmocka_unit_test(numbers_and_strings),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
