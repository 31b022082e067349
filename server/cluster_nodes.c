/* cluster_nodes.c: the cluster's nodes as the last look at etcd saw them, and the wish that one of them be drained. */
#include <stdio.h>

#include "base/jtext.h"
#include "base/log.h"
#include "base/mem.h"
#include "base/num.h"
#include "server/cluster_impl.h"
#include "server/metrics.h"
#include "server/parts.h"

enum { LOOK_MS = 5000 }; /* the next look comes sooner, unless etcd is away */

static const char *const state_names[CLUSTER_STATES] = { "joined", "draining", "drained", "away" };

/* ---- the last look ---- */

static void drop_nodes(struct cluster *c)
{
	each(n, c->nodes.v, c->nodes.n)
		json_decref(n->member);
	c->nodes.n = 0;
}

static struct cluster_node *find(const struct cluster *c, struct str name)
{
	each(n, c->nodes.v, c->nodes.n)
		if (str_is(name, n->name))
			return n;
	return NULL;
}

/* A value that is none of dcpd's is named and passed over: nobody else's key keeps a node out of its cluster. */
static FALLIBLE enum err pass_over(struct cluster *c, const json_t *row, enum err e)
{
	CLEANUP(buf_free) struct buf key = BUF_INIT(CLUSTER_KEY_MAX), shown = BUF_INIT(8 * CLUSTER_KEY_MAX);
	struct err_info info = *err_last();

	if (e != ERR_CLUSTER_UNAVAILABLE)
		return e;
	if (etcd_key(row, "", &key) || key.len == 0) { /* no row of etcd's */
		err_restore(&info);
		return e;
	}
	err_clear();
	buf_json_str(&shown, (struct str){ (const char *)key.p, key.len });
	TRY(buf_status(&shown));
	if (c->odd_count++ == 0)
		snprintf(c->odd, sizeof c->odd, "etcd holds values that are none of dcpd's, which are passed over: %.*s", (int)shown.len,
			 shown.p);
	return OK;
}

/* The name in a row's key. ERR_CLUSTER_UNAVAILABLE: it is none. */
static FALLIBLE enum err name_of(const struct cluster *c, const char *kind, const json_t *row, char out[CLUSTER_NAME_MAX + 1])
{
	CLEANUP(buf_free) struct buf b = BUF_INIT(CLUSTER_KEY_MAX);
	char prefix[CLUSTER_KEY_MAX];

	TRY(etcd_key(row, cluster_key(c, kind, "", prefix), &b));
	if (b.len == 0 || b.len > CLUSTER_NAME_MAX || memchr(b.p, '\0', b.len))
		return ERR(CLUSTER_UNAVAILABLE, "etcd holds a node whose name is none");
	memcpy(out, b.p, b.len);
	out[b.len] = '\0';
	return OK;
}

static FALLIBLE enum err take_members(struct cluster *c, const json_t *rows)
{
	struct cluster_node *n;
	const json_t *row;
	size_t i;

	json_array_foreach(rows, i, row) {
		TRY(vec_push(&c->nodes, &n));
		*n = (struct cluster_node){ .state = CLUSTER_AWAY, .jobs = -1 };
		enum err e = name_of(c, "members/", row, n->name);
		if (e) {
			c->nodes.n--;
			TRY(pass_over(c, row, e));
			continue;
		}
		e = etcd_value(row, &n->member); /* without it the node is known, and nothing is sent to it */
		TRY(e ? pass_over(c, row, e) : OK);
	}
	return OK;
}

static FALLIBLE enum err take_alive(struct cluster *c, const json_t *rows)
{
	char name[CLUSTER_NAME_MAX + 1];
	const json_t *row;
	size_t i;

	json_array_foreach(rows, i, row) {
		CLEANUP(json_decrefp) json_t *value = NULL;
		enum err e = name_of(c, "alive/", row, name);
		struct cluster_node *n = e ? NULL : find(c, str_of(name));
		e = e ?: etcd_value(row, &value); /* whatever it is, the node's lease is not over */
		TRY(e ? pass_over(c, row, e) : OK);
		if (!n)
			continue;
		n->jobs = etcd_number(value, "jobs");
		n->state = n->jobs ? CLUSTER_DRAINING : CLUSTER_DRAINED;
		if (!json_is_true(json_object_get(value, "draining")))
			n->state = CLUSTER_JOINED;
	}
	return OK;
}

