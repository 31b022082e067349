/* state_dict_op_fill.c: the operations whose result follows the target: broadcast, distribute, redistribute (see state_dict_op.h).
 *
 * PyTorch's functions take flat dicts; nested ones here are treated as if they had been flattened, which is what PyTorch's own callers do
 * first. The three differ in the keys of the result and in the giver of a tensor's bytes; the rest is alike. A target that is not
 * there yet is made first (state_dict_op_cut.h) and then filled like any other. */
#include "plan/state_dict_op_cut.h"
#include "plan/state_dict_op_pool.h"
#include "tensor/box.h"

/* A rank's target at one path. */
struct slot {
	struct tree *made;               /* its result; NULL: it is taken out */
	bool open;                       /* a container of the source belongs to it: the walk goes on below */
};

struct filler {
	struct state_dict_op_build *b;
	uint32_t root;                   /* in the world */
	bool drop;                       /* strict broadcast: keys that the source lacks are taken out */
	struct tree **targets;
	struct pool pool;                /* redistribute: of row `number` */
	uint64_t number;
	bool has_pool;
};

static const struct iterate_place *place_of(const struct iterate_place *places, uint32_t count, uint32_t rank)
{
	uint32_t lo = 0, hi = count;

	while (lo < hi) {
		uint32_t mid = lo + (hi - lo) / 2;
		if (places[mid].rank == rank)
			return &places[mid];
		places[mid].rank < rank ? (lo = mid + 1) : (hi = mid);
	}
	return NULL;
}

/* Finds the rank whose value `rank` takes, if any rank has the path. */
static const struct iterate_place *giver(const struct filler *f, const struct iterate_row *row, uint32_t rank)
{
	const struct iterate_place *own = place_of(row->source, row->source_count, rank);

	if (f->b->rq->kind == JOB_BROADCAST)
		return place_of(row->source, row->source_count, f->root);
	if (own)
		return own;
	if (f->b->rq->kind == JOB_DISTRIBUTE)
		return place_of(row->source, row->source_count, f->root);
	return row->source_count ? &row->source[0] : NULL;
}

static FALLIBLE enum err move_whole(struct filler *f, const struct iterate_place *from, uint32_t rank, const struct tree *to)
{
	const struct tree_tensor *t = &to->tensor;

	for (uint32_t i = 0; i < t->shard_count && f->b->wanted[rank]; i++) {
		struct state_dict_op_move m = { .from_rank = from->rank, .to_rank = rank, .from = from->node, .to = to, .to_shard = i,
						.dims = t->shards[i].dims };
		if (!m.dims)
			TRY(state_dict_op_whole_dims(f->b, t, &m.dims));
		if (!box_empty(t->ndim, m.dims + t->ndim))
			TRY(state_dict_op_move_add(f->b, m));
	}
	return OK;
}

static FALLIBLE enum err needs_whole(const struct filler *f, const struct iterate_place *from)
{
	if (from->node->kind == TREE_TENSOR)
		return OK;
	return err_at_rank(ERR(KIND_MISMATCH, "%s takes whole tensors, this is a %s: gather or redistribute it",
			       f->b->rq->kind == JOB_BROADCAST ? "broadcast" : "distribute", tree_kind_name(from->node->kind)),
			   from->rank);
}

/* A plain target takes the source's size and dtype. */
static FALLIBLE enum err fill_plain(struct filler *f, const struct iterate_row *row, const struct iterate_place *from, uint32_t rank,
				    const struct tree *target, struct tree **out)
{
	struct str was, is;

	TRY(needs_whole(f, from));
	if (target && target->kind == TREE_TENSOR && tree_same_shape(target, from->node) &&
	    target->tensor.dtype == from->node->tensor.dtype) {
		*out = (struct tree *)(uintptr_t)target;
	} else {
		TRY(state_dict_op_made_whole(f->b, rank, from->node, out));
		if (target && tree_is_tensor(target)) {
			TRY(state_dict_op_describe(f->b->arena, target, &was));
			TRY(state_dict_op_describe(f->b->arena, from->node, &is));
			TRY(state_dict_op_note_add(f->b, STATE_DICT_OP_NOTE_RESIZED, row, rank, was, is));
		}
	}
	return move_whole(f, from, rank, *out);
}

