/* libcuda.c: a libcuda.so.1 without a GPU, for tests: the same symbols over host memory.
 *
 * It is stricter than a GPU where that finds mistakes: device pointers cannot be read by the host (the bytes are elsewhere), and
 * nothing on a stream happens before somebody asks whether it is done, one piece of work per question.
 *
 *     FAKE_CUDA_INIT=100          cuInit fails with this error
 *     FAKE_CUDA_CRASH=FILE        cuInit ends the process while there is such a file
 *     FAKE_CUDA_DEVICES=2         how many there are; default 1
 *     FAKE_CUDA_MEMORY=1048576    bytes of device memory; default 1 GiB
 *     FAKE_CUDA_FAIL=cuMemHostRegister_v2:2:999     the second call of that name fails with error 999; 0: every call */
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "fakes/fake_cuda.h"

enum { ALLOCATIONS = 4096, PINNED = 4096, PAGE = 4096, INVALID_VALUE = 1, NOT_INITIALIZED = 3, INVALID_DEVICE = 101,
       INVALID_CONTEXT = 201, ALREADY_REGISTERED = 712, NOT_REGISTERED = 713 };

struct work {
	struct work *next;
	int (*step)(void *arg);
	void *arg;
};

struct CUstream_st {
	struct work *first, **end;
};

struct CUevent_st {
	struct CUstream_st *stream;
	int pending;
};

struct CUctx_st {
	int users;
};

struct range {
	char *p;
	size_t bytes, reserved;
};

static struct range allocations[ALLOCATIONS], pinned[PINNED];
static size_t used;
static bool initialized;
static struct CUctx_st context, *current;

static unsigned long number_of(const char *name, unsigned long otherwise)
{
	const char *value = getenv(name);

	return value ? strtoul(value, NULL, 10) : otherwise;
}

/* CUDA_OK, or the error that the environment asks for. */
static cuda_result injected(const char *symbol)
{
	static char counted[64];
	static unsigned long calls;
	const char *spec = getenv("FAKE_CUDA_FAIL");
	size_t n = strlen(symbol);

	if (!spec || strncmp(spec, symbol, n) != 0 || spec[n] != ':')
		return CUDA_OK;
	if (strcmp(counted, symbol) != 0) {
		snprintf(counted, sizeof counted, "%s", symbol);
		calls = 0;
	}
	char *end;
	unsigned long nth = strtoul(spec + n + 1, &end, 10);
	calls++;
	return nth == 0 || nth == calls ? (cuda_result)strtoul(end + 1, NULL, 10) : CUDA_OK;
}

/* Every call but cuInit and those about errors begins so. */
#define BEGIN()                                         \
	do {                                            \
		cuda_result r_ = injected(__func__);    \
		if (!initialized)                       \
			return NOT_INITIALIZED;         \
		if (r_ != CUDA_OK)                      \
			return r_;                      \
	} while (0)
#define NEED_CONTEXT()                                  \
	do {                                            \
		if (!current || !current->users)        \
			return INVALID_CONTEXT;         \
	} while (0)

#define X(member, symbol, params) cuda_result symbol params;
CUDA_FUNCTIONS(X)
#undef X

cuda_result cuInit(unsigned flags)
{
	cuda_result r = (cuda_result)number_of("FAKE_CUDA_INIT", CUDA_OK);
	const char *crash = getenv("FAKE_CUDA_CRASH");

	if (crash && access(crash, F_OK) == 0)
		raise(SIGSEGV);
	if (r == CUDA_OK && flags)
		r = INVALID_VALUE;
	initialized = r == CUDA_OK;
	return r;
}

