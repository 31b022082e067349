/* commit.h: checkpoints that go, and what jobs that never ended left behind. How they come: staging.h.
 *
 * On a file system a commit is acknowledged only when the fsync of the parent directory has succeeded. After a failed fsync the kernel
 * may have marked what it could not write as clean, so a second fsync that succeeds proves nothing about the first. Therefore:
 *   - a commit (save, overwrite, delete, a save beside other files) whose fsync fails is taken back by the opposite rename, which makes
 *     the directory dirty anew, and that is fsynced: the job fails with the storage's error, and nothing has changed;
 *     (one that another node may take over is not: that node may have found it there, and is in the next case);
 *   - if that fails too, or the fsync of a recovery does, the job fails with ERR_NOT_DURABLE: what is visible is whole, but a power cut may
 *     bring the other state back. Nothing is removed then, no recovery is asked, and no retry follows;
 *   - a directory on the way to a target is removed again if its parent cannot be fsynced, so that no later save relies on it.
 * A worker that is killed between a failed fsync and its report leaves a recovery that cannot know of it. */
#pragma once
#include "store/staging.h"

/* A removal: its condition, and whether the checkpoint may come back. */
struct commit_removal {
	const struct spec_only_if *only_if;    /* NULL, or not given: whatever is there goes */
	int64_t trash_ms;              /* it lies in the storage's trash for so long; 0: it is gone */
	const char *policy, *why;      /* that removes it; NULL: a person does */
};
/* Removes a checkpoint. ERR_NOT_FOUND, ERR_FORBIDDEN, ERR_CHECKPOINT_HELD, ERR_STATE_CONFLICT: only_if is not so. */
struct commit_removed {
	uint64_t bytes;                /* of its files */
	char *about;                   /* mem_free; the words beside it in the trash, as JSON. NULL: it is gone for good */
};
FALLIBLE enum err commit_delete(const struct store_job *by, const struct ref *ref, const struct commit_removal *how,
				struct commit_removed *out);
/* Records ERR_NOT_DURABLE: "'name' what, but …", and why: this thread's latest error. */
enum err commit_in_doubt(const char *what, const char *name);
enum { COMMIT_JOB_MAX = 64 };
/* After a crash: is the job's checkpoint there? If not, what it left is removed. Of a job that is taken over, other_out is the job whose
 * checkpoint is there instead, or "": whoever asks knows which of the two came later. */
FALLIBLE enum err commit_recover(const struct stores *stores, const json_t *question, bool *committed_out, struct manifest **manifest_out,
				 char other_out[COMMIT_JOB_MAX]);
/* Names that a sweep (store.h) leaves alone, besides the one copy of a checkpoint that a job had put away (posix_in_place.h). */
struct commit_keep {
	const json_t *jobs;            /* these; NULL: none */
	const char *before;            /* those whose id does not sort before this; NULL: none */
	const char *mark;              /* those whose id does not end so: another daemon's on the same storage. NULL: all are ours */
	uint64_t attempt;              /* of one job: what attempts after this one have begun; 0: nothing */
	/* Another daemon's are removed if they have not changed since an earlier sweep. The caller knows by its own clock how long ago that
	 * was: times of files come from other hosts, and from clocks that jump. */
	const json_t *watched;         /* "others" of that sweep; NULL: none */
	json_t *others;                /* an object that gets what is left alone as another daemon's: path → state. NULL: not wanted */
};
