/* test_layout.c: rules become the boxes that PyTorch makes, and bad ones are refused with FQN and rule. */
#include "lib/t.h"

#include <string.h>

#include "plan/layout.h"
#include "plan/layout_use.h"
#include "plan/save_plan.h"
#include "tensor/box.h"

#define V(...) ((const int64_t[]){ __VA_ARGS__ })
#define R(...) ((const uint32_t[]){ __VA_ARGS__ })
#define COUNT(a) (sizeof(a) / sizeof *(a))

static struct sdict *apply(const struct layout *l, uint32_t ndim, const int64_t *shape, uint32_t *matched)
{
	struct sdict *sd = NULL;
	uint32_t t;

	T_OK(layout_check(l));
	T_OK(sdict_new(16 << 20, &sd));
	T_OK(sdict_add_tensor(sd, STR("model.w"), DT_FLOAT32, ndim, shape, &t));
	T_OK(layout_apply(l, sd, t, matched));
	return sd;
}

/* expect: rank, then offsets and sizes, for each chunk. */
static void same(const struct sdict *sd, uint64_t count, const int64_t *expect)
{
	uint32_t ndim = sd->tensors[0].ndim;

	assert_int_equal(sd->chunk_count, count);
	for (uint64_t i = 0; i < count; i++, expect += 1 + ndim * 2) {
		assert_int_equal(sd->chunks[i].rank, expect[0]);
		if (ndim)
			assert_memory_equal(sd->chunks[i].dims, expect + 1, ndim * 2 * sizeof *expect);
	}
}

static void case_of(const struct layout_rule *rule, uint32_t world, uint32_t ndim, const int64_t *shape,
		    uint64_t count, const int64_t *expect)
{
	struct layout l = { rule, rule ? 1 : 0, world };
	uint32_t matched;
	CLEANUP(sdict_free_ptr) struct sdict *sd = apply(&l, ndim, shape, &matched);

	assert_int_equal(matched, rule ? 0 : UINT32_MAX);
	same(sd, count, expect);
}

static struct layout_rule mesh_rule(uint32_t ndim, const int64_t *mesh, const struct placement *p)
{
	return (struct layout_rule){ .match = STR("*"), .mesh_ndim = ndim, .mesh = mesh, .placements = p,
				     .placement_count = ndim };
}

static const struct placement S0 = { .kind = PLACE_SHARD }, S1 = { .kind = PLACE_SHARD, .dim = 1 },
			      RE = { .kind = PLACE_REPLICATE };

static void dtensor_boxes(void **state)
{
	struct layout_rule r = mesh_rule(2, V(2, 2), (const struct placement[]){ S0, S0 });

	(void)state;
	case_of(&r, 4, 1, V(5), 4, V(0, 0, 2, 1, 2, 1, 2, 3, 1, 3, 4, 1));
	r = mesh_rule(1, V(4), &S0); /* empty shards are pinned to the end */
	case_of(&r, 4, 2, V(2, 3), 4, V(0, 0, 0, 1, 3, 1, 1, 0, 1, 3, 2, 2, 0, 0, 3, 3, 2, 0, 0, 3));
	r = mesh_rule(2, V(2, 2), (const struct placement[]){ RE, S1 });
	case_of(&r, 4, 2, V(2, 3), 4, V(0, 0, 0, 2, 2, 1, 0, 2, 2, 1, 2, 0, 0, 2, 2, 3, 0, 2, 2, 1));
	const struct placement last = { .kind = PLACE_SHARD, .dim = -1 };
	r = mesh_rule(1, V(2), &last);
	case_of(&r, 2, 2, V(2, 4), 2, V(0, 0, 0, 2, 2, 1, 0, 2, 2, 2));
	r = mesh_rule(1, V(2), &RE);
	case_of(&r, 2, 0, NULL, 2, V(0, 1));
	r = mesh_rule(2, V(1, 2), (const struct placement[]){ RE, S0 }); /* on some ranks, in any order */
	r.ranks = R(5, 2);
	r.rank_count = 2;
	case_of(&r, 8, 1, V(4), 2, V(2, 2, 2, 5, 0, 2));
	r = mesh_rule(0, NULL, &S0); /* no mesh: the world */
	r.placement_count = 1;
	case_of(&r, 2, 1, V(3), 2, V(0, 0, 2, 1, 2, 1));
	case_of(&r, 2, 1, V(0), 2, V(0, 0, 0, 1, 0, 0));
}

