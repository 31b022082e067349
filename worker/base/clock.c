/* clock.c: see clock.h. */
#include "base/clock.h"

#include <stdio.h>

enum { MS_PER_S = 1000, NS_PER_MS = 1000000, NS_PER_S = 1000000000 };

int64_t clock_read_ns(clockid_t which)
{
	struct timespec t;

	clock_gettime(which, &t);
	return (int64_t)t.tv_sec * NS_PER_S + t.tv_nsec;
}

int64_t clock_wall_ms(void)
{
	return clock_read_ns(CLOCK_REALTIME) / NS_PER_MS;
}

int64_t clock_mono_ms(void)
{
	return clock_mono_ns() / NS_PER_MS;
}

int64_t clock_mono_ns(void)
{
	return clock_read_ns(CLOCK_MONOTONIC);
}

struct timespec clock_mono_in(int64_t ms)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	int64_t ns = t.tv_nsec + ms % MS_PER_S * NS_PER_MS;
	return (struct timespec){ .tv_sec = t.tv_sec + ms / MS_PER_S + ns / NS_PER_S, .tv_nsec = ns % NS_PER_S };
}

const char *clock_text(int64_t wall_ms, char out[CLOCK_TEXT_MAX])
{
	time_t seconds = wall_ms / 1000;
	struct tm tm;

	gmtime_r(&seconds, &tm);
	size_t n = strftime(out, CLOCK_TEXT_MAX, "%Y-%m-%dT%H:%M:%S", &tm);
	snprintf(out + n, CLOCK_TEXT_MAX - n, ".%03dZ", (int)(wall_ms % 1000));
	return out;
}
