/* fence.h: keeps a former owner of a job from committing, where the checkpoint lies.
 *
 * Nodes of a cluster take jobs of dead nodes over (server/takeover.h). A node that is only slow, or cut off, does not know that it is dead
 * to the others, and no lease keeps its worker from going on a second later. So each ownership has a number, the token, which grows from
 * owner to owner, and the storage has a page beside the target that tells the highest one: the fence. With stagings S:
 *
 *     owner       makes S · reads the fence: a higher token ends it · writes · renames S to the target: ENOENT ends it
 *     who takes   raises the fence · renames every other S away · looks whether the target was committed · begins an attempt
 *
 * Either the owner sees the fence, or it made S before the fence was raised, and then its S is found and renamed. So it commits before that
 * rename, and whoever takes over finds the checkpoint, or not at all. On an object storage the conditional write of the commit is in the
 * rename's place, and a mark that is set dead is S renamed away. A removal has no S: it reads the fence under the lock of the folder, and
 * who takes it over raises the fence under the same lock.
 *
 * A staging's name ends with the mark of the daemon that made it, where that is not the job's own: each removes its own. A fence stays
 * until a sweep finds that it has not changed for an hour. */
#pragma once
#include "base/str.h"
#include "store/store.h"

bool fence_is(const char *name);                 /* a fence, or one that is being written */
/* Was the staging of that name, of `job`, made by the daemon with that mark? */
bool fence_is_of(const char *name, struct str job, const char *mark);
/* ERR_JOB_MOVED: a later owner has raised the fence. Nothing for jobs that nobody takes over (by->mark is NULL). */
FALLIBLE enum err fence_check(const struct store_job *by, const struct store *store, const char *target);
/* Raises the fence to the job's token. lock: keeps removals out meanwhile. ERR_JOB_MOVED: it is higher already. */
FALLIBLE enum err fence_raise(const struct store_job *by, const struct store *store, const char *target, bool lock);
