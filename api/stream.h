/* stream.h: /v1/events and /v1/jobs/{id}/events: what happens, as it happens, as server-sent events or as lines of JSON. */
#pragma once
#include "api/http.h"

enum { STREAMS_MAX = 2048, STREAMS_FED_MAX = 128, STREAM_ID_MAX = 48 };

/* A node asks for a job's events with this header (relay.h): the answer ends with those that there are, or ("next") with the first that
 * come within ten seconds. STREAM_END at its end: no more will follow. */
#define STREAM_POLL_HEAD "Dcpd-Poll"
#define STREAM_POLL_NOW  "now"
#define STREAM_POLL_NEXT "next"
#define STREAM_END       ": end\n\n"

struct streams;
struct stream;

FALLIBLE enum err streams_new(struct api *a, struct streams **out);
void streams_drain(struct streams *s);       /* ends all streams */
unsigned streams_open(const struct streams *s);
void streams_free(struct streams *s);

/* Brings events that are another node's. Neither function calls back from within. */
struct stream_feed {
	void (*want)(void *user);            /* the client has all: stream_bring() is to follow, once */
	void (*gone)(void *user);            /* the stream is no more */
};
/* How far a stream has come whose job is another node's by now. Returns who brings what follows, for *feed_user; NULL: the stream ends. */
struct stream_now {
	struct req *req;
	struct stream *stream;
	const char *job;
	char after[STREAM_ID_MAX];
	bool lines;
	void *feed_user;
};
typedef const struct stream_feed *(*stream_moved_fn)(struct stream_now *now);

/* Begins a stream. job: only events about it, from the oldest that is kept, and an end with the job's; NULL: all, from now on or
 * from Last-Event-ID. ERR_TOO_MANY_STREAMS, ERR_NOT_ACCEPTABLE. */
FALLIBLE enum err stream_start(struct req *r, const char *job, stream_moved_fn moved);
FALLIBLE enum err stream_start_fed(struct req *r, const char *job, const struct stream_feed *feed, void *user, struct stream **out);
void stream_bring(struct stream *s, struct str text, bool end);
void stream_go_on(struct stream *s, stream_moved_fn moved);  /* the job has come here: its events are this daemon's again */
/* Does the request want lines of JSON? ERR_NOT_ACCEPTABLE. */
FALLIBLE enum err stream_form(const struct req *r, bool *lines_out);
