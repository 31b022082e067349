/* h_policies.c: /v1/policies/{policy}:preview (server/policy.h); the rest: h_followers.c. */
#include "api/h_common.h"
#include "api/handlers.h"
#include "server/policy.h"

FALLIBLE enum err h_policy_preview(struct req *r)
{
	const struct principal who = req_principal(r);

	req_hold(r);
	policy_preview(r->core, &who, r->parts[2], json_object_size(r->body) ? r->body : NULL, h_pass_text, r);
	return OK;
}
