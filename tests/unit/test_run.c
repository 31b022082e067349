/* The shared tables of a job: what is put in is what every worker sees; tasks are given out once each. */
#include "lib/t.h"

#include <pthread.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "runner/run.h"

static struct run_build build;

static int teardown(void **state)
{
	(void)state;
	run_build_free(&build);
	return 0;
}

static void add_ranks(uint32_t n, const uint64_t *tasks)
{
	struct run_rank *k;
	uint64_t first = 0;

	for (uint32_t r = 0; r < n; r++) {
		T_OK(vec_push(&build.ranks, &k));
		*k = (struct run_rank){ .rank = r, .first_task = first, .task_count = tasks[r], .bytes_total = tasks[r] * 10 };
		first += tasks[r];
	}
}

static void test_shared(void **state)
{
	int64_t dims[4] = { 1, 2, 3, 4 };
	struct run a, b;
	uint32_t dir, file;
	uint64_t at;

	(void)state;
	build.opts.near.rtol = 0.25;
	T_OK(run_add_dir(&build, 3, STR("a/b"), &dir));
	T_OK(run_add_file(&build, RUN_FILE_TARGET, dir, STR("__0_0.distcp"), 77, &file));
	T_OK(run_add_file(&build, RUN_FILE_SOURCE, dir, (struct str){ NULL, 0 }, 5, &file));
	assert_int_equal(file, 1);
	T_OK(run_add_dims(&build, dims, 2, &at));
	T_OK(run_add_dims(&build, NULL, 0, &at));
	assert_int_equal(at, 4);
	T_OK(run_share(&build, &a));
	T_OK(run_attach(dup(a.fd), &b));
	assert_int_equal(b.files_n, 2);
	assert_true(str_is(run_file_name(&b, &b.files[0]), "__0_0.distcp"));
	assert_int_equal(run_file_name(&b, &b.files[1]).n, 0);
	assert_int_equal(b.dirs[0].root, 3);
	assert_int_equal(b.dims[3], 4);
	assert_true(b.head->opts.near.rtol == 0.25);
	assert_int_equal(b.tasks_n, 0);
	atomic_store(&a.files[0].blocks_left, 9); /* one memory */
	assert_int_equal(atomic_load(&b.files[0].blocks_left), 9);
	run_detach(&b);
	run_detach(&a);
	run_detach(&a); /* twice is once */
}

static int memfd_of(const void *bytes, size_t n)
{
	int fd = memfd_create("t", MFD_CLOEXEC);

	assert_true(fd >= 0);
	assert_int_equal(write(fd, bytes, n), n);
	return fd;
}

static void refuse(int fd)
{
	struct run r;

	T_ERR(PROTOCOL, run_attach(fd, &r));
	assert_int_equal(lseek(fd, 0, SEEK_CUR) >= 0, 1); /* still the caller's */
	close(fd);
}

static void test_not_a_run(void **state)
{
	static unsigned char zeros[1 << 16];
	struct run good;

	(void)state;
	refuse(memfd_of("", 0));
	refuse(memfd_of("short", 5));
	refuse(memfd_of(zeros, sizeof zeros));
	T_OK(run_share(&build, &good));
	size_t n = good.bytes;
	unsigned char *copy = mem_alloc(n);
	struct run_head *h = (struct run_head *)copy;
	memcpy(copy, good.head, n);
	refuse(memfd_of(copy, n - 1));
	h->srcs.n = UINT64_MAX / sizeof(struct run_src);
	refuse(memfd_of(copy, n));
	h->srcs = (struct run_table){ UINT64_MAX & ~15ull, 1 };
	refuse(memfd_of(copy, n));
	h->srcs = (struct run_table){ n & ~15ull, 1 };
	refuse(memfd_of(copy, n));
	h->srcs = (struct run_table){ 0, 0 };
	refuse(memfd_of(copy, n));
	mem_free(copy);
	run_detach(&good);
}

static void test_tasks_once(void **state)
{
	static const uint64_t tasks[] = { 3, 0, 5, 1 };
	bool seen[9] = { false };
	struct run r;
	uint64_t t = 0, n = 0;

	(void)state;
	add_ranks(4, tasks);
	T_OK(run_share(&build, &r));
	assert_int_equal(run_bytes_total(&r), 90);
	assert_true(run_take_task(&r, 1, 2, &t));
	assert_int_equal(t, 3); /* rank 2 is worker 1's first */
	seen[t] = true;
	for (n = 1; run_take_task(&r, (uint32_t)(n % 2), 2, &t); n++) {
		assert_true(t < 9 && !seen[t]);
		seen[t] = true;
	}
	assert_int_equal(n, 9);
	assert_false(run_take_task(&r, 0, 2, &t));
	run_detach(&r);
}

