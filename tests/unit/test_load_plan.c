/* test_load_plan.c: reads are planned as PyTorch plans them, holes are found, odd and hostile inputs end well. */
#include "lib/t.h"

#include "base/mem.h"
#include "lib/plan_cases.h"
#include "plan/problems.h"

#define V(...) ((const int64_t[]){ __VA_ARGS__ })
static const struct sd_loc nowhere = { .file = SD_NO_FILE };

static void add_line(struct sdict *sd, const char *fqn, int64_t size, int64_t pieces)
{
	uint32_t t;

	T_OK(sdict_add_tensor(sd, str_of(fqn), DT_FLOAT32, 1, V(size), &t));
	for (int64_t i = 0; i < pieces; i++)
		T_OK(sdict_add_chunk(sd, t, V(i * (size / pieces), size / pieces), (uint32_t)i, nowhere));
}

static struct sdict *line(int64_t size, int64_t pieces)
{
	struct sdict *sd = NULL;

	T_OK(sdict_new(64 << 20, &sd));
	add_line(sd, "w", size, pieces);
	return sd;
}

struct fixture {
	struct sdict *source, *target;
	struct arena *arena;
	struct load_match match;
	struct load_plan plan;
};

static void fixture_free(struct fixture *f)
{
	sdict_free(f->source);
	sdict_free(f->target);
	arena_free(f->arena);
}

static enum err make(struct fixture *f)
{
	if (!f->arena)
		f->arena = arena_new(64 << 20);
	return load_plan_make(f->source, f->target, &f->match, f->arena, &f->plan);
}

/* The numbers of PyTorch's test_planner. */
static void pytorchs_own_cases(void **state)
{
	CLEANUP(fixture_free) struct fixture a = { line(128, 8), line(128, 4), .match.strict = true };
	CLEANUP(fixture_free) struct fixture b = { line(120, 4), line(120, 3), .match.strict = true };
	CLEANUP(fixture_free) struct fixture c = { line(16, 2), NULL, .match.strict = true };
	int64_t off, size;
	uint32_t t;

	(void)state;
	T_OK(make(&a));
	assert_int_equal(a.plan.source_count, 8);
	assert_int_equal(a.plan.first[1], 2);
	assert_int_equal(a.plan.first[2], 4);
	assert_int_equal(a.source->chunks[a.plan.sources[2]].dims[0], 32);
	assert_int_equal(a.source->chunks[a.plan.sources[3]].dims[0], 48);
	T_OK(make(&b));
	assert_int_equal(b.plan.first[1], 2);
	assert_int_equal(b.plan.first[2], 4);
	const int64_t *want = b.target->chunks[1].dims, *x = b.source->chunks[b.plan.sources[2]].dims,
		      *y = b.source->chunks[b.plan.sources[3]].dims;
	assert_int_equal(x[0], 30);
	assert_true(box_intersect(1, want, want + 1, x, x + 1, &off, &size));
	assert_int_equal(off - x[0], 10);
	assert_int_equal(size, 20);
	assert_int_equal(y[0], 60);
	assert_true(box_intersect(1, want, want + 1, y, y + 1, &off, &size));
	assert_int_equal(off - y[0], 0);
	assert_int_equal(off - want[0], 20);
	T_OK(sdict_new(1 << 20, &c.target));
	T_OK(sdict_add_tensor(c.target, STR("w"), DT_FLOAT32, 1, V(16), &t));
	T_OK(sdict_add_chunk(c.target, t, V(4, 7), 0, nowhere));
	T_OK(make(&c));
	assert_int_equal(c.plan.source_count, 2);
}

static void as_brute_force_says(void **state)
{
	struct dice d = { .state = 20260101 };
	int outcomes[3] = { 0 };

	(void)state;
	for (int i = 0; i < 12000; i++) {
		struct boxes from, to;

		case_shape(&d, &from);
		to = from;
		case_tile(&d, &from);
		case_tile(&d, &to);
		if (roll(&d, 2))
			case_spoil(&d, &from, roll(&d, 4) == 0);
		if (roll(&d, 4) == 0)
			case_spoil(&d, &to, roll(&d, 8) == 0);
		enum err e = case_cover(&from, &to);
		outcomes[e == OK ? 0 : e == ERR_COVERAGE_HOLE ? 1 : 2]++;
		case_load(&from, &to);
	}
	assert_true(outcomes[0] > 1000 && outcomes[1] > 1000 && outcomes[2] > 100);
}

