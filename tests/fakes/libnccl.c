/* libnccl.c: a libnccl.so.2 without GPUs, for tests: the same symbols over the fake libcuda's memory, between processes of one host.
 *
 * Every collective is sends and receives of everyone's whole data through rings in a shared file that the unique id names: slow,
 * and easy to trust. Like NCCL it begins nothing before the stream gets there, and never ends an operation that a member is missing.
 *
 *     FAKE_NCCL_VERSION=21304     what ncclGetVersion says
 *     FAKE_NCCL_INIT=2            ncclCommInitRankConfig fails with this error (ncclSystemError)
 *     FAKE_NCCL_ASYNC_AFTER=3     the operation after the third ends in an asynchronous error
 *     FAKE_NCCL_HANG_AFTER=3      … never ends
 *     FAKE_NCCL_RANK=1            both of these on this rank only
 *     FAKE_NCCL_QUIET=1           a member that aborts is not noticed by the others
 *     FAKE_NCCL_ABORT_HANGS=1     ncclCommAbort never returns
 *     FAKE_NCCL_FAIL=ncclSend:2:3 the second call of that name fails with error 3; 0: every call. Those that return text return none */
#include <dlfcn.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>

#include "comm/nccl_abi.h"
#include "fakes/fake_cuda.h"

enum { RANKS = 8, RING = 64 << 10, TRANSFERS = 4096, SYSTEM_ERROR = 2, INVALID_ARGUMENT = 4, INVALID_USAGE = 5 };

struct ring {
	_Atomic uint64_t head, tail;
	unsigned char bytes[RING];
};

struct rendezvous {
	_Atomic uint32_t joined, left, aborted;
	struct ring rings[RANKS][RANKS];    /* [from][to] */
};

struct ncclComm {
	struct ncclComm *next;
	struct rendezvous *m;
	int n, rank, ops;
	_Atomic bool stopped;
	nccl_result async;
	char name[48];
};

struct transfer {
	unsigned char *p;
	size_t bytes;
	int peer;
	bool out;
};

struct op {
	struct ncclComm *c;
	struct transfer *t;
	size_t n;
	int number;
	void (*finish)(struct op *o);
	/* of a reduction: everyone's input in rank order, and where the result goes */
	unsigned char *all, *own, *result;
	size_t total, first, count;
	unsigned type, how;
};

#define X(member, symbol, result, params) result symbol params;
NCCL_FUNCTIONS(X)
#undef X

static __thread struct op *grouped;
static __thread struct CUstream_st *group_stream;
static __thread int depth;

static void *(*device_bytes)(const void *p, size_t bytes);
static void (*push)(struct CUstream_st *s, int (*step)(void *arg), void *arg);

static bool find_cuda(void)
{
	void *lib = dlopen("libcuda.so.1", RTLD_NOW);

	if (!lib)
		return false;
	*(void **)&device_bytes = dlsym(lib, "fake_cuda_bytes");
	*(void **)&push = dlsym(lib, "fake_cuda_push");
	return device_bytes && push;
}

static long number_of(const char *name, long otherwise)
{
	const char *value = getenv(name);

	return value ? strtol(value, NULL, 10) : otherwise;
}

static bool strikes(const struct ncclComm *c, const char *name, int number)
{
	long after = number_of(name, -1), rank = number_of("FAKE_NCCL_RANK", c->rank);

	return after >= 0 && rank == c->rank && number > after;
}

/* NCCL_OK, or the error that the environment asks for. */
static nccl_result injected(const char *symbol)
{
	static unsigned long calls;
	const char *spec = getenv("FAKE_NCCL_FAIL");
	size_t n = strlen(symbol);
	char *end;

	if (!spec || strncmp(spec, symbol, n) != 0 || spec[n] != ':')
		return NCCL_OK;
	unsigned long nth = strtoul(spec + n + 1, &end, 10);
	return ++calls == nth || nth == 0 ? (nccl_result)strtoul(end + 1, NULL, 10) : NCCL_OK;
}

