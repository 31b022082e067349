/* problem.h: errors as RFC 9457 application/problem+json. The catalogue is base/err.def; `type` is
 * urn:dcpd:problem:<code>, so that it is stable and needs no server. */
#pragma once
#include "base/buf.h"
#include "base/err.h"

/* Appends the document of this thread's latest error. instance (the request's path), job and request (its id) may be NULL. */
void problem_put(struct buf *out, const struct err_info *info, const char *instance, const char *job, const char *request);
