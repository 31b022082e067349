/* libcuda.c: a libcuda.so.1 without a GPU, for tests: the same symbols over host memory.
 *
 * It is stricter than a GPU where that finds mistakes: device pointers cannot be read by the host (the bytes are elsewhere), and
 * nothing on a stream happens before somebody asks whether it is done, one piece of work per question.
 *
 *     FAKE_CUDA_INIT=100          cuInit fails with this error
 *     FAKE_CUDA_CRASH=FILE        cuInit ends the process while there is such a file
 *     FAKE_CUDA_VERSION=11030     the CUDA that the driver is of; default 13.0
 *     FAKE_CUDA_DEVICES=2         how many there are; default 1
 *     FAKE_CUDA_ARCH=80           their architecture, which a kernel's code has to fit; default 90
 *     FAKE_CUDA_MEMORY=1048576    bytes of device memory; default 1 GiB
 *     FAKE_CUDA_NO_VMM=1          the devices share no memory by descriptors
 *     FAKE_CUDA_FAIL=cuMemHostRegister_v2:2:999     the second call of that name fails with error 999; 0: every call;
 *                                 "hang" in place of an error never returns;
 *                                 with ":sticky" behind it so does every call after it, as when a device is lost; "@FILE": as FILE says now
 *
 * Memory is in files without a name, so that another process can open it: a legacy handle says where its exporter has it open, and is
 * good for nothing once that has ended; a VMM descriptor is the file itself. Sizes of VMM memory are multiples of 2 MiB, as on a GPU, and
 * an allocation has its room as long as this process has a handle or a mapping of it: fake_cuda_left() counts both. */
#include <fcntl.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "fakes/libcuda_impl.h"

enum { ALLOCATIONS = 4096, PINNED = 4096, PAGE = 4096, GRANULE = 2 << 20 };

struct CUctx_st {
	int users;
};

enum kind { ALLOCATED, IMPORTED, MAPPED, RESERVED };

struct range {
	char *p;                       /* NULL: the entry is free */
	size_t bytes, distance;        /* from the device's address to where the bytes are */
	int fd;                        /* of the memory; -1: none of its own */
	enum kind kind;
	unsigned allocation;           /* of a mapping */
	bool is_closed, is_readonly;   /* a mapping without access, or that cannot be written to */
};

struct vmm {
	int fd, refs;                  /* refs 0: the entry is free */
	size_t bytes;
	bool is_shareable, is_own;     /* is_own: made here, it takes room of this process's */
};

static struct range allocations[ALLOCATIONS], pinned[PINNED];
static struct vmm vmms[ALLOCATIONS];
cuda_result fake_sticky;
int fake_modules;
static size_t used;
bool fake_initialized;
static struct CUctx_st context, *current;

unsigned long fake_number(const char *name, unsigned long otherwise)
{
	const char *value = getenv(name);

	return value ? strtoul(value, NULL, 10) : otherwise;
}

/* The text of FAKE_CUDA_FAIL, or of the file that it names. */
static const char *spec_now(char *room, size_t n)
{
	const char *spec = getenv("FAKE_CUDA_FAIL");

	if (!spec || spec[0] != '@')
		return spec;
	int fd = open(spec + 1, O_RDONLY | O_CLOEXEC);
	ssize_t got = fd < 0 ? -1 : read(fd, room, n - 1);
	if (fd >= 0)
		close(fd);
	room[got < 0 ? 0 : got] = '\0';
	return room;
}

cuda_result fake_injected(const char *symbol)
{
	static char counted[64];
	static unsigned long calls;
	char room[128];
	const char *spec = spec_now(room, sizeof room);
	size_t n = strlen(symbol);

	if (fake_sticky || !spec || strncmp(spec, symbol, n) != 0 || spec[n] != ':')
		return fake_sticky;
	if (strcmp(counted, symbol) != 0) {
		snprintf(counted, sizeof counted, "%s", symbol);
		calls = 0;
	}
	char *end;
	unsigned long nth = strtoul(spec + n + 1, &end, 10);
	calls++;
	if (nth && nth != calls)
		return CUDA_OK;
	while (strncmp(end, ":hang", 5) == 0)
		pause();
	cuda_result r = (cuda_result)strtoul(end + 1, &end, 10);
	fake_sticky = strncmp(end, ":sticky", 7) == 0 ? r : CUDA_OK;
	return r;
}

cuda_result cuInit(unsigned flags)
{
	cuda_result asked = fake_injected("cuInit"), r = asked ? asked : (cuda_result)fake_number("FAKE_CUDA_INIT", CUDA_OK);
	const char *crash = getenv("FAKE_CUDA_CRASH");

	if (crash && access(crash, F_OK) == 0)
		raise(SIGSEGV);
	if (r == CUDA_OK && flags)
		r = INVALID_VALUE;
	fake_initialized = r == CUDA_OK;
	return r;
}

