/* libhost.c: a host with its troubles, for LD_PRELOAD: what a test cannot do to the real one without disturbing others.
 *
 *     FAKE_HOST_CLOCK=FILE        the steps of the wall clock: struct steps below; a test adds to them while programs run
 *     FAKE_HOST_AHEAD=FILE        the monotonic clock is so many seconds ahead, as if so long had passed: an int64_t, which may change
 *     FAKE_HOST_UNSYNCED=1        the kernel says that nobody keeps the clock
 *     FAKE_HOST_OLD=1             tmpfs as before Linux 6.6: user.* attributes are refused
 *     FAKE_HOST_BUFFERED=1        file systems take O_DIRECT when a file is opened, and refuse the write
 *     FAKE_HOST_SLOW=MS           reading a directory waits so long at each entry whose name begins with `slow-`, which it also says on
 *                                 stderr, and for ever at one that begins with `hang-`
 *     FAKE_HOST_DISK=FILE         each fsync and each rename takes so many milliseconds longer: an int32_t in the file, which may change
 *
 * The wall clock is moved as settimeofday() would: a file's times are of the wall clock as it was when the kernel set them. */
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/timex.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

enum { STEPS_MAX = 4096, NS_PER_S = 1000000000 };

struct step {
	int64_t since_ns, ahead_s; /* from this time of the real clock on, the fake one is so far ahead */
};

static const struct steps {
	volatile int64_t count; /* at least one, whose time is the first at which a program could run */
	struct step v[STEPS_MAX];
} *steps;
static int old_kernel, buffered;
static long slow_ms;
static const volatile int32_t *disk_ms;
static const volatile int64_t *ahead_s;

static const void *map_file(const char *path, size_t n)
{
	int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;

	if (fd < 0)
		return NULL;
	void *p = mmap(NULL, n, PROT_READ, MAP_SHARED, fd, 0);
	close(fd);
	return p == MAP_FAILED ? NULL : p;
}

__attribute__((constructor)) static void begin(void)
{
	steps = map_file(getenv("FAKE_HOST_CLOCK"), sizeof *steps);
	disk_ms = map_file(getenv("FAKE_HOST_DISK"), sizeof *disk_ms);
	ahead_s = map_file(getenv("FAKE_HOST_AHEAD"), sizeof *ahead_s);
	old_kernel = getenv("FAKE_HOST_OLD") != NULL;
	buffered = getenv("FAKE_HOST_BUFFERED") != NULL;
	slow_ms = getenv("FAKE_HOST_SLOW") ? strtol(getenv("FAKE_HOST_SLOW"), NULL, 10) : 0;
}

int clock_gettime(clockid_t which, struct timespec *t)
{
	static int (*real)(clockid_t, struct timespec *);

	if (!real)
		real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
	int rc = real(which, t);
	if (rc == 0 && steps && (which == CLOCK_REALTIME || which == CLOCK_REALTIME_COARSE))
		t->tv_sec += steps->v[steps->count - 1].ahead_s;
	if (rc == 0 && ahead_s && (which == CLOCK_MONOTONIC || which == CLOCK_MONOTONIC_COARSE))
		t->tv_sec += *ahead_s;
	return rc;
}

/* ---- times of files ---- */

static int64_t ns_of(struct timespec t)
{
	return t.tv_sec * NS_PER_S + t.tv_nsec;
}

static void to_fake(struct timespec *t)
{
	int64_t i = steps->count - 1;

	while (i > 0 && ns_of(*t) < steps->v[i].since_ns)
		i--;
	t->tv_sec += steps->v[i].ahead_s;
}

/* The inverse. A time that the fake clock never showed stays as it is. */
static void to_real(struct timespec *t)
{
	for (int64_t i = steps->count - 1; i >= 0; i--) {
		int64_t real = ns_of(*t) - steps->v[i].ahead_s * NS_PER_S;
		if ((i == 0 || real >= steps->v[i].since_ns) && (i == steps->count - 1 || real < steps->v[i + 1].since_ns)) {
			t->tv_sec -= steps->v[i].ahead_s;
			return;
		}
	}
}

static int faked(int rc, struct stat *st)
{
	if (rc == 0 && steps) {
		to_fake(&st->st_atim);
		to_fake(&st->st_mtim);
		to_fake(&st->st_ctim);
	}
	return rc;
}

int fstat(int fd, struct stat *st)
{
	static int (*real)(int, struct stat *);

	if (!real)
		real = (int (*)(int, struct stat *))dlsym(RTLD_NEXT, "fstat");
	return faked(real(fd, st), st);
}

int fstatat(int fd, const char *restrict path, struct stat *restrict st, int flags)
{
	static int (*real)(int, const char *, struct stat *, int);

	if (!real)
		real = (int (*)(int, const char *, struct stat *, int))dlsym(RTLD_NEXT, "fstatat");
	return faked(real(fd, path, st, flags), st);
}

