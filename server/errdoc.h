/* errdoc.h: errors inside job records and control messages: the members of a problem (code, detail, rank, fqn, file, offset,
 * expected, actual) as a JSON object. The HTTP form, with type and instance, is api's. */
#pragma once
#include <jansson.h>
#include "base/err.h"

/* The latest error of this thread. NULL when out of memory. */
json_t *errdoc_of(enum err e);
/* A worker's problem as this thread's latest error; unknown members are ignored, texts are cut to their limits. */
enum err errdoc_restore(const json_t *problem);
