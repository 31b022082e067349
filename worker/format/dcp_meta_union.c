/* dcp_meta_union.c: rank-local checkpoints. Each rank wrote a `.metadata` of its own that lists
 * only its chunks; PyTorch can load them with the same layout only. Their union is an ordinary
 * checkpoint that can be resharded. */
#include "format/dcp_meta.h"

#include <stdlib.h>

#include "base/map.h"
#include "base/mem.h"
#include "base/num.h"
#include "base/vec.h"
#include "tensor/box.h"

/* A chunk of one of the parts. */
struct candidate {
	const struct sd_chunk *chunk;
	uint32_t part;
	uint64_t seq;                /* the order in which the parts list them */
	bool repeated;
};

struct merge {
	struct sdict *const *parts;
	uint32_t count;
	struct sdict *sd;
	struct map files;
	struct candidate *found;
	uint64_t found_count, found_cap;
};

static FALLIBLE enum err copy_loc(struct merge *m, const struct sdict *from, struct sd_loc *loc)
{
	const struct sd_file *f = &from->files[loc->file];
	uint32_t file = map_get(&m->files, f->name);

	if (file == MAP_NONE) {
		TRY(sdict_add_file(m->sd, f->name, f->rank, &file));
		TRY(map_put(&m->files, m->sd->files[file].name, file));
	}
	loc->file = file;
	if (loc->transform)
		TRY(sdict_add_transform(m->sd, from->transforms[loc->transform - 1], &loc->transform));
	return OK;
}

static int compare_boxes(const void *a, const void *b, void *user)
{
	const struct candidate *x = a, *y = b;
	const uint32_t *ndim = user;

	return num_order_rows(x->chunk->dims, y->chunk->dims, 2 * *ndim) ?: num_order(x->seq, y->seq);
}

static int compare_seq(const void *a, const void *b)
{
	const struct candidate *x = a, *y = b;
	return x->seq < y->seq ? -1 : x->seq > y->seq;
}

static FALLIBLE enum err collect(struct merge *m, uint32_t part, const struct sd_tensor *t)
{
	uint64_t need = m->found_count + t->chunk_count;

	if (need > m->found_cap) {
		uint64_t cap = num_max(need, m->found_cap * 2);
		struct candidate *bigger = mem_grow(m->found, cap, sizeof *bigger);
		NEED(bigger, "no memory for %ju chunks", (uintmax_t)cap);
		m->found = bigger;
		m->found_cap = cap;
	}
	for (uint64_t i = 0; i < t->chunk_count; i++, m->found_count++)
		m->found[m->found_count] = (struct candidate){
			&m->parts[part]->chunks[t->first_chunk + i], part, m->found_count, false };
	return OK;
}

static FALLIBLE enum err same_tensor(const struct sd_tensor *a, const struct sd_tensor *b, uint32_t rank)
{
	enum err e = OK;

	if (!b)
		e = ERR(FORMAT_METADATA, "a tensor on one rank, a value on another");
	else if (a->dtype != b->dtype)
		e = ERR(FORMAT_METADATA, "%s on one rank, %s on another", dtype_name(a->dtype), dtype_name(b->dtype));
	else if (!box_same_shape(a->ndim, a->shape, b->ndim, b->shape))
		e = ERR(FORMAT_METADATA, "the ranks disagree on the size of the tensor");
	return err_at_rank(e, rank);
}

static FALLIBLE enum err merge_chunks(struct merge *m, uint32_t tensor, uint32_t ndim)
{
	qsort_r(m->found, m->found_count, sizeof *m->found, compare_boxes, &ndim);
	for (uint64_t i = 1; i < m->found_count; i++)
		m->found[i].repeated = memcmp(m->found[i].chunk->dims, m->found[i - 1].chunk->dims,
					      2 * ndim * sizeof(int64_t)) == 0;
	qsort(m->found, m->found_count, sizeof *m->found, compare_seq);
	each(c, m->found, m->found_count) {
		struct sd_loc loc = c->chunk->loc;
		if (c->repeated)
			continue;
		TRY(copy_loc(m, m->parts[c->part], &loc));
		TRY(sdict_add_chunk(m->sd, tensor, c->chunk->dims, c->chunk->rank, loc));
	}
	return OK;
}

static FALLIBLE enum err merge_tensor(struct merge *m, uint32_t first, const struct sd_tensor *t)
{
	struct sd_path path = t->path;
	bool requires_grad = t->requires_grad;
	uint32_t tensor;

	m->found_count = 0;
	TRY(collect(m, first, t));
	for (uint32_t part = first + 1; part < m->count; part++) {
		const struct sd_tensor *other = sdict_tensor(m->parts[part], t->fqn);
		if (!other && !sdict_value(m->parts[part], t->fqn))
			continue;
		TRY(same_tensor(t, other, part));
		TRY(collect(m, part, other));
		requires_grad |= other->requires_grad;
		if (path.count == 0)
			path = other->path;
	}
	TRY(sdict_add_tensor(m->sd, t->fqn, t->dtype, t->ndim, t->shape, &tensor));
	m->sd->tensors[tensor].requires_grad = requires_grad;
	TRY(sdict_copy_path(m->sd, path, &m->sd->tensors[tensor].path));
	return merge_chunks(m, tensor, t->ndim);
}

static FALLIBLE enum err merge_value(struct merge *m, uint32_t part, const struct sd_value *v)
{
	struct sd_loc loc = v->loc;
	uint32_t index;

	if (sdict_tensor(m->sd, v->fqn))
		return err_at_rank(ERR(FORMAT_METADATA, "a value on one rank, a tensor on another"), part);
	if (sdict_value(m->sd, v->fqn))
		return OK;
	TRY(copy_loc(m, m->parts[part], &loc));
	TRY(sdict_add_value(m->sd, v->fqn, v->rank, loc, &index));
	return sdict_copy_path(m->sd, v->path, &m->sd->values[index].path);
}

static FALLIBLE enum err merge_all(struct merge *m)
{
	for (uint32_t part = 0; part < m->count; part++) {
		const struct sdict *sd = m->parts[part];
		m->sd->has_paths |= sd->has_paths;
		each(t, sd->tensors, sd->tensor_count)
			TRY(err_at_fqn(sdict_tensor(m->sd, t->fqn) ? OK : merge_tensor(m, part, t), t->fqn.p, t->fqn.n));
	}
	for (uint32_t part = 0; part < m->count; part++)
		each(v, m->parts[part]->values, m->parts[part]->value_count)
			TRY(err_at_fqn(merge_value(m, part, v), v->fqn.p, v->fqn.n));
	return OK;
}

enum err dcp_meta_union(struct sdict *const *parts, uint32_t count, struct sdict **out)
{
	struct sdict *sd CLEANUP(sdict_free_ptr) = NULL;
	uint64_t bytes = 1 << 20;

	for (uint32_t i = 0; i < count; i++)
		TRY(num_add(bytes, 2 * arena_used(parts[i]->arena), &bytes));
	TRY(sdict_new(bytes, &sd));
	struct merge m = { .parts = parts, .count = count, .sd = sd };
	enum err e = merge_all(&m);
	mem_free(m.found);
	map_free(&m.files);
	if (!e)
		*out = move(sd);
	return e;
}
