/* iterate.c: the walk over the trees of all ranks in step, and PyTorch's iterate on it (see iterate.h).
 *
 * The rows of a container are found by joining the keys of everybody who has it. Ranks mostly have the same keys in the same order, so
 * the key that came next before is tried first, and a hash table is made only where that fails. */
#include "plan/iterate.h"

#include "base/map.h"
#include "base/num.h"
#include "base/vec.h"

struct walk {
	struct arena *scratch;
	iterate_visit *visit;
	void *ctx;
	bool companion_first;
	uint64_t rows;
};

/* The keys of one container's rows, in order, while they are joined. */
struct join {
	struct vec(struct tree_key) keys;
	struct map texts, ints;
	bool mapped;                     /* the maps hold all keys */
	uint32_t longest;                /* list rows: 0 … */
};

static FALLIBLE enum err map_key(struct join *j, const struct tree_key *k, uint32_t value, uint32_t *found)
{
	struct str s = { (const char *)&k->index, sizeof k->index };

	return k->is_int ? map_intern(&j->ints, s, value, found) : map_intern(&j->texts, k->text, value, found);
}

static FALLIBLE enum err map_keys(struct join *j, struct arena *scratch)
{
	struct tree_key *kept;
	uint32_t found;

	/* The maps borrow the keys' bytes, and a vec moves. */
	TRY(arena_alloc(scratch, j->keys.n, sizeof *kept, &kept));
	for (uint32_t i = 0; i < j->keys.n; i++) {
		kept[i] = j->keys.v[i];
		TRY(map_key(j, &kept[i], i, &found));
	}
	j->mapped = true;
	return OK;
}

/* The row number of each of a dict's keys goes to `rows`. */
static FALLIBLE enum err join_dict(struct join *j, const struct tree *d, uint32_t *rows, struct arena *scratch)
{
	bool first = j->keys.n == 0;
	uint32_t next = 0, found;

	for (uint32_t i = 0; i < d->count; i++) {
		const struct tree_key *k = &d->keys[i];
		if (!first && next < j->keys.n && tree_key_eq(&j->keys.v[next], k)) {
			rows[i] = next++;
			continue;
		}
		if (!first) {
			if (!j->mapped)
				TRY(map_keys(j, scratch));
			TRY(map_key(j, k, (uint32_t)j->keys.n, &found));
			rows[i] = found;
			next = found + 1;
			if (found < j->keys.n)
				continue;
		} else {
			rows[i] = i;
		}
		struct tree_key *at;
		TRY(vec_push(&j->keys, &at));
		*at = *k;
	}
	return OK;
}

struct rows {
	struct iterate_row *v;
	uint32_t n;
};

/* Adds the places of one side to the rows. maps[i]: row numbers of place i's keys. */
static FALLIBLE enum err fill_side(struct walk *w, const struct iterate_place *places, uint32_t count, uint32_t *const *maps,
				   uint32_t dict_rows, struct rows *rows, bool companion)
{
	uint64_t total = 0;
	struct iterate_place *all;

	for (uint32_t p = 0; p < count; p++) {
		const struct tree *t = places[p].node;
		for (uint32_t i = 0; t && tree_is_container(t) && i < t->count; i++, total++) {
			struct iterate_row *r = &rows->v[t->kind == TREE_DICT ? maps[p][i] : dict_rows + i];
			companion ? r->companion_count++ : r->source_count++;
		}
	}
	TRY(arena_alloc(w->scratch, total, sizeof *all, &all));
	each(r, rows->v, rows->n) {
		*(companion ? &r->companion : &r->source) = all;
		all += companion ? r->companion_count : r->source_count;
		*(companion ? &r->companion_count : &r->source_count) = 0;
	}
	for (uint32_t p = 0; p < count; p++) {
		const struct tree *t = places[p].node;
		for (uint32_t i = 0; t && tree_is_container(t) && i < t->count; i++) {
			struct iterate_row *r = &rows->v[t->kind == TREE_DICT ? maps[p][i] : dict_rows + i];
			*(companion ? &r->companion[r->companion_count++] : &r->source[r->source_count++]) =
				(struct iterate_place){ t->children[i], places[p].rank, p, i };
		}
	}
	return OK;
}

