/* engine.h: asynchronous reads, writes and fsyncs: io_uring where the kernel lets us, else a pool of threads. Same calls,
 * same order rules (none: completions come in any order), bounded depth.
 *
 *     io_engine_open(IO_AUTO, depth, &e)          before the sandbox closes: makes the ring, restricts it to read/write/fsync
 *     io_submit(e, &op)                           op stays the caller's and must live until it comes back
 *     io_wait(e, &op)                             blocks for one completion; op->error is OK or a code, io_report(op) says it
 *
 * Short transfers are continued inside; a read that ends before `bytes - slack` is ERR_STORAGE_IO "ends at …"; EINTR/EAGAIN are retried;
 * ENOSPC/EDQUOT → ERR_STORAGE_FULL, EROFS → ERR_STORAGE_READONLY, ESTALE/ENODEV → ERR_STORAGE_GONE, EFAULT → ERR_SEGMENT_SHRUNK.
 * An op with a `move` of its own is moved by that, in a thread of the pool, whatever the engine is: a store without descriptors is read
 * and written so.
 * A failed fsync is never retried. io_report's text names no file: add it with err_at_file. What a `move` of its own said of its error is
 * in it: a store behind a network has more to say than a code. io_done() ends each op that came back.
 * One engine, one caller at a time. The pool's threads start at the first io_submit, so that a sandbox entered after
 * io_engine_open covers them. Fault points (os/fs.h): "io.read", "io.write", "io.fsync". */
#pragma once
#include <errno.h>

#include "base/err.h"

enum io_kind { IO_READ, IO_WRITE, IO_FSYNC };

struct io_op {
	enum io_kind kind;
	enum err error;                  /* OK: all bytes are transferred */
	/* NULL: through fd. Moves all bytes or returns an error. */
	enum err (*transfer)(struct io_op *op);
	union {
		int fd;
		void *at;                /* the caller's, for transfer */
	};
	void *buf;
	uint64_t bytes, offset;
	void *user;                      /* the caller's */
	union {
		uint64_t done;           /* bytes transferred; see io_moved() */
		struct err_info *why;    /* of an error of transfer; NULL: none, or no memory for it */
	};
	uint16_t slack;                  /* a read: so many of its last bytes may lie behind the file's end */
	/* private to the engine */
	uint16_t tries;
	int fail;                        /* errno, or a negative code of its own */
	struct io_op *next;
};

enum io_engine_kind { IO_AUTO, IO_URING, IO_THREADS };
struct io_engine;

FALLIBLE enum err io_engine_open(enum io_engine_kind kind, uint32_t depth, struct io_engine **out);
void io_engine_close(struct io_engine *e);               /* waits for what is in flight */
const char *io_engine_name(const struct io_engine *e);   /* "io_uring" or "threads" */
uint32_t io_engine_free_slots(const struct io_engine *e);
FALLIBLE enum err io_submit(struct io_engine *e, struct io_op *op);  /* ERR_INTERNAL if no slot is free */
FALLIBLE enum err io_wait(struct io_engine *e, struct io_op **done_out); /* ERR_INTERNAL if nothing is in flight */
/* As io_wait, but gives up after timeout_ms (0: asks only): timed_out_out says so and *done_out is NULL then. */
FALLIBLE enum err io_wait_for(struct io_engine *e, int timeout_ms, struct io_op **done_out, bool *timed_out_out);
/* Records an operation's error in this thread, with what was asked for and where it stopped; returns its code. Only transfer's errors
 * have a text of their own: thousands of operations wait at a time. */
enum err io_report(const struct io_op *op);
void io_done(struct io_op *op);        /* gives back what an op that came back holds; twice is fine */
/* Bytes of an op that came back that were transferred. */
static inline uint64_t io_moved(const struct io_op *op)
{
	return op->transfer && op->error ? 0 : op->done;
}
/* Did the file system refuse an op that came back, as some do with O_DIRECT? Nothing was moved. */
static inline bool io_is_refused(const struct io_op *op)
{
	return op->fail == EINVAL && op->done == 0;
}
uint32_t io_in_flight(const struct io_engine *e);
