/* Items that must be unpacked as a stream end up in one file that can be read anywhere. */
#include "lib/t_worker.h"

#include <zstd.h>

#include "runner/spool.h"

enum { MIB = 1 << 20 };

static struct t_worker t;
static struct checkpoint c;
static struct job j;
static uint64_t at;            /* in "data" */

static int setup(void **state)
{
	uint32_t index;

	(void)state;
	t_worker_make(&t);
	memset(&c, 0, sizeof c);
	j = (struct job){ .worker = &t.w, .id = "01T" };
	at = 0;
	t_worker_put(&t, "data", "", 0);
	T_OK(sdict_new(UINT64_MAX, &c.sd));
	T_OK(sdict_add_file(c.sd, STR("data"), 0, &index));
	c.file_bytes = mem_zalloc(1, sizeof *c.file_bytes);
	c.dir = posix_at(t.dir.fd);
	return 0;
}

static int teardown(void **state)
{
	(void)state;
	job_free(&j);
	sdict_free(c.sd);
	mem_free(c.file_bytes);
	t_worker_remove(&t);
	return 0;
}

static struct sd_loc store(const void *bytes, uint64_t n, uint32_t transform)
{
	struct sd_loc loc = { .transform = transform, .offset = at, .length = n };
	int fd = -1;

	T_OK(fs_open(t.dir.fd, "data", O_WRONLY, 0, &fd));
	T_OK(fs_pwrite(fd, bytes, n, at, "data"));
	T_OK(fs_close(&fd));
	at += n + 7;
	return loc;
}

static uint32_t zstd_id(void)
{
	uint32_t id;

	T_OK(sdict_add_transform(c.sd, STR("stream.zstd/1"), &id));
	return id;
}

/* A uint8 tensor of n elements whose item is `bytes`, packed; cut: so many bytes are missing at its end. */
static void add_tensor(const char *fqn, int64_t n, const void *bytes, size_t size, size_t cut)
{
	size_t most = ZSTD_compressBound(size);
	void *packed = mem_alloc(most);
	size_t got = ZSTD_compress(packed, most, bytes, size, 1);
	int64_t dims[2] = { 0, n };
	uint32_t index;

	assert_false(ZSTD_isError(got));
	T_OK(sdict_add_tensor(c.sd, str_of(fqn), DT_UINT8, 1, &n, &index));
	T_OK(sdict_add_chunk(c.sd, index, dims, 0, store(packed, got - cut, zstd_id())));
	mem_free(packed);
}

static void check_chunk(uint64_t i, const void *want, size_t n)
{
	const struct sd_loc *loc = &c.sd->chunks[i].loc;
	const struct sd_file *f = &c.sd->files[loc->file];
	void *got = mem_alloc(n);

	assert_false(sd_is_transformed(*loc));
	assert_int_equal(loc->length, n);
	assert_int_equal(f->name.n, 0);
	assert_true(f->rank < j.fd_count);
	assert_true(loc->offset + n <= c.file_bytes[loc->file]);
	T_OK(fs_pread(j.fds[f->rank], got, n, loc->offset, "spool"));
	assert_memory_equal(got, want, n);
	mem_free(got);
}

static unsigned char *noise(size_t n)
{
	unsigned char *p = mem_alloc(n);

	for (size_t i = 0; i < n; i++)
		p[i] = (unsigned char)(i * 2654435761u >> 23);
	return p;
}

static void test_nothing_to_do(void **state)
{
	(void)state;
	T_OK(spool_transforms(&j, &c, false));
	assert_int_equal(j.fd_count, 0);
	assert_int_equal(c.sd->file_count, 1);
}

static void test_small(void **state)
{
	static const char text[] = "some bytes of an item";

	(void)state;
	add_tensor("a", 30, text, sizeof text, 0);
	add_tensor("b", 30, text + 5, 4, 0);
	T_OK(spool_transforms(&j, &c, false));
	assert_int_equal(j.fd_count, 1);
	check_chunk(0, text, sizeof text);
	check_chunk(1, text + 5, 4);
	assert_int_equal(t_worker_entries(&t, "."), 1);
}

/* Well packed: the last output is still inside the decoder when all input is in. */
static void test_output_waits_inside(void **state)
{
	static unsigned char zeros[3 * MIB + 12345];

	(void)state;
	char fqn[16];
	uint64_t count = 0;
	for (size_t n = 256 << 10; n <= sizeof zeros; n = n * 3 / 2 + 1) {
		snprintf(fqn, sizeof fqn, "z%ju", (uintmax_t)count++);
		add_tensor(fqn, (int64_t)n, zeros, n, 0);
	}
	T_OK(spool_transforms(&j, &c, false));
	for (uint64_t i = 0; i < count; i++)
		check_chunk(i, zeros, (size_t)c.sd->tensors[i].shape[0]);
}

/* More than what is kept in memory moves to a file without a name on the storage. */
static void test_moves_to_the_disk(void **state)
{
	size_t n = 24 * MIB;
	unsigned char *p = noise(n);

	(void)state;
	add_tensor("a", (int64_t)n, p, n, 0);
	add_tensor("b", (int64_t)n, p, n, 0);
	T_OK(spool_transforms(&j, &c, false));
	check_chunk(0, p, n);
	check_chunk(1, p, n);
	assert_int_equal(t_worker_entries(&t, "."), 1);
	mem_free(p);
}

static void test_cut_off(void **state)
{
	unsigned char *p = noise(300000);

	(void)state;
	add_tensor("model.w", 300000, p, 300000, 5);
	T_ERR(FORMAT_TRANSFORM, spool_transforms(&j, &c, false));
	assert_string_equal(err_last()->fqn, "model.w");
	assert_string_equal(err_last()->file, "data");
	assert_int_equal(err_last()->offset, 0);
	mem_free(p);
}

static void test_not_zstd(void **state)
{
	int64_t n = 8, dims[2] = { 0, 8 };
	uint32_t index;

	(void)state;
	T_OK(sdict_add_tensor(c.sd, STR("w"), DT_UINT8, 1, &n, &index));
	T_OK(sdict_add_chunk(c.sd, index, dims, 0, store("no zstd frame", 13, zstd_id())));
	T_ERR(FORMAT_TRANSFORM, spool_transforms(&j, &c, false));
}

/* 200 MiB of zeros in a few KiB, for a tensor of 16 bytes. */
static void test_bomb(void **state)
{
	size_t n = 200 * MIB;
	unsigned char *zeros = mem_zalloc(n, 1);

	(void)state;
	add_tensor("w", 16, zeros, n, 0);
	mem_free(zeros);
	T_ERR(LIMIT_EXCEEDED, spool_transforms(&j, &c, false));
	assert_string_equal(err_last()->fqn, "w");
}

static void test_file_gone(void **state)
{
	(void)state;
	add_tensor("a", 30, "abc", 3, 0);
	T_OK(fs_unlink(t.dir.fd, "data"));
	T_ERR(NOT_FOUND, spool_transforms(&j, &c, false));
	assert_string_equal(err_last()->file, "data");
	t_worker_put(&t, "data", "", 0);
}

int main(void)
{
#define T(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
	const struct CMUnitTest tests[] = {
		T(test_nothing_to_do), T(test_small), T(test_output_waits_inside), T(test_moves_to_the_disk), T(test_cut_off),
		T(test_not_zstd), T(test_bomb), T(test_file_gone),
	};

	return cmocka_run_group_tests_name("spool", tests, NULL, NULL);
}
