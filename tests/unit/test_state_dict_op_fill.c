/* test_state_dict_op_fill.c: broadcast, distribute and redistribute into targets that are there. */
#include "plan/state_dict_op.h"
#include "lib/t_tree.h"

static struct state_dict_op_plan plan(enum job_kind kind, uint32_t world, struct tree **from, struct tree **to, bool strict)
{
	struct state_dict_op_request rq = { .kind = kind, .world_size = world, .strict = strict, .type_check = true };
	struct state_dict_op_plan p;

	T_OK(state_dict_op_plan(&rq, from, to, NULL, t_arena, &p));
	return p;
}

static struct tree **rank0(const char *text, uint32_t world)
{
	struct tree **trees = t_alloc(world, sizeof *trees);

	trees[0] = t_tree(text, 0);
	return trees;
}

static bool noted(const struct state_dict_op_plan *p, enum state_dict_op_what what, uint32_t rank, const char *path)
{
	for (uint64_t i = 0; i < p->note_count; i++)
		if (p->notes[i].what == what && p->notes[i].rank == rank && str_is(p->notes[i].path, path))
			return true;
	return false;
}

static void test_broadcast(void **state)
{
	struct tree **from = rank0("{'a':'T f32 8,2','b':'T f32 4','step':'T f32','lr':0.5,'new':'T f32 3','opt':{'m':'T f32 2',"
			"'k':1}}", 4);
	struct tree **to = t_world("{'lr':0,'a':'D bf16 8,2 / 2x2 / Shard(0) Replicate()','b':'T i64 7','step':'D f32 9 / 4 / Shard(0)',"
				   "'kept':'T f32 2','opt':{'m':'T f32 2','old':5}}", 4);
	struct state_dict_op_plan p;

	(void)state;
	p = plan(JOB_BROADCAST, 4, from, to, false);
	for (uint32_t r = 0; r < 4; r++) {
		const struct tree *t = p.target[r];
		char want[256];
		snprintf(want, sizeof want, "{lr: 0.5, a: D bfloat16 [8, 2] [%u, 0]+[4, 2], b: T float32 [4], step: T float32 [], "
			 "kept: T float32 [2], opt: {m: T float32 [2], old: 5}}", r / 2 * 4);
		t_is(t, want);
		assert_ptr_equal(t->children[1], to[r]->children[1]);
		assert_ptr_equal(t->children[4], to[r]->children[4]);
		assert_ptr_equal(t->children[5]->children[0], to[r]->children[5]->children[0]);
		assert_true(t->children[2]->tensor.shards[0].made); /* another size: there are no bytes for it yet */
		assert_int_equal(p.made[r], 2);
		t_covered(&p, from, r, t->children[1], 1);
		t_covered(&p, from, r, t->children[2], 1);
		t_covered(&p, from, r, t->children[3], 1);
		t_covered(&p, from, r, t->children[5]->children[0], 1);
		assert_true(noted(&p, STATE_DICT_OP_NOTE_CAST, r, "a") && noted(&p, STATE_DICT_OP_NOTE_RESIZED, r, "b"));
		assert_true(noted(&p, STATE_DICT_OP_NOTE_MISSING, r, "kept") && noted(&p, STATE_DICT_OP_NOTE_MISSING, r, "opt.old"));
		assert_true(noted(&p, STATE_DICT_OP_NOTE_DROPPED, r, "new") && noted(&p, STATE_DICT_OP_NOTE_DROPPED, r, "opt.k"));
	}
	assert_int_equal(p.move_count, 16);
	for (uint64_t i = 0; i < p.move_count; i++)
		assert_int_equal(p.moves[i].from_rank, 0);

	p = plan(JOB_BROADCAST, 4, from, to, true);
	t_is(p.target[1], "{lr: 0.5, a: D bfloat16 [8, 2] [0, 0]+[4, 2], b: T float32 [4], step: T float32 [], opt: {m: T float32 [2]}}");
	assert_true(noted(&p, STATE_DICT_OP_NOTE_MISSING, 1, "kept"));
}

