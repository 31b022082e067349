/* torch_ranks_open.c: a folder in which each rank has saved its own state dict by torch.save, as a source: verl's
 * model_world_size_N_rank_R.pt, accelerate's pytorch_model_fsdp_rankR.bin and others of such names. Sharded tensors are put together from
 * the boxes that the ranks hold; of what several ranks have alike (replicas, values) the lowest rank's is taken.
 *
 * Files of one family share what stands in front of "world_size" and "rank". A family called model is the state dict itself; the keys of
 * any other stand below its name: optim_world_size_2_rank_0.pt → optim.… */
#include <stdlib.h>
#include <string.h>

#include "base/map.h"
#include "base/num.h"
#include "format/format.h"
#include "format/torch_file.h"
#include "tensor/box.h"

struct piece {
	uint32_t tensor, rank;
	const int64_t *dims;
	struct sd_strided strided;
	bool in_order;                 /* C order, as it is */
	struct sd_loc loc;
};

/* A tensor as the first rank that has some of it describes it. */
struct whole {
	struct str fqn;
	struct sd_path path;
	const int64_t *shape;
	enum dtype dtype;
	uint32_t ndim, rank;
	bool sharded, requires_grad;
};

struct ranks {
	const struct format_source *s;
	struct sdict *sd;
	struct arena *arena;
	struct vec(struct piece) pieces;
	struct vec(struct whole) wholes;
	struct map by_fqn;
	uint64_t strided_count;
};

/* ------------------------------------------------------------------------------------------------------------ the ranks */

/* "FAMILY/WORLD/RANK" */
static FALLIBLE enum err rank_key(struct arena *a, const struct format_rank_name *n, int64_t rank, struct str *out)
{
	CLEANUP(buf_free) struct buf b = BUF_INIT(4096);

	buf_put(&b, n->family.p, n->family.n);
	buf_printf(&b, "/%jd/%jd", (intmax_t)n->world_size, (intmax_t)rank);
	TRY(buf_status(&b));
	return arena_str(a, (struct str){ (char *)b.p, b.len }, out);
}

static FALLIBLE enum err check_there(const struct map *there, struct arena *a, const struct format_rank_name *n, int64_t rank,
				     const char *beside)
{
	struct str key;

	TRY(rank_key(a, n, rank, &key));
	if (map_get(there, key) != MAP_NONE)
		return OK;
	enum err e = ERR(CHECKPOINT_INCOMPLETE, "rank %jd's file is missing from the folder", (intmax_t)rank);
	return err_at_rank(err_at_file(e, beside, -1), rank);
}

/* Each family has a file of every rank: of all in its world, or up to the highest rank that there is. The files come by rank. */
static FALLIBLE enum err check_complete(const struct ranks *r)
{
	const struct format_source *s = r->s;
	CLEANUP(map_free) struct map there = { 0 };
	struct format_rank_name n;
	struct str key;

	for (uint64_t i = 0; i < s->payload_count; i++) {
		must(format_rank_name(s->payload[i], &n));
		TRY(rank_key(r->arena, &n, n.rank, &key));
		TRY(map_put(&there, key, (uint32_t)i));
	}
	for (uint64_t i = 0; i < s->payload_count; i++) {
		must(format_rank_name(s->payload[i], &n));
		if (n.world_size > 0 && n.rank >= n.world_size)
			return err_at_file(ERR(CHECKPOINT_INCOMPLETE, "a file of rank %jd in a world of %jd", (intmax_t)n.rank,
					       (intmax_t)n.world_size), s->payload[i], -1);
		if (n.rank > 0)
			TRY(check_there(&there, r->arena, &n, n.rank - 1, s->payload[i]));
		if (n.rank + 1 < n.world_size)
			TRY(check_there(&there, r->arena, &n, n.rank + 1, s->payload[i]));
	}
	return OK;
}

/* ------------------------------------------------------------------------------------------------------------ the parts */

static FALLIBLE enum err copy_dims(struct arena *a, uint32_t n, const int64_t *from, const int64_t **out)
{
	int64_t *to;

	TRY(arena_i64(a, n, &to));
	if (n)
		memcpy(to, from, n * sizeof *to);
	*out = to;
	return OK;
}

