/* posix_in_place.h: a checkpoint's files moved one by one into a directory that holds other things too, and moved back if that broke off.
 *
 *     target: old files ──(1)──► staging/.old        .metadata first: from here on nothing can be loaded
 *     staging: new files ──(2)──► target             .metadata last: the commit point
 *     staging goes, and .old with it
 *
 * No rename can do all of this at once, as it can where a whole directory is exchanged. So the old files stay until the new ones are
 * complete, and whoever finds a job that ended in between takes (2) and (1) back: posix_in_place_restore(). */
#pragma once
#include "store/staging.h"

/* Moves the staged files, manifest and metadata to the directory `to`; `metadata` is the name of the file
 * that makes the others a checkpoint. */
FALLIBLE enum err posix_in_place_move(const struct staging *s, int to, const char *metadata);
/* Puts back what lies in staging/.old, unless the new checkpoint is complete. Nothing to put back is fine. */
FALLIBLE enum err posix_in_place_restore(int staging, int to);
/* Is a checkpoint put away in there that posix_in_place_restore would put back? True if it cannot be told. */
bool posix_in_place_holds_old(int staging);
