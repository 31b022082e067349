/* optim_model.c: what a model's state dict says of slices and groups (see optim.h).
 *
 * PyTorch asks each rank's own state dict and takes the process group of the last nested tensor it sees. Here all ranks are known, so
 * what each of them says is checked against the others: a group whose members hold different slices would give a rank another one's
 * optimizer state. */
#include "plan/optim_impl.h"

#include <stdio.h>

#include "base/num.h"
#include "tensor/dtensor.h"
#include "tensor/box.h"

enum { AMBIGUOUS = UINT32_MAX - 1, NAME_SHOWN = 300 };

enum err optim_model_new(uint32_t world_size, struct optim_model **out)
{
	struct optim_model *m = mem_zalloc(1, sizeof *m);

	if (m)
		m->arena = arena_new(UINT64_MAX);
	if (!m || !m->arena) {
		mem_free(m);
		return ERR(NO_MEMORY, "no memory for a model");
	}
	m->world_size = world_size;
	*out = m;
	return OK;
}

void optim_model_free(struct optim_model *m)
{
	if (!m)
		return;
	vec_free(&m->params);
	map_free(&m->by_name);
	map_free(&m->by_tail);
	arena_free(m->arena);
	mem_free(m);
}

static enum err at(enum err e, const struct optim_param *p, uint32_t rank)
{
	return err_at_rank(err_at_fqn(e, p->fqn.p, p->fqn.n), rank);
}

/* {"model": {"layer.w": …}} is a model too: its parameters are called "layer.w" where optimizers speak of them. */
static FALLIBLE enum err add_tail(struct optim_model *m, struct sd_path path, uint32_t param)
{
	uint64_t n = 0;
	uint32_t found;
	char *text;

	if (path.count < 2)
		return OK;
	for (uint32_t i = 1; i < path.count; i++)
		n += path.parts[i].key.p ? path.parts[i].key.n + 1 : 24;
	TRY(arena_alloc(m->arena, n + 1, 1, &text));
	size_t len = 0;
	for (uint32_t i = 1; i < path.count; i++) {
		struct str key = path.parts[i].key;
		if (i > 1)
			text[len++] = '.';
		if (!key.p)
			len += (size_t)snprintf(text + len, 24, "%jd", (intmax_t)path.parts[i].index);
		else if (key.n)
			memcpy(text + len, key.p, key.n);
		len += key.p ? key.n : 0;
	}
	TRY(map_intern(&m->by_tail, (struct str){ text, len }, param, &found));
	return found == param ? OK : map_put(&m->by_tail, (struct str){ text, len }, AMBIGUOUS);
}

static FALLIBLE enum err param_of(struct optim_model *m, struct str fqn, struct sd_path path, uint32_t rank, uint32_t ndim,
				  const int64_t *shape, struct optim_param **out)
{
	struct optim_param *p;
	uint32_t i;
	char a[128], b[128];

	TRY(map_intern(&m->by_name, fqn, (uint32_t)m->params.n, &i));
	if (i == m->params.n) {
		TRY(vec_push(&m->params, &p));
		*p = (struct optim_param){ .fqn = fqn, .shape = shape, .ndim = ndim, .rank = OPTIM_NONE };
		TRY(add_tail(m, path, i));
	}
	*out = p = &m->params.v[i];
	if (box_same_shape(p->ndim, p->shape, ndim, shape))
		return OK;
	box_print(p->ndim, p->shape, a, sizeof a);
	box_print(ndim, shape, b, sizeof b);
	return err_expected(at(ERR(PLAN_INVALID, "the model's rank %u has shape %s, rank %u %s", p->rank, a, rank, b), p, rank), a, b);
}

