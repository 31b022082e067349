/* state_dict_op_pool.c: who holds what of a tensor, and who gives it (see state_dict_op_pool.h).
 *
 * Boxes are sorted and equal ones put together: they are replicas. The remaining boxes have to tile the tensor; a tensor cut along one
 * dim, which most are, shows that in one pass, any other asks overlap.h. A target's box then takes from each box that it meets: from the
 * rank itself, from its host, or from the one that gives least so far, so that no holder serves all. */
#include "plan/state_dict_op_pool.h"

#include <stdlib.h>

#include "base/mem.h"
#include "base/num.h"
#include "plan/overlap.h"
#include "tensor/box.h"

enum { FEW_PAIRS = 4096, MEMBERS_MAX = UINT16_MAX };

/* Sorting needs the number of dims; qsort has no argument for it. */
struct sortable {
	const struct pool_entry *entry;
	uint32_t ndim;
};

static int compare_entries(const struct pool_entry *x, const struct pool_entry *y, uint32_t ndim)
{
	int order = x->dims == y->dims ? 0 : num_order_rows(x->dims, y->dims, ndim * 2);

	return order ?: num_order(x->group, y->group) ?: num_order(x->rank, y->rank);
}

static int compare_sortable(const void *a, const void *b)
{
	const struct sortable *x = a, *y = b;

	return compare_entries(x->entry, y->entry, x->ndim);
}

static FALLIBLE enum err sort_entries(struct pool *p)
{
	uint32_t ndim = p->like->tensor.ndim, n = p->entry_count;
	bool sorted = true;

	for (uint32_t i = 1; i < n && sorted; i++)
		sorted = compare_entries(&p->entries[i - 1], &p->entries[i], ndim) <= 0;
	if (sorted)
		return OK;
	CLEANUP(mem_free_ptr) struct sortable *order = mem_zalloc(n, sizeof *order);
	CLEANUP(mem_free_ptr) struct pool_entry *copy = mem_zalloc(n, sizeof *copy);
	NEED(order && copy, "no memory to plan %u shards", n);
	for (uint32_t i = 0; i < n; i++) {
		copy[i] = p->entries[i];
		order[i] = (struct sortable){ &copy[i], ndim };
	}
	qsort(order, n, sizeof *order, compare_sortable);
	for (uint32_t i = 0; i < n; i++)
		p->entries[i] = *order[i].entry;
	return OK;
}

/* Partial: what the members of a group hold has to be put together. */
static FALLIBLE enum err partial_op(struct pool *p)
{
	const struct tree_tensor *t = &p->like->tensor;
	uint64_t members = 1, divisor = 1;
	bool any = false;

	p->members = 1;
	for (uint32_t m = 0; p->like->kind == TREE_DTENSOR && m < t->mesh->ndim; m++) {
		const struct placement *pl = &t->placements[m];
		if (pl->kind != PLACE_PARTIAL)
			continue;
		if (any && !placement_may_mix(pl->reduce, (enum reduce_op)p->op))
			return ERR(LAYOUT_INVALID, "Partial(%s) and Partial(%s) of one tensor cannot be reduced in a certain order",
				   placement_reduce_name(p->op), placement_reduce_name(pl->reduce));
		/* A sum of averages is an average of sums. */
		p->op = any && pl->reduce == REDUCE_SUM ? p->op : pl->reduce;
		members *= (uint64_t)t->mesh->sizes[m];
		divisor *= pl->reduce == REDUCE_AVG ? (uint64_t)t->mesh->sizes[m] : 1;
		any = true;
	}
	if (members > MEMBERS_MAX)
		return ERR(LIMIT_EXCEEDED, "a value is spread over %ju ranks", (uintmax_t)members);
	p->members = (uint32_t)members;
	p->divisor = (uint16_t)divisor;
	if (any && p->op == REDUCE_AVG && !dtype_is_float(t->dtype) && !dtype_is_complex(t->dtype))
		return ERR(DTYPE_UNSUPPORTED, "there is no average of %s", dtype_name(t->dtype));
	if (any && p->op >= REDUCE_MIN && p->op <= REDUCE_MAX && dtype_is_complex(t->dtype))
		return ERR(DTYPE_UNSUPPORTED, "there is no %s of %s", placement_reduce_name(p->op), dtype_name(t->dtype));
	return OK;
}

