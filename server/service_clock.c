/* service_clock.c: the clock of leases and stalls (see service_clock.h).
 *
 * Service time counts the intervals between its own readings, each up to DEAF_MS: the ticks of leases read it twice a second, so a
 * longer interval is one in which the loop did not run. CLOCK_BOOTTIME alone would not do: it runs on during a suspend, and no clock
 * of the kernel stops for SIGSTOP. */
#include "server/service_clock.h"

#include "base/num.h"

enum { DEAF_MS = 2000, JUMP_MS = 5000, SETTLE_MS = 3600000, AWAY_MS = 86400000 };

static struct {
	int64_t ms, read_ms;        /* service time; CLOCK_MONOTONIC when it was read last, 0: never */
} service;

void clock_service_begin(int64_t ms)
{
	service.ms = (int64_t)num_max((uint64_t)service.ms, (uint64_t)ms);
	service.read_ms = clock_mono_ms();
}

int64_t clock_service_ms(void)
{
	int64_t now = clock_mono_ms();

	service.ms += (int64_t)num_min((uint64_t)(now - service.read_ms), DEAF_MS);
	service.read_ms = now;
	return service.ms;
}

int64_t clock_service_wall(int64_t service_ms)
{
	return clock_wall_ms() + service_ms - clock_service_ms();
}

/* ---- is the wall clock to be trusted? ---- */

static struct {
	int64_t wall_ms, boot_ms;   /* at the last reading; boot_ms 0: never read */
	int64_t settled_ms;         /* CLOCK_BOOTTIME from which on it is trusted */
} wall;

static int64_t boot_ms(void)
{
	return clock_read_ns(CLOCK_BOOTTIME) / 1000000;
}

void clock_wall_begin(int64_t last_ms)
{
	wall.wall_ms = clock_wall_ms();
	wall.boot_ms = boot_ms();
	wall.settled_ms = last_ms && wall.wall_ms - last_ms > AWAY_MS ? wall.boot_ms + SETTLE_MS : wall.boot_ms;
}

/* A clock that is steered runs a little faster or slower. */
bool clock_wall_is_sane(void)
{
	int64_t now = clock_wall_ms(), boot = boot_ms(), passed = boot - wall.boot_ms, off = now - wall.wall_ms - passed;

	if (!wall.boot_ms || off > JUMP_MS + passed / 1000 || off < -JUMP_MS - passed / 1000)
		wall.settled_ms = boot + SETTLE_MS;
	wall.wall_ms = now;
	wall.boot_ms = boot;
	return boot >= wall.settled_ms;
}
