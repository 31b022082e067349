/* sdict.c: building state dict structures (see sdict.h). The big arrays are grown in place with realloc rather than in the arena,
 * which would leave every outgrown copy behind; what they take counts against the same cap. */
#include "tensor/sdict.h"

#include <stdio.h>

#include "base/mem.h"
#include "base/num.h"
#include "tensor/box.h"

enum { FIRST_CAP = 16, TRANSFORMS_MAX = 64 };

enum err sdict_new(uint64_t arena_cap_bytes, struct sdict **out)
{
	struct sdict *sd = mem_zalloc(1, sizeof *sd);

	NEED(sd, "no memory for a state dict");
	sd->cap_bytes = arena_cap_bytes;
	sd->arena = arena_new(arena_cap_bytes);
	if (!sd->arena) {
		mem_free(sd);
		return ERR(NO_MEMORY, "no memory for a state dict");
	}
	*out = sd;
	return OK;
}

void sdict_free(struct sdict *sd)
{
	if (!sd)
		return;
	mem_free(sd->tensors);
	mem_free(sd->chunks);
	mem_free(sd->values);
	mem_free(sd->differing);
	mem_free(sd->files);
	mem_free(sd->transforms);
	table_free(&sd->names);
	arena_free(sd->arena);
	mem_free(sd);
}

void sdict_free_ptr(struct sdict **sd)
{
	sdict_free(*sd);
}

static FALLIBLE enum err check_cap(const struct sdict *sd, uint64_t more)
{
	uint64_t total;

	TRY(num_add(sd->array_bytes, arena_used(sd->arena), &total));
	TRY(num_add(total, more, &total));
	if (total > sd->cap_bytes)
		return ERR(LIMIT_EXCEEDED, "more than %ju bytes of metadata", (uintmax_t)sd->cap_bytes);
	return OK;
}

static FALLIBLE enum err grow(struct sdict *sd, void *array_ptr, uint64_t want, uint64_t *cap, size_t bytes)
{
	uint64_t more;
	void *old;

	TRY(num_mul(want - *cap, bytes, &more));
	TRY(check_cap(sd, more));
	memcpy(&old, array_ptr, sizeof old);
	void *p = mem_grow(old, want, bytes);
	NEED(p, "no memory for %ju entries of a state dict", (uintmax_t)want);
	memcpy(array_ptr, &p, sizeof p);
	*cap = want;
	sd->array_bytes += more;
	return OK;
}

/* Makes room for one more entry: half as many again each time. */
static FALLIBLE enum err room(struct sdict *sd, void *array_ptr, uint64_t count, uint64_t *cap, size_t bytes)
{
	if (count < *cap)
		return check_cap(sd, 0);
	return grow(sd, array_ptr, *cap ? *cap + *cap / 2 : FIRST_CAP, cap, bytes);
}

static struct str fqn_of(const struct sdict *sd, uint32_t item)
{
	return item & SD_VALUE_BIT ? sd->values[item & ~SD_VALUE_BIT].fqn : sd->tensors[item].fqn;
}

static FALLIBLE enum err name_room(struct sdict *sd, uint64_t keys)
{
	uint64_t old = sd->names.v ? (uint64_t)sd->names.raw.mask + 1 : 0, slots = table_slots(keys);

	if (slots <= old)
		return OK;
	TRY(check_cap(sd, slots * sizeof *sd->names.v));
	TRY(table_reserve(&sd->names, keys));
	sd->array_bytes += (slots - old) * sizeof *sd->names.v;
	return OK;
}

/* The item is not there yet: the caller puts it where `item` says. */
static FALLIBLE enum err add_name(struct sdict *sd, struct str fqn, uint32_t item)
{
	if (fqn.n > SD_FQN_MAX)
		return err_at_fqn(ERR(LIMIT_EXCEEDED, "a key of %zu bytes, more than %d", fqn.n, SD_FQN_MAX), fqn.p, fqn.n);
	uint32_t hash = table_hash(fqn);
	struct table_item *n;
	table_find(&sd->names, hash, n, str_eq(fqn_of(sd, n->item), fqn));
	if (n)
		return err_at_fqn(ERR(DUPLICATE_KEY, "the key is there twice"), fqn.p, fqn.n);
	TRY(name_room(sd, (uint64_t)sd->names.raw.count + 1));
	TRY(table_add(&sd->names, hash, &n));
	n->item = item;
	return OK;
}

