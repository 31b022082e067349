/* dcp_index.c: see dcp_index.h. */
#include "format/dcp_index.h"

#include <isa-l/crc.h>
#include <stdio.h>
#include <stdlib.h>

#include "format/jscan.h"
#include "tensor/box.h"

#define BEGINS "{\"dcpd_index\":1,"
#define ENDS ",\"bytes\":%12ju,\"crc32\":\"%08x\"}\n"

enum { PAGE = FILE_PLAN_PAGE, ENDS_BYTES = 9 + 12 + 10 + 8 + 3, PATH_MAX_PARTS = 256 };

/* ------------------------------------------------------------------------------------------------------ writing */

static void put_number(struct buf *b, uint64_t v)
{
	char digits[20];
	size_t at = sizeof digits;

	do
		digits[--at] = (char)('0' + v % 10);
	while (v /= 10);
	buf_put(b, digits + at, sizeof digits - at);
}

static void put_dims(struct buf *b, const int64_t *dims, uint32_t n, bool first)
{
	for (uint32_t i = 0; i < n; i++) {
		if (i || !first)
			buf_putc(b, ',');
		put_number(b, (uint64_t)dims[i]);
	}
}

static FALLIBLE enum err put_path(struct buf *b, struct sd_path path)
{
	buf_puts(b, ",[");
	for (uint32_t i = 0; i < path.count; i++) {
		const struct sd_path_part *p = &path.parts[i];
		bool is_int = p->key.p && p->index == SD_PATH_INT_KEY;
		if (i)
			buf_putc(b, ',');
		if (!p->key.p) {
			buf_printf(b, "%jd", (intmax_t)p->index);
			continue;
		}
		buf_puts(b, is_int ? "[" : "");
		TRY(jscan_put_str(b, p->key));
		buf_puts(b, is_int ? "]" : "");
	}
	buf_putc(b, ']');
	return OK;
}

static FALLIBLE enum err put_key(struct buf *b, uint64_t number, struct str fqn, struct sd_path path)
{
	buf_putc(b, '[');
	put_number(b, number);
	buf_putc(b, ',');
	TRY(err_at_fqn(jscan_put_str(b, fqn), fqn.p, fqn.n));
	return err_at_fqn(put_path(b, path), fqn.p, fqn.n);
}

static FALLIBLE enum err put_tensor(struct buf *b, const struct sdict *sd, const struct file_plan_item *const *items, uint64_t n)
{
	uint32_t number = sd->chunks[items[0]->index].tensor;
	const struct sd_tensor *t = &sd->tensors[number];

	TRY(put_key(b, number, t->fqn, t->path));
	buf_printf(b, ",\"%s\",%s,[", dtype_name(t->dtype), t->requires_grad ? "true" : "false");
	put_dims(b, t->shape, t->ndim, true);
	buf_puts(b, "],[");
	for (uint64_t i = 0; i < n; i++) {
		if (i)
			buf_putc(b, ',');
		put_number(b, items[i]->index);
		buf_putc(b, ',');
		put_number(b, items[i]->offset);
		buf_putc(b, ',');
		put_number(b, items[i]->at.length);
		put_dims(b, sd->chunks[items[i]->index].dims, 2u * t->ndim, false);
	}
	buf_puts(b, "]]");
	return OK;
}

static int by_index(const void *a, const void *b)
{
	const struct file_plan_item *x = *(const struct file_plan_item *const *)a, *y = *(const struct file_plan_item *const *)b;

	if (x->kind != y->kind)
		return x->kind < y->kind ? -1 : 1;
	return x->index < y->index ? -1 : x->index > y->index;
}

