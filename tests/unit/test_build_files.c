/* Target files before a byte is written: every item has its place, every byte its block. */
#include "lib/t_target.h"

#include <stdio.h>

/* Rows of a matrix dealt to `world` ranks, `columns` chunks side by side in each. */
static void add_matrix(const char *fqn, int64_t rows, int64_t cols, uint32_t world, uint32_t columns)
{
	int64_t shape[] = { rows, cols };
	uint32_t index;

	T_OK(sdict_add_tensor(sd, str_of(fqn), DT_FLOAT32, 2, shape, &index));
	for (int64_t r = 0; r < world; r++)
		for (int64_t c = 0; c < columns; c++) {
			int64_t top = rows * r / world, left = cols * c / columns;
			int64_t dims[] = { top, left, rows * (r + 1) / world - top, cols * (c + 1) / columns - left };
			T_OK(sdict_add_chunk(sd, index, dims, (uint32_t)((r + c) % world), (struct sd_loc){ .file = SD_NO_FILE }));
		}
}

static void add_value(const char *fqn, uint32_t rank, uint64_t bytes)
{
	uint32_t index;

	T_OK(sdict_add_value(sd, str_of(fqn), rank, (struct sd_loc){ .file = SD_NO_FILE, .length = bytes }, &index));
}

static void add_scalar(const char *fqn)
{
	uint32_t index;

	T_OK(sdict_add_tensor(sd, str_of(fqn), DT_FLOAT64, 0, NULL, &index));
	T_OK(sdict_add_chunk(sd, index, NULL, 0, (struct sd_loc){ .file = SD_NO_FILE }));
}

static bool cuts;

static enum err build(uint32_t world, uint32_t files, bool direct, uint32_t task_bytes)
{
	static uint32_t value_src[64];
	struct run_src *s;

	for (uint64_t i = 0; i < sd->chunk_count + sd->value_count; i++)
		T_OK(vec_push(&b.srcs, &s));
	for (uint32_t i = 0; i < sd->value_count; i++)
		value_src[i] = (uint32_t)sd->chunk_count + i;
	t_target_one_to_one();
	target = (struct build_target){ .format = FORMAT_DCP, .sd = sd, .pieces = &plan, .value_src = value_src, .world_size = world,
					.files_per_rank = files, .cut = cuts, .direct = direct, .task_bytes = task_bytes };
	return build_target_files(&b, &target);
}

/* A file is fsynced by whoever brings its count to zero: blocks, and heads of large items. */
static void check_counts(void)
{
	uint32_t want[64] = { 0 };
	uint64_t bytes = 0;

	assert_true(b.files.n <= 64);
	for (uint64_t i = 0; i < b.blocks.n; i++)
		want[b.blocks.v[i].file]++;
	for (uint64_t i = 0; i < b.dsts.n; i++)
		want[b.dsts.v[i].file] += b.dsts.v[i].kind == RUN_DST_TENSOR && !b.dsts.v[i].small;
	for (uint64_t i = 0; i < b.files.n; i++) {
		assert_int_equal(atomic_load(&b.files.v[i].blocks_left), want[i]);
		bytes += b.files.v[i].bytes;
	}
	assert_int_equal(bytes, target.bytes);
}

static void check(void)
{
	t_build_check_parts(&b);
	t_build_check_blocks(&b);
	check_counts();
	uint64_t indexes = 0;
	for (uint64_t i = 0; i < b.files.n; i++)
		indexes += b.files.v[i].bytes != 0; /* behind the items of a file */
	assert_int_equal(b.dsts.n, sd->chunk_count + sd->value_count + indexes);
	for (uint64_t i = 0; i < sd->chunk_count; i++) {
		const struct build_place *p = &target.chunk_places[i];
		assert_int_equal(b.files.v[p->file].rank, sd->chunks[i].rank);
		assert_true(p->offset + p->length <= b.files.v[p->file].bytes);
	}
	for (uint64_t i = 0; i < b.dsts.n; i++) {
		const struct run_dst *d = &b.dsts.v[i];
		if (!d->small)
			assert_int_equal((d->offset + d->payload_off) % 4096, 0);
	}
}

static void test_small_items_share_blocks(void **state)
{
	char fqn[16];

	(void)state;
	for (int i = 0; i < 50; i++) {
		snprintf(fqn, sizeof fqn, "t%d", i);
		add_matrix(fqn, 3, 5, 1, 1);
	}
	add_scalar("s");
	add_value("v", 0, 900);
	T_OK(build(1, 1, true, BUILD_TASK_BYTES));
	check();
	assert_int_equal(b.files.n, 1);
	assert_int_equal(b.blocks.n, 2); /* the items, the index */
	assert_true(str_is((struct str){ b.strings.v + b.files.v[0].name_at, b.files.v[0].name_len }, "__0_0.distcp"));
}

static void test_large_and_uneven(void **state)
{
	(void)state;
	add_matrix("rows", 1031, 2053, 3, 1);
	add_matrix("columns", 1031, 2053, 1, 3); /* of the same rows: side by side */
	add_matrix("wide", 3, 3000000, 1, 2);    /* a row is more than a task */
	add_matrix("empty", 0, 7, 2, 1);
	add_value("large", 1, 9 << 20);
	T_OK(build(3, 1, true, BUILD_TASK_BYTES));
	check();
	assert_int_equal(b.files.n, 3);
	t_target_teardown(NULL);
	t_target_setup(NULL);
	add_matrix("columns", 1031, 2053, 1, 3);
	add_matrix("many", 2000, 4096, 1, 100);
	T_OK(build(1, 1, true, BUILD_MEMORY_TASK_BYTES));
	check();
}

