/* test_engine.c: both engines do the same, with a file as the witness. */
#include "lib/t.h"

#include <fcntl.h>
#include <linux/io_uring.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/syscall.h>

#include "base/mem.h"
#include "io/engine.h"
#include "lib/t_dir.h"
#include "os/fs.h"

enum { DEPTH = 8, BLOCK = 64 << 10, BLOCKS = 64 };

struct fixture {
	struct t_dir dir;
	struct io_engine *e;
	int fds_before;
};
static struct fixture fx;

static int setup(void **state)
{
	enum io_engine_kind kind = (enum io_engine_kind)(uintptr_t)*state;

	fx.fds_before = t_count_fds();
	t_dir_make(&fx.dir);
	fx.e = NULL;
	enum err bad = io_engine_open(kind, DEPTH, &fx.e);
	if (bad == ERR_UNSUPPORTED) {
		print_message("%s: skipped\n", err_last()->text);
		return 0;
	}
	T_OK(bad);
	assert_string_equal(io_engine_name(fx.e), kind == IO_URING ? "io_uring" : "threads");
	return 0;
}

static int teardown(void **state)
{
	(void)state;
	io_engine_close(fx.e);
	t_dir_remove(&fx.dir);
	assert_int_equal(t_count_fds(), fx.fds_before);
	return 0;
}

static void need_engine(void)
{
	if (!fx.e)
		skip();
}

static int open_file(const char *name, int flags)
{
	int fd;

	T_OK(fs_open(fx.dir.fd, name, flags | O_RDWR | O_CREAT, 0600, &fd));
	return fd;
}

/* Runs one op to its end. */
static void run_op(struct io_op *op)
{
	struct io_op *done;

	T_OK(io_submit(fx.e, op));
	T_OK(io_wait(fx.e, &done));
	assert_ptr_equal(done, op);
}

static void fill(unsigned char *p, size_t n, unsigned seed)
{
	for (size_t i = 0; i < n; i++)
		p[i] = (unsigned char)(seed + i * 31 + i / 251);
}

/* Blocks in a shuffled order, as deep as the engine allows; read back in another order. */
static void shuffled(int fd, enum io_kind kind, unsigned char *image, unsigned step)
{
	struct io_op ops[DEPTH];
	unsigned issued = 0, finished = 0;
	bool used[BLOCKS] = { false };

	while (finished < BLOCKS) {
		struct io_op *op;
		if (issued < BLOCKS && io_engine_free_slots(fx.e)) {
			unsigned b = (issued * step + 5) % BLOCKS;
			op = issued < DEPTH ? &ops[issued] : NULL;
			if (!op) {
				T_OK(io_wait(fx.e, &op));
				assert_int_equal(op->error, OK);
				finished++;
			}
			assert_false(used[b]);
			used[b] = true;
			*op = (struct io_op){ .kind = kind, .fd = fd, .buf = image + (size_t)b * BLOCK, .bytes = BLOCK,
					      .offset = (uint64_t)b * BLOCK };
			T_OK(io_submit(fx.e, op));
			issued++;
			continue;
		}
		T_OK(io_wait(fx.e, &op));
		assert_int_equal(op->error, OK);
		assert_int_equal(op->done, BLOCK);
		finished++;
	}
	assert_int_equal(io_in_flight(fx.e), 0);
}

static void test_shuffled_blocks(void **state)
{
	size_t n = (size_t)BLOCK * BLOCKS;
	unsigned char *image = aligned_alloc(4096, n), *back = aligned_alloc(4096, n);
	bool direct = fs_direct_ok(fx.dir.fd);

	(void)state;
	need_engine();
	for (int use_direct = 0; use_direct <= direct; use_direct++) {
		int fd = open_file(use_direct ? "direct" : "buffered", use_direct ? O_DIRECT : 0);
		fill(image, n, (unsigned)use_direct);
		memset(back, 0, n);
		shuffled(fd, IO_WRITE, image, 7);
		struct io_op sync = { .kind = IO_FSYNC, .fd = fd };
		run_op(&sync);
		assert_int_equal(sync.error, OK);
		shuffled(fd, IO_READ, back, 11);
		assert_memory_equal(back, image, n);
		fs_drop(&fd);
	}
	free(image);
	free(back);
}