/* A rank's group: its place in the mesh without the dims that are Partial. */
static FALLIBLE enum err group_of(const struct pool *p, const struct tree *node, uint32_t rank, uint32_t *out)
{
	const struct tree_mesh *mesh = p->like->tensor.mesh;
	int64_t coord[NDIM_MAX];
	uint64_t group = 0;

	*out = rank;
	if (p->members == 1)
		return OK;
	if (!tree_mesh_coord(mesh, rank, coord))
		return ERR(PLAN_INVALID, "the rank has a shard of a DTensor and is not in its mesh");
	for (uint32_t m = 0; m < mesh->ndim; m++)
		if (node->tensor.placements[m].kind != PLACE_PARTIAL)
			group = group * (uint64_t)mesh->sizes[m] + (uint64_t)coord[m];
	*out = (uint32_t)group;
	return OK;
}

static FALLIBLE enum err check_same(const struct tree *first, uint32_t first_rank, const struct tree *node, uint32_t rank)
{
	const struct tree_tensor *a = &first->tensor, *b = &node->tensor;
	char x[160], y[160];

	if (first->kind != node->kind)
		return err_at_rank(ERR(PLAN_INVALID, "rank %u has a %s, rank %u a %s", first_rank, tree_kind_name(first->kind), rank,
				       tree_kind_name(node->kind)), rank);
	if (a->dtype != b->dtype || !tree_same_shape(first, node))
		return err_at_rank(ERR(PLAN_INVALID, "rank %u has %s %s, rank %u %s %s", first_rank, dtype_name(a->dtype),
				       box_print(a->ndim, a->shape, x, sizeof x), rank, dtype_name(b->dtype),
				       box_print(b->ndim, b->shape, y, sizeof y)), rank);
	if (!tree_same_mesh(first, node))
		return err_at_rank(ERR(PLAN_INVALID, "rank %u has another mesh or other placements than rank %u", rank, first_rank),
				   rank);
	return OK;
}

static FALLIBLE enum err collect(struct state_dict_op_build *b, const struct iterate_place *places, uint32_t count, struct pool *p)
{
	uint64_t total = 0;

	for (uint32_t i = 0; i < count; i++) {
		if (!tree_is_tensor(places[i].node))
			return err_at_rank(ERR(PLAN_INVALID, "rank %u has a %s, rank %u a %s", places[i].rank,
					       tree_kind_name(places[i].node->kind), places[0].rank,
					       tree_kind_name(places[0].node->kind)), places[i].rank);
		TRY(check_same(places[0].node, places[0].rank, places[i].node, places[i].rank));
		total += places[i].node->tensor.shard_count;
	}
	if (total > UINT32_MAX)
		return ERR(LIMIT_EXCEEDED, "a tensor of %ju shards", (uintmax_t)total);
	TRY(arena_alloc(b->scratch, total, sizeof *p->entries, &p->entries));
	for (uint32_t i = 0; i < count; i++) {
		const struct tree_tensor *t = &places[i].node->tensor;
		for (uint32_t s = 0; s < t->shard_count; s++) {
			struct pool_entry *e = &p->entries[p->entry_count];
			*e = (struct pool_entry){ t->shards[s].dims, places[i].rank, s, places[i].node, 0 };
			if (!e->dims && p->entry_count && p->entries[0].node->kind == TREE_TENSOR)
				e->dims = p->entries[0].dims; /* all whole ones are equal */
			if (!e->dims)
				TRY(state_dict_op_whole_dims(b, t, &e->dims));
			if (box_empty(t->ndim, e->dims + t->ndim))
				continue;
			TRY(err_at_rank(group_of(p, places[i].node, e->rank, &e->group), e->rank));
			p->entry_count++;
		}
	}
	return OK;
}

