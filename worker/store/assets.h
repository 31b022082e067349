/* assets.h: the small files beside a model's weights: config.json, tokenizers, and what else Hugging Face's libraries look for. */
#pragma once
#include "base/vec.h"
#include "store/checkpoint.h"

enum { ASSET_BYTES_MAX = 64 << 20, ASSETS_MAX = 256 };

/* Opens the folder whose files are meant: that of `ref`, a checkpoint, a folder or a file in it; where ref->name.p is NULL, the one that
 * c's files are in. *path_out: its path below the store's top, a part of the reference or of c. store_close(). */
FALLIBLE enum err assets_open(const struct stores *stores, const struct ref *ref, const struct checkpoint *c, struct store_at *out,
			      struct str *path_out);
/* A file of this name, whole (mem_free); *out NULL: there is none. ERR_LIMIT_EXCEEDED: it is larger than ASSET_BYTES_MAX. */
FALLIBLE enum err assets_read(struct store_at folder, const char *name, void **out, uint64_t *n_out);

/* A file that travels along with a checkpoint; `left_out` says why it does not. */
struct asset {
	struct str name;
	uint64_t bytes;
	const char *left_out;          /* "too large", "a symbolic link"; NULL: it is copied */
};
struct assets {
	struct arena *arena;
	struct vec(struct asset) files;
};
/* Is a file of this name no asset: hidden, dcpd's own, or data or metadata of any format? */
bool asset_is_data(const char *name);
/* The folder's assets, by name: files that no format knows. Folders are passed over; links, and files larger than ASSET_BYTES_MAX, are left
 * out. ERR_LIMIT_EXCEEDED: more than ASSETS_MAX; ERR_NAME_INVALID: a name that is no UTF-8 or has control characters. assets_free(). */
FALLIBLE enum err assets_list(struct store_at folder, struct assets *out);
void assets_free(struct assets *a);
