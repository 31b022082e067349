/* test_sdict.c: building a state dict's structure, its caps and its refusals. */
#include "lib/t.h"

#include "base/mem.h"
#include "tensor/box.h"
#include "tensor/sdict.h"

#define V(...) ((const int64_t[]){ __VA_ARGS__ })
static const struct sd_loc nowhere = { .file = SD_NO_FILE };

static void what_was_added_is_found(void **state)
{
	CLEANUP(sdict_free_ptr) struct sdict *sd = NULL;
	uint32_t w, b, lr, f, t1, t2;
	char name[] = "model.w";

	(void)state;
	T_OK(sdict_new(1 << 20, &sd));
	T_OK(sdict_add_tensor(sd, str_of(name), DT_FLOAT32, 2, V(8, 4), &w));
	name[0] = 'X'; /* names are copied */
	T_OK(sdict_add_chunk(sd, w, V(0, 0, 4, 4), 0, nowhere));
	T_OK(sdict_add_chunk(sd, w, V(4, 0, 4, 4), 1, nowhere));
	T_OK(sdict_add_tensor(sd, STR("s"), DT_INT64, 0, NULL, &b));
	T_OK(sdict_add_chunk(sd, b, NULL, 0, nowhere));
	T_OK(sdict_add_file(sd, STR("__0_0.distcp"), 0, &f));
	T_OK(sdict_add_value(sd, STR("optim.lr"), 3, (struct sd_loc){ f, 0, 100, 20 }, &lr));
	assert_int_equal(sd->tensor_count, 2);
	assert_int_equal(sd->chunk_count, 3);
	const struct sd_tensor *t = sdict_tensor(sd, STR("model.w"));
	assert_non_null(t);
	assert_int_equal(t->first_chunk, 0);
	assert_int_equal(t->chunk_count, 2);
	assert_int_equal(sd->chunks[1].tensor, w);
	assert_int_equal(sd_offsets(&sd->chunks[1])[0], 4);
	assert_int_equal(sd_sizes(&sd->chunks[1], 2)[1], 4);
	assert_int_equal(sdict_tensor(sd, STR("s"))->first_chunk, 2);
	assert_null(sdict_tensor(sd, STR("optim.lr")));
	assert_null(sdict_value(sd, STR("model.w")));
	assert_null(sdict_value(sd, STR("nothing")));
	assert_int_equal(sdict_value(sd, STR("optim.lr"))->loc.offset, 100);
	T_OK(sdict_add_transform(sd, STR("stream.zstd/1"), &t1));
	T_OK(sdict_add_transform(sd, STR("stream.zstd/1"), &t2));
	assert_int_equal(t1, 1);
	assert_int_equal(t2, 1);
}

static void paths_are_copied(void **state)
{
	CLEANUP(sdict_free_ptr) struct sdict *sd = NULL;
	char key[] = "layers";
	struct sd_path_part parts[2] = { { .key = str_of(key) }, { .index = 3 } };
	struct sd_path out;

	(void)state;
	T_OK(sdict_new(1 << 20, &sd));
	T_OK(sdict_copy_path(sd, (struct sd_path){ parts, 2 }, &out));
	key[0] = 'X';
	assert_int_equal(out.count, 2);
	assert_true(str_is(out.parts[0].key, "layers"));
	assert_null(out.parts[1].key.p);
	assert_int_equal(out.parts[1].index, 3);
	T_OK(sdict_copy_path(sd, (struct sd_path){ 0 }, &out));
	assert_int_equal(out.count, 0);
}

