/* guard.c: see guard.h.
 *
 * A web page on another site can make a browser send requests to 127.0.0.1, and with DNS rebinding even read the answers. The
 * token stops most of that; Host and Origin stop it before the token is looked at. Duplicate framing headers are refused here
 * because libmicrohttpd 0.9.75 lets them through and a proxy in front may count the other one. */
#include "api/guard.h"

#include <strings.h>

#include "api/accept.h"
#include "api/api_impl.h"
#include "api/host.h"
#include "api/tokens.h"
#include "server/cluster.h"
#include "server/config.h"
#include "server/journal.h"
#include "server/parts.h"

struct heads {
	unsigned host, length, encoding, type, auth;
	bool spaced;                  /* a name with a space: a proxy in front may take it for the name without */
};

static enum MHD_Result count_head(void *user, enum MHD_ValueKind, const char *key, const char *)
{
	struct heads *n = user;

	n->spaced |= key[strcspn(key, " \t")] != '\0';
	switch (key[0] | 0x20) {
	case 'h':
		n->host += strcasecmp(key, "Host") == 0;
		break;
	case 'c':
		n->length += strcasecmp(key, "Content-Length") == 0;
		n->type += strcasecmp(key, "Content-Type") == 0;
		break;
	case 't':
		n->encoding += strcasecmp(key, "Transfer-Encoding") == 0;
		break;
	case 'a':
		n->auth += strcasecmp(key, "Authorization") == 0;
		break;
	default:
		break;
	}
	return MHD_YES;
}

static FALLIBLE enum err check_host(struct req *r, const char *version, unsigned count)
{
	const char *host = req_head(r, MHD_HTTP_HEADER_HOST), *origin = req_head(r, "Origin");

	if (count > 1)
		return ERR(INVALID_REQUEST, "more than one Host header");
	if (count == 0 && strcmp(version, MHD_HTTP_VERSION_1_0) != 0)
		return ERR(INVALID_REQUEST, "no Host header");
	if (r->caller.over_unix)
		return OK;
	const char *advertised = r->core->config->advertise; /* other nodes call this one so */
	if (host && !(advertised && strcasecmp(host, advertised) == 0) &&
	    !host_ok(str_of(host), r->api->allowed_hosts, r->api->allowed_host_count))
		return ERR(MISDIRECTED, "the Host \"%.100s\" is not ours: see --allowed-host", host);
	if (origin && !host_is_origin(origin, host))
		return ERR(FORBIDDEN, "pages of another origin (%.100s) may not call this API", origin);
	return OK;
}

FALLIBLE enum err guard_head(struct req *r, const char *version)
{
	struct heads n = { 0 };
	const char *auth;

	MHD_get_connection_values(r->conn, MHD_HEADER_KIND, count_head, &n);
	if (n.length > 1 || n.encoding > 1 || n.type > 1 || n.auth > 1)
		return ERR(INVALID_REQUEST, "a header that must be single is given more than once");
	if (n.spaced)
		return ERR(INVALID_REQUEST, "a header's name has a space in it");
	if (!http_body_ends(r))
		return ERR(INVALID_REQUEST, "the only Transfer-Encoding that is understood is chunked");
	if (n.length && n.encoding)
		return ERR(INVALID_REQUEST, "Content-Length and Transfer-Encoding at once");
	TRY(check_host(r, version, n.host));
	if (!tokens_have_own(r->api->tokens) && journal_may_write(r->core->journal) == OK)
		TRY(tokens_read(r->core->config, &r->api->tokens)); /* dcpd was started without space for a token */
	auth = n.auth ? req_head(r, MHD_HTTP_HEADER_AUTHORIZATION) : NULL;
	if (!auth)
		return OK;
	/* A wrong token is an error even where none is needed: the caller thinks it is someone. */
	r->caller.known = r->caller.admin = false;
	bool images_only = cluster_is_reader(r->core->cluster, auth);
	if (images_only || cluster_is_peer(r->core->cluster, auth)) {
		enum err e = auth_of_node(r);
		r->caller.images_only = images_only;
		return e;
	}
	return tokens_find(r->api->tokens, auth, &r->caller);
}

/* Everything below /v1 but event streams and bytes of tensors and images is JSON, lists are lines of JSON too. */
static FALLIBLE enum err check_accept(const struct req *r)
{
	const char *accept = req_head(r, MHD_HTTP_HEADER_ACCEPT), *path = r->route->path;

	if (!accept || strncmp(path, "/v1/", 4) != 0 || str_ends(str_of(path), "/events") ||
	    str_ends(str_of(path), "/{fqn}") || r->route->image ||
	    accept_quality(accept, "application/json") > 0 || strcasestr(accept, "+json") ||
	    (r->route->list && accept_quality(accept, "application/x-ndjson") > 0))
		return OK;
	return ERR(NOT_ACCEPTABLE, "this comes as application/json%s", r->route->list ? " or application/x-ndjson" : "");
}

FALLIBLE enum err guard_body(struct req *r)
{
	const char *length = req_head(r, MHD_HTTP_HEADER_CONTENT_LENGTH), *type = req_head(r, MHD_HTTP_HEADER_CONTENT_TYPE);
	const char *encoding = req_head(r, MHD_HTTP_HEADER_TRANSFER_ENCODING);
	uint64_t bytes = 0;

	if (length && !str_to_u64(str_of(length), &bytes))
		return ERR(INVALID_REQUEST, "Content-Length is no number");
	if (bytes > HTTP_BODY_MAX)
		return ERR(PAYLOAD_TOO_LARGE, "a body has at most %d bytes", HTTP_BODY_MAX);
	TRY(check_accept(r));
	bool has_body = bytes > 0 || encoding;
	if (has_body && r->route->body == ROUTE_NO_BODY)
		return ERR(INVALID_REQUEST, "this request has no body");
	if (!has_body || !type)
		return has_body ? ERR(UNSUPPORTED_MEDIA_TYPE, "Content-Type is missing") : OK;
	if (strncasecmp(type, "application/json", 16) != 0 || (type[16] && !strchr("; \t", type[16])))
		return ERR(UNSUPPORTED_MEDIA_TYPE, "Content-Type is \"%.100s\"", type);
	return OK;
}
