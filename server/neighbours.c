/* neighbours.c: see neighbours.h. */
#include "server/neighbours.h"

#include <stdio.h>

#include "base/jtext.h"
#include "base/jval.h"
#include "base/log.h"
#include "base/list.h"
#include "base/mem.h"
#include "server/cluster.h"
#include "server/config.h"
#include "server/errdoc.h"
#include "server/events.h"
#include "server/job_impl.h"
#include "server/metrics.h"
#include "server/parts.h"
#include "server/service_clock.h"
#include "server/state_dict.h"

enum { SWEEP_MS = 5000, LOOK_MS = 500, LOOKS = 60, PAUSE_MS = 1000, TRIES = 5, WAIT_S = 5, ASK_MS = 8000, QUIET_STALLS = 2,
       PATH_BYTES = 256 };

/* A piece is what one load on another node copies: all that a save reads, or, of a planned save, one of its parts. */
struct piece {
	struct state_dict_use *use;
	json_t *body;                      /* of the request */
	unsigned held, pending;
};

/* A load on one other node. */
struct copy {
	struct cluster_errand errand;      /* the first member */
	struct copying *of;
	struct piece *piece;
	struct copy *next;
	json_t *record;                    /* of the job's list: borrowed */
	char node[CLUSTER_NODE_TEXT], job[JOB_ID_LEN + 1];     /* job: "": not accepted yet */
	unsigned tries;
	char state[16];                    /* of the load there, as last answered */
	json_int_t bytes_done;             /* of the same answer */
	int64_t moved_ms;                  /* service clock: when state or bytes_done last changed */
	struct buf path, caller, key;
	char *body;
	const char *lines[3];
	struct loop_timer *timer;
};

/* All copies of one save. */
struct copying {
	struct copying *prev, *next;
	struct neighbours *all;
	char job[JOB_ID_LEN + 1];
	struct piece *pieces;
	uint32_t piece_count;
	struct principal who;
	json_t *list;                      /* the job's `replicas` */
	struct copy *copies;
	unsigned wanted;                   /* of each piece */
	uint32_t looks;                    /* how often the cluster had not looked yet */
	int64_t sealed_ms;                 /* monotone clock */
	char why[300];                     /* there are fewer than wanted; "": there are not */
	struct loop_timer *timer;
};

struct neighbours {
	struct server *server;
	struct copying *first;
	struct loop_timer *tick;
};

static void copy_free(struct copy *c)
{
	loop_timer_stop(&c->timer);
	cluster_errand_free(&c->errand);
	buf_free(&c->path);
	buf_free(&c->caller);
	buf_free(&c->key);
	mem_free(c->body);
	mem_free(c);
}

static void copying_free(struct copying *k)
{
	list2_remove(&k->all->first, k);
	for (struct copy *c = k->copies, *next; c; c = next) {
		next = c->next;
		copy_free(c);
	}
	loop_timer_stop(&k->timer);
	for (uint32_t i = 0; i < k->piece_count; i++) {
		state_dict_unuse(&k->pieces[i].use);
		json_decref(k->pieces[i].body);
	}
	mem_free(k->pieces);
	json_decref(k->list);
	mem_free(k);
}

static unsigned count_held(const struct copying *k)
{
	unsigned n = 0;

	for (uint32_t i = 0; i < k->piece_count; i++)
		n += k->pieces[i].held;
	return n;
}

static bool is_pending(const struct copying *k)
{
	for (uint32_t i = 0; i < k->piece_count; i++)
		if (k->pieces[i].pending)
			return true;
	return false;
}

static bool is_short(const struct copying *k)
{
	return count_held(k) < k->wanted * k->piece_count;
}

/* ---- the job's record ---- */

/* NULL: it is gone. */
static struct job *job_of(const struct copying *k)
{
	struct job *j = NULL;

	if (job_find(k->all->server, str_of(k->job), &j))
		err_clear();
	return j;
}

static void note(struct copying *k)
{
	struct job *j = job_of(k);

	if (!j)
		return;
	json_decref(j->replicas);
	j->replicas = json_incref(k->list);
	job_changed(j);
}

static void warn(struct job *j, const char *why)
{
	if (j->step != STEP_NONE) { /* its end takes it along */
		mem_free(j->replicas_short);
		j->replicas_short = mem_strdup(why);
	} else if (j->state == JOB_SUCCEEDED) {
		errdoc_warn(j->result, JOB_NOT_REPLICATED, why);
	}
}

