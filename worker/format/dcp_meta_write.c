/* dcp_meta_write.c: writes `.metadata` as a protocol 2 pickle, piece by piece: nothing grows with
 * the number of chunks.
 *
 * Protocol 2 and only the opcodes that torch's weights-only unpickler knows. TensorProperties has
 * five elements, because PyTorch up to 2.14 cannot read the sixth of 2.15. Repeated objects are fetched from the memo; the numbers are
 * laid out beforehand:
 *
 *     0 …  classes and attribute names, as they come up
 *     MEMO_FIXED …  FQNs of tensors, FQNs of values, offsets of chunks
 *     then  sizes and path keys, as they come up */
#include "format/dcp_meta.h"

#include <endian.h>

#include "base/map.h"
#include "base/mem.h"
#include "base/vec.h"
#include "format/pickle.h"

enum { PIECE_BYTES = 64 << 10, SHORT_MAX = PIECE_BYTES / 2, BATCH = 1000 };
#define MODULE "torch.distributed.checkpoint.metadata\n"

/* Classes, constants and attribute names: written once, then fetched. */
enum word {
	W_METADATA, W_TENSOR, W_PROPERTIES, W_BYTES, W_CHUNK, W_INDEX, W_STORAGE_INFO, W_FORMAT,
	W_SIZE, W_LAYOUT, W_STRIDED,
	W_OFFSETS, W_SIZES, W_FQN, W_INDEX_KEY, W_OFFSET, W_PATH, W_LENGTH, W_TRANSFORMS, W_PROPERTIES_KEY, W_SIZE_KEY,
	W_CHUNKS,
	W_DTYPES,
	MEMO_FIXED = W_DTYPES + DT_COUNT,
};

static const struct {
	bool global;
	const char *text;
} words[] = {
	[W_METADATA] = { true, MODULE "Metadata\n" },
	[W_TENSOR] = { true, MODULE "TensorStorageMetadata\n" },
	[W_PROPERTIES] = { true, MODULE "TensorProperties\n" },
	[W_BYTES] = { true, MODULE "BytesStorageMetadata\n" },
	[W_CHUNK] = { true, MODULE "ChunkStorageMetadata\n" },
	[W_INDEX] = { true, MODULE "MetadataIndex\n" },
	[W_FORMAT] = { true, MODULE "_MEM_FORMAT_ENCODING\n" },
	[W_STORAGE_INFO] = { true, "torch.distributed.checkpoint.filesystem\n_StorageInfo\n" },
	[W_SIZE] = { true, "torch\nSize\n" },
	[W_LAYOUT] = { true, "torch.serialization\n_get_layout\n" },
	[W_STRIDED] = { false, "torch.strided" },
	[W_OFFSETS] = { false, "offsets" },
	[W_SIZES] = { false, "sizes" },
	[W_FQN] = { false, "fqn" },
	[W_INDEX_KEY] = { false, "index" },
	[W_OFFSET] = { false, "offset" },
	[W_PATH] = { false, "relative_path" },
	[W_LENGTH] = { false, "length" },
	[W_TRANSFORMS] = { false, "transform_descriptors" },
	[W_PROPERTIES_KEY] = { false, "properties" },
	[W_SIZE_KEY] = { false, "size" },
	[W_CHUNKS] = { false, "chunks" },
};

struct writer {
	const struct sdict *sd;
	dcp_meta_sink sink;
	void *user;
	enum err failed;             /* the first error; later puts do nothing */
	size_t len;
	bool known[MEMO_FIXED];
	struct map keys;             /* path key → memo number */
	uint32_t *files;             /* file → the memo number of its name; 0: not written yet */
	uint64_t next;               /* the next free memo number */
	const int64_t *sizes;        /* the sizes written last, their memo number and length */
	uint64_t sizes_id;
	uint32_t sizes_ndim;
	unsigned char piece[PIECE_BYTES];
};

static void flush(struct writer *w)
{
	if (!w->failed && w->len)
		w->failed = w->sink(w->user, w->piece, w->len);
	w->len = 0;
}

/* Room for n bytes, at most SHORT_MAX. Inlined, for there are some 30 short writes to a chunk. */
static inline unsigned char *room(struct writer *w, size_t n)
{
	if (n > sizeof w->piece - w->len)
		flush(w);
	return w->piece + w->len;
}

static inline void put(struct writer *w, const void *p, size_t n)
{
	if (n > SHORT_MAX) {
		flush(w);
		if (!w->failed)
			w->failed = w->sink(w->user, p, n);
		return;
	}
	memcpy(room(w, n), p, n);
	w->len += n;
}