static FALLIBLE enum err overlapping(uint32_t ndim, const struct pool_entry *x, const struct pool_entry *y)
{
	char t[4][96];

	return err_at_rank(ERR(PLAN_INVALID, "shards overlap: %s+%s of rank %u and %s+%s of rank %u",
			       box_print(ndim, x->dims, t[0], 96), box_print(ndim, x->dims + ndim, t[1], 96), x->rank,
			       box_print(ndim, y->dims, t[2], 96), box_print(ndim, y->dims + ndim, t[3], 96), y->rank), y->rank);
}

static FALLIBLE enum err part_missing(const struct pool *p, const struct pool_box *box)
{
	const struct tree_mesh *mesh = p->like->tensor.mesh;
	uint32_t rank = p->entries[box->first].rank;
	uint64_t size = tree_mesh_size(mesh);

	for (uint64_t i = size; i-- > 0;) {
		uint32_t k = 0;
		while (k < p->entry_count && p->entries[k].rank != mesh->ranks[i])
			k++;
		if (k == p->entry_count)
			rank = mesh->ranks[i];
	}
	return err_at_rank(ERR(PLAN_INVALID, "a part of the Partial value is missing on rank %u", rank), rank);
}

/* Puts equal boxes together: replicas, or the parts of a Partial value. */
static FALLIBLE enum err unite(struct state_dict_op_build *b, struct pool *p)
{
	uint32_t ndim = p->like->tensor.ndim;
	struct pool_box *box = NULL;

	TRY(arena_alloc(b->scratch, p->entry_count, sizeof *p->boxes, &p->boxes));
	for (uint32_t i = 0; i < p->entry_count; i++) {
		struct pool_entry *e = &p->entries[i];
		if (box && (box->dims == e->dims || ndim == 0 || memcmp(box->dims, e->dims, 2 * ndim * sizeof *e->dims) == 0)) {
			if (e[-1].rank == e->rank)
				return overlapping(ndim, &e[-1], e);
			box->count++;
			continue;
		}
		box = &p->boxes[p->box_count++];
		*box = (struct pool_box){ e->dims, box_volume(ndim, e->dims + ndim), i, 1 };
	}
	for (uint32_t i = 0; i < p->box_count; i++) {
		box = &p->boxes[i];
		p->choice |= box->count > p->members;
		for (uint32_t k = 0; k < box->count; k++) {
			const struct pool_entry *first = &p->entries[box->first + k / p->members * p->members];
			if (box->count % p->members || p->entries[box->first + k].group != first->group)
				return part_missing(p, box);
		}
	}
	return OK;
}

/* The dim along which sorted boxes follow each other without a gap, if they do; else -1. */
static int32_t line_dim(const struct pool *p)
{
	const struct tree_tensor *t = &p->like->tensor;
	uint32_t dim = 0;

	if (p->box_count == 0 || t->ndim == 0)
		return -1;
	const int64_t *d = p->boxes[0].dims;
	while (dim + 1 < t->ndim && d[t->ndim + dim] == t->shape[dim])
		dim++;
	int64_t end = 0;
	for (uint32_t i = 0; i < p->box_count; i++) {
		d = p->boxes[i].dims;
		for (uint32_t k = 0; k < t->ndim; k++)
			if (k != dim && (d[k] != 0 || d[t->ndim + k] != t->shape[k]))
				return -1;
		if (d[dim] != end)
			return -1;
		end += d[t->ndim + dim];
	}
	return end == t->shape[dim] ? (int32_t)dim : -1;
}

struct pair {
	uint32_t x, y;
};

