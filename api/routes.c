/* routes.c: see routes.h. A few dozen routes: a scan of the table is faster than what could replace it, and can be read. */
#include "api/routes.h"

#include <stdio.h>

#include "api/api_impl.h"
#include "api/guard.h"
#include "api/handlers.h"
#include "api/url.h"
#include "base/mem.h"

#define Q(...) .query = (const char *const[]){ __VA_ARGS__ }

static const struct route routes[] = {
	{ "GET", "/v1/jobs/{id}", h_job_get, ROUTE_NO_BODY, false, false, Q("wait", NULL) },
	{ "GET", "/v1/jobs", h_jobs_list, ROUTE_NO_BODY, false, false, Q("page_size", "page_token", "filter", NULL), .list = "jobs" },
	{ "POST", "/v1/jobs", h_jobs_create, ROUTE_BODY, false, true, Q("dry_run", NULL) },
	{ "GET", "/v1/jobs/{id}/events", h_job_events, ROUTE_NO_BODY, false, false, Q(NULL) },
	{ "GET", "/v1/jobs/{id}/plan", h_job_plan, ROUTE_NO_BODY, false, false, Q(NULL) },
	{ "POST", "/v1/jobs/{id}:cancel", h_job_cancel, ROUTE_BODY_MAY, false, false, Q(NULL) },
	{ "POST", "/v1/jobs/{id}:retry", h_job_retry, ROUTE_BODY_MAY, false, true, Q(NULL) },

	{ "GET", "/v1/state-dicts", h_sdicts_list, ROUTE_NO_BODY, false, false,
	  Q("page_size", "page_token", "replica_of", "replica_of_run", NULL), .list = "state_dicts" },
	{ "POST", "/v1/state-dicts", h_sdicts_create, ROUTE_BODY, false, true, Q(NULL) },
	{ "DELETE", "/v1/state-dicts", h_sdicts_withdraw, ROUTE_NO_BODY, false, false, Q("replica_of", "saved_by", "saved_before", NULL) },
	{ "GET", "/v1/state-dicts/{name}", h_sdict_get, ROUTE_NO_BODY, false, false, Q(NULL) },
	{ "DELETE", "/v1/state-dicts/{name}", h_sdict_delete, ROUTE_NO_BODY, false, true, Q(NULL), .audit = "state_dict.remove" },
	{ "GET", "/v1/state-dicts/{name}/tensors", h_sdict_tensors, ROUTE_NO_BODY, false, false,
	  Q("page_size", "page_token", "prefix", "generation", NULL), .list = "tensors" },
	{ "GET", "/v1/state-dicts/{name}/digests", h_sdict_digests, ROUTE_NO_BODY, false, false, Q("generation", "of", NULL),
	  .image = true },
	{ "GET", "/v1/state-dicts/{name}/ranks/{rank}/image", h_rank_image, ROUTE_NO_BODY, false, false, Q("generation", NULL),
	  .image = true },
	{ "POST", "/v1/state-dicts/{name}/ranks/{rank}:reserve", h_rank_reserve, ROUTE_BODY, false, true, Q("wait", NULL) },
	{ "POST", "/v1/state-dicts/{name}/ranks/{rank}:renew", h_rank_renew, ROUTE_BODY_MAY, false, false, Q("wait", NULL) },
	{ "POST", "/v1/state-dicts/{name}/ranks/{rank}:seal", h_rank_seal, ROUTE_BODY, false, false, Q(NULL) },
	{ "POST", "/v1/state-dicts/{name}/ranks/{rank}:release", h_rank_release, ROUTE_BODY, false, false, Q(NULL) },
	{ "POST", "/v1/state-dicts/{name}/ranks/{rank}:copy", h_rank_copy, ROUTE_BODY, false, false, Q(NULL) },
	{ "GET", "/v1/descriptors", h_descriptors, ROUTE_NO_BODY, false, false, Q(NULL), .scope = SCOPE_SUBMIT },

	{ "GET", "/v1/device-images", h_device_images_list, ROUTE_NO_BODY, false, false, Q("state_dict", NULL), .list = "device_images" },
	{ "POST", "/v1/device-images", h_device_images_create, ROUTE_BODY, false, true, Q(NULL), .audit = "device_image.keep" },
	{ "GET", "/v1/device-images/{id}", h_device_image_get, ROUTE_NO_BODY, false, false, Q(NULL) },
	{ "POST", "/v1/device-images/{id}:attach", h_device_image_attach, ROUTE_BODY, false, false, Q(NULL) },
	{ "DELETE", "/v1/device-images/{id}", h_device_image_drop, ROUTE_NO_BODY, false, true, Q(NULL), .audit = "device_image.drop" },

	{ "GET", "/v1/publications", h_publications_list, ROUTE_NO_BODY, false, false, Q(NULL), .list = "publications" },
	{ "GET", "/v1/publications/{name}", h_publication_get, ROUTE_NO_BODY, false, false, Q(NULL) },
	{ "POST", "/v1/publications/{name}:follow", h_publication_follow, ROUTE_BODY_MAY, false, false, Q("wait", NULL),
	  .scope = SCOPE_READ },

	{ "GET", "/v1/checkpoints", h_checkpoints_list, ROUTE_NO_BODY, false, false,
	  Q("page_size", "page_token", "prefix", "storage", "run", "filter", "sort", NULL), .list = "checkpoints" },
	{ "GET", "/v1/checkpoints/{storage}", h_checkpoints_list, ROUTE_NO_BODY, false, false,
	  Q("page_size", "page_token", "prefix", "run", "filter", "sort", NULL), .list = "checkpoints" },
	{ "GET", "/v1/checkpoints/{storage}/{name}", h_checkpoint_get, ROUTE_NO_BODY, false, false, Q(NULL) },
	{ "DELETE", "/v1/checkpoints/{storage}/{name}", h_checkpoint_delete, ROUTE_NO_BODY, false, true,
	  Q("trash", NULL), .scope = SCOPE_ADMIN, .audit = "checkpoint.delete" },
	{ "GET", "/v1/checkpoints/{storage}/{name}/tensors", h_checkpoint_tensors, ROUTE_NO_BODY, false, false,
	  Q("page_size", "page_token", "prefix", NULL), .list = "tensors" },
	{ "GET", "/v1/checkpoints/{storage}/{name}/tensors/{fqn}", h_checkpoint_tensor, ROUTE_NO_BODY, false, false,
	  Q("slice", "format", "verify", NULL) },
	{ "POST", "/v1/checkpoints/{storage}/{name}:locate", h_checkpoint_locate, ROUTE_BODY, false, false, Q(NULL), .scope = SCOPE_READ },
	{ "GET", "/v1/checkpoints/{storage}/{name}/files", h_checkpoint_files, ROUTE_NO_BODY, false, false, Q(NULL), .list = "files" },
	{ "GET", "/v1/checkpoints/{storage}/{name}/files/{file}", h_checkpoint_file, ROUTE_NO_BODY, false, false,
	  Q("offset", "bytes", NULL) },
	{ "GET", "/v1/checkpoints/{storage}/{name}/lineage", h_checkpoint_lineage, ROUTE_NO_BODY, false, false, Q(NULL) },
	{ "PUT", "/v1/checkpoints/{storage}/{name}/hold", h_checkpoint_hold, ROUTE_BODY_MAY, false, true, Q(NULL), .audit = "hold.set" },
	{ "DELETE", "/v1/checkpoints/{storage}/{name}/hold", h_checkpoint_unhold, ROUTE_NO_BODY, false, true,
	  Q(NULL), .scope = SCOPE_ADMIN, .audit = "hold.lift" },
	{ "POST", "/v1/checkpoints/{storage}/{name}:undelete", h_checkpoint_undelete, ROUTE_BODY_MAY, false, true,
	  Q(NULL), .audit = "checkpoint.undelete" },

	{ "GET", "/v1/policies", h_followers_list_all, ROUTE_NO_BODY, false, false, Q(NULL), .list = "policies" },
	{ "GET", "/v1/policies/{policy}", h_follower_get, ROUTE_NO_BODY, false, false, Q(NULL) },
	{ "PUT", "/v1/policies/{policy}", h_follower_put, ROUTE_BODY, false, true, Q(NULL), .scope = SCOPE_ADMIN, .audit = "policy.set" },
	{ "DELETE", "/v1/policies/{policy}", h_follower_delete, ROUTE_NO_BODY, false, true,
	  Q(NULL), .scope = SCOPE_ADMIN, .audit = "policy.remove" },
	{ "POST", "/v1/policies/{policy}:preview", h_policy_preview, ROUTE_BODY_MAY, false, false, Q(NULL), .scope = SCOPE_READ },

	{ "GET", "/v1/runs", h_runs_list, ROUTE_NO_BODY, false, false, Q("storage", "page_size", "page_token", NULL), .list = "runs" },
	{ "GET", "/v1/runs/{storage}/{run}", h_run_get, ROUTE_NO_BODY, false, false,
	  Q("page_size", "page_token", "filter", "sort", "mtbf", NULL) },
	{ "GET", "/v1/runs/{storage}/{run}:resume", h_run_resume, ROUTE_NO_BODY, false, false,
	  Q("world_size", "layout", "attempts_max", "optimizer", NULL) },
	{ "POST", "/v1/runs/{storage}/{run}:resume", h_run_resume_take, ROUTE_BODY_MAY, false, true, Q(NULL) },
	{ "POST", "/v1/runs/{storage}/{run}:drain", h_run_drain, ROUTE_BODY_MAY, false, false, Q("wait", NULL) },
	{ "PUT", "/v1/runs/{storage}/{run}/aliases/{alias}", h_alias_put, ROUTE_BODY, false, true, Q(NULL), .audit = "alias.move" },
	{ "DELETE", "/v1/runs/{storage}/{run}/aliases/{alias}", h_alias_delete, ROUTE_BODY_MAY, false, true,
	  Q(NULL), .audit = "alias.remove" },

	{ "GET", "/v1/webhooks", h_followers_list, ROUTE_NO_BODY, false, false, Q("page_size", "page_token", NULL), .list = "webhooks" },
	{ "GET", "/v1/webhooks/{webhook}", h_follower_get, ROUTE_NO_BODY, false, false, Q(NULL) },
	{ "PUT", "/v1/webhooks/{webhook}", h_follower_put, ROUTE_BODY, false, true, Q(NULL), .scope = SCOPE_ADMIN, .audit = "webhook.set" },
	{ "DELETE", "/v1/webhooks/{webhook}", h_follower_delete, ROUTE_NO_BODY, false, true,
	  Q(NULL), .scope = SCOPE_ADMIN, .audit = "webhook.remove" },
	{ "POST", "/v1/webhooks/{webhook}:test", h_webhook_test, ROUTE_BODY_MAY, false, true, Q(NULL), .scope = SCOPE_ADMIN },
	{ "GET", "/v1/webhooks/{webhook}/deliveries", h_follower_tasks, ROUTE_NO_BODY, false, false,
	  Q("page_size", "page_token", NULL), .list = "deliveries" },
	{ "POST", "/v1/webhooks/{webhook}/deliveries/{id}:retry", h_webhook_retry, ROUTE_BODY_MAY, false, true,
	  Q(NULL), .scope = SCOPE_ADMIN },

	{ "GET", "/v1/chains", h_followers_list, ROUTE_NO_BODY, false, false, Q("page_size", "page_token", NULL), .list = "chains" },
	{ "GET", "/v1/chains/{chain}", h_follower_get, ROUTE_NO_BODY, false, false, Q(NULL) },
	{ "PUT", "/v1/chains/{chain}", h_follower_put, ROUTE_BODY, false, true, Q(NULL), .scope = SCOPE_ADMIN, .audit = "chain.set" },
	{ "DELETE", "/v1/chains/{chain}", h_follower_delete, ROUTE_NO_BODY, false, true,
	  Q(NULL), .scope = SCOPE_ADMIN, .audit = "chain.remove" },
	{ "GET", "/v1/chains/{chain}/executions", h_follower_tasks, ROUTE_NO_BODY, false, false,
	  Q("page_size", "page_token", NULL), .list = "executions" },

	{ "GET", "/v1/storages", h_storages_list, ROUTE_NO_BODY, false, false, Q("page_size", "page_token", NULL), .list = "storages" },
	{ "POST", "/v1/storages", h_storages_create, ROUTE_BODY, false, true, Q(NULL), .scope = SCOPE_ADMIN, .audit = "storage.add" },
	{ "GET", "/v1/storages/{storage}", h_storage_get, ROUTE_NO_BODY, false, false, Q(NULL) },
	{ "GET", "/v1/storages/{storage}/trash", h_trash_list, ROUTE_NO_BODY, false, false, Q("name", NULL) },
	{ "POST", "/v1/storages/{storage}:meet", h_storage_meet, ROUTE_BODY, false, false, Q(NULL) },
	{ "GET", "/v1/workers", h_workers_list, ROUTE_NO_BODY, false, false, Q("page_size", "page_token", NULL), .list = "workers" },
	{ "GET", "/v1/nodes", h_nodes_list, ROUTE_NO_BODY, false, false, Q(NULL), .list = "nodes" },
	{ "POST", "/v1/nodes/{node}:drain", h_node_drain, ROUTE_BODY_MAY, false, false,
	  Q("wait", NULL), .scope = SCOPE_ADMIN, .audit = "node.drain" },
	{ "POST", "/v1/nodes/{node}:undrain", h_node_undrain, ROUTE_BODY_MAY, false, false,
	  Q("wait", NULL), .scope = SCOPE_ADMIN, .audit = "node.undrain" },
	{ "POST", "/v1/nodes/{node}:forget", h_node_forget, ROUTE_BODY_MAY, false, false,
	  Q(NULL), .scope = SCOPE_ADMIN, .audit = "node.forget" },
	{ "POST", "/v1/spreads/{id}:meet", h_spread_meet, ROUTE_BODY, false, false, Q(NULL), .scope = SCOPE_READ },
	{ "GET", "/v1/audit", h_audit, ROUTE_NO_BODY, false, false,
	  Q("page_size", "page_token", NULL), .scope = SCOPE_ADMIN, .list = "audit" },
	{ "GET", "/v1/events", h_events, ROUTE_NO_BODY, false, false, Q(NULL) },
	{ "GET", "/v1/capabilities", h_capabilities, ROUTE_NO_BODY, false, false, Q(NULL) },
	{ "GET", "/v1/doctor", h_doctor, ROUTE_NO_BODY, false, false, Q(NULL) },
	{ "GET", "/v1/transforms", h_transforms, ROUTE_NO_BODY, false, false, Q(NULL), .list = "transforms" },
	{ "GET", "/v1/transforms/{name}", h_transform, ROUTE_NO_BODY, false, false, Q(NULL) },

	{ "GET", "/livez", h_livez, ROUTE_NO_BODY, true, false, .query = NULL },
	{ "GET", "/readyz", h_readyz, ROUTE_NO_BODY, true, false, .query = NULL },
	{ "GET", "/metrics", h_metrics, ROUTE_NO_BODY, false, false, .query = NULL },
	{ "GET", "/openapi.yaml", h_openapi, ROUTE_NO_BODY, false, false, .query = NULL },
	{ .method = NULL },
};

