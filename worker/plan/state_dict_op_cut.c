/* state_dict_op_cut.c: making a target (see state_dict_op_cut.h). The boxes come from layout_apply, which knows sdicts; so each tensor
 * goes through one that is thrown away. */
#include "plan/state_dict_op_cut.h"

#include "plan/layout_use.h"
#include "tensor/box.h"

/* One for each rule: all tensors that it cuts share it. */
struct rule_mesh {
	bool made;
	struct tree_mesh mesh;
	const struct placement *placements;
};

struct cut {
	struct state_dict_op_build *b;
	struct tree **trees;
	struct layout layout;            /* the request's and, at the end, Shard(0) over the group */
	struct rule_mesh *meshes;        /* layout.rule_count */
	struct sdict *sd;
	bool whole;                      /* no layout: broadcast gives everybody all */
};

static struct tree **slots_of(const struct iterate_row *row)
{
	return row->state;
}

/* Sets a rank's node of this row: in its container above, or as its tree. */
static FALLIBLE enum err set_node(struct cut *c, const struct iterate_row *row, uint32_t rank, struct tree *node)
{
	struct tree *above = row->parent ? slots_of(row->parent)[rank] : NULL;

	slots_of(row)[rank] = node;
	if (!row->parent) {
		c->trees[rank] = node;
		return OK;
	}
	return row->in_list ? tree_append(c->b->arena, above, node) : tree_put(c->b->arena, above, row->key, node);
}

static FALLIBLE enum err check_kinds(const struct iterate_row *row)
{
	const struct iterate_place *p = row->source;

	for (uint32_t i = 1; i < row->source_count; i++) {
		if (p[i].node->kind != p[0].node->kind)
			return err_at_rank(ERR(PLAN_INVALID, "rank %u has a %s, rank %u a %s", p[0].rank,
					       tree_kind_name(p[0].node->kind), p[i].rank, tree_kind_name(p[i].node->kind)),
					   p[i].rank);
		if (tree_is_tensor(p[0].node) && !tree_same_shape(p[0].node, p[i].node))
			return err_at_rank(state_dict_op_same_size(p[0].node, p[i].node), p[i].rank);
	}
	return OK;
}

/* The mesh of a rule, as trees have it. */
static FALLIBLE enum err mesh_of(struct cut *c, uint32_t rule, const struct rule_mesh **out)
{
	const struct layout_rule *r = &c->layout.rules[rule];
	struct rule_mesh *m = &c->meshes[rule];
	uint32_t count = r->ranks ? r->rank_count : c->layout.world_size;
	struct arena *a = c->b->arena;
	struct placement *placements;
	uint32_t *ranks;
	int64_t *sizes;

	*out = m;
	if (m->made)
		return OK;
	m->mesh.ndim = r->mesh_ndim ? r->mesh_ndim : 1;
	TRY(arena_i64(a, m->mesh.ndim, &sizes));
	TRY(arena_alloc(a, count, sizeof *ranks, &ranks));
	TRY(arena_alloc(a, m->mesh.ndim, sizeof *placements, &placements));
	for (uint32_t i = 0; i < m->mesh.ndim; i++) {
		sizes[i] = r->mesh_ndim ? r->mesh[i] : (int64_t)count;
		placements[i] = r->placements[i];
	}
	for (uint32_t i = 0; i < count; i++)
		ranks[i] = r->ranks ? r->ranks[i] : i;
	m->mesh.sizes = sizes;
	m->mesh.ranks = ranks;
	m->mesh.names = r->dim_names;
	m->placements = placements;
	m->made = true;
	return OK;
}

/* The shards of one rank: the chunks [first, first + count) of the sdict. */
static FALLIBLE enum err shards_of(struct cut *c, uint32_t ndim, uint64_t first, uint32_t count, struct tree_shard **out)
{
	TRY(arena_alloc(c->b->arena, count, sizeof **out, out));
	for (uint32_t i = 0; i < count; i++) {
		int64_t *dims;
		TRY(arena_i64(c->b->arena, (uint64_t)ndim * 2 + 1, &dims));
		if (ndim)
			memcpy(dims, c->sd->chunks[first + i].dims, 2 * ndim * sizeof *dims);
		(*out)[i].dims = dims;
	}
	return OK;
}

static FALLIBLE enum err cut_tensor(struct cut *c, const struct iterate_row *row, const struct tree *like, uint32_t rule,
				    const struct sd_tensor *t)
{
	bool mesh = c->layout.rules[rule].kind == LAYOUT_MESH;
	uint64_t at = t->first_chunk, end = at + t->chunk_count;
	const struct rule_mesh *m = NULL;
	struct state_dict_op_build *b = c->b;
	struct tree_shard *shards;

	if (mesh)
		TRY(mesh_of(c, rule, &m));
	for (uint32_t r = 0; r < b->rq->world_size; r++) {
		struct tree_tensor part = like->tensor;
		struct tree *node;
		uint32_t n = 0;

		while (at + n < end && c->sd->chunks[at + n].rank == r)
			n++;
		if (!state_dict_op_takes(b, r)) {
			for (uint32_t i = 0; i < n; i++)
				if (!box_empty(t->ndim, c->sd->chunks[at + i].dims + t->ndim))
					return err_at_rank(ERR(LAYOUT_INVALID, "the layout gives a part to rank %u, which is not in "
							       "the group", r), r);
			at += n;
			continue;
		}
		TRY(shards_of(c, t->ndim, at, n, &shards));
		at += n;
		part.shards = shards;
		part.shard_count = n;
		part.mesh = m ? &m->mesh : NULL;
		part.placements = m ? m->placements : NULL;
		struct tree shape = { .kind = m ? TREE_DTENSOR : TREE_SHARDED, .tensor = part };
		TRY(state_dict_op_made(b, r, &shape, &node));
		TRY(set_node(c, row, r, node));
	}
	return OK;
}

