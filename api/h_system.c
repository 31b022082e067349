/* h_system.c: the daemon itself: health, metrics, capabilities, its contract and its page. */
#include <stdio.h>

#include "api/api_impl.h"
#include "api/assets.h"
#include "api/guard.h"
#include "api/h_common.h"
#include "api/handlers.h"
#include "api/counts.h"
#include "server/parts.h"
#include "spec/kinds.h"
#include "base/mem.h"
#include "os/fs.h"
#include "server/audit.h"
#include "server/cluster.h"
#include "server/config.h"
#include "server/devices.h"
#include "server/doctor_report.h"
#include "server/gang.h"
#include "server/job.h"
#include "server/server.h"
#include "server/journal.h"
#include "server/metrics.h"
#include "server/state_dict.h"
#include "server/storage.h"

enum { FILE_MAX = 8 << 20, NAME_MAX_ = 512 };

FALLIBLE enum err h_livez(struct req *r)
{
	struct buf b = BUF_INIT(64);

	cluster_probe_heard(r->core->cluster, req_head(r, CLUSTER_PROBE_HEAD));
	buf_puts(&b, "{\"status\":\"alive\"}");
	return req_json(r, 200, &b);
}

/* etcd's words, keys and address are for callers who may see them. */
static void put_cluster_warnings(const struct req *r, bool is_first, struct buf *out)
{
	const char *apart = cluster_problem(r->core->cluster), *odd;
	char text[900];

	if (apart) {
		snprintf(text, sizeof text, "this node is not in its cluster, and goes on with its own work: %s",
			 r->caller.known ? apart : "dcpctl nodes says why");
		buf_puts(out, is_first ? "" : ",");
		buf_json_str(out, str_of(text));
	}
	for (uint32_t i = 0; r->caller.known && (odd = cluster_oddity(r->core->cluster, i)); i++) {
		buf_puts(out, is_first && !apart && i == 0 ? "" : ",");
		buf_json_str(out, str_of(odd));
	}
}

FALLIBLE enum err h_readyz(struct req *r)
{
	struct buf b = BUF_INIT(2 * CONFIG_PATH_MAX);

	if (r->core->draining || http_draining(r->api->http))
		return ERR(DRAINING, "the daemon is shutting down");
	if (!r->core->ready) {
		buf_puts(&b, "{\"status\":\"starting\"}");
		return req_json(r, 503, &b);
	}
	const char *unconfined = gang_unconfined(r->core->gangs);
	bool full = journal_may_write(r->core->journal) != OK;
	bool apart = cluster_problem(r->core->cluster) != NULL;
	buf_printf(&b, "{\"status\":\"%s\",\"warnings\":[", full || apart ? "degraded" : "ready");
	if (full)
		buf_json_str(&b, str_of(err_last()->text));
	if (unconfined) {
		char text[300];
		snprintf(text, sizeof text, "workers are not confined to the storages: no Landlock; and no mount namespace: %s",
			 unconfined);
		buf_puts(&b, full ? "," : "");
		buf_json_str(&b, str_of(text));
	}
	put_cluster_warnings(r, !full && !unconfined, &b);
	buf_puts(&b, "]}");
	return req_json(r, 200, &b);
}

FALLIBLE enum err h_metrics(struct req *r)
{
	const char *accept = req_head(r, MHD_HTTP_HEADER_ACCEPT);
	bool open_metrics = accept && strstr(accept, "application/openmetrics-text");
	struct buf b = BUF_INIT(16 << 20);

	counts_flush(r->api);
	server_measure(r->core);
	metrics_render(r->core->metrics, open_metrics, &b);
	return req_bytes(r, 200, open_metrics ? "application/openmetrics-text; version=1.0.0; charset=utf-8"
					      : "text/plain; version=0.0.4; charset=utf-8", &b);
}

