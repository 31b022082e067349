/* test_optim.c: optimizer state as a model's ranks need it: names, slices, groups, and models that contradict themselves. */
#include "lib/t.h"

#include <string.h>

#include "base/mem.h"
#include "base/str.h"
#include "plan/optim_impl.h"
#include "tensor/box.h"

#define V(...) ((const int64_t[]){ __VA_ARGS__ })
#define R(...) ((const uint32_t[]){ __VA_ARGS__ })

static void model_free(struct optim_model **m)
{
	optim_model_free(*m);
}

static struct sd_path path_of(const char *text, struct sd_path_part *parts)
{
	struct sd_path p = { parts, 0 };

	for (const char *end; text; text = *end ? end + 1 : NULL) { /* parts divided by '/' */
		end = strchr(text, '/') ? strchr(text, '/') : text + strlen(text);
		parts[p.count++] = (struct sd_path_part){ .key = { text, (size_t)(end - text) } };
	}
	return p;
}

static void add(struct sdict *sd, const char *fqn, const char *path, uint32_t ndim, const int64_t *shape)
{
	struct sd_path_part parts[16];
	uint32_t t;

	T_OK(sdict_add_tensor(sd, str_of(fqn), DT_FLOAT32, ndim, shape, &t));
	if (path)
		T_OK(sdict_copy_path(sd, path_of(path, parts), &sd->tensors[t].path));
}

struct made {
	struct optim_plan plan;
	struct arena *arena;
};

static void drop(struct made *m)
{
	sdict_free(m->plan.sd);
	arena_free(m->arena);
}

static enum err plan(const struct sdict *source, struct optim_model *m, const char *key, struct made *out)
{
	enum dtype dtypes[512];

	out->arena = arena_new(1 << 20);
	for (size_t i = 0; i < 512; i++)
		dtypes[i] = DT_FLOAT32;
	return optim_plan_make(source, dtypes, m, str_of(key), out->arena, &out->plan);
}

/* Rank r's box of a tensor is `dims`: offsets, then sizes. */
static void box_is(const struct made *m, const char *fqn, uint32_t rank, const int64_t *dims)
{
	const struct sd_tensor *t = sdict_tensor(m->plan.sd, str_of(fqn));

	assert_non_null(t);
	const struct sd_chunk *c = &m->plan.sd->chunks[t->first_chunk + rank];
	assert_int_equal(c->rank, rank);
	for (uint32_t d = 0; d < 2 * t->ndim; d++)
		if (c->dims[d] != dims[d])
			T_FAIL("%s on rank %u: dim %u is %jd, expected %jd", fqn, rank, d, (intmax_t)c->dims[d], (intmax_t)dims[d]);
}

static const struct sd_outer *outer_of(const struct made *m, const char *fqn, uint32_t rank)
{
	return m->plan.outers[sdict_tensor(m->plan.sd, str_of(fqn))->first_chunk + rank];
}

static struct sd_path nowhere(void)
{
	return (struct sd_path){ NULL, 0 };
}

