/* t_group.h: runs a function in every member of a group, each a process of its own, over any back end. A member that ends otherwise than
 * by returning from it is told apart; nobody outlives t_group_end(). */
#pragma once
#include "lib/t.h"

#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "comm/comm.h"

enum { T_RANKS = 16, T_ROUNDS = 16, T_FAILED = 99 };

/* Memory that all processes of a test share. */
struct t_shared {
	_Atomic uint32_t met[T_ROUNDS], flags[T_RANKS], begun;
	unsigned char notes[T_ROUNDS][T_RANKS][COMM_RENDEZVOUS_BYTES];
	struct { _Atomic int code; int64_t rank; char text[200]; } ends[T_RANKS];
};

struct t_group {
	struct comm_spec spec;
	enum err (*fn)(struct comm *c, struct t_group *g);
	const void *arg;
	int arena, arena2;             /* arena2: of the second host, if there is one */
	uint32_t absent;               /* bits of ranks that never come */
	struct t_shared *shared;
	uint32_t round;
	pid_t pids[T_RANKS];
	int status[T_RANKS];
};

static inline uint64_t t_now_ms(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * 1000 + (uint64_t)t.tv_nsec / 1000000;
}

static inline void t_sleep_ms(long ms)
{
	struct timespec t = { ms / 1000, ms % 1000 * 1000000 };

	nanosleep(&t, NULL);
}

