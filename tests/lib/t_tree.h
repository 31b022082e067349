/* t_tree.h: trees and plans of state-dict operations in tests, as text.
 *
 *     t_tree("{'w':'T f32 4,2','l':['T i64 3',5],'s':'S f32 4 / 0: 0+2 / 1: 2+2','d':'D f32 8,4 / 2x2 / Shard(0) Replicate()'}", rank)
 *
 * JSON with ' for ". A dict key "#3" is the int 3; {"$": [..]} a tuple. Strings that begin with a letter and a space are tensors: T whole;
 * S a ShardedTensor, each rank's boxes "rank: offsets+sizes"; D a DTensor, mesh, placements and, if not 0.., "/ ranks". "O name" is
 * a value of a class, "X text" bytes. All else is a JSON value. */
#pragma once
#include <jansson.h>

#include "base/arena.h"
#include "lib/t_json.h"
#include "tensor/dtensor.h"
#include "plan/state_dict_op.h"
#include "lib/t.h"

#define T_TREE static __attribute__((unused))

static struct arena *t_arena;
static uint64_t t_at;

T_TREE void *t_alloc(uint64_t n, uint64_t bytes)
{
	void *p = NULL;

	T_OK(arena_alloc_(t_arena, n, bytes, &p));
	return p;
}

T_TREE struct str t_keep(const char *z)
{
	struct str s;

	T_OK(arena_str(t_arena, str_of(z), &s));
	return s;
}

/* "4,2" → numbers; stops at what is no number. */
T_TREE uint32_t t_numbers(const char **at, char sep, int64_t *out)
{
	uint32_t n = 0;
	char *end;

	while (**at == ' ')
		++*at;
	while (**at == '-' || (**at >= '0' && **at <= '9')) {
		out[n++] = strtoll(*at, &end, 10);
		*at = end;
		if (**at != sep)
			break;
		++*at;
	}
	return n;
}

T_TREE enum dtype t_dtype(const char **at)
{
	static const struct { const char *name; enum dtype d; } all[] = {
		{ "f32", DT_FLOAT32 }, { "f64", DT_FLOAT64 }, { "bf16", DT_BFLOAT16 }, { "i64", DT_INT64 },
		{ "c64", DT_COMPLEX64 }, { "u8", DT_UINT8 }, { "f4", DT_FLOAT4_E2M1FN_X2 },
	};

	for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
		size_t n = strlen(all[i].name);
		if (strncmp(*at, all[i].name, n) == 0 && ((*at)[n] == ' ' || (*at)[n] == '\0')) {
			*at += n;
			return all[i].d;
		}
	}
	T_FAIL("no dtype at '%s'", *at);
}

T_TREE void t_sharded(struct tree_tensor *t, const char *at, uint32_t rank)
{
	struct tree_shard *shards = t_alloc(64, sizeof *shards);
	int64_t who;

	t->shards = shards;
	while ((at = strchr(at, '/')) != NULL) {
		int64_t *dims = t_alloc(2 * (uint64_t)t->ndim + 2, sizeof *dims);
		at++;
		assert_int_equal(t_numbers(&at, ',', &who), 1);
		at++; /* the colon */
		t_numbers(&at, ',', dims);
		at++; /* the plus */
		t_numbers(&at, ',', dims + t->ndim);
		if ((uint32_t)who == rank)
			shards[t->shard_count++] = (struct tree_shard){ .dims = dims, .at = t_at++ };
	}
}

T_TREE void t_dtensor_shards(struct tree_tensor *t, uint32_t rank)
{
	CLEANUP(dtensor_part_free) struct dtensor_part part = { 0 };
	int64_t coord[8];

	if (!tree_mesh_coord(t->mesh, rank, coord))
		return;
	T_OK(dtensor_part_make(t->ndim, t->shape, t->mesh->ndim, t->mesh->sizes, coord, t->placements, &part));
	struct tree_shard *shards = t_alloc(part.count, sizeof *shards);
	for (uint64_t i = 0; i < part.count; i++) {
		int64_t *dims = t_alloc(2 * (uint64_t)t->ndim + 1, sizeof *dims);
		dtensor_part_box(&part, i, dims, NULL);
		shards[i] = (struct tree_shard){ .dims = dims, .at = t_at++ };
	}
	t->shards = shards;
	t->shard_count = (uint32_t)part.count;
}