static void test_broadcast_root_in_a_group(void **state)
{
	const uint32_t group[] = { 2, 0 };
	struct tree *from[3] = { t_tree("{'w':'T f32 3'}", 0), t_tree("{'w':'T f32 4'}", 1), t_tree("{'w':'T f32 5'}", 2) };
	struct tree **to = t_world("{'w':'S f32 4 / 0: 0+4'}", 3);
	struct state_dict_op_request rq = { .kind = JOB_BROADCAST, .world_size = 3, .group = group, .group_count = 2, .root = 1 };
	struct state_dict_op_plan p;

	(void)state;
	T_ERR(SIZE_MISMATCH, state_dict_op_plan(&rq, from, to, NULL, t_arena, &p));
	t_names("w", 0, "source [3] and target [4]");
	from[0] = t_tree("{'w':'T f32 4'}", 0);
	T_OK(state_dict_op_plan(&rq, from, to, NULL, t_arena, &p));
	assert_null(p.target[1]);
	assert_int_equal(p.move_count, 1); /* rank 2 holds nothing of it */
	assert_int_equal(p.bytes_needed, 0);
	rq.root = 2;
	T_ERR(INVALID_REQUEST, state_dict_op_plan(&rq, from, to, NULL, t_arena, &p));
	rq.root = 0;
	from[2] = NULL;
	T_ERR(INVALID_REQUEST, state_dict_op_plan(&rq, from, to, NULL, t_arena, &p));
	t_names("", 2, "no state dict");
}

static void test_fill_errors(void **state)
{
	static const struct { enum job_kind kind; const char *from, *to; enum err e; } cases[] = {
		{ JOB_BROADCAST, "{'w':'S f32 4 / 0: 0+4'}", "{'w':'T f32 4'}", ERR_KIND_MISMATCH },
		{ JOB_DISTRIBUTE, "{'w':'D f32 4 / 1 / Shard(0)'}", "{'w':'T f32 4'}", ERR_KIND_MISMATCH },
		{ JOB_BROADCAST, "{'w':'T f32 4'}", "{'w':'D f32 4 / 1 / Partial()'}", ERR_LAYOUT_INVALID },
		{ JOB_DISTRIBUTE, "{'w':'T f32 5'}", "{'w':'D f32 4 / 1 / Shard(0)'}", ERR_SIZE_MISMATCH },
		{ JOB_BROADCAST, "{'w':'T f4 4'}", "{'w':'D f32 4 / 1 / Shard(0)'}", ERR_DTYPE_UNSUPPORTED },
		{ JOB_BROADCAST, "{'w':{'x':'T f32 4'}}", "{'w':5}", ERR_KIND_MISMATCH },
		{ JOB_BROADCAST, "{'w':'O a.B'}", "{'w':5}", ERR_VALUE_TYPE },
		{ JOB_REDISTRIBUTE, "{'w':'T f32 4'}", "{'w':5}", ERR_KIND_MISMATCH },
		{ JOB_REDISTRIBUTE, "{'w':5}", "{'w':'T f32 4'}", ERR_KIND_MISMATCH },
		{ JOB_REDISTRIBUTE, "{'w':5}", "{'w':[1]}", ERR_KIND_MISMATCH },
		{ JOB_REDISTRIBUTE, "{'w':[1]}", "{'w':{'a':1}}", ERR_KIND_MISMATCH },
		{ JOB_REDISTRIBUTE, "{'w':'T f32 4'}", "{'w':'T f32 5'}", ERR_SIZE_MISMATCH },
		{ JOB_REDISTRIBUTE, "{'w':'T f32 4'}", "{'w':'D f32 4 / 1 / Partial()'}", ERR_LAYOUT_INVALID },
		{ JOB_REDISTRIBUTE, "{}", "{'w':'T f32 4'}", ERR_MISSING_KEY },
	};
	struct state_dict_op_plan p;

	(void)state;
	for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
		struct state_dict_op_request rq = { .kind = cases[i].kind, .world_size = 1, .type_check = true, .strict = true };
		struct tree *from[1] = { t_tree(cases[i].from, 0) }, *to[1] = { t_tree(cases[i].to, 0) };
		assert_int_equal(state_dict_op_plan(&rq, from, to, NULL, t_arena, &p), cases[i].e);
		t_names("w", 0, "");
	}
}

