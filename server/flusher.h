/* flusher.h: copies durable checkpoints to the storage behind theirs (tier.h), one at a time per storage, by jobs of kind replicate.
 *
 * No save waits for it: the copies have a lane of their own, and what goes wrong with them is tried again later, with longer and longer
 * rests, for as long as the daemon lives. After a restart both lists say what is missing. */
#pragma once
#include "base/err.h"

struct flushers;
struct job;
struct server;

FALLIBLE enum err flushers_new(struct server *s, struct flushers **out);
void flushers_free(struct flushers *all);
/* Something has ended: a save whose checkpoint is to be copied, or a copy. */
void flushers_note(struct flushers *all, struct job *j);
