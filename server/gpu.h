/* gpu.h: what this host has beside CPUs, as far as the coordinator must know: it refuses at once what no worker could do. */
#pragma once
#include "base/buf.h"

/* NULL: there is an NVIDIA GPU whose driver is loaded; else one sentence that says what is missing. */
const char *gpu_missing(void);
/* {"auto":{"available":true},"shm":…,"tcp":…,"nccl":{"available":false,"reason":"…"}}: back ends of operations on state dicts. */
FALLIBLE enum err gpu_put_backends(struct buf *out);