static FALLIBLE enum err add_whole(struct ranks *r, const struct torch_leaf *leaf, uint32_t rank, uint32_t *index_out)
{
	const struct item_tensor *t = &leaf->tensor;
	uint32_t next = (uint32_t)r->wholes.n;
	struct whole *w;
	struct str fqn;

	*index_out = map_get(&r->by_fqn, leaf->fqn);
	if (*index_out != MAP_NONE) {
		w = &r->wholes.v[*index_out];
		if (w->dtype != t->dtype || w->sharded != leaf->is_sharded || !box_same_shape(w->ndim, w->shape, t->ndim, t->sizes))
			return ERR(FORMAT_ITEM, "the tensor is not what rank %u says: dtype, shape or sharding differ", w->rank);
		return OK;
	}
	TRY(vec_push(&r->wholes, &w));
	TRY(arena_str(r->arena, leaf->fqn, &fqn));
	*w = (struct whole){ .fqn = fqn, .dtype = t->dtype, .ndim = t->ndim, .rank = rank, .sharded = leaf->is_sharded,
			     .requires_grad = t->requires_grad };
	TRY(copy_dims(r->arena, t->ndim, t->sizes, &w->shape));
	TRY(sdict_copy_path(r->sd, leaf->path, &w->path));
	*index_out = next;
	return map_put(&r->by_fqn, fqn, next);
}

static bool in_c_order(uint32_t n, const int64_t *sizes, const int64_t *strides)
{
	int64_t run = 1;

	if (box_empty(n, sizes))
		return true;
	for (uint32_t d = n; d-- > 0; run *= sizes[d])
		if (sizes[d] != 1 && strides[d] != run)
			return false;
	return true;
}

static FALLIBLE enum err add_piece(struct ranks *r, const struct torch_file *f, uint32_t tensor, const struct torch_shard *s, uint32_t file,
				   uint32_t rank)
{
	const struct whole *w = &r->wholes.v[tensor];
	struct piece *p;

	TRY(vec_push(&r->pieces, &p));
	*p = (struct piece){ .tensor = tensor, .rank = rank, .strided = { NULL, s->conj, s->neg } };
	TRY(copy_dims(r->arena, 2 * w->ndim, s->dims, &p->dims));
	p->loc = (struct sd_loc){ .file = file, .offset = f->storages.v[s->storage].offset };
	p->loc.length = torch_file_span(w->ndim, s->dims + w->ndim, s->strides, w->dtype);
	if (p->loc.length)
		p->loc.offset += s->first * dtype_bytes(w->dtype);
	p->in_order = p->loc.length == 0 || (!s->conj && !s->neg && in_c_order(w->ndim, s->dims + w->ndim, s->strides));
	return p->in_order ? OK : copy_dims(r->sd->arena, w->ndim, s->strides, &p->strided.strides);
}

static FALLIBLE enum err add_tensor(struct ranks *r, const struct torch_file *f, const struct torch_leaf *leaf, uint32_t file,
				    uint32_t rank)
{
	int64_t dims[2 * NDIM_MAX] = { 0 };
	uint32_t tensor = 0;

	TRY(add_whole(r, leaf, rank, &tensor));
	for (uint64_t i = 0; i < leaf->shard_count; i++)
		TRY(add_piece(r, f, tensor, &f->shards.v[leaf->first_shard + i], file, rank));
	if (leaf->is_sharded || r->wholes.v[tensor].rank != rank)
		return OK;
	memcpy(dims + leaf->tensor.ndim, leaf->tensor.sizes, leaf->tensor.ndim * sizeof *dims);
	const struct torch_shard all = { dims, leaf->tensor.strides, leaf->tensor.storage_offset, leaf->storage, leaf->tensor.conj,
					 leaf->tensor.neg };
	return add_piece(r, f, tensor, &all, file, rank);
}

static FALLIBLE enum err add_leaf(struct ranks *r, const struct torch_file *f, const struct torch_leaf *leaf, uint32_t file,
				  uint32_t rank)
{
	if (leaf->is_tensor)
		return add_tensor(r, f, leaf, file, rank);
	return sdict_find(r->sd, leaf->fqn) == SD_NONE ? torch_file_add_value(f, leaf, r->sd, rank) : OK;
}

