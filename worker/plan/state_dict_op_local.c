/* state_dict_op_local.c: the operations in which every rank works on its own: create, copy, offload, compare (see state_dict_op.h). */
#include "plan/state_dict_op_impl.h"

/* create: the same boxes again, nothing moves; what is new is zeros, as a 0-d tensor must be. */
static enum err create_leaf(void *ctx, const struct iterate_leaf *leaf, struct tree **out)
{
	struct state_dict_op_build *b = ctx;

	TRY(state_dict_op_made(b, leaf->rank, leaf->node, out));
	if (!b->rq->has_device)
		(*out)->tensor.device = TREE_CPU;
	(*out)->tensor.requires_grad = leaf->node->kind != TREE_TENSOR && leaf->node->tensor.requires_grad;
	return OK;
}

static FALLIBLE enum err layouts_fit(const struct iterate_leaf *leaf)
{
	if (leaf->node->kind != leaf->companion->kind)
		return ERR(COMPANION_MISMATCH, "the state dict has a %s, the companion a %s", tree_kind_name(leaf->node->kind),
			   tree_kind_name(leaf->companion->kind));
	TRY(state_dict_op_same_size(leaf->node, leaf->companion));
	if (!tree_same_layout(leaf->node, leaf->companion))
		return ERR(COMPANION_MISMATCH, "the %s is cut in another way in the companion: redistribute it",
			   tree_kind_name(leaf->node->kind));
	return OK;
}

/* copy, and offload into a target that is there. */
static enum err copy_leaf(void *ctx, const struct iterate_leaf *leaf, struct tree **out)
{
	struct state_dict_op_build *b = ctx;

	if (!leaf->listed)
		return OK;
	if (leaf->companion) {
		TRY(layouts_fit(leaf));
		TRY(state_dict_op_cast(b, leaf->row, leaf->rank, leaf->node, leaf->companion));
		*out = (struct tree *)(uintptr_t)leaf->companion;
	} else {
		TRY(state_dict_op_made(b, leaf->rank, leaf->node, out));
	}
	return state_dict_op_move_own(b, leaf->rank, leaf->node, *out);
}

enum err state_dict_op_local(struct state_dict_op_build *b)
{
	iterate_fn *fn = b->rq->kind == JOB_CREATE ? create_leaf : copy_leaf;
	const struct iterate_fns fns = { fn, fn, fn, NULL, b };
	struct iterate_options o = state_dict_op_iterate_options(b);

	o.cpu_offload = b->rq->kind == JOB_OFFLOAD;
	if (b->rq->kind != JOB_OFFLOAD)
		o.ranks_only_count = 0;
	if (b->rq->kind == JOB_CREATE)
		o.type_check = false; /* as PyTorch: what it does not know is copied */
	return iterate(&fns, &o, b->source, b->rq->world_size, b->arena, b->scratch, b->out->target);
}

static FALLIBLE enum err difference(struct state_dict_op_build *b, const struct iterate_row *row, uint32_t rank, const char *what,
				    struct str x, struct str y)
{
	struct state_dict_op_difference *d;

	b->out->difference_total++;
	if (b->differences.n >= STATE_DICT_OP_DIFFERENCES_MAX)
		return OK;
	TRY(vec_push(&b->differences, &d));
	*d = (struct state_dict_op_difference){ .rank = rank, .what = str_of(what), .a = x, .b = y };
	return state_dict_op_path(b, row, &d->path);
}

static struct str kind_text(const struct tree *t)
{
	return t ? str_of(tree_kind_name(t->kind)) : (struct str){ 0 };
}

static enum err structure_differs(void *ctx, const struct iterate_row *row, uint32_t rank, const struct tree *x,
				  const struct tree *y)
{
	struct state_dict_op_build *b = ctx;
	struct str m, n;

	if (!x || !y)
		return difference(b, row, rank, x ? "missing in b" : "missing in a", kind_text(x), kind_text(y));
	if (!tree_is_list(x) || !tree_is_list(y))
		return difference(b, row, rank, "kind", kind_text(x), kind_text(y));
	TRY(arena_printf(b->arena, &m, "%u", x->count));
	TRY(arena_printf(b->arena, &n, "%u", y->count));
	return difference(b, row, rank, "length", m, n);
}

static enum err compare_leaf(void *ctx, const struct iterate_leaf *leaf, struct tree **out)
{
	struct state_dict_op_build *b = ctx;
	const struct tree *x = leaf->node, *y = leaf->companion;
	bool alike = x->kind == y->kind;
	struct str m, n;

	*out = NULL;
	if (!alike)
		TRY(difference(b, leaf->row, leaf->rank, "kind", kind_text(x), kind_text(y)));
	if (x->tensor.dtype != y->tensor.dtype) {
		alike = false;
		TRY(difference(b, leaf->row, leaf->rank, "dtype", str_of(dtype_name(x->tensor.dtype)),
			       str_of(dtype_name(y->tensor.dtype))));
	}
	if (!tree_same_shape(x, y)) {
		alike = false;
		TRY(state_dict_op_describe(b->arena, x, &m));
		TRY(state_dict_op_describe(b->arena, y, &n));
		TRY(difference(b, leaf->row, leaf->rank, "size", m, n));
	}
	if (alike && !tree_same_layout(x, y)) {
		alike = false;
		TRY(arena_printf(b->arena, &m, "%u boxes", x->tensor.shard_count));
		TRY(arena_printf(b->arena, &n, "%u boxes", y->tensor.shard_count));
		TRY(difference(b, leaf->row, leaf->rank, "layout", m, n));
	}
	return alike && b->rq->values ? state_dict_op_move_own(b, leaf->rank, x, y) : OK;
}

/* PyTorch does not look at values that are no tensors; neither does this unless it is asked to. */
static enum err compare_value(void *ctx, const struct iterate_leaf *leaf, struct tree **)
{
	struct state_dict_op_build *b = ctx;
	const struct tree *x = leaf->node, *y = leaf->companion;

	if (!b->rq->values || tree_equal(x, y))
		return OK;
	return difference(b, leaf->row, leaf->rank, "value", x->value.kind == TREE_JSON ? x->value.bytes : STR("bytes"),
			  y->value.kind == TREE_JSON ? y->value.bytes : STR("bytes"));
}

enum err state_dict_op_compare(struct state_dict_op_build *b)
{
	const struct iterate_fns fns = { compare_leaf, compare_leaf, compare_leaf, compare_value, b };
	struct iterate_options o = state_dict_op_iterate_options(b);
	struct tree **unused;

	o.ranks_only_count = 0;
	o.type_check = false;
	o.differ = structure_differs;
	TRY(arena_alloc(b->scratch, b->rq->world_size, sizeof *unused, &unused));
	return iterate(&fns, &o, b->source, b->rq->world_size, b->scratch, b->scratch, unused);
}