static void without_nesting_rows_are_cut_over_the_world(void **state)
{
	CLEANUP(sdict_free_ptr) struct sdict *sd = NULL;
	CLEANUP(model_free) struct optim_model *m = NULL;
	CLEANUP(drop) struct made made = { 0 };
	const int64_t *big = V(99, 99);
	uint32_t i;

	(void)state;
	T_OK(sdict_new(1 << 20, &sd));
	add(sd, "model.w", "model/w", 2, V(7, 2));
	add(sd, "optim.state.w.exp_avg", "optim/state/w/exp_avg", 2, V(7, 2));
	add(sd, "optim.state.w.step", "optim/state/w/step", 0, NULL);
	add(sd, "optim.state.w.one", "optim/state/w/one", 3, V(1, 1, 1));
	add(sd, "optim.state.w.none", "optim/state/w/none", 2, V(0, 3));
	add(sd, "optimizer.x", "optimizer/x", 1, V(4));
	T_OK(sdict_add_value(sd, STR("optim.lr"), 3, (struct sd_loc){ .file = 5, .offset = 6, .length = 7 }, &i));
	struct sd_path_part parts[4];
	T_OK(sdict_copy_path(sd, path_of("optim/lr", parts), &sd->values[i].path));
	T_OK(optim_model_new(3, &m));
	for (uint32_t r = 0; r < 3; r++)
		T_OK(optim_model_add(m, r, STR("w"), nowhere(), 2, big, NULL)); /* 1-D: as in PyTorch nobody looks at its shape */
	T_OK(optim_model_done(m));
	assert_false(m->nested);
	T_OK(plan(sd, m, "optim", &made));
	assert_int_equal(made.plan.sd->tensor_count, 4);
	assert_int_equal(made.plan.sd->value_count, 1);
	assert_int_equal(made.plan.sd->values[0].loc.file, 5);
	assert_int_equal(made.plan.sd->values[0].loc.offset, 6);
	assert_int_equal(made.plan.sd->values[0].path.count, 2);
	box_is(&made, "optim.state.w.exp_avg", 0, V(0, 0, 3, 2));
	box_is(&made, "optim.state.w.exp_avg", 1, V(3, 0, 3, 2));
	box_is(&made, "optim.state.w.exp_avg", 2, V(6, 0, 1, 2));
	for (uint32_t r = 0; r < 3; r++) {
		box_is(&made, "optim.state.w.one", r, V(0, 0, 0, 1, 1, 1));
		box_is(&made, "optim.state.w.none", r, V(0, 0, 0, 3));
		assert_null(outer_of(&made, "optim.state.w.exp_avg", r));
	}
	assert_true(made.plan.plain[1] && made.plan.plain[2]);
	assert_false(made.plan.plain[0] || made.plan.plain[3]);
}

/* w is 6 × 5, cut by columns into 3 and 2 over two TP ranks; two of the four ranks have each slice. */
static const struct sd_outer left = { .offsets = V(0, 0), .sizes = V(6, 3) }, right = { .offsets = V(0, 3), .sizes = V(6, 2) };

static const int64_t w_shape[] = { 6, 5 }, b_shape[] = { 4 };

static void four(struct optim_model **m)
{
	T_OK(optim_model_new(4, m));
	for (uint32_t r = 0; r < 4; r++) {
		T_OK(optim_model_add(*m, r, STR("w"), nowhere(), 2, w_shape, r % 2 ? &right : &left));
		T_OK(optim_model_add(*m, r, STR("w.b"), nowhere(), 1, b_shape, NULL));
	}
}

static void slices_are_cut_over_their_group(void **state)
{
	CLEANUP(sdict_free_ptr) struct sdict *sd = NULL;
	CLEANUP(model_free) struct optim_model *m = NULL;
	CLEANUP(drop) struct made made = { 0 };

	(void)state;
	T_OK(sdict_new(1 << 20, &sd));
	add(sd, "optim.state.w.m", "optim/state/w/m", 2, V(6, 5));
	add(sd, "optim.state.w.row", "optim/state/w/row", 2, V(6, 1)); /* a factored second moment: whole */
	add(sd, "optim.state.w.b.m", "optim/state/w.b/m", 1, V(4));
	add(sd, "optim.state.0.m", "optim/state/0/m", 2, V(6, 5));     /* by index: the model cannot say whose it is */
	four(&m);
	T_OK(optim_model_done(m));
	assert_true(m->nested);
	T_OK(plan(sd, m, "optim", &made));
	assert_int_equal(made.plan.unmatched, 1);
	for (uint32_t r = 0; r < 4; r++) {
		bool tp = r % 2, dp = r / 2;
		const struct sd_outer *o = outer_of(&made, "optim.state.w.m", r);
		box_is(&made, "optim.state.w.m", r, V(3 * dp, 3 * tp, 3, 3 - tp));
		box_is(&made, "optim.state.w.row", r, V(3 * dp, 0, 3, 1));
		box_is(&made, "optim.state.w.b.m", r, V(2 * dp, 2));
		box_is(&made, "optim.state.0.m", r, V(3 * dp, 0, 3, 5));
		assert_non_null(o);
		assert_int_equal(o->rank_count, 2);
		assert_memory_equal(o->ranks, R(tp, 2u + tp), 2 * sizeof *o->ranks);
		assert_null(outer_of(&made, "optim.state.w.row", r));
		assert_null(outer_of(&made, "optim.state.w.b.m", r));
	}
}