/* For a store that takes each file from one process: a rank's tasks are one worker's, unless they write files of several ranks. */
static void test_whole_files(void **state)
{
	static const uint64_t tasks[] = { 2, 1, 2 };
	struct run_file *f;
	struct run_block *b;
	struct run r;
	uint64_t t;

	(void)state;
	for (int two = 0; two < 2; two++) { /* then, with a task of rank 2 that writes rank 0's file */
		add_ranks(3, tasks);
		for (uint32_t i = 0; i < 5; i++) {
			struct run_task *task;
			T_OK(vec_push(&build.tasks, &task));
			*task = (struct run_task){ .first = i, .count = 1, .rank_index = i < 2 ? 0 : i < 3 ? 1 : 2 };
			T_OK(vec_push(&build.blocks, &b));
			b->file = two && i == 4 ? 0 : task->rank_index;
		}
		for (int i = 0; i < 3; i++)
			T_OK(vec_push(&build.files, &f));
		T_OK(run_share(&build, &r));
		T_OK(run_write_whole_files(&r));
		assert_int_equal(r.head->opts.takers, two ? RUN_TAKE_FIRST : RUN_TAKE_OWN);
		int n[2] = { 0 };
		for (int worker = 1; worker >= 0; worker--)
			for (; run_take_task(&r, (uint32_t)worker, 2, &t); n[worker]++)
				assert_int_equal(two ? 0 : r.tasks[t].rank_index % 2, worker);
		assert_int_equal(n[0], two ? 5 : 4);
		run_detach(&r);
		run_build_free(&build);
		build = (struct run_build){ 0 };
	}
}

/* More workers than ranks: all have something to do. */
static void test_more_workers(void **state)
{
	static const uint64_t tasks[] = { 8 };
	struct run r;
	uint64_t t;

	(void)state;
	add_ranks(1, tasks);
	T_OK(run_share(&build, &r));
	for (uint32_t i = 0; i < 8; i++) {
		assert_true(run_take_task(&r, i, 8, &t));
		assert_int_equal(t, i);
	}
	assert_false(run_take_task(&r, 7, 8, &t));
	run_detach(&r);
}

static void test_no_ranks(void **state)
{
	struct run r;
	uint64_t t;

	(void)state;
	T_OK(run_share(&build, &r));
	assert_false(run_take_task(&r, 0, 1, &t));
	assert_int_equal(run_bytes_total(&r), 0);
	run_detach(&r);
}

enum { THREADS = 4, RANKS = 7, EACH = 3000 };

struct taker {
	struct run *run;
	_Atomic uint32_t *taken;
	uint32_t index;
};

static void *take_all(void *user)
{
	struct taker *k = user;
	uint64_t t;

	while (run_take_task(k->run, k->index, THREADS, &t))
		atomic_fetch_add(&k->taken[t], 1);
	return NULL;
}

static void test_threads(void **state)
{
	static _Atomic uint32_t taken[RANKS * EACH];
	uint64_t tasks[RANKS];
	struct taker takers[THREADS];
	pthread_t threads[THREADS];
	struct run r;

	(void)state;
	for (uint32_t i = 0; i < RANKS; i++)
		tasks[i] = EACH;
	add_ranks(RANKS, tasks);
	T_OK(run_share(&build, &r));
	for (uint32_t i = 0; i < THREADS; i++) {
		takers[i] = (struct taker){ &r, taken, i };
		assert_int_equal(pthread_create(&threads[i], NULL, take_all, &takers[i]), 0);
	}
	for (uint32_t i = 0; i < THREADS; i++)
		pthread_join(threads[i], NULL);
	for (uint32_t i = 0; i < RANKS * EACH; i++)
		assert_int_equal(atomic_load(&taken[i]), 1);
	run_detach(&r);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test_teardown(test_shared, teardown),      cmocka_unit_test_teardown(test_not_a_run, teardown),
		cmocka_unit_test_teardown(test_tasks_once, teardown),  cmocka_unit_test_teardown(test_more_workers, teardown),
		cmocka_unit_test_teardown(test_whole_files, teardown),
		cmocka_unit_test_teardown(test_no_ranks, teardown),    cmocka_unit_test_teardown(test_threads, teardown),
	};

	return cmocka_run_group_tests_name("run", tests, NULL, NULL);
}