static inline void op(struct writer *w, unsigned char code)
{
	*room(w, 1) = code;
	w->len++;
}

/* bytes: of v, at most 8. */
static inline void op_le(struct writer *w, unsigned char code, uint64_t v, unsigned bytes)
{
	unsigned char *to = room(w, 1 + sizeof v);

	v = htole64(v);
	to[0] = code;
	memcpy(to + 1, &v, sizeof v);
	w->len += 1 + bytes;
}

static void memo_put(struct writer *w, uint64_t id)
{
	if (id < 256)
		op_le(w, 'q', id, 1);
	else
		op_le(w, 'r', id, 4);
}

static void memo_get(struct writer *w, uint64_t id)
{
	if (id < 256)
		op_le(w, 'h', id, 1);
	else
		op_le(w, 'j', id, 4);
}

static void integer(struct writer *w, uint64_t v)
{
	if (v < 1 << 8) {
		op_le(w, 'K', v, 1);
	} else if (v < 1 << 16) {
		op_le(w, 'M', v, 2);
	} else if (v <= INT32_MAX) {
		op_le(w, 'J', v, 4);
	} else {
		/* LONG1: the fewest bytes whose top bit is clear. */
		unsigned bytes = (unsigned)(64 - __builtin_clzll(v)) / 8 + 1;
		op_le(w, 0x8a, bytes, 1);
		for (unsigned i = 0; i < bytes; i++)
			op(w, (unsigned char)(i < 8 ? v >> 8 * i : 0));
	}
}

/* A path's list positions may be negative in odd sources. */
static void signed_integer(struct writer *w, int64_t v)
{
	if (v >= 0) {
		integer(w, (uint64_t)v);
	} else if (v >= INT32_MIN) {
		op_le(w, 'J', (uint32_t)v, 4);
	} else {
		op_le(w, 0x8a, 8, 1);
		for (unsigned i = 0; i < 8; i++)
			op(w, (unsigned char)((uint64_t)v >> 8 * i));
	}
}

static void string(struct writer *w, struct str s)
{
	if (!w->failed && (s.n > UINT32_MAX || !pickle_utf8(s)))
		w->failed = ERR(FORMAT_METADATA, "a name that is not UTF-8 cannot be pickled");
	op_le(w, 'X', s.n, 4);
	put(w, s.p, s.n);
}

static void word(struct writer *w, enum word id)
{
	if (w->known[id]) {
		memo_get(w, id);
		return;
	}
	if (words[id].global) {
		op(w, 'c');
		put(w, words[id].text, strlen(words[id].text));
	} else {
		string(w, str_of(words[id].text));
	}
	memo_put(w, id);
	w->known[id] = true;
}

static void dtype(struct writer *w, enum dtype d)
{
	enum word id = W_DTYPES + (enum word)d;

	if (w->known[id]) {
		memo_get(w, id);
		return;
	}
	put(w, "ctorch\n", 7);
	put(w, dtype_name(d), strlen(dtype_name(d)));
	op(w, '\n');
	memo_put(w, id);
	w->known[id] = true;
}

static void new_string(struct writer *w, struct str s)
{
	if (!w->failed && w->next >= MAP_NONE)
		w->failed = ERR(LIMIT_EXCEEDED, "too many names for one .metadata");
	string(w, s);
	memo_put(w, w->next++);
}

/* Many paths have the same keys. */
static void path_key(struct writer *w, struct str key)
{
	uint32_t id = MAP_NONE;

	if (!w->failed)
		w->failed = map_intern(&w->keys, key, (uint32_t)w->next, &id);
	if (w->failed)
		return;
	if (id == w->next)
		new_string(w, key);
	else
		memo_get(w, id);
}

static void file_name(struct writer *w, uint32_t file)
{
	if (w->files[file]) {
		memo_get(w, w->files[file]);
		return;
	}
	w->files[file] = (uint32_t)w->next;
	new_string(w, w->sd->files[file].name);
}

/* cls.__new__(cls) and, with BUILD, its attributes: the caller writes key, value … between begin() and end(). */
static void begin(struct writer *w, enum word class)
{
	word(w, class);
	put(w, ")\x81}(", 4);
}

static void end(struct writer *w)
{
	put(w, "ub", 2);
}

static void size(struct writer *w, uint32_t ndim, const int64_t *dims)
{
	word(w, W_SIZE);
	if (ndim > 3)
		op(w, '(');
	for (uint32_t i = 0; i < ndim; i++)
		integer(w, (uint64_t)dims[i]);
	op(w, (unsigned char)(ndim == 0 ? ')' : ndim > 3 ? 't' : 0x84 + ndim));
	put(w, "\x85R", 2);
}

