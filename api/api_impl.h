/* api_impl.h: what the files of api/ share; nobody else includes it. */
#pragma once
#include <sys/types.h>
#include "api/api.h"
#include "api/http.h"

enum { API_TOKEN_MAX = 256, API_LISTENERS_MAX = 16, API_ROUTES_MAX = 64, API_CODES = 6 };

struct api {
	struct server *core;
	struct http *http;
	struct http_listener listeners[API_LISTENERS_MAX];
	uint32_t listener_count;
	const char *const *allowed_hosts;
	uint32_t allowed_host_count;
	const char *web_root;
	char token[API_TOKEN_MAX];
	gid_t group;
	bool has_group;
	char *tls_cert_pem, *tls_key_pem;
	uint64_t answered[API_ROUTES_MAX][API_CODES]; /* by route (the last row: none) and status / 100 */
	struct streams *streams;           /* stream.c: open event streams */
	struct answers *answers;           /* answers.c: job records ready to be sent */
};
