/* bench.h: the clock of the bench programs, and a line of /proc/self/status. */
#pragma once
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

static inline double now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

/* The KiB of a row; 0: there is none. A peak is "VmHWM:" and not ru_maxrss, which an exec inherits: the caller's would hide it. */
static inline uint64_t status_kib(const char *row)
{
	char line[256];
	uint64_t kib = 0;
	FILE *f = fopen("/proc/self/status", "r");

	while (f && fgets(line, sizeof line, f))
		if (strncmp(line, row, strlen(row)) == 0 && sscanf(line + strlen(row), "%ju", &kib) == 1)
			break;
	if (f)
		fclose(f);
	return kib;
}