static void defaults(void **state)
{
	(void)state;
	case_of(NULL, 2, 2, V(3, 2), 2, V(0, 0, 0, 2, 2, 1, 2, 0, 1, 2));
	case_of(NULL, 4, 0, NULL, 1, V(0));
}

static void chunk_sharding_spec(void **state)
{
	struct layout_rule r = { .match = STR("model.*"), .kind = LAYOUT_CHUNKS, .chunk_dim = -2, .ranks = R(0, 1, 1, 0),
				 .rank_count = 4 };

	(void)state;
	case_of(&r, 2, 2, V(10, 20), 4, V(0, 0, 0, 3, 20, 0, 9, 0, 1, 20, 1, 3, 0, 3, 20, 1, 6, 0, 3, 20));
	case_of(&r, 2, 2, V(5, 2), 4, V(0, 0, 0, 2, 2, 0, 5, 0, 0, 2, 1, 2, 0, 2, 2, 1, 4, 0, 1, 2));
	case_of(&r, 2, 2, V(6, 2), 4, V(0, 0, 0, 2, 2, 0, 6, 0, 0, 2, 1, 2, 0, 2, 2, 1, 4, 0, 2, 2));
}

static void enumerable_sharding_spec(void **state)
{
	const struct layout_box boxes[] = { { 1, 2, V(0, 0, 8, 20) }, { 0, 2, V(8, 0, 2, 20) } };
	const struct layout_box holed[] = { { 1, 2, V(0, 0, 8, 20) }, { 0, 2, V(8, 0, 1, 20) } };
	const struct layout_box twice[] = { { 1, 2, V(0, 0, 8, 20) }, { 0, 2, V(7, 0, 3, 20) } };
	const struct layout_box beyond[] = { { 1, 2, V(0, 0, 8, 20) }, { 0, 2, V(8, 0, INT64_MAX, 20) } };
	const struct {
		const struct layout_box *boxes;
		const char *what;
	} bad[] = { { holed, "invalid fill" }, { twice, "overlapping" }, { beyond, "out of bounds" } };
	struct layout_rule r = { .match = STR("*"), .kind = LAYOUT_BOXES, .boxes = boxes, .box_count = 2 };
	CLEANUP(sdict_free_ptr) struct sdict *sd = NULL;
	uint32_t t, matched;

	(void)state;
	case_of(&r, 2, 2, V(10, 20), 2, V(0, 8, 0, 2, 20, 1, 0, 0, 8, 20));
	T_OK(sdict_new(1 << 20, &sd));
	for (size_t i = 0; i < COUNT(bad); i++) {
		char name[8];
		struct layout l = { &r, 1, 2 };

		r.boxes = bad[i].boxes;
		snprintf(name, sizeof name, "t%zu", i);
		T_OK(layout_check(&l));
		T_OK(sdict_add_tensor(sd, str_of(name), DT_INT8, 2, V(10, 20), &t));
		T_ERR(LAYOUT_INVALID, layout_apply(&l, sd, t, &matched));
		assert_string_equal(err_last()->fqn, name);
		assert_non_null(strstr(err_last()->text, "rule 0 ('*')"));
		assert_non_null(strstr(err_last()->text, bad[i].what));
	}
	r.boxes = boxes; /* of another number of dims */
	T_OK(sdict_add_tensor(sd, STR("line"), DT_INT8, 1, V(10), &t));
	T_ERR(LAYOUT_INVALID, layout_apply(&(struct layout){ &r, 1, 2 }, sd, t, &matched));
}

