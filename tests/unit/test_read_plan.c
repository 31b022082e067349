/* Boxes from sources to a target chunk, whatever the cuts, in memory of any size: against element-by-element copies.
 * Every element's value is its number in the whole tensor. */
#include "lib/t.h"

#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "format/torch_item.h"
#include "io/digest.h"
#include "runner/read_plan.h"
#include "tensor/box.h"

struct world {
	struct run_build b;
	struct run run;
	struct files files;
	struct sources sources;
	struct read_plan g;
	struct wave w;
	int fd;                        /* all sources one behind the other */
	uint64_t bytes;
	uint32_t ndim;
	int64_t shape[4];
};

static uint64_t number_of(const struct world *k, const int64_t *at)
{
	uint64_t n = 0;

	for (uint32_t i = 0; i < k->ndim; i++)
		n = n * (uint64_t)k->shape[i] + (uint64_t)at[i];
	return n;
}

static bool next(uint32_t ndim, const int64_t *sizes, int64_t *at)
{
	for (uint32_t i = ndim; i-- > 0;) {
		if (++at[i] < sizes[i])
			return true;
		at[i] = 0;
	}
	return false;
}

/* The payload of a box: uint32 numbers in C order. */
static void fill(const struct world *k, const int64_t *dims, uint32_t *out)
{
	int64_t at[4] = { 0 }, whole[4];
	uint64_t numel = 0, i = 0;

	T_OK(box_numel(k->ndim, dims + k->ndim, &numel));
	if (numel == 0)
		return;
	do {
		for (uint32_t d = 0; d < k->ndim; d++)
			whole[d] = dims[d] + at[d];
		out[i++] = (uint32_t)number_of(k, whole);
	} while (next(k->ndim, dims + k->ndim, at));
}

static void write_source(struct world *k, struct run_src *s, const int64_t *dims, const void *payload, uint64_t bytes)
{
	CLEANUP(buf_free) struct buf b = BUF_INIT(1 << 26);

	if (s->kind == RUN_SRC_ITEM) {
		uint32_t crc = digest_crc32(0, payload, bytes);
		struct item_layout l;
		T_OK(item_layout_tensor(DT_UINT32, k->ndim, dims + k->ndim, 64, &l));
		T_OK(item_put_head(&b, DT_UINT32, k->ndim, dims + k->ndim, 64, crc));
		buf_put(&b, payload, bytes);
		buf_fill(&b, 0, l.tail_off - l.payload_off - bytes);
		T_OK(item_put_tail(&b, DT_UINT32, k->ndim, dims + k->ndim, 64, crc));
	} else {
		buf_put(&b, payload, bytes);
	}
	T_OK(buf_status(&b));
	s->offset = k->bytes;
	s->length = b.len;
	assert_int_equal(pwrite(k->fd, b.p, b.len, (off_t)k->bytes), b.len);
	k->bytes += b.len + 13;        /* nothing is aligned to anything */
}

static void add_source(struct world *k, enum run_src_kind kind, const int64_t *dims)
{
	struct run_src *s;
	uint64_t numel = 0;

	T_OK(box_numel(k->ndim, dims + k->ndim, &numel));
	uint32_t *payload = mem_alloc(numel * 4);
	fill(k, dims, payload);
	T_OK(vec_push(&k->b.srcs, &s));
	*s = (struct run_src){ .kind = (uint8_t)kind, .dtype = DT_UINT32, .ndim = k->ndim };
	T_OK(run_add_dims(&k->b, dims, k->ndim, &s->dims_at));
	write_source(k, s, dims, payload, numel * 4);
	mem_free(payload);
}

