/* device.h: where bytes live besides host memory, and how they get there and back: one GPU, or the CPU with the same calls.
 *
 *     device_cuda_open()                   OK, or why there is no GPU: "libcuda.so.1 was not found"
 *     device_open(0, &d)                   a context and a stream on GPU 0; DEVICE_CPU: host memory
 *     device_alloc(d, n, &p)
 *     device_copy(d, p, segment, n, DEVICE_PUT)      begins; source and target stay as they are until …
 *     device_wait(d, 5000)                 … all copies begun so far are done
 *     device_free(d, p), device_close(d)
 *
 * libcuda.so.1 is opened at run time, so one binary serves hosts with and without GPUs; nothing is loaded before device_cuda_open.
 * It opens files of /dev and may start threads: call it before sandbox_enter, or never. One thread per device; the calls about the
 * library as a whole (open, count, info) from one thread.
 *
 * Errors: ERR_BACKEND_UNAVAILABLE when there is no driver or GPU, ERR_NO_MEMORY when the device's memory is used up, ERR_TIMED_OUT,
 * ERR_DEVICE_FAILED for the rest; the text names the driver's call, its error and what the driver says about it. After
 * ERR_DEVICE_FAILED the process's context is usually lost: the gang is renewed. */
#pragma once
#include "tensor/dtype.h"

enum { DEVICE_CPU = -1, DEVICE_MARKS = 8, DEVICE_NAME_MAX = 128, DEVICE_UUID_MAX = 48, DEVICE_IPC_BYTES = 64 };

enum device_way { DEVICE_PUT, DEVICE_GET, DEVICE_MOVE }; /* host to device, device to host, within the device */

struct device;

struct device_info {
	char name[DEVICE_NAME_MAX];    /* "NVIDIA H100 80GB HBM3" */
	char uuid[DEVICE_UUID_MAX];    /* "GPU-…" as nvidia-smi prints it */
	uint64_t memory_bytes;
};

/* Opens the driver once; later calls give the first answer. */
FALLIBLE enum err device_cuda_open(void);
uint32_t device_cuda_count(void);                      /* 0 unless device_cuda_open was OK */
FALLIBLE enum err device_cuda_info(uint32_t index, struct device_info *out);

/* The index of the GPU with this uuid, as nvidia-smi prints it; ERR_NOT_FOUND. */
FALLIBLE enum err device_cuda_find(const char *uuid, uint32_t *index_out);

FALLIBLE enum err device_open(int32_t index, struct device **out);
void device_close(struct device *d);                   /* accepts NULL; waits for nothing; free what was allocated before */
bool device_is_cpu(const struct device *d);
int32_t device_index(const struct device *d);          /* the index that device_open() was given */

FALLIBLE enum err device_alloc(struct device *d, uint64_t bytes, void **out);   /* contents undefined; 0 bytes: a valid pointer */
void device_free(struct device *d, void *p);           /* accepts NULL */

/* In order on the device's stream. Host memory that is not pinned is allowed, and slower. */
FALLIBLE enum err device_copy(struct device *d, void *to, const void *from, uint64_t bytes, enum device_way way);
FALLIBLE enum err device_wait(struct device *d, uint32_t deadline_ms);          /* all begun before; ERR_TIMED_OUT */
FALLIBLE enum err device_done(struct device *d, bool *done_out);                /* the same without waiting */
/* Marks what has been begun so far; a ring of buffers uses a mark for each. A mark never set is done. */
FALLIBLE enum err device_mark(struct device *d, uint32_t mark);
FALLIBLE enum err device_mark_done(struct device *d, uint32_t mark, bool *done_out);
FALLIBLE enum err device_mark_wait(struct device *d, uint32_t mark, uint32_t deadline_ms);   /* ERR_TIMED_OUT */

/* Pins host memory, page by page where it lies (a mapped segment), so that copies go by DMA. CPU: ERR_BACKEND_UNAVAILABLE, because
 * pinning is a matter between host memory and a GPU's driver. */
FALLIBLE enum err device_pin(struct device *d, void *p, uint64_t bytes);
FALLIBLE enum err device_unpin(struct device *d, void *p);

/* ---- many small pieces ---- */

enum { DEVICE_GATHER_MAX = 4096 };
struct device_piece {
	void *to;                      /* addresses as the GPU sees them: of its memory, or by device_host_pointer */
	const void *from;
	uint64_t bytes;
};
/* Fills out with the address at which the GPU sees page-locked host memory. */
FALLIBLE enum err device_host_pointer(struct device *d, void *p, void **out);
/* Copies up to DEVICE_GATHER_MAX pieces, which are read here, by one launch of a kernel. The last gather with this mark must be done:
 * set the mark behind it, and wait for it. ERR_BACKEND_UNAVAILABLE: no kernel runs here, copy one by one; nothing was begun. */
FALLIBLE enum err device_gather(struct device *d, const struct device_piece *pieces, uint32_t n, uint32_t mark);

/* ---- casts on the way ---- */

/* The narrower side of a cast crosses the bus, so casts are done on the device where that side is the host's: a load of bfloat16 into
 * float32 moves half of the bytes. Why no statistics and digests: CONTRIBUTING.md. */
struct device_cast {
	void *to;                      /* addresses as the GPU sees them, multiples of the elements' sizes */
	const void *from;
	uint64_t count;                /* of elements */
	enum dtype to_dtype, from_dtype;
};
/* Whether a GPU casts this pair: two different floating dtypes of cast.h, but for packed ones. */
bool device_casts(enum dtype to, enum dtype from);
/* As device_gather, with its limits and marks: casts as cast_run does, bit for bit. */
FALLIBLE enum err device_cast(struct device *d, const struct device_cast *casts, uint32_t n, uint32_t mark);

/* ---- memory of another process ---- */

struct device_handle {
	int fd;                        /* of a VMM allocation (cuMemExportToShareableHandle): stays the caller's; -1: ipc counts */
	unsigned char ipc[DEVICE_IPC_BYTES];   /* of cuIpcGetMemHandle */
	uint64_t bytes;                /* that will be used, from the allocation's beginning; of a VMM allocation all */
};
struct device_import {
	void *p;                       /* for device_copy */
	uint64_t bytes;
	unsigned long long allocation; /* cuda_import.c's, as the rest */
	bool is_vmm, has_allocation, is_mapped;
};
/* ERR_VALIDATION_FAILED if a legacy handle's allocation is smaller; ERR_DEVICE_FAILED, ERR_NO_MEMORY as above: then nothing stays open, or
 * the error is ERR_DEVICE_FAILED. */
FALLIBLE enum err device_import(struct device *d, const struct device_handle *h, struct device_import *out);
/* After all copies are done. An error: something stays open until the process ends. */
FALLIBLE enum err device_import_end(struct device *d, struct device_import *i);
/* New VMM memory, mapped here, which device_import_end lets go; out->bytes: `bytes` rounded up to what the driver allocates. Descriptors
 * made by device_export (the caller's to close) hold the memory on their own, and other processes import them. ERR_BACKEND_UNAVAILABLE: the
 * GPU or its driver shares no memory by descriptors; errors leave nothing open, as device_import's do. */
FALLIBLE enum err device_create(struct device *d, uint64_t bytes, struct device_import *out);
FALLIBLE enum err device_export(struct device *d, const struct device_import *i, int *fd_out);

/* For nccl: makes the device's context this thread's, and hands out its CUstream. NULL for the CPU. */
FALLIBLE enum err device_enter(struct device *d);
void *device_stream(struct device *d);