static void first_rule_that_fits_wins(void **state)
{
	const struct layout_rule rules[] = {
		{ .match = STR("optim.*"), .placements = &RE, .placement_count = 1 },
		{ .match = STR("*"), .placements = &S1, .placement_count = 1 },
		{ .match = STR("model.*"), .placements = &RE, .placement_count = 1 },
	};
	struct layout l = { rules, 3, 2 };
	uint32_t matched;

	(void)state;
	sdict_free(apply(&l, 2, V(4, 4), &matched));
	assert_int_equal(matched, 1);
	sdict_free(apply(&l, 1, V(4), &matched)); /* has no dim 1 */
	assert_int_equal(matched, 2);
	l.rule_count = 2;
	sdict_free(apply(&l, 1, V(4), &matched));
	assert_int_equal(matched, UINT32_MAX);
}

static void like_another(void **state)
{
	CLEANUP(sdict_free_ptr) struct sdict *other = NULL;
	CLEANUP(sdict_free_ptr) struct sdict *sd = NULL;
	struct layout_rule r = { .match = STR("*"), .kind = LAYOUT_LIKE };
	struct layout l = { &r, 1, 2 };
	uint32_t t, matched;
	const struct sd_loc nowhere = { .file = SD_NO_FILE };

	(void)state;
	T_ERR(LAYOUT_INVALID, layout_check(&l));
	T_OK(sdict_new(1 << 20, &other));
	T_OK(sdict_add_tensor(other, STR("model.w"), DT_FLOAT32, 1, V(10), &t));
	T_OK(sdict_add_chunk(other, t, V(4, 6), 1, nowhere));
	T_OK(sdict_add_chunk(other, t, V(0, 4), 0, nowhere));
	T_OK(sdict_add_chunk(other, t, V(0, 4), 1, nowhere)); /* a replica */
	T_OK(sdict_add_tensor(other, STR("half"), DT_FLOAT32, 1, V(10), &t));
	T_OK(sdict_add_chunk(other, t, V(0, 4), 0, nowhere));
	r.like = other;
	case_of(&r, 2, 1, V(10), 3, V(0, 0, 4, 1, 4, 6, 1, 0, 4));
	T_OK(sdict_new(1 << 20, &sd));
	T_OK(sdict_add_tensor(sd, STR("model.w"), DT_FLOAT32, 1, V(11), &t));
	T_ERR(LAYOUT_INVALID, layout_apply(&l, sd, t, &matched));
	T_OK(sdict_add_tensor(sd, STR("half"), DT_FLOAT32, 1, V(10), &t));
	T_ERR(LAYOUT_INVALID, layout_apply(&l, sd, t, &matched));
	T_OK(sdict_add_tensor(sd, STR("new"), DT_FLOAT32, 1, V(10), &t));
	T_OK(layout_apply(&l, sd, t, &matched));
	assert_int_equal(matched, UINT32_MAX);
	l.world_size = 1;
	CLEANUP(sdict_free_ptr) struct sdict *narrow = NULL;
	T_OK(sdict_new(1 << 20, &narrow));
	T_OK(sdict_add_tensor(narrow, STR("model.w"), DT_FLOAT32, 1, V(10), &t));
	T_ERR(LAYOUT_INVALID, layout_apply(&l, narrow, t, &matched));
}

static void partial_in_memory_is_the_whole_unreduced(void **state)
{
	const struct placement p[] = { { .kind = PLACE_PARTIAL }, S0 }, mixed[] = { p[0], { .kind = PLACE_PARTIAL, .reduce = REDUCE_MAX } },
			       both[] = { p[0], { .kind = PLACE_PARTIAL, .reduce = REDUCE_AVG } };
	struct layout_rule r = mesh_rule(2, V(2, 2), p);
	struct layout l = { &r, 1, 4 };
	uint32_t matched, t;
	CLEANUP(sdict_free_ptr) struct sdict *sd = NULL;

	(void)state;
	T_ERR(LAYOUT_INVALID, layout_check(&l));
	T_OK(layout_check_in_memory(&l));
	T_OK(sdict_new(1 << 20, &sd));
	T_OK(sdict_add_tensor(sd, STR("g"), DT_FLOAT32, 1, V(3), &t));
	T_OK(layout_apply(&l, sd, t, &matched));
	same(sd, 4, V(0, 0, 2, 1, 2, 1, 2, 0, 2, 3, 2, 1));
	r.placements = mixed;
	T_ERR(LAYOUT_INVALID, layout_check_in_memory(&l));
	assert_non_null(strstr(err_last()->text, "Partial(sum) and Partial(max)"));
	r.placements = both;
	T_OK(layout_check_in_memory(&l));
}

