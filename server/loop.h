/* loop.h: what other threads use to get back into the event loop, and timers.
 *
 * All functions of server/ belong to the loop's thread unless their header says otherwise; none blocks.
 * A call that takes time takes a callback. Three rules hold for every callback of server/:
 *   - it is called exactly once, from the loop, and never before the function that took it has returned;
 *   - if its `e` is not OK, err_last() says what is known, as after a direct call;
 *   - what it is given is borrowed: valid during the call only. */
#pragma once
#include "base/err.h"
#include "os/watch.h"

struct event_base;
struct loop;

typedef void (*done_fn)(void *user, enum err e);

FALLIBLE enum err loop_new(struct event_base *base, struct loop **out);
void loop_free(struct loop *l);               /* drops what was posted and not yet run */

typedef void (*loop_fn)(void *user);
/* From any thread: fn(user) will run in the loop, in the order of posting. */
void loop_post(struct loop *l, loop_fn fn, void *user);
/* As loop_post, for the loop's own thread, with an outcome to hand over: fn(user, e), err_last() as it is now. */
void loop_later(struct loop *l, void (*fn)(void *user, enum err e), void *user, enum err e);
/* Runs everything posted so far; for tests and for the end. */
void loop_run_posted(struct loop *l);

struct loop_timer;
/* Runs fn(user) once after `ms`. The timer is gone when fn is called. Deadlines and retries stand on timers, so starting one never
 * fails: without memory for it, it starts as soon as there is some. */
void loop_timer_start(struct loop *l, int64_t ms, loop_fn fn, void *user, struct loop_timer **out);
/* Runs fn(user) every `ms` until it is stopped. */
FALLIBLE enum err loop_every(struct loop *l, int64_t ms, loop_fn fn, void *user, struct loop_timer **out);
void loop_timer_stop(struct loop_timer **t);            /* NULL inside is fine */

/* Calls fn(user) again and again while the descriptor is readable. It is moved into the watch unless this fails. */
FALLIBLE enum err loop_watch(struct loop *l, int *fd, loop_fn fn, void *user, struct watch **out);
