/* h_chains.c: /v1/chains (server/chain.h). */
#include "api/h_common.h"
#include "api/handlers.h"
#include "server/chain.h"
#include "server/parts.h"

enum { ANSWER_MAX = 64 << 20 };

FALLIBLE enum err h_chains_list(struct req *r)
{
	CLEANUP(buf_free) struct buf b = BUF_INIT(ANSWER_MAX);
	struct h_page page;

	TRY(h_page_query(r, &page));
	TRY(chains_put(r->core, page.token, page.size, &b));
	return req_json(r, 200, &b);
}

FALLIBLE enum err h_chain_get(struct req *r)
{
	CLEANUP(buf_free) struct buf b = BUF_INIT(ANSWER_MAX);

	TRY(chain_put(r->core, r->parts[2], &b));
	return req_json(r, 200, &b);
}

static void on_set(void *user, enum err e)
{
	req_done(user, e ? e : h_chain_get(user));
}

FALLIBLE enum err h_chain_put(struct req *r)
{
	struct principal who = req_principal(r);

	req_hold(r);
	chain_set(r->core, &who, r->parts[2], r->body, on_set, r);
	return OK;
}

static void on_gone(void *user, enum err e)
{
	req_done(user, e ? e : req_empty(user, 204));
}

FALLIBLE enum err h_chain_delete(struct req *r)
{
	struct principal who = req_principal(r);

	req_hold(r);
	chain_delete(r->core, &who, r->parts[2], on_gone, r);
	return OK;
}

FALLIBLE enum err h_chain_executions(struct req *r)
{
	CLEANUP(buf_free) struct buf b = BUF_INIT(ANSWER_MAX);
	struct follower_page page;

	TRY(h_tasks_query(r, &page));
	TRY(chain_put_executions(r->core, r->parts[2], &page, &b));
	return req_json(r, 200, &b);
}
