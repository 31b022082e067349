/* A batch of reads: neighbours become one operation, everything lies where wave_data says. */
#include "lib/t.h"

#include <stdlib.h>
#include <string.h>

#include "runner/wave.h"

enum { MEMORY = 1 << 20, FILE_BYTES = 3 << 20 };

static unsigned char *memory, *files[2];
static struct wave w;

static int setup(void **state)
{
	(void)state;
	memory = aligned_alloc(WAVE_PAGE, MEMORY);
	must(memory);
	for (int f = 0; f < 2; f++) {
		files[f] = mem_alloc(FILE_BYTES);
		for (uint32_t i = 0; i < FILE_BYTES; i++)
			files[f][i] = (unsigned char)(i * 2654435761u >> 24 ^ (uint32_t)f);
	}
	wave_begin(&w, memory, MEMORY);
	return 0;
}

static int teardown(void **state)
{
	(void)state;
	wave_free(&w);
	mem_free(memory);
	mem_free(files[0]);
	mem_free(files[1]);
	return 0;
}

static uint32_t add(uint32_t file, uint64_t offset, uint64_t bytes)
{
	uint32_t index = 0;
	bool full = true;

	T_OK(wave_add(&w, file, offset, bytes, NULL, &index, &full));
	assert_false(full);
	return index;
}

/* Does what an engine would; every operation must stay inside the memory and apart from the others. */
static void run_all(void)
{
	T_OK(wave_plan(&w, &w));
	for (uint64_t i = 0; i < w.ops.n; i++) {
		const struct wave_op *op = &w.ops.v[i];
		const unsigned char *p = op->io.buf;
		assert_ptr_equal(op->io.user, &w);
		assert_true(op->io.offset + op->io.bytes <= FILE_BYTES);
		if (p >= memory && p < memory + MEMORY) {
			assert_true(p + op->io.bytes <= memory + MEMORY);
			for (uint64_t k = 0; k < i; k++) {
				const unsigned char *q = w.ops.v[k].io.buf;
				assert_true(q + w.ops.v[k].io.bytes <= p || p + op->io.bytes <= q);
			}
		}
		memcpy(op->io.buf, files[op->file] + op->io.offset, op->io.bytes);
	}
}

static void check(uint32_t index)
{
	const struct wave_read *r = &w.reads.v[index];

	assert_memory_equal(wave_data(&w, index), files[r->file] + r->offset + r->skip, r->bytes - r->skip - r->slack);
}

static void test_neighbours(void **state)
{
	(void)state;
	uint32_t c = add(0, 20000, 10), a = add(0, 0, 100), b = add(0, 100 + WAVE_GAP, 50), d = add(1, 100, 1), same = add(0, 10, 20);
	run_all();
	assert_int_equal(w.ops.n, 3);
	assert_int_equal(w.read_bytes, 100 + WAVE_GAP + 50 + 10 + 1);
	for (uint32_t i = 0; i < 5; i++)
		check(i);
	assert_int_equal(w.reads.v[a].op, w.reads.v[b].op);
	assert_int_equal(w.reads.v[a].op, w.reads.v[same].op);
	assert_int_not_equal(w.reads.v[a].op, w.reads.v[c].op);
	assert_int_not_equal(w.reads.v[c].op, w.reads.v[d].op);
}

static void test_gap_too_large(void **state)
{
	(void)state;
	add(0, 0, 100);
	add(0, 100 + WAVE_GAP + 1, 50);
	run_all();
	assert_int_equal(w.ops.n, 2);
}

/* A read with a place of its own stands alone, even between neighbours. */
static void test_own_place(void **state)
{
	unsigned char own[100];
	uint32_t index;
	bool full;

	(void)state;
	add(0, 0, 100);
	T_OK(wave_add(&w, 0, 100, sizeof own, own, &index, &full));
	add(0, 200, 100);
	run_all();
	assert_int_equal(w.ops.n, 2);
	assert_ptr_equal(wave_data(&w, index), own);
	for (uint32_t i = 0; i < 3; i++)
		check(i);
}

static void test_full(void **state)
{
	unsigned char own[8];
	uint32_t index;
	bool full = false;

	(void)state;
	T_ERR(INTERNAL, wave_add(&w, 0, 0, MEMORY + 1, NULL, &index, &full));
	add(0, 0, MEMORY);
	T_OK(wave_add(&w, 1, 0, 1, NULL, &index, &full));
	assert_true(full);
	T_OK(wave_add(&w, 1, 0, sizeof own, own, &index, &full)); /* takes no memory */
	assert_false(full);
	run_all();
	check(0);
	check(1);
	wave_begin(&w, memory, MEMORY);
	for (uint32_t i = 0; i < wave_reads_max(MEMORY); i++)
		T_OK(wave_add(&w, 0, i, 1, own, &index, &full));
	T_OK(wave_add(&w, 0, 0, 1, own, &index, &full));
	assert_true(full);
}

