/* Plans of safetensors files, which have no holes, and of diffs. */
#include "format/safetensors.h"
#include "lib/t_target.h"

static void add(const char *fqn, enum dtype dtype, uint32_t ndim, const int64_t *shape)
{
	int64_t dims[2 * NDIM_MAX] = { 0 };
	uint32_t index;

	for (uint32_t i = 0; i < ndim; i++)
		dims[ndim + i] = shape[i];
	T_OK(sdict_add_tensor(sd, str_of(fqn), dtype, ndim, shape, &index));
	T_OK(sdict_add_chunk(sd, index, dims, 0, (struct sd_loc){ .file = SD_NO_FILE }));
}

static void add_1d(const char *fqn, enum dtype dtype, int64_t n)
{
	add(fqn, dtype, 1, &n);
}

static enum err build(uint64_t max_file_bytes, bool direct)
{
	static const struct str meta[][2] = { { { "format", 6 }, { "pt", 2 } } };

	t_target_one_to_one();
	target = (struct build_target){ .format = FORMAT_SAFETENSORS, .sd = sd, .pieces = &plan, .world_size = 1, .direct = direct,
					.task_bytes = BUILD_TASK_BYTES, .max_file_bytes = max_file_bytes, .meta = meta,
					.meta_count = 1 };
	return build_target_files(&b, &target);
}

/* Each file: its header, then tensor behind tensor up to its last byte, each at a multiple of its element. */
static void check_files(void)
{
	t_build_check_parts(&b);
	t_build_check_blocks(&b);
	uint64_t dst = 0, bytes = 0;
	for (uint64_t f = 0; f < b.files.n; f++) {
		uint64_t at = 0;
		for (; dst < b.dsts.n && b.dsts.v[dst].file == f; dst++) {
			const struct run_dst *d = &b.dsts.v[dst];
			assert_int_equal(d->offset, at);
			assert_true(d->kind == RUN_DST_RAW || at % dtype_bytes((enum dtype)d->dtype) == 0);
			at += d->length;
		}
		assert_int_equal(at, b.files.v[f].bytes);
		bytes += at;
	}
	assert_int_equal(dst, b.dsts.n);
	assert_int_equal(bytes, target.bytes);
}

static void test_one_file(void **state)
{
	const int64_t none[] = { 0, 3 };

	(void)state;
	add_1d("odd", DT_UINT8, 7);
	add_1d("large", DT_BFLOAT16, 5000001);
	add("scalar", DT_FLOAT64, 0, NULL);
	add("empty", DT_INT32, 2, none);
	T_OK(build(1u << 30, true));
	check_files();
	assert_int_equal(b.files.n, 1);
	assert_true(str_is((struct str){ b.strings.v + b.files.v[0].name_at, b.files.v[0].name_len }, "model-00001-of-00001.safetensors"));
	assert_int_equal(b.dsts.v[1].dtype, DT_FLOAT64); /* largest elements first */
	assert_int_equal(b.dsts.v[1].offset % 4096, 0);
}

static void test_header(void **state)
{
	uint64_t json_bytes = 0;

	(void)state;
	add_1d("a", DT_FLOAT32, 3);
	T_OK(build(1u << 30, false));
	const unsigned char *head = (const unsigned char *)b.strings.v + b.dsts.v[0].inline_at;
	T_OK(sft_header_bytes(head, b.files.v[0].bytes, &json_bytes));
	assert_int_equal(8 + json_bytes, b.dsts.v[0].inline_len);
	assert_non_null(memmem(head, b.dsts.v[0].inline_len, "\"format\":\"pt\"", 13));
	assert_non_null(memmem(head, b.dsts.v[0].inline_len, "\"data_offsets\":[0,12]", 21));
}

static void test_many_files(void **state)
{
	char fqn[8];

	(void)state;
	for (int i = 0; i < 10; i++) {
		snprintf(fqn, sizeof fqn, "t%d", i);
		add_1d(fqn, DT_FLOAT32, i == 4 ? 5000 : 300);
	}
	T_OK(build(4000, false));
	check_files();
	assert_int_equal(b.files.n, 5); /* 3, 1, the large one alone, 3, 2 */
}

static void test_nothing(void **state)
{
	(void)state;
	T_OK(build(4000, false));
	check_files();
	assert_int_equal(b.files.n, 1);
}

