/* test_cli_args.c: dcpctl's little languages: options, references, layout rules, renames. */
#include "lib/t.h"

#include <string.h>

#include "api/cli/args.h"

/* The rule that `text` means is this JSON. */
static void rule_is(const char *text, const char *wanted)
{
	json_t *rule = NULL, *want = json_loads(wanted, 0, NULL);

	T_OK(args_layout(text, &rule));
	if (!want || !json_equal(rule, want))
		T_FAIL("%s is not %s", text, wanted);
	json_decref(rule);
	json_decref(want);
}

static void test_layout(void **state)
{
	json_t *rule = NULL;

	(void)state;
	rule_is("model.*=Replicate(),Shard(0)@2x4",
		"{\"match\":\"model.*\",\"mesh\":[2,4],\"placements\":[\"Replicate()\",\"Shard(0)\"]}");
	rule_is("*=R,S(0)@2x2:0,1,4,5",
		"{\"match\":\"*\",\"mesh\":[2,2],\"ranks\":[0,1,4,5],\"placements\":[\"R\",\"S(0)\"]}");
	rule_is("a=b=Shard(dim=1)@3", "{\"match\":\"a=b\",\"mesh\":[3],\"placements\":[\"Shard(dim=1)\"]}");
	rule_is("w=_StridedShard(dim=0, sf=2), Shard(0)@2x2",
		"{\"match\":\"w\",\"mesh\":[2,2],\"placements\":[\"_StridedShard(dim=0, sf=2)\",\"Shard(0)\"]}");
	rule_is("user@host=Shard(0)@2", "{\"match\":\"user@host\",\"mesh\":[2],\"placements\":[\"Shard(0)\"]}");
	rule_is("user@host=Shard(0)", "{\"match\":\"user@host\",\"placements\":[\"Shard(0)\"]}");
	rule_is("*=Shard(0)", "{\"match\":\"*\",\"placements\":[\"Shard(0)\"]}");
	rule_is("{\"match\":\"*\",\"like\":\"main:x\"}", "{\"match\":\"*\",\"like\":\"main:x\"}");
	rule_is("?a=Shard(1)@2", "{\"match\":\"a\",\"mesh\":[2],\"placements\":[\"Shard(1)\"],\"optional\":true}");
	rule_is("?{\"match\":\"*\",\"like\":\"main:x\"}", "{\"match\":\"*\",\"like\":\"main:x\",\"optional\":true}");
	T_ERR(INVALID_REQUEST, args_layout("?", &rule));
	T_ERR(INVALID_REQUEST, args_layout("*=Shard(0)@", &rule));
	T_ERR(INVALID_REQUEST, args_layout("*=Shard(0)@2x", &rule));
	T_ERR(INVALID_REQUEST, args_layout("*=Shard(0)@x2", &rule));
	T_ERR(INVALID_REQUEST, args_layout("*=Shard(0)@2:", &rule));
	T_ERR(INVALID_REQUEST, args_layout("*=Shard(0),@2", &rule));
	T_ERR(INVALID_REQUEST, args_layout("=Shard(0)@2", &rule));
	T_ERR(INVALID_REQUEST, args_layout("Shard(0)@2", &rule));
	T_ERR(INVALID_REQUEST, args_layout("{\"match\":}", &rule));
}

static void pair_is(enum err (*parse)(const char *, json_t **), const char *text, const char *a, const char *b)
{
	json_t *pair = NULL;

	T_OK(parse(text, &pair));
	assert_string_equal(json_string_value(json_array_get(pair, 0)), a);
	assert_string_equal(json_string_value(json_array_get(pair, 1)), b);
	json_decref(pair);
}

