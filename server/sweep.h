/* sweep.h: has look-up workers remove what jobs left in a storage and nobody needs: staging directories, and trash.
 *
 * A whole storage is walked at start and after a worker died. The directory of one target is looked at some time after a job that may have
 * left something there, until nothing of that job is left: a removal that fails does not fail the job. The receipt of a target that is one
 * file goes as soon as the journal has the job's success. */
#pragma once
#include <stdbool.h>
#include "base/err.h"

struct job;
struct jobs;
struct journal;
struct lookups;
struct loop;
struct storage;
struct state_dicts;
struct storages;
struct sweeps;

/* Everything of jobs that are none any more, in the whole storage. */
void sweep_storage(struct sweeps *all, const char *storage);
bool sweep_is_due(const struct storage *st);     /* what other daemons have there was seen long ago: is it still the same? */
/* Of a job that has just ended, beside its target. Nothing if it can have left nothing, or must not be touched (ERR_NOT_DURABLE). */
void sweep_after(struct sweeps *all, struct job *j);

/* The parts below that sweeps use. */
struct sweep_parts {
	struct loop *loop;
	struct journal *journal;
	struct storages *storages;
	struct lookups *lookups;
	const struct state_dicts *state_dicts;
	const struct jobs *jobs;
};
FALLIBLE enum err sweeps_new(const struct sweep_parts *parts, struct sweeps **out);
void sweeps_free(struct sweeps *all);
