/* assets.h: the small files beside a model's weights: config.json, tokenizers, and what else Hugging Face's libraries look for. */
#pragma once
#include "store/checkpoint.h"

enum { ASSET_BYTES_MAX = 64 << 20 };

/* Opens the folder whose files are meant: that of `ref`, a checkpoint, a folder or a file in it; where ref->name.p is NULL, the one that
 * c's files are in. store_close(). */
FALLIBLE enum err assets_open(const struct stores *stores, const struct ref *ref, const struct checkpoint *c, struct store_at *out);
/* A file of this name, whole (mem_free); *out NULL: there is none. ERR_LIMIT_EXCEEDED: it is larger than ASSET_BYTES_MAX. */
FALLIBLE enum err assets_read(struct store_at folder, const char *name, void **out, uint64_t *n_out);
