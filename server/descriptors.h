/* descriptors.h: file descriptors that a client has handed over for a request that is still to come, such as those of device memory; and
 * one that a client is given.
 *
 * HTTP's library reads a socket without ancillary data, so descriptors do not travel with a request: a connection to the Unix socket is
 * upgraded (api/device-memory.md), the client sends descriptors over it, and requests name them by the connection's token. They are held as
 * long as that connection is open, so a client that dies leaves none behind. */
#pragma once
#include <sys/types.h>
#include "server/loop.h"
#include "server/principal.h"

enum { DESCRIPTORS_MAX = 4096, DESCRIPTORS_PARKS_MAX = 512, DESCRIPTORS_TOKEN_MAX = 33 };

struct descriptors;
struct descriptors_park;

FALLIBLE enum err descriptors_new(struct loop *loop, struct descriptors **out);
void descriptors_free(struct descriptors *d);
/* Whether this user may open one more. ERR_BUSY: the user has half of what other users leave. */
FALLIBLE enum err descriptors_check(const struct descriptors *d, const struct principal *who);
/* Takes the socket over unless this fails, and tells the client its token: {"descriptors":"…"} and a line feed.
 * ERR_BUSY as descriptors_check. */
FALLIBLE enum err descriptors_open(struct descriptors *d, int *socket, const struct principal *who);
/* Holds the descriptors that have come by now under this token, which must be of the same user, until descriptors_drop. ERR_NOT_FOUND. */
FALLIBLE enum err descriptors_hold(struct descriptors *d, const struct principal *who, struct str token, struct descriptors_park **out);
const int *descriptors_of(const struct descriptors_park *p, uint32_t *count_out);
/* Sends the client of this token a descriptor over its connection, once for each connection; fd stays the caller's. gone(user) is called
 * when the connection ends. ERR_NOT_FOUND; ERR_STATE_CONFLICT: it was sent one before. */
FALLIBLE enum err descriptors_give(struct descriptors *d, const struct principal *who, struct str token, int fd, loop_fn gone, void *user);
void descriptors_drop(struct descriptors_park **p);              /* NULL inside is fine */
