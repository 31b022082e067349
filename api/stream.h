/* stream.h: /v1/events and /v1/jobs/{id}/events: what happens, as it happens, as server-sent events or as lines of JSON. */
#pragma once
#include "api/http.h"

enum { STREAMS_MAX = 2048 };

struct streams;

FALLIBLE enum err streams_new(struct api *a, struct streams **out);
void streams_drain(struct streams *s);       /* ends all streams */
unsigned streams_open(const struct streams *s);
void streams_free(struct streams *s);
/* Begins a stream. job: only events about it, from the oldest that is kept, and an end with the job's; NULL: all, from now on or
 * from Last-Event-ID. ERR_TOO_MANY_STREAMS, ERR_NOT_ACCEPTABLE. */
FALLIBLE enum err stream_start(struct req *r, const char *job);
