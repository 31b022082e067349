/* gang_run.h: a run done by a whole gang: the leader shares the tables, every worker does its part, the leader waits for all. */
#pragma once
#include "runner/run.h"
#include "session/job.h"

/* Shares the run with the gang, does this worker's part, waits for the others; if it streams, for the seals too: ERR_NOT_SEALED when they
 * do not come soon, for then it is begun again when they have. */
FALLIBLE enum err gang_run(struct job *j, struct run *run);
/* The same of tables that are built, which are freed; the job's state says `stage`, and the plan. *run: the caller's (run_detach), whatever
 * comes of it. */
FALLIBLE enum err gang_run_built(struct job *j, struct run_build *b, const char *stage, const json_t *plan, struct run *run);
/* Notes in the job's result and its `checked` how much the run has read, and how much of it was compared. */
void gang_run_note(struct job *j, const struct run *run);
/* Another worker's part: the RUN frame's descriptors are the memfd, then the segments and spools. */
FALLIBLE enum err gang_run_join(struct job *j, int *fds, uint32_t fd_count);
