/* test_conversion.c: what conversion rules a request may have, where the error points, and sizes that are worked out. */
#include "lib/t_conversion.h"


static struct arena *arena;
static json_t *doc;

static int setup(void **state)
{
	(void)state;
	arena = arena_new(UINT64_MAX);
	return arena ? 0 : -1;
}

static int teardown(void **state)
{
	(void)state;
	json_decref(doc);
	doc = NULL;
	arena_free(arena);
	return 0;
}

static enum err rules(const char *text, struct conversion *c)
{
	return t_conversion(text, &doc, arena, c);
}

static void test_every_kind(void **state)
{
	struct conversion c;

	(void)state;
	T_OK(rules("{'vars':{'heads':8},'transform':[{'match':'a','rename':'$1'},{'match':'a','dtype':'torch.bfloat16'},"
		   "{'match':'a','split':{'dim':-1,'sizes':[1,'{heads}'],'into':['x','y']}},"
		   "{'match':'a','split':{'dim':0,'parts':1,'into':['x']}},"
		   "{'match':'a','concat':{'dim':0,'into':'x','order':['q','k']}},{'match':'a','stack':{'dim':1,'into':'x'}},"
		   "{'match':'a','unstack':{'dim':0,'into':'x{i}'}},{'match':'a','permute':[-1,0]},{'match':'a','reshape':[-1,'{dim0}']},"
		   "{'match':'a','pad':{'dim':0,'to':8}},{'match':'a','slice':['0:{heads}','-3:',':']},"
		   "{'match':'a','drop':true,'optional':true},"
		   "{'match':'a','from':{'storage':'main','name':'b','fqn':'c'}},{'match':'a','tie':'b'}]}", &c));
	assert_int_equal(c.count, 14);
	assert_int_equal(c.rules[1].dtype, DT_BFLOAT16);
	assert_int_equal(c.rules[2].dim, -1);
	assert_true(str_is(c.rules[2].sizes[1].text, "heads"));
	assert_int_equal(c.rules[3].parts, 1);
	assert_int_equal(c.rules[7].sizes[0].number, 1);
	assert_int_equal(c.rules[10].sizes[2].number, -3);
	assert_int_equal(c.rules[10].sizes[3].number, CONVERSION_OPEN);
	assert_true(c.rules[11].optional);
	assert_true(str_is(c.rules[12].from.storage, "main") && str_is(c.rules[12].names[0], "c"));
	T_OK(rules("{}", &c));
	assert_int_equal(c.count, 0);
}

static void test_where_an_error_points(void **state)
{
	static const char *const wrong[][2] = {
		{ "{'transform':{}}", "/transform" },
		{ "{'transform':[1]}", "/transform/0" },
		{ "{'transform':[{'match':'a'}]}", "/transform/0" },
		{ "{'transform':[{'match':'a','drop':true,'tie':'b'}]}", "/transform/0" },
		{ "{'transform':[{'drop':true}]}", "/transform/0/match" },
		{ "{'transform':[{'match':'','drop':true}]}", "/transform/0/match" },
		{ "{'transform':[{'match':'a','drop':false}]}", "/transform/0/drop" },
		{ "{'transform':[{'match':'a','dtype':'float3'}]}", "/transform/0/dtype" },
		{ "{'transform':[{'match':'a','split':{'dim':0,'into':['x']}}]}", "/transform/0/split" },
		{ "{'transform':[{'match':'a','split':{'dim':0,'parts':2,'into':['x']}}]}", "/transform/0/split/into" },
		{ "{'transform':[{'match':'a','split':{'dim':64,'parts':1,'into':['x']}}]}", "/transform/0/split/dim" },
		{ "{'transform':[{'match':'a','split':{'dim':0,'sizes':[-1],'into':['x']}}]}", "/transform/0/split/sizes/0" },
		{ "{'transform':[{'match':'a','unstack':{'dim':0,'into':'x'}}]}", "/transform/0/unstack/into" },
		{ "{'transform':[{'match':'a','permute':[0,0]}]}", "/transform/0/permute/1" },
		{ "{'transform':[{'match':'a','permute':[0,2]}]}", "/transform/0/permute/1" },
		{ "{'transform':[{'match':'a','permute':['{dim0}']}]}", "/transform/0/permute/0" },
		{ "{'transform':[{'match':'a','reshape':[-1,2,-1]}]}", "/transform/0/reshape/2" },
		{ "{'transform':[{'match':'a','reshape':['{nobody}']}]}", "/transform/0/reshape/0" },
		{ "{'transform':[{'match':'a','reshape':['8']}]}", "/transform/0/reshape/0" },
		{ "{'transform':[{'match':'a','slice':['8']}]}", "/transform/0/slice/0" },
		{ "{'transform':[{'match':'a','slice':['0x1:']}]}", "/transform/0/slice/0" },
		{ "{'transform':[{'match':'a','from':{'storage':'main'}}]}", "/transform/0/from/name" },
		{ "{'transform':[{'match':'a','concat':{'dim':0,'into':'x','order':[]}}]}", "/transform/0/concat/order" },
		{ "{'transform':[],'vars':{'dim0':1}}", "/vars/dim0" },
		{ "{'transform':[],'vars':{'a':-1}}", "/vars/a" },
		{ "{'transform':[],'vars':{'A':1}}", "/vars/A" },
	};
	struct conversion c;

	(void)state;
	for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
		T_ERR(VALIDATION_FAILED, rules(wrong[i][0], &c));
		assert_string_equal(err_last()->pointer, wrong[i][1]);
	}
	T_ERR(UNKNOWN_FIELD, rules("{'transform':[{'match':'a','dorp':true}]}", &c));
	assert_string_equal(err_last()->pointer, "/transform/0/dorp");
	T_ERR(UNKNOWN_FIELD, rules("{'transform':[{'match':'a','pad':{'dim':0,'to':1,'with':2}}]}", &c));
}

static enum err size(const struct conversion *c, const char *text, int64_t *out)
{
	const int64_t shape[] = { 12, 7 };

	return conversion_size(c, &(struct conversion_size){ .text = str_of(text) }, 2, shape, out);
}

static void test_sizes(void **state)
{
	static const struct {
		const char *text;
		int64_t value;
	} right[] = { { "heads", 8 }, { " heads / 2 ", 4 }, { "dim0*dim1", 84 }, { "(dim1-1)*2+heads/4/2", 13 }, { "1-2-3", -4 } };
	static const char *const wrong[] = { "heads/3", "heads/0", "heads/(4-4)", "dim2", "(1", "1)", "1+", "*2", "1 2", "none",
					     "9223372036854775808", "9223372036854775807+1", "9223372036854775807*2", "-1", "heads;", "" };
	char deep[64];
	struct conversion c;
	int64_t got = 0;

	(void)state;
	T_OK(rules("{'transform':[],'vars':{'heads':8}}", &c));
	for (size_t i = 0; i < sizeof right / sizeof *right; i++) {
		T_OK(size(&c, right[i].text, &got));
		assert_int_equal(got, right[i].value);
	}
	for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++)
		if (size(&c, wrong[i], &got) == OK)
			T_FAIL("\"%s\" is %jd", wrong[i], (intmax_t)got);
	memset(deep, '(', sizeof deep - 1);
	deep[sizeof deep - 1] = '\0';
	T_ERR(VALIDATION_FAILED, size(&c, deep, &got));
}

int main(void)
{
#define T(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
	const struct CMUnitTest tests[] = { T(test_every_kind), T(test_where_an_error_points), T(test_sizes) };

	return cmocka_run_group_tests_name("conversion", tests, NULL, NULL);
}
