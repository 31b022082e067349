/* forward.c: see forward.h. The answer's body and the headers that mean something go back as they came; the form (lines, compression,
 * tags) is this node's to choose. */
#include "api/forward.h"

#include <stdio.h>

#include "api/guard.h"
#include "api/h_common.h"
#include "api/relay.h"
#include "api/url.h"
#include "base/clock.h"
#include "base/jtext.h"
#include "base/jval.h"
#include "base/mem.h"
#include "server/cluster.h"
#include "server/config.h"
#include "server/errdoc.h"
#include "server/job.h"
#include "server/parts.h"

enum { HEADERS_MAX = 4, PATH_MAX_BYTES = 16384, LIST_MS = 5000, LISTS_MS = 10000, LEAST_MS = 100, SEEK_MS = 500, RECORDS_PAGE = 200,
       RECORDS_PAGES = 50, WHOLE_MS = 15000, WAITING_MS = 75000, ANSWER_MAX = 64 << 20 };

struct seeking;

struct forwarded {
	struct cluster_errand errand;      /* the first member */
	struct req *r;
	struct seeking *seeking;           /* for the node that has a job; NULL: the node is the one */
	struct buf path, headers[HEADERS_MAX];
	const char *lines[HEADERS_MAX + 1];
};

/* ---- one request ---- */

static void forwarded_free(struct forwarded *f)
{
	cluster_errand_free(&f->errand);
	buf_free(&f->path);
	for (size_t i = 0; i < HEADERS_MAX; i++)
		buf_free(&f->headers[i]);
	mem_free(f);
}

static FALLIBLE enum err pass_head(struct req *r, const struct cluster_errand *x, const char *name)
{
	struct str value = cluster_errand_head(x, name);
	char text[256];

	if (value.n == 0 || value.n >= sizeof text)
		return OK;
	snprintf(text, sizeof text, "%.*s", (int)value.n, value.p);
	return req_header(r, name, text);
}

static FALLIBLE enum err answer(struct req *r, struct cluster_errand *x)
{
	const char *type = x->status >= 400 ? "application/problem+json" : "application/json";

	TRY(req_bytes(r, (unsigned)x->status, type, &x->answer));
	TRY(pass_head(r, x, "Location"));
	TRY(pass_head(r, x, "Retry-After"));
	return pass_head(r, x, "Idempotency-Replayed");
}

static bool seeks_on(struct seeking *s, const struct cluster_errand *x, enum err e);
static void seeking_free(struct seeking *s);

static void on_answer(struct cluster_errand *x, enum err e)
{
	struct forwarded *f = (struct forwarded *)x;
	struct req *r = f->r;

	if (f->seeking && seeks_on(f->seeking, x, e)) {
		forwarded_free(f);
		return;
	}
	e = e ? e : answer(r, x);
	seeking_free(f->seeking);
	forwarded_free(f);
	req_done(r, e);
}

static struct forwarded *forwarded_new(struct req *r)
{
	struct forwarded *f = mem_zalloc(1, sizeof *f);

	if (!f)
		return NULL;
	f->r = r;
	f->path = BUF_INIT(PATH_MAX_BYTES);
	f->errand.url = BUF_INIT(PATH_MAX_BYTES + 512);
	for (size_t i = 0; i < HEADERS_MAX; i++)
		f->headers[i] = BUF_INIT(1024);
	return f;
}

/* Sets the lines of the headers that have something; ends each text. */
static FALLIBLE enum err set_headers(struct forwarded *f)
{
	size_t n = 0;

	auth_put_caller(f->r, &f->headers[0]);
	static const char *const passed[] = { "Idempotency-Key", "traceparent", "X-Request-Id" };
	for (size_t i = 0; i < sizeof passed / sizeof *passed; i++)
		if (req_head(f->r, passed[i]))
			buf_printf(&f->headers[i + 1], "%s: %s", passed[i], req_head(f->r, passed[i]));
	for (size_t i = 0; i < HEADERS_MAX; i++) {
		if (f->headers[i].len == 0)
			continue;
		buf_putc(&f->headers[i], '\0');
		TRY(buf_status(&f->headers[i]));
		f->lines[n++] = (const char *)f->headers[i].p;
	}
	f->errand.headers = f->lines;
	buf_putc(&f->path, '\0');
	f->errand.path = (const char *)f->path.p;
	return buf_status(&f->path);
}

