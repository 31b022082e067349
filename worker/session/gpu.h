/* gpu.h: a worker's GPU: opened when a job first needs it and kept, since a context takes long to make; and segments that are page-locked
 * for it.
 *
 * Page-locked segments stay mapped and registered here as long as this worker lives and the segment has its name: a state dict that
 * is gone is let go within seconds. A trainer that wants to copy from such a segment by DMA registers its own mapping too; the pages
 * are locked already. */
#pragma once
#include "session/job.h"

/* worker->gpu; ERR_BACKEND_UNAVAILABLE says why there is none. */
FALLIBLE enum err gpu_open(struct worker *w);
/* The same of the GPU with this uuid. A worker has one GPU for its life: another one's is not looked at. ERR_NOT_FOUND. */
FALLIBLE enum err gpu_open_by_uuid(struct worker *w, const char *uuid);
void gpu_close(struct worker *w);
/* Page-locks the job's new segments. All or none. */
FALLIBLE enum err gpu_pin_made(struct job *j);
struct gpu_segment {
	unsigned char *p;
	const char *not_pinned;        /* why the driver does not page-lock it: copies take longer; NULL: it is page-locked */
};
/* The segment mapped, and page-locked if the driver lets us: once, and again only if it has grown. Valid until the next gpu_sweep. */
FALLIBLE enum err gpu_map_segment(struct worker *w, int fd, uint64_t bytes, struct gpu_segment *out);
/* Lets go what was page-locked or mapped since worker->pins.n was `before`: a segment that is read once. */
void gpu_let_go(struct worker *w, uint64_t before);
/* Lets go what has no name any more. */
void gpu_sweep(struct worker *w);
