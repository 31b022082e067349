/* state_dict_op_trees.c: see state_dict_op_trees.h.
 *
 * An image is flat: FQNs, each with a path. The tree is grown path by path in a table of nodes (a child is found by parent and key) and
 * written out as arrays at the end. Dicts and lists of JSON values are taken apart, too: the companion's are compared key by key. */
#include "ops/state_dict_op_trees.h"

#include "format/jscan.h"
#include "ops/state_dict_op_rules.h"
#include "os/fs.h"

enum { PATH_MAX_PARTS = 64, LIST_HOLES_MAX = 1024, NONE = UINT32_MAX };

enum node_kind { NODE_OPEN, NODE_DICT, NODE_LIST, NODE_TUPLE, NODE_LEAF };

struct node {
	uint32_t parent, first, last, next, count;
	uint8_t kind;
	struct tree_key key;
	struct tree *leaf;
};

struct growing {
	struct arena *arena;
	const struct image *im;
	struct vec(struct node) nodes;         /* 0: the root */
	struct map children;                   /* parent and key → node */
	uint32_t rank, dict;
	struct state_dict_op_places *places;
	const struct state_dict_op_rules *rules;
	struct map *lists;
};

static FALLIBLE enum err new_node(struct growing *g, uint32_t *out)
{
	struct node *n;

	if (g->nodes.n >= NONE)
		return ERR(LIMIT_EXCEEDED, "a state dict of too many parts");
	*out = (uint32_t)g->nodes.n;
	TRY(vec_push(&g->nodes, &n));
	n->first = n->last = n->next = NONE;
	return OK;
}

/* A container becomes a dict or a list by its first child. */
static FALLIBLE enum err open_as(struct growing *g, uint32_t node, enum node_kind kind)
{
	struct node *n = &g->nodes.v[node];

	if (n->kind == NODE_OPEN)
		n->kind = (uint8_t)kind;
	else if (n->kind != kind && !(kind == NODE_LIST && n->kind == NODE_TUPLE))
		return ERR(FORMAT_IMAGE, "its path leads through what is no %s", kind == NODE_DICT ? "dict" : "list");
	return OK;
}

static FALLIBLE enum err child_of(struct growing *g, uint32_t parent, struct sd_path_part part, uint32_t *out)
{
	CLEANUP(buf_free) struct buf key = BUF_INIT(1 << 20);
	struct str copy;

	TRY(open_as(g, parent, part.key.p ? NODE_DICT : NODE_LIST));
	buf_le32(&key, parent);
	if (part.key.p)
		buf_put(&key, part.key.p, part.key.n);
	else
		buf_le64(&key, (uint64_t)part.index);
	TRY(buf_status(&key));
	uint32_t found = map_get(&g->children, (struct str){ (char *)key.p, key.len });
	if (found != MAP_NONE) {
		*out = found;
		return OK;
	}
	TRY(arena_str(g->arena, (struct str){ (char *)key.p, key.len }, &copy));
	TRY(new_node(g, out));
	TRY(map_put(&g->children, copy, *out));
	struct node *p = &g->nodes.v[parent], *n = &g->nodes.v[*out];
	n->key = (struct tree_key){ .text = part.key, .index = part.index };
	n->parent = parent;
	if (p->last == NONE)
		p->first = *out;
	else
		g->nodes.v[p->last].next = *out;
	p->last = *out;
	p->count++;
	return OK;
}

static FALLIBLE enum err node_at(struct growing *g, struct sd_path path, uint32_t *out)
{
	*out = 0;
	if (path.count == 0 || path.count > PATH_MAX_PARTS)
		return ERR(LIMIT_EXCEEDED, "a path of %u parts", path.count);
	if (!path.parts[0].key.p)
		return ERR(FORMAT_IMAGE, "its path begins with a list position: a state dict is a dict");
	for (uint32_t i = 0; i < path.count; i++)
		TRY(child_of(g, *out, path.parts[i], out));
	return OK;
}

