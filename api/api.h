/* api.h: what the main program needs of the API: start, drain, end. Everything runs in the event loop's thread. */
#pragma once
#include "base/err.h"

struct server;
struct config;
struct api;
struct listen_given;

/* --check-config: whether api_start could make sense of it. Binds nothing. */
FALLIBLE enum err api_check(const struct config *c);
/* Binds every listener of core->config (a taken port is an error), makes the token file if there is none, and begins to answer
 * as soon as the loop runs. Addresses whose sockets are given are not bound; one that no listener wants is an error. */
FALLIBLE enum err api_start(struct server *core, struct listen_given *given, struct api **out);
/* "http://127.0.0.1:8427", "unix:///run/dcpd/dcpd.sock", with the real port; NULL beyond the last. */
const char *api_url(const struct api *a, uint32_t index);
FALLIBLE enum err api_reload(struct api *a);          /* SIGHUP: reads the token again */
/* Takes no new connections, answers 503 to what would change something, ends streams and waits. Call once drained or late:
 * until then clients may still watch their jobs end. */
void api_drain(struct api *a);
bool api_drained(const struct api *a);                /* no connection is left */
void api_free(struct api *a);                         /* accepts NULL; before server_free */