T_TREE void t_dtensor(struct tree_tensor *t, const char *at, uint32_t rank)
{
	struct tree_mesh *mesh = t_alloc(1, sizeof *mesh);
	int64_t *sizes = t_alloc(8, sizeof *sizes), ranks[64] = { 0 };
	struct placement *placements = t_alloc(8, sizeof *placements);
	uint32_t *listed, n = 0;

	at = strchr(at, '/') + 1;
	mesh->ndim = t_numbers(&at, 'x', sizes);
	mesh->sizes = sizes;
	at = strchr(at, '/') + 1;
	while (n < mesh->ndim) {
		at += strspn(at, " ");
		size_t len = strcspn(at, " ");
		T_OK(placement_parse((struct str){ at, len }, &placements[n++]));
		at += len;
	}
	listed = t_alloc(tree_mesh_size(mesh) + 64, sizeof *listed);
	for (uint32_t i = 0; i < tree_mesh_size(mesh); i++)
		listed[i] = i;
	at = strchr(at, '/');
	if (at) {
		at++;
		n = t_numbers(&at, ',', ranks);
		for (uint32_t i = 0; i < n; i++)
			listed[i] = (uint32_t)ranks[i];
	}
	mesh->ranks = listed;
	t->mesh = mesh;
	t->placements = placements;
	t_dtensor_shards(t, rank);
}

T_TREE struct tree *t_tensor(const char *text, uint32_t rank)
{
	int64_t *shape = t_alloc(64, sizeof *shape);
	const char *at = text + 2;
	struct tree_tensor t = { .dtype = t_dtype(&at), .shape = shape };
	struct tree *out;

	t.ndim = t_numbers(&at, ',', shape);
	if (*text == 'T') {
		T_OK(tree_whole(t_arena, t.dtype, t.ndim, shape, t_at++, &out));
		return out;
	}
	if (*text == 'S')
		t_sharded(&t, at, rank);
	else
		t_dtensor(&t, at, rank);
	T_OK(tree_tensor_new(t_arena, *text == 'S' ? TREE_SHARDED : TREE_DTENSOR, &t, &out));
	return out;
}

T_TREE struct tree *t_node(json_t *j, uint32_t rank)
{
	const char *text = json_string_value(j), *key;
	struct tree *out, *child;
	json_t *v;
	size_t i;

	if (json_is_object(j) && json_object_get(j, "$")) {
		T_OK(tree_new(t_arena, TREE_TUPLE, &out));
		json_array_foreach(json_object_get(j, "$"), i, v)
			T_OK(tree_append(t_arena, out, t_node(v, rank)));
		return out;
	}
	if (json_is_object(j)) {
		T_OK(tree_new(t_arena, TREE_DICT, &out));
		json_object_foreach(j, key, v) {
			child = t_node(v, rank);
			T_OK(tree_put(t_arena, out, *key == '#' ? tree_key_int(strtoll(key + 1, NULL, 10)) :
						    tree_key_str(t_keep(key)), child));
		}
		return out;
	}
	if (json_is_array(j)) {
		T_OK(tree_new(t_arena, TREE_LIST, &out));
		json_array_foreach(j, i, v)
			T_OK(tree_append(t_arena, out, t_node(v, rank)));
		return out;
	}
	if (text && strchr("TSD", *text) && text[1] == ' ')
		return t_tensor(text, rank);
	if (text && *text == 'O' && text[1] == ' ') {
		T_OK(tree_value(t_arena, TREE_OPAQUE, STR("pickle"), &out));
		out->value.type = t_keep(text + 2);
		return out;
	}
	if (text && *text == 'X' && text[1] == ' ') {
		T_OK(tree_value(t_arena, TREE_BYTES, t_keep(text + 2), &out));
		return out;
	}
	char *dumped = json_dumps(j, JSON_ENCODE_ANY | JSON_COMPACT | JSON_ENSURE_ASCII);
	T_OK(tree_value(t_arena, TREE_JSON, t_keep(dumped), &out));
	free(dumped);
	return out;
}

T_TREE struct tree *t_tree(const char *text, uint32_t rank)
{
	json_t *j = t_json(text);
	struct tree *t = t_node(j, rank);
	json_decref(j);
	return t;
}

/* The same text for all ranks. */
T_TREE struct tree **t_world(const char *text, uint32_t world)
{
	struct tree **trees = t_alloc(world, sizeof *trees);

	for (uint32_t r = 0; r < world; r++)
		trees[r] = t_tree(text, r);
	return trees;
}

/* Prints a node in the words of t_tree: boxes instead of meshes. */
T_TREE void t_print(const struct tree *t, char *out, size_t max)
{
	size_t n = 0;
	char one[1024], box[2][128];

#define T_PUT(...) (n += (size_t)snprintf(out + n, n < max ? max - n : 0, __VA_ARGS__))
	out[0] = '\0';
	if (!t) {
		T_PUT("None");
	} else if (tree_is_container(t)) {
		T_PUT(t->kind == TREE_DICT ? "{" : t->kind == TREE_LIST ? "[" : "(");
		for (uint32_t i = 0; i < t->count; i++) {
			if (i)
				T_PUT(", ");
			if (t->kind == TREE_DICT && t->keys[i].is_int)
				T_PUT("%jd: ", (intmax_t)t->keys[i].index);
			else if (t->kind == TREE_DICT)
				T_PUT("%.*s: ", (int)t->keys[i].text.n, t->keys[i].text.p);
			t_print(t->children[i], one, sizeof one);
			T_PUT("%s", one);
		}
		T_PUT(t->kind == TREE_DICT ? "}" : t->kind == TREE_LIST ? "]" : ")");
	} else if (tree_is_tensor(t)) {
		T_PUT("%c %s %s", t->kind == TREE_TENSOR ? 'T' : t->kind == TREE_SHARDED ? 'S' : 'D', dtype_name(t->tensor.dtype),
		      box_print(t->tensor.ndim, t->tensor.shape, box[0], 128));
		for (uint32_t i = 0; t->kind != TREE_TENSOR && i < t->tensor.shard_count; i++)
			T_PUT(" %s+%s", box_print(t->tensor.ndim, t->tensor.shards[i].dims, box[0], 128),
			      box_print(t->tensor.ndim, t->tensor.shards[i].dims + t->tensor.ndim, box[1], 128));
	} else {
		T_PUT("%.*s", (int)t->value.bytes.n, t->value.bytes.p);
	}
#undef T_PUT
}

