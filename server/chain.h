/* chain.h: chains: jobs that follow each checkpoint of a run when it has become durable: verify, export, copy, delete, in order.
 *
 * An execution (one chain, one checkpoint) is in the journal with the end of the job that made the checkpoint, in one transaction, and each
 * of its jobs is made with a key of execution, step and try: whatever is killed when, every step runs once. One execution of a chain
 * runs at a time. "behind" says what becomes of those that wait: of "newest" only the newest waits, the others are skipped; of "all" they
 * wait in order, FOLLOWER_QUEUE_MAX at most.
 *
 * The document: {"storage","match"?,"steps","behind"?,"retries"?}. Jobs run as the uid that set the chain. What a chain makes may start
 * other chains, CHAIN_DEPTH_MAX deep, and never the chain itself; a circle of chains is refused when it is set. */
#pragma once
#include "server/events.h"
#include "server/follower.h"

struct server;

enum { CHAIN_DEPTH_MAX = 4 };

FALLIBLE enum err chains_new(struct server *s);
void chains_free(struct server *s);
/* A checkpoint is durable: each chain that is about it gets an execution, in the transaction. */
void chains_note(struct server *s, struct journal_txn *t, const struct happening *h);
/* Once that is on disk. job: the one that has ended; NULL: none. */
void chains_wake(struct server *s, const char *job);

/* Calls fn for each checkpoint that an execution is about which runs or waits: its steps will read it. */
typedef void (*chain_ref_fn)(void *user, struct str storage, struct str name);
FALLIBLE enum err chains_each_ref(const struct server *s, chain_ref_fn fn, void *user);
