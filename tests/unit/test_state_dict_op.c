/* test_state_dict_op.c: the request's checks, and plans for large state dicts: time and memory. */
#include "plan/state_dict_op.h"

#include <time.h>

#include "base/mem.h"
#include "lib/t_tree.h"

enum { WORLD = 64, TENSORS = 10000 };

static void test_bad_requests(void **state)
{
	struct tree **trees = t_world("{'w':'T f32 4'}", 2);
	const uint32_t far[] = { 2 }, twice[] = { 1, 1 };
	struct state_dict_op_plan p;

	(void)state;
	struct state_dict_op_request rq = { .kind = JOB_GATHER, .world_size = 2, .group = far, .group_count = 1 };
	T_ERR(INVALID_REQUEST, state_dict_op_plan(&rq, trees, NULL, NULL, t_arena, &p));
	rq.group = twice;
	rq.group_count = 2;
	T_ERR(INVALID_REQUEST, state_dict_op_plan(&rq, trees, NULL, NULL, t_arena, &p));
	rq = (struct state_dict_op_request){ .kind = JOB_GATHER, .world_size = 2, .ranks_only = far, .ranks_only_count = 1 };
	T_ERR(INVALID_REQUEST, state_dict_op_plan(&rq, trees, NULL, NULL, t_arena, &p));
	rq = (struct state_dict_op_request){ .kind = JOB_GATHER, .world_size = 2, .plan_for = far, .plan_for_count = 1 };
	T_ERR(INVALID_REQUEST, state_dict_op_plan(&rq, trees, NULL, NULL, t_arena, &p));
	rq = (struct state_dict_op_request){ .kind = JOB_KIND_COUNT, .world_size = 2 };
	T_ERR(INVALID_REQUEST, state_dict_op_plan(&rq, trees, NULL, NULL, t_arena, &p));
	rq = (struct state_dict_op_request){ .kind = JOB_GATHER };
	T_ERR(WORLD_MISMATCH, state_dict_op_plan(&rq, trees, NULL, NULL, t_arena, &p));
}

static void test_hostile_trees(void **state)
{
	struct state_dict_op_request rq = { .kind = JOB_GATHER, .world_size = 1 };
	struct tree *trees[1] = { t_tree("{'w':'T f64 9223372036854775807,3'}", 0) };
	struct state_dict_op_plan p;

	(void)state;
	T_ERR(LIMIT_EXCEEDED, state_dict_op_plan(&rq, trees, NULL, NULL, t_arena, &p));
	t_names("w", 0, "");
	trees[0] = t_tree("{'w':'S f32 9 / 0: 9223372036854775807+9223372036854775807'}", 0);
	T_ERR(PLAN_INVALID, state_dict_op_plan(&rq, trees, NULL, NULL, t_arena, &p));
	trees[0] = t_tree("{'w':'T f32 4'}", 0);
	struct tree *to[1] = { t_tree("{'w':'D f32 4 / 2 / Shard(0)'}", 0) };
	T_ERR(WORLD_MISMATCH, state_dict_op_plan(&rq, trees, to, NULL, t_arena, &p));
}

/* Out of memory anywhere ends in an error; LeakSanitizer sees the rest. */
static void test_no_memory(void **state)
{
	struct tree **trees = t_world("{'w':'D f32 8,4 / 2x2 / Shard(0) Shard(1)','p':'D f32 4 / 4 / Partial()','v':[1]}", 4);
	struct state_dict_op_request rq = { .kind = JOB_REDISTRIBUTE, .world_size = 4 };
	struct state_dict_op_plan p;
	enum err e = ERR_NO_MEMORY;

	(void)state;
	for (uint64_t n = 1; e; n++) {
		mem_fail_at(n);
		e = state_dict_op_plan(&rq, trees, NULL, NULL, t_arena, &p);
		mem_fail_at(0);
		assert_true(e == OK || e == ERR_NO_MEMORY);
		assert_true(n < 1000);
	}
	t_all_covered(&p, trees, 0, p.target[0]->children[0]);
}

