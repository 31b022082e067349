/* dcp_meta.h: `.metadata` (a pickled torch.distributed.checkpoint.metadata.Metadata) ↔ sdict.
 * Reads what torch 2.0 to 2.15 on Python 3.7 to 3.14 writes (protocols 0 to 5); writes protocol 2 that 2.3 to 2.15 read and that
 * torch._weights_only_unpickler reads when DCP's classes are allowed. Never executes anything (pickle.h). */
#pragma once
#include "base/buf.h"
#include "tensor/sdict.h"

/* One `.metadata`. The sdict's strings do not point into `bytes`. A chunk or value without an entry in storage_data is
 * ERR_FORMAT_METADATA; so are paths that are not plain file names beneath the checkpoint directory ("..", absolute, empty parts).
 * A dtype or chunk that cannot be (negative sizes, ndim mismatch, product overflow) names its FQN. */
FALLIBLE enum err dcp_meta_read(const void *bytes, uint64_t n, struct sdict **out);

/* Rank-local checkpoints (`__{r}.metadata`): the union of all ranks' chunks; equal boxes once, values from the lowest rank. */
FALLIBLE enum err dcp_meta_union(struct sdict *const *parts, uint32_t count, struct sdict **out);

/* Streams the pickle through `sink` in pieces; sink's error is returned. Every chunk and value must have a loc. */
typedef enum err (*dcp_meta_sink)(void *user, const void *bytes, size_t n);
struct delta_head;
struct dcp_meta_opts {
	const char *checkpoint_id;       /* a plain str; may be NULL (None) */
	const char *save_id;             /* uuid4 text */
	const struct delta_head *delta;  /* of a delta's index; else NULL */
};
FALLIBLE enum err dcp_meta_write(const struct sdict *sd, const struct dcp_meta_opts *opts, dcp_meta_sink sink,
				 void *user);