static void test_end_of_file(void **state)
{
	unsigned char *buf = aligned_alloc(4096, 16384);
	int fd = open_file("f", 0);

	(void)state;
	need_engine();
	fill(buf, 5000, 1);
	T_OK(fs_pwrite(fd, buf, 5000, 0, "f"));
	for (int direct = 0; direct <= fs_direct_ok(fx.dir.fd); direct++) {
		int in = open_file("f", direct ? O_DIRECT : 0);
		memset(buf, 0, 16384);
		struct io_op op = { .kind = IO_READ, .fd = in, .buf = buf, .bytes = 8192, .offset = 0 };
		run_op(&op);
		assert_int_equal(op.error, ERR_STORAGE_IO);
		assert_int_equal(io_report(&op), ERR_STORAGE_IO);
		assert_string_equal(err_last()->text, "the file ends at 5000, 8192 bytes at 0 were expected");
		assert_int_equal(err_last()->offset, 5000);
		op.slack = 3192;
		run_op(&op);
		assert_int_equal(op.error, OK);
		op.slack = 3191;
		run_op(&op);
		assert_int_equal(op.error, ERR_STORAGE_IO);
		assert_false(io_is_refused(&op));
		fs_drop(&in);
	}
	struct io_op none = { .kind = IO_READ, .fd = fd, .buf = buf, .bytes = 0, .offset = 1 << 20 };
	run_op(&none);
	assert_int_equal(none.error, OK);
	fs_drop(&fd);
	free(buf);
}

/* A peer took the memory away: an error for write and read, no signal. */
static void test_shrunk_memory(void **state)
{
	int fd = open_file("f", 0), mem = memfd_create("shrunk", MFD_CLOEXEC);
	size_t n = 64 << 10;

	(void)state;
	need_engine();
	assert_int_equal(ftruncate(mem, (off_t)n), 0);
	unsigned char *p = mmap(NULL, n, PROT_READ | PROT_WRITE, MAP_SHARED, mem, 0);
	assert_ptr_not_equal(p, MAP_FAILED);
	memset(p, 1, n);
	T_OK(fs_pwrite(fd, p, n, 0, "f"));
	assert_int_equal(ftruncate(mem, 8192), 0);
	struct io_op op = { .kind = IO_WRITE, .fd = fd, .buf = p, .bytes = n };
	run_op(&op);
	assert_int_equal(op.error, ERR_SEGMENT_SHRUNK);
	op.kind = IO_READ;
	run_op(&op);
	assert_int_equal(op.error, ERR_SEGMENT_SHRUNK);
	munmap(p, n);
	close(mem);
	fs_drop(&fd);
}

static void test_full_disk(void **state)
{
	static unsigned char block[256 << 10];
	char path[300];
	int dir, fd;

	(void)state;
	need_engine();
	snprintf(path, sizeof path, "%s/small", fx.dir.path);
	assert_int_equal(mkdir(path, 0700), 0);
	if (mount("tmpfs", path, "tmpfs", 0, "size=1m") < 0)
		skip();
	T_OK(fs_open_dir(fx.dir.fd, "small", &dir));
	T_OK(fs_open(dir, "f", O_RDWR | O_CREAT, 0600, &fd));
	enum err got = OK;
	for (uint64_t at = 0; !got && at < 4 << 20; at += sizeof block) {
		struct io_op op = { .kind = IO_WRITE, .fd = fd, .buf = block, .bytes = sizeof block, .offset = at };
		run_op(&op);
		got = op.error;
		if (io_report(&op))
			assert_non_null(strstr(err_last()->text, "No space left on device"));
	}
	assert_int_equal(got, ERR_STORAGE_FULL);
	fs_drop(&fd);
	fs_drop(&dir);
	assert_int_equal(umount2(path, MNT_DETACH), 0);
}

static void test_limits(void **state)
{
	struct io_op ops[DEPTH + 1] = { 0 }, *done;
	unsigned char buf[DEPTH + 1][16];
	int fd = open_file("f", 0), pipefd[2];
	bool timed_out;

	(void)state;
	need_engine();
	T_ERR(INTERNAL, io_wait(fx.e, &done));
	T_OK(fs_pwrite(fd, "0123456789abcdef", 16, 0, "f"));
	for (int i = 0; i <= DEPTH; i++)
		ops[i] = (struct io_op){ .kind = IO_READ, .fd = fd, .buf = buf[i], .bytes = 16 };
	for (int i = 0; i < DEPTH; i++)
		T_OK(io_submit(fx.e, &ops[i]));
	assert_int_equal(io_engine_free_slots(fx.e), 0);
	T_ERR(INTERNAL, io_submit(fx.e, &ops[DEPTH]));
	for (int i = 0; i < DEPTH; i++) {
		T_OK(io_wait_for(fx.e, 10000, &done, &timed_out));
		assert_false(timed_out);
		assert_int_equal(done->error, OK);
		assert_memory_equal(done->buf, "0123456789abcdef", 16);
	}
	ops[0].offset = UINT64_MAX;
	T_ERR(LIMIT_EXCEEDED, io_submit(fx.e, &ops[0]));
	ops[0] = (struct io_op){ .kind = IO_READ, .fd = -1, .buf = buf[0], .bytes = 16 };
	run_op(&ops[0]);
	assert_int_equal(ops[0].error, ERR_SYSTEM);
	assert_int_equal(pipe2(pipefd, O_CLOEXEC), 0);
	ops[0] = (struct io_op){ .kind = IO_FSYNC, .fd = pipefd[0] };
	run_op(&ops[0]);
	assert_int_not_equal(ops[0].error, OK);
	assert_int_equal(io_report(&ops[0]), ops[0].error);
	assert_string_equal(err_last()->text, "cannot sync the file: Invalid argument");
	close(pipefd[0]);
	close(pipefd[1]);
	fs_drop(&fd);
}

