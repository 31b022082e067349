/* cuda_gather.c: many small pieces by one launch of a kernel. A copy by the driver costs microseconds whatever its size, so that 10,000
 * small tensors would take as long as some hundred megabytes.
 *
 * The kernel writes page-locked host memory, or reads it, over the bus itself: no room on the GPU is taken for the bytes, and none of them
 * is copied twice. gather.fatbin has the kernel as machine code for several architectures, so that the driver compiles nothing at the first
 * copy, and as PTX, which the driver compiles for the others. Where it does not load, copies go one by one. */
#include <string.h>

#include "base/mem.h"
#include "device/cuda_impl.h"
#include "device/gather.h"

__asm__(".section .rodata\n"
	".balign 16\n"
	"gather_code: .incbin \"worker/device/gather.fatbin\"\n"
	"gather_ptx: .incbin \"worker/device/gather.ptx\"\n"
	".byte 0\n"
	".previous\n");
extern const char gather_code[], gather_ptx[];

enum { ROWS_BYTES = DEVICE_GATHER_MAX * sizeof(struct gather_row), BLOCKS_MAX = 4096 };

enum err cuda_host_pointer(struct device *d, void *p, void **out)
{
	cuda_ptr there = 0;

	TRY(device_enter(d));
	TRY(cuda_check(cuda.host_pointer(&there, p, 0), "cuMemHostGetDevicePointer"));
	*out = (void *)(uintptr_t)there;
	return OK;
}

static FALLIBLE enum err prepare(struct cuda_gather *g)
{
	cuda_result r = cuda.module_load(&g->module, gather_code);

	/* A driver older than the toolkit that made the machine code may not know its form. */
	if (r != CUDA_OK)
		r = cuda.module_load(&g->module, gather_ptx);
	TRY(cuda_check(r, "cuModuleLoadData"));
	TRY(cuda_check(cuda.module_function(&g->kernel, g->module, "dcpd_gather"), "cuModuleGetFunction"));
	g->rows = mem_alloc((uint64_t)DEVICE_MARKS * ROWS_BYTES);
	NEED(g->rows, "no memory for the pieces of a kernel");
	return cuda_check(cuda.mem_alloc(&g->rows_there, (uint64_t)DEVICE_MARKS * ROWS_BYTES), "cuMemAlloc");
}

/* The context is current. A failure follows from an earlier one, or is of memory that ends with the context. */
void cuda_gather_end(struct cuda_dev *c)
{
	struct cuda_gather *g = &c->gather;

	if (g->rows_there)
		(void)cuda.mem_free(g->rows_there);
	if (g->module)
		(void)cuda.module_unload(g->module);
	mem_free(g->rows);
	g->rows_there = 0;
	g->module = NULL;
	g->rows = NULL;
}

static FALLIBLE enum err ready(struct cuda_dev *c)
{
	struct cuda_gather *g = &c->gather;

	if (!g->tried) {
		g->tried = true;
		if (prepare(g) != OK) {
			g->why = *err_last();
			g->why.code = g->state = ERR_BACKEND_UNAVAILABLE;
			cuda_gather_end(c);
		}
	}
	if (g->state)
		err_restore(&g->why);
	return g->state;
}

enum err cuda_gather(struct device *d, const struct device_piece *pieces, uint32_t n, uint32_t mark)
{
	struct cuda_dev *c = (struct cuda_dev *)d;
	struct cuda_gather *g = &c->gather;

	TRY(device_enter(d));
	TRY(ready(c));
	struct gather_row *rows = g->rows + (uint64_t)mark * DEVICE_GATHER_MAX;
	cuda_ptr there = g->rows_there + (uint64_t)mark * ROWS_BYTES;
	for (uint32_t i = 0; i < n; i++)
		rows[i] = (struct gather_row){ (uintptr_t)pieces[i].to, (uintptr_t)pieces[i].from, pieces[i].bytes };
	TRY(cuda_check(cuda.copy_put(there, rows, n * sizeof *rows, c->stream), "cuMemcpyHtoDAsync"));
	void *params[] = { &there, &n };
	return cuda_check(cuda.launch(g->kernel, n < BLOCKS_MAX ? n : BLOCKS_MAX, 1, 1, GATHER_THREADS, 1, 1, 0, c->stream, params, NULL),
			  "cuLaunchKernel");
}
