/* tree_tool.c: flattening and paths behind JSON lines, so that tests can hold them against PyTorch's. One object in, one out:
 *
 *     {"op":"flatten","rule":"utils"|"dcp"|"dcp-2.3","tree":T}     → {"flat":[[key, path, T], …]}
 *     {"op":"unflatten","rule":…,"tree":T}                         → {"tree":T}      flattened and put together again
 *     {"op":"set","tree":T,"path":[…],"value":T}                   → {"tree":T}
 *     {"op":"get","tree":T,"path":[…]}                             → {"tree":T} | {}
 *
 * T: {"d":[[key,T],…]} a dict, {"l":[T,…]} a list, {"t":[T,…]} a tuple, {"x":n} a tensor of n elements, else a JSON value that is no
 * container. Keys and path parts are text or ints. An error is {"error":"code","text":"…"}. Input is a test's: wrong forms end the
 * program. */
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>

#include "plan/flatten.h"

static struct arena *arena;

static void need(bool cond, const char *what)
{
	if (cond)
		return;
	fprintf(stderr, "tree_tool: %s\n", what);
	exit(2);
}

static void good(enum err e)
{
	need(e == OK, err_last()->text);
}

static struct str keep(const char *z)
{
	struct str s = { 0 };

	need(z != NULL, "text is missing");
	good(arena_str(arena, str_of(z), &s));
	return s;
}

static struct tree_key read_key(json_t *j)
{
	return json_is_integer(j) ? tree_key_int(json_integer_value(j)) : tree_key_str(keep(json_string_value(j)));
}

static struct tree *read_tree(json_t *j)
{
	json_t *d = json_object_get(j, "d"), *l = json_object_get(j, "l"), *t = json_object_get(j, "t"), *v;
	struct tree *out = NULL;
	size_t i;

	if (d) {
		good(tree_new(arena, TREE_DICT, &out));
		json_array_foreach(d, i, v)
			good(tree_put(arena, out, read_key(json_array_get(v, 0)), read_tree(json_array_get(v, 1))));
	} else if (l || t) {
		good(tree_new(arena, l ? TREE_LIST : TREE_TUPLE, &out));
		json_array_foreach(l ? l : t, i, v)
			good(tree_append(arena, out, read_tree(v)));
	} else if (json_is_object(j)) {
		int64_t *shape = NULL;
		good(arena_i64(arena, 1, &shape));
		shape[0] = json_integer_value(json_object_get(j, "x"));
		good(tree_whole(arena, DT_INT64, 1, shape, 0, &out));
	} else {
		char *text = json_dumps(j, JSON_ENCODE_ANY | JSON_COMPACT);
		good(tree_value(arena, TREE_JSON, keep(text), &out));
		free(text);
	}
	return out;
}

static json_t *write_key(const struct tree_key *k)
{
	return k->is_int ? json_integer(k->index) : json_stringn(k->text.p, k->text.n);
}

static json_t *write_tree(const struct tree *t)
{
	json_t *list = json_array();

	if (t->kind == TREE_VALUE) {
		json_decref(list);
		return json_loadb(t->value.bytes.p, t->value.bytes.n, JSON_DECODE_ANY, NULL);
	}
	if (tree_is_tensor(t)) {
		json_decref(list);
		return json_pack("{sI}", "x", (json_int_t)t->tensor.shape[0]);
	}
	for (uint32_t i = 0; i < t->count; i++) {
		json_t *one = write_tree(t->children[i]);
		json_array_append_new(list, t->kind == TREE_DICT ? json_pack("[oo]", write_key(&t->keys[i]), one) : one);
	}
	return json_pack("{so}", t->kind == TREE_DICT ? "d" : t->kind == TREE_LIST ? "l" : "t", list);
}

static json_t *failed(enum err e)
{
	return json_pack("{ss ss}", "error", err_code_name(e), "text", err_last()->text);
}

static struct tree_path read_path(json_t *j)
{
	struct tree_key *parts = NULL;
	json_t *v;
	size_t i;

	good(arena_alloc(arena, json_array_size(j), sizeof *parts, &parts));
	json_array_foreach(j, i, v)
		parts[i] = read_key(v);
	return (struct tree_path){ parts, (uint32_t)json_array_size(j) };
}

static json_t *write_flat(const struct flat *f)
{
	json_t *all = json_array();

	for (uint64_t i = 0; i < f->count; i++) {
		json_t *path = json_array();
		for (uint32_t k = 0; k < f->paths[i].count; k++)
			json_array_append_new(path, write_key(&f->paths[i].parts[k]));
		json_array_append_new(all, json_pack("[s%oo]", f->keys[i].p, f->keys[i].n, path, write_tree(f->values[i])));
	}
	return json_pack("{so}", "flat", all);
}

static json_t *answer(json_t *q)
{
	const char *op = json_string_value(json_object_get(q, "op"));
	struct tree *t = read_tree(json_object_get(q, "tree")), *out;
	enum flatten_rule rule;
	struct flat flat;
	enum err e;

	need(op != NULL, "no op");
	if (strcmp(op, "set") == 0) {
		e = traverse_set_element(arena, t, read_path(json_object_get(q, "path")), read_tree(json_object_get(q, "value")));
		return e ? failed(e) : json_pack("{so}", "tree", write_tree(t));
	}
	if (strcmp(op, "get") == 0) {
		out = traverse_get_element(t, read_path(json_object_get(q, "path")));
		return out ? json_pack("{so}", "tree", write_tree(out)) : json_object();
	}
	good(flatten_rule_parse(keep(json_string_value(json_object_get(q, "rule"))), &rule));
	e = flatten(t, rule, arena, &flat);
	if (!e && strcmp(op, "flatten") == 0)
		return write_flat(&flat);
	if (!e)
		e = flatten_undo(&flat, arena, &out);
	return e ? failed(e) : json_pack("{so}", "tree", write_tree(out));
}

int main(void)
{
	size_t cap = 0;
	char *line = NULL;

	while (getline(&line, &cap, stdin) > 0) {
		json_t *q = json_loads(line, 0, NULL), *a;

		need(q != NULL, "a line is no JSON object");
		arena = arena_new(256u << 20);
		need(arena != NULL, "out of memory");
		a = answer(q);
		json_dumpf(a, stdout, JSON_COMPACT);
		putchar('\n');
		fflush(stdout);
		json_decref(a);
		json_decref(q);
		arena_free(arena);
	}
	free(line);
	return 0;
}
