/* gguf_open.c: GGUF as a source, version 2 or 3, little-endian. The metadata are walked over: they may be tens of megabytes of tokens, and
 * only the alignment matters here. The file is read in windows, and no length in it is believed before the file is known to be as long.
 *
 * Tensors in blocks of Q8_0 are float32, worked out as they are read. Others are shown as gguf-py's reader shows them: as uint8, the last
 * dim in bytes. Their bytes can be copied, compared and looked at; dcpd does not work out what numbers they stand for. */
#include <stdlib.h>
#include <string.h>

#include "base/num.h"
#include "base/reader.h"
#include "base/vec.h"
#include "format/format.h"
#include "format/gguf.h"
#include "tensor/box.h"

enum { WINDOW = 256 << 10, DEPTH_MAX = 4, KEY_MAX = 65535, HEAD_MAX = 1 << 30, ENTRY_MIN = 8 + 4 + 4 + 8, VALUE_TYPES = 13,
       TENSORS_MAX = 1 << 20 };

/* A tensor of the table. */
struct entry {
	struct str name;
	uint64_t offset, bytes;        /* in the data */
	int64_t shape[GGUF_DIMS_MAX];
	uint32_t ndim;
	enum dtype dtype;
	bool q8_0;
	const char *blocks;            /* the name of their type, if they are not worked out */
};

struct opening {
	const struct format_source *s;
	const char *name;
	uint64_t file_bytes, at;       /* at: of the next field */
	unsigned char *window;         /* [from, from + n) of the file */
	uint64_t from, n;
	uint64_t align;
	struct arena *arena;
	struct vec(struct entry) entries;
	struct sdict *sd;
};

static FALLIBLE enum err bad(const struct opening *o, const char *what)
{
	return err_at_file(ERR(FORMAT_GGUF, "%s", what), o->name, (int64_t)o->at);
}

/* The next n bytes, at most WINDOW of them; good until the next call. */
static FALLIBLE enum err take(struct opening *o, uint64_t n, const unsigned char **out)
{
	if (n > o->file_bytes - o->at)
		return bad(o, "the file ends within its header");
	if (o->at < o->from || o->at - o->from + n > o->n) {
		o->n = num_min(WINDOW, o->file_bytes - o->at);
		o->from = o->at;
		TRY(o->s->read(o->s->user, o->name, o->from, o->window, o->n));
	}
	*out = o->window + (o->at - o->from);
	o->at += n;
	return o->at <= HEAD_MAX ? OK : bad(o, "a header of more than 1 GiB");
}

static FALLIBLE enum err skip(struct opening *o, uint64_t n)
{
	if (n > o->file_bytes - o->at)
		return bad(o, "a length beyond the end of the file");
	o->at += n;
	return OK;
}

static FALLIBLE enum err take_number(struct opening *o, uint32_t bytes, uint64_t *out)
{
	const unsigned char *p;

	TRY(take(o, bytes, &p));
	struct reader r = reader_of(p, bytes);
	*out = reader_le(&r, bytes);
	return OK;
}

/* A text of at most KEY_MAX bytes, good until the next call. */
static FALLIBLE enum err take_text(struct opening *o, struct str *out)
{
	const unsigned char *p;
	uint64_t n;

	TRY(take_number(o, 8, &n));
	if (n > KEY_MAX)
		return bad(o, "a name of more than 65,535 bytes");
	TRY(take(o, n, &p));
	*out = (struct str){ (const char *)p, n };
	return OK;
}

/* Bytes of a value of the type; 0: it has no fixed size. */
static uint32_t value_bytes(uint64_t type)
{
	static const uint8_t bytes[VALUE_TYPES] = { 1, 1, 2, 2, 4, 4, 4, 1, [10] = 8, [11] = 8, [12] = 8 };

	return type < VALUE_TYPES ? bytes[type] : 0;
}

static FALLIBLE enum err skip_value(struct opening *o, uint64_t type, uint32_t depth);