static enum err first_pair(void *ctx, uint32_t x, uint32_t y)
{
	*(struct pair *)ctx = (struct pair){ x < y ? x : y, x < y ? y : x };
	return ERR_PLAN_INVALID; /* one is enough */
}

static FALLIBLE enum err check_tiling(struct state_dict_op_build *b, const struct pool *p, const struct iterate_place *places,
				      uint32_t count)
{
	uint32_t ndim = p->like->tensor.ndim, lacks = places[0].rank;
	struct pair pair = { 0 };
	struct overlap_box *boxes;
	uint64_t sum = 0, want;
	char text[128];

	TRY(box_numel(ndim, p->like->tensor.shape, &want));
	TRY(arena_alloc(b->scratch, p->box_count, sizeof *boxes, &boxes));
	for (uint32_t i = 0; i < p->box_count; i++) {
		boxes[i] = (struct overlap_box){ p->boxes[i].dims, i };
		if (__builtin_add_overflow(sum, p->boxes[i].volume, &sum))
			sum = UINT64_MAX;
	}
	enum err e = p->box_count > 1 ? overlap_self(ndim, boxes, p->box_count, first_pair, &pair) : OK;
	if (pair.y)
		return overlapping(ndim, &p->entries[p->boxes[pair.x].first], &p->entries[p->boxes[pair.y].first]);
	if (e || sum == want)
		return e;
	for (uint32_t i = count; i-- > 0;)
		if (places[i].node->tensor.shard_count == 0)
			lacks = places[i].rank;
	return err_at_rank(ERR(COVERAGE_HOLE, "the shards of %s leave a hole: %ju of %ju elements are there",
			       box_print(ndim, p->like->tensor.shape, text, sizeof text), (uintmax_t)sum, (uintmax_t)want), lacks);
}

enum err pool_make(struct state_dict_op_build *b, const struct iterate_place *places, uint32_t count, struct pool *p)
{
	must(count > 0);
	*p = (struct pool){ .like = places[0].node };
	if (!tree_is_tensor(p->like))
		return ERR(KIND_MISMATCH, "a %s where a tensor is needed", tree_kind_name(p->like->kind));
	TRY(partial_op(p));
	TRY(collect(b, places, count, p));
	TRY(sort_entries(p));
	TRY(unite(b, p));
	p->line = line_dim(p);
	return p->line >= 0 ? OK : check_tiling(b, p, places, count);
}

/* The group of a box's holders that gives it to a rank: its first entry. */
static const struct pool_entry *choose(struct state_dict_op_build *b, const struct pool *p, const struct pool_box *box, uint32_t rank)
{
	const struct pool_entry *e = &p->entries[box->first], *best = NULL;
	bool best_near = false;
	uint32_t lo = 0, hi = box->count;

	if (box->count == p->members)
		return e;
	while (p->members == 1 && lo < hi) {
		uint32_t mid = lo + (hi - lo) / 2;
		if (e[mid].rank == rank)
			return &e[mid];
		e[mid].rank < rank ? (lo = mid + 1) : (hi = mid);
	}
	for (uint32_t i = 0; p->members > 1 && i < box->count; i++)
		if (e[i].rank == rank)
			return &e[i / p->members * p->members];
	for (uint32_t i = 0; i < box->count; i += p->members) {
		bool near = !b->hosts || b->hosts[e[i].rank] == b->hosts[rank];
		if (best && (best_near > near || (best_near == near && b->load[best->rank] <= b->load[e[i].rank])))
			continue;
		best = &e[i];
		best_near = near;
	}
	return best;
}

struct fill {
	struct state_dict_op_build *b;
	const struct pool *p;
	uint32_t rank, shard;
	const struct tree *to;
	const int64_t *dims;             /* of the target's shard */
	uint64_t found;                  /* elements */
};

/* The part of the pool's box that the target's box needs. */
static enum err take(struct fill *f, const struct pool_box *box)
{
	struct state_dict_op_build *b = f->b;
	uint32_t ndim = f->p->like->tensor.ndim;
	int64_t part[2 * NDIM_MAX], *kept;