static FALLIBLE enum err set_leaf(struct growing *g, uint32_t node, const struct tree *leaf)
{
	struct node *n = &g->nodes.v[node];

	if (n->kind != NODE_OPEN)
		return ERR(DUPLICATE_KEY, "two things have this path");
	n->kind = NODE_LEAF;
	TRY(arena_alloc(g->arena, 1, sizeof *n->leaf, &n->leaf));
	*n->leaf = *leaf;
	return OK;
}

/* ------------------------------------------------------------------------------------------------------ values */

static FALLIBLE enum err json_leaf(struct growing *g, const struct jscan *js, const struct jscan_token *t, struct tree *out)
{
	CLEANUP(buf_free) struct buf b = BUF_INIT(UINT32_MAX);
	struct str text;
	double v;

	if (t->kind == JSCAN_STRING) { /* one way to write it, so that equal values have equal texts */
		TRY(jscan_str(js, t, g->arena, &text));
		TRY(jscan_put_str(&b, text.p ? text : STR("")));
	} else if (t->kind == JSCAN_NUMBER && !t->integer && jscan_double(t, &v)) {
		jscan_put_double(&b, v);
	} else if (t->kind == JSCAN_NUMBER) {
		buf_put(&b, t->raw.p, t->raw.n);
	} else {
		buf_puts(&b, t->kind == JSCAN_TRUE ? "true" : t->kind == JSCAN_FALSE ? "false" : "null");
	}
	TRY(buf_status(&b));
	*out = (struct tree){ .kind = TREE_VALUE, .value.kind = TREE_JSON };
	return arena_str(g->arena, (struct str){ (char *)b.p, b.len }, &out->value.bytes);
}

static void put_path(const struct growing *g, uint32_t node, struct buf *b)
{
	const struct node *n = &g->nodes.v[node];

	if (n->parent) {
		put_path(g, n->parent, b);
		buf_putc(b, '.');
	}
	if (n->key.text.p)
		buf_put(b, n->key.text.p, n->key.text.n);
	else
		buf_printf(b, "%jd", (intmax_t)n->key.index);
}

/* Here a list is one value, and not one for each of its members: so it will be in what is made of it. */
static FALLIBLE enum err note_list(struct growing *g, uint32_t node)
{
	CLEANUP(buf_free) struct buf b = BUF_INIT(1 << 20);
	struct str path;
	uint32_t found;

	put_path(g, node, &b);
	TRY(buf_status(&b));
	TRY(arena_str(g->arena, (struct str){ (char *)b.p, b.len }, &path));
	return map_intern(g->lists, path, 1, &found);
}

/* The value whose first token is `t`, at `node`. The scanner's own limit on depth holds here. */
static FALLIBLE enum err add_json(struct growing *g, uint32_t node, struct jscan *js, struct jscan_token t)
{
	struct tree leaf;
	bool dict = t.kind == JSCAN_OBJECT;

	if (!dict && t.kind != JSCAN_ARRAY) {
		TRY(json_leaf(g, js, &t, &leaf));
		return set_leaf(g, node, &leaf);
	}
	TRY(open_as(g, node, dict ? NODE_DICT : NODE_LIST));
	if (!dict && g->nodes.v[g->nodes.v[node].parent].kind == NODE_DICT)
		TRY(note_list(g, node));
	for (int64_t i = 0;; i++) {
		struct sd_path_part part = { .index = i };
		uint32_t child;
		TRY(jscan_next(js, &t));
		if (t.kind == JSCAN_OBJECT_END || t.kind == JSCAN_ARRAY_END)
			return OK;
		if (dict) {
			TRY(jscan_str(js, &t, g->arena, &part.key));
			part.key = part.key.p ? part.key : STR("");
			TRY(jscan_next(js, &t));
		}
		TRY(child_of(g, node, part, &child));
		TRY(add_json(g, child, js, t));
	}
}

