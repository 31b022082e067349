/* State-dict operations without a daemon: four processes, each a rank with tensors in its own memory. */
#include "ops/dcp_ops.h"

#include "base/mem.h"
#include "lib/t_comm.h"

enum { RANKS = 4, ROWS = 8, COLS = 6, EACH = ROWS / RANKS };

#define CHECK(cond)                                                                                               \
	do {                                                                                                      \
		if (!(cond)) {                                                                                    \
			fprintf(stderr, "rank %u, line %d: %s (%s)\n", g->rank, __LINE__, #cond, err_last()->text); \
			return 1;                                                                                 \
		}                                                                                                 \
	} while (0)
#define DO(call) CHECK((call) == OK)

static const int64_t whole_shape[] = { ROWS, COLS };
static const int64_t mesh_sizes[] = { RANKS };
static const uint32_t mesh_ranks[] = { 0, 1, 2, 3 };
static const struct tree_mesh mesh = { .ndim = 1, .sizes = mesh_sizes, .ranks = mesh_ranks };
static const struct placement by_rows[] = { { .kind = PLACE_SHARD, .dim = 0 } };
static const struct placement by_cols[] = { { .kind = PLACE_SHARD, .dim = 1 } };

/* { "model": { "w": this rank's rows }, "step": 7 } */
static enum err make_tree(struct arena *a, uint32_t rank, enum dtype dtype, void *rows, struct tree **out)
{
	struct tree *root, *model, *w, *step;
	struct tree_shard *shard;
	int64_t *dims;

	TRY(arena_i64(a, 4, &dims));
	dims[0] = rank * EACH;
	dims[2] = EACH;
	dims[3] = COLS;
	TRY(arena_alloc(a, 1, sizeof *shard, &shard));
	*shard = (struct tree_shard){ .dims = dims, .at = (uint64_t)(uintptr_t)rows };
	struct tree_tensor t = { .dtype = dtype, .ndim = 2, .shape = whole_shape, .shards = shard, .shard_count = 1, .mesh = &mesh,
				 .placements = by_rows };
	TRY(tree_new(a, TREE_DICT, &root));
	TRY(tree_new(a, TREE_DICT, &model));
	TRY(tree_tensor_new(a, TREE_DTENSOR, &t, &w));
	TRY(tree_value(a, TREE_JSON, STR("7"), &step));
	TRY(tree_put(a, model, tree_key_str(STR("w")), w));
	TRY(tree_put(a, root, tree_key_str(STR("model")), model));
	TRY(tree_put(a, root, tree_key_str(STR("step")), step));
	*out = root;
	return OK;
}

static const struct tree_tensor *w_of(const struct tree *root)
{
	const struct tree *w = tree_get(tree_get(root, tree_key_str(STR("model"))), tree_key_str(STR("w")));

	return w ? &w->tensor : NULL;
}

static const void *bytes_of(const struct tree_tensor *t)
{
	return (const void *)(uintptr_t)t->shards[0].at;
}

static void fill(float *rows, uint32_t rank)
{
	for (uint32_t i = 0; i < EACH * COLS; i++)
		rows[i] = (float)(rank * EACH * COLS + i);
}

static int gathers(struct t_group *g, struct comm *c)
{
	static const uint32_t only[] = { 0, 2 };
	struct dcp_state_dict full;
	struct arena *a = arena_new(1 << 20);
	float rows[EACH * COLS];
	struct tree *mine;

	fill(rows, g->rank);
	DO(make_tree(a, g->rank, DT_FLOAT32, rows, &mine));
	for (uint32_t some = 0; some < 2; some++) {
		struct dcp_options o = { .type_check = true, .ranks_only = some ? only : NULL, .ranks_only_count = some ? 2 : 0 };
		DO(dcp_gather(c, mine, &o, &full));
		if (some && g->rank % 2) {
			CHECK(full.tree->kind == TREE_DICT && full.tree->count == 0 && full.block_count == 0);
		} else {
			const struct tree_tensor *t = w_of(full.tree);
			CHECK(t && t->shard_count == 1 && t->shape[0] == ROWS && full.moved_bytes == (RANKS - 1) * sizeof rows);
			for (uint32_t i = 0; i < ROWS * COLS; i++)
				CHECK(((const float *)bytes_of(t))[i] == (float)i);
			CHECK(str_is(tree_get(full.tree, tree_key_str(STR("step")))->value.bytes, "7"));
		}
		dcp_free(&full);
	}
	arena_free(a);
	return 0;
}

static int redistributes(struct t_group *g, struct comm *c)
{
	struct layout_rule rule = { .match = STR("*"), .kind = LAYOUT_MESH, .placements = by_cols, .placement_count = 1 };
	struct layout cols = { &rule, 1, RANKS };
	struct dcp_options o = { .type_check = true, .layout = &cols };
	struct dcp_state_dict out;
	struct arena *a = arena_new(1 << 20);
	float rows[EACH * COLS];
	struct tree *mine;

	fill(rows, g->rank);
	DO(make_tree(a, g->rank, DT_FLOAT32, rows, &mine));
	DO(dcp_redistribute(c, mine, &o, &out));
	const struct tree_tensor *t = w_of(out.tree);
	const int64_t *box = t->shard_count ? t->shards[0].dims : NULL; /* 6 columns over 4 ranks: 2, 2, 2, 0 */
	CHECK(g->rank == 3 || (box && box[1] == g->rank * 2 && box[3] == 2));
	for (uint32_t i = 0; g->rank < 3 && i < ROWS * 2; i++)
		CHECK(((const float *)bytes_of(t))[i] == (float)(i / 2 * COLS + g->rank * 2 + i % 2));
	dcp_free(&out);
	arena_free(a);
	return 0;
}

static int copies_and_compares(struct t_group *g, struct comm *c)
{
	struct dcp_options o = { .type_check = true, .values = true };
	struct dcp_state_dict out;
	struct arena *a = arena_new(1 << 20);
	float rows[EACH * COLS], same[EACH * COLS];
	double wide[EACH * COLS] = { 0 };
	struct tree *mine, *target, *other;
	bool equal = false;

	fill(rows, g->rank);
	DO(make_tree(a, g->rank, DT_FLOAT32, rows, &mine));
	DO(make_tree(a, g->rank, DT_FLOAT64, wide, &target));
	DO(dcp_copy(c, mine, target, &o, &out));
	CHECK(out.block_count == 0 && bytes_of(w_of(out.tree)) == wide && wide[5] == rows[5] && out.moved_bytes == 0);
	dcp_free(&out);
	memcpy(same, rows, sizeof rows);
	DO(make_tree(a, g->rank, DT_FLOAT32, same, &other));
	DO(dcp_compare(c, mine, other, &o, &equal));
	CHECK(equal);
	same[3] += g->rank == 2;
	DO(dcp_compare(c, mine, other, &o, &equal));
	CHECK(!equal);
	o.atol = 1;
	DO(dcp_compare(c, mine, other, &o, &equal));
	CHECK(equal);
	arena_free(a);
	return 0;
}

static int broadcasts(struct t_group *g, struct comm *c)
{
	struct dcp_options o = { .type_check = true, .root = 1 };
	struct arena *a = arena_new(1 << 20);
	float all[ROWS * COLS], rows[EACH * COLS] = { 0 };
	struct tree *full = NULL, *model, *w, *into;
	struct dcp_state_dict out;

	for (uint32_t i = 0; i < ROWS * COLS; i++)
		all[i] = (float)i;
	if (g->rank == 1) {
		DO(tree_new(a, TREE_DICT, &full));
		DO(tree_new(a, TREE_DICT, &model));
		DO(tree_whole(a, DT_FLOAT32, 2, whole_shape, (uint64_t)(uintptr_t)all, &w));
		DO(tree_put(a, model, tree_key_str(STR("w")), w));
		DO(tree_put(a, full, tree_key_str(STR("model")), model));
	}
	DO(make_tree(a, g->rank, DT_FLOAT32, rows, &into));
	DO(dcp_broadcast(c, full, into, &o, &out));
	CHECK(out.block_count == 0 && w_of(out.tree)->placements[0].kind == PLACE_SHARD);
	for (uint32_t i = 0; i < EACH * COLS; i++)
		CHECK(rows[i] == (float)(g->rank * EACH * COLS + i));
	dcp_free(&out);
	arena_free(a);
	return 0;
}

/* Rank 2's tensor is of another dtype: everyone hears it, nobody waits. */
static int disagrees(struct t_group *g, struct comm *c)
{
	struct dcp_options o = { .type_check = true };
	struct arena *a = arena_new(1 << 20);
	double rows[EACH * COLS] = { 0 };
	struct dcp_state_dict out;
	struct tree *mine;

	DO(make_tree(a, g->rank, g->rank == 2 ? DT_FLOAT64 : DT_FLOAT32, rows, &mine));
	CHECK(dcp_gather(c, mine, &o, &out) == ERR_PLAN_INVALID);
	CHECK(err_last()->rank == 2 && strcmp(err_last()->fqn, "model.w") == 0 && !out.tree && !out.arena);
	CHECK(dcp_gather(c, mine, &o, &out) == ERR_PLAN_INVALID); /* a group that failed stays so */
	arena_free(a);
	return 0;
}

static void run_members(int (*body)(struct t_group *g, struct comm *c))
{
	struct t_group g = { .spec = { .size = RANKS, .inside = COMM_TCP, .between = COMM_TCP, .deadline_ms = 10000, .arena_fd = -1 },
			     .body = body };

	t_group_start(&g);
	t_group_wait(&g);
	for (uint32_t r = 0; r < RANKS; r++)
		assert_int_equal(g.end[r], 0);
	t_group_free(&g);
}

static void gather_brings_all_rows_together(void **state)
{
	(void)state;
	run_members(gathers);
}

static void redistribute_turns_rows_into_columns(void **state)
{
	(void)state;
	run_members(redistributes);
}

static void copy_writes_in_place_and_compare_sees_a_difference(void **state)
{
	(void)state;
	run_members(copies_and_compares);
}

static void broadcast_fills_each_ranks_rows(void **state)
{
	(void)state;
	run_members(broadcasts);
}

static void ranks_that_differ_are_named_to_all(void **state)
{
	(void)state;
	run_members(disagrees);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(gather_brings_all_rows_together),
		cmocka_unit_test(redistribute_turns_rows_into_columns),
		cmocka_unit_test(copy_writes_in_place_and_compare_sees_a_difference),
		cmocka_unit_test(broadcast_fills_each_ranks_rows),
		cmocka_unit_test(ranks_that_differ_are_named_to_all),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
