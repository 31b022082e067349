/* traverse.c: PyTorch's three traversals as one walk with a question per rule: is this container a terminal value? (see traverse.h)
 *
 * PyTorch asks that question of every container again at every level, which is quadratic in the depth. Here each container's
 * answer is found once, from below, before the walk; a tree is not changed for it: the answers stand in an array in walk order. */
#include "plan/traverse.h"

#include <stdio.h>

#include "base/mem.h"

struct walk {
	enum flatten_rule rule;
	traverse_visit *visit;
	void *ctx;
	uint8_t *terminal;               /* of each container, in the order of walking */
	uint64_t count, cap, at;
	struct tree_key parts[TREE_DEPTH_MAX + 1];
	char numbers[TREE_DEPTH_MAX + 1][24]; /* text of int keys */
};

static FALLIBLE enum err note_container(struct walk *w, uint64_t *place_out)
{
	if (w->count == w->cap) {
		uint64_t cap = w->cap ? w->cap * 2 : 256;
		void *p = mem_grow(w->terminal, cap, 1);
		NEED(p, "no memory to walk a state dict");
		w->terminal = p;
		w->cap = cap;
	}
	*place_out = w->count++;
	return OK;
}

/* Is the value terminal? Notes the answer for each container below. */
static FALLIBLE enum err judge(struct walk *w, const struct tree *t, uint32_t depth, bool *terminal_out)
{
	bool one, walked = w->rule == FLATTEN_UTILS || t->kind == TREE_LIST || t->kind == TREE_DICT;
	uint64_t place;

	*terminal_out = true;
	if (!tree_is_container(t))
		return OK;
	if (depth > TREE_DEPTH_MAX)
		return ERR(LIMIT_EXCEEDED, "containers are nested more than %d deep", TREE_DEPTH_MAX);
	TRY(note_container(w, &place));
	bool terminal = !(w->rule == FLATTEN_UTILS || (w->rule == FLATTEN_DCP && t->kind == TREE_DICT));
	for (uint32_t i = 0; walked && i < t->count; i++) {
		TRY(judge(w, t->children[i], depth + 1, &one));
		if (!one || tree_is_tensor(t->children[i]))
			terminal = false;
	}
	w->terminal[place] = terminal;
	*terminal_out = terminal;
	return OK;
}

/* Containers below a terminal one have places, too. */
static void skip(struct walk *w, const struct tree *t)
{
	bool walked = w->rule == FLATTEN_UTILS || t->kind == TREE_LIST || t->kind == TREE_DICT;

	if (!tree_is_container(t))
		return;
	w->at++;
	for (uint32_t i = 0; walked && i < t->count; i++)
		skip(w, t->children[i]);
}

static FALLIBLE enum err go(struct walk *w, struct tree *t, uint32_t depth)
{
	if (!tree_is_container(t) || (depth && w->terminal[w->at])) {
		skip(w, t);
		return w->visit(w->ctx, (struct tree_path){ w->parts, depth }, t);
	}
	w->at++;
	for (uint32_t i = 0; i < t->count; i++) {
		struct tree_key *part = &w->parts[depth];
		if (t->kind != TREE_DICT) {
			*part = tree_key_int(i);
		} else if (!t->keys[i].is_int) {
			*part = t->keys[i];
		} else {
			int n = snprintf(w->numbers[depth], sizeof w->numbers[depth], "%jd", (intmax_t)t->keys[i].index);
			*part = tree_key_str((struct str){ w->numbers[depth], (size_t)n });
		}
		TRY(go(w, t->children[i], depth + 1));
	}
	return OK;
}

enum err traverse(const struct tree *root, enum flatten_rule rule, traverse_visit *visit, void *ctx)
{
	CLEANUP(mem_free_ptr) struct walk *w = mem_zalloc(1, sizeof *w);
	bool terminal;

	NEED(w, "no memory to walk a state dict");
	if (root->kind != TREE_DICT)
		return ERR(KIND_MISMATCH, "a state dict is a dict, not a %s", tree_kind_name(root->kind));
	w->rule = rule;
	w->visit = visit;
	w->ctx = ctx;
	enum err e = judge(w, root, 0, &terminal);
	if (!e)
		e = go(w, (struct tree *)(uintptr_t)root, 0); /* visitors get children, never the root */
	mem_free(w->terminal);
	return e;
}

static FALLIBLE enum err not_subscriptable(const struct tree *t)
{
	return ERR(KIND_MISMATCH, "a %s does not support item assignment", tree_kind_name(t->kind));
}