static void tell(const struct copying *k, struct job *j)
{
	const struct ref *target = &j->spec.target;
	struct metrics *m = k->all->server->metrics;
	json_t *nodes = json_array(), *seen = json_object();
	const json_t *one;
	size_t i;

	json_array_foreach(k->list, i, one)
		if (strcmp(jval_text(one, "state"), "held") == 0 && !json_object_get(seen, jval_text(one, "node"))) {
			(void)json_object_set_new(seen, jval_text(one, "node"), json_true());
			(void)json_array_append(nodes, json_object_get(one, "node"));
		}
	json_decref(seen);
	metrics_observe(m, "dcpd_replicated_seconds", "", (double)(clock_mono_ms() - k->sealed_ms) / 1000);
	events_emit(k->all->server->events, "job.replicated", j->id,
		    json_pack("{s:s, s:s, s:s, s:o}", "job", j->id, "storage", target->storage.p, "name", target->name.p, "nodes", nodes));
}

/* ---- the end of a checkpoint ---- */

/* Has the job failed because the memory that it saves from was lost? Then the copies are all that is left. */
static bool has_lost_its_memory(const struct job *j)
{
	static const char *const codes[] = { "segment_gone", "segment_shrunk", "not_sealed", "not_found" };
	const char *code = jval_text(j->error, "code");

	for (size_t i = 0; i < sizeof codes / sizeof *codes; i++)
		if (strcmp(code, codes[i]) == 0)
			return true;
	return false;
}

/* Has the save come to nothing, so that no copy may stand for it? */
static bool is_void(const struct job *j)
{
	return j->kind == JOB_SAVE && j->step == STEP_NONE && !j->moved &&
	       (j->state == JOB_CANCELLED || (j->state == JOB_FAILED && !has_lost_its_memory(j)));
}

static void note_dropped(struct job *j)
{
	json_t *one;
	size_t i;

	json_array_foreach(j->replicas, i, one)
		if (strcmp(jval_text(one, "state"), "held") == 0)
			(void)json_object_set_new(one, "state", json_string("dropped"));
	job_changed(j);
	job_write(j, NULL, NULL);
}

void neighbours_ended(struct job *j)
{
	struct replica_withdrawal w = { .of = j->spec.target, .job = str_of(j->id) };
	bool replaces = job_spec_writes_checkpoint(j) && j->spec.overwrite;

	if (j->dry_run || j->moved || !j->server->cluster)
		return;
	w.is_exact = is_void(j) && j->spec.neighbours > 0;
	if (w.is_exact)
		note_dropped(j);
	if (w.is_exact || (j->state == JOB_SUCCEEDED && (kind_is(j->kind, KIND_REMOVES) || replaces)))
		cluster_withdraw(j->server, &w);
}

static void settle(void *user);

static void settle_soon(struct copying *k, int64_t ms)
{
	loop_timer_start(k->all->server->loop, ms, settle, k, &k->timer);
}

/* All copies have ended: the record says how. An end that is on its way to the journal is waited for. */
static void settle(void *user)
{
	struct copying *k = user;
	struct job *j = job_of(k);

	k->timer = NULL;
	if (j && j->step == STEP_ENDING) {
		settle_soon(k, PAUSE_MS);
		return;
	}
	if (j && is_void(j)) {
		/* its end has withdrawn what there was */
	} else if (j && !is_short(k) && !j->replicated_ms) {
		j->replicated_ms = clock_wall_ms();
		tell(k, j);
	} else if (j && is_short(k)) {
		log_warn("a save has fewer copies in other nodes' memory than it asked for", "job", k->job, "why", k->why, NULL);
		warn(j, k->why);
	}
	for (uint32_t i = 0; i < k->piece_count; i++)
		state_dict_read_over(k->pieces[i].use);
	if (j) {
		note(k);
		if (is_void(j)) /* a copy may have come after its end */
			neighbours_ended(j);
		job_write(j, NULL, NULL);
		job_emit_state(j);
	}
	copying_free(k);
}

/* ---- one copy ---- */

static void next_node(struct copying *k);

static void copy_end(struct copy *c, const char *why)
{
	struct copying *k = c->of;

	c->piece->pending--;
	c->piece->held += why == NULL;
	metrics_add(k->all->server->metrics, "dcpd_replicas_total", why ? "outcome=\"failed\"" : "outcome=\"held\"", 1);
	(void)json_object_set_new(c->record, "state", json_string(why ? "failed" : "held"));
	if (why)
		(void)json_object_set_new(c->record, "why", json_string(why));
	if (why)
		snprintf(k->why, sizeof k->why, "node \"%.64s\": %.200s", c->node, why);
	note(k);
	next_node(k);
}

