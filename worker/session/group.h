/* group.h: the group of a gang's workers for the jobs whose members talk (backend tcp, nccl), and the NCCL groups that they keep between
 * jobs: NCCL takes seconds to start, and the GPU's memory that a group has is small beside a job's.
 *
 * A few groups are kept, one of each number of members, so that jobs of different sizes by turns open none anew; the one that was not used
 * for the longest makes room. Before each job over NCCL its members tell each other which group of that size they have kept. If all have
 * the same one, and it is sound, it serves again. Else all open a new one, ranks 0 to n - 1, whatever the ranks were before: after a
 * failure, and in a gang of which a worker is new. A group of TCP is opened for each job. */
#pragma once
#include <jansson.h>

#include "comm/comm.h"
#include "session/job.h"

/* doc: the job's `comm`: {"members", "backend", "group_id", "secret", "deadline_ms"}. rank: this worker's in its gang of `count`. *out
 * NULL: the worker is no member. Valid until group_leave. */
FALLIBLE enum err group_join(struct job *j, const json_t *doc, uint32_t rank, uint32_t count, struct comm **out);
/* is_whole: the job's collectives are done on this member, and a group over NCCL is kept. */
void group_leave(struct worker *w, struct comm *c, bool is_whole);
/* Closes what is kept; before the GPU. */
void group_close(struct worker *w);

/* How the members of any group of a gang meet: through the coordinator, round after round. */
struct group_meeting {
	struct job *job;
	uint32_t size, round, deadline_ms;
};
FALLIBLE enum err group_meet(struct group_meeting *m, const unsigned char mine[COMM_RENDEZVOUS_BYTES], unsigned char *all_out);
/* Reads a group's `secret`. */
FALLIBLE enum err group_secret(const json_t *group, unsigned char out[COMM_SECRET_BYTES]);
