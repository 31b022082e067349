/* owner.h: whose a checkpoint is. Only its owner, root and dcpd's own user remove or replace it.
 *
 * The owner is the uid that had it committed, as the manifest (of a single file the page beside it, beside.h) says: dcpd's user owns the
 * files themselves. A manifest is believed if it belongs to whom the directory or file belongs to, so that nobody can add one to another's
 * directory. Where there is none (PyTorch's checkpoints), and in checkpoints of older versions, the owner is the uid of the directory or
 * file. Ranks that save without collectives have a manifest each: who replaces anything there must own all of them. A copy belongs to whom
 * its own page names (copied.h). */
#pragma once
#include "store/store.h"

/* ERR_FORBIDDEN unless the job may remove or replace what lies at `name`. */
FALLIBLE enum err owner_check(const struct store_job *by, const struct store *store, const char *name);
/* *owner_out: the owner; where parts have different ones, one that is not `asks`. ERR_NOT_FOUND. */
FALLIBLE enum err owner_find(const struct store *store, const char *name, uid_t asks, uid_t *owner_out);
