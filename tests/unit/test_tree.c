/* test_tree.c: building and checking trees, hostile ones too, and the walk over several ranks' trees. */
#include "plan/iterate.h"
#include "plan/tree.h"
#include "lib/t_tree.h"

static void test_dict_keeps_order_and_keys(void **state)
{
	struct tree *d, *one, *two;
	char name[32];

	(void)state;
	T_OK(tree_new(t_arena, TREE_DICT, &d));
	T_OK(tree_none(t_arena, &one));
	T_OK(tree_value(t_arena, TREE_JSON, STR("2"), &two));
	for (int i = 0; i < 1000; i++) {
		int n = snprintf(name, sizeof name, "k%d", i);
		struct str key;
		T_OK(arena_str(t_arena, (struct str){ name, (size_t)n }, &key));
		T_OK(tree_put(t_arena, d, tree_key_str(key), one));
		T_OK(tree_put(t_arena, d, tree_key_int(i), one));
	}
	assert_int_equal(d->count, 2000);
	T_OK(tree_put(t_arena, d, tree_key_str(STR("k7")), two)); /* keeps its place */
	assert_int_equal(d->count, 2000);
	assert_ptr_equal(d->children[14], two);
	assert_ptr_equal(tree_get(d, tree_key_str(STR("k7"))), two);
	assert_ptr_equal(tree_get(d, tree_key_int(7)), one);
	assert_null(tree_get(d, tree_key_str(STR("7"))));
	assert_null(tree_get(d, tree_key_int(1000)));
	assert_null(tree_get(one, tree_key_int(0)));
}

static void test_shell_does_not_share_growth(void **state)
{
	struct tree *d = t_tree("{'a':1,'b':2,'c':3,'d':4}", 0), *shell, *none;

	(void)state;
	T_OK(tree_none(t_arena, &none));
	T_OK(tree_shell(t_arena, d, &shell));
	for (uint32_t i = 0; i < 4; i++)
		shell->children[i] = none;
	T_OK(tree_put(t_arena, shell, tree_key_str(STR("e")), none));
	assert_int_equal(shell->count, 5);
	t_is(d, "{a: 1, b: 2, c: 3, d: 4}");
	t_is(shell, "{a: null, b: null, c: null, d: null, e: null}");
}

static void test_equal(void **state)
{
	static const char *const all[] = {
		"{'a':'T f32 4'}", "{'a':'T f32 5'}", "{'a':'T f64 4'}", "{'b':'T f32 4'}", "{'a':['T f32 4']}", "{'a':{'$':['T f32 4']}}",
		"{'a':'S f32 4 / 0: 0+4'}", "{'a':'S f32 4 / 0: 0+2 / 0: 2+2'}", "{'a':'D f32 4 / 2 / Shard(0)'}",
		"{'a':'D f32 4 / 2 / Replicate()'}", "{'a':'D f32 4 / 2 / Partial(sum)'}", "{'a':'D f32 4 / 2 / Partial(max)'}", "{'a':1}",
		"{'a':2}", "{'a':'X 1'}", "{'#1':1}", "{'1':1}", "{}", "[]",
	};
	size_t n = sizeof all / sizeof *all;

	(void)state;
	for (size_t i = 0; i < n; i++)
		for (size_t j = 0; j < n; j++)
			assert_int_equal(tree_equal(t_tree(all[i], 0), t_tree(all[j], 0)), i == j);
}

static void test_check(void **state)
{
	(void)state;
	T_OK(tree_check(t_tree("{'a':'D f32 8,4 / 2x2 / Shard(0) _StridedShard(1,sf=2)','b':['S f32 4 / 1: 0+2',{'$':[1]}]}", 1), 1, 4));
	T_ERR(WORLD_MISMATCH, tree_check(t_tree("{'x':{'a':'D f32 8,4 / 2x2 / Shard(0) Shard(1)'}}", 1), 1, 3));
	t_names("x.a", 1, "world of 3");
	T_ERR(WORLD_MISMATCH, tree_check(t_tree("['D f32 8 / 2 / Shard(0) / 0,7']", 0), 3, 4));
	t_names("0", 3, "rank 7");
	T_ERR(LAYOUT_INVALID, tree_check(t_tree("{'a':'D f32 8 / 2 / Shard(0) / 1,1'}", 3), 0, 4));
	T_ERR(PLAN_INVALID, tree_check(t_tree("{'a':'S f32 4 / 0: 3+2'}", 0), 0, 4));
	T_ERR(PLAN_INVALID, tree_check(t_tree("{'a':'S f32 4 / 0: 0+3 / 0: 1+3'}", 0), 0, 4));
	t_names("a", 0, "overlap");
	T_ERR(LIMIT_EXCEEDED, tree_check(t_tree("{'a':'T f32 4294967296,4294967296'}", 0), 0, 4));
	T_ERR(LIMIT_EXCEEDED, tree_check(t_tree("{'a':'T f64 4611686018427387904'}", 0), 0, 4));
	T_ERR(LIMIT_EXCEEDED, tree_check(t_tree("{'a':'T f64 -3'}", 0), 0, 4));
	T_ERR(PLAN_INVALID, tree_check(t_tree("{'a':'S f32 4 / 0: -1+2'}", 0), 0, 4));

	struct tree *bad = t_tree("{'a':'D f32 8 / 2 / Shard(0)'}", 0);
	bad->children[0]->tensor.mesh = NULL;
	T_ERR(PLAN_INVALID, tree_check(bad, 0, 4));
	bad = t_tree("{'a':'T f32 8'}", 0);
	bad->children[0]->tensor.dtype = DT_COUNT;
	T_ERR(LIMIT_EXCEEDED, tree_check(bad, 0, 4));
	bad->children[0]->tensor = (struct tree_tensor){ .ndim = NDIM_MAX + 1 };
	T_ERR(LIMIT_EXCEEDED, tree_check(bad, 0, 4));
}

