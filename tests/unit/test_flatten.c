/* test_flatten.c: the three flattenings, and paths. What is expected was taken from PyTorch 2.15; tests/interop/test_flatten.py compares
 * with it at random. */
#include "plan/flatten.h"
#include "plan/traverse.h"
#include "lib/t_tree.h"

/* "key=value; …" with list positions in the path marked */
static void flat_is(const char *tree, enum flatten_rule rule, const char *want)
{
	char got[2048] = "", one[512];
	struct flat flat;
	size_t n = 0;

	T_OK(flatten(t_tree(tree, 0), rule, t_arena, &flat));
	for (uint64_t i = 0; i < flat.count; i++) {
		n += (size_t)snprintf(got + n, sizeof got - n, "%s", i ? "; " : "");
		for (uint32_t k = 0; k < flat.paths[i].count; k++) {
			const struct tree_key *part = &flat.paths[i].parts[k];
			n += part->is_int ? (size_t)snprintf(got + n, sizeof got - n, "[%jd]", (intmax_t)part->index) :
					    (size_t)snprintf(got + n, sizeof got - n, "/%.*s", (int)part->text.n, part->text.p);
		}
		t_print(flat.values[i], one, sizeof one);
		n += (size_t)snprintf(got + n, sizeof got - n, "=%s", one);
	}
	assert_string_equal(got, want);
}

static void test_rules_differ(void **state)
{
	const char *tree = "{'a':{'b':[1,2],'c':'T f32 2'},'t':{'$':['T f32 2',{'x':1}]},'l':[{'y':1},5],'m':[[['T f32 2']],[3]],'e':{},"
			   "'el':[],'#7':'X z','n':{'deep':{'v':1}},'le':[[],{}]}";

	(void)state;
	flat_is(tree, FLATTEN_UTILS,
		"/a/b[0]=1; /a/b[1]=2; /a/c=T float32 [2]; /t[0]=T float32 [2]; /t[1]/x=1; /l[0]/y=1; /l[1]=5; /m[0][0][0]=T float32 [2]; "
		"/m[1][0]=3; /7=z; /n/deep/v=1");
	flat_is(tree, FLATTEN_DCP,
		"/a/b=[1, 2]; /a/c=T float32 [2]; /t=(T float32 [2], {x: 1}); /l[0]/y=1; /l[1]=5; /m[0][0][0]=T float32 [2]; /m[1]=[3]; "
		"/el=[]; /7=z; /n/deep/v=1; /le[0]=[]");
	flat_is(tree, FLATTEN_DCP_2_3,
		"/a/b=[1, 2]; /a/c=T float32 [2]; /t=(T float32 [2], {x: 1}); /l=[{y: 1}, 5]; /m[0][0][0]=T float32 [2]; /m[1]=[3]; "
		"/e={}; /el=[]; /7=z; /n={deep: {v: 1}}; /le=[[], {}]");
}

static void test_duplicates(void **state)
{
	static const char *const all[] = { "{'a':{'b':1},'a.b':2}", "{'1':1,'#1':2}", "{'l':['T f32 1'],'l.0':1}" };
	static const char *const texts[] = { "duplicated flatten key a.b", "duplicated flatten key 1", "duplicated flatten key l.0" };
	struct flat flat;

	(void)state;
	for (size_t i = 0; i < 3; i++) {
		T_ERR(DUPLICATE_KEY, flatten(t_tree(all[i], 0), FLATTEN_DCP, t_arena, &flat));
		assert_string_equal(err_last()->text, texts[i]);
		T_ERR(DUPLICATE_KEY, flatten(t_tree(all[i], 0), FLATTEN_UTILS, t_arena, &flat));
	}
	T_OK(flatten(t_tree(all[0], 0), FLATTEN_DCP_2_3, t_arena, &flat)); /* {'b': 1} is a leaf there */
}

static void test_undo(void **state)
{
	struct flat flat;
	struct tree *out;

	(void)state;
	T_OK(flatten(t_tree("{'a':{'b':[1,{'$':[2,3]}],'e':{}},'#3':4}", 0), FLATTEN_UTILS, t_arena, &flat));
	T_OK(flatten_undo(&flat, t_arena, &out));
	t_is(out, "{a: {b: [1, [2, 3]]}, 3: 4}");
	assert_false(out->keys[1].is_int);
	T_OK(flatten(t_tree("{'l':[{},'T f32 2',{}]}", 0), FLATTEN_DCP, t_arena, &flat)); /* a hole, and a shorter list: as PyTorch */
	T_OK(flatten_undo(&flat, t_arena, &out));
	t_is(out, "{l: [null, T float32 [2]]}");
	T_ERR(KIND_MISMATCH, flatten(t_tree("[1]", 0), FLATTEN_DCP, t_arena, &flat));
}

static struct tree_path path_of(const char *text)
{
	struct tree_key *parts = t_alloc(400, sizeof *parts);
	struct tree *list = t_tree(text, 0);

