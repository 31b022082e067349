/* derived.h: checkpoints that a job made of others of their run, such as the reshard of a step that lies beside the steps.
 *
 * The contents of such a checkpoint are as old as what it was made of, however late it was written. A training that went on from the
 * reshard of step 100, because that is the newest file, would lose what step 200 has learned. */
#pragma once
#include <jansson.h>

#include "base/str.h"

/* When the youngest of its parents in the run of `name` was begun, wall clock. -1: a training saved it, it was made of another run's
 * checkpoints, or its parents' jobs are not known: it is as old as its files. */
int64_t derived_ms(const json_t *record, const char *name);