static FALLIBLE enum err join_side(struct walk *w, struct join *j, const struct iterate_place *places, uint32_t count,
				   uint32_t ***maps_out)
{
	uint32_t **maps;

	TRY(arena_alloc(w->scratch, count, sizeof *maps, &maps));
	for (uint32_t p = 0; p < count; p++) {
		const struct tree *t = places[p].node;
		if (t && tree_is_list(t) && t->count > j->longest)
			j->longest = t->count;
		if (!t || t->kind != TREE_DICT)
			continue;
		TRY(arena_alloc(w->scratch, t->count, sizeof **maps, &maps[p]));
		TRY(join_dict(j, t, maps[p], w->scratch));
	}
	*maps_out = maps;
	return OK;
}

static FALLIBLE enum err children(struct walk *w, struct join *j, struct iterate_row *row, struct rows *out)
{
	uint32_t **source, **companion;

	if (w->companion_first)
		TRY(join_side(w, j, row->companion, row->companion_count, &companion));
	TRY(join_side(w, j, row->source, row->source_count, &source));
	if (!w->companion_first)
		TRY(join_side(w, j, row->companion, row->companion_count, &companion));
	uint32_t dict_rows = (uint32_t)j->keys.n;
	out->n = dict_rows + j->longest;
	TRY(arena_alloc(w->scratch, out->n, sizeof *out->v, &out->v));
	for (uint32_t i = 0; i < out->n; i++) {
		struct iterate_row *r = &out->v[i];
		r->parent = row;
		r->depth = row->depth + 1;
		r->in_list = i >= dict_rows;
		r->key = r->in_list ? tree_key_int(i - dict_rows) : j->keys.v[i];
	}
	TRY(fill_side(w, row->source, row->source_count, source, dict_rows, out, false));
	return fill_side(w, row->companion, row->companion_count, companion, dict_rows, out, true);
}

static bool any_container(const struct iterate_place *places, uint32_t count)
{
	for (uint32_t i = 0; i < count; i++)
		if (places[i].node && tree_is_container(places[i].node))
			return true;
	return false;
}

static FALLIBLE enum err walk_row(struct walk *w, struct iterate_row *row)
{
	struct join j = { 0 };
	struct rows rows;

	if (row->depth > TREE_DEPTH_MAX)
		return ERR(LIMIT_EXCEEDED, "containers are nested more than %d deep", TREE_DEPTH_MAX);
	row->number = w->rows++;
	TRY(w->visit(w->ctx, row));
	if (!any_container(row->source, row->source_count) && !any_container(row->companion, row->companion_count))
		return OK;
	enum err e = children(w, &j, row, &rows);
	vec_free(&j.keys);
	map_free(&j.texts);
	map_free(&j.ints);
	for (uint32_t i = 0; !e && i < rows.n; i++)
		e = walk_row(w, &rows.v[i]);
	return e;
}

static FALLIBLE enum err root_side(struct arena *scratch, struct iterate_side side, struct iterate_place **out, uint32_t *n_out)
{
	uint32_t n = 0;

	TRY(arena_alloc(scratch, side.count, sizeof **out, out));
	for (uint32_t r = 0; r < side.count; r++)
		if (side.trees && side.trees[r])
			(*out)[n++] = (struct iterate_place){ .node = side.trees[r], .rank = r };
	*n_out = n;
	return OK;
}

enum err iterate_rows(struct iterate_side source, struct iterate_side companion, bool companion_first, struct arena *scratch,
		      iterate_visit *visit, void *ctx)
{
	struct walk w = { scratch, visit, ctx, companion_first, 0 };
	struct iterate_row root = { 0 };

	TRY(root_side(scratch, source, &root.source, &root.source_count));
	TRY(root_side(scratch, companion, &root.companion, &root.companion_count));
	return walk_row(&w, &root);
}

enum err iterate_path(const struct iterate_row *row, struct arena *a, struct str *out)
{
	struct tree_key parts[TREE_DEPTH_MAX + 2];
	uint32_t at = row->depth;