/* Odd targets that PyTorch has an answer for: the value is set. */
static void test_values_replace_anything(void **state)
{
	struct tree *from[1] = { t_tree("{'a':[1,2],'b':5,'c':{'x':1},'d':'T f32','e':'T f32 3'}", 0) };
	struct tree *to[1] = { t_tree("{'a':null,'b':{'y':'T f32 4'},'c':'T f32 3','d':[1],'e':{'z':1}}", 0) };

	(void)state;
	for (enum job_kind k = JOB_BROADCAST; k <= JOB_DISTRIBUTE; k++) {
		struct state_dict_op_plan p = plan(k, 1, from, to, false);
		t_is(p.target[0], "{a: [1, 2], b: 5, c: {x: 1}, d: T float32 [], e: T float32 [3]}");
		t_all_covered(&p, from, 0, p.target[0]);
	}
	from[0] = t_tree("{'a':'T f32 3','b':'T f32'}", 0);
	to[0] = t_tree("{'a':null,'b':null}", 0);
	for (enum job_kind k = JOB_BROADCAST; k <= JOB_DISTRIBUTE; k++) {
		struct state_dict_op_plan p = plan(k, 1, from, to, false);
		t_is(p.target[0], "{a: null, b: T float32 []}"); /* so does PyTorch: None is as good as absent */
		assert_true(noted(&p, STATE_DICT_OP_NOTE_DROPPED, 0, "a"));
	}
}

static void test_distribute(void **state)
{
	struct tree **from = t_world("{'lr':0.5,'step':'T f32','a':'T f32 7,2','b':'T f32 4','big':'T f32 3','opt':{'k':1,'big':'T f32 2'},"
				     "'only':{'big':'T f32 2'},'l':['T f32 2',7]}", 4);
	struct tree **to = t_world("{'a':'D f32 7,2 / 2x2 / Shard(0) Shard(0)','b':'T f32 9','kept':3}", 4);
	struct state_dict_op_plan p;

	(void)state;
	p = plan(JOB_DISTRIBUTE, 4, from, to, false);
	t_is(p.target[0], "{a: D float32 [7, 2] [0, 0]+[2, 2], b: T float32 [4], kept: 3, lr: 0.5, step: T float32 [], opt: {k: 1}, "
			"l: [null, 7]}");
	t_is(p.target[3], "{a: D float32 [7, 2] [6, 0]+[1, 2], b: T float32 [4], kept: 3, lr: 0.5, step: T float32 [], opt: {k: 1}, "
			"l: [null, 7]}");
	for (uint32_t r = 0; r < 4; r++) {
		t_all_covered(&p, from, r, p.target[r]->children[0]);
		t_all_covered(&p, from, r, p.target[r]->children[4]);
		assert_true(noted(&p, STATE_DICT_OP_NOTE_DROPPED, r, "big"));
	}
	for (uint64_t i = 0; i < p.move_count; i++) /* a DTensor comes from the first rank of its mesh, all else is the rank's own */
		assert_int_equal(p.moves[i].from_rank, p.moves[i].to->kind == TREE_DTENSOR ? 0 : p.moves[i].to_rank);

	/* only the root has it */
	const uint32_t group[] = { 1, 0, 3 };
	struct state_dict_op_request rq = { .kind = JOB_DISTRIBUTE, .world_size = 4, .group = group, .group_count = 3, .root = 0 };
	from[0] = from[2] = from[3] = NULL;
	T_OK(state_dict_op_plan(&rq, from, to, NULL, t_arena, &p));
	t_is(p.target[3], "{a: D float32 [7, 2] [6, 0]+[1, 2], b: T float32 [4], kept: 3, lr: 0.5, step: T float32 [], opt: {k: 1}, "
			"l: [null, 7]}");
	assert_null(p.target[2]);
	for (uint64_t i = 0; i < p.move_count; i++)
		assert_int_equal(p.moves[i].from_rank, 1);
}

