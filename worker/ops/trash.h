/* trash.h: removes a directory that nobody can see any more, behind the job's back: taking back the blocks of a large checkpoint can last
 * as long as writing it did. What a dying worker leaves is swept at the next start (commit_sweep). */
#pragma once
#include "base/err.h"

/* dirfd is duplicated. Removes at once if no thread can be started. */
FALLIBLE enum err trash_remove(int dirfd, const char *name);
