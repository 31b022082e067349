/* stream.c: see stream.h.
 *
 * A stream holds no queue, only the id of the event that it sent last: events.h keeps the latest few thousand for everybody. A
 * client that is too slow therefore costs nothing; it is told that events were lost. While there is nothing to send its connection
 * sleeps.
 *
 * libmicrohttpd sends the head and the end. What comes between is sent past it, to the sockets of the connections that sleep: a chunk that
 * is made once for all clients costs each of them one send(), where waking a connection and putting it to sleep again costs as much again.
 * Where that cannot be (TLS, HTTP/1.0) the connection is woken. A heartbeat every ten seconds shows which clients have gone. */
#include "api/stream.h"

#include <event2/event.h>
#include <fcntl.h>
#include <stdio.h>
#include <strings.h>
#include <sys/socket.h>
#include <unistd.h>

#include "api/accept.h"
#include "api/api_impl.h"
#include "base/list.h"
#include "base/mem.h"
#include "os/watch.h"
#include "server/service_clock.h"
#include "server/cluster.h"
#include "server/events.h"
#include "server/job.h"
#include "server/parts.h"

enum { BEAT_S = 10, STALLS_MAX = 2, TEXT_MAX = EVENTS_DATA_MAX + 1024 };
enum { CHUNK_TEXT = 16 << 10, CHUNK_HEAD = 10 }; /* a chunk takes no more events when it has so many bytes; its size as 8 digits, CR, LF */

struct stream {
	struct streams *all;
	struct stream *prev, *next;
	struct req *req;
	struct buf text;              /* of the event being sent; of a chunk, its rest */
	size_t sent;
	int fd;                       /* of the connection; -1: libmicrohttpd sends everything */
	struct watch *slow;           /* duplicate of fd, while a chunk's rest waits for room; NULL: none does */
	uint64_t after;
	char job[JOB_ID_LEN + 1];     /* "": all jobs */
	bool lines, asleep, beat, ending;
	bool lost;                    /* what the client saw last is another daemon's: it has missed some */
	size_t polled;                /* bytes of the answer to a node */
	bool polls, awaits, told;     /* for another node: ends soon; a beat may pass until something comes; something has come */
	const struct stream_feed *feed; /* NULL: the events are this daemon's */
	void *feed_user;
	bool wanted;                  /* the feed has been asked for more */
	stream_moved_fn moved;        /* NULL: a job that has moved ends its stream */
	unsigned stalls;              /* beats since a rest that waits was last sent on */
	bool is_half, broken;         /* a part of a chunk has been sent; nothing can be sent any more */
};

/* The next events for all streams that have come as far as `after`, in one form. */
struct chunk {
	struct buf text;              /* framed, in the form of HTTP/1.1 */
	uint64_t after, next;         /* event before it; last event in it */
	bool lines, is_shared;
};

struct streams {
	struct api *api;
	struct events_listener *listener;
	struct event *beat;
	struct stream *first;
	struct chunk chunk;
	char mark[JOB_MARK_LEN + 1];  /* the daemon's */
	unsigned count, fed;          /* fed: those with a feed */
	bool draining;
};

static void wake(struct stream *s)
{
	if (!s->asleep)
		return;
	s->asleep = false;
	watch_free(&s->slow);
	MHD_resume_connection(s->req->conn);
	http_kick(s->req->http);
}

/* Of a job's events the ids tell whose they are, since its next events may be another node's. */
static void put_event(struct stream *s, struct buf *b, const struct event_record *e, bool lost)
{
	char when[CLOCK_TEXT_MAX], id[STREAM_ID_MAX];
	bool marked = s->job[0] && s->all->api->core->cluster;

	snprintf(id, sizeof id, "%s%s%ju", marked ? s->all->mark : "", marked ? "-" : "", (uintmax_t)e->id);
	lost = lost || s->lost;
	s->lost = false;
	s->told = true;
	if (s->lines) {
		if (lost)
			buf_puts(b, "{\"type\":\"lost\"}\n");
		buf_printf(b, "{\"id\":\"%s\",\"type\":\"%s\",\"time\":\"%s\",\"data\":", id, e->type,
			   clock_text(e->wall_ms, when));
		buf_put(b, e->data.p, e->data.n);
		buf_puts(b, "}\n");
		return;
	}
	if (lost)
		buf_puts(b, "event: lost\ndata: {}\n\n");
	buf_printf(b, "id: %s\nevent: %s\ndata: ", id, e->type);
	buf_put(b, e->data.p, e->data.n);
	buf_puts(b, "\n\n");
}

static void put_beat(struct buf *b, bool lines)
{
	buf_puts(b, lines ? "\n" : ": still here\n\n");
}