#define BEGIN()                                              \
	do {                                                 \
		nccl_result r_ = injected(__func__);         \
		if (r_ != NCCL_OK)                           \
			return r_;                           \
	} while (0)

nccl_result ncclGetVersion(int *out)
{
	BEGIN();
	*out = (int)number_of("FAKE_NCCL_VERSION", 22809);
	return NCCL_OK;
}

nccl_result ncclGetUniqueId(ncclUniqueId *out)
{
	BEGIN();
	memset(out, 0, sizeof *out);
	return getrandom(out->internal, 16, 0) == 16 ? NCCL_OK : SYSTEM_ERROR;
}

const char *ncclGetErrorString(nccl_result r)
{
	static const char *const names[] = { "no error", "unhandled cuda error", "unhandled system error", "internal error",
					     "invalid argument", "invalid usage", "remote process exited or there was a network error",
					     "NCCL operation in progress" };

	if (injected(__func__))
		return NULL;
	return r < sizeof names / sizeof *names ? names[r] : "unknown result code";
}

const char *ncclGetLastError(struct ncclComm *c)
{
	(void)c;
	return injected(__func__) ? NULL : "fake: as the environment asked";
}

/* ---- communicators ---- */

static struct rendezvous *meet(const char *name)
{
	int fd = shm_open(name, O_RDWR | O_CREAT, 0600);

