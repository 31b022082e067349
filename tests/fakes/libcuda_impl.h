/* libcuda_impl.h: what the files of the fake libcuda share. */
#pragma once
#include <stdbool.h>
#include <stdint.h>

#include "fakes/fake_cuda.h"

enum { INVALID_VALUE = 1, NOT_INITIALIZED = 3, INVALID_DEVICE = 101, INVALID_IMAGE = 200, INVALID_CONTEXT = 201, NO_BINARY = 209,
       INVALID_PTX = 218, INVALID_HANDLE = 400, NOT_FOUND = 500, ILLEGAL_ADDRESS = 700, ALREADY_REGISTERED = 712, NOT_REGISTERED = 713,
       NOT_SUPPORTED = 801 };

extern cuda_result fake_sticky;        /* every call's answer, once a device is lost */
extern bool fake_initialized;
extern int fake_modules;

/* CUDA_OK, or the error that the environment asks for. */
cuda_result fake_injected(const char *symbol);
bool fake_has_context(void);
/* A number of the environment. */
unsigned long fake_number(const char *name, unsigned long otherwise);
/* The memory behind it, if it may be written to. */
void *fake_cuda_target(const void *p, size_t bytes);
/* Memory that a kernel's access reaches: of the device, or page-locked memory of the host; NULL: none. */
unsigned char *fake_cuda_seen(uint64_t p, uint64_t bytes);

/* Every call but cuInit and those about errors begins so. */
#define BEGIN()                                              \
	do {                                                 \
		cuda_result r_ = fake_injected(__func__);    \
		if (!fake_initialized)                       \
			return NOT_INITIALIZED;              \
		if (r_ != CUDA_OK)                           \
			return r_;                           \
	} while (0)
#define NEED_CONTEXT()                                       \
	do {                                                 \
		if (!fake_has_context())                     \
			return INVALID_CONTEXT;              \
	} while (0)

#define X(member, symbol, params) cuda_result symbol params;
CUDA_FUNCTIONS(X)
FAKE_CUDA_EXPORTS(X)
#undef X
