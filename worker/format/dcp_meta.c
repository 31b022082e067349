/* dcp_meta.c: reads `.metadata`. The pickle machine makes a graph in which the five classes that
 * come once per chunk are compact records; this file walks it into an sdict.
 *
 * Storage entries name their chunk by (FQN, offsets). They are matched through the index hint where
 * it is right, else by a binary search among the tensor's chunks sorted by offsets: no hash table,
 * so that hostile offsets cannot make it slow. */
#include "format/dcp_meta.h"

#include <stdlib.h>

#include "base/map.h"
#include "base/mem.h"
#include "base/num.h"
#include "base/vec.h"
#include "format/pickle.h"
#include "tensor/box.h"

enum {
	PATH_PARTS_MAX = 256,
	FILE_NAME_MAX = 1024,
	STORAGE_ENTRY_BYTES_MIN = 16,  /* of the pickle: a MetadataIndex of its own and a reference to where the bytes lie */
	STRUCTURE_BYTES_MIN = 64 << 20, STRUCTURE_TIMES = 4, /* the sdict takes at most the first + n times the second */
};

enum { REC_METADATA, REC_TENSOR, REC_BYTES, REC_CHUNK, REC_INDEX, REC_STORAGE };
enum { METADATA_STATE_DICT, METADATA_PLANNER, METADATA_STORAGE };
enum { TENSOR_PROPERTIES, TENSOR_SIZE, TENSOR_CHUNKS };
enum { CHUNK_OFFSETS, CHUNK_SIZES };
enum { INDEX_FQN, INDEX_OFFSET, INDEX_HINT };
enum { STORAGE_PATH, STORAGE_OFFSET, STORAGE_LENGTH, STORAGE_TRANSFORMS };

#define META_MODULE "torch.distributed.checkpoint.metadata"
#define OLD_MODULE "torch.distributed._shard.checkpoint.metadata"
#define META_RECORD(name, id, ...)                                                             \
	{ META_MODULE, name, id, sizeof((const char *[]){ __VA_ARGS__ }) / sizeof(char *), { __VA_ARGS__ } }, \
	{ OLD_MODULE, name, id, sizeof((const char *[]){ __VA_ARGS__ }) / sizeof(char *), { __VA_ARGS__ } }

static const struct pickle_record records[] = {
	META_RECORD("ChunkStorageMetadata", REC_CHUNK, "offsets", "sizes"),
	META_RECORD("MetadataIndex", REC_INDEX, "fqn", "offset", "index"),
	META_RECORD("TensorStorageMetadata", REC_TENSOR, "properties", "size", "chunks"),
	META_RECORD("Metadata", REC_METADATA, "state_dict_metadata", "planner_data", "storage_data"),
	{ META_MODULE, "BytesStorageMetadata", REC_BYTES, 0, { NULL } },
	{ OLD_MODULE, "BytesStorageMetadata", REC_BYTES, 0, { NULL } },
	{ "torch.distributed.checkpoint.filesystem", "_StorageInfo", REC_STORAGE, 4,
	  { "relative_path", "offset", "length", "transform_descriptors" } },
	{ "torch.distributed._shard.checkpoint.filesystem", "_StorageInfo", REC_STORAGE, 4,
	  { "relative_path", "offset", "length", "transform_descriptors" } },
	{ NULL, NULL, 0, 0, { NULL } },
};

struct reader {
	struct pickle *pk;
	struct sdict *sd;
	uint64_t n;                  /* bytes of the pickle */
	uint32_t *order;             /* chunk numbers, those of each tensor sorted by offsets */
	struct map files;            /* name → index in sd->files */
	pnode last_path;             /* entries of one file often share its name */
	uint32_t last_file;
};

static enum err at_fqn(enum err e, struct str fqn)
{
	return err_at_fqn(e, fqn.p, fqn.n);
}