	if (fd < 0 || ftruncate(fd, sizeof(struct rendezvous)) < 0)
		return NULL;
	struct rendezvous *m = mmap(NULL, sizeof *m, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	close(fd);
	return m == MAP_FAILED ? NULL : m;
}

nccl_result ncclCommInitRankConfig(struct ncclComm **out, int n, ncclUniqueId id, int rank, ncclConfig_t *how)
{
	nccl_result wrong = (nccl_result)number_of("FAKE_NCCL_INIT", NCCL_OK);

	*out = NULL;
	BEGIN();
	if (wrong)
		return wrong;
	if (how->magic != (unsigned)NCCL_CONFIG_MAGIC || how->size < 24 || how->blocking)
		return INVALID_USAGE;
	if (n < 1 || n > RANKS || rank < 0 || rank >= n || !find_cuda())
		return INVALID_ARGUMENT;
	struct ncclComm *c = calloc(1, sizeof *c);
	c->n = n;
	c->rank = rank;
	size_t k = (size_t)snprintf(c->name, sizeof c->name, "/fake-nccl-");
	for (int i = 0; i < 16; i++)
		k += (size_t)snprintf(c->name + k, sizeof c->name - k, "%02x", (unsigned char)id.internal[i]);
	c->m = meet(c->name);
	if (!c->m)
		return SYSTEM_ERROR;
	if (atomic_fetch_add(&c->m->joined, 1) + 1 == (uint32_t)n)
		shm_unlink(c->name);
	*out = c;
	return NCCL_IN_PROGRESS;
}

nccl_result ncclCommGetAsyncError(struct ncclComm *c, nccl_result *out)
{
	BEGIN();
	if (!c->async && atomic_load(&c->m->aborted) && !getenv("FAKE_NCCL_QUIET"))
		c->async = NCCL_REMOTE_ERROR;
	*out = c->async ? c->async : atomic_load(&c->m->joined) < (uint32_t)c->n ? NCCL_IN_PROGRESS : NCCL_OK;
	return NCCL_OK;
}

nccl_result ncclCommFinalize(struct ncclComm *c)
{
	BEGIN();
	atomic_fetch_add(&c->m->left, 1);
	return NCCL_OK;
}

static struct ncclComm *_Atomic kept;

static nccl_result end(struct ncclComm *c)
{
	shm_unlink(c->name);
	munmap(c->m, sizeof *c->m);
	c->m = NULL;
	c->stopped = true;
	c->next = atomic_exchange(&kept, c); /* work that hangs on a stream still looks at it */
	return NCCL_OK;
}

nccl_result ncclCommDestroy(struct ncclComm *c)
{
	BEGIN();
	return end(c);
}

nccl_result ncclCommAbort(struct ncclComm *c)
{
	BEGIN();
	while (getenv("FAKE_NCCL_ABORT_HANGS"))
		pause();
	atomic_store(&c->m->aborted, 1);
	return end(c);
}

/* ---- work ---- */

static bool move(struct ring *r, struct transfer *t)
{
	uint64_t head = atomic_load(&r->head), tail = atomic_load(&r->tail);
	size_t n = t->out ? RING - (size_t)(head - tail) : (size_t)(head - tail);

	n = n < t->bytes ? n : t->bytes;
	for (size_t i = 0; i < n; i++) {
		if (t->out)
			r->bytes[(head + i) % RING] = t->p[i];
		else
			t->p[i] = r->bytes[(tail + i) % RING];
	}
	t->p += n;
	t->bytes -= n;
	atomic_store(t->out ? &r->head : &r->tail, (t->out ? head : tail) + n);
	return t->bytes == 0;
}

static void free_op(struct op *o)
{
	free(o->t);
	free(o->all);
	free(o);
}

static int step(void *arg)
{
	struct op *o = arg;
	struct ncclComm *c = o->c;
	bool busy[2][RANKS] = { 0 }, left = false;

	if (c->stopped) {
		free_op(o);
		return FAKE_DONE;
	}
	if (strikes(c, "FAKE_NCCL_ASYNC_AFTER", o->number))
		c->async = SYSTEM_ERROR;
	if (c->async || strikes(c, "FAKE_NCCL_HANG_AFTER", o->number))
		return FAKE_LATER;
	for (size_t i = 0; i < o->n; i++) { /* in order per peer and direction */
		struct transfer *t = &o->t[i];
		struct ring *r = t->out ? &c->m->rings[c->rank][t->peer] : &c->m->rings[t->peer][c->rank];
		if (t->bytes && !busy[t->out][t->peer] && !move(r, t))
			busy[t->out][t->peer] = true;
		left = left || t->bytes;
	}
	if (left)
		return FAKE_LATER;
	if (o->finish)
		o->finish(o);
	free_op(o);
	return FAKE_DONE;
}

static struct op *new_op(struct ncclComm *c)
{
	struct op *o = calloc(1, sizeof *o);