	for (uint32_t i = 0; i < list->count; i++) {
		struct str s = list->children[i]->value.bytes;
		parts[i] = *s.p == '"' ? tree_key_str((struct str){ s.p + 1, s.n - 2 }) : tree_key_int(strtoll(s.p, NULL, 10));
	}
	return (struct tree_path){ parts, list->count };
}

static void set_is(const char *tree, const char *path, const char *want)
{
	struct tree *t = t_tree(tree, 0);

	T_OK(traverse_set_element(t_arena, t, path_of(path), t_tree("9", 0)));
	t_is(t, want);
}

static void test_set_element(void **state)
{
	(void)state;
	set_is("{}", "['a','b',2,'c']", "{a: {b: [null, null, {c: 9}]}}");
	set_is("{'a':[1]}", "['a',0]", "{a: [9]}");
	set_is("{'a':[1]}", "['a',-1]", "{a: [9]}");
	set_is("{'a':[null]}", "['a',0,0]", "{a: [[9]]}");
	set_is("{}", "[0,'a']", "{0: {a: 9}}");
	set_is("{'x':1}", "[0]", "{x: 1, 0: 9}"); /* a dict that is longer than the int takes it */
	set_is("{'a':{'$':[{}]}}", "['a',0,'k']", "{a: ({k: 9})}");

	static const char *const bad[][2] = {
		{ "{'a':1}", "['a','b']" }, { "{'a':null}", "['a','b']" }, { "{'a':[1]}", "['a','b']" }, { "{'a':[1]}", "['a',0,0]" },
		{ "{'a':{'$':[1]}}", "['a',0]" }, { "{'a':{'$':[null]}}", "['a',0,'k']" }, { "{'a':{'$':[1]}}", "['a',1,'k']" },
		{ "{'a':'T f32 4'}", "['a',0]" }, { "{}", "[0]" },
	};
	for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
		T_ERR(KIND_MISMATCH, traverse_set_element(t_arena, t_tree(bad[i][0], 0), path_of(bad[i][1]), t_tree("9", 0)));
	T_ERR(RANGE_INVALID, traverse_set_element(t_arena, t_tree("{'a':[]}", 0), path_of("['a',-1]"), t_tree("9", 0)));
	T_ERR(LIMIT_EXCEEDED, traverse_set_element(t_arena, t_tree("{'a':[]}", 0), path_of("['a',1000000000000]"), t_tree("9", 0)));
	T_ERR(LIMIT_EXCEEDED, traverse_set_element(t_arena, t_tree("{}", 0), (struct tree_path){ NULL, 0 }, t_tree("9", 0)));
}

static void test_get_element(void **state)
{
	struct tree *t = t_tree("{'a':[1,{'b':2}],'t':{'$':[3]}}", 0);

	(void)state;
	t_is(traverse_get_element(t, path_of("['a',1,'b']")), "2");
	t_is(traverse_get_element(t, path_of("['a',-2]")), "1");
	t_is(traverse_get_element(t, path_of("[]")), "{a: [1, {b: 2}], t: (3)}");
	assert_null(traverse_get_element(t, path_of("['a',2]"))); /* PyTorch raises IndexError: its check is off by one */
	assert_null(traverse_get_element(t, path_of("['a',3]")));
	assert_null(traverse_get_element(t, path_of("['t',0]"))); /* a tuple is not walked */
	assert_null(traverse_get_element(t, path_of("['a',0,'b']")));
	assert_null(traverse_get_element(t, path_of("['c']")));
}

static void test_rule_names(void **state)
{
	enum flatten_rule rule;

	(void)state;
	T_OK(flatten_rule_parse(STR("utils"), &rule));
	assert_int_equal(rule, FLATTEN_UTILS);
	T_OK(flatten_rule_parse(STR("dcp-2.3"), &rule));
	assert_int_equal(rule, FLATTEN_DCP_2_3);
	T_ERR(VALIDATION_FAILED, flatten_rule_parse(STR("dcp-2"), &rule));
}

static void test_too_deep(void **state)
{
	struct tree *root, *at, *below;
	struct flat flat;

	(void)state;
	T_OK(tree_new(t_arena, TREE_DICT, &root));
	at = root;
	for (int i = 0; i < 100000; i++, at = below) {
		T_OK(tree_new(t_arena, TREE_DICT, &below));
		T_OK(tree_put(t_arena, at, tree_key_int(0), below));
	}
	for (enum flatten_rule r = FLATTEN_UTILS; r <= FLATTEN_DCP_2_3; r++)
		T_ERR(LIMIT_EXCEEDED, flatten(root, r, t_arena, &flat));
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		T_CASE(test_rules_differ), T_CASE(test_duplicates), T_CASE(test_undo), T_CASE(test_set_element), T_CASE(test_get_element),
		T_CASE(test_rule_names), T_CASE(test_too_deep),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
