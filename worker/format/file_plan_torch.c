/* file_plan_torch.c: a file as torch.save lays it out: data.pkl first, with the nested state dict that the paths of the tensors and values
 * describe, then a record per tensor, at multiples of 64 so that torch.load(mmap=True) maps them. Every opcode is one that
 * torch.load(weights_only=True) takes, unless a value of another class needs more. Tied weights share a record.
 *
 * The pickle is made before anything is written, so values are part of the plan: their archives are in memory (FORMAT_EMBEDS). */
#include "format/format.h"

#include <stdio.h>
#include <stdlib.h>

#include "base/arena.h"
#include "base/map.h"
#include "base/num.h"
#include "format/torch_item_graph.h"
#include "format/zip_plan.h"

enum { HOLES_MAX = 1 << 20, STORAGE_ALIGN = 64 };
#define NO_LEAF UINT64_MAX
#define VALUE_LEAF (1ull << 63)
#define ROOT 0u

/* A container of the state dict, or a leaf: a tensor's index, or VALUE_LEAF | a value's. */
struct node {
	struct sd_path_part part;
	uint64_t leaf;
	uint32_t first, last, next;    /* children, in the order they came; 0: none */
	uint32_t count;
	bool is_list;
};

struct tree {
	const struct sdict *sd;
	struct arena *arena;
	struct vec(struct node) nodes;
	struct map by_key;             /* parent, kind and key → node */
	struct buf *b;
	uint64_t tensors, holes;
};

/* ---------------------------------------------------------------------------------------------------------- the tree */

static FALLIBLE enum err add_node(struct tree *t, struct sd_path_part part, uint32_t *out)
{
	struct node *n;

	if (t->nodes.n >= UINT32_MAX)
		return ERR(LIMIT_EXCEEDED, "a state dict of more than %ju parts", (uintmax_t)t->nodes.n);
	*out = (uint32_t)t->nodes.n;
	TRY(vec_push(&t->nodes, &n));
	n->part = part;
	n->leaf = NO_LEAF;
	return OK;
}

/* The child of that key or position, which is made if it is new. */
static FALLIBLE enum err child_of(struct tree *t, uint32_t parent, const struct sd_path_part *part, uint32_t *out)
{
	struct node *p = &t->nodes.v[parent];
	bool is_index = part->key.p == NULL;
	size_t key_bytes = is_index ? sizeof part->index : part->key.n;
	uint32_t next = (uint32_t)t->nodes.n;
	char *key;

	if (p->leaf != NO_LEAF)
		return ERR(NAME_INVALID, "its path leads through a tensor or value");
	if (p->count && p->is_list != is_index)
		return ERR(NAME_INVALID, "its path takes a container for a %s that others take for a %s", is_index ? "list" : "dict",
			   is_index ? "dict" : "list");
	TRY(arena_alloc(t->arena, sizeof parent + 1 + key_bytes, 1, &key));
	memcpy(key, &parent, sizeof parent);
	key[sizeof parent] = is_index ? 'i' : part->index == SD_PATH_INT_KEY ? 'n' : 'k';
	if (key_bytes)
		memcpy(key + sizeof parent + 1, is_index ? (const char *)&part->index : part->key.p, key_bytes);
	TRY(map_intern(&t->by_key, (struct str){ key, sizeof parent + 1 + key_bytes }, next, out));
	if (*out != next)
		return OK;
	TRY(add_node(t, *part, out));
	p = &t->nodes.v[parent];
	p->is_list = is_index;
	p->count++;
	*(p->last ? &t->nodes.v[p->last].next : &p->first) = next;
	p->last = next;
	return OK;
}

