/* A load whose file is not in the page cache, on file systems that refuse O_DIRECT: when the file is opened, or not until it is read. And
 * a name that another file has got when it is opened a second time. The load reads what it opened first, through the page cache.
 *
 * The store, pread and what the page cache is said to hold are the test's own (the Makefile wraps the latter two). */
#include "lib/t_dir.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/arena.h"
#include "os/fs.h"
#include "plan/load_plan.h"
#include "runner/build.h"
#include "runner/exec.h"
#include "store/posix.h"

enum { TENSORS = 40, BYTES = 256 << 10, GAP = 1 << 20, ODD = 13 }; /* gaps that no read bridges */

enum refusal { NONE, OPENING, READING, REPLACED };

ssize_t __real_pread(int fd, void *into, size_t n, off_t offset);
ssize_t __wrap_pread(int fd, void *into, size_t n, off_t offset);
enum fs_cached __wrap_fs_cached(int fd, uint64_t offset, uint64_t n);

static enum refusal how;
static _Atomic uint32_t opened, read_directly, refused;

enum fs_cached __wrap_fs_cached(int fd, uint64_t offset, uint64_t n)
{
	(void)fd;
	(void)offset;
	(void)n;
	return FS_NOT_CACHED;
}

/* A file opened with O_DIRECT is opened without it here, as the test's own file system may lack it: its mark is that FD_CLOEXEC is off. */
static bool is_direct(int fd)
{
	return !(fcntl(fd, F_GETFD) & FD_CLOEXEC);
}

ssize_t __wrap_pread(int fd, void *into, size_t n, off_t offset)
{
	if (!is_direct(fd))
		return __real_pread(fd, into, n, offset);
	if (how == READING) {
		refused++;
		errno = EINVAL;
		return -1;
	}
	read_directly++;
	return __real_pread(fd, into, n, offset);
}

static enum err open_file(struct store_at folder, const char *name, unsigned flags, struct store_at *out)
{
	if (!(flags & STORE_DIRECT))
		return posix_ops.open_file(folder, name, flags, out);
	opened++;
	if (how == OPENING) {
		errno = EINVAL;
		return ERR_SYS(STORAGE_IO, "cannot open %s", name);
	}
	TRY(posix_ops.open_file(folder, how == REPLACED ? "other" : name, flags & ~(unsigned)STORE_DIRECT, out));
	assert_int_equal(fcntl(posix_ops.fd_of(*out), F_SETFD, 0), 0);
	return OK;
}

static enum err tick(void *user)
{
	(void)user;
	return OK;
}

static unsigned char byte_at(uint64_t tensor, uint64_t i)
{
	return (unsigned char)(tensor * 7 + i % 251);
}

static void write_file(int dir, const char *name, unsigned char flip)
{
	unsigned char *bytes = mem_alloc(BYTES);
	int fd = openat(dir, name, O_CREAT | O_WRONLY, 0644);

	for (uint64_t t = 0; t < TENSORS; t++) {
		for (uint64_t i = 0; i < BYTES; i++)
			bytes[i] = byte_at(t, i) ^ flip;
		assert_int_equal(pwrite(fd, bytes, BYTES, (off_t)(t * GAP + t % 2 * ODD)), BYTES);
	}
	close(fd);
	mem_free(bytes);
}

/* Tensors that lie on pages, and between them every second one, into a segment. */
static void describe(struct sdict *from, struct sdict *to)
{
	static const int64_t shape[] = { BYTES }, dims[] = { 0, BYTES };
	uint32_t index;

	T_OK(sdict_add_file(from, STR("f"), 0, &index));
	T_OK(sdict_add_file(to, STR("segment"), 0, &index));
	for (uint64_t t = 0; t < TENSORS; t++) {
		char name[16];
		struct str fqn = { name, (size_t)snprintf(name, sizeof name, "t%02ju", (uintmax_t)t) };
		T_OK(sdict_add_tensor(from, fqn, DT_UINT8, 1, shape, &index));
		T_OK(sdict_add_chunk(from, index, dims, 0, (struct sd_loc){ .offset = t * GAP + t % 2 * ODD, .length = BYTES }));
		T_OK(sdict_add_tensor(to, fqn, DT_UINT8, 1, shape, &index));
		T_OK(sdict_add_chunk(to, index, dims, 0, (struct sd_loc){ .offset = t * BYTES, .length = BYTES }));
	}
}