/* As size, but fetched when equal to the sizes before: nearly all chunks of a tensor are. */
static void sizes(struct writer *w, uint32_t ndim, const int64_t *dims)
{
	if (w->sizes && w->sizes_ndim == ndim && memcmp(w->sizes, dims, ndim * sizeof *dims) == 0) {
		memo_get(w, w->sizes_id);
		return;
	}
	size(w, ndim, dims);
	w->sizes = dims;
	w->sizes_ndim = ndim;
	w->sizes_id = w->next++;
	memo_put(w, w->sizes_id);
}

static uint64_t tensor_id(uint64_t tensor) { return MEMO_FIXED + tensor; }
static uint64_t value_id(const struct sdict *sd, uint64_t value) { return MEMO_FIXED + sd->tensor_count + value; }
static uint64_t chunk_id(const struct sdict *sd, uint64_t chunk) { return value_id(sd, sd->value_count) + chunk; }

static void properties(struct writer *w, const struct sd_tensor *t)
{
	word(w, W_PROPERTIES);
	put(w, ")\x81(", 3);
	dtype(w, t->dtype);
	word(w, W_LAYOUT);
	word(w, W_STRIDED);
	put(w, "\x85R", 2);
	op(w, t->requires_grad ? 0x88 : 0x89);
	word(w, W_FORMAT);
	put(w, "K\0\x85R\x89tb", 7);
}

static void chunk(struct writer *w, const struct sd_tensor *t, uint64_t index)
{
	const int64_t *dims = w->sd->chunks[index].dims;

	begin(w, W_CHUNK);
	word(w, W_OFFSETS);
	size(w, t->ndim, dims);
	memo_put(w, chunk_id(w->sd, index));
	word(w, W_SIZES);
	sizes(w, t->ndim, dims + t->ndim);
	end(w);
}

static void tensor(struct writer *w, uint64_t index)
{
	const struct sd_tensor *t = &w->sd->tensors[index];

	string(w, t->fqn);
	memo_put(w, tensor_id(index));
	begin(w, W_TENSOR);
	word(w, W_PROPERTIES_KEY);
	properties(w, t);
	word(w, W_SIZE_KEY);
	sizes(w, t->ndim, t->shape);
	word(w, W_CHUNKS);
	op(w, ']');
	for (uint64_t i = 0; i < t->chunk_count; i++) {
		if (i % BATCH == 0)
			op(w, '(');
		chunk(w, t, t->first_chunk + i);
		if (i % BATCH == BATCH - 1 || i + 1 == t->chunk_count)
			op(w, 'e');
	}
	end(w);
	if (w->failed)
		w->failed = err_at_fqn(w->failed, t->fqn.p, t->fqn.n);
}

/* Calls entry for 0 … count - 1 and groups them into SETITEMS; with no entries it writes nothing. */
static void dict_items(struct writer *w, uint64_t count, void (*entry)(struct writer *w, uint64_t i))
{
	for (uint64_t i = 0; i < count && !w->failed; i++) {
		if (i % BATCH == 0)
			op(w, '(');
		entry(w, i);
		if (i % BATCH == BATCH - 1 || i + 1 == count)
			op(w, 'u');
	}
}

static void value(struct writer *w, uint64_t index)
{
	string(w, w->sd->values[index].fqn);
	memo_put(w, value_id(w->sd, index));
	word(w, W_BYTES);
	put(w, ")\x81", 2);
}

static void path(struct writer *w, struct sd_path p, uint64_t fqn_id)
{
	memo_get(w, fqn_id);
	op(w, '(');
	if (p.count == 0)
		memo_get(w, fqn_id);
	for (uint32_t i = 0; i < p.count; i++) {
		if (p.parts[i].key.p)
			path_key(w, p.parts[i].key);
		else
			signed_integer(w, p.parts[i].index);
	}
	op(w, 't');
}

static void tensor_path(struct writer *w, uint64_t i)
{
	path(w, w->sd->tensors[i].path, tensor_id(i));
}

static void value_path(struct writer *w, uint64_t i)
{
	path(w, w->sd->values[i].path, value_id(w->sd, i));
}

static void transforms(struct writer *w, struct str joined)
{
	word(w, W_TRANSFORMS);
	put(w, "](", 2);
	for (size_t from = 0, i = 0; i <= joined.n; i++) {
		if (i < joined.n && joined.p[i] != ' ')
			continue;
		string(w, (struct str){ joined.p + from, i - from });
		from = i + 1;
	}
	op(w, 'e');
}

