/* runs.h: trainings as their checkpoints' names tell them apart, and when each last had a durable or verified checkpoint.
 *
 * A run is a checkpoint's name without its last component, "-" for a name of one component. The newest RUNS_MAX runs are kept, in
 * memory and in the journal, so that a restart does not silence an alert and a sweep of thousands of runs does not fill /metrics. */
#pragma once
#include "base/str.h"
#include "server/journal.h"

struct metrics;
struct runs;

enum { RUNS_MAX = 256 };

FALLIBLE enum err runs_new(struct journal *j, struct runs **out);    /* reads the journal */
void runs_free(struct runs *r);

/* The run of a checkpoint's name. */
struct str run_of(const char *name);
/* The number at the end of the name, else `generation`, else -1. */
int64_t run_step(const char *name, int64_t generation);
/* Notes that a checkpoint reached the mark at at_ms (wall clock). step counts for RUN_DURABLE only. The row goes into txn. */
void run_note(struct runs *all, struct journal_txn *txn, enum run_mark mark, const char *storage, const char *name, int64_t step,
	      int64_t at_ms);
/* Notes the digest of all tensors that a save wrote. True: the save before it in the same run had the same one; *before_out: its name
 * (mem_free). The journal gets it with the run's next row. */
bool run_note_tensors(struct runs *all, const char *storage, const char *name, const char *digest, char **before_out);
/* Sets the gauges dcpd_last_durable_* and dcpd_last_verified_*. */
void runs_fill(const struct runs *all, struct metrics *m);