/* Overlaps and a hole of the same volume must not cancel out. */
static void a_hole_is_seen_behind_an_overlap(void **state)
{
	CLEANUP(fixture_free) struct fixture f = { NULL, line(8, 1), .match.strict = true };
	uint32_t t;

	(void)state;
	T_OK(sdict_new(1 << 20, &f.source));
	T_OK(sdict_add_tensor(f.source, STR("w"), DT_FLOAT32, 1, V(8), &t));
	T_OK(sdict_add_chunk(f.source, t, V(0, 4), 0, nowhere));
	T_OK(sdict_add_chunk(f.source, t, V(2, 4), 1, nowhere));
	T_ERR(COVERAGE_HOLE, make(&f));
	assert_string_equal(err_last()->fqn, "w");
	assert_non_null(strstr(err_last()->text, "[6]+[2]"));
}

static void replicas_are_read_once(void **state)
{
	CLEANUP(fixture_free) struct fixture f = { NULL, line(1024, 2), .match.strict = true };
	uint32_t t;

	(void)state;
	T_OK(sdict_new(64 << 20, &f.source));
	T_OK(sdict_add_tensor(f.source, STR("w"), DT_FLOAT32, 1, V(1024), &t));
	for (uint32_t rank = 0; rank < 64; rank++)
		for (int64_t i = 0; i < 1024; i++)
			T_OK(sdict_add_chunk(f.source, t, V(i, 1), rank, nowhere));
	T_OK(make(&f));
	assert_int_equal(f.plan.source_count, 1024);
	assert_int_equal(f.plan.sources[1023], 1023);
}

static void keys_are_matched(void **state)
{
	CLEANUP(fixture_free) struct fixture f = { line(8, 2), line(8, 1), .match.strict = true };
	uint32_t v;

	(void)state;
	add_line(f.source, "extra", 4, 1);
	T_OK(sdict_add_value(f.source, STR("lr"), 0, nowhere, &v));
	T_OK(sdict_add_value(f.target, STR("lr"), 0, nowhere, &v));
	T_OK(make(&f));
	assert_int_equal(f.match.missing_count, 0);
	assert_int_equal(f.match.unexpected_count, 1);
	assert_true(str_is(f.match.unexpected[0], "extra"));
	T_OK(sdict_add_value_replica(f.target, v, 1, nowhere, &v)); /* counts as one key */
	T_OK(make(&f));
	assert_int_equal(f.match.unexpected_count, 1);
	add_line(f.target, "a.b", 4, 2);
	T_OK(sdict_add_value(f.target, STR("step"), 0, nowhere, &v));
	T_ERR(MISSING_KEY, make(&f));
	assert_string_equal(err_last()->text, "Missing keys in checkpoint state_dict: a.b, step");
	assert_int_equal(f.match.missing_count, 2);
	f.match.strict = false;
	T_OK(make(&f));
	assert_int_equal(f.match.missing_count, 2);
	assert_int_equal(f.plan.first[1], 2); /* what is there is planned, what is not has no sources */
	assert_int_equal(f.plan.first[3], 2);
	f.match.a_part = true;
	T_OK(make(&f));
	assert_int_equal(f.match.missing_count, 2);
	assert_int_equal(f.match.unexpected_count, 0);
}

