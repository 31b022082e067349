/* clock.c: see clock.h. */
#include "base/clock.h"

#include <stdio.h>
#include <string.h>

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

/* The first three digits behind the dot count, as milliseconds. */
static const char *read_fraction(const char *p, int64_t *ms)
{
	*ms = 0;
	if (*p != '.')
		return p;
	for (int64_t unit = 100; *++p >= '0' && *p <= '9'; unit /= 10)
		*ms += (*p - '0') * unit;
	return p;
}

/* Just so many digits, and the byte behind them, if it is not 0; NULL: something else stands there. sscanf() takes ten times as long. */
static const char *read_number(const char *p, int digits, char behind, int *out)
{
	*out = 0;
	for (; digits > 0 && *p >= '0' && *p <= '9'; digits--)
		*out = *out * 10 + (*p++ - '0');
	return digits || (behind && *p != behind) ? NULL : p + (behind != '\0');
}

bool clock_of_text(const char *text, int64_t *wall_ms_out)
{
	struct tm tm = { 0 };
	int64_t ms;

	if (!(text = read_number(text, 4, '-', &tm.tm_year)) || !(text = read_number(text, 2, '-', &tm.tm_mon)) ||
	    !(text = read_number(text, 2, 'T', &tm.tm_mday)) || !(text = read_number(text, 2, ':', &tm.tm_hour)) ||
	    !(text = read_number(text, 2, ':', &tm.tm_min)) || !(text = read_number(text, 2, '\0', &tm.tm_sec)))
		return false;
	if (strcmp(read_fraction(text, &ms), "Z") != 0 || tm.tm_mon < 1 || tm.tm_mon > 12 || tm.tm_mday < 1 || tm.tm_mday > 31 ||
	    tm.tm_hour > 23 || tm.tm_min > 59 || tm.tm_sec > 60)
		return false;
	tm.tm_year -= 1900;
	tm.tm_mon -= 1;
	*wall_ms_out = (int64_t)timegm(&tm) * MS_PER_S + ms;
	return true;
}
