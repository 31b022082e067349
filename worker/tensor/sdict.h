/* sdict.h: the structure of a state dict or checkpoint: which tensors and values there are, how each tensor is cut into chunks,
 * who holds a chunk and where its bytes lie. No tensor bytes. Everything else is a function of it:
 *
 *     .metadata, segment images, safetensors headers ──► sdict ──► plan ──► sdict of the target ──► .metadata, images
 *
 * It is flat (arrays and indices) so that a million chunks cost little: at most 300 bytes a chunk are used besides the input.
 * An sdict owns one arena; strings and dims live there. The arrays may move when something is added: keep indices, not pointers.
 * Index order is meaningful: tensors and values in the order the source lists them (PyTorch keeps insertion order), chunks of one
 * tensor in a row. */
#pragma once
#include "base/arena.h"
#include "base/table.h"
#include "base/str.h"
#include "tensor/dtype.h"

/* A key path: what PyTorch's planner_data holds per flat key. key.p == NULL: a list position. Flattening makes text of dict keys that are
 * ints; index == SD_PATH_INT_KEY remembers that the key was one, where the source says so. */
struct sd_path_part {
	struct str key;
	int64_t index;
};
enum { SD_PATH_INT_KEY = 1 };
struct sd_path {
	const struct sd_path_part *parts;
	uint32_t count;               /* 0: the source has no paths (planner_data None) */
};

/* Location of the bytes of a chunk or value. */
struct sd_loc {
	uint32_t file;                /* index into sdict.files, or SD_NO_FILE: nowhere yet */
	uint32_t transform;           /* index + 1 into sdict.transforms; 0: none; SD_SPOOLED | index into sdict.origins: undone;
	                               * SD_STRIDED | index into sdict.strided */
	uint64_t offset, length;      /* of the stored item in the file (segment image: of the entry's raw data) */
};
#define SD_NO_FILE UINT32_MAX
#define SD_SPOOLED 0x80000000u
#define SD_STRIDED 0x40000000u

/* Place in the checkpoint of an item whose transform was undone into a spool: errors and reports name this place. */
struct sd_origin {
	uint32_t file;
	uint64_t offset;
};

/* How a chunk lies in its range of bytes, if that is not its box in C order and as it is: a view of a storage. */
struct sd_strided {
	const int64_t *strides;       /* ndim, in elements */
	bool conj, neg;               /* lazy bits: the stored elements are those before conjugation or negation */
	bool q8_0;                    /* float32 in C order, stored as ggml's blocks Q8_0 (tensor/quant.h) */
};

/* A range of a file that has a CRC32 of its own, whatever chunks lie in it (a record of a torch.save file). */
struct sd_record {
	uint32_t file, crc32;
	uint64_t offset, length;
};

struct sd_chunk {
	const int64_t *dims;          /* ndim offsets, then ndim sizes (global coordinates) */
	uint32_t tensor;
	uint32_t rank;                /* who holds it (image), or who writes it (plan); from the file name for checkpoints */
	struct sd_loc loc;
};

/* A rank's shard of a tensor may itself be sharded (FSDP over tensor parallelism: a ShardedTensor in a ShardedTensor): the box of that
 * shard in the whole tensor, and the ranks that share it. */
struct sd_outer {
	const int64_t *offsets, *sizes; /* ndim each */
	const uint32_t *ranks;         /* of the inner tensor's process group, in its order; NULL: the ranks with the same box */
	uint32_t rank_count;
	bool outer_dtensor, inner_dtensor; /* DTensors instead of ShardedTensors */
};

