/* test_convert.c: conversion rules on structures: companions of quantised weights, sources of `from`, order, limits. What comes of the
 * elements is compared with torch in tests/interop/test_transform.py. */
#include "lib/t_conversion.h"

#include "plan/companions.h"
#include "plan/convert_impl.h"

static struct arena *arena;
static struct sdict *sd, *other;
static struct conversion c;
static struct converted out;
static json_t *doc;

static void add(struct sdict *to, const char *fqn, enum dtype d, int64_t rows, int64_t columns)
{
	const int64_t shape[] = { rows, columns }, dims[] = { 0, 0, rows, columns };
	uint32_t index;

	T_OK(sdict_add_tensor(to, str_of(fqn), d, 2, shape, &index));
	T_OK(sdict_add_chunk(to, index, dims, 0, (struct sd_loc){ 0 }));
}

static int setup(void **state)
{
	uint32_t index;

	(void)state;
	arena = arena_new(UINT64_MAX);
	T_OK(sdict_new(UINT64_MAX, &sd));
	T_OK(sdict_new(UINT64_MAX, &other));
	T_OK(sdict_add_file(sd, STR("f"), 0, &index));
	T_OK(sdict_add_value(sd, STR("step"), 0, (struct sd_loc){ .file = 0, .length = 9 }, &index));
	T_OK(sdict_add_value(sd, STR("lr"), 0, (struct sd_loc){ .file = 0, .length = 7 }, &index));
	return 0;
}

static int teardown(void **state)
{
	(void)state;
	convert_free(&out);
	sdict_free(sd);
	sdict_free(other);
	json_decref(doc);
	doc = NULL;
	arena_free(arena);
	return 0;
}

static enum err apply(const char *text)
{
	char json[4096];

	snprintf(json, sizeof json, "{'transform':%s,'vars':{}}", text);
	T_OK(t_conversion(json, &doc, arena, &c));
	convert_free(&out);
	const struct convert_source sources[] = { { sd, NULL, 0 }, { other, NULL, (uint32_t)sd->chunk_count } };
	return convert(&c, sources, &out);
}

static void has(const char *fqns)
{
	char all[1024] = "";
	size_t n = 0;

	for (uint64_t i = 0; i < out.sd->tensor_count; i++)
		n += (size_t)snprintf(all + n, sizeof all - n, "%s%.*s", n ? " " : "", (int)out.sd->tensors[i].fqn.n,
				      out.sd->tensors[i].fqn.p);
	assert_string_equal(all, fqns);
}

static void test_values_are_renamed_and_dropped(void **state)
{
	(void)state;
	T_OK(apply("[{'match':'^step$','drop':true},{'match':'^l','rename':'x.l'}]"));
	assert_int_equal(out.sd->value_count, 1);
	assert_true(str_is(out.sd->values[0].fqn, "x.lr"));
	assert_int_equal(out.value_from[0], 1);
	assert_int_equal(out.sd->values[0].loc.length, 7);
	T_ERR(VALIDATION_FAILED, apply("[{'match':'lr','dtype':'float32'}]")); /* of tensors alone */
}

static void test_what_is_made_stands_where_its_first_part_stood(void **state)
{
	(void)state;
	add(sd, "a", DT_FLOAT32, 4, 4);
	add(sd, "e.1", DT_FLOAT32, 4, 4);
	add(sd, "e.0", DT_FLOAT32, 4, 4);
	add(sd, "z", DT_FLOAT32, 4, 4);
	T_OK(apply("[{'match':'e','concat':{'dim':0,'into':'e'}},{'match':'a','split':{'dim':1,'parts':2,'into':['a.0','a.1']}}]"));
	has("a.0 a.1 e z");
	assert_int_equal(out.sd->tensors[2].shape[0], 8);
	assert_int_equal(out.views[out.sd->tensors[2].first_chunk].source, 2); /* e.0 comes first */
}

static void test_companions_follow(void **state)
{
	(void)state;
	add(sd, "m.weight", DT_INT8, 4, 4);
	add(sd, "m.SCB", DT_FLOAT32, 4, 1);
	add(sd, "q.qweight", DT_INT32, 4, 4);
	add(sd, "q.scales", DT_FLOAT16, 4, 1);
	T_OK(apply("[{'match':'^m\\\\.weight','rename':'n.weight'},{'match':'^q\\\\.qweight','drop':true}]"));
	has("n.weight n.SCB");
	T_ERR(VALIDATION_FAILED, apply("[{'match':'^m\\\\.weight','rename':'n.w'}]"));
	T_ERR(DTYPE_UNSUPPORTED, apply("[{'match':'qweight','dtype':'float32'}]"));
	assert_string_equal(err_last()->fqn, "q.qweight");
	T_OK(apply("[{'match':'scales','dtype':'float32'}]"));
}

static void test_names_of_companions(void **state)
{
	struct companions names = { .main = STR("x.weight") };
	uint32_t count = 0;
	struct str name, follows;
	char room[COMPANION_NAME_MAX];

	(void)state;
	while (companions_next(&names, &name)) {
		count++;
		assert_true(str_starts(name, "x."));
		assert_true(companions_follow(&names, STR("y.weight"), room, &follows));
		assert_true(str_starts(follows, "y.") && follows.n == name.n && memcmp(follows.p + 1, name.p + 1, name.n - 1) == 0);
	}
	assert_true(count > 8);
	assert_false(companions_dtype(DT_BFLOAT16) || companions_dtype(DT_BOOL) || !companions_dtype(DT_FLOAT8_E4M3FN));
}

static void test_sources_of_from(void **state)
{
	(void)state;
	add(sd, "a", DT_FLOAT32, 4, 4);
	add(other, "b", DT_FLOAT16, 2, 2);
	T_OK(apply("[{'match':'a','from':{'storage':'m','name':'x','fqn':'b'}},{'match':'b','from':{'storage':'m','name':'x'}}]"));
	assert_int_equal(convert_source_of(&c, 0), 1);
	assert_int_equal(convert_source_of(&c, 1), 1);
	has("a b");
	assert_int_equal(out.sd->tensors[0].dtype, DT_FLOAT16);
	assert_int_equal(out.views[0].source, 1);
	T_ERR(MISSING_KEY, apply("[{'match':'a','from':{'storage':'m','name':'x'}}]"));
}

static void test_too_many_pieces(void **state)
{
	(void)state;
	add(sd, "big", DT_INT8, 4, 2 << 20);
	T_ERR(LIMIT_EXCEEDED, apply("[{'match':'big','permute':[1,0]},{'match':'big','reshape':[-1]}]"));
	assert_string_equal(err_last()->pointer, "/transform/1");
}

int main(void)
{
#define T(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
	const struct CMUnitTest tests[] = {
		T(test_values_are_renamed_and_dropped), T(test_what_is_made_stands_where_its_first_part_stood), T(test_companions_follow),
		T(test_names_of_companions), T(test_sources_of_from), T(test_too_many_pieces),
	};

	return cmocka_run_group_tests_name("convert", tests, NULL, NULL);
}
