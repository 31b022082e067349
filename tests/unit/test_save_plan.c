/* test_save_plan.c: dedup, order and validation, against brute force and PyTorch's words. */
#include "lib/t.h"

#include "base/mem.h"
#include "lib/plan_cases.h"

#define V(...) ((const int64_t[]){ __VA_ARGS__ })
static const struct sd_loc nowhere = { .file = SD_NO_FILE };

static void chunks_are_shared_out(void **state)
{
	CLEANUP(sdict_free_ptr) struct sdict *held = NULL;
	CLEANUP(sdict_free_ptr) struct sdict *plan = NULL;
	struct save_plan_stats stats;
	uint32_t t, v, f;

	(void)state;
	T_OK(sdict_new(1 << 20, &held));
	T_OK(sdict_add_file(held, STR("0"), 0, &f));
	T_OK(sdict_add_file(held, STR("1"), 1, &f));
	T_OK(sdict_add_tensor(held, STR("big"), DT_FLOAT32, 1, V(100), &t)); /* replicated */
	T_OK(sdict_add_chunk(held, t, V(0, 100), 0, (struct sd_loc){ 0, 0, 4096, 400 }));
	T_OK(sdict_add_chunk(held, t, V(0, 100), 1, (struct sd_loc){ 1, 0, 8192, 400 }));
	held->tensors[t].requires_grad = true;
	T_OK(sdict_add_tensor(held, STR("small"), DT_FLOAT32, 1, V(10), &t)); /* replicated */
	T_OK(sdict_add_chunk(held, t, V(0, 10), 0, (struct sd_loc){ 0, 0, 0, 40 }));
	T_OK(sdict_add_chunk(held, t, V(0, 10), 1, (struct sd_loc){ 1, 0, 40, 40 }));
	T_OK(sdict_add_tensor(held, STR("cut"), DT_FLOAT32, 1, V(3), &t)); /* the last rank has nothing */
	T_OK(sdict_add_chunk(held, t, V(0, 3), 0, nowhere));
	T_OK(sdict_add_chunk(held, t, V(3, 0), 1, nowhere));
	T_OK(sdict_add_tensor(held, STR("empty"), DT_FLOAT32, 2, V(0, 2), &t));
	T_OK(sdict_add_chunk(held, t, V(0, 0, 0, 2), 0, nowhere));
	T_OK(sdict_add_chunk(held, t, V(0, 0, 0, 2), 1, nowhere));
	T_OK(sdict_add_value(held, STR("lr"), 0, (struct sd_loc){ .length = 7 }, &v));
	T_OK(sdict_add_value_replica(held, v, 1, (struct sd_loc){ .length = 7, .offset = 9 }, &v));
	T_OK(save_plan_make(held, DEDUP_BALANCED, 1 << 20, &plan, &stats));
	T_OK(save_plan_validate(plan));
	assert_int_equal(stats.bytes_total, 400 + 40 + 12 + 7);
	assert_int_equal(stats.bytes_saved, 400 + 40 + 7);
	assert_int_equal(stats.chunk_count, 4);
	assert_int_equal(plan->file_count, 2);
	/* rank 0: big, cut and empty go first; rank 1: small and the value */
	assert_true(str_is(plan->tensors[0].fqn, "big"));
	assert_true(plan->tensors[0].requires_grad);
	const struct sd_tensor *small = sdict_tensor(plan, STR("small"));
	assert_int_equal(plan->chunks[small->first_chunk].rank, 1);
	assert_int_equal(plan->chunks[small->first_chunk].loc.offset, 40);
	assert_int_equal(sdict_value(plan, STR("lr"))->rank, 1);
	assert_int_equal(sdict_value(plan, STR("lr"))->loc.offset, 9);
	assert_int_equal(plan->value_count, 1);
	assert_int_equal(sdict_tensor(plan, STR("empty"))->chunk_count, 1);
	assert_int_equal(sdict_tensor(plan, STR("cut"))->chunk_count, 1);
	CLEANUP(sdict_free_ptr) struct sdict *lowest = NULL;
	T_OK(save_plan_make(held, DEDUP_LOWEST_RANK, 1 << 20, &lowest, &stats));
	for (uint64_t i = 0; i < lowest->chunk_count; i++)
		assert_int_equal(lowest->chunks[i].rank, 0);
	assert_int_equal(sdict_value(lowest, STR("lr"))->rank, 0);
}