static FALLIBLE enum err check_cut(struct filler *f, const struct iterate_row *row, uint32_t rank, const struct tree *source,
				   const struct tree *target)
{
	const struct tree_tensor *t = &target->tensor;

	TRY(state_dict_op_same_size(source, target));
	for (uint32_t i = 0; target->kind == TREE_DTENSOR && i < t->mesh->ndim; i++)
		if (t->placements[i].kind == PLACE_PARTIAL)
			return ERR(LAYOUT_INVALID, "Partial() can be a source, not a target");
	return state_dict_op_cast(f->b, row, rank, source, target);
}

/* A sharded target keeps its mesh, placements and dtype and takes its part. */
static FALLIBLE enum err fill_sharded(struct filler *f, const struct iterate_row *row, const struct iterate_place *from, uint32_t rank,
				      const struct tree *target, struct tree **out)
{
	const struct iterate_place *first = NULL;

	/* distribute_tensor: what the first rank of the mesh has counts. */
	if (f->b->rq->kind == JOB_DISTRIBUTE && target->kind == TREE_DTENSOR)
		first = place_of(row->source, row->source_count, target->tensor.mesh->ranks[0]);
	if (first && first->node->kind == TREE_TENSOR)
		from = first;
	TRY(needs_whole(f, from));
	TRY(check_cut(f, row, rank, from->node, target));
	*out = (struct tree *)(uintptr_t)target;
	return move_whole(f, from, rank, target);
}

static FALLIBLE enum err refill(struct filler *f, const struct iterate_row *row, uint32_t rank, const struct tree *target,
				struct tree **out)
{
	if (!f->has_pool || f->number != row->number) {
		TRY(pool_make(f->b, row->source, row->source_count, &f->pool));
		f->has_pool = true;
		f->number = row->number;
	}
	if (!tree_is_tensor(target))
		return ERR(KIND_MISMATCH, "the source has a tensor, the target a %s", tree_kind_name(target->kind));
	TRY(check_cut(f, row, rank, f->pool.like, target));
	*out = (struct tree *)(uintptr_t)target;
	return pool_fill(f->b, &f->pool, rank, target);
}

static FALLIBLE enum err fill_leaf(struct filler *f, const struct iterate_row *row, const struct iterate_place *from, uint32_t rank,
				   const struct tree *target, struct tree **out)
{
	bool redistribute = f->b->rq->kind == JOB_REDISTRIBUTE;

	if (tree_is_tensor(from->node)) {
		if (redistribute)
			return refill(f, row, rank, target, out);
		/* PyTorch cannot tell a key that is None from one that is not there. */
		if (target && tree_is_none(target) && from->node->tensor.ndim) {
			*out = (struct tree *)(uintptr_t)target;
			return state_dict_op_note_add(f->b, STATE_DICT_OP_NOTE_DROPPED, row, rank, (struct str){ 0 }, (struct str){ 0 });
		}
		return target && tree_is_sharded(target) && from->node->tensor.ndim ?
			       fill_sharded(f, row, from, rank, target, out) :
			       fill_plain(f, row, from, rank, target, out);
	}
	if (f->b->rq->type_check && from->node->value.kind == TREE_OPAQUE)
		return err_at_rank(ERR(VALUE_TYPE, "Unexpected value type <class '%.*s'>",
				       (int)(from->node->value.type.n < 200 ? from->node->value.type.n : 200),
				       from->node->value.type.n ? from->node->value.type.p : ""), from->rank);
	if (redistribute && target && target->kind != TREE_VALUE)
		return ERR(KIND_MISMATCH, "the source has a value, the target a %s", tree_kind_name(target->kind));
	*out = (struct tree *)(uintptr_t)from->node;
	return OK;
}

/* Adds the values and 0-d tensors of a key that the target lacks, or that was no container there. */
static FALLIBLE enum err graft(struct filler *f, const struct iterate_row *row, const struct iterate_place *from, uint32_t rank,
			       struct tree **out)
{
	const struct tree *t = from->node;
	struct tree *one, *none;
	bool any = t->count == 0;

