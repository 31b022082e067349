/* cluster.h: this daemon as a node of a cluster on etcd. Without --cluster there is no struct cluster, and all functions take NULL.
 *
 *   PREFIX/cluster        which cluster this is; made by its first node, with
 *   PREFIX/secret         what nodes prove themselves to each other with
 *   PREFIX/members/NAME   a node that has joined once: its daemon's id, address, storages; stays
 *   PREFIX/alive/NAME     the same node now: bound to the lease that it keeps alive every third of --cluster-ttl
 *   PREFIX/drained/NAME   an operator's wish: no new work there
 *   PREFIX/keys/HASH      the node and the job of an Idempotency-Key
 *   PREFIX/withdrawn/NAME/JOB   a checkpoint that came to an end while the node was away (cluster_withdraw.c)
 *
 * A node is `joined`, `draining` (some jobs have not ended), `drained`, or `away` (its lease is over). While etcd cannot be reached a node
 * goes on with its work: only the others see it as away. A name belongs to the state directory that holds its lease; a daemon that is
 * restarted takes its own over at once. */
#pragma once
#include <jansson.h>

#include "base/buf.h"
#include "server/courier.h"
#include "server/job.h"
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
/* Names a fault that a person is to mend, though this node is in the cluster: it is not at the address that it advertises, a node is not
 * reached from here, etcd has values that dcpd did not write. index: of those that there are, from 0. NULL: no more. */
const char *cluster_oddity(const struct cluster *c, uint32_t index);
/* The header of a request by which a daemon finds itself at the address that it advertises (cluster_probe.c). */
#define CLUSTER_PROBE_HEAD "Dcpd-Probe"
void cluster_probe_heard(struct cluster *c, const char *head);      /* NULL: a request without it */

/* ---- other nodes (cluster_forward.c) ---- */
enum { CLUSTER_HEADERS_MAX = 8, CLUSTER_NODE_TEXT = 65 };
bool cluster_is_peer(const struct cluster *c, const char *authorization);   /* the header of a request: does a node send it? */
/* The node that has the job, by the mark at its id's end. NULL: this one, or nobody that is known. */
const char *cluster_owner(const struct cluster *c, struct str id);
/* The next node that is not this one; *index_io: 0 at first. NULL: there is none. */
const char *cluster_other(const struct cluster *c, uint32_t *index_io);
/* The node with the fewest jobs that takes work and has all of these storages. ERR_DRAINING: there is none. */
FALLIBLE enum err cluster_taker(const struct cluster *c, const char *const *storages, size_t count, const char **node_out);
bool cluster_is_drained(const struct cluster *c);
/* The node that takes work and is the index-th behind this one, in a circle, by name; NULL: there are not so many. */
const char *cluster_neighbour(const struct cluster *c, uint32_t index);

/* ---- state dicts of other nodes (cluster_images.c) ---- */
/* The header in which a node says for whom it asks: uid, scope, "1" for an administrator, name of the token. */
#define CLUSTER_CALLER_HEAD "Dcpd-Caller"
bool cluster_is_reader(const struct cluster *c, const char *authorization); /* … does a worker of a node send it, which may read images? */
/* The secret of a group that nodes make for a load (spread.h): of the cluster's secret and the group's name. ERR_CLUSTER_UNAVAILABLE. */
enum { CLUSTER_GROUP_SECRET_TEXT = 65 };
FALLIBLE enum err cluster_make_secret(const struct cluster *c, const char *id, char out[CLUSTER_GROUP_SECRET_TEXT]);
/* The storage that stands for the node's state dicts, to workers alone. ERR_NOT_FOUND, ERR_CLUSTER_UNAVAILABLE. */
FALLIBLE enum err cluster_storage(struct server *s, const char *node, const char **storage_out);
/* Asks the node for the generation that it would let `who` read: fn hears its number. */
struct ref;
struct principal;
typedef void (*cluster_image_fn)(void *user, enum err e, int64_t generation);
void cluster_ask_image(struct server *s, const struct ref *ref, const struct principal *who, cluster_image_fn fn, void *user);

/* ---- copies of checkpoints in nodes' memory (cluster_replicas.c) ---- */
/* Asks all nodes for replicas of a checkpoint, or of a run's checkpoints (of->name), that `who` may read: fn hears
 * [{"node","state_dict","generation","job","uid","part","name","created_at"}], the newest save's first, and a node that has not answered,
 * or NULL: without it nobody knows that there are no others. */
typedef void (*cluster_replicas_fn)(void *user, const json_t *list, const char *silent);
struct cluster_search;             /* until fn was called */
struct cluster_search *cluster_find_replicas(struct server *s, const struct ref *of, bool of_run, const struct principal *who,
					     cluster_replicas_fn fn, void *user);
/* The caller can do without copies: nodes that do not answer soon are waited for no longer. */
void cluster_replicas_enough(struct cluster_search *search);

/* The copies are to stand for their checkpoint no more, on all nodes: they are told until they know it, or when they are back. */
struct replica_withdrawal;
void cluster_withdraw(struct server *s, const struct replica_withdrawal *w);
void cluster_take_withdrawal(struct server *s, const struct replica_withdrawal *w);      /* this node was told of one */
bool cluster_heeds(const struct cluster *c);         /* it knows which were withdrawn while its lease was over */