static FALLIBLE enum err skip_array(struct opening *o, uint32_t depth)
{
	uint64_t type, count, bytes;

	TRY(take_number(o, 4, &type));
	TRY(take_number(o, 8, &count));
	if (depth == DEPTH_MAX)
		return bad(o, "arrays in arrays, too deep");
	if (value_bytes(type)) {
		if (__builtin_mul_overflow(count, value_bytes(type), &bytes))
			return bad(o, "an array that is larger than any file");
		return skip(o, bytes);
	}
	if (count > (o->file_bytes - o->at) / 8) /* a text or an array has a length */
		return bad(o, "an array of more elements than the file has room for");
	for (uint64_t i = 0; i < count; i++)
		TRY(skip_value(o, type, depth + 1));
	return OK;
}

static FALLIBLE enum err skip_value(struct opening *o, uint64_t type, uint32_t depth)
{
	uint64_t n;

	if (value_bytes(type))
		return skip(o, value_bytes(type));
	if (type == GGUF_ARRAY)
		return skip_array(o, depth);
	if (type != GGUF_STRING)
		return bad(o, "a value of a type that GGUF has not");
	TRY(take_number(o, 8, &n));
	return skip(o, n);
}

static FALLIBLE enum err read_pair(struct opening *o)
{
	struct str key;
	uint64_t type;

	TRY(take_text(o, &key));
	bool align = str_is(key, "general.alignment");
	TRY(take_number(o, 4, &type));
	if (!align)
		return skip_value(o, type, 0);
	if (type != GGUF_U32)
		return bad(o, "an alignment that is no 32-bit number");
	TRY(take_number(o, 4, &o->align));
	if (o->align == 0 || o->align > 1 << 30 || (o->align & (o->align - 1)))
		return bad(o, "an alignment that is no power of two");
	return OK;
}

/* ------------------------------------------------------------------------------------------------------ tensors */

/* ggml's block types: elements and bytes of a block. */
struct block_type {
	uint8_t type;
	const char *name;
	uint16_t elements, bytes;
};

static const struct block_type *block_of(uint64_t type)
{
	static const struct block_type blocks[] = {
		{ 2, "Q4_0", 32, 18 },      { 3, "Q4_1", 32, 20 },      { 6, "Q5_0", 32, 22 },      { 7, "Q5_1", 32, 24 },
		{ 8, "Q8_0", 32, 34 },      { 9, "Q8_1", 32, 40 },      { 10, "Q2_K", 256, 84 },    { 11, "Q3_K", 256, 110 },
		{ 12, "Q4_K", 256, 144 },   { 13, "Q5_K", 256, 176 },   { 14, "Q6_K", 256, 210 },   { 15, "Q8_K", 256, 292 },
		{ 16, "IQ2_XXS", 256, 66 }, { 17, "IQ2_XS", 256, 74 },  { 18, "IQ3_XXS", 256, 98 }, { 19, "IQ1_S", 256, 50 },
		{ 20, "IQ4_NL", 32, 18 },   { 21, "IQ3_S", 256, 110 },  { 22, "IQ2_S", 256, 82 },   { 23, "IQ4_XS", 256, 136 },
		{ 29, "IQ1_M", 256, 56 },   { 34, "TQ1_0", 256, 54 },   { 35, "TQ2_0", 256, 66 },
	};

	for (size_t i = 0; i < sizeof blocks / sizeof *blocks; i++)
		if (blocks[i].type == type)
			return &blocks[i];
	return NULL;
}

static bool plain_of(uint64_t type, enum dtype *out)
{
	for (int d = 0; d < DT_COUNT; d++) {
		uint32_t t;
		*out = (enum dtype)d;
		if (gguf_type_of(*out, &t) && t == type)
			return true;
	}
	return false;
}

