/* torch_shards.c: which boxes of a tensor a rank's file holds, from what PyTorch pickles of a DTensor or ShardedTensor.
 *
 *     DTensor         _rebuild_from_type_v2(_rebuild_wrapper_subclass, DTensor, (class, dtype, size, …), {_local_tensor, _spec})
 *     _spec           {mesh: DeviceMesh, placements: (Shard, Replicate, _StridedShard …)}; the mesh knows its rank's coordinate
 *     ShardedTensor   the same with (shards, metadata, …) for the state; each shard has a tensor, offsets and sizes
 *
 * Attributes are looked up by name in what BUILD would have set; attributes of classes with slots are the second of a pair. */
#include "base/num.h"
#include "format/torch_file.h"
#include "tensor/dtensor.h"

static pnode attribute(const struct pickle *pk, pnode object, const char *name)
{
	pnode state = pickle_state(pk, object);

	if (pickle_kind(pk, state) == PK_TUPLE)
		state = pickle_at(pk, state, 1);
	return pickle_dict_get(pk, state, name);
}

bool torch_shards_is(const struct pickle *pk, pnode n)
{
	pnode func = pickle_at(pk, pickle_args(pk, n), 0);
	struct str class = pickle_name(pk, pickle_at(pk, pickle_args(pk, n), 1));

	return pickle_is_call(pk, n, "torch._tensor", "_rebuild_from_type_v2") && pickle_kind(pk, func) == PK_GLOBAL &&
	       str_is(pickle_name(pk, func), "_rebuild_wrapper_subclass") && (str_is(class, "DTensor") || str_is(class, "ShardedTensor"));
}

/* A list or tuple of numbers; of a tuple among them, the product (a mesh dim made of several). */
static FALLIBLE enum err read_numbers(const struct pickle *pk, pnode n, uint32_t max, const char *what, int64_t *out, uint32_t *count)
{
	struct pickle_iter it = pickle_iter(pk, n), part;
	pnode item, one;
	int64_t v;

	for (*count = 0; pickle_next(pk, &it, &item); ++*count) {
		if (*count == max)
			return ERR(LIMIT_EXCEEDED, "%s of more than %u dims", what, max);
		out[*count] = 1;
		if (pickle_int(pk, item, &out[*count]))
			continue;
		part = pickle_iter(pk, item);
		if (pickle_count(pk, item) == 0)
			return ERR(FORMAT_ITEM, "%s is no list of numbers", what);
		while (pickle_next(pk, &part, &one))
			if (!pickle_int(pk, one, &v) || __builtin_mul_overflow(out[*count], v, &out[*count]))
				return ERR(FORMAT_ITEM, "%s is no list of numbers", what);
	}
	return OK;
}

/* dtype and the whole shape: (class, dtype, size, …). */
static FALLIBLE enum err read_whole(const struct pickle *pk, pnode n, struct item_tensor *t)
{
	pnode args = pickle_at(pk, pickle_args(pk, n), 2), dtype = pickle_at(pk, args, 1);
	uint64_t numel;

	*t = (struct item_tensor){ .requires_grad = pickle_is_true(pk, pickle_at(pk, args, 7)) };
	if (pickle_kind(pk, dtype) != PK_GLOBAL || !str_is(pickle_module(pk, dtype), "torch"))
		return ERR(FORMAT_ITEM, "the sharded tensor has no dtype");
	TRY(dtype_parse(pickle_name(pk, dtype), &t->dtype));
	TRY(read_numbers(pk, pickle_at(pk, args, 2), NDIM_MAX, "the shape", t->sizes, &t->ndim));
	return box_numel(t->ndim, t->sizes, &numel);
}

/* One box: `dims` in the whole, `at` in the local tensor. */
static FALLIBLE enum err add_box(struct torch_file *f, struct torch_leaf *leaf, const struct item_tensor *local, uint32_t storage,
				 const int64_t *dims, const int64_t *at)
{
	uint32_t n = leaf->tensor.ndim;
	struct torch_shard *s;
	int64_t *kept, *strides;

	TRY(arena_i64(f->arena, 2ull * n, &kept));
	TRY(arena_i64(f->arena, n, &strides));
	TRY(vec_push(&f->shards, &s));
	*s = (struct torch_shard){ kept, strides, local->storage_offset, storage, local->conj, local->neg };
	for (uint32_t d = 0; d < n; d++) {
		kept[d] = dims[d];
		kept[n + d] = dims[n + d];
		strides[d] = local->strides[d];
		s->first += (uint64_t)at[d] * (uint64_t)local->strides[d];
	}
	leaf->shard_count++;
	return OK;
}