static void test_files_per_rank(void **state)
{
	(void)state;
	for (int i = 0; i < 8; i++)
		add_matrix((const char *const[]){ "a", "b", "c", "d", "e", "f", "g", "h" }[i], 100 + 20 * i, 1000, 2, 1);
	T_OK(build(2, 3, false, BUILD_TASK_BYTES));
	check();
	assert_int_equal(b.files.n, 6);
	uint64_t least = UINT64_MAX, most = 0;
	for (uint64_t i = 0; i < 6; i++) {
		least = b.files.v[i].bytes < least ? b.files.v[i].bytes : least;
		most = b.files.v[i].bytes > most ? b.files.v[i].bytes : most;
	}
	assert_true(most < 2 * least);
}

/* Files that the next save may share: values alone, each large tensor alone, small ones together. */
static void test_cut(void **state)
{
	(void)state;
	add_value("step", 0, 100);
	add_matrix("large", 1000, 1000, 1, 1);
	add_matrix("small", 10, 10, 1, 1);
	add_matrix("larger", 3000, 1000, 1, 1);
	add_matrix("less", 500, 300, 1, 1);
	cuts = true;
	enum err e = build(2, 1, true, BUILD_TASK_BYTES);
	cuts = false;
	T_OK(e);
	check();
	static const uint32_t files[] = { 2, 1, 3, 1 };
	for (uint64_t i = 0; i < sd->chunk_count; i++)
		assert_int_equal(target.chunk_places[i].file, files[i]);
	assert_int_equal(target.value_places[0].file, 0);
	assert_int_equal(b.files.n, 5); /* the last one is the other rank's */
}

/* More tensors than there may be files are put together. */
static void test_cut_of_many(void **state)
{
	char name[16];

	(void)state;
	for (int i = 0; i < 10000; i++) {
		snprintf(name, sizeof name, "w%05d", i);
		add_matrix(name, 512, 512, 1, 1);
	}
	cuts = true;
	enum err e = build(1, 1, true, BUILD_TASK_BYTES);
	cuts = false;
	T_OK(e);
	assert_in_range(b.files.n, FILE_PLAN_CUT_MAX / 4, FILE_PLAN_CUT_MAX);
}

/* A rank without an item has its file all the same: PyTorch's world size is read from the names. */
static void test_nothing(void **state)
{
	(void)state;
	T_OK(build(3, 1, true, BUILD_TASK_BYTES));
	check();
	assert_int_equal(b.files.n, 3);
	assert_int_equal(b.ranks.n, 3);
	assert_int_equal(b.tasks.n, 0);
}

static void test_rank_outside_of_the_world(void **state)
{
	(void)state;
	add_value("v", 3, 10);
	T_ERR(INTERNAL, build(3, 1, true, BUILD_TASK_BYTES));
}

/* The sizes are those of a hostile .metadata: refused before they are listed. */
static void test_more_blocks_than_there_can_be(void **state)
{
	(void)state;
	add_matrix("huge", 1ll << 40, 1 << 10, 1, 1);
	T_ERR(LIMIT_EXCEEDED, build(1, 1, true, BUILD_TASK_BYTES));
	t_target_teardown(NULL);
	t_target_setup(NULL);
	add_matrix("huge", 1ll << 40, 1 << 10, 1, 2);
	T_ERR(LIMIT_EXCEEDED, build(2, 1, true, BUILD_TASK_BYTES));
}

static void test_no_memory(void **state)
{
	(void)state;
	for (uint64_t nth = 1;; nth++) {
		add_matrix("a", 100, 1000, 2, 2);
		add_value("v", 0, 1 << 20);
		struct run_src *s;
		for (int i = 0; i < 5; i++)
			T_OK(vec_push(&b.srcs, &s));
		static uint32_t value_src[1];
		T_OK(arena_alloc(arena, 5, sizeof *plan.first, &plan.first));
		T_OK(arena_alloc(arena, 5, sizeof *plan.sources, &plan.sources));
		for (uint32_t i = 0; i < 5; i++)
			plan.first[i] = plan.sources[i] = i;
		target = (struct build_target){ .format = FORMAT_DCP, .sd = sd, .pieces = &plan, .value_src = value_src, .world_size = 2,
						.files_per_rank = 2, .task_bytes = BUILD_TASK_BYTES };
		mem_fail_at(nth);
		enum err e = build_target_files(&b, &target);
		mem_fail_at(0);
		if (e == OK)
			break;
		assert_int_equal(e, ERR_NO_MEMORY);
		t_target_teardown(NULL);
		t_target_setup(NULL);
	}
}

int main(void)
{
#define T(name) cmocka_unit_test_setup_teardown(name, t_target_setup, t_target_teardown)
	const struct CMUnitTest tests[] = {
		T(test_small_items_share_blocks), T(test_large_and_uneven), T(test_files_per_rank), T(test_cut), T(test_cut_of_many),
		T(test_nothing),
		T(test_rank_outside_of_the_world), T(test_more_blocks_than_there_can_be), T(test_no_memory),
	};

	return cmocka_run_group_tests_name("build_files", tests, NULL, NULL);
}
