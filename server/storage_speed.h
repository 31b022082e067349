/* storage_speed.h: how fast a storage is used, minute by minute, and how fast its free space goes: the last hours of both, in memory.
 *
 * Sums since the start say nothing of a disk that became slow an hour ago, and one free space says nothing of when the disk is full.
 * Times are the monotonic clock's; answers have the wall clock's. */
#pragma once
#include "base/buf.h"

enum { STORAGE_SPEED_MINUTES = 360 };

struct storage_speed;              /* NULL: nothing is known yet */

void storage_speed_drop(struct storage_speed *s);
/* Adds what one stage of a job, or a look-up, moved: [written], in ns. Without memory nothing is kept. */
void storage_speed_count(struct storage_speed **s, int64_t now_ms, bool written, uint64_t bytes, int64_t ns);
void storage_speed_space(struct storage_speed **s, int64_t now_ms, uint64_t free_bytes);
/* [{"at","read":{"bytes","seconds"},"write":{…}},…], oldest first; minutes and directions without traffic are left out. */
FALLIBLE enum err storage_speed_put(const struct storage_speed *s, int64_t now_ms, int64_t wall_ms, struct buf *out);
/* How much less is free than at the oldest look within the hours that are kept, and how long ago that was. False: nothing is known of so
 * long a time that it says anything. */
bool storage_speed_growth(const struct storage_speed *s, int64_t now_ms, int64_t *bytes, int64_t *ms);