	for (; row->parent; row = row->parent)
		parts[row->depth - 1] = row->key;
	return traverse_path_text(a, (struct tree_path){ parts, at }, out);
}

enum err iterate_error(enum err e, const struct iterate_row *row, int64_t rank)
{
	CLEANUP(arena_free_ptr) struct arena *a = arena_new(1 << 26);
	const struct err_info was = *err_last();
	struct str path;

	if (!e)
		return OK;
	if (a && !iterate_path(row, a, &path)) {
		err_restore(&was);
		return err_at_rank(err_at_fqn(e, path.p, path.n), rank);
	}
	err_restore(&was);
	return err_at_rank(e, rank);
}

struct iteration {
	const struct iterate_fns *fns;
	const struct iterate_options *options;
	struct arena *arena, *scratch;
	struct tree **results;
	uint8_t *listed;                 /* per rank of the world */
};

static FALLIBLE enum err differ(struct iteration *it, struct iterate_row *row, uint32_t rank, const struct tree *source,
				const struct tree *companion)
{
	const struct tree *there = source ? source : companion;

	if (it->options->differ)
		return it->options->differ(it->fns->ctx, row, rank, source, companion);
	if (!source || !companion)
		return iterate_error(ERR(COMPANION_MISMATCH, "only the %s has this %s", source ? "state dict" : "companion",
					 tree_kind_name(there->kind)), row, rank);
	if (tree_is_list(source) && tree_is_list(companion))
		return iterate_error(ERR(COMPANION_MISMATCH, "the state dict's %s has %u items, the companion's %u",
					 tree_kind_name(source->kind), source->count, companion->count), row, rank);
	return iterate_error(ERR(COMPANION_MISMATCH, "the state dict has a %s, the companion a %s",
				 tree_kind_name(source->kind), tree_kind_name(companion->kind)), row, rank);
}

/* May a companion of this kind take it? The functions say which tensor fits which. */
static bool alike(const struct tree *a, const struct tree *b)
{
	if (tree_is_list(a))
		return tree_is_list(b) && a->count == b->count;
	if (tree_is_tensor(a))
		return tree_is_tensor(b);
	return a->kind == b->kind;
}

static FALLIBLE enum err leaf_result(struct iteration *it, struct iterate_leaf *leaf, struct tree **out)
{
	const struct tree *t = leaf->node;
	iterate_fn *fn = t->kind == TREE_SHARDED ? it->fns->sharded : t->kind == TREE_DTENSOR ? it->fns->dtensor : it->fns->tensor;
	struct tree *result = NULL;

	if (t->kind == TREE_VALUE) {
		if (it->options->type_check && t->value.kind == TREE_OPAQUE)
			return iterate_error(ERR(VALUE_TYPE, "Unexpected value type <class '%.*s'>",
						 (int)num_min(t->value.type.n, 200), t->value.type.n ? t->value.type.p : ""),
					     leaf->row, leaf->rank);
		*out = (struct tree *)(uintptr_t)t; /* results refer to the trees given */
		return it->fns->value ? iterate_error(it->fns->value(it->fns->ctx, leaf, out), leaf->row, leaf->rank) : OK;
	}
	enum err e = fn(it->fns->ctx, leaf, &result);
	if (e)
		return iterate_error(e, leaf->row, leaf->rank);
	if (leaf->listed && result && it->options->cpu_offload && !leaf->companion && tree_is_tensor(result) &&
	    result->tensor.device != TREE_CPU) {
		TRY(tree_tensor_new(it->arena, result->kind, &result->tensor, &result));
		result->tensor.device = TREE_CPU;
	}
	*out = result;
	return OK;
}

static FALLIBLE enum err place_result(struct iteration *it, struct iterate_row *row, struct iterate_place *p,
				      const struct tree *companion, struct tree **out)
{
	struct iterate_leaf leaf = { row, p->rank, p->node, companion, it->listed[p->rank] };

	if (!tree_is_container(p->node))
		return leaf_result(it, &leaf, out);
	if (leaf.listed)
		return tree_shell(it->arena, p->node, out);
	/* PyTorch walks on, for its checks and collectives, and throws away what it made. */
	return !row->parent && p->node->kind == TREE_DICT ? tree_new(it->arena, TREE_DICT, &it->results[p->rank]) : OK;
}

