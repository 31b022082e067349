/* t_nccl.h: the members of a group over libnccl, each a process, for test_comm_nccl*.c. Over the fake library there are up to four, over a
 * real one (make check-gpu) as many as there are GPUs. */
#pragma once
#include <stdatomic.h>
#include <sys/mman.h>
#include <time.h>

#include "base/mem.h"
#include "comm/comm.h"
#include "comm/nccl.h"
#include "device/device.h"
#include "lib/t_fakes.h"

enum { RANKS = 4, MEETINGS = 8, DEADLINE_MS = 1000, PLENTY_MS = 60000 };

/* Memory that the members of a case share. */
static struct shared {
	_Atomic uint32_t came[MEETINGS], passed, turn;
	unsigned char blobs[MEETINGS][RANKS][COMM_RENDEZVOUS_BYTES];
} *shared;

static struct me {
	uint32_t rank, size, meets, gpus;
	struct device *d;
	struct comm *c;
	enum err tick;                 /* what the tick answers */
	uint32_t deadline_ms;
} me;

typedef void (*case_fn)(void);

static inline enum err meet(void *user, const unsigned char mine[COMM_RENDEZVOUS_BYTES], unsigned char *all_out)
{
	uint32_t n = me.meets++;

	(void)user;
	C_TRUE(n < MEETINGS);
	memcpy(shared->blobs[n][me.rank], mine, COMM_RENDEZVOUS_BYTES);
	atomic_fetch_add(&shared->came[n], 1);
	while (atomic_load(&shared->came[n]) < me.size)
		nanosleep(&(struct timespec){ .tv_nsec = 200000 }, NULL);
	memcpy(all_out, shared->blobs[n], (size_t)me.size * COMM_RENDEZVOUS_BYTES);
	return OK;
}

static inline enum err tick(void *user)
{
	(void)user;
	return me.tick ? (err_record(me.tick, 0, ERR_PLACE, "the coordinator said so"), me.tick) : OK;
}

static inline struct comm_spec spec_of(void)
{
	return (struct comm_spec){ .rank = me.rank, .size = me.size, .inside = COMM_NCCL, .between = COMM_NCCL, .arena_fd = -1,
				   .device = me.d, .deadline_ms = me.deadline_ms, .meet = meet, .tick = tick };
}

static inline void open_device(void)
{
	C_OK(device_open((int32_t)me.rank, &me.d)); /* NCCL takes one member a GPU */
}

static inline void open_group(void)
{
	open_device();
	struct comm_spec spec = spec_of();
	C_OK(comm_open(&spec, &me.c));
}

static inline void close_group(void)
{
	comm_close(me.c);
	device_close(me.d);
}

static inline void member(void *arg)
{
	(*(case_fn *)arg)();
	atomic_fetch_add(&shared->passed, 1);
}

static int gpus = RANKS, ran;         /* groups that can be made; cases that were */

static inline void count_gpus(void *arg)
{
	(void)arg;
	enum err e = device_cuda_open();
	if (!e)
		e = comm_nccl_available(NULL);
	if (e)
		fprintf(stderr, "skipped: %s\n", err_last()->text);
	_exit(e ? 0 : (int)device_cuda_count());
}

/* At the end of each test: one that had no case is skipped, not passed. */
static inline void finish(void)
{
	int n = ran;

	ran = 0;
	if (n == 0)
		skip();
}

/* The case in `size` processes. */
static inline void run(case_fn fn, uint32_t size)
{
	pid_t pids[RANKS];

	if ((int)size > gpus) {
		if (gpus)
			fprintf(stderr, "not tried: %u members need as many GPUs, there are %d\n", size, gpus);
		return;
	}
	ran++;
	memset(shared, 0, sizeof *shared);
	for (uint32_t r = 0; r < size; r++) {
		me = (struct me){ .rank = r, .size = size, .deadline_ms = PLENTY_MS };
		pids[r] = t_fakes_start(member, &fn);
	}
	for (uint32_t r = 0; r < size; r++)
		t_fakes_end(pids[r]);
}