/* sorted: chunks first, those of a tensor in a row. */
static FALLIBLE enum err put_items(struct buf *b, const struct sdict *sd, const struct file_plan_item *const *sorted, uint64_t count)
{
	uint64_t i = 0, first;

	buf_printf(b, BEGINS "\"tensors\":%ju,\"chunks\":%ju,\"values\":%ju,\"paths\":%s,\n\"t\":[", (uintmax_t)sd->tensor_count,
		   (uintmax_t)sd->chunk_count, (uintmax_t)sd->value_count, sd->has_paths ? "true" : "false");
	while (i < count && sorted[i]->kind == FILE_PLAN_CHUNK) {
		for (first = i; i < count && sorted[i]->kind == FILE_PLAN_CHUNK &&
				sd->chunks[sorted[i]->index].tensor == sd->chunks[sorted[first]->index].tensor; i++)
			;
		buf_puts(b, first ? ",\n" : "");
		TRY(put_tensor(b, sd, sorted + first, i - first));
	}
	buf_puts(b, "],\n\"v\":[");
	for (first = i; i < count; i++) {
		const struct sd_value *v = &sd->values[sorted[i]->index];
		buf_puts(b, i > first ? ",\n" : "");
		TRY(put_key(b, sorted[i]->index, v->fqn, v->path));
		buf_printf(b, ",%ju,%ju]", (uintmax_t)sorted[i]->offset, (uintmax_t)sorted[i]->at.length);
	}
	buf_putc(b, ']');
	return OK;
}

enum err dcp_index_put(struct buf *b, const struct sdict *sd, const struct file_plan_item *items, uint64_t count)
{
	CLEANUP(mem_free_ptr) const struct file_plan_item **sorted = mem_zalloc(count + 1, sizeof *sorted);
	size_t begin = b->len;

	NEED(sorted, "no memory for an index of %ju items", (uintmax_t)count);
	for (uint64_t i = 0; i < count; i++)
		sorted[i] = &items[i];
	qsort(sorted, count, sizeof *sorted, by_index);
	TRY(put_items(b, sd, sorted, count));
	size_t bytes = (size_t)file_plan_page_up(b->len - begin + ENDS_BYTES);
	buf_fill(b, ' ', bytes - ENDS_BYTES - (b->len - begin));
	TRY(buf_status(b));
	buf_printf(b, ENDS, (uintmax_t)bytes, crc32_gzip_refl(0, b->p + begin, b->len - begin));
	return buf_status(b);
}

/* ------------------------------------------------------------------------------------------------------ finding */

/* Reads the last line: how many bytes the index has, and its CRC32. False: there is none. */
static bool read_end(const char end[ENDS_BYTES], uint64_t *bytes_out, uint32_t *crc_out)
{
	char again[ENDS_BYTES + 1];
	struct str digits = { end + 9, 12 };
	int64_t crc = str_hex((struct str){ end + 31, 8 }, 8);

	while (digits.n && *digits.p == ' ')
		digits = (struct str){ digits.p + 1, digits.n - 1 };
	if (!str_to_u64(digits, bytes_out) || crc < 0)
		return false;
	*crc_out = (uint32_t)crc;
	snprintf(again, sizeof again, ENDS, (uintmax_t)*bytes_out, *crc_out);
	return memcmp(again, end, ENDS_BYTES) == 0;
}

enum err dcp_index_find(const struct item_source *file, uint64_t *begin_out, char **text_out)
{
	char end[ENDS_BYTES];
	uint64_t bytes = 0;
	uint32_t crc = 0;

	*begin_out = file->length;
	if (text_out)
		*text_out = NULL;
	if (file->length < PAGE)
		return OK;
	TRY(source_read(file, file->length - ENDS_BYTES, end, ENDS_BYTES));
	if (!read_end(end, &bytes, &crc))
		return OK;
	if (bytes > file->length || bytes % PAGE || bytes == 0 || bytes > DCP_INDEX_MAX)
		return ERR(CHECKPOINT_DAMAGED, "an index of %ju bytes in a file of %ju", (uintmax_t)bytes, (uintmax_t)file->length);
	CLEANUP(mem_free_ptr) char *text = mem_alloc(bytes);
	NEED(text, "no memory for an index of %ju bytes", (uintmax_t)bytes);
	TRY(source_read(file, file->length - bytes, text, bytes));
	if (memcmp(text, BEGINS, sizeof BEGINS - 1) != 0 || crc32_gzip_refl(0, (unsigned char *)text, bytes - ENDS_BYTES) != crc)
		return ERR(CHECKPOINT_DAMAGED, "the file's index is not what was written");
	*begin_out = file->length - bytes;
	if (text_out)
		*text_out = move(text);
	return OK;
}

