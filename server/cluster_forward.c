/* cluster_forward.c: requests from this node to another one. Nodes prove themselves by the secret that lies in etcd; which caller a node
 * speaks for, it says itself: nodes trust each other. */
#include <sodium.h>
#include <stdio.h>

#include "base/list.h"
#include "base/mem.h"
#include "server/cluster_impl.h"
#include "server/config.h"
#include "server/parts.h"

enum { ERRANDS_MAX = 256, ANSWER_MAX = 32 << 20, HEADS_MAX = 64 << 10, CONNECT_MS = 2000 };

bool cluster_is_peer(const struct cluster *c, const char *authorization)
{
	static const char scheme[] = "Bearer ";
	size_t n = c ? strlen(c->secret) : 0;

	if (n == 0 || strncmp(authorization, scheme, sizeof scheme - 1) != 0 || strlen(authorization + sizeof scheme - 1) != n)
		return false;
	return sodium_memcmp(authorization + sizeof scheme - 1, c->secret, n) == 0;
}

static bool is_self(const struct cluster *c, const struct cluster_node *n)
{
	return strcmp(n->name, c->name) == 0;
}

static const char *member_text(const struct cluster_node *n, const char *key)
{
	const char *text = json_string_value(json_object_get(n->member, key));

	return text ? text : "";
}

const char *cluster_owner(const struct cluster *c, struct str id)
{
	if (!c || !job_id_ok(id) || memcmp(id.p + JOB_ID_LEN - JOB_MARK_LEN, c->mark, JOB_MARK_LEN) == 0)
		return NULL;
	each(n, c->nodes.v, c->nodes.n)
		if (!is_self(c, n) && str_is((struct str){ id.p + JOB_ID_LEN - JOB_MARK_LEN, JOB_MARK_LEN }, member_text(n, "mark")))
			return n->name;
	return NULL;
}

const char *cluster_other(const struct cluster *c, uint32_t *index_io)
{
	while (c && *index_io < c->nodes.n) {
		const struct cluster_node *n = &c->nodes.v[(*index_io)++];
		if (!is_self(c, n))
			return n->name;
	}
	return NULL;
}

static bool speaks_our_protocol(const struct cluster_node *n)
{
	return etcd_number(n->member, "protocol") == CLUSTER_PROTOCOL;
}

bool cluster_speaks_otherwise(const struct cluster_node *n)
{
	return json_is_integer(json_object_get(n->member, "protocol")) && !speaks_our_protocol(n);
}

static bool has_storage(const struct cluster_node *n, const char *storage)
{
	const json_t *one;
	size_t i;

	json_array_foreach(json_object_get(n->member, "storages"), i, one)
		if (json_is_string(one) && strcmp(json_string_value(one), storage) == 0)
			return true;
	return false;
}

FALLIBLE enum err cluster_taker(const struct cluster *c, const char *const *storages, size_t count, const char **node_out)
{
	const struct cluster_node *best = NULL;

	each(n, c->nodes.v, c->nodes.n) {
		bool has_all = n->state == CLUSTER_JOINED && !is_self(c, n) && speaks_our_protocol(n);
		for (size_t i = 0; i < count && has_all; i++)
			has_all = has_storage(n, storages[i]);
		if (has_all && (!best || n->jobs < best->jobs))
			best = n;
	}
	if (!best)
		return ERR(DRAINING, "node \"%s\" is drained, and no other node that takes work has all storages of the request: "
			   "dcpctl nodes", c->name);
	*node_out = best->name;
	return OK;
}

const char *cluster_neighbour(const struct cluster *c, uint32_t index)
{
	uint64_t self = 0, n = c ? c->nodes.n : 0; /* etcd has them in the order of their names */

	while (self < n && !is_self(c, &c->nodes.v[self]))
		self++;
	for (uint64_t i = 1; i < n; i++) {
		const struct cluster_node *node = &c->nodes.v[(self + i) % n];
		if (self < n && node->state == CLUSTER_JOINED && speaks_our_protocol(node) && index-- == 0)
			return node->name;
	}
	return NULL;
}

enum cluster_presence cluster_presence(const struct cluster *c, const char *node)
{
	if (strcmp(node, c->name) == 0)
		return CLUSTER_IS_SELF;
	each(n, c->nodes.v, c->nodes.n)
		if (strcmp(n->name, node) == 0)
			return n->state == CLUSTER_AWAY ? CLUSTER_IS_AWAY : CLUSTER_IS_HERE;
	return CLUSTER_IS_UNKNOWN;
}

bool cluster_is_away(const struct server *s, const char *node)
{
	enum cluster_presence presence = s->cluster ? cluster_presence(s->cluster, node) : CLUSTER_IS_UNKNOWN;

	return presence == CLUSTER_IS_AWAY || presence == CLUSTER_IS_UNKNOWN;
}

bool cluster_has_looked(const struct cluster *c)
{
	return c && c->looks > 0;
}

bool cluster_is_drained(const struct cluster *c)
{
	return c && c->drained;
}

/* ---- errands ---- */