static FALLIBLE enum err read_dims(const struct reader *r, pnode n, const char *what, uint32_t ndim, int64_t *dims)
{
	enum pickle_kind kind = pickle_kind(r->pk, n);
	char name[64];

	if (kind != PK_SIZE && kind != PK_TUPLE)
		return ERR(FORMAT_METADATA, "the %s of a tensor is a %s, not a torch.Size", what,
			   pickle_class_name(r->pk, n, name, sizeof name));
	if (pickle_count(r->pk, n) != ndim)
		return ERR(FORMAT_METADATA, "%s with %ju dims in a tensor with %u", what,
			   (uintmax_t)pickle_count(r->pk, n), ndim);
	for (uint32_t i = 0; i < ndim; i++) {
		if (!pickle_int(r->pk, pickle_at(r->pk, n, i), &dims[i]))
			return ERR(FORMAT_METADATA, "%s: dim %u is no 64-bit int", what, i);
		if (dims[i] < 0)
			return ERR(FORMAT_METADATA, "%s: dim %u is %jd", what, i, (intmax_t)dims[i]);
	}
	return OK;
}

/* TensorProperties: (dtype, layout, requires_grad, memory format, pin_memory), since 2.15 also the strides of a local tensor. */
static FALLIBLE enum err read_properties(const struct reader *r, pnode n, enum dtype *dtype, bool *requires_grad)
{
	const struct pickle *pk = r->pk;
	pnode state = pickle_state(pk, n), type = pickle_at(pk, state, 0), layout = pickle_at(pk, state, 1);
	char name[128];

	if (!str_is(pickle_name(pk, n), "TensorProperties") || pickle_count(pk, state) < 5 ||
	    pickle_count(pk, state) > 6)
		return ERR(FORMAT_METADATA, "the properties of a tensor are a %s, not TensorProperties with 5 or 6 values",
			   pickle_class_name(pk, n, name, sizeof name));
	if (pickle_kind(pk, type) != PK_GLOBAL || !str_is(pickle_module(pk, type), "torch"))
		return ERR(FORMAT_METADATA, "the dtype of a tensor is a %s",
			   pickle_class_name(pk, type, name, sizeof name));
	TRY(dtype_parse(pickle_name(pk, type), dtype));
	struct str layout_name = pickle_str(pk, pickle_at(pk, pickle_args(pk, layout), 0));
	if (pickle_kind(pk, layout) == PK_OBJECT && !pickle_is_call(pk, layout, "torch.serialization", "_get_layout"))
		return ERR(FORMAT_METADATA, "the layout of a tensor is a %s", pickle_class_name(pk, layout, name, sizeof name));
	if (layout_name.n && !str_is(layout_name, "torch.strided"))
		return ERR(FORMAT_METADATA, "a tensor of layout %.*s", (int)num_min(layout_name.n, 64), layout_name.p);
	*requires_grad = pickle_is_true(pk, pickle_at(pk, state, 2));
	return OK;
}

static FALLIBLE enum err read_chunk(struct reader *r, uint32_t tensor, pnode n)
{
	const struct sd_tensor *t = &r->sd->tensors[tensor];
	int64_t dims[2 * NDIM_MAX];
	char name[64];

	/* A list in the memo can be the chunks of many tensors. */
	if (r->sd->chunk_count >= r->n / STORAGE_ENTRY_BYTES_MIN)
		return ERR(FORMAT_METADATA, "more chunks than storage_data can have entries");
	if (pickle_record_id(r->pk, n) != REC_CHUNK)
		return ERR(FORMAT_METADATA, "a chunk is a %s", pickle_class_name(r->pk, n, name, sizeof name));
	TRY(read_dims(r, pickle_field(r->pk, n, CHUNK_OFFSETS), "offsets", t->ndim, dims));
	TRY(read_dims(r, pickle_field(r->pk, n, CHUNK_SIZES), "sizes", t->ndim, dims + t->ndim));
	TRY(box_check(t->ndim, dims, dims + t->ndim, t->shape));
	return sdict_add_chunk(r->sd, tensor, dims, 0, (struct sd_loc){ .file = SD_NO_FILE });
}

