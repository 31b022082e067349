/* state_dict_op_images.c: see state_dict_op_images.h.
 *
 * Dicts and lists become paths; a list of JSON leaves stays one value where it was one; what is empty stays. The entries
 * themselves are image_build's: one sdict per rank. */
#include "ops/state_dict_op_images.h"

#include "format/jscan.h"
#include "ops/state_dict_op_rules.h"
#include "os/fs.h"

enum { HEADER_MAX = 100 << 20 };

/* One rank's tree on its way into an image. */
struct writing {
	struct state_dict_op_images *out;
	struct arena *arena;
	const struct state_dict_op_trees *from;         /* STATE_DICT_OP_SIDES of them, or NULL */
	uint32_t rank;
	struct sdict *sd;
	struct vec(struct image_value) values;
	struct vec(bool) plain;
	struct vec(struct sd_path) tuples;
	struct sd_path_part path[TREE_DEPTH_MAX + 1];
	uint32_t depth;
	struct buf exact, wild, first;         /* rules; `first`: the first one's, without its pattern */
	bool many, sharded;                    /* not all DTensors are cut alike; there are ShardedTensors */
};

static FALLIBLE enum err keep_path(const struct writing *w, struct sd_path *out)
{
	struct sd_path_part *parts;

	TRY(arena_alloc(w->arena, (uint64_t)w->depth + 1, sizeof *parts, &parts));
	memcpy(parts, w->path, w->depth * sizeof *parts);
	*out = (struct sd_path){ parts, w->depth };
	return OK;
}

static FALLIBLE enum err fqn_of(const struct writing *w, struct str *out)
{
	CLEANUP(buf_free) struct buf b = BUF_INIT(1 << 20);

	for (uint32_t i = 0; i < w->depth; i++) {
		if (i)
			buf_putc(&b, '.');
		if (w->path[i].key.p)
			buf_put(&b, w->path[i].key.p, w->path[i].key.n);
		else
			buf_printf(&b, "%jd", (intmax_t)w->path[i].index);
	}
	TRY(buf_status(&b));
	return arena_str(w->arena, (struct str){ b.p ? (char *)b.p : "", b.len }, out);
}

static FALLIBLE enum err enter(struct writing *w, const struct tree *t, uint32_t i)
{
	struct sd_path_part *part = &w->path[w->depth];

	if (w->depth >= TREE_DEPTH_MAX)
		return ERR(LIMIT_EXCEEDED, "a state dict of more than %d levels", TREE_DEPTH_MAX);
	if (tree_is_list(t))
		*part = (struct sd_path_part){ .index = i };
	else if (t->keys[i].is_int)
		TRY(arena_printf(w->arena, &part->key, "%jd", (intmax_t)t->keys[i].index));
	else
		part->key = t->keys[i].text.p ? t->keys[i].text : STR("");
	w->depth++;
	return OK;
}

/* ------------------------------------------------------------------------------------------------------ values */

/* JSON leaves, what is empty, and lists of such. Dicts are taken apart, so that each key has its FQN. */
static bool all_json(const struct tree *t)
{
	if (!tree_is_container(t))
		return t->kind == TREE_VALUE && t->value.kind == TREE_JSON;
	if (t->kind == TREE_DICT)
		return t->count == 0;
	for (uint32_t i = 0; i < t->count; i++)
		if (!all_json(t->children[i]))
			return false;
	return true;
}

/* Is this one value of the image? A list is if it was one where it came from. */
static bool is_value(const struct writing *w, struct str fqn, const struct tree *t)
{
	if (!tree_is_container(t) || t->count == 0)
		return true;
	for (uint32_t i = 0; w->from && i < STATE_DICT_OP_SIDES; i++)
		if (map_get(&w->from[i].lists, fqn) != MAP_NONE)
			return all_json(t);
	return false;
}

static FALLIBLE enum err note_tuple(struct writing *w)
{
	struct sd_path *path;

	TRY(vec_push(&w->tuples, &path));
	return keep_path(w, path);
}

static FALLIBLE enum err put_json(struct writing *w, const struct tree *t, struct buf *b)
{
	if (!tree_is_container(t)) {
		buf_put(b, t->value.bytes.p, t->value.bytes.n);
		return buf_status(b);
	}
	if (t->kind == TREE_TUPLE)
		TRY(note_tuple(w));
	buf_putc(b, t->kind == TREE_DICT ? '{' : '[');
	for (uint32_t i = 0; i < t->count; i++) {
		if (i)
			buf_putc(b, ',');
		TRY(enter(w, t, i));
		if (t->kind == TREE_DICT) {
			TRY(jscan_put_str(b, w->path[w->depth - 1].key));
			buf_putc(b, ':');
		}
		TRY(put_json(w, t->children[i], b));
		w->depth--;
	}
	buf_putc(b, t->kind == TREE_DICT ? '}' : ']');
	return buf_status(b);
}

