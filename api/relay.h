/* relay.h: the events of jobs that other nodes of the cluster have, as a stream of this node's. A stream follows a job that is taken over
 * to its new owner. */
#pragma once
#include "api/stream.h"

/* Begins the stream of a request for a job's events, or answers why not; later. node: which may have the job; NULL: etcd is asked. */
FALLIBLE enum err relay_start(struct req *r, const char *node);
/* Brings the rest of a stream of this node's whose job another node has taken over. NULL: no memory. */
const struct stream_feed *relay_follow(struct stream_now *now);
