/* cluster_take.c: takes over the jobs of nodes whose lease is over (takeover.h). After each look at etcd the nodes that are away are gone
 * through, one after the other; of several nodes that want a job etcd's transaction lets one have it. Which one is left to chance: all that
 * have its storages ask at about the same time. */
#include <stdio.h>

#include "base/jval.h"
#include "base/log.h"
#include "base/mem.h"
#include "server/cluster_impl.h"
#include "server/job_impl.h"
#include "server/journal.h"
#include "server/service_clock.h"
#include "server/storage.h"
#include "server/takeover.h"

enum { TAKE_PAGE = 32 };

/* A walk over the jobs of the nodes that are away. */
struct cluster_taking {
	struct cluster *cluster;
	char node[CLUSTER_NAME_MAX + 1];       /* whose jobs are looked at */
	char id[JOB_ID_LEN + 1];               /* the last one; "": none yet */
	int64_t live;                          /* revision of its key */
	json_t *rows;                          /* of a page */
	size_t next;                           /* in rows */
	bool more;
	json_t *last;                          /* row of the last key of the page; NULL: of the first page */
	json_t *record;                        /* of the job that is being taken */
};

static void next_row(struct cluster_taking *t);

static void end_walk(struct cluster_taking *t)
{
	t->cluster->taking = NULL;
	json_decref(t->rows);
	json_decref(t->last);
	json_decref(t->record);
	mem_free(t);
}

/* A walk goes on where it can; what failed is tried again after the next look. */
static void on_error(struct cluster_taking *t)
{
	err_clear();
	end_walk(t);
}

static bool takes_work(const struct cluster *c)
{
	const struct server *s = c->server;
	bool may = cluster_is_in(c) && c->settled && !c->leaving && !c->drained && !s->draining &&
		   s->jobs->live_count < s->config->queue_max && journal_may_write(s->journal) == OK;

	err_clear();
	return may;
}

static bool has_storages(const struct cluster *c, const json_t *ids)
{
	const char *name;
	struct storage *st;
	json_t *id;

	json_object_foreach((json_t *)(uintptr_t)ids, name, id) {
		bool there = storage_find(c->server->storages, str_of(name), &st) == OK && st->state == STORAGE_OK;
		const char *own = there ? json_string_value(json_object_get(st->probe, "id")) : NULL;
		err_clear();
		if (!own || !json_is_string(id) || strcmp(own, json_string_value(id)) != 0)
			return false;
	}
	return json_object_size(ids) > 0;
}

static bool is_away(const struct cluster *c, const char *node)
{
	each(n, c->nodes.v, c->nodes.n)
		if (strcmp(n->name, node) == 0)
			return n->state == CLUSTER_AWAY;
	return false;
}

/* ---- one job ---- */

static void on_journalled(void *user, enum err e)
{
	struct cluster_taking *t = user;

	if (e)
		log_err("a job that was taken over is not in the journal yet", NULL);
	if (e)
		t->cluster->settled = false; /* etcd says that it is this node's: it is taken up anew */
	if (e)
		on_error(t);
	else
		next_row(t);
}

static void on_ours(void *user, enum err e, const json_t *answer)
{
	struct cluster_taking *t = user;

	if (e) {
		t->cluster->settled = false; /* perhaps it was done */
		on_error(t);
	} else if (!etcd_succeeded(answer)) {
		next_row(t); /* its node is back, or another one was quicker */
	} else {
		log_warn("takes a job over", "job", t->id, "from", t->node, NULL);
		job_take(t->cluster->server, t->record, etcd_number(json_object_get(answer, "header"), "revision"), on_journalled, t);
	}
}

