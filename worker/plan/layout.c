/* layout.c: rules → boxes (see layout.h). Every kind of rule ends in the same thing, chunks in rank order, so that nothing behind
 * it needs to know meshes and placements. Rules are checked once for what does not depend on a tensor (layout_check); what is
 * left to go wrong per tensor names the FQN and the rule. */
#include "plan/layout.h"

#include <stdlib.h>

#include "base/mem.h"
#include "base/num.h"
#include "tensor/dtensor.h"
#include "plan/tiling.h"
#include "tensor/box.h"

enum { MATCH_SHOWN = 100, CHUNKS_MAX = 1 << 22 };

static const struct sd_loc nowhere = { .file = SD_NO_FILE };

/* One chunk to come: position says where it stands in the rule. */
struct entry {
	uint32_t rank, position;
	const int64_t *dims;
};

/* The error recorded last, with the rule in front. */
static enum err in_rule(const struct layout *l, uint32_t rule, enum err e)
{
	struct err_info was = *err_last();
	struct str m = l->rules[rule].match;

	if (!e)
		return OK;
	err_record(e, 0, was.place, "rule %u ('%.*s'): %s", rule, (int)num_min(m.n, MATCH_SHOWN), m.n ? m.p : "",
		   was.text);
	if (was.fqn[0])
		return err_at_fqn(e, was.fqn, strlen(was.fqn));
	return e;
}

static FALLIBLE enum err check(const struct layout *l, bool in_memory)
{
	struct layout_at at;

	if (l->world_size < 1 || l->world_size > LAYOUT_WORLD_MAX)
		return ERR(WORLD_MISMATCH, "a world has 1 to %d ranks, not %u", LAYOUT_WORLD_MAX, l->world_size);
	for (uint32_t i = 0; i < l->rule_count; i++) {
		const struct layout_rule *r = &l->rules[i];
		enum err e = layout_rules_check_one(r, l->world_size, in_memory, &at);
		if (!e && r->kind == LAYOUT_LIKE && !r->like)
			e = ERR(LAYOUT_INVALID, "no checkpoint to be like");
		TRY(in_rule(l, i, e));
	}
	return OK;
}

enum err layout_check(const struct layout *l)
{
	return check(l, false);
}

enum err layout_check_in_memory(const struct layout *l)
{
	return check(l, true);
}

static int by_rank(const void *a, const void *b)
{
	const struct entry *x = a, *y = b;

	return num_order(x->rank, y->rank) ?: num_order(x->position, y->position);
}

/* Adds the chunks of a mesh of `count` ranks; ranks NULL: 0, 1, … */
static FALLIBLE enum err apply_mesh(struct sdict *out, uint32_t tensor, uint32_t mesh_ndim, const int64_t *mesh,
				    const struct placement *placements, const uint32_t *ranks, uint32_t count)
{
	const struct sd_tensor *t = &out->tensors[tensor];
	CLEANUP(mem_free_ptr) struct entry *order = ranks ? mem_zalloc(count, sizeof *order) : NULL;
	CLEANUP(dtensor_part_free) struct dtensor_part part = { 0 };
	int64_t coord[MESH_DIMS_MAX], dims[2 * NDIM_MAX];
	uint64_t chunks = 0;

	if (ranks && !order)
		return ERR(NO_MEMORY, "no memory for a mesh of %u ranks", count);
	for (uint32_t i = 0; ranks && i < count; i++)
		order[i] = (struct entry){ ranks[i], i, NULL };
	if (ranks)
		qsort(order, count, sizeof *order, by_rank);
	for (uint32_t i = 0; i < count; i++) {
		uint32_t rest = order ? order[i].position : i;
		for (uint32_t m = mesh_ndim; m-- > 0;) {
			coord[m] = rest % mesh[m];
			rest = (uint32_t)(rest / mesh[m]);
		}
		TRY(dtensor_part_make(t->ndim, t->shape, mesh_ndim, mesh, coord, placements, &part));
		chunks += part.count;
		if (chunks > CHUNKS_MAX)
			return ERR(LIMIT_EXCEEDED, "the tensor would be cut in more than %d chunks", CHUNKS_MAX);
		for (uint64_t k = 0; k < part.count; k++) {
			dtensor_part_box(&part, k, dims, NULL);
			TRY(sdict_add_chunk(out, tensor, dims, order ? order[i].rank : i, nowhere));
		}
	}
	return OK;
}

