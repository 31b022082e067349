/* service_clock.c: the clock of leases and stalls (see service_clock.h).
 *
 * Service time counts the intervals between its own readings, each up to DEAF_MS: the ticks of leases read it twice a second, so a
 * longer interval is one in which the loop did not run. CLOCK_BOOTTIME alone would not do: it runs on during a suspend, and no clock
 * of the kernel stops for SIGSTOP. */
#include "server/service_clock.h"

#include "base/num.h"

enum { DEAF_MS = 2000 };

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
