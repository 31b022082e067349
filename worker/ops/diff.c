/* diff.c: how two checkpoints or state dicts differ: keys, kinds, dtypes, shapes, then values, chunk by chunk of a, whatever the two
 * layouts are. */
#include <stdio.h>
#include <string.h>

#include "base/jtext.h"
#include "base/num.h"
#include "plan/load_plan.h"
#include "plan/save_plan.h"
#include "runner/build.h"
#include "runner/gang_run.h"
#include "runner/input.h"
#include "runner/target.h"

enum { DIFFERENCES_MAX = 10000, TEXT_MAX = 200 };

struct diff {
	struct job *job;
	struct input a, b;
	struct spec_view view_a, view_b;
	struct sdict *plan_a, *common; /* a without replicas; of it, the tensors that both have in one form */
	struct arena *arena;
	struct run_build build;
	uint32_t *map_a, *map_b;
	json_t *list;
	uint64_t count;
};

/* The entry, or NULL when the list is long enough: differences are counted on. */
static json_t *put(struct diff *d, struct str fqn, const char *what, json_t *a, json_t *b)
{
	d->count++;
	if (json_array_size(d->list) >= DIFFERENCES_MAX) {
		json_decref(a);
		json_decref(b);
		return NULL;
	}
	json_t *path = json_stringn(fqn.p, fqn.n);
	json_t *entry = json_pack("{s:o, s:s, s:o, s:o}", "path", path ? path : json_string("?"), "what", what, "a",
				  a ? a : json_null(), "b", b ? b : json_null());
	json_array_append_new(d->list, entry);
	return entry;
}

static json_t *shape_doc(const struct sd_tensor *t)
{
	json_t *list = json_array();

	for (uint32_t i = 0; i < t->ndim; i++)
		json_array_append_new(list, json_integer(t->shape[i]));
	return list;
}

static bool same_shape(const struct sd_tensor *a, const struct sd_tensor *b)
{
	return a->ndim == b->ndim && (a->ndim == 0 || memcmp(a->shape, b->shape, a->ndim * sizeof *a->shape) == 0);
}

static FALLIBLE enum err keep_common(struct diff *d, const struct sd_tensor *t)
{
	const struct sdict *from = d->plan_a;
	uint32_t index;

	TRY(sdict_add_tensor(d->common, t->fqn, t->dtype, t->ndim, t->shape, &index));
	for (uint64_t c = t->first_chunk; c < t->first_chunk + t->chunk_count; c++)
		TRY(sdict_add_chunk(d->common, index, from->chunks[c].dims, from->chunks[c].rank, from->chunks[c].loc));
	return OK;
}

static FALLIBLE enum err compare_tensors(struct diff *d)
{
	const struct sdict *a = d->plan_a, *b = d->b.sd;

	TRY(sdict_copy_files(d->common, a));
	for (uint64_t i = 0; i < a->tensor_count; i++) {
		const struct sd_tensor *t = &a->tensors[i], *u = sdict_tensor(b, t->fqn);
		if (!u && sdict_value(b, t->fqn))
			put(d, t->fqn, "kind", json_string("tensor"), json_string("value"));
		else if (!u)
			put(d, t->fqn, "missing", json_string(dtype_name(t->dtype)), NULL);
		else if (!same_shape(t, u))
			put(d, t->fqn, "shape", shape_doc(t), shape_doc(u));
		else if (t->dtype != u->dtype)
			put(d, t->fqn, "dtype", json_string(dtype_name(t->dtype)), json_string(dtype_name(u->dtype)));
		else
			TRY(keep_common(d, t));
	}
	for (uint64_t i = 0; i < b->tensor_count; i++) {
		const struct sd_tensor *u = &b->tensors[i];
		if (!sdict_tensor(a, u->fqn) && !sdict_value(a, u->fqn))
			put(d, u->fqn, "missing", NULL, json_string(dtype_name(u->dtype)));
	}
	return OK;
}

