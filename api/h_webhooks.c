/* h_webhooks.c: deliveries that somebody asks for (server/webhook.h); the rest of /v1/webhooks: h_followers.c. */
#include "api/h_common.h"
#include "api/handlers.h"
#include "base/jval.h"
#include "server/webhook.h"

enum { ANSWER_MAX = 64 << 10 };

static FALLIBLE enum err answer_delivery(struct req *r, const char *id)
{
	CLEANUP(buf_free) struct buf b = BUF_INIT(ANSWER_MAX);
	struct principal who = req_principal(r);
	struct follower *f;

	TRY(follower_need(followers_of(r->core, r->parts[1]), &who, r->parts[2], &f));
	TRY(follower_put_task(f, str_of(id), &b));
	return req_json(r, 202, &b);
}

static void on_due(void *user, enum err e, const char *id)
{
	req_done(user, e ? e : answer_delivery(user, id));
}

FALLIBLE enum err h_webhook_retry(struct req *r)
{
	struct principal who = req_principal(r);

	TRY(h_no_body(r));
	req_hold(r);
	webhook_retry(r->core, &who, r->parts[2], r->parts[4], on_due, r);
	return OK;
}

FALLIBLE enum err h_webhook_test(struct req *r)
{
	struct principal who = req_principal(r);

	TRY(h_no_body(r));
	req_hold(r);
	webhook_test(r->core, &who, r->parts[2], on_due, r);
	return OK;
}