/* The group's own order counts, and it may be smaller than the set of ranks with the slice (HSDP). */
static void named_groups(void **state)
{
	CLEANUP(sdict_free_ptr) struct sdict *sd = NULL;
	CLEANUP(model_free) struct optim_model *m = NULL;
	CLEANUP(drop) struct made made = { 0 };
	const struct sd_outer all = { .offsets = V(0), .sizes = V(5), .ranks = R(2, 0), .rank_count = 2 };
	const struct sd_outer other = { .offsets = V(0), .sizes = V(5), .ranks = R(1), .rank_count = 1 };

	(void)state;
	T_OK(sdict_new(1 << 20, &sd));
	add(sd, "o.state.w.m", "o/state/w/m", 1, V(5));
	T_OK(optim_model_new(4, &m));
	for (uint32_t r = 0; r < 3; r++)
		T_OK(optim_model_add(m, r, STR("w"), nowhere(), 1, &w_shape[1], r == 1 ? &other : &all));
	T_OK(optim_model_done(m));
	T_OK(plan(sd, m, "o", &made));
	box_is(&made, "o.state.w.m", 2, V(0, 3));
	box_is(&made, "o.state.w.m", 0, V(3, 2));
	box_is(&made, "o.state.w.m", 1, V(0, 5));
	box_is(&made, "o.state.w.m", 3, V(5, 0)); /* nothing nested there: over the world, as PyTorch does */
}

static void names_are_found_without_paths(void **state)
{
	static const struct {
		const char *fqn, *path;
		bool sliced;
	} cases[] = {
		{ "optim.state.layer.w.m", NULL, true },
		{ "optim.state.layer.w.m.n", NULL, true },
		{ "optim.layer.w.m2", NULL, true },
		{ "optim.state.layer.w", NULL, true },
		{ "optim.state.layer.w2.m", NULL, false },
		{ "optim.state.layer", NULL, false },
		{ "optim", NULL, false },
		{ "optim.", NULL, false },
		{ "optim..", NULL, false },
		{ "optim.x", "optim", false },
		{ "optim.y", "optim/state.layer.w.m", true },
		{ "optim.z", "optim/state/layer.w.m", true },
		{ "optim.u", "optim/state/layer.w/m/n", true },
		{ "optim.v", "optim/state/model/layer/w/m", true },
		{ "optim.t", "optim/state/model/layer/m", false },
	};
	CLEANUP(sdict_free_ptr) struct sdict *sd = NULL;
	CLEANUP(model_free) struct optim_model *m = NULL;
	CLEANUP(drop) struct made made = { 0 };
	const int64_t *square = V(4, 4);
	const struct sd_outer upper = { .offsets = V(0, 0), .sizes = V(2, 4) };
	struct sd_path_part parts[4];

	(void)state;
	T_OK(sdict_new(1 << 20, &sd));
	for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
		add(sd, cases[i].fqn, cases[i].path, 2, V(4, 4));
	T_OK(optim_model_new(1, &m));
	T_OK(optim_model_add(m, 0, STR("model.layer.w"), path_of("model/layer/w", parts), 2, square, &upper));
	T_OK(optim_model_done(m));
	T_OK(plan(sd, m, "optim", &made));
	assert_int_equal(made.plan.sd->tensor_count, sizeof cases / sizeof *cases);
	for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
		if ((outer_of(&made, cases[i].fqn, 0) != NULL) != cases[i].sliced)
			T_FAIL("%s was %scut like layer.w", cases[i].fqn, cases[i].sliced ? "not " : "");
}

