/* spread.c: see spread.h. Cards of a load that this node has not begun yet are kept for a while: nodes begin when they come to it. */
#include "server/spread.h"

#include <sodium.h>
#include <stdio.h>

#include "base/clock.h"
#include "base/jtext.h"
#include "base/jval.h"
#include "base/list.h"
#include "base/mem.h"
#include "base/num.h"
#include "server/cluster.h"
#include "server/config.h"
#include "server/gang.h"
#include "server/job_impl.h"
#include "server/parts.h"
#include "server/state_dict.h"

enum { MEETINGS_MAX = 256, ROUNDS_MAX = 8, KEEP_MS = 600000, RETRY_MS = 200, ANSWER_MS = 5000, PATH_BYTES = 512,
       GROUP_TEXT = SPREAD_ID_MAX + 16 };

/* A meeting is one round in which the nodes of a spread load exchange cards: what each node's leader tells of itself. */
struct meeting {
	struct meeting *prev, *next;
	struct spreads *all;
	char group[GROUP_TEXT];            /* of make_group() */
	int64_t round, size;
	json_t *cards;                     /* by node: its data, an object {"why"} if it does not take part, null: unknown */
	char job[JOB_ID_LEN + 1];          /* this node's job whose leader waits for the cards; "": its leader has not come yet */
	int64_t wait_s;                    /* how long the leader waits for missing cards, in seconds */
	struct loop_timer *timer;          /* ends the leader's wait, or drops a meeting to which no leader comes */
};

/* A request to another node: a card, or the load itself. */
struct errand {
	struct cluster_errand sent;        /* the first member */
	struct errand *prev, *next;
	struct spreads *all;
	char group[GROUP_TEXT], node[CLUSTER_NODE_TEXT];
	int64_t index, size, until_ms;
	bool calls;                        /* the errand starts the load on the other node; false: it brings a card */
	struct buf path, caller, key;
	char *body;
	const char *lines[3];
	struct loop_timer *timer;
};

struct spreads {
	struct server *server;
	struct meeting *meetings;
	struct errand *errands;
	uint32_t count;
};

FALLIBLE enum err spreads_new(struct server *s, struct spreads **out)
{
	*out = mem_zalloc(1, sizeof **out);
	NEED(*out, "no memory for loads by several nodes");
	(*out)->server = s;
	return OK;
}

static void meeting_free(struct meeting *m)
{
	list2_remove(&m->all->meetings, m);
	m->all->count--;
	loop_timer_stop(&m->timer);
	json_decref(m->cards);
	mem_free(m);
}

static void errand_free(struct errand *x)
{
	list2_remove(&x->all->errands, x);
	loop_timer_stop(&x->timer);
	cluster_errand_free(&x->sent);
	buf_free(&x->path);
	buf_free(&x->caller);
	buf_free(&x->key);
	mem_free(x->body);
	mem_free(x);
}

void spreads_free(struct spreads *all)
{
	while (all && all->errands)
		errand_free(all->errands);
	while (all && all->meetings)
		meeting_free(all->meetings);
	mem_free(all);
}

static FALLIBLE enum err refuse(const char *node, const char *why)
{
	return err_at_pointer(ERR(VALIDATION_FAILED, "node \"%.64s\" %s", node, why), "/spread/nodes");
}

FALLIBLE enum err spread_check(const struct server *s, const struct spec *spec)
{
	const struct strs *nodes = &spec->spread_nodes;
	uint32_t own = 0;

	if (spec->kind != JOB_LOAD || !nodes->n)
		return OK;
	if (!s->cluster)
		return ERR(UNSUPPORTED, "a load is spread over the nodes of a cluster, and this daemon is in none");
	if (!config_cluster_reaches_workers(s->config))
		return ERR(UNSUPPORTED, "--comm-listen of node \"%.64s\" is \"%.64s\", where no worker of another host reaches its "
			   "own: let it be an address or an interface of the network between the nodes", s->config->node,
			   s->config->comm_listen);
	for (size_t i = 0; i < nodes->n; i++) {
		own += str_is(nodes->v[i], s->config->node);
		if (cluster_presence(s->cluster, nodes->v[i].p) == CLUSTER_IS_UNKNOWN && cluster_has_looked(s->cluster))
			return refuse(nodes->v[i].p, "is not in the cluster");
		for (size_t k = 0; k < i; k++)
			if (str_eq(nodes->v[i], nodes->v[k]))
				return refuse(nodes->v[i].p, "is named twice");
	}
	return own ? OK : refuse(s->config->node, "is asked, and is not among the nodes of the load");
}