T_TREE void t_is(const struct tree *t, const char *want)
{
	char got[4096];

	t_print(t, got, sizeof got);
	assert_string_equal(got, want);
}

static inline bool t_holds(const struct tree *t, uint32_t shard, const int64_t *dims)
{
	int64_t scratch[2 * NDIM_MAX];
	uint32_t ndim = t->tensor.ndim;

	if (shard >= t->tensor.shard_count)
		return false;
	const int64_t *box = tree_shard_dims(&t->tensor, &t->tensor.shards[shard], scratch);
	for (uint32_t d = 0; d < ndim; d++)
		if (dims[d] < box[d] || dims[d] + dims[ndim + d] > box[d] + box[ndim + d])
			return false;
	return true;
}

/* Does rank r's tree have the node? */
T_TREE bool t_within(const struct tree *root, const struct tree *node)
{
	if (root == node)
		return true;
	for (uint32_t i = 0; root && tree_is_container(root) && i < root->count; i++)
		if (t_within(root->children[i], node))
			return true;
	return false;
}

/* Every element of every shard of the target is given once, or once by each of `members` ranks; nobody gives what it does not have. */
T_TREE void t_covered(const struct state_dict_op_plan *p, struct tree *const *source, uint32_t rank, const struct tree *node,
		      uint32_t members)
{
	uint32_t ndim = node->tensor.ndim;
	int64_t scratch[2 * NDIM_MAX];

	for (uint32_t s = 0; s < node->tensor.shard_count; s++) {
		const int64_t *box = tree_shard_dims(&node->tensor, &node->tensor.shards[s], scratch);
		uint64_t n = 1;
		for (uint32_t d = 0; d < ndim; d++)
			n *= (uint64_t)box[ndim + d];
		uint8_t *seen = t_alloc(n + 1, 1);
		for (uint64_t i = 0; i < p->move_count; i++) {
			const struct state_dict_op_move *m = &p->moves[i];
			if (m->to != node || m->to_shard != s || m->to_rank != rank)
				continue;
			assert_true(t_holds(m->to, s, m->dims) && t_holds(m->from, m->from_shard, m->dims));
			assert_true(t_within(source[m->from_rank], m->from));
			assert_int_equal(m->reduce > 0, members > 1);
			for (uint64_t e = 0; e < n; e++) {
				uint64_t rest = e;
				bool inside = true;
				for (uint32_t d = ndim; d-- > 0;) {
					int64_t at = box[d] + (int64_t)(rest % (uint64_t)box[ndim + d]);
					rest /= (uint64_t)box[ndim + d];
					inside &= at >= m->dims[d] && at < m->dims[d] + m->dims[ndim + d];
				}
				seen[e] = (uint8_t)(seen[e] + inside);
			}
		}
		for (uint64_t e = 0; e < n; e++)
			assert_int_equal(seen[e], members);
	}
}

/* The same for all tensors of a rank's target. */
T_TREE void t_all_covered(const struct state_dict_op_plan *p, struct tree *const *source, uint32_t rank, const struct tree *node)
{
	if (node && tree_is_tensor(node))
		t_covered(p, source, rank, node, 1);
	for (uint32_t i = 0; node && tree_is_container(node) && i < node->count; i++)
		t_all_covered(p, source, rank, node->children[i]);
}

/* cmocka's setup and teardown of one test. */
T_TREE int t_open(void **state)
{
	(void)state;
	t_arena = arena_new((uint64_t)1 << 34);
	t_at = 1;
	return t_arena ? 0 : -1;
}

T_TREE int t_close(void **state)
{
	(void)state;
	arena_free(t_arena);
	t_arena = NULL;
	return 0;
}

#define T_CASE(f) cmocka_unit_test_setup_teardown(f, t_open, t_close)

/* The error must name this path and rank (-1: any) and say this. */
T_TREE void t_names(const char *fqn, int64_t rank, const char *words)
{
	assert_string_equal(err_last()->fqn, fqn);
	if (rank >= 0)
		assert_int_equal(err_last()->rank, rank);
	if (!strstr(err_last()->text, words))
		T_FAIL("'%s' does not say '%s'", err_last()->text, words);
}