static int64_t seeking_left(const struct seeking *s);

/* The query as it was sent: nothing of it has been decoded yet. Of a wait the rest. */
static enum MHD_Result put_query(void *user, enum MHD_ValueKind, const char *key, const char *value)
{
	struct forwarded *f = user;

	buf_putc(&f->path, memchr(f->path.p, '?', f->path.len) ? '&' : '?');
	url_encode(&f->path, str_of(key));
	if (value && f->seeking && strcmp(key, "wait") == 0)
		buf_printf(&f->path, "=%jdms", (intmax_t)seeking_left(f->seeking));
	else if (value)
		buf_printf(&f->path, "=%s", value);
	return MHD_YES;
}

static FALLIBLE enum err start(struct forwarded *f, const char *node)
{
	struct req *r = f->r;

	TRY(set_headers(f));
	f->errand.method = r->route->method; /* HEAD's is GET; it outlives the connection */
	f->errand.body = (struct str){ (const char *)r->raw.p, r->raw.len };
	f->errand.whole_ms = MHD_lookup_connection_value(r->conn, MHD_GET_ARGUMENT_KIND, "wait") ? WAITING_MS : WHOLE_MS;
	f->errand.fn = on_answer;
	r->audit = NULL; /* the node that does it notes it */
	cluster_send(r->core->cluster, node, &f->errand);
	return OK;
}

static FALLIBLE enum err send_to(struct req *r, const char *node, struct seeking *seeking)
{
	struct forwarded *f = forwarded_new(r);

	NEED(f, "cannot ask another node");
	f->seeking = seeking;
	buf_puts(&f->path, r->path);
	MHD_get_connection_values(r->conn, MHD_GET_ARGUMENT_KIND, put_query, f);
	enum err e = start(f, node);
	if (e)
		forwarded_free(f);
	return e;
}

FALLIBLE enum err forward_to(struct req *r, const char *node)
{
	TRY(send_to(r, node, NULL));
	req_hold(r);
	return OK;
}

/* ---- the node that has a job ---- */

/* First the node that made the job is asked, or the one that took it over as far as this node knows. If that does not answer, or has it no
 * more, etcd's record says who has it; and if that one is away, what the record says is the answer. */
struct seeking {
	struct req *r;
	char tried[CLUSTER_NODE_TEXT];     /* the node that was asked last; "": none */
	struct err_info why;               /* … and how that ended */
	int64_t end_ms;                    /* monotone clock: of the caller's wait */
	struct loop_timer *timer;
};

static int64_t seeking_left(const struct seeking *s)
{
	int64_t left = s->end_ms - clock_mono_ms();

	return left > 0 ? left : 0;
}

static void seeking_free(struct seeking *s)
{
	if (s)
		loop_timer_stop(&s->timer);
	mem_free(s);
}

static void seeking_end(struct seeking *s, enum err e)
{
	struct req *r = s->r;

	seeking_free(s);
	req_done(r, e);
}

static void ask_record(struct seeking *s);

static bool seeks_on(struct seeking *s, const struct cluster_errand *x, enum err e)
{
	bool moved = x->status == 409 && x->answer.p && memmem(x->answer.p, x->answer.len, "\"job_moved\"", 11);

	if (e != ERR_CLUSTER_UNAVAILABLE && (e || (x->status != 404 && !moved)))
		return false;
	if (!e)
		(void)ERR(NOT_FOUND, "there is no job \"%.*s\"", (int)s->r->parts[2].n, s->r->parts[2].p);
	s->why = *err_last();
	ask_record(s);
	return true;
}

static void ask_again(void *user)
{
	struct seeking *s = user;

	s->timer = NULL;
	ask_record(s);
}

/* Says in a job's record that its node does not answer. A job whose node was forgotten has failed. */
static FALLIBLE enum err mark_record(json_t *doc, const char *node, enum cluster_presence there)
{
	if (json_object_set_new(doc, "node_away", json_true()) != 0)
		return ERR(NO_MEMORY, "cannot show a job");
	if (there != CLUSTER_IS_UNKNOWN || job_record_ended(doc))
		return OK;
	(void)ERR(CLUSTER_UNAVAILABLE, "node \"%s\" was forgotten before the job ended", node);
	json_t *error = errdoc_of(ERR_CLUSTER_UNAVAILABLE);
	bool bad = json_object_set_new(doc, "error", error) != 0 || json_object_set_new(doc, "state", json_string("failed")) != 0;
	return bad ? ERR(NO_MEMORY, "cannot show a job") : OK;
}

