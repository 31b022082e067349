/* exchange.h: a worker's part of a run of moves where the members of a gang share no memory but talk (backend tcp, nccl): rank r of the
 * state dicts belongs to member r % members, who alone maps r's segments.
 *
 * All members walk the same list of moves and cut it into the same messages; a window of them at a time is one comm_exchange, so that
 * memory is bounded whatever the tensors' size. Data that stays with one member is copied straight. */
#pragma once
#include "comm/comm.h"
#include "runner/exec.h"
#include "session/job.h"

/* The back end for this job: j->backend and the result's `backend`. ERR_BACKEND_UNAVAILABLE. */
FALLIBLE enum err exchange_choose(struct job *j);
/* How many members do a job over so many ranks: no more than there are workers, or GPUs. */
uint32_t exchange_members(const struct job *j, uint32_t world_size);
/* Joins the gang's group and takes part. group: the document's `comm`. */
FALLIBLE enum err exchange_part(struct job *j, const json_t *group, const struct exec_spec *spec);
/* The moves over a group that is open already. Members are the group's. */
FALLIBLE enum err exchange_run(const struct exec_spec *spec, struct comm *c);
