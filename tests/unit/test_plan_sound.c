/* test_plan_sound.c: plans are the same for the same input, to the byte, and take no more memory than their input warrants. */
#include "lib/t.h"

#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/mem.h"
#include "plan/layout.h"
#include "plan/load_plan.h"
#include "plan/save_plan.h"
#include "runner/build.h"
#include "runner/target.h"

static uint32_t dice;
static const struct sd_loc nowhere = { .file = SD_NO_FILE };

/* ------------------------------------------------------------------------------------------------------------ the same */

static uint32_t roll(uint32_t sides)
{
	dice = dice * 1664525 + 1013904223;
	return (dice >> 8) % sides;
}

/* Tensors of all sorts over 4 ranks: rows, columns, replicas, empty ones, scalars; values of several ranks. */
static struct sdict *held(uint32_t seed)
{
	struct sdict *sd = NULL;
	uint32_t t, v, f;
	char name[64];

	T_OK(sdict_new(1 << 26, &sd));
	dice = seed;
	for (uint32_t r = 0; r < 4; r++) {
		snprintf(name, sizeof name, "%u", r);
		T_OK(sdict_add_file(sd, str_of(name), r, &f));
	}
	for (uint32_t i = 0; i < 300; i++) {
		int64_t rows = roll(9), cols = 1 + roll(9);
		bool replicated = roll(3) == 0;
		snprintf(name, sizeof name, "layer.%u", i);
		T_OK(sdict_add_tensor(sd, str_of(name), roll(2) ? DT_FLOAT32 : DT_BFLOAT16, 2, (const int64_t[]){ rows, cols }, &t));
		for (int64_t r = 0; r < 4; r++) {
			int64_t from = replicated ? 0 : rows * r / 4, to = replicated ? rows : rows * (r + 1) / 4;
			struct sd_loc loc = { (uint32_t)r, 0, 4096ull * i, 400 };
			T_OK(sdict_add_chunk(sd, t, (const int64_t[]){ from, 0, to - from, cols }, (uint32_t)r, loc));
		}
	}
	for (uint32_t i = 0; i < 20; i++) {
		snprintf(name, sizeof name, "value.%u", i);
		T_OK(sdict_add_value(sd, str_of(name), i % 4, nowhere, &v));
		sd->values[v].kind = SD_VALUE_INLINE;
		T_OK(arena_str(sd->arena, str_of(name), &sd->values[v].bytes));
	}
	return sd;
}

/* The tables of the run that writes it, as all workers see them. */
static struct run tables(enum dedup how)
{
	CLEANUP(sdict_free_ptr) struct sdict *have = held(7), *plan = NULL;
	struct arena *a = arena_new(1 << 26);
	struct save_plan_stats stats;
	struct run_build b = { 0 };
	struct load_plan pieces;
	struct run run = { .fd = -1 };
	uint32_t map[4], first, value_src[64];

	memset(value_src, 0xFF, sizeof value_src);
	T_OK(save_plan_make(have, how, 1 << 26, &plan, &stats));
	T_OK(save_plan_validate(plan));
	for (uint32_t r = 0; r < 4; r++)
		T_OK(run_add_file(&b, RUN_FILE_SEGMENT, 0, STR("segment"), 1 << 22, &map[r]));
	T_OK(build_sources(&b, plan, RUN_SRC_PLAIN, map, NULL, &first));
	T_OK(target_identity(plan->chunk_count, a, &pieces));
	struct build_target t = { .format = FORMAT_DCP,
					.sd = plan, .pieces = &pieces, .first_src = first, .value_src = value_src, .world_size = 4,
				  .files_per_rank = 2, .task_bytes = BUILD_TASK_BYTES };
	T_OK(run_add_dir(&b, 0, STR("x"), &t.dir));
	b.opts.task_bytes = BUILD_TASK_BYTES;
	T_OK(build_target_files(&b, &t));
	T_OK(run_share(&b, &run));
	mem_free(t.chunk_places);
	mem_free(t.value_places);
	run_build_free(&b);
	arena_free(a);
	return run;
}

/* Fills the heap, so that memory an earlier plan left cannot pass for zeros. */
static void dirty_the_heap(unsigned char with)
{
	void *p[64];

	for (size_t i = 0; i < 64; i++) {
		p[i] = mem_alloc(1000 + i * 977);
		assert_non_null(p[i]);
		memset(p[i], with, 1000 + i * 977);
	}
	for (size_t i = 0; i < 64; i++)
		mem_free(p[i]);
}

static void the_same_input_gives_the_same_run(void **state)
{
	(void)state;
	for (int how = DEDUP_BALANCED; how <= DEDUP_LOWEST_RANK; how++) {
		dirty_the_heap(0x55);
		struct run a = tables((enum dedup)how);
		dirty_the_heap(0xAA);
		struct run b = tables((enum dedup)how);
		assert_int_equal(a.bytes, b.bytes);
		assert_memory_equal(a.head, b.head, a.bytes);
		run_detach(&a);
		run_detach(&b);
	}
}