static void order_is_that_of_pytorchs_metadata(void **state)
{
	CLEANUP(sdict_free_ptr) struct sdict *held = NULL;
	CLEANUP(sdict_free_ptr) struct sdict *plan = NULL;
	struct save_plan_stats stats;
	uint32_t t;

	(void)state;
	T_OK(sdict_new(1 << 20, &held));
	T_OK(sdict_add_tensor(held, STR("only on 1"), DT_INT8, 1, V(4), &t));
	T_OK(sdict_add_chunk(held, t, V(0, 4), 1, nowhere));
	T_OK(sdict_add_tensor(held, STR("both"), DT_INT8, 1, V(4), &t));
	T_OK(sdict_add_chunk(held, t, V(2, 2), 0, nowhere)); /* rank 0 has the end */
	T_OK(sdict_add_chunk(held, t, V(0, 2), 1, nowhere));
	T_OK(save_plan_make(held, DEDUP_BALANCED, 1 << 20, &plan, &stats));
	assert_true(str_is(plan->tensors[0].fqn, "both"));
	assert_int_equal(plan->chunks[0].dims[0], 2);
	assert_int_equal(plan->chunks[1].dims[0], 0);
	assert_true(str_is(plan->tensors[1].fqn, "only on 1"));
}

/* Many chunks of one tensor, dealt out like cards, are ordered by writer too. */
static void large_tensors_are_ordered_the_same(void **state)
{
	enum { SMALL = 1000, LARGE = 20000 };

	(void)state;
	for (int64_t n = SMALL; n <= LARGE; n += LARGE - SMALL) {
		CLEANUP(sdict_free_ptr) struct sdict *held = NULL;
		CLEANUP(sdict_free_ptr) struct sdict *plan = NULL;
		struct save_plan_stats stats;
		uint32_t t;

		T_OK(sdict_new(16 << 20, &held));
		T_OK(sdict_add_tensor(held, STR("before"), DT_INT8, 1, V(4), &t));
		T_OK(sdict_add_chunk(held, t, V(0, 4), 3, nowhere));
		T_OK(sdict_add_tensor(held, STR("w"), DT_INT8, 1, V(n), &t));
		for (int64_t i = 0; i < n; i++)
			T_OK(sdict_add_chunk(held, t, V(i, 1), (uint32_t)(i % 7), nowhere));
		T_OK(save_plan_make(held, DEDUP_BALANCED, 16 << 20, &plan, &stats));
		T_OK(save_plan_validate(plan));
		assert_true(str_is(plan->tensors[0].fqn, "w"));
		assert_int_equal(plan->chunk_count, n + 1);
		for (int64_t i = 1; i < n; i++) {
			const struct sd_chunk *a = &plan->chunks[i - 1], *b = &plan->chunks[i];
			assert_true(a->rank < b->rank || (a->rank == b->rank && a->dims[0] < b->dims[0]));
		}
	}
}