/* The last rule is not the request's. */
static FALLIBLE enum err note_rule(struct cut *c, const struct sd_tensor *t, uint32_t rule)
{
	const struct state_dict_op_request *rq = c->b->rq;

	if (!rq->layout_use || !rq->layout)
		return OK;
	return layout_use_note(rq->layout_use, rq->layout, t, rule < rq->layout->rule_count ? rule : UINT32_MAX);
}

static FALLIBLE enum err make_tensor(struct cut *c, const struct iterate_row *row)
{
	const struct tree *like = row->source[0].node;
	struct state_dict_op_build *b = c->b;
	uint32_t index, rule = UINT32_MAX;
	struct str path;

	if (!c->whole) {
		TRY(iterate_path(row, b->scratch, &path));
		TRY(sdict_add_tensor(c->sd, path, like->tensor.dtype, like->tensor.ndim, like->tensor.shape, &index));
		TRY(layout_apply(&c->layout, c->sd, index, &rule));
		TRY(note_rule(c, &c->sd->tensors[index], rule));
		if (rule != UINT32_MAX)
			return cut_tensor(c, row, like, rule, &c->sd->tensors[index]);
	}
	/* Everybody has a copy, as of values: a 0-d tensor that no rule speaks of. */
	for (uint32_t r = 0; r < b->rq->world_size; r++) {
		struct tree *node;
		if (!state_dict_op_takes(b, r))
			continue;
		TRY(state_dict_op_made_whole(b, r, like, &node));
		TRY(set_node(c, row, r, node));
	}
	return OK;
}

static FALLIBLE enum err make_value(struct cut *c, const struct iterate_row *row)
{
	uint32_t at = 0;

	for (uint32_t r = 0; r < c->b->rq->world_size; r++) {
		while (at < row->source_count && row->source[at].rank < r)
			at++;
		if (!state_dict_op_takes(c->b, r))
			continue;
		bool own = at < row->source_count && row->source[at].rank == r;
		const struct tree *v = row->source[own ? at : 0].node;
		TRY(set_node(c, row, r, (struct tree *)(uintptr_t)v)); /* results refer to the trees given */
	}
	return OK;
}

static FALLIBLE enum err make_node(struct cut *c, struct iterate_row *row)
{
	const struct tree *like = row->source[0].node;

	TRY(check_kinds(row));
	if (tree_is_tensor(like))
		return make_tensor(c, row);
	if (like->kind == TREE_VALUE)
		return make_value(c, row);
	for (uint32_t r = 0; r < c->b->rq->world_size; r++) {
		struct tree *node;
		if (!state_dict_op_takes(c->b, r))
			continue;
		TRY(tree_new(c->b->arena, like->kind, &node));
		TRY(set_node(c, row, r, node));
	}
	return OK;
}

static enum err visit(void *ctx, struct iterate_row *row)
{
	struct cut *c = ctx;
	struct tree **slots;

	if (row->source_count == 0)
		return OK;
	TRY(arena_alloc(c->b->scratch, c->b->rq->world_size, sizeof *slots, &slots));
	row->state = slots;
	enum err e = make_node(c, row);
	return e ? iterate_error(e, row, -1) : OK;
}

/* The request's rules, then Shard(0) over the group for what they do not speak of. */
static FALLIBLE enum err make_layout(struct cut *c)
{
	const struct state_dict_op_request *rq = c->b->rq;
	const struct layout *given = rq->layout;
	uint32_t n = given ? given->rule_count : 0;
	struct layout_rule *rules;
	struct placement *shard0;

	TRY(arena_alloc(c->b->scratch, (uint64_t)n + 1, sizeof *rules, &rules));
	TRY(arena_alloc(c->b->scratch, 1, sizeof *shard0, &shard0));
	for (uint32_t i = 0; i < n; i++)
		rules[i] = given->rules[i];
	shard0->kind = PLACE_SHARD;
	rules[n] = (struct layout_rule){ .match = STR("*"), .kind = LAYOUT_MESH, .placements = shard0, .placement_count = 1,
					 .ranks = rq->group, .rank_count = rq->group ? rq->group_count : 0 };
	c->layout = (struct layout){ rules, n + 1, rq->target_world ? rq->target_world : rq->world_size };
	if (given && given->world_size != c->layout.world_size)
		return ERR(WORLD_MISMATCH, "the layout is for a world of %u, the state dict has %u", given->world_size,
			   c->layout.world_size);
	TRY(layout_check(&c->layout));
	return arena_alloc(c->b->arena, (uint64_t)n + 1, sizeof *c->meshes, &c->meshes); /* results refer to it */
}

enum err state_dict_op_cut(struct state_dict_op_build *b, struct tree *const *source, struct tree **trees)
{
	CLEANUP(sdict_free_ptr) struct sdict *sd = NULL;
	struct cut c = { .b = b, .trees = trees, .whole = b->rq->kind == JOB_BROADCAST && !b->rq->layout };

	TRY(sdict_new((uint64_t)1 << 36, &sd));
	c.sd = sd;
	TRY(make_layout(&c));
	TRY(iterate_rows((struct iterate_side){ source, b->rq->world_size }, (struct iterate_side){ NULL, 0 }, false, b->scratch,
			 visit, &c));
	return b->rq->layout_use && b->rq->layout ? layout_use_check(b->rq->layout_use, b->rq->layout, sd, NULL) : OK;
}
