/* spool.h: items with a stream transform (zstd) cannot be read at a position. They are undone once, by the leader, into an unnamed file
 * that all workers of the gang read: in memory while small, else on a storage of the job that can be written. */
#pragma once
#include "session/job.h"
#include "store/checkpoint.h"

/* Rewrites the locs of all transformed chunks and values of c->sd to a spool file, which becomes the sdict's last file (empty name, rank =
 * descriptor index in the job). Nothing to do: nothing is added. `digested`: those stay as they are whose stored bytes the manifest has a
 * digest of. */
FALLIBLE enum err spool_transforms(struct job *j, struct checkpoint *c, bool digested);

/* An empty spool, for at most `bytes` bytes, as one more descriptor of the job: in memory if they are few, else on a storage of the job,
 * the target's first. Regions that are not written take no space. */
FALLIBLE enum err spool_new(struct job *j, uint64_t bytes, uint32_t *fd_index_out);