/* JSON text, or what can be said of it. */
static json_t *value_doc(const struct item_value *v)
{
	if (v->kind == ITEM_VALUE_JSON) {
		json_t *doc;
		enum err e = jtext_parse((struct str){ (char *)v->text.p, v->text.len }, JSON_DECODE_ANY | JSON_ALLOW_NUL, &doc);
		return e ? json_string("?") : doc;
	}
	if (v->kind == ITEM_VALUE_BYTES)
		return json_sprintf("%zu bytes", v->text.len);
	return json_sprintf("<%.*s>", (int)num_min(v->text.len, TEXT_MAX), (char *)v->text.p);
}

static bool same_value(struct str a, struct str b)
{
	struct item_source x = source_memory(&a), y = source_memory(&b);

	return str_eq(a, b) || item_same_value(&x, &y);
}

static FALLIBLE enum err compare_value(struct diff *d, const struct sd_value *a, const struct sd_value *b)
{
	struct item_value va = { 0 }, vb = { 0 };
	void *pa = NULL, *pb = NULL;
	uint64_t na = 0, nb = 0;

	enum err e = input_value(&d->a, a, &pa, &na);
	if (!e)
		e = input_value(&d->b, b, &pb, &nb);
	bool same = !e && same_value((struct str){ pa, na }, (struct str){ pb, nb });
	if (!e && !same)
		e = input_at_value(&d->a, a, input_item_value(pa, na, &va));
	if (!e && !same)
		e = input_at_value(&d->b, b, input_item_value(pb, nb, &vb));
	struct str ta = { (char *)va.text.p, va.text.len }, tb = { (char *)vb.text.p, vb.text.len };
	if (!e && !same && (va.kind != vb.kind || va.kind == ITEM_VALUE_OPAQUE || !str_eq(ta, tb)))
		put(d, a->fqn, "value", value_doc(&va), value_doc(&vb));
	item_value_free(&va);
	item_value_free(&vb);
	mem_free(pa);
	mem_free(pb);
	return e;
}

static FALLIBLE enum err compare_values(struct diff *d)
{
	const struct sdict *a = d->plan_a, *b = d->b.sd;

	for (uint64_t i = 0; i < a->value_count; i++) {
		const struct sd_value *v = &a->values[i], *u = sdict_value(b, v->fqn);
		if (!u && sdict_tensor(b, v->fqn))
			put(d, v->fqn, "kind", json_string("value"), json_string("tensor"));
		else if (!u)
			put(d, v->fqn, "missing", json_string("value"), NULL);
		else
			TRY(compare_value(d, v, u));
		TRY(job_tick(d->job));
	}
	for (uint64_t i = 0; i < b->value_count; i++) {
		const struct sd_value *u = &b->values[i];
		if (!sdict_tensor(a, u->fqn) && !sdict_value(a, u->fqn))
			put(d, u->fqn, "missing", NULL, json_string("value"));
	}
	return OK;
}

/* Coordinates in the whole tensor of element `linear` of a chunk. */
static json_t *global_index(const struct sd_chunk *c, uint32_t ndim, uint64_t linear)
{
	json_t *list = json_array();

	for (uint32_t i = ndim; i-- > 0;) {
		int64_t size = sd_sizes(c, ndim)[i];
		json_array_insert_new(list, 0, json_integer(sd_offsets(c)[i] + (int64_t)(linear % (uint64_t)size)));
		linear /= (uint64_t)size;
	}
	return list;
}

static json_t *real_doc(double v)
{
	json_t *doc = json_real(v);

	return doc ? doc : json_string(v != v ? "nan" : "inf");
}

static double largest(double so_far, uint64_t bits)
{
	double v;

	memcpy(&v, &bits, sizeof v);
	return v > so_far || v != v ? v : so_far;
}

/* Differences are noted per chunk; one entry per tensor is made of them. */
static void report_tensor(struct diff *d, const struct run_src *srcs, const struct sd_tensor *t)
{
	const struct sd_chunk *first = NULL;
	uint64_t count = 0, element = 0;
	double max_abs = 0, max_rel = 0;

	for (uint64_t c = t->first_chunk; c < t->first_chunk + t->chunk_count; c++) {
		uint64_t n = atomic_load(&srcs[c].diff_count);
		if (n && !first) {
			first = &d->common->chunks[c];
			element = atomic_load(&srcs[c].diff_first) - 1;
		}
		count += n;
		max_abs = largest(max_abs, atomic_load(&srcs[c].diff_max_abs));
		max_rel = largest(max_rel, atomic_load(&srcs[c].diff_max_rel));
	}
	json_t *entry = count ? put(d, t->fqn, "values", NULL, NULL) : NULL;
	if (!entry)
		return;
	json_object_set_new(entry, "count", json_integer((json_int_t)count));
	json_object_set_new(entry, "max_abs", real_doc(max_abs));
	json_object_set_new(entry, "max_rel", real_doc(max_rel));
	json_object_set_new(entry, "first_index", global_index(first, t->ndim, element));
}

