/* pace.c: see pace.h. */
#include "io/pace.h"

#include <string.h>
#include <time.h>

enum { NS_PER_MS = 1000000, PERIOD_NS = PACE_PERIOD_MS * NS_PER_MS, ALLOWED_NS = PERIOD_NS / 1000 * PACE_BACKGROUND_PERMILLE };

static int64_t clock_ns(clockid_t which)
{
	struct timespec t;

	clock_gettime(which, &t);
	return t.tv_sec * 1000000000ll + t.tv_nsec;
}

enum pace_kind pace_kind_of(const char *name)
{
	return name && strcmp(name, "background") == 0 ? PACE_BACKGROUND : PACE_FULL;
}

void pace_begin(struct pace *p, enum pace_kind kind)
{
	*p = (struct pace){ .kind = kind };
	if (kind == PACE_FULL)
		return;
	p->cpu_ns = clock_ns(CLOCK_PROCESS_CPUTIME_ID);
	p->period = clock_ns(CLOCK_MONOTONIC) / PERIOD_NS;
}

int pace_rest_at(struct pace *p, int64_t now_ns, int64_t cpu_ns)
{
	int64_t period = now_ns / PERIOD_NS, begun = period - p->period;

	p->left_ns -= cpu_ns - p->cpu_ns;
	p->cpu_ns = cpu_ns;
	p->period = period;
	if (begun > 0) {
		p->left_ns += begun * ALLOWED_NS;
		p->left_ns = p->left_ns > ALLOWED_NS ? ALLOWED_NS : p->left_ns;
	}
	if (p->left_ns > 0)
		return 0;
	return (int)(((period + 1) * PERIOD_NS - now_ns + NS_PER_MS - 1) / NS_PER_MS);
}

int pace_rest_ms(struct pace *p)
{
	if (p->kind == PACE_FULL)
		return 0;
	return pace_rest_at(p, clock_ns(CLOCK_MONOTONIC), clock_ns(CLOCK_PROCESS_CPUTIME_ID));
}
