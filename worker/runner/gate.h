/* gate.h: a save that begins while its ranks still copy into their segments: the disk works while the trainer does.
 *
 * A rank that fills its segment has written the image's header; behind the image, on the next page, stands a little-endian u64: so many
 * bytes of the image, from its beginning, are there and will not change. A task of a run is taken when that number has passed all that
 * it reads. Of each rank, tasks come in the order in which its segment is filled. When all ranks have sealed the numbers say nothing any
 * more (run_head.sealed).
 *
 * The number is a trainer's, and may be anything: it can only make this run fail, or wait for GATE_STALL_MS. */
#pragma once
#include "runner/run.h"

enum { GATE_STALL_MS = 10000 };

/* Lists in `gates` the ranges of segments that each task of a run that writes files reads. */
FALLIBLE enum err gate_tasks(struct run_build *b);
/* Each rank's tasks in the order in which they become ready. */
FALLIBLE enum err gate_sort(struct run *run);

/* One worker's view. */
struct gate {
	struct run *run;
	const int *fds;
	uint64_t *marks;               /* by file: the latest that was read */
	int64_t moved_ms;              /* when one grew, or a task was taken */
	bool held;                     /* the latest gate_take left tasks that are not ready */
	int rest_us;                   /* how long to look away then */
};
/* active_out: some of its files are being filled; else `out` needs no closing. */
FALLIBLE enum err gate_open(struct run *run, const int *fds, uint32_t fd_count, struct gate *out, bool *active_out);
void gate_close(struct gate *g);
/* As run_take_task, of those that are ready. ERR_NOT_SEALED when nothing has come for long; ERR_FORMAT_IMAGE, ERR_SEGMENT_SHRUNK. */
FALLIBLE enum err gate_take(struct gate *g, uint32_t index, uint32_t count, uint64_t *task_out, bool *taken_out);