/* Boxes side by side in the same rows: each is nearly all of the rows, and together they take no more memory than these. */
static void test_shared_rows(void **state)
{
	const uint64_t row = 100, rows = MEMORY / row - 1, before = w.read_bytes;

	(void)state;
	for (uint32_t i = 0; i < 10; i++)
		add(1, 10ull * i, (rows - 1) * row + 10);
	assert_true(w.used <= rows * row);
	run_all();
	assert_int_equal(w.ops.n, 1);
	assert_int_equal(w.read_bytes - before, rows * row);
	for (uint32_t i = 0; i < 10; i++)
		check(i);
}

/* Whole pages are read, to page boundaries; what nobody asked for of the last one may lie behind the file's end. */
static void test_pages(void **state)
{
	unsigned char own[100];
	uint32_t index;
	bool full;

	(void)state;
	w.read_bytes = 0;
	w.pages = true;
	uint32_t a = add(0, 4000, 200), b = add(0, 8000, 50), c = add(1, 4096, 4096), d = add(1, 3 * WAVE_PAGE, 1);
	T_OK(wave_add(&w, 0, 100, sizeof own, own, &index, &full));
	run_all();
	assert_int_equal(w.ops.n, 3);
	for (uint64_t i = 1; i < w.ops.n; i++)
		assert_int_equal((w.ops.v[i].io.offset | w.ops.v[i].io.bytes | (uintptr_t)w.ops.v[i].io.buf) % WAVE_PAGE, 0);
	assert_int_equal(w.ops.v[w.reads.v[a].op].io.slack, 2 * WAVE_PAGE - 8050);
	assert_int_equal(w.ops.v[w.reads.v[d].op].io.slack, WAVE_PAGE - 1);
	assert_int_equal(w.read_bytes, sizeof own + 8050 + 2 * WAVE_PAGE + 1);
	for (uint32_t i = 0; i < 5; i++)
		check(i);
	assert_int_equal(w.reads.v[a].op, w.reads.v[b].op);
	assert_int_equal(w.reads.v[c].op, w.reads.v[d].op);
	wave_begin(&w, memory, MEMORY);
	w.pages = true;
	T_OK(wave_add(&w, 0, 1, MEMORY - WAVE_PAGE, NULL, &index, &full));
	assert_false(full);
	T_OK(wave_add(&w, 0, 1ull << 30, 1, NULL, &index, &full));
	assert_true(full);
}

/* A wave's tables are counted in the memory that a job may take, and are little beside its buffer. */
static void test_tables_are_small(void **state)
{
	const uint64_t bytes[] = { 1 << 20, 8 << 20, 1 << 30 };
	unsigned char own[8], *room = mem_alloc(1 << 20);
	uint32_t index;
	bool full = false;

	(void)state;
	assert_true(sizeof(struct io_op) <= 128);
	assert_int_equal(wave_reads_max(1 << 20), (1 << 20) / WAVE_GAP); /* what few reads need is not taken for each */
	for (size_t i = 0; i < sizeof bytes / sizeof *bytes; i++)
		if (wave_table_bytes(bytes[i]) > bytes[i] / 20)
			T_FAIL("tables of %ju bytes beside a buffer of %ju", (uintmax_t)wave_table_bytes(bytes[i]), (uintmax_t)bytes[i]);
	for (int round = 0; round < 3; round++) {
		wave_begin(&w, room, 1 << 20);
		for (full = false; !full;)
			T_OK(wave_add(&w, 0, 2 * WAVE_GAP * w.reads.n, 1, own, &index, &full));
		T_OK(wave_plan(&w, &w));
		assert_int_equal(w.ops.n, wave_reads_max(1 << 20));
		each(op, w.ops.v, w.ops.n)
			T_OK(wave_hash(&w, op));
		assert_ptr_equal(wave_digest(&w, &w.ops.v[1]), &w.digests.v[1]);
		assert_null(wave_digest(&w, &w.ops.v[w.ops.n - 1]));
	}
	assert_true(w.reads.cap * sizeof *w.reads.v + w.order.cap * sizeof *w.order.v + w.ops.cap * sizeof *w.ops.v +
		    w.digests.cap * sizeof *w.digests.v <= wave_table_bytes(1 << 20));
	mem_free(room);
}

static void test_random(void **state)
{
	(void)state;
	srandom(1);
	for (int round = 0; round < 300; round++) {
		wave_begin(&w, memory, MEMORY);
		w.pages = round % 2;
		uint64_t spread = 1ull << (8 + random() % 13);
		for (;;) {
			uint64_t bytes = (uint64_t)random() % (1u << (random() % 17)), offset = (uint64_t)random() % spread;
			uint32_t index;
			bool full;
			T_OK(wave_add(&w, (uint32_t)random() % 2, offset, bytes, NULL, &index, &full));
			if (full || w.reads.n == 200)
				break;
		}
		run_all();
		for (uint32_t i = 0; i < w.reads.n; i++)
			check(i);
	}
}

int main(void)
{
#define T(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
	const struct CMUnitTest tests[] = { T(test_neighbours), T(test_gap_too_large), T(test_own_place), T(test_full), T(test_random),
		T(test_shared_rows), T(test_tables_are_small), T(test_pages) };

	return cmocka_run_group_tests_name("wave", tests, NULL, NULL);
}