static void many_missing_keys_are_cut_in_the_text_only(void **state)
{
	CLEANUP(fixture_free) struct fixture f = { line(8, 2), NULL, .match.strict = true };
	char name[700], big[700];

	(void)state;
	T_OK(sdict_new(64 << 20, &f.target));
	memset(big, 'k', sizeof big);
	big[sizeof big - 1] = 0;
	add_line(f.target, big, 4, 1);
	for (int i = 0; i < 1000; i++) {
		snprintf(name, sizeof name, "layers.%d.weight", i);
		add_line(f.target, name, 4, 1);
	}
	T_ERR(MISSING_KEY, make(&f));
	assert_int_equal(f.match.missing_count, 1001);
	assert_true(str_is(f.match.missing[1000], "layers.999.weight"));
	assert_non_null(strstr(err_last()->text, "layers.0.weight"));
	assert_non_null(strstr(err_last()->text, " more"));
	assert_non_null(strstr(err_last()->text, "and 9"));
}

static void sides_must_agree(void **state)
{
	CLEANUP(fixture_free) struct fixture f = { line(8, 2), line(10, 1), .match.strict = true };
	CLEANUP(fixture_free) struct fixture g = { line(8, 2), NULL, .match.strict = true };
	CLEANUP(fixture_free) struct fixture h = { NULL, line(8, 2), .match.strict = true };
	uint32_t v;

	(void)state;
	T_ERR(SIZE_MISMATCH, make(&f));
	assert_string_equal(err_last()->text, "Size mismatch between saved [8] and current: [10] for w");
	assert_string_equal(err_last()->expected, "[8]");
	assert_string_equal(err_last()->actual, "[10]");
	T_OK(sdict_new(1 << 20, &g.target));
	T_OK(sdict_add_value(g.target, STR("w"), 0, nowhere, &v));
	T_ERR(KIND_MISMATCH, make(&g));
	T_OK(sdict_new(1 << 20, &h.source));
	T_OK(sdict_add_value(h.source, STR("w"), 0, nowhere, &v));
	T_ERR(KIND_MISMATCH, make(&h));
	assert_string_equal(err_last()->fqn, "w");
}

/* A key that is missing, one of another size, one with a hole, one that fits: all that is wrong is said at once. */
static void everything_wrong_is_told(void **state)
{
	CLEANUP(fixture_free) struct fixture f = { line(8, 2), line(9, 1), .match.strict = true };
	struct problems p = { 0 };
	int64_t half[2] = { 0, 4 };
	uint32_t t;

	(void)state;
	add_line(f.target, "gone", 4, 1);
	add_line(f.target, "holed", 8, 2);
	add_line(f.target, "fits", 8, 2);
	T_OK(sdict_add_tensor(f.source, STR("holed"), DT_FLOAT32, 1, (int64_t[]){ 8 }, &t));
	T_OK(sdict_add_chunk(f.source, t, half, 0, (struct sd_loc){ .file = SD_NO_FILE }));
	add_line(f.source, "fits", 8, 4);
	T_ERR(MISSING_KEY, make(&f));
	assert_string_equal(err_last()->fqn, "gone");
	assert_non_null(strstr(err_last()->text, "Missing key in checkpoint state_dict: gone; Size mismatch between saved [8] and "
						 "current: [9] for w; "));
	assert_non_null(strstr(err_last()->text, "holed"));

	p.arena = f.arena;
	f.match.problems = &p;
	T_OK(make(&f));
	assert_int_equal(p.count, 3);
	assert_int_equal(p.list.v[0].code, ERR_MISSING_KEY);
	assert_int_equal(p.list.v[1].code, ERR_SIZE_MISMATCH);
	assert_string_equal(p.list.v[1].actual.p, "[9]");
	assert_int_equal(p.list.v[2].code, ERR_COVERAGE_HOLE);
	assert_true(str_is(p.list.v[2].fqn, "holed"));
	/* w, gone and both chunks of holed have no sources, each half of fits has two */
	assert_int_equal(f.plan.first[f.target->chunk_count], 4);
	assert_int_equal(f.plan.first[f.target->chunk_count - 2], 0);
	problems_free(&p);
}

