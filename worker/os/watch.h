/* watch.h: a descriptor that an event loop (libevent) watches. The watch owns the descriptor: nothing else closes it.
 *
 *     watch_new(base, &fd, on_read, on_write, user, &w)   moves fd into the watch (fd becomes -1) unless it fails
 *     watch_reads(w, true)                                on_read(user) from now on, as long as the descriptor is readable
 *     watch_writes(w, true)                               the same for on_write
 *     watch_free(&w)                                      takes the events out of the loop, then closes; NULL inside is fine
 *     watch_take(&w)                                      takes the events out of the loop and returns the descriptor
 *
 * libevent keeps a table of its own, by number, of what it has told epoll. If a watched descriptor is closed, epoll forgets it and
 * that table does not: the next file with this number is taken for registered, and none of its events ever arrives. So no other
 * module puts an event on a descriptor (make tidy checks it). A callback may free its own watch. */
#pragma once
#include "base/err.h"

struct event_base;
struct watch;
typedef void (*watch_fn)(void *user);

/* on_write may be NULL if watch_writes is never called. Both are off at first. */
FALLIBLE enum err watch_new(struct event_base *base, int *fd, watch_fn on_read, watch_fn on_write, void *user, struct watch **out);
void watch_free(struct watch **w);
int watch_take(struct watch **w);
int watch_fd(const struct watch *w);                    /* borrowed; -1 if w is NULL */
/* Turning off what is off, or what is no watch any more (NULL), is fine. */
FALLIBLE enum err watch_reads(struct watch *w, bool on);
FALLIBLE enum err watch_writes(struct watch *w, bool on);
bool watch_is_writing(const struct watch *w);           /* on_write is due as soon as the descriptor is writable */
