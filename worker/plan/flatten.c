/* flatten.c: flat dicts (see flatten.h). Keys are joined by dots, so two paths may meet in one key: {"a.b": 1, "a": {"b": 2}}. Such
 * a state dict cannot be flattened, and PyTorch says so in the words used here. */
#include "plan/flatten.h"

#include "base/map.h"
#include "base/num.h"
#include "base/vec.h"

enum err flatten_rule_parse(struct str text, enum flatten_rule *out)
{
	if (str_is(text, "utils"))
		*out = FLATTEN_UTILS;
	else if (str_is(text, "dcp"))
		*out = FLATTEN_DCP;
	else if (str_is(text, "dcp-2.3"))
		*out = FLATTEN_DCP_2_3;
	else
		return ERR(VALIDATION_FAILED, "a rule is utils, dcp or dcp-2.3, not '%.*s'", (int)(text.n < 40 ? text.n : 40),
			   text.n ? text.p : "");
	return OK;
}

struct entry {
	struct str key;
	struct tree_path path;
	struct tree *value;
};

struct maker {
	struct arena *arena;
	struct map seen;
	struct vec(struct entry) entries;
};

static enum err add(void *ctx, struct tree_path path, struct tree *value)
{
	struct maker *m = ctx;
	struct tree_key *parts;
	struct entry *e;
	struct str key;
	uint32_t found;

	TRY(traverse_path_text(m->arena, path, &key));
	if (m->entries.n >= MAP_NONE)
		return ERR(LIMIT_EXCEEDED, "too many keys");
	TRY(map_intern(&m->seen, key, (uint32_t)m->entries.n, &found));
	if (found != m->entries.n)
		return err_at_fqn(ERR(DUPLICATE_KEY, "duplicated flatten key %.*s", (int)num_min(key.n, 900),
				      key.n ? key.p : ""), key.p, key.n);
	TRY(vec_push(&m->entries, &e));
	TRY(arena_alloc(m->arena, path.count, sizeof *parts, &parts));
	for (uint32_t i = 0; i < path.count; i++) {
		parts[i] = path.parts[i];
		if (!parts[i].is_int)
			TRY(arena_str(m->arena, parts[i].text, &parts[i].text));
	}
	*e = (struct entry){ key, { parts, path.count }, value };
	return OK;
}

static FALLIBLE enum err hand_over(const struct maker *m, struct flat *out)
{
	struct arena *a = m->arena;
	uint64_t n = m->entries.n;

	TRY(arena_alloc(a, n, sizeof *out->keys, &out->keys));
	TRY(arena_alloc(a, n, sizeof *out->paths, &out->paths));
	TRY(arena_alloc(a, n, sizeof *out->values, &out->values));
	for (uint64_t i = 0; i < n; i++) {
		out->keys[i] = m->entries.v[i].key;
		out->paths[i] = m->entries.v[i].path;
		out->values[i] = m->entries.v[i].value;
	}
	out->count = n;
	return OK;
}

enum err flatten(const struct tree *root, enum flatten_rule rule, struct arena *arena, struct flat *out)
{
	struct maker m = { .arena = arena };
	enum err e = traverse(root, rule, add, &m);

	e = e ?: hand_over(&m, out);
	map_free(&m.seen);
	vec_free(&m.entries);
	return e;
}

enum err flatten_undo(const struct flat *flat, struct arena *arena, struct tree **out)
{
	struct tree *root;

	TRY(tree_new(arena, TREE_DICT, &root));
	for (uint64_t i = 0; i < flat->count; i++) {
		TRY(err_at_fqn(traverse_set_element(arena, root, flat->paths[i], flat->values[i]), flat->keys[i].p, flat->keys[i].n));
	}
	*out = root;
	return OK;
}
