/* threads.c: the back end for hosts that refuse io_uring (see io_impl.h): a pool of threads that make ordinary calls.
 *
 * Threads start when work first comes and only as many as it needs, up to the depth: a sandbox that was entered in between
 * covers them, and an engine that is never used costs nothing. */
#include <pthread.h>
#include <signal.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/mem.h"
#include "io/io_impl.h"

enum { THREADS_MAX = 32, STACK_BYTES = 512 << 10 };

struct queue {
	struct io_op *first, *last;
};

struct pool {
	pthread_mutex_t lock;
	pthread_cond_t work, finished;
	struct queue todo, done;
	uint32_t threads, threads_max, idle;
	bool stop;
	int start_error;
	pthread_t ids[THREADS_MAX];
};

static void push(struct queue *q, struct io_op *op)
{
	op->next = NULL;
	if (q->last)
		q->last->next = op;
	else
		q->first = op;
	q->last = op;
}

static struct io_op *pop(struct queue *q)
{
	struct io_op *op = q->first;

	if (op) {
		q->first = op->next;
		if (!q->first)
			q->last = NULL;
	}
	return op;
}

static void transfer(struct io_op *op)
{
	op->error = op->transfer(op);
	op->fail = op->error ? IO_TRANSFER : 0;
	op->done = op->bytes;
	if (op->error) {
		op->why = err_last()->code == op->error ? mem_alloc(sizeof *op->why) : NULL;
		if (op->why)
			*op->why = *err_last();
	}
	err_clear();
}

static void perform(struct io_op *op)
{
	ssize_t n;

	if (op->transfer) {
		transfer(op);
		return;
	}
	do {
		char *at = op->buf ? (char *)op->buf + op->done : NULL; /* an fsync has no buffer */
		off_t offset = (off_t)(op->offset + op->done);
		if (op->kind == IO_READ)
			n = pread(op->fd, at, io_next_bytes(op), offset);
		else if (op->kind == IO_WRITE)
			n = pwrite(op->fd, at, io_next_bytes(op), offset);
		else
			n = fsync(op->fd);
	} while (!io_advance(op, n < 0 ? -errno : n));
}

static void *thread_main(void *arg)
{
	struct pool *p = arg;

	(void)prctl(PR_SET_NAME, "dcpd-io");
	pthread_mutex_lock(&p->lock);
	while (!p->stop) {
		struct io_op *op = pop(&p->todo);
		if (!op) {
			p->idle++;
			pthread_cond_wait(&p->work, &p->lock);
			p->idle--;
			continue;
		}
		pthread_mutex_unlock(&p->lock);
		perform(op);
		pthread_mutex_lock(&p->lock);
		push(&p->done, op);
		pthread_cond_signal(&p->finished);
	}
	pthread_mutex_unlock(&p->lock);
	return NULL;
}

/* Signals are for the program's own threads. Called with the lock held. */
static void start_thread(struct pool *p)
{
	pthread_attr_t attr;
	sigset_t all, before;

	if (pthread_attr_init(&attr) != 0)
		return;
	(void)pthread_attr_setstacksize(&attr, STACK_BYTES);
	sigfillset(&all);
	/* A page of a segment that is gone is an errno to the kernel's copy, but a bug of ours should still show. */
	sigdelset(&all, SIGBUS);
	sigdelset(&all, SIGSEGV);
	sigdelset(&all, SIGSYS);
	pthread_sigmask(SIG_SETMASK, &all, &before);
	p->start_error = pthread_create(&p->ids[p->threads], &attr, thread_main, p);
	if (p->start_error == 0)
		p->threads++;
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	(void)pthread_attr_destroy(&attr);
}

static void pool_submit(void *self, struct io_op *op)
{
	struct pool *p = self;
	uint32_t waiting = 1;

	pthread_mutex_lock(&p->lock);
	for (struct io_op *o = p->todo.first; o; o = o->next)
		waiting++;
	if (p->idle < waiting && p->threads < p->threads_max)
		start_thread(p);
	if (p->threads == 0) {
		op->fail = p->start_error;
		push(&p->done, op);
	} else {
		push(&p->todo, op);
		pthread_cond_signal(&p->work);
	}
	pthread_mutex_unlock(&p->lock);
}

static FALLIBLE enum err pool_wait(void *self, int timeout_ms, struct io_op **done_out)
{
	struct pool *p = self;
	struct timespec end = clock_mono_in(timeout_ms);
	int bad = 0;

	pthread_mutex_lock(&p->lock);
	struct io_op *op = pop(&p->done);
	while (!op && bad == 0) {
		bad = timeout_ms < 0 ? pthread_cond_wait(&p->finished, &p->lock)
				     : pthread_cond_timedwait(&p->finished, &p->lock, &end);
		op = pop(&p->done);
	}
	pthread_mutex_unlock(&p->lock);
	*done_out = op;
	return OK;
}

static void pool_close(void *self)
{
	struct pool *p = self;

	pthread_mutex_lock(&p->lock);
	p->stop = true;
	pthread_cond_broadcast(&p->work);
	pthread_mutex_unlock(&p->lock);
	for (uint32_t i = 0; i < p->threads; i++)
		pthread_join(p->ids[i], NULL);
	pthread_cond_destroy(&p->work);
	pthread_cond_destroy(&p->finished);
	pthread_mutex_destroy(&p->lock);
	mem_free(p);
}

enum err threads_open(uint32_t depth, struct io_backend *out)
{
	struct pool *p = mem_zalloc(1, sizeof *p);
	pthread_condattr_t attr;

	NEED(p, "no memory for I/O threads");
	p->threads_max = depth < THREADS_MAX ? depth : THREADS_MAX;
	pthread_mutex_init(&p->lock, NULL);
	pthread_cond_init(&p->work, NULL);
	pthread_condattr_init(&attr);
	pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
	pthread_cond_init(&p->finished, &attr);
	pthread_condattr_destroy(&attr);
	*out = (struct io_backend){ "threads", p, pool_submit, pool_wait, pool_close };
	return OK;
}
