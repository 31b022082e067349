/* capabilities.h: what this host has beside CPUs: GPUs and communication back ends, and why not. Asked once, by a worker of the role
 * "probe": a driver may take seconds to answer, may crash, and starts threads, which no worker with a sandbox may have. */
#pragma once
#include "base/buf.h"

/* Members of a JSON object: "backends":{"shm":{"available":true},…,"nccl":{"available":false,"reason":"…"}},"devices":[…] */
void capabilities_put(struct buf *out);
