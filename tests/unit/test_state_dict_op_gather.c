/* test_state_dict_op_gather.c: sharded tensors become whole, whatever their cut. */
#include "plan/state_dict_op.h"
#include "lib/t_tree.h"

static void gather(const char *text, uint32_t world, struct state_dict_op_plan *p, struct tree ***trees_out)
{
	struct state_dict_op_request rq = { .kind = JOB_GATHER, .world_size = world, .type_check = true };

	*trees_out = t_world(text, world);
	T_OK(state_dict_op_plan(&rq, *trees_out, NULL, NULL, t_arena, p));
}

/* All ranks get one whole tensor, each element once. */
static void test_any_cut(void **state)
{
	static const char *const cuts[] = {
		"S f32 12,3,3 / 0: 0,0,0+3,3,3 / 1: 3,0,0+3,3,3 / 2: 6,0,0+3,3,3 / 3: 9,0,0+3,3,3",
		"S f32 2,8 / 0: 0,0+2,3 / 1: 0,3+2,3 / 2: 0,6+2,2",                     /* columns: PyTorch scrambles them */
		"S f32 5,4 / 3: 0,0+1,4 / 0: 1,0+2,4 / 2: 3,0+2,2 / 1: 3,2+2,2",        /* uneven, in no order */
		"S f32 6 / 0: 0+1 / 0: 3+1 / 1: 1+2 / 1: 4+2 / 2: 6+0",                 /* several shards a rank, and an empty one */
		"S f32 0,3 / 0: 0,0+0,3",                                               /* no rows: PyTorch divides by zero */
		"D f32 8,4 / 2x2 / Shard(0) Shard(1)", "D f32 7,4 / 2x2 / Shard(0) Shard(0)", "D f32 3 / 4 / Shard(0)",
		"D f32 8,6 / 2x2 / Replicate() Shard(1)", "D f32 10,2 / 2x2 / _StridedShard(0,sf=2) Shard(0)",
		"D f32 10,2 / 2x2 / _StridedShard(0,sf=2) Replicate()", "D f32 8 / 2 / Shard(0) / 3,1", "D f32 / 4 / Replicate()",
	};
	struct state_dict_op_plan p;
	struct tree **trees;
	char text[256];

	(void)state;
	for (size_t i = 0; i < sizeof cuts / sizeof *cuts; i++) {
		snprintf(text, sizeof text, "{'l':[1,{'w':'%s'}]}", cuts[i]);
		gather(text, 4, &p, &trees);
		for (uint32_t r = 0; r < 4; r++) {
			const struct tree *w = p.target[r]->children[0]->children[1]->children[0];
			assert_int_equal(w->kind, TREE_TENSOR);
			assert_true(tree_same_shape(w, trees[0]->children[0]->children[1]->children[0]));
			assert_int_equal(p.made[r], 1);
			t_all_covered(&p, trees, r, p.target[r]);
		}
	}
}

/* PyTorch's test: a random 3x3x3 tensor per rank, gathered to ranks 0 and 2. */
static void test_ranks_only(void **state)
{
	struct tree **trees = t_world("{'w':'S f32 12,3,3 / 0: 0,0,0+3,3,3 / 1: 3,0,0+3,3,3 / 2: 6,0,0+3,3,3 / 3: 9,0,0+3,3,3'}", 4);
	const uint32_t only[] = { 0, 2 };
	struct state_dict_op_request rq = { .kind = JOB_GATHER, .world_size = 4, .ranks_only = only, .ranks_only_count = 2 };
	struct state_dict_op_plan p;

	(void)state;
	T_OK(state_dict_op_plan(&rq, trees, NULL, NULL, t_arena, &p));
	for (uint32_t r = 0; r < 4; r++) {
		t_is(p.target[r], r % 2 ? "{}" : "{w: T float32 [12, 3, 3]}");
		t_all_covered(&p, trees, r, p.target[r]);
		assert_int_equal(p.made[r], r % 2 ? 0 : 1); /* no full copy where nobody asked for it */
	}
	assert_int_equal(p.move_count, 8);
	assert_int_equal(p.bytes_total, 2 * 432);
	assert_int_equal(p.bytes_needed, 2 * 324);
	for (uint64_t i = 0; i < 8; i++)
		assert_int_equal(p.moves[i].to_rank, i < 4 ? 0 : 2);
}

