/* fake_cuda.h: what the fake libnccl asks of the fake libcuda: work on a stream, and the bytes behind a device pointer. */
#pragma once
#include "device/cuda_abi.h"

enum { FAKE_DONE, FAKE_LATER };

/* Calls of a trainer that hands memory over, and of an engine that maps a device image; none of dcpd's programs makes them. In the form of
 * CUDA_FUNCTIONS. */
#define FAKE_CUDA_EXPORTS(X)                                                                                     \
	X(ipc_get, cuIpcGetMemHandle, (struct CUipcMemHandle_st *out, cuda_ptr p))                               \
	X(attribute, cuPointerGetAttribute, (void *out, unsigned what, cuda_ptr p))                                   \
	X(vmm_retain, cuMemRetainAllocationHandle, (cuda_allocation *out, void *p))                              \
	X(copy_get_now, cuMemcpyDtoH_v2, (void *to, cuda_ptr from, size_t bytes))                                \
	X(ctx_push, cuCtxPushCurrent_v2, (struct CUctx_st *ctx))                                                 \
	X(ctx_pop, cuCtxPopCurrent_v2, (struct CUctx_st **out))                                                  \
	X(ctx_wait, cuCtxSynchronize, (void))

enum {
	FAKE_CUDA_ACCESS_READ = 1,
	FAKE_CUDA_ATTRIBUTE_DEVICE = 9, FAKE_CUDA_ATTRIBUTE_IPC = 10,
	FAKE_CUDA_ATTRIBUTE_MAPPING_BYTES = 18, FAKE_CUDA_ATTRIBUTE_MAPPING_BASE = 19,
};

/* Adds work to a stream. step returns FAKE_DONE, or FAKE_LATER to be called again. */
void fake_cuda_push(struct CUstream_st *s, int (*step)(void *arg), void *arg);
/* The memory behind [p, p + bytes) of the fake device; NULL if that is no device memory. */
void *fake_cuda_bytes(const void *p, size_t bytes);
/* How many allocations, imports, reservations, modules and page-locked ranges this process has. */
int fake_cuda_left(void);
/* The architecture of the code that the latest module was loaded from: of machine code, or, negative, of PTX. */
int fake_cuda_code(void);