/* A tensor or value without a path becomes a key of the outermost dict. */
static FALLIBLE enum err add_leaf(struct tree *t, struct sd_path path, struct str fqn, uint64_t leaf)
{
	const struct sd_path_part alone = { .key = fqn };
	uint32_t at = ROOT;

	if (!t->sd->has_paths || path.count == 0)
		path = (struct sd_path){ &alone, 1 };
	if (path.count > PICKLE_DEPTH_MAX)
		return ERR(LIMIT_EXCEEDED, "a path of %u parts", path.count);
	for (uint32_t i = 0; i < path.count; i++)
		TRY(child_of(t, at, &path.parts[i], &at));
	if (t->nodes.v[at].leaf != NO_LEAF || t->nodes.v[at].count)
		return ERR(NAME_INVALID, "its path is that of another tensor or value, or of a container of them");
	t->nodes.v[at].leaf = leaf;
	return OK;
}

static FALLIBLE enum err make_tree(struct tree *t)
{
	const struct sdict *sd = t->sd;
	uint32_t root;

	TRY(add_node(t, (struct sd_path_part){ .index = 0 }, &root));
	for (uint64_t i = 0; i < sd->tensor_count; i++)
		TRY(err_at_fqn(add_leaf(t, sd->tensors[i].path, sd->tensors[i].fqn, i), sd->tensors[i].fqn.p, sd->tensors[i].fqn.n));
	for (uint64_t i = 0; i < sd->value_count; i++)
		TRY(err_at_fqn(add_leaf(t, sd->values[i].path, sd->values[i].fqn, VALUE_LEAF | i), sd->values[i].fqn.p,
			       sd->values[i].fqn.n));
	return OK;
}

/* -------------------------------------------------------------------------------------------------------- the pickle */

static FALLIBLE enum err put_value(struct tree *t, const struct sd_value *v)
{
	CLEANUP(item_close) struct item it = { .pickle = BUF_INIT(0) };
	struct item_source src = source_memory(&v->bytes);

	must(v->kind == SD_VALUE_INLINE);
	TRY(item_open(&src, ITEM_VALUE_PICKLE_MAX, &it));
	return pickle_put_part(it.pk, pickle_root(it.pk), t->b);
}

static FALLIBLE enum err put_leaf(struct tree *t, uint64_t leaf)
{
	char key[24];

	if (leaf & VALUE_LEAF) {
		const struct sd_value *v = &t->sd->values[leaf & ~VALUE_LEAF];
		return err_at_fqn(put_value(t, v), v->fqn.p, v->fqn.n);
	}
	const struct sd_tensor *tensor = &t->sd->tensors[leaf];
	bool grad = tensor->requires_grad && (dtype_is_float(tensor->dtype) || dtype_is_complex(tensor->dtype));
	snprintf(key, sizeof key, "%ju", (uintmax_t)(tensor->tied_to ? tensor->tied_to - 1 : leaf));
	return err_at_fqn(item_put_tensor(t->b, tensor->dtype, tensor->ndim, tensor->shape, key, grad), tensor->fqn.p, tensor->fqn.n);
}

static FALLIBLE enum err put_node(struct tree *t, uint32_t at);

static FALLIBLE enum err put_key(struct tree *t, const struct sd_path_part *part)
{
	char text[24] = "";

	if (part->index != SD_PATH_INT_KEY || part->key.n >= sizeof text) {
		pickle_put_str(t->b, part->key);
		return OK;
	}
	memcpy(text, part->key.p, part->key.n);
	pickle_put_int(t->b, strtoll(text, NULL, 10));
	return OK;
}

static int by_index(const void *a, const void *b, void *user)
{
	const struct node *nodes = user;
	const struct node *x = &nodes[*(const uint32_t *)a], *y = &nodes[*(const uint32_t *)b];

	return x->part.index < y->part.index ? -1 : x->part.index > y->part.index;
}

