/* tree.c: building, checking and comparing trees (see tree.h). Dicts keep insertion order as Python's do, in arrays; only large ones
 * get a hash table, in the arena, so that a dict of 10,000 keys is built in linear time and a small one costs nothing. */
#include "plan/tree.h"

#include <stdio.h>
#include <stdlib.h>

#include "base/mem.h"
#include "base/num.h"
#include "base/vec.h"
#include "tensor/box.h"

enum { INDEX_FROM = 16, CHILDREN_MAX = 1 << 30 };
#define NOT_FOUND UINT32_MAX

static const char *const kind_names[] = {
	[TREE_DICT] = "dict", [TREE_LIST] = "list", [TREE_TUPLE] = "tuple", [TREE_TENSOR] = "tensor",
	[TREE_SHARDED] = "ShardedTensor", [TREE_DTENSOR] = "DTensor", [TREE_VALUE] = "value",
};

const char *tree_kind_name(enum tree_kind kind)
{
	return kind_names[kind];
}

bool tree_is_none(const struct tree *t)
{
	return t->kind == TREE_VALUE && t->value.kind == TREE_JSON && str_is(t->value.bytes, "null");
}

bool tree_key_eq(const struct tree_key *a, const struct tree_key *b)
{
	return a->is_int == b->is_int && (a->is_int ? a->index == b->index : str_eq(a->text, b->text));
}

static uint32_t key_hash(const struct tree_key *k)
{
	struct str s = k->is_int ? (struct str){ (const char *)&k->index, sizeof k->index } : k->text;

	return table_hash(s);
}

static FALLIBLE enum err index_key(struct tree *d, uint32_t place)
{
	struct table_item *at;

	TRY(table_add(&d->index, key_hash(&d->keys[place]), &at));
	at->item = place;
	return OK;
}

/* The place of `key` in a dict, tried first at `hint`; UINT32_MAX: absent. */
static uint32_t tree_find(const struct tree *dict, const struct tree_key *key, uint32_t hint)
{
	if (dict->kind != TREE_DICT)
		return NOT_FOUND;
	if (hint < dict->count && tree_key_eq(&dict->keys[hint], key))
		return hint;
	if (!dict->index.v) {
		for (uint32_t i = 0; i < dict->count; i++)
			if (tree_key_eq(&dict->keys[i], key))
				return i;
		return NOT_FOUND;
	}
	const struct table_item *at;
	table_find(&dict->index, key_hash(key), at, tree_key_eq(&dict->keys[at->item], key));
	return at ? at->item : NOT_FOUND;
}

struct tree *tree_get(const struct tree *dict, struct tree_key key)
{
	uint32_t i = tree_find(dict, &key, 0);

	return i == NOT_FOUND ? NULL : dict->children[i];
}

enum err tree_new(struct arena *a, enum tree_kind container, struct tree **out)
{
	must(container <= TREE_TUPLE);
	TRY(arena_alloc(a, 1, sizeof **out, out));
	(*out)->kind = container;
	return OK;
}

static FALLIBLE enum err grow(struct arena *a, struct tree *t)
{
	uint32_t cap = t->cap ? t->cap * 2 : 4;
	struct tree **children;
	struct tree_key *keys;

	if (t->count < t->cap)
		return OK;
	if (t->count >= CHILDREN_MAX)
		return ERR(LIMIT_EXCEEDED, "a %s of more than %d items", tree_kind_name(t->kind), CHILDREN_MAX);
	TRY(arena_alloc(a, cap, sizeof *children, &children));
	if (t->count)
		memcpy(children, t->children, t->count * sizeof *children);
	if (t->kind == TREE_DICT) {
		TRY(arena_alloc(a, cap, sizeof *keys, &keys));
		if (t->count)
			memcpy(keys, t->keys, t->count * sizeof *keys);
		t->keys = keys;
		if (cap > INDEX_FROM) { /* a table of its own, with room for cap keys: the old one may be borrowed */
			uint64_t slots = table_slots(cap);
			t->index.raw = (struct table_raw){ .mask = (uint32_t)slots - 1 };
			TRY(arena_alloc(a, slots, sizeof *t->index.v, &t->index.v));
			for (uint32_t i = 0; i < t->count; i++)
				TRY(index_key(t, i));
		}
	}
	t->children = children;
	t->cap = cap;
	return OK;
}