	o->c = c;
	o->t = calloc(TRANSFERS, sizeof *o->t);
	return o;
}

static void add(struct op *o, bool out, int peer, const void *p, size_t bytes)
{
	if (bytes && o->n < TRANSFERS)
		o->t[o->n++] = (struct transfer){ (unsigned char *)(uintptr_t)p, bytes, peer, out };
}

static nccl_result start(struct op *o, struct CUstream_st *s)
{
	o->number = ++o->c->ops;
	push(s, step, o);
	return NCCL_IN_PROGRESS; /* as a non-blocking communicator may */
}

nccl_result ncclGroupStart(void)
{
	BEGIN();
	depth++;
	return NCCL_OK;
}

nccl_result ncclGroupEnd(void)
{
	struct op *o = grouped;

	if (--depth == 0)
		grouped = NULL;
	BEGIN();
	if (depth || !o)
		return NCCL_OK;
	return start(o, group_stream);
}

static nccl_result send_or_recv(bool out, const void *p, size_t n, unsigned type, int peer, struct ncclComm *c, struct CUstream_st *s)
{
	if (type != NCCL_INT8 && type != NCCL_UINT8)
		return INVALID_ARGUMENT;
	void *bytes = device_bytes(p, n);
	if (!bytes || peer < 0 || peer >= c->n)
		return INVALID_ARGUMENT;
	struct op *o = depth && grouped ? grouped : new_op(c);
	add(o, out, peer, bytes, n);
	if (!depth)
		return start(o, s);
	grouped = o;
	group_stream = s;
	return NCCL_OK;
}

nccl_result ncclSend(const void *p, size_t n, unsigned type, int peer, struct ncclComm *c, struct CUstream_st *s)
{
	BEGIN();
	return send_or_recv(true, p, n, type, peer, c, s);
}

nccl_result ncclRecv(void *p, size_t n, unsigned type, int peer, struct ncclComm *c, struct CUstream_st *s)
{
	BEGIN();
	return send_or_recv(false, p, n, type, peer, c, s);
}

static size_t width(unsigned type)
{
	static const size_t widths[] = { 1, 1, 4, 4, 8, 8, 2, 4, 8, 2 };

	return type < sizeof widths / sizeof *widths ? widths[type] : 0;
}

/* Every member sends `in` to every other and gets the others' into all, in rank order. */
static void exchange_all(struct op *o, const unsigned char *in, unsigned char *all, size_t bytes)
{
	for (int r = 0; r < o->c->n; r++)
		if (r != o->c->rank) {
			add(o, true, r, in, bytes);
			add(o, false, r, all + (size_t)r * bytes, bytes);
		}
}

/* The own part is copied when everybody's is there: `in` may be written by earlier work of the stream. */
static void put_own(struct op *o)
{
	if (o->result != o->own)
		memmove(o->result, o->own, o->count);
}

nccl_result ncclBroadcast(const void *in, void *out, size_t n, unsigned type, int root, struct ncclComm *c, struct CUstream_st *s)
{
	BEGIN();
	size_t bytes = n * width(type);
	unsigned char *to = device_bytes(out, bytes), *from = c->rank == root ? device_bytes(in, bytes) : to;

	if (!to || !from || root < 0 || root >= c->n)
		return INVALID_ARGUMENT;
	struct op *o = new_op(c);
	if (c->rank != root)
		add(o, false, root, to, bytes);
	for (int r = 0; c->rank == root && r < c->n; r++)
		if (r != root)
			add(o, true, r, from, bytes);
	o->own = from;
	o->result = to;
	o->count = bytes;
	o->finish = put_own;
	return start(o, s);
}

nccl_result ncclAllGather(const void *in, void *out, size_t n, unsigned type, struct ncclComm *c, struct CUstream_st *s)
{
	BEGIN();
	size_t bytes = n * width(type);
	unsigned char *from = device_bytes(in, bytes), *to = device_bytes(out, bytes * (size_t)c->n);

	if (!from || !to)
		return INVALID_ARGUMENT;
	struct op *o = new_op(c);
	exchange_all(o, from, to, bytes);
	o->own = from;
	o->result = to + (size_t)c->rank * bytes;
	o->count = bytes;
	o->finish = put_own;
	return start(o, s);
}

/* ---- reductions ---- */

static float half_of(unsigned type, const unsigned char *p)
{
	_Float16 h;
	uint16_t bits;
	uint32_t wide;
	float f;

	memcpy(&bits, p, 2);
	if (type == NCCL_FLOAT16) {
		memcpy(&h, p, 2);
		return (float)h;
	}
	wide = (uint32_t)bits << 16;
	memcpy(&f, &wide, 4);
	return f;
}

static void put_half(unsigned type, unsigned char *p, float f)
{
	uint32_t wide;

	if (type == NCCL_FLOAT16) {
		_Float16 h = (_Float16)f;
		memcpy(p, &h, 2);
		return;
	}
	memcpy(&wide, &f, 4);
	wide += 0x7fff + (wide >> 16 & 1);
	uint16_t bits = (uint16_t)(wide >> 16);
	memcpy(p, &bits, 2);
}

#define COMBINE(T, a, b)                                                                                          \
	(how == NCCL_PROD ? (T)((a) * (b)) : how == NCCL_MAX ? ((a) > (b) ? (a) : (b)) :                          \
	 how == NCCL_MIN ? ((a) < (b) ? (a) : (b)) : (T)((a) + (b)))
#define REDUCE(T)                                                                                                 \
	do {                                                                                                      \
		T sum, x;                                                                                         \
		memcpy(&sum, at, sizeof sum);                                                                     \
		for (int r = 1; r < ranks; r++) {                                                                 \
			memcpy(&x, at + (size_t)r * step_bytes, sizeof x);                                        \
			sum = COMBINE(T, sum, x);                                                                 \
		}                                                                                                 \
		if (how == NCCL_AVG)                                                                              \
			sum = (T)(sum / (T)ranks);                                                                \
		memcpy(to, &sum, sizeof sum);                                                                     \
	} while (0)

static void reduce_element(unsigned type, unsigned how, int ranks, const unsigned char *at, size_t step_bytes, unsigned char *to)
{
	if (type == NCCL_INT8)
		REDUCE(int8_t);
	else if (type == NCCL_UINT8)
		REDUCE(uint8_t);
	else if (type == NCCL_INT32)
		REDUCE(int32_t);
	else if (type == NCCL_UINT32)
		REDUCE(uint32_t);
	else if (type == NCCL_INT64)
		REDUCE(int64_t);
	else if (type == NCCL_UINT64)
		REDUCE(uint64_t);
	else if (type == NCCL_FLOAT32)
		REDUCE(float);
	else if (type == NCCL_FLOAT64)
		REDUCE(double);
	else {
		float sum = half_of(type, at);
		for (int r = 1; r < ranks; r++)
			sum = COMBINE(float, sum, half_of(type, at + (size_t)r * step_bytes));
		put_half(type, to, how == NCCL_AVG ? sum / (float)ranks : sum);
	}
}

static void do_reduce(struct op *o)
{
	size_t w = width(o->type), part = o->total * w;

	memcpy(o->all + (size_t)o->c->rank * part, o->own, part);
	for (size_t i = 0; o->result && i < o->count; i++)
		reduce_element(o->type, o->how, o->c->n, o->all + (o->first + i) * w, part, o->result + i * w);
}

/* `total` elements from everyone; `count` of the result, from `first` on, to out. */
static nccl_result reduction(const void *in, size_t total, void *out, size_t first, size_t count, unsigned type, unsigned how,
			     struct ncclComm *c, struct CUstream_st *s)
{
	size_t w = width(type);
	unsigned char *from = device_bytes(in, total * w), *to = out ? device_bytes(out, count * w) : NULL;

