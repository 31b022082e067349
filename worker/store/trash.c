/* trash.c: see trash.h.
 *
 * A disk that is told which blocks are free (discard) is busy with it, and a save that runs beside takes twice as long. No priority helps
 * there. So a large file loses its name at once, and then its bytes from the end, a step at a time, with rests that are longer than the
 * steps. Shrinking a file is seen by all who have it open, which unlinking is not: only one that is ours alone is shrunk.
 *
 * One thread for all of it: two would take twice the share of the disk. */
#include "store/trash.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/mem.h"
#include "base/num.h"
#include "os/fs.h"

enum {
	STEP_BYTES = 8 << 20,
	LARGE_BYTES = 2 * STEP_BYTES,  /* what is smaller goes in one step */
	REST = 9,                      /* times the step's time */
	REST_MIN_NS = 1000000,         /* shorter ones are saved up */
	REST_MAX_NS = 1000000000,
	OPENING_NS = 20000000,         /* whoever has found a file's name has it open by then */
	SPARE_SHARE = 20,              /* of the file system: less is short */
	SLOW_BYTES_PER_MS = 256 << 10, /* freed by a slow disk without rests */
	SMALL_MS = 5000,               /* for what is unlinked in few steps; a sweep that comes too early only does it faster */
	COUNTED_MAX = 1000,            /* files; so many are small, or few of them tell enough */
};

struct removal {
	struct removal *next;
	int dirfd;
	bool local;
	uint64_t held;                 /* bytes, as far as counted */
	int64_t until_ns;              /* no rests any more */
	int64_t owed_ns;               /* rests too short to be taken one by one */
	char name[256];
};

static struct {
	pthread_mutex_t lock;
	struct removal *first, **last;
	bool running;
} queue = { .lock = PTHREAD_MUTEX_INITIALIZER, .last = &queue.first };
static _Atomic uint64_t held, steps, rests, removals, waiting;

struct trash_stats trash_stats(void)
{
	return (struct trash_stats){ .held = held, .steps = steps, .rests = rests, .removals = removals, .waiting = waiting };
}

int64_t trash_ms(void)
{
	uint64_t bytes = held, slow = bytes / SLOW_BYTES_PER_MS;

	if (bytes < LARGE_BYTES)
		return bytes == 0 ? 0 : SMALL_MS;
	return slow > TRASH_GENTLE_MS ? (int64_t)slow : TRASH_GENTLE_MS;
}

static void rest_ns(int64_t ns)
{
	struct timespec t = { .tv_sec = ns / 1000000000, .tv_nsec = (long)(ns % 1000000000) };

	while (nanosleep(&t, &t) < 0 && errno == EINTR)
		;
}

/* ---- how fast ---- */

bool trash_is_short(uint64_t free_bytes, uint64_t total_bytes, uint64_t held_bytes)
{
	return free_bytes < total_bytes / SPARE_SHARE || free_bytes / 2 < held_bytes;
}

static bool in_haste(const struct removal *r)
{
	uint64_t free_bytes, total;

	if (clock_mono_ns() >= r->until_ns)
		return true;
	if (fs_free_bytes(r->dirfd, &free_bytes, &total)) {
		err_clear();
		return true;
	}
	return trash_is_short(free_bytes, total, held);
}

static void let_go(struct removal *r, uint64_t bytes)
{
	bytes = num_min(bytes, r->held);
	r->held -= bytes;
	held -= bytes;
}

/* After a step that took so long and freed so much. All that is held must go at this speed before the time is up. */
static void rest_after(struct removal *r, int64_t step_ns, uint64_t bytes)
{
	double left = (double)(r->until_ns - clock_mono_ns()), step = (double)step_ns, rest = REST * step;
	double work = bytes ? (double)held / (double)bytes * step : 0;

	if (work * (REST + 1) > left)
		rest = left > work ? step * (left / work - 1) : 0;
	r->owed_ns += (int64_t)rest;
	if (r->owed_ns < REST_MIN_NS)
		return;
	rest_ns(r->owed_ns < REST_MAX_NS ? r->owed_ns : REST_MAX_NS);
	r->owed_ns = 0;
	rests++;
}

/* ---- one file ---- */

static uint64_t bytes_of(const struct stat *st)
{
	return S_ISREG(st->st_mode) && st->st_nlink == 1 ? (uint64_t)st->st_blocks * 512 : 0;
}

/* Cuts the file, which has no name any more, in steps. If a step fails, closing the file frees the rest. */
static void shrink(struct removal *r, int fd)
{
	struct stat st;

	rest_ns(OPENING_NS);
	if (!fs_is_sole(fd) || fstat(fd, &st) < 0 || st.st_size < STEP_BYTES)
		return;
	uint64_t size = (uint64_t)st.st_size, a_step = (uint64_t)st.st_blocks * 512 / (size / STEP_BYTES);
	while (size > STEP_BYTES && !in_haste(r)) {
		int64_t start = clock_mono_ns();
		size -= STEP_BYTES;
		if (fs_truncate(fd, size, r->name)) {
			err_clear();
			return;
		}
		steps++;
		let_go(r, a_step);
		rest_after(r, clock_mono_ns() - start, a_step);
	}
}

/* A file that had another name (fs_link) may not be written to by anybody. This is its last one. */
static void allow_writing(int dirfd, const char *name)
{
	int fd;

	if (fs_open(dirfd, name, O_RDONLY, 0, &fd)) {
		err_clear();
		return;
	}
	(void)fchmod(fd, 0600);
	fs_drop(&fd);
}

