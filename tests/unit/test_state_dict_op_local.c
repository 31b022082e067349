/* test_state_dict_op_local.c: create, copy, offload and compare, with the scenarios of PyTorch's test_state_dict_utils. */
#include "plan/state_dict_op.h"
#include "lib/t_tree.h"

#define COMPLICATED "{'tensor1':'T i64 10','tensor2':'T f32 10','bytes_io':'X io','bytes':'X b','step':'T f32','float':1.5," \
		    "'nested':{'list':[1,2,'T f32 3',{'x':'T bf16 2,2'}]}}"

static void test_create(void **state)
{
	struct tree **trees = t_world("{'w':'T f32 4','step':'T f32','z':'T f32 0,3','s':'S f32 4 / 0: 0+2 / 1: 2+2','d':'D f32 / 2 "
			"/ Replicate()',"
				      "'v':[1,'O my.Thing'],'n':'S f32 4 / 9: 0+4'}", 2);
	struct state_dict_op_request rq = { .kind = JOB_CREATE, .world_size = 2, .type_check = true };
	struct state_dict_op_plan p;

	(void)state;
	trees[0]->children[0]->tensor.requires_grad = true;
	trees[0]->children[0]->tensor.device = TREE_CUDA;
	T_OK(state_dict_op_plan(&rq, trees, NULL, NULL, t_arena, &p));
	for (uint32_t r = 0; r < 2; r++)
		assert_true(tree_equal(p.target[r], trees[r]));
	assert_int_equal(p.move_count, 0);
	assert_int_equal(p.made[0], 5); /* n has no shard on this rank */
	assert_true(p.target[0]->children[1]->tensor.shards[0].made);
	assert_ptr_not_equal(p.target[0]->children[6], trees[0]->children[6]); /* PyTorch gives the very object back */
	assert_false(p.target[0]->children[0]->tensor.requires_grad);
	assert_int_equal(p.target[0]->children[0]->tensor.device, TREE_CPU);
	T_ERR(INVALID_REQUEST, state_dict_op_plan(&rq, trees, trees, NULL, t_arena, &p));
}

static void test_create_compare_copy(void **state)
{
	struct tree **trees = t_world(COMPLICATED, 2), **other;
	struct state_dict_op_request rq = { .kind = JOB_CREATE, .world_size = 2 };
	struct state_dict_op_plan made, p;

	(void)state;
	T_OK(state_dict_op_plan(&rq, trees, NULL, NULL, t_arena, &made));
	rq.kind = JOB_COMPARE;
	T_OK(state_dict_op_plan(&rq, trees, made.target, NULL, t_arena, &p));
	assert_true(p.equal);
	assert_null(p.target[0]);
	rq.kind = JOB_COPY;
	rq.type_check = true;
	T_OK(state_dict_op_plan(&rq, trees, made.target, NULL, t_arena, &p));
	assert_int_equal(p.move_count, 2 * 5);
	assert_int_equal(p.bytes_total, 2 * (80 + 40 + 4 + 12 + 8));
	assert_int_equal(p.bytes_needed, 0);
	for (uint32_t r = 0; r < 2; r++) {
		t_all_covered(&p, trees, r, p.target[r]);
		assert_true(tree_equal(p.target[r], trees[r]));
	}
	assert_ptr_equal(p.target[0]->children[0], made.target[0]->children[0]);

	other = t_world("{'tensor1':'T i64 11','tensor2':'T f32 10','bytes_io':'X io','bytes':'X b','step':'T f32','float':1.5,"
			"'nested':{'list':[1,2,'T f32 3',{'x':'T bf16 2,2'}]}}", 2);
	rq.kind = JOB_COMPARE;
	T_OK(state_dict_op_plan(&rq, other, made.target, NULL, t_arena, &p));
	assert_false(p.equal);
	assert_int_equal(p.difference_count, 2);
	assert_string_equal(p.differences[1].path.p, "tensor1");
	assert_string_equal(p.differences[1].what.p, "size");
	assert_string_equal(p.differences[1].a.p, "int64 [11]");
	assert_int_equal(p.differences[1].rank, 1);
	rq.kind = JOB_COPY;
	T_ERR(SIZE_MISMATCH, state_dict_op_plan(&rq, other, made.target, NULL, t_arena, &p));
	t_names("tensor1", 0, "Size mismatch between source [11] and target [10]");
}

static void test_copy_values_and_casts(void **state)
{
	struct tree *a[1] = { t_tree("{'w':'T f32 4','lr':0.5,'l':{'$':[1,2]}}", 0) },
			*b[1] = { t_tree("{'l':[7,8],'lr':'X q','w':'T bf16 4'}", 0) };
	struct state_dict_op_request rq = { .kind = JOB_COPY, .world_size = 1 };
	struct state_dict_op_plan p;

	(void)state;
	T_OK(state_dict_op_plan(&rq, a, b, NULL, t_arena, &p));
	t_is(p.target[0], "{w: T bfloat16 [4], lr: 0.5, l: (1, 2)}");
	assert_int_equal(p.note_count, 1);
	assert_int_equal(p.notes[0].what, STATE_DICT_OP_NOTE_CAST);
	assert_string_equal(p.notes[0].path.p, "w");
	assert_string_equal(p.notes[0].from.p, "float32");
	assert_string_equal(p.notes[0].to.p, "bfloat16");
	a[0] = t_tree("{'w':'T f4 4','lr':0.5,'l':[1,2]}", 0);
	T_ERR(DTYPE_UNSUPPORTED, state_dict_op_plan(&rq, a, b, NULL, t_arena, &p));
	t_names("w", 0, "");
	T_ERR(INVALID_REQUEST, state_dict_op_plan(&rq, a, NULL, NULL, t_arena, &p));
}