	if (!box_intersect(ndim, f->dims, f->dims + ndim, box->dims, box->dims + ndim, part, part + ndim))
		return OK;
	uint64_t n = box_volume(ndim, part + ndim);
	const struct pool_entry *e = choose(b, f->p, box, f->rank);
	struct state_dict_op_move m = { .to_rank = f->rank, .to = f->to, .to_shard = f->shard, .dims = box->dims };

	f->found += n;
	if (box->count > f->p->members && e->rank != f->rank)
		b->load[e->rank] += n * dtype_bytes(f->p->like->tensor.dtype);
	if (!b->wanted[f->rank])
		return OK;
	if (n == box_volume(ndim, f->dims + ndim)) {
		m.dims = f->dims;
	} else if (n != box->volume) {
		TRY(arena_i64(b->arena, (uint64_t)ndim * 2, &kept));
		memcpy(kept, part, 2 * ndim * sizeof *kept);
		m.dims = kept;
	}
	if (f->p->members > 1) {
		m.reduce = ++b->reduces;
		m.op = (uint8_t)f->p->op;
		m.divisor = f->p->divisor;
	}
	for (uint32_t i = 0; i < f->p->members; i++) {
		m.from_rank = e[i].rank;
		m.from = e[i].node;
		m.from_shard = e[i].shard;
		TRY(state_dict_op_move_add(b, m));
	}
	return OK;
}

static enum err take_pair(void *ctx, uint32_t, uint32_t box)
{
	struct fill *f = ctx;

	return take(f, &f->p->boxes[box]);
}

static FALLIBLE enum err take_line(struct fill *f)
{
	uint32_t dim = (uint32_t)f->p->line, ndim = f->p->like->tensor.ndim, lo = 0, hi = f->p->box_count;
	int64_t start = f->dims[dim], end = start + f->dims[ndim + dim];

	while (lo + 1 < hi) { /* the last box that begins at or before it */
		uint32_t mid = lo + (hi - lo) / 2;
		f->p->boxes[mid].dims[dim] <= start ? (lo = mid) : (hi = mid);
	}
	for (; lo < f->p->box_count && f->p->boxes[lo].dims[dim] < end; lo++)
		TRY(take(f, &f->p->boxes[lo]));
	return OK;
}

static FALLIBLE enum err take_grid(struct fill *f)
{
	struct state_dict_op_build *b = f->b;
	const struct overlap_box target = { f->dims, 0 };
	struct overlap_box *boxes;

	if (f->p->box_count <= FEW_PAIRS) {
		for (uint32_t i = 0; i < f->p->box_count; i++)
			TRY(take(f, &f->p->boxes[i]));
		return OK;
	}
	TRY(arena_alloc(b->scratch, f->p->box_count, sizeof *boxes, &boxes));
	for (uint32_t i = 0; i < f->p->box_count; i++)
		boxes[i] = (struct overlap_box){ f->p->boxes[i].dims, i };
	return overlap_join(f->p->like->tensor.ndim, &target, 1, boxes, f->p->box_count, take_pair, f);
}

enum err pool_fill(struct state_dict_op_build *b, const struct pool *p, uint32_t rank, const struct tree *to)
{
	const struct tree_tensor *t = &to->tensor;
	if (!p->choice && !b->wanted[rank])
		return OK;
	for (uint32_t i = 0; i < t->shard_count; i++) {
		struct fill f = { b, p, rank, i, to, t->shards[i].dims, 0 };
		if (!f.dims)
			TRY(state_dict_op_whole_dims(b, t, &f.dims));
		if (box_empty(t->ndim, f.dims + t->ndim))
			continue;
		TRY(p->line >= 0 ? take_line(&f) : take_grid(&f));
		must(f.found == box_volume(t->ndim, f.dims + t->ndim)); /* the pool tiles the tensor, the box is inside of it */
	}
	return OK;
}