enum err tree_put(struct arena *a, struct tree *dict, struct tree_key key, struct tree *child)
{
	must(dict->kind == TREE_DICT);
	uint32_t at = tree_find(dict, &key, dict->count);
	if (at != NOT_FOUND) {
		dict->children[at] = child;
		return OK;
	}
	TRY(grow(a, dict));
	dict->keys[dict->count] = key;
	dict->children[dict->count++] = child;
	return dict->index.v ? index_key(dict, dict->count - 1) : OK;
}

enum err tree_append(struct arena *a, struct tree *list, struct tree *child)
{
	must(tree_is_list(list));
	TRY(grow(a, list));
	list->children[list->count++] = child;
	return OK;
}

enum err tree_shell(struct arena *a, const struct tree *like, struct tree **out)
{
	TRY(tree_new(a, like->kind, out));
	TRY(arena_alloc(a, like->count, sizeof *(*out)->children, &(*out)->children));
	/* Borrowed: tree_put copies before it adds, as there is no room left. */
	(*out)->keys = like->keys;
	(*out)->index.raw = like->index.raw;
	(*out)->count = (*out)->cap = like->count;
	return OK;
}

enum err tree_value(struct arena *a, enum tree_value_kind kind, struct str bytes, struct tree **out)
{
	TRY(arena_alloc(a, 1, sizeof **out, out));
	(*out)->kind = TREE_VALUE;
	(*out)->value.kind = kind;
	(*out)->value.bytes = bytes;
	return OK;
}

enum err tree_none(struct arena *a, struct tree **out)
{
	return tree_value(a, TREE_JSON, STR("null"), out);
}

enum err tree_tensor_new(struct arena *a, enum tree_kind kind, const struct tree_tensor *tensor, struct tree **out)
{
	must(kind >= TREE_TENSOR && kind <= TREE_DTENSOR);
	TRY(arena_alloc(a, 1, sizeof **out, out));
	(*out)->kind = kind;
	(*out)->tensor = *tensor;
	return OK;
}

enum err tree_whole(struct arena *a, enum dtype dtype, uint32_t ndim, const int64_t *shape, uint64_t at, struct tree **out)
{
	struct tree_shard *shard;

	TRY(arena_alloc(a, 1, sizeof *shard, &shard));
	shard->at = at;
	struct tree_tensor t = { .dtype = dtype, .ndim = ndim, .shape = shape, .shards = shard, .shard_count = 1 };
	return tree_tensor_new(a, TREE_TENSOR, &t, out);
}

const int64_t *tree_shard_dims(const struct tree_tensor *t, const struct tree_shard *s, int64_t *scratch)
{
	if (s->dims)
		return s->dims;
	for (uint32_t d = 0; d < t->ndim; d++) {
		scratch[d] = 0;
		scratch[t->ndim + d] = t->shape[d];
	}
	return scratch;
}

uint64_t tree_mesh_size(const struct tree_mesh *mesh)
{
	return box_volume(mesh->ndim, mesh->sizes);
}

bool tree_mesh_coord(const struct tree_mesh *mesh, uint32_t rank, int64_t *coord_out)
{
	uint64_t n = tree_mesh_size(mesh), at = 0;

	while (at < n && mesh->ranks[at] != rank)
		at++;
	if (at == n)
		return false;
	for (uint32_t m = mesh->ndim; m-- > 0;) {
		coord_out[m] = (int64_t)(at % (uint64_t)mesh->sizes[m]);
		at /= (uint64_t)mesh->sizes[m];
	}
	return true;
}

/* Position of a check, for the error's FQN. */
struct link {
	const struct link *parent;
	const struct tree_key *key;
	uint32_t index, depth;
};