	*out = NULL;
	if (!tree_is_container(t))
		return tree_is_tensor(t) && t->tensor.ndim ? OK : fill_leaf(f, row, from, rank, NULL, out);
	TRY(tree_new(f->b->arena, t->kind, out));
	for (uint32_t i = 0; i < t->count; i++) {
		const struct iterate_place below = { .node = t->children[i], .rank = from->rank };
		TRY(graft(f, row, &below, rank, &one));
		if (one && t->kind == TREE_DICT) {
			TRY(tree_put(f->b->arena, *out, t->keys[i], one));
		} else if (one) {
			TRY(tree_none(f->b->arena, &none));
			while ((*out)->count < i) /* as set_element leaves holes */
				TRY(tree_append(f->b->arena, *out, none));
			TRY(tree_append(f->b->arena, *out, one));
		}
		any |= one != NULL;
	}
	if (!any)
		*out = NULL;
	return OK;
}

static bool holds_tensor(const struct tree *t)
{
	if (!tree_is_container(t))
		return tree_is_tensor(t) && t->tensor.ndim;
	for (uint32_t i = 0; i < t->count; i++)
		if (holds_tensor(t->children[i]))
			return true;
	return false;
}

/* A container meets something else. */
static FALLIBLE enum err fill_odd(struct filler *f, const struct iterate_row *row, const struct iterate_place *from, uint32_t rank,
				  const struct tree *target, struct tree **out)
{
	if (f->b->rq->kind == JOB_REDISTRIBUTE || holds_tensor(from->node))
		return ERR(KIND_MISMATCH, "the source has a %s, the target a %s", tree_kind_name(from->node->kind),
			   tree_kind_name(target->kind));
	return graft(f, row, from, rank, out);
}

static FALLIBLE enum err missing(struct filler *f, const struct iterate_row *row, const struct iterate_place *target, struct slot *slot)
{
	bool container = tree_is_container(target->node);

	slot->open = container;
	if (!container || target->node->count == 0) {
		if (f->b->rq->kind == JOB_REDISTRIBUTE && f->b->rq->strict)
			return ERR(MISSING_KEY, "the source lacks this key of the target");
		TRY(state_dict_op_note_add(f->b, STATE_DICT_OP_NOTE_MISSING, row, target->rank, (struct str){ 0 }, (struct str){ 0 }));
	}
	if (f->drop)
		return OK;
	if (container)
		return tree_shell(f->b->arena, target->node, &slot->made);
	slot->made = (struct tree *)(uintptr_t)target->node;
	return OK;
}

static FALLIBLE enum err fill_slot(struct filler *f, const struct iterate_row *row, const struct iterate_place *target,
				   struct slot *slot)
{
	const struct iterate_place *from = giver(f, row, target->rank);
	const struct tree *t = target->node;

	if (!from)
		return missing(f, row, target, slot);
	if (tree_is_container(t) && tree_is_container(from->node) && tree_is_list(t) == tree_is_list(from->node)) {
		slot->open = true;
		return f->drop ? tree_new(f->b->arena, t->kind, &slot->made) : tree_shell(f->b->arena, t, &slot->made);
	}
	if (tree_is_container(from->node) || (tree_is_container(t) && f->b->rq->kind == JOB_REDISTRIBUTE))
		return fill_odd(f, row, from, target->rank, t, &slot->made);
	return fill_leaf(f, row, from, target->rank, t, &slot->made);
}

static FALLIBLE enum err attach(struct filler *f, const struct iterate_row *row, const struct iterate_place *p, struct tree *node)
{
	if (!row->parent) {
		f->targets[p->rank] = node;
		return OK;
	}
	struct tree *above = ((struct slot *)row->parent->state)[p->parent].made;
	if (!above || !node)
		return OK;
	if (!f->drop) {
		above->children[p->index] = node;
		return OK;
	}
	return row->in_list ? tree_append(f->b->arena, above, node) : tree_put(f->b->arena, above, row->key, node);
}