static void add_dst(struct world *k, enum dtype dtype, const int64_t *dims)
{
	struct run_dst *d;
	uint32_t *piece;
	uint64_t numel = 0;

	T_OK(box_numel(k->ndim, dims + k->ndim, &numel));
	T_OK(vec_push(&k->b.dsts, &d));
	*d = (struct run_dst){ .kind = RUN_DST_TENSOR, .dtype = (uint8_t)dtype, .ndim = k->ndim,
			       .payload_bytes = numel * dtype_bytes(dtype), .first_piece = k->b.pieces.n,
			       .piece_count = (uint32_t)k->b.srcs.n };
	T_OK(run_add_dims(&k->b, dims, k->ndim, &d->dims_at));
	for (uint32_t i = 0; i < k->b.srcs.n; i++) {
		T_OK(vec_push(&k->b.pieces, &piece));
		*piece = i;
	}
}

static void begin(struct world *k, uint32_t ndim, const int64_t *shape)
{
	memset(k, 0, sizeof *k);
	k->ndim = ndim;
	if (ndim)
		memcpy(k->shape, shape, ndim * sizeof *shape);
	k->fd = memfd_create("sources", MFD_CLOEXEC);
	assert_true(k->fd >= 0);
}

static void ready(struct world *k, enum run_file_kind kind)
{
	uint32_t file;

	assert_int_equal(ftruncate(k->fd, (off_t)k->bytes + 4096), 0);
	T_OK(run_add_file(&k->b, kind, 0, STR("sources"), k->bytes + 4096, &file));
	T_OK(run_share(&k->b, &k->run));
	T_OK(files_open(&k->run, NULL, &k->fd, 1, &k->files));
	T_OK(sources_open(&k->run, &k->files, &k->sources));
	k->g.sources = &k->sources;
}

static void end(struct world *k)
{
	read_plan_free(&k->g);
	wave_free(&k->w);
	sources_close(&k->sources);
	files_close(&k->files);
	run_detach(&k->run);
	run_build_free(&k->b);
	close(k->fd);
}

/* Bytes [begin, end) of a target's payload, with so much memory for reads. */
static void fetch(struct world *k, uint32_t dst, uint64_t from, uint64_t to, unsigned char *out, uint64_t memory)
{
	unsigned char *in = mem_alloc(memory);

	read_plan_begin(&k->g);
	T_OK(read_plan_add(&k->g, dst, from, to, out));
	for (uint64_t rounds = 0; read_plan_more(&k->g); rounds++) {
		assert_true(rounds < 100000);
		wave_begin(&k->w, in, memory);
		T_OK(read_plan_fill(&k->g, &k->w));
		T_OK(wave_plan(&k->w, NULL));
		for (uint64_t i = 0; i < k->w.ops.n; i++) {
			const struct io_op *op = &k->w.ops.v[i].io;
			assert_int_equal(pread(k->fd, op->buf, op->bytes, (off_t)op->offset), op->bytes);
		}
		T_OK(read_plan_copy(&k->g, &k->w));
	}
	mem_free(in);
}

static void check_whole(struct world *k, uint32_t dst, uint64_t step, uint64_t memory)
{
	const struct run_dst *d = &k->run.dsts[dst];
	uint32_t *want = mem_alloc(d->payload_bytes);

	fill(k, k->run.dims + d->dims_at, want);
	for (uint64_t at = 0; at < d->payload_bytes; at += step) {
		uint64_t to = at + step < d->payload_bytes ? at + step : d->payload_bytes;
		unsigned char *out = mem_alloc(to - at); /* exactly so large: a byte beyond it is seen */
		memset(out, 0xEE, to - at);
		fetch(k, dst, at, to, out, memory);
		assert_memory_equal(out, (unsigned char *)want + at, to - at);
		mem_free(out);
	}
	mem_free(want);
}

static int64_t below(int64_t n)
{
	return n > 0 ? random() % n : 0;
}

static void random_box(const struct world *k, int64_t *dims)
{
	for (uint32_t i = 0; i < k->ndim; i++) {
		dims[i] = below(k->shape[i]);
		dims[k->ndim + i] = 1 + below(k->shape[i] - dims[i]);
	}
}

