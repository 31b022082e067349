/* forward.h: requests that another node of the cluster answers: about its jobs, or new work for a node that takes some. A node answers a
 * request that another node sent by itself alone, so that none goes in a circle. */
#pragma once
#include "api/http.h"

/* A request about a job that is not this node's: held, and answered by the node that has the job, or by what etcd knows of it. Before the
 * query is looked at. */
FALLIBLE enum err forward_job(struct req *r, bool *elsewhere_out);
/* Has the node answer the request, and holds it. */
FALLIBLE enum err forward_to(struct req *r, const char *node);
/* The first jobs of all nodes, newest first, as one list. token: as the caller gave it; filter: likewise. */
FALLIBLE enum err forward_list(struct req *r, struct str filter, uint32_t size, struct str token);
bool forward_lists(const struct req *r);    /* are there other nodes to be asked? */
