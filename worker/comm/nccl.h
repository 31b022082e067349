/* nccl.h: can this process use NCCL? For the answer to /v1/capabilities; collectives go through comm.h with COMM_NCCL.
 *
 * Differences from the other back ends:
 *   - spec.device is the GPU; buffers of the collectives are memory of it (device_alloc). The callbacks of comm_exchange, and the boxes
 *     of comm_all_to_all, are host memory as everywhere: messages go through a pinned ring of two slots, one being packed or unpacked
 *     while the other is under way, and through as much device memory. So an operation on state dicts in shared memory needs no change;
 *   - f16 and bf16 are summed as NCCL does it, rounded at each step; dtypes and operations that NCCL lacks (bool, 16-bit and complex
 *     numbers, float8, the average of integers) are brought to the host and reduced there;
 *   - who did not come by the deadline is not known: ERR_PEER_TIMEOUT and ERR_PEER_LOST carry no rank, unless that member could say why
 *     it left. Members that wait in a collective hear of an abort from NCCL, from their tick, or at their deadline;
 *   - NCCL starts threads and opens sockets and files: not from within the sandbox. */
#pragma once
#include "base/err.h"

/* Opens libnccl.so.2, once; no GPU is touched. ERR_BACKEND_UNAVAILABLE says why: "libnccl.so.2 was not found". */
FALLIBLE enum err comm_nccl_available(int *version_out);   /* 22809 is 2.28.9; may be NULL */
/* Whether NCCL is 2.30 or newer, and the environment asks it to take several members on one GPU (NCCL_MULTI_RANK_GPU_ENABLE=1). Else such
 * a group is refused with ERR_BACKEND_UNAVAILABLE, which names two members and their GPU. */
bool comm_nccl_shares_gpus(void);
/* A communicator of this process could not be ended within seconds: NCCL's call has not returned. No other is opened, and the process
 * should end, by _exit: the driver's own end would wait for the same. */
bool comm_nccl_stuck(void);
