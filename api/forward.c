/* forward.c: see forward.h. The answer's body and the headers that mean something go back as they came; the form (lines, compression,
 * tags) is this node's to choose. */
#include "api/forward.h"

#include <stdio.h>

#include "api/guard.h"
#include "api/h_common.h"
#include "api/url.h"
#include "base/jtext.h"
#include "base/mem.h"
#include "server/cluster.h"
#include "server/job.h"
#include "server/parts.h"

enum { HEADERS_MAX = 4, PATH_MAX_BYTES = 16384, LIST_MS = 5000, WHOLE_MS = 15000, WAITING_MS = 75000, ANSWER_MAX = 64 << 20 };

struct forwarded {
	struct cluster_errand errand;      /* the first member */
	struct req *r;
	struct buf path, headers[HEADERS_MAX];
	const char *lines[HEADERS_MAX + 1];
};

static void put_caller(const struct req *r, struct buf *b)
{
	buf_printf(b, "%s: %u %u %u %s", CLUSTER_CALLER_HEAD, (unsigned)r->caller.uid, (unsigned)r->caller.scope, (unsigned)r->caller.admin,
		   r->caller.token[0] ? r->caller.token : "-");
}

/* ---- one request ---- */

static void forwarded_free(struct forwarded *f)
{
	buf_free(&f->errand.answer);
	buf_free(&f->errand.heads);
	buf_free(&f->errand.url);
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

static void on_answer(struct cluster_errand *x, enum err e)
{
	struct forwarded *f = (struct forwarded *)x;
	struct req *r = f->r;

	e = e ? e : answer(r, x);
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

	put_caller(f->r, &f->headers[0]);
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

/* The query as it was sent: nothing of it has been decoded yet. */
static enum MHD_Result put_query(void *user, enum MHD_ValueKind, const char *key, const char *value)
{
	struct forwarded *f = user;

	buf_putc(&f->path, memchr(f->path.p, '?', f->path.len) ? '&' : '?');
	url_encode(&f->path, str_of(key));
	if (value)
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
	req_hold(r);
	cluster_send(r->core->cluster, node, &f->errand);
	return OK;
}

FALLIBLE enum err forward_to(struct req *r, const char *node)
{
	struct forwarded *f = forwarded_new(r);

	NEED(f, "cannot ask another node");
	buf_puts(&f->path, r->path);
	MHD_get_connection_values(r->conn, MHD_GET_ARGUMENT_KIND, put_query, f);
	enum err e = start(f, node);
	if (e)
		forwarded_free(f);
	return e;
}

const char *forward_owner(const struct req *r)
{
	static const char of_a_job[] = "/v1/jobs/{id}";

	if (r->caller.is_node || strncmp(r->route->path, of_a_job, sizeof of_a_job - 1) != 0)
		return NULL;
	return cluster_owner(r->core->cluster, r->parts[2]);
}

/* ---- the list of all jobs ---- */

/* Nodes are asked one after the other: no more than one answer is held. */
struct gathering {
	struct req *r;
	struct buf query;
	uint32_t size, next;
	json_t *rows;                      /* newest first, `size` at most */
	json_t *silent;                    /* nodes that did not answer */
	bool more;
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
	forwarded_free(f);
	ask_next(g);
}

static void ask_next(struct gathering *g)
{
	const char *node = cluster_other(g->r->core->cluster, &g->next);
	struct forwarded *f = node ? forwarded_new(g->r) : NULL;

	if (!node) {
		gathering_end(g, OK);
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
	f->errand.whole_ms = LIST_MS;
	f->errand.fn = on_page;
	f->errand.user = g;
	cluster_send(g->r->core->cluster, node, &f->errand);
}

bool forward_lists(const struct req *r)
{
	uint32_t index = 0;

	return !r->caller.is_node && cluster_other(r->core->cluster, &index);
}

FALLIBLE enum err forward_list(struct req *r, struct str filter, uint32_t size, struct str token)
{
	CLEANUP(buf_free) struct buf own = BUF_INIT(ANSWER_MAX);
	struct gathering *g = mem_zalloc(1, sizeof *g);

	NEED(g, "cannot list jobs");
	*g = (struct gathering){ .r = r, .size = size, .rows = json_array(), .silent = json_array(), .query = BUF_INIT(PATH_MAX_BYTES) };
	buf_printf(&g->query, "/v1/jobs?page_size=%u", size);
	if (token.n) {
		buf_puts(&g->query, "&page_token=");
		url_encode(&g->query, token);
	}
	if (filter.n) {
		buf_puts(&g->query, "&filter=");
		url_encode(&g->query, filter);
	}
	enum err e = g->rows && g->silent ? buf_status(&g->query) : ERR(NO_MEMORY, "cannot list jobs");
	e = e ? e : job_list(r->core, filter, size, token, &own);
	e = e ? e : merge_text(g, (struct str){ (const char *)own.p, own.len });
	req_hold(r);
	if (e)
		gathering_end(g, e);
	else
		ask_next(g);
	return OK;
}