static inline void run_sizes(case_fn fn)
{
	for (uint32_t size = 1; size <= RANKS; size++)
		run(fn, size);
}

static inline uint64_t now_ms(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * 1000 + (uint64_t)t.tv_nsec / 1000000;
}

/* ---- device memory ---- */

static inline void *to_device(const void *p, uint64_t n)
{
	void *at;

	C_OK(device_alloc(me.d, n, &at));
	C_OK(device_copy(me.d, at, p, n, DEVICE_PUT));
	C_OK(device_wait(me.d, PLENTY_MS));
	return at;
}

static inline void from_device(void *to, void *at, uint64_t n)
{
	C_OK(device_copy(me.d, to, at, n, DEVICE_GET));
	C_OK(device_wait(me.d, PLENTY_MS));
}

static inline unsigned char byte_of(uint32_t rank, uint64_t i)
{
	return (unsigned char)(rank * 71 + i * 7 + i / 255 + 1);
}

static inline unsigned char *bytes_of(uint32_t rank, uint64_t n)
{
	unsigned char *p = mem_alloc(n);

	C_TRUE(p);
	for (uint64_t i = 0; i < n; i++)
		p[i] = byte_of(rank, i);
	return p;
}

static inline void check_part(const unsigned char *p, uint32_t rank, uint64_t n)
{
	for (uint64_t i = 0; i < n; i++)
		C_TRUE(p[i] == byte_of(rank, i));
}

/* ---- messages ---- */

struct traffic {
	struct comm_message *messages;
	uint64_t count, packed, unpacked, last[RANKS][RANKS];
	uint64_t fail_at;
	enum err fail;
};

static inline enum err pack(void *user, uint64_t i, void *out)
{
	struct traffic *t = user;
	const struct comm_message *m = &t->messages[i];

	C_TRUE(m->from == me.rank);
	if (t->fail && i == t->fail_at)
		return err_at_fqn(ERR(FORMAT_IMAGE, "the tensor of message %ju is cut off", (uintmax_t)i), "model.w", 7);
	for (uint32_t k = 0; k < m->bytes; k++)
		((unsigned char *)out)[k] = byte_of(m->from, i + k);
	t->packed++;
	return OK;
}

static inline enum err unpack(void *user, uint64_t i, const void *in)
{
	struct traffic *t = user;
	const struct comm_message *m = &t->messages[i];

	C_TRUE(m->to == me.rank);
	C_TRUE(t->last[m->from][m->to] <= i); /* in list order per pair */
	t->last[m->from][m->to] = i;
	for (uint32_t k = 0; k < m->bytes; k++)
		C_TRUE(((const unsigned char *)in)[k] == byte_of(m->from, i + k));
	t->unpacked++;
	return OK;
}

static inline struct traffic traffic_of(uint64_t count, uint32_t most, unsigned seed)
{
	struct traffic t = { .messages = mem_zalloc(count + 1, sizeof *t.messages), .count = count };
	uint32_t x = seed;

	C_TRUE(t.messages);
	for (uint64_t i = 0; i < count; i++) {
		x = x * 1664525 + 1013904223;
		t.messages[i].from = (x >> 8) % me.size;
		t.messages[i].to = (x >> 16) % me.size;
		t.messages[i].bytes = i % 7 == 0 ? 0 : (x >> 4) % most;
	}
	return t;
}

static inline bool share(void)
{
	if (!t_gpu())
		setenv("FAKE_CUDA_DEVICES", "4", 1);
	shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (t_gpu()) { /* in a process of its own: a driver must not be inherited */
		int status = 0;
		if (waitpid(t_fakes_start(count_gpus, NULL), &status, 0) < 0 || !WIFEXITED(status))
			return false;
		gpus = WEXITSTATUS(status);
	}
	return shared != MAP_FAILED;
}