/* Sets dtype, shape and bytes: of blocks that are not worked out the last dim becomes bytes. */
static FALLIBLE enum err set_type(const struct opening *o, struct entry *e, uint64_t type)
{
	const struct block_type *block = block_of(type);
	int64_t *last = e->ndim ? &e->shape[e->ndim - 1] : NULL;
	uint64_t numel;

	if (!block && !plain_of(type, &e->dtype))
		return err_at_file(ERR(FORMAT_UNSUPPORTED, "a tensor of ggml's type %ju, which is not known", (uintmax_t)type), o->name,
				   (int64_t)o->at);
	e->q8_0 = type == GGUF_Q8_0;
	if (block && (!last || *last % block->elements))
		return bad(o, "a row that is not made of whole blocks");
	if (block && !e->q8_0 && __builtin_mul_overflow(*last / block->elements, block->bytes, last))
		return bad(o, "a row that is larger than any file");
	if (block) {
		e->dtype = e->q8_0 ? DT_FLOAT32 : DT_UINT8;
		e->blocks = e->q8_0 ? NULL : block->name;
	}
	if (box_numel(e->ndim, e->shape, &numel) || __builtin_mul_overflow(numel, dtype_bytes(e->dtype), &e->bytes))
		return bad(o, "a tensor that is larger than any file");
	if (e->q8_0)
		e->bytes = numel / block->elements * block->bytes;
	return OK;
}

static FALLIBLE enum err read_entry(struct opening *o, struct entry *e)
{
	struct str name;
	uint64_t ndim, type, dim;

	TRY(take_text(o, &name));
	TRY(arena_str(o->arena, name, &e->name));
	TRY(take_number(o, 4, &ndim));
	if (ndim > GGUF_DIMS_MAX)
		return bad(o, "a tensor of more than 4 dims");
	e->ndim = (uint32_t)ndim;
	for (uint32_t d = e->ndim; d-- > 0;) {
		TRY(take_number(o, 8, &dim));
		if (dim > INT64_MAX)
			return bad(o, "a dim of more than 2^63 - 1");
		e->shape[d] = (int64_t)dim;
	}
	TRY(take_number(o, 4, &type));
	TRY(take_number(o, 8, &e->offset));
	TRY(set_type(o, e, type));
	return e->offset % o->align ? bad(o, "a tensor that does not begin at a multiple of the alignment") : OK;
}

static FALLIBLE enum err read_table(struct opening *o, uint64_t count)
{
	struct entry *e;

	for (uint64_t i = 0; i < count; i++) {
		TRY(vec_push(&o->entries, &e));
		*e = (struct entry){ 0 };
		enum err bad = read_entry(o, e);
		if (bad)
			return e->name.p ? err_at_fqn(bad, e->name.p, e->name.n) : bad;
	}
	return OK;
}

static int by_offset(const void *a, const void *b, void *user)
{
	const struct entry *entries = user, *x = &entries[*(const uint32_t *)a], *y = &entries[*(const uint32_t *)b];

	return num_order(x->offset, y->offset) ?: num_order(x->bytes, y->bytes);
}

/* Every tensor lies in the file, and no two share bytes. */
static FALLIBLE enum err check_places(const struct opening *o, uint64_t data)
{
	uint64_t n = o->entries.n, end = 0;
	CLEANUP(mem_free_ptr) uint32_t *order = mem_alloc(n * sizeof *order + 1);

	NEED(order, "no memory for %ju tensors", (uintmax_t)n);
	for (uint64_t i = 0; i < n; i++)
		order[i] = (uint32_t)i;
	if (n)
		qsort_r(order, n, sizeof *order, by_offset, o->entries.v);
	for (uint64_t i = 0; i < n; i++) {
		const struct entry *e = &o->entries.v[order[i]];
		enum err bad = OK;
		if (data > o->file_bytes || !num_inside(e->offset, e->bytes, o->file_bytes - data))
			bad = ERR(CHECKPOINT_INCOMPLETE, "the tensor's %ju bytes at %ju of the data end beyond the file",
				  (uintmax_t)e->bytes, (uintmax_t)e->offset);
		else if (e->bytes && e->offset < end)
			bad = ERR(FORMAT_GGUF, "the tensor shares bytes with another one");
		TRY(err_at_fqn(err_at_file(bad, o->name, (int64_t)data), e->name.p, e->name.n));
		end = e->bytes ? e->offset + e->bytes : end;
	}
	return OK;
}