/* Every pair of cuts: each rank gets its boxes, and fetches only what it does not hold. */
static void test_redistribute_any_to_any(void **state)
{
	static const char *const cuts[] = {
		"D f32 7,6 / 4 / Shard(0)", "D f32 7,6 / 4 / Shard(1)", "D f32 7,6 / 2x2 / Shard(1) Shard(0)",
				"D f32 7,6 / 4 / Replicate()",
		"D f32 7,6 / 2x2 / Replicate() Shard(0)", "D f32 7,6 / 2x2 / _StridedShard(0,sf=2) Shard(0)",
				"D f32 7,6 / 2 / Shard(0) / 3,1",
		"S f32 7,6 / 2: 0,0+7,2 / 0: 0,2+3,4 / 0: 3,2+4,1 / 3: 3,3+4,3", "T f32 7,6", "D f32 7,6 / 2x2 / Replicate() Partial()",
		"D f32 7,6 / 2x2 / Partial(max) Shard(1)",
	};
	char a[128], b[128];

	(void)state;
	for (size_t i = 0; i < sizeof cuts / sizeof *cuts; i++) {
		for (size_t j = 0; j < 9; j++) {
			snprintf(a, sizeof a, "{'x':{'w':'%s'},'v':1}", cuts[i]);
			snprintf(b, sizeof b, "{'v':2,'x':{'w':'%s'}}", cuts[j]);
			struct tree **from = t_world(a, 4), **to = t_world(b, 4);
			struct state_dict_op_plan p = plan(JOB_REDISTRIBUTE, 4, from, to, true);
			uint64_t held = 0, wanted = 0;
			for (uint32_t r = 0; r < 4; r++) {
				struct tree *w = p.target[r]->children[1]->children[0], *has = from[r]->children[0]->children[0];
				assert_ptr_equal(w, to[r]->children[1]->children[0]);
				assert_string_equal(p.target[r]->children[0]->value.bytes.p, "1");
				t_covered(&p, from, r, w, i < 9 ? 1 : 2);
				for (int64_t e = 0; e < 42; e++) {
					const int64_t at[4] = { e / 6, e % 6, 1, 1 };
					bool in = false, own = false;
					for (uint32_t s = 0; s < w->tensor.shard_count; s++)
						in |= t_holds(w, s, at);
					for (uint32_t s = 0; s < has->tensor.shard_count; s++)
						own |= t_holds(has, s, at);
					wanted += in;
					held += in && own;
				}
			}
			if (i < 9)
				assert_int_equal(p.bytes_needed, (wanted - held) * 4);
		}
	}
}

static void test_redistribute_not_strict(void **state)
{
	struct tree **from = t_world("{'w':'S f32 4 / 0: 0+2 / 1: 2+2','extra':{'a':'T f32 2'},'v':1}", 2);
	struct tree **to = t_world("{'w':'T f64 4','gone':{'q':5},'v':2}", 2);
	struct state_dict_op_plan p;

	(void)state;
	p = plan(JOB_REDISTRIBUTE, 2, from, to, false);
	t_is(p.target[1], "{w: T float64 [4], gone: {q: 5}, v: 1}");
	assert_true(noted(&p, STATE_DICT_OP_NOTE_MISSING, 0, "gone.q") && noted(&p, STATE_DICT_OP_NOTE_DROPPED, 1, "extra") && noted(&p,
			STATE_DICT_OP_NOTE_CAST, 1, "w"));
	assert_int_equal(p.note_count, 6);
}