/* The page and its files: any path outside /v1 that the web folder has. */
static const struct route page_route = { "GET", "/", h_page, ROUTE_NO_BODY, true, false, .query = NULL };

static bool part_matches(const char *pattern, size_t n, struct str part)
{
	return pattern[0] == '{' ? part.n > 0 : part.n == n && memcmp(part.p, pattern, n) == 0;
}

/* Does the route's path fit the request's parts? With a verb, the last part is compared without it. */
static bool path_matches(const char *path, const struct req *r, bool with_verb)
{
	const char *verb = strchr(path, ':');
	uint32_t i = 0;

	if (with_verb != (verb != NULL) || (verb && !str_is(r->verb, verb + 1)))
		return false;
	while (*path == '/') {
		size_t n = strcspn(++path, "/:");
		if (i >= r->part_count || !part_matches(path, n, r->parts[i]))
			return false;
		i++;
		path += n;
	}
	return i == r->part_count;
}

/* HEAD is answered as GET; libmicrohttpd leaves the body out. */
static bool method_matches(const char *method, const char *sent)
{
	return strcmp(method, sent) == 0 || (strcmp(sent, "HEAD") == 0 && strcmp(method, "GET") == 0);
}

static void add_allowed(struct req *r, const char *method)
{
	size_t n = strlen(r->allow);

	snprintf(r->allow + n, sizeof r->allow - n, "%s%s%s", n ? ", " : "", method,
		 strcmp(method, "GET") == 0 ? ", HEAD" : "");
}