static FALLIBLE enum err add_value(struct growing *g, const struct image_text *v)
{
	struct jscan js = jscan_of(v->text, ERR_FORMAT_IMAGE);
	struct sd_path_part self;
	struct jscan_token t;
	struct tree leaf = { .kind = TREE_VALUE, .value.kind = v->kind == IMAGE_TEXT_BYTES ? TREE_BYTES : TREE_OPAQUE };
	uint32_t node;

	TRY(node_at(g, image_path(g->im, v->fqn, &self), &node));
	if (v->kind == IMAGE_TEXT_JSON) {
		TRY(jscan_next(&js, &t));
		return add_json(g, node, &js, t);
	}
	CLEANUP(buf_free) struct buf plain = BUF_INIT(v->text.n + 1);
	if (buf_unbase64(&plain, v->text))
		return ERR(FORMAT_IMAGE, "the value is not base64");
	TRY(arena_str(g->arena, (struct str){ (char *)plain.p, plain.len }, &leaf.value.bytes));
	return set_leaf(g, node, &leaf);
}

/* ----------------------------------------------------------------------------------------------------- tensors */

static bool in_mesh(const struct tree_mesh *m, uint32_t rank)
{
	uint64_t n = 1;

	for (uint32_t i = 0; i < m->ndim; i++)
		n *= (uint64_t)m->sizes[i];
	for (uint64_t i = 0; i < n; i++)
		if (m->ranks[i] == rank)
			return true;
	return false;
}

static FALLIBLE enum err add_place(struct growing *g, const struct image_part *p, struct tree_shard *out)
{
	struct state_dict_op_place *place;
	int64_t *dims;

	TRY(arena_i64(g->arena, 2ull * p->ndim + 1, &dims));
	for (uint32_t i = 0; i < p->ndim; i++) {
		dims[i] = p->offsets[i];
		dims[p->ndim + i] = p->sizes[i];
	}
	*out = (struct tree_shard){ .dims = p->boxed ? dims : NULL, .at = g->places->n };
	TRY(vec_push(g->places, &place));
	*place = (struct state_dict_op_place){ .fqn = p->fqn, .dtype = p->dtype, .ndim = p->ndim, .rank = g->rank, .dict = g->dict,
					       .dims = dims, .offset = p->offset, .bytes = p->bytes };
	return OK;
}

/* A further box of a tensor that was begun before. */
static FALLIBLE enum err add_box(struct growing *g, struct tree *leaf, const struct image_part *p)
{
	struct tree_tensor *t = &leaf->tensor;
	bool same = leaf->kind != TREE_TENSOR && p->boxed && t->dtype == p->dtype && t->ndim == p->ndim;

	if (!p->boxed || leaf->kind == TREE_TENSOR)
		return ERR(DUPLICATE_KEY, "a plain tensor of the same key twice");
	for (uint32_t i = 0; same && i < p->ndim; i++)
		same = t->shape[i] == p->shape[i];
	if (!same)
		return ERR(PLAN_INVALID, "two entries of one tensor disagree on dtype or shape");
	struct tree_shard *shards;
	/* room doubles: one rank's boxes of one tensor are few, but nobody promises that */
	if ((t->shard_count & (t->shard_count - 1)) == 0) {
		TRY(arena_alloc(g->arena, t->shard_count ? 2ull * t->shard_count : 1, sizeof *shards, &shards));
		if (t->shard_count)
			memcpy(shards, t->shards, t->shard_count * sizeof *shards);
		t->shards = shards;
	}
	shards = (struct tree_shard *)(uintptr_t)t->shards;
	return add_place(g, p, &shards[t->shard_count++]);
}

