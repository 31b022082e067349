/* cluster_impl.h: what cluster.c (joining, the lease) and cluster_nodes.c (the others, and who is drained) share. */
#pragma once
#include <stdio.h>

#include "base/map.h"
#include "base/vec.h"
#include "server/cluster.h"
#include "server/config.h"
#include "server/etcd.h"
#include "server/job.h"
#include "server/parts.h"

#ifndef CLUSTER_PROTOCOL /* the Makefile builds a daemon with a later one, for tests */
#define CLUSTER_PROTOCOL 1
#endif
enum { CLUSTER_NAME_MAX = 64, CLUSTER_KEY_MAX = 300, CLUSTER_HURRY_MS = 200 };

enum cluster_state { CLUSTER_JOINED, CLUSTER_DRAINING, CLUSTER_DRAINED, CLUSTER_AWAY, CLUSTER_STATES };

/* A node as etcd had it at the last look. */
struct cluster_node {
	char name[CLUSTER_NAME_MAX + 1];
	enum cluster_state state;
	json_t *member;              /* {"id","mark","advertise","url","place","version","protocol","storages"} */
	int64_t jobs;                /* that have not ended; -1: away */
};

/* A node that has not answered in time. */
enum { CLUSTER_SILENT_MAX = 16 };
struct cluster_silent {
	char node[CLUSTER_NAME_MAX + 1];
	int64_t until_ms;            /* monotone clock: taken for silent */
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
	unsigned errand_count;
	const char *name;            /* this node's */
	char id[17], mark[JOB_MARK_LEN + 1];    /* of the state directory */
	int64_t cluster;             /* its id; 0: not known yet */
	int64_t lease, made;         /* made: create_revision of the alive key */
	bool asking;                 /* a chain of calls is under way */
	bool joined, refused, drained, leaving;
	bool tried;                  /* the first attempt to join has ended */
	char problem[700];           /* "": none */
	char odd[700];               /* names the values that the last look at etcd passed over; "": none */
	uint32_t odd_count;
	char apart[700];             /* names the nodes of the last look that are there and not reached from here; "": none */
	uint32_t apart_count;
	char place[64];              /* of this node's loopback: its host's boot and network namespace; "": unknown */
	struct cluster_probe *probe; /* cluster_probe.c */
	int64_t told_jobs;           /* of the alive key's value; -1: unknown */
	bool told_draining;
	uint64_t looks, failures;
	struct vec(struct cluster_node) nodes;
	struct cluster_wait *waits;
	struct loop_timer *timer;
	int64_t renewed_ms, renewing_ms;        /* CLOCK_BOOTTIME: when the lease was asked for; the last time with success, and now */
	/* cluster_jobs.c */
	bool loaded, settled, settling;         /* the journal's jobs are here; etcd knows which are this node's, and is being asked */
	bool noting;                            /* a transaction about jobs is under way */
	uint32_t alone;                         /* notes that are sent one by one, to find the one that etcd refuses */
	uint32_t note_count;
	struct cluster_note *notes, **last_note;
	struct map note_table;
	bool has_gone;                          /* nodes were forgotten: etcd may have records of theirs */
	bool unmarked;                          /* jobs were noted since the journal's mark (journal_put_noted) */
	int64_t mark_ms;                        /* monotone clock: the next mark */
	/* cluster_prune.c */
	int64_t prune_ms;                       /* monotone clock: next */
	struct cluster_silent silent[CLUSTER_SILENT_MAX];       /* cluster_replicas.c */
	/* cluster_take.c */
	struct cluster_taking *taking;          /* NULL: nothing is being taken over */
	/* cluster_withdraw.c */
	struct cluster_telling *tellings;
	bool has_untold;                        /* somebody is not told by this daemon any more */
	bool heeding;                           /* etcd is asked what became of checkpoints while this node was away */
	int64_t heeding_for, heeded;            /* `made` of that time; as far as all is known */
};

static inline const char *cluster_key(const struct cluster *c, const char *kind, const char *name, char out[CLUSTER_KEY_MAX])
{
	snprintf(out, CLUSTER_KEY_MAX, "%s/%s%s", c->server->config->cluster_prefix, kind, name);
	return out;
}

static inline bool cluster_is_in(const struct cluster *c)      /* etcd answered the last time */
{
	return c->joined && !c->problem[0];
}

/* cluster.c */
void cluster_hurry(struct cluster *c);                  /* looks soon */

/* cluster_forward.c */
static inline bool cluster_knows(const struct cluster *c, const char *node)
{
	return cluster_presence(c, node) != CLUSTER_IS_UNKNOWN;
}
void cluster_errands_end(struct cluster *c);            /* those that are under way are told ERR_DRAINING */

/* Is the node of another protocol? (Of one whose description is none of dcpd's nobody knows.) */
bool cluster_speaks_otherwise(const struct cluster_node *n);
/* May requests, with the cluster's secret or a key made of it, go to the node's address? ERR_CLUSTER_UNAVAILABLE: it speaks another
 * protocol, has no TLS beyond loopback, or its address is this node's. */
FALLIBLE enum err cluster_may_send(const struct cluster *c, const struct cluster_node *n);

/* cluster_probe.c: is this node at the address that it advertises? */
FALLIBLE enum err cluster_probe_new(struct cluster *c);
void cluster_probe_free(struct cluster *c);
void cluster_probe_begin(struct cluster *c);            /* as soon as the daemon answers requests, until it has found itself */
const char *cluster_probe_problem(const struct cluster *c);     /* "": it was found there, or that is not known yet */

/* cluster_jobs.c */
void cluster_jobs_looked(struct cluster *c);            /* after each look: asks which jobs are this node's, tells of those that changed */
void cluster_jobs_free(struct cluster *c);
bool cluster_has_told(const struct cluster *c);         /* nothing that is noted waits for an etcd that answers */
void cluster_mark_noted(struct cluster *c);             /* puts the mark behind which ended jobs are noted again, if none waits */

/* cluster_prune.c */
void cluster_prune(struct cluster *c);                  /* after each look */

/* cluster_replicas.c */
/* Adds what a node tells of one copy to the list (cluster_find_replicas), which keeps the newest saves' few. */
void cluster_add_replica(json_t *list, const char *node, const json_t *record);

/* Appends STORAGE:NAME, as a query's value. */
void cluster_put_ref(struct buf *b, const struct ref *ref);

/* cluster_withdraw.c */
void cluster_withdraw_looked(struct cluster *c);       /* after each look: asks what became of checkpoints meanwhile */
bool cluster_has_words(const struct cluster *c);       /* nodes that must be told have not answered yet */
void cluster_withdraw_free(struct cluster *c);

/* cluster_take.c */
void cluster_take_looked(struct cluster *c);            /* after each look: takes over what nodes that are away had */
void cluster_take_free(struct cluster *c);
/* Takes up a job of this node's that its journal lacks, as its next owner: another daemon may have had the node's name, and go on. value:
 * of its record in etcd; live, record: revisions of the live key and of the record. */
FALLIBLE enum err cluster_take_up(struct cluster *c, const char *id, json_t *value, int64_t live, int64_t record);

/* cluster_nodes.c */
/* Takes what four ranges have answered, from the index on: members, alive, drained, gone. */
FALLIBLE enum err cluster_take(struct cluster *c, const json_t *answer, size_t index);
void cluster_looked(struct cluster *c);                 /* those who wait are answered */
bool cluster_is_described(const struct cluster *c);     /* the last look has found this node's description in etcd */
void cluster_nodes_free(struct cluster *c);
