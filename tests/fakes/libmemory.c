/* libmemory.c: an allocator that fails when a test says so, put before a daemon's own with LD_PRELOAD.
 *
 * Every allocation of the process passes here: those of the daemon, and those that libevent, libmicrohttpd, jansson, SQLite and the C
 * library make for it. The test shares a file with it (FAKE_MEMORY): `left` counts down to the one that fails, `odds` makes one in
 * so many fail until it is set to 0 again. Where the failed one came from is written into the file, for who reads a failure.
 * Only the program named by FAKE_MEMORY_OF is meant: its children inherit the environment, and run untouched. */
#include <dlfcn.h>
#include <errno.h>
#include <execinfo.h>
#include <fcntl.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { DEPTH = 24, FILE_BYTES = 8192, TRACE_AT = 64 };

struct control {
	_Atomic uint64_t left;             /* 1: the next one fails; 0: none does */
	_Atomic uint64_t odds, state;      /* 0: off; state of the generator */
	_Atomic uint64_t failed;           /* so many have failed */
};

void *__libc_malloc(size_t n);
void *__libc_calloc(size_t count, size_t n);
void *__libc_realloc(void *p, size_t n);

static struct control *control;
static _Thread_local bool inside;

static void note_trace(void)
{
	void *at[DEPTH];
	Dl_info where;
	char *text = (char *)control + TRACE_AT;
	size_t used = 0;

	inside = true;
	int n = backtrace(at, DEPTH);
	for (int i = 2; i < n && used < FILE_BYTES - TRACE_AT - 256; i++)
		if (dladdr(at[i], &where) && where.dli_fname)
			used += (size_t)snprintf(text + used, 256, "%.200s+%#lx\n", where.dli_fname,
						 (unsigned long)((uintptr_t)at[i] - (uintptr_t)where.dli_fbase - 1));
	text[used] = '\0';
	inside = false;
}

static bool draw(uint64_t odds)
{
	uint64_t x = atomic_fetch_add(&control->state, 0x9e3779b97f4a7c15u) + 0x9e3779b97f4a7c15u;

	x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
	x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
	return (x ^ (x >> 31)) % odds == 0;
}

static bool fails(void)
{
	if (!control || inside)
		return false;
	uint64_t left = atomic_load_explicit(&control->left, memory_order_relaxed);
	uint64_t odds = atomic_load_explicit(&control->odds, memory_order_relaxed);
	bool now = odds && draw(odds);
	while (left != 0 && !now)
		if (atomic_compare_exchange_weak(&control->left, &left, left - 1)) {
			now = left == 1;
			break;
		}
	if (!now)
		return false;
	atomic_fetch_add(&control->failed, 1);
	note_trace();
	errno = ENOMEM;
	return true;
}

void *malloc(size_t n)
{
	return fails() ? NULL : __libc_malloc(n);
}

void *calloc(size_t count, size_t n)
{
	return fails() ? NULL : __libc_calloc(count, n);
}

void *realloc(void *p, size_t n)
{
	return fails() ? NULL : __libc_realloc(p, n);
}

void *reallocarray(void *p, size_t count, size_t n)
{
	size_t bytes;

	if (__builtin_mul_overflow(count, n, &bytes)) {
		errno = ENOMEM;
		return NULL;
	}
	return realloc(p, bytes);
}

static void on_abort(int signo)
{
	void *at[DEPTH];

	signal(signo, SIG_DFL);
	control = NULL;
	backtrace_symbols_fd(at, backtrace(at, DEPTH), 2);
	raise(signo);
}

__attribute__((constructor)) static void start(void)
{
	const char *path = getenv("FAKE_MEMORY"), *name = getenv("FAKE_MEMORY_OF");
	void *warm[2];

	if (!path || !name || strcmp(program_invocation_short_name, name) != 0)
		return;
	(void)backtrace(warm, 2); /* loads what it needs now, and not in the middle of an allocation */
	int fd = open(path, O_RDWR | O_CLOEXEC);
	void *p = fd < 0 ? MAP_FAILED : mmap(NULL, FILE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (fd >= 0)
		close(fd);
	if (p == MAP_FAILED)
		abort();
	control = p;
	signal(SIGABRT, on_abort);
	signal(SIGSEGV, on_abort);
}
