/* cluster_keys.c: an Idempotency-Key that was sent to several nodes makes one job. The first node to claim the key in etcd, in one
 * transaction, makes the job, and the others send the request on to that node, whose journal has the key and answers as ever. The claim
 * names the job's id before there is a job: if the node is away, etcd's record of that job tells what became of the request. */
#include <inttypes.h>
#include <sodium.h>
#include <stdio.h>

#include "base/jval.h"
#include "base/mem.h"
#include "server/cluster_impl.h"
#include "server/journal.h"

enum { HASH_BYTES = 16 };

struct claiming {
	struct cluster *cluster;
	struct cluster_claim claim;            /* what the caller hears */
	cluster_claim_fn fn;
	void *user;
};

/* Keys are bytes of anybody's choice: their hash is the key in etcd. */
static const char *key_of(const struct cluster *c, const char hash[33], char out[CLUSTER_KEY_MAX])
{
	return cluster_key(c, "keys/", hash, out);
}

static void finish(struct claiming *w, enum err e)
{
	struct err_info info = *err_last();
	struct cluster_claim claim = w->claim;
	cluster_claim_fn fn = w->fn;
	void *user = w->user;

	mem_free(w);
	err_restore(&info);
	fn(user, e, &claim);
}

static void finish_later(void *user, enum err e)
{
	finish(user, e);
}

static json_t *value_of(const struct claiming *w)
{
	return json_pack("{s:s, s:s, s:s}", "node", w->cluster->name, "job", w->claim.job, "digest", w->claim.digest);
}

static void on_taken(void *user, enum err e, const json_t *answer)
{
	struct claiming *w = user;

	if (!e && !etcd_succeeded(answer))
		e = ERR(IDEMPOTENCY_IN_FLIGHT, "another node has just taken a request with this key");
	w->claim.revision = etcd_number(json_object_get(answer, "header"), "revision");
	finish(w, e);
}

/* The claim becomes this node's, for a new job. */
static void take(struct claiming *w, int64_t revision)
{
	char key[CLUSTER_KEY_MAX];

	w->claim.node[0] = '\0';
	job_new_id(w->cluster->server->journal, w->claim.job);
	CLEANUP(json_decrefp) json_t *value = value_of(w);
	key_of(w->cluster, w->claim.hash, key);
	etcd_ask(w->cluster->etcd, "/v3/kv/txn",
		 etcd_txn(json_pack("[o]", etcd_changed_at(key, revision)), json_pack("[o]", etcd_put(key, value, 0)), json_array()),
		 on_taken, w);
}

static void on_claimed(void *user, enum err e, const json_t *answer)
{
	struct claiming *w = user;
	const json_t *row = json_array_get(etcd_rows(answer, 0), 0);
	CLEANUP(json_decrefp) json_t *value = NULL;

	if (e) { /* as while etcd is away: each node's journal has its own keys */
		err_clear();
		finish(w, OK);
		return;
	}
	if (etcd_succeeded(answer)) {
		w->claim.revision = etcd_number(json_object_get(answer, "header"), "revision");
		finish(w, OK);
		return;
	}
	e = row ? etcd_value(row, &value) : ERR(IDEMPOTENCY_IN_FLIGHT, "the claim of this key is gone: try again");
	if (e) {
		finish(w, e);
		return;
	}
	const char *node = jval_text(value, "node"), *job = jval_text(value, "job");
	int64_t revision = etcd_number(row, "mod_revision");
	w->claim.is_same = strcmp(jval_text(value, "digest"), w->claim.digest) == 0;
	enum cluster_presence there = cluster_presence(w->cluster, node);
	bool is_here;
	(void)job_moved_to(w->cluster->server, str_of(job), &is_here);
	if (there == CLUSTER_IS_SELF && job_id_ok(str_of(job)) && !is_here) { /* the request came to nothing, or is being worked on */
		snprintf(w->claim.job, sizeof w->claim.job, "%s", job);
		w->claim.revision = revision;
		finish(w, OK);
	} else if (there == CLUSTER_IS_SELF) { /* its journal has forgotten the key */
		take(w, revision);
	} else {
		snprintf(w->claim.node, sizeof w->claim.node, "%s", node);
		snprintf(w->claim.job, sizeof w->claim.job, "%s", job);
		w->claim.is_away = there != CLUSTER_IS_HERE;
		w->claim.revision = revision;
		finish(w, OK);
	}
}

void cluster_claim(struct cluster *c, uid_t uid, const struct idempotency *idem, cluster_claim_fn fn, void *user)
{
	struct claiming *w = mem_sure(sizeof *w);
	unsigned char hash[HASH_BYTES];
	crypto_generichash_state h;
	char key[CLUSTER_KEY_MAX];

	*w = (struct claiming){ .cluster = c, .fn = fn, .user = user };
	crypto_generichash_init(&h, NULL, 0, sizeof hash);
	crypto_generichash_update(&h, (const unsigned char *)&uid, sizeof uid);
	crypto_generichash_update(&h, (const unsigned char *)idem->key.p, idem->key.n);
	crypto_generichash_final(&h, hash, sizeof hash);
	sodium_bin2hex(w->claim.hash, sizeof w->claim.hash, hash, sizeof hash);
	snprintf(w->claim.digest, sizeof w->claim.digest, "%016" PRIx64, journal_digest(idem->body));
	job_new_id(c->server->journal, w->claim.job);
	if (!cluster_is_in(c) || c->leaving) {
		loop_later(c->server->loop, finish_later, w, OK);
		return;
	}
	CLEANUP(json_decrefp) json_t *value = value_of(w);
	key_of(c, w->claim.hash, key);
	etcd_ask(c->etcd, "/v3/kv/txn",
		 etcd_txn(json_pack("[o]", etcd_absent(key)), json_pack("[o]", etcd_put(key, value, 0)), json_pack("[o]", etcd_get(key))),
		 on_claimed, w);
}

void cluster_claim_take(struct cluster *c, const struct cluster_claim *claim, cluster_claim_fn fn, void *user)
{
	struct claiming *w = mem_sure(sizeof *w);

	*w = (struct claiming){ .cluster = c, .claim = *claim, .fn = fn, .user = user };
	take(w, claim->revision);
}

static void on_done(void *, enum err, const json_t *)
{
	err_clear();
}

void cluster_claim_drop(struct cluster *c, const struct cluster_claim *claim)
{
	char key[CLUSTER_KEY_MAX];

	if (claim->revision == 0 || c->leaving)
		return;
	key_of(c, claim->hash, key);
	json_t *same = etcd_changed_at(key, claim->revision);
	etcd_ask(c->etcd, "/v3/kv/txn", etcd_txn(json_pack("[o]", same), json_pack("[o]", etcd_delete(key)), json_array()), on_done, NULL);
}
