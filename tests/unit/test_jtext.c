/* test_jtext.c: JSON and text, and each allocation that either needs failing in its turn. */
#include "lib/t.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/buf.h"
#include "base/jtext.h"
#include "base/mem.h"

enum { LONG = 5000 };

/* A document whose tokens outgrow the reader's buffer many times: where one did not grow, jansson wrote beyond another. */
static struct str long_text(struct buf *b)
{
	buf_puts(b, "{\"numbers\":[1,-2.5,true,null],\"text\":\"");
	buf_fill(b, 'x', LONG);
	buf_puts(b, "\",\"");
	buf_fill(b, 'k', LONG);
	buf_puts(b, "\":{\"deep\":[{},[],\"\\u00e9\\n\"]}}");
	T_OK(buf_status(b));
	return (struct str){ (char *)b->p, b->len };
}

static void test_parse_without_memory(void **state)
{
	CLEANUP(buf_free) struct buf b = BUF_INIT(1 << 20);
	struct str text = long_text(&b);
	size_t failed = 0;
	json_t *doc, *good;

	(void)state;
	T_OK(jtext_parse(text, JSON_REJECT_DUPLICATES, &good));
	for (uint64_t nth = 1;; nth++) {
		mem_fail_at(nth);
		enum err e = jtext_parse(text, JSON_REJECT_DUPLICATES, &doc);
		mem_fail_at(0);
		if (!e) {
			assert_true(json_equal(doc, good));
			json_decref(doc);
			break;
		}
		assert_int_equal(e, ERR_NO_MEMORY);
		assert_null(doc);
		failed++;
	}
	assert_in_range(failed, 30, 1000);
	json_decref(good);
}

static void test_no_half_text(void **state)
{
	CLEANUP(buf_free) struct buf b = BUF_INIT(1 << 20);
	struct str text = long_text(&b);
	size_t failed = 0;
	json_t *doc;

	(void)state;
	T_OK(jtext_parse(text, 0, &doc));
	CLEANUP(mem_free_ptr) char *good = jtext_of(doc);
	assert_non_null(good);
	for (uint64_t nth = 1;; nth++) {
		mem_fail_at(nth);
		CLEANUP(mem_free_ptr) char *out = jtext_of(doc);
		mem_fail_at(0);
		if (!out) {
			failed++;
			continue;
		}
		assert_string_equal(out, good);
		break;
	}
	assert_true(failed > 2);
	assert_null(jtext_of(NULL));
	json_decref(doc);
}

static void test_bad_json(void **state)
{
	json_t *doc;

	(void)state;
	T_ERR(INVALID_JSON, jtext_parse(STR("{\"a\":\n  1,}"), 0, &doc));
	assert_null(doc);
	assert_non_null(strstr(err_last()->text, "line 2, column 5"));
	T_ERR(INVALID_JSON, jtext_parse(STR(""), 0, &doc));
	T_ERR(INVALID_JSON, jtext_parse((struct str){ 0 }, 0, &doc));
	T_ERR(INVALID_JSON, jtext_parse(STR("{\"a\":1,\"a\":2}"), JSON_REJECT_DUPLICATES, &doc));
	T_OK(jtext_parse(STR("7"), JSON_DECODE_ANY, &doc));
	assert_int_equal(json_integer_value(doc), 7);
	json_decref(doc);
}

/* Numbers read back the same, in as few digits as do; texts and structure as they were. */
static void test_written_as_read(void **state)
{
	static const char *const same[] = { "0.898", "0.1", "1.0", "-2.5e-09", "1e+22", "0.3333333333333333",
					    "1.7976931348623157e+308", "4.94065645841247e-324", "9007199254740993", "-9223372036854775808",
					    "\"a\\u0000\\\"\\\\\xC3\xA9\"", "[]", "{}", "[[],{\"\":null}]",
					    "{\"b\":1,\"a\":[true,false,0.2,3]}", "null" };

	(void)state;
	for (size_t i = 0; i < sizeof same / sizeof *same; i++) {
		CLEANUP(json_decrefp) json_t *doc = NULL;
		T_OK(jtext_parse(str_of(same[i]), JSON_DECODE_ANY | JSON_ALLOW_NUL, &doc));
		CLEANUP(mem_free_ptr) char *text = jtext_of(doc);
		assert_string_equal(text, same[i]);
	}
	uint64_t bits = 88172645463325252;
	for (int i = 0; i < 20000; i++) {
		CLEANUP(buf_free) struct buf b = BUF_INIT(64);
		double v;
		bits ^= bits << 13, bits ^= bits >> 7, bits ^= bits << 17;
		memcpy(&v, &bits, sizeof v);
		if (!isfinite(v))
			continue;
		jtext_put_double(&b, v);
		buf_putc(&b, '\0');
		assert_true(strtod((char *)b.p, NULL) == v);
	}
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_parse_without_memory),
		cmocka_unit_test(test_no_half_text),
		cmocka_unit_test(test_bad_json),
		cmocka_unit_test(test_written_as_read),
	};

	jtext_init();
	return cmocka_run_group_tests_name("jtext", tests, NULL, NULL);
}
