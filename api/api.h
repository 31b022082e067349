/* api.h: what the main program needs of the API: listeners, start, drain, end. Everything runs in the event loop's thread. */
#pragma once
#include "base/err.h"

struct event_base;
struct server;

struct api_options {
	const char *const *listen;          /* "unix:PATH", "HOST:PORT", "PORT" */
	uint32_t listen_count;
	const char *token_path;             /* made when it is not there */
	const char *const *allowed_hosts;   /* beside localhost and IP addresses */
	uint32_t allowed_host_count;
	const char *allow_group;            /* NULL: none; its members need no token on the Unix socket */
	const char *tls_cert, *tls_key;     /* NULL: no TLS */
	bool insecure_http;                 /* allow TCP beyond loopback without TLS */
	const char *web_root;               /* NULL: the page inside the binary */
};

struct api;

/* Binds every listener (a taken port is an error) and begins to answer. */
FALLIBLE enum err api_start(struct event_base *base, struct server *core, const struct api_options *options,
			    struct api **out);
/* "http://127.0.0.1:8427", "unix:///run/dcpd/dcpd.sock"; NULL beyond the last. Ports are the real ones. */
const char *api_url(const struct api *a, uint32_t index);
const char *api_token(const struct api *a);
FALLIBLE enum err api_reload(struct api *a);          /* SIGHUP: reads the token again */
/* Takes no new connections, answers 503 to what would change something, ends streams and waits. */
void api_drain(struct api *a);
bool api_drained(const struct api *a);                /* no connection is left */
void api_free(struct api *a);