static void problems_are_those_of_keys(void **state)
{
	CLEANUP(problems_free) struct problems p = { .arena = arena_new(64 << 20) };
	char name[32];

	(void)state;
	T_OK(problems_note(&p, OK));
	T_ERR(NO_MEMORY, problems_note(&p, ERR(NO_MEMORY, "no memory")));
	T_ERR(LIMIT_EXCEEDED, problems_note(&p, err_at_fqn(ERR(LIMIT_EXCEEDED, "too many"), "w", 1)));
	T_ERR(SIZE_MISMATCH, problems_note(&p, ERR(SIZE_MISMATCH, "of no key")));
	T_OK(problems_raise(&p));
	for (int i = 0; i < PROBLEMS_KEPT + 5; i++) {
		int n = snprintf(name, sizeof name, "k%d", i);
		T_OK(problems_note(&p, err_at_rank(err_at_fqn(ERR(LAYOUT_INVALID, "bad %d", i), name, (size_t)n), 3)));
	}
	assert_int_equal(p.list.n, PROBLEMS_KEPT);
	assert_int_equal(p.count, PROBLEMS_KEPT + 5);
	T_ERR(LAYOUT_INVALID, problems_raise(&p));
	assert_string_equal(err_last()->fqn, "k0");
	assert_int_equal(err_last()->rank, 3);
	assert_non_null(strstr(err_last()->text, "bad 0; bad 1; "));
	assert_non_null(strstr(err_last()->text, " more"));
	arena_free(p.arena);
}

static void scalars_and_empty_tensors(void **state)
{
	CLEANUP(fixture_free) struct fixture f = { .match.strict = true };
	uint32_t t;

	(void)state;
	T_OK(sdict_new(1 << 20, &f.source));
	T_OK(sdict_new(1 << 20, &f.target));
	T_OK(sdict_add_tensor(f.source, STR("s"), DT_INT64, 0, NULL, &t));
	T_OK(sdict_add_chunk(f.source, t, NULL, 0, nowhere));
	T_OK(sdict_add_chunk(f.source, t, NULL, 1, nowhere));
	T_OK(sdict_add_tensor(f.source, STR("e"), DT_INT64, 2, V(0, 4), &t));
	T_OK(sdict_add_chunk(f.source, t, V(0, 0, 0, 4), 0, nowhere));
	T_OK(sdict_add_tensor(f.target, STR("s"), DT_INT64, 0, NULL, &t));
	T_OK(sdict_add_chunk(f.target, t, NULL, 0, nowhere));
	T_OK(sdict_add_chunk(f.target, t, NULL, 1, nowhere));
	T_OK(sdict_add_tensor(f.target, STR("e"), DT_INT64, 2, V(0, 4), &t));
	T_OK(sdict_add_chunk(f.target, t, V(0, 0, 0, 4), 0, nowhere));
	T_OK(make(&f));
	assert_int_equal(f.plan.source_count, 2);
	assert_int_equal(f.plan.sources[0], 0);
	assert_int_equal(f.plan.sources[1], 0);
	assert_int_equal(f.plan.first[3], 2);
}

static void a_tensor_without_chunks_is_a_hole(void **state)
{
	CLEANUP(fixture_free) struct fixture f = { line(8, 0 + 1), line(8, 1), .match.strict = true };

	(void)state;
	f.source->chunk_count = 0;
	f.source->tensors[0].chunk_count = 0;
	T_ERR(COVERAGE_HOLE, make(&f));
	assert_non_null(strstr(err_last()->text, "no stored chunk covers [0]+[8] of w"));
}

static void grid(struct sdict *sd, int64_t side, int64_t rows, int64_t columns)
{
	uint32_t t;

	T_OK(sdict_add_tensor(sd, STR("g"), DT_INT8, 2, V(side, side), &t));
	for (int64_t i = 0; i < rows; i++)
		for (int64_t j = 0; j < columns; j++)
			T_OK(sdict_add_chunk(sd, t, V(i * (side / rows), j * (side / columns), side / rows, side / columns),
					     (uint32_t)j, nowhere));
}