/* ------------------------------------------------------------------------------------------------------ reading */

struct tensor_entry {
	uint32_t number;
	uint16_t ndim;
	enum dtype dtype;
	bool requires_grad;
	struct str fqn;
	struct sd_path path;
	int64_t *shape;
};

struct chunk_entry {
	uint32_t number, tensor, rank;
	int64_t *dims;
	struct sd_loc loc;
};

struct value_entry {
	uint32_t number, rank;
	struct str fqn;
	struct sd_path path;
	struct sd_loc loc;
};

struct index_file {
	struct str name;
	uint32_t rank;
};

struct dcp_indexes {
	struct arena *arena;
	bool begun, has_paths;
	uint64_t tensor_count, chunk_count, value_count;       /* as every index says */
	struct vec(struct index_file) files;
	struct vec(struct tensor_entry) tensors;
	struct vec(struct chunk_entry) chunks;
	struct vec(struct value_entry) values;
};

struct parse {
	struct dcp_indexes *all;
	struct jscan js;
	uint64_t file_bytes;
	uint64_t tensors, chunks, values;
	bool paths;
};

void dcp_indexes_free_ptr(struct dcp_indexes **p)
{
	struct dcp_indexes *all = *p;

	if (!all)
		return;
	vec_free(&all->files);
	vec_free(&all->tensors);
	vec_free(&all->chunks);
	vec_free(&all->values);
	arena_free(all->arena);
	mem_free(all);
}

enum err dcp_indexes_new(struct dcp_indexes **out)
{
	CLEANUP(dcp_indexes_free_ptr) struct dcp_indexes *all = mem_zalloc(1, sizeof *all);

	NEED(all, "no memory for indexes");
	all->arena = arena_new((uint64_t)4 * DCP_INDEX_MAX);
	NEED(all->arena, "no memory for indexes");
	*out = move(all);
	return OK;
}

static FALLIBLE enum err take_u64(struct parse *p, uint64_t max, uint64_t *out)
{
	struct jscan_token t;
	int64_t v;

	TRY(jscan_expect(&p->js, JSCAN_NUMBER, &t));
	if (!jscan_i64(&t, &v) || v < 0 || (uint64_t)v > max)
		return jscan_bad(&p->js, "a number that cannot be");
	*out = (uint64_t)v;
	return OK;
}

static FALLIBLE enum err take_str(struct parse *p, struct str *out)
{
	struct jscan_token t;
	struct str s;

	TRY(jscan_expect(&p->js, JSCAN_STRING, &t));
	TRY(jscan_str(&p->js, &t, p->all->arena, &s));
	if (s.n > SD_FQN_MAX)
		return jscan_bad(&p->js, "a text that is too long");
	return arena_str(p->all->arena, s, out);
}

static FALLIBLE enum err take_bool(struct parse *p, bool *out)
{
	struct jscan_token t;

	TRY(jscan_next(&p->js, &t));
	*out = t.kind == JSCAN_TRUE;
	return *out || t.kind == JSCAN_FALSE ? OK : jscan_bad(&p->js, "neither true nor false");
}

/* The part whose first token is t. */
static FALLIBLE enum err take_part(struct parse *p, const struct jscan_token *t, struct sd_path_part *out)
{
	struct jscan_token end;
	struct str s;

	if (t->kind == JSCAN_NUMBER)
		return jscan_i64(t, &out->index) && out->index >= 0 ? OK : jscan_bad(&p->js, "a list position that cannot be");
	if (t->kind == JSCAN_ARRAY) {
		out->index = SD_PATH_INT_KEY;
		TRY(take_str(p, &out->key));
		return jscan_expect(&p->js, JSCAN_ARRAY_END, &end);
	}
	if (t->kind != JSCAN_STRING)
		return jscan_bad(&p->js, "a path of neither texts nor numbers");
	TRY(jscan_str(&p->js, t, p->all->arena, &s));
	return arena_str(p->all->arena, s, &out->key);
}