static void bad_things_are_refused(void **state)
{
	CLEANUP(sdict_free_ptr) struct sdict *sd = NULL;
	uint32_t i;
	int64_t big[NDIM_MAX + 1] = { 0 };

	(void)state;
	T_OK(sdict_new(1 << 20, &sd));
	T_OK(sdict_add_tensor(sd, STR("a"), DT_FLOAT32, 1, V(8), &i));
	T_ERR(DUPLICATE_KEY, sdict_add_tensor(sd, STR("a"), DT_FLOAT32, 1, V(8), &i));
	assert_string_equal(err_last()->fqn, "a");
	T_ERR(DUPLICATE_KEY, sdict_add_value(sd, STR("a"), 0, nowhere, &i));
	static const char too_long[SD_FQN_MAX + 1]; /* no format is written with a name that it is not read with */
	T_ERR(LIMIT_EXCEEDED, sdict_add_tensor(sd, (struct str){ too_long, sizeof too_long }, DT_FLOAT32, 1, V(8), &i));
	T_ERR(LIMIT_EXCEEDED, sdict_add_value(sd, (struct str){ too_long, sizeof too_long }, 0, nowhere, &i));
	T_ERR(LIMIT_EXCEEDED, sdict_add_tensor(sd, STR("b"), DT_FLOAT32, 2, V(1LL << 40, 1LL << 40), &i));
	assert_string_equal(err_last()->fqn, "b");
	T_ERR(LIMIT_EXCEEDED, sdict_add_tensor(sd, STR("b"), DT_FLOAT64, 1, V(1LL << 61), &i));
	T_ERR(LIMIT_EXCEEDED, sdict_add_tensor(sd, STR("b"), DT_FLOAT64, 1, V(-1), &i));
	T_ERR(LIMIT_EXCEEDED, sdict_add_tensor(sd, STR("b"), DT_INT8, NDIM_MAX + 1, big, &i));
	assert_int_equal(sd->tensor_count, 1);
	for (uint32_t n = 0; n < 64; n++) {
		char name[16];
		snprintf(name, sizeof name, "t%u", n);
		T_OK(sdict_add_transform(sd, str_of(name), &i));
	}
	T_ERR(LIMIT_EXCEEDED, sdict_add_transform(sd, STR("one more"), &i));
}

static void a_whole_chunk_costs_nothing_more(void **state)
{
	CLEANUP(sdict_free_ptr) struct sdict *sd = NULL;
	uint32_t t;

	(void)state;
	T_OK(sdict_new(1 << 20, &sd));
	T_OK(sdict_add_tensor(sd, STR("w"), DT_INT8, 2, V(3, 4), &t));
	T_OK(sdict_add_chunk(sd, t, V(0, 0, 3, 4), 0, nowhere));
	T_OK(sdict_add_chunk(sd, t, V(0, 0, 3, 4), 1, nowhere));
	T_OK(sdict_add_chunk(sd, t, V(0, 0, 3, 3), 2, nowhere));
	T_OK(sdict_add_tensor(sd, STR("s"), DT_INT8, 0, NULL, &t));
	T_OK(sdict_add_chunk(sd, t, NULL, 0, nowhere));
	assert_ptr_equal(sd->chunks[0].dims, sd->chunks[1].dims);
	assert_memory_equal(sd->chunks[1].dims, V(0, 0, 3, 4), 4 * sizeof(int64_t));
	assert_memory_equal(sd->chunks[2].dims, V(0, 0, 3, 3), 4 * sizeof(int64_t));
}

static void what_is_borrowed_stays(void **state)
{
	struct sdict *a = NULL, *b = NULL, *c = NULL;
	const struct sd_path_part parts[] = { { STR("model"), 0 }, { STR("w"), 0 } };
	uint32_t t;

	(void)state;
	T_OK(sdict_new(1 << 20, &a));
	T_OK(sdict_add_tensor(a, STR("model.w"), DT_INT8, 1, V(9), &t));
	T_OK(sdict_copy_path(a, (struct sd_path){ parts, 2 }, &a->tensors[t].path));
	T_OK(sdict_add_chunk(a, t, V(0, 4), 3, nowhere));
	T_OK(sdict_add_chunk(a, t, V(4, 5), 4, nowhere));
	for (int i = 0; i < 2; i++) { /* b of a, c of b */
		struct sdict *from = i ? b : a, **to = i ? &c : &b;
		T_OK(sdict_new(1 << 20, to));
		T_OK(sdict_reserve(*to, 1, 1, 2));
		sdict_borrow(*to, from);
		T_OK(sdict_add_tensor_of(*to, &from->tensors[0], &t));
		T_ERR(DUPLICATE_KEY, sdict_add_tensor_of(*to, &from->tensors[0], &t));
		T_OK(sdict_add_chunk_of(*to, t, &from->chunks[1]));
		T_OK(sdict_add_chunk_of(*to, t, &from->chunks[0]));
		sdict_free(from);
	}
	const struct sd_tensor *w = sdict_tensor(c, STR("model.w"));
	assert_non_null(w);
	assert_int_equal(w->shape[0], 9);
	assert_true(str_is(w->path.parts[1].key, "w"));
	assert_int_equal(w->chunk_count, 2);
	assert_int_equal(c->chunks[0].rank, 3); /* turned round twice */
	assert_int_equal(c->chunks[1].dims[0], 4);
	assert_int_equal(c->chunks[1].tensor, 0);
	sdict_free(c);
}