int futimens(int fd, const struct timespec times[2])
{
	static int (*real)(int, const struct timespec[2]);
	struct timespec t[2];

	if (!real)
		real = (int (*)(int, const struct timespec[2]))dlsym(RTLD_NEXT, "futimens");
	if (!times || !steps)
		return real(fd, times);
	for (int i = 0; i < 2; i++) {
		t[i] = times[i];
		if (t[i].tv_nsec < NS_PER_S) /* else it is UTIME_NOW or UTIME_OMIT */
			to_real(&t[i]);
	}
	return real(fd, t);
}

/* ---- the rest of the clock ---- */

int adjtimex(struct timex *t)
{
	static int (*real)(struct timex *);

	if (!real)
		real = (int (*)(struct timex *))dlsym(RTLD_NEXT, "adjtimex");
	int state = real(t);
	if (!getenv("FAKE_HOST_UNSYNCED"))
		return state;
	t->status |= STA_UNSYNC;
	return TIME_ERROR;
}

int gettimeofday(struct timeval *restrict tv, void *restrict zone)
{
	struct timespec t;

	(void)zone;
	clock_gettime(CLOCK_REALTIME, &t);
	*tv = (struct timeval){ .tv_sec = t.tv_sec, .tv_usec = t.tv_nsec / 1000 };
	return 0;
}

time_t time(time_t *out)
{
	struct timespec t;

	clock_gettime(CLOCK_REALTIME, &t);
	if (out)
		*out = t.tv_sec;
	return t.tv_sec;
}

static int is_refused(const char *name)
{
	if (!old_kernel || strncmp(name, "user.", 5) != 0)
		return 0;
	errno = EOPNOTSUPP;
	return 1;
}

int fsetxattr(int fd, const char *name, const void *value, size_t n, int flags)
{
	static int (*real)(int, const char *, const void *, size_t, int);

	if (!real)
		real = (int (*)(int, const char *, const void *, size_t, int))dlsym(RTLD_NEXT, "fsetxattr");
	return is_refused(name) ? -1 : real(fd, name, value, n, flags);
}

ssize_t fgetxattr(int fd, const char *name, void *value, size_t n)
{
	static ssize_t (*real)(int, const char *, void *, size_t);

	if (!real)
		real = (ssize_t (*)(int, const char *, void *, size_t))dlsym(RTLD_NEXT, "fgetxattr");
	return is_refused(name) ? -1 : real(fd, name, value, n);
}

ssize_t pwrite(int fd, const void *p, size_t n, off_t at)
{
	static ssize_t (*real)(int, const void *, size_t, off_t);

	if (!real)
		real = (ssize_t (*)(int, const void *, size_t, off_t))dlsym(RTLD_NEXT, "pwrite");
	if (buffered && fcntl(fd, F_GETFL) & O_DIRECT) {
		errno = EINVAL;
		return -1;
	}
	return real(fd, p, n, at);
}

static void wait_ms(long ms)
{
	nanosleep(&(struct timespec){ ms / 1000, ms % 1000 * 1000000 }, NULL);
}

static void wait_for_disk(void)
{
	if (disk_ms && *disk_ms > 0)
		wait_ms(*disk_ms);
}

int fsync(int fd)
{
	static int (*real)(int);

	if (!real)
		real = (int (*)(int))dlsym(RTLD_NEXT, "fsync");
	wait_for_disk();
	return real(fd);
}

int fdatasync(int fd)
{
	static int (*real)(int);

	if (!real)
		real = (int (*)(int))dlsym(RTLD_NEXT, "fdatasync");
	wait_for_disk();
	return real(fd);
}

int renameat(int from, const char *old, int to, const char *new)
{
	static int (*real)(int, const char *, int, const char *);

	if (!real)
		real = (int (*)(int, const char *, int, const char *))dlsym(RTLD_NEXT, "renameat");
	wait_for_disk();
	return real(from, old, to, new);
}

int renameat2(int from, const char *old, int to, const char *new, unsigned flags)
{
	static int (*real)(int, const char *, int, const char *, unsigned);

	if (!real)
		real = (int (*)(int, const char *, int, const char *, unsigned))dlsym(RTLD_NEXT, "renameat2");
	wait_for_disk();
	return real(from, old, to, new, flags);
}

struct dirent *readdir(DIR *d)
{
	static struct dirent *(*real)(DIR *);

	if (!real)
		real = (struct dirent *(*)(DIR *))dlsym(RTLD_NEXT, "readdir");
	struct dirent *e = real(d);
	if (e && slow_ms && strncmp(e->d_name, "slow-", 5) == 0) {
		fprintf(stderr, "slow: %s\n", e->d_name);
		wait_ms(slow_ms);
	}
	while (e && slow_ms && strncmp(e->d_name, "hang-", 5) == 0)
		wait_ms(3600000);
	return e;
}
