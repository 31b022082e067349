/* spread.h: loads by several nodes of the cluster, each of which has a job of its own, that read each byte once from the storage
 * (worker/runner/spread.h). The coordinators bring the leaders of the jobs' gangs together: each sends what its leader tells of itself
 * to the other nodes. A request that names nodes but no id begins the load on all of them: this node sends it on, with its job's id. */
#pragma once
#include <jansson.h>
#include <sys/types.h>

#include "base/err.h"
#include "spec/spec.h"

struct job;
struct server;
struct spreads;

enum { SPREAD_NODES_MAX = 64, SPREAD_ID_MAX = 64, SPREAD_CARD_MAX = 1024 };

FALLIBLE enum err spreads_new(struct server *s, struct spreads **out);
void spreads_free(struct spreads *all);               /* after cluster_free */
/* Checks the nodes that a request names, if any. ERR_UNSUPPORTED: no cluster. ERR_VALIDATION_FAILED. */
FALLIBLE enum err spread_check(const struct server *s, const struct spec *spec);

/* Hooks of parts.h. An attempt begins: sets *doc_out, "spread" of JOB, and calls the other nodes if that is this node's to do. NULL: the
 * job, or this attempt of it, is by itself. */
FALLIBLE enum err spread_start(struct job *j, json_t **doc_out);
/* The leader of the job's gang has sent RENDEZVOUS. */
void spread_meet(struct job *j, const json_t *body);

/* Card of another node's leader: how to reach it. */
struct spread_card {
	uid_t uid;                            /* the owner of the sender's job: loads of two users never meet */
	struct str id, data;
	int64_t round, index, size;
};
FALLIBLE enum err spread_take(struct server *s, const struct spread_card *card);
