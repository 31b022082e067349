/* test_state_dict_op_cut.c: targets that are not there yet: everything the source has, cut by a layout. */
#include "plan/state_dict_op.h"
#include "lib/t_tree.h"

static const struct placement shard0 = { .kind = PLACE_SHARD }, shard1 = { .kind = PLACE_SHARD, .dim = 1 },
			      partial = { .kind = PLACE_PARTIAL };
static const struct placement grid[2] = { { .kind = PLACE_SHARD, .dim = 1 }, { .kind = PLACE_REPLICATE } };
static const int64_t two_two[2] = { 2, 2 };
static const uint32_t pair[2] = { 2, 0 };

static void test_redistribute_by_layout(void **state)
{
	const struct layout_rule rules[] = {
		{ .match = STR("col"), .kind = LAYOUT_MESH, .placements = &shard1, .placement_count = 1 },
		{ .match = STR("g.*"), .kind = LAYOUT_MESH, .mesh_ndim = 2, .mesh = two_two, .placements = grid, .placement_count = 2 },
		{ .match = STR("pair"), .kind = LAYOUT_CHUNKS, .chunk_dim = 0, .ranks = pair, .rank_count = 2 },
	};
	const struct layout l = { rules, 3, 4 };
	struct state_dict_op_request rq = { .kind = JOB_REDISTRIBUTE, .world_size = 4, .layout = &l };
	struct tree **from = t_world("{'col':'D f32 8,4 / 4 / Shard(0)','g':{'w':'D f32 2,6 / 4 / Replicate()'},'pair':'T f32 5',"
				     "'other':'S f32 6 / 1: 0+6','step':'T f32','v':{'$':[1,'X b']},'e':[]}", 4);
	struct state_dict_op_plan p;

	(void)state;
	T_OK(state_dict_op_plan(&rq, from, NULL, NULL, t_arena, &p));
	t_is(p.target[0], "{col: D float32 [8, 4] [0, 0]+[8, 1], g: {w: D float32 [2, 6] [0, 0]+[2, 3]}, pair: S float32 [5] [3]+[2], "
			  "other: D float32 [6] [0]+[2], step: T float32 [], v: (1, b), e: []}");
	t_is(p.target[3], "{col: D float32 [8, 4] [0, 3]+[8, 1], g: {w: D float32 [2, 6] [0, 3]+[2, 3]}, pair: S float32 [5], "
			  "other: D float32 [6] [6]+[0], step: T float32 [], v: (1, b), e: []}");
	for (uint32_t r = 0; r < 4; r++)
		t_all_covered(&p, from, r, p.target[r]);
	assert_int_equal(p.target[0]->children[1]->children[0]->tensor.mesh->ndim, 2);
	assert_int_equal(p.bytes_needed, 4 * 6 * 4 + 4 * 4 + 0);
	assert_ptr_equal(p.target[0]->children[0]->tensor.mesh, p.target[3]->children[0]->tensor.mesh);
	for (uint32_t r = 0; r < 4; r++)
		T_OK(tree_check(p.target[r], r, 4)); /* a result can be a source */

	from[1]->children[0] = t_tree("'D f32 8,5 / 4 / Shard(0)'", 1);
	T_ERR(SIZE_MISMATCH, state_dict_op_plan(&rq, from, NULL, NULL, t_arena, &p));
	t_names("col", 1, "Size mismatch");
	from[1]->children[0] = t_tree("[1]", 1);
	T_ERR(PLAN_INVALID, state_dict_op_plan(&rq, from, NULL, NULL, t_arena, &p));
	t_names("col", 1, "rank 0 has a DTensor, rank 1 a list");
}

