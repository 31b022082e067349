/* t_hurt.h: collectives without an end in each member, until a signal hits one of them: the others end, with one error
 * naming it. That a death is seen before the deadline shows in the error: at the deadline it would be another. */
#pragma once
#include "lib/t_collectives.h"

static inline enum err t_churn(struct comm *c, struct t_group *g)
{
	for (uint32_t n = 0;; n++) {
		atomic_fetch_add(&g->shared->flags[comm_rank(c)], 1);
		TRY(t_all_gathers(c, n % 3 ? 700000 : 100, n));
		TRY(t_rooted(c, n % 2 ? 500000 : 10, n));
		TRY(t_exchanges(c, 40, n));
		TRY(t_reductions(c, 20000, n));
		TRY(t_subgroups(c));
	}
}

/* g: made by t_group_init with t_churn; ended here. */
static inline void t_hurt(struct t_group *g, uint32_t victim, int signal_number, long after_us, enum err code)
{
	t_group_start(g);
	while (!atomic_load(&g->shared->flags[victim]))
		t_sleep_ms(1);
	usleep((useconds_t)after_us);
	kill(g->pids[victim], signal_number);
	pid_t pid = g->pids[victim];
	g->pids[victim] = 0;
	uint32_t hung = t_group_wait(g);
	kill(pid, SIGKILL);
	waitpid(pid, &g->status[victim], 0);
	if (hung)
		T_FAIL("%u members hung after rank %u got signal %d", hung, victim, signal_number);
	for (uint32_t r = 0; r < g->spec.size; r++)
		if (r != victim)
			t_group_expect(g, r, code, victim);
	t_group_end(g);
}

/* One member hangs, by what it runs: the others end by themselves, late, and name it. g: ended here. */
static inline void t_hangs(struct t_group *g, uint32_t victim)
{
	t_group_start(g);
	pid_t pid = g->pids[victim];
	g->pids[victim] = 0;
	assert_int_equal(t_group_wait(g), 0);
	kill(pid, SIGKILL);
	waitpid(pid, &g->status[victim], 0);
	for (uint32_t r = 0; r < g->spec.size; r++)
		if (r != victim)
			t_group_expect(g, r, ERR_PEER_TIMEOUT, victim);
	t_group_end(g);
}