enum err sdict_reserve(struct sdict *sd, uint64_t keys, uint64_t tensors, uint64_t chunks)
{
	TRY(name_room(sd, keys));
	if (tensors > sd->tensor_cap)
		TRY(grow(sd, &sd->tensors, tensors, &sd->tensor_cap, sizeof *sd->tensors));
	return chunks > sd->chunk_cap ? grow(sd, &sd->chunks, chunks, &sd->chunk_cap, sizeof *sd->chunks) : OK;
}

/* A shape is believed only if its bytes can be counted. */
static FALLIBLE enum err check_shape(enum dtype dtype, uint32_t ndim, const int64_t *shape)
{
	uint64_t numel, bytes;

	if (ndim > NDIM_MAX)
		return ERR(LIMIT_EXCEEDED, "%u dims, at most %d are possible", ndim, NDIM_MAX);
	TRY(box_numel(ndim, shape, &numel));
	TRY(num_mul(numel, dtype_bytes(dtype), &bytes));
	if (bytes > INT64_MAX)
		return ERR(LIMIT_EXCEEDED, "%ju elements of %s are too many", (uintmax_t)numel,
			   dtype_name(dtype));
	return OK;
}

static FALLIBLE enum err tensor_room(struct sdict *sd)
{
	if (sd->tensor_count >= SD_VALUE_BIT - 1)
		return ERR(LIMIT_EXCEEDED, "more than %ju tensors", (uintmax_t)sd->tensor_count);
	return room(sd, &sd->tensors, sd->tensor_count, &sd->tensor_cap, sizeof *sd->tensors);
}

/* In front of a shape stand as many zeros: together they are the dims of a chunk that is the whole tensor. */
enum err sdict_add_tensor(struct sdict *sd, struct str fqn, enum dtype dtype, uint32_t ndim,
			  const int64_t *shape, uint32_t *index_out)
{
	struct sd_tensor t = { .dtype = dtype, .ndim = (uint16_t)ndim, .first_chunk = (uint32_t)sd->chunk_count };
	int64_t *copy;
	enum err e = check_shape(dtype, ndim, shape);

	if (e)
		return err_at_fqn(e, fqn.p, fqn.n);
	TRY(tensor_room(sd));
	TRY(arena_i64(sd->arena, (uint64_t)ndim * 2, &copy));
	if (ndim)
		memcpy(copy + ndim, shape, ndim * sizeof *copy);
	t.shape = copy + ndim;
	TRY(arena_str(sd->arena, fqn, &t.fqn));
	TRY(add_name(sd, fqn, (uint32_t)sd->tensor_count));
	*index_out = (uint32_t)sd->tensor_count;
	sd->tensors[sd->tensor_count++] = t;
	return OK;
}

static FALLIBLE enum err chunk_room(struct sdict *sd, uint32_t tensor)
{
	must(tensor < sd->tensor_count);
	struct sd_tensor *t = &sd->tensors[tensor];

	if (sd->chunk_count >= UINT32_MAX - 1) /* plans index chunks with 32 bits */
		return ERR(LIMIT_EXCEEDED, "more than %ju chunks", (uintmax_t)sd->chunk_count);
	if (t->chunk_count == 0)
		t->first_chunk = (uint32_t)sd->chunk_count;
	must(t->first_chunk + t->chunk_count == sd->chunk_count);
	return room(sd, &sd->chunks, sd->chunk_count, &sd->chunk_cap, sizeof *sd->chunks);
}

static void put_chunk(struct sdict *sd, const struct sd_chunk *c)
{
	sd->chunks[sd->chunk_count++] = *c;
	sd->tensors[c->tensor].chunk_count++;
}

enum err sdict_add_chunk(struct sdict *sd, uint32_t tensor, const int64_t *dims, uint32_t rank, struct sd_loc loc)
{
	TRY(chunk_room(sd, tensor));
	const struct sd_tensor *t = &sd->tensors[tensor];
	struct sd_chunk c = { t->ndim ? t->shape - t->ndim : t->shape, tensor, rank, loc };
	size_t bytes = (size_t)t->ndim * 2 * sizeof *dims;
	int64_t *copy;

	if (t->ndim && memcmp(dims, c.dims, bytes) != 0) {
		TRY(arena_i64(sd->arena, (uint64_t)t->ndim * 2, &copy));
		c.dims = memcpy(copy, dims, bytes);
	}
	put_chunk(sd, &c);
	return OK;
}

enum err sdict_copy_files(struct sdict *sd, const struct sdict *from)
{
	uint32_t index;