/* A node that has not yet heard of the wish, or has not said that it has, may still take work. */
static FALLIBLE enum err take_drained(struct cluster *c, const json_t *rows)
{
	char name[CLUSTER_NAME_MAX + 1];
	const json_t *row;
	bool self = false;
	size_t i;

	json_array_foreach(rows, i, row) {
		enum err e = name_of(c, "drained/", row, name);
		if (e) {
			TRY(pass_over(c, row, e));
			continue;
		}
		struct cluster_node *n = find(c, str_of(name));
		self = self || strcmp(name, c->name) == 0;
		if (n && n->state == CLUSTER_JOINED)
			n->state = CLUSTER_DRAINING;
	}
	if (self != c->drained)
		log_info(self ? "this node is to be drained" : "this node takes work again", "node", c->name, NULL);
	c->drained = self;
	return OK;
}

/* A node on loopback of another host, or of another network namespace of this one, is not where the others look for it. A relay may lead
 * there: it is told, and requests go there all the same. */
static FALLIBLE enum err check_place(const struct cluster *c, const struct cluster_node *n)
{
	const char *at = json_string_value(json_object_get(n->member, "advertise"));
	const char *place = json_string_value(json_object_get(n->member, "place"));

	if (!at || !place || !place[0] || !c->place[0] || strcmp(place, c->place) == 0 || !config_is_loopback(at))
		return OK;
	return ERR(CLUSTER_UNAVAILABLE, "node \"%s\" is on another host, and advertises %.200s, which is on loopback: this node does not "
		   "find it there (--advertise)", n->name, at);
}

/* Names nodes that are there and not reached from here: else nothing would be said of them until they are needed. */
static void note_apart(struct cluster *c)
{
	uint32_t before = c->apart_count;
	size_t n;

	c->apart[0] = '\0';
	c->apart_count = 0;
	each(node, c->nodes.v, c->nodes.n) {
		bool counts = node->state != CLUSTER_AWAY && json_is_object(node->member) && strcmp(node->name, c->name) != 0;
		enum err e = counts ? check_place(c, node) ?: cluster_may_send(c, node) : OK;
		if (e && c->apart_count++ == 0)
			snprintf(c->apart, sizeof c->apart, "%.600s", err_last()->text);
		if (e)
			err_clear();
	}
	n = strlen(c->apart);
	if (c->apart_count > 1)
		snprintf(c->apart + n, sizeof c->apart - n, "; and %u more nodes that this one does not reach", c->apart_count - 1);
	if (c->apart_count && c->apart_count != before)
		log_warn("does not reach a node", "why", c->apart, NULL);
}

FALLIBLE enum err cluster_take(struct cluster *c, const json_t *answer, size_t index)
{
	uint32_t before = c->odd_count;

	drop_nodes(c);
	c->odd[0] = '\0';
	c->odd_count = 0;
	TRY(take_members(c, etcd_rows(answer, index)));
	TRY(take_alive(c, etcd_rows(answer, index + 1)));
	TRY(take_drained(c, etcd_rows(answer, index + 2)));
	c->has_gone = json_array_size(etcd_rows(answer, index + 3)) > 0;
	if (c->odd_count > 1) {
		size_t n = strlen(c->odd);
		snprintf(c->odd + n, sizeof c->odd - n, " and %u more", c->odd_count - 1);
	}
	if (c->odd_count && c->odd_count != before)
		log_warn("passes values in etcd over", "why", c->odd, NULL);
	note_apart(c);
	return OK;
}

/* Was this node's own description there? */
bool cluster_is_described(const struct cluster *c)
{
	const struct cluster_node *n = find(c, str_of(c->name));

	return n && json_is_string(json_object_get(n->member, "id"));
}

bool cluster_has_gone(const struct cluster *c)
{
	return c->has_gone;
}

/* ---- shown ---- */