static void room_may_be_made_in_advance(void **state)
{
	CLEANUP(sdict_free_ptr) struct sdict *sd = NULL;
	uint32_t t;

	(void)state;
	T_OK(sdict_new(1 << 20, &sd));
	T_ERR(LIMIT_EXCEEDED, sdict_reserve(sd, 1 << 20, 0, 0));
	T_ERR(LIMIT_EXCEEDED, sdict_reserve(sd, 0, 1ULL << 60, 0));
	T_ERR(LIMIT_EXCEEDED, sdict_reserve(sd, UINT64_MAX, 0, 0));
	T_OK(sdict_reserve(sd, 1000, 10, 10));
	const struct table_item *names = sd->names.v;
	for (uint32_t i = 0; i < 1000; i++) {
		char name[16];
		snprintf(name, sizeof name, "t%u", i);
		T_OK(sdict_add_tensor(sd, str_of(name), DT_INT8, 0, NULL, &t));
	}
	assert_ptr_equal(sd->names.v, names);
	for (uint32_t i = 0; i < 1000; i++) {
		char name[16];
		snprintf(name, sizeof name, "t%u", i);
		assert_int_equal(sdict_find(sd, str_of(name)), i);
	}
	assert_int_equal(sdict_find(sd, STR("t1000")), SD_NONE);
}

static void the_cap_holds_for_arrays_too(void **state)
{
	CLEANUP(sdict_free_ptr) struct sdict *sd = NULL;
	uint32_t t;
	enum err e = OK;

	(void)state;
	T_OK(sdict_new(1 << 20, &sd));
	T_OK(sdict_add_tensor(sd, STR("a"), DT_INT8, 1, V(1 << 30), &t));
	for (int64_t i = 0; i < 1 << 20 && !e; i++)
		e = sdict_add_chunk(sd, t, V(i, 1), 0, nowhere);
	assert_int_equal(e, ERR_LIMIT_EXCEEDED);
	assert_true(sd->chunk_count > 1000);
	assert_true(arena_used(sd->arena) + sd->chunk_cap * sizeof *sd->chunks <= 2 << 20); /* a block over at most */
}

static void running_out_of_memory_is_an_error(void **state)
{
	(void)state;
	for (uint64_t nth = 1;; nth++) {
		CLEANUP(sdict_free_ptr) struct sdict *sd = NULL;
		uint32_t t;

		mem_fail_at(nth);
		enum err e = sdict_new(1 << 20, &sd);
		if (!e)
			e = sdict_add_tensor(sd, STR("a"), DT_INT8, 1, V(64), &t);
		for (int64_t i = 0; i < 64 && !e; i++)
			e = sdict_add_chunk(sd, t, V(i, 1), 0, nowhere);
		mem_fail_at(0);
		if (!e) {
			assert_true(nth > 4);
			break;
		}
		assert_int_equal(e, ERR_NO_MEMORY);
	}
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(what_was_added_is_found),
		cmocka_unit_test(paths_are_copied),
		cmocka_unit_test(bad_things_are_refused),
		cmocka_unit_test(a_whole_chunk_costs_nothing_more),
		cmocka_unit_test(what_is_borrowed_stays),
		cmocka_unit_test(room_may_be_made_in_advance),
		cmocka_unit_test(the_cap_holds_for_arrays_too),
		cmocka_unit_test(running_out_of_memory_is_an_error),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