/* The record as the new owner has it. */
static FALLIBLE enum err change_record(const struct cluster *c, const char *from, const char *why, json_t *value)
{
	const char *self = c->name;
	json_t *job = json_object_get(value, "job");
	char stamp[CLOCK_TEXT_MAX];
	json_t *taken = json_object_get(job, "taken_over");
	json_t *one = json_pack("{s:s, s:s, s:s, s:O*, s:s}", "from", from, "to", self, "at", clock_text(clock_wall_ms(), stamp),
				"attempt", json_object_get(job, "attempt"), "why", why);

	(void)json_object_del(job, "moved_to");
	(void)json_object_del(job, "ownership");
	bool bad = !one ||
		   (taken ? json_array_append_new(taken, one) : json_object_set_new(job, "taken_over", json_pack("[o]", one))) != 0 ||
		   json_object_set_new(job, "node", json_string(self)) != 0 ||
		   json_object_set_new(job, "nodes", json_pack("[s]", self)) != 0 ||
		   json_object_set_new(job, "state", json_string("queued")) != 0 ||
		   json_object_set_new(job, "stage", json_string("taken over")) != 0 ||
		   json_object_set_new(value, "node", json_string(self)) != 0;
	return bad ? ERR(NO_MEMORY, "cannot take a job over") : OK;
}

static FALLIBLE enum err ask_for(struct cluster_taking *t, const json_t *row)
{
	const struct cluster *c = t->cluster;
	char alive[CLUSTER_KEY_MAX], self[CLUSTER_KEY_MAX], jobs[CLUSTER_KEY_MAX], theirs[CLUSTER_KEY_MAX], ours[CLUSTER_KEY_MAX],
		left[CLUSTER_KEY_MAX], back[CLUSTER_KEY_MAX], name[CLUSTER_NAME_MAX + JOB_ID_LEN + 2];
	CLEANUP(json_decrefp) json_t *value = NULL, *nothing = json_object(), *about = json_deep_copy(json_array_get(t->rows, t->next - 1));
	json_t *job;

	TRY(etcd_value(row, &value));
	job = json_object_get(value, "job");
	const struct takeover_offer offer = { .owner_is_away = is_away(c, t->node) && strcmp(jval_text(value, "node"), t->node) == 0,
					      .has_storages = has_storages(c, json_object_get(about, "storages")),
					      .takes_work = takes_work(c), .has_record = json_object_get(job, "spec") != NULL };
	if (!takeover_may_take(&offer))
		return ERR(STATE_CONFLICT, "the job stays where it is");
	TRY(job_check_take(c->server, job));
	TRY(change_record(c, t->node, "the lease of its node was over", value));
	(void)json_object_del(about, "id");
	(void)json_object_del(about, "revision");
	json_decref(t->record);
	t->record = json_incref(job);
	cluster_key(c, "alive/", t->node, alive);
	cluster_key(c, "alive/", c->name, self);
	cluster_key(c, "jobs/", t->id, jobs);
	snprintf(name, sizeof name, "%s/%s", t->node, t->id);
	cluster_key(c, "live/", name, theirs);
	cluster_key(c, "left/", name, left);
	snprintf(name, sizeof name, "%s/%s", c->name, t->id);
	cluster_key(c, "live/", name, ours);
	cluster_key(c, "left/", name, back);
	json_t *compare = json_pack("[o, o, o, o]", etcd_absent(alive), etcd_changed_at(theirs, t->live), etcd_made_at(self, c->made),
				    etcd_changed_at(jobs, etcd_number(row, "mod_revision")));
	json_t *then = json_pack("[o, o, o, o, o]", etcd_delete(theirs), etcd_put(left, nothing, 0), etcd_delete(back),
				 etcd_put(ours, about, 0), etcd_put(jobs, value, 0));
	etcd_ask(c->etcd, "/v3/kv/txn", etcd_txn(compare, then, json_array()), on_ours, t);
	return OK;
}

static void on_record(void *user, enum err e, const json_t *answer)
{
	struct cluster_taking *t = user;
	const json_t *row = json_array_get(etcd_rows(answer, 0), 0);

	if (e) {
		on_error(t);
		return;
	}
	if (!row || ask_for(t, row)) {
		err_clear();
		next_row(t);
	}
}

/* ---- a node's jobs ---- */

static void next_node(struct cluster_taking *t);
static void ask_page(struct cluster_taking *t);

