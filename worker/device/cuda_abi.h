/* cuda_abi.h: the part of the CUDA driver's binary interface that we call, in declarations of our own, so that building needs no
 * toolkit. Where a toolkit is, tests/abi/cuda_abi.c compares each line of this with its cuda.h.
 *
 * The driver keeps these symbols and forms for ever: a changed function gets a new one (_v2). */
#pragma once
#include <stddef.h>

typedef unsigned cuda_result;               /* enum CUresult */
typedef int cuda_device;
typedef unsigned long long cuda_ptr;
struct CUctx_st;
struct CUstream_st;
struct CUevent_st;
struct CUuuid_st;                           /* 16 bytes */
struct CUmod_st;
struct CUfunc_st;
typedef unsigned long long cuda_allocation; /* CUmemGenericAllocationHandle */

#ifndef CUDA_VERSION                        /* the toolkit's cuda.h has these of its own */
struct CUipcMemHandle_st {
	char reserved[64];
};
struct CUmemLocation_st {
	int type, id;
};
struct CUmemAccessDesc_st {
	struct CUmemLocation_st location;
	int flags;
};
struct CUmemAllocationProp_st {
	int type, handle_types;
	struct CUmemLocation_st location;
	void *win32;
	unsigned char flags[8];
};
#endif

enum {
	CUDA_OLDEST = 11040,                /* the first with all of these functions */
	CUDA_OK = 0, CUDA_OUT_OF_MEMORY = 2, CUDA_NO_DEVICE = 100, CUDA_NOT_READY = 600,
	CUDA_UUID_BYTES = 16, CUDA_STREAM_NON_BLOCKING = 1, CUDA_EVENT_DISABLE_TIMING = 2, CUDA_HOST_PORTABLE = 1, CUDA_HOST_DEVICEMAP = 2,
	CUDA_IPC_HANDLE_BYTES = 64, CUDA_IPC_LAZY_PEER_ACCESS = 1, CUDA_HANDLE_FD = 1, CUDA_LOCATION_DEVICE = 1, CUDA_ACCESS_READWRITE = 3,
	CUDA_PROP_BYTES = 32, CUDA_PROP_HANDLE_TYPES = 4, CUDA_PROP_LOCATION = 8, CUDA_ALLOCATION_PINNED = 1, CUDA_GRANULARITY_MINIMUM = 0,
	CUDA_ATTRIBUTE_VMM = 102, CUDA_ATTRIBUTE_HANDLE_FD = 103,
};

