/* gang.h: worker processes: gangs that run jobs, kept warm, and what is known of each worker. See worker/ctl/README.md.
 *
 * A gang is keyed by the set of storage roots that its sandbox holds. A worker that dies aborts its gang, never another one. */
#pragma once
#include "server/server.h"

/* Appends {"workers":[{"id","pid","role":"gang"|"lookup","gang","index","state":"starting"|"idle"|"busy"|"stalled","job",
 * "storages":[…],"engine","landlock","seccomp","started_at"}…]}. */
FALLIBLE enum err gang_put_workers(struct server *s, struct buf *out);
/* What this host and build can do, as the first worker said it: {"engine","landlock","seccomp"}; members are null before. */
FALLIBLE enum err gang_put_capabilities(struct server *s, struct buf *out);