static FALLIBLE enum err take_path(struct parse *p, struct sd_path *out)
{
	struct sd_path_part parts[PATH_MAX_PARTS] = { { { NULL, 0 }, 0 } }, *kept;
	struct jscan_token t;

	TRY(jscan_expect(&p->js, JSCAN_ARRAY, &t));
	out->count = 0;
	JSCAN_EACH(&p->js, &t) {
		if (out->count == PATH_MAX_PARTS)
			return jscan_bad(&p->js, "a path of too many parts");
		TRY(take_part(p, &t, &parts[out->count++]));
	}
	TRY(arena_alloc(p->all->arena, out->count + 1, sizeof *kept, &kept));
	memcpy(kept, parts, out->count * sizeof *parts);
	out->parts = kept;
	return OK;
}

/* Numbers up to the array's end, `max` at most. */
static FALLIBLE enum err take_shape(struct parse *p, struct tensor_entry *out)
{
	int64_t shape[NDIM_MAX];
	struct jscan_token t;

	TRY(jscan_expect(&p->js, JSCAN_ARRAY, &t));
	JSCAN_EACH(&p->js, &t) {
		if (out->ndim == NDIM_MAX || t.kind != JSCAN_NUMBER || !jscan_i64(&t, &shape[out->ndim]) || shape[out->ndim] < 0)
			return jscan_bad(&p->js, "a shape that cannot be");
		out->ndim++;
	}
	TRY(arena_i64(p->all->arena, out->ndim, &out->shape));
	memcpy(out->shape, shape, out->ndim * sizeof *shape);
	return OK;
}

static FALLIBLE enum err take_loc(struct parse *p, struct sd_loc *out)
{
	TRY(take_u64(p, p->file_bytes, &out->offset));
	TRY(take_u64(p, p->file_bytes - out->offset, &out->length));
	out->file = (uint32_t)(p->all->files.n - 1);
	return OK;
}

/* Behind the chunk's number. */
static FALLIBLE enum err take_chunk(struct parse *p, const struct tensor_entry *t, uint64_t number)
{
	struct dcp_indexes *all = p->all;
	struct chunk_entry *c;
	uint64_t v = 0;

	if (number >= p->chunks)
		return jscan_bad(&p->js, "a chunk that cannot be");
	TRY(vec_push(&all->chunks, &c));
	*c = (struct chunk_entry){ .number = (uint32_t)number, .tensor = t->number, .rank = all->files.v[all->files.n - 1].rank };
	TRY(take_loc(p, &c->loc));
	TRY(arena_i64(all->arena, 2u * t->ndim, &c->dims));
	for (uint32_t i = 0; i < 2u * t->ndim; i++) {
		TRY(take_u64(p, INT64_MAX, &v));
		c->dims[i] = (int64_t)v;
	}
	return err_at_fqn(box_check(t->ndim, c->dims, c->dims + t->ndim, t->shape), t->fqn.p, t->fqn.n);
}

static FALLIBLE enum err take_tensor(struct parse *p)
{
	struct tensor_entry t = { .ndim = 0 }, *kept;
	struct jscan_token token;
	uint64_t number = 0;
	struct str dtype;
	int64_t first;

	TRY(take_u64(p, p->tensors ? p->tensors - 1 : 0, &number));
	t.number = (uint32_t)number;
	TRY(take_str(p, &t.fqn));
	TRY(take_path(p, &t.path));
	TRY(take_str(p, &dtype));
	TRY(err_at_fqn(dtype_parse(dtype, &t.dtype), t.fqn.p, t.fqn.n));
	TRY(take_bool(p, &t.requires_grad));
	TRY(take_shape(p, &t));
	TRY(jscan_expect(&p->js, JSCAN_ARRAY, &token));
	JSCAN_EACH(&p->js, &token) {
		if (token.kind != JSCAN_NUMBER || !jscan_i64(&token, &first) || first < 0)
			return jscan_bad(&p->js, "a chunk without a number");
		TRY(take_chunk(p, &t, (uint64_t)first));
	}
	TRY(jscan_expect(&p->js, JSCAN_ARRAY_END, &token));
	TRY(vec_push(&p->all->tensors, &kept));
	*kept = t;
	return OK;
}