/* A FUSE or network file system would do; a lock that nobody gives back would not. A slow sync is made by much dirty data. */
static void test_wait_for_gives_up(void **state)
{
	static unsigned char block[1 << 20];
	int fd = open_file("f", 0);
	struct io_op op = { .kind = IO_FSYNC, .fd = fd }, *done = NULL;
	bool timed_out;
	int polls = 0;

	(void)state;
	need_engine();
	for (uint64_t i = 0; i < 16; i++)
		T_OK(fs_pwrite(fd, block, sizeof block, i * sizeof block, "f"));
	T_OK(io_submit(fx.e, &op));
	do {
		T_OK(io_wait_for(fx.e, 1, &done, &timed_out));
		assert_true(timed_out == (done == NULL));
		assert_true(++polls < 20000);
	} while (timed_out);
	assert_ptr_equal(done, &op);
	assert_int_equal(op.error, OK);
	fs_drop(&fd);
}

/* Closing waits: the memory of an op may be freed right after. */
static void test_close_drains(void **state)
{
	struct io_op ops[DEPTH];
	unsigned char *image = mem_zalloc(DEPTH, BLOCK);
	int fd = open_file("f", 0);
	struct stat st;

	(void)state;
	need_engine();
	for (int i = 0; i < DEPTH; i++) {
		ops[i] = (struct io_op){ .kind = IO_WRITE, .fd = fd, .buf = image + (size_t)i * BLOCK, .bytes = BLOCK,
					 .offset = (uint64_t)i * BLOCK };
		T_OK(io_submit(fx.e, &ops[i]));
	}
	io_engine_close(fx.e);
	fx.e = NULL;
	mem_free(image);
	assert_int_equal(fstat(fd, &st), 0);
	assert_int_equal(st.st_size, DEPTH * BLOCK);
	fs_drop(&fd);
}

static void test_open(void **state)
{
	struct io_engine *e;

	(void)state;
	T_ERR(INTERNAL, io_engine_open(IO_AUTO, 0, &e));
	T_ERR(INTERNAL, io_engine_open(IO_AUTO, 1 << 20, &e));
	T_OK(io_engine_open(IO_AUTO, 1, &e));
	assert_int_equal(io_engine_free_slots(e), 1);
	io_engine_close(e);
	io_engine_close(NULL);
	for (uint64_t nth = 1; nth < 3; nth++) {
		mem_fail_at(nth);
		enum err bad = io_engine_open(IO_THREADS, 4, &e);
		mem_fail_at(0);
		assert_int_equal(bad, ERR_NO_MEMORY);
	}
}

/* The ring of this process takes no registrations any more, such as files or buffers: that is how its restrictions show. */
static void test_ring_is_restricted(void **state)
{
	struct io_engine *e;
	char path[64], target[64];
	int rings = 0;

	(void)state;
	if (io_engine_open(IO_URING, 4, &e))
		skip();
	for (int fd = 3; fd < 64; fd++) {
		snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
		ssize_t n = readlink(path, target, sizeof target - 1);
		target[n < 0 ? 0 : n] = '\0';
		if (strcmp(target, "anon_inode:[io_uring]") != 0)
			continue;
		rings++;
		assert_int_equal(syscall(SYS_io_uring_register, fd, IORING_REGISTER_FILES, &fd, 1), -1);
		assert_int_equal(errno, EACCES);
	}
	assert_int_equal(rings, 1);
	io_engine_close(e);
}

#define BOTH(fn)                                                                                            \
	{ #fn " io_uring", fn, setup, teardown, (void *)(uintptr_t)IO_URING },                             \
	{                                                                                                   \
		#fn " threads", fn, setup, teardown, (void *)(uintptr_t)IO_THREADS                          \
	}

int main(void)
{
	const struct CMUnitTest tests[] = {
		BOTH(test_shuffled_blocks), BOTH(test_end_of_file), BOTH(test_shrunk_memory),
		BOTH(test_full_disk),       BOTH(test_limits),      BOTH(test_wait_for_gives_up),
		BOTH(test_close_drains),    cmocka_unit_test(test_open),
		cmocka_unit_test(test_ring_is_restricted),
	};
	return cmocka_run_group_tests_name("engine", tests, NULL, NULL);
}