static void test_group(void **state)
{
	struct tree **trees = t_world("{'s':'S f32 4 / 3: 0+2 / 1: 2+2','d':'D f32 4 / 2 / Shard(0) / 0,1'}", 4);
	const uint32_t group[] = { 3, 1 }, only[] = { 1 };
	struct state_dict_op_request rq = { .kind = JOB_GATHER, .world_size = 4, .group = group, .group_count = 2, .ranks_only = only,
					    .ranks_only_count = 1 };
	struct state_dict_op_plan p;

	(void)state;
	T_OK(state_dict_op_plan(&rq, trees, NULL, NULL, t_arena, &p)); /* the DTensor is gathered over its mesh, as in PyTorch */
	assert_null(p.target[0]);
	t_is(p.target[3], "{}");
	t_is(p.target[1], "{s: T float32 [4], d: T float32 [4]}");
	t_all_covered(&p, trees, 1, p.target[1]);
}

static void test_complicated(void **state)
{
	struct state_dict_op_plan p;
	struct tree **trees;

	(void)state;
	gather("{'l':['S f32 4 / 0: 0+2 / 1: 2+2','T f32 4',{'$':['S f32 4 / 0: 0+2 / 1: 2+2',7]}],'s':'S i64 2 / 1: 0+2','range':[0,"
			"1,2]}", 2,
	       &p, &trees);
	for (uint32_t r = 0; r < 2; r++) {
		t_is(p.target[r], "{l: [T float32 [4], T float32 [4], (T float32 [4], 7)], s: T int64 [2], range: [0, 1, 2]}");
		t_all_covered(&p, trees, r, p.target[r]);
	}
}

static void test_partial(void **state)
{
	static const struct { const char *text; uint32_t members; enum reduce_op op; uint32_t divisor; } cases[] = {
		{ "D f32 6 / 4 / Partial()", 4, REDUCE_SUM, 1 },
		{ "D f32 6 / 4 / Partial(avg)", 4, REDUCE_AVG, 4 },
		{ "D i64 6 / 4 / Partial(max)", 4, REDUCE_MAX, 1 },
		{ "D i64 6 / 2x2 / Partial(min) Shard(0)", 2, REDUCE_MIN, 1 },
		{ "D f32 6 / 2x2 / Shard(0) Partial(product)", 2, REDUCE_PRODUCT, 1 },
		{ "D f32 6 / 2x2 / Replicate() Partial()", 2, REDUCE_SUM, 1 },
		{ "D f32 6 / 2x2 / Partial(sum) Partial(avg)", 4, REDUCE_AVG, 2 },
		{ "D f32 6 / 2x2 / Partial(avg) Partial(sum)", 4, REDUCE_AVG, 2 },
		{ "D c64 6 / 2x2 / Partial(avg) Partial(avg)", 4, REDUCE_AVG, 4 },
	};
	struct state_dict_op_plan p;
	struct tree **trees;
	char text[128];

	(void)state;
	for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
		snprintf(text, sizeof text, "{'g':'%s'}", cases[i].text);
		gather(text, 4, &p, &trees);
		for (uint32_t r = 0; r < 4; r++) {
			assert_int_equal(p.target[r]->children[0]->kind, TREE_TENSOR);
			t_covered(&p, trees, r, p.target[r]->children[0], cases[i].members);
		}
		for (uint64_t m = 0; m < p.move_count; m++) {
			const struct state_dict_op_move *at = &p.moves[m];
			assert_int_equal(at->op, cases[i].op);
			assert_int_equal(at->divisor, cases[i].divisor);
			/* a number's moves stand in a row, come from different ranks and give one box */
			if (m && at[-1].reduce == at->reduce) {
				assert_true(at[-1].from_rank != at->from_rank && at[-1].dims == at->dims && at[-1].to == at->to);
			} else {
				for (uint64_t k = 0; k < m; k++)
					assert_int_not_equal(p.moves[k].reduce, at->reduce);
			}
		}
	}
}

static void test_partial_errors(void **state)
{
	static const struct { const char *text; enum err e; } cases[] = {
		{ "{'g':'D f32 6 / 2x2 / Partial(sum) Partial(max)'}", ERR_LAYOUT_INVALID },
		{ "{'g':'D i64 6 / 4 / Partial(avg)'}", ERR_DTYPE_UNSUPPORTED },
		{ "{'g':'D c64 6 / 4 / Partial(max)'}", ERR_DTYPE_UNSUPPORTED },
	};
	struct state_dict_op_request rq = { .kind = JOB_GATHER, .world_size = 4 };
	struct state_dict_op_plan p;

	(void)state;
	for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
		assert_int_equal(state_dict_op_plan(&rq, t_world(cases[i].text, 4), NULL, NULL, t_arena, &p), cases[i].e);
		t_names("g", 0, "");
	}
	struct tree **trees = t_world("{'g':'D f32 6 / 4 / Partial()'}", 4);
	trees[2] = NULL;
	T_ERR(PLAN_INVALID, state_dict_op_plan(&rq, trees, NULL, NULL, t_arena, &p));
	t_names("g", 2, "missing on rank 2");
}