static size_t link_text(const struct link *l, char *text, size_t max)
{
	int more;

	if (!l->parent)
		return 0;
	size_t n = link_text(l->parent, text, max);
	if (!l->key || l->key->is_int)
		more = snprintf(text + n, max - n, "%s%jd", n ? "." : "", (intmax_t)(l->key ? l->key->index : l->index));
	else
		more = snprintf(text + n, max - n, "%s%.*s", n ? "." : "", (int)num_min(l->key->text.n, max),
				l->key->text.n ? l->key->text.p : "");
	return num_min(n + (size_t)(more > 0 ? more : 0), max - 1);
}

struct check {
	uint32_t world;
	const struct tree_mesh *good;    /* the latest mesh that was looked at: most tensors share one */
};

static FALLIBLE enum err check_mesh(struct check *c, const struct tree_mesh *m)
{
	uint64_t n = 1;

	if (m == c->good)
		return OK;
	if (m->ndim < 1 || m->ndim > NDIM_MAX)
		return ERR(PLAN_INVALID, "a mesh of %u dims", m->ndim);
	for (uint32_t i = 0; i < m->ndim; i++)
		if (m->sizes[i] < 1 || (uint64_t)m->sizes[i] > c->world || (n *= (uint64_t)m->sizes[i]) > c->world)
			return ERR(WORLD_MISMATCH, "the mesh does not fit a world of %u", c->world);
	CLEANUP(mem_free_ptr) uint32_t *sorted = mem_zalloc(n, sizeof *sorted);
	NEED(sorted, "no memory for a mesh of %ju ranks", (uintmax_t)n);
	memcpy(sorted, m->ranks, n * sizeof *sorted);
	qsort(sorted, n, sizeof *sorted, num_cmp_u32);
	if (sorted[n - 1] >= c->world)
		return ERR(WORLD_MISMATCH, "rank %u of the mesh is not in a world of %u", sorted[n - 1], c->world);
	for (uint64_t i = 1; i < n; i++)
		if (sorted[i] == sorted[i - 1])
			return ERR(LAYOUT_INVALID, "rank %u is in the mesh twice", sorted[i]);
	c->good = m;
	return OK;
}

static FALLIBLE enum err check_dtensor(struct check *c, const struct tree_tensor *t)
{
	if (!t->mesh || !t->placements)
		return ERR(PLAN_INVALID, "a DTensor needs a mesh and placements");
	TRY(check_mesh(c, t->mesh));
	each(p, t->placements, t->mesh->ndim) {
		if (placement_cuts(p) && (p->dim >= (int64_t)t->ndim || p->dim < -(int64_t)t->ndim))
			return ERR(LAYOUT_INVALID, "Shard(%d) of a tensor of %u dims", p->dim, t->ndim);
	}
	return OK;
}

static FALLIBLE enum err check_tensor(struct check *c, const struct tree *node)
{
	const struct tree_tensor *t = &node->tensor;
	uint64_t numel, bytes, sum = 0;

	if (t->ndim > NDIM_MAX || (uint32_t)t->dtype >= DT_COUNT)
		return ERR(LIMIT_EXCEEDED, "a tensor of %u dims", t->ndim);
	TRY(box_numel(t->ndim, t->shape, &numel));
	TRY(num_mul(numel, dtype_bytes(t->dtype), &bytes));
	if (bytes > INT64_MAX)
		return ERR(LIMIT_EXCEEDED, "a tensor of %ju bytes", (uintmax_t)bytes);
	if (node->kind == TREE_TENSOR && (t->shard_count != 1 || t->shards[0].dims))
		return ERR(PLAN_INVALID, "a tensor that is not sharded has one whole shard");
	if (node->kind == TREE_DTENSOR)
		TRY(check_dtensor(c, t));
	for (uint32_t i = 0; i < t->shard_count; i++) {
		uint64_t n = numel;
		const int64_t *d = t->shards[i].dims;
		if (d) {
			TRY(box_check(t->ndim, d, d + t->ndim, t->shape));
			TRY(box_numel(t->ndim, d + t->ndim, &n));
		}
		sum += n; /* shard_count * n fits: each is below 2^63 and a sum that is too large is seen at once */
		if (sum > numel)
			return ERR(PLAN_INVALID, "the rank's shards overlap");
	}
	return OK;
}

