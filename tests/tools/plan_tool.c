/* plan_tool.c: the planner behind JSON lines, so that tests can hold it against PyTorch's. One object in, one out:
 *
 *     {"op":"layout","world":4,"rules":[{"match":"*","mesh":[2,2],"ranks":[…],"placements":["Shard(0)","R"]} |
 *         {"match":"*","chunks":{"dim":0,"ranks":[0,1]}} | {"match":"*","boxes":[{"rank":0,"offsets":[],"sizes":[]}]}],
 *      "tensors":[{"fqn":"w","shape":[8,4]}]}                       → {"tensors":{"w":[[rank,[offsets],[sizes]],…]}}
 *     {"op":"parts","shape":[8,4],"mesh":[2,2],"placements":["Shard(0)","R"]}
 *         → {"parts":[{"size":[…],"boxes":[[[offsets],[sizes],[offsets in the local tensor]],…]} per rank, row by row]}
 *     {"op":"save","dedup":"lowest"|"balanced","tensors":[{"fqn","shape","chunks":[[rank,[offsets],[sizes]],…]}]}     → the same
 *     {"op":"load","source":[tensors],"target":[tensors]}           → {"reads":[[source chunk, …] per target chunk]}
 *
 * An error is {"error":"code","text":"…","fqn":"…"}. Input is a test's: wrong forms end the program. */
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>

#include "tensor/dtensor.h"
#include "plan/layout.h"
#include "plan/load_plan.h"
#include "plan/save_plan.h"
#include "tensor/box.h"

#define CAP (256ull << 20)
static const struct sd_loc nowhere = { .file = SD_NO_FILE };

static void need(bool cond, const char *what)
{
	if (cond)
		return;
	fprintf(stderr, "plan_tool: %s\n", what);
	exit(2);
}

static void *zalloc(size_t n, size_t size)
{
	void *p = calloc(n ? n : 1, size);

	need(p != NULL, "out of memory");
	return p;
}

static int64_t *ints(json_t *a, uint32_t *count)
{
	need(json_is_array(a), "a list of numbers is missing");
	int64_t *v = zalloc(json_array_size(a), sizeof *v);

	*count = (uint32_t)json_array_size(a);
	for (uint32_t i = 0; i < *count; i++)
		v[i] = json_integer_value(json_array_get(a, i));
	return v;
}

static uint32_t *ranks_of(json_t *a, uint32_t *count)
{
	if (!a)
		return NULL;
	int64_t *v = ints(a, count);
	uint32_t *r = zalloc(*count, sizeof *r);

	for (uint32_t i = 0; i < *count; i++)
		r[i] = (uint32_t)v[i];
	free(v);
	return r;
}

/* offsets then sizes, from two lists */
static int64_t *dims_of(json_t *offsets, json_t *sizes, uint32_t *ndim)
{
	uint32_t n, m;
	int64_t *o = ints(offsets, &n), *s = ints(sizes, &m), *d = zalloc((size_t)n + m, sizeof *d);

	need(n == m && n <= NDIM_MAX, "offsets and sizes differ in length");
	for (uint32_t i = 0; i < n; i++) {
		d[i] = o[i];
		d[n + i] = s[i];
	}
	free(o);
	free(s);
	*ndim = n;
	return d;
}

static enum err read_mesh(json_t *j, struct layout_rule *r)
{
	json_t *p = json_object_get(j, "placements");
	struct placement *placements = zalloc(json_array_size(p), sizeof *placements);

	r->placement_count = (uint32_t)json_array_size(p);
	r->placements = placements;
	if (json_object_get(j, "mesh"))
		r->mesh = ints(json_object_get(j, "mesh"), &r->mesh_ndim);
	r->ranks = ranks_of(json_object_get(j, "ranks"), &r->rank_count);
	for (uint32_t i = 0; i < r->placement_count; i++)
		TRY(placement_parse(str_of(json_string_value(json_array_get(p, i))), &placements[i]));
	return OK;
}

static enum err read_rule(json_t *j, struct layout_rule *r)
{
	json_t *chunks = json_object_get(j, "chunks"), *boxes = json_object_get(j, "boxes");