static FALLIBLE enum err add_strides(struct arena *a, const struct entry *e, struct sd_strided *out)
{
	int64_t *strides, at = 1;

	TRY(arena_i64(a, e->ndim, &strides));
	for (uint32_t d = e->ndim; d-- > 0; at *= e->shape[d]) /* a product that box_numel knows */
		strides[d] = at;
	*out = (struct sd_strided){ .strides = strides, .q8_0 = true };
	return OK;
}

static FALLIBLE enum err add_tensor(struct opening *o, const struct entry *e, struct sd_loc loc)
{
	int64_t dims[2 * GGUF_DIMS_MAX] = { 0 };
	uint32_t tensor;

	memcpy(dims + e->ndim, e->shape, e->ndim * sizeof *dims);
	TRY(sdict_add_tensor(o->sd, e->name, e->dtype, e->ndim, e->shape, &tensor));
	o->sd->tensors[tensor].blocks = e->blocks;
	return sdict_add_chunk(o->sd, tensor, dims, 0, loc);
}

static FALLIBLE enum err add_tensors(struct opening *o, uint32_t file, uint64_t data)
{
	struct sd_strided *strided;
	uint32_t n = 0;

	TRY(arena_alloc(o->sd->arena, o->entries.n, sizeof *strided, &strided));
	o->sd->strided = strided;
	each(e, o->entries.v, o->entries.n) {
		struct sd_loc loc = { file, 0, data + e->offset, e->bytes };
		enum err bad = OK;
		if (e->q8_0 && e->bytes) {
			loc.transform = SD_STRIDED | n;
			bad = add_strides(o->sd->arena, e, &strided[n++]);
		}
		if (!bad)
			bad = add_tensor(o, e, loc);
		TRY(err_at_fqn(err_at_file(bad, o->name, -1), e->name.p, e->name.n));
	}
	return OK;
}

static FALLIBLE enum err read_file(struct opening *o)
{
	const unsigned char *magic;
	uint64_t version, tensors, pairs, data;
	uint32_t file;

	TRY(sdict_add_file(o->sd, str_of(o->name), 0, &file));
	TRY(o->s->bytes_of(o->s->user, o->name, &o->file_bytes));
	TRY(take(o, 4, &magic));
	if (memcmp(magic, "GGUF", 4) != 0)
		return bad(o, "no GGUF file: it does not begin so");
	TRY(take_number(o, 4, &version));
	if (version != 2 && version != GGUF_VERSION)
		return err_at_file(ERR(FORMAT_UNSUPPORTED, "GGUF of version %ju, or big-endian; known are 2 and 3", (uintmax_t)version),
				   o->name, 4);
	TRY(take_number(o, 8, &tensors));
	TRY(take_number(o, 8, &pairs));
	if (tensors > o->file_bytes / ENTRY_MIN || tensors > TENSORS_MAX || pairs > o->file_bytes / 13)
		return bad(o, "more tensors or metadata than the file has room for");
	for (uint64_t i = 0; i < pairs; i++)
		TRY(read_pair(o));
	TRY(read_table(o, tensors));
	if (o->s->unchecked)
		o->s->unchecked(o->s->user, o->at);
	TRY(num_align(o->at, o->align, &data));
	TRY(check_places(o, data));
	return add_tensors(o, file, data);
}

bool gguf_file_is(const void *first, size_t n)
{
	return n >= 8 && memcmp(first, "GGUF", 4) == 0;
}

enum err format_open_gguf(const struct format_source *s, struct arena *scratch, struct sdict **out)
{
	CLEANUP(mem_free_ptr) unsigned char *window = mem_alloc(WINDOW);
	struct opening o = { .s = s, .name = s->payload[0], .align = GGUF_ALIGN, .window = window, .arena = scratch };

	NEED(window, "no memory for a header");
	TRY(sdict_new(UINT64_MAX, out));
	o.sd = *out;
	enum err e = read_file(&o);
	vec_free(&o.entries);
	return e;
}
