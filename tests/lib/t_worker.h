/* t_worker.h: a worker inside the test: one root in a scratch directory, an I/O engine, and the coordinator's end of its control
 * socket. Jobs run in the test's own process, so that sanitizers see all of it. */
#pragma once
#include <fcntl.h>
#include <string.h>
#include <sys/socket.h>
#include "lib/t_dir.h"
#include "os/fs.h"
#include "session/job.h"
#include "store/posix.h"

struct t_worker {
	struct t_dir dir;
	struct worker w;
	int peer;                      /* the coordinator's end */
};

static inline void t_worker_make(struct t_worker *t)
{
	int pair[2];

	memset(t, 0, sizeof *t);
	t_dir_make(&t->dir);
	assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair), 0);
	t->peer = pair[1];
	T_OK(frame_conn_new(pair[0], &t->w.conn));
	T_OK(io_engine_open(IO_THREADS, 8, &t->w.io));
	t->w.stores.v[0] = (struct store){ .name = "main", .ops = &posix_ops };
	T_OK(fs_open_root(t->dir.path, &t->w.stores.v[0].top));
	t->w.stores.count = t->w.count = 1;
	t->w.memory_bytes = 64 << 20;
}

static inline void t_worker_remove(struct t_worker *t)
{
	io_engine_close(t->w.io);
	frame_conn_free(t->w.conn);
	close(t->peer);
	close(t->w.stores.v[0].top);
	t_dir_remove(&t->dir);
}

/* A worker of each test's own, for cmocka: `t`, setup() and teardown(). */
#define T_WORKER_EACH(t) \
	static struct t_worker t; \
	static int setup(void **state) \
	{ \
		(void)state; \
		t_worker_make(&t); \
		return 0; \
	} \
	static int teardown(void **state) \
	{ \
		(void)state; \
		t_worker_remove(&t); \
		return 0; \
	} \
	_Static_assert(true, "a semicolon follows")

/* Says what the coordinator would say later: the worker reads it when it asks. */
static inline void t_worker_say(struct t_worker *t, enum frame_type type, uint64_t generation)
{
	unsigned char head[24] = { 'D', 'C', 'P', 'D', FRAME_VERSION, 0, (unsigned char)type, 0, 2 };

	memcpy(head + 16, &generation, sizeof generation);
	assert_int_equal(write(t->peer, head, sizeof head), sizeof head);
	assert_int_equal(write(t->peer, "{}", 2), 2);
}

/* Throws away what the worker said, so that it never waits for room. */
static inline void t_worker_drain(struct t_worker *t)
{
	char waste[65536];

	while (recv(t->peer, waste, sizeof waste, MSG_DONTWAIT) > 0)
		;
}

/* A file beneath the root, its directories made. */
static inline void t_worker_put(struct t_worker *t, const char *path, const void *bytes, size_t n)
{
	char dir[512];
	const char *slash = strrchr(path, '/');
	int fd = -1;

	if (slash) {
		snprintf(dir, sizeof dir, "%.*s", (int)(slash - path), path);
		T_OK(fs_mkdirs(t->dir.fd, dir, &fd));
		fs_drop(&fd);
	}
	T_OK(fs_open(t->dir.fd, path, O_CREAT | O_TRUNC | O_WRONLY, 0644, &fd));
	T_OK(fs_pwrite(fd, bytes, n, 0, path));
	T_OK(fs_close(&fd));
}

static inline bool t_worker_has(const struct t_worker *t, const char *path)
{
	return faccessat(t->dir.fd, path, F_OK, AT_SYMLINK_NOFOLLOW) == 0;
}

/* How many entries a directory beneath the root has. */
static inline int t_worker_entries(const struct t_worker *t, const char *path)
{
	int fd = openat(t->dir.fd, path, O_RDONLY | O_DIRECTORY | O_CLOEXEC), n = -2;
	DIR *d = fdopendir(fd);

	assert_non_null(d);
	while (readdir(d))
		n++;
	closedir(d);
	return n;
}

/* A golden checkpoint of tests/fixtures, copied beneath the root. */
static inline void t_worker_copy(struct t_worker *t, const char *fixture, const char *name)
{
	char from[512], path[768];
	struct dirent *e;

	snprintf(from, sizeof from, "tests/fixtures/%s/checkpoint", fixture);
	DIR *d = opendir(from);
	if (!d)
		T_FAIL("%s is not there: run in the tree's root", from);
	while ((e = readdir(d))) {
		void *bytes = NULL;
		uint64_t n = 0;
		if (strcmp(e->d_name, ".") == 0 || strcmp(e->d_name, "..") == 0)
			continue;
		T_OK(fs_read_all(dirfd(d), e->d_name, 1 << 26, &bytes, &n));
		snprintf(path, sizeof path, "%s/%s", name, e->d_name);
		t_worker_put(t, path, bytes, n);
		mem_free(bytes);
	}
	closedir(d);
}