static void copy_send(struct copy *c);

static void on_pause_over(void *user)
{
	struct copy *c = user;

	c->timer = NULL;
	copy_send(c);
}

/* Returns why the copy is given up, NULL if it is not: it holds a slot of the trainer until it ends. */
static const char *hopeless(const struct copy *c)
{
	const struct server *s = c->of->all->server;
	const struct job *j = job_of(c->of);

	if (j && is_void(j))
		return "the save has come to nothing";
	if (cluster_is_away(s, c->node))
		return "it is away";
	return (clock_service_ms() - c->moved_ms) / QUIET_STALLS > s->config->stall_ms ?
		"the copy made no progress in twice the time of --stall-after" : NULL;
}

static void send_again(struct copy *c, int64_t ms)
{
	const char *why = hopeless(c);

	if (why) {
		copy_end(c, why);
		return;
	}
	loop_timer_start(c->of->all->server->loop, ms, on_pause_over, c, &c->timer);
}

/* Goes by the state of the load there. */
static void on_record(struct copy *c, const json_t *doc)
{
	const char *state = jval_text(doc, "state");
	json_int_t done = json_integer_value(json_object_get(json_object_get(doc, "progress"), "bytes_done"));

	if (done != c->bytes_done || strncmp(state, c->state, sizeof c->state - 1) != 0)
		c->moved_ms = clock_service_ms();
	c->bytes_done = done;
	snprintf(c->state, sizeof c->state, "%s", state);
	c->tries = 0;
	if (strcmp(state, "succeeded") == 0)
		copy_end(c, NULL);
	else if (strcmp(state, "failed") == 0 || strcmp(state, "cancelled") == 0)
		copy_end(c, state[0] == 'f' ? jval_text(json_object_get(doc, "error"), "detail") : "its load was cancelled there");
	else
		send_again(c, c->errand.body.n ? 0 : PAUSE_MS); /* a node that does not wait is not asked in a tight loop */
}

static void on_answer(struct cluster_errand *x, enum err e)
{
	struct copy *c = (struct copy *)x;
	CLEANUP(json_decrefp) json_t *doc = NULL;
	char why[ERR_TEXT_MAX] = "";

	if (c->of->all->server->draining && e == ERR_DRAINING)
		return; /* neighbours_free takes it */
	if (!e && jtext_parse((struct str){ (const char *)x->answer.p, x->answer.len }, 0, &doc))
		e = ERR(CLUSTER_UNAVAILABLE, "it answers with status %ld", x->status);
	bool again = e || x->status == 429 || x->status >= 500 ||
		     strcmp(jval_text(doc, "code"), "idempotency_in_flight") == 0; /* a request that timed out is still at work there */
	snprintf(why, sizeof why, "%s", e ? err_last()->text : jval_text(doc, "detail"));
	if (!e && (x->status == 507 || (x->status == 503 && c->job[0] == '\0')))
		again = false; /* it has no room, or takes no work: another node may */
	if (!e && x->status < 300 && job_id_ok(str_of(jval_text(doc, "id")))) {
		memcpy(c->job, jval_text(doc, "id"), sizeof c->job);
		(void)json_object_set_new(c->record, "job", json_string(c->job));
		on_record(c, doc);
	} else if (again && ++c->tries < TRIES) {
		err_clear();
		send_again(c, PAUSE_MS);
	} else {
		err_clear();
		copy_end(c, why[0] ? why : "it does not take the copy");
	}
}

/* The request for the load, or, once that is accepted, for its end. */
static void copy_send(struct copy *c)
{
	struct cluster_errand *x = &c->errand;

	cluster_errand_free(x);
	buf_free(&c->path);
	x->url = BUF_INIT(PATH_BYTES + 512);
	c->path = BUF_INIT(PATH_BYTES);
	if (c->job[0])
		buf_printf(&c->path, "/v1/jobs/%s?wait=%ds", c->job, WAIT_S);
	else
		buf_puts(&c->path, "/v1/jobs");
	buf_putc(&c->path, '\0');
	if (buf_status(&c->path)) {
		copy_end(c, err_last()->text);
		return;
	}
	x->method = c->job[0] ? "GET" : "POST";
	x->path = (const char *)c->path.p;
	x->headers = c->lines;
	x->body = c->job[0] ? (struct str){ 0 } : str_of(c->body);
	x->whole_ms = ASK_MS;
	x->fn = on_answer;
	cluster_send(c->of->all->server->cluster, c->node, x);
}