/* Keys of the source that a target lacks. */
static FALLIBLE enum err extra(struct filler *f, const struct iterate_row *row, uint32_t rank, struct tree *above)
{
	const struct iterate_place *from = giver(f, row, rank);
	struct tree *node, *none;

	if (!from)
		return OK;
	if (f->b->rq->kind == JOB_DISTRIBUTE) {
		TRY(graft(f, row, from, rank, &node));
		if (node && !row->in_list)
			return tree_put(f->b->arena, above, row->key, node);
		if (node) {
			TRY(tree_none(f->b->arena, &none));
			while ((int64_t)above->count < row->key.index)
				TRY(tree_append(f->b->arena, above, none));
			return tree_append(f->b->arena, above, node);
		}
	}
	return state_dict_op_note_add(f->b, STATE_DICT_OP_NOTE_DROPPED, row, rank, (struct str){ 0 }, (struct str){ 0 });
}

static FALLIBLE enum err extras(struct filler *f, const struct iterate_row *row)
{
	const struct iterate_row *up = row->parent;
	uint32_t at = 0;

	for (uint32_t i = 0; up && i < up->companion_count; i++) {
		struct slot *slot = &((struct slot *)up->state)[i];
		while (at < row->companion_count && row->companion[at].parent < i)
			at++;
		if (at < row->companion_count && row->companion[at].parent == i)
			continue;
		if (!slot->open || !slot->made || !up->companion[i].node ||
		    tree_is_list(up->companion[i].node) != row->in_list)
			continue;
		enum err e = extra(f, row, up->companion[i].rank, slot->made);
		if (e)
			return iterate_error(e, row, up->companion[i].rank);
	}
	return OK;
}

static enum err visit(void *ctx, struct iterate_row *row)
{
	struct filler *f = ctx;
	struct slot *slots;

	TRY(arena_alloc(f->b->scratch, row->companion_count, sizeof *slots, &slots));
	row->state = slots;
	for (uint32_t i = 0; i < row->companion_count; i++) {
		struct iterate_place *p = &row->companion[i];
		enum err e = fill_slot(f, row, p, &slots[i]);
		e = e ?: attach(f, row, p, slots[i].made);
		if (e)
			return iterate_error(e, row, p->rank);
		if (!slots[i].open)
			p->node = NULL;
	}
	TRY(extras(f, row));
	for (uint32_t i = 0; row->companion_count == 0 && i < row->source_count; i++)
		row->source[i].node = NULL; /* nobody wants what is below */
	return OK;
}

/* Collects the trees that count as the source. */
static FALLIBLE enum err sources(struct filler *f, struct tree ***out)
{
	struct state_dict_op_build *b = f->b;
	const struct state_dict_op_request *rq = b->rq;

	f->root = rq->group && rq->root < rq->group_count ? rq->group[rq->root] : rq->root;
	f->drop = rq->kind == JOB_BROADCAST && rq->strict;
	TRY(arena_alloc(b->scratch, rq->world_size, sizeof **out, out));
	for (uint32_t r = 0; r < rq->world_size; r++)
		if (rq->kind == JOB_BROADCAST ? r == f->root : b->member[r])
			(*out)[r] = b->source[r];
	if (rq->kind == JOB_BROADCAST && !(*out)[f->root])
		return err_at_rank(ERR(INVALID_REQUEST, "the root, rank %u, has no state dict", f->root), f->root);
	return OK;
}

enum err state_dict_op_fill(struct state_dict_op_build *b)
{
	struct filler f = { .b = b, .targets = b->out->target };
	struct tree **source, **target;
	uint32_t world = b->rq->world_size;

	TRY(sources(&f, &source));
	TRY(arena_alloc(b->scratch, world, sizeof *target, &target));
	for (uint32_t r = 0; b->companion && r < world; r++)
		target[r] = state_dict_op_takes(b, r) ? b->companion[r] : NULL;
	if (!b->companion)
		TRY(state_dict_op_cut(b, source, target));
	return iterate_rows((struct iterate_side){ source, world }, (struct iterate_side){ target, world }, true, b->scratch,
			    visit, &f);
}