	if (!w || how > NCCL_AVG || !from || (out && !to))
		return INVALID_ARGUMENT;
	struct op *o = new_op(c);
	o->all = calloc((size_t)c->n, total * w);
	o->own = from;
	o->total = total;
	exchange_all(o, from, o->all, total * w);
	o->result = to;
	o->first = first;
	o->count = count;
	o->type = type;
	o->how = how;
	o->finish = do_reduce;
	return start(o, s);
}

nccl_result ncclReduce(const void *in, void *out, size_t n, unsigned type, unsigned op, int root, struct ncclComm *c,
		       struct CUstream_st *s)
{
	BEGIN();
	return reduction(in, n, c->rank == root ? out : NULL, 0, n, type, op, c, s);
}

nccl_result ncclAllReduce(const void *in, void *out, size_t n, unsigned type, unsigned op, struct ncclComm *c, struct CUstream_st *s)
{
	BEGIN();
	return reduction(in, n, out, 0, n, type, op, c, s);
}

nccl_result ncclReduceScatter(const void *in, void *out, size_t n, unsigned type, unsigned op, struct ncclComm *c,
			      struct CUstream_st *s)
{
	BEGIN();
	return reduction(in, n * (size_t)c->n, out, n * (size_t)c->rank, n, type, op, c, s);
}
