/* pace.c: see pace.h. */
#include "io/pace.h"

#include <time.h>

#include "base/clock.h"

enum { NS_PER_MS = 1000000, PERIOD_NS = PACE_PERIOD_MS * NS_PER_MS, ALLOWED_NS = PERIOD_NS / 1000 * PACE_BACKGROUND_PERMILLE };

int pace_core(const cpu_set_t *cpus, uint32_t index, uint32_t count)
{
	uint64_t n = (uint64_t)CPU_COUNT(cpus);

	if (n == 0 || count == 0)
		return -1;
	uint64_t at = count > n ? index % n : index * n / count;
	for (int i = 0; i < CPU_SETSIZE; i++)
		if (CPU_ISSET((unsigned)i, cpus) && at-- == 0)
			return i;
	return -1;
}

/* The scheduler leaves two workers on one core for long: they hardly weigh anything. It leaves them apart as well, so they are put
 * apart and then may run anywhere again: a core that is idle when a period begins is better still. */
static void move_apart(const struct pace *p)
{
	cpu_set_t all, one;

	if (sched_getaffinity(0, sizeof all, &all) < 0)
		return;
	int core = pace_core(&all, p->index, p->count);
	if (core < 0)
		return;
	CPU_ZERO(&one);
	CPU_SET((unsigned)core, &one);
	if (sched_setaffinity(0, sizeof one, &one) == 0)
		(void)sched_setaffinity(0, sizeof all, &all);
}

void pace_begin(struct pace *p, enum pace_kind kind, uint32_t index, uint32_t count)
{
	*p = (struct pace){ .kind = kind, .index = index, .count = count };
	if (kind == PACE_FULL)
		return;
	p->cpu_ns = clock_read_ns(CLOCK_PROCESS_CPUTIME_ID);
	p->period = clock_mono_ns() / PERIOD_NS;
}

int64_t pace_rest_at(struct pace *p, int64_t now_ns, int64_t cpu_ns)
{
	int64_t period = now_ns / PERIOD_NS, begun = period - p->period;

	p->left_ns -= cpu_ns - p->cpu_ns;
	p->cpu_ns = cpu_ns;
	p->period = period;
	if (begun > 0) {
		p->left_ns += begun * ALLOWED_NS;
		p->left_ns = p->left_ns > ALLOWED_NS ? ALLOWED_NS : p->left_ns;
	}
	return p->left_ns > 0 ? 0 : (period + 1) * PERIOD_NS - now_ns;
}

int pace_rest_ms(struct pace *p)
{
	if (p->kind == PACE_FULL)
		return 0;
	int64_t rest = pace_rest_at(p, clock_mono_ns(), clock_read_ns(CLOCK_PROCESS_CPUTIME_ID));
	if (rest >= NS_PER_MS)
		move_apart(p);
	while (rest > 0 && rest < NS_PER_MS) {
		/* to the point: a timeout in milliseconds would set the workers apart in time */
		(void)nanosleep(&(struct timespec){ .tv_nsec = (long)rest }, NULL);
		rest = pace_rest_at(p, clock_mono_ns(), clock_read_ns(CLOCK_PROCESS_CPUTIME_ID));
	}
	return (int)(rest / NS_PER_MS);
}