/* ---- meetings ---- */

/* Names the group that the loads of one user with one id are: ids are the callers' words, and anyone may read those of others. */
static const char *make_group(uid_t uid, struct str id, char out[GROUP_TEXT])
{
	snprintf(out, GROUP_TEXT, "%u:%.*s", (unsigned)uid, (int)id.n, id.p);
	return out;
}

static struct meeting *find(const struct spreads *all, const char *group, int64_t round)
{
	list_each(m, all->meetings)
		if (m->round == round && strcmp(m->group, group) == 0)
			return m;
	return NULL;
}

static struct job *job_of(const struct meeting *m)
{
	struct job *j = NULL;

	if (job_find(m->all->server, str_of(m->job), &j))
		err_clear();
	return j;
}

/* Tells the leader all cards; the meeting is over. */
static void answer(struct meeting *m, json_t *doc)
{
	struct job *j = job_of(m);

	if (j && j->gang && doc)
		gang_met(j->gang, doc);
	json_decref(doc);
	meeting_free(m);
}

static void answer_late(struct meeting *m, size_t index, const char *why)
{
	answer(m, json_pack("{s:I, s:I, s:s}", "round", (json_int_t)m->round, "late", (json_int_t)index, "why", why));
}

static void on_late(void *user)
{
	struct meeting *m = user;
	char why[96];

	m->timer = NULL;
	for (size_t i = 0; m->job[0] && i < json_array_size(m->cards); i++)
		if (json_is_null(json_array_get(m->cards, i))) {
			snprintf(why, sizeof why, "it has not begun the load within %jd s", (intmax_t)m->wait_s);
			answer_late(m, i, why);
			return;
		}
	meeting_free(m);
}

/* Ends a meeting that needs no more. */
static void look(struct meeting *m)
{
	bool all = true;

	if (!m->job[0])
		return;
	for (size_t i = 0; i < json_array_size(m->cards); i++) {
		const json_t *card = json_array_get(m->cards, i);
		all = all && json_is_string(card);
		if (json_is_object(card)) {
			answer_late(m, i, jval_text(card, "why"));
			return;
		}
	}
	if (all)
		answer(m, json_pack("{s:I, s:O}", "round", (json_int_t)m->round, "all", m->cards));
}

static FALLIBLE enum err meeting_of(struct spreads *all, const char *group, int64_t round, int64_t size, struct meeting **out)
{
	struct meeting *m = *out = find(all, group, round);

	if (m && m->size != size)
		return ERR(VALIDATION_FAILED, "a load over %jd nodes; others say %jd", (intmax_t)size, (intmax_t)m->size);
	if (m)
		return OK;
	if (all->count >= MEETINGS_MAX)
		return ERR(BUSY, "%d loads by several nodes wait for others", MEETINGS_MAX);
	m = mem_zalloc(1, sizeof *m);
	NEED(m, "cannot bring a group together");
	*m = (struct meeting){ .all = all, .round = round, .size = size, .cards = json_array() };
	snprintf(m->group, sizeof m->group, "%s", group);
	list2_add(&all->meetings, m);
	all->count++;
	for (int64_t i = 0; i < size; i++)
		if (json_array_append_new(m->cards, json_null()) != 0) {
			meeting_free(m);
			return ERR(NO_MEMORY, "cannot bring a group together");
		}
	loop_timer_start(all->server->loop, KEEP_MS, on_late, m, &m->timer);
	*out = m;
	return OK;
}

FALLIBLE enum err spread_take(struct server *s, const struct spread_card *card)
{
	char group[GROUP_TEXT];
	struct meeting *m;

	if (!card->id.n || card->id.n > SPREAD_ID_MAX || card->round < 0 || card->round >= ROUNDS_MAX || card->size < 2 ||
	    card->size > SPREAD_NODES_MAX || card->index < 0 || card->index >= card->size || card->data.n > SPREAD_CARD_MAX)
		return ERR(VALIDATION_FAILED, "a node tells of a load what cannot be");
	make_group(card->uid, card->id, group);
	TRY(meeting_of(s->spreads, group, card->round, card->size, &m));
	if (json_array_set_new(m->cards, (size_t)card->index, json_stringn(card->data.p, card->data.n)) != 0)
		return ERR(VALIDATION_FAILED, "a card that is no text");
	look(m);
	return OK;
}