	*r = (struct layout_rule){ .match = str_of(json_string_value(json_object_get(j, "match"))) };
	if (chunks) {
		r->kind = LAYOUT_CHUNKS;
		r->chunk_dim = (int32_t)json_integer_value(json_object_get(chunks, "dim"));
		r->ranks = ranks_of(json_object_get(chunks, "ranks"), &r->rank_count);
		return OK;
	}
	if (!boxes)
		return read_mesh(j, r);
	struct layout_box *b = zalloc(json_array_size(boxes), sizeof *b);
	r->kind = LAYOUT_BOXES;
	r->boxes = b;
	r->box_count = (uint32_t)json_array_size(boxes);
	for (uint32_t i = 0; i < r->box_count; i++) {
		json_t *x = json_array_get(boxes, i);
		b[i].rank = (uint32_t)json_integer_value(json_object_get(x, "rank"));
		b[i].dims = dims_of(json_object_get(x, "offsets"), json_object_get(x, "sizes"), &b[i].ndim);
	}
	return OK;
}

static enum err read_tensors(json_t *list, const struct layout *layout, struct sdict **out)
{
	json_t *j;
	size_t i, k;

	TRY(sdict_new(CAP, out));
	json_array_foreach(list, i, j) {
		uint32_t t, ndim, matched;
		int64_t *shape = ints(json_object_get(j, "shape"), &ndim);
		json_t *c;

		TRY(sdict_add_tensor(*out, str_of(json_string_value(json_object_get(j, "fqn"))), DT_FLOAT32, ndim, shape, &t));
		free(shape);
		if (layout)
			TRY(layout_apply(layout, *out, t, &matched));
		json_array_foreach(json_object_get(j, "chunks"), k, c) {
			uint32_t n;
			int64_t *d = dims_of(json_array_get(c, 1), json_array_get(c, 2), &n);
			need(n == ndim, "a chunk has other dims than its tensor");
			TRY(sdict_add_chunk(*out, t, d, (uint32_t)json_integer_value(json_array_get(c, 0)), nowhere));
			free(d);
		}
	}
	return OK;
}

static json_t *int_list(uint32_t n, const int64_t *v)
{
	json_t *a = json_array();

	for (uint32_t i = 0; i < n; i++)
		json_array_append_new(a, json_integer(v[i]));
	return a;
}

static json_t *show_chunks(const struct sdict *sd)
{
	json_t *all = json_object();

	for (uint64_t i = 0; i < sd->tensor_count; i++) {
		const struct sd_tensor *t = &sd->tensors[i];
		json_t *list = json_array();
		for (uint64_t k = t->first_chunk; k < t->first_chunk + t->chunk_count; k++) {
			const struct sd_chunk *c = &sd->chunks[k];
			json_array_append_new(list, json_pack("[I,o,o]", (json_int_t)c->rank, int_list(t->ndim, c->dims),
							      int_list(t->ndim, c->dims + t->ndim)));
		}
		json_object_setn_new(all, t->fqn.p, t->fqn.n, list);
	}
	return json_pack("{s:o}", "tensors", all);
}

static enum err do_layout(json_t *in, json_t **out)
{
	CLEANUP(sdict_free_ptr) struct sdict *sd = NULL;
	json_t *rules = json_object_get(in, "rules"), *j;
	struct layout_rule *r = zalloc(json_array_size(rules), sizeof *r);
	struct layout l = { r, (uint32_t)json_array_size(rules), (uint32_t)json_integer_value(json_object_get(in, "world")) };
	size_t i;

	json_array_foreach(rules, i, j)
		TRY(read_rule(j, &r[i]));
	TRY(layout_check(&l));
	TRY(read_tensors(json_object_get(in, "tensors"), &l, &sd));
	*out = show_chunks(sd);
	return OK;
}

static json_t *show_part(const struct dtensor_part *part)
{
	json_t *boxes = json_array();
	int64_t dims[2 * NDIM_MAX], local[NDIM_MAX];

	for (uint64_t i = 0; i < part->count; i++) {
		dtensor_part_box(part, i, dims, local);
		json_array_append_new(boxes, json_pack("[o,o,o]", int_list(part->ndim, dims), int_list(part->ndim, dims + part->ndim),
						       int_list(part->ndim, local)));
	}
	return json_pack("{s:o,s:o}", "size", int_list(part->ndim, part->sizes), "boxes", boxes);
}