static void set_feed(struct stream *s, const struct stream_feed *feed, void *user)
{
	s->all->fed += (feed != NULL) - (s->feed != NULL);
	s->feed = feed;
	s->feed_user = user;
	s->wanted = false;
	s->fd = -1; /* such streams are few: libmicrohttpd sends them */
}

/* Another node has the job: its events come from there. false: they do not. */
static bool follow(struct stream *s)
{
	struct stream_now now = { .req = s->req, .stream = s, .job = s->job, .lines = s->lines };

	if (!s->moved || s->all->fed >= STREAMS_FED_MAX)
		return false;
	snprintf(now.after, sizeof now.after, "%s-%ju", s->all->mark, (uintmax_t)s->after);
	const struct stream_feed *feed = s->moved(&now);
	if (!feed)
		return false;
	set_feed(s, feed, now.feed_user);
	wake(s);
	return true;
}

static bool job_has_ended(struct stream *s)
{
	struct server *core = s->all->api->core;
	enum job_state state;
	bool is_here;

	if (!s->job[0])
		return false;
	if (job_moved_to(core, str_of(s->job), &is_here))
		return !follow(s);
	return job_state_of(core, str_of(s->job), &state) != OK || job_state_ended(state);
}

/* Ends the answer to a node; it is told if nothing will follow. */
static void end_poll(struct stream *s, bool ended)
{
	bool is_here;

	s->ending = true;
	if (ended && !job_moved_to(s->all->api->core, str_of(s->job), &is_here))
		buf_puts(&s->text, STREAM_END);
}

static void want(struct stream *s)
{
	if (!s->wanted && !s->ending) {
		s->wanted = true;
		s->feed->want(s->feed_user);
	}
}

/* Fills s->text with what comes next. false: nothing for now. */
static bool refill(struct stream *s)
{
	struct event_record e;
	bool lost = false, ended = false;

	s->text.len = 0;
	s->text.failed = OK;
	s->polled += s->polls ? s->sent : 0;
	s->sent = 0;
	if (s->ending)
		return false;
	if (!s->feed && s->polled < CHUNK_TEXT &&
	    events_next(s->all->api->core->events, s->after, s->job[0] ? s->job : NULL, &e, &lost)) {
		put_event(s, &s->text, &e, lost && s->after != 0);
		s->after = e.id;
	} else if (!s->feed && s->polled < CHUNK_TEXT && (ended = job_has_ended(s)) && !s->polls) {
		s->ending = true;
	} else if (s->polls && (ended || s->told || !s->awaits || s->beat)) {
		end_poll(s, ended);
	} else if (s->beat) {
		put_beat(&s->text, s->lines);
	}
	s->beat = false;
	if (buf_status(&s->text) != OK) { /* half an event is none */
		s->ending = true;
		s->text.len = 0;
	}
	if (s->feed)
		want(s);
	return s->text.len > 0;
}

/* ---- past libmicrohttpd ---- */

/* The socket of a connection whose answer comes in chunks, as they are; -1: it is another one. */
static int plain_socket(const struct req *r)
{
	const union MHD_ConnectionInfo *i = MHD_get_connection_info(r->conn, MHD_CONNECTION_INFO_CONNECTION_FD);
	bool tls = MHD_get_connection_info(r->conn, MHD_CONNECTION_INFO_GNUTLS_SESSION) != NULL;

	return i && r->is_http_1_1 && !tls ? i->connect_fd : -1;
}

static void end_chunk(struct buf *b)
{
	char head[CHUNK_HEAD + 1];

	buf_puts(b, "\r\n");
	if (buf_status(b) != OK)
		return;
	snprintf(head, sizeof head, "%08zx\r\n", b->len - CHUNK_HEAD - 2);
	memcpy(b->p, head, CHUNK_HEAD);
}

/* Makes the chunk that the stream sends next. NULL: nothing for now, or s->ending. Streams that have come as far get the same one. */
static const struct chunk *next_chunk(struct stream *s)
{
	struct chunk *c = &s->all->chunk;
	struct event_record e;
	bool lost, shared = !s->job[0] && !s->beat;

	if (shared && s->after == events_last_id(s->all->api->core->events))
		return NULL;
	if (shared && c->is_shared && c->after == s->after && c->lines == s->lines)
		return c;
	*c = (struct chunk){ .text = c->text, .after = s->after, .next = s->after, .lines = s->lines };
	c->text.len = 0;
	c->text.failed = OK;
	buf_printf(&c->text, "%*s", CHUNK_HEAD, "");
	while (c->text.len < CHUNK_TEXT && events_next(s->all->api->core->events, c->next, s->job[0] ? s->job : NULL, &e, &lost)) {
		put_event(s, &c->text, &e, lost && c->next != 0);
		c->next = e.id;
	}
	if (c->text.len == CHUNK_HEAD && s->beat)
		put_beat(&c->text, s->lines);
	if (c->text.len == CHUNK_HEAD) {
		s->ending = job_has_ended(s);
		return NULL;
	}
	end_chunk(&c->text);
	c->is_shared = shared && c->next != c->after;
	s->ending = buf_status(&c->text) != OK;
	return s->ending ? NULL : c;
}