static FALLIBLE enum err open_file(struct ranks *r, const char *name)
{
	CLEANUP(torch_file_close) struct torch_file f = { 0 };
	struct format_rank_name is;
	uint32_t file;

	must(format_rank_name(name, &is));
	TRY(sdict_add_file(r->sd, str_of(name), (uint32_t)is.rank, &file));
	TRY(torch_file_open(r->s, name, &f));
	each(leaf, f.leaves.v, f.leaves.n) {
		TRY(torch_leaf_move(f.arena, leaf, 0, is.is_model ? STR("") : is.family));
		TRY(err_at_fqn(add_leaf(r, &f, leaf, file, (uint32_t)is.rank), leaf->fqn.p, leaf->fqn.n));
	}
	return torch_file_add_records(&f, r->sd, file);
}

/* ------------------------------------------------------------------------------------------------------------ as an sdict */

static int by_tensor(const void *a, const void *b, void *user)
{
	const struct ranks *r = user;
	const struct piece *x = a, *y = b;
	uint32_t n = r->wholes.v[x->tensor].ndim;

	return num_order(x->tensor, y->tensor) ?: num_order_rows(x->dims, y->dims, 2 * n) ?: num_order(x->rank, y->rank);
}

/* The pieces from `first` on that are of one tensor; the first of equal boxes stands for all. */
static FALLIBLE enum err put_tensor(struct ranks *r, uint64_t first, uint64_t end, struct sd_strided *strided)
{
	const struct whole *w = &r->wholes.v[r->pieces.v[first].tensor];
	uint64_t sum = 0, numel, part;
	uint32_t tensor;

	TRY(sdict_add_tensor(r->sd, w->fqn, w->dtype, w->ndim, w->shape, &tensor));
	r->sd->tensors[tensor].path = w->path;
	r->sd->tensors[tensor].requires_grad = w->requires_grad;
	for (uint64_t i = first; i < end; i++) {
		struct piece *p = &r->pieces.v[i];
		bool again = i > first && (w->ndim == 0 || memcmp(p->dims, p[-1].dims, 2 * w->ndim * sizeof *p->dims) == 0);
		TRY(box_numel(w->ndim, p->dims + w->ndim, &part));
		if (again || (part == 0 && end - first > 1 && !box_empty(w->ndim, w->shape)))
			continue;
		TRY(num_add(sum, part, &sum));
		if (!p->in_order) {
			p->loc.transform = SD_STRIDED | (uint32_t)r->strided_count;
			strided[r->strided_count++] = p->strided;
		}
		TRY(sdict_add_chunk(r->sd, tensor, p->dims, p->rank, p->loc));
	}
	TRY(box_numel(w->ndim, w->shape, &numel));
	return sum == numel ? OK : ERR(CHECKPOINT_INCOMPLETE, "the ranks' files hold %ju of its %ju elements", (uintmax_t)sum,
				       (uintmax_t)numel);
}

static FALLIBLE enum err put_tensors(struct ranks *r)
{
	struct sd_strided *strided;
	uint64_t n = r->pieces.n;

	TRY(arena_alloc(r->sd->arena, n, sizeof *strided, &strided));
	r->sd->strided = strided;
	if (n)
		qsort_r(r->pieces.v, n, sizeof *r->pieces.v, by_tensor, r);
	for (uint64_t i = 0, end; i < n; i = end) {
		for (end = i + 1; end < n && r->pieces.v[end].tensor == r->pieces.v[i].tensor; end++)
			;
		const struct whole *w = &r->wholes.v[r->pieces.v[i].tensor];
		TRY(err_at_fqn(put_tensor(r, i, end, strided), w->fqn.p, w->fqn.n));
	}
	return OK;
}

static FALLIBLE enum err open_all(struct ranks *r)
{
	TRY(check_complete(r));
	r->sd->has_paths = true;
	for (uint64_t i = 0; i < r->s->payload_count; i++)
		TRY(err_at_file(open_file(r, r->s->payload[i]), r->s->payload[i], -1));
	return put_tensors(r);
}

enum err format_open_torch_ranks(const struct format_source *s, struct arena *scratch, struct sdict **out)
{
	struct ranks r = { .s = s, .arena = scratch };

	TRY(sdict_new(UINT64_MAX, out));
	r.sd = *out;
	enum err e = open_all(&r);
	vec_free(&r.pieces);
	vec_free(&r.wholes);
	map_free(&r.by_fqn);
	return e;
}