/* Answers with the last record that etcd has of a job whose node is away. A job whose node was forgotten is shown as failed. */
static FALLIBLE enum err answer_record(struct req *r, const json_t *record, const char *node, enum cluster_presence there)
{
	CLEANUP(json_decrefp) json_t *doc = json_deep_copy(record);

	NEED(doc, "cannot show a job");
	TRY(mark_record(doc, node, there));
	return req_json_doc(r, 200, doc);
}

static void on_record(void *user, enum err e, const json_t *doc)
{
	struct seeking *s = user;
	const json_t *record = json_object_get(doc, "job");
	const char *node = jval_text(doc, "node");
	enum cluster_presence there = record ? cluster_presence(s->r->core->cluster, node) : CLUSTER_IS_UNKNOWN;
	bool looks = strcmp(s->r->route->path, "/v1/jobs/{id}") == 0;

	if (e || !record) {
		if (s->tried[0] || !e)
			err_restore(&s->why);
		seeking_end(s, s->tried[0] || !e ? s->why.code : e);
		return;
	}
	if (there == CLUSTER_IS_HERE && strcmp(node, s->tried) != 0) {
		snprintf(s->tried, sizeof s->tried, "%s", node);
		e = send_to(s->r, node, s);
		if (e)
			seeking_end(s, e);
		return;
	}
	if (looks && !job_record_ended(record) && there != CLUSTER_IS_UNKNOWN && seeking_left(s) > 0) {
		s->tried[0] = '\0'; /* another node may take it over meanwhile */
		loop_timer_start(s->r->core->loop, SEEK_MS, ask_again, s, &s->timer);
		return;
	}
	if (looks)
		e = answer_record(s->r, record, node, there);
	else
		e = ERR(CLUSTER_UNAVAILABLE, there == CLUSTER_IS_UNKNOWN ? "node \"%s\" was forgotten" : "node \"%s\" is away", node);
	seeking_end(s, e);
}

static void ask_record(struct seeking *s)
{
	cluster_record(s->r->core->cluster, s->r->parts[2], on_record, s);
}

FALLIBLE enum err forward_job(struct req *r, bool *elsewhere_out)
{
	static const char of_a_job[] = "/v1/jobs/{id}";
	struct cluster *c = r->core->cluster;
	unsigned wait_ms = 0;
	bool is_here;

	*elsewhere_out = false;
	if (!c || strncmp(r->route->path, of_a_job, sizeof of_a_job - 1) != 0 || !job_id_ok(r->parts[2]))
		return OK;
	const char *node = job_moved_to(r->core, r->parts[2], &is_here);
	if (is_here && !node)
		return OK;
	if (r->caller.is_node)
		return is_here ? ERR(JOB_MOVED, "node \"%s\" has the job", node) : OK;
	node = node && node[0] ? node : is_here ? NULL : cluster_owner(c, r->parts[2]);
	if (str_ends(str_of(r->route->path), "/events")) {
		*elsewhere_out = true;
		return relay_start(r, node);
	}
	if (strcmp(r->route->path, of_a_job) == 0)
		TRY(req_query_wait(r, &wait_ms));
	struct seeking *s = mem_zalloc(1, sizeof *s);
	NEED(s, "cannot ask another node");
	*s = (struct seeking){ .r = r, .end_ms = clock_mono_ms() + wait_ms };
	if (cluster_has_looked(c))
		(void)ERR(NOT_FOUND, "there is no job \"%.*s\"", (int)r->parts[2].n, r->parts[2].p);
	else
		(void)ERR(CLUSTER_UNAVAILABLE, "this node has not heard of the others yet");
	s->why = *err_last();
	snprintf(s->tried, sizeof s->tried, "%s", node ? node : "");
	enum err e = node ? send_to(r, node, s) : OK;
	if (e) {
		seeking_free(s);
		return e;
	}
	*elsewhere_out = true;
	req_hold(r);
	if (!node)
		ask_record(s);
	return OK;
}

/* ---- the list of all jobs ---- */

