/* listen.h: the sockets that the API listens on. */
#pragma once
#include "api/http.h"

enum { LISTEN_GIVEN_MAX = 16 };

/* "unix:PATH", "HOST:PORT", "[v6]:PORT" or "PORT" (on 127.0.0.1; 0: any). ERR_CONFIG for a bad address, a taken port, or TCP beyond
 * loopback without TLS. group: owner of a Unix socket, (gid_t)-1 for none. */
FALLIBLE enum err listen_open(const char *address, bool tls, bool insecure, gid_t group, struct http_listener *out);
/* Says of an address what listen_open would say of its form, without listening. */
FALLIBLE enum err listen_check(const char *address, bool tls, bool insecure);
/* Sockets on which a service manager listens for this process (socket activation, sd_listen_fds(3)), until they are used. */
struct listen_given {
	int fd[LISTEN_GIVEN_MAX];
	uint32_t count;
};
/* Takes them over: once, before processes are started. ERR_CONFIG for what is no listening stream socket. */
FALLIBLE enum err listen_given_take(struct listen_given *out);
/* Fills *out with the one that has this address, which listen_check has accepted. out->fd is -1 if there is none; else the
 * caller closes it, after an error too. */
FALLIBLE enum err listen_given_use(struct listen_given *g, const char *address, bool tls, struct http_listener *out);
/* Closes those that no address has asked for: ERR_CONFIG names one. Clients of such a socket would wait for ever. */
FALLIBLE enum err listen_given_end(struct listen_given *g);
/* Closes, and removes a Unix socket's file. */
void listen_close(struct http_listener *l);
