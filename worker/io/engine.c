/* engine.c: one face for both back ends (see engine.h): bounds, short transfers, and errors. */
#include "io/engine.h"

#include <inttypes.h>

#include "base/mem.h"
#include "io/io_impl.h"
#include "os/fs.h"

enum { DEPTH_MAX = 4096, SECTOR_BYTES = 512 };

struct io_engine {
	struct io_backend back, pool;      /* pool: for ops that move themselves, where `back` cannot; its self may be NULL */
	uint32_t depth, in_flight, in_pool;
	struct io_op *ready;               /* finished without the back end */
};

static void close_back(struct io_backend *b)
{
	if (b->self)
		b->close(b->self);
}

enum err io_engine_open(enum io_engine_kind kind, uint32_t depth, struct io_engine **out)
{
	struct io_engine *e;

	if (depth == 0 || depth > DEPTH_MAX)
		return ERR(INTERNAL, "an I/O depth of %" PRIu32 " is not between 1 and %d", depth, DEPTH_MAX);
	e = mem_zalloc(1, sizeof *e);
	NEED(e, "no memory for an I/O engine");
	e->depth = depth;
	enum err bad = kind == IO_THREADS ? ERR_UNSUPPORTED : uring_open(depth, &e->back);
	if (!bad)
		bad = threads_open(depth, &e->pool);
	else if (kind != IO_URING)
		bad = threads_open(depth, &e->back);
	if (bad) {
		close_back(&e->back);
		mem_free(e);
		return bad;
	}
	*out = e;
	return OK;
}

void io_engine_close(struct io_engine *e)
{
	if (!e)
		return;
	while (e->in_flight > 0) {
		struct io_op *op;
		if (io_wait(e, &op))
			break;
		io_done(op);
	}
	close_back(&e->back);
	close_back(&e->pool);
	mem_free(e);
}

const char *io_engine_name(const struct io_engine *e)
{
	return e->back.name;
}

uint32_t io_engine_free_slots(const struct io_engine *e)
{
	return e->depth - e->in_flight;
}

uint32_t io_in_flight(const struct io_engine *e)
{
	return e->in_flight;
}

static const char *fault_point(enum io_kind kind)
{
	return kind == IO_READ ? "io.read" : kind == IO_WRITE ? "io.write" : "io.fsync";
}

enum err io_submit(struct io_engine *e, struct io_op *op)
{
	if (e->in_flight == e->depth)
		return ERR(INTERNAL, "all %" PRIu32 " slots of the I/O engine are in use", e->depth);
	if (op->offset > INT64_MAX || op->bytes > INT64_MAX - op->offset)
		return ERR(LIMIT_EXCEEDED, "%" PRIu64 " bytes at %" PRIu64 " are beyond the end of any file", op->bytes,
			   op->offset);
	op->error = OK;
	op->done = 0;
	op->tries = 0;
	op->next = NULL;
	op->fail = fs_fault_errno(fault_point(op->kind));
	e->in_flight++;
	if (op->fail || (op->kind != IO_FSYNC && op->bytes == 0)) {
		op->next = e->ready;
		e->ready = op;
	} else if (e->pool.self && (op->transfer || e->in_pool)) {
		e->in_pool++;
		e->pool.submit(e->pool.self, op);
	} else {
		e->back.submit(e->back.self, op);
	}
	return OK;
}

/* After part of an O_DIRECT transfer that is no whole sector, the rest cannot be asked for: for a read that is the file's end. */
static bool stuck(const struct io_op *op, int64_t result)
{
	return result == -EINVAL && op->done % SECTOR_BYTES != 0;
}

bool io_advance(struct io_op *op, int64_t result)
{
	if (op->kind == IO_FSYNC) {
		op->fail = result < 0 ? (int)-result : 0;
		return true;
	}
	if (result > 0) {
		op->done += (uint64_t)result;
		op->tries = 0;
		op->fail = 0;
		return op->done >= op->bytes;
	}
	if ((result == -EINTR || result == -EAGAIN) && ++op->tries < IO_TRIES_MAX)
		return false;
	if (op->kind == IO_READ && (result == 0 || stuck(op, result)))
		op->fail = op->done + op->slack >= op->bytes ? 0 : IO_EOF;
	else
		op->fail = result < 0 ? (int)-result : EIO;
	return true;
}

static const char *verb(enum io_kind kind)
{
	return kind == IO_READ ? "read" : "write";
}

void io_done(struct io_op *op)
{
	if (!op->transfer || !op->error)
		return;
	mem_free(op->why);
	op->why = NULL;
}

enum err io_report(const struct io_op *op)
{
	int sys_errno = op->fail > 0 ? op->fail : 0;
	uint64_t moved = io_moved(op);

	if (op->transfer && op->error && op->why)
		err_restore(op->why);
	else if (op->fail == IO_EOF)
		err_record(op->error, 0, ERR_PLACE, "the file ends at %" PRIu64 ", %" PRIu64 " bytes at %" PRIu64
			   " were expected", op->offset + moved, op->bytes, op->offset);
	else if (op->kind == IO_FSYNC)
		err_record(op->error, sys_errno, ERR_PLACE, "cannot sync the file");
	else
		err_record(op->error, sys_errno, ERR_PLACE, "cannot %s %" PRIu64 " bytes at %" PRIu64, verb(op->kind),
			   op->bytes - moved, op->offset + moved);
	if (op->kind == IO_FSYNC)
		return op->error;
	return err_at_file(op->error, "", (int64_t)(op->offset + moved));
}

/* While the pool has work all new ops go there, so that what the other back end still has soon ends: that is waited for first. */
static FALLIBLE enum err wait_back(struct io_engine *e, int timeout_ms, struct io_op **done_out)
{
	bool pool = e->in_pool && e->in_pool == e->in_flight;
	const struct io_backend *b = pool ? &e->pool : &e->back;

	TRY(b->wait(b->self, timeout_ms, done_out));
	e->in_pool -= pool && *done_out;
	return OK;
}

enum err io_wait_for(struct io_engine *e, int timeout_ms, struct io_op **done_out, bool *timed_out_out)
{
	struct io_op *op = e->ready;

	*timed_out_out = false;
	*done_out = NULL;
	if (e->in_flight == 0)
		return ERR(INTERNAL, "the I/O engine has nothing to wait for");
	if (op)
		e->ready = op->next;
	else
		TRY(wait_back(e, timeout_ms, &op));
	if (!op) {
		*timed_out_out = true;
		return OK;
	}
	e->in_flight--;
	op->next = NULL;
	if (!op->transfer)
		fs_count(op->fd, op->kind == IO_WRITE, op->done);
	if (op->fail && op->fail != IO_TRANSFER)
		op->error = op->fail == IO_EOF ? ERR_STORAGE_IO : fs_error(op->fail);
	*done_out = op;
	return OK;
}

enum err io_wait(struct io_engine *e, struct io_op **done_out)
{
	bool timed_out;

	return io_wait_for(e, -1, done_out, &timed_out);
}