static FALLIBLE enum err apply_mesh_rule(const struct layout *l, const struct layout_rule *r, struct sdict *out,
					 uint32_t tensor)
{
	uint32_t count = r->ranks ? r->rank_count : l->world_size;
	const int64_t line = count;

	return apply_mesh(out, tensor, r->mesh_ndim ? r->mesh_ndim : 1, r->mesh_ndim ? r->mesh : &line, r->placements,
			  r->ranks, count);
}

/* Entries must be gathered for the whole tensor first: a rank may own several, in any place of the rule. */
static FALLIBLE enum err add_entries(struct sdict *out, uint32_t tensor, struct entry *entries, uint64_t count)
{
	qsort(entries, count, sizeof *entries, by_rank);
	for (uint64_t i = 0; i < count; i++)
		TRY(sdict_add_chunk(out, tensor, entries[i].dims, entries[i].rank, nowhere));
	return OK;
}

static FALLIBLE enum err apply_chunks(const struct layout_rule *r, struct sdict *out, uint32_t tensor)
{
	const struct sd_tensor *t = &out->tensors[tensor];
	uint32_t ndim = t->ndim, dim = (uint32_t)(r->chunk_dim < 0 ? r->chunk_dim + (int64_t)ndim : r->chunk_dim);
	CLEANUP(mem_free_ptr) struct entry *entries = mem_zalloc(r->rank_count, sizeof *entries);
	int64_t dims[2 * NDIM_MAX];

	NEED(entries, "no memory for %u chunks", r->rank_count);
	for (uint32_t i = 0; i < r->rank_count; i++)
		entries[i] = (struct entry){ r->ranks[i], i, NULL };
	qsort(entries, r->rank_count, sizeof *entries, by_rank);
	for (uint32_t d = 0; d < ndim; d++) {
		dims[d] = 0;
		dims[ndim + d] = t->shape[d];
	}
	/* PyTorch begins empty chunks behind the end, and then cannot save them: here they begin at the end. */
	for (uint32_t i = 0; i < r->rank_count; i++) {
		dtensor_chunk(t->shape[dim], r->rank_count, entries[i].position, &dims[dim], &dims[ndim + dim]);
		TRY(sdict_add_chunk(out, tensor, dims, entries[i].rank, nowhere));
	}
	return OK;
}

/* The boxes must tile the tensor. */
static FALLIBLE enum err check_tiling(struct tiling *tl, const struct sd_tensor *t, struct overlap_box *boxes, uint64_t n)
{
	TRY(tiling_check(tl, t->fqn, t->ndim, t->shape, boxes, n));
	if (tl->problems)
		return ERR(LAYOUT_INVALID, "the boxes do not tile the tensor: %.*s", (int)tl->text.len,
			   tl->text.len ? (const char *)tl->text.p : "");
	return OK;
}

static FALLIBLE enum err apply_boxes(const struct layout_rule *r, struct sdict *out, uint32_t tensor)
{
	const struct sd_tensor *t = &out->tensors[tensor];
	CLEANUP(mem_free_ptr) struct entry *entries = mem_zalloc(r->box_count, sizeof *entries);
	CLEANUP(tiling_free) struct tiling tl;
	struct overlap_box *boxes;

	tiling_init(&tl);
	NEED(entries, "no memory for %u boxes", r->box_count);
	if (r->boxes[0].ndim != t->ndim)
		return ERR(LAYOUT_INVALID, "boxes of %u dims for a tensor of %u", r->boxes[0].ndim, t->ndim);
	TRY(tiling_boxes(&tl, r->box_count, &boxes));
	for (uint32_t i = 0; i < r->box_count; i++) {
		boxes[i].dims = r->boxes[i].dims;
		entries[i] = (struct entry){ r->boxes[i].rank, i, r->boxes[i].dims };
	}
	TRY(check_tiling(&tl, t, boxes, r->box_count));
	return add_entries(out, tensor, entries, r->box_count);
}

