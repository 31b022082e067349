/* uring.c: the io_uring back end (see io_impl.h).
 *
 * seccomp does not see what is asked of a ring, so the ring itself is restricted while it is still disabled: read, write and
 * fsync, no flags, no further registrations. A ring that cannot be restricted is not used. */
#include <liburing.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/mem.h"
#include "io/io_impl.h"

enum { RETRY_MS = 10 };

struct uring {
	struct io_uring ring;
};

/* The op's next call. There is always room: the queue has as many entries as the engine has slots. */
static void prepare(struct uring *u, struct io_op *op)
{
	struct io_uring_sqe *sqe = io_uring_get_sqe(&u->ring);
	unsigned n = (unsigned)io_next_bytes(op);
	char *at = op->buf ? (char *)op->buf + op->done : NULL; /* an fsync has no buffer */

	if (!sqe) {
		/* Entries are still waiting to be taken by the kernel. */
		(void)io_uring_submit(&u->ring);
		sqe = io_uring_get_sqe(&u->ring);
	}
	must(sqe);
	if (op->kind == IO_READ)
		io_uring_prep_read(sqe, op->fd, at, n, op->offset + op->done);
	else if (op->kind == IO_WRITE)
		io_uring_prep_write(sqe, op->fd, at, n, op->offset + op->done);
	else
		io_uring_prep_fsync(sqe, op->fd, 0);
	io_uring_sqe_set_data(sqe, op);
	/* Operations that the kernel does not take now go with the next submit, or while we wait. */
	(void)io_uring_submit(&u->ring);
}

static void uring_submit(void *self, struct io_op *op)
{
	prepare(self, op);
}

static FALLIBLE enum err uring_wait(void *self, int timeout_ms, struct io_op **done_out)
{
	struct uring *u = self;
	int left_ms = timeout_ms;

	for (;;) {
		struct io_uring_cqe *cqe = NULL;
		bool stalled = false;
		if (io_uring_sq_ready(&u->ring)) {
			(void)io_uring_submit(&u->ring);
			stalled = io_uring_sq_ready(&u->ring) > 0;
		}
		/* Operations that the kernel had no memory for are offered again soon: no completion might ever come otherwise. */
		int ms = stalled && (left_ms < 0 || left_ms > RETRY_MS) ? RETRY_MS : left_ms;
		struct __kernel_timespec t = { .tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000ll };
		int bad = io_uring_wait_cqe_timeout(&u->ring, &cqe, ms < 0 ? NULL : &t);
		if (bad == -ETIME && ms != left_ms) {
			left_ms -= left_ms < 0 ? 0 : ms;
			continue;
		}
		if (bad == -ETIME) {
			*done_out = NULL;
			return OK;
		}
		if (bad == -EINTR || bad == -EAGAIN)
			continue;
		if (bad < 0) {
			errno = -bad;
			return ERR_SYS(SYSTEM, "cannot wait for the I/O ring");
		}
		struct io_op *op = io_uring_cqe_get_data(cqe);
		int result = cqe->res;
		io_uring_cqe_seen(&u->ring, cqe);
		if (io_advance(op, result)) {
			*done_out = op;
			return OK;
		}
		prepare(u, op);
	}
}

static void uring_close(void *self)
{
	struct uring *u = self;

	io_uring_queue_exit(&u->ring);
	mem_free(u);
}

/* liburing has functions for these two, but Debian's shared library 2.3 forgets to export them. */
static int register_with(const struct io_uring *ring, unsigned opcode, const void *arg, unsigned n)
{
	return syscall(SYS_io_uring_register, ring->ring_fd, opcode, arg, n) < 0 ? -errno : 0;
}

static int restrict_ring(const struct io_uring *ring)
{
	static const struct io_uring_restriction allowed[] = {
		{ .opcode = IORING_RESTRICTION_SQE_OP, .sqe_op = IORING_OP_READ },
		{ .opcode = IORING_RESTRICTION_SQE_OP, .sqe_op = IORING_OP_WRITE },
		{ .opcode = IORING_RESTRICTION_SQE_OP, .sqe_op = IORING_OP_FSYNC },
	};
	int bad = register_with(ring, IORING_REGISTER_RESTRICTIONS, allowed, sizeof allowed / sizeof *allowed);

	return bad < 0 ? bad : register_with(ring, IORING_REGISTER_ENABLE_RINGS, NULL, 0);
}

enum err uring_open(uint32_t depth, struct io_backend *out)
{
	struct uring *u = mem_zalloc(1, sizeof *u);
	struct io_uring_params params = { .flags = IORING_SETUP_R_DISABLED };

	NEED(u, "no memory for an I/O ring");
	int bad = io_uring_queue_init_params(depth, &u->ring, &params);
	if (bad == 0) {
		/* Without EXT_ARG a timeout would be an operation of its own, which the restrictions refuse. */
		bad = params.features & IORING_FEAT_EXT_ARG ? restrict_ring(&u->ring) : -ENOSYS;
		if (bad < 0)
			io_uring_queue_exit(&u->ring);
	}
	if (bad < 0) {
		mem_free(u);
		errno = -bad;
		return ERR_SYS(UNSUPPORTED, "io_uring cannot be used here");
	}
	*out = (struct io_backend){ "io_uring", u, uring_submit, uring_wait, uring_close };
	return OK;
}