static FALLIBLE enum err read_tensor(struct reader *r, struct str fqn, pnode n)
{
	pnode size = pickle_field(r->pk, n, TENSOR_SIZE), chunks = pickle_field(r->pk, n, TENSOR_CHUNKS), chunk;
	uint64_t ndim = pickle_count(r->pk, size), numel, bytes;
	int64_t shape[NDIM_MAX];
	enum dtype dtype;
	bool requires_grad;
	uint32_t tensor;

	if (ndim > NDIM_MAX)
		return ERR(LIMIT_EXCEEDED, "a tensor with %ju dims", (uintmax_t)ndim);
	TRY(read_dims(r, size, "size", (uint32_t)ndim, shape));
	TRY(read_properties(r, pickle_field(r->pk, n, TENSOR_PROPERTIES), &dtype, &requires_grad));
	TRY(box_numel((uint32_t)ndim, shape, &numel));
	TRY(num_mul(numel, dtype_bytes(dtype), &bytes));
	if (pickle_kind(r->pk, chunks) != PK_LIST && pickle_kind(r->pk, chunks) != PK_TUPLE)
		return ERR(FORMAT_METADATA, "the chunks of a tensor are no list");
	TRY(sdict_add_tensor(r->sd, fqn, dtype, (uint32_t)ndim, shape, &tensor));
	r->sd->tensors[tensor].requires_grad = requires_grad;
	struct pickle_iter it = pickle_iter(r->pk, chunks);
	while (pickle_next(r->pk, &it, &chunk))
		TRY(read_chunk(r, tensor, chunk));
	return OK;
}

static FALLIBLE enum err read_state_dict(struct reader *r, pnode dict)
{
	struct pickle_iter it = pickle_iter(r->pk, dict);
	pnode key, value;
	char name[128];

	if (pickle_kind(r->pk, dict) != PK_DICT && pickle_kind(r->pk, dict) != PK_ORDERED_DICT)
		return ERR(FORMAT_METADATA, "state_dict_metadata is no dict");
	while (pickle_next(r->pk, &it, &key) && pickle_next(r->pk, &it, &value)) {
		struct str fqn = pickle_str(r->pk, key);
		uint32_t index;
		enum err e;
		if (pickle_kind(r->pk, key) != PK_STR)
			return ERR(FORMAT_METADATA, "a key of state_dict_metadata is a %s",
				   pickle_class_name(r->pk, key, name, sizeof name));
		if (pickle_record_id(r->pk, value) == REC_TENSOR)
			e = read_tensor(r, fqn, value);
		else if (pickle_record_id(r->pk, value) == REC_BYTES)
			e = sdict_add_value(r->sd, fqn, 0, (struct sd_loc){ .file = SD_NO_FILE }, &index);
		else
			e = ERR(FORMAT_METADATA, "neither a tensor nor a value but a %s",
				pickle_class_name(r->pk, value, name, sizeof name));
		if (e)
			return at_fqn(e, fqn);
	}
	return OK;
}

struct sort_ctx {
	const struct sd_chunk *chunks;
	uint32_t ndim;
};

static int compare_chunks(const void *a, const void *b, void *user)
{
	const struct sort_ctx *ctx = user;
	uint32_t x, y;

	memcpy(&x, a, sizeof x);
	memcpy(&y, b, sizeof y);
	return num_order_rows(ctx->chunks[x].dims, ctx->chunks[y].dims, ctx->ndim);
}

static FALLIBLE enum err sort_chunks(struct reader *r)
{
	const struct sdict *sd = r->sd;

	r->order = mem_alloc(sd->chunk_count * sizeof *r->order);
	NEED(r->order, "no memory for %ju chunks", (uintmax_t)sd->chunk_count);
	for (uint64_t i = 0; i < sd->chunk_count; i++)
		r->order[i] = (uint32_t)i;
	each(t, sd->tensors, sd->tensor_count) {
		struct sort_ctx ctx = { sd->chunks, t->ndim };
		uint32_t *order = r->order + t->first_chunk;
		bool sorted = true;
		for (uint64_t k = 1; k < t->chunk_count && sorted; k++)
			sorted = compare_chunks(&order[k - 1], &order[k], &ctx) < 0;
		if (sorted)
			continue;
		qsort_r(order, t->chunk_count, sizeof *order, compare_chunks, &ctx);
		for (uint64_t k = 1; k < t->chunk_count; k++)
			if (compare_chunks(&order[k - 1], &order[k], &ctx) == 0) {
				char at[128];
				enum err e = ERR(FORMAT_METADATA, "two chunks at %s",
						 box_print(t->ndim, sd->chunks[order[k]].dims, at, sizeof at));
				return at_fqn(e, t->fqn);
			}
	}
	return OK;
}