static void values_take_turns(void **state)
{
	CLEANUP(sdict_free_ptr) struct sdict *held = NULL;
	CLEANUP(sdict_free_ptr) struct sdict *plan = NULL;
	struct save_plan_stats stats;
	uint32_t v, r, of_rank[4] = { 0 };

	(void)state;
	T_OK(sdict_new(1 << 20, &held));
	for (int i = 0; i < 8; i++) {
		char name[8];
		snprintf(name, sizeof name, "v%d", i);
		T_OK(sdict_add_value(held, str_of(name), 0, (struct sd_loc){ .length = 100 }, &v));
		held->values[v].kind = SD_VALUE_INLINE;
		held->values[v].bytes = STR("0123456789");
		for (uint32_t rank = 1; rank < 4; rank++)
			T_OK(sdict_add_value_replica(held, v, rank, nowhere, &r));
	}
	T_OK(save_plan_make(held, DEDUP_BALANCED, 1 << 20, &plan, &stats));
	assert_int_equal(plan->value_count, 8);
	for (int i = 0; i < 8; i++)
		of_rank[plan->values[i].rank]++;
	for (int i = 0; i < 4; i++)
		assert_int_equal(of_rank[i], 2);
	assert_true(str_is(plan->values[0].bytes, "0123456789"));
	assert_int_equal(stats.bytes_total, 80);
	assert_int_equal(stats.bytes_saved, 240);
}

static bool same(uint32_t ndim, const int64_t *a, const int64_t *b)
{
	return box_equal(ndim, a, a + ndim, b, b + ndim);
}

/* The greedy choice, done naively. */
static void check_writers(const struct sdict *held, const struct sdict *plan)
{
	uint64_t load[4] = { 0 }, done = 0;

	for (uint32_t rank = 0; rank < 4; rank++) {
		for (uint64_t i = 0; i < held->chunk_count; i++) {
			const struct sd_chunk *c = &held->chunks[i];
			const struct sd_tensor *t = &held->tensors[c->tensor];
			uint32_t holders = 0, best = UINT32_MAX, first = UINT32_MAX;
			const struct sd_chunk *found = NULL;

			for (uint64_t j = t->first_chunk; j < t->first_chunk + t->chunk_count; j++) {
				if (!same(t->ndim, c->dims, held->chunks[j].dims))
					continue;
				first = first == UINT32_MAX ? (uint32_t)j : first;
				holders |= 1u << held->chunks[j].rank;
			}
			if (first != i || (holders & ((1u << rank) - 1)) || !(holders & 1u << rank) ||
			    box_empty(t->ndim, c->dims + t->ndim))
				continue;
			for (uint32_t r = 0; r < 4; r++)
				if ((holders & 1u << r) && (best == UINT32_MAX || load[r] < load[best]))
					best = r;
			uint64_t bytes = 2;
			for (uint32_t d = 0; d < t->ndim; d++)
				bytes *= (uint64_t)c->dims[t->ndim + d];
			load[best] += bytes;
			done++;
			const struct sd_tensor *p = sdict_tensor(plan, t->fqn);
			for (uint64_t j = p->first_chunk; j < p->first_chunk + p->chunk_count; j++)
				if (same(t->ndim, c->dims, plan->chunks[j].dims))
					found = &plan->chunks[j];
			if (!found)
				T_FAIL("a box was lost");
			assert_int_equal(found->rank, best);
		}
	}
	assert_int_equal(done, plan->chunk_count);
}

static void writers_are_chosen_greedily(void **state)
{
	struct dice d = { .state = 7 };
	uint64_t shared = 0;

	(void)state;
	for (int i = 0; i < 3000; i++) {
		CLEANUP(sdict_free_ptr) struct sdict *held = NULL;
		CLEANUP(sdict_free_ptr) struct sdict *plan = NULL;
		struct save_plan_stats stats;

		T_OK(sdict_new(1 << 20, &held));
		for (int k = 0; k < 3; k++) {
			struct boxes b;
			uint32_t t;
			char name[8];

			do
				case_shape(&d, &b);
			while (case_numel(&b) == 0);
			case_tile(&d, &b);
			snprintf(name, sizeof name, "t%d", k);
			T_OK(sdict_add_tensor(held, str_of(name), DT_INT16, b.ndim, b.shape, &t));
			for (uint32_t rank = 0; rank < 4; rank++)
				for (uint32_t j = 0; j < b.count; j++)
					if ((j + rank) % 4 == 0 || roll(&d, 3) == 0)
						T_OK(sdict_add_chunk(held, t, b.dims[j], rank, nowhere));
		}
		T_OK(save_plan_make(held, DEDUP_BALANCED, 1 << 20, &plan, &stats));
		T_OK(save_plan_validate(plan));
		check_writers(held, plan);
		for (uint64_t c = 1; c < plan->chunk_count; c++) /* by writer within a tensor */
			assert_true(plan->chunks[c].tensor != plan->chunks[c - 1].tensor ||
				    plan->chunks[c].rank >= plan->chunks[c - 1].rank);
		shared += stats.bytes_saved;
	}
	assert_true(shared > 0);
}

