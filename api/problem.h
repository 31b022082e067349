/* problem.h: errors as RFC 9457 application/problem+json. The catalogue is base/err.def; `type` is
 * urn:dcpd:problem:<code>, so that it is stable and needs no server. */
#pragma once
#include <jansson.h>
#include "base/buf.h"
#include "base/err.h"

/* Appends the document of this thread's latest error. instance (the request's path) and job may be NULL. */
void problem_put(struct buf *out, const struct err_info *info, const char *instance, const char *job);
/* A problem that a job record or a worker carries, as this thread's latest error. Unknown members are ignored. */
enum err problem_restore(const json_t *problem);