/* Cuts the tensor into a grid: every element in one source. */
static void add_grid(struct world *k, bool items)
{
	int64_t cuts[4], at[4] = { 0 }, dims[8];

	for (uint32_t i = 0; i < k->ndim; i++)
		cuts[i] = 1 + below(3 < k->shape[i] ? 3 : k->shape[i]);
	do {
		for (uint32_t i = 0; i < k->ndim; i++) {
			dims[i] = k->shape[i] * at[i] / cuts[i];
			dims[k->ndim + i] = k->shape[i] * (at[i] + 1) / cuts[i] - dims[i];
		}
		add_source(k, items && random() % 2 ? RUN_SRC_ITEM : RUN_SRC_PLAIN, dims);
	} while (next(k->ndim, cuts, at));
}

static void random_round(enum run_file_kind kind, int64_t largest)
{
	struct world k;
	int64_t shape[4], dims[8];
	uint32_t ndim = (uint32_t)random() % 5;

	for (uint32_t i = 0; i < ndim; i++)
		shape[i] = 1 + below(largest);
	begin(&k, ndim, shape);
	add_grid(&k, kind == RUN_FILE_SPOOL);
	for (int i = 0; i < 3; i++) {
		random_box(&k, dims);
		add_dst(&k, DT_UINT32, dims);
	}
	ready(&k, kind);
	for (uint32_t i = 0; i < 3; i++)
		check_whole(&k, i, 4 * (1 + (uint64_t)below((int64_t)(k.run.dsts[i].payload_bytes / 4))), 256 << 10);
	end(&k);
}

static void test_random_files(void **state)
{
	(void)state;
	srandom(7);
	for (int i = 0; i < 150; i++)
		random_round(RUN_FILE_SPOOL, 9);
}

static void test_random_segments(void **state)
{
	(void)state;
	srandom(8);
	for (int i = 0; i < 150; i++)
		random_round(RUN_FILE_SEGMENT, 9);
}

/* A column of a wide matrix, larger than the memory: read in several rounds, without what lies between. */
static void test_columns_in_little_memory(void **state)
{
	const int64_t shape[] = { 700, 3000 }, all[] = { 0, 0, 700, 3000 }, narrow[] = { 0, 100, 700, 5 }, wide[] = { 3, 1, 690, 2990 };
	struct world k;

	(void)state;
	begin(&k, 2, shape);
	add_source(&k, RUN_SRC_ITEM, all);
	add_dst(&k, DT_UINT32, narrow);
	add_dst(&k, DT_UINT32, wide);
	ready(&k, RUN_FILE_SPOOL);
	check_whole(&k, 0, UINT32_MAX, 256 << 10);
	assert_true(k.w.read_bytes < 700 * 100); /* 20 bytes of every 12,000 are needed */
	check_whole(&k, 1, 1 << 20, 256 << 10);
	end(&k);
}

static void test_rows_go_straight_to_their_place(void **state)
{
	const int64_t shape[] = { 100, 4096 }, top[] = { 0, 0, 50, 4096 }, rest[] = { 50, 0, 50, 4096 }, middle[] = { 20, 0, 60, 4096 };
	struct world k;

	(void)state;
	begin(&k, 2, shape);
	add_source(&k, RUN_SRC_ITEM, top);
	add_source(&k, RUN_SRC_PLAIN, rest);
	add_dst(&k, DT_UINT32, middle);
	ready(&k, RUN_FILE_SPOOL);
	check_whole(&k, 0, UINT32_MAX, 4096); /* hardly any memory: what is direct needs none */
	end(&k);
}

static uint64_t place_of(uint32_t ndim, const int64_t *dims, const int64_t *at)
{
	uint64_t n = 0;

	for (uint32_t i = 0; i < ndim; i++)
		n = n * (uint64_t)dims[ndim + i] + (uint64_t)(at[i] - dims[i]);
	return n;
}

