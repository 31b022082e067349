/* Sources of a run and the ranges of them that are read: all for a verify, what is needed for a load. */
#include "lib/t.h"

#include <stdio.h>
#include <string.h>

#include "format/torch_item.h"
#include "runner/build.h"

static struct sdict *sd, *to;
static struct run_build b;
static struct arena *arena;
static const uint32_t map[] = { 0 };

static int setup(void **state)
{
	uint32_t index;

	(void)state;
	memset(&b, 0, sizeof b);
	arena = arena_new(UINT64_MAX);
	T_OK(sdict_new(UINT64_MAX, &sd));
	T_OK(sdict_new(UINT64_MAX, &to));
	T_OK(sdict_add_file(sd, STR("f"), 0, &index));
	T_OK(sdict_add_file(to, STR("0"), 0, &index));
	T_OK(run_add_file(&b, RUN_FILE_SOURCE, 0, STR("f"), 0, &index));
	return 0;
}

static int teardown(void **state)
{
	(void)state;
	run_build_free(&b);
	sdict_free(sd);
	sdict_free(to);
	arena_free(arena);
	return 0;
}

static void add(struct sdict *into, const char *fqn, const int64_t *shape, const int64_t *dims, uint32_t rank, uint64_t offset,
		uint64_t length)
{
	struct sd_tensor *t = sdict_tensor(into, str_of(fqn));
	uint32_t index = t ? (uint32_t)(t - into->tensors) : 0;

	if (!t)
		T_OK(sdict_add_tensor(into, str_of(fqn), DT_FLOAT32, 2, shape, &index));
	T_OK(sdict_add_chunk(into, index, dims, rank, (struct sd_loc){ .offset = offset, .length = length }));
}

static uint32_t sources(const char *manifest)
{
	CLEANUP(manifest_free_ptr) struct manifest *m = NULL;
	uint32_t first;

	if (manifest)
		T_OK(manifest_parse(manifest, strlen(manifest), &m));
	T_OK(build_sources(&b, sd, RUN_SRC_ITEM, map, m, &first));
	return first;
}

/* Every scan in one task, scans of a source in a row; whole: together they are its payload. */
static void check_scans(bool whole)
{
	uint64_t scans = 0, tasks = 0;

	for (uint64_t i = 0; i < b.srcs.n; i++) {
		const struct run_src *s = &b.srcs.v[i];
		uint64_t at = 0;
		for (uint32_t k = 0; k < s->scan_count; k++) {
			const struct run_scan *scan = &b.scans.v[s->first_scan + k];
			assert_int_equal(scan->src, i);
			assert_true(scan->end - scan->begin <= BUILD_TASK_BYTES + BUILD_TASK_BYTES / 2);
			assert_true(k == 0 || scan->begin == at);
			assert_true(!whole || scan->begin == at);
			at = scan->end;
		}
		assert_int_equal(s->scans_left, s->scan_count);
	}
	for (uint64_t i = 0; i < b.tasks.n; i++) {
		assert_int_equal(b.tasks.v[i].first, scans);
		scans += b.tasks.v[i].count;
	}
	assert_int_equal(scans, b.scans.n);
	for (uint64_t r = 0; r < b.ranks.n; r++) {
		assert_int_equal(b.ranks.v[r].first_task, tasks);
		tasks += b.ranks.v[r].task_count;
	}
	assert_int_equal(tasks, b.tasks.n);
}

static void test_verify(void **state)
{
	const int64_t shape[] = { 3000, 1000 }, top[] = { 0, 0, 2000, 1000 }, low[] = { 2000, 0, 1000, 1000 }, none[] = { 0, 0, 0, 5 };
	uint32_t index;

	(void)state;
	add(sd, "w", shape, top, 1, 100, 8 << 20);
	add(sd, "w", shape, low, 0, 9 << 20, 4 << 20);
	add(sd, "empty", none + 2, none, 0, 50, 20);
	T_OK(sdict_add_value(sd, STR("v"), 0, (struct sd_loc){ .offset = 30, .length = 20 }, &index));
	T_OK(build_verify(&b, sources(NULL)));
	check_scans(true);
	assert_int_equal(b.srcs.n, 4);
	assert_int_equal(b.ranks.n, 2);
	assert_int_equal(b.ranks.v[0].bytes_total, 4000000 + 20);
	assert_int_equal(b.ranks.v[1].bytes_total, 8000000);
	assert_int_equal(b.srcs.v[3].kind, RUN_SRC_RAW);
	assert_int_equal(b.srcs.v[2].scan_count, 1); /* nothing to read, but its header is looked at */
	assert_int_equal(b.srcs.v[0].partial, false);
}