/* Nodes are asked one after the other: no more than one answer is held. */
struct gathering {
	struct req *r;
	struct buf query;
	uint32_t size, next;
	json_t *rows;                      /* newest first, `size` at most */
	json_t *silent;                    /* nodes that did not answer */
	json_t *answered;                  /* the others, by name */
	char *filter;
	char before[JOB_ID_LEN + 1];       /* etcd's records are looked through from here on; "": from the newest */
	json_t *records;                   /* those of nodes that did not answer */
	unsigned pages;                    /* of records */
	bool more;
	int64_t end_ms;                    /* monotone clock: nodes that have not been asked by then are silent, too */
};

static void ask_next(struct gathering *g);

static void gathering_end(struct gathering *g, enum err e)
{
	struct req *r = g->r;
	size_t n = json_array_size(g->rows);
	const char *last = n ? json_string_value(json_object_get(json_array_get(g->rows, n - 1), "id")) : NULL;
	json_t *doc = e ? NULL : json_pack("{s:O}", "jobs", g->rows);

	if (!e && (!doc || (g->more && last && json_object_set_new(doc, "next_page_token", json_string(last)) != 0) ||
		   (json_array_size(g->silent) && json_object_set(doc, "nodes_silent", g->silent) != 0)))
		e = ERR(NO_MEMORY, "cannot list jobs");
	e = e ? e : req_json_doc(r, 200, doc);
	json_decref(doc);
	json_decref(g->rows);
	json_decref(g->silent);
	json_decref(g->answered);
	json_decref(g->records);
	mem_free(g->filter);
	buf_free(&g->query);
	mem_free(g);
	req_done(r, e);
}

static const char *id_of(const json_t *row)
{
	const char *id = json_string_value(json_object_get(row, "id"));

	return id ? id : "";
}

/* Merges a node's page into the rows: both have the newest first. */
static FALLIBLE enum err merge(struct gathering *g, const json_t *page)
{
	const json_t *more = json_object_get(page, "jobs");
	json_t *merged = json_array();
	size_t i = 0, k = 0, n = json_array_size(g->rows), m = json_array_size(more);
	int bad = merged ? 0 : -1;

	while (!bad && (i < n || k < m) && json_array_size(merged) < g->size) {
		if (k < m && json_object_get(json_array_get(more, k), "moved_to")) { /* the node that has it tells of it */
			k++;
			continue;
		}
		int order = i == n ? -1 : k == m ? 1 : strcmp(id_of(json_array_get(g->rows, i)), id_of(json_array_get(more, k)));
		bad = json_array_append(merged, order >= 0 ? json_array_get(g->rows, i) : json_array_get(more, k));
		i += order >= 0;
		k += order <= 0; /* a node that was asked twice, since others came meanwhile, tells the same */
	}
	g->more = g->more || i < n || k < m || json_object_get(page, "next_page_token");
	json_decref(g->rows);
	g->rows = merged;
	return bad ? ERR(NO_MEMORY, "cannot list jobs") : OK;
}

static FALLIBLE enum err merge_text(struct gathering *g, struct str text)
{
	CLEANUP(json_decrefp) json_t *page = NULL;

	TRY(jtext_parse(text, JSON_ALLOW_NUL, &page));
	return merge(g, page);
}

static void on_page(struct cluster_errand *x, enum err e)
{
	struct forwarded *f = (struct forwarded *)x;
	struct gathering *g = x->user;

	if (!e && x->status == 200)
		e = merge_text(g, (struct str){ (const char *)x->answer.p, x->answer.len });
	if (e == ERR_NO_MEMORY || e == ERR_DRAINING) { /* no more nodes are asked at the end of the daemon */
		forwarded_free(f);
		gathering_end(g, e);
		return;
	}
	if (e || x->status != 200)
		(void)json_array_append_new(g->silent, json_string(x->node));
	else
		(void)json_object_set_new(g->answered, x->node, json_true());
	forwarded_free(f);
	ask_next(g);
}

/* ---- of nodes that did not answer ---- */

static void ask_records(struct gathering *g);

/* Is there a reason to look at older ones? Not if the page is full of newer ones. */
static bool wants_more(const struct gathering *g, const json_t *page)
{
	size_t n = json_array_size(g->rows);
	const char *last = n ? id_of(json_array_get(g->rows, n - 1)) : "";

	return json_is_true(json_object_get(page, "more")) && json_array_size(g->records) <= g->size && g->pages < RECORDS_PAGES &&
	       (n < g->size || strcmp(g->before, last) > 0);
}