/* -1: not one to be shrunk, or not to be opened. */
static int open_large(const struct removal *r, int dirfd, const char *name, const struct stat *st)
{
	int fd;

	if (bytes_of(st) < LARGE_BYTES || st->st_size < LARGE_BYTES || !r->local || in_haste(r))
		return -1;
	if (!(st->st_mode & 0200))
		allow_writing(dirfd, name);
	if (fs_open(dirfd, name, O_WRONLY, 0, &fd)) {
		err_clear();
		return -1;
	}
	return fd;
}

/* An fs_unlink_fn. */
static int unlink_gently(void *user, int dirfd, const char *name)
{
	struct removal *r = user;
	struct stat st;

	if (fstatat(dirfd, name, &st, AT_SYMLINK_NOFOLLOW) < 0)
		return -1;
	int fd = open_large(r, dirfd, name, &st);
	int64_t start = clock_mono_ns();
	if (fs_unlink_here(dirfd, name) < 0) {
		int why = errno;
		fs_drop(&fd);
		errno = why;
		return -1;
	}
	uint64_t before = r->held, bytes = bytes_of(&st);
	if (fd >= 0)
		shrink(r, fd);
	fs_drop(&fd);
	let_go(r, bytes - num_min(bytes, before - r->held));
	if (bytes < LARGE_BYTES && !in_haste(r))
		rest_after(r, clock_mono_ns() - start, bytes);
	return 0;
}

/* ---- one after the other ---- */

struct counting {
	int dirfd;
	uint64_t bytes;
	uint32_t files;
};

static enum err count_one(void *user, const char *name, unsigned char)
{
	struct counting *c = user;
	struct stat st;

	if (c->files++ < COUNTED_MAX && fstatat(c->dirfd, name, &st, AT_SYMLINK_NOFOLLOW) == 0)
		c->bytes += bytes_of(&st);
	return OK;
}

/* Checkpoints have their files in one directory; what lies deeper, and links, are not counted. */
static uint64_t count(int dirfd, const char *name)
{
	struct counting c = { .dirfd = -1 };
	struct stat st;

	if (fstatat(dirfd, name, &st, AT_SYMLINK_NOFOLLOW) == 0 && S_ISREG(st.st_mode))
		return bytes_of(&st);
	if (fs_open_dir(dirfd, name, &c.dirfd) || fs_list(c.dirfd, count_one, &c))
		err_clear();
	fs_drop(&c.dirfd);
	return c.bytes;
}

static void forget(struct removal *r)
{
	held -= r->held;
	fs_drop(&r->dirfd);
	mem_free(r);
}

static struct removal *next(void)
{
	pthread_mutex_lock(&queue.lock);
	struct removal *r = queue.first;
	if (r)
		queue.first = r->next;
	else
		queue.running = false;
	if (!queue.first)
		queue.last = &queue.first;
	pthread_mutex_unlock(&queue.lock);
	return r;
}

static void *remove_all(void *)
{
	struct removal *r;

	while ((r = next())) {
		if (fs_remove_tree_by(r->dirfd, r->name, unlink_gently, r) || fs_fsync(r->dirfd, "."))
			err_clear(); /* gone or not after a power cut: it is trash either way */
		forget(r);
		removals++;
		waiting--;
	}
	return NULL;
}

static bool start_thread(void)
{
	pthread_attr_t attr;
	pthread_t thread;

	if (pthread_attr_init(&attr) != 0)
		return false;
	pthread_attr_setdetachstate(&attr, PTHREAD_CREATE_DETACHED);
	(void)signal(SIGIO, SIG_IGN); /* of somebody who opens a file while we ask whether it is ours alone: it would end us */
	int rc = pthread_create(&thread, &attr, remove_all, NULL);
	pthread_attr_destroy(&attr);
	return rc == 0;
}

static bool put(struct removal *r)
{
	pthread_mutex_lock(&queue.lock);
	*queue.last = r;
	queue.last = &r->next;
	waiting++;
	if (!queue.running)
		queue.running = start_thread();
	bool ok = queue.running;
	if (!ok) { /* then it is the only one */
		queue.first = NULL;
		queue.last = &queue.first;
		waiting--;
	}
	pthread_mutex_unlock(&queue.lock);
	return ok;
}

/* The next checkpoint may not fit before it is gone: then no job must end before it is. */
static bool is_needed(const struct removal *r)
{
	uint64_t free_bytes, total;

	if (fs_free_bytes(r->dirfd, &free_bytes, &total)) {
		err_clear();
		return true;
	}
	return free_bytes / 2 < held;
}

enum err trash_remove(int dirfd, const char *name)
{
	struct removal *r = mem_zalloc(1, sizeof *r);

	if (!r || strlen(name) >= sizeof r->name) {
		mem_free(r);
		return fs_remove_tree(dirfd, name);
	}
	memcpy(r->name, name, strlen(name) + 1);
	r->dirfd = fcntl(dirfd, F_DUPFD_CLOEXEC, 0);
	r->local = fs_is_local(dirfd);
	r->until_ns = clock_mono_ns() + TRASH_GENTLE_MS * 1000000ll;
	r->held = count(dirfd, name);
	held += r->held;
	if (!is_needed(r) && r->dirfd >= 0 && put(r))
		return OK;
	forget(r);
	removals++;
	return fs_remove_tree(dirfd, name);
}