enum err optim_model_add(struct optim_model *m, uint32_t rank, struct str fqn, struct sd_path path, uint32_t ndim,
			 const int64_t *shape, const struct sd_outer *outer)
{
	struct optim_param *p;

	must(rank < m->world_size);
	TRY(param_of(m, fqn, path, rank, ndim, shape, &p));
	if (outer && outer->outer_dtensor)
		return at(ERR(PLAN_INVALID, "Cannot handle nested DTensor"), p, rank);
	if (outer && outer->inner_dtensor)
		return at(ERR(PLAN_INVALID, "Cannot handle DTensor nested inside ShardedTensor"), p, rank);
	const struct sd_outer *before = outer && p->outers ? p->outers[rank] : NULL;
	if ((p->rank == rank && p->nested_here != (outer != NULL)) ||
	    (before && !box_equal(ndim, before->offsets, before->sizes, outer->offsets, outer->sizes)))
		return at(ERR(PLAN_INVALID, "Cannot handle ST with multiple shards"), p, rank);
	p->rank = rank;
	p->nested_here = outer != NULL;
	if (!outer)
		return OK;
	m->nested = true;
	if (!p->outers)
		TRY(arena_alloc(m->arena, m->world_size, sizeof *p->outers, &p->outers));
	p->outers[rank] = outer;
	return OK;
}

/* ---- groups ---- */

static bool same_ranks(const struct optim_group *g, const uint32_t *ranks, uint32_t count)
{
	return g->count == count && memcmp(g->ranks, ranks, count * sizeof *ranks) == 0;
}

static FALLIBLE enum err check_named(const struct optim_model *m, const struct optim_param *p, uint32_t rank, uint32_t *seen)
{
	const struct sd_outer *o = p->outers[rank];
	bool here = false;

	for (uint32_t i = 0; i < o->rank_count; i++) {
		uint32_t r = o->ranks[i];
		if (r >= m->world_size)
			return at(ERR(PLAN_INVALID, "the group of a nested tensor has rank %u, the model %u ranks", r, m->world_size), p,
				  rank);
		if (seen[r] == rank + 1)
			return at(ERR(PLAN_INVALID, "rank %u is in the group of a nested tensor twice", r), p, rank);
		seen[r] = rank + 1;
		here |= r == rank;
	}
	return here ? OK : at(ERR(PLAN_INVALID, "a rank is not in the group of its own nested tensor"), p, rank);
}

/* The groups that nested tensors name. */
static FALLIBLE enum err named_groups(struct optim_model *m)
{
	CLEANUP(mem_free_ptr) uint32_t *seen = mem_zalloc(m->world_size, sizeof *seen);

	NEED(seen, "no memory for %u ranks", m->world_size);
	each(p, m->params.v, m->params.n) {
		for (uint32_t r = 0; p->outers && r < m->world_size; r++) {
			const struct sd_outer *o = p->outers[r];
			struct optim_group *g = &m->groups[r];
			if (!o || !o->ranks)
				continue;
			if (g->count && !same_ranks(g, o->ranks, o->rank_count))
				return at(ERR(PLAN_INVALID, "nested tensors of one rank have different data-parallel groups"), p, r);
			if (!g->count) {
				TRY(check_named(m, p, r, seen));
				*g = (struct optim_group){ o->ranks, o->rank_count, 0 };
			}
		}
	}
	return OK;
}

/* Numbers the box that each rank has of each nested tensor; 0: none. Row by rank. */
static FALLIBLE enum err number_boxes(const struct optim_model *m, uint64_t nested, uint32_t **out)
{
	CLEANUP(mem_free_ptr) uint32_t *rows = nested <= UINT32_MAX ? mem_zalloc(m->world_size * nested, sizeof *rows) : NULL;
	CLEANUP(map_free) struct map boxes = { 0 };
	uint64_t column = 0;

	NEED(rows, "no memory for the slices of %u ranks", m->world_size);
	each(p, m->params.v, m->params.n) {
		for (uint32_t r = 0; p->outers && r < m->world_size; r++) {
			const struct sd_outer *o = p->outers[r];
			int64_t *box;
			uint32_t id;
			if (!o)
				continue;
			TRY(arena_i64(m->arena, 2 * (uint64_t)p->ndim + 1, &box));
			memcpy(box, o->offsets, p->ndim * sizeof *box);
			memcpy(box + p->ndim, o->sizes, p->ndim * sizeof *box);
			TRY(map_intern(&boxes, (struct str){ (char *)box, 2 * p->ndim * sizeof *box }, boxes.raw.count + 1, &id));
			rows[r * nested + column] = id;
		}
		column += p->outers != NULL;
		map_free(&boxes);
	}
	*out = move(rows);
	return OK;
}

