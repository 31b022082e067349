/* cluster_withdraw.c: copies in nodes' memory that must stand for their checkpoint no more: its save came to nothing, or the checkpoint was
 * deleted or replaced. All nodes are told, each until it answers or its lease is over. For a node that is away the word lies in etcd, where
 * the node reads it when it joins again, before it names its copies to anybody.
 *
 * If this daemon ends before all have heard, the next one tells all of them again: the journal's mark (journal_put_noted) stays before the
 * job that ended the checkpoint, and jobs behind the mark are recalled. A word that comes twice does no harm: it names the saves. */
#include <stdio.h>

#include "base/jval.h"
#include "base/list.h"
#include "base/log.h"
#include "base/mem.h"
#include "server/cluster_impl.h"
#include "server/job.h"
#include "server/state_dict.h"

enum { ASK_MS = 8000, PAUSE_MS = 1000, PATH_BYTES = 16 << 10, PAGE = 100 };

/* A node that is to be told. */
struct cluster_telling {
	struct cluster_errand errand;      /* the first member */
	struct cluster_telling *next;
	struct cluster *cluster;
	char *storage, *name;              /* of the checkpoint */
	char job[JOB_ID_LEN + 1], node[CLUSTER_NODE_TEXT], caller[64];
	bool is_exact;
	struct buf path;
	const char *lines[2];
	struct loop_timer *timer;
};

static void telling_end(struct cluster_telling *t)
{
	list_remove(&t->cluster->tellings, t);
	loop_timer_stop(&t->timer);
	cluster_errand_free(&t->errand);
	buf_free(&t->path);
	mem_free(t->storage);
	mem_free(t->name);
	mem_free(t);
}

static void tell(struct cluster_telling *t);

static void on_pause_over(void *user)
{
	struct cluster_telling *t = user;

	t->timer = NULL;
	tell(t);
}

static void tell_again(struct cluster_telling *t)
{
	if (!t->cluster->server->draining) /* else it stays, and keeps the mark from being put */
		loop_timer_start(t->cluster->server->loop, PAUSE_MS, on_pause_over, t, &t->timer);
}

static void on_told(struct cluster_errand *x, enum err e)
{
	struct cluster_telling *t = (struct cluster_telling *)x;

	err_clear();
	if (e || x->status == 429 || x->status >= 500) {
		tell_again(t);
		return;
	}
	if (x->status >= 300)
		log_warn("a node does not let go of its copies of a checkpoint that is no more", "node", t->node, "name", t->name, NULL);
	telling_end(t);
}

static void on_left(void *user, enum err e, const json_t *answer)
{
	struct cluster_telling *t = user;

	err_clear();
	if (e || !etcd_succeeded(answer)) /* it is back, or was forgotten */
		tell_again(t);
	else
		telling_end(t);
}

/* The node hears of it when it joins again: its lease has not begun anew, or the word comes too late. */
static void leave_word(struct cluster_telling *t)
{
	struct cluster *c = t->cluster;
	char alive[CLUSTER_KEY_MAX], member[CLUSTER_KEY_MAX], key[CLUSTER_KEY_MAX], name[CLUSTER_NODE_TEXT + JOB_ID_LEN + 2];
	CLEANUP(json_decrefp) json_t *value = json_pack("{s:s, s:s, s:s, s:b}", "storage", t->storage, "name", t->name, "job", t->job,
							"exact", t->is_exact);

	if (!cluster_is_in(c) || c->leaving) {
		tell_again(t);
		return;
	}
	snprintf(name, sizeof name, "%s/%s", t->node, t->job);
	cluster_key(c, "withdrawn/", name, key);
	json_t *still = json_pack("[o, o]", etcd_absent(cluster_key(c, "alive/", t->node, alive)),
				  etcd_present(cluster_key(c, "members/", t->node, member)));
	etcd_ask(c->etcd, "/v3/kv/txn", etcd_txn(still, json_pack("[o]", etcd_put(key, value, 0)), json_array()), on_left, t);
}

static void tell(struct cluster_telling *t)
{
	struct cluster *c = t->cluster;
	enum cluster_presence there = cluster_presence(c, t->node);

	if (there == CLUSTER_IS_UNKNOWN) { /* it was forgotten */
		telling_end(t);
	} else if (there == CLUSTER_IS_AWAY) {
		leave_word(t);
	} else {
		cluster_errand_free(&t->errand);
		t->errand = (struct cluster_errand){ .method = "DELETE", .path = (const char *)t->path.p, .headers = t->lines,
						     .whole_ms = ASK_MS, .url = BUF_INIT(PATH_BYTES + 512), .fn = on_told };
		cluster_send(c, t->node, &t->errand);
	}
}