static FALLIBLE enum err read_local(struct torch_file *f, const struct torch_leaf *leaf, pnode n, struct item_tensor *local,
				    uint32_t *storage)
{
	struct item_storage says;

	TRY(item_tensor_of(f->item.pk, n, local, &says));
	if (local->dtype != leaf->tensor.dtype || local->ndim != leaf->tensor.ndim)
		return ERR(FORMAT_ITEM, "the rank's part is of dtype %s and %u dims, the tensor of %s and %u", dtype_name(local->dtype),
			   local->ndim, dtype_name(leaf->tensor.dtype), leaf->tensor.ndim);
	return torch_file_storage(f, &says, storage);
}

/* ------------------------------------------------------------------------------------------------------------ DTensor */

struct mesh {
	uint32_t ndim;
	int64_t sizes[MESH_DIMS_MAX], coord[MESH_DIMS_MAX];
	struct placement placements[MESH_DIMS_MAX];
};

/* Versions of PyTorch keep the mesh as a tensor of ranks, or as a layout: sizes and strides of its dims, or an axis for each. */
static FALLIBLE enum err read_mesh(const struct pickle *pk, pnode node, struct mesh *m)
{
	pnode tensor = attribute(pk, node, "mesh"), layout = attribute(pk, node, "_layout"), axes = attribute(pk, layout, "axes"), axis;
	struct item_tensor ranks;
	struct item_storage says;
	uint32_t n = 0, factors;

	if (item_is_tensor(pk, tensor)) {
		TRY(item_tensor_of(pk, tensor, &ranks, &says));
		if (ranks.ndim > MESH_DIMS_MAX)
			return ERR(LIMIT_EXCEEDED, "a mesh of %u dims", ranks.ndim);
		for (m->ndim = 0; m->ndim < ranks.ndim; m->ndim++)
			m->sizes[m->ndim] = ranks.sizes[m->ndim];
	} else if (axes) {
		struct pickle_iter it = pickle_iter(pk, axes);
		for (m->ndim = 0; pickle_next(pk, &it, &axis); m->ndim++) {
			int64_t shape[MESH_DIMS_MAX];
			if (m->ndim == MESH_DIMS_MAX)
				return ERR(LIMIT_EXCEEDED, "a mesh of more than %u dims", m->ndim);
			TRY(read_numbers(pk, attribute(pk, axis, "shape"), MESH_DIMS_MAX, "an axis of the mesh", shape, &factors));
			m->sizes[m->ndim] = 1;
			for (uint32_t i = 0; i < factors; i++)
				if (__builtin_mul_overflow(m->sizes[m->ndim], shape[i], &m->sizes[m->ndim]))
					return ERR(FORMAT_ITEM, "an axis of the mesh is too large");
		}
	} else {
		TRY(read_numbers(pk, attribute(pk, layout, "shape"), MESH_DIMS_MAX, "the mesh", m->sizes, &m->ndim));
	}
	TRY(read_numbers(pk, attribute(pk, node, "_coordinate_on_dim"), MESH_DIMS_MAX, "the rank's place in the mesh", m->coord, &n));
	bool inside = n == m->ndim && n > 0;
	for (uint32_t d = 0; inside && d < n; d++)
		inside = m->coord[d] >= 0 && m->coord[d] < m->sizes[d];
	return inside ? OK : ERR(FORMAT_UNSUPPORTED, "a device mesh of %u dims in which the rank has no place", m->ndim);
}

static FALLIBLE enum err read_placement(const struct pickle *pk, pnode n, struct placement *out)
{
	struct str name = pickle_name(pk, n);
	int64_t dim = 0;

	*out = (struct placement){ .kind = PLACE_REPLICATE, .split_factor = 1 };
	if (str_is(name, "Replicate"))
		return OK;
	out->kind = str_is(name, "_StridedShard") ? PLACE_STRIDED_SHARD : PLACE_SHARD;
	if (out->kind == PLACE_SHARD && !str_is(name, "Shard"))
		return ERR(FORMAT_UNSUPPORTED, "a tensor placed as %.*s, which is no part of it", (int)num_min(name.n, 64), name.p);
	if (!pickle_int(pk, attribute(pk, n, "dim"), &dim) || dim < -NDIM_MAX || dim >= NDIM_MAX ||
	    (out->kind == PLACE_STRIDED_SHARD &&
	     (!pickle_int(pk, attribute(pk, n, "split_factor"), &out->split_factor) || out->split_factor < 1)))
		return ERR(FORMAT_ITEM, "a %.*s without its dim", (int)num_min(name.n, 64), name.p);
	out->dim = (int32_t)dim;
	return OK;
}