struct sd_tensor {
	struct str fqn;
	const int64_t *shape;         /* global, ndim entries */
	struct sd_path path;
	const char *blocks;           /* "Q4_K": the bytes are blocks of this type, which dcpd does not work out; NULL: elements */
	uint32_t first_chunk, chunk_count;
	uint32_t tied_to;             /* of a target: 1 + the tensor before that has the same bytes, if they are written once; 0: none */
	uint16_t ndim;
	enum dtype dtype : 8;
	bool requires_grad : 1;
	bool q8_0 : 1;                /* of a target: float32 that the file has as ggml's blocks Q8_0 */
};
_Static_assert(sizeof(struct sd_tensor) == 64, "there are millions of them");

enum sd_value_kind {
	SD_VALUE_STORED,              /* bytes at loc: a torch.save archive (BYTE_IO item), copied byte for byte */
	SD_VALUE_INLINE,              /* `bytes` is such an archive, in memory */
};

struct sd_value {
	struct str fqn;
	struct sd_path path;
	enum sd_value_kind kind;
	uint32_t rank;
	struct sd_loc loc;
	struct str bytes;
	struct str unread;            /* why it cannot be read (a sparse tensor, say), so that it is only listed; else empty */
};

/* A rank's own form of a value that it should share with others (image_collect): only the first rank's counts as the value. */
struct sd_differing {
	uint32_t value, rank;
	struct str bytes;             /* a torch.save archive */
};

struct sd_file {
	struct str name;              /* relative to the checkpoint directory; for images the rank's decimal number */
	uint32_t rank;
};

struct sdict {
	struct arena *arena;
	struct sd_tensor *tensors;
	uint64_t tensor_count, tensor_cap;
	struct sd_chunk *chunks;
	uint64_t chunk_count, chunk_cap;
	struct sd_value *values;
	uint64_t value_count, value_cap;
	struct sd_differing *differing;
	uint64_t differing_count, differing_cap;
	struct sd_file *files;
	uint64_t file_count, file_cap;
	struct str *transforms;       /* descriptor lists joined by ' ' in stored order, e.g. "stream.zstd/1" */
	uint64_t transform_count, transform_cap;
	const struct sd_strided *strided; /* as long-lived as origins */
	struct sd_record *records;     /* sorted by file and offset, apart from each other; as long-lived as origins */
	uint64_t record_count, record_cap; /* room only in the sdict that they were added to */
	const struct str (*meta)[2];  /* free text beside the tensors: keys and values of safetensors' __metadata__ */
	uint64_t meta_count;
	const struct sd_origin *origins; /* of spooled items; in the arena of the checkpoint's sdict, which outlives the others */
	bool has_paths;               /* false: planner_data was None */
	struct table(struct table_item) names; /* by FQN; see sdict_find */
	uint64_t cap_bytes, array_bytes; /* the arena's cap holds for arena and arrays together */
};
#define SD_VALUE_BIT 0x80000000u
#define SD_NONE UINT32_MAX

enum { SD_FQN_MAX = 64 << 10 };  /* bytes of a key: longer ones are neither read nor written */

FALLIBLE enum err sdict_new(uint64_t arena_cap_bytes, struct sdict **out);
void sdict_free(struct sdict *sd);
void sdict_free_ptr(struct sdict **sd);                        /* for CLEANUP */

/* Room for so many keys (tensors and values), tensors and chunks in all, to spare growing; adding more is still possible. */
FALLIBLE enum err sdict_reserve(struct sdict *sd, uint64_t keys, uint64_t tensors, uint64_t chunks);
/* Adding. FQN and shape are copied into the arena; a second one of the same FQN is ERR_DUPLICATE_KEY. */
FALLIBLE enum err sdict_add_tensor(struct sdict *sd, struct str fqn, enum dtype dtype, uint32_t ndim,
				   const int64_t *shape, uint32_t *index_out);
/* Chunks of a tensor must be added in a row (between two tensors' chunks no switching back). dims: offsets then sizes. */
FALLIBLE enum err sdict_add_chunk(struct sdict *sd, uint32_t tensor, const int64_t *dims, uint32_t rank,
				  struct sd_loc loc);
FALLIBLE enum err sdict_add_value(struct sdict *sd, struct str fqn, uint32_t rank, struct sd_loc loc,
				  uint32_t *index_out);
