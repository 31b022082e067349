/* client.h: HTTP to the daemon, by libcurl. */
#pragma once
#include <jansson.h>
#include "base/buf.h"
#include "base/err.h"

struct client;

extern bool client_json;        /* --json: failures are printed as JSON too */

struct answer {
	long status;
	struct buf body;
	json_t *json;               /* if the body is JSON; its own reference */
	char dtype[32], shape[256]; /* of a tensor */
};

/* url: --url or NULL; then DCPD_URL, then the usual sockets. */
FALLIBLE enum err client_new(const char *url, struct client **out);
void client_free(struct client *c);
void client_limit(struct client *c, long ms);         /* of each request from now on */
const char *client_url(const struct client *c);
/* body NULL: none. Any failure to reach the daemon is ERR_SYSTEM, see client_unreachable; ERR_CANCELLED after client_stop.
 * A problem of the daemon is this thread's latest error, its code returned. */
FALLIBLE enum err client_call(struct client *c, const char *method, const char *path, const json_t *body, struct answer *out);
FALLIBLE enum err client_get(struct client *c, const char *path, struct answer *out);
void client_drop(struct answer *a);
/* The problem of the latest failure, if the daemon sent one; borrowed. NULL otherwise. */
const json_t *client_problem(const struct client *c);
/* Was the latest failure that nobody answers? */
bool client_unreachable(const struct client *c);
/* Writes an answer of any size to fd as it comes; what does not come for a while is given up. */
FALLIBLE enum err client_save(struct client *c, const char *path, int fd);
/* An endless answer, line by line, until fn returns false or *stop is not 0. */
FALLIBLE enum err client_lines(struct client *c, const char *path, bool (*fn)(void *user, const char *line), void *user);
/* Appends `format`, in which each % stands for the next argument, percent-encoded; nothing at all if one of them is NULL. */
void client_put(struct buf *b, const char *format, ...);
/* Ends what client_put made, so that b->p is the path. */
FALLIBLE enum err client_end(struct buf *b);
FALLIBLE enum err client_get_at(struct client *c, struct buf *path, struct answer *out);    /* client_end, then client_get */
/* Set by the signal handler: requests under way are given up. */
extern volatile int client_stop;
