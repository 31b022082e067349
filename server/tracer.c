/* tracer.c: see tracer.h. */
#include "server/tracer.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/list.h"
#include "base/log.h"
#include "base/mem.h"
#include "server/config.h"
#include "server/job_impl.h"
#include "server/metrics.h"
#include "server/parts.h"
#include "server/trace.h"
#include "server/courier.h"

/* Shipments on their way: beyond these spans are dropped. One goes when its first job has ended for GATHER_MS, or is that large. */
enum { UNDER_WAY_MAX = 256, GATHER_MS = 500, BODY_FULL = 128 << 10, BODY_MAX = 256 << 10, COMPLAIN_MS = 60000, URL_MAX = 2048 };
enum { KIND_INTERNAL = 1, KIND_SERVER = 2, STATUS_OK = 1, STATUS_ERROR = 2 };    /* of OTLP */

struct tracer {
	struct server *server;
	struct courier *sender;
	char url[URL_MAX + 16], host[256];
	uint32_t under_way;
	struct shipment *shipments; /* those */
	struct shipment *gathering; /* the next one; NULL: no job has ended since the last */
	struct loop_timer *due;     /* of that */
	int64_t complained_ms;      /* monotone clock; 0: never */
};

struct shipment {
	struct courier_parcel parcel;
	struct shipment *prev, *next;
	struct tracer *tracer;
	struct buf body;
	unsigned spans;
};

static void count(struct tracer *t, const char *outcome, unsigned spans)
{
	char labels[64];

	snprintf(labels, sizeof labels, "outcome=\"%s\"", outcome);
	metrics_add(t->server->metrics, "dcpd_trace_spans_total", labels, spans);
}

static void complain(struct tracer *t, const char *why)
{
	int64_t now = clock_mono_ms();

	if (t->complained_ms && now - t->complained_ms < COMPLAIN_MS)
		return;
	t->complained_ms = now;
	log_warn("spans are dropped", "endpoint", t->url, "why", why, NULL);
}

/* ---- OTLP as JSON ---- */

static void put_text(struct buf *b, bool first, const char *key, const char *value)
{
	buf_printf(b, "%s{\"key\":\"%s\",\"value\":{\"stringValue\":", first ? "" : ",", key);
	buf_json_str(b, str_of(value));
	buf_puts(b, "}}");
}

static void put_number(struct buf *b, const char *key, uint64_t value)
{
	buf_printf(b, ",{\"key\":\"%s\",\"value\":{\"intValue\":\"%ju\"}}", key, (uintmax_t)value);
}

/* Up to its attributes. */
static void put_span(struct buf *b, const json_t *trace, const char *id, const char *parent, const char *name, int kind, int64_t from_ms,
		     int64_t to_ms)
{
	buf_printf(b, "{\"traceId\":\"%s\",\"spanId\":\"%s\"", json_string_value(json_object_get(trace, "trace_id")), id);
	if (parent)
		buf_printf(b, ",\"parentSpanId\":\"%s\"", parent);
	buf_json_member(b, ",\"name\":", str_of(name));
	buf_printf(b, ",\"kind\":%d,\"startTimeUnixNano\":\"%jd000000\",\"endTimeUnixNano\":\"%jd000000\",\"attributes\":[", kind,
		   (intmax_t)from_ms, (intmax_t)(to_ms > from_ms ? to_ms : from_ms));
}

static void put_job(struct buf *b, const struct job *j)
{
	const char *code = json_string_value(json_object_get(j->error, "code"));
	const char *detail = json_string_value(json_object_get(j->error, "detail"));

	put_span(b, j->trace, json_string_value(json_object_get(j->trace, "span_id")),
		 json_string_value(json_object_get(j->trace, "parent_id")), kind_of(j->kind)->name, KIND_SERVER, j->created_ms,
		 j->finished_ms);
	put_text(b, true, "dcpd.job", j->id);
	put_text(b, false, "dcpd.kind", kind_of(j->kind)->name);
	put_text(b, false, "dcpd.state", job_state_text(j->state));
	if (j->target && j->target[0])
		put_text(b, false, "dcpd.target", j->target);
	put_number(b, "dcpd.bytes", j->bytes_done);
	put_number(b, "dcpd.attempt", (uint64_t)j->attempt);
	if (j->state == JOB_FAILED && code)
		put_text(b, false, "error.type", code);
	buf_printf(b, "],\"status\":{\"code\":%d", j->state == JOB_FAILED ? STATUS_ERROR : STATUS_OK);
	if (j->state == JOB_FAILED && detail)
		buf_json_member(b, ",\"message\":", str_of(detail));
	buf_puts(b, "}}");
}

static int64_t time_of(const json_t *stage)
{
	const char *text = json_string_value(json_object_get(stage, "at"));
	int64_t ms = 0;

	return text && clock_of_text(text, &ms) ? ms : 0;
}

static void put_stage(struct buf *b, const struct job *j, const char *name, int64_t from_ms, int64_t to_ms)
{
	char id[TRACE_SPAN_HEX + 1];

	trace_span_id(id);
	buf_putc(b, ',');
	put_span(b, j->trace, id, json_string_value(json_object_get(j->trace, "span_id")), name, KIND_INTERNAL, from_ms, to_ms);
	put_text(b, true, "dcpd.job", j->id);
	buf_puts(b, "]}");
}

