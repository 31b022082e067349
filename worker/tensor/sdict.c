/* sdict.c: building state dict structures (see sdict.h). The big arrays are grown in place with realloc rather than in the arena,
 * which would leave every outgrown copy behind; what they take counts against the same cap. */
#include "tensor/sdict.h"

#include "base/mem.h"
#include "base/num.h"
#include "tensor/box.h"

enum { FIRST_CAP = 16, TRANSFORMS_MAX = 64 };

enum err sdict_new(uint64_t arena_cap_bytes, struct sdict **out)
{
	struct sdict *sd = mem_zalloc(1, sizeof *sd);

	if (!sd)
		return ERR(NO_MEMORY, "no memory for a state dict");
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
	mem_free(sd->files);
	mem_free(sd->transforms);
	map_free(&sd->fqns);
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

/* Makes room for one more entry: half as many again each time. */
static FALLIBLE enum err room(struct sdict *sd, void *array_ptr, uint64_t count, uint64_t *cap, size_t bytes)
{
	void *old;

	if (count < *cap)
		return check_cap(sd, 0);
	uint64_t want = *cap ? *cap + *cap / 2 : FIRST_CAP, more;
	TRY(num_mul(want - *cap, bytes, &more));
	TRY(check_cap(sd, more));
	memcpy(&old, array_ptr, sizeof old);
	void *p = mem_grow(old, want, bytes);
	if (!p)
		return ERR(NO_MEMORY, "no memory for %ju entries of a state dict", (uintmax_t)want);
	memcpy(array_ptr, &p, sizeof p);
	*cap = want;
	sd->array_bytes += more;
	return OK;
}

static FALLIBLE enum err add_name(struct sdict *sd, struct str fqn, uint32_t entry, struct str *copy_out)
{
	uint32_t found;

	TRY(arena_str(sd->arena, fqn, copy_out));
	TRY(map_intern(&sd->fqns, *copy_out, entry, &found));
	if (found != entry)
		return err_at_fqn(ERR(DUPLICATE_KEY, "the key is there twice"), fqn.p, fqn.n);
	return OK;
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

enum err sdict_add_tensor(struct sdict *sd, struct str fqn, enum dtype dtype, uint32_t ndim,
			  const int64_t *shape, uint32_t *index_out)
{
	struct sd_tensor t = { .dtype = dtype, .ndim = ndim, .first_chunk = sd->chunk_count };
	int64_t *copy;
	enum err e = check_shape(dtype, ndim, shape);

	if (e)
		return err_at_fqn(e, fqn.p, fqn.n);
	if (sd->tensor_count >= SD_VALUE_BIT - 1)
		return ERR(LIMIT_EXCEEDED, "more than %ju tensors", (uintmax_t)sd->tensor_count);
	TRY(room(sd, &sd->tensors, sd->tensor_count, &sd->tensor_cap, sizeof *sd->tensors));
	TRY(arena_i64(sd->arena, ndim, &copy));
	if (ndim)
		memcpy(copy, shape, ndim * sizeof *copy);
	t.shape = copy;
	TRY(add_name(sd, fqn, (uint32_t)sd->tensor_count, &t.fqn));
	*index_out = (uint32_t)sd->tensor_count;
	sd->tensors[sd->tensor_count++] = t;
	return OK;
}

enum err sdict_add_chunk(struct sdict *sd, uint32_t tensor, const int64_t *dims, uint32_t rank, struct sd_loc loc)
{
	must(tensor < sd->tensor_count);
	struct sd_tensor *t = &sd->tensors[tensor];
	int64_t *copy;

	if (t->chunk_count == 0)
		t->first_chunk = sd->chunk_count;
	must(t->first_chunk + t->chunk_count == sd->chunk_count);
	if (sd->chunk_count >= UINT32_MAX - 1) /* plans index chunks with 32 bits */
		return ERR(LIMIT_EXCEEDED, "more than %ju chunks", (uintmax_t)sd->chunk_count);
	TRY(room(sd, &sd->chunks, sd->chunk_count, &sd->chunk_cap, sizeof *sd->chunks));
	TRY(arena_i64(sd->arena, (uint64_t)t->ndim * 2, &copy));
	if (t->ndim)
		memcpy(copy, dims, (size_t)t->ndim * 2 * sizeof *copy);
	sd->chunks[sd->chunk_count++] =
		(struct sd_chunk){ .dims = copy, .tensor = tensor, .rank = rank, .loc = loc };
	t->chunk_count++;
	return OK;
}

enum err sdict_add_value(struct sdict *sd, struct str fqn, uint32_t rank, struct sd_loc loc, uint32_t *index_out)
{
	struct sd_value v = { .kind = SD_VALUE_STORED, .rank = rank, .loc = loc };

	if (sd->value_count >= SD_VALUE_BIT - 2)
		return ERR(LIMIT_EXCEEDED, "more than %ju values", (uintmax_t)sd->value_count);
	TRY(room(sd, &sd->values, sd->value_count, &sd->value_cap, sizeof *sd->values));
	TRY(add_name(sd, fqn, SD_VALUE_BIT | (uint32_t)sd->value_count, &v.fqn));
	*index_out = (uint32_t)sd->value_count;
	sd->values[sd->value_count++] = v;
	return OK;
}

enum err sdict_add_value_replica(struct sdict *sd, uint32_t first, uint32_t rank, struct sd_loc loc,
				 uint32_t *index_out)
{
	must(first < sd->value_count);
	if (sd->value_count >= SD_VALUE_BIT - 2)
		return ERR(LIMIT_EXCEEDED, "more than %ju values", (uintmax_t)sd->value_count);
	TRY(room(sd, &sd->values, sd->value_count, &sd->value_cap, sizeof *sd->values));
	struct sd_value v = sd->values[first];
	v.rank = rank;
	v.loc = loc;
	*index_out = (uint32_t)sd->value_count;
	sd->values[sd->value_count++] = v;
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

struct sd_tensor *sdict_tensor(const struct sdict *sd, struct str fqn)
{
	uint32_t at = map_get(&sd->fqns, fqn);

	return at == MAP_NONE || (at & SD_VALUE_BIT) ? NULL : &sd->tensors[at];
}

struct sd_value *sdict_value(const struct sdict *sd, struct str fqn)
{
	uint32_t at = map_get(&sd->fqns, fqn);

	return at == MAP_NONE || !(at & SD_VALUE_BIT) ? NULL : &sd->values[at & ~SD_VALUE_BIT];
}
