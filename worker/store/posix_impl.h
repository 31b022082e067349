/* posix_impl.h: what posix*.c share: the commit and the sweep, which posix.c puts in its table. */
#pragma once
#include "store/commit.h"
#include "store/posix.h"
#include "store/staging.h"

enum { POSIX_LOCK_MS = 10000 };

/* posix_commit.c */
enum err posix_stage(struct staging *s, bool keep);
enum err posix_publish(struct staging *s, const char *replaces);
enum err posix_publish_in_place(struct staging *s, const char *metadata);
enum err posix_replace(struct staging *s, const char *name);
void posix_discard(struct staging *s);
enum err posix_remove(const struct store_job *by, const struct store *store, const char *name, const struct store_removal *how);

/* posix_beside.c */
/* Moves the pages of the file `from` that are there to those of `to`, paths below the top; what lies there is replaced. */
enum err posix_beside_move(const struct store *store, const char *from, const char *to);
enum err posix_beside_drop(const struct store *store, const char *name);
/* After a crash: pages of a file that has gone follow it to `to`, or, NULL, go for good. */
enum err posix_beside_follow(const struct store *store, const char *name, const char *to);
/* The manifest in the staging directory becomes the page of the published file. The checkpoint is durable already: a failure costs it
 * its record, and is logged. */
void posix_beside_keep_receipt(int parent, const char *staging, const char *file);

/* posix_sweep.c */
enum err posix_fence(const struct store_job *by, const struct store *store, const char *target);
enum err posix_recover(const struct store_job *by, const struct store *store, const char *name, bool removes, bool *done_out,
		       struct manifest **out);
enum err posix_sweep(const struct store *store, const struct commit_keep *keep, const char *name, const char *job,
		     struct store_swept *out);
/* Opens the directory that `name` is in; `last` becomes its last component. */
FALLIBLE enum err posix_open_parent(const struct store *store, const char *name, char last[256], int *fd_out);
/* Removes what earlier attempts of this job left beside its target, before another one begins. */
FALLIBLE enum err posix_clear(int parent, const struct store_job *by);

/* posix_trash.c */
enum { POSIX_TRASH_PATH_MAX = 128 };
/* Makes the entry of the job, with its page; path becomes where the checkpoint is to be moved. */
FALLIBLE enum err posix_trash_begin(const struct store *store, int parent, const char *job, const char *about,
				    char path[POSIX_TRASH_PATH_MAX]);
FALLIBLE enum err posix_trash_sync(const struct store *store, const char *job);    /* what was moved there, or out of it */
void posix_trash_end(const struct store *store, const char *job);       /* removes the entry if no checkpoint lies in it */
FALLIBLE enum err posix_trash_has(const struct store *store, const char *job, bool *out);      /* is a checkpoint in its entry? */
/* After a crash of a removal whose checkpoint is in the entry: the pages beside the name follow it. */
enum err posix_trash_follow(const struct store *store, const char *job, const char *name);
/* Removes entries without a checkpoint, of jobs that `keep` lets go. */
FALLIBLE enum err posix_trash_sweep(const struct store *store, const struct commit_keep *keep, uint64_t *removed_out);
enum err posix_trash_list(const struct store *store, store_trash_fn fn, void *user);
enum err posix_trash_restore(const struct store_job *by, const struct store *store, const char *id, const char *name);
enum err posix_trash_empty(const struct store *store, const char *id);
