/* spec_layout.c: layout rules from a request's JSON (see spec.h). */
#include "runner/spec.h"

#include "base/num.h"
#include "tensor/box.h"

enum { LAYOUT_ARENA = 64 << 20, RULES_MAX = 10000 };

void spec_layout_free(struct spec_layout *l)
{
	for (uint32_t i = 0; i < l->like_count; i++)
		checkpoint_free(l->likes[i]);
	arena_free(l->arena);
	*l = (struct spec_layout){ 0 };
}

static FALLIBLE enum err read_ints(struct arena *a, const json_t *list, int64_t **out, uint32_t *count_out)
{
	size_t n = json_array_size(list);

	TRY(arena_i64(a, n, out));
	for (size_t i = 0; i < n; i++)
		(*out)[i] = json_integer_value(json_array_get(list, i));
	*count_out = (uint32_t)n;
	return OK;
}

static FALLIBLE enum err read_ranks(struct arena *a, const json_t *list, struct layout_rule *rule)
{
	size_t n = json_array_size(list);
	uint32_t *ranks;

	if (n == 0)
		return OK;
	TRY(arena_alloc(a, n, sizeof *ranks, &ranks));
	for (size_t i = 0; i < n; i++) {
		json_int_t r = json_integer_value(json_array_get(list, i));
		if (r < 0 || r > UINT32_MAX - 1)
			return ERR(LAYOUT_INVALID, "rank %jd", (intmax_t)r);
		ranks[i] = (uint32_t)r;
	}
	rule->ranks = ranks;
	rule->rank_count = (uint32_t)n;
	return OK;
}

static FALLIBLE enum err read_names(struct arena *a, const json_t *list, struct layout_rule *rule)
{
	size_t n = json_array_size(list), dims = rule->mesh_ndim ? rule->mesh_ndim : 1;
	struct str *names;

	if (n == 0)
		return OK;
	if (n != dims)
		return ERR(LAYOUT_INVALID, "%zu names for %zu mesh dims", n, dims);
	TRY(arena_alloc(a, n, sizeof *names, &names));
	for (size_t i = 0; i < n; i++) {
		const char *text = json_string_value(json_array_get(list, i));
		TRY(arena_str(a, str_of(text ? text : ""), &names[i]));
	}
	rule->dim_names = names;
	return OK;
}

static FALLIBLE enum err read_mesh(struct arena *a, const json_t *j, struct layout_rule *rule)
{
	const json_t *list = json_object_get(j, "placements");
	size_t n = json_array_size(list);
	struct placement *p;
	int64_t *mesh;

	rule->kind = LAYOUT_MESH;
	if (json_object_get(j, "mesh")) {
		TRY(read_ints(a, json_object_get(j, "mesh"), &mesh, &rule->mesh_ndim));
		rule->mesh = mesh;
	}
	TRY(read_ranks(a, json_object_get(j, "ranks"), rule));
	TRY(read_names(a, json_object_get(j, "dim_names"), rule));
	TRY(arena_alloc(a, n, sizeof *p, &p));
	for (size_t i = 0; i < n; i++) {
		const char *text = json_string_value(json_array_get(list, i));
		TRY(placement_parse(str_of(text ? text : ""), &p[i]));
	}
	rule->placements = p;
	rule->placement_count = (uint32_t)n;
	return OK;
}

static FALLIBLE enum err read_box(struct arena *a, const json_t *j, struct layout_box *box)
{
	const json_t *off = json_object_get(j, "offsets"), *size = json_object_get(j, "sizes");
	size_t n = json_array_size(off);
	int64_t *dims;

	if (n != json_array_size(size) || n > NDIM_MAX)
		return ERR(LAYOUT_INVALID, "a box with %zu offsets and %zu sizes", n, json_array_size(size));
	TRY(arena_i64(a, 2 * n, &dims));
	for (size_t i = 0; i < n; i++) {
		dims[i] = json_integer_value(json_array_get(off, i));
		dims[n + i] = json_integer_value(json_array_get(size, i));
	}
	*box = (struct layout_box){ (uint32_t)json_integer_value(json_object_get(j, "rank")), (uint32_t)n, dims };
	return OK;
}