/* In a member: the test fails, without cmocka's jump. */
#define T_CHECK(cond)                                                                                                 \
	do {                                                                                                          \
		if (!(cond)) {                                                                                        \
			fprintf(stderr, "%s:%d: %s: not so (%s)\n", __FILE__, __LINE__, #cond, err_last()->text);      \
			_exit(T_FAILED);                                                                              \
		}                                                                                                     \
	} while (0)

static inline enum err t_rendezvous(void *user, const unsigned char mine[COMM_RENDEZVOUS_BYTES], unsigned char *all)
{
	struct t_group *g = user;
	uint32_t round = g->round++ % T_ROUNDS, size = g->spec.size;
	uint64_t until = t_now_ms() + T_HUNG_MS;

	memcpy(g->shared->notes[round][g->spec.rank], mine, COMM_RENDEZVOUS_BYTES);
	atomic_fetch_add(&g->shared->met[round], 1);
	while (atomic_load(&g->shared->met[round]) < size) {
		if (t_now_ms() > until)
			return ERR(PEER_TIMEOUT, "nobody to meet");
		t_sleep_ms(1);
	}
	for (uint32_t r = 0; r < size; r++)
		memcpy(all + (size_t)r * COMM_RENDEZVOUS_BYTES, g->shared->notes[round][r], COMM_RENDEZVOUS_BYTES);
	return OK;
}

static inline int t_member(struct t_group *g)
{
	struct comm *c = NULL;
	uint32_t rank = g->spec.rank;

	/* Deadlines are not for the time that it takes to start processes. */
	atomic_fetch_add(&g->shared->begun, 1);
	while (atomic_load(&g->shared->begun) < g->spec.size - (uint32_t)__builtin_popcount(g->absent))
		t_sleep_ms(1);
	g->spec.user = g->spec.user ? g->spec.user : g;
	enum err e = comm_open(&g->spec, &c);
	if (!e)
		e = g->fn(c, g);
	g->shared->ends[rank].rank = e ? err_last()->rank : -1;
	memcpy(g->shared->ends[rank].text, err_last()->text, sizeof g->shared->ends[rank].text - 1);
	g->shared->ends[rank].code = (int)e;
	comm_close(c);
	return e ? 1 : 0;
}

static inline void t_group_init(struct t_group *g, enum comm_backend backend, uint32_t size,
				enum err (*fn)(struct comm *c, struct t_group *g))
{
	static uint64_t id = 0;

	memset(g, 0, sizeof *g);
	assert_true(size <= T_RANKS);
	g->fn = fn;
	g->spec = (struct comm_spec){ .size = size, .inside = backend, .between = backend, .group_id = ++id, .generation = 1,
				      .deadline_ms = 60000, .meet = t_rendezvous };
	T_OK(comm_arena_new(size, &g->arena));
	g->spec.arena_fd = g->arena;
	memset(g->spec.secret, 0x5A, sizeof g->spec.secret);
	g->shared = mmap(NULL, sizeof *g->shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	assert_true(g->shared != MAP_FAILED);
}

static inline void t_group_start(struct t_group *g)
{
	static const int crashes[] = { SIGSEGV, SIGBUS, SIGABRT, SIGFPE, SIGILL };

	fflush(NULL);
	for (uint32_t r = 0; r < g->spec.size; r++) {
		if (g->absent >> r & 1)
			continue;
		g->shared->ends[r].code = -1;
		g->pids[r] = fork();
		assert_true(g->pids[r] >= 0);
		if (g->pids[r] == 0) {
			prctl(PR_SET_PDEATHSIG, SIGKILL);
			/* A crash is to end the member, not to jump into cmocka's copy in it. */
			for (size_t k = 0; k < sizeof crashes / sizeof *crashes; k++)
				signal(crashes[k], SIG_DFL);
			g->spec.rank = r;
			if (g->arena2 && g->spec.hosts[r] == 1)
				g->spec.arena_fd = g->arena2;
			int code = t_member(g);
			fflush(NULL);
			_exit(code);
		}
	}
}

/* Waits for all; who hangs is killed. Returns how many hung. */
static inline uint32_t t_group_wait(struct t_group *g)
{
	uint64_t until = t_now_ms() + T_HUNG_MS;
	uint32_t hung = 0;

	for (uint32_t r = 0; r < g->spec.size; r++) {
		while (g->pids[r] > 0 && waitpid(g->pids[r], &g->status[r], WNOHANG) == 0) {
			if (t_now_ms() > until) {
				hung++;
				kill(g->pids[r], SIGKILL);
				waitpid(g->pids[r], &g->status[r], 0);
				break;
			}
			t_sleep_ms(1);
		}
		g->pids[r] = 0;
	}
	return hung;
}

static inline void t_group_end(struct t_group *g)
{
	for (uint32_t r = 0; r < g->spec.size; r++) {
		if (g->pids[r] > 0) {
			kill(g->pids[r], SIGKILL);
			waitpid(g->pids[r], &g->status[r], 0);
		}
	}
	close(g->arena);
	if (g->arena2)
		close(g->arena2);
	munmap(g->shared, sizeof *g->shared);
}

/* All of it, where every member must succeed. */
static inline void t_group_run(enum comm_backend backend, uint32_t size, enum err (*fn)(struct comm *c, struct t_group *g),
			       const void *arg)
{
	struct t_group g;

	t_group_init(&g, backend, size, fn);
	g.arg = arg;
	t_group_start(&g);
	assert_int_equal(t_group_wait(&g), 0);
	bool bad = false;
	for (uint32_t r = 0; r < size; r++) {
		if (WIFEXITED(g.status[r]) && WEXITSTATUS(g.status[r]) == 0)
			continue;
		bad = true;
		fprintf(stderr, "rank %u of %u: status %x, error %d: %s\n", r, size, g.status[r], g.shared->ends[r].code,
			g.shared->ends[r].text);
	}
	t_group_end(&g);
	assert_false(bad);
}

/* Ended by itself with this error and this rank (-2: any)? */
static inline void t_group_expect(const struct t_group *g, uint32_t r, enum err code, int64_t rank)
{
	if (!WIFEXITED(g->status[r]) || WEXITSTATUS(g->status[r]) != 1 || g->shared->ends[r].code != (int)code ||
	    (rank != -2 && g->shared->ends[r].rank != rank))
		T_FAIL("rank %u: status %x, error %d of rank %lld, not of %lld: %s", r, g->status[r], g->shared->ends[r].code,
		       (long long)g->shared->ends[r].rank, (long long)rank, g->shared->ends[r].text);
}