static uint32_t seed;

static uint32_t below(uint32_t n)
{
	seed = seed * 1664525 + 1013904223;
	return (seed >> 8) % n;
}

/* Cuts a box in two, at random, until it is given to a rank, or with replicas to two. */
static void cut(struct tree_shard *shards, uint32_t *counts, uint32_t per_rank, const int64_t *box, uint32_t world, bool replicas)
{
	uint32_t d = below(3), rank = below(world);

	if (box[3 + d] > 1 && below(4)) {
		int64_t a[6], b[6], at = 1 + below((uint32_t)box[3 + d] - 1);
		memcpy(a, box, sizeof a);
		memcpy(b, box, sizeof b);
		a[3 + d] = at;
		b[d] += at;
		b[3 + d] -= at;
		cut(shards, counts, per_rank, a, world, replicas);
		cut(shards, counts, per_rank, b, world, replicas);
		return;
	}
	for (uint32_t i = 0; i < (replicas && world > 1 && below(3) == 0 ? 2 : 1); i++, rank = (rank + 1) % world) {
		int64_t *dims = t_alloc(6, sizeof *dims);
		memcpy(dims, box, 6 * sizeof *dims);
		assert_true(counts[rank] < per_rank);
		shards[rank * per_rank + counts[rank]++].dims = dims;
	}
}

static struct tree **random_cut(const int64_t *shape, uint32_t world, bool replicas)
{
	enum { PER_RANK = 512 };
	struct tree_shard *shards = t_alloc((uint64_t)world * PER_RANK, sizeof *shards);
	struct tree **trees = t_alloc(world, sizeof *trees);
	uint32_t *counts = t_alloc(world, sizeof *counts);
	const int64_t box[6] = { 0, 0, 0, shape[0], shape[1], shape[2] };

	cut(shards, counts, PER_RANK, box, world, replicas);
	for (uint32_t r = 0; r < world; r++) {
		const struct tree_tensor t = { .dtype = DT_FLOAT32, .ndim = 3, .shape = shape, .shards = shards + (uint64_t)r * PER_RANK,
					       .shard_count = counts[r] };
		T_OK(tree_tensor_new(t_arena, TREE_SHARDED, &t, &trees[r]));
	}
	return trees;
}

static void test_random_cuts(void **state)
{
	(void)state;
	seed = 7;
	for (int i = 0; i < 300; i++) {
		uint32_t world = 1 + below(5);
		int64_t *shape = t_alloc(3, sizeof *shape);
		uint64_t needed = 0;

		for (int d = 0; d < 3; d++)
			shape[d] = 1 + below(7);
		struct tree **from = random_cut(shape, world, i % 2), **to = random_cut(shape, world, i % 3 == 0);
		struct state_dict_op_plan p = plan(JOB_REDISTRIBUTE, world, from, to, true);
		for (uint32_t r = 0; r < world; r++) {
			t_covered(&p, from, r, to[r], 1);
			for (int64_t e = 0; e < shape[0] * shape[1] * shape[2]; e++) {
				const int64_t at[6] = { e / shape[2] / shape[1], e / shape[2] % shape[1], e % shape[2], 1, 1, 1 };
				bool in = false, own = false;
				for (uint32_t s = 0; s < to[r]->tensor.shard_count; s++)
					in |= t_holds(to[r], s, at);
				for (uint32_t s = 0; s < from[r]->tensor.shard_count; s++)
					own |= t_holds(from[r], s, at);
				needed += in && !own;
			}
		}
		assert_int_equal(p.bytes_needed, needed * 4);
	}
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		T_CASE(test_broadcast), T_CASE(test_broadcast_root_in_a_group), T_CASE(test_fill_errors),
				T_CASE(test_values_replace_anything),
		T_CASE(test_distribute), T_CASE(test_redistribute_any_to_any), T_CASE(test_redistribute_not_strict),
		T_CASE(test_random_cuts),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
