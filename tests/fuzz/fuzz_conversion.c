/* fuzz_conversion.c: bytes → the JSON of a request → conversion rules → applied to a small state dict. What comes out must be boxes inside
 * their tensors whose elements lie inside their stored chunks, as many of them as the tensor has. */
#include "lib/plan_cases.h"
#include "plan/convert.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { INPUT_MAX = 16 << 10, VIEWS_CHECKED = 1 << 16 };

static void add(struct sdict *sd, const char *fqn, enum dtype d, uint32_t ndim, const int64_t *shape)
{
	int64_t dims[2][8] = { { 0 }, { 0 } };
	uint32_t index;

	CASE_CHECK(sdict_add_tensor(sd, str_of(fqn), d, ndim, shape, &index) == OK);
	for (uint32_t i = 0; i < ndim; i++)
		dims[0][ndim + i] = dims[1][ndim + i] = shape[i];
	if (ndim && shape[0] > 1) {
		dims[0][ndim] = dims[1][0] = shape[0] / 2;
		dims[1][ndim] = shape[0] - shape[0] / 2;
		CASE_CHECK(sdict_add_chunk(sd, index, dims[1], 0, (struct sd_loc){ 0 }) == OK);
	}
	CASE_CHECK(sdict_add_chunk(sd, index, dims[0], 0, (struct sd_loc){ 0 }) == OK);
}

static void check_view(const struct sdict *from, const struct sd_tensor *t, const struct view *v, uint64_t *elements)
{
	const int64_t *size = v->dims + t->ndim, *stride = size + t->ndim;
	int64_t last = v->first;
	uint64_t numel = 0, stored = 0;

	CASE_CHECK(box_inside(t->ndim, v->dims, size, t->shape) && box_numel(t->ndim, size, &numel) == OK && numel > 0);
	*elements += numel;
	if (v->source == VIEW_ZEROS)
		return;
	CASE_CHECK(v->source < from->chunk_count);
	const struct sd_chunk *c = &from->chunks[v->source];
	CASE_CHECK(box_numel(from->tensors[c->tensor].ndim, sd_sizes(c, from->tensors[c->tensor].ndim), &stored) == OK);
	for (uint32_t d = 0; d < t->ndim; d++)
		last += (size[d] - 1) * stride[d];
	CASE_CHECK(v->first >= 0 && last >= v->first && (uint64_t)last < stored);
}

static void check(const struct sdict *from, const struct converted *out)
{
	for (uint64_t i = 0; i < out->sd->tensor_count; i++) {
		const struct sd_tensor *t = &out->sd->tensors[i];
		uint64_t want = 0, elements = 0;
		CASE_CHECK(box_numel(t->ndim, t->shape, &want) == OK);
		if (t->chunk_count > VIEWS_CHECKED)
			continue;
		for (uint64_t k = t->first_chunk; k < t->first_chunk + t->chunk_count; k++)
			check_view(from, t, &out->views[k], &elements);
		CASE_CHECK(elements == want);
	}
}

static void apply(const struct conversion *c)
{
	struct sdict *sd = NULL;
	struct converted out;
	uint32_t index;

	CASE_CHECK(sdict_new(UINT64_MAX, &sd) == OK);
	CASE_CHECK(sdict_add_file(sd, STR("f"), 0, &index) == OK);
	add(sd, "e.0.w", DT_FLOAT32, 2, (const int64_t[]){ 6, 4 });
	add(sd, "e.1.w", DT_FLOAT32, 2, (const int64_t[]){ 6, 4 });
	add(sd, "m.weight", DT_INT8, 3, (const int64_t[]){ 2, 3, 5 });
	add(sd, "m.SCB", DT_FLOAT32, 1, (const int64_t[]){ 7 });
	add(sd, "s", DT_BFLOAT16, 0, NULL);
	add(sd, "z", DT_FLOAT16, 2, (const int64_t[]){ 0, 3 });
	CASE_CHECK(sdict_add_value(sd, STR("lr"), 0, (struct sd_loc){ .length = 4 }, &index) == OK);
	struct convert_source sources[1 + 16] = { { 0 } };
	for (uint32_t i = 0; i < sizeof sources / sizeof *sources; i++) /* the others are the same, under its numbers */
		sources[i] = (struct convert_source){ sd, NULL, 0 };
	uint32_t others = 0;
	for (uint32_t i = 0; i < c->count; i++)
		others += c->rules[i].kind == CONVERT_FROM;
	if (others < sizeof sources / sizeof *sources) {
		if (convert(c, sources, &out) == OK)
			check(sd, &out);
		convert_free(&out);
	}
	sdict_free(sd);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct arena *a = arena_new(1 << 20);
	struct conversion c;
	json_t *doc = NULL;

	if (a && size <= INPUT_MAX && jval_parse((struct str){ (const char *)data, size }, &doc) == OK) {
		struct jval root = JVAL_ROOT(doc), transform = jval_get(&root, "transform"), vars = jval_get(&root, "vars");
		if (conversion_read(&transform, &vars, a, &c) == OK)
			apply(&c);
	}
	json_decref(doc);
	arena_free(a);
	return 0;
}
