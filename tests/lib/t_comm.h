/* t_comm.h: the members of a group as processes of one test: they are forked, meet through shared memory, and the test sees how each
 * ended.
 *
 *     struct t_group g = { .spec = { .size = 4, .inside = COMM_TCP, .deadline_ms = 3000 }, .body = what_each_does };
 *     t_group_run(&g);                 g.end[r]: exit code of member r, or 128 + the signal that ended it; g.said: what they put there */
#pragma once
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include "comm/comm.h"
#include "lib/t.h"

enum { T_MEMBERS_MAX = 16, T_ENDED = 77 };

/* Of one member, seen by all. */
struct t_said {
	enum err code;
	int64_t rank;
	double seconds;
	uint64_t number;
	char text[512];
};

struct t_shared {
	_Atomic uint32_t met[8], flags[8];
	unsigned char cards[8][T_MEMBERS_MAX][COMM_RENDEZVOUS_BYTES];
	struct t_said said[T_MEMBERS_MAX];
	_Atomic int pids[T_MEMBERS_MAX];
};

struct t_group {
	struct comm_spec spec;         /* rank, meet and user are set here */
	int (*body)(struct t_group *g, struct comm *c);   /* c: NULL if `unopened`; the exit code */
	void (*before)(struct t_group *g, uint32_t rank); /* in the member, before it opens; may be NULL */
	bool unopened;                 /* the body opens */
	uint32_t lingerer;             /* this one goes on `linger_ms` after the others once all have met; 0 ms: nobody */
	long linger_ms;
	const void *arg;
	/* out */
	struct t_shared *shared;
	int end[T_MEMBERS_MAX];
	/* of a member */
	uint32_t rank, meetings;
};

static inline double t_now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static inline void t_sleep_ms(long ms)
{
	struct timespec t = { ms / 1000, ms % 1000 * 1000000 };

	while (nanosleep(&t, &t) < 0)
		;
}

static inline enum err t_comm_rendezvous(void *user, const unsigned char mine[COMM_RENDEZVOUS_BYTES], unsigned char *all_out)
{
	struct t_group *g = user;
	struct t_shared *s = g->shared;
	uint32_t turn = g->meetings++ % 8;

	memcpy(s->cards[turn][g->rank], mine, COMM_RENDEZVOUS_BYTES);
	atomic_fetch_add(&s->met[turn], 1);
	for (int i = 0; atomic_load(&s->met[turn]) < g->spec.size; i++) {
		if (i > 20000)
			return ERR(TIMED_OUT, "a member did not come to the meeting");
		t_sleep_ms(1);
	}
	memcpy(all_out, s->cards[turn], (size_t)g->spec.size * COMM_RENDEZVOUS_BYTES);
	if (g->linger_ms && g->rank == g->lingerer)
		t_sleep_ms(g->linger_ms);
	return OK;
}

/* Writes down how a call ended. */
static inline enum err t_say(struct t_group *g, enum err e, double since)
{
	struct t_said *s = &g->shared->said[g->rank];

	s->code = e;
	s->rank = e ? err_last()->rank : -1;
	s->seconds = t_now() - since;
	snprintf(s->text, sizeof s->text, "%.500s", e ? err_last()->text : "");
	return e;
}

static inline int t_member(struct t_group *g, uint32_t rank)
{
	struct comm *c = NULL;
	int code;

	g->rank = g->spec.rank = rank;
	g->spec.meet = t_comm_rendezvous;
	g->spec.user = g;
	if (g->before)
		g->before(g, rank);
	if (g->unopened)
		return g->body(g, NULL);
	double since = t_now();
	if (t_say(g, comm_open(&g->spec, &c), since)) {
		fprintf(stderr, "rank %u: comm_open: %s\n", rank, err_last()->text);
		return T_ENDED;
	}
	code = g->body(g, c);
	comm_close(c);
	return code;
}

static inline void t_group_start(struct t_group *g)
{
	g->shared = mmap(NULL, sizeof *g->shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	assert_true(g->shared != MAP_FAILED && g->spec.size <= T_MEMBERS_MAX);
	fflush(NULL);
	for (uint32_t r = 0; r < g->spec.size; r++) {
		pid_t pid = fork();
		assert_true(pid >= 0);
		if (pid == 0) {
			/* One that is stopped would outlive a test that fails, and hold its output open. */
			prctl(PR_SET_PDEATHSIG, SIGKILL);
			_exit(t_member(g, r));
		}
		atomic_store(&g->shared->pids[r], pid);
	}
}

static inline void t_group_wait(struct t_group *g)
{
	for (uint32_t r = 0; r < g->spec.size; r++) {
		int status;
		assert_int_equal(waitpid(g->shared->pids[r], &status, 0), g->shared->pids[r]);
		g->end[r] = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
	}
}

static inline void t_group_free(struct t_group *g)
{
	munmap(g->shared, sizeof *g->shared);
	g->shared = NULL;
}

/* All members must end with 0. */
static inline void t_group_run(struct t_group *g)
{
	t_group_start(g);
	t_group_wait(g);
	for (uint32_t r = 0; r < g->spec.size; r++)
		if (g->end[r])
			T_FAIL("member %u of %u ended with %d: %s", r, g->spec.size, g->end[r], g->shared->said[r].text);
	t_group_free(g);
}
