/* neighbours.h: checkpoints in the memory of other nodes (api/cluster.md, "Checkpoints in neighbours' memory").
 *
 * A save with options.neighbours K asks K other nodes, as soon as its generation is sealed, to load it out of this node's memory: an
 * ordinary load there, by POST /v1/jobs with `replica`, whose bytes are compared with digests like those of every load. The generation
 * is held until all have ended. Which nodes: the next ones behind this one in the order of names, in a circle, so that each node has the
 * copies of K others; who declines or fails is passed over. Nothing of it fails a save: fewer copies than asked for are a warning of its
 * result.
 *
 * Of a planned save each part is copied by itself.
 *
 * Known to this run of the daemon alone: after a restart, jobs that have not ended begin again (a neighbour finds its load by its
 * Idempotency-Key), copies of ended ones are given up. */
#pragma once
#include "base/err.h"

struct job;
struct neighbours;
struct server;

FALLIBLE enum err neighbours_new(struct server *s, struct neighbours **out);     /* after the cluster's and the jobs' */
void neighbours_free(struct neighbours *all);          /* after cluster_free: no request is under way */
void neighbours_snapshotted(struct job *j);            /* its generation is sealed, and its row in the journal */
/* After the end of any job: if a checkpoint is no more, or a save has come to nothing, its copies stand for it no more on any node. Those
 * of a save that has failed because its memory was lost stay: they are all that is left of it. */
void neighbours_ended(struct job *j);