	for (uint64_t i = 0; i < from->file_count; i++)
		TRY(sdict_add_file(sd, from->files[i].name, from->files[i].rank, &index));
	sd->strided = from->strided;
	sd->records = from->records;
	sd->record_count = from->record_count;
	sd->origins = from->origins;
	return OK;
}

void sdict_borrow(struct sdict *sd, const struct sdict *other)
{
	arena_keep(sd->arena, other->arena);
}

enum err sdict_add_tensor_of(struct sdict *sd, const struct sd_tensor *t, uint32_t *index_out)
{
	TRY(tensor_room(sd));
	TRY(add_name(sd, t->fqn, (uint32_t)sd->tensor_count));
	*index_out = (uint32_t)sd->tensor_count;
	struct sd_tensor *out = &sd->tensors[sd->tensor_count++];
	*out = *t;
	out->first_chunk = (uint32_t)sd->chunk_count;
	out->chunk_count = 0;
	return OK;
}

enum err sdict_add_chunk_of(struct sdict *sd, uint32_t tensor, const struct sd_chunk *c)
{
	TRY(chunk_room(sd, tensor));
	put_chunk(sd, &(struct sd_chunk){ c->dims, tensor, c->rank, c->loc });
	return OK;
}

const struct sd_record *sdict_record(const struct sdict *sd, struct sd_loc loc)
{
	uint64_t lo = 0, hi = sd->record_count;

	while (lo < hi) { /* the first that begins behind the range's begin */
		uint64_t mid = lo + (hi - lo) / 2;
		const struct sd_record *r = &sd->records[mid];
		if (r->file < loc.file || (r->file == loc.file && r->offset <= loc.offset))
			lo = mid + 1;
		else
			hi = mid;
	}
	const struct sd_record *r = lo ? &sd->records[lo - 1] : NULL;
	return r && r->file == loc.file && num_inside(loc.offset - r->offset, loc.length, r->length) ? r : NULL;
}

static FALLIBLE enum err value_room(struct sdict *sd)
{
	if (sd->value_count >= SD_VALUE_BIT - 2)
		return ERR(LIMIT_EXCEEDED, "more than %ju values", (uintmax_t)sd->value_count);
	return room(sd, &sd->values, sd->value_count, &sd->value_cap, sizeof *sd->values);
}

enum err sdict_add_value(struct sdict *sd, struct str fqn, uint32_t rank, struct sd_loc loc, uint32_t *index_out)
{
	struct sd_value v = { .kind = SD_VALUE_STORED, .rank = rank, .loc = loc };

	TRY(value_room(sd));
	TRY(arena_str(sd->arena, fqn, &v.fqn));
	TRY(add_name(sd, fqn, SD_VALUE_BIT | (uint32_t)sd->value_count));
	*index_out = (uint32_t)sd->value_count;
	sd->values[sd->value_count++] = v;
	return OK;
}

enum err sdict_copy_chunks(struct sdict *sd, uint32_t index, const struct sdict *from, const struct sd_tensor *t)
{
	for (uint64_t c = t->first_chunk; c < t->first_chunk + t->chunk_count; c++)
		TRY(sdict_add_chunk(sd, index, from->chunks[c].dims, from->chunks[c].rank, from->chunks[c].loc));
	return OK;
}

enum err sdict_add_value_replica(struct sdict *sd, uint32_t first, uint32_t rank, struct sd_loc loc,
				 uint32_t *index_out)
{
	must(first < sd->value_count);
	TRY(value_room(sd));
	struct sd_value v = sd->values[first];
	v.rank = rank;
	v.loc = loc;
	*index_out = (uint32_t)sd->value_count;
	sd->values[sd->value_count++] = v;
	return OK;
}

enum err sdict_add_differing(struct sdict *sd, uint32_t value, uint32_t rank, struct str bytes)
{
	struct sd_differing d = { .value = value, .rank = rank };

	must(value < sd->value_count);
	TRY(room(sd, &sd->differing, sd->differing_count, &sd->differing_cap, sizeof *sd->differing));
	TRY(arena_str(sd->arena, bytes, &d.bytes));
	sd->differing[sd->differing_count++] = d;
	return OK;
}

enum err sdict_add_file(struct sdict *sd, struct str name, uint32_t rank, uint32_t *index_out)
{
	struct sd_file f = { .rank = rank };

	if (sd->file_count >= SD_NO_FILE - 1)
		return ERR(LIMIT_EXCEEDED, "more than %ju files", (uintmax_t)sd->file_count);
	TRY(room(sd, &sd->files, sd->file_count, &sd->file_cap, sizeof *sd->files));
	TRY(arena_str(sd->arena, name, &f.name));
	*index_out = (uint32_t)sd->file_count;
	sd->files[sd->file_count++] = f;
	return OK;
}