/* ---- errands ---- */

static void send_errand(struct errand *x);

static void on_again(void *user)
{
	struct errand *x = user;

	x->timer = NULL;
	send_errand(x);
}

/* Notes that the node does not load, so that the meeting does not wait for its card. */
static void note_refusal(const struct errand *x, const char *why)
{
	struct meeting *m;

	if (meeting_of(x->all, x->group, 0, x->size, &m)) {
		err_clear();
		return;
	}
	if (json_array_set_new(m->cards, (size_t)x->index, json_pack("{s:s}", "why", why)) == 0)
		look(m);
}

static void on_answer(struct cluster_errand *sent, enum err e)
{
	struct errand *x = (struct errand *)sent;
	CLEANUP(json_decrefp) json_t *doc = NULL;

	if (!e && jtext_parse((struct str){ (const char *)sent->answer.p, sent->answer.len }, 0, &doc))
		err_clear();
	bool again = e || sent->status == 429 || sent->status >= 500 || strcmp(jval_text(doc, "code"), "idempotency_in_flight") == 0;
	if (e != ERR_DRAINING && again && clock_mono_ms() < x->until_ms) {
		err_clear();
		loop_timer_start(x->all->server->loop, RETRY_MS, on_again, x, &x->timer);
		return;
	}
	if (x->calls && e != ERR_DRAINING && (e || sent->status >= 300))
		note_refusal(x, e ? err_last()->text : doc ? jval_text(doc, "detail") : "it does not take the load");
	err_clear();
	errand_free(x);
}

static void send_errand(struct errand *x)
{
	struct cluster_errand *sent = &x->sent;

	cluster_errand_free(sent);
	sent->url = BUF_INIT(PATH_BYTES + 512);
	sent->method = "POST";
	sent->path = (const char *)x->path.p;
	sent->headers = x->lines;
	sent->body = str_of(x->body);
	sent->whole_ms = ANSWER_MS;
	sent->fn = on_answer;
	cluster_send(x->all->server->cluster, x->node, sent);
}

/* Takes doc. */
static FALLIBLE enum err errand_new(struct job *j, const char *id, size_t index, json_t *doc, bool calls)
{
	struct spreads *all = j->server->spreads;
	struct principal who = job_owner(j);
	struct errand *x = mem_zalloc(1, sizeof *x);

	if (!x) {
		json_decref(doc);
		return ERR(NO_MEMORY, "cannot ask a node");
	}
	*x = (struct errand){ .all = all, .index = (int64_t)index, .size = (int64_t)j->spec.spread_nodes.n, .calls = calls,
			      .path = BUF_INIT(PATH_BYTES), .caller = BUF_INIT(128), .key = BUF_INIT(128),
			      .until_ms = clock_mono_ms() + j->spec.spread_wait_s * 1000 };
	make_group(who.uid, str_of(id), x->group);
	snprintf(x->node, sizeof x->node, "%s", j->spec.spread_nodes.v[index].p);
	list2_add(&all->errands, x);
	buf_puts(&x->path, calls ? "/v1/jobs" : "/v1/spreads/");
	for (const unsigned char *p = (const unsigned char *)id; *p && !calls; p++)
		buf_printf(&x->path, "%%%02X", *p);
	buf_puts(&x->path, calls ? "" : ":meet");
	buf_putc(&x->path, '\0');
	buf_printf(&x->caller, CLUSTER_CALLER_HEAD ": %u 2 %d -", (unsigned)who.uid, who.admin);
	buf_putc(&x->caller, '\0');
	buf_printf(&x->key, "Idempotency-Key: spread-%s", id);
	buf_putc(&x->key, '\0');
	x->body = jtext_of(doc);
	json_decref(doc);
	enum err e = buf_status(&x->path);
	e = e ? e : buf_status(&x->caller);
	e = e ? e : buf_status(&x->key);
	if (e || !x->body) {
		errand_free(x);
		return e ? e : ERR(NO_MEMORY, "cannot ask a node");
	}
	x->lines[0] = (const char *)x->caller.p;
	x->lines[1] = calls ? (const char *)x->key.p : NULL;
	send_errand(x);
	return OK;
}