static const struct route *scan(struct req *r, bool with_verb)
{
	for (const struct route *t = routes; t->method; t++) {
		if (!path_matches(t->path, r, with_verb))
			continue;
		if (method_matches(t->method, r->method))
			return t;
		add_allowed(r, t->method);
	}
	return NULL;
}

/* "01J…:cancel" as the last raw component: the verb is what follows its last colon. "%3A" is a colon inside a name. */
static void cut_verb(struct req *r)
{
	struct str *last = r->part_count ? &r->parts[r->part_count - 1] : NULL;
	const char *colon = last ? memrchr(last->p, ':', last->n) : NULL;

	if (!colon || colon == last->p || !strchr(strrchr(r->path, '/'), ':'))
		return;
	r->verb = (struct str){ colon + 1, last->n - (size_t)(colon + 1 - last->p) };
}

static FALLIBLE enum err parse_path(struct req *r)
{
	const char *path = r->path;

	/* The absolute form, as sent to a proxy: the Host header was checked already. */
	if (path[0] != '/' && strstr(path, "://")) {
		path = strchr(strstr(path, "://") + 3, '/');
		if (!path)
			path = "/";
	}
	if (path[0] != '/' && strcmp(path, "*") != 0)
		return ERR(INVALID_REQUEST, "the path does not begin with \"/\"");
	r->path = path; /* what is routed is what is sent on to another node */
	r->decoded = mem_strdup(path);
	NEED(r->decoded, "cannot read the path");
	return url_split(r->decoded, r->parts, HTTP_PARTS_MAX, &r->part_count);
}

