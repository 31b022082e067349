/* test_image_part.c: the values of an image are found where they are written, whatever is around them, and read again alone. */
#include "lib/t.h"

#include <string.h>

#include "base/mem.h"
#include "format/image.h"

struct fixture {
	struct buf header;
	struct image *im;
	uint64_t begin, end;
};

static void fixture_free(struct fixture *f)
{
	buf_free(&f->header);
	image_free(f->im);
}

/* An image without tensors, but with this __metadata__. */
static void open_meta(struct fixture *f, const char *meta)
{
	f->header = BUF_INIT(1 << 20);
	buf_le64(&f->header, strlen(meta) + 19);
	buf_printf(&f->header, "{\"__metadata__\":{%s}}", meta);
	f->header.p[0] = (unsigned char)(f->header.len - 8);
	f->header.p[1] = (unsigned char)((f->header.len - 8) >> 8);
	T_OK(image_parse(f->header.p, f->header.len, f->header.len, 0, &f->im));
	T_OK(image_values_span(f->header.p, f->header.len, &f->begin, &f->end));
}

static struct str span(const struct fixture *f)
{
	return (struct str){ (const char *)f->header.p + f->begin, f->end - f->begin };
}

static void is_at(const char *meta, const char *want)
{
	CLEANUP(fixture_free) struct fixture f = { 0 };
	CLEANUP(sdict_free_ptr) struct sdict *alone = NULL, *whole = NULL;
	struct image *part = NULL;

	open_meta(&f, meta);
	if (!want) {
		assert_int_equal(f.begin, 0);
		assert_int_equal(f.end, 0);
		return;
	}
	if (!str_is(span(&f), want))
		print_error("%.*s\n", (int)span(&f).n, span(&f).p);
	assert_true(str_is(span(&f), want));
	T_OK(image_parse_values(span(&f), 0, f.im, &part));
	assert_true(image_same_values(part, f.im));
	T_OK(image_collect(&f.im, 1, &whole));
	T_OK(image_collect_values(&part, 1, &alone));
	assert_int_equal(alone->value_count, whole->value_count);
	for (uint64_t i = 0; i < alone->value_count; i++) {
		const struct sd_value *a = &alone->values[i], *b = &whole->values[i];
		assert_true(str_eq(a->fqn, b->fqn));
		assert_true(str_eq(a->bytes, b->bytes));
		assert_int_equal(a->path.count, b->path.count);
		for (uint32_t k = 0; k < a->path.count; k++)
			assert_true(str_eq(a->path.parts[k].key, b->path.parts[k].key));
	}
	image_free(part);
}

#define ONE "{\\\"a\\\":{\\\"json\\\":1}}"

static void values_are_found(void **state)
{
	(void)state;
	is_at("\"dcpd\":\"{\\\"version\\\":1,\\\"values\\\":" ONE "}\"", ONE);
	is_at("\"dcpd\":\"{\\\"values\\\": " ONE " ,\\\"version\\\":1}\"", ONE);
	is_at("\"dcpd\":\"{\\\"version\\\":1,\\\"values\\\":{}}\"", "{}");
	is_at("\"dcpd\":\"{\\\"version\\\":1}\"", NULL);
	is_at("\"format\":\"pt\"", NULL);
	/* what only looks like them */
	is_at("\"format\":\"\\\"values\\\":{}\",\"dcpd\":\"{\\\"version\\\":1,\\\"values\\\":" ONE "}\"", ONE);
	is_at("\"dcpd\":\"{\\\"version\\\":1,\\\"paths\\\":{\\\"values\\\":[\\\"values\\\",\\\"x\\\"]},\\\"values\\\":" ONE "}\"", ONE);
	is_at("\"dcpd\":\"{\\\"version\\\":1,\\\"layout\\\":[{\\\"values\\\":{}}],\\\"values\\\":" ONE "}\"", ONE);
}