static void a_tail_that_two_tensors_have(void **state)
{
	CLEANUP(sdict_free_ptr) struct sdict *sd = NULL;
	CLEANUP(model_free) struct optim_model *m = NULL;
	CLEANUP(drop) struct made made = { 0 };
	struct sd_path_part parts[4];

	(void)state;
	T_OK(sdict_new(1 << 20, &sd));
	add(sd, "optim.state.w.m", "optim/state/w/m", 2, V(6, 5));
	T_OK(optim_model_new(1, &m));
	T_OK(optim_model_add(m, 0, STR("model.w"), path_of("model/w", parts), 2, w_shape, &left));
	T_OK(optim_model_add(m, 0, STR("ema.w"), path_of("ema/w", parts), 2, w_shape, &left));
	T_OK(optim_model_done(m));
	T_ERR(PLAN_INVALID, plan(sd, m, "optim", &made));
	assert_string_equal(err_last()->fqn, "optim.state.w.m");
}

static void keys_that_are_not_there_are_listed(void **state)
{
	CLEANUP(sdict_free_ptr) struct sdict *sd = NULL;
	CLEANUP(model_free) struct optim_model *m = NULL;
	static const char *const keys[] = { "opt", "optim.", "optim.state.w.m.x", ".", "optim/state" };

	(void)state;
	T_OK(sdict_new(1 << 20, &sd));
	add(sd, "optim.state.w.m", "optim/state/w/m", 1, V(4));
	add(sd, "model.w", NULL, 1, V(4));
	T_OK(optim_model_new(2, &m));
	T_OK(optim_model_done(m));
	for (size_t i = 0; i < sizeof keys / sizeof *keys; i++) {
		CLEANUP(drop) struct made made = { 0 };
		T_ERR(MISSING_KEY, plan(sd, m, keys[i], &made));
		assert_non_null(strstr(err_last()->text, "its keys are: optim, model"));
	}
	CLEANUP(drop) struct made made = { 0 };
	T_OK(plan(sd, m, "optim.state", &made));
}

static void models_that_contradict_themselves(void **state)
{
	const struct sd_outer in = { .offsets = V(0, 0), .sizes = V(6, 5), .inner_dtensor = true };
	const struct sd_outer out = { .offsets = V(0, 0), .sizes = V(6, 5), .outer_dtensor = true };
	const struct sd_outer pair = { .offsets = V(0, 0), .sizes = V(6, 3), .ranks = R(0, 1), .rank_count = 2 };
	const struct sd_outer pair2 = { .offsets = V(0, 3), .sizes = V(6, 2), .ranks = R(0, 1), .rank_count = 2 };
	const struct sd_outer alone = { .offsets = V(0, 3), .sizes = V(6, 2), .ranks = R(1), .rank_count = 1 };
	const struct {
		const struct sd_outer *a, *b; /* w on ranks 0 and 1 */
		const char *words;
	} cases[] = {
		{ &in, NULL, "Cannot handle DTensor nested inside ShardedTensor" },
		{ &out, NULL, "Cannot handle nested DTensor" },
		{ &pair, &pair2, "have different slices" },
		{ &pair, &alone, "has another one" },
		{ &pair, &right, "has another one" },
	};

	(void)state;
	for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
		CLEANUP(model_free) struct optim_model *m = NULL;
		T_OK(optim_model_new(2, &m));
		enum err e = optim_model_add(m, 0, STR("w"), nowhere(), 2, w_shape, cases[i].a);
		if (!e)
			e = optim_model_add(m, 1, STR("w"), nowhere(), 2, w_shape, cases[i].b);
		T_ERR(PLAN_INVALID, e ? e : optim_model_done(m));
		if (!strstr(err_last()->text, cases[i].words))
			T_FAIL("case %zu: %s", i, err_last()->text);
	}
	CLEANUP(model_free) struct optim_model *m = NULL;
	T_OK(optim_model_new(2, &m));
	T_OK(optim_model_add(m, 1, STR("w"), nowhere(), 2, w_shape, &left));
	T_OK(optim_model_add(m, 1, STR("w"), nowhere(), 2, w_shape, &left)); /* the inner tensor has two shards here */
	T_ERR(PLAN_INVALID, optim_model_add(m, 1, STR("w"), nowhere(), 2, w_shape, &right));
	assert_non_null(strstr(err_last()->text, "Cannot handle ST with multiple shards"));
	T_ERR(PLAN_INVALID, optim_model_add(m, 1, STR("w"), nowhere(), 2, w_shape, NULL));
	T_ERR(PLAN_INVALID, optim_model_add(m, 1, STR("w"), nowhere(), 2, V(6, 4), &left));
	assert_int_equal(err_last()->rank, 1);
}