static void next_row_later(void *user, enum err)
{
	struct cluster_taking *t = user;
	char key[CLUSTER_KEY_MAX];

	while (t->next < json_array_size(t->rows)) {
		const json_t *about = json_array_get(t->rows, t->next++);
		snprintf(t->id, sizeof t->id, "%s", jval_text(about, "id"));
		t->live = jval_int(about, "revision");
		if (!takes_work(t->cluster) || !has_storages(t->cluster, json_object_get(about, "storages")))
			continue;
		json_t *get = etcd_get(cluster_key(t->cluster, "jobs/", t->id, key));
		etcd_ask(t->cluster->etcd, "/v3/kv/txn", etcd_txn(json_array(), json_pack("[o]", get), json_array()), on_record, t);
		return;
	}
	if (t->more && t->last)
		ask_page(t);
	else
		next_node(t);
}

static void next_row(struct cluster_taking *t)
{
	loop_later(t->cluster->server->loop, next_row_later, t, OK);
}

static FALLIBLE enum err take_page(struct cluster_taking *t, const json_t *answer)
{
	char prefix[CLUSTER_KEY_MAX], name[CLUSTER_NAME_MAX + 2];
	const json_t *row;
	size_t i;

	snprintf(name, sizeof name, "%s/", t->node);
	cluster_key(t->cluster, "live/", name, prefix);
	json_decref(t->rows);
	json_decref(t->last);
	t->last = json_incref(json_array_get(etcd_rows(answer, 0), json_array_size(etcd_rows(answer, 0)) - 1));
	t->rows = json_array();
	t->next = 0;
	t->more = etcd_has_more(answer, 0);
	json_array_foreach(etcd_rows(answer, 0), i, row) {
		CLEANUP(buf_free) struct buf id = BUF_INIT(CLUSTER_KEY_MAX);
		json_t *about = NULL;
		if (etcd_key(row, prefix, &id) || !job_id_ok((struct str){ (char *)id.p, id.len }) || etcd_value(row, &about)) {
			err_clear(); /* none of dcpd's */
			continue;
		}
		if (json_object_set_new(about, "id", json_stringn((char *)id.p, id.len)) != 0 ||
		    json_object_set_new(about, "revision", json_integer(etcd_number(row, "mod_revision"))) != 0) {
			json_decref(about);
			return ERR(NO_MEMORY, "cannot take jobs over");
		}
		if (json_array_append_new(t->rows, about) != 0)
			return ERR(NO_MEMORY, "cannot take jobs over");
	}
	return OK;
}

static void on_page(void *user, enum err e, const json_t *answer)
{
	struct cluster_taking *t = user;

	if (e || take_page(t, answer))
		on_error(t);
	else
		next_row(t);
}

static void ask_page(struct cluster_taking *t)
{
	char prefix[CLUSTER_KEY_MAX], name[CLUSTER_NAME_MAX + 2];

	snprintf(name, sizeof name, "%s/", t->node);
	cluster_key(t->cluster, "live/", name, prefix);
	json_t *range = etcd_range_behind(prefix, t->last, TAKE_PAGE);
	etcd_ask(t->cluster->etcd, "/v3/kv/txn", etcd_txn(json_array(), json_pack("[o]", range), json_array()), on_page, t);
}

/* Nodes come in the order of their names. Jobs of another protocol may mean what this daemon does not know: they wait for their node. */
static void next_node(struct cluster_taking *t)
{
	const struct cluster *c = t->cluster;

	each(n, c->nodes.v, c->nodes.n)
		if (n->state == CLUSTER_AWAY && strcmp(n->name, t->node) > 0 && !cluster_speaks_otherwise(n) && takes_work(c)) {
			snprintf(t->node, sizeof t->node, "%s", n->name);
			json_decref(t->last);
			t->last = NULL;
			ask_page(t);
			return;
		}
	end_walk(t);
}

void cluster_take_looked(struct cluster *c)
{
	if (c->taking || !takes_work(c))
		return;
	c->taking = mem_zalloc(1, sizeof *c->taking);
	if (!c->taking)
		return; /* after the next look */
	c->taking->cluster = c;
	next_node(c->taking);
}

/* ---- a job of this node's that its journal lacks ---- */

struct taking_up {
	struct cluster *cluster;
	json_t *value;                         /* of its record */
};

static void on_taken_up(void *, enum err e)
{
	if (e)
		log_err("a job of this node is not in its journal", NULL);
}