static void test_depth(void **state)
{
	struct tree *root, *at, *below;

	(void)state;
	T_OK(tree_new(t_arena, TREE_LIST, &root));
	at = root;
	for (int i = 0; i < TREE_DEPTH_MAX; i++, at = below) {
		T_OK(tree_new(t_arena, TREE_LIST, &below));
		T_OK(tree_append(t_arena, at, below));
	}
	T_OK(tree_check(root, 0, 1));
	T_OK(tree_new(t_arena, TREE_LIST, &below));
	T_OK(tree_append(t_arena, at, below));
	T_ERR(LIMIT_EXCEEDED, tree_check(root, 0, 1));
}

/* rows as text: path, then who has it on each side */
static char rows_text[4096];

static enum err print_row(void *ctx, struct iterate_row *row)
{
	size_t n = strlen(rows_text);
	struct str path;

	(void)ctx;
	T_OK(iterate_path(row, t_arena, &path));
	n += (size_t)snprintf(rows_text + n, sizeof rows_text - n, "%.*s:", (int)path.n, path.p);
	for (uint32_t i = 0; i < row->source_count; i++)
		n += (size_t)snprintf(rows_text + n, sizeof rows_text - n, "%u", row->source[i].rank);
	n += (size_t)snprintf(rows_text + n, sizeof rows_text - n, "/");
	for (uint32_t i = 0; i < row->companion_count; i++)
		n += (size_t)snprintf(rows_text + n, sizeof rows_text - n, "%u", row->companion[i].rank);
	snprintf(rows_text + n, sizeof rows_text - n, " ");
	return OK;
}

static void test_rows_join_what_differs(void **state)
{
	struct tree *a[3] = { t_tree("{'x':1,'y':[1,2],'z':{'p':1}}", 0), NULL, t_tree("{'z':{'q':1,'p':2},'x':1,'#0':1,'0':2}", 2) };
	struct tree *b[3] = { NULL, t_tree("{'y':[1,2,3],'w':1,'z':[9]}", 1), NULL };

	(void)state;
	rows_text[0] = '\0';
	T_OK(iterate_rows((struct iterate_side){ a, 3 }, (struct iterate_side){ b, 3 }, false, t_arena, print_row, NULL));
	assert_string_equal(rows_text, ":02/1 x:02/ y:0/1 y.0:0/1 y.1:0/1 y.2:/1 z:02/1 z.p:02/ z.q:2/ z.0:/1 0:2/ 0:2/ w:/1 ");
	rows_text[0] = '\0';
	T_OK(iterate_rows((struct iterate_side){ a, 1 }, (struct iterate_side){ b, 3 }, true, t_arena, print_row, NULL));
	assert_string_equal(rows_text, ":0/1 y:0/1 y.0:0/1 y.1:0/1 y.2:/1 w:/1 z:0/1 z.p:0/ z.0:/1 x:0/ ");
}

static enum err same(void *ctx, const struct iterate_leaf *leaf, struct tree **out)
{
	++*(int *)ctx;
	*out = (struct tree *)(uintptr_t)(leaf->companion ? leaf->companion : leaf->node);
	return OK;
}

