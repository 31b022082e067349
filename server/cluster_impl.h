/* cluster_impl.h: what cluster.c (joining, the lease) and cluster_nodes.c (the others, and who is drained) share. */
#pragma once
#include "base/vec.h"
#include "server/cluster.h"
#include "server/etcd.h"
#include "server/job.h"

enum { CLUSTER_NAME_MAX = 64, CLUSTER_KEY_MAX = 300, CLUSTER_NODES_MAX = 1000, CLUSTER_PROTOCOL = 1, CLUSTER_HURRY_MS = 200 };

enum cluster_state { CLUSTER_JOINED, CLUSTER_DRAINING, CLUSTER_DRAINED, CLUSTER_AWAY, CLUSTER_STATES };

/* A node as etcd had it at the last look. */
struct cluster_node {
	char name[CLUSTER_NAME_MAX + 1];
	enum cluster_state state;
	json_t *member;              /* {"id","mark","advertise","url","version","protocol","storages"} */
	int64_t jobs;                /* that have not ended; -1: away */
};

/* A caller that waits for a node's state. */
struct cluster_wait {
	struct cluster_wait *next;
	struct cluster *cluster;
	char name[CLUSTER_NAME_MAX + 1];
	bool drain;
	uint64_t after;              /* looks that there were; a later one counts */
	int64_t wait_ms;             /* 0: for the next look alone */
	struct loop_timer *timer;
	done_fn fn;
	void *user;
};

struct cluster {
	struct server *server;
	struct courier *courier;
	struct etcd *etcd;
	struct courier_tls tls;      /* of other nodes */
	char secret[129];            /* "": not known yet */
	struct cluster_errand *errands;
	const char *name;            /* this node's */
	char id[17], mark[JOB_MARK_LEN + 1];    /* of the state directory */
	int64_t cluster;             /* its id; 0: not known yet */
	int64_t lease, made;         /* made: create_revision of the alive key */
	bool asking;                 /* a chain of calls is under way */
	bool joined, refused, drained, leaving;
	bool tried;                  /* the first attempt to join has ended */
	char problem[700];           /* "": none */
	int64_t told_jobs;           /* of the alive key's value; -1: unknown */
	bool told_draining;
	uint64_t looks, failures;
	struct vec(struct cluster_node) nodes;
	struct cluster_wait *waits;
	struct loop_timer *timer;
};

/* cluster.c */
const char *cluster_key(const struct cluster *c, const char *kind, const char *name, char out[CLUSTER_KEY_MAX]);
void cluster_hurry(struct cluster *c);                  /* looks soon */

/* cluster_forward.c */
void cluster_errands_end(struct cluster *c);            /* those that are under way are told ERR_DRAINING */

/* cluster_nodes.c */
/* Takes what three ranges have answered, from the index on: members, alive, drained. */
FALLIBLE enum err cluster_take(struct cluster *c, const json_t *answer, size_t index);
void cluster_looked(struct cluster *c);                 /* those who wait are answered */
void cluster_nodes_free(struct cluster *c);