static FALLIBLE enum err take_records(struct gathering *g, const json_t *page)
{
	const struct cluster *c = g->r->core->cluster;
	const json_t *one;
	size_t i;

	json_array_foreach(json_object_get(page, "records"), i, one) {
		json_t *record = json_object_get(one, "job");
		const char *node = jval_text(one, "node");
		bool matches = false;
		snprintf(g->before, sizeof g->before, "%s", id_of(record));
		if (json_object_get(g->answered, node) || json_array_size(g->records) > g->size)
			continue;
		TRY(mark_record(record, node, cluster_presence(c, node)));
		TRY(job_matches(str_of(g->filter), record, &matches));
		if (matches && json_array_append(g->records, record) != 0)
			return ERR(NO_MEMORY, "cannot list jobs");
	}
	return OK;
}

static void on_records(void *user, enum err e, const json_t *page)
{
	struct gathering *g = user;

	if (e) { /* etcd is away, too: their jobs are missing */
		err_clear();
		gathering_end(g, OK);
		return;
	}
	g->pages++;
	e = take_records(g, page);
	if (!e && wants_more(g, page)) {
		ask_records(g);
		return;
	}
	CLEANUP(json_decrefp) json_t *all = json_pack("{s:O}", "jobs", g->records);
	e = e ? e : !all ? ERR(NO_MEMORY, "cannot list jobs") : merge(g, all);
	gathering_end(g, e);
}

static void ask_records(struct gathering *g)
{
	struct cluster *c = g->r->core->cluster;

	if (json_array_size(g->silent) == 0 && !cluster_has_gone(c))
		gathering_end(g, OK);
	else
		cluster_records(c, g->before, RECORDS_PAGE, on_records, g);
}

static void ask_next(struct gathering *g)
{
	const char *node = cluster_other(g->r->core->cluster, &g->next);
	struct forwarded *f = node ? forwarded_new(g->r) : NULL;

	if (!node) {
		ask_records(g);
		return;
	}
	enum err e = f ? OK : ERR(NO_MEMORY, "cannot ask another node");
	if (!e) {
		buf_put(&f->path, g->query.p, g->query.len);
		e = set_headers(f);
	}
	if (e) {
		if (f)
			forwarded_free(f);
		gathering_end(g, e);
		return;
	}
	f->errand.method = "GET";
	int64_t left = g->end_ms - clock_mono_ms();
	f->errand.whole_ms = (long)(left > LIST_MS ? LIST_MS : left > LEAST_MS ? left : LEAST_MS);
	f->errand.fn = on_page;
	f->errand.user = g;
	cluster_send(g->r->core->cluster, node, &f->errand);
}

bool forward_lists(const struct req *r)
{
	uint32_t index = 0;

	return !r->caller.is_node && r->core->cluster && (cluster_other(r->core->cluster, &index) || cluster_has_gone(r->core->cluster));
}

FALLIBLE enum err forward_list(struct req *r, struct str filter, uint32_t size, struct str token)
{
	CLEANUP(buf_free) struct buf own = BUF_INIT(ANSWER_MAX);
	struct gathering *g = mem_zalloc(1, sizeof *g);

	NEED(g, "cannot list jobs");
	*g = (struct gathering){ .r = r, .size = size, .end_ms = clock_mono_ms() + LISTS_MS, .rows = json_array(), .silent = json_array(),
				 .query = BUF_INIT(PATH_MAX_BYTES), .answered = json_pack("{s:b}", r->core->config->node, 1),
				 .records = json_array(), .filter = mem_strndup(filter.n ? filter.p : "", filter.n) };
	snprintf(g->before, sizeof g->before, "%.*s", (int)token.n, token.n ? token.p : "");
	buf_printf(&g->query, "/v1/jobs?page_size=%u", size);
	if (token.n) {
		buf_puts(&g->query, "&page_token=");
		url_encode(&g->query, token);
	}
	if (filter.n) {
		buf_puts(&g->query, "&filter=");
		url_encode(&g->query, filter);
	}
	bool whole = g->rows && g->silent && g->answered && g->records && g->filter;
	enum err e = whole ? buf_status(&g->query) : ERR(NO_MEMORY, "cannot list jobs");
	e = e ? e : job_list(r->core, filter, size, token, &own);
	e = e ? e : merge_text(g, (struct str){ (const char *)own.p, own.len });
	req_hold(r);
	if (e)
		gathering_end(g, e);
	else
		ask_next(g);
	return OK;
}
