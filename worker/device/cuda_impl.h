/* cuda_impl.h: the driver as cuda.c has opened it, for cuda_import.c. */
#pragma once
#include "device/cuda_abi.h"
#include "device/device_impl.h"

struct cuda_driver {
#define X(member, symbol, params) cuda_result (*member) params;
	CUDA_FUNCTIONS(X)
#undef X
	bool tried;
	enum err state;
	struct err_info why;
	uint32_t count;
};
extern struct cuda_driver cuda;

struct cuda_dev {
	struct device base;
	cuda_device ordinal;
	struct CUctx_st *ctx;
	struct CUstream_st *stream;
	struct CUevent_st *marks[DEVICE_MARKS];
	bool marked[DEVICE_MARKS];
	struct cuda_gather {
		bool tried;
		enum err state;        /* of the first try: later ones give the same answer */
		struct err_info why;
		struct CUmod_st *module;
		struct CUfunc_st *copy, *cast;
		char *rows;            /* DEVICE_GATHER_MAX of a kernel's rows for each mark, and the same on the GPU */
		cuda_ptr rows_there;
	} gather;
};

/* OK, or an error that names the call and what the driver says. */
FALLIBLE enum err cuda_check(cuda_result r, const char *call);
enum err cuda_host_pointer(struct device *d, void *p, void **out);
enum err cuda_gather(struct device *d, const struct device_piece *pieces, uint32_t n, uint32_t mark);
enum err cuda_cast(struct device *d, const struct device_cast *casts, uint32_t n, uint32_t mark);
void cuda_gather_end(struct cuda_dev *c);
enum err cuda_import(struct device *d, const struct device_handle *h, struct device_import *out);
enum err cuda_import_end(struct device *d, struct device_import *i);
enum err cuda_create(struct device *d, uint64_t bytes, struct device_import *out);
enum err cuda_export(struct device *d, const struct device_import *i, int *fd_out);
