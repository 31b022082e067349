/* listen.h: the sockets that the API listens on. */
#pragma once
#include "api/http.h"

/* "unix:PATH", "HOST:PORT", "[v6]:PORT" or "PORT" (on 127.0.0.1; 0: any). ERR_CONFIG for a bad address, a taken port, or TCP beyond
 * loopback without TLS. group: owner of a Unix socket, (gid_t)-1 for none. */
FALLIBLE enum err listen_open(const char *address, bool tls, bool insecure, gid_t group, struct http_listener *out);
/* Says of an address what listen_open would say of its form, without listening. */
FALLIBLE enum err listen_check(const char *address, bool tls, bool insecure);
/* Closes, and removes a Unix socket's file. */
void listen_close(struct http_listener *l);
