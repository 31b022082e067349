/* h_policies.c: /v1/policies: how long checkpoints are kept (server/policy.h). */
#include "api/h_common.h"
#include "api/handlers.h"
#include "base/jval.h"
#include "base/mem.h"
#include "server/parts.h"
#include "server/policy.h"
#include "spec/policy.h"

enum { LIST_BYTES_MAX = 16 << 20 };

/* The policy's name, without a verb behind it, NUL-terminated; `out` has POLICY_NAME_BYTES_MAX + 1 bytes. */
static FALLIBLE enum err name_of(const struct req *r, char *out)
{
	struct str name = r->parts[2];

	TRY(policy_check_name(name));
	memcpy(out, name.p, name.n);
	out[name.n] = '\0';
	return OK;
}

FALLIBLE enum err h_policies_list(struct req *r)
{
	CLEANUP(buf_free) struct buf out = BUF_INIT(LIST_BYTES_MAX);

	TRY(policy_list(r->core, &out));
	return req_json(r, 200, &out);
}

FALLIBLE enum err h_policy_get(struct req *r)
{
	CLEANUP(buf_free) struct buf out = BUF_INIT(LIST_BYTES_MAX);
	char name[POLICY_NAME_BYTES_MAX + 1];

	TRY(name_of(r, name));
	TRY(policy_show(r->core, name, &out));
	return req_json(r, 200, &out);
}

static FALLIBLE enum err answer_put(struct req *r)
{
	CLEANUP(buf_free) struct buf out = BUF_INIT(LIST_BYTES_MAX);
	char name[POLICY_NAME_BYTES_MAX + 1];

	TRY(name_of(r, name));
	TRY(policy_show(r->core, name, &out));
	return req_json(r, 200, &out);
}

static void on_put(void *user, enum err e)
{
	req_done(user, e ? e : answer_put(user));
}

FALLIBLE enum err h_policy_put(struct req *r)
{
	const struct principal who = req_principal(r);
	char name[POLICY_NAME_BYTES_MAX + 1];

	TRY(name_of(r, name));
	json_t *doc = json_deep_copy(r->body);
	NEED(doc, "cannot keep a policy");
	req_hold(r);
	policy_put(r->core, &who, name, doc, on_put, r);
	return OK;
}

static void on_deleted(void *user, enum err e)
{
	struct req *r = user;

	req_done(r, e ? e : req_empty(r, 204));
}

FALLIBLE enum err h_policy_delete(struct req *r)
{
	const struct principal who = req_principal(r);
	char name[POLICY_NAME_BYTES_MAX + 1];

	TRY(name_of(r, name));
	req_hold(r);
	policy_delete(r->core, &who, name, on_deleted, r);
	return OK;
}

static void on_previewed(void *user, enum err e, struct buf *out)
{
	req_done(user, e ? e : req_json(user, 200, out));
}

FALLIBLE enum err h_policy_preview(struct req *r)
{
	char name[POLICY_NAME_BYTES_MAX + 1];
	json_t *doc = NULL;

	TRY(name_of(r, name));
	if (r->body && json_object_size(r->body)) {
		doc = json_deep_copy(r->body);
		NEED(doc, "cannot look at a policy");
	}
	req_hold(r);
	policy_preview(r->core, name, doc, on_previewed, r);
	return OK;
}