static void validation_agrees_with_brute_force(void **state)
{
	struct dice d = { .state = 42 };
	int good = 0, bad = 0;

	(void)state;
	for (int i = 0; i < 15000; i++) {
		struct boxes b;

		case_shape(&d, &b);
		case_tile(&d, &b);
		if (roll(&d, 3))
			case_spoil(&d, &b, roll(&d, 2) == 0);
		*(case_validate(&b) ? &bad : &good) += 1;
		case_plan(&b);
	}
	assert_true(good > 3000 && bad > 3000);
}

static void messages_are_pytorchs(void **state)
{
	CLEANUP(sdict_free_ptr) struct sdict *sd = NULL;
	uint32_t t;

	(void)state;
	T_OK(sdict_new(1 << 20, &sd));
	T_OK(sdict_add_tensor(sd, STR("good"), DT_INT8, 1, V(8), &t));
	T_OK(sdict_add_chunk(sd, t, V(0, 8), 0, nowhere));
	T_OK(sdict_add_tensor(sd, STR("hole"), DT_INT8, 1, V(8), &t));
	T_OK(sdict_add_chunk(sd, t, V(0, 6), 0, nowhere));
	T_ERR(COVERAGE_HOLE, save_plan_validate(sd));
	assert_string_equal(err_last()->text, "key:hole invalid fill tensor-volume: 8 chunks-volume: 6");
	assert_string_equal(err_last()->fqn, "hole");
	T_OK(sdict_add_tensor(sd, STR("w"), DT_INT8, 2, V(8, 2), &t));
	T_OK(sdict_add_chunk(sd, t, V(0, 0, 5, 2), 0, nowhere));
	T_OK(sdict_add_chunk(sd, t, V(4, 0, 4, 2), 1, nowhere));
	T_OK(sdict_add_chunk(sd, t, V(6, 0, 4, 2), 1, nowhere));
	T_ERR(PLAN_INVALID, save_plan_validate(sd));
	const char *text = err_last()->text;
	assert_non_null(strstr(text, "Failed to validate global plan: key:hole"));
	assert_non_null(strstr(text, "key:w has out of bounds chunk: tensor-size:[8, 2] chunk: [6, 0]+[4, 2]"));
	assert_non_null(strstr(text, "key:w has overlapping chunks: "));
	assert_non_null(strstr(text, "key:w invalid fill tensor-volume: 16 chunks-volume: 18"));
}

static void out_of_bounds_and_far_ranks_are_refused(void **state)
{
	CLEANUP(sdict_free_ptr) struct sdict *sd = NULL;
	CLEANUP(sdict_free_ptr) struct sdict *far = NULL;
	struct sdict *plan = NULL;
	struct save_plan_stats stats;
	uint32_t t;

	(void)state;
	T_OK(sdict_new(1 << 20, &sd));
	T_OK(sdict_add_tensor(sd, STR("w"), DT_INT8, 1, V(8), &t));
	T_OK(sdict_add_chunk(sd, t, V(4, INT64_MAX), 2, nowhere));
	T_ERR(PLAN_INVALID, save_plan_make(sd, DEDUP_BALANCED, 1 << 20, &plan, &stats));
	assert_string_equal(err_last()->fqn, "w");
	assert_int_equal(err_last()->rank, 2);
	T_OK(sdict_new(1 << 20, &far));
	T_OK(sdict_add_tensor(far, STR("w"), DT_INT8, 1, V(8), &t));
	T_OK(sdict_add_chunk(far, t, V(0, 8), 65536, nowhere));
	T_ERR(LIMIT_EXCEEDED, save_plan_make(far, DEDUP_BALANCED, 1 << 20, &plan, &stats));
	assert_null(plan);
}