static FALLIBLE enum err add_value(struct writing *w, struct str fqn, const struct tree *t)
{
	CLEANUP(buf_free) struct buf b = BUF_INIT(HEADER_MAX);
	struct image_value *v;

	TRY(vec_push(&w->values, &v));
	v->fqn = fqn;
	w->out->values++;
	TRY(keep_path(w, &v->path));
	if (!tree_is_container(t) && t->value.kind != TREE_JSON) {
		v->kind = t->value.kind == TREE_BYTES ? IMAGE_VALUE_BYTES : IMAGE_VALUE_PICKLE;
		v->bytes = t->value.bytes;
		return OK;
	}
	TRY(put_json(w, t, &b));
	return arena_str(w->arena, (struct str){ (char *)b.p, b.len }, &v->bytes);
}

/* ----------------------------------------------------------------------------------------------------- tensors */

static FALLIBLE enum err node_key(struct arena *a, uint32_t rank, const struct tree *node, struct str *out)
{
	struct { uint64_t rank; const struct tree *node; } key = { rank, node };

	return arena_str(a, (struct str){ (const char *)&key, sizeof key }, out);
}

uint64_t state_dict_op_images_slot(const struct state_dict_op_images *im, uint32_t rank, const struct tree *node, uint32_t shard)
{
	struct { uint64_t rank; const struct tree *node; } key = { rank, node };
	uint32_t first = map_get(&im->first_slot, (struct str){ (const char *)&key, sizeof key });

	return first == MAP_NONE || shard >= node->tensor.shard_count ? UINT64_MAX : (uint64_t)first + shard;
}

static FALLIBLE enum err add_rule(struct writing *w, struct str fqn, const struct tree_tensor *t)
{
	CLEANUP(buf_free) struct buf any = BUF_INIT(HEADER_MAX);
	struct buf *b = fqn.n && memchr(fqn.p, '*', fqn.n) ? &w->wild : &w->exact;

	TRY(state_dict_op_rules_put(&any, STR("*"), t->mesh, t->placements));
	if (w->first.len == 0)
		buf_put(&w->first, any.p, any.len);
	else if (!str_eq((struct str){ (char *)w->first.p, w->first.len }, (struct str){ (char *)any.p, any.len }))
		w->many = true;
	if (b->len)
		buf_putc(b, ',');
	return state_dict_op_rules_put(b, fqn, t->mesh, t->placements);
}

static FALLIBLE enum err add_shards(struct writing *w, struct str fqn, const struct tree *node, uint32_t index)
{
	const struct tree_tensor *t = &node->tensor;
	int64_t scratch[2 * NDIM_MAX] = { 0 };
	struct sd_loc nowhere = { .file = SD_NO_FILE };
	struct state_dict_op_slot *slot;
	struct str key;

	/* so that the tensor is in this rank's dict though the rank holds none of it */
	if (t->shard_count == 0)
		return sdict_add_chunk(w->sd, index, scratch, w->rank, nowhere);
	if (w->out->slots.n + t->shard_count >= MAP_NONE)
		return ERR(LIMIT_EXCEEDED, "more than %u shards", MAP_NONE);
	TRY(node_key(w->arena, w->rank, node, &key));
	TRY(map_put(&w->out->first_slot, key, (uint32_t)w->out->slots.n));
	for (uint32_t i = 0; i < t->shard_count; i++) {
		const int64_t *dims = tree_shard_dims(t, &t->shards[i], scratch);
		int64_t *copy;
		TRY(sdict_add_chunk(w->sd, index, dims, w->rank, nowhere));
		TRY(arena_i64(w->arena, 2ull * t->ndim + 1, &copy));
		memcpy(copy, dims, 2ull * t->ndim * sizeof *copy);
		TRY(vec_push(&w->out->slots, &slot));
		*slot = (struct state_dict_op_slot){ .fqn = fqn, .dtype = t->dtype, .ndim = t->ndim, .rank = w->rank, .dims = copy,
						     .keeps = t->shards[i].made ? UINT64_MAX : t->shards[i].at };
	}
	return OK;
}

static FALLIBLE enum err add_tensor(struct writing *w, struct str fqn, const struct tree *node)
{
	const struct tree_tensor *t = &node->tensor;
	uint32_t index;
	bool *plain;

	TRY(sdict_add_tensor(w->sd, fqn, t->dtype, t->ndim, t->shape, &index));
	TRY(keep_path(w, &w->sd->tensors[index].path));
	TRY(vec_push(&w->plain, &plain));
	*plain = node->kind == TREE_TENSOR;
	w->sharded = w->sharded || node->kind == TREE_SHARDED;
	w->out->tensors++;
	if (node->kind == TREE_DTENSOR)
		TRY(add_rule(w, fqn, t));
	return add_shards(w, fqn, node, index);
}