static void test_iterate_options(void **state)
{
	struct tree **trees = t_world("{'a':'T f32 4','l':[1,{'b':'T f32 4'}],'t':{'$':['T f32 4',null]},'e':{}}", 4), *out[4];
	const uint32_t group[] = { 3, 1, 0 }, only[] = { 0, 2 }, far[] = { 3 };
	int calls = 0;
	const struct iterate_fns fns = { same, same, same, NULL, &calls };
	struct iterate_options o = { .group = group, .group_count = 3, .ranks_only = only, .ranks_only_count = 2, .cpu_offload = true };

	(void)state;
	trees[0]->children[0]->tensor.device = TREE_CUDA;
	T_OK(iterate(&fns, &o, trees, 4, t_arena, t_arena, out));
	assert_int_equal(calls, 9); /* rank 1 has its part in each, though it gets nothing */
	assert_true(tree_equal(out[0], trees[0]) && tree_equal(out[3], trees[3]));
	assert_int_equal(out[0]->children[0]->tensor.device, TREE_CPU);
	assert_int_equal(trees[0]->children[0]->tensor.device, TREE_CUDA);
	t_is(out[1], "{}");
	assert_null(out[2]);

	for (uint32_t r = 0; r < 4; r++)
		trees[r] = t_tree("['T f32 4']", r);
	T_OK(iterate(&fns, &o, trees, 4, t_arena, t_arena, out));
	assert_null(out[1]); /* only a dict becomes {} */
	o.ranks_only = far;
	o.ranks_only_count = 1;
	T_ERR(INVALID_REQUEST, iterate(&fns, &o, trees, 4, t_arena, t_arena, out));
}

static void test_type_check_names_the_rank(void **state)
{
	struct tree *trees[2] = { t_tree("{'a':[1,{'b':2}]}", 0), t_tree("{'a':[1,{'b':'O my.Thing'}]}", 1) }, *out[2];
	int calls = 0;
	const struct iterate_fns fns = { same, same, same, NULL, &calls };
	struct iterate_options o = { .type_check = true };

	(void)state;
	T_ERR(VALUE_TYPE, iterate(&fns, &o, trees, 2, t_arena, t_arena, out));
	assert_string_equal(err_last()->text, "Unexpected value type <class 'my.Thing'>");
	t_names("a.1.b", 1, "Unexpected");
	o.type_check = false;
	T_OK(iterate(&fns, &o, trees, 2, t_arena, t_arena, out));
	t_is(out[1], "{a: [1, {b: pickle}]}");
}

static void test_companion_mismatch_names_the_first_path(void **state)
{
	static const struct { const char *a, *b, *fqn, *words; } cases[] = {
		{ "{'x':1,'y':{'p':1}}", "{'x':1,'y':{'q':1}}", "y.p", "only the state dict" },
		{ "{'x':1}", "{'x':1,'y':{'q':1}}", "y", "only the companion" },
		{ "{'x':[1,2]}", "{'x':[1]}", "x", "2 items, the companion's 1" },
		{ "{'x':{'a':1}}", "{'x':[1]}", "x", "a dict, the companion a list" },
		{ "{'x':{'a':1}}", "{'x':5}", "x", "a dict, the companion a value" },
		{ "{'x':5}", "{'x':{'a':1}}", "x", "a value, the companion a dict" },
		{ "{'x':'T f32 4'}", "{'x':null}", "x", "a tensor, the companion a value" },
		{ "{'#1':1}", "{'1':1}", "1", "only the state dict" },
		{ "{}", "[]", "", "a dict, the companion a list" },
	};
	int calls = 0;
	const struct iterate_fns fns = { same, same, same, NULL, &calls };

	(void)state;
	for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
		struct tree *a[2] = { t_tree("{}", 0), t_tree(cases[i].a, 1) }, *b[2] = { t_tree("{}", 0), t_tree(cases[i].b, 1) };
		struct tree *out[2];
		const struct iterate_options o = { .companion = b };

		T_ERR(COMPANION_MISMATCH, iterate(&fns, &o, a, 2, t_arena, t_arena, out));
		t_names(cases[i].fqn, 1, cases[i].words);
	}
	struct tree *a[1] = { t_tree("{'l':[1,'T f32 4'],'t':{'$':[2]}}", 0) }, *b[1] = { t_tree("{'t':[7],'l':{'$':[0,'T f32 4']}}", 0) };
	struct tree *out[1], *none[1] = { NULL };
	struct iterate_options o = { .companion = b };
	T_OK(iterate(&fns, &o, a, 1, t_arena, t_arena, out)); /* order and list or tuple do not matter */
	t_is(out[0], "{l: [1, T float32 [4]], t: (2)}");
	assert_ptr_equal(out[0]->children[0]->children[1], b[0]->children[1]->children[1]);
	o.companion = none;
	T_ERR(COMPANION_MISMATCH, iterate(&fns, &o, a, 1, t_arena, t_arena, out));
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		T_CASE(test_dict_keeps_order_and_keys), T_CASE(test_shell_does_not_share_growth), T_CASE(test_equal), T_CASE(test_check),
		T_CASE(test_depth), T_CASE(test_rows_join_what_differs), T_CASE(test_iterate_options),
		T_CASE(test_type_check_names_the_rank), T_CASE(test_companion_mismatch_names_the_first_path),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