static void too_many_parts_are_not_planned(void **state)
{
	CLEANUP(sdict_free_ptr) struct sdict *sd = NULL;
	CLEANUP(model_free) struct optim_model *m = NULL;
	CLEANUP(drop) struct made made = { 0 };
	char fqn[32];

	(void)state;
	T_OK(sdict_new(8 << 20, &sd));
	for (int i = 0; i < 300; i++) {
		snprintf(fqn, sizeof fqn, "optim.state.%d.m", i);
		add(sd, fqn, NULL, 1, V(4));
	}
	T_OK(optim_model_new(65536, &m));
	T_OK(optim_model_done(m));
	T_ERR(LIMIT_EXCEEDED, plan(sd, m, "optim", &made));
}

static void running_out_of_memory(void **state)
{
	CLEANUP(sdict_free_ptr) struct sdict *sd = NULL;
	unsigned failed = 0;

	(void)state;
	T_OK(sdict_new(1 << 20, &sd));
	add(sd, "optim.state.w.m", "optim/state/w/m", 2, w_shape);
	add(sd, "optim.state.w.b.m", NULL, 1, b_shape);
	for (uint64_t n = 1; n < 60; n++) {
		CLEANUP(model_free) struct optim_model *m = NULL;
		CLEANUP(drop) struct made made = { .arena = arena_new(1 << 20) };
		enum dtype dtypes[2] = { DT_FLOAT32, DT_FLOAT32 };
		mem_fail_at(n);
		enum err e = optim_model_new(4, &m);
		for (uint32_t r = 0; r < 4 && !e; r++)
			e = optim_model_add(m, r, STR("w"), nowhere(), 2, w_shape, r % 2 ? &right : &left);
		if (!e)
			e = optim_model_done(m);
		if (!e)
			e = optim_plan_make(sd, dtypes, m, STR("optim"), made.arena, &made.plan);
		mem_fail_at(0);
		assert_true(e == OK || e == ERR_NO_MEMORY);
		assert_true(e == OK || !made.plan.sd);
		failed += e != OK;
	}
	assert_true(failed > 10);
}

static void slices_of_meshes(void **state)
{
	static const struct str names[] = { { "dp", 2 }, { "tp", 2 } };
	static const struct placement placed[] = { { .kind = PLACE_STRIDED_SHARD, .dim = 0, .split_factor = 2 }, { .kind = PLACE_SHARD } };
	CLEANUP(arena_free_ptr) struct arena *a = arena_new(1 << 20);
	const struct tree_mesh mesh = { 2, V(3, 2), R(5, 4, 3, 2, 1, 0), names };
	const struct tree_mesh unnamed = { 2, V(3, 2), R(5, 4, 3, 2, 1, 0), NULL };
	const struct sd_outer *o;

	(void)state;
	T_OK(optim_mesh_slice(&mesh, placed, 2, 1, V(7), a, &o)); /* place 3: dp 1, tp 1 */
	assert_int_equal(o->offsets[0], 4);
	assert_int_equal(o->sizes[0], 3);
	assert_int_equal(o->rank_count, 3);
	assert_memory_equal(o->ranks, R(4, 2, 0), 3 * sizeof *o->ranks);
	T_OK(optim_mesh_slice(&mesh, placed, 6, 1, V(7), a, &o));
	assert_null(o);
	T_OK(optim_mesh_slice(&unnamed, placed, 2, 1, V(7), a, &o));
	assert_null(o);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(without_nesting_rows_are_cut_over_the_world),
		cmocka_unit_test(slices_are_cut_over_their_group),
		cmocka_unit_test(named_groups),
		cmocka_unit_test(names_are_found_without_paths),
		cmocka_unit_test(a_tail_that_two_tensors_have),
		cmocka_unit_test(keys_that_are_not_there_are_listed),
		cmocka_unit_test(models_that_contradict_themselves),
		cmocka_unit_test(too_many_parts_are_not_planned),
		cmocka_unit_test(running_out_of_memory),
		cmocka_unit_test(slices_of_meshes),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