static void test_rename(void **state)
{
	json_t *pair = NULL;

	(void)state;
	pair_is(args_rename, "s/^module\\.//", "^module\\.", "");
	pair_is(args_rename, "s|a/b|c|", "a/b", "c");
	pair_is(args_rename, "s/a\\/b/c/", "a/b", "c");
	pair_is(args_rename, "s#(x+)\\.(y)#\\2.\\1#", "(x+)\\.(y)", "${2}.${1}");
	T_ERR(INVALID_REQUEST, args_rename("s/a/b", &pair));
	T_ERR(INVALID_REQUEST, args_rename("s/a/b/g", &pair));
	T_ERR(INVALID_REQUEST, args_rename("a/b/c/", &pair));
	T_ERR(INVALID_REQUEST, args_rename("s", &pair));
	T_ERR(INVALID_REQUEST, args_rename("", &pair));
	pair_is(args_pair, "a=b.*=bfloat16", "a=b.*", "bfloat16");
	T_ERR(INVALID_REQUEST, args_pair("bfloat16", &pair));
}

static void test_references(void **state)
{
	json_t *ref = NULL;

	(void)state;
	T_OK(args_ref("main:run1/step:1", &ref));
	assert_string_equal(json_string_value(json_object_get(ref, "storage")), "main");
	assert_string_equal(json_string_value(json_object_get(ref, "name")), "run1/step:1");
	json_decref(ref);
	T_OK(args_ref("shm:train", &ref));
	assert_string_equal(json_string_value(json_object_get(ref, "state_dict")), "train");
	json_decref(ref);
	T_ERR(INVALID_REQUEST, args_ref("main", &ref));
	T_ERR(INVALID_REQUEST, args_ref("main:", &ref));
	T_ERR(INVALID_REQUEST, args_ref(":x", &ref));
	T_ERR(INVALID_REQUEST, args_ref("main:\xff", &ref));
}

static enum err parse(const char *allowed, struct args *out, unsigned n, const char **words)
{
	return args_parse((int)n, (char *const *)(uintptr_t)words, allowed, out);
}

static void test_options(void **state)
{
	const char *good[] = { "a", "--layout", "x=y", "--overwrite", "b", "--layout=z=w", "--json", "--", "--c" };
	const char *lacks[] = { "--layout" }, *unknown[] = { "--nope" }, *flag[] = { "--overwrite=1" }, *dash[] = { "-x" };
	unsigned at = 0;
	struct args a;

	(void)state;
	T_OK(parse("layout= overwrite", &a, 9, good));
	assert_int_equal(a.word_count, 3);
	assert_string_equal(a.words[2], "--c");
	assert_string_equal(args_next(&a, "layout", &at), "x=y");
	assert_string_equal(args_next(&a, "layout", &at), "z=w");
	assert_null(args_next(&a, "layout", &at));
	assert_string_equal(args_value(&a, "layout"), "z=w");
	assert_true(args_flag(&a, "overwrite") && args_flag(&a, "json") && !args_flag(&a, "detach"));
	T_ERR(INVALID_REQUEST, parse("layout=", &a, 1, lacks));
	T_ERR(INVALID_REQUEST, parse("layout=", &a, 1, unknown));
	T_ERR(INVALID_REQUEST, parse("overwrite", &a, 1, flag));
	T_ERR(INVALID_REQUEST, parse("overwrite", &a, 1, dash));
}

static void test_durations(void **state)
{
	int64_t ms = 0;

	(void)state;
	T_OK(args_duration("90", &ms));
	assert_int_equal(ms, 90000);
	T_OK(args_duration("500ms", &ms));
	assert_int_equal(ms, 500);
	T_OK(args_duration("1.5m", &ms));
	assert_int_equal(ms, 90000);
	T_ERR(INVALID_REQUEST, args_duration("5 parsecs", &ms));
	T_ERR(INVALID_REQUEST, args_duration("", &ms));
	T_ERR(INVALID_REQUEST, args_duration("-1s", &ms));
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_layout),  cmocka_unit_test(test_rename),    cmocka_unit_test(test_references),
		cmocka_unit_test(test_options), cmocka_unit_test(test_durations),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