static FALLIBLE enum err add_children(struct writing *w, const struct tree *t);

static FALLIBLE enum err add_node(struct writing *w, const struct tree *t)
{
	struct str fqn;

	TRY(fqn_of(w, &fqn));
	enum err e = tree_is_tensor(t) ? add_tensor(w, fqn, t) : is_value(w, fqn, t) ? add_value(w, fqn, t) : add_children(w, t);
	return err_at_fqn(e, fqn.p, fqn.n);
}

static enum err add_children(struct writing *w, const struct tree *t)
{
	if (t->kind == TREE_TUPLE)
		TRY(note_tuple(w));
	for (uint32_t i = 0; i < t->count; i++) {
		TRY(enter(w, t, i));
		TRY(add_node(w, t->children[i]));
		w->depth--;
	}
	return OK;
}

/* ----------------------------------------------------------------------------------------------------- an image */

/* One rule for all, if all DTensors are cut alike and nothing else would be taken for one. */
static FALLIBLE enum err layout_of(struct writing *w, struct buf *out)
{
	if (w->first.len == 0)
		return OK;
	buf_putc(out, '[');
	if (!w->many && !w->sharded) {
		buf_put(out, w->first.p, w->first.len);
	} else {
		buf_put(out, w->exact.p, w->exact.len);
		if (w->exact.len && w->wild.len)
			buf_putc(out, ',');
		buf_put(out, w->wild.p, w->wild.len);
	}
	buf_putc(out, ']');
	return buf_status(out);
}

static FALLIBLE enum err build(struct writing *w, const struct tree *root)
{
	CLEANUP(buf_free) struct buf layout = BUF_INIT(HEADER_MAX);
	uint64_t first = w->out->slots.n, at = first;

	if (root && root->kind != TREE_DICT)
		return ERR(INTERNAL, "a state dict that is no dict");
	if (root)
		TRY(add_children(w, root));
	TRY(layout_of(w, &layout));
	struct image_more more = { .plain = w->plain.v, .tuples = w->tuples.v, .tuple_count = w->tuples.n,
				   .layout = { (char *)layout.p, layout.len } };
	w->out->headers[w->rank] = BUF_INIT(HEADER_MAX + 8192);
	TRY(image_build_more(w->sd, w->rank, w->values.v, w->values.n, &more, &w->out->headers[w->rank],
			     &w->out->image_bytes[w->rank]));
	for (uint64_t i = 0; i < w->sd->chunk_count && at < w->out->slots.n; i++) {
		const struct sd_chunk *c = &w->sd->chunks[i];
		struct state_dict_op_slot *slot = &w->out->slots.v[at];
		if (!str_eq(w->sd->tensors[c->tensor].fqn, slot->fqn)) /* the empty box of a tensor without shards */
			continue;
		slot->offset = c->loc.offset;
		slot->bytes = c->loc.length;
		at++;
	}
	return at == w->out->slots.n ? OK : ERR(INTERNAL, "an image lacks a shard");
}

static FALLIBLE enum err write_rank(struct state_dict_op_images *out, const struct state_dict_op_trees *from, struct arena *a,
				    uint32_t rank,
				    const struct tree *root)
{
	struct writing w = { .out = out, .arena = a, .from = from, .rank = rank, .exact = BUF_INIT(HEADER_MAX),
			     .wild = BUF_INIT(HEADER_MAX),
			     .first = BUF_INIT(HEADER_MAX) };

	enum err e = sdict_new(UINT64_MAX, &w.sd);
	e = e ?: build(&w, root);
	sdict_free(w.sd);
	vec_free(&w.values);
	vec_free(&w.plain);
	vec_free(&w.tuples);
	buf_free(&w.exact);
	buf_free(&w.wild);
	buf_free(&w.first);
	return err_at_rank(e, rank);
}

enum err state_dict_op_images_make(struct tree *const *trees, uint32_t world_size, const struct state_dict_op_trees *from, struct arena *a,
				   struct state_dict_op_images *out)
{
	*out = (struct state_dict_op_images){ .world_size = world_size, .headers = mem_zalloc(world_size, sizeof *out->headers),
					      .image_bytes = mem_zalloc(world_size, sizeof *out->image_bytes) };
	NEED(out->headers && out->image_bytes, "no memory for %u images", world_size);
	for (uint32_t r = 0; r < world_size; r++)
		TRY(write_rank(out, from, a, r, trees[r]));
	return OK;
}

void state_dict_op_images_free(struct state_dict_op_images *im)
{
	for (uint32_t r = 0; im->headers && r < im->world_size; r++)
		buf_free(&im->headers[r]);
	mem_free(im->headers);
	mem_free(im->image_bytes);
	vec_free(&im->slots);
	map_free(&im->first_slot);
	*im = (struct state_dict_op_images){ 0 };
}