static void put_node(const struct cluster_node *n, struct buf *out)
{
	const char *advertise = json_string_value(json_object_get(n->member, "advertise"));
	const char *version = json_string_value(json_object_get(n->member, "version"));
	const json_t *storages = json_object_get(n->member, "storages");

	buf_puts(out, "{\"name\":");
	buf_json_str(out, str_of(n->name));
	buf_printf(out, ",\"state\":\"%s\"", state_names[n->state]);
	buf_json_member(out, ",\"advertise\":", str_of(advertise ? advertise : ""));
	buf_json_member(out, ",\"version\":", str_of(version ? version : ""));
	if (n->jobs >= 0)
		buf_printf(out, ",\"jobs\":%jd", (intmax_t)n->jobs);
	buf_puts(out, ",\"storages\":");
	if (json_is_array(storages))
		jtext_put(out, storages);
	else
		buf_puts(out, "[]");
	buf_putc(out, '}');
}

FALLIBLE enum err cluster_put_nodes(const struct cluster *c, struct buf *out)
{
	buf_puts(out, "{");
	if (c) {
		buf_puts(out, "\"node\":");
		buf_json_str(out, str_of(c->name));
		const char *problem = cluster_problem(c) ?: cluster_oddity(c, 0);
		if (problem)
			buf_json_member(out, ",\"problem\":", str_of(problem));
		buf_printf(out, ",\"spreads\":%s,", config_cluster_reaches_workers(c->server->config) ? "true" : "false");
	}
	buf_puts(out, "\"nodes\":[");
	for (uint64_t i = 0; c && i < c->nodes.n; i++) {
		buf_puts(out, i ? "," : "");
		put_node(&c->nodes.v[i], out);
	}
	buf_puts(out, "]}");
	return buf_status(out);
}

static FALLIBLE enum err no_node(struct str name)
{
	return ERR(NOT_FOUND, "the cluster has no node \"%.*s\"", (int)num_min(name.n, 64), name.p);
}

FALLIBLE enum err cluster_put_node(const struct cluster *c, struct str name, struct buf *out)
{
	const struct cluster_node *n = c ? find(c, name) : NULL;

	if (!n)
		return no_node(name);
	put_node(n, out);
	return buf_status(out);
}

void cluster_fill(const struct cluster *c, struct metrics *m)
{
	unsigned counts[CLUSTER_STATES] = { 0 };
	char labels[40];

	if (!c)
		return;
	each(n, c->nodes.v, c->nodes.n)
		counts[n->state]++;
	for (int i = 0; i < CLUSTER_STATES; i++) {
		snprintf(labels, sizeof labels, "state=\"%s\"", state_names[i]);
		metrics_set(m, "dcpd_cluster_nodes", labels, counts[i]);
	}
	metrics_set(m, "dcpd_cluster_joined", "", c->problem[0] == '\0');
	metrics_set(m, "dcpd_cluster_failures_total", "", (double)c->failures);
}

/* ---- drained ---- */

static void wait_end(struct cluster_wait *w, enum err e)
{
	struct cluster *c = w->cluster;
	struct cluster_wait **at = &c->waits;

	while (*at != w)
		at = &(*at)->next;
	*at = w->next;
	loop_timer_stop(&w->timer);
	w->fn(w->user, e);
	mem_free(w);
}

static void on_wait_over(void *user)
{
	struct cluster_wait *w = user;

	w->timer = NULL;
	wait_end(w, OK);
}

void cluster_looked(struct cluster *c)
{
	for (struct cluster_wait *w = c->waits, *next; w; w = next) {
		const struct cluster_node *n = find(c, str_of(w->name));
		bool is_so = n && n->state == (w->drain ? CLUSTER_DRAINED : CLUSTER_JOINED);
		next = w->next;
		if (w->after < c->looks && (is_so || w->wait_ms == 0))
			wait_end(w, OK);
	}
}

static void on_wished(void *user, enum err e, const json_t *answer)
{
	struct cluster_wait *w = user;

	if (!e && !etcd_succeeded(answer))
		e = no_node(str_of(w->name));
	if (e) {
		wait_end(w, e);
		return;
	}
	loop_timer_start(w->cluster->server->loop, w->wait_ms ? w->wait_ms : LOOK_MS, on_wait_over, w, &w->timer);
	w->after = w->cluster->looks + w->cluster->asking; /* a look that is under way may not have seen it */
	cluster_hurry(w->cluster);
}