/* Element by element: is what a source has for a box one run on both sides, and where? */
static void check_row(struct world *k, uint32_t src, const int64_t *box)
{
	const int64_t *from = k->run.dims + k->run.srcs[src].dims_at;
	int64_t part[8], at[4] = { 0 }, whole[4];
	struct src_row row = { 0 };
	struct src_info *info;
	bool run = box_intersect(k->ndim, from, from + k->ndim, box, box + k->ndim, part, part + 4);
	uint64_t n = 0, first[2] = { 0 };

	do {
		for (uint32_t i = 0; i < k->ndim; i++)
			whole[i] = part[i] + at[i];
		uint64_t there[2] = { run ? place_of(k->ndim, from, whole) : 0, run ? place_of(k->ndim, box, whole) : 0 };
		if (n == 0)
			memcpy(first, there, sizeof first);
		run = run && there[0] == first[0] + n && there[1] == first[1] + n;
		n++;
	} while (run && next(k->ndim, part + 4, at));
	T_OK(sources_info(&k->sources, src, &info));
	assert_int_equal(sources_row(&k->run, &k->run.srcs[src], info, DT_UINT32, box, &row), run);
	if (run) {
		assert_int_equal(row.from, first[0] * 4);
		assert_int_equal(row.at, first[1] * 4);
		assert_int_equal(row.bytes, n * 4);
	}
	assert_false(sources_row(&k->run, &k->run.srcs[src], info, DT_INT32, box, &row));
}

static void test_rows(void **state)
{
	int64_t shape[4], dims[8];
	struct world k;

	(void)state;
	srandom(9);
	for (int i = 0; i < 100; i++) {
		uint32_t ndim = (uint32_t)random() % 5;
		for (uint32_t d = 0; d < ndim; d++)
			shape[d] = 1 + below(5);
		begin(&k, ndim, shape);
		add_grid(&k, true);
		ready(&k, RUN_FILE_SPOOL);
		for (int j = 0; j < 20; j++) {
			random_box(&k, dims);
			for (uint32_t s = 0; s < k.run.srcs_n; s++)
				check_row(&k, s, dims);
		}
		end(&k);
	}
}

/* The layout of an item that was not read is what reading its head tells; but only where a digest will be compared. */
static void test_items_by_their_layout(void **state)
{
	const int64_t shape[] = { 300, 200 }, all[] = { 0, 0, 300, 200 }, one[] = { 3, 4, 1, 1 }, none[] = { 0, 0, 0, 200 };
	const int64_t *boxes[] = { all, one, none };
	struct src_info *info;
	struct item_layout l;
	struct world k;

	(void)state;
	begin(&k, 2, shape);
	for (int i = 0; i < 3; i++)
		add_source(&k, RUN_SRC_ITEM, boxes[i]);
	add_source(&k, RUN_SRC_PLAIN, all);
	ready(&k, RUN_FILE_SPOOL);
	for (uint32_t i = 0; i < 4; i++) {
		struct run_src *s = &k.run.srcs[i];
		const int64_t *sizes = k.run.dims + s->dims_at + 2;
		assert_false(sources_layout(s, sizes, &l));
		s->digest_count = 1;
		s->raw_digests = true;
		assert_false(sources_layout(s, sizes, &l));
		s->raw_digests = false;
		s->length++;
		assert_false(sources_layout(s, sizes, &l));
		s->length--;
		assert_int_equal(sources_layout(s, sizes, &l), i < 3);
		s->digest_count = 0; /* now by its head */
		T_OK(sources_info(&k.sources, i, &info));
		if (i == 3)
			continue;
		assert_int_equal(l.payload_off, info->payload_off);
		assert_int_equal(l.payload_bytes, info->payload_bytes);
		struct src_info read = *info;
		info->src = UINT32_MAX;
		s->digest_count = 1;
		assert_true(sources_known(&k.sources, i));
		T_OK(sources_info(&k.sources, i, &info));
		assert_memory_equal(read.strides, info->strides, (i == 0 ? 2 : 0) * sizeof *read.strides);
		assert_true(info->dense && !info->conj && !info->neg && !info->deflated && info->storage_offset == 0);
	}
	end(&k);
}

