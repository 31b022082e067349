/* cuda.c: a GPU through the CUDA driver's library, opened at run time. Why the driver API and not the runtime: the runtime is a
 * library that hosts without CUDA lack and that must match the toolkit; libcuda.so.1 comes with the driver, or it does not. */
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "device/cuda_impl.h"

struct cuda_driver cuda;

/* ---- errors ---- */

static enum err failed(enum err code, cuda_result r, const char *call)
{
	const char *name = NULL, *text = NULL;

	if (!cuda.error_name || cuda.error_name(r, &name) != CUDA_OK || !name)
		name = "unknown error";
	if (!cuda.error_string || cuda.error_string(r, &text) != CUDA_OK || !text)
		text = "the driver has no text for it";
	err_record(code, 0, ERR_PLACE, "%s: %s (%s, error %u)", call, text, name, r);
	return code;
}

FALLIBLE enum err cuda_check(cuda_result r, const char *call)
{
	if (r == CUDA_OK)
		return OK;
	return failed(r == CUDA_OUT_OF_MEMORY ? ERR_NO_MEMORY : ERR_DEVICE_FAILED, r, call);
}

/* ---- the library ---- */

static FALLIBLE enum err load(void)
{
	/* Never closed: the driver's threads and handlers would outlive their code. */
	void *lib = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
	const char *why = lib ? NULL : dlerror();

	if (!lib && why && strstr(why, "No such file"))
		return ERR(BACKEND_UNAVAILABLE, "libcuda.so.1 was not found: no NVIDIA driver is installed here");
	if (!lib)
		return ERR(BACKEND_UNAVAILABLE, "libcuda.so.1 cannot be loaded: %.300s", why ? why : "no reason given");
#define X(member, symbol, params)                                                                                     \
	if (!(*(void **)&cuda.member = dlsym(lib, #symbol)))                                                          \
		return ERR(BACKEND_UNAVAILABLE, "libcuda.so.1 lacks " #symbol ": the NVIDIA driver is too old");
	CUDA_FUNCTIONS(X)
#undef X
	return OK;
}

static FALLIBLE enum err open_driver(void)
{
	int count = 0, version = 0;

	TRY(load());
	cuda_result r = cuda.init(0);
	if (r != CUDA_OK)
		return failed(ERR_BACKEND_UNAVAILABLE, r, "cuInit");
	r = cuda.driver_version(&version);
	if (r != CUDA_OK)
		return failed(ERR_BACKEND_UNAVAILABLE, r, "cuDriverGetVersion");
	if (version < CUDA_OLDEST)
		return ERR(BACKEND_UNAVAILABLE, "the NVIDIA driver is too old: it is of CUDA %d.%d, and 11.4 or newer is needed",
			   version / 1000, version / 10 % 100);
	r = cuda.device_count(&count);
	if (r != CUDA_OK)
		return failed(ERR_BACKEND_UNAVAILABLE, r, "cuDeviceGetCount");
	if (count <= 0)
		return ERR(BACKEND_UNAVAILABLE, "the NVIDIA driver shows no GPU to this process");
	cuda.count = (uint32_t)count;
	return OK;
}

FALLIBLE enum err device_cuda_open(void)
{
	if (!cuda.tried) {
		cuda.tried = true;
		cuda.state = open_driver();
		if (cuda.state)
			cuda.why = *err_last();
	} else if (cuda.state) {
		err_restore(&cuda.why);
	}
	return cuda.state;
}

uint32_t device_cuda_count(void)
{
	return cuda.count;
}

FALLIBLE enum err device_cuda_info(uint32_t index, struct device_info *out)
{
	unsigned char id[CUDA_UUID_BYTES] = { 0 };
	cuda_device d;
	size_t bytes = 0;

	TRY(device_cuda_open());
	if (index >= cuda.count)
		return ERR(VALIDATION_FAILED, "there is no GPU %u, only %u", index, cuda.count);
	memset(out, 0, sizeof *out);
	TRY(cuda_check(cuda.device_get(&d, (int)index), "cuDeviceGet"));
	TRY(cuda_check(cuda.device_name(out->name, sizeof out->name - 1, d), "cuDeviceGetName"));
	TRY(cuda_check(cuda.device_uuid((struct CUuuid_st *)(void *)id, d), "cuDeviceGetUuid"));
	TRY(cuda_check(cuda.device_memory(&bytes, d), "cuDeviceTotalMem"));
	out->memory_bytes = bytes;
	size_t n = (size_t)snprintf(out->uuid, sizeof out->uuid, "GPU");
	for (uint32_t i = 0; i < CUDA_UUID_BYTES; i++)
		n += (size_t)snprintf(out->uuid + n, sizeof out->uuid - n, "%s%02x",
				      i == 0 || i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "", id[i]);
	return OK;
}

/* ---- a device ---- */

static struct cuda_dev *of(struct device *d)
{
	return (struct cuda_dev *)d;
}

static enum err cuda_enter(struct device *d)
{
	return cuda_check(cuda.ctx_set(of(d)->ctx), "cuCtxSetCurrent");
}

static void *cuda_stream(struct device *d)
{
	return of(d)->stream;
}

/* A failure to close follows from an earlier one, which was reported. */
static void cuda_close(struct device *d)
{
	struct cuda_dev *c = of(d);

	if (c->ctx && cuda.ctx_set(c->ctx) == CUDA_OK) {
		for (uint32_t i = 0; i < DEVICE_MARKS; i++)
			if (c->marks[i])
				(void)cuda.event_destroy(c->marks[i]);
		if (c->stream)
			(void)cuda.stream_destroy(c->stream);
		cuda_gather_end(c);
	}
	if (c->ctx)
		(void)cuda.ctx_release(c->ordinal);
	mem_free(c);
}

static enum err cuda_alloc(struct device *d, uint64_t bytes, void **out)
{
	char call[64];
	cuda_ptr p = 0;

	TRY(cuda_enter(d));
	snprintf(call, sizeof call, "cuMemAlloc of %ju bytes", (uintmax_t)bytes);
	TRY(cuda_check(cuda.mem_alloc(&p, bytes), call));
	*out = (void *)(uintptr_t)p;
	return OK;
}

static void cuda_free(struct device *d, void *p)
{
	if (cuda_enter(d) == OK)
		(void)cuda.mem_free((cuda_ptr)(uintptr_t)p);
}

static enum err cuda_copy(struct device *d, void *to, const void *from, uint64_t bytes, enum device_way way)
{
	cuda_ptr to_device = (cuda_ptr)(uintptr_t)to, from_device = (cuda_ptr)(uintptr_t)from;
	struct CUstream_st *s = of(d)->stream;

	TRY(cuda_enter(d));
	if (way == DEVICE_PUT)
		return cuda_check(cuda.copy_put(to_device, from, bytes, s), "cuMemcpyHtoDAsync");
	if (way == DEVICE_GET)
		return cuda_check(cuda.copy_get(to, from_device, bytes, s), "cuMemcpyDtoHAsync");
	return cuda_check(cuda.copy_move(to_device, from_device, bytes, s), "cuMemcpyDtoDAsync");
}

static FALLIBLE enum err is_done(cuda_result r, const char *call, bool *done_out)
{
	*done_out = r == CUDA_OK;
	return r == CUDA_NOT_READY ? OK : cuda_check(r, call);
}

static enum err cuda_done(struct device *d, bool *done_out)
{
	TRY(cuda_enter(d));
	return is_done(cuda.stream_query(of(d)->stream), "cuStreamQuery", done_out);
}

static enum err cuda_mark(struct device *d, uint32_t mark)
{
	struct cuda_dev *c = of(d);

	TRY(cuda_enter(d));
	if (!c->marks[mark])
		TRY(cuda_check(cuda.event_create(&c->marks[mark], CUDA_EVENT_DISABLE_TIMING), "cuEventCreate"));
	TRY(cuda_check(cuda.event_record(c->marks[mark], c->stream), "cuEventRecord"));
	c->marked[mark] = true;
	return OK;
}

static enum err cuda_mark_done(struct device *d, uint32_t mark, bool *done_out)
{
	*done_out = true;
	if (!of(d)->marked[mark])
		return OK;
	TRY(cuda_enter(d));
	return is_done(cuda.event_query(of(d)->marks[mark]), "cuEventQuery", done_out);
}

static enum err cuda_pin(struct device *d, void *p, uint64_t bytes)
{
	char call[64];

	TRY(cuda_enter(d));
	snprintf(call, sizeof call, "cuMemHostRegister of %ju bytes", (uintmax_t)bytes);
	return cuda_check(cuda.host_register(p, bytes, CUDA_HOST_PORTABLE | CUDA_HOST_DEVICEMAP), call);
}

static enum err cuda_unpin(struct device *d, void *p)
{
	TRY(cuda_enter(d));
	return cuda_check(cuda.host_unregister(p), "cuMemHostUnregister");
}

static FALLIBLE enum err open_context(struct cuda_dev *c, uint32_t index)
{
	TRY(cuda_check(cuda.device_get(&c->ordinal, (int)index), "cuDeviceGet"));
	/* The primary context is the one NCCL uses as well. */
	TRY(cuda_check(cuda.ctx_retain(&c->ctx, c->ordinal), "cuDevicePrimaryCtxRetain"));
	TRY(cuda_enter(&c->base));
	return cuda_check(cuda.stream_create(&c->stream, CUDA_STREAM_NON_BLOCKING), "cuStreamCreate");
}

FALLIBLE enum err device_cuda_new(uint32_t index, struct device **out)
{
	static const struct device_ops ops = {
		.close = cuda_close, .alloc = cuda_alloc, .free = cuda_free, .copy = cuda_copy, .done = cuda_done,
		.mark = cuda_mark, .mark_done = cuda_mark_done, .pin = cuda_pin, .unpin = cuda_unpin, .enter = cuda_enter,
		.host_pointer = cuda_host_pointer, .gather = cuda_gather, .cast = cuda_cast, .import = cuda_import,
		.import_end = cuda_import_end, .create = cuda_create, .export = cuda_export, .stream = cuda_stream,
	};

	TRY(device_cuda_open());
	if (index >= cuda.count)
		return ERR(VALIDATION_FAILED, "there is no GPU %u, only %u", index, cuda.count);
	struct cuda_dev *c = mem_zalloc(1, sizeof *c);
	NEED(c, "no memory for a device");
	c->base.ops = &ops;
	enum err e = open_context(c, index);
	if (e) {
		CLEANUP(err_restore) struct err_info info = *err_last();
		cuda_close(&c->base);
		return e;
	}
	*out = &c->base;
	return OK;
}