/* A world that grows: the new ranks have no source. */
static void test_ranks_without_a_source(void **state)
{
	struct tree *from[4] = { t_tree("{'w':'S f32 8 / 0: 0+4 / 1: 4+4','a':1}", 0),
				 t_tree("{'w':'S f32 8 / 0: 0+4 / 1: 4+4','b':2}", 1) };
	struct state_dict_op_request rq = { .kind = JOB_REDISTRIBUTE, .world_size = 4 };
	struct state_dict_op_plan p;

	(void)state;
	T_OK(state_dict_op_plan(&rq, from, NULL, NULL, t_arena, &p));
	for (uint32_t r = 0; r < 4; r++) {
		char want[128];
		snprintf(want, sizeof want, "{w: D float32 [8] [%u]+[2], a: 1, b: 2}", r * 2);
		t_is(p.target[r], want);
		t_all_covered(&p, from, r, p.target[r]);
	}
	assert_int_equal(p.bytes_needed, 3 * 8);
}

static void test_broadcast_and_distribute(void **state)
{
	struct tree *from[3] = { NULL, t_tree("{'w':'T f32 4,3','step':'T i64','l':[1,'T f32 2']}", 1), NULL };
	const struct layout_rule rules[] = { { .match = STR("w"), .kind = LAYOUT_MESH, .placements = &shard1, .placement_count = 1 } };
	const struct layout l = { rules, 1, 3 };
	struct state_dict_op_request rq = { .kind = JOB_BROADCAST, .world_size = 3, .root = 1 };
	struct state_dict_op_plan p;

	(void)state;
	T_OK(state_dict_op_plan(&rq, from, NULL, NULL, t_arena, &p)); /* no layout: everybody has all */
	t_is(p.target[2], "{w: T float32 [4, 3], step: T int64 [], l: [1, T float32 [2]]}");
	rq.layout = &l;
	for (int i = 0; i < 2; i++) {
		T_OK(state_dict_op_plan(&rq, from, NULL, NULL, t_arena, &p));
		t_is(p.target[2], "{w: D float32 [4, 3] [0, 2]+[4, 1], step: T int64 [], l: [1, D float32 [2] [2]+[0]]}");
		for (uint32_t r = 0; r < 3; r++)
			t_all_covered(&p, from, r, p.target[r]);
		assert_int_equal(p.note_count, 0);
		rq.kind = JOB_DISTRIBUTE;
	}
}

static void test_group(void **state)
{
	struct tree **from = t_world("{'w':'T f32 4'}", 4);
	const uint32_t group[] = { 3, 1 };
	struct state_dict_op_request rq = { .kind = JOB_REDISTRIBUTE, .world_size = 4, .group = group, .group_count = 2 };
	const struct layout_rule all = { .match = STR("*"), .kind = LAYOUT_MESH, .placements = &shard0, .placement_count = 1 };
	const struct layout_rule part = { .match = STR("*"), .kind = LAYOUT_MESH, .placements = &partial, .placement_count = 1 };
	struct layout l = { &all, 1, 4 };
	struct state_dict_op_plan p;

	(void)state;
	T_OK(state_dict_op_plan(&rq, from, NULL, NULL, t_arena, &p)); /* the default is over the group */
	t_is(p.target[3], "{w: D float32 [4] [0]+[2]}");
	t_is(p.target[1], "{w: D float32 [4] [2]+[2]}");
	assert_null(p.target[0]);
	rq.layout = &l;
	T_ERR(LAYOUT_INVALID, state_dict_op_plan(&rq, from, NULL, NULL, t_arena, &p));
	t_names("w", 0, "not in the group");
	rq.group = NULL;
	l.rules = &part;
	T_ERR(LAYOUT_INVALID, state_dict_op_plan(&rq, from, NULL, NULL, t_arena, &p));
	l.world_size = 5;
	T_ERR(WORLD_MISMATCH, state_dict_op_plan(&rq, from, NULL, NULL, t_arena, &p));
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		T_CASE(test_redistribute_by_layout), T_CASE(test_ranks_without_a_source), T_CASE(test_broadcast_and_distribute),
		T_CASE(test_group),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