static void bad_rules_are_refused(void **state)
{
	const struct placement partial = { .kind = PLACE_PARTIAL, .reduce = REDUCE_AVG }, strided = { .kind = PLACE_STRIDED_SHARD };
	struct layout_rule r = mesh_rule(1, V(3), &S0);
	struct layout l = { &r, 1, 2 };
	const struct layout_box mixed[] = { { 0, 1, V(0, 1) }, { 0, 2, V(0, 0, 1, 1) } }, far = { 2, 1, V(0, 1) },
				negative = { 0, 1, V(-1, 1) };

	(void)state;
	T_ERR(WORLD_MISMATCH, layout_check(&l));
	assert_non_null(strstr(err_last()->text, "rule 0 ('*')"));
	r = mesh_rule(2, V(1LL << 40, 1LL << 40), (const struct placement[]){ S0, S0 });
	T_ERR(WORLD_MISMATCH, layout_check(&l));
	r = mesh_rule(2, V(2, 0), (const struct placement[]){ S0, S0 });
	T_ERR(LAYOUT_INVALID, layout_check(&l));
	r = mesh_rule(1, V(2), &partial);
	T_ERR(LAYOUT_INVALID, layout_check(&l));
	assert_non_null(strstr(err_last()->text, "rule 0 ('*'): Any checkpointing related operations are not supported for DTensor with "
			       "partial placements: Partial(avg)"));
	r = mesh_rule(1, V(2), &strided);
	T_ERR(LAYOUT_INVALID, layout_check(&l));
	assert_non_null(strstr(err_last()->text, "rule 0 ('*'): the split factor"));
	r = mesh_rule(9, V(1, 1, 1, 1, 1, 1, 1, 1, 2), (const struct placement[9]){ S0 });
	T_ERR(LAYOUT_INVALID, layout_check(&l));
	r = mesh_rule(1, V(2), &S0);
	r.placement_count = 0;
	T_ERR(LAYOUT_INVALID, layout_check(&l));
	r = mesh_rule(1, V(2), &S0);
	r.ranks = R(0, 2);
	r.rank_count = 2;
	T_ERR(WORLD_MISMATCH, layout_check(&l));
	r.ranks = R(1, 1);
	T_ERR(LAYOUT_INVALID, layout_check(&l));
	r.rank_count = 1;
	T_ERR(WORLD_MISMATCH, layout_check(&l));
	r = mesh_rule(0, NULL, &S0); /* a list of no ranks: nobody would hold anything */
	r.placement_count = 1;
	r.ranks = R(0);
	T_ERR(LAYOUT_INVALID, layout_check(&l));
	r = (struct layout_rule){ .match = STR("*"), .kind = LAYOUT_CHUNKS };
	T_ERR(LAYOUT_INVALID, layout_check(&l));
	r = (struct layout_rule){ .match = STR("*"), .kind = LAYOUT_BOXES };
	T_ERR(LAYOUT_INVALID, layout_check(&l));
	r.boxes = mixed;
	r.box_count = 2;
	T_ERR(LAYOUT_INVALID, layout_check(&l));
	r.boxes = &far;
	r.box_count = 1;
	T_ERR(WORLD_MISMATCH, layout_check(&l));
	r.boxes = &negative;
	T_ERR(LAYOUT_INVALID, layout_check(&l));
	l = (struct layout){ NULL, 0, 0 };
	T_ERR(WORLD_MISMATCH, layout_check(&l));
	l.world_size = 65537;
	T_ERR(WORLD_MISMATCH, layout_check(&l));
}