bool fake_has_context(void)
{
	return current && current->users;
}

static const struct { cuda_result r; const char *name, *text; } errors[] = {
	{ CUDA_OK, "CUDA_SUCCESS", "no error" },
	{ INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument" },
	{ CUDA_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory" },
	{ NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error" },
	{ CUDA_NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected" },
	{ INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal" },
	{ INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context" },
	{ NO_BINARY, "CUDA_ERROR_NO_BINARY_FOR_GPU", "no kernel image is available for execution on the device" },
	{ INVALID_PTX, "CUDA_ERROR_INVALID_PTX", "a PTX JIT compilation failed" },
	{ INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle" },
	{ ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered" },
	{ NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found" },
	{ NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported" },
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
	*out = (int)fake_number("FAKE_CUDA_VERSION", 13000);
	return fake_injected(__func__);
}

cuda_result cuDeviceGetCount(int *out)
{
	BEGIN();
	*out = (int)fake_number("FAKE_CUDA_DEVICES", 1);
	return CUDA_OK;
}

cuda_result cuDeviceGet(cuda_device *out, int ordinal)
{
	BEGIN();
	*out = ordinal;
	return ordinal >= 0 && (unsigned long)ordinal < fake_number("FAKE_CUDA_DEVICES", 1) ? CUDA_OK : INVALID_DEVICE;
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
	*out = fake_number("FAKE_CUDA_MEMORY", 1UL << 30);
	return CUDA_OK;
}

cuda_result cuDeviceGetAttribute(int *out, unsigned which, cuda_device d)
{
	(void)d;
	BEGIN();
	if (which != CUDA_ATTRIBUTE_VMM && which != CUDA_ATTRIBUTE_HANDLE_FD)
		return INVALID_VALUE;
	*out = !fake_number("FAKE_CUDA_NO_VMM", 0);
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

/* The stack of contexts has one level here: callers of the driver push and pop around single calls. */
static struct CUctx_st *below;

cuda_result cuCtxPushCurrent_v2(struct CUctx_st *ctx)
{
	BEGIN();
	below = current;
	current = ctx;
	return CUDA_OK;
}

cuda_result cuCtxPopCurrent_v2(struct CUctx_st **out)
{
	BEGIN();
	NEED_CONTEXT();
	*out = current;
	current = below;
	return CUDA_OK;
}

cuda_result cuCtxSynchronize(void)
{
	BEGIN();
	NEED_CONTEXT();
	return CUDA_OK;
}

/* ---- memory: the pointers given out have no access; the bytes are `distance` behind them ---- */

static size_t round_up(size_t bytes)
{
	return (bytes + PAGE - 1) / PAGE * PAGE;
}

static struct range *new_range(void)
{
	for (int i = 0; i < ALLOCATIONS; i++)
		if (!allocations[i].p)
			return &allocations[i];
	return NULL;
}

/* Addresses for `bytes`, and the same again behind them. */
static char *new_addresses(size_t bytes)
{
	char *p = mmap(NULL, 2 * bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

	return p == MAP_FAILED ? NULL : p;
}

static bool put_file(char *at, size_t bytes, int fd)
{
	return mmap(at, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0) != MAP_FAILED;
}

/* Takes fd. */
static cuda_result map_whole(int fd, size_t bytes, enum kind kind, cuda_ptr *out)
{
	struct range *a = new_range();
	char *p = a ? new_addresses(round_up(bytes)) : NULL;

	if (!p || !put_file(p + round_up(bytes), round_up(bytes), fd)) {
		close(fd);
		return CUDA_OUT_OF_MEMORY;
	}
	*a = (struct range){ .p = p, .bytes = bytes, .distance = round_up(bytes), .fd = fd, .kind = kind };
	*out = (cuda_ptr)(uintptr_t)p;
	return CUDA_OK;
}

static int new_file(size_t bytes)
{
	int fd = memfd_create("fake device memory", MFD_CLOEXEC);

	if (fd >= 0 && ftruncate(fd, (off_t)round_up(bytes)) < 0) {
		close(fd);
		fd = -1;
	}
	return fd;
}

/* bytes: 0 for whatever it has. */
static struct range *find(cuda_ptr p, size_t bytes, enum kind kind)
{
	for (int i = 0; i < ALLOCATIONS; i++) {
		struct range *a = &allocations[i];
		if (a->p && a->kind == kind && (cuda_ptr)(uintptr_t)a->p == p && (!bytes || bytes == a->bytes))
			return a;
	}
	return NULL;
}

cuda_result cuMemAlloc_v2(cuda_ptr *out, size_t bytes)
{
	size_t reserved = round_up(bytes);

	BEGIN();
	NEED_CONTEXT();
	if (bytes == 0)
		return INVALID_VALUE;
	if (reserved < bytes || used + reserved > fake_number("FAKE_CUDA_MEMORY", 1UL << 30))
		return CUDA_OUT_OF_MEMORY;
	int fd = new_file(bytes);
	if (fd < 0 || map_whole(fd, bytes, ALLOCATED, out) != CUDA_OK)
		return CUDA_OUT_OF_MEMORY;
	memset((char *)(uintptr_t)*out + reserved, 0xa5, reserved);
	used += reserved;
	return CUDA_OK;
}

static cuda_result free_whole(cuda_ptr p, enum kind kind)
{
	struct range *a = find(p, 0, kind);

	if (!a)
		return INVALID_VALUE;
	munmap(a->p, 2 * a->distance);
	close(a->fd);
	if (kind == ALLOCATED)
		used -= a->distance;
	a->p = NULL;
	return CUDA_OK;
}

cuda_result cuMemFree_v2(cuda_ptr p)
{
	BEGIN();
	NEED_CONTEXT();
	return free_whole(p, ALLOCATED);
}

static struct range *range_at(const void *p, size_t bytes)
{
	const char *at = p;

	for (int i = 0; i < ALLOCATIONS; i++) {
		struct range *a = &allocations[i];
		if (a->p && a->kind != RESERVED && at >= a->p && at <= a->p + a->bytes && bytes <= a->bytes - (size_t)(at - a->p))
			return a;
	}
	return NULL;
}

void *fake_cuda_bytes(const void *p, size_t bytes)
{
	const struct range *a = range_at(p, bytes);

	return a && !a->is_closed ? (char *)(uintptr_t)p + a->distance : NULL;
}

void *fake_cuda_target(const void *p, size_t bytes)
{
	const struct range *a = range_at(p, bytes);

	return a && a->is_readonly ? NULL : fake_cuda_bytes(p, bytes);
}

int fake_cuda_left(void)
{
	int n = 0;

	for (int i = 0; i < ALLOCATIONS; i++)
		n += (allocations[i].p != NULL) + (vmms[i].refs != 0);
	for (int i = 0; i < PINNED; i++)
		n += pinned[i].p != NULL;
	return n + fake_modules;
}

cuda_result cuMemGetAddressRange_v2(cuda_ptr *base, size_t *bytes, cuda_ptr p)
{
	BEGIN();
	NEED_CONTEXT();
	const struct range *a = range_at((void *)(uintptr_t)p, 1);
	if (!a)
		return INVALID_VALUE;
	*base = (cuda_ptr)(uintptr_t)a->p;
	*bytes = a->bytes;
	return CUDA_OK;
}

cuda_result cuPointerGetAttribute(void *out, unsigned what, cuda_ptr p)
{
	BEGIN();
	const struct range *a = range_at((void *)(uintptr_t)p, 1);
	if (!a)
		return INVALID_VALUE;
	if (what == FAKE_CUDA_ATTRIBUTE_DEVICE)
		*(int *)out = (int)fake_number("FAKE_CUDA_ORDINAL", 0);
	else if (what == FAKE_CUDA_ATTRIBUTE_IPC)
		*(int *)out = a->kind == ALLOCATED;
	else if (what == FAKE_CUDA_ATTRIBUTE_MAPPING_BYTES)
		*(size_t *)out = a->bytes;
	else if (what == FAKE_CUDA_ATTRIBUTE_MAPPING_BASE)
		*(cuda_ptr *)out = (cuda_ptr)(uintptr_t)a->p;
	else
		return INVALID_VALUE;
	return CUDA_OK;
}

/* ---- memory of other processes ---- */

struct ipc {
	char magic[8];
	int pid, fd;
	size_t bytes;
};

cuda_result cuIpcGetMemHandle(struct CUipcMemHandle_st *out, cuda_ptr p)
{
	struct ipc ipc = { .magic = "fakecuda", .pid = getpid() };

	BEGIN();
	NEED_CONTEXT();
	const struct range *a = range_at((void *)(uintptr_t)p, 1);
	if (!a || a->kind != ALLOCATED)
		return INVALID_VALUE;
	ipc.fd = a->fd;
	ipc.bytes = a->bytes;
	memset(out, 0, sizeof *out);
	memcpy(out, &ipc, sizeof ipc);
	return CUDA_OK;
}

cuda_result cuIpcOpenMemHandle_v2(cuda_ptr *out, struct CUipcMemHandle_st handle, unsigned flags)
{
	char path[64];
	struct ipc ipc;

	BEGIN();
	NEED_CONTEXT();
	memcpy(&ipc, &handle, sizeof ipc);
	if (flags != CUDA_IPC_LAZY_PEER_ACCESS || memcmp(ipc.magic, "fakecuda", 8) != 0)
		return INVALID_VALUE;
	if (ipc.pid == getpid())
		return INVALID_CONTEXT;
	snprintf(path, sizeof path, "/proc/%d/fd/%d", ipc.pid, ipc.fd);
	int fd = open(path, O_RDWR | O_CLOEXEC);
	return fd < 0 ? INVALID_HANDLE : map_whole(fd, ipc.bytes, IMPORTED, out);
}

cuda_result cuIpcCloseMemHandle(cuda_ptr p)
{
	BEGIN();
	NEED_CONTEXT();
	return free_whole(p, IMPORTED);
}

/* Takes fd. */
static cuda_result new_vmm(int fd, size_t bytes, bool is_shareable, bool is_own, cuda_allocation *out)
{
	for (unsigned i = 0; fd >= 0 && i < ALLOCATIONS; i++)
		if (!vmms[i].refs) {
			vmms[i] = (struct vmm){ fd, 1, bytes, is_shareable, is_own };
			used += is_own ? bytes : 0;
			*out = i + 1;
			return CUDA_OK;
		}
	return CUDA_OUT_OF_MEMORY;
}

static struct vmm *vmm_of(cuda_allocation a)
{
	return a >= 1 && a <= ALLOCATIONS && vmms[a - 1].refs ? &vmms[a - 1] : NULL;
}

static void unref_vmm(struct vmm *v)
{
	if (--v->refs)
		return;
	used -= v->is_own ? v->bytes : 0;
	close(v->fd);
}

static bool is_prop(const struct CUmemAllocationProp_st *how)
{
	return how->type == CUDA_ALLOCATION_PINNED && how->location.type == CUDA_LOCATION_DEVICE &&
	       (unsigned long)how->location.id < fake_number("FAKE_CUDA_DEVICES", 1) && (how->handle_types & ~CUDA_HANDLE_FD) == 0;
}

cuda_result cuMemGetAllocationGranularity(size_t *out, const struct CUmemAllocationProp_st *how, unsigned which)
{
	BEGIN();
	if (!is_prop(how) || which != CUDA_GRANULARITY_MINIMUM)
		return INVALID_VALUE;
	*out = GRANULE;
	return CUDA_OK;
}

cuda_result cuMemCreate(cuda_allocation *out, size_t bytes, const struct CUmemAllocationProp_st *how, unsigned long long flags)
{
	BEGIN();
	if (!is_prop(how) || !bytes || bytes % GRANULE || flags)
		return INVALID_VALUE;
	if (used + bytes > fake_number("FAKE_CUDA_MEMORY", 1UL << 30))
		return CUDA_OUT_OF_MEMORY;
	return new_vmm(new_file(bytes), bytes, how->handle_types == CUDA_HANDLE_FD, true, out);
}

cuda_result cuMemImportFromShareableHandle(cuda_allocation *out, void *handle, unsigned type)
{
	off_t bytes;

	BEGIN();
	int fd = fcntl((int)(intptr_t)handle, F_DUPFD_CLOEXEC, 0);
	bytes = fd < 0 ? -1 : lseek(fd, 0, SEEK_END);
	if (type != CUDA_HANDLE_FD || bytes <= 0)
		return INVALID_VALUE;
	return new_vmm(fd, (size_t)bytes, true, false, out);
}

cuda_result cuMemExportToShareableHandle(void *out, cuda_allocation a, unsigned type, unsigned long long flags)
{
	BEGIN();
	const struct vmm *v = vmm_of(a);
	if (!v || type != CUDA_HANDLE_FD || flags)
		return INVALID_VALUE;
	if (!v->is_shareable)
		return NOT_SUPPORTED;
	*(int *)out = fcntl(v->fd, F_DUPFD_CLOEXEC, 0);
	return CUDA_OK;
}

cuda_result cuMemRetainAllocationHandle(cuda_allocation *out, void *p)
{
	BEGIN();
	const struct range *a = range_at(p, 1);
	if (!a || a->kind != MAPPED)
		return INVALID_VALUE;
	vmms[a->allocation - 1].refs++;
	*out = a->allocation;
	return CUDA_OK;
}

cuda_result cuMemRelease(cuda_allocation a)
{
	BEGIN();
	struct vmm *v = vmm_of(a);
	if (!v)
		return INVALID_VALUE;
	unref_vmm(v);
	return CUDA_OK;
}

cuda_result cuMemAddressReserve(cuda_ptr *out, size_t bytes, size_t align, cuda_ptr at, unsigned long long flags)
{
	BEGIN();
	struct range *a = new_range();
	char *p = bytes && bytes % GRANULE == 0 && !align && !at && !flags ? new_addresses(bytes) : NULL;
	if (!a || !p)
		return INVALID_VALUE;
	*a = (struct range){ .p = p, .bytes = bytes, .distance = bytes, .fd = -1, .kind = RESERVED };
	*out = (cuda_ptr)(uintptr_t)p;
	return CUDA_OK;
}

cuda_result cuMemAddressFree(cuda_ptr p, size_t bytes)
{
	BEGIN();
	struct range *a = find(p, bytes, RESERVED);
	if (!a)
		return INVALID_VALUE;
	munmap(a->p, 2 * bytes);
	a->p = NULL;
	return CUDA_OK;
}

cuda_result cuMemMap(cuda_ptr p, size_t bytes, size_t offset, cuda_allocation allocation, unsigned long long flags)
{
	char *at = (char *)(uintptr_t)p;

	BEGIN();
	struct vmm *v = vmm_of(allocation);
	struct range *a = new_range();
	if (!a || !v || !bytes || bytes > v->bytes || bytes % GRANULE || offset || flags)
		return INVALID_VALUE;
	for (int i = 0; i < ALLOCATIONS; i++) {
		const struct range *r = &allocations[i];
		if (!r->p || r->kind != RESERVED || at < r->p || at + bytes > r->p + r->bytes)
			continue;
		if (!put_file(at + r->bytes, bytes, v->fd))
			return CUDA_OUT_OF_MEMORY;
		*a = (struct range){ .p = at, .bytes = bytes, .distance = r->bytes, .fd = -1, .kind = MAPPED,
				     .allocation = (unsigned)allocation, .is_closed = true };
		v->refs++;
		return CUDA_OK;
	}
	return INVALID_VALUE;
}

cuda_result cuMemUnmap(cuda_ptr p, size_t bytes)
{
	BEGIN();
	struct range *a = find(p, bytes, MAPPED);
	if (!a)
		return INVALID_VALUE;
	mmap(a->p + a->distance, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
	unref_vmm(&vmms[a->allocation - 1]);
	a->p = NULL;
	return CUDA_OK;
}

cuda_result cuMemSetAccess(cuda_ptr p, size_t bytes, const struct CUmemAccessDesc_st *who, size_t count)
{
	BEGIN();
	struct range *a = find(p, bytes, MAPPED);
	if (!a || count != 1 || who->location.type != CUDA_LOCATION_DEVICE ||
	    (who->flags != CUDA_ACCESS_READWRITE && who->flags != FAKE_CUDA_ACCESS_READ))
		return INVALID_VALUE;
	a->is_closed = false;
	a->is_readonly = who->flags == FAKE_CUDA_ACCESS_READ;
	return mprotect(a->p + a->distance, bytes, a->is_readonly ? PROT_READ : PROT_READ | PROT_WRITE) == 0 ? CUDA_OK : INVALID_VALUE;
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
	*found = (struct range){ .p = p, .bytes = bytes };
	return CUDA_OK;
}

static struct range *pinned_at(const char *p)
{
	for (int i = 0; i < PINNED; i++)
		if (pinned[i].p && p >= pinned[i].p && p < pinned[i].p + pinned[i].bytes)
			return &pinned[i];
	return NULL;
}

cuda_result cuMemHostGetDevicePointer_v2(cuda_ptr *out, void *p, unsigned flags)
{
	BEGIN();
	NEED_CONTEXT();
	*out = (cuda_ptr)(uintptr_t)p;
	return pinned_at(p) && !flags ? CUDA_OK : INVALID_VALUE;
}

unsigned char *fake_cuda_seen(uint64_t p, uint64_t bytes)
{
	char *at = (char *)(uintptr_t)p;
	const struct range *r = pinned_at(at);

	if (!r)
		return fake_cuda_bytes(at, bytes);
	return bytes <= r->bytes - (size_t)(at - r->p) ? (unsigned char *)at : NULL;
}

cuda_result cuMemHostUnregister(void *p)
{
	BEGIN();
	NEED_CONTEXT();
	struct range *r = pinned_at(p);
	if (!r || r->p != p)
		return NOT_REGISTERED;
	r->p = NULL;
	return CUDA_OK;
}
