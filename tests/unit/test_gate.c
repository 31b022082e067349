/* Tasks that read what is still being filled: what each needs, their order, and numbers that lie. */
#include "lib/t_dir.h"

#include <endian.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "runner/gate.h"

enum { IMAGE = 3 * 4096 + 100, MARK = 4 * 4096 };

struct bench {
	struct run_build b;
	struct run run;
	struct gate gate;
	int fds[2];
};

static void put_mark(struct bench *t, int file, uint64_t n)
{
	uint64_t le = htole64(n);

	assert_int_equal(pwrite(t->fds[file], &le, sizeof le, MARK), sizeof le);
}

static void add_src(struct bench *t, uint32_t file, uint64_t offset, uint64_t length, enum dtype dtype, const int64_t *dims)
{
	struct run_src *s;

	T_OK(vec_push(&t->b.srcs, &s));
	*s = (struct run_src){ .kind = RUN_SRC_PLAIN, .file = file, .offset = offset, .length = length, .ndim = 1,
			       .dtype = (uint8_t)dtype };
	T_OK(run_add_dims(&t->b, dims, 1, &s->dims_at));
}

/* One item, of one source, in one block and one task. */
static void add_task(struct bench *t, uint32_t src, uint64_t begin, uint64_t end, enum dtype dtype, const int64_t *dims)
{
	struct run_dst *d;
	struct run_part *p;
	struct run_block *k;
	struct run_task *task;
	uint32_t *piece;
	uint64_t *part;

	T_OK(vec_push(&t->b.dsts, &d));
	*d = (struct run_dst){ .kind = RUN_DST_TENSOR, .dtype = (uint8_t)dtype, .ndim = 1, .first_piece = t->b.pieces.n, .piece_count = 1 };
	T_OK(run_add_dims(&t->b, dims, 1, &d->dims_at));
	T_OK(vec_push(&t->b.pieces, &piece));
	*piece = src;
	T_OK(vec_push(&t->b.parts, &p));
	*p = (struct run_part){ .dst = (uint32_t)t->b.dsts.n - 1, .begin = begin, .end = end };
	T_OK(vec_push(&t->b.blocks, &k));
	*k = (struct run_block){ .part_count = 1, .first_part = t->b.block_parts.n };
	T_OK(vec_push(&t->b.block_parts, &part));
	*part = t->b.parts.n - 1;
	T_OK(vec_push(&t->b.tasks, &task));
	*task = (struct run_task){ .first = t->b.blocks.n - 1, .count = 1 };
}

/* Two segments; of rank 0 three tasks in the wrong order, of rank 1 one that reads of both. */
static void set_up(struct bench *t)
{
	static const int64_t box[] = { 0, 2048 }, half[] = { 0, 1024 };
	struct run_rank *k;
	struct run_part *p;
	uint64_t *part;
	uint32_t index;

	memset(t, 0, sizeof *t);
	for (uint32_t i = 0; i < 2; i++) {
		t->fds[i] = memfd_create("segment", MFD_CLOEXEC);
		assert_int_equal(ftruncate(t->fds[i], MARK + 4096), 0);
		T_OK(run_add_file(&t->b, RUN_FILE_SEGMENT, 0, STR("seg"), IMAGE, &index));
		t->b.files.v[i].fd_index = t->b.files.v[i].rank = i;
		t->b.files.v[i].filling = true;
		add_src(t, i, 4096, 8192, DT_FLOAT32, box);
	}
	add_task(t, 0, 4096, 8192, DT_FLOAT32, box);
	add_task(t, 0, 0, 1024, DT_BFLOAT16, box);   /* half the bytes of what is read */
	add_task(t, 0, 0, 1024, DT_FLOAT32, half);   /* another box: all of the source is needed */
	add_task(t, 0, 0, 4096, DT_FLOAT32, box);
	T_OK(vec_push(&t->b.parts, &p));
	*p = (struct run_part){ .dst = (uint32_t)t->b.dsts.n, .begin = 0, .end = 40 };
	T_OK(vec_push(&t->b.block_parts, &part));
	*part = t->b.parts.n - 1;
	t->b.blocks.v[3].part_count = 2;
	struct run_dst *d;
	T_OK(vec_push(&t->b.dsts, &d));
	*d = t->b.dsts.v[0];
	d->first_piece = t->b.pieces.n;
	uint32_t *piece;
	T_OK(vec_push(&t->b.pieces, &piece));
	*piece = 1;
	for (uint32_t i = 0; i < 2; i++) {
		T_OK(vec_push(&t->b.ranks, &k));
		k->rank = i;
		k->first_task = i * 3;
		k->task_count = i ? 1 : 3;
	}
	T_OK(gate_tasks(&t->b));
}

static void start(struct bench *t)
{
	bool active;

	T_OK(run_share(&t->b, &t->run));
	T_OK(gate_sort(&t->run));
	T_OK(gate_open(&t->run, t->fds, 2, &t->gate, &active));
	assert_true(active);
}