static FALLIBLE enum err read_placements(const struct pickle *pk, pnode n, struct mesh *m)
{
	struct pickle_iter it = pickle_iter(pk, n);
	uint32_t count = 0;
	pnode one;

	for (; pickle_next(pk, &it, &one); count++) {
		if (count == m->ndim)
			break;
		TRY(read_placement(pk, one, &m->placements[count]));
	}
	return count == m->ndim && !one ? OK : ERR(FORMAT_ITEM, "a mesh of %u dims and another number of placements", m->ndim);
}

static FALLIBLE enum err add_part(struct torch_file *f, struct torch_leaf *leaf, const struct mesh *m, const struct item_tensor *local,
				  uint32_t storage)
{
	CLEANUP(dtensor_part_free) struct dtensor_part part = { 0 };
	int64_t dims[2 * NDIM_MAX], at[NDIM_MAX];
	char a[128], b[128];

	TRY(dtensor_part_make(leaf->tensor.ndim, leaf->tensor.sizes, m->ndim, m->sizes, m->coord, m->placements, &part));
	for (uint32_t d = 0; d < local->ndim; d++)
		if (local->sizes[d] != part.sizes[d])
			return ERR(FORMAT_ITEM, "the rank's part has the shape %s, mesh and placements say %s",
				   box_print(local->ndim, local->sizes, a, sizeof a), box_print(local->ndim, part.sizes, b, sizeof b));
	for (uint64_t i = 0; i < part.count; i++) {
		dtensor_part_box(&part, i, dims, at);
		TRY(add_box(f, leaf, local, storage, dims, at));
	}
	return OK;
}

static FALLIBLE enum err read_dtensor(struct torch_file *f, struct torch_leaf *leaf, pnode state)
{
	const struct pickle *pk = f->item.pk;
	struct item_tensor local;
	struct mesh m = { 0 };
	uint32_t storage;

	if (pickle_kind(pk, state) == PK_TUPLE)
		state = pickle_at(pk, state, 1);
	pnode spec = pickle_dict_get(pk, state, "_spec");
	TRY(read_local(f, leaf, pickle_dict_get(pk, state, "_local_tensor"), &local, &storage));
	TRY(read_mesh(pk, attribute(pk, spec, "mesh"), &m));
	TRY(read_placements(pk, attribute(pk, spec, "placements"), &m));
	return add_part(f, leaf, &m, &local, storage);
}

/* ------------------------------------------------------------------------------------------------------ ShardedTensor */

static FALLIBLE enum err read_shard(struct torch_file *f, struct torch_leaf *leaf, pnode shard)
{
	const struct pickle *pk = f->item.pk;
	pnode meta = attribute(pk, shard, "metadata");
	uint32_t n = leaf->tensor.ndim, offsets = 0, sizes = 0, storage;
	int64_t dims[2 * NDIM_MAX] = { 0 }, size[NDIM_MAX] = { 0 };
	static const int64_t zeros[NDIM_MAX];
	struct item_tensor local;

	TRY(read_local(f, leaf, attribute(pk, shard, "tensor"), &local, &storage));
	TRY(read_numbers(pk, attribute(pk, meta, "shard_offsets"), NDIM_MAX, "a shard's offsets", dims, &offsets));
	TRY(read_numbers(pk, attribute(pk, meta, "shard_sizes"), NDIM_MAX, "a shard's sizes", size, &sizes));
	bool same = offsets == n && sizes == n;
	for (uint32_t d = 0; same && d < n; d++) {
		same = size[d] == local.sizes[d];
		dims[n + d] = size[d];
	}
	if (!same)
		return ERR(FORMAT_ITEM, "a shard's sizes are not those of its tensor");
	TRY(box_check(n, dims, dims + n, leaf->tensor.sizes));
	return add_box(f, leaf, &local, storage, dims, zeros);
}

enum err torch_shards_read(struct torch_file *f, struct torch_leaf *leaf)
{
	const struct pickle *pk = f->item.pk;
	pnode args = pickle_args(pk, leaf->node), state = pickle_at(pk, args, 3), shard;

	TRY(read_whole(pk, leaf->node, &leaf->tensor));
	leaf->first_shard = f->shards.n;
	if (str_is(pickle_name(pk, pickle_at(pk, args, 1)), "DTensor"))
		return read_dtensor(f, leaf, state);
	struct pickle_iter it = pickle_iter(pk, pickle_at(pk, state, 0));
	while (pickle_next(pk, &it, &shard))
		TRY(read_shard(f, leaf, shard));
	return OK;
}