void cluster_drain(struct server *s, struct str name, bool drain, int64_t wait_ms, done_fn fn, void *user)
{
	struct cluster *c = s->cluster;
	char member[CLUSTER_KEY_MAX], drained[CLUSTER_KEY_MAX];
	CLEANUP(json_decrefp) json_t *value = json_object();

	if (!c || c->problem[0]) {
		enum err e = c ? ERR(CLUSTER_UNAVAILABLE, "%s", c->problem) : ERR(NOT_FOUND, "there is no cluster: see --cluster");
		loop_later(s->loop, fn, user, e);
		return;
	}
	if (!find(c, name)) {
		loop_later(s->loop, fn, user, no_node(name));
		return;
	}
	struct cluster_wait *w = mem_sure(sizeof *w);
	*w = (struct cluster_wait){ .cluster = c, .drain = drain, .after = UINT64_MAX, .wait_ms = wait_ms, .fn = fn, .user = user,
				    .next = c->waits };
	memcpy(w->name, name.p, name.n); /* no longer than a node's */
	c->waits = w;
	cluster_key(c, "members/", w->name, member);
	cluster_key(c, "drained/", w->name, drained);
	json_t *wish = json_pack("[o]", drain ? etcd_put(drained, value, 0) : etcd_delete(drained));
	etcd_ask(c->etcd, "/v3/kv/txn", etcd_txn(json_pack("[o]", etcd_present(member)), wish, json_array()), on_wished, w);
}

static void on_forgotten(void *user, enum err e, const json_t *answer)
{
	struct cluster_wait *w = user;

	if (!e && !etcd_succeeded(answer))
		e = ERR(STATE_CONFLICT, "node \"%s\" is not away: only a node that will not come back is forgotten", w->name);
	cluster_hurry(w->cluster);
	wait_end(w, e);
}

void cluster_forget(struct server *s, struct str name, done_fn fn, void *user)
{
	struct cluster *c = s->cluster;
	char keys[7][CLUSTER_KEY_MAX], live[CLUSTER_NAME_MAX + 2];
	CLEANUP(json_decrefp) json_t *value = json_object();

	if (!c || c->problem[0] || !find(c, name)) {
		enum err e = c && c->problem[0] ? ERR(CLUSTER_UNAVAILABLE, "%s", c->problem) : no_node(name);
		loop_later(s->loop, fn, user, e);
		return;
	}
	struct cluster_wait *w = mem_sure(sizeof *w);
	*w = (struct cluster_wait){ .cluster = c, .after = UINT64_MAX, .fn = fn, .user = user, .next = c->waits };
	memcpy(w->name, name.p, name.n);
	c->waits = w;
	snprintf(live, sizeof live, "%s/", w->name);
	cluster_key(c, "alive/", w->name, keys[0]);
	cluster_key(c, "members/", w->name, keys[1]);
	cluster_key(c, "drained/", w->name, keys[2]);
	cluster_key(c, "live/", live, keys[3]);
	cluster_key(c, "gone", "", keys[4]);
	cluster_key(c, "withdrawn/", live, keys[5]);
	cluster_key(c, "left/", live, keys[6]);
	json_t *then = json_pack("[o, o, o, o, o, o]", etcd_delete(keys[1]), etcd_delete(keys[2]), etcd_delete_all(keys[3]),
				 etcd_put(keys[4], value, 0), etcd_delete_all(keys[5]), etcd_delete_all(keys[6]));
	etcd_ask(c->etcd, "/v3/kv/txn", etcd_txn(json_pack("[o, o]", etcd_present(keys[1]), etcd_absent(keys[0])), then, json_array()),
		 on_forgotten, w);
}

void cluster_nodes_free(struct cluster *c)
{
	while (c->waits)
		wait_end(c->waits, ERR(DRAINING, "the daemon is shutting down"));
	drop_nodes(c);
	vec_free(&c->nodes);
}