static void huge_dims_do_not_overflow(void **state)
{
	struct layout_rule r = mesh_rule(1, V(60000), &S0);
	struct layout l = { &r, 1, 60000 };
	uint32_t matched, t;
	CLEANUP(sdict_free_ptr) struct sdict *sd = NULL;

	(void)state;
	T_OK(sdict_new(64 << 20, &sd));
	T_OK(sdict_add_tensor(sd, STR("w"), DT_INT8, 1, V(INT64_MAX), &t));
	T_OK(layout_apply(&l, sd, t, &matched));
	T_OK(save_plan_validate(sd));
	assert_int_equal(sd->chunk_count, 60000);
	const int64_t *last = sd->chunks[59999].dims;
	assert_true(last[0] + last[1] == INT64_MAX);
}

/* The tensors of `shapes` (ndim each) in turn, as target.c does it. */
static enum err use_of(const struct layout *l, const char *const *names, const uint32_t *ndims, uint32_t n, struct layout_use *use)
{
	CLEANUP(sdict_free_ptr) struct sdict *sd = NULL;
	uint32_t t, matched;

	T_OK(layout_use_new(l, use));
	T_OK(sdict_new(16 << 20, &sd));
	for (uint32_t i = 0; i < n; i++) {
		T_OK(sdict_add_tensor(sd, str_of(names[i]), DT_FLOAT32, ndims[i], V(4, 4), &t));
		T_OK(layout_apply(l, sd, t, &matched));
		T_OK(layout_use_note(use, l, &sd->tensors[t], matched));
	}
	return layout_use_check(use, l, sd, NULL);
}

/* A rule is a slip if tensors came to it, and none that its pattern matches has its dim; whoever took those. */
static void rules_that_are_slips(void **state)
{
	static const char *const names[] = { "a.w", "a.b", "b.w", "c" };
	static const uint32_t ndims[] = { 2, 1, 2, 0 };
	static const struct {
		const char *first, *second;  /* patterns: Shard(1), then Shard(1) */
		int32_t dim;                 /* of the second */
		bool optional;
		enum err e;
		uint64_t fallbacks;
	} cases[] = {
		{ "a.b", "zzz", 1, false, ERR_LAYOUT_INVALID, 1 }, { "zzz", "a.*", 1, false, OK, 1 },
		{ "zzz", "a.*", 2, false, ERR_LAYOUT_INVALID, 2 }, { "zzz", "a.*", 2, true, OK, 2 },
		{ "a.w", "a.*", 1, false, OK, 1 },		   { "a.w", "a.w", 9, false, OK, 0 },
		{ "zzz", "*", 7, false, OK, 4 },		   { "zzz", "c", 0, false, ERR_LAYOUT_INVALID, 1 },
		{ "zzz", "a.*", -2, false, OK, 1 },
	};

	(void)state;
	for (size_t i = 0; i < COUNT(cases); i++) {
		struct placement p = { .kind = PLACE_SHARD, .dim = cases[i].dim };
		struct layout_rule rules[2] = { mesh_rule(0, NULL, &S1), mesh_rule(0, NULL, &p) };
		struct layout l = { rules, 2, 2 };
		CLEANUP(layout_use_free) struct layout_use use = { 0 };

		rules[0].placement_count = rules[1].placement_count = 1;
		rules[0].match = str_of(cases[i].first);
		rules[1].match = str_of(cases[i].second);
		rules[1].optional = cases[i].optional;
		enum err e = use_of(&l, names, ndims, 4, &use);
		if (e != cases[i].e || use.fallback_count != cases[i].fallbacks)
			T_FAIL("case %zu: %s, %ju fell back", i, err_code_name(e), (uintmax_t)use.fallback_count);
		if (e)
			assert_true(err_last()->fqn[0] != 0);
	}
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(dtensor_boxes),
		cmocka_unit_test(defaults),
		cmocka_unit_test(chunk_sharding_spec),
		cmocka_unit_test(enumerable_sharding_spec),
		cmocka_unit_test(first_rule_that_fits_wins),
		cmocka_unit_test(rules_that_are_slips),
		cmocka_unit_test(like_another),
		cmocka_unit_test(partial_in_memory_is_the_whole_unreduced),
		cmocka_unit_test(bad_rules_are_refused),
		cmocka_unit_test(huge_dims_do_not_overflow),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