FALLIBLE enum err h_capabilities(struct req *r)
{
	CLEANUP(buf_free) struct buf b = BUF_INIT(1 << 20);
	uint64_t limit = 0, used = 0, unused = 0;

	state_dict_shm(r->core->state_dicts, &limit, &used, &unused);
	buf_puts(&b, "{\"version\":\"" DCPD_VERSION "\",\"api\":\"v1\",\"kinds\":[");
	for (size_t i = 0; i < JOB_KIND_COUNT; i++)
		buf_printf(&b, "%s\"%s\"", i ? "," : "", kind_names[i]);
	buf_puts(&b, "],\"formats\":{\"read\":[\"dcp\"],\"write\":[\"dcp\",\"safetensors\"]}");
	buf_printf(&b, ",\"limits\":{\"body_bytes\":%d,\"world_size\":%d,\"name_parts\":%d,\"name_part_bytes\":%d,"
		       "\"page_size\":%d,\"jobs_waiting\":%ju}",
		   HTTP_BODY_MAX, STATE_DICT_WORLD_MAX, REF_COMPONENTS_MAX, REF_COMPONENT_BYTES_MAX, H_PAGE_MAX,
		   (uintmax_t)r->core->config->queue_max);
	buf_printf(&b, ",\"workers\":%ju,\"shm\":{\"limit_bytes\":%ju,\"used_bytes\":%ju,\"free_bytes\":%ju,\"orphaned_bytes\":%ju},"
		       "\"host\":",
		   (uintmax_t)r->core->config->workers, (uintmax_t)limit, (uintmax_t)used, (uintmax_t)unused,
		   (uintmax_t)state_dict_orphaned(r->core->state_dicts));
	TRY(gang_put_capabilities(r->core->gangs, &b));
	buf_putc(&b, ',');
	TRY(devices_put(r->core->devices, &b));
	buf_printf(&b, ",\"uid\":%u,\"admin\":%s,\"scope\":\"%s\"", (unsigned)r->caller.uid, r->caller.admin ? "true" : "false",
		   auth_scope_names[r->caller.scope]);
	if (r->caller.token[0])
		buf_json_member(&b, ",\"token\":", str_of(r->caller.token));
	buf_putc(&b, '}');
	return req_json(r, 200, &b);
}

FALLIBLE enum err h_doctor(struct req *r)
{
	CLEANUP(buf_free) struct buf b = BUF_INIT(1 << 20);

	TRY(doctor_report(r->core, &b));
	return req_json(r, 200, &b);
}

#define TRANSFORMS "api/transforms/"

/* The name of a ready set of conversion rules, "llama-hf-to-megatron"; n 0: the asset is something else. */
static struct str transform_name(const struct asset *a)
{
	struct str path = str_of(a->path), prefix = STR(TRANSFORMS), end = STR(".json");

	if (!str_starts(path, prefix.p) || !str_ends(path, end.p))
		return (struct str){ path.p, 0 };
	return (struct str){ path.p + prefix.n, path.n - prefix.n - end.n };
}

/* Each set with its description and its vars, without the rules. */
FALLIBLE enum err h_transforms(struct req *r)
{
	CLEANUP(json_decrefp) json_t *doc = json_pack("{s:[]}", "transforms");
	enum err e = doc ? OK : ERR(NO_MEMORY, "no memory for the list");

	for (const struct asset *a = assets; !e && a->path; a++) {
		struct str name = transform_name(a);
		json_t *set = NULL;
		if (name.n == 0)
			continue;
		e = jval_parse((struct str){ (const char *)a->begin, (size_t)(a->end - a->begin) }, &set);
		if (!e && (json_object_del(set, "transform") != 0 || json_object_set_new(set, "name", json_stringn(name.p, name.n)) != 0 ||
			   json_array_append(json_object_get(doc, "transforms"), set) != 0))
			e = ERR(NO_MEMORY, "no memory for the list");
		json_decref(set);
	}
	return e ?: req_json_doc(r, 200, doc);
}

FALLIBLE enum err h_transform(struct req *r)
{
	for (const struct asset *a = assets; a->path; a++)
		if (r->parts[2].n && str_eq(transform_name(a), r->parts[2]))
			return assets_send(r, "application/json", a);
	return ERR(NOT_FOUND, "there is no ready set of conversion rules \"%.*s\": GET /v1/transforms lists them",
		   (int)(r->parts[2].n < 100 ? r->parts[2].n : 100), r->parts[2].p);
}

FALLIBLE enum err h_openapi(struct req *r)
{
	const struct asset *a = assets_find("api/openapi.yaml");

	return a ? assets_send(r, "application/yaml", a) : ERR(NOT_FOUND, "this build has no openapi.yaml");
}