static FALLIBLE enum err tell_new(struct cluster *c, const char *node, const struct replica_withdrawal *w)
{
	struct cluster_telling *t = mem_zalloc(1, sizeof *t);

	NEED(t, "cannot tell a node of a checkpoint that is no more");
	*t = (struct cluster_telling){ .next = c->tellings, .cluster = c, .storage = mem_strndup(w->of.storage.p, w->of.storage.n),
				       .name = mem_strndup(w->of.name.p, w->of.name.n), .is_exact = w->is_exact,
				       .path = BUF_INIT(PATH_BYTES), .lines = { t->caller } };
	c->tellings = t;
	snprintf(t->node, sizeof t->node, "%s", node);
	snprintf(t->job, sizeof t->job, "%.*s", (int)w->job.n, w->job.p);
	snprintf(t->caller, sizeof t->caller, CLUSTER_CALLER_HEAD ": 0 2 1 -");
	buf_puts(&t->path, "/v1/state-dicts?replica_of=");
	cluster_put_ref(&t->path, &w->of);
	buf_printf(&t->path, "&%s=%s", w->is_exact ? "saved_by" : "saved_before", t->job);
	buf_putc(&t->path, '\0');
	if (!t->storage || !t->name || buf_status(&t->path)) {
		telling_end(t);
		return ERR(NO_MEMORY, "cannot tell a node of a checkpoint that is no more");
	}
	tell(t);
	return OK;
}

void cluster_take_withdrawal(struct server *s, const struct replica_withdrawal *w)
{
	job_cancel_replicas(s, w);
	state_dict_replicas_withdraw(s->state_dicts, w);
}

void cluster_withdraw(struct server *s, const struct replica_withdrawal *w)
{
	struct cluster *c = s->cluster;
	const char *node;
	uint32_t i = 0;

	if (!c)
		return;
	cluster_take_withdrawal(s, w);
	if (s->draining) {
		c->has_untold = true;
		return;
	}
	while ((node = cluster_other(c, &i)) != NULL)
		if (tell_new(c, node, w)) {
			log_warn("a node keeps copies of a checkpoint that is no more", "node", node, "why", err_last()->text, NULL);
			err_clear();
			c->has_untold = true;
		}
}

/* ---- what happened while this node was away ---- */

static void on_removed(void *, enum err, const json_t *)
{
	err_clear(); /* a word that stays is heard again with the next joining */
}

/* Takes a word, and notes that its key is to go. A key that no node has written stays. */
static FALLIBLE enum err take_word(struct cluster *c, const json_t *row, json_t *removes)
{
	CLEANUP(buf_free) struct buf key = BUF_INIT(CLUSTER_KEY_MAX);
	CLEANUP(json_decrefp) json_t *value = NULL;
	enum err e = etcd_key(row, "", &key);

	buf_putc(&key, '\0');
	e = e ?: buf_status(&key);
	if (e == ERR_NO_MEMORY)
		return e;
	if (e || memchr(key.p, 0, key.len - 1)) {
		err_clear();
		return OK;
	}
	e = etcd_value(row, &value);
	if (e == ERR_NO_MEMORY)
		return e;
	const struct replica_withdrawal w = { .of = ref_checkpoint(jval_text(value, "storage"), jval_text(value, "name")),
					      .job = str_of(jval_text(value, "job")),
					      .is_exact = json_is_true(json_object_get(value, "exact")) };
	if (!e && job_id_ok(w.job))
		cluster_take_withdrawal(c->server, &w);
	err_clear();
	(void)json_array_append_new(removes, etcd_delete((const char *)key.p));
	return OK;
}

static void on_words(void *user, enum err e, const json_t *answer);

static const char *words_of(const struct cluster *c, char out[CLUSTER_KEY_MAX])
{
	char name[CLUSTER_NODE_TEXT + 1];

	snprintf(name, sizeof name, "%s/", c->name);
	return cluster_key(c, "withdrawn/", name, out);
}

static void ask_words(struct cluster *c, json_t *range)
{
	etcd_ask(c->etcd, "/v3/kv/txn", etcd_txn(json_array(), json_pack("[o]", range), json_array()), on_words, c);
}

static void on_words(void *user, enum err e, const json_t *answer)
{
	struct cluster *c = user;
	json_t *removes = json_array(), *behind = NULL;
	const json_t *row = NULL, *rows = etcd_rows(answer, 0);
	char key[CLUSTER_KEY_MAX];
	size_t i;

	json_array_foreach(rows, i, row)
		e = e ?: take_word(c, row, removes);
	if (!e && json_array_size(rows) && etcd_has_more(answer, 0)) {
		behind = etcd_range_behind(words_of(c, key), json_array_get(rows, json_array_size(rows) - 1), PAGE);
		e = behind ? OK : ERR(NO_MEMORY, "cannot ask for the rest of what was withdrawn");
	}
	err_clear();
	if (json_array_size(removes))
		etcd_ask(c->etcd, "/v3/kv/txn", etcd_txn(json_array(), removes, json_array()), on_removed, NULL);
	else
		json_decref(removes);
	if (behind) {
		ask_words(c, behind);
		return;
	}
	c->heeding = false; /* after an error a look soon asks again */
	if (e)
		return;
	c->heeded = c->heeding_for;
	cluster_withdraw_looked(c); /* the node may have joined anew meanwhile */
}

static void heed(struct cluster *c)
{
	char key[CLUSTER_KEY_MAX];

	c->heeding = true;
	c->heeding_for = c->made;
	ask_words(c, etcd_range(words_of(c, key), PAGE));
}

void cluster_withdraw_looked(struct cluster *c)
{
	if (c->loaded && !c->leaving && !c->heeding && c->heeded != c->made)
		heed(c);
}

bool cluster_heeds(const struct cluster *c)
{
	return !c || c->heeded == c->made;
}

bool cluster_has_words(const struct cluster *c)
{
	return c->tellings || c->has_untold;
}

void cluster_withdraw_free(struct cluster *c)
{
	while (c->tellings)
		telling_end(c->tellings);
}