enum err sdict_add_transform(struct sdict *sd, struct str joined, uint32_t *id_out)
{
	struct str copy;

	for (uint32_t i = 0; i < sd->transform_count; i++) {
		if (str_eq(sd->transforms[i], joined)) {
			*id_out = i + 1;
			return OK;
		}
	}
	if (sd->transform_count >= TRANSFORMS_MAX)
		return ERR(LIMIT_EXCEEDED, "more than %d different transforms", TRANSFORMS_MAX);
	TRY(room(sd, &sd->transforms, sd->transform_count, &sd->transform_cap, sizeof *sd->transforms));
	TRY(arena_str(sd->arena, joined, &copy));
	sd->transforms[sd->transform_count++] = copy;
	*id_out = (uint32_t)sd->transform_count;
	return OK;
}

enum err sdict_copy_path(struct sdict *sd, struct sd_path from, struct sd_path *out)
{
	struct sd_path_part *parts = NULL;

	if (from.count)
		TRY(arena_alloc(sd->arena, from.count, sizeof *parts, &parts));
	for (uint32_t i = 0; i < from.count; i++) {
		parts[i].index = from.parts[i].index;
		if (from.parts[i].key.p)
			TRY(arena_str(sd->arena, from.parts[i].key, &parts[i].key));
	}
	*out = (struct sd_path){ parts, from.count };
	return OK;
}

enum err sdict_check_read(const struct sdict *sd, const struct sd_value *v)
{
	if (!v->unread.n)
		return OK;
	enum err e = err_at_fqn(ERR(FORMAT_UNSUPPORTED, "%.*s", (int)v->unread.n, v->unread.p), v->fqn.p, v->fqn.n);
	return v->loc.file < sd->file_count ? err_at_file(e, sd->files[v->loc.file].name.p, -1) : e;
}

enum err sdict_rename_path(struct sdict *sd, struct sd_path from, struct str old, struct str name, struct sd_path *out)
{
	char number[24];
	uint32_t keep = from.count;
	size_t left = name.n;
	struct sd_path_part *parts;

	if (str_eq(old, name) || from.count == 0)
		return sdict_copy_path(sd, from, out);
	while (keep > 0) {
		const struct sd_path_part *p = &from.parts[keep - 1];
		struct str text = p->key;
		if (!text.p)
			text = (struct str){ number, (size_t)snprintf(number, sizeof number, "%jd", (intmax_t)p->index) };
		if (text.n > left || memcmp(name.p + left - text.n, text.p, text.n) != 0)
			break;
		size_t rest = left - text.n;
		if (rest > 0 && name.p[rest - 1] != '.')
			break;
		left = rest ? rest - 1 : 0;
		keep--;
		if (rest == 0)
			break;
	}
	uint32_t kept = from.count - keep, head = left > 0 ? 1 : 0;
	TRY(arena_alloc(sd->arena, kept + head + 1, sizeof *parts, &parts));
	if (head)
		TRY(arena_str(sd->arena, (struct str){ name.p, left }, &parts[0].key));
	for (uint32_t i = 0; i < kept; i++) {
		parts[head + i] = from.parts[keep + i];
		if (parts[head + i].key.p)
			TRY(arena_str(sd->arena, from.parts[keep + i].key, &parts[head + i].key));
	}
	*out = (struct sd_path){ parts, kept + head };
	return OK;
}

uint32_t sdict_find(const struct sdict *sd, struct str fqn)
{
	const struct table_item *n;

	table_find(&sd->names, table_hash(fqn), n, str_eq(fqn_of(sd, n->item), fqn));
	return n ? n->item : SD_NONE;
}

struct sd_tensor *sdict_tensor(const struct sdict *sd, struct str fqn)
{
	uint32_t at = sdict_find(sd, fqn);

	return at == SD_NONE || (at & SD_VALUE_BIT) ? NULL : &sd->tensors[at];
}

struct sd_value *sdict_value(const struct sdict *sd, struct str fqn)
{
	uint32_t at = sdict_find(sd, fqn);

	return at == SD_NONE || !(at & SD_VALUE_BIT) ? NULL : &sd->values[at & ~SD_VALUE_BIT];
}

int sdict_record_order(const void *a, const void *b)
{
	const struct sd_record *x = a, *y = b;

	return num_order(x->offset, y->offset);
}