/* A hundred thousand equal chunks are five thousand million overlapping pairs: a few are named. */
static void hostile_overlaps_end_early(void **state)
{
	CLEANUP(sdict_free_ptr) struct sdict *sd = NULL;
	uint32_t t;

	(void)state;
	T_OK(sdict_new(64 << 20, &sd));
	T_OK(sdict_add_tensor(sd, STR("w"), DT_INT8, 2, V(1 << 20, 1 << 20), &t));
	for (int64_t i = 0; i < 100000; i++)
		T_OK(sdict_add_chunk(sd, t, V(i, i, 1 << 19, 1 << 19), 0, nowhere));
	T_ERR(PLAN_INVALID, save_plan_validate(sd));
	assert_true(strlen(err_last()->text) < ERR_TEXT_MAX);
}

/* A square grid has no dim along which a sweep would be short. */
static void grids_validate_fast(void **state)
{
	CLEANUP(sdict_free_ptr) struct sdict *sd = NULL;
	uint32_t t;

	(void)state;
	T_OK(sdict_new(64 << 20, &sd));
	T_OK(sdict_add_tensor(sd, STR("w"), DT_INT8, 3, V(80, 80, 80), &t));
	for (int64_t i = 0; i < 40 * 40 * 40; i++)
		T_OK(sdict_add_chunk(sd, t, V(i % 40 * 2, i / 40 % 40 * 2, i / 1600 * 2, 2, 2, 2), 0, nowhere));
	T_OK(save_plan_validate(sd));
	((int64_t *)sd->chunks[777].dims)[2] ^= 2; /* lay it over a neighbour */
	T_ERR(PLAN_INVALID, save_plan_validate(sd));
}

static void running_out_of_memory_is_an_error(void **state)
{
	struct boxes b = { .ndim = 1, .shape = { 6 } };
	enum err e = ERR_NO_MEMORY;

	(void)state;
	for (int64_t i = 0; i < 24; i++)
		case_add(&b, V(i % 6, 1));
	for (uint64_t nth = 1; e; nth++) {
		CLEANUP(sdict_free_ptr) struct sdict *held = case_sdict(&b, NULL);
		CLEANUP(sdict_free_ptr) struct sdict *plan = NULL;
		struct save_plan_stats stats;
		uint32_t v;

		T_OK(sdict_add_value(held, STR("v"), 0, nowhere, &v));
		mem_fail_at(nth);
		e = save_plan_make(held, DEDUP_BALANCED, 1 << 20, &plan, &stats);
		if (!e)
			e = save_plan_validate(plan);
		mem_fail_at(0);
		assert_true(e == ERR_NO_MEMORY || (e == OK && nth > 10));
	}
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(chunks_are_shared_out),
		cmocka_unit_test(order_is_that_of_pytorchs_metadata),
		cmocka_unit_test(large_tensors_are_ordered_the_same),
		cmocka_unit_test(values_take_turns),
		cmocka_unit_test(writers_are_chosen_greedily),
		cmocka_unit_test(validation_agrees_with_brute_force),
		cmocka_unit_test(messages_are_pytorchs),
		cmocka_unit_test(out_of_bounds_and_far_ranks_are_refused),
		cmocka_unit_test(hostile_overlaps_end_early),
		cmocka_unit_test(grids_validate_fast),
		cmocka_unit_test(running_out_of_memory_is_an_error),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
