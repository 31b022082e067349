/* api_impl.h: what the files of api/ share; nobody else includes it. */
#pragma once
#include <sys/types.h>
#include "api/http.h"

enum { API_LISTENERS_MAX = 16, API_ROUTES_MAX = 128, API_CODES = 6 };

struct route_count {
	const struct route *route;
	uint64_t codes[API_CODES];         /* by status / 100 */
};

struct api {
	struct server *core;
	struct http *http;
	struct http_listener listeners[API_LISTENERS_MAX];
	uint32_t listener_count;
	const char *const *allowed_hosts;
	uint32_t allowed_host_count;
	const char *web_root;
	struct tokens *tokens;
	uint64_t next_id;                  /* request_id.c */
	gid_t group;
	bool has_group;
	char *tls_cert_pem, *tls_key_pem;
	struct route_count answered[API_ROUTES_MAX];  /* by row of the table of routes, from 1; 0: none */
	struct streams *streams;           /* stream.c: open event streams */
	struct assets_packed *packed;      /* assets.c: compressed files of the page */
	struct answers *answers;           /* answers.c: job records ready to be sent */
};
