/* gate.h: a save that begins while its ranks still copy into their segments: the disk works while the trainer does.
 *
 * A rank that fills its segment has written the image's header; behind the image, on the next page, stands a little-endian u64: so many
 * bytes of the image, from its beginning, are there and will not change. A task of a run is taken when that number has passed all that
 * it reads. Of each rank, tasks come in the order in which its segment is filled. When all ranks have sealed the numbers say nothing any
 * more (run_head.sealed).
 *
 * A rank that needs no room for all of its image sends it through a ring: byte x lies at x modulo the ring's bytes. The page behind the
 * ring has the rank's number and, RELEASED_AT bytes on, one of the workers': below it nothing is read any more, and the rank may write as
 * far as the ring's bytes beyond. Tasks are marked as they have written what they read (gate_done), and the number is the lowest byte that
 * a task without a mark reads. A ring is read once: a run that breaks off cannot be done again.
 *
 * The rank's number is a trainer's, and may be anything: it can only make this run fail, or wait for GATE_STALL_MS. What is said to be
 * there before there was room for it fails the run as well. The workers' number is only written: the truth is in the run's tables. */
#pragma once
#include "os/seg.h"
#include "runner/run.h"

enum { GATE_STALL_MS = 10000, GATE_RELEASED_AT = 64 };

/* Lists in `gates` the ranges of segments that each task of a run that writes files reads. */
FALLIBLE enum err gate_tasks(struct run_build *b);
/* The most bytes of an image that small items of one block may be apart; 0: any. Else a ring had no room for a block's bytes. */
uint64_t gate_span(const struct run_build *b);
/* Each rank's tasks in the order in which they become ready. ERR_PLAN_INVALID: they cannot be done in that order through its ring. */
FALLIBLE enum err gate_sort(struct run *run);

/* One worker's view. */
struct gate {
	struct run *run;
	const int *fds;
	uint64_t *marks;               /* by file: the latest that was read */
	struct seg_map *pages;         /* by file: of a ring, the page with the numbers */
	int64_t moved_ms;              /* when one grew, or a task was taken or done */
	uint64_t done_seen;            /* tasks of all ranks that were done then */
	bool held;                     /* the latest gate_take left tasks that are not ready */
	int rest_us;                   /* how long to look away then */
};
/* active_out: some of its files are being filled; else `out` needs no closing. */
FALLIBLE enum err gate_open(struct run *run, const int *fds, uint32_t fd_count, struct gate *out, bool *active_out);
void gate_close(struct gate *g);
/* Says what may be written over in the beginning, before any task is taken: by one worker, once. */
FALLIBLE enum err gate_begin(struct run *run, const int *fds);
/* The task has written what it read. Once more is fine. */
FALLIBLE enum err gate_done(struct gate *g, uint64_t task);
/* As run_take_task, of those that are ready. ERR_NOT_SEALED when nothing has come for long; ERR_FORMAT_IMAGE, ERR_SEGMENT_SHRUNK. */
FALLIBLE enum err gate_take(struct gate *g, uint32_t index, uint32_t count, uint64_t *task_out, bool *taken_out);
