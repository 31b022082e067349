/* h_followers.c: /v1/webhooks, /v1/chains and /v1/policies (server/follower.h): what all three do the same way. The path says which. */
#include "api/h_common.h"
#include "api/handlers.h"
#include "server/job.h"

enum { ANSWER_MAX = 64 << 20 };

static struct followers *all_of(const struct req *r)
{
	return followers_of(r->core, r->parts[1]);
}

static FALLIBLE enum err answer_list(struct req *r, const struct h_page *page)
{
	CLEANUP(buf_free) struct buf b = BUF_INIT(ANSWER_MAX);
	struct principal who = req_principal(r);

	TRY(followers_put(all_of(r), &who, page->token, page->size, &b));
	return req_json(r, 200, &b);
}

FALLIBLE enum err h_followers_list(struct req *r)
{
	struct h_page page;

	TRY(h_page_query(r, &page));
	return answer_list(r, &page);
}

FALLIBLE enum err h_followers_list_all(struct req *r)
{
	return answer_list(r, &(struct h_page){ .size = FOLLOWERS_MAX });
}

FALLIBLE enum err h_follower_get(struct req *r)
{
	CLEANUP(buf_free) struct buf b = BUF_INIT(ANSWER_MAX);
	struct principal who = req_principal(r);

	TRY(follower_put(all_of(r), &who, r->parts[2], &b));
	return req_json(r, 200, &b);
}

static void on_set(void *user, enum err e)
{
	req_done(user, e ? e : h_follower_get(user));
}

FALLIBLE enum err h_follower_put(struct req *r)
{
	struct principal who = req_principal(r);
	struct followers *all = all_of(r);

	req_hold(r);
	all->kind->set(all, &who, r->parts[2], r->body, on_set, r);
	return OK;
}

FALLIBLE enum err h_follower_delete(struct req *r)
{
	struct principal who = req_principal(r);

	req_hold(r);
	follower_remove(all_of(r), &who, r->parts[2], h_pass_nothing, r);
	return OK;
}

FALLIBLE enum err h_follower_tasks(struct req *r)
{
	CLEANUP(buf_free) struct buf b = BUF_INIT(ANSWER_MAX);
	struct principal who = req_principal(r);
	struct h_page page;
	struct follower *f;

	TRY(h_page_query(r, &page));
	if (page.token.n && !job_id_ok(page.token))
		return ERR(INVALID_REQUEST, "the query's \"page_token\" is none of ours");
	TRY(follower_need(all_of(r), &who, r->parts[2], &f));
	TRY(follower_put_page(f, &(struct follower_page){ page.token, page.size }, &b));
	return req_json(r, 200, &b);
}
