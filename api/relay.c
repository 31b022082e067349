/* relay.c: see relay.h. The node that has the job is asked for its events again and again: each answer has those that have come since, or
 * comes after some seconds without any. A stream from node to node would have to be cut into events, held back for slow clients, and
 * have a way to say that the job has moved. Short answers go the way of all requests to nodes, and there is never more than one at a time.
 *
 *   node has it → ask it ─200→ bring ─client has it→ ask it …
 *                  └─ 404, job_moved, no answer → etcd's record → ask its node, or wait: for that node, or for one that takes the job over
 *
 * Nobody answers for longer than the job can take to find a new owner: the stream ends, with the event job.away. */
#include "api/relay.h"

#include <stdio.h>

#include "api/guard.h"
#include "api/h_common.h"
#include "base/clock.h"
#include "base/jtext.h"
#include "base/jval.h"
#include "base/mem.h"
#include "server/cluster.h"
#include "server/config.h"
#include "server/job.h"
#include "server/parts.h"

enum { LINE_MAX_BYTES = 512, LINES = 4, NOW_MS = 15000, NEXT_MS = 30000, AGAIN_MS = 500, AWAY_TTLS = 3, AWAY_MS = 3000, EVENT_MAX = 4096 };

struct relay {
	struct cluster_errand errand;      /* the first member */
	struct server *core;
	struct req *r;                     /* held, and not answered yet; NULL: it has its stream */
	struct stream *stream;
	struct loop_timer *timer;
	char job[JOB_ID_LEN + 1], node[CLUSTER_NODE_TEXT], path[64], after[STREAM_ID_MAX];
	char headers[LINES][LINE_MAX_BYTES];
	const char *lines[LINES + 1];
	bool is_lines;                     /* the form */
	bool asks, gone;                   /* a callback is to come; the client has gone meanwhile */
	int64_t heard_ms, asked_ms;        /* monotone clock: the last answer; the last question */
};

static void ask_node(struct relay *y, const char *poll);
static void seek(struct relay *y);

static void relay_free(struct relay *y)
{
	loop_timer_stop(&y->timer);
	cluster_errand_free(&y->errand);
	mem_free(y);
}

static void on_want(void *user)
{
	struct relay *y = user;

	if (!y->asks && !y->timer)
		ask_node(y, STREAM_POLL_NEXT);
}

static void on_gone(void *user)
{
	struct relay *y = user;

	y->stream = NULL;
	y->gone = true;
	loop_timer_stop(&y->timer);
	if (!y->asks)
		relay_free(y);
}

static const struct stream_feed feed = { .want = on_want, .gone = on_gone };

/* Answers a request that has no stream with this thread's latest error. */
static void refuse(struct relay *y, enum err e)
{
	struct req *r = y->r;
	struct err_info info = *err_last();

	relay_free(y);
	err_restore(&info);
	req_done(r, e);
}

/* The request has its stream, if it had none yet. false: it was refused, or its client has gone; so is the relay. */
static bool begin(struct relay *y)
{
	struct req *r = y->r;

	if (!r)
		return true;
	y->asks = true; /* it outlives a stream that ends at once */
	enum err e = stream_start_fed(r, y->job, &feed, y, &y->stream);
	y->asks = false;
	if (e) {
		refuse(y, e);
		return false;
	}
	bool gone = y->gone;
	y->r = NULL;
	if (gone)
		relay_free(y);
	req_release(r);
	return !gone;
}

/* ---- what a node answers ---- */

/* The id of the last event in the text: a line of its own, or the beginning of one. */
static void note_last(struct relay *y, struct str text)
{
	static const char *const before[] = { "id: ", "{\"id\":\"" };
	const char *head = before[y->is_lines];
	size_t n = strlen(head);

	while (text.n) {
		const char *end = memchr(text.p, '\n', text.n);
		size_t line = end ? (size_t)(end - text.p) : text.n, id = 0;
		while (str_starts((struct str){ text.p, line }, head) && n + id < line && text.p[n + id] != '"')
			id++;
		if (id > 0 && id < sizeof y->after)
			snprintf(y->after, sizeof y->after, "%.*s", (int)id, text.p + n);
		text = (struct str){ text.p + line + (end != NULL), text.n - line - (end != NULL) };
	}
}

