/* test_state_dict_op_pool.c: who of several holders gives a box. */
#include "plan/state_dict_op_pool.h"
#include "lib/t_tree.h"

static void plan_gather(const char *text, uint32_t world, const uint32_t *hosts, struct state_dict_op_plan *p)
{
	struct state_dict_op_request rq = { .kind = JOB_GATHER, .world_size = world };

	T_OK(state_dict_op_plan(&rq, t_world(text, world), NULL, hosts, t_arena, p));
}

static void test_own_bytes_first(void **state)
{
	struct state_dict_op_plan p;

	(void)state;
	plan_gather("{'w':'D f32 8 / 2x4 / Replicate() Shard(0)'}", 8, NULL, &p);
	for (uint64_t i = 0; i < p.move_count; i++) {
		uint32_t a = p.moves[i].from_rank, b = p.moves[i].to_rank;
		assert_true(a % 4 != b % 4 || a == b); /* who has a piece does not fetch it */
	}
	assert_int_equal(p.bytes_total, 8 * 32);
	assert_int_equal(p.bytes_needed, 8 * 24);
	plan_gather("{'w':'D f32 8 / 8 / Replicate()'}", 8, NULL, &p);
	assert_int_equal(p.bytes_needed, 0);
}

static void test_same_host_next(void **state)
{
	const uint32_t hosts[8] = { 5, 6, 5, 6, 6, 5, 6, 5 };
	struct state_dict_op_plan p;

	(void)state;
	/* replicas of a piece are r and r + 4: one on each host */
	plan_gather("{'w':'D f32 8 / 2x4 / Replicate() Shard(0)'}", 8, hosts, &p);
	for (uint64_t i = 0; i < p.move_count; i++)
		assert_int_equal(hosts[p.moves[i].from_rank], hosts[p.moves[i].to_rank]);
}

static void test_then_balanced(void **state)
{
	uint64_t given[8] = { 0 };
	struct state_dict_op_plan p;

	(void)state;
	/* two whole copies, on ranks 0 and 1; six others want all */
	plan_gather("{'w':'D f32 600 / 2 / Replicate() / 0,1','v':'D f32 600 / 2 / Replicate() / 1,0'}", 8, NULL, &p);
	for (uint64_t i = 0; i < p.move_count; i++)
		if (p.moves[i].from_rank != p.moves[i].to_rank)
			given[p.moves[i].from_rank] += (uint64_t)p.moves[i].dims[1];
	assert_int_equal(given[0], given[1]);
	assert_int_equal(given[0], 3 * 1200);
}

/* A worker that plans for its own ranks must choose as the others do. */
static void test_plan_for_is_part_of_the_whole(void **state)
{
	const char *text = "{'w':'D f32 600,4 / 2x3 / Replicate() Shard(1)','p':'D f32 60 / 2x3 / Shard(0) Partial()','o':'D f32 9 / "
			"2 / Replicate()'}";
	struct tree **trees = t_world(text, 8);
	struct state_dict_op_request rq = { .kind = JOB_GATHER, .world_size = 8 };
	struct state_dict_op_plan all, part;
	uint64_t at = 0, bytes = 0;

	(void)state;
	T_OK(state_dict_op_plan(&rq, trees, NULL, NULL, t_arena, &all));
	for (uint32_t r = 0; r < 8; r++) {
		rq.plan_for = &r;
		rq.plan_for_count = 1;
		T_OK(state_dict_op_plan(&rq, trees, NULL, NULL, t_arena, &part));
		assert_true(part.move_count > 0);
		for (uint64_t i = 0; i < part.move_count; i++, at++) {
			const struct state_dict_op_move *x = &part.moves[i], *y = &all.moves[at];
			assert_true(x->to_rank == r && y->to_rank == r && x->from_rank == y->from_rank && x->from == y->from);
			assert_memory_equal(x->dims, y->dims, 2 * x->from->tensor.ndim * sizeof *x->dims);
			assert_true(tree_equal(x->to, y->to));
		}
		bytes += part.bytes_needed;
	}
	assert_int_equal(at, all.move_count);
	assert_int_equal(bytes, all.bytes_needed);
}

static void test_pool_of_a_grid(void **state)
{
	struct tree **trees = t_world("'D f32 100,100 / 80x80 / Shard(0) Shard(1)'", 1), *node;
	struct tree_shard *shards = t_alloc(10000, sizeof *shards);
	struct state_dict_op_plan out = { 0 };
	struct state_dict_op_request rq = { .world_size = 1 };
	uint8_t wanted[1] = { 1 };
	uint64_t load[1] = { 0 };
	struct state_dict_op_build b = { .rq = &rq, .arena = t_arena, .scratch = t_arena, .out = &out, .wanted = wanted, .load = load };
	struct tree_tensor t = { .ndim = 2, .shape = trees[0]->tensor.shape, .shards = shards, .shard_count = 10000 };
	struct pool pool;

	(void)state;
	for (uint32_t i = 0; i < 10000; i++) { /* one element each: too many pairs to try them all */
		int64_t *dims = t_alloc(4, sizeof *dims);
		dims[0] = i * 7919 % 10000 / 100;
		dims[1] = i * 7919 % 10000 % 100;
		dims[2] = dims[3] = 1;
		shards[i].dims = dims;
	}
	T_OK(tree_tensor_new(t_arena, TREE_SHARDED, &t, &node));
	const struct iterate_place place = { .node = node };
	T_OK(pool_make(&b, &place, 1, &pool));
	assert_int_equal(pool.box_count, 10000);
	assert_int_equal(pool.line, -1);
	int64_t *dims = t_alloc(4, sizeof *dims);
	dims[0] = 10;
	dims[1] = 20;
	dims[2] = 3;
	dims[3] = 5;
	struct tree_shard want = { .dims = dims };
	struct tree_tensor to = { .ndim = 2, .shape = t.shape, .shards = &want, .shard_count = 1 };
	T_OK(tree_tensor_new(t_arena, TREE_SHARDED, &to, &node));
	T_OK(pool_fill(&b, &pool, 0, node));
	assert_int_equal(b.moves.n, 15);
	assert_int_equal(out.bytes_total, 15 * 8); /* float64 is the first dtype */
	vec_free(&b.moves);
	shards[7].dims = shards[8].dims;
	T_ERR(PLAN_INVALID, pool_make(&b, &place, 1, &pool));
	shards[7].dims = dims;
	T_ERR(PLAN_INVALID, pool_make(&b, &place, 1, &pool));
	t.shard_count = 9999;
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		T_CASE(test_own_bytes_first), T_CASE(test_same_host_next), T_CASE(test_then_balanced),
		T_CASE(test_plan_for_is_part_of_the_whole), T_CASE(test_pool_of_a_grid),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