static FALLIBLE enum err add_tensor(struct growing *g, const struct image_part *p)
{
	struct tree leaf = { .kind = TREE_TENSOR, .tensor = { .dtype = p->dtype, .ndim = p->ndim, .shape = p->shape } };
	struct sd_path_part self;
	struct tree_shard *one;
	uint32_t node;

	TRY(node_at(g, image_path(g->im, p->fqn, &self), &node));
	bool there = g->nodes.v[node].kind == NODE_LEAF && g->nodes.v[node].leaf->kind != TREE_VALUE;
	if (there && g->nodes.v[node].leaf->kind == TREE_TENSOR)
		return ERR(DUPLICATE_KEY, "two tensors have this path");
	if (!there && !p->boxed) {
		TRY(arena_alloc(g->arena, 1, sizeof *one, &one));
		TRY(add_place(g, p, one));
		leaf.tensor.shards = one;
		leaf.tensor.shard_count = 1;
		return set_leaf(g, node, &leaf);
	}
	if (!there) {
		bool mesh = state_dict_op_rules_find(g->rules, p->fqn, p->ndim, &leaf.tensor.mesh, &leaf.tensor.placements);
		leaf.kind = mesh ? TREE_DTENSOR : TREE_SHARDED;
		TRY(set_leaf(g, node, &leaf));
	}
	struct tree *t = g->nodes.v[node].leaf;
	/* a rank that holds nothing of a sharded tensor has an empty box, so that the tensor is in its dict */
	if (t->kind == TREE_DTENSOR ? !in_mesh(t->tensor.mesh, g->rank) : box_empty(p->ndim, p->sizes))
		return OK;
	return add_box(g, t, p);
}

/* ---------------------------------------------------------------------------------------------------- the tree */

static FALLIBLE enum err write_out(struct growing *g, uint32_t node, struct tree **out);

static FALLIBLE enum err write_dict(struct growing *g, const struct node *n, struct tree *t)
{
	t->kind = TREE_DICT;
	t->count = n->count;
	TRY(arena_alloc(g->arena, (uint64_t)n->count + 1, sizeof *t->children, &t->children));
	TRY(arena_alloc(g->arena, (uint64_t)n->count + 1, sizeof *t->keys, &t->keys));
	uint32_t i = 0;
	for (uint32_t c = n->first; c != NONE; c = g->nodes.v[c].next, i++) {
		t->keys[i] = g->nodes.v[c].key;
		TRY(write_out(g, c, &t->children[i]));
	}
	return OK;
}

/* Positions that nothing was found for hold None, as PyTorch's set_element leaves them. */
static FALLIBLE enum err write_list(struct growing *g, const struct node *n, struct tree *t)
{
	int64_t longest = 0;

	for (uint32_t c = n->first; c != NONE; c = g->nodes.v[c].next)
		longest = g->nodes.v[c].key.index >= longest ? g->nodes.v[c].key.index + 1 : longest;
	if (longest > (int64_t)n->count + LIST_HOLES_MAX)
		return ERR(FORMAT_IMAGE, "a list position %jd in a list of %u", (intmax_t)longest - 1, n->count);
	t->kind = n->kind == NODE_TUPLE ? TREE_TUPLE : TREE_LIST;
	t->count = (uint32_t)longest;
	TRY(arena_alloc(g->arena, (uint64_t)longest + 1, sizeof *t->children, &t->children));
	for (uint32_t c = n->first; c != NONE; c = g->nodes.v[c].next)
		TRY(write_out(g, c, &t->children[g->nodes.v[c].key.index]));
	for (uint32_t i = 0; i < t->count; i++) {
		if (t->children[i])
			continue;
		TRY(arena_alloc(g->arena, 1, sizeof **t->children, &t->children[i]));
		*t->children[i] = (struct tree){ .kind = TREE_VALUE, .value = { TREE_JSON, STR("null") } };
	}
	return OK;
}

static enum err write_out(struct growing *g, uint32_t node, struct tree **out)
{
	const struct node *n = &g->nodes.v[node];

	if (n->kind == NODE_LEAF) {
		*out = n->leaf;
		return OK;
	}
	TRY(arena_alloc(g->arena, 1, sizeof **out, out));
	return n->kind == NODE_LIST || n->kind == NODE_TUPLE ? write_list(g, n, *out) : write_dict(g, n, *out);
}

static FALLIBLE enum err mark_tuple(struct growing *g, struct sd_path path)
{
	uint32_t node;

	TRY(node_at(g, path, &node));
	struct node *n = &g->nodes.v[node];
	if (n->kind != NODE_OPEN && n->kind != NODE_LIST && n->kind != NODE_TUPLE)
		return ERR(FORMAT_IMAGE, "a tuple that is none");
	n->kind = NODE_TUPLE;
	return OK;
}

