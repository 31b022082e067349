/* trash.h: removes what nobody can see any more, behind the job's back and without slowing the next save: taking back the blocks of a large
 * checkpoint can keep a disk as busy as writing it did. A process that has a file open or mapped, or another link to it, keeps it whole.
 *
 * It lasts up to ten times as long as it would at full speed, but no longer than TRASH_GENTLE_MS where full speed can do it in that time;
 * a storage that runs out of space gets all of its own back at full speed; where the next checkpoint might not fit before, the job waits
 * for that. A dying worker's left-overs are swept (commit_sweep). */
#pragma once
#include <stdbool.h>
#include "base/err.h"

#define TRASH_PREFIX ".dcpd-trash-"    /* and the id of the job that put it there */

enum { TRASH_GENTLE_MS = 45000 };      /* less than a gang stays warm when it is idle */

/* A file or a directory. dirfd is duplicated. Removes at once if no thread can be started, or less than twice what is held is free. */
FALLIBLE enum err trash_remove(int dirfd, const char *name);
/* Is there no time for rests, with so much free, and so much in the trash? */
bool trash_is_short(uint64_t free_bytes, uint64_t total_bytes, uint64_t held_bytes);
/* Of this process, so far. */
struct trash_stats {
	uint64_t held;                 /* bytes in the trash now */
	uint64_t steps, rests;         /* that files were shrunk by, that were taken between them */
	uint64_t removals;             /* ended */
	uint64_t waiting;              /* not ended */
};
struct trash_stats trash_stats(void);
/* How long it may yet take until the trash is empty, on a disk that is not too slow; 0: it is. */
int64_t trash_ms(void);
