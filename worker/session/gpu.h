/* gpu.h: a worker's GPU: opened when a job first needs it and kept, since a context takes long to make; and segments that are page-locked
 * for it.
 *
 * Page-locked segments stay mapped and registered here as long as this worker lives and the segment has its name: a state dict that
 * is gone is let go when the worker begins its next job, or ends. A trainer that wants to copy from such a segment by DMA registers
 * its own mapping too; the pages are locked already. */
#pragma once
#include "session/job.h"

/* worker->gpu; ERR_BACKEND_UNAVAILABLE says why there is none. */
FALLIBLE enum err gpu_open(struct worker *w);
void gpu_close(struct worker *w);
/* Page-locks the job's new segments. All or none. */
FALLIBLE enum err gpu_pin_made(struct job *j);
/* Lets go what has no name any more. */
void gpu_sweep(struct worker *w);
