/* Layout rules from a request's JSON. Their meaning is test_layout.c's; here it is how they are read. */
#include "lib/t_worker.h"
#include "lib/t_json.h"

#include "runner/spec.h"
#include "tensor/box.h"

T_WORKER_EACH(t);

static json_t *doc;
static struct arena *arena;
static struct layout_rules rules;

/* Reads rules and opens them; ' stands for ". What is read lasts until the next call. */
static enum err open_rules(const char *text, uint32_t world, struct spec_layout *out)
{
	json_decref(doc);
	arena_free(arena);
	doc = t_json(text);
	arena = arena_new(1 << 20);
	assert_non_null(arena);
	*out = (struct spec_layout){ 0 };
	TRY(layout_rules_read(&JVAL_ROOT(doc), 100, arena, &rules));
	return spec_layout_open(&t.w, &rules, world, out);
}

static enum err layout(const char *text, uint32_t world, struct spec_layout *out)
{
	enum err e = open_rules(text, world, out);

	return e ? e : layout_check(&out->layout);
}

static void test_rules(void **state)
{
	struct spec_layout l;

	(void)state;
	T_OK(layout("[{'match':'a.*','mesh':[2,2],'placements':['Replicate()','Shard(0)'],'ranks':[3,2,1,0]},"
		    "{'match':'*','chunks':{'dim':1,'ranks':[0,0,1]}},"
		    "{'match':'b','boxes':[{'rank':2,'offsets':[0,1],'sizes':[3,4]}]},{'match':'c','placements':['S(-1)']}]", 4, &l));
	const struct layout_rule *r = l.layout.rules;
	assert_int_equal(l.layout.rule_count, 4);
	assert_int_equal(r[0].kind, LAYOUT_MESH);
	assert_int_equal(r[0].mesh_ndim, 2);
	assert_int_equal(r[0].ranks[0], 3);
	assert_int_equal(r[0].placements[1].kind, PLACE_SHARD);
	assert_int_equal(r[1].kind, LAYOUT_CHUNKS);
	assert_true(str_is(r[1].match, "*"));
	assert_int_equal(r[1].chunk_dim, 1);
	assert_int_equal(r[1].rank_count, 3);
	assert_int_equal(r[2].boxes[0].rank, 2);
	assert_int_equal(r[2].boxes[0].dims[3], 4);
	assert_int_equal(r[3].mesh_ndim, 0);
	assert_int_equal(r[3].placements[0].dim, -1);
	spec_layout_free(&l);
	T_OK(layout("[]", 4, &l));
	spec_layout_free(&l);
}

static void test_bad_rules(void **state)
{
	static const struct { enum err code; const char *text; } bad[] = {
		{ ERR_LAYOUT_INVALID, "[{'match':'*','placements':['Shard(x)']}]" },
		{ ERR_VALIDATION_FAILED, "[{'match':'*','placements':[7]}]" },
		{ ERR_VALIDATION_FAILED, "[{'placements':['R']}]" },
		{ ERR_VALIDATION_FAILED, "[{'match':'*','mesh':[4],'placements':['Shard(0)'],'ranks':[0,1,2,-1]}]" },
		{ ERR_VALIDATION_FAILED, "[{'match':'*','mesh':[4],'placements':['Shard(0)'],'ranks':[0,1,2,4294967295]}]" },
		{ ERR_LAYOUT_INVALID, "[{'match':'*','boxes':[{'rank':0,'offsets':[0],'sizes':[1,2]}]}]" },
		{ ERR_LAYOUT_INVALID, "[{'match':'*','like':'nowhere'}]" },
		{ ERR_NOT_FOUND, "[{'match':'*','like':'main:nothing'}]" },
		{ ERR_NOT_FOUND, "[{'match':'*','like':'other:x'}]" },
		{ ERR_WORLD_MISMATCH, "[{'match':'*','mesh':[3],'placements':['Shard(0)']}]" },
		{ ERR_LAYOUT_INVALID, "[{'match':'*','mesh':[4],'placements':['Partial(sum)']}]" },
		{ ERR_LAYOUT_INVALID, "[{'match':'*','mesh':[4],'placements':['R'],'dim_names':['a','b']}]" },
		{ ERR_LAYOUT_INVALID, "[{'match':'*','mesh':[4],'placements':['_StridedShard(dim=0, sf=0)']}]" },
	};

	(void)state;
	for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
		struct spec_layout l;
		enum err e = layout(bad[i].text, 4, &l);
		spec_layout_free(&l);
		if (e != bad[i].code)
			T_FAIL("%s gave %s: %s", bad[i].text, err_code_name(e), e ? err_last()->text : "");
	}
}

static void test_bad_rules_are_named(void **state)
{
	struct spec_layout l;

	(void)state;
	T_ERR(LAYOUT_INVALID, layout("[{'match':'*','placements':['R']},{'match':'a.*','placements':['_S(0, -2)']}]", 4, &l));
	assert_string_equal(err_last()->pointer, "/1/placements/0");
	assert_non_null(strstr(err_last()->text, "\"_S(0, -2)\""));
	spec_layout_free(&l);
	T_ERR(WORLD_MISMATCH, layout("[{'match':'*','placements':['R']},{'match':'a.*','mesh':[3],'placements':['R']}]", 4, &l));
	assert_non_null(strstr(err_last()->text, "rule 1 ('a.*'): the mesh has 3 ranks, the world 4"));
	spec_layout_free(&l);
}

static void test_in_memory(void **state)
{
	struct spec_layout l;

	(void)state;
	T_OK(open_rules("[{'match':'*','mesh':[2,2],'placements':['Partial(avg)','S(0)'],'dim_names':['dp','tp']}]", 4, &l));
	T_OK(layout_check_in_memory(&l.layout));
	assert_int_equal(l.layout.rules[0].placements[0].reduce, REDUCE_AVG);
	assert_true(str_is(l.layout.rules[0].dim_names[1], "tp"));
	spec_layout_free(&l);
}

static void test_like(void **state)
{
	struct spec_layout l;

	(void)state;
	t_worker_copy(&t, "torch-2.15.0/sharded_rowwise", "x/golden");
	int fds = t_count_fds();
	T_OK(layout("[{'match':'*','like':'main:x/golden'}]", 4, &l));
	assert_int_equal(l.layout.rules[0].kind, LAYOUT_LIKE);
	assert_true(l.layout.rules[0].like->tensor_count > 0);
	spec_layout_free(&l);
	assert_int_equal(t_count_fds(), fds);
}

static void test_too_many_likes(void **state)
{
	char text[1024] = "[";
	struct spec_layout l;

	(void)state;
	t_worker_copy(&t, "torch-2.15.0/empty", "e");
	for (int i = 0; i < 17; i++)
		snprintf(text + strlen(text), sizeof text - strlen(text), "%s{'match':'*','like':'main:e'}", i ? "," : "");
	snprintf(text + strlen(text), sizeof text - strlen(text), "]");
	T_ERR(LIMIT_EXCEEDED, layout(text, 4, &l));
	spec_layout_free(&l);
}

int main(void)
{
#define T(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
	const struct CMUnitTest tests[] = { T(test_rules), T(test_bad_rules), T(test_bad_rules_are_named), T(test_in_memory), T(test_like),
					    T(test_too_many_likes) };

	return cmocka_run_group_tests_name("spec_layout", tests, NULL, NULL);
}
