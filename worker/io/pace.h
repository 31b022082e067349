/* pace.h: how fast a job may go when the host's CPUs belong to somebody else: `options.pace`.
 *
 * A trainer that computes on the same cores waits for its slowest thread: what is taken of one core is taken of the step. Priority does
 * not keep that small, since it counts within a cgroup or a session only, and the trainer is mostly in another one. Taking little does: of
 * every PACE_PERIOD_MS a worker of a background job uses PACE_BACKGROUND_PERMILLE of CPU time and rests otherwise, whatever else runs or
 * does not. That bounds its use of memory bandwidth and caches, too. Periods begin at the same instants in all processes, and each worker
 * of a gang begins them on a core of its own, so that all cores are disturbed at once: the trainer waits once, not for one after the
 * other.
 *
 * Nothing is saved up: what waited for a disk goes on as slowly as it began. Later periods give back the time that a block took too much.
 *
 *     pace_begin(&p, PACE_BACKGROUND, 0, 2)    before the first block, by the thread that works
 *     ms = pace_rest_ms(&p)                    after each: rest so long, and ask again; 0: go on
 *
 * CPU time is that of the whole process, threads of the I/O engine too. */
#pragma once
#include <sched.h>
#include <stdint.h>

#include "spec/fields.h"

enum { PACE_PERIOD_MS = 100, PACE_BACKGROUND_PERMILLE = 20 };

struct pace {
	enum pace_kind kind;
	int64_t cpu_ns;                /* used when last asked */
	int64_t left_ns;               /* of what this period allows; below 0: a debt */
	int64_t period;                /* number of the last one seen */
	uint32_t index, count;
};

/* Begins the pace of worker `index` of `count`. */
void pace_begin(struct pace *p, enum pace_kind kind, uint32_t index, uint32_t count);
/* At most a period, so that who asks can look after other things in between. Less than a millisecond it rests itself. */
int pace_rest_ms(struct pace *p);
/* The core of `cpus` that worker `index` of `count` begins on; -1: none. */
int pace_core(const cpu_set_t *cpus, uint32_t index, uint32_t count);
/* How long to rest at given clocks, in nanoseconds. */
int64_t pace_rest_at(struct pace *p, int64_t now_ns, int64_t cpu_ns);