static void attach(struct iteration *it, const struct iterate_row *row, const struct iterate_place *p, struct tree *result)
{
	struct tree **above = row->parent ? row->parent->state : NULL;

	if (!it->listed[p->rank])
		return;
	if (!row->parent)
		it->results[p->rank] = result;
	else if (above[p->parent])
		above[p->parent]->children[p->index] = result;
}

static enum err visit(void *ctx, struct iterate_row *row)
{
	struct iteration *it = ctx;
	struct tree **made;
	uint32_t c = 0;

	TRY(arena_alloc(it->scratch, row->source_count, sizeof *made, &made));
	row->state = made;
	for (uint32_t i = 0; i < row->source_count; i++) {
		struct iterate_place *p = &row->source[i], *with = NULL;

		for (; c < row->companion_count && row->companion[c].rank < p->rank; c++) {
			TRY(differ(it, row, row->companion[c].rank, NULL, row->companion[c].node));
			row->companion[c].node = NULL;
		}
		if (c < row->companion_count && row->companion[c].rank == p->rank)
			with = &row->companion[c++];
		if (it->options->companion && it->listed[p->rank] && (!with || !alike(p->node, with->node))) {
			TRY(differ(it, row, p->rank, p->node, with ? with->node : NULL));
			if (!with || !tree_is_list(p->node) || !tree_is_list(with->node)) {
				p->node = NULL;
				if (with)
					with->node = NULL;
			}
			continue;
		}
		TRY(place_result(it, row, p, with ? with->node : NULL, &made[i]));
		attach(it, row, p, made[i]);
	}
	for (; c < row->companion_count; c++) {
		TRY(differ(it, row, row->companion[c].rank, NULL, row->companion[c].node));
		row->companion[c].node = NULL;
	}
	return OK;
}

/* Marks the ranks that take part, and those of them that get a result. */
static FALLIBLE enum err membership(const struct iterate_options *o, uint32_t world, uint8_t *member, uint8_t *listed)
{
	uint32_t size = o->group ? o->group_count : world;

	for (uint32_t i = 0; i < size; i++) {
		uint32_t rank = o->group ? o->group[i] : i;
		if (rank >= world)
			return ERR(INVALID_REQUEST, "rank %u of the group is not in a world of %u", rank, world);
		if (member[rank])
			return ERR(INVALID_REQUEST, "rank %u is in the group twice", rank);
		member[rank] = 1;
		listed[rank] = o->ranks_only_count == 0;
	}
	for (uint32_t i = 0; i < o->ranks_only_count; i++) {
		if (o->ranks_only[i] >= size)
			return ERR(INVALID_REQUEST, "ranks_only names %u, the group has %u", o->ranks_only[i], size);
		listed[o->group ? o->group[o->ranks_only[i]] : o->ranks_only[i]] = 1;
	}
	return OK;
}

enum err iterate(const struct iterate_fns *fns, const struct iterate_options *options, struct tree *const *trees,
		 uint32_t world, struct arena *arena, struct arena *scratch, struct tree **results)
{
	struct iteration it = { .fns = fns, .options = options, .arena = arena, .scratch = scratch, .results = results };
	struct tree **source, **companion;
	uint8_t *member;

	TRY(arena_alloc(scratch, world, 1, &member));
	TRY(arena_alloc(scratch, world, 1, &it.listed));
	TRY(arena_alloc(scratch, world, sizeof *source, &source));
	TRY(arena_alloc(scratch, world, sizeof *companion, &companion));
	TRY(membership(options, world, member, it.listed));
	for (uint32_t r = 0; r < world; r++) {
		results[r] = NULL;
		source[r] = member[r] ? trees[r] : NULL;
		if (options->companion && member[r] && it.listed[r] && (trees[r] || options->differ))
			companion[r] = options->companion[r];
	}
	return iterate_rows((struct iterate_side){ source, world }, (struct iterate_side){ companion, world }, false, scratch,
			    visit, &it);
}
