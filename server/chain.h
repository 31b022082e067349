/* chain.h: chains: jobs that follow each checkpoint of a run when it has become durable: verify, export, copy, delete, in order.
 *
 * An execution (one chain, one checkpoint) is in the journal with the end of the job that made the checkpoint, in one transaction, and each
 * of its jobs is made with a key of execution, step and try: whatever is killed when, every step runs once. One execution of a chain
 * runs at a time. "behind" says what becomes of those that wait: of "newest" only the newest waits, the others are skipped; of "all" they
 * wait in order, FOLLOWER_QUEUE_MAX at most.
 *
 * Jobs run as the uid that set the chain. What a chain makes may start other chains, CHAIN_DEPTH_MAX deep, and never the chain itself; a
 * circle of chains is refused when it is set. */
#pragma once
#include "base/buf.h"
#include "server/events.h"
#include "server/follower.h"
#include "server/principal.h"

struct server;
struct chains;

enum { CHAIN_DEPTH_MAX = 4 };

FALLIBLE enum err chains_new(struct server *s);
void chains_free(struct chains *all);
/* A checkpoint is durable: each chain that is about it gets an execution, in the transaction. */
void chains_note(struct server *s, struct journal_txn *t, const struct happening *h);
/* Once that is on disk. job: the one that has ended; NULL: none. */
void chains_wake(struct server *s, const char *job);

/* Calls fn for each checkpoint that an execution is about which runs or waits: its steps will read it. */
typedef void (*chain_ref_fn)(void *user, struct str storage, struct str name);
FALLIBLE enum err chains_each_ref(const struct server *s, chain_ref_fn fn, void *user);

/* ---- for handlers ---- */

/* size: of the page, which begins behind the name `after` (n == 0: at the start). */
FALLIBLE enum err chains_put(struct server *s, struct str after, uint32_t size, struct buf *out);
FALLIBLE enum err chain_put(struct server *s, struct str name, struct buf *out);      /* with "status" */
/* Checks {"storage","match"?,"steps","behind"?,"retries"?} and keeps it, as set by `who`. An admin, or who set it, may change it. */
void chain_set(struct server *s, const struct principal *who, struct str name, const json_t *doc, done_fn fn, void *user);
/* A job that the chain has running is not cancelled. */
void chain_delete(struct server *s, const struct principal *who, struct str name, done_fn fn, void *user);
FALLIBLE enum err chain_put_executions(struct server *s, struct str name, const struct follower_page *page, struct buf *out);