static void test_copy_refuses_what_does_not_fit(void **state)
{
	static const struct { const char *a, *b; enum err e; } cases[] = {
		{ "{'w':'T f32 1'}", "{'w':'T f32 4'}", ERR_SIZE_MISMATCH },     /* copy_ would broadcast */
		{ "{'w':'T f32 4'}", "{'w':'T f32 4,1'}", ERR_SIZE_MISMATCH },
		{ "{'w':'T f32 4'}", "{'w':'S f32 4 / 0: 0+4'}", ERR_COMPANION_MISMATCH },
		{ "{'w':'S f32 4 / 0: 0+2 / 0: 2+2'}", "{'w':'S f32 4 / 0: 0+4'}", ERR_COMPANION_MISMATCH },
		{ "{'w':'D f32 4 / 1 / Partial(sum)'}", "{'w':'D f32 4 / 1 / Replicate()'}", ERR_COMPANION_MISMATCH },
		{ "{'w':'T f32 4'}", "{'w':4}", ERR_COMPANION_MISMATCH },
		{ "{'w':'O a.B'}", "{'w':4}", ERR_VALUE_TYPE },
	};
	struct state_dict_op_request rq = { .kind = JOB_COPY, .world_size = 1, .type_check = true };
	struct state_dict_op_plan p;

	(void)state;
	for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
		struct tree *a[1] = { t_tree(cases[i].a, 0) }, *b[1] = { t_tree(cases[i].b, 0) };
		assert_int_equal(state_dict_op_plan(&rq, a, b, NULL, t_arena, &p), cases[i].e);
		t_names("w", 0, "");
	}
}

static void test_offload(void **state)
{
	struct tree **trees = t_world("{'t1':'T i64 10','d':{'t2':'T f32 10','n':1}}", 4);
	const uint32_t only[] = { 0, 2 };
	struct state_dict_op_request rq = { .kind = JOB_OFFLOAD, .world_size = 4, .ranks_only = only, .ranks_only_count = 2 };
	struct state_dict_op_plan p;

	(void)state;
	trees[2]->children[0]->tensor.device = TREE_CUDA;
	T_OK(state_dict_op_plan(&rq, trees, NULL, NULL, t_arena, &p));
	for (uint32_t r = 0; r < 4; r++) {
		t_is(p.target[r], r % 2 ? "{}" : "{t1: T int64 [10], d: {t2: T float32 [10], n: 1}}");
		t_all_covered(&p, trees, r, p.target[r]);
	}
	assert_int_equal(p.target[2]->children[0]->tensor.device, TREE_CPU);
	assert_int_equal(p.move_count, 4);
	assert_int_equal(p.made[1], 0);
}

static void test_compare_lists_everything(void **state)
{
	struct tree *a[2] = { t_tree("{'a':1,'b':['T f32 4',2,3],'c':'T f32 4','k':{'x':1},'s':'S f32 4 / 0: 0+4','v':1.5}", 0), NULL };
	struct tree *b[2] = { t_tree("{'v':2.5,'s':'S f32 4 / 0: 0+2 / 0: 2+2','k':[1],'c':'T f64 5','b':['T f32 4',2],'z':1}", 0),
			t_tree("{}", 1) };
	static const char *const want[] = { ":missing in a", "a:missing in b", "b:length", "b.2:missing in b", "c:dtype", "c:size",
			"k:kind",
					    "s:layout", "v:value", "z:missing in a" };
	struct state_dict_op_request rq = { .kind = JOB_COMPARE, .world_size = 2, .values = true };
	struct state_dict_op_plan p;
	char text[128];

	(void)state;
	T_OK(state_dict_op_plan(&rq, a, b, NULL, t_arena, &p));
	assert_int_equal(p.difference_total, 10);
	for (size_t i = 0; i < 10; i++) {
		snprintf(text, sizeof text, "%.*s:%s", (int)p.differences[i].path.n, p.differences[i].path.p, p.differences[i].what.p);
		assert_string_equal(text, want[i]);
	}
	assert_int_equal(p.move_count, 1); /* b.0, the only pair to compare */
	assert_ptr_equal(p.moves[0].to, b[0]->children[4]->children[0]);
	rq.values = false;
	T_OK(state_dict_op_plan(&rq, a, b, NULL, t_arena, &p));
	assert_int_equal(p.difference_total, 9); /* PyTorch does not look at values either */
	assert_int_equal(p.move_count, 0);
}

static void test_compare_keeps_so_many(void **state)
{
	struct tree *a[1], *b[1] = { t_tree("{}", 0) }, *none;
	struct state_dict_op_request rq = { .kind = JOB_COMPARE, .world_size = 1 };
	struct state_dict_op_plan p;

	(void)state;
	T_OK(tree_new(t_arena, TREE_DICT, &a[0]));
	T_OK(tree_none(t_arena, &none));
	for (int64_t i = 0; i < 5000; i++)
		T_OK(tree_put(t_arena, a[0], tree_key_int(i), none));
	T_OK(state_dict_op_plan(&rq, a, b, NULL, t_arena, &p));
	assert_int_equal(p.difference_total, 5000);
	assert_int_equal(p.difference_count, STATE_DICT_OP_DIFFERENCES_MAX);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		T_CASE(test_create), T_CASE(test_create_compare_copy), T_CASE(test_copy_values_and_casts),
		T_CASE(test_copy_refuses_what_does_not_fit), T_CASE(test_offload), T_CASE(test_compare_lists_everything),
		T_CASE(test_compare_keeps_so_many),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