static void put_head(struct buf *b, const struct tracer *t)
{
	buf_puts(b, "{\"resourceSpans\":[{\"resource\":{\"attributes\":[");
	put_text(b, true, "service.name", "dcpd");
	put_text(b, false, "service.version", DCPD_VERSION);
	put_text(b, false, "host.name", t->host);
	buf_puts(b, "]},\"scopeSpans\":[{\"scope\":{\"name\":\"dcpd\",\"version\":\"" DCPD_VERSION "\"},\"spans\":[");
}

/* Returns how many spans there are. */
static unsigned put_spans(struct buf *b, const struct job *j)
{
	size_t n = json_array_size(j->stages);
	unsigned spans = 1;

	put_job(b, j);
	for (size_t i = 0; i < n; i++) {
		const json_t *stage = json_array_get(j->stages, i);
		int64_t from = time_of(stage), to = i + 1 < n ? time_of(json_array_get(j->stages, i + 1)) : j->finished_ms;
		if (i == 0 && from > j->created_ms) {
			put_stage(b, j, "queued", j->created_ms, from);
			spans++;
		}
		put_stage(b, j, json_string_value(json_object_get(stage, "stage")), from, to);
		spans++;
	}
	return spans;
}

/* ---- sending ---- */

static void shipment_free(struct shipment *s)
{
	buf_free(&s->body);
	mem_free(s);
}

static void on_sent(struct courier_parcel *p)
{
	struct shipment *s = (struct shipment *)p;
	struct tracer *t = s->tracer;
	bool taken = p->status >= 200 && p->status < 300;
	char why[300];

	t->under_way--;
	list2_remove(&t->shipments, s);
	count(t, taken ? "sent" : "dropped", s->spans);
	if (!taken) {
		snprintf(why, sizeof why, p->status ? "HTTP %ld" : "%.0ld%s", p->status, p->status ? "" : p->error);
		complain(t, why);
	}
	shipment_free(s);
}

static void drop(struct tracer *t, unsigned spans, const char *why)
{
	count(t, "dropped", spans);
	complain(t, why);
}

static void ship(struct tracer *t)
{
	struct shipment *s = t->gathering;

	t->gathering = NULL;
	loop_timer_stop(&t->due);
	buf_puts(&s->body, "]}]}]}");
	if (buf_status(&s->body)) {
		drop(t, s->spans, err_last()->text);
		shipment_free(s);
		return;
	}
	s->parcel = (struct courier_parcel){ .url = t->url, .body = { (char *)s->body.p, s->body.len }, .may_reuse = true, .fn = on_sent };
	t->under_way++;
	list2_add(&t->shipments, s);
	courier_send(t->sender, &s->parcel);
}

static void on_due(void *user)
{
	struct tracer *t = user;

	t->due = NULL;
	ship(t);
}

void tracer_job_ended(struct tracer *t, const struct job *j)
{
	if (!t || !j->trace || !json_is_true(json_object_get(j->trace, "sampled")))
		return;
	struct shipment *s = t->gathering;
	if (!s && t->under_way < UNDER_WAY_MAX)
		s = t->gathering = mem_zalloc(1, sizeof *s);
	if (!s) {
		drop(t, 1 + (unsigned)json_array_size(j->stages),
		     t->under_way < UNDER_WAY_MAX ? "no memory" : "the collector is too slow");
		return;
	}
	if (s->spans) {
		buf_putc(&s->body, ',');
	} else {
		*s = (struct shipment){ .tracer = t, .body = BUF_INIT(BODY_MAX) };
		put_head(&s->body, t);
		loop_timer_start(t->server->loop, GATHER_MS, on_due, t, &t->due);
	}
	s->spans += put_spans(&s->body, j);
	if (s->body.len >= BODY_FULL || t->server->draining) /* which nobody waits for, when it has ended */
		ship(t);
}

FALLIBLE enum err tracer_new(struct server *s, struct tracer **out)
{
	static const char path[] = "/v1/traces";
	struct str base = str_of(s->config->otlp_endpoint ? s->config->otlp_endpoint : "");

	if (base.n == 0)
		return OK;
	if (courier_check_url(base))
		return ERR(CONFIG, "otlp-endpoint %s", err_last()->text);
	struct tracer *t = mem_zalloc(1, sizeof *t);
	NEED(t, "cannot send spans");
	*out = t;
	t->server = s;
	while (base.n && base.p[base.n - 1] == '/')
		base.n--;
	snprintf(t->url, sizeof t->url, "%.*s%s", (int)base.n, base.p, str_ends(base, path) ? "" : path);
	if (gethostname(t->host, sizeof t->host - 1) != 0)
		t->host[0] = '\0';
	return courier_new_anywhere(s->loop, &t->sender);
}

void tracer_free(struct tracer *t)
{
	if (!t)
		return;
	courier_free(t->sender);
	loop_timer_stop(&t->due);
	if (t->gathering)
		shipment_free(t->gathering);
	for (struct shipment *s = t->shipments, *next; s; s = next) {
		next = s->next;
		shipment_free(s);
	}
	mem_free(t);
}
