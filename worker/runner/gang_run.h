/* gang_run.h: a run done by a whole gang: the leader shares the tables, every worker does its part, the leader waits for all. */
#pragma once
#include "runner/run.h"
#include "session/job.h"

/* Shares the run with the gang, does this worker's part, waits for the others; if it streams, for the seals too: ERR_NOT_SEALED when they
 * do not come soon, for then it is begun again when they have. */
FALLIBLE enum err gang_run(struct job *j, struct run *run);
/* Another worker's part: the RUN frame's descriptors are the memfd, then the segments and spools. */
FALLIBLE enum err gang_run_join(struct job *j, int *fds, uint32_t fd_count);
