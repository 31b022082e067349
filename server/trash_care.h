/* trash_care.h: looks at the storages' trash now and then, and has checkpoints whose time there is over removed for good, one at a time for
 * each storage, by look-up workers that take their time (worker/store/trash.h). While the wall clock is in doubt none goes. */
#pragma once
#include "base/err.h"

struct server;

FALLIBLE enum err trash_care_start(struct server *s);
/* The storage's trash has changed: it is looked at soon. */
void trash_care_changed(struct server *s, const char *storage);