static void test_no_place(void **state)
{
	(void)state;
	add_1d("c", DT_COMPLEX128, 2);
	T_ERR(DTYPE_UNSUPPORTED, build(4000, false));
	assert_string_equal(err_last()->fqn, "c");
	t_target_teardown(NULL);
	t_target_setup(NULL);
	add_1d("__metadata__", DT_FLOAT32, 2);
	T_ERR(NAME_INVALID, build(4000, false));
	t_target_teardown(NULL);
	t_target_setup(NULL);
	add_1d("\xff\xfe", DT_FLOAT32, 2);
	T_ERR(NAME_INVALID, build(4000, false));
}

/* Two sizes whose sum does not fit 64 bits; one that is more blocks than there can be. */
static void test_sizes_that_lie(void **state)
{
	(void)state;
	add_1d("a", DT_UINT8, INT64_MAX);
	add_1d("b", DT_UINT8, INT64_MAX);
	add_1d("c", DT_UINT8, INT64_MAX);
	T_ERR(LIMIT_EXCEEDED, build(1ull << 33, false));
	t_target_teardown(NULL);
	t_target_setup(NULL);
	add_1d("a", DT_UINT8, 1ll << 50);
	T_ERR(LIMIT_EXCEEDED, build(1ull << 33, false));
}

/* -------------------------------------------------------------------------------------------------------- diff */

static enum err diff(void)
{
	static const uint32_t map[] = { 0 };
	uint32_t first_a, first_b, index;

	T_OK(sdict_add_file(sd, STR("f"), 0, &index));
	for (uint64_t i = 0; i < sd->chunk_count; i++)
		sd->chunks[i].loc.file = 0;
	T_OK(run_add_file(&b, RUN_FILE_SOURCE, 0, STR("f"), 0, &index));
	T_OK(build_sources(&b, sd, RUN_SRC_ITEM, map, NULL, &first_a));
	T_OK(build_sources(&b, sd, RUN_SRC_ITEM, map, NULL, &first_b));
	t_target_one_to_one();
	return build_diff(&b, sd, first_a, first_b, &plan);
}

/* Parts come in pairs, A's and B's, of the same range, apart in their block. */
static void test_diff(void **state)
{
	(void)state;
	add_1d("large", DT_FLOAT32, 3000001);
	for (int i = 0; i < 9; i++)
		add_1d((const char *const[]){ "a", "b", "c", "d", "e", "f", "g", "h", "i" }[i], DT_UINT8, 100000 + i);
	add("scalar", DT_FLOAT64, 0, NULL);
	T_OK(diff());
	uint64_t total = 0;
	for (uint64_t i = 0; i < b.blocks.n; i++) {
		const struct run_block *k = &b.blocks.v[i];
		uint64_t used = 0;
		assert_int_equal(k->part_count % 2, 0);
		for (uint32_t p = 0; p < k->part_count; p += 2) {
			const struct run_part *x = &b.parts.v[b.block_parts.v[k->first_part + p]], *y = x + 1;
			const struct run_dst *dx = &b.dsts.v[x->dst], *dy = &b.dsts.v[y->dst];
			uint64_t bytes = x->end - x->begin, ax = dx->offset + x->begin - k->offset, ay = dy->offset + y->begin - k->offset;
			assert_true(x->begin == y->begin && x->end == y->end);
			assert_true(ax >= used && ay >= ax + bytes && ay + bytes <= k->bytes);
			assert_int_equal(b.pieces.v[dy->first_piece], b.pieces.v[dx->first_piece] + 11);
			used = ay + bytes;
			total += bytes;
		}
	}
	assert_int_equal(total, 3000001 * 4 + 9 * 100000 + 36 + 8);
	assert_int_equal(b.ranks.v[0].bytes_total, total);
	assert_int_equal(b.ranks.v[0].task_count, b.tasks.n);
}

static void test_diff_too_large(void **state)
{
	(void)state;
	add_1d("a", DT_UINT8, 1ll << 50);
	T_ERR(LIMIT_EXCEEDED, diff());
}

int main(void)
{
#define T(name) cmocka_unit_test_setup_teardown(name, t_target_setup, t_target_teardown)
	const struct CMUnitTest tests[] = {
		T(test_one_file), T(test_header), T(test_many_files), T(test_nothing), T(test_no_place), T(test_sizes_that_lie),
		T(test_diff), T(test_diff_too_large),
	};

	return cmocka_run_group_tests_name("build_other", tests, NULL, NULL);
}