static FALLIBLE enum err take_value(struct parse *p)
{
	struct value_entry *v;
	struct jscan_token t;
	uint64_t number = 0;

	TRY(vec_push(&p->all->values, &v));
	TRY(take_u64(p, p->values ? p->values - 1 : 0, &number));
	v->number = (uint32_t)number;
	v->rank = p->all->files.v[p->all->files.n - 1].rank;
	TRY(take_str(p, &v->fqn));
	TRY(take_path(p, &v->path));
	TRY(take_loc(p, &v->loc));
	return jscan_expect(&p->js, JSCAN_ARRAY_END, &t);
}

static FALLIBLE enum err take_list(struct parse *p, enum err (*one)(struct parse *p))
{
	struct jscan_token t;

	TRY(jscan_expect(&p->js, JSCAN_ARRAY, &t));
	JSCAN_EACH(&p->js, &t) {
		if (t.kind != JSCAN_ARRAY)
			return jscan_bad(&p->js, "an entry that is no array");
		TRY(one(p));
	}
	return OK;
}

/* The members stand in the order of writing: counts come before what is counted. */
static FALLIBLE enum err take_member(struct parse *p, struct str key)
{
	struct jscan_token t;
	struct str span;

	if (str_is(key, "tensors"))
		return take_u64(p, UINT32_MAX / 4, &p->tensors);
	if (str_is(key, "chunks"))
		return take_u64(p, UINT32_MAX / 4, &p->chunks);
	if (str_is(key, "values"))
		return take_u64(p, UINT32_MAX / 4, &p->values);
	if (str_is(key, "paths"))
		return take_bool(p, &p->paths);
	if (str_is(key, "t"))
		return take_list(p, take_tensor);
	if (str_is(key, "v"))
		return take_list(p, take_value);
	TRY(jscan_next(&p->js, &t));
	return jscan_skip(&p->js, &t, &span);
}

static FALLIBLE enum err take_all(struct parse *p)
{
	struct jscan_token t;

	TRY(jscan_expect(&p->js, JSCAN_OBJECT, &t));
	JSCAN_EACH(&p->js, &t)
		TRY(take_member(p, t.raw));
	return jscan_expect(&p->js, JSCAN_END, &t);
}

enum err dcp_indexes_add(struct dcp_indexes *all, struct str name, uint32_t rank, uint64_t n, struct str text)
{
	struct parse p = { .all = all, .js = jscan_of(text, ERR_FORMAT_METADATA), .file_bytes = n };
	struct index_file *file;

	TRY(vec_push(&all->files, &file));
	file->rank = rank;
	TRY(arena_str(all->arena, name, &file->name));
	TRY(take_all(&p));
	bool same = p.tensors == all->tensor_count && p.chunks == all->chunk_count && p.values == all->value_count &&
		    p.paths == all->has_paths;
	if (all->begun && !same)
		return ERR(FORMAT_METADATA, "the file's index is of another checkpoint than that of the file before");
	all->begun = true;
	all->tensor_count = p.tensors;
	all->chunk_count = p.chunks;
	all->value_count = p.values;
	all->has_paths = p.paths;
	return OK;
}

/* ------------------------------------------------------------------------------------------------------ joining */

static int by_tensor(const void *a, const void *b)
{
	const struct tensor_entry *x = a, *y = b;

	return x->number < y->number ? -1 : x->number > y->number;
}

static int by_chunk(const void *a, const void *b)
{
	const struct chunk_entry *x = a, *y = b;

	return x->number < y->number ? -1 : x->number > y->number;
}

static int by_value(const void *a, const void *b)
{
	const struct value_entry *x = a, *y = b;

	return x->number < y->number ? -1 : x->number > y->number;
}

static bool same_tensor(const struct tensor_entry *a, const struct tensor_entry *b)
{
	return str_eq(a->fqn, b->fqn) && a->dtype == b->dtype && box_same_shape(a->ndim, a->shape, b->ndim, b->shape);
}