/* Before, in and behind them: escapes of JSON in JSON, \u of one to four bytes, characters as they are. */
static void escapes_are_counted(void **state)
{
	char meta[1024], values[] = "{\\\"\\\\u00e4\\u00e4\\u20ac\\ud83d\\ude00\\\\\\\"\\u0041/\\\":{\\\"json\\\":\\\"\\\\n\xc3\xa4 \\\"}}";

	(void)state;
	snprintf(meta, sizeof meta,
		 "\"dcpd\":\"{\\\"paths\\\":{\\\"\\u00e9\\u20ac\\ud83d\\ude00\xe2\x82\xac\\\":[\\\"\\\\ud83d\\\\ude00\\\"]},"
		 "\\u0022version\\u0022:1,\\\"values\\\":%s,\\\"layout\\\":[]}\"", values);
	is_at(meta, values);
}

static void paths_come_along(void **state)
{
	CLEANUP(fixture_free) struct fixture f = { 0 };
	CLEANUP(sdict_free_ptr) struct sdict *sd = NULL;
	struct image *part = NULL, *again = NULL;

	(void)state;
	open_meta(&f, "\"dcpd\":\"{\\\"version\\\":1,\\\"paths\\\":{\\\"o.lr\\\":[\\\"o\\\",\\\"lr\\\"],\\\"x\\\":[\\\"y\\\"]},"
		      "\\\"values\\\":{\\\"o.lr\\\":{\\\"json\\\":1}}}\"");
	T_OK(image_parse_values(span(&f), 0, f.im, &part));
	T_OK(image_parse_values(STR("{\\\"o.lr\\\":{\\\"json\\\":{\\\"b\\\":2}}}"), 0, part, &again));
	T_OK(image_collect_values(&again, 1, &sd));
	assert_int_equal(sd->value_count, 1);
	assert_true(str_is(sd->values[0].fqn, "o.lr.b"));
	assert_int_equal(sd->values[0].path.count, 3);
	assert_true(str_is(sd->values[0].path.parts[0].key, "o"));
	image_free(part);
	image_free(again);
}

static void other_values_are_told_apart(void **state)
{
	static const char *const others[] = { "{\\\"b\\\":{\\\"json\\\":1}}", "{\\\"a\\\":{\\\"bytes\\\":\\\"\\\"}}", "{}",
					      "{\\\"a\\\":{\\\"json\\\":1},\\\"b\\\":{\\\"json\\\":1}}" };
	CLEANUP(fixture_free) struct fixture f = { 0 };
	struct image *part = NULL;

	(void)state;
	open_meta(&f, "\"dcpd\":\"{\\\"version\\\":1,\\\"values\\\":" ONE "}\"");
	for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
		T_OK(image_parse_values(str_of(others[i]), 0, f.im, &part));
		assert_false(image_same_values(part, f.im));
		image_free(part);
	}
}

/* A span that would end its string or its object earlier, or later, or is none. */
static void what_breaks_out_is_refused(void **state)
{
	static const char *const bad[] = {
		"{\"}", "{}\"", "\"", ONE "\",\"x\":\"", "{\\\"a\\\":{\\\"json\\\":1}", ONE "}",
		"{},\\\"paths\\\":{}", "[]", "1", " ", "\\",
		"{\\", "{\\\"a\\\":{\\\"json\\\":1,\\\"json\\\":2}}", "{\\\"a\\\":{\\\"json\\\":1},\\\"a\\\":{\\\"json\\\":2}}", "{\\u12",
	};
	CLEANUP(fixture_free) struct fixture f = { 0 };
	struct image *part = NULL;

	(void)state;
	open_meta(&f, "\"dcpd\":\"{\\\"version\\\":1,\\\"values\\\":" ONE "}\"");
	for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
		enum err e = image_parse_values(str_of(bad[i]), 0, f.im, &part);
		if (!e)
			print_error("%s was taken\n", bad[i]);
		assert_true(e == ERR_FORMAT_IMAGE || e == ERR_DUPLICATE_KEY);
	}
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(values_are_found),	       cmocka_unit_test(escapes_are_counted),
		cmocka_unit_test(paths_come_along),	       cmocka_unit_test(other_values_are_told_apart),
		cmocka_unit_test(what_breaks_out_is_refused),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