static void test_shards_that_do_not_fit(void **state)
{
	static const struct { const char *text; enum err e; int64_t rank; const char *words; } cases[] = {
		{ "{'a':{'w':'S f32 4 / 0: 0+2 / 1: 1+3'}}", ERR_PLAN_INVALID, 1, "[0]+[2] of rank 0 and [1]+[3] of rank 1" },
		{ "{'a':{'w':'S f32 4,4 / 0: 0,0+2,4 / 1: 2,0+2,3'}}", ERR_COVERAGE_HOLE, -1, "14 of 16" },
		{ "{'a':{'w':'S f32 4 / 0: 0+2'}}", ERR_COVERAGE_HOLE, 1, "2 of 4" },
		{ "{'a':{'w':'S f32 4,4 / 0: 0,0+4,2 / 1: 0,2+2,2 / 1: 1,3+2,1'}}", ERR_PLAN_INVALID, 1, "overlap" },
		{ "{'a':{'w':'S f32 4,4 / 0: 0,0+3,3 / 1: 2,2+2,2'}}", ERR_PLAN_INVALID, 1, "overlap" },
	};
	struct state_dict_op_request rq = { .kind = JOB_GATHER, .world_size = 2 };
	struct state_dict_op_plan p;

	(void)state;
	for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
		assert_int_equal(state_dict_op_plan(&rq, t_world(cases[i].text, 2), NULL, NULL, t_arena, &p), cases[i].e);
		t_names("a.w", cases[i].rank, cases[i].words);
	}
}

static void test_ranks_that_differ(void **state)
{
	static const struct { const char *a, *b; } cases[] = {
		{ "{'w':'S f32 4 / 0: 0+2'}", "{'w':'S f32 5 / 1: 2+3'}" }, { "{'w':'S f32 4 / 0: 0+2'}", "{'w':'S f64 4 / 1: 2+2'}" },
		{ "{'w':'S f32 4 / 0: 0+2'}", "{'w':'T f32 4'}" }, { "{'w':'S f32 4 / 0: 0+2'}", "{'w':3}" },
		{ "{'w':'D f32 4 / 2 / Shard(0)'}", "{'w':'D f32 4 / 2 / Replicate()'}" },
	};
	struct state_dict_op_request rq = { .kind = JOB_GATHER, .world_size = 2 };
	struct state_dict_op_plan p;

	(void)state;
	for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
		struct tree *trees[2] = { t_tree(cases[i].a, 0), t_tree(cases[i].b, 1) };
		T_ERR(PLAN_INVALID, state_dict_op_plan(&rq, trees, NULL, NULL, t_arena, &p));
		t_names("w", 1, "rank 1");
	}
	struct tree *trees[2] = { t_tree("{'w':'S f32 4 / 0: 0+2'}", 0), t_tree("{}", 1) };
	T_ERR(COVERAGE_HOLE, state_dict_op_plan(&rq, trees, NULL, NULL, t_arena, &p));
	t_names("w", 0, "2 of 4");
}

static void test_into_a_target(void **state)
{
	struct tree **trees = t_world("{'w':'S f32 4 / 0: 0+2 / 1: 2+2','v':1}", 2);
	struct tree *to[2] = { t_tree("{'w':'T f64 4','v':2}", 0), NULL };
	const uint32_t only[] = { 0 };
	struct state_dict_op_request rq = { .kind = JOB_GATHER, .world_size = 2, .ranks_only = only, .ranks_only_count = 1 };
	struct state_dict_op_plan p;

	(void)state;
	T_OK(state_dict_op_plan(&rq, trees, to, NULL, t_arena, &p));
	assert_ptr_equal(p.target[0]->children[0], to[0]->children[0]);
	t_is(p.target[0], "{w: T float64 [4], v: 1}");
	t_is(p.target[1], "{}");
	assert_int_equal(p.made[0], 0);
	assert_int_equal(p.note_count, 1);
	to[0] = t_tree("{'w':'S f32 4 / 0: 0+2 / 1: 2+2','v':2}", 0);
	T_ERR(COMPANION_MISMATCH, state_dict_op_plan(&rq, trees, to, NULL, t_arena, &p));
	to[0] = t_tree("{'w':'T f32 5','v':2}", 0);
	T_ERR(SIZE_MISMATCH, state_dict_op_plan(&rq, trees, to, NULL, t_arena, &p));
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		T_CASE(test_any_cut), T_CASE(test_ranks_only), T_CASE(test_group), T_CASE(test_complicated), T_CASE(test_partial),
		T_CASE(test_partial_errors), T_CASE(test_shards_that_do_not_fit), T_CASE(test_ranks_that_differ),
				T_CASE(test_into_a_target),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