/* false: the socket takes no more now, or is broken. *sent_io: of the n bytes. */
static bool send_some(struct stream *s, const void *bytes, size_t n, size_t *sent_io)
{
	while (*sent_io < n) {
		ssize_t done = send(s->fd, (const char *)bytes + *sent_io, n - *sent_io, MSG_DONTWAIT | MSG_NOSIGNAL);
		if (done < 0 && errno == EINTR)
			continue;
		s->broken = done < 0 && errno != EAGAIN && errno != EWOULDBLOCK;
		if (done < 0)
			return false;
		*sent_io += (size_t)done;
	}
	return true;
}

static void on_writable(void *user);

/* The socket is libmicrohttpd's, who may close it when its connection is awake again: a duplicate is watched until then. */
static FALLIBLE enum err await_room(struct stream *s)
{
	int fd = s->slow ? -1 : fcntl(s->fd, F_DUPFD_CLOEXEC, 0);

	if (s->slow)
		return OK;
	if (fd < 0)
		return ERR_SYS(SYSTEM, "cannot wait for the client of a stream");
	enum err e = watch_new(s->all->api->core->base, &fd, NULL, on_writable, s, &s->slow);
	if (e)
		close(fd);
	return e ? e : watch_writes(s->slow, true);
}

/* Keeps what the socket did not take: that goes before anything else, or the connection is cut. */
static void keep_rest(struct stream *s, const struct chunk *c, size_t sent)
{
	s->text.len = 0;
	s->text.failed = OK;
	s->sent = 0;
	buf_put(&s->text, c->text.p + sent, c->text.len - sent);
	s->is_half = true;
	s->broken = s->broken || buf_status(&s->text) != OK || await_room(s) != OK;
}

/* Sends all that there is to a connection that sleeps. */
static void push(struct stream *s)
{
	const struct chunk *c;

	if (s->is_half && !s->broken) {
		s->is_half = !send_some(s, s->text.p, s->text.len, &s->sent);
		if (!s->is_half)
			watch_free(&s->slow);
	}
	while (!s->is_half && !s->broken && (c = next_chunk(s))) {
		size_t sent = 0;
		s->beat = false;
		s->after = c->next;
		if (!send_some(s, c->text.p, c->text.len, &sent))
			keep_rest(s, c, sent);
	}
	s->beat = false;
	if (s->broken || s->ending)
		wake(s);
}

static void tell(struct stream *s)
{
	if (s->asleep && s->fd >= 0 && !s->all->draining)
		push(s);
	else
		wake(s);
}

static void on_writable(void *user)
{
	tell(user);
}

static void on_events(void *user)
{
	struct streams *all = user;

	for (struct stream *s = all->first; s; s = s->next)
		tell(s);
}

static void on_beat(evutil_socket_t, short, void *user)
{
	struct streams *all = user;

	for (struct stream *s = all->first; s; s = s->next) {
		s->beat = s->asleep;
		s->stalls = s->asleep && s->is_half ? s->stalls + 1 : 0;
		s->broken = s->broken || s->stalls > STALLS_MAX;
		tell(s);
	}
}

/* ---- all streams ---- */

FALLIBLE enum err streams_new(struct api *a, struct streams **out)
{
	const struct timeval every = { BEAT_S, 0 };
	struct streams *all = mem_zalloc(1, sizeof *all);
	char id[JOB_ID_LEN + 1];

	NEED(all, "cannot keep event streams");
	all->api = a;
	*out = all;
	all->chunk.text = BUF_INIT(CHUNK_TEXT + TEXT_MAX);
	job_new_id(a->core->journal, id);
	memcpy(all->mark, id + JOB_ID_LEN - JOB_MARK_LEN, sizeof all->mark);
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
	buf_free(&all->chunk.text);
	if (all->listener)
		events_unlisten(all->api->core->events, &all->listener);
	mem_free(all);
}

static ssize_t read_stream(void *user, uint64_t, char *to, size_t max)
{
	struct stream *s = user;

	if (s->broken || s->is_half)
		return MHD_CONTENT_READER_END_WITH_ERROR;
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
	if (s->feed)
		s->feed->gone(s->feed_user);
	set_feed(s, NULL, NULL);
	watch_free(&s->slow);
	buf_free(&s->text);
	req_release(s->req);
	mem_free(s);
}