static FALLIBLE enum err apply_like(const struct layout *l, const struct layout_rule *r, struct sdict *out,
				    uint32_t tensor)
{
	const struct sd_tensor *t = &out->tensors[tensor], *other = sdict_tensor(r->like, t->fqn);
	CLEANUP(mem_free_ptr) struct entry *entries = mem_zalloc(other->chunk_count, sizeof *entries);
	CLEANUP(tiling_free) struct tiling tl;
	struct overlap_box *boxes;
	uint64_t n = 0;

	tiling_init(&tl);
	NEED(entries, "no memory for %ju boxes", (uintmax_t)other->chunk_count);
	if (!box_same_shape(other->ndim, other->shape, t->ndim, t->shape)) {
		char a[96], b[96];
		return ERR(LAYOUT_INVALID, "the other checkpoint's tensor has size %s, this one %s",
			   box_print(other->ndim, other->shape, a, sizeof a), box_print(t->ndim, t->shape, b, sizeof b));
	}
	TRY(tiling_boxes(&tl, other->chunk_count, &boxes));
	for (; n < other->chunk_count; n++) {
		const struct sd_chunk *c = &r->like->chunks[other->first_chunk + n];
		if (c->rank >= l->world_size)
			return ERR(LAYOUT_INVALID, "the other checkpoint has a chunk on rank %u, the world has %u",
				   c->rank, l->world_size);
		boxes[n].dims = c->dims;
		entries[n] = (struct entry){ c->rank, (uint32_t)n, c->dims };
	}
	if (n)
		TRY(overlap_drop_equal(t->ndim, boxes, &n)); /* replicas are fine */
	TRY(check_tiling(&tl, t, boxes, n));
	return add_entries(out, tensor, entries, other->chunk_count);
}

static bool has_dim(uint32_t ndim, int64_t dim)
{
	return dim < 0 ? -dim <= (int64_t)ndim : dim < (int64_t)ndim;
}

bool layout_has_dims(const struct layout_rule *r, uint32_t ndim)
{
	if (r->kind == LAYOUT_CHUNKS)
		return has_dim(ndim, r->chunk_dim);
	for (uint32_t i = 0; r->kind == LAYOUT_MESH && i < r->placement_count; i++)
		if (placement_cuts(&r->placements[i]) && !has_dim(ndim, r->placements[i].dim))
			return false;
	return true;
}

/* Does the rule speak of this tensor? */
static bool matches(const struct layout_rule *r, const struct sd_tensor *t)
{
	if (!str_glob(r->match, t->fqn) || !layout_has_dims(r, t->ndim))
		return false;
	return r->kind != LAYOUT_LIKE || sdict_tensor(r->like, t->fqn) != NULL;
}

static FALLIBLE enum err apply_rule(const struct layout *l, const struct layout_rule *r, struct sdict *out,
				    uint32_t tensor)
{
	switch (r->kind) {
	case LAYOUT_MESH:
		return apply_mesh_rule(l, r, out, tensor);
	case LAYOUT_CHUNKS:
		return apply_chunks(r, out, tensor);
	case LAYOUT_BOXES:
		return apply_boxes(r, out, tensor);
	case LAYOUT_LIKE:
		return apply_like(l, r, out, tensor);
	}
	return ERR(LAYOUT_INVALID, "unknown kind of rule");
}

enum err layout_apply(const struct layout *l, struct sdict *out, uint32_t tensor, uint32_t *matched_out)
{
	const struct sd_tensor *t = &out->tensors[tensor];
	const struct placement shard0 = { .kind = PLACE_SHARD };
	const int64_t line = l->world_size;
	enum err e;

	must(tensor < out->tensor_count && t->chunk_count == 0);
	for (uint32_t i = 0; i < l->rule_count; i++) {
		if (!matches(&l->rules[i], t))
			continue;
		*matched_out = i;
		e = apply_rule(l, &l->rules[i], out, tensor);
		return e ? err_at_fqn(in_rule(l, i, e), t->fqn.p, t->fqn.n) : OK;
	}
	*matched_out = UINT32_MAX;
	e = t->ndim ? apply_mesh(out, tensor, 1, &line, &shard0, NULL, l->world_size) :
		      sdict_add_chunk(out, tensor, NULL, 0, nowhere);
	return err_at_fqn(e, t->fqn.p, t->fqn.n);
}
