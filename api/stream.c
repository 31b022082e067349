/* stream.c: see stream.h.
 *
 * A stream holds no queue, only the id of the event that it sent last: events.h keeps the latest few thousand for everybody. A
 * client that is too slow therefore costs nothing; it is told that events were lost. While there is nothing to send its connection
 * sleeps; it is woken by an event, and every ten seconds for a heartbeat, which is also how a client that has gone is noticed. */
#include "api/stream.h"

#include <event2/event.h>
#include <stdio.h>
#include <strings.h>

#include "api/accept.h"
#include "api/api_impl.h"
#include "base/list.h"
#include "base/mem.h"
#include "server/service_clock.h"
#include "server/events.h"
#include "server/job.h"
#include "server/parts.h"

enum { BEAT_S = 10, TEXT_MAX = EVENTS_DATA_MAX + 1024 };

struct stream {
	struct streams *all;
	struct stream *prev, *next;
	struct req *req;
	struct buf text;              /* of the event being sent */
	size_t sent;
	uint64_t after;
	char job[JOB_ID_LEN + 1];     /* "": all jobs */
	bool lines, asleep, beat, ending;
};

struct streams {
	struct api *api;
	struct events_listener *listener;
	struct event *beat;
	struct stream *first;
	unsigned count;
	bool draining;
};

static void wake(struct stream *s)
{
	if (!s->asleep)
		return;
	s->asleep = false;
	MHD_resume_connection(s->req->conn);
	http_kick(s->req->http);
}

static void on_events(void *user)
{
	struct streams *all = user;

	for (struct stream *s = all->first; s; s = s->next)
		wake(s);
}

static void on_beat(evutil_socket_t, short, void *user)
{
	struct streams *all = user;

	for (struct stream *s = all->first; s; s = s->next) {
		s->beat = s->asleep;
		wake(s);
	}
}

FALLIBLE enum err streams_new(struct api *a, struct streams **out)
{
	const struct timeval every = { BEAT_S, 0 };
	struct streams *all = mem_zalloc(1, sizeof *all);

	NEED(all, "cannot keep event streams");
	all->api = a;
	*out = all;
	TRY(events_listen(a->core->events, on_events, all, &all->listener));
	all->beat = event_new(a->core->base, -1, EV_PERSIST, on_beat, all);
	if (!all->beat || event_add(all->beat, &every) != 0)
		return ERR(NO_MEMORY, "cannot keep event streams");
	return OK;
}

void streams_drain(struct streams *all)
{
	if (!all)
		return;
	all->draining = true;
	on_events(all);
}

unsigned streams_open(const struct streams *all)
{
	return all->count;
}

void streams_free(struct streams *all)
{
	if (!all)
		return;
	must(!all->first);
	if (all->beat)
		event_free(all->beat);
	if (all->listener)
		events_unlisten(all->api->core->events, &all->listener);
	mem_free(all);
}

static void put_event(struct stream *s, const struct event_record *e, bool lost)
{
	char when[CLOCK_TEXT_MAX];
	struct buf *b = &s->text;

	if (s->lines) {
		if (lost)
			buf_puts(b, "{\"type\":\"lost\"}\n");
		buf_printf(b, "{\"id\":\"%ju\",\"type\":\"%s\",\"time\":\"%s\",\"data\":", (uintmax_t)e->id, e->type,
			   clock_text(e->wall_ms, when));
		buf_put(b, e->data.p, e->data.n);
		buf_puts(b, "}\n");
		return;
	}
	if (lost)
		buf_puts(b, "event: lost\ndata: {}\n\n");
	buf_printf(b, "id: %ju\nevent: %s\ndata: ", (uintmax_t)e->id, e->type);
	buf_put(b, e->data.p, e->data.n);
	buf_puts(b, "\n\n");
}

/* Fills s->text with what comes next. false: nothing for now. */
static bool refill(struct stream *s)
{
	struct event_record e;
	enum job_state state;
	bool lost = false;

	s->text.len = 0;
	s->text.failed = OK;
	s->sent = 0;
	if (events_next(s->all->api->core->events, s->after, s->job[0] ? s->job : NULL, &e, &lost)) {
		put_event(s, &e, lost && s->after != 0);
		s->after = e.id;
	} else if (s->job[0] && (job_state_of(s->all->api->core, str_of(s->job), &state) != OK || job_state_ended(state))) {
		s->ending = true;
	} else if (s->beat) {
		buf_puts(&s->text, s->lines ? "\n" : ": still here\n\n");
	}
	s->beat = false;
	if (buf_status(&s->text) != OK) { /* half an event is none */
		s->ending = true;
		s->text.len = 0;
	}
	return s->text.len > 0;
}

static ssize_t read_stream(void *user, uint64_t, char *to, size_t max)
{
	struct stream *s = user;

	if (s->sent == s->text.len && !s->all->draining && !refill(s) && !s->ending) {
		s->asleep = true;
		MHD_suspend_connection(s->req->conn);
		http_kick(s->req->http);
		return 0;
	}
	if (s->sent == s->text.len)
		return MHD_CONTENT_READER_END_OF_STREAM;
	size_t n = s->text.len - s->sent < max ? s->text.len - s->sent : max;
	memcpy(to, s->text.p + s->sent, n);
	s->sent += n;
	return (ssize_t)n;
}

static void end_stream(void *user)
{
	struct stream *s = user;

	list2_remove(&s->all->first, s);
	s->all->count--;
	buf_free(&s->text);
	req_release(s->req);
	mem_free(s);
}

static FALLIBLE enum err choose_form(const struct req *r, bool *lines_out)
{
	const char *accept = req_head(r, MHD_HTTP_HEADER_ACCEPT);
	int events = accept_quality(accept, "text/event-stream"), lines = accept_quality(accept, "application/x-ndjson");

	*lines_out = lines > events || (accept && lines == events && strcasestr(accept, "application/x-ndjson"));
	if (events == 0 && lines == 0)
		return ERR(NOT_ACCEPTABLE, "events come as text/event-stream or application/x-ndjson");
	return OK;
}

FALLIBLE enum err stream_start(struct req *r, const char *job)
{
	struct streams *all = r->api->streams;
	const char *last = req_head(r, "Last-Event-ID");
	uint64_t after = job ? 0 : events_last_id(r->core->events);
	struct stream *s;
	bool lines;

	TRY(choose_form(r, &lines));
	if (last && last[0] && (strlen(last) > 18 || !str_to_u64(str_of(last), &after)))
		return ERR(INVALID_REQUEST, "Last-Event-ID is no number");
	if (all->draining)
		return ERR(DRAINING, "the daemon is shutting down");
	if (all->count >= STREAMS_MAX)
		return ERR(TOO_MANY_STREAMS, "%d event streams are open", STREAMS_MAX);
	s = mem_zalloc(1, sizeof *s);
	NEED(s, "cannot open a stream");
	s->all = all;
	s->req = r;
	s->text = BUF_INIT(TEXT_MAX);
	s->after = after;
	s->lines = lines;
	snprintf(s->job, sizeof s->job, "%s", job ? job : "");
	/* Something at once, so that the client sees the head of the answer. */
	buf_puts(&s->text, lines ? "" : "retry: 1000\n\n");
	req_hold(r);
	list2_add(&all->first, s);
	all->count++;
	return req_stream(r, lines ? "application/x-ndjson" : "text/event-stream", read_stream, s, end_stream);
}