#define D "\"00112233445566778899aabbccddeeff\""
#define MANIFEST(blocks) "{\"files\":[{\"name\":\"f\",\"items\":[[100,8388608,\"c\"," D blocks "]]}]}"

static void build_with(const char *manifest)
{
	const int64_t shape[] = { 2000, 1000 }, all[] = { 0, 0, 2000, 1000 };

	teardown(NULL);
	setup(NULL);
	add(sd, "w", shape, all, 0, 100, 8 << 20);
	T_OK(build_verify(&b, sources(manifest)));
	check_scans(true);
}

/* Scans are the blocks that digests are known of, if those add up to the payload and fit a task. */
static void test_digests(void **state)
{
	(void)state;
	build_with(MANIFEST(",[3000000," D ",6000000," D ",8000000," D "]"));
	assert_int_equal(b.srcs.v[0].digest_count, 3);
	assert_int_equal(b.srcs.v[0].scan_count, 3);
	assert_int_equal(b.scans.v[0].end, 3000000);
	build_with(MANIFEST(",[3000000," D ",6000000," D ",8000001," D "]"));
	assert_int_equal(b.srcs.v[0].digest_count, 0);
	build_with(MANIFEST(",[8000000," D "]")); /* one block, larger than a task */
	assert_int_equal(b.srcs.v[0].digest_count, 0);
	build_with(MANIFEST("")); /* the same: its end is the payload's */
	assert_int_equal(b.srcs.v[0].digest_count, 0);
	build_with(MANIFEST(",[]"));
	assert_int_equal(b.srcs.v[0].digest_count, 0);
	build_with(MANIFEST(",[9223372036854775807," D "]"));
	assert_int_equal(b.srcs.v[0].digest_count, 0);
	build_with(MANIFEST(",[0," D ",4000000," D ",4000000," D ",8000000," D ",8000000," D "]")); /* empty blocks do no harm */
	assert_true(b.srcs.v[0].scan_count >= 2);
	build_with("{\"files\":[{\"name\":\"f\",\"items\":[[100,8388607,\"c\"," D "],[101,8388608,\"c\"," D "]]}]}"); /* other items */
	assert_int_equal(b.srcs.v[0].digest_count, 0);
}

static struct load_plan plan_of(void)
{
	struct load_match match = { .strict = true };
	struct load_plan p;

	T_OK(load_plan_make(sd, to, &match, arena, &p));
	return p;
}

/* Rows 1000 to 1010 of 3000: one block of the source is read, and it does not stand for the whole CRC. */
static void test_fill_reads_what_is_needed(void **state)
{
	const int64_t shape[] = { 3000, 1000 }, all[] = { 0, 0, 3000, 1000 }, rows[] = { 1100, 0, 10, 1000 };
	char hex[33] = "00112233445566778899aabbccddeeff", manifest[512];
	struct item_layout l;
	uint32_t first;

	(void)state;
	T_OK(item_layout_tensor(DT_FLOAT32, 2, shape, 4096, &l));
	snprintf(manifest, sizeof manifest,
		 "{\"files\":[{\"name\":\"f\",\"items\":[[0,%ju,\"00000000\",\"%s\",[4194304,\"%s\",8388608,\"%s\",12000000,\"%s\"]]]}]}",
		 (uintmax_t)l.length, hex, hex, hex, hex);
	add(sd, "w", shape, all, 0, 0, l.length);
	add(to, "w", shape, rows, 0, 4096, 40000);
	b.opts.verify = true;
	first = sources(manifest);
	struct load_plan p = plan_of();
	T_OK(build_fill(&b, to, map, sd, first, &p));
	check_scans(false);
	assert_int_equal(b.srcs.v[0].scan_count, 1); /* one digest block */
	assert_true(b.srcs.v[0].partial && b.srcs.v[0].by_blocks && !b.srcs.v[0].sparse);
	assert_true(b.scans.v[0].begin == 4194304 && b.scans.v[0].end == 8388608);
	assert_int_equal(b.srcs.v[0].piece_count, 1);
	assert_int_equal(b.dsts.v[b.pieces.v[b.srcs.v[0].first_piece]].offset, 4096);
}