/* ------------------------------------------------------------------------------------------------------------ memory */

/* In a process that may have `mib` more memory than it has; true: fn ended well there. */
static bool within(unsigned mib, void (*fn)(void))
{
	int status = 0;
	pid_t pid = fork();

	assert_true(pid >= 0);
	if (pid == 0) {
		unsigned long pages = 0;
		FILE *f = fopen("/proc/self/statm", "r");
		if (!f || fscanf(f, "%lu", &pages) != 1)
			_exit(2);
		fclose(f);
		rlim_t bytes = (rlim_t)pages * 4096 + (rlim_t)mib * (1 << 20);
		if (setrlimit(RLIMIT_AS, &(struct rlimit){ bytes, bytes }) != 0)
			_exit(2);
		fn();
		_exit(0);
	}
	assert_int_equal(waitpid(pid, &status, 0), pid);
	return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

/* Any end but for want of memory. */
static void wants_memory(enum err e)
{
	if (e == ERR_NO_MEMORY) {
		fprintf(stderr, "%s\n", err_last()->text);
		_exit(1);
	}
}

static struct sdict *one(const int64_t *shape, uint32_t ndim, uint32_t *t)
{
	struct sdict *sd = NULL;

	if (sdict_new(UINT64_MAX, &sd) != OK || sdict_add_tensor(sd, STR("w"), DT_UINT8, ndim, shape, t) != OK)
		_exit(3);
	return sd;
}

static void plan_both(struct sdict *held, struct sdict *target)
{
	struct sdict *plan = NULL;
	struct save_plan_stats stats;
	struct load_match match = { .strict = true };
	struct load_plan loads;
	struct arena *a = arena_new(UINT64_MAX);
	enum err e = save_plan_make(held, DEDUP_BALANCED, UINT64_MAX, &plan, &stats);

	wants_memory(e);
	if (!e)
		wants_memory(save_plan_validate(plan));
	wants_memory(load_plan_make(held, target, &match, a, &loads));
}

/* Sizes of 2^60 and offsets beyond them are numbers, not amounts. */
static void enormous_boxes(void)
{
	const int64_t n = 1ll << 60, shape[] = { n };
	uint32_t t, u;
	struct sdict *held = one(shape, 1, &t), *target = one(shape, 1, &u);

	for (int64_t i = 0; i < 3; i++)
		if (sdict_add_chunk(held, t, (const int64_t[]){ i * (n / 4), n / 4 }, (uint32_t)i, nowhere) != OK)
			_exit(3);
	if (sdict_add_chunk(target, u, (const int64_t[]){ 0, n }, 65535, nowhere) != OK)
		_exit(3);
	plan_both(held, target);
	if (sdict_add_chunk(held, t, (const int64_t[]){ INT64_MAX, INT64_MAX }, 3, nowhere) == OK)
		plan_both(held, target);
}

/* Many that overlap: each with each would be a million pairs. */
static void overlapping_boxes(void)
{
	const int64_t shape[] = { 4096, 4096 };
	uint32_t t, u;
	struct sdict *held = one(shape, 2, &t), *target = one(shape, 2, &u);

	for (int64_t i = 0; i < 1000; i++) {
		const int64_t dims[] = { i, i, 4096 - i, 4096 - i };
		if (sdict_add_chunk(held, t, dims, (uint32_t)i, nowhere) != OK ||
		    sdict_add_chunk(target, u, dims, (uint32_t)i, nowhere) != OK)
			_exit(3);
	}
	plan_both(held, target);
}

/* A layout over the largest world of a tensor of 64 dims. */
static void the_largest_world(void)
{
	const struct placement shard = { .kind = PLACE_SHARD, .dim = 63 };
	const struct layout_rule rule = { .match = STR("*"), .placements = &shard, .placement_count = 1 };
	const struct layout l = { &rule, 1, 65536 };
	int64_t shape[64];
	uint32_t t, matched;

	for (int i = 0; i < 64; i++)
		shape[i] = i < 63 ? 1 : INT64_MAX;
	struct sdict *sd = one(shape, 64, &t);
	if (layout_check(&l) != OK)
		_exit(3);
	wants_memory(layout_apply(&l, sd, t, &matched));
}

static void plans_take_what_their_input_warrants(void **state)
{
	(void)state;
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
	skip(); /* shadow memory is far beyond any limit */
#endif
	assert_true(within(16, enormous_boxes));
	assert_true(within(64, overlapping_boxes));
	assert_true(within(160, the_largest_world)); /* 65536 chunks of 2 x 64 numbers are 64 MiB */
	assert_false(within(16, the_largest_world)); /* the limit is one */
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(the_same_input_gives_the_same_run),
		cmocka_unit_test(plans_take_what_their_input_warrants),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
