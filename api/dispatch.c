/* dispatch.c: see dispatch.h. */
#include "api/dispatch.h"

#include "api/counts.h"
#include "api/forward.h"
#include "api/guard.h"
#include "api/request_id.h"
#include "api/routes.h"
#include "base/jval.h"
#include "server/journal.h"
#include "server/parts.h"

static enum err on_head(struct req *r, const char *version)
{
	request_id_take(r);
	r->is_http_1_1 = strcmp(version, MHD_HTTP_VERSION_1_1) == 0;
	TRY(guard_head(r, version));
	TRY(routes_find(r));
	if (!r->route)
		return OK;
	if (r->route->changes && http_draining(r->http))
		return ERR(DRAINING, "the daemon is shutting down");
	if (r->route->changes)
		TRY(journal_may_write(r->core->journal));
	r->reads_only = !r->route->changes;
	r->audit = r->route->audit;
	return guard_body(r);
}

static enum err on_body(struct req *r)
{
	struct str text = { (const char *)r->raw.p, r->raw.len };

	if (!r->route)
		return routes_options(r);
	if (r->route->body == ROUTE_BODY || (r->route->body == ROUTE_BODY_MAY && text.n > 0))
		TRY(jval_parse(text, &r->body));
	else if (text.n > 0)
		return ERR(INVALID_REQUEST, "this request has no body");
	bool elsewhere;
	TRY(forward_job(r, &elsewhere));
	if (elsewhere)
		return OK;
	if (r->route->query)
		TRY(req_query_only(r, r->route->query));
	return r->route->handler(r);
}

static void on_failed(struct req *r, enum err e)
{
	req_fail(r, e, NULL);
}

const struct http_calls dispatch_calls = { .connected = auth_peer, .head = on_head, .handle = on_body, .fail = on_failed,
					   .sent = counts_note, .ended = req_release };
