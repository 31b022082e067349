/* h_webhooks.c: /v1/webhooks (server/webhook.h). */
#include "api/h_common.h"
#include "api/handlers.h"
#include "base/jval.h"
#include "server/parts.h"
#include "server/webhook.h"

enum { ANSWER_MAX = 64 << 20 };

FALLIBLE enum err h_webhooks_list(struct req *r)
{
	CLEANUP(buf_free) struct buf b = BUF_INIT(ANSWER_MAX);
	struct principal who = req_principal(r);
	struct h_page page;

	TRY(h_page_query(r, &page));
	TRY(webhooks_put(r->core, &who, page.token, page.size, &b));
	return req_json(r, 200, &b);
}

static FALLIBLE enum err answer(struct req *r, unsigned status)
{
	CLEANUP(buf_free) struct buf b = BUF_INIT(ANSWER_MAX);
	struct principal who = req_principal(r);

	TRY(webhook_put(r->core, &who, r->parts[2], &b));
	return req_json(r, status, &b);
}

FALLIBLE enum err h_webhook_get(struct req *r)
{
	return answer(r, 200);
}

static void on_set(void *user, enum err e)
{
	req_done(user, e ? e : answer(user, 200));
}

FALLIBLE enum err h_webhook_put(struct req *r)
{
	struct principal who = req_principal(r);

	req_hold(r);
	webhook_set(r->core, &who, r->parts[2], r->body, on_set, r);
	return OK;
}

static void on_gone(void *user, enum err e)
{
	req_done(user, e ? e : req_empty(user, 204));
}

FALLIBLE enum err h_webhook_delete(struct req *r)
{
	struct principal who = req_principal(r);

	req_hold(r);
	webhook_delete(r->core, &who, r->parts[2], on_gone, r);
	return OK;
}

FALLIBLE enum err h_webhook_deliveries(struct req *r)
{
	CLEANUP(buf_free) struct buf b = BUF_INIT(ANSWER_MAX);
	struct principal who = req_principal(r);
	struct follower_page page;

	TRY(h_tasks_query(r, &page));
	TRY(webhook_put_deliveries(r->core, &who, r->parts[2], &page, &b));
	return req_json(r, 200, &b);
}

/* Actions take an empty body or {}: nothing can be set. */
static FALLIBLE enum err check_action(struct req *r)
{
	struct jval root = JVAL_ROOT(r->body);

	return r->body ? jval_only(&root, (const char *const[]){ NULL }) : OK;
}

static FALLIBLE enum err answer_delivery(struct req *r, const char *id)
{
	CLEANUP(buf_free) struct buf b = BUF_INIT(ANSWER_MAX);

	TRY(webhook_put_delivery(r->core, r->parts[2], str_of(id), &b));
	return req_json(r, 202, &b);
}

static void on_due(void *user, enum err e, const char *id)
{
	req_done(user, e ? e : answer_delivery(user, id));
}

FALLIBLE enum err h_webhook_retry(struct req *r)
{
	struct principal who = req_principal(r);

	TRY(check_action(r));
	req_hold(r);
	webhook_retry(r->core, &who, r->parts[2], r->parts[4], on_due, r);
	return OK;
}

FALLIBLE enum err h_webhook_test(struct req *r)
{
	struct principal who = req_principal(r);

	TRY(check_action(r));
	req_hold(r);
	webhook_test(r->core, &who, r->parts[2], on_due, r);
	return OK;
}