/* The chunk that a MetadataIndex means; NULL if there is none. */
static struct sd_chunk *find_chunk(const struct reader *r, const struct sd_tensor *t, pnode index)
{
	struct sd_chunk *chunks = r->sd->chunks;
	pnode offset = pickle_field(r->pk, index, INDEX_OFFSET);
	int64_t want[NDIM_MAX], hint;

	if (pickle_kind(r->pk, offset) == PK_ABSENT || pickle_kind(r->pk, offset) == PK_NONE)
		return t->chunk_count == 1 ? &chunks[t->first_chunk] : NULL;
	if (pickle_count(r->pk, offset) != t->ndim)
		return NULL;
	for (uint32_t i = 0; i < t->ndim; i++)
		if (!pickle_int(r->pk, pickle_at(r->pk, offset, i), &want[i]))
			return NULL;
	if (pickle_int(r->pk, pickle_field(r->pk, index, INDEX_HINT), &hint) && hint >= 0 &&
	    (uint64_t)hint < t->chunk_count &&
	    num_order_rows(chunks[t->first_chunk + (uint64_t)hint].dims, want, t->ndim) == 0)
		return &chunks[t->first_chunk + (uint64_t)hint];
	const uint32_t *order = r->order + t->first_chunk;
	for (uint64_t low = 0, high = t->chunk_count; low < high;) {
		uint64_t middle = low + (high - low) / 2;
		int c = num_order_rows(chunks[order[middle]].dims, want, t->ndim);
		if (c == 0)
			return &chunks[order[middle]];
		if (c < 0)
			low = middle + 1;
		else
			high = middle;
	}
	return NULL;
}

/* A relative path whose parts are plain names. */
static bool path_is_plain(struct str s)
{
	if (s.n == 0 || s.n > FILE_NAME_MAX || memchr(s.p, 0, s.n))
		return false;
	for (size_t from = 0, i = 0; i <= s.n; i++) {
		if (i < s.n && s.p[i] != '/')
			continue;
		struct str part = { s.p + from, i - from };
		if (part.n == 0 || str_is(part, ".") || str_is(part, ".."))
			return false;
		from = i + 1;
	}
	return true;
}

/* "__{rank}_{n}.distcp" → rank; 0 for any other name. */
static uint32_t rank_of(struct str path)
{
	const char *slash = memrchr(path.p, '/', path.n);
	struct str s = path;
	uint64_t rank;

	if (slash)
		s = (struct str){ slash + 1, (size_t)(path.p + path.n - slash - 1) };
	if (!str_starts(s, "__"))
		return 0;
	s = (struct str){ s.p + 2, s.n - 2 };
	const char *end = memchr(s.p, '_', s.n);
	if (!end || !str_to_u64((struct str){ s.p, (size_t)(end - s.p) }, &rank) || rank >= UINT32_MAX)
		return 0;
	return (uint32_t)rank;
}

static FALLIBLE enum err read_file(struct reader *r, pnode path, uint32_t *file_out)
{
	struct str name = pickle_str(r->pk, path);

	if (path == r->last_path && path) {
		*file_out = r->last_file;
		return OK;
	}
	uint32_t file = map_get(&r->files, name);
	if (file == MAP_NONE) {
		if (!path_is_plain(name))
			return ERR(FORMAT_METADATA, "'%.*s' is no name of a file in the checkpoint",
				   (int)num_min(name.n, 200), name.p);
		TRY(sdict_add_file(r->sd, name, rank_of(name), &file));
		TRY(map_put(&r->files, r->sd->files[file].name, file));
	}
	r->last_path = path;
	*file_out = r->last_file = file;
	return OK;
}