static FALLIBLE enum err compare_bytes(struct diff *d)
{
	struct load_match match = { .strict = true };
	struct run run = { .fd = -1 };
	struct load_plan plan;
	uint32_t first_a, first_b;

	TRY(load_plan_make(d->b.sd, d->common, &match, d->arena, &plan));
	TRY(input_add_files(&d->a, &d->build, false, &d->map_a));
	TRY(input_add_files(&d->b, &d->build, false, &d->map_b));
	TRY(build_sources(&d->build, d->common, input_kind(&d->a), d->map_a, input_manifest(&d->a), &first_a));
	TRY(build_sources(&d->build, d->b.sd, input_kind(&d->b), d->map_b, input_manifest(&d->b), &first_b));
	d->build.opts.rtol = d->job->spec.rtol;
	d->build.opts.atol = d->job->spec.atol;
	d->build.opts.verify = input_verifies(d->job);
	TRY(build_diff(&d->build, d->common, first_a, first_b, &plan));
	TRY(run_share(&d->build, &run));
	run_build_free(&d->build);
	enum err e = job_state(d->job, "running", "compare", NULL, run_bytes_total(&run));
	if (!e)
		e = gang_run(d->job, &run);
	if (!e) {
		for (uint64_t i = 0; i < d->common->tensor_count; i++)
			report_tensor(d, run.srcs + first_a, &d->common->tensors[i]);
		json_object_set_new(d->job->result, "compared_bytes", json_integer((json_int_t)run_bytes_total(&run)));
		run_checked(&run, &d->job->checked);
	}
	run_detach(&run);
	return e;
}

static FALLIBLE enum err diff(struct diff *d)
{
	struct save_plan_stats stats;

	d->job->result = json_object();
	d->list = json_array();
	d->arena = arena_new(UINT64_MAX);
	NEED(d->job->result && d->list && d->arena, "no memory for a plan");
	json_object_set(d->job->result, "differences", d->list);
	TRY(job_state(d->job, "planning", "metadata", NULL, 0));
	TRY(input_open(d->job, &d->job->spec.a, &d->a));
	TRY(input_open(d->job, &d->job->spec.b, &d->b));
	TRY(input_undo_transforms(d->job, &d->a, false));
	TRY(input_undo_transforms(d->job, &d->b, false));
	TRY(input_select(&d->a, &d->job->spec, &d->view_a));
	TRY(input_select(&d->b, &d->job->spec, &d->view_b));
	TRY(save_plan_make(d->a.sd, DEDUP_LOWEST_RANK, UINT64_MAX, &d->plan_a, &stats));
	TRY(save_plan_validate(d->plan_a)); /* what no chunk holds would not be compared, and count as equal */
	TRY(sdict_new(UINT64_MAX, &d->common));
	TRY(compare_tensors(d));
	TRY(compare_values(d));
	if (!d->job->dry_run)
		TRY(compare_bytes(d));
	if (d->a.checkpoint || d->b.checkpoint)
		checked_report(&d->job->checked, d->job->result);
	json_object_set_new(d->job->result, "equal", json_boolean(d->count == 0));
	json_object_set_new(d->job->result, "difference_count", json_integer((json_int_t)d->count));
	return OK;
}

enum err diff_job(struct job *j)
{
	struct diff d = { .job = j };

	enum err e = diff(&d);
	run_build_free(&d.build);
	mem_free(d.map_a);
	mem_free(d.map_b);
	sdict_free(d.plan_a);
	sdict_free(d.common);
	arena_free(d.arena);
	input_close(&d.a);
	input_close(&d.b);
	spec_view_free(&d.view_a);
	spec_view_free(&d.view_b);
	json_decref(d.list);
	return e;
}