static void exec(struct run_build *b, int root, int segment)
{
	struct store_ops ops = posix_ops;
	struct run run;

	ops.open_file = open_file;
	T_OK(run_share(b, &run));
	const struct stores stores = { .v = { { .ops = &ops, .top = root } }, .count = 1 };
	struct exec_spec spec = { .run = &run, .stores = &stores, .fds = &segment, .fd_count = 1, .count = 1, .memory_bytes = 16 << 20,
				  .tick = tick };
	T_OK(io_engine_open(IO_THREADS, 4, &spec.io));
	T_OK(exec_run(&spec));
	io_engine_close(spec.io);
	run_detach(&run);
}

static void load(int root, int segment)
{
	struct load_match match = { .strict = true };
	struct run_build b = { .opts = { .mode = RUN_FILL_SEGMENTS, .past_cache = true, .task_bytes = BUILD_TASK_BYTES } };
	uint32_t dir, map[1], segments[1], first;
	struct sdict *from, *to;
	struct arena *arena = arena_new(UINT64_MAX);
	struct load_plan plan;

	T_OK(sdict_new(UINT64_MAX, &from));
	T_OK(sdict_new(UINT64_MAX, &to));
	describe(from, to);
	T_OK(load_plan_make(from, to, &match, arena, &plan));
	T_OK(run_add_dir(&b, 0, STR(""), &dir));
	b.dirs.v[dir].is_source = true;
	T_OK(run_add_file(&b, RUN_FILE_SOURCE, dir, STR("f"), TENSORS * GAP, map));
	T_OK(run_add_file(&b, RUN_FILE_SEGMENT, dir, STR(""), TENSORS * BYTES, segments));
	b.files.v[segments[0]].writable = true;
	T_OK(build_sources(&b, from, RUN_SRC_PLAIN, map, NULL, &first));
	T_OK(build_fill(&b, to, segments, from, first, &plan));
	exec(&b, root, segment);
	run_build_free(&b);
	arena_free(arena);
	sdict_free(from);
	sdict_free(to);
}

static void check(enum refusal refusal)
{
	const uint64_t bytes = (uint64_t)TENSORS * BYTES;
	struct t_dir d;

	how = refusal;
	opened = read_directly = refused = 0;
	t_dir_make(&d);
	write_file(d.fd, "f", 0);
	write_file(d.fd, "other", 255);
	int fds = t_count_fds(), segment = memfd_create("segment", MFD_CLOEXEC);
	assert_int_equal(ftruncate(segment, (off_t)bytes), 0);
	load(d.fd, segment);
	unsigned char *got = mmap(NULL, bytes, PROT_READ, MAP_SHARED, segment, 0);
	assert_true(got != MAP_FAILED);
	for (uint64_t i = 0; i < bytes; i++)
		if (got[i] != byte_at(i / BYTES, i % BYTES))
			fail_msg("byte %ju of tensor %ju", (uintmax_t)(i % BYTES), (uintmax_t)(i / BYTES));
	munmap(got, bytes);
	close(segment);
	assert_int_equal(t_count_fds(), fds);
	assert_int_equal(opened, 1); /* and never again */
	t_dir_remove(&d);
}

static void test_all_is_read_past_the_page_cache(void **state)
{
	(void)state;
	check(NONE);
	assert_true(read_directly >= TENSORS);
}

static void test_a_file_system_that_refuses_to_open(void **state)
{
	(void)state;
	check(OPENING);
	assert_int_equal(read_directly + refused, 0);
	assert_int_equal(err_last()->code, OK);
}

/* Reads that are in flight when the first is refused are refused as well. */
static void test_a_file_system_that_refuses_to_read(void **state)
{
	(void)state;
	check(READING);
	assert_true(refused >= 1 && refused < TENSORS);
	assert_int_equal(read_directly, 0);
}

static void test_a_name_that_is_another_files_by_now(void **state)
{
	(void)state;
	check(REPLACED);
	assert_int_equal(read_directly + refused, 0);
}

int main(void)
{
	const struct CMUnitTest tests[] = { cmocka_unit_test(test_all_is_read_past_the_page_cache),
		cmocka_unit_test(test_a_file_system_that_refuses_to_open), cmocka_unit_test(test_a_file_system_that_refuses_to_read),
		cmocka_unit_test(test_a_name_that_is_another_files_by_now) };

	return cmocka_run_group_tests(tests, NULL, NULL);
}