/* X(member, symbol, parameters) */
#define CUDA_FUNCTIONS(X)                                                                                        \
	X(init, cuInit, (unsigned flags))                                                                        \
	X(error_name, cuGetErrorName, (cuda_result r, const char **out))                                         \
	X(error_string, cuGetErrorString, (cuda_result r, const char **out))                                     \
	X(driver_version, cuDriverGetVersion, (int *out))                                                        \
	X(device_count, cuDeviceGetCount, (int *out))                                                            \
	X(device_get, cuDeviceGet, (cuda_device *out, int ordinal))                                              \
	X(device_name, cuDeviceGetName, (char *out, int bytes, cuda_device d))                                   \
	X(device_uuid, cuDeviceGetUuid_v2, (struct CUuuid_st *out, cuda_device d))                               \
	X(device_memory, cuDeviceTotalMem_v2, (size_t *out, cuda_device d))                                      \
	X(device_attribute, cuDeviceGetAttribute, (int *out, unsigned which, cuda_device d))                          \
	X(ctx_retain, cuDevicePrimaryCtxRetain, (struct CUctx_st **out, cuda_device d))                          \
	X(ctx_release, cuDevicePrimaryCtxRelease_v2, (cuda_device d))                                            \
	X(ctx_set, cuCtxSetCurrent, (struct CUctx_st *ctx))                                                      \
	X(mem_alloc, cuMemAlloc_v2, (cuda_ptr *out, size_t bytes))                                               \
	X(mem_free, cuMemFree_v2, (cuda_ptr p))                                                                  \
	X(copy_put, cuMemcpyHtoDAsync_v2, (cuda_ptr to, const void *from, size_t bytes, struct CUstream_st *s))  \
	X(copy_get, cuMemcpyDtoHAsync_v2, (void *to, cuda_ptr from, size_t bytes, struct CUstream_st *s))        \
	X(copy_move, cuMemcpyDtoDAsync_v2, (cuda_ptr to, cuda_ptr from, size_t bytes, struct CUstream_st *s))    \
	X(stream_create, cuStreamCreate, (struct CUstream_st **out, unsigned flags))                             \
	X(stream_destroy, cuStreamDestroy_v2, (struct CUstream_st *s))                                           \
	X(stream_query, cuStreamQuery, (struct CUstream_st *s))                                                  \
	X(event_create, cuEventCreate, (struct CUevent_st **out, unsigned flags))                                \
	X(event_destroy, cuEventDestroy_v2, (struct CUevent_st *e))                                              \
	X(event_record, cuEventRecord, (struct CUevent_st *e, struct CUstream_st *s))                            \
	X(event_query, cuEventQuery, (struct CUevent_st *e))                                                     \
	X(host_register, cuMemHostRegister_v2, (void *p, size_t bytes, unsigned flags))                          \
	X(host_unregister, cuMemHostUnregister, (void *p))                                                       \
	X(host_pointer, cuMemHostGetDevicePointer_v2, (cuda_ptr *out, void *p, unsigned flags))                  \
	X(module_load, cuModuleLoadData, (struct CUmod_st **out, const void *image))                             \
	X(module_unload, cuModuleUnload, (struct CUmod_st *m))                                                   \
	X(module_function, cuModuleGetFunction, (struct CUfunc_st **out, struct CUmod_st *m, const char *name))  \
	X(launch, cuLaunchKernel,                                                                                \
	  (struct CUfunc_st *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, \
	   struct CUstream_st *s, void **params, void **extra))                                                  \
	X(ipc_open, cuIpcOpenMemHandle_v2, (cuda_ptr *out, struct CUipcMemHandle_st handle, unsigned flags))     \
	X(ipc_close, cuIpcCloseMemHandle, (cuda_ptr p))                                                          \
	X(range_of, cuMemGetAddressRange_v2, (cuda_ptr *base, size_t *bytes, cuda_ptr p))                        \
	X(vmm_granularity, cuMemGetAllocationGranularity,                                                        \
	  (size_t *out, const struct CUmemAllocationProp_st *how, unsigned which))                               \
	X(vmm_create, cuMemCreate,                                                                               \
	  (cuda_allocation *out, size_t bytes, const struct CUmemAllocationProp_st *how, unsigned long long flags)) \
	X(vmm_export, cuMemExportToShareableHandle, (void *out, cuda_allocation a, unsigned type, unsigned long long flags)) \
	X(vmm_import, cuMemImportFromShareableHandle, (cuda_allocation *out, void *handle, unsigned type))            \
	X(vmm_release, cuMemRelease, (cuda_allocation a))                                                        \
	X(vmm_reserve, cuMemAddressReserve, (cuda_ptr *out, size_t bytes, size_t align, cuda_ptr at, unsigned long long flags)) \
	X(vmm_unreserve, cuMemAddressFree, (cuda_ptr p, size_t bytes))                                           \
	X(vmm_map, cuMemMap, (cuda_ptr p, size_t bytes, size_t offset, cuda_allocation a, unsigned long long flags)) \
	X(vmm_unmap, cuMemUnmap, (cuda_ptr p, size_t bytes))                                                     \
	X(vmm_access, cuMemSetAccess, (cuda_ptr p, size_t bytes, const struct CUmemAccessDesc_st *who, size_t count))