/* 10,000 tensors of 64 ranks, each rank's tree built by itself. */
static struct tree **large(const struct placement *placements, const int64_t *mesh, uint32_t mesh_ndim)
{
	struct tree **trees = t_alloc(WORLD, sizeof *trees);
	uint32_t *ranks = t_alloc(WORLD, sizeof *ranks);
	struct tree_mesh *m = t_alloc(1, sizeof *m);
	int64_t *shape = t_alloc(2, sizeof *shape);
	struct tree *leaf, *layer;
	struct str key;

	shape[0] = 4096;
	shape[1] = 1024;
	for (uint32_t i = 0; i < WORLD; i++)
		ranks[i] = i;
	*m = (struct tree_mesh){ .ndim = mesh_ndim, .sizes = mesh, .ranks = ranks };
	for (uint32_t r = 0; r < WORLD; r++) {
		struct tree_tensor t = { .dtype = DT_FLOAT32, .ndim = 2, .shape = shape, .mesh = m, .placements = placements };
		t_dtensor_shards(&t, r);
		T_OK(tree_new(t_arena, TREE_DICT, &trees[r]));
		for (uint32_t i = 0; i < TENSORS; i++) {
			if (i % 100 == 0) {
				T_OK(tree_new(t_arena, TREE_DICT, &layer));
				T_OK(arena_printf(t_arena, &key, "layers.%u", i / 100));
				T_OK(tree_put(t_arena, trees[r], tree_key_str(key), layer));
			}
			T_OK(arena_printf(t_arena, &key, "block.%u.weight", i));
			T_OK(tree_tensor_new(t_arena, TREE_DTENSOR, &t, &leaf));
			T_OK(tree_put(t_arena, layer, tree_key_str(key), leaf));
		}
	}
	return trees;
}

static double now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static void test_large(void **state)
{
	static const struct placement row[1] = { { .kind = PLACE_SHARD } }, hsdp[2] = { { .kind = PLACE_REPLICATE },
			{ .kind = PLACE_SHARD } };
	static const int64_t flat[1] = { WORLD }, folded[2] = { 2, WORLD / 2 };
	struct tree **rows = large(row, flat, 1), **half = large(hsdp, folded, 2);
	const uint32_t me = 5;
	struct state_dict_op_request rq = { .kind = JOB_REDISTRIBUTE, .world_size = WORLD };
	struct state_dict_op_plan p;
	uint64_t before = arena_used(t_arena);
	double start = now();

	(void)state;
	T_OK(state_dict_op_plan(&rq, rows, half, NULL, t_arena, &p));
	print_message("redistribute, 64 x 10,000 tensors, all ranks' %ju moves: %.2f s, %ju MiB\n", (uintmax_t)p.move_count, now() - start,
		      (uintmax_t)(arena_used(t_arena) - before) >> 20);
	assert_int_equal(p.move_count, (uint64_t)TENSORS * WORLD * 2);
	/* each rank needs 128 rows; those that hold 64 of them already do not fetch these */
	assert_int_equal(p.bytes_needed % ((uint64_t)TENSORS * 4096), 0);
	assert_true(p.bytes_needed < p.bytes_total);
	assert_true(arena_used(t_arena) - before < (uint64_t)TENSORS * WORLD * 400);

	rq.kind = JOB_GATHER;
	T_ERR(LIMIT_EXCEEDED, state_dict_op_plan(&rq, rows, NULL, NULL, t_arena, &p)); /* 41 million */
	rq.plan_for = &me;
	rq.plan_for_count = 1;
	start = now();
	T_OK(state_dict_op_plan(&rq, rows, NULL, NULL, t_arena, &p));
	print_message("gather, 64 x 10,000 tensors, one rank's %ju moves: %.2f s\n", (uintmax_t)p.move_count, now() - start);
	assert_int_equal(p.move_count, (uint64_t)TENSORS * WORLD);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		T_CASE(test_bad_requests), T_CASE(test_hostile_trees), T_CASE(test_no_memory), T_CASE(test_large),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
