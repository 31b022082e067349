/* device_impl.h: what cpu.c and cuda.c each give to device.c. */
#pragma once
#include "device/device.h"

struct device_ops {
	void (*close)(struct device *d);
	enum err (*alloc)(struct device *d, uint64_t bytes, void **out);
	void (*free)(struct device *d, void *p);
	enum err (*copy)(struct device *d, void *to, const void *from, uint64_t bytes, enum device_way way);
	enum err (*done)(struct device *d, bool *done_out);
	enum err (*mark)(struct device *d, uint32_t mark);
	enum err (*mark_done)(struct device *d, uint32_t mark, bool *done_out);
	enum err (*pin)(struct device *d, void *p, uint64_t bytes);
	enum err (*unpin)(struct device *d, void *p);
	enum err (*import)(struct device *d, const struct device_handle *h, struct device_import *out);   /* NULL: host memory only */
	enum err (*import_end)(struct device *d, struct device_import *i);
	enum err (*create)(struct device *d, uint64_t bytes, struct device_import *out);                  /* NULL: host memory only */
	enum err (*export)(struct device *d, const struct device_import *i, int *fd_out);
	enum err (*host_pointer)(struct device *d, void *p, void **out);
	enum err (*gather)(struct device *d, const struct device_piece *pieces, uint32_t n, uint32_t mark);   /* NULL: host memory only */
	enum err (*cast)(struct device *d, const struct device_cast *casts, uint32_t n, uint32_t mark);       /* NULL: the same */
	enum err (*enter)(struct device *d);
	void *(*stream)(struct device *d);
};

struct device {
	const struct device_ops *ops;
	int32_t index;                 /* the index that device_open() was given */
};

FALLIBLE enum err device_cpu_new(struct device **out);
FALLIBLE enum err device_cuda_new(uint32_t index, struct device **out);