static void ask_next(void *user)
{
	struct relay *y = user;

	y->timer = NULL;
	ask_node(y, STREAM_POLL_NEXT);
}

static void take(struct relay *y)
{
	struct str text = { (const char *)y->errand.answer.p, y->errand.answer.len };
	bool end = str_ends(text, STREAM_END);
	int64_t now = clock_mono_ms();

	text.n -= end ? sizeof STREAM_END - 1 : 0;
	note_last(y, text);
	y->heard_ms = now;
	bool begins = y->r != NULL;
	if (!begin(y))
		return;
	if (text.n == 0 && !end && !begins) /* a node that answers at once without anything is not asked without pause */
		loop_timer_start(y->core->loop, now - y->asked_ms < AGAIN_MS ? AGAIN_MS : 0, ask_next, y, &y->timer);
	else
		stream_bring(y->stream, text, end);
}

static bool is_moved(const struct cluster_errand *x)
{
	return x->status == 409 && x->answer.p && memmem(x->answer.p, x->answer.len, "\"job_moved\"", 11);
}

static void on_answer(struct cluster_errand *x, enum err e)
{
	struct relay *y = (struct relay *)x;

	y->asks = false;
	if (y->gone)
		relay_free(y);
	else if (!e && x->status == 200)
		take(y);
	else if (y->r && !e && x->status >= 400 && x->status < 500 && x->status != 404 && !is_moved(x)) {
		struct req *r = y->r;
		e = req_bytes(r, (unsigned)x->status, "application/problem+json", &x->answer);
		relay_free(y);
		req_done(r, e);
	} else if (e == ERR_DRAINING && y->r) {
		refuse(y, e);
	} else {
		err_clear();
		seek(y);
	}
}

static void put_line(struct relay *y, size_t *count, const char *name, const char *value)
{
	if (!value[0])
		return;
	snprintf(y->headers[*count], LINE_MAX_BYTES, "%s: %s", name, value);
	y->lines[*count] = y->headers[*count];
	++*count;
}

/* headers[0] is the caller's line. */
static void ask_node(struct relay *y, const char *poll)
{
	size_t count = 1;

	y->lines[0] = y->headers[0];
	put_line(y, &count, "Accept", y->is_lines ? "application/x-ndjson" : "text/event-stream");
	put_line(y, &count, STREAM_POLL_HEAD, poll);
	put_line(y, &count, "Last-Event-ID", y->after);
	y->lines[count] = NULL;
	cluster_errand_free(&y->errand);
	y->errand = (struct cluster_errand){ .method = "GET", .path = y->path, .headers = y->lines, .fn = on_answer,
					     .whole_ms = strcmp(poll, STREAM_POLL_NOW) == 0 ? NOW_MS : NEXT_MS, .url = BUF_INIT(2048) };
	y->asks = true;
	y->asked_ms = clock_mono_ms();
	cluster_send(y->core->cluster, y->node, &y->errand);
}

/* ---- who has it? ---- */

static void seek_again(void *user)
{
	struct relay *y = user;

	y->timer = NULL;
	seek(y);
}

/* Appends an event that no node tells: it has no id. */
static void put_event(const struct relay *y, struct buf *b, const char *type, const json_t *data)
{
	CLEANUP(mem_free_ptr) char *text = jtext_of(data);

	buf_printf(b, y->is_lines ? "{\"type\":\"%s\",\"data\":%s}\n" : "event: %s\ndata: %s\n\n", type, text ? text : "{}");
}

static void end_with(struct relay *y, const char *type, json_t *data)
{
	CLEANUP(buf_free) struct buf b = BUF_INIT(EVENT_MAX);

	put_event(y, &b, type, data);
	json_decref(data);
	if (begin(y))
		stream_bring(y->stream, (struct str){ (const char *)b.p, b.len }, true);
}

static void end_of_record(struct relay *y, const json_t *record)
{
	end_with(y, "job.state", json_pack("{s:s, s:s, s:s, s:s}", "job", y->job, "kind", jval_text(record, "kind"), "state",
					   jval_text(record, "state"), "stage", jval_text(record, "stage")));
}

/* Nobody has answered yet. */
static void wait_or_end(struct relay *y)
{
	int64_t patience = AWAY_TTLS * y->core->config->cluster_ttl_ms + AWAY_MS;

	if (clock_mono_ms() - y->heard_ms > patience)
		end_with(y, "job.away", json_pack("{s:s, s:s}", "job", y->job, "node", y->node));
	else if (begin(y))
		loop_timer_start(y->core->loop, AGAIN_MS, seek_again, y, &y->timer);
}

