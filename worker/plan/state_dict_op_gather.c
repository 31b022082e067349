/* state_dict_op_gather.c: sharded tensors become whole on the ranks that are listed, and nowhere else (see state_dict_op.h).
 *
 * PyTorch gathers a ShardedTensor as if it were cut on dim 0 into equal pieces, one a rank, whatever its metadata say. Here the
 * boxes decide, so that any cut, several shards a rank, uneven and empty ones come out right. */
#include "plan/state_dict_op_pool.h"

struct gather {
	struct state_dict_op_build *b;
	const struct iterate_row *row;   /* of the pool */
	uint64_t number;
	struct pool pool;
};

/* The same path in another tree, or NULL. */
static const struct tree *same_path(const struct iterate_row *row, const struct tree *root)
{
	if (!row->parent)
		return root;
	const struct tree *above = same_path(row->parent, root);
	if (!above || !tree_is_container(above) || row->in_list != tree_is_list(above))
		return NULL;
	if (row->in_list)
		return row->key.index < (int64_t)above->count ? above->children[row->key.index] : NULL;
	return tree_get(above, row->key);
}

/* A DTensor is gathered over its mesh, whatever the group is. */
static FALLIBLE enum err holders(struct gather *g, const struct iterate_row *row, const struct iterate_place **out, uint32_t *n_out)
{
	struct state_dict_op_build *b = g->b;
	const struct tree *first = row->source[0].node;
	struct iterate_place *all;
	uint32_t n = 0;

	*out = row->source;
	*n_out = row->source_count;
	if (!b->rq->group || first->kind != TREE_DTENSOR)
		return OK;
	uint64_t size = tree_mesh_size(first->tensor.mesh);
	TRY(arena_alloc(b->scratch, row->source_count + size, sizeof *all, &all));
	for (; n < row->source_count; n++)
		all[n] = row->source[n];
	for (uint64_t i = 0; i < size; i++) {
		uint32_t rank = first->tensor.mesh->ranks[i];
		const struct tree *node = b->member[rank] || !b->source[rank] ? NULL : same_path(row, b->source[rank]);
		if (node)
			all[n++] = (struct iterate_place){ .node = node, .rank = rank };
	}
	*out = all;
	*n_out = n;
	return OK;
}

static FALLIBLE enum err target_of(struct gather *g, const struct iterate_leaf *leaf, struct tree **out)
{
	if (!leaf->companion)
		return state_dict_op_made_whole(g->b, leaf->rank, leaf->node, out);
	if (leaf->companion->kind != TREE_TENSOR)
		return ERR(COMPANION_MISMATCH, "what is gathered is a tensor, the companion has a %s",
			   tree_kind_name(leaf->companion->kind));
	TRY(state_dict_op_same_size(leaf->node, leaf->companion));
	TRY(state_dict_op_cast(g->b, leaf->row, leaf->rank, leaf->node, leaf->companion));
	*out = (struct tree *)(uintptr_t)leaf->companion;
	return OK;
}

static enum err gather_leaf(void *ctx, const struct iterate_leaf *leaf, struct tree **out)
{
	struct gather *g = ctx;
	const struct iterate_place *places;
	uint32_t count;

	if (!g->row || g->number != leaf->row->number) {
		TRY(holders(g, leaf->row, &places, &count));
		TRY(pool_make(g->b, places, count, &g->pool));
		g->row = leaf->row;
		g->number = leaf->row->number;
	}
	if (!leaf->listed)
		return OK;
	TRY(target_of(g, leaf, out));
	return pool_fill(g->b, &g->pool, leaf->rank, *out);
}

static enum err keep_leaf(void *ctx, const struct iterate_leaf *leaf, struct tree **out)
{
	struct gather *g = ctx;

	if (!leaf->listed)
		return OK;
	TRY(target_of(g, leaf, out));
	return state_dict_op_move_own(g->b, leaf->rank, leaf->node, *out);
}

enum err state_dict_op_gather(struct state_dict_op_build *b)
{
	struct gather g = { .b = b };
	const struct iterate_fns fns = { gather_leaf, gather_leaf, keep_leaf, NULL, &g };
	const struct iterate_options o = state_dict_op_iterate_options(b);

	return iterate(&fns, &o, b->source, b->rq->world_size, b->arena, b->scratch, b->out->target);
}
