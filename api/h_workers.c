/* h_workers.c: /v1/workers and /v1/events: what goes on inside. */
#include "api/h_common.h"
#include "api/handlers.h"
#include "api/stream.h"
#include "server/gang.h"

FALLIBLE enum err h_workers_list(struct req *r)
{
	CLEANUP(buf_free) struct buf b = BUF_INIT(8 << 20);

	TRY(req_query_only(r, (const char *const[]){ "page_size", "page_token", NULL }));
	TRY(gang_put_workers(r->core, &b));
	return req_json(r, 200, &b);
}

FALLIBLE enum err h_events(struct req *r)
{
	TRY(req_query_only(r, (const char *const[]){ NULL }));
	return stream_start(r, NULL);
}