static FALLIBLE enum err copy_new(struct copying *k, struct piece *p, const char *node)
{
	struct copy *c = mem_zalloc(1, sizeof *c);
	const char *sd = jval_text(json_object_get(p->body, "target"), "state_dict");

	p->pending++; /* the caller takes it back after an error */
	NEED(c, "cannot ask a neighbour");
	c->of = k;
	c->piece = p;
	c->moved_ms = clock_service_ms();
	c->next = k->copies;
	k->copies = c;
	snprintf(c->node, sizeof c->node, "%s", node);
	c->caller = BUF_INIT(128);
	c->key = BUF_INIT(128);
	buf_printf(&c->caller, CLUSTER_CALLER_HEAD ": %u 2 %d -", (unsigned)k->who.uid, k->who.admin);
	buf_putc(&c->caller, '\0');
	buf_printf(&c->key, "Idempotency-Key: %s-%jd", sd, (intmax_t)p->use->generation);
	buf_putc(&c->key, '\0');
	c->body = jtext_of(p->body);
	c->record = json_pack("{s:s, s:s, s:s, s:I}", "node", node, "state", "copying", "state_dict", sd, "generation",
			      (json_int_t)STATE_DICT_MADE_FIRST);
	if (json_array_append_new(k->list, c->record) != 0)
		return ERR(NO_MEMORY, "cannot ask a neighbour");
	NEED(c->body, "cannot ask a neighbour");
	TRY(buf_status(&c->caller));
	TRY(buf_status(&c->key));
	c->lines[0] = (const char *)c->caller.p;
	c->lines[1] = (const char *)c->key.p;
	copy_send(c);
	return OK;
}

/* ---- all copies ---- */

static void on_look(void *user)
{
	struct copying *k = user;

	k->timer = NULL;
	next_node(k);
}

/* The nearest node that was not asked for it yet; NULL: there is none. */
static const char *nearest(const struct copying *k, const struct piece *p)
{
	const char *node;

	for (uint32_t i = 0; (node = cluster_neighbour(k->all->server->cluster, i)) != NULL; i++) {
		const struct copy *c = k->copies;
		while (c && (c->piece != p || strcmp(c->node, node) != 0))
			c = c->next;
		if (!c)
			return node;
	}
	return NULL;
}

/* True: the cluster has too few. */
static bool next_nodes_of(struct copying *k, struct piece *p)
{
	const char *node;

	while (p->held + p->pending < k->wanted && (node = nearest(k, p)) != NULL)
		if (copy_new(k, p, node)) { /* out of memory: as if there were no more nodes */
			err_clear();
			p->pending--;
			break;
		}
	return p->held + p->pending < k->wanted;
}

/* Asks as many nodes as are lacking. */
static void next_node(struct copying *k)
{
	const struct cluster *cluster = k->all->server->cluster;
	bool lacks = false;

	for (uint32_t i = 0; i < k->piece_count; i++)
		lacks = next_nodes_of(k, &k->pieces[i]) || lacks;
	if (lacks && cluster && !cluster_has_looked(cluster) && k->looks++ < LOOKS) {
		loop_timer_start(k->all->server->loop, LOOK_MS, on_look, k, &k->timer);
		return;
	}
	if (is_pending(k) || k->timer)
		return;
	if (is_short(k)) {
		char last[sizeof k->why];
		snprintf(last, sizeof last, "%s", k->why);
		snprintf(k->why, sizeof k->why, "%u of %u copies are in other nodes' memory%s%.200s", count_held(k),
			 k->wanted * k->piece_count,
			 last[0] ? ": " : cluster ? ": there are no more nodes that take work" : ": this daemon is in no cluster", last);
	}
	settle_soon(k, 0);
}

/* Of a planned save the parts are copied, not the list of items. */
static bool is_planned(const struct job *j)
{
	return json_object_get(json_object_get(j->request, "source"), "parts") != NULL;
}

static uint32_t count_pieces(const struct job *j)
{
	return is_planned(j) ? j->part_count : j->source_use != NULL;
}

static struct state_dict_use *nth_piece(const struct job *j, uint32_t i)
{
	return is_planned(j) ? j->part_uses[i] : j->source_use;
}