/* ---- jobs ---- */

static const char *id_of(const struct job *j)
{
	return j->spec.spread_id.n ? j->spec.spread_id.p : j->id;
}

static const char *group_of(const struct job *j, char out[GROUP_TEXT])
{
	return make_group(job_owner(j).uid, str_of(id_of(j)), out);
}

static size_t own_index(const struct job *j)
{
	size_t i = 0;

	while (i < j->spec.spread_nodes.n && !str_is(j->spec.spread_nodes.v[i], j->server->config->node))
		i++;
	return i;
}

void spread_meet(struct job *j, const json_t *body)
{
	const char *data = jval_text(body, "data");
	int64_t round = jval_int(body, "round");
	size_t own = own_index(j);
	char group[GROUP_TEXT];
	struct meeting *m;

	enum err e = meeting_of(j->server->spreads, group_of(j, group), round, (int64_t)j->spec.spread_nodes.n, &m);
	if (!e && json_array_set_new(m->cards, own, json_string(data)) != 0)
		e = ERR(PROTOCOL, "a leader's card that is no text");
	for (size_t i = 0; !e && i < j->spec.spread_nodes.n; i++)
		if (i != own)
			e = errand_new(j, id_of(j), i, json_pack("{s:I, s:I, s:I, s:s}", "round", (json_int_t)round, "index",
								 (json_int_t)own, "size", (json_int_t)m->size, "data", data), false);
	if (e) {
		json_t *doc = json_pack("{s:I, s:I, s:s}", "round", (json_int_t)round, "late", (json_int_t)own, "why", err_last()->text);
		err_clear();
		if (doc)
			gang_met(j->gang, doc);
		json_decref(doc);
		return;
	}
	memcpy(m->job, j->id, sizeof m->job);
	m->wait_s = j->spec.spread_wait_s;
	loop_timer_stop(&m->timer);
	loop_timer_start(j->server->loop, m->wait_s * 1000, on_late, m, &m->timer);
	look(m);
}

/* Starts the same load on the other nodes. */
static FALLIBLE enum err call_others(struct job *j)
{
	size_t own = own_index(j);

	for (size_t i = 0; i < j->spec.spread_nodes.n; i++) {
		if (i == own)
			continue;
		json_t *doc = json_deep_copy(j->request);
		if (!doc || json_object_set_new(json_object_get(doc, "spread"), "id", json_string(j->id)) != 0) {
			json_decref(doc);
			return ERR(NO_MEMORY, "cannot ask a node");
		}
		TRY(errand_new(j, j->id, i, doc, true));
	}
	return OK;
}

FALLIBLE enum err spread_start(struct job *j, json_t **doc_out)
{
	char secret[CLUSTER_GROUP_SECRET_TEXT], group[GROUP_TEXT];
	unsigned char hash[crypto_generichash_BYTES];
	uint64_t group_id;

	*doc_out = NULL;
	if (j->kind != JOB_LOAD || !j->spec.spread_nodes.n || j->dry_run || j->attempt != 1 || own_index(j) == j->spec.spread_nodes.n)
		return OK;
	TRY(cluster_make_secret(j->server->cluster, group_of(j, group), secret));
	crypto_generichash(hash, sizeof hash, (const unsigned char *)group, strlen(group), NULL, 0);
	memcpy(&group_id, hash, sizeof group_id);
	json_t *nodes = json_object_get(json_object_get(j->request, "spread"), "nodes");
	*doc_out = json_pack("{s:O, s:I, s:I, s:s, s:I, s:I}", "nodes", nodes, "index", (json_int_t)own_index(j), "group_id",
			     (json_int_t)(group_id & INT64_MAX), "secret", secret, "deadline_ms",
			     (json_int_t)j->server->config->comm_deadline_ms, "wait_ms", (json_int_t)(j->spec.spread_wait_s + 5) * 1000);
	sodium_memzero(secret, sizeof secret);
	NEED(*doc_out, "cannot describe a job");
	return j->spec.spread_id.n ? OK : call_others(j);
}