static FALLIBLE enum err read_transforms(struct reader *r, pnode list, uint32_t *id_out)
{
	struct buf joined CLEANUP(buf_free) = BUF_INIT(4096);
	struct pickle_iter it = pickle_iter(r->pk, list);
	enum pickle_kind kind = pickle_kind(r->pk, list);
	pnode item;

	if (kind != PK_LIST && kind != PK_TUPLE && kind != PK_NONE && kind != PK_ABSENT)
		return ERR(FORMAT_METADATA, "transform_descriptors is no list");
	*id_out = 0;
	while (pickle_next(r->pk, &it, &item)) {
		struct str s = pickle_str(r->pk, item);
		if (s.n == 0 || memchr(s.p, ' ', s.n))
			return ERR(FORMAT_METADATA, "a transform that is no descriptor");
		if (joined.len)
			buf_putc(&joined, ' ');
		buf_put(&joined, s.p, s.n);
	}
	TRY(buf_status(&joined));
	if (joined.len == 0)
		return OK;
	return sdict_add_transform(r->sd, (struct str){ (const char *)joined.p, joined.len }, id_out);
}

static FALLIBLE enum err read_loc(struct reader *r, pnode info, struct sd_loc *loc)
{
	const struct pickle *pk = r->pk;
	int64_t offset, length, end;
	char name[64];

	if (pickle_record_id(pk, info) != REC_STORAGE)
		return ERR(FORMAT_METADATA, "where its bytes lie is told by a %s",
			   pickle_class_name(pk, info, name, sizeof name));
	if (!pickle_int(pk, pickle_field(pk, info, STORAGE_OFFSET), &offset) || offset < 0 ||
	    !pickle_int(pk, pickle_field(pk, info, STORAGE_LENGTH), &length) || length < 0 ||
	    __builtin_add_overflow(offset, length, &end))
		return ERR(FORMAT_METADATA, "the offset or length of its bytes cannot be");
	TRY(read_file(r, pickle_field(pk, info, STORAGE_PATH), &loc->file));
	TRY(read_transforms(r, pickle_field(pk, info, STORAGE_TRANSFORMS), &loc->transform));
	loc->offset = (uint64_t)offset;
	loc->length = (uint64_t)length;
	return OK;
}

/* One entry of storage_data. Entries for what state_dict_metadata does not list are left alone, as PyTorch does. */
static FALLIBLE enum err place(struct reader *r, pnode index, pnode info)
{
	struct sdict *sd = r->sd;
	struct sd_loc *to, loc = { 0 };
	uint32_t *rank;

	if (pickle_record_id(r->pk, index) != REC_INDEX)
		return OK;
	struct str fqn = pickle_str(r->pk, pickle_field(r->pk, index, INDEX_FQN));
	uint32_t at = sdict_find(sd, fqn);
	if (at == SD_NONE)
		return OK;
	if (at & SD_VALUE_BIT) {
		enum pickle_kind kind = pickle_kind(r->pk, pickle_field(r->pk, index, INDEX_OFFSET));
		if (kind != PK_ABSENT && kind != PK_NONE)
			return OK;
		to = &sd->values[at & ~SD_VALUE_BIT].loc;
		rank = &sd->values[at & ~SD_VALUE_BIT].rank;
	} else {
		struct sd_chunk *chunk = find_chunk(r, &sd->tensors[at], index);
		if (!chunk)
			return OK;
		to = &chunk->loc;
		rank = &chunk->rank;
	}
	enum err e = read_loc(r, info, &loc);
	if (!e && to->file != SD_NO_FILE && memcmp(to, &loc, sizeof loc) != 0)
		e = ERR(FORMAT_METADATA, "storage_data has two places for one chunk or value");
	if (e)
		return at_fqn(e, fqn);
	*to = loc;
	*rank = sd->files[loc.file].rank;
	return OK;
}

static FALLIBLE enum err read_storage(struct reader *r, pnode dict)
{
	struct pickle_iter it = pickle_iter(r->pk, dict);
	enum pickle_kind kind = pickle_kind(r->pk, dict);
	pnode index, info;

	if (kind != PK_DICT && kind != PK_ORDERED_DICT && kind != PK_NONE)
		return ERR(FORMAT_METADATA, "storage_data is no dict");
	while (pickle_next(r->pk, &it, &index) && pickle_next(r->pk, &it, &info))
		TRY(place(r, index, info));
	return OK;
}

