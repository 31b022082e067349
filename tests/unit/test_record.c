/* Records: what is put is read; what is cut short, changed or of another form is refused with a reason, and never believed. */
#include "lib/t.h"

#include <string.h>

#include "base/jtext.h"
#include "base/jval.h"
#include "store/record.h"

static const char tail[] = ",\"job\":\"01J\",\"metadata\":{\"name\":\".metadata\",\"bytes\":55,"
			   "\"xxh3_128\":\"000102030405060708090a0b0c0d0e0f\",\"save_id\":\"s\"},\"files\":[";

static json_t *doc_of(const char *quoted)
{
	CLEANUP(buf_free) struct buf b = BUF_INIT(1 << 20);
	json_t *doc = NULL;

	for (const char *p = quoted; *p; p++)
		buf_putc(&b, *p == '\'' ? '"' : (unsigned char)*p);
	T_OK(jval_parse((struct str){ (char *)b.p, b.len }, &doc));
	return doc;
}

/* The front of a manifest that has this record. */
static void front_of(const char *quoted, struct buf *b)
{
	json_t *doc = doc_of(quoted);

	buf_puts(b, "{\"dcpd\":1");
	T_OK(record_put(b, doc));
	buf_puts(b, tail);
	T_OK(buf_status(b));
	json_decref(doc);
}

static enum err parse(struct buf *b, json_t **doc)
{
	struct record_metadata m = { .bytes = 1 };

	return record_parse((struct str){ (char *)b->p, b->len }, doc, &m);
}

static const char whole[] =
	"{'made_by':{'job':'01J','kind':'save','attempt':1,'version':'1','plan_digest':'000102030405060708090a0b0c0d0e0f','uid':0},"
	"'durable_at':'2026-11-23T07:20:00.120Z','generation':7,'labels':{'a':'b'},'metrics':{'loss':1.5,'n':3},"
	"'parents':[{'role':'source','storage':'main','name':'a/b','job':'01K'}],'bytes_shared':5,"
	"'content_digest':'000102030405060708090a0b0c0d0e0f'}";

static void test_round_trip(void **state)
{
	CLEANUP(buf_free) struct buf b = BUF_INIT(1 << 20);
	json_t *got = NULL, *want = doc_of(whole);
	struct record_metadata m = { 0 };

	(void)state;
	front_of(whole, &b);
	T_OK(record_parse((struct str){ (char *)b.p, b.len }, &got, &m));
	assert_true(json_equal(got, want));
	assert_string_equal(m.name, ".metadata");
	assert_string_equal(m.save_id, "s");
	assert_int_equal(m.bytes, 55);
	json_decref(got);
	json_decref(want);
}

/* A part of the front is no record, but for the last bytes, which tell nothing of it. */
static void test_cut_short(void **state)
{
	CLEANUP(buf_free) struct buf b = BUF_INIT(1 << 20);

	(void)state;
	front_of(whole, &b);
	for (size_t n = 0, all = b.len; n < all - 1; n++) {
		json_t *got = NULL;
		b.len = n;
		assert_int_not_equal(parse(&b, &got), OK);
		assert_null(got);
	}
}

static void test_one_byte_changed(void **state)
{
	CLEANUP(buf_free) struct buf b = BUF_INIT(1 << 20);
	size_t begin, end;

	(void)state;
	front_of(whole, &b);
	begin = (size_t)((unsigned char *)memmem(b.p, b.len, "\"record\":", 9) - b.p) + 9;
	end = (size_t)((unsigned char *)memmem(b.p, b.len, ",\"record_xxh3", 13) - b.p);
	for (size_t i = begin; i < end; i++) {
		json_t *got = NULL;
		b.p[i] ^= 1;
		assert_int_not_equal(parse(&b, &got), OK);
		b.p[i] ^= 1;
	}
}

/* Of the right digest, and of another form. */
static void test_wrong_forms(void **state)
{
	static const char *const wrong[] = {
		"{'made_by':[]}", "{'made_by':{'job':1}}", "{'made_by':{'attempt':-1}}", "{'made_by':{'attempt':1.5}}",
		"{'made_by':{'plan_digest':'00'}}", "{'generation':'7'}", "{'labels':{'a':1}}", "{'labels':[]}", "{'metrics':{'loss':'1'}}",
		"{'parents':{}}", "{'parents':[1]}", "{'parents':[{'name':{}}]}", "{'content_digest':'x'}", "{'bytes_shared':true}",
		"{'durable_at':'0123456789012345678901234567890123456789'}",
	};

	(void)state;
	for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
		CLEANUP(buf_free) struct buf b = BUF_INIT(1 << 20);
		json_t *got = NULL;
		front_of(wrong[i], &b);
		assert_int_not_equal(parse(&b, &got), OK);
		assert_null(got);
	}
}

static void test_members_of_a_newer_dcpd_are_left_out(void **state)
{
	CLEANUP(buf_free) struct buf b = BUF_INIT(1 << 20);
	json_t *got = NULL, *want = doc_of("{'generation':3,'made_by':{'job':'x'}}");

	(void)state;
	front_of("{'generation':3,'made_by':{'job':'x','mood':[1]},'weather':{'wind':4},'labels':null}", &b);
	T_OK(parse(&b, &got));
	assert_true(json_equal(got, want));
	json_decref(got);
	json_decref(want);
}

static void test_an_older_manifest_makes_one(void **state)
{
	CLEANUP(buf_free) struct buf b = BUF_INIT(1 << 20);
	json_t *got = NULL, *want = doc_of("{'made_by':{'job':'01J','kind':'save','attempt':2,'uid':5},'generation':7,"
					   "'durable_at':'2026-01-01T00:00:00Z'}");

	(void)state;
	buf_puts(&b, "{\"dcpd\":1,\"job\":\"01J\",\"created_at\":\"1999\",\"generation\":1,"
		     "\"attempt\":2,\"kind\":\"save\",\"created_at\":\"2026-01-01T00:00:00Z\",\"uid\":5,"
		     "\"generation\":7,\"world_size\":2,\"bytes\":9,\"metadata\":{\"name\":\".metadata\",\"bytes\":1,"
		     "\"xxh3_128\":\"000102030405060708090a0b0c0d0e0f\"},\"files\":[{\"name");
	T_OK(parse(&b, &got));
	assert_true(json_equal(got, want));
	json_decref(got);
	json_decref(want);
}

static void test_members_of_a_list(void **state)
{
	CLEANUP(buf_free) struct buf b = BUF_INIT(1 << 20);
	struct record r = { .doc = doc_of("{'generation':7,'metrics':{'loss':1.5}}"), .problem = "" };

	(void)state;
	T_OK(record_put_members(&b, &r, "run/best"));
	T_OK(record_put_members(&b, &r, "run/step-9"));
	buf_putc(&b, '\0');
	assert_string_equal((char *)b.p, ",\"step\":7,\"metrics\":{\"loss\":1.5},\"step\":9,\"metrics\":{\"loss\":1.5}");
	record_free(&r);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_round_trip), cmocka_unit_test(test_cut_short), cmocka_unit_test(test_one_byte_changed),
		cmocka_unit_test(test_wrong_forms), cmocka_unit_test(test_members_of_a_newer_dcpd_are_left_out),
		cmocka_unit_test(test_an_older_manifest_makes_one), cmocka_unit_test(test_members_of_a_list),
	};

	jtext_init();
	return cmocka_run_group_tests(tests, NULL, NULL);
}