static void test_cast(void **state)
{
	const int64_t shape[] = { 8, 9 }, all[] = { 0, 0, 8, 9 }, part[] = { 2, 3, 4, 5 };
	struct world k;
	double out[20];

	(void)state;
	begin(&k, 2, shape);
	add_source(&k, RUN_SRC_ITEM, all);
	add_dst(&k, DT_FLOAT64, part);
	ready(&k, RUN_FILE_SPOOL);
	fetch(&k, 0, 0, sizeof out, (unsigned char *)out, 64 << 10);
	for (int64_t r = 0; r < 4; r++)
		for (int64_t c = 0; c < 5; c++)
			assert_true(out[r * 5 + c] == (double)((r + 2) * 9 + c + 3));
	end(&k);
}

static enum err fetch_error(struct world *k, unsigned char *out)
{
	unsigned char in[128 << 10];

	read_plan_begin(&k->g);
	T_OK(read_plan_add(&k->g, 0, 0, k->run.dsts[0].payload_bytes, out));
	wave_begin(&k->w, in, sizeof in);
	TRY(read_plan_fill(&k->g, &k->w));
	TRY(wave_plan(&k->w, NULL));
	for (uint64_t i = 0; i < k->w.ops.n; i++) {
		const struct io_op *op = &k->w.ops.v[i].io;
		if (pread(k->fd, op->buf, op->bytes, (off_t)op->offset) != (ssize_t)op->bytes)
			return ERR(STORAGE_IO, "short");
	}
	return read_plan_copy(&k->g, &k->w);
}

/* The item's own header is what counts for reading, .metadata is what it must agree with. */
static void test_items_that_disagree(void **state)
{
	const int64_t shape[] = { 8, 9 }, all[] = { 0, 0, 8, 9 };
	unsigned char out[8 * 9 * 8];
	struct world k;

	(void)state;
	for (int what = 0; what < 4; what++) {
		begin(&k, 2, shape);
		add_source(&k, RUN_SRC_ITEM, all);
		add_dst(&k, DT_UINT32, all);
		T_OK(run_add_string(&k.b, STR("model.w"), &k.b.srcs.v[0].fqn_at));
		k.b.srcs.v[0].fqn_len = 7;
		k.b.srcs.v[0].rank = 3;
		if (what == 0)
			k.b.srcs.v[0].dtype = DT_INT32;
		if (what == 1)
			k.b.dims.v[k.b.srcs.v[0].dims_at + 3] = 8;
		if (what == 2)
			k.b.srcs.v[0].length -= 30;
		if (what == 3)
			assert_int_equal(pwrite(k.fd, "XXXXXXXX", 8, (off_t)k.b.srcs.v[0].length - 22), 8);
		ready(&k, RUN_FILE_SPOOL);
		enum err e = fetch_error(&k, out);
		assert_int_equal(e, what < 2 ? ERR_FORMAT_ITEM : ERR_FORMAT_ZIP);
		assert_string_equal(err_last()->fqn, "model.w");
		assert_string_equal(err_last()->file, "sources");
		assert_int_equal(err_last()->rank, 3);
		assert_true(err_last()->offset >= 0);
		end(&k);
	}
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_random_files),
		cmocka_unit_test(test_random_segments),
		cmocka_unit_test(test_columns_in_little_memory),
		cmocka_unit_test(test_rows_go_straight_to_their_place),
		cmocka_unit_test(test_rows),
		cmocka_unit_test(test_items_by_their_layout),
		cmocka_unit_test(test_cast),
		cmocka_unit_test(test_items_that_disagree),
	};

	return cmocka_run_group_tests_name("gather", tests, NULL, NULL);
}