enum { LIST_MAX = 1 << 24 };

static FALLIBLE enum err extend_list(struct arena *a, struct tree *list, int64_t index)
{
	struct tree *none;

	if (index >= LIST_MAX)
		return ERR(LIMIT_EXCEEDED, "list index %jd is too large", (intmax_t)index);
	if ((int64_t)list->count > index)
		return OK;
	TRY(tree_none(a, &none));
	while ((int64_t)list->count <= index)
		TRY(tree_append(a, list, none));
	return OK;
}

/* Python counts negative positions from the end. */
static FALLIBLE enum err position(const struct tree *list, int64_t index, uint32_t *out)
{
	if (index < 0)
		index += list->count;
	if (index < 0 || index >= (int64_t)list->count)
		return ERR(RANGE_INVALID, "list index out of range");
	*out = (uint32_t)index;
	return OK;
}

/* Steps from a container to the one below it. */
static FALLIBLE enum err step(struct arena *a, struct tree *cur, const struct tree_key *key, bool next_is_int, struct tree **out)
{
	uint32_t at;

	if (cur->kind == TREE_DICT) {
		*out = tree_get(cur, *key);
		if (*out)
			return OK;
		TRY(tree_new(a, next_is_int ? TREE_LIST : TREE_DICT, out));
		return tree_put(a, cur, *key, *out);
	}
	if (!tree_is_list(cur) || !key->is_int)
		return not_subscriptable(cur);
	if (cur->kind == TREE_TUPLE && key->index >= (int64_t)cur->count)
		return not_subscriptable(cur);
	TRY(extend_list(a, cur, key->index));
	TRY(position(cur, key->index, &at));
	if (tree_is_none(cur->children[at])) {
		if (cur->kind == TREE_TUPLE)
			return not_subscriptable(cur);
		TRY(tree_new(a, next_is_int ? TREE_LIST : TREE_DICT, &cur->children[at]));
	}
	*out = cur->children[at];
	return OK;
}

enum err traverse_set_element(struct arena *a, struct tree *root, struct tree_path path, struct tree *value)
{
	struct tree *cur = root;
	uint32_t at;

	if (path.count < 1 || path.count > TREE_DEPTH_MAX)
		return ERR(LIMIT_EXCEEDED, "a path has 1 to %d parts", TREE_DEPTH_MAX);
	for (uint32_t i = 1; i < path.count; i++)
		TRY(step(a, cur, &path.parts[i - 1], path.parts[i].is_int, &cur));
	const struct tree_key *key = &path.parts[path.count - 1];
	/* PyTorch asks a dict's length before it sets an int. */
	if (cur->kind == TREE_DICT && (!key->is_int || key->index < (int64_t)cur->count))
		return tree_put(a, cur, *key, value);
	if (cur->kind != TREE_LIST || !key->is_int)
		return not_subscriptable(cur);
	TRY(extend_list(a, cur, key->index));
	TRY(position(cur, key->index, &at));
	cur->children[at] = value;
	return OK;
}

struct tree *traverse_get_element(const struct tree *root, struct tree_path path)
{
	struct tree *cur = (struct tree *)(uintptr_t)root; /* what is found may be changed by whoever owns the tree */
	uint32_t at;

	for (uint32_t i = 0; cur && i < path.count; i++) {
		const struct tree_key *key = &path.parts[i];
		if (!key->is_int)
			cur = tree_get(cur, *key);
		else if (cur->kind != TREE_LIST || position(cur, key->index, &at))
			cur = NULL;
		else
			cur = cur->children[at];
	}
	return cur;
}

enum err traverse_path_text(struct arena *a, struct tree_path path, struct str *out)
{
	uint64_t bytes = 1;
	size_t n = 0;
	char *p;

	for (uint32_t i = 0; i < path.count; i++)
		bytes += 1 + (path.parts[i].is_int ? 24 : path.parts[i].text.n);
	TRY(arena_alloc(a, bytes, 1, &p));
	for (uint32_t i = 0; i < path.count; i++) {
		const struct tree_key *k = &path.parts[i];
		if (i)
			p[n++] = '.';
		if (k->is_int) {
			n += (size_t)snprintf(p + n, bytes - n, "%jd", (intmax_t)k->index);
		} else if (k->text.n) {
			memcpy(p + n, k->text.p, k->text.n);
			n += k->text.n;
		}
	}
	*out = (struct str){ p, n };
	return OK;
}