/* One more rank that holds a value of which `first` is the index: the same FQN again, not looked up by name. For save plans. */
/* ERR_FORMAT_UNSUPPORTED, with file and FQN, of a value that is only listed. */
FALLIBLE enum err sdict_check_read(const struct sdict *sd, const struct sd_value *v);
FALLIBLE enum err sdict_add_value_replica(struct sdict *sd, uint32_t first, uint32_t rank, struct sd_loc loc,
					  uint32_t *index_out);
FALLIBLE enum err sdict_add_differing(struct sdict *sd, uint32_t value, uint32_t rank, struct str bytes);
FALLIBLE enum err sdict_add_file(struct sdict *sd, struct str name, uint32_t rank, uint32_t *index_out);
/* All files of another sdict, under the same numbers, with its strides and records, and where its spooled items come from. */
FALLIBLE enum err sdict_copy_files(struct sdict *sd, const struct sdict *from);
/* Gives the tensor `index` the chunks that t has in `from`, whose files are numbered alike. */
FALLIBLE enum err sdict_copy_chunks(struct sdict *sd, uint32_t index, const struct sdict *from, const struct sd_tensor *t);
FALLIBLE enum err sdict_add_transform(struct sdict *sd, struct str joined, uint32_t *id_out); /* id: index + 1, interned */
/* Tensors and chunks of another sdict, by reference: FQN, shape, path and dims are not copied. sdict_borrow comes first: it keeps
 * the other's arena for as long as this one is there. One other at most. */
void sdict_borrow(struct sdict *sd, const struct sdict *other);
FALLIBLE enum err sdict_add_tensor_of(struct sdict *sd, const struct sd_tensor *t, uint32_t *index_out);
FALLIBLE enum err sdict_add_chunk_of(struct sdict *sd, uint32_t tensor, const struct sd_chunk *c);
FALLIBLE enum err sdict_copy_path(struct sdict *sd, struct sd_path from, struct sd_path *out);
/* The path of a key that was `old`: it keeps the parts that the new name still ends with; what is in front becomes one part. */
FALLIBLE enum err sdict_rename_path(struct sdict *sd, struct sd_path from, struct str old, struct str name, struct sd_path *out);

/* The record that a range of bytes lies in; NULL: none. */
int sdict_record_order(const void *a, const void *b);             /* by offset, for qsort */
const struct sd_record *sdict_record(const struct sdict *sd, struct sd_loc loc);

/* The tensor's index, SD_VALUE_BIT | the value's, or SD_NONE. */
uint32_t sdict_find(const struct sdict *sd, struct str fqn);
/* NULL if absent or of the other kind. Good until the next tensor or value is added. */
struct sd_tensor *sdict_tensor(const struct sdict *sd, struct str fqn);
struct sd_value *sdict_value(const struct sdict *sd, struct str fqn);

static inline bool sd_is_transformed(struct sd_loc loc) { return loc.transform && !(loc.transform & (SD_SPOOLED | SD_STRIDED)); }
/* NULL: C order, as it is, or the stored item says. */
static inline const struct sd_strided *sd_strided_of(const struct sdict *sd, struct sd_loc loc)
{
	return loc.transform & SD_STRIDED && !(loc.transform & SD_SPOOLED) ? &sd->strided[loc.transform & ~SD_STRIDED] : NULL;
}
static inline struct sd_origin sd_origin_of(const struct sdict *sd, struct sd_loc loc)
{
	return loc.transform & SD_SPOOLED ? sd->origins[loc.transform & ~SD_SPOOLED] : (struct sd_origin){ loc.file, loc.offset };
}
static inline const int64_t *sd_offsets(const struct sd_chunk *c) { return c->dims; }
static inline const int64_t *sd_sizes(const struct sd_chunk *c, uint32_t ndim) { return c->dims + ndim; }
