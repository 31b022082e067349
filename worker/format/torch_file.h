/* torch_file.h: one file that torch.save wrote, whole: its tensors and values under the names that DCP gives them, and where each
 * tensor's storage lies, so that bytes are read when they are wanted and no others. One file may be a checkpoint, or one of many (a rank's,
 * a shard).
 *
 *     torch.save file ──► pickle graph ──► leaves: FQN, path, tensor | value ──► storages: file offset, bytes, CRC32
 *
 * Containers are walked as flatten_state_dict of torch.distributed.checkpoint walks them: dicts always, lists that hold a tensor, a dict or
 * such a list; tuples are values. Nothing is executed: tensors that are not dense (quantized, sparse, nested) are values that can be named
 * and left out, and not read; a module is refused by name; any other object is an opaque value, taken over as it is. */
#pragma once
#include "base/map.h"
#include "base/vec.h"
#include "format/format.h"
#include "format/torch_item_graph.h"
#include "tensor/sdict.h"

/* A box of a DTensor or ShardedTensor that the file's rank holds. */
struct torch_shard {
	const int64_t *dims;             /* global offsets, then sizes */
	const int64_t *strides;          /* in the storage */
	uint64_t first;                  /* element of the storage */
	uint32_t storage;
	bool conj, neg;
};

struct torch_leaf {
	struct str fqn;
	struct sd_path path;
	pnode node;
	bool is_tensor;
	struct str unread;               /* of a tensor that is not dense: why it is not read; is_tensor is false then */
	uint32_t storage;                /* of a tensor: index into storages */
	bool is_sharded;                 /* a DTensor or ShardedTensor: tensor has dtype and the whole shape; the rest is in shards */
	uint64_t first_shard, shard_count;
	struct item_tensor tensor;       /* sizes, strides and offset in the storage */
};

/* A storage that leaves refer to: several leaves, if they are views of it or tied. */
struct torch_storage {
	struct item_storage says;
	bool found;
	uint64_t offset;                 /* in the file */
	uint32_t crc32;
	bool crc_known;
};

struct torch_file {
	struct item item;                /* the graph is item.pk */
	struct arena *arena;             /* of FQNs and paths */
	struct vec(struct torch_leaf) leaves;
	struct vec(struct torch_shard) shards;
	struct vec(struct torch_storage) storages;
	struct map by_key;               /* storage key → index into storages */
};

/* Do the first bytes of a file say that torch.save wrote it? TORCH_FILE_FIRST bytes are enough. */
enum { TORCH_FILE_FIRST = 512 };
bool torch_file_is(const void *first, size_t n);

/* A file of a source; errors name it. ERR_FORMAT_ZIP, ERR_FORMAT_PICKLE, ERR_FORMAT_ITEM, ERR_FORMAT_UNSUPPORTED (a class or container
 * that is refused by name), ERR_DTYPE_UNSUPPORTED, ERR_LIMIT_EXCEEDED; with FQN and offset where there are any. */
FALLIBLE enum err torch_file_open(const struct format_source *s, const char *name, struct torch_file *out);
void torch_file_close(struct torch_file *f);             /* for CLEANUP too */

/* The FQN of a leaf behind the first `skip` parts of its path. */
struct str torch_leaf_tail(const struct torch_leaf *leaf, uint32_t skip);
/* Takes a leaf out of the first `skip` parts of its path, and puts it below a new one; "": none. arena: of FQN and path. */
FALLIBLE enum err torch_leaf_move(struct arena *a, struct torch_leaf *leaf, uint32_t skip, struct str below);

/* Adds all leaves to an sdict, as tensors of one chunk and values of `rank`. file: its number in the sdict. */
FALLIBLE enum err torch_file_add(const struct torch_file *f, struct sdict *sd, uint32_t file, uint32_t rank);
/* The bytes from the first to behind the last element of a box. */
uint64_t torch_file_span(uint32_t ndim, const int64_t *sizes, const int64_t *strides, enum dtype dtype);
/* Adds the file's records to the sdict, behind those of files with lower numbers. */
FALLIBLE enum err torch_file_add_records(const struct torch_file *f, struct sdict *sd, uint32_t file);
/* A leaf's value as a torch.save archive, in the sdict's arena. */
FALLIBLE enum err torch_file_add_value(const struct torch_file *f, const struct torch_leaf *leaf, struct sdict *sd, uint32_t rank);

/* torch_shards.c: the part of a DTensor (local tensor, mesh and placements) or ShardedTensor (shards with offsets) that a node describes:
 * fills leaf->tensor and the file's shards. ERR_FORMAT_UNSUPPORTED: a placement or mesh that it does not know, by name. */
bool torch_shards_is(const struct pickle *pk, pnode n);
FALLIBLE enum err torch_shards_read(struct torch_file *f, struct torch_leaf *leaf);
/* The number of a storage; a new one is added. */
FALLIBLE enum err torch_file_storage(struct torch_file *f, const struct item_storage *s, uint32_t *index_out);