static FALLIBLE enum err check_node(struct check *c, const struct tree *t, const struct link *at)
{
	enum err e = OK;

	if (at->depth > TREE_DEPTH_MAX)
		return ERR(LIMIT_EXCEEDED, "containers are nested more than %d deep", TREE_DEPTH_MAX);
	if (tree_is_tensor(t))
		return check_tensor(c, t);
	for (uint32_t i = 0; tree_is_container(t) && i < t->count && !e; i++) {
		struct link below = { at, t->kind == TREE_DICT ? &t->keys[i] : NULL, i, at->depth + 1 };
		e = check_node(c, t->children[i], &below);
		if (e && !err_last()->fqn[0]) {
			char text[ERR_FQN_MAX] = "";
			return err_at_fqn(e, text, link_text(&below, text, sizeof text));
		}
	}
	return e;
}

enum err tree_check(const struct tree *t, uint32_t rank, uint32_t world_size)
{
	struct check c = { .world = world_size };

	return err_at_rank(check_node(&c, t, &(struct link){ 0 }), rank);
}

static bool same_i64(const int64_t *a, const int64_t *b, uint64_t n)
{
	return n == 0 || memcmp(a, b, n * sizeof *a) == 0;
}

static bool same_placement(const struct placement *a, const struct placement *b)
{
	return a->kind == b->kind && (!placement_cuts(a) || a->dim == b->dim) &&
	       (a->kind != PLACE_STRIDED_SHARD || a->split_factor == b->split_factor) &&
	       (a->kind != PLACE_PARTIAL || a->reduce == b->reduce);
}

bool tree_same_mesh(const struct tree *x, const struct tree *y)
{
	const struct tree_tensor *a = &x->tensor, *b = &y->tensor;

	if (x->kind != TREE_DTENSOR)
		return true;
	if (a->mesh == b->mesh && a->placements == b->placements)
		return true;
	if (a->mesh->ndim != b->mesh->ndim || !same_i64(a->mesh->sizes, b->mesh->sizes, a->mesh->ndim))
		return false;
	for (uint32_t i = 0; i < a->mesh->ndim; i++)
		if (!same_placement(&a->placements[i], &b->placements[i]))
			return false;
	return memcmp(a->mesh->ranks, b->mesh->ranks, tree_mesh_size(a->mesh) * sizeof *a->mesh->ranks) == 0;
}

bool tree_same_layout(const struct tree *x, const struct tree *y)
{
	const struct tree_tensor *a = &x->tensor, *b = &y->tensor;
	int64_t p[2 * NDIM_MAX], q[2 * NDIM_MAX];

	if (x->kind != y->kind || a->shard_count != b->shard_count || a->ndim != b->ndim)
		return false;
	for (uint32_t i = 0; i < a->shard_count; i++)
		if (!same_i64(tree_shard_dims(a, &a->shards[i], p), tree_shard_dims(b, &b->shards[i], q), a->ndim * 2))
			return false;
	return tree_same_mesh(x, y);
}

bool tree_same_shape(const struct tree *x, const struct tree *y)
{
	return x->tensor.ndim == y->tensor.ndim && same_i64(x->tensor.shape, y->tensor.shape, x->tensor.ndim);
}

bool tree_equal(const struct tree *a, const struct tree *b)
{
	if (a->kind != b->kind)
		return false;
	if (a->kind == TREE_VALUE)
		return a->value.kind == b->value.kind && str_eq(a->value.bytes, b->value.bytes) &&
		       str_eq(a->value.type, b->value.type);
	if (tree_is_tensor(a))
		return a->tensor.dtype == b->tensor.dtype && tree_same_shape(a, b) && tree_same_layout(a, b);
	if (a->count != b->count)
		return false;
	for (uint32_t i = 0; i < a->count; i++)
		if ((a->kind == TREE_DICT && !tree_key_eq(&a->keys[i], &b->keys[i])) ||
		    !tree_equal(a->children[i], b->children[i]))
			return false;
	return true;
}
