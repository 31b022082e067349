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
enum err posix_remove(const struct store_job *by, const struct store *store, const char *name);

/* posix_sweep.c */
enum err posix_recover(const struct store *store, const char *name, const char *job, bool removes, bool *done_out, struct manifest **out);
enum err posix_sweep(const struct store *store, const struct commit_keep *keep, const char *name, const char *job, uint64_t *removed_out);
/* Opens the directory that `name` is in; `last` becomes its last component. */
FALLIBLE enum err posix_open_parent(const struct store *store, const char *name, char last[256], int *fd_out);
/* Removes what earlier attempts of this job left beside its target, before another one begins. */
FALLIBLE enum err posix_clear(int parent, const char *job);