static void tear_down(struct bench *t)
{
	gate_close(&t->gate);
	run_detach(&t->run);
	run_build_free(&t->b);
	close(t->fds[0]);
	close(t->fds[1]);
}

static bool take(struct bench *t, uint64_t *task)
{
	bool taken;

	T_OK(gate_take(&t->gate, 0, 2, task, &taken));
	return taken;
}

static void test_needs(void **state)
{
	struct bench t;

	(void)state;
	set_up(&t);
	const struct run_task *k = t.b.tasks.v;
	assert_int_equal(t.b.gates.v[k[0].first_gate].end, 4096 + 8192);
	assert_int_equal(t.b.gates.v[k[1].first_gate].end, 4096 + 2048);
	assert_int_equal(t.b.gates.v[k[2].first_gate].end, 4096 + 8192);
	assert_int_equal(k[3].gate_count, 2);
	assert_int_equal(t.b.gates.v[k[3].first_gate].end, 4096 + 4096);
	assert_int_equal(t.b.gates.v[k[3].first_gate + 1].file, 1);
	assert_int_equal(t.b.gates.v[k[3].first_gate + 1].end, 4096 + 40);
	uint64_t gates = t.b.gates.n;
	T_OK(gate_tasks(&t.b)); /* once more is the same */
	assert_int_equal(t.b.gates.n, gates);
	T_OK(run_share(&t.b, &t.run));
	T_OK(gate_sort(&t.run));
	assert_int_equal(t.run.tasks[0].first, 1);
	assert_int_equal(t.run.tasks[1].first, 0);
	assert_int_equal(t.run.tasks[2].first, 2);
	tear_down(&t);
}

static void test_taken_when_there(void **state)
{
	struct bench t;
	uint64_t task;

	(void)state;
	set_up(&t);
	start(&t);
	assert_false(take(&t, &task));
	assert_true(t.gate.held && t.gate.rest_us > 0);
	put_mark(&t, 0, 4096 + 2047);
	assert_false(take(&t, &task));
	put_mark(&t, 0, 4096 + 2048);
	assert_true(take(&t, &task));
	assert_int_equal(task, 0);
	assert_false(take(&t, &task));
	put_mark(&t, 0, 4096 + 4096); /* rank 1's needs both */
	assert_false(take(&t, &task));
	put_mark(&t, 1, IMAGE);
	assert_true(take(&t, &task));
	assert_int_equal(task, 3);
	atomic_store(&t.run.head->sealed, 1); /* the number says nothing then */
	put_mark(&t, 0, 0);
	assert_true(take(&t, &task) && task == 1);
	assert_true(take(&t, &task) && task == 2);
	assert_false(take(&t, &task));
	assert_false(t.gate.held);
	tear_down(&t);
}

static void test_lies(void **state)
{
	struct bench t;
	uint64_t task;
	bool taken;

	(void)state;
	for (int i = 0; i < 4; i++) {
		set_up(&t);
		start(&t);
		put_mark(&t, 0, 5000);
		assert_false(take(&t, &task));
		if (i < 3)
			put_mark(&t, 0, i == 0 ? 4999 : i == 1 ? IMAGE + 1 : UINT64_MAX);
		else
			assert_int_equal(ftruncate(t.fds[0], MARK + 4), 0);
		enum err e = gate_take(&t.gate, 0, 2, &task, &taken);
		assert_int_equal(e, i < 3 ? ERR_FORMAT_IMAGE : ERR_SEGMENT_SHRUNK);
		assert_int_equal(err_last()->rank, 0);
		tear_down(&t);
	}
}

static void test_stall(void **state)
{
	struct bench t;
	uint64_t task;
	bool taken;

	(void)state;
	set_up(&t);
	start(&t);
	put_mark(&t, 0, 5000);
	assert_false(take(&t, &task));
	t.gate.moved_ms -= GATE_STALL_MS + 1000;
	put_mark(&t, 0, 5001); /* it moves */
	assert_false(take(&t, &task));
	t.gate.moved_ms -= GATE_STALL_MS + 1000;
	T_ERR(NOT_SEALED, gate_take(&t.gate, 0, 2, &task, &taken));
	assert_int_equal(err_last()->rank, 0);
	tear_down(&t);
}

static void test_nothing_is_filling(void **state)
{
	struct bench t;
	bool active;

	(void)state;
	set_up(&t);
	t.b.files.v[0].filling = t.b.files.v[1].filling = false;
	T_OK(run_share(&t.b, &t.run));
	T_OK(gate_open(&t.run, t.fds, 2, &t.gate, &active));
	assert_false(active);
	tear_down(&t);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_needs),	       cmocka_unit_test(test_taken_when_there), cmocka_unit_test(test_lies),
		cmocka_unit_test(test_stall),	       cmocka_unit_test(test_nothing_is_filling),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