/* Why there can be no copy; NULL: there can. */
static const char *impossible(const struct job *j)
{
	for (uint32_t i = 0; i < count_pieces(j) || !j->source_use; i++)
		if (!j->source_use || !nth_piece(j, i))
			return "0 copies are in other nodes' memory: the save had ended";
		else if (j->spec.ring || state_dict_use_has_ring(nth_piece(j, i)))
			return "0 copies are in other nodes' memory: the state dict went through a ring, and lies in no memory";
	return NULL;
}

/* The parts of a planned save have a copy each, in a state dict of its own. */
static FALLIBLE enum err make_body(const struct job *j, uint32_t i, struct piece *p)
{
	const char *self = j->server->config->node ? j->server->config->node : "";
	const struct ref *target = &j->spec.target;
	char name[JOB_ID_LEN + 32];

	snprintf(name, sizeof name, is_planned(j) ? "replica-%s-%u" : "replica-%s", j->id, i);
	p->body = json_pack("{s:s, s:{s:s, s:s, s:I}, s:{s:s}, s:{s:s, s:{s:s, s:s}, s:b}, s:{s:s}}", "kind", "load",
			    "source", "state_dict", p->use->name, "node", self, "generation", (json_int_t)p->use->generation,
			    "target", "state_dict", name,
			    "replica", "job", j->id, "checkpoint", "storage", target->storage.p, "name", target->name.p,
				       "part", is_planned(j) || j->spec.hosts.id.p,
			    "labels", "replica_from", self);
	NEED(p->body, "cannot ask a neighbour");
	if (j->spec.hosts.id.p && json_object_set_new(json_object_get(p->body, "replica"), "hosts", json_string(j->spec.hosts.id.p)) != 0)
		return ERR(NO_MEMORY, "cannot ask a neighbour");
	return OK;
}

/* Holds what is to be copied. */
static FALLIBLE enum err take_pieces(struct job *j, struct copying *k)
{
	uint32_t n = count_pieces(j);

	k->list = json_array();
	k->pieces = mem_zalloc(n + 1, sizeof *k->pieces);
	NEED(k->list && k->pieces, "cannot ask a neighbour");
	for (uint32_t i = 0; i < n; i++) {
		struct piece *p = &k->pieces[k->piece_count++];
		const struct state_dict_use *u = nth_piece(j, i);
		TRY(state_dict_use(j->server->state_dicts, &k->who, str_of(u->name), u->generation, j->id, &p->use));
		TRY(make_body(j, i, p));
	}
	return OK;
}

void neighbours_snapshotted(struct job *j)
{
	struct neighbours *all = j->server->neighbours;
	const char *why = impossible(j);

	if (!all || j->kind != JOB_SAVE || j->spec.neighbours <= 0 || j->dry_run || j->replicated_ms)
		return;
	if (why) {
		warn(j, why);
		return;
	}
	struct copying *k = mem_sure(sizeof *k);
	*k = (struct copying){ .all = all, .wanted = (unsigned)j->spec.neighbours, .who = job_owner(j), .sealed_ms = clock_mono_ms() };
	memcpy(k->job, j->id, sizeof k->job);
	list2_add(&all->first, k);
	if (take_pieces(j, k)) {
		warn(j, err_last()->text);
		err_clear();
		copying_free(k);
		return;
	}
	next_node(k);
}

/* ---- what this node has of others ---- */

static bool is_gone(const void *user, const char *node)
{
	const struct server *s = user;

	return cluster_has_looked(s->cluster) && cluster_presence(s->cluster, node) == CLUSTER_IS_UNKNOWN;
}

static void on_tick(void *user)
{
	struct server *s = user;

	state_dict_replicas_sweep(s->state_dicts, is_gone, s);
}

FALLIBLE enum err neighbours_new(struct server *s, struct neighbours **out)
{
	struct neighbours *all = *out = mem_zalloc(1, sizeof *all);

	NEED(all, "cannot keep copies for neighbours");
	all->server = s;
	for (struct job *j = s->jobs->live; j; j = j->live_next)
		if (j->snapshotted_ms)
			neighbours_snapshotted(j);
	return loop_every(s->loop, SWEEP_MS, on_tick, s, &all->tick);
}

void neighbours_free(struct neighbours *all)
{
	if (!all)
		return;
	loop_timer_stop(&all->tick);
	while (all->first)
		copying_free(all->first);
	mem_free(all);
}