static enum err do_parts(json_t *in, json_t **out)
{
	CLEANUP(dtensor_part_free) struct dtensor_part part = { 0 };
	struct layout_rule r = { .match = STR("*") };
	json_t *parts = json_array();
	uint32_t ndim, ranks = 1;
	int64_t *shape = ints(json_object_get(in, "shape"), &ndim), coord[MESH_DIMS_MAX];

	*out = json_pack("{s:o}", "parts", parts);
	TRY(read_mesh(in, &r));
	for (uint32_t m = 0; m < r.mesh_ndim; m++)
		ranks *= (uint32_t)r.mesh[m];
	TRY(layout_check_in_memory(&(struct layout){ &r, 1, ranks }));
	for (uint32_t i = 0; i < ranks; i++) {
		uint32_t rest = i;
		for (uint32_t m = r.mesh_ndim; m-- > 0; rest /= (uint32_t)r.mesh[m])
			coord[m] = rest % r.mesh[m];
		TRY(dtensor_part_make(ndim, shape, r.mesh_ndim, r.mesh, coord, r.placements, &part));
		json_array_append_new(parts, show_part(&part));
	}
	free(shape);
	return OK;
}

static enum err do_save(json_t *in, json_t **out)
{
	CLEANUP(sdict_free_ptr) struct sdict *sd = NULL;
	CLEANUP(sdict_free_ptr) struct sdict *plan = NULL;
	const char *how = json_string_value(json_object_get(in, "dedup"));
	struct save_plan_stats stats;

	TRY(read_tensors(json_object_get(in, "tensors"), NULL, &sd));
	TRY(save_plan_make(sd, how && !strcmp(how, "lowest") ? DEDUP_LOWEST_RANK : DEDUP_BALANCED, CAP, &plan, &stats));
	TRY(save_plan_validate(plan));
	*out = show_chunks(plan);
	return OK;
}

static enum err do_load(json_t *in, json_t **out)
{
	CLEANUP(sdict_free_ptr) struct sdict *source = NULL;
	CLEANUP(sdict_free_ptr) struct sdict *target = NULL;
	CLEANUP(arena_free_ptr) struct arena *arena = arena_new(CAP);
	struct load_match match = { .strict = true };
	struct load_plan plan;
	json_t *reads = json_array();

	*out = json_pack("{s:o}", "reads", reads);
	TRY(read_tensors(json_object_get(in, "source"), NULL, &source));
	TRY(read_tensors(json_object_get(in, "target"), NULL, &target));
	TRY(load_plan_make(source, target, &match, arena, &plan));
	for (uint64_t i = 0; i < target->chunk_count; i++) {
		json_t *list = json_array();
		for (uint64_t k = plan.first[i]; k < plan.first[i + 1]; k++)
			json_array_append_new(list, json_integer(plan.sources[k]));
		json_array_append_new(reads, list);
	}
	return OK;
}

int main(void)
{
	char *line = NULL;
	size_t cap = 0;

	while (getline(&line, &cap, stdin) > 0) {
		json_t *in = json_loads(line, 0, NULL), *out = NULL;
		need(in != NULL, "not a line of JSON");
		const char *op = json_string_value(json_object_get(in, "op"));
		need(op != NULL, "no op");
		enum err e = !strcmp(op, "layout") ? do_layout(in, &out) : !strcmp(op, "save") ? do_save(in, &out) :
			     !strcmp(op, "parts") ? do_parts(in, &out) : do_load(in, &out);
		if (e) {
			json_decref(out);
			out = json_pack("{s:s,s:s,s:s}", "error", err_code_name(e), "text", err_last()->text, "fqn", err_last()->fqn);
		}
		json_dumpf(out, stdout, JSON_COMPACT);
		printf("\n");
		fflush(stdout);
		json_decref(out);
		json_decref(in);
	}
	free(line);
	return 0;
}
