/* cluster.h: this daemon as a node of a cluster on etcd. Without --cluster there is no struct cluster, and all functions take NULL.
 *
 *   PREFIX/cluster        which cluster this is; made by its first node, with
 *   PREFIX/secret         what nodes prove themselves to each other with
 *   PREFIX/members/NAME   a node that has joined once: its daemon's id, address, storages; stays
 *   PREFIX/alive/NAME     the same node now: bound to the lease that it keeps alive every third of --cluster-ttl
 *   PREFIX/drained/NAME   an operator's wish: no new work there
 *
 * A node is `joined`, `draining` (some jobs have not ended), `drained`, or `away` (its lease is over). While etcd cannot be reached a node
 * goes on with its work: only the others see it as away. A name belongs to the state directory that holds its lease; a daemon that is
 * restarted takes its own over at once. */
#pragma once
#include "base/buf.h"
#include "server/loop.h"

struct cluster;
struct metrics;
struct server;

/* Joins, for START_MS at most: a cluster that does not answer is asked again and again. ERR_CONFIG: it answers, and refuses this daemon:
 * its name is another's, the state directory is of another cluster, or the prefix is not dcpd's. */
FALLIBLE enum err cluster_new(struct server *s, struct cluster **out);
void cluster_leave(struct cluster *c);                /* gives the lease back, if etcd answers soon */
void cluster_free(struct cluster *c);                 /* after it nothing that was posted to the loop may run */
const char *cluster_problem(const struct cluster *c); /* why this node is not in the cluster now; NULL: it is, or there is none */
/* May a request begin work here? Once this node is to be drained only what concerns its own shared memory may: a trainer's save is never
 * refused. ERR_DRAINING. */
FALLIBLE enum err cluster_may_begin(const struct cluster *c, bool in_memory);
void cluster_fill(const struct cluster *c, struct metrics *m);

/* Appends {"node","nodes":[…]}, or one node. ERR_NOT_FOUND, ERR_UNSUPPORTED: no cluster. */
FALLIBLE enum err cluster_put_nodes(const struct cluster *c, struct buf *out);
FALLIBLE enum err cluster_put_node(const struct cluster *c, struct str name, struct buf *out);
/* Sets or lifts the wish, then waits for so long until the node is drained, or joined; fn hears OK in both cases. ERR_NOT_FOUND,
 * ERR_CLUSTER_UNAVAILABLE, ERR_UNSUPPORTED. */
void cluster_drain(struct server *s, struct str name, bool drain, int64_t wait_ms, done_fn fn, void *user);
