/* A worker's report of a run that fails: the job's reason is the first worker's, not an error that followed from it. */
#include "lib/t_dir.h"

#include <string.h>
#include <unistd.h>

#include "runner/build.h"
#include "runner/exec.h"
#include "store/posix.h"

enum { BYTES = 4096 };

static struct run run;
static bool others_fail;

/* Comes when the read is under way. */
static enum err tick(void *user)
{
	(void)user;
	if (others_fail)
		atomic_store(&run.head->cancelled, 1);
	return OK;
}

/* Verifies a tensor whose file is too short. */
static enum err verify(int root)
{
	static const int64_t shape[] = { 2, BYTES / 8 }, dims[] = { 0, 0, 2, BYTES / 8 };
	static const uint32_t map[] = { 0 };
	struct run_build b = { 0 };
	struct sdict *sd;
	uint32_t index, first;

	T_OK(sdict_new(UINT64_MAX, &sd));
	T_OK(sdict_add_file(sd, STR("f"), 0, &index));
	T_OK(sdict_add_tensor(sd, STR("w"), DT_FLOAT32, 2, shape, &index));
	T_OK(sdict_add_chunk(sd, index, dims, 0, (struct sd_loc){ .length = BYTES }));
	T_OK(run_add_dir(&b, 0, STR(""), &index));
	T_OK(run_add_file(&b, RUN_FILE_SOURCE, index, STR("f"), BYTES, &index));
	T_OK(build_sources(&b, sd, RUN_SRC_PLAIN, map, NULL, &first));
	b.opts.mode = RUN_VERIFY;
	T_OK(build_verify(&b, first));
	T_OK(run_share(&b, &run));
	const struct stores stores = { .v = { { .ops = &posix_ops, .top = root } }, .count = 1 };
	struct exec_spec spec = { .run = &run, .stores = &stores, .count = 2, .memory_bytes = 16 << 20, .tick = tick };
	T_OK(io_engine_open(IO_THREADS, 4, &spec.io));
	enum err e = exec_run(&spec);
	io_engine_close(spec.io);
	assert_int_equal(atomic_load(&run.head->cancelled), 1);
	run_detach(&run);
	run_build_free(&b);
	sdict_free(sd);
	return e;
}

static void test_the_first_reason_counts(void **state)
{
	struct t_dir d;

	(void)state;
	t_dir_make(&d);
	int fd = openat(d.fd, "f", O_CREAT | O_WRONLY, 0644);
	assert_int_equal(write(fd, "short", 5), 5);
	close(fd);
	T_ERR(STORAGE_IO, verify(d.fd));
	others_fail = true;
	T_ERR(CANCELLED, verify(d.fd));
	t_dir_remove(&d);
}

int main(void)
{
	const struct CMUnitTest tests[] = { cmocka_unit_test(test_the_first_reason_counts) };

	return cmocka_run_group_tests(tests, NULL, NULL);
}
