/* clock.c: the two clocks (see server.h). */
#include <stdio.h>
#include <time.h>

#include "server/server.h"

int64_t clock_wall_ms(void)
{
	struct timespec t;

	clock_gettime(CLOCK_REALTIME, &t);
	return (int64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

int64_t clock_mono_ms(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (int64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000;
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