static const struct route *find_route(struct req *r)
{
	const struct route *found;

	cut_verb(r);
	if (r->verb.p) {
		struct str *last = &r->parts[r->part_count - 1], whole = *last;
		last->n -= r->verb.n + 1;
		found = scan(r, true);
		if (found || r->allow[0])
			return found;
		*last = whole;
		r->verb = (struct str){ 0 };
	}
	found = scan(r, false);
	if (!found && !r->allow[0] && h_page_exists(r)) {
		if (method_matches("GET", r->method))
			return &page_route;
		add_allowed(r, "GET");
	}
	return found;
}

FALLIBLE enum err routes_find(struct req *r)
{
	bool options = strcmp(r->method, "OPTIONS") == 0;

	if (options && strcmp(r->path, "*") == 0) {
		snprintf(r->allow, sizeof r->allow, "GET, HEAD, POST, PUT, DELETE");
		return OK;
	}
	if (strlen(r->path) > 8192)
		return ERR(URI_TOO_LONG, "a path has at most 8192 bytes");
	TRY(parse_path(r));
	r->route = find_route(r);
	r->row = r->route && r->route != &page_route ? (uint32_t)(r->route - routes) + 1 : 0;
	/* Only routes marked open need no token; any other path, even one that does not exist, is not shown to strangers. */
	if (!r->route || !r->route->open)
		TRY(auth_need(r));
	if (r->route)
		return auth_route(r);
	if (!r->allow[0])
		return ERR(NOT_FOUND, "no resource has this path");
	if (options)
		return OK;
	return ERR(METHOD_NOT_ALLOWED, "%.16s is not possible here, only %s", r->method, r->allow);
}

FALLIBLE enum err routes_options(struct req *r)
{
	size_t n = strlen(r->allow);

	snprintf(r->allow + n, sizeof r->allow - n, ", OPTIONS");
	TRY(req_empty(r, 204));
	return req_header(r, MHD_HTTP_HEADER_ALLOW, r->allow);
}

_Static_assert(sizeof routes / sizeof *routes <= API_ROUTES_MAX, "the table of counts is too small");
