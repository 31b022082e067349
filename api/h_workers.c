/* h_workers.c: /v1/workers and /v1/events: what goes on inside. */
#include "api/h_common.h"
#include "api/handlers.h"
#include "api/stream.h"
#include "server/parts.h"
#include "server/worker.h"

FALLIBLE enum err h_workers_list(struct req *r)
{
	CLEANUP(buf_free) struct buf b = BUF_INIT(8 << 20);
	struct h_page page;
	uint64_t before = UINT64_MAX;

	TRY(h_page_query(r, &page));
	if (page.token.n > 18 || (page.token.n && !str_to_u64(page.token, &before)))
		return ERR(INVALID_REQUEST, "the query's \"page_token\" is none of ours");
	TRY(worker_put_page(r->core->workers, page.size, before, &b));
	return req_json(r, 200, &b);
}

FALLIBLE enum err h_events(struct req *r)
{
	return stream_start(r, NULL, NULL);
}
