/* fake_cuda.h: what the fake libnccl asks of the fake libcuda: work on a stream, and the bytes behind a device pointer. */
#pragma once
#include "device/cuda_abi.h"

enum { FAKE_DONE, FAKE_LATER };

/* Adds work to a stream. step returns FAKE_DONE, or FAKE_LATER to be called again. */
void fake_cuda_push(struct CUstream_st *s, int (*step)(void *arg), void *arg);
/* The memory behind [p, p + bytes) of the fake device; NULL if that is no device memory. */
void *fake_cuda_bytes(const void *p, size_t bytes);
