/* cuda_gather.c: many small pieces, or casts, by one launch of a kernel. A copy by the driver costs microseconds whatever its size, so that
 * 10,000 small tensors would take as long as some hundred megabytes.
 *
 * The kernel writes page-locked host memory, or reads it, over the bus itself: no room on the GPU is taken for the bytes, and none of them
 * is copied twice. gather.fatbin has the kernels as machine code for several architectures, so that the driver compiles nothing at the
 * first launch, and as PTX, which the driver compiles for the others. Where it does not load, copies go one by one, and nothing is cast. */
#include <string.h>

#include "base/mem.h"
#include "device/cuda_impl.h"
#include "device/gather_cast.h"

__asm__(".section .rodata\n"
	".balign 16\n"
	"gather_code: .incbin \"worker/device/gather.fatbin\"\n"
	"gather_ptx: .incbin \"worker/device/gather.ptx\"\n"
	".byte 0\n"
	".previous\n");
extern const char gather_code[], gather_ptx[];

_Static_assert(sizeof(struct gather_row) <= sizeof(struct gather_cast_row), "rows of both kernels lie in one place");

enum { ROWS_BYTES = DEVICE_GATHER_MAX * sizeof(struct gather_cast_row), BLOCKS_MAX = 4096 };

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
	TRY(cuda_check(cuda.module_function(&g->copy, g->module, "dcpd_gather"), "cuModuleGetFunction"));
	TRY(cuda_check(cuda.module_function(&g->cast, g->module, "dcpd_cast"), "cuModuleGetFunction"));
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

/* Launches a kernel on n rows of so many bytes, which are those of this mark. */
static FALLIBLE enum err launch(struct cuda_dev *c, struct CUfunc_st *kernel, uint32_t n, uint64_t row_bytes, uint32_t mark)
{
	cuda_ptr there = c->gather.rows_there + (uint64_t)mark * ROWS_BYTES;
	void *params[] = { &there, &n };

	TRY(cuda_check(cuda.copy_put(there, c->gather.rows + (uint64_t)mark * ROWS_BYTES, n * row_bytes, c->stream), "cuMemcpyHtoDAsync"));
	return cuda_check(cuda.launch(kernel, n < BLOCKS_MAX ? n : BLOCKS_MAX, 1, 1, GATHER_THREADS, 1, 1, 0, c->stream, params, NULL),
			  "cuLaunchKernel");
}

enum err cuda_gather(struct device *d, const struct device_piece *pieces, uint32_t n, uint32_t mark)
{
	struct cuda_dev *c = (struct cuda_dev *)d;

	TRY(device_enter(d));
	TRY(ready(c));
	struct gather_row *rows = (void *)(c->gather.rows + (uint64_t)mark * ROWS_BYTES);
	for (uint32_t i = 0; i < n; i++)
		rows[i] = (struct gather_row){ (uintptr_t)pieces[i].to, (uintptr_t)pieces[i].from, pieces[i].bytes };
	return launch(c, c->gather.copy, n, sizeof *rows, mark);
}

/* GATHER_KINDS: none. */
static uint32_t kind_of(enum dtype d)
{
	static const enum dtype kinds[GATHER_KINDS] = {
		[GATHER_F64] = DT_FLOAT64, [GATHER_F32] = DT_FLOAT32, [GATHER_F16] = DT_FLOAT16, [GATHER_BF16] = DT_BFLOAT16,
		[GATHER_E4M3FN] = DT_FLOAT8_E4M3FN, [GATHER_E5M2] = DT_FLOAT8_E5M2, [GATHER_E4M3FNUZ] = DT_FLOAT8_E4M3FNUZ,
		[GATHER_E5M2FNUZ] = DT_FLOAT8_E5M2FNUZ, [GATHER_E8M0FNU] = DT_FLOAT8_E8M0FNU,
	};
	uint32_t k = 0;

	while (k < GATHER_KINDS && kinds[k] != d)
		k++;
	return k;
}

bool device_casts(enum dtype to, enum dtype from)
{
	return to != from && kind_of(to) < GATHER_KINDS && kind_of(from) < GATHER_KINDS;
}

enum err cuda_cast(struct device *d, const struct device_cast *casts, uint32_t n, uint32_t mark)
{
	struct cuda_dev *c = (struct cuda_dev *)d;

	TRY(device_enter(d));
	TRY(ready(c));
	struct gather_cast_row *rows = (void *)(c->gather.rows + (uint64_t)mark * ROWS_BYTES);
	for (uint32_t i = 0; i < n; i++)
		rows[i] = (struct gather_cast_row){ (uintptr_t)casts[i].to, (uintptr_t)casts[i].from, casts[i].count,
						    kind_of(casts[i].to_dtype), kind_of(casts[i].from_dtype) };
	return launch(c, c->gather.cast, n, sizeof *rows, mark);
}
