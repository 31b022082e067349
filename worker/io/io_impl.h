/* io_impl.h: what io/engine.c asks of io/uring.c and io/threads.c. A back end moves bytes and reports an errno in op->fail;
 * the engine counts, makes errors out of them and keeps the promises of engine.h. */
#pragma once
#include "io/engine.h"

enum {
	IO_EOF = -1,                       /* in op->fail: the file ended */
	IO_TRANSFER = -2,                  /* op->transfer failed; op->error says how */
	IO_TRIES_MAX = 1000,               /* of a call that says "again" */
	IO_CALL_BYTES_MAX = 1 << 30,       /* more in one call does not fit its result */
};

struct io_backend {
	const char *name;
	void *self;
	void (*submit)(void *self, struct io_op *op);
	/* One finished op, or NULL after timeout_ms (-1: never). */
	FALLIBLE enum err (*wait)(void *self, int timeout_ms, struct io_op **done_out);
	void (*close)(void *self);         /* nothing is in flight */
};

FALLIBLE enum err uring_open(uint32_t depth, struct io_backend *out);
FALLIBLE enum err threads_open(uint32_t depth, struct io_backend *out);

/* Takes in the result of one call (bytes or -errno). True: the op is finished, op->fail says how. False: make the next call. */
bool io_advance(struct io_op *op, int64_t result);
static inline uint64_t io_next_bytes(const struct io_op *op)
{
	uint64_t left = op->bytes - op->done;

	return left < IO_CALL_BYTES_MAX ? left : IO_CALL_BYTES_MAX;
}
