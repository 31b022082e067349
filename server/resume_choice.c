/* resume_choice.c: see resume_choice.h. */
#include "server/resume_choice.h"

int64_t resume_attempts(const struct resume_candidate *all, size_t i, int64_t now_ms)
{
	for (size_t newer = 0; newer < i; newer++) /* a time to come says nothing: somebody's clock was wrong */
		if (all[newer].durable_ms > all[i].attempted_ms && all[newer].durable_ms <= now_ms)
			return 0;
	return all[i].attempts;
}

enum resume_fate resume_fate_of(const struct resume_candidate *all, size_t i, int64_t attempts_max, int64_t now_ms)
{
	if (all[i].unwanted)
		return RESUME_UNWANTED;
	if (all[i].damaged)
		return RESUME_DAMAGED;
	if (all[i].unloadable)
		return RESUME_UNLOADABLE;
	return attempts_max && resume_attempts(all, i, now_ms) >= attempts_max ? RESUME_EXHAUSTED : RESUME_FIT;
}

size_t resume_choose(const struct resume_candidate *all, size_t n, int64_t attempts_max, int64_t now_ms)
{
	for (size_t i = 0; i < n; i++)
		if (resume_fate_of(all, i, attempts_max, now_ms) == RESUME_FIT)
			return i;
	return n;
}
