/* h_nodes.c: /v1/nodes: the nodes of the cluster (server/cluster.h); /v1/spreads: how they bring loads together (server/spread.h). */
#include "api/h_common.h"
#include "api/handlers.h"
#include "base/jval.h"
#include "server/cluster.h"
#include "server/parts.h"
#include "server/spread.h"

enum { ANSWER_MAX = 16 << 20 };

FALLIBLE enum err h_nodes_list(struct req *r)
{
	CLEANUP(buf_free) struct buf b = BUF_INIT(ANSWER_MAX);

	TRY(cluster_put_nodes(r->core->cluster, &b));
	return req_json(r, 200, &b);
}

static FALLIBLE enum err answer(struct req *r)
{
	CLEANUP(buf_free) struct buf b = BUF_INIT(ANSWER_MAX);

	TRY(cluster_put_node(r->core->cluster, r->parts[2], &b));
	return req_json(r, 200, &b);
}

static void on_waited(void *user, enum err e)
{
	req_done(user, e ? e : answer(user));
}

static FALLIBLE enum err wish(struct req *r, bool drain)
{
	struct jval root = JVAL_ROOT(r->body);
	unsigned wait_ms = 0;

	TRY(r->body ? jval_only(&root, (const char *const[]){ NULL }) : OK);
	TRY(req_query_wait(r, &wait_ms));
	req_hold(r);
	cluster_drain(r->core, r->parts[2], drain, wait_ms, on_waited, r);
	return OK;
}

FALLIBLE enum err h_node_drain(struct req *r)
{
	return wish(r, true);
}

FALLIBLE enum err h_node_undrain(struct req *r)
{
	return wish(r, false);
}

FALLIBLE enum err h_node_forget(struct req *r)
{
	TRY(h_no_body(r));
	req_hold(r);
	cluster_forget(r->core, r->parts[2], h_pass_nothing, r);
	return OK;
}

FALLIBLE enum err h_spread_meet(struct req *r)
{
	struct jval root = JVAL_ROOT(r->body), data = jval_get(&root, "data");
	struct spread_card card = { .uid = r->caller.uid, .id = r->parts[2] };
	CLEANUP(buf_free) struct buf b = BUF_INIT(64);

	if (!r->caller.is_node)
		return ERR(FORBIDDEN, "nodes of a cluster tell each other this: a load's spread brings them to it");
	TRY(jval_only(&root, (const char *const[]){ "round", "index", "size", "data", NULL }));
	TRY(jval_opt_integer(&root, "round", 0, INT64_MAX, &card.round));
	TRY(jval_opt_integer(&root, "index", 0, INT64_MAX, &card.index));
	TRY(jval_opt_integer(&root, "size", 0, INT64_MAX, &card.size));
	TRY(jval_string(&data, &card.data));
	TRY(spread_take(r->core, &card));
	buf_puts(&b, "{}");
	return req_json(r, 200, &b);
}
