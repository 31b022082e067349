/* trace.h: which trace a job belongs to (W3C Trace Context): the ids of its span, and of the caller's. As JSON, so that it travels in the
 * job's record: {"trace_id","span_id","parent_id"?,"sampled"}, ids in lower-case hex. */
#pragma once
#include <jansson.h>
#include "base/err.h"
#include "base/str.h"

enum { TRACE_ID_HEX = 32, TRACE_SPAN_HEX = 16 };

/* The job's part of the caller's trace, by the header `traceparent`; NULL: none was sent, or none that can be read, which the standard
 * treats alike. */
json_t *trace_of_caller(const char *traceparent);
json_t *trace_new(void);                                       /* a trace that begins with the job; NULL: no memory */
void trace_again(json_t *trace);                                /* another span of it, for a retry; NULL: none */
void trace_span_id(char out[TRACE_SPAN_HEX + 1]);              /* a new one */
