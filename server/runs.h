/* runs.h: trainings as their checkpoints' names tell them apart, and when each last had a durable or verified checkpoint.
 *
 * A run is a checkpoint's name without its last component, "-" for a name of one component. The newest RUNS_MAX runs are kept, in
 * memory and in the journal, so that a restart does not silence an alert and a sweep of thousands of runs does not fill /metrics. */
#pragma once
#include "base/buf.h"
#include "base/str.h"
#include "server/journal.h"
#include "spec/ref.h"

struct metrics;
struct runs;

enum { RUNS_MAX = 256 };

FALLIBLE enum err runs_new(struct journal *j, struct runs **out);    /* reads the journal */
void runs_free(struct runs *r);

/* The run of a checkpoint's name. */
static inline struct str run_of(const char *name) { return ref_run(name); }
/* The number at the end of the name, else `generation`, else -1. */
static inline int64_t run_step(const char *name, int64_t generation)
{
	return ref_step(name, generation);
}
/* Notes that a checkpoint reached the mark at at_ms (wall clock). step counts for RUN_DURABLE only. The row goes into txn. */
void run_note(struct runs *all, struct journal_txn *txn, enum run_mark mark, const char *storage, const char *name, int64_t step,
	      int64_t at_ms);
/* Notes that a snapshot of this step is in memory: what a save that is under way, or has failed, would have kept. The journal gets it with
 * the run's next row; run_put writes that. step -1: not known. state_dict: that of the trainer. */
void run_note_seen(struct runs *all, const char *storage, const char *name, int64_t step, int64_t at_ms, const char *state_dict);
/* Notes what a save took: from its begin until it was durable, and until its snapshot was whole (-1: not known). */
void run_note_cost(struct runs *all, const char *storage, const char *name, int64_t save_ms, int64_t stall_ms);
/* Puts the row of the checkpoint's run into txn, if the run is known. */
void run_put(const struct runs *all, struct journal_txn *txn, const char *storage, const char *name);
/* Appends `"lost_work":{…},"save_interval":{…}` of a run whose newest durable checkpoint is of that moment (wall clock; 0: not known) and
 * step (-1: none). since: the moment as text. mtbf_s: mean time between failures. */
struct run_newest {
	const char *since;
	int64_t since_ms, step;
};
void run_put_course(const struct runs *all, const char *storage, struct str run, const struct run_newest *newest, double mtbf_s,
		    struct buf *out);
/* Notes the digest of all tensors that a save wrote. True: the save before it in the same run had the same one; *before_out: its name
 * (mem_free). The journal gets it with the run's next row. */
bool run_note_tensors(struct runs *all, const char *storage, const char *name, const char *digest, char **before_out);
/* Sets the gauges dcpd_last_durable_*, dcpd_last_verified_* and, of runs whose trainer lives, dcpd_lost_work_*. lives: has the state dict
 * of this name a trainer that lives? */
struct run_trainers {
	bool (*lives)(const void *user, const char *state_dict);
	const void *user;
};
void runs_fill(const struct runs *all, const struct run_trainers *trainers, struct metrics *m);
