/* unread.h: bytes of answers that are made, or being made, and that their clients have not read yet: slices and places of boxes (memfds),
 * lists, plans, records. All clients together hold at most UNREAD_MAX, so that clients that ask and do not read cannot use up the host's
 * memory. An answer larger than that is made when no other is there. Small answers are not counted: HTTP_CONNECTIONS_MAX bounds them. */
#pragma once
#include "server/loop.h"


enum { UNREAD_SMALL = 16 << 10, UNREAD_MAX = 256 << 20 };

struct unread;

FALLIBLE enum err unread_new(struct loop *loop, struct unread **out);
void unread_free(struct unread *u);
/* fn(user) is called from the loop after unread_give() has made room. One listener: the look-ups, whose questions wait for room. */
void unread_listen(struct unread *u, done_fn fn, void *user);

bool unread_take(struct unread *u, uint64_t bytes);                        /* false: no room now */
void unread_add(struct unread *u, uint64_t bytes);                         /* counts an answer that has to be given in any case */
void unread_shrink(struct unread *u, uint64_t taken, uint64_t needed);     /* of what was taken only so much is needed */
void unread_give(struct unread *u, uint64_t taken);                        /* the client has read the answer, or is gone */
uint64_t unread_bytes(const struct unread *u);
