/* clock.h: what time it is. The wall clock may jump by any amount at any time: it is for records that people read. Deadlines and
 * durations go by the monotonic clock, which never jumps and stands still during a suspend. */
#pragma once
#include <stdbool.h>
#include <stdint.h>
#include <time.h>

int64_t clock_wall_ms(void);                 /* since 1970 */
int64_t clock_mono_ms(void);
int64_t clock_mono_ns(void);
int64_t clock_read_ns(clockid_t which);
static inline bool clock_same(struct timespec a, struct timespec b) { return a.tv_sec == b.tv_sec && a.tv_nsec == b.tv_nsec; }
struct timespec clock_mono_in(int64_t ms);   /* the monotonic clock's time in `ms`, for pthread's timed waits */
/* "2026-11-21T09:36:08.120Z"; out holds at least CLOCK_TEXT_MAX bytes. Returns out. */
enum { CLOCK_TEXT_MAX = 32 };
const char *clock_text(int64_t wall_ms, char out[CLOCK_TEXT_MAX]);
/* Reads RFC 3339 in UTC, with or without a fraction of a second. False: the text is no such time, and *wall_ms_out stays. */
bool clock_of_text(const char *text, int64_t *wall_ms_out);