/* "css/x.css" of a path like /css/x.css, below web/; "index.html" for /. false: no such name is possible. */
static bool page_name(const struct req *r, char out[NAME_MAX_])
{
	size_t n = 0;

	out[0] = '\0';
	for (uint32_t i = 0; i < r->part_count; i++) {
		struct str p = r->parts[i];
		if (p.n == 0 || p.p[0] == '.' || memchr(p.p, '/', p.n) || n + p.n + 2 > NAME_MAX_)
			return false;
		n += (size_t)snprintf(out + n, NAME_MAX_ - n, "%s%.*s", i ? "/" : "", (int)p.n, p.p);
	}
	if (n == 0)
		snprintf(out, NAME_MAX_, "index.html");
	else if (strcmp(out, "docs") == 0)
		snprintf(out, NAME_MAX_, "docs.html");
	return true;
}

/* The file in the binary. The API's page reads the contract without a token: it is the same for everybody. */
static const struct asset *find_page_asset(const char *name)
{
	char path[NAME_MAX_ + 8];

	if (strcmp(name, "docs/openapi.yaml") == 0)
		return assets_find("api/openapi.yaml");
	snprintf(path, sizeof path, "web/%s", name);
	return assets_find(path);
}

static bool is_of_web_root(const struct req *r, const char *name)
{
	return r->api->web_root && strcmp(name, "docs/openapi.yaml") != 0;
}

/* With --web-root the files come from there, read anew each time: that is for those who write the page. */
static FALLIBLE enum err read_web_root(const struct req *r, const char *name, void **bytes_out, uint64_t *n_out)
{
	CLEANUP(fs_drop) int root = -1;

	TRY(fs_open_root(r->api->web_root, &root));
	return fs_read_all(root, name, FILE_MAX, bytes_out, n_out);
}

bool h_page_exists(const struct req *r)
{
	char name[NAME_MAX_];
	void *file = NULL;
	uint64_t n = 0;

	if (!page_name(r, name))
		return false;
	if (is_of_web_root(r, name)) {
		bool there = read_web_root(r, name, &file, &n) == OK;
		mem_free(file);
		return there;
	}
	return find_page_asset(name) != NULL;
}

FALLIBLE enum err h_audit(struct req *r)
{
	struct buf b = BUF_INIT(16 << 20);
	struct h_page page;

	if (!r->caller.admin)
		return ERR(FORBIDDEN, "the audit is for root, dcpd's own user and tokens with the scope admin");
	TRY(h_page_query(r, &page));
	enum err e = audit_list(r->core, page.token, page.size, &b);
	if (e) {
		buf_free(&b);
		return e;
	}
	return req_json(r, 200, &b);
}

static const char *content_type_of(const char *name)
{
	static const char *const types[][2] = {
		{ ".html", "text/html; charset=utf-8" },      { ".js", "text/javascript; charset=utf-8" },
		{ ".css", "text/css; charset=utf-8" },        { ".svg", "image/svg+xml" },
		{ ".png", "image/png" },                      { ".ico", "image/x-icon" },
		{ ".json", "application/json" },              { ".woff2", "font/woff2" },
		{ ".txt", "text/plain; charset=utf-8" },      { ".yaml", "application/yaml" },
	};

	for (size_t i = 0; i < sizeof types / sizeof *types; i++)
		if (str_ends(str_of(name), types[i][0]))
			return types[i][1];
	return "application/octet-stream";
}

FALLIBLE enum err h_page(struct req *r)
{
	char name[NAME_MAX_];
	void *file = NULL;
	uint64_t n = 0;

	if (!page_name(r, name))
		return ERR(NOT_FOUND, "the page has no such file");
	if (is_of_web_root(r, name)) {
		TRY(read_web_root(r, name, &file, &n));
		struct buf b = BUF_INIT(FILE_MAX);
		buf_put(&b, file, n);
		mem_free(file);
		return req_page(r, content_type_of(name), &b);
	}
	const struct asset *a = find_page_asset(name);
	return a ? assets_send(r, content_type_of(name), a) : ERR(NOT_FOUND, "the page has no such file");
}
