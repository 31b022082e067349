/* test_trace.c: the header traceparent: what the W3C's standard has, and what it has not. */
#include "lib/t.h"

#include <sodium.h>
#include <string.h>

#include "base/mem.h"
#include "server/trace.h"

#define TRACE "0af7651916cd43dd8448eb211c80319c"
#define SPAN "b7ad6b7169203331"

static const char *text(const json_t *o, const char *key)
{
	return json_string_value(json_object_get(o, key));
}

static void test_known_headers(void **state)
{
	static const struct {
		const char *header;
		bool sampled;
	} good[] = {
		{ "00-" TRACE "-" SPAN "-01", true },
		{ "00-" TRACE "-" SPAN "-00", false },
		{ "00-" TRACE "-" SPAN "-03", true },
		{ "00-" TRACE "-" SPAN "-fe", false },
		{ "01-" TRACE "-" SPAN "-01-what comes later", true },
	};

	(void)state;
	for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
		json_t *t = trace_of_caller(good[i].header);
		assert_non_null(t);
		assert_string_equal(text(t, "trace_id"), TRACE);
		assert_string_equal(text(t, "parent_id"), SPAN);
		assert_int_equal(strlen(text(t, "span_id")), TRACE_SPAN_HEX);
		assert_string_not_equal(text(t, "span_id"), SPAN);
		assert_int_equal(json_is_true(json_object_get(t, "sampled")), good[i].sampled);
		json_decref(t);
	}
}

/* Each header that lacks its end, or has one character that does not belong there, is none. */
static void test_all_others_are_none(void **state)
{
	static const char good[] = "00-" TRACE "-" SPAN "-01";
	char bad[sizeof good + 8];

	(void)state;
	assert_null(trace_of_caller(NULL));
	for (size_t n = 0; n < sizeof good - 1; n++) {
		snprintf(bad, sizeof bad, "%.*s", (int)n, good);
		assert_null(trace_of_caller(bad));
		for (const char *c = "-gG \x80"; *c; c++) {
			if (*c == good[n])
				continue;
			memcpy(bad, good, sizeof good);
			bad[n] = *c;
			assert_null(trace_of_caller(bad));
		}
	}
	snprintf(bad, sizeof bad, "%s-more", good);
	assert_null(trace_of_caller(bad)); /* version 00 has no more */
	assert_null(trace_of_caller("ff-" TRACE "-" SPAN "-01"));
	assert_null(trace_of_caller("00-00000000000000000000000000000000-" SPAN "-01"));
	assert_null(trace_of_caller("00-" TRACE "-0000000000000000-01"));
}

static void test_own_traces_differ(void **state)
{
	json_t *a = trace_new(), *b = trace_new();

	(void)state;
	assert_int_equal(strlen(text(a, "trace_id")), TRACE_ID_HEX);
	assert_string_not_equal(text(a, "trace_id"), text(b, "trace_id"));
	assert_null(json_object_get(a, "parent_id"));
	json_t *before = json_deep_copy(a);
	trace_again(a);
	assert_string_equal(text(a, "trace_id"), text(before, "trace_id"));
	assert_string_not_equal(text(a, "span_id"), text(before, "span_id"));
	trace_again(NULL);
	json_decref(before);
	json_decref(a);
	json_decref(b);
}

int main(void)
{
	const struct CMUnitTest tests[] = { cmocka_unit_test(test_known_headers), cmocka_unit_test(test_all_others_are_none),
					    cmocka_unit_test(test_own_traces_differ) };

	return sodium_init() < 0 ? 1 : cmocka_run_group_tests(tests, NULL, NULL);
}
