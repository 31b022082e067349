/* clock.c: the three clocks (see clock.h).
 *
 * Service time counts the intervals between its own readings, each up to DEAF_MS: the ticks of leases read it twice a second, so a
 * longer interval is one in which the loop did not run. CLOCK_BOOTTIME alone would not do: it runs on during a suspend, and no clock
 * of the kernel stops for SIGSTOP. */
#include <stdio.h>
#include <time.h>

#include "base/num.h"
#include "server/clock.h"
#include "server/clock.h"

enum { DEAF_MS = 2000 };

static struct {
	int64_t ms, read_ms;        /* service time; CLOCK_MONOTONIC when it was read last, 0: never */
} service;

static int64_t read_clock(clockid_t which)
{
	struct timespec t;

	clock_gettime(which, &t);
	return (int64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

int64_t clock_wall_ms(void)
{
	return read_clock(CLOCK_REALTIME);
}

int64_t clock_mono_ms(void)
{
	return read_clock(CLOCK_MONOTONIC);
}

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

const char *clock_text(int64_t wall_ms, char out[CLOCK_TEXT_MAX])
{
	time_t seconds = wall_ms / 1000;
	struct tm tm;
	size_t n;

	gmtime_r(&seconds, &tm);
	n = strftime(out, CLOCK_TEXT_MAX, "%Y-%m-%dT%H:%M:%S", &tm);
	snprintf(out + n, CLOCK_TEXT_MAX - n, ".%03dZ", (int)(wall_ms % 1000));
	return out;
}