static const struct { cuda_result r; const char *name, *text; } errors[] = {
	{ CUDA_OK, "CUDA_SUCCESS", "no error" },
	{ INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument" },
	{ CUDA_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory" },
	{ NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error" },
	{ CUDA_NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected" },
	{ INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal" },
	{ INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context" },
	{ CUDA_NOT_READY, "CUDA_ERROR_NOT_READY", "device not ready" },
	{ ALREADY_REGISTERED, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED", "part or all of the requested memory range is already mapped" },
	{ NOT_REGISTERED, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED", "pointer does not correspond to a registered memory region" },
};

static cuda_result text_of(cuda_result r, bool name, const char **out)
{
	*out = NULL;
	for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
		if (errors[i].r == r)
			*out = name ? errors[i].name : errors[i].text;
	return *out ? CUDA_OK : INVALID_VALUE;
}

cuda_result cuGetErrorName(cuda_result r, const char **out)
{
	return text_of(r, true, out);
}

cuda_result cuGetErrorString(cuda_result r, const char **out)
{
	return text_of(r, false, out);
}

cuda_result cuDriverGetVersion(int *out)
{
	*out = 13000;
	return CUDA_OK;
}

cuda_result cuDeviceGetCount(int *out)
{
	BEGIN();
	*out = (int)number_of("FAKE_CUDA_DEVICES", 1);
	return CUDA_OK;
}

cuda_result cuDeviceGet(cuda_device *out, int ordinal)
{
	BEGIN();
	*out = ordinal;
	return ordinal >= 0 && (unsigned long)ordinal < number_of("FAKE_CUDA_DEVICES", 1) ? CUDA_OK : INVALID_DEVICE;
}

cuda_result cuDeviceGetName(char *out, int bytes, cuda_device d)
{
	BEGIN();
	snprintf(out, (size_t)bytes, "Fake GPU %d", d);
	return CUDA_OK;
}

cuda_result cuDeviceGetUuid_v2(struct CUuuid_st *out, cuda_device d)
{
	BEGIN();
	for (int i = 0; i < CUDA_UUID_BYTES; i++)
		((unsigned char *)out)[i] = (unsigned char)(i + 16 * d);
	return CUDA_OK;
}

cuda_result cuDeviceTotalMem_v2(size_t *out, cuda_device d)
{
	(void)d;
	BEGIN();
	*out = number_of("FAKE_CUDA_MEMORY", 1UL << 30);
	return CUDA_OK;
}

cuda_result cuDevicePrimaryCtxRetain(struct CUctx_st **out, cuda_device d)
{
	(void)d;
	BEGIN();
	context.users++;
	*out = &context;
	return CUDA_OK;
}

cuda_result cuDevicePrimaryCtxRelease_v2(cuda_device d)
{
	(void)d;
	BEGIN();
	NEED_CONTEXT();
	context.users--;
	return CUDA_OK;
}

cuda_result cuCtxSetCurrent(struct CUctx_st *ctx)
{
	BEGIN();
	current = ctx;
	return CUDA_OK;
}

/* ---- memory: the pointers given out have no access; the bytes are `reserved` behind them ---- */

cuda_result cuMemAlloc_v2(cuda_ptr *out, size_t bytes)
{
	size_t reserved = (bytes + PAGE - 1) / PAGE * PAGE;

	BEGIN();
	NEED_CONTEXT();
	if (bytes == 0)
		return INVALID_VALUE;
	if (reserved < bytes || used + reserved > number_of("FAKE_CUDA_MEMORY", 1UL << 30))
		return CUDA_OUT_OF_MEMORY;
	for (int i = 0; i < ALLOCATIONS; i++) {
		if (allocations[i].p)
			continue;
		char *p = mmap(NULL, 2 * reserved, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		if (p == MAP_FAILED || mprotect(p, reserved, PROT_NONE) < 0)
			return CUDA_OUT_OF_MEMORY;
		memset(p + reserved, 0xa5, reserved);
		allocations[i] = (struct range){ p, bytes, reserved };
		used += reserved;
		*out = (cuda_ptr)(uintptr_t)p;
		return CUDA_OK;
	}
	return CUDA_OUT_OF_MEMORY;
}

cuda_result cuMemFree_v2(cuda_ptr p)
{
	BEGIN();
	NEED_CONTEXT();
	for (int i = 0; i < ALLOCATIONS; i++)
		if (allocations[i].p && (cuda_ptr)(uintptr_t)allocations[i].p == p) {
			munmap(allocations[i].p, 2 * allocations[i].reserved);
			used -= allocations[i].reserved;
			allocations[i].p = NULL;
			return CUDA_OK;
		}
	return INVALID_VALUE;
}

void *fake_cuda_bytes(const void *p, size_t bytes)
{
	const char *at = p;

	for (int i = 0; i < ALLOCATIONS; i++) {
		struct range *a = &allocations[i];
		if (a->p && at >= a->p && at <= a->p + a->bytes && bytes <= a->bytes - (size_t)(at - a->p))
			return a->p + a->reserved + (at - a->p);
	}
	return NULL;
}

cuda_result cuMemHostRegister_v2(void *p, size_t bytes, unsigned flags)
{
	struct range *found = NULL;

	(void)flags;
	BEGIN();
	NEED_CONTEXT();
	if (!p || bytes == 0)
		return INVALID_VALUE;
	for (int i = 0; i < PINNED; i++) {
		if (pinned[i].p && (char *)p < pinned[i].p + pinned[i].bytes && pinned[i].p < (char *)p + bytes)
			return ALREADY_REGISTERED;
		if (!pinned[i].p && !found)
			found = &pinned[i];
	}
	if (!found)
		return CUDA_OUT_OF_MEMORY;
	*found = (struct range){ p, bytes, 0 };
	return CUDA_OK;
}

cuda_result cuMemHostUnregister(void *p)
{
	BEGIN();
	NEED_CONTEXT();
	for (int i = 0; i < PINNED; i++)
		if (pinned[i].p && pinned[i].p == p) {
			pinned[i].p = NULL;
			return CUDA_OK;
		}
	return NOT_REGISTERED;
}

/* ---- streams ---- */

void fake_cuda_push(struct CUstream_st *s, int (*step)(void *arg), void *arg)
{
	struct work *w = calloc(1, sizeof *w);

	w->step = step;
	w->arg = arg;
	*s->end = w;
	s->end = &w->next;
}

/* One piece of work at most; true if nothing was left to do before. */
static bool advance(struct CUstream_st *s)
{
	struct work *w = s->first;

	if (!w)
		return true;
	if (w->step(w->arg) == FAKE_LATER)
		return false;
	s->first = w->next;
	if (!s->first)
		s->end = &s->first;
	free(w);
	return false;
}

cuda_result cuStreamCreate(struct CUstream_st **out, unsigned flags)
{
	(void)flags;
	BEGIN();
	NEED_CONTEXT();
	*out = calloc(1, sizeof **out);
	(*out)->end = &(*out)->first;
	return CUDA_OK;
}

cuda_result cuStreamDestroy_v2(struct CUstream_st *s)
{
	BEGIN();
	while (s->first) { /* work that never ends would hold us: it is dropped */
		struct work *w = s->first;
		s->first = w->next;
		free(w);
	}
	free(s);
	return CUDA_OK;
}

cuda_result cuStreamQuery(struct CUstream_st *s)
{
	BEGIN();
	NEED_CONTEXT();
	return advance(s) ? CUDA_OK : CUDA_NOT_READY;
}

cuda_result cuEventCreate(struct CUevent_st **out, unsigned flags)
{
	(void)flags;
	BEGIN();
	NEED_CONTEXT();
	*out = calloc(1, sizeof **out);
	return CUDA_OK;
}

cuda_result cuEventDestroy_v2(struct CUevent_st *e)
{
	BEGIN();
	free(e);
	return CUDA_OK;
}

static int reach_event(void *arg)
{
	((struct CUevent_st *)arg)->pending--;
	return FAKE_DONE;
}

cuda_result cuEventRecord(struct CUevent_st *e, struct CUstream_st *s)
{
	BEGIN();
	NEED_CONTEXT();
	e->stream = s;
	e->pending++;
	fake_cuda_push(s, reach_event, e);
	return CUDA_OK;
}

cuda_result cuEventQuery(struct CUevent_st *e)
{
	BEGIN();
	NEED_CONTEXT();
	if (e->pending)
		(void)advance(e->stream);
	return e->pending ? CUDA_NOT_READY : CUDA_OK;
}

struct copy {
	void *to;
	const void *from;
	size_t bytes;
};

static int do_copy(void *arg)
{
	struct copy *c = arg;

	memmove(c->to, c->from, c->bytes);
	free(c);
	return FAKE_DONE;
}

static cuda_result copy(void *to, const void *from, size_t bytes, struct CUstream_st *s)
{
	struct copy *c = calloc(1, sizeof *c);

	if (!to || !from) {
		free(c);
		return INVALID_VALUE;
	}
	*c = (struct copy){ to, from, bytes };
	fake_cuda_push(s, do_copy, c);
	return CUDA_OK;
}

cuda_result cuMemcpyHtoDAsync_v2(cuda_ptr to, const void *from, size_t bytes, struct CUstream_st *s)
{
	BEGIN();
	NEED_CONTEXT();
	return copy(fake_cuda_bytes((void *)(uintptr_t)to, bytes), from, bytes, s);
}

cuda_result cuMemcpyDtoHAsync_v2(void *to, cuda_ptr from, size_t bytes, struct CUstream_st *s)
{
	BEGIN();
	NEED_CONTEXT();
	return copy(to, fake_cuda_bytes((void *)(uintptr_t)from, bytes), bytes, s);
}

cuda_result cuMemcpyDtoDAsync_v2(cuda_ptr to, cuda_ptr from, size_t bytes, struct CUstream_st *s)
{
	BEGIN();
	NEED_CONTEXT();
	return copy(fake_cuda_bytes((void *)(uintptr_t)to, bytes), fake_cuda_bytes((void *)(uintptr_t)from, bytes), bytes, s);
}