/* Ranks of equal rows are a group, unless they name one; those without any slice have none. */
static FALLIBLE enum err found_groups(struct optim_model *m, const uint32_t *rows, uint64_t nested)
{
	CLEANUP(map_free) struct map kinds = { 0 };
	CLEANUP(mem_free_ptr) uint32_t *kind = mem_zalloc(m->world_size, sizeof *kind);
	CLEANUP(mem_free_ptr) uint32_t *count = mem_zalloc(m->world_size, sizeof *count);
	CLEANUP(mem_free_ptr) uint32_t **ranks = mem_zalloc(m->world_size, sizeof *ranks);

	NEED(kind && count && ranks, "no memory for %u ranks", m->world_size);
	for (uint32_t r = 0; r < m->world_size; r++) {
		struct str row = { (const char *)(rows + r * nested), nested * sizeof *rows };
		TRY(map_intern(&kinds, row, kinds.raw.count, &kind[r]));
		count[kind[r]]++;
	}
	for (uint32_t k = 0; k < kinds.raw.count; k++) {
		TRY(arena_alloc(m->arena, count[k], sizeof **ranks, &ranks[k]));
		count[k] = 0;
	}
	for (uint32_t r = 0; r < m->world_size; r++)
		ranks[kind[r]][count[kind[r]]++] = r;
	for (uint32_t r = 0; r < m->world_size; r++) {
		bool none = true;
		for (uint64_t i = 0; i < nested; i++)
			none &= rows[r * nested + i] == 0;
		if (!none && !m->groups[r].count)
			m->groups[r] = (struct optim_group){ ranks[kind[r]], count[kind[r]], 0 };
	}
	return OK;
}

static enum err strangers(uint32_t member, uint32_t of)
{
	return err_at_rank(ERR(PLAN_INVALID, "rank %u is in the data-parallel group of rank %u, but has another one", member, of), member);
}

/* The members of a group must agree on who they are, and hold the same slices. */
static FALLIBLE enum err check_members(struct optim_model *m, const uint32_t *rows, uint64_t nested, uint32_t r)
{
	const struct optim_group *g = &m->groups[r];

	for (uint32_t i = 0; i < g->count; i++) {
		uint32_t q = g->ranks[i];
		uint64_t column = 0;
		m->groups[q].place = i;
		if (!same_ranks(&m->groups[q], g->ranks, g->count))
			return strangers(q, r);
		each(p, m->params.v, m->params.n) {
			if (p->outers && rows[r * nested + column] != rows[q * nested + column])
				return at(ERR(PLAN_INVALID, "ranks %u and %u are in one data-parallel group and have different slices", r,
					      q), p, q);
			column += p->outers != NULL;
		}
	}
	return OK;
}

static FALLIBLE enum err check_groups(struct optim_model *m, const uint32_t *rows, uint64_t nested)
{
	for (uint32_t r = 0; r < m->world_size; r++) {
		const struct optim_group *g = &m->groups[r];
		if (g->count && g->ranks[0] == r)
			TRY(check_members(m, rows, nested, r));
		else if (g->count && !same_ranks(&m->groups[g->ranks[0]], g->ranks, g->count))
			return strangers(g->ranks[0], r);
	}
	return OK;
}

/* From here on every slice says its group. */
static FALLIBLE enum err name_groups(struct optim_model *m)
{
	each(p, m->params.v, m->params.n) {
		for (uint32_t r = 0; p->outers && r < m->world_size; r++) {
			struct sd_outer *named;
			if (!p->outers[r] || p->outers[r]->ranks)
				continue;
			TRY(arena_alloc(m->arena, 1, sizeof *named, &named));
			*named = *p->outers[r];
			named->ranks = m->groups[r].ranks;
			named->rank_count = m->groups[r].count;
			p->outers[r] = named;
		}
	}
	return OK;
}