/* Grids, rows against columns, and nested boxes: must end at once, not in minutes. */
static void large_and_hostile_inputs(void **state)
{
	CLEANUP(fixture_free) struct fixture f = { .match.strict = true };
	CLEANUP(fixture_free) struct fixture g = { .match.strict = true };
	CLEANUP(fixture_free) struct fixture n = { .match.strict = true, .target = line(4000, 4000) };
	uint32_t t;

	(void)state;
	T_OK(sdict_new(64 << 20, &f.source));
	T_OK(sdict_new(64 << 20, &f.target));
	grid(f.source, 256 * 27, 256, 256);
	grid(f.target, 256 * 27, 27, 27);
	T_OK(make(&f));
	assert_true(f.plan.source_count >= 256 * 256);
	T_OK(sdict_new(64 << 20, &g.source));
	T_OK(sdict_new(64 << 20, &g.target));
	grid(g.source, 512, 512, 1);
	grid(g.target, 512, 1, 512);
	T_OK(make(&g));
	assert_int_equal(g.plan.source_count, 512 * 512);
	g.match.pieces_max = 512 * 512;
	T_OK(make(&g));
	g.match.pieces_max = 512 * 512 - 1;
	T_ERR(LIMIT_EXCEEDED, make(&g));
	T_OK(sdict_new(64 << 20, &n.source));
	T_OK(sdict_add_tensor(n.source, STR("w"), DT_INT8, 1, V(4000), &t));
	for (int64_t i = 1; i <= 4000; i++)
		T_OK(sdict_add_chunk(n.source, t, V(0, i), 0, nowhere));
	T_OK(make(&n));
	assert_int_equal(n.plan.source_count, 4000);
}

static void chunks_outside_are_refused(void **state)
{
	CLEANUP(fixture_free) struct fixture f = { NULL, line(8, 1), .match.strict = true };
	uint32_t t;

	(void)state;
	T_OK(sdict_new(1 << 20, &f.source));
	T_OK(sdict_add_tensor(f.source, STR("w"), DT_FLOAT32, 1, V(8), &t));
	T_OK(sdict_add_chunk(f.source, t, V(0, 8), 0, nowhere));
	T_OK(sdict_add_chunk(f.source, t, V(INT64_MAX, INT64_MAX), 3, nowhere));
	T_ERR(PLAN_INVALID, make(&f));
	assert_int_equal(err_last()->rank, 3);
	assert_string_equal(err_last()->fqn, "w");
}

static void running_out_of_memory_is_an_error(void **state)
{
	struct boxes from = { .ndim = 2, .shape = { 6, 6 } }, to = from;
	enum err e = ERR_NO_MEMORY;

	(void)state;
	for (int64_t i = 0; i < 36; i++) {
		case_add(&from, V(i / 6, i % 6, 1, 1));
		case_add(&to, V(i % 6, i / 6, 1, 1));
	}
	case_add(&from, V(2, 2, 3, 3)); /* overlapping: the longest way */
	for (uint64_t nth = 1; e; nth++) {
		CLEANUP(fixture_free) struct fixture f = { case_sdict(&from, NULL), case_sdict(&to, NULL),
							   .arena = arena_new(1 << 20) };
		mem_fail_at(nth);
		e = make(&f);
		mem_fail_at(0);
		assert_true(e == ERR_NO_MEMORY || (e == OK && nth > 10));
	}
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(pytorchs_own_cases),
		cmocka_unit_test(as_brute_force_says),
		cmocka_unit_test(a_hole_is_seen_behind_an_overlap),
		cmocka_unit_test(replicas_are_read_once),
		cmocka_unit_test(keys_are_matched),
		cmocka_unit_test(many_missing_keys_are_cut_in_the_text_only),
		cmocka_unit_test(sides_must_agree),
		cmocka_unit_test(everything_wrong_is_told),
		cmocka_unit_test(problems_are_those_of_keys),
		cmocka_unit_test(scalars_and_empty_tensors),
		cmocka_unit_test(a_tensor_without_chunks_is_a_hole),
		cmocka_unit_test(large_and_hostile_inputs),
		cmocka_unit_test(chunks_outside_are_refused),
		cmocka_unit_test(running_out_of_memory_is_an_error),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