static FALLIBLE enum err read_boxes(struct arena *a, const json_t *list, struct layout_rule *rule)
{
	size_t n = json_array_size(list);
	struct layout_box *boxes;

	rule->kind = LAYOUT_BOXES;
	TRY(arena_alloc(a, n, sizeof *boxes, &boxes));
	for (size_t i = 0; i < n; i++)
		TRY(read_box(a, json_array_get(list, i), &boxes[i]));
	rule->boxes = boxes;
	rule->box_count = (uint32_t)n;
	return OK;
}

static FALLIBLE enum err read_like(struct worker *w, const char *ref, struct spec_layout *l, struct layout_rule *rule)
{
	const char *colon = strchr(ref, ':');
	struct str storage;

	rule->kind = LAYOUT_LIKE;
	if (!colon)
		return ERR(LAYOUT_INVALID, "like '%s' is no reference", ref);
	if (l->like_count == sizeof l->likes / sizeof *l->likes)
		return ERR(LIMIT_EXCEEDED, "more than %u rules with like", l->like_count);
	TRY(arena_str(l->arena, (struct str){ ref, (size_t)(colon - ref) }, &storage));
	const struct ref other = ref_checkpoint(storage.p, colon + 1);
	TRY(checkpoint_open(&w->stores, &other, &l->likes[l->like_count]));
	rule->like = l->likes[l->like_count++]->sd;
	return OK;
}

static FALLIBLE enum err read_rule(struct worker *w, const json_t *j, struct spec_layout *l, struct layout_rule *rule)
{
	const json_t *chunks = json_object_get(j, "chunks"), *boxes = json_object_get(j, "boxes");
	const char *like = json_string_value(json_object_get(j, "like"));
	const char *match = json_string_value(json_object_get(j, "match"));

	TRY(arena_str(l->arena, str_of(match ? match : "*"), &rule->match));
	rule->optional = json_is_true(json_object_get(j, "optional"));
	if (like)
		return read_like(w, like, l, rule);
	if (boxes)
		return read_boxes(l->arena, boxes, rule);
	if (chunks) {
		rule->kind = LAYOUT_CHUNKS;
		rule->chunk_dim = (int32_t)json_integer_value(json_object_get(chunks, "dim"));
		return read_ranks(l->arena, json_object_get(chunks, "ranks"), rule);
	}
	return read_mesh(l->arena, j, rule);
}

/* A rule that cannot be understood is named. */
static FALLIBLE enum err read_rule_at(struct worker *w, const json_t *j, size_t at, struct spec_layout *l,
				      struct layout_rule *rule)
{
	enum err e = read_rule(w, j, l, rule);
	struct err_info was = *err_last();

	if (e == ERR_LAYOUT_INVALID)
		err_record(e, 0, was.place, "rule %zu ('%.*s'): %s", at, (int)num_min(rule->match.n, 100), rule->match.p,
			   was.text);
	return e;
}

static FALLIBLE enum err read_all(struct worker *w, const json_t *list, uint32_t world_size, struct spec_layout *out)
{
	size_t n = json_array_size(list);
	struct layout_rule *rules;

	*out = (struct spec_layout){ .arena = arena_new(LAYOUT_ARENA) };
	if (!out->arena)
		return ERR(NO_MEMORY, "no memory for a layout");
	if (n > RULES_MAX)
		return ERR(LIMIT_EXCEEDED, "%zu layout rules", n);
	TRY(arena_alloc(out->arena, n, sizeof *rules, &rules));
	for (size_t i = 0; i < n; i++)
		TRY(read_rule_at(w, json_array_get(list, i), i, out, &rules[i]));
	out->layout = (struct layout){ rules, (uint32_t)n, world_size };
	return OK;
}

enum err spec_layout_read(struct worker *w, const json_t *list, uint32_t world_size, struct spec_layout *out)
{
	TRY(read_all(w, list, world_size, out));
	return layout_check(&out->layout);
}

enum err spec_layout_read_in_memory(struct worker *w, const json_t *list, uint32_t world_size, struct spec_layout *out)
{
	TRY(read_all(w, list, world_size, out));
	return layout_check_in_memory(&out->layout);
}