/* A request to another node. */
struct cluster_errand {
	struct courier_parcel parcel;          /* the cluster's */
	struct cluster_errand *prev, *next;
	struct cluster *cluster;
	const char *lines[CLUSTER_HEADERS_MAX];
	char authorization[192], node[CLUSTER_NODE_TEXT];
	/* set by the caller; borrowed until the callback */
	const char *method, *path;             /* path: with the query */
	const char *const *headers;            /* a NULL ends them */
	struct str body;
	long whole_ms;
	struct buf url;                        /* empty; has room for it. The caller frees it */
	/* From the loop, exactly once. ERR_CLUSTER_UNAVAILABLE, ERR_BUSY, ERR_DRAINING */
	void (*fn)(struct cluster_errand *x, enum err e);
	void *user;
	/* the answer, whatever its status; the caller frees the buffers */
	long status;
	struct buf answer, heads;
};
void cluster_send(struct cluster *c, const char *node, struct cluster_errand *x);
void cluster_errand_free(struct cluster_errand *x);       /* its buffers: the answer and the URL */
struct str cluster_errand_head(const struct cluster_errand *x, const char *name);     /* n 0: absent */

/* ---- jobs (cluster_jobs.c) ---- */
struct job;
void cluster_note_job(const struct job *j);          /* hooks of parts.h */
uint64_t cluster_untold(const struct server *s);
void cluster_confirm(struct job *j, done_fn fn, void *user);
void cluster_compare(struct job *j, const char *other, done_fn fn, void *user);      /* cluster_take.c */
void cluster_jobs_loaded(struct server *s);
/* The record that etcd has of a job, {"node","job"}; NULL: none. ERR_CLUSTER_UNAVAILABLE. */
typedef void (*cluster_record_fn)(void *user, enum err e, const json_t *doc);
void cluster_record(struct cluster *c, struct str id, cluster_record_fn fn, void *user);
/* {"records":[…],"more"}: those of ids before this one ("": of all), newest first. */
void cluster_records(struct cluster *c, const char *before, uint32_t limit, cluster_record_fn fn, void *user);
enum cluster_presence { CLUSTER_IS_SELF, CLUSTER_IS_HERE, CLUSTER_IS_AWAY, CLUSTER_IS_UNKNOWN };
enum cluster_presence cluster_presence(const struct cluster *c, const char *node);
bool cluster_is_away(const struct server *s, const char *node);      /* hook of parts.h */
bool cluster_has_gone(const struct cluster *c);      /* nodes were forgotten whose jobs etcd may have records of */
bool cluster_has_looked(const struct cluster *c);    /* it knows which nodes there are */

/* ---- idempotency keys (cluster_keys.c) ---- */
/* A key, and the node that has it. */
struct cluster_claim {
	char hash[33], digest[17];             /* of uid and key; of the body */
	char node[CLUSTER_NODE_TEXT];          /* which node's request it is; "": this one's, which makes the job */
	bool is_away;                          /* … and that node is away, or forgotten */
	bool is_same;                          /* … and its request had the same body */
	char job[JOB_ID_LEN + 1];              /* the id that the job has, or is to have */
	int64_t revision;                      /* of the claim; 0: etcd does not know of it */
};
typedef void (*cluster_claim_fn)(void *user, enum err e, const struct cluster_claim *claim);
/* Claims the key for this node, unless another one has it; while etcd is away it is always this node's. ERR_IDEMPOTENCY_IN_FLIGHT,
 * ERR_CLUSTER_UNAVAILABLE. */
void cluster_claim(struct cluster *c, uid_t uid, const struct idempotency *idem, cluster_claim_fn fn, void *user);
/* Claims the key of a node that was forgotten. */
void cluster_claim_take(struct cluster *c, const struct cluster_claim *claim, cluster_claim_fn fn, void *user);
void cluster_claim_drop(struct cluster *c, const struct cluster_claim *claim);  /* it came to nothing, if it is still so */

void cluster_fill(const struct cluster *c, struct metrics *m);

/* Appends {"node","nodes":[…]}, or one node. ERR_NOT_FOUND, ERR_UNSUPPORTED: no cluster. */
FALLIBLE enum err cluster_put_nodes(const struct cluster *c, struct buf *out);
FALLIBLE enum err cluster_put_node(const struct cluster *c, struct str name, struct buf *out);
/* Sets or lifts the wish, then waits for so long until the node is drained, or joined; fn hears OK in both cases. ERR_NOT_FOUND,
 * ERR_CLUSTER_UNAVAILABLE, ERR_UNSUPPORTED. */
void cluster_drain(struct server *s, struct str name, bool drain, int64_t wait_ms, done_fn fn, void *user);
/* A node that is away, and will not come back, is no longer shown; its jobs that no other node can take have failed. ERR_STATE_CONFLICT: it
 * is here. ERR_NOT_FOUND, ERR_CLUSTER_UNAVAILABLE. */
void cluster_forget(struct server *s, struct str name, done_fn fn, void *user);