static void storage_info(struct writer *w, const struct sd_loc *loc)
{
	const struct sdict *sd = w->sd;

	begin(w, W_STORAGE_INFO);
	word(w, W_PATH);
	file_name(w, loc->file);
	word(w, W_OFFSET);
	integer(w, loc->offset);
	word(w, W_LENGTH);
	integer(w, loc->length);
	if (loc->transform)
		transforms(w, sd->transforms[loc->transform - 1]);
	end(w);
}

static void chunk_storage(struct writer *w, uint64_t i)
{
	const struct sd_chunk *c = &w->sd->chunks[i];

	begin(w, W_INDEX);
	word(w, W_FQN);
	memo_get(w, tensor_id(c->tensor));
	word(w, W_INDEX_KEY);
	integer(w, i - w->sd->tensors[c->tensor].first_chunk);
	word(w, W_OFFSET);
	memo_get(w, chunk_id(w->sd, i));
	end(w);
	storage_info(w, &c->loc);
}

static void value_storage(struct writer *w, uint64_t i)
{
	begin(w, W_INDEX);
	word(w, W_FQN);
	memo_get(w, value_id(w->sd, i));
	word(w, W_INDEX_KEY);
	op(w, 'N');
	end(w);
	storage_info(w, &w->sd->values[i].loc);
}

static void optional(struct writer *w, const char *text)
{
	if (text)
		string(w, str_of(text));
	else
		op(w, 'N');
}

static void all(struct writer *w, const struct dcp_meta_opts *opts)
{
	const struct sdict *sd = w->sd;

	put(w, "\x80\x02", 2);
	begin(w, W_METADATA);
	string(w, STR("state_dict_metadata"));
	op(w, '}');
	dict_items(w, sd->tensor_count, tensor);
	dict_items(w, sd->value_count, value);
	string(w, STR("planner_data"));
	op(w, sd->has_paths ? '}' : 'N');
	if (sd->has_paths) {
		dict_items(w, sd->tensor_count, tensor_path);
		dict_items(w, sd->value_count, value_path);
	}
	string(w, STR("storage_data"));
	op(w, '}');
	dict_items(w, sd->chunk_count, chunk_storage);
	dict_items(w, sd->value_count, value_storage);
	string(w, STR("storage_meta"));
	op(w, 'N'); /* 2.3 has no StorageMeta; newer readers make one. Its members are attributes of Metadata itself. */
	string(w, STR("checkpoint_id"));
	optional(w, opts->checkpoint_id);
	string(w, STR("save_id"));
	optional(w, opts->save_id);
	string(w, STR("version"));
	string(w, STR("1.0.0"));
	end(w);
	op(w, '.');
}

static FALLIBLE enum err check(const struct sdict *sd)
{
	each(c, sd->chunks, sd->chunk_count) {
		if (c->loc.file >= sd->file_count || c->loc.transform > sd->transform_count) {
			struct str fqn = sd->tensors[c->tensor].fqn;
			return err_at_fqn(ERR(FORMAT_METADATA, "a chunk without a file"), fqn.p, fqn.n);
		}
	}
	each(v, sd->values, sd->value_count) {
		if (v->loc.file >= sd->file_count || v->loc.transform > sd->transform_count)
			return err_at_fqn(ERR(FORMAT_METADATA, "a value without a file"), v->fqn.p, v->fqn.n);
	}
	/* Memo numbers have 32 bits; sizes and keys take at most one more for each chunk, tensor, file and path key. */
	if (chunk_id(sd, sd->chunk_count) > UINT32_MAX / 4)
		return ERR(LIMIT_EXCEEDED, "too many chunks for one .metadata");
	return OK;
}

enum err dcp_meta_write(const struct sdict *sd, const struct dcp_meta_opts *opts, dcp_meta_sink sink, void *user)
{
	CLEANUP(mem_free_ptr) uint32_t *files = NULL;
	struct writer w;

	TRY(check(sd));
	files = mem_zalloc(sd->file_count, sizeof *files);
	NEED(files, "no memory for the names of %ju files", (uintmax_t)sd->file_count);
	memset(&w, 0, offsetof(struct writer, piece));
	w.files = files;
	w.sd = sd;
	w.sink = sink;
	w.user = user;
	w.next = chunk_id(sd, sd->chunk_count);
	all(&w, opts);
	flush(&w);
	map_free(&w.keys);
	return w.failed;
}
