/* fence.h: keeps a former owner of a job from committing, where the checkpoint lies.
 *
 * Nodes of a cluster take jobs of dead nodes over (server/takeover.h). A node that is only slow, or cut off, does not know that it is dead
 * to the others, and no lease keeps its worker from going on a second, or a month, later. So owners of a job are counted: the first has
 * turn 0, and whoever takes the job from turn N has turn N + 1. A fence is a file beside the target, `.dcpd-ID-fence+N`: the owner of
 * turn N commits nothing. With stagings S, whose names have the turn, too:
 *
 *     owner       makes S · looks for the fence of its turn, which ends it · writes · renames S to the target: ENOENT ends it
 *     who takes   makes the fences of all turns before its own · looks for the one of its own, which ends it · renames every S of an
 *                 earlier turn away · looks whether the target was committed · begins an attempt
 *
 * Either an owner sees its fence, or it made S before the fence was made, and then its S is found and renamed. So it commits before that
 * rename, and whoever takes over finds the checkpoint, or not at all. Fences are only ever made, so two nodes that take over one after the
 * other, each stopped anywhere for any time, cannot undo each other's; and none touches the S of a later turn. On an object storage the
 * conditional write of the commit is in the rename's place, and a mark that is set dead is S renamed away. A removal has no S: it looks for
 * the fence under the lock of the folder, and who takes it over makes the fence under the same lock.
 *
 * A fence has no end in time: its owner may have been stopped for longer than any. Its bytes are for people; only that it is there counts.
 * A take-over leaves one for each owner before it. Whoever is kept out removes its own, once its journal says that the job is another's and
 * none of its workers is at it: nothing would look for the fence any more. Those of owners that never come back go with their folder.
 *
 * The name of a staging of a turn behind 0 ends with the mark of the daemon that made it: each daemon removes its own. */
#pragma once
#include "base/str.h"
#include "store/store.h"

bool fence_is(const char *name);                 /* a fence, or one that is being written */
/* Was the staging of that name, of `job`, made by the daemon with that mark? */
bool fence_is_of(const char *name, struct str job, const char *mark);
/* Is the staging of that name an earlier owner's than `by`, and another daemon's? */
bool fence_keeps_out(const char *name, struct str job, const struct store_job *by);
/* ERR_JOB_MOVED: a later owner has the job. Nothing for jobs that nobody takes over (by->mark is NULL). */
FALLIBLE enum err fence_check(const struct store_job *by, const struct store *store, const char *target);
/* The one that keeps out this daemon, which was the owner of that turn, has no worker at the job, and never begins one again. */
FALLIBLE enum err fence_drop(const struct store *store, const char *target, const char *job, uint32_t turn);
/* Makes the fences of all earlier owners. lock: keeps removals out meanwhile. ERR_JOB_MOVED: a later owner has the job by now. */
FALLIBLE enum err fence_raise(const struct store_job *by, const struct store *store, const char *target, bool lock);
