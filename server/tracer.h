/* tracer.h: sends the spans of jobs that have ended to a collector: OTLP over HTTP, as JSON (--otlp-endpoint).
 *
 * A job is a span, each of its stages one below it. They are sent once, within half a second of the job's end, with those of other jobs
 * that have ended meanwhile, by the thread that sends webhooks: the loop never waits. A collector that is slow or away costs spans, which
 * are counted (dcpd_trace_spans_total), and nothing else. A daemon that stops drops those that are not sent yet. */
#pragma once
#include "base/err.h"

struct job;
struct server;
struct tracer;

/* *out is NULL where there is no endpoint. ERR_CONFIG: it is no URL. */
FALLIBLE enum err tracer_new(struct server *s, struct tracer **out);
void tracer_free(struct tracer *t);
void tracer_job_ended(struct tracer *t, const struct job *j);     /* t may be NULL */
