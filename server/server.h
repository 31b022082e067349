/* server.h: the coordinator as a whole: one event loop's thread, and what its modules share.
 *
 * Law: it maps no tensor memory, parses no checkpoint file and never touches checkpoint storage. Whatever may hang or be hostile is
 * asked of a worker process. All functions of server/ belong to the loop's thread unless their header says otherwise; none blocks.
 *
 * What takes time takes a callback. Three rules hold for every callback of server/:
 *   - it is called exactly once, from the loop, and never before the function that took it has returned;
 *   - if its `e` is not OK, err_last() says what is known, as after a direct call;
 *   - what it is given is borrowed: valid during the call only. */
#pragma once
#include <jansson.h>
#include <sys/types.h>
#include "base/buf.h"
#include "base/err.h"
#include "base/str.h"

struct event_base;
struct config;
struct loop;
struct loop_timer;
struct journal;
struct events;
struct metrics;
struct job;
struct storage;
struct storages;
struct sweeps;
struct state_dicts;
struct jobs;
struct gangs;
struct lookups;
struct unread;
struct workers;
struct devices;
struct runs;

/* Who asks, as the socket or the token has proved. Root, the daemon's own uid and the token's holder are `admin`. */
struct principal {
	uid_t uid;
	bool admin;
};

/* The key of a POST that creates, and the bytes that must be the same when it comes again. key.n == 0: none was sent. */
struct idempotency {
	struct str key, body;
};

struct server;

/* What a lower layer tells those above it, which it does not know: server.c sets these before anything runs. */
struct server_hooks {
	/* lookup.c: a worker was killed in a system call on the storage, which is marked as stalled. */
	void (*storage_hangs)(struct server *s, struct storage *st);
	/* gang.c: jobs may have left something in the storage that nobody removes. */
	void (*storage_soiled)(struct server *s, const char *name);
	/* job_end.c: after everybody can see its end. */
	void (*job_ended)(struct job *j);
};

struct server {
	const struct server_hooks *hooks;
	const struct config *config;
	struct event_base *base;
	struct loop *loop;
	struct journal *journal;
	struct events *events;
	struct metrics *metrics;
	struct storages *storages;
	struct sweeps *sweeps;
	struct state_dicts *state_dicts;
	struct jobs *jobs;
	struct gangs *gangs;
	struct unread *unread;
	struct lookups *lookups;
	struct workers *workers;
	struct devices *devices;
	struct runs *runs;
	int64_t started_ms;           /* wall clock */
	uint64_t boot;                /* starts of this state dir, from the journal; 1 at the first */
	bool ready;                   /* journal open, left-overs swept: /readyz */
	bool draining;                /* new work is refused with ERR_DRAINING */
	struct loop_timer *drain_timer;
	int lock_fd;                  /* of the state dir */
};

typedef void (*done_fn)(void *user, enum err e);

/* Opens the journal, takes up what it holds and sweeps left-overs. Work starts as soon as the loop runs. */
FALLIBLE enum err server_new(const struct config *config, struct event_base *base, struct server **out);
/* Refuses new work from now on; running jobs get config->drain_ms to end, then they are kept as queued for the next start. */
void server_drain(struct server *s);
bool server_drained(const struct server *s);
/* SIGHUP: takes the new storages and the log's form over from a configuration read again; the old one stays valid. */
FALLIBLE enum err server_reload(struct server *s, const struct config *fresh);
void server_free(struct server *s);          /* accepts NULL; ends all workers, commits the journal */

bool principal_may(const struct principal *p, uid_t owner);

/* ---- clocks ----
 *
 * The wall clock may jump by any amount at any time, so it is for records that people read and never decides. Two clocks decide:
 *   - CLOCK_MONOTONIC: timeouts within this process.
 *   - service time: leases, stalls, retention, whatever a restart must not forget. It runs while the daemon can hear its clients, and
 *     stands still while it cannot: silence then says nothing about them.
 *       suspend, SIGSTOP, a paused virtual machine: trainers stood still too, or could not be heard; at most 2 s count.
 *       restart: the journal keeps service time (each minute and at the end), the down time does not count, and the leases of ranks
 *       begin anew. A crash may take back a minute: leases end later, never earlier.
 *       reboot: as a restart. /dev/shm is empty then, so state dicts have nothing left to keep; jobs are kept a little longer. */
int64_t clock_wall_ms(void);                 /* since 1970 */
int64_t clock_mono_ms(void);
int64_t clock_service_ms(void);              /* above 0 */
void clock_service_begin(int64_t ms);        /* as the journal has it; once, before the first reading */
int64_t clock_service_wall(int64_t service_ms);      /* what the wall clock shows, showed or will show then: for records */
/* "2026-11-21T09:36:08.120Z"; out holds at least CLOCK_TEXT_MAX bytes. */
enum { CLOCK_TEXT_MAX = 32 };
const char *clock_text(int64_t wall_ms, char out[CLOCK_TEXT_MAX]);