FALLIBLE enum err stream_form(const struct req *r, bool *lines_out)
{
	const char *accept = req_head(r, MHD_HTTP_HEADER_ACCEPT);
	int events = accept_quality(accept, "text/event-stream"), lines = accept_quality(accept, "application/x-ndjson");

	*lines_out = lines > events || (accept && lines == events && strcasestr(accept, "application/x-ndjson"));
	if (events == 0 && lines == 0)
		return ERR(NOT_ACCEPTABLE, "events come as text/event-stream or application/x-ndjson");
	return OK;
}

/* "MARK-NUMBER", or a number that is this daemon's. */
static FALLIBLE enum err read_last(const struct req *r, struct stream *s)
{
	const char *last = req_head(r, "Last-Event-ID"), *dash = last && s->job[0] ? strchr(last, '-') : NULL;
	const char *number = dash ? dash + 1 : last;

	if (!last || !last[0])
		return OK;
	if ((dash && dash - last != JOB_MARK_LEN) || strlen(number) > 18 || !str_to_u64(str_of(number), &s->after))
		return ERR(INVALID_REQUEST, "Last-Event-ID is no number");
	s->lost = dash && memcmp(last, s->all->mark, JOB_MARK_LEN) != 0;
	if (s->lost) /* what there is came after that */
		s->after = 0;
	return OK;
}

static FALLIBLE enum err start(struct req *r, struct stream *s)
{
	const char *poll = r->caller.is_node ? req_head(r, STREAM_POLL_HEAD) : NULL;
	struct streams *all = s->all;

	TRY(stream_form(r, &s->lines));
	TRY(read_last(r, s));
	if (all->draining)
		return ERR(DRAINING, "the daemon is shutting down");
	if (all->count >= STREAMS_MAX || (s->feed && all->fed >= STREAMS_FED_MAX))
		return ERR(TOO_MANY_STREAMS, "%d event streams are open%s", s->feed ? STREAMS_FED_MAX : STREAMS_MAX,
			   s->feed ? " of jobs that other nodes have" : "");
	s->polls = poll != NULL;
	s->awaits = poll && strcmp(poll, STREAM_POLL_NEXT) == 0;
	/* Something at once, so that the client sees the head of the answer. */
	buf_puts(&s->text, s->lines || s->polls ? "" : "retry: 1000\n\n");
	return buf_status(&s->text);
}

static FALLIBLE enum err open_stream(struct req *r, const char *job, struct stream *s)
{
	struct streams *all = r->api->streams;
	const struct stream_feed *feed = s->feed;

	s->all = all;
	s->req = r;
	s->text = BUF_INIT(CHUNK_TEXT + TEXT_MAX);
	s->after = job ? 0 : events_last_id(r->core->events);
	snprintf(s->job, sizeof s->job, "%s", job ? job : "");
	enum err e = start(r, s);
	if (e) {
		buf_free(&s->text);
		mem_free(s);
		return e;
	}
	s->fd = s->polls ? -1 : plain_socket(r);
	s->feed = NULL;
	if (feed)
		set_feed(s, feed, s->feed_user);
	req_hold(r);
	list2_add(&all->first, s);
	all->count++;
	return req_stream(r, s->lines ? "application/x-ndjson" : "text/event-stream", read_stream, s, end_stream);
}

FALLIBLE enum err stream_start(struct req *r, const char *job, stream_moved_fn moved)
{
	struct stream *s = mem_zalloc(1, sizeof *s);

	NEED(s, "cannot open a stream");
	s->moved = moved;
	return open_stream(r, job, s);
}

/* ---- events of other nodes ---- */

FALLIBLE enum err stream_start_fed(struct req *r, const char *job, const struct stream_feed *feed, void *user, struct stream **out)
{
	struct stream *s = mem_zalloc(1, sizeof *s);

	NEED(s, "cannot open a stream");
	s->feed = feed;
	s->feed_user = user;
	*out = s;
	return open_stream(r, job, s);
}

void stream_bring(struct stream *s, struct str text, bool end)
{
	if (s->sent == s->text.len) {
		s->text.len = s->sent = 0;
		s->text.failed = OK;
	}
	buf_put(&s->text, text.p, text.n);
	s->ending = s->ending || end || buf_status(&s->text) != OK;
	s->wanted = false;
	wake(s);
}

void stream_go_on(struct stream *s, stream_moved_fn moved)
{
	set_feed(s, NULL, NULL);
	s->moved = moved;
	s->after = 0;
	s->lost = true;
	wake(s);
}