static void on_ours_again(void *user, enum err e, const json_t *answer)
{
	struct taking_up t = *(struct taking_up *)user;

	mem_free(user);
	err_clear();
	if (e || !etcd_succeeded(answer))
		t.cluster->settled = false; /* the next look goes through its jobs anew */
	else
		job_take(t.cluster->server, json_object_get(t.value, "job"),
			 etcd_number(json_object_get(answer, "header"), "revision"), on_taken_up, NULL);
	json_decref(t.value);
}

FALLIBLE enum err cluster_take_up(struct cluster *c, const char *id, json_t *value, int64_t live, int64_t record)
{
	char jobs[CLUSTER_KEY_MAX], ours[CLUSTER_KEY_MAX], self[CLUSTER_KEY_MAX], name[CLUSTER_NAME_MAX + JOB_ID_LEN + 2];
	const json_t *job = json_object_get(value, "job");

	if (!json_object_get(job, "spec") || strcmp(jval_text(value, "node"), c->name) != 0)
		return ERR(CLUSTER_UNAVAILABLE, "etcd does not have its record");
	TRY(job_check_take(c->server, job));
	TRY(change_record(c, c->name, "the journal of its node did not have it", value));
	snprintf(name, sizeof name, "%s/%s", c->name, id);
	cluster_key(c, "live/", name, ours);
	cluster_key(c, "jobs/", id, jobs);
	cluster_key(c, "alive/", c->name, self);
	json_t *compare = json_pack("[o, o, o]", etcd_changed_at(ours, live), etcd_changed_at(jobs, record), etcd_made_at(self, c->made));
	json_t *then = json_pack("[o, o]", etcd_touch(ours), etcd_put(jobs, value, 0));
	struct taking_up *t = mem_sure(sizeof *t);
	*t = (struct taking_up){ c, json_incref(value) };
	etcd_ask(c->etcd, "/v3/kv/txn", etcd_txn(compare, then, json_array()), on_ours_again, t);
	return OK;
}

/* ---- what is at its target ---- */

struct comparing {
	char id[JOB_ID_LEN + 1], other[JOB_ID_LEN + 1];
	done_fn fn;
	void *user;
};

static void on_compared(void *user, enum err e, const json_t *answer)
{
	struct comparing w = *(struct comparing *)user;
	const json_t *own = json_array_get(etcd_rows(answer, 0), 0), *other = json_array_get(etcd_rows(answer, 1), 0);
	CLEANUP(json_decrefp) json_t *value = NULL;
	size_t mark = JOB_ID_LEN - JOB_MARK_LEN;

	mem_free(user);
	if (e || (other && etcd_value(other, &value)))
		err_clear();
	const struct takeover_found found = { .has_records = own && value, .other_ended = job_record_ended(json_object_get(value, "job")),
					      .own_made = etcd_number(own, "create_revision"),
					      .other_changed = etcd_number(other, "mod_revision"),
					      .by_one_daemon = strcmp(w.id + mark, w.other + mark) == 0,
					      .id_is_later = strcmp(w.other, w.id) > 0 };
	w.fn(w.user, takeover_is_later(&found) ? ERR(STATE_CONFLICT, "job %s has saved the target meanwhile: it stays as that left it",
						     w.other) : OK);
}

void cluster_compare(struct job *j, const char *other, done_fn fn, void *user)
{
	struct cluster *c = j->server->cluster;
	struct comparing *w = mem_sure(sizeof *w);
	char own_key[CLUSTER_KEY_MAX], other_key[CLUSTER_KEY_MAX];

	*w = (struct comparing){ .fn = fn, .user = user };
	snprintf(w->id, sizeof w->id, "%s", j->id);
	snprintf(w->other, sizeof w->other, "%s", other);
	if (!c || !job_id_ok(str_of(other))) {
		on_compared(w, OK, NULL);
		return;
	}
	json_t *gets = json_pack("[o, o]", etcd_get(cluster_key(c, "jobs/", j->id, own_key)),
				 etcd_get(cluster_key(c, "jobs/", other, other_key)));
	etcd_ask(c->etcd, "/v3/kv/txn", etcd_txn(json_array(), gets, json_array()), on_compared, w);
}

void cluster_take_free(struct cluster *c)
{
	if (c->taking)
		end_walk(c->taking);
}