enum err optim_model_done(struct optim_model *m)
{
	CLEANUP(mem_free_ptr) uint32_t *rows = NULL;
	uint64_t nested = 0;

	TRY(arena_alloc(m->arena, m->world_size, sizeof *m->groups, &m->groups));
	if (!m->nested)
		return OK;
	for (uint64_t i = 0; i < m->params.n; i++)
		nested += m->params.v[i].outers != NULL;
	TRY(named_groups(m));
	TRY(number_boxes(m, nested, &rows));
	TRY(found_groups(m, rows, nested));
	TRY(check_groups(m, rows, nested));
	return name_groups(m);
}

enum err optim_model_find(const struct optim_model *m, struct str name, uint32_t *out)
{
	*out = map_get(&m->by_name, name);
	if (*out == MAP_NONE)
		*out = map_get(&m->by_tail, name);
	if (*out == AMBIGUOUS)
		return ERR(PLAN_INVALID, "two tensors of the model may be meant by '%.*s'", (int)num_min(name.n, NAME_SHOWN), name.p);
	return OK;
}

/* ---- DTensors ---- */

enum err optim_mesh_slice(const struct tree_mesh *mesh, const struct placement *placements, uint32_t rank, uint32_t ndim,
			  const int64_t *shape, struct arena *a, const struct sd_outer **out)
{
	CLEANUP(dtensor_part_free) struct dtensor_part part = { 0 };
	int64_t sizes[MESH_DIMS_MAX], coord[MESH_DIMS_MAX], at_dim[MESH_DIMS_MAX] = { 0 }, *dims;
	struct placement placed[MESH_DIMS_MAX];
	bool tp[MESH_DIMS_MAX] = { 0 };
	uint64_t total = 1, me, members = 1;
	uint32_t n = 0, *ranks;
	struct sd_outer *o;

	*out = NULL;
	for (uint32_t i = 0; i < mesh->ndim; i++)
		total *= (uint64_t)mesh->sizes[i];
	for (me = 0; me < total && mesh->ranks[me] != rank; me++)
		;
	if (me == total || !mesh->names)
		return OK;
	uint64_t rest = me;
	for (uint32_t i = mesh->ndim; i-- > 0; rest /= (uint64_t)mesh->sizes[i])
		at_dim[i] = (int64_t)(rest % (uint64_t)mesh->sizes[i]);
	for (uint32_t i = 0; i < mesh->ndim; i++) {
		tp[i] = str_is(mesh->names[i], "tp");
		members *= tp[i] ? 1 : (uint64_t)mesh->sizes[i];
		if (!tp[i])
			continue;
		sizes[n] = mesh->sizes[i];
		coord[n] = at_dim[i];
		placed[n++] = placements[i];
	}
	if (n == 0)
		return OK;
	TRY(dtensor_part_make(ndim, shape, n, sizes, coord, placed, &part));
	if (part.count != 1)
		return ERR(PLAN_INVALID, "the slice of mesh dim \"tp\" is not one box but %ju", (uintmax_t)part.count);
	TRY(arena_alloc(a, 1, sizeof *o, &o));
	TRY(arena_i64(a, 2 * (uint64_t)ndim + 1, &dims));
	TRY(arena_alloc(a, members, sizeof *ranks, &ranks));
	dtensor_part_box(&part, 0, dims, NULL);
	for (uint64_t i = 0; i < members; i++) { /* the i-th place with the same tp coordinates */
		uint64_t place = 0, stride = 1, left = i;
		for (uint32_t d = mesh->ndim; d-- > 0; stride *= (uint64_t)mesh->sizes[d]) {
			uint64_t c = tp[d] ? (uint64_t)at_dim[d] : left % (uint64_t)mesh->sizes[d];
			left = tp[d] ? left : left / (uint64_t)mesh->sizes[d];
			place += c * stride;
		}
		ranks[i] = mesh->ranks[place];
	}
	*o = (struct sd_outer){ .offsets = dims, .sizes = dims + ndim, .ranks = ranks, .rank_count = (uint32_t)members };
	*out = o;
	return OK;
}