/* A tensor with chunks in several files is in the index of each. */
static FALLIBLE enum err drop_repeated(struct dcp_indexes *all)
{
	uint64_t n = 0;

	if (all->tensors.n)
		qsort(all->tensors.v, all->tensors.n, sizeof *all->tensors.v, by_tensor);
	each(t, all->tensors.v, all->tensors.n) {
		if (n == 0 || t->number != all->tensors.v[n - 1].number)
			all->tensors.v[n++] = *t;
		else if (!same_tensor(t, &all->tensors.v[n - 1]))
			return err_at_fqn(ERR(FORMAT_METADATA, "two indexes have another tensor under the number %u", t->number),
					  t->fqn.p, t->fqn.n);
	}
	all->tensors.n = n;
	return OK;
}

static FALLIBLE enum err check_complete(const struct dcp_indexes *all)
{
	if (!all->begun)
		return ERR(CHECKPOINT_INCOMPLETE, "no file says which tensors are in it");
	for (uint64_t i = 1; i < all->chunks.n; i++)
		if (all->chunks.v[i].number == all->chunks.v[i - 1].number)
			return ERR(FORMAT_METADATA, "two indexes list chunk %u", all->chunks.v[i].number);
	for (uint64_t i = 1; i < all->values.n; i++)
		if (all->values.v[i].number == all->values.v[i - 1].number)
			return ERR(FORMAT_METADATA, "two indexes list value %u", all->values.v[i].number);
	if (all->tensors.n == all->tensor_count && all->chunks.n == all->chunk_count && all->values.n == all->value_count)
		return OK;
	return ERR(CHECKPOINT_INCOMPLETE, "of %ju tensors in %ju chunks and %ju values, %ju in %ju and %ju are in the files that are here",
		   (uintmax_t)all->tensor_count, (uintmax_t)all->chunk_count, (uintmax_t)all->value_count, (uintmax_t)all->tensors.n,
		   (uintmax_t)all->chunks.n, (uintmax_t)all->values.n);
}

static FALLIBLE enum err add_tensors(const struct dcp_indexes *all, struct sdict *sd)
{
	uint64_t c = 0;
	uint32_t index;

	each(t, all->tensors.v, all->tensors.n) {
		TRY(sdict_add_tensor(sd, t->fqn, t->dtype, t->ndim, t->shape, &index));
		sd->tensors[index].requires_grad = t->requires_grad;
		TRY(sdict_copy_path(sd, t->path, &sd->tensors[index].path));
		for (; c < all->chunks.n && all->chunks.v[c].tensor == t->number; c++)
			TRY(sdict_add_chunk(sd, index, all->chunks.v[c].dims, all->chunks.v[c].rank, all->chunks.v[c].loc));
	}
	return c == all->chunks.n ? OK : ERR(FORMAT_METADATA, "the chunks of a tensor are not in a row");
}

enum err dcp_indexes_join(struct dcp_indexes *all, struct sdict **out)
{
	CLEANUP(sdict_free_ptr) struct sdict *sd = NULL;
	uint32_t index;

	TRY(drop_repeated(all));
	if (all->chunks.n)
		qsort(all->chunks.v, all->chunks.n, sizeof *all->chunks.v, by_chunk);
	if (all->values.n)
		qsort(all->values.v, all->values.n, sizeof *all->values.v, by_value);
	TRY(check_complete(all));
	TRY(sdict_new(UINT64_MAX, &sd));
	for (uint64_t i = 0; i < all->files.n; i++)
		TRY(sdict_add_file(sd, all->files.v[i].name, all->files.v[i].rank, &index));
	TRY(add_tensors(all, sd));
	each(v, all->values.v, all->values.n) {
		TRY(sdict_add_value(sd, v->fqn, v->rank, v->loc, &index));
		TRY(sdict_copy_path(sd, v->path, &sd->values[index].path));
	}
	sd->has_paths = all->has_paths;
	*out = move(sd);
	return OK;
}