static FALLIBLE enum err check_placed(const struct sdict *sd)
{
	char at[128];

	each(c, sd->chunks, sd->chunk_count) {
		const struct sd_tensor *t = &sd->tensors[c->tensor];
		if (c->loc.file == SD_NO_FILE)
			return at_fqn(ERR(FORMAT_METADATA, "storage_data has no entry for the chunk at %s",
					  box_print(t->ndim, c->dims, at, sizeof at)), t->fqn);
	}
	for (uint64_t i = 0; i < sd->value_count; i++)
		if (sd->values[i].loc.file == SD_NO_FILE)
			return at_fqn(ERR(FORMAT_METADATA, "storage_data has no entry for the value"),
				      sd->values[i].fqn);
	return OK;
}

static FALLIBLE enum err read_path(const struct reader *r, pnode tuple, struct sd_path *out)
{
	struct sd_path_part parts[PATH_PARTS_MAX];
	struct sd_path path = { parts, 0 };
	struct pickle_iter it = pickle_iter(r->pk, tuple);
	enum pickle_kind kind = pickle_kind(r->pk, tuple);
	pnode item;

	if (kind != PK_TUPLE && kind != PK_LIST)
		return ERR(FORMAT_METADATA, "the path in planner_data is no tuple");
	while (pickle_next(r->pk, &it, &item)) {
		if (path.count == PATH_PARTS_MAX)
			return ERR(LIMIT_EXCEEDED, "a path of more than %d keys", PATH_PARTS_MAX);
		struct sd_path_part *part = &parts[path.count++];
		*part = (struct sd_path_part){ { NULL, 0 }, 0 };
		if (pickle_kind(r->pk, item) == PK_STR)
			part->key = pickle_str(r->pk, item);
		else if (!pickle_int(r->pk, item, &part->index))
			return ERR(FORMAT_METADATA, "a path in planner_data has a key that is no str or int");
	}
	return sdict_copy_path(r->sd, path, out);
}

/* Custom planners may keep anything else here, which says nothing about paths. */
static FALLIBLE enum err read_planner(struct reader *r, pnode dict)
{
	struct pickle_iter it = pickle_iter(r->pk, dict);
	enum pickle_kind kind = pickle_kind(r->pk, dict);
	pnode key, value;

	r->sd->has_paths = kind == PK_DICT || kind == PK_ORDERED_DICT;
	while (pickle_next(r->pk, &it, &key) && pickle_next(r->pk, &it, &value) && r->sd->has_paths) {
		struct str fqn = pickle_str(r->pk, key);
		uint32_t at = pickle_kind(r->pk, key) == PK_STR ? sdict_find(r->sd, fqn) : SD_NONE;
		if (at == SD_NONE)
			continue;
		struct sd_path *to = at & SD_VALUE_BIT ? &r->sd->values[at & ~SD_VALUE_BIT].path :
							 &r->sd->tensors[at].path;
		enum err e = read_path(r, value, to);
		if (e)
			return at_fqn(e, fqn);
	}
	return OK;
}

static FALLIBLE enum err read_all(struct reader *r)
{
	pnode root = pickle_root(r->pk);
	char name[128];

	if (pickle_record_id(r->pk, root) != REC_METADATA)
		return ERR(FORMAT_METADATA, "the pickle holds a %s, not torch.distributed.checkpoint's Metadata",
			   pickle_class_name(r->pk, root, name, sizeof name));
	TRY(read_state_dict(r, pickle_field(r->pk, root, METADATA_STATE_DICT)));
	TRY(sort_chunks(r));
	TRY(read_storage(r, pickle_field(r->pk, root, METADATA_STORAGE)));
	TRY(check_placed(r->sd));
	return read_planner(r, pickle_field(r->pk, root, METADATA_PLANNER));
}

enum err dcp_meta_read(const void *bytes, uint64_t n, struct sdict **out)
{
	struct pickle *pk CLEANUP(pickle_free_ptr) = NULL;
	struct sdict *sd CLEANUP(sdict_free_ptr) = NULL;

	TRY(pickle_parse(bytes, n, records, &pk));
	TRY(sdict_new(STRUCTURE_BYTES_MIN + STRUCTURE_TIMES * n, &sd));
	struct reader r = { .pk = pk, .sd = sd, .n = n };
	enum err e = read_all(&r);
	mem_free(r.order);
	map_free(&r.files);
	if (!e)
		*out = move(sd);
	return e;
}