/* The job has come to this node, if its journal knows that already. */
static void come_home(struct relay *y)
{
	bool is_here;

	if (job_moved_to(y->core, str_of(y->job), &is_here) || !is_here) {
		wait_or_end(y);
		return;
	}
	if (!begin(y))
		return;
	struct stream *s = y->stream;
	relay_free(y);
	stream_go_on(s, relay_follow);
}

static void on_record(void *user, enum err e, const json_t *doc)
{
	struct relay *y = user;
	const json_t *record = json_object_get(doc, "job");
	const char *node = jval_text(doc, "node");

	y->asks = false;
	if (y->gone) {
		relay_free(y);
		return;
	}
	if (y->r && (e || !record)) {
		refuse(y, e ? e : ERR(NOT_FOUND, "there is no job \"%s\"", y->job));
		return;
	}
	err_clear();
	enum cluster_presence there = record ? cluster_presence(y->core->cluster, node) : CLUSTER_IS_UNKNOWN;
	bool is_other = record && strcmp(node, y->node) != 0, retried = clock_mono_ms() - y->asked_ms >= AGAIN_MS;
	if (record)
		snprintf(y->node, sizeof y->node, "%s", node);
	if (there == CLUSTER_IS_SELF)
		come_home(y);
	else if (there == CLUSTER_IS_HERE && is_other)
		ask_node(y, STREAM_POLL_NOW);
	else if (record && job_record_ended(record))
		end_of_record(y, record);
	else if (there == CLUSTER_IS_HERE && retried)
		ask_node(y, STREAM_POLL_NOW);
	else
		wait_or_end(y);
}

static void seek(struct relay *y)
{
	y->asks = true;
	cluster_record(y->core->cluster, str_of(y->job), on_record, y);
}

/* ---- ---- */

static struct relay *relay_new(struct req *r, const char *job, bool is_lines)
{
	struct relay *y = mem_zalloc(1, sizeof *y);
	CLEANUP(buf_free) struct buf caller = BUF_INIT(LINE_MAX_BYTES);

	if (!y)
		return NULL;
	y->core = r->core;
	y->is_lines = is_lines;
	y->heard_ms = clock_mono_ms();
	auth_put_caller(r, &caller);
	snprintf(y->headers[0], LINE_MAX_BYTES, "%.*s", (int)caller.len, (const char *)caller.p);
	snprintf(y->job, sizeof y->job, "%s", job);
	snprintf(y->path, sizeof y->path, "/v1/jobs/%s/events", y->job);
	return y;
}

FALLIBLE enum err relay_start(struct req *r, const char *node)
{
	const char *last = req_head(r, "Last-Event-ID");
	char job[JOB_ID_LEN + 1];
	bool is_lines;

	TRY(req_query_only(r, r->route->query));
	TRY(stream_form(r, &is_lines));
	snprintf(job, sizeof job, "%.*s", (int)r->parts[2].n, r->parts[2].p);
	struct relay *y = last && strlen(last) >= sizeof y->after ? NULL : relay_new(r, job, is_lines);
	if (!y)
		return last && strlen(last) >= sizeof y->after ? ERR(INVALID_REQUEST, "Last-Event-ID is no number") :
								 ERR(NO_MEMORY, "cannot open a stream");
	snprintf(y->after, sizeof y->after, "%s", last ? last : "");
	snprintf(y->node, sizeof y->node, "%s", node ? node : "");
	y->r = r;
	req_hold(r);
	if (node)
		ask_node(y, STREAM_POLL_NOW);
	else
		seek(y);
	return OK;
}

const struct stream_feed *relay_follow(struct stream_now *now)
{
	bool is_here;
	const char *node = job_moved_to(now->req->core, str_of(now->job), &is_here);
	struct relay *y = now->req->core->cluster ? relay_new(now->req, now->job, now->lines) : NULL;

	if (!y)
		return NULL;
	y->stream = now->stream;
	snprintf(y->after, sizeof y->after, "%s", now->after);
	snprintf(y->node, sizeof y->node, "%s", node ? node : "");
	now->feed_user = y;
	return &feed;
}