/* A single CRC32 covers the whole payload: an item of PyTorch's is read whole to be compared, and box by box if it is not. */
static void test_fill_without_blocks(void **state)
{
	const int64_t shape[] = { 3000, 1000 }, all[] = { 0, 0, 3000, 1000 }, rows[] = { 1100, 0, 10, 1000 };

	for (int verify = 0; verify < 2; verify++) {
		if (verify) {
			teardown(state);
			setup(state);
		}
		add(sd, "w", shape, all, 0, 100, 13 << 20);
		add(to, "w", shape, rows, 0, 4096, 40000);
		b.opts.verify = verify;
		uint32_t first = sources(NULL);
		struct load_plan p = plan_of();
		T_OK(build_fill(&b, to, map, sd, first, &p));
		assert_int_equal(b.srcs.v[0].sparse, !verify);
		assert_false(b.srcs.v[0].partial);
	}
}

/* A column: so little of each row is needed that only that is read. */
static void test_fill_sparse(void **state)
{
	const int64_t shape[] = { 3000, 1000 }, all[] = { 0, 0, 3000, 1000 }, column[] = { 0, 7, 3000, 1 };
	uint32_t first;

	(void)state;
	add(sd, "w", shape, all, 0, 100, 13 << 20);
	add(to, "w", shape, column, 0, 0, 12000);
	first = sources(NULL);
	struct load_plan p = plan_of();
	T_OK(build_fill(&b, to, map, sd, first, &p));
	assert_true(b.srcs.v[0].sparse);
	assert_true(b.tasks.n >= 1);
}

/* Sources that nobody needs are not read; those that several need are read once. */
static void test_fill_shares(void **state)
{
	const int64_t shape[] = { 20, 10 }, top[] = { 0, 0, 10, 10 }, low[] = { 10, 0, 10, 10 };
	const int64_t a[] = { 0, 0, 4, 10 }, c[] = { 4, 0, 6, 10 };
	uint32_t first;

	(void)state;
	add(sd, "w", shape, top, 0, 0, 2000);
	add(sd, "w", shape, low, 1, 3000, 2000);
	add(to, "w", shape, a, 0, 0, 160);
	add(to, "w", shape, c, 1, 4096, 240);
	first = sources(NULL);
	struct load_plan p = plan_of();
	T_OK(build_fill(&b, to, map, sd, first, &p));
	check_scans(false);
	assert_int_equal(b.srcs.v[0].piece_count, 2);
	assert_int_equal(b.srcs.v[1].piece_count, 0);
	assert_int_equal(b.srcs.v[1].scan_count, 0);
	assert_int_equal(b.tasks.n, 1);
}

static void test_more_than_there_can_be(void **state)
{
	const int64_t shape[] = { 1ll << 40, 1 << 10 }, all[] = { 0, 0, 1ll << 40, 1 << 10 };

	(void)state;
	add(sd, "w", shape, all, 0, 0, 1 << 20);
	T_ERR(LIMIT_EXCEEDED, build_verify(&b, sources(NULL)));
}

int main(void)
{
#define T(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
	const struct CMUnitTest tests[] = {
		T(test_verify), T(test_digests), T(test_fill_reads_what_is_needed), T(test_fill_without_blocks),
		T(test_fill_sparse), T(test_fill_shares),
		T(test_more_than_there_can_be),
	};

	return cmocka_run_group_tests_name("build_sources", tests, NULL, NULL);
}