/* Positions that nothing has are None, as in PyTorch. */
static FALLIBLE enum err put_list(struct tree *t, const struct node *list)
{
	int64_t next = 0;
	uint32_t *order, n = 0;

	TRY(arena_alloc(t->arena, list->count, sizeof *order, &order));
	for (uint32_t i = list->first; i; i = t->nodes.v[i].next)
		order[n++] = i;
	qsort_r(order, n, sizeof *order, by_index, t->nodes.v);
	buf_puts(t->b, "](");
	for (uint32_t i = 0; i < n; i++) {
		int64_t index = t->nodes.v[order[i]].part.index;
		if (index < next || (uint64_t)(index - next) > HOLES_MAX - t->holes)
			return ERR(LIMIT_EXCEEDED, "a path with list position %jd, where %jd come before", (intmax_t)index, (intmax_t)next);
		t->holes += (uint64_t)(index - next);
		buf_fill(t->b, 'N', (size_t)(index - next));
		TRY(put_node(t, order[i]));
		next = index + 1;
	}
	buf_putc(t->b, 'e');
	return OK;
}

static FALLIBLE enum err put_node(struct tree *t, uint32_t at)
{
	const struct node *n = &t->nodes.v[at];

	TRY(buf_status(t->b));
	if (n->leaf != NO_LEAF)
		return put_leaf(t, n->leaf);
	if (n->is_list)
		return put_list(t, n);
	buf_puts(t->b, "}(");
	for (uint32_t i = n->first; i; i = t->nodes.v[i].next) {
		TRY(put_key(t, &t->nodes.v[i].part));
		TRY(put_node(t, i));
	}
	buf_putc(t->b, 'u');
	return OK;
}

static FALLIBLE enum err put_pickle(const struct sdict *sd, struct arena *a, struct buf *b)
{
	struct tree t = { .sd = sd, .arena = a, .b = b };

	buf_puts(b, "\x80\x02");
	enum err e = make_tree(&t);
	e = e ?: put_node(&t, ROOT);
	buf_putc(b, '.');
	vec_free(&t.nodes);
	map_free(&t.by_key);
	return e ? e : buf_status(b);
}

/* ---------------------------------------------------------------------------------------------------------- the file */

static FALLIBLE enum err add_storage(struct zip_plan *z, const struct sd_tensor *t, uint64_t index)
{
	uint64_t numel, bytes;
	char name[40];
	struct str kept;

	must(t->chunk_count == 1);
	TRY(box_numel(t->ndim, t->shape, &numel));
	TRY(num_mul(numel, dtype_bytes(t->dtype), &bytes));
	snprintf(name, sizeof name, "archive/data/%ju", (uintmax_t)index);
	TRY(arena_str(z->p->arena, str_of(name), &kept));
	return zip_plan_chunk(z, (struct zip_entry){ .name = kept }, STR(""), t->first_chunk, bytes, STORAGE_ALIGN);
}

static FALLIBLE enum err place(const struct file_plan_target *t, struct zip_plan *z)
{
	CLEANUP(buf_free) struct buf pickle = BUF_INIT(ITEM_VALUE_PICKLE_MAX);
	struct arena *a CLEANUP(arena_free_ptr) = arena_new(UINT64_MAX);

	NEED(a, "no memory for a plan");
	TRY(put_pickle(t->sd, a, &pickle));
	TRY(zip_plan_bytes(z, STR("archive/data.pkl"), (struct str){ (char *)pickle.p, pickle.len }));
	TRY(zip_plan_bytes(z, STR("archive/byteorder"), STR("little")));
	for (uint64_t i = 0; i < t->sd->tensor_count; i++)
		if (!t->sd->tensors[i].tied_to)
			TRY(add_storage(z, &t->sd->tensors[i], i));
	TRY(zip_plan_bytes(z, STR("archive/version"), STR("3\n")));
	return zip_plan_end(z, t->file_name);
}

enum err file_plan_torch(const struct file_plan_target *t, struct file_plan *out)
{
	CLEANUP(zip_plan_free) struct zip_plan z = { .p = out };

	return place(t, &z);
}
