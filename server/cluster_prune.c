/* cluster_prune.c: etcd keeps --keep-jobs records of jobs and as many idempotency keys: the first node that is not away removes the
 * rest, the oldest first. */
#include "base/clock.h"
#include "base/jval.h"
#include "server/cluster_impl.h"
#include "server/config.h"
#include "server/etcd.h"

enum { PRUNE_MS = 60000, PRUNE_PAGE = 64 };

typedef bool (*may_go_fn)(struct cluster *c, const json_t *row);

struct pruning {
	struct cluster *cluster;
	const char *folder;
	may_go_fn may_go;
};

static void on_pruned(void *, enum err, const json_t *)
{
	err_clear();
}

static void prune_page(struct cluster *c, const struct pruning *which, json_t *page);

static void on_page_to_prune(void *user, enum err e, const json_t *answer)
{
	struct pruning p = *(struct pruning *)user;
	struct cluster *c = p.cluster;
	int64_t beyond = etcd_counted(answer, 0) - (int64_t)c->server->config->keep_jobs;
	char prefix[CLUSTER_KEY_MAX], key[CLUSTER_KEY_MAX];
	json_t *deletes = json_array();
	const json_t *row;
	size_t i;

	mem_free(user);
	cluster_key(c, p.folder, "", prefix);
	json_array_foreach(etcd_rows(answer, 1), i, row) {
		CLEANUP(buf_free) struct buf name = BUF_INIT(CLUSTER_KEY_MAX);
		if (e || beyond <= 0)
			break;
		if ((p.may_go && !p.may_go(c, row)) || etcd_key(row, prefix, &name))
			continue;
		buf_putc(&name, '\0');
		if (buf_status(&name) == OK) {
			(void)json_array_append_new(deletes, etcd_delete(cluster_key(c, p.folder, (const char *)name.p, key)));
			beyond--;
		}
	}
	err_clear();
	if (json_array_size(deletes) == 0) {
		json_decref(deletes);
		if (!e && beyond > 0 && etcd_has_more(answer, 1)) /* none of this page may go: others behind it may */
			prune_page(c, &p, etcd_range_behind(prefix, json_array_get(etcd_rows(answer, 1), i - 1), PRUNE_PAGE));
		return;
	}
	if (beyond > 0)
		c->prune_ms = 0; /* the next look goes on */
	etcd_ask(c->etcd, "/v3/kv/txn", etcd_txn(json_array(), deletes, json_array()), on_pruned, NULL);
}

static void prune_page(struct cluster *c, const struct pruning *which, json_t *page)
{
	struct pruning *p = mem_sure(sizeof *p);
	char prefix[CLUSTER_KEY_MAX];

	*p = *which;
	cluster_key(c, which->folder, "", prefix);
	json_t *asked = json_pack("[o, o]", etcd_count(prefix), page);
	etcd_ask(c->etcd, "/v3/kv/txn", etcd_txn(json_array(), asked, json_array()), on_page_to_prune, p);
}

/* Of a folder of etcd, the first keys beyond --keep-jobs go, in the order of first(). may_go: of a row; NULL: all may. */
static void prune_folder(struct cluster *c, const char *folder, json_t *(*first)(const char *prefix, uint32_t limit), may_go_fn may_go)
{
	char prefix[CLUSTER_KEY_MAX];

	prune_page(c, &(struct pruning){ c, folder, may_go }, first(cluster_key(c, folder, "", prefix), PRUNE_PAGE));
}

/* Jobs that have not ended stay, unless their node was forgotten. */
static bool job_may_go(struct cluster *c, const json_t *row)
{
	CLEANUP(json_decrefp) json_t *value = NULL;

	if (etcd_value(row, &value))
		return false;
	const char *state = jval_text(json_object_get(value, "job"), "state");
	bool ended = strcmp(state, "succeeded") == 0 || strcmp(state, "failed") == 0 || strcmp(state, "cancelled") == 0;
	return ended || !cluster_knows(c, jval_text(value, "node"));
}

void cluster_prune(struct cluster *c)
{
	const char *first = NULL;

	each(n, c->nodes.v, c->nodes.n)
		if (!first && n->state != CLUSTER_AWAY)
			first = n->name;
	if (!first || strcmp(first, c->name) != 0 || clock_mono_ms() < c->prune_ms)
		return;
	c->prune_ms = clock_mono_ms() + PRUNE_MS;
	prune_folder(c, "keys/", etcd_oldest, NULL); /* cluster_keys.c */
	prune_folder(c, "withdrawn/", etcd_oldest, NULL); /* cluster_withdraw.c */
	prune_folder(c, "jobs/", etcd_range, job_may_go);
}