static void errand_end(struct cluster_errand *x, enum err e)
{
	list2_remove(&x->cluster->errands, x);
	x->cluster->errand_count--;
	x->fn(x, e);
}

static void on_answer(struct courier_parcel *p)
{
	struct cluster_errand *x = (struct cluster_errand *)p;

	x->status = p->status;
	errand_end(x, p->status ? OK : ERR(CLUSTER_UNAVAILABLE, "node \"%s\" does not answer: %s", x->node, p->error));
}

static void on_no_node(void *user, enum err e)
{
	errand_end(user, e);
}

FALLIBLE enum err cluster_may_send(const struct cluster *c, const struct cluster_node *n)
{
	if (!speaks_our_protocol(n))
		return ERR(CLUSTER_UNAVAILABLE, "node \"%s\" (version %.40s) speaks another protocol than this one: update the older one",
			   n->name, member_text(n, "version"));
	if (!is_self(c, n) && strcmp(member_text(n, "advertise"), c->server->config->advertise) == 0)
		return ERR(CLUSTER_UNAVAILABLE, "node \"%s\" advertises %.200s, as this one does: each needs an --advertise at which all "
			   "others reach it, and nobody else", n->name, c->server->config->advertise);
	if (config_may_send_secret(c->server->config, str_of(member_text(n, "url"))))
		return OK;
	return ERR(CLUSTER_UNAVAILABLE, "node \"%s\" has no TLS beyond loopback: the cluster's secret is not sent to it in the clear (or "
		   "start this node with --insecure-http, too)", n->name);
}

/* ERR_CLUSTER_UNAVAILABLE: it is away, or nothing may be sent there. */
static FALLIBLE enum err find_node(const struct cluster *c, const char *name, const struct cluster_node **out)
{
	*out = NULL;
	each(n, c->nodes.v, c->nodes.n)
		if (strcmp(n->name, name) == 0)
			*out = n;
	if (!*out || (*out)->state == CLUSTER_AWAY)
		return ERR(CLUSTER_UNAVAILABLE, "node \"%s\" is away", name);
	return cluster_may_send(c, *out);
}

void cluster_send(struct cluster *c, const char *name, struct cluster_errand *x)
{
	const struct cluster_node *n;
	enum err e = find_node(c, name, &n);

	x->cluster = c;
	x->answer = BUF_INIT(ANSWER_MAX);
	x->heads = BUF_INIT(HEADS_MAX);
	snprintf(x->node, sizeof x->node, "%s", name);
	list2_add(&c->errands, x);
	if (c->errand_count++ >= ERRANDS_MAX)
		e = ERR(BUSY, "%d requests wait for other nodes", ERRANDS_MAX);
	if (!e && x->path[0] != '/') /* else it would end in another host, with this cluster's secret */
		e = ERR(INTERNAL, "a path that does not begin with \"/\"");
	if (!e) {
		buf_printf(&x->url, "%s%s", member_text(n, "url"), x->path);
		buf_putc(&x->url, '\0');
		e = buf_status(&x->url);
	}
	if (e) {
		loop_later(c->server->loop, on_no_node, x, e);
		return;
	}
	size_t count = 0;
	snprintf(x->authorization, sizeof x->authorization, "Authorization: Bearer %s", c->secret);
	x->lines[count++] = x->authorization;
	for (const char *const *h = x->headers; h && *h && count < CLUSTER_HEADERS_MAX - 1; h++)
		x->lines[count++] = *h;
	x->lines[count] = NULL;
	x->parcel = (struct courier_parcel){ .url = (const char *)x->url.p, .method = x->method, .headers = x->lines, .body = x->body,
					     .tls = &c->tls, .connect_ms = CONNECT_MS, .whole_ms = x->whole_ms, .may_reuse = true,
					     .answer = &x->answer, .heads = &x->heads, .fn = on_answer };
	courier_send(c->courier, &x->parcel);
}

void cluster_errands_end(struct cluster *c)
{
	while (c->errands)
		errand_end(c->errands, ERR(DRAINING, "the daemon is shutting down"));
}

void cluster_errand_free(struct cluster_errand *x)
{
	buf_free(&x->answer);
	buf_free(&x->heads);
	buf_free(&x->url);
}

struct str cluster_errand_head(const struct cluster_errand *x, const char *name)
{
	struct str rest = { (const char *)x->heads.p, x->heads.len };
	size_t n = strlen(name);

	while (rest.n) {
		const char *end = memchr(rest.p, '\n', rest.n);
		size_t line = end ? (size_t)(end - rest.p) : rest.n;
		struct str value = { rest.p + n + 1, line > n + 1 ? line - n - 1 : 0 };
		if (line > n && strncasecmp(rest.p, name, n) == 0 && rest.p[n] == ':') {
			while (value.n && (value.p[0] == ' ' || value.p[0] == '\t'))
				value = (struct str){ value.p + 1, value.n - 1 };
			while (value.n && (value.p[value.n - 1] == '\r' || value.p[value.n - 1] == ' '))
				value.n--;
			return value;
		}
		rest = (struct str){ rest.p + line + (end != NULL), rest.n - line - (end != NULL) };
	}
	return (struct str){ 0 };
}