static FALLIBLE enum err grow(struct growing *g, struct tree **out)
{
	uint32_t root;

	TRY(new_node(g, &root));
	g->nodes.v[root].kind = NODE_DICT;
	for (uint32_t i = 0; i < image_part_count(g->im); i++) {
		struct image_part p = image_part_at(g->im, i);
		TRY(err_at_fqn(add_tensor(g, &p), p.fqn.p, p.fqn.n));
	}
	for (uint32_t i = 0; i < image_text_count(g->im); i++) {
		struct image_text v = image_text_at(g->im, i);
		TRY(err_at_fqn(add_value(g, &v), v.fqn.p, v.fqn.n));
	}
	for (uint32_t i = 0; i < image_tuple_count(g->im); i++)
		TRY(mark_tuple(g, image_tuple_at(g->im, i)));
	return write_out(g, root, out);
}

static FALLIBLE enum err tree_of(struct growing *g, struct tree **out)
{
	enum err e = grow(g, out);

	vec_free(&g->nodes);
	map_free(&g->children);
	return e;
}

/* The rules of this image: mostly those of the rank before. Their meshes are part of the trees, so all are kept. */
static FALLIBLE enum err rules_of(const struct image *im, uint32_t world_size, struct state_dict_op_trees *t,
				  const struct state_dict_op_rules **out)
{
	struct state_dict_op_rules **last = t->rules.n ? &t->rules.v[t->rules.n - 1] : NULL;
	struct str text = image_layout(im);

	if (!last || !str_eq((*last)->text, text)) {
		TRY(vec_push(&t->rules, &last));
		*last = mem_zalloc(1, sizeof **last);
		NEED(*last, "no memory for a layout");
		TRY(state_dict_op_rules_read(text, world_size, *last));
	}
	*out = *last;
	return OK;
}

enum err state_dict_op_trees_add(struct image *im, uint32_t rank, uint32_t dict, struct arena *a,
				 struct state_dict_op_places *places, struct state_dict_op_trees *t)
{
	struct growing g = { .arena = a, .im = im, .rank = rank, .dict = dict, .places = places, .lists = &t->lists };

	enum err e = rules_of(im, t->world_size, t, &g.rules);
	e = e ?: tree_of(&g, &t->ranks[rank]);
	return err_at_rank(e, rank);
}

enum err state_dict_op_trees_begin(uint32_t world_size, struct arena *a, struct state_dict_op_trees *out)
{
	*out = (struct state_dict_op_trees){ .world_size = world_size, .images = mem_zalloc(world_size, sizeof *out->images) };
	NEED(out->images, "no memory for %u ranks", world_size);
	return arena_alloc(a, (uint64_t)world_size + 1, sizeof *out->ranks, &out->ranks);
}

enum err state_dict_op_trees_read(struct job *j, const struct rank_segments *s, uint32_t dict, uint32_t world_size, struct arena *a,
				  struct state_dict_op_places *places, struct state_dict_op_trees *out)
{
	uint32_t n = s->count;

	TRY(state_dict_op_trees_begin(world_size, a, out));
	if (n > world_size)
		return ERR(WORLD_MISMATCH, "a state dict of %u ranks in a world of %u", n, world_size);
	for (uint32_t r = 0; r < n; r++) {
		TRY(input_read_image(&s->v[r], j->fds, &out->images[r]));
		TRY(state_dict_op_trees_add(out->images[r], r, dict, a, places, out));
		TRY(job_tick(j));
	}
	return OK;
}

void state_dict_op_trees_free(struct state_dict_op_trees *t)
{
	for (uint32_t i = 0; t->images && i < t->world_size; i++)
		image_free(t->images[i]);
	mem_free(t->images);
	for (uint64_t i = 0; i < t->rules.n; i++) {
		if (t->rules.v[i])
			state_dict_op_rules_free(t->rules.v[i]);
		mem_free(t->rules.v[i]);
	}
	vec_free(&t->rules);
	map_free(&t->lists);
	*t = (struct state_dict_op_trees){ 0 };
}
