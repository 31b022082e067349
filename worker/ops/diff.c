/* diff.c: how two checkpoints or state dicts differ: keys, kinds, dtypes, shapes, then values, chunk by chunk of a, whatever the two
 * layouts and formats are. Tensors that the digests on record prove equal are not read (options.read_all: they are): two steps of one
 * training share what is frozen. Only whole tensors are left out, so that the figures of the others are of all their elements. */
#include <string.h>

#include "base/jtext.h"
#include "base/num.h"
#include "plan/load_plan.h"
#include "ops/diff_impl.h"
#include "plan/save_plan.h"
#include "runner/gang_run.h"
#include "tensor/cast.h"

enum { DIFFERENCES_MAX = 10000, TEXT_MAX = 200 };

json_t *diff_put(struct diff *d, struct str fqn, const char *what, json_t *a, json_t *b)
{
	d->count++;
	if (json_array_size(d->list) >= DIFFERENCES_MAX) {
		json_decref(a);
		json_decref(b);
		return NULL;
	}
	json_t *entry = json_pack("{s:o, s:s, s:o, s:o}", "path", jtext_value(fqn), "what", what, "a", a ? a : json_null(), "b",
				  b ? b : json_null());
	json_array_append_new(d->list, entry);
	return entry;
}

static struct manifest_range range_of(const struct input *from, const struct sdict *sd, struct sd_loc loc)
{
	return (struct manifest_range){ input_manifest(from), sd->files[loc.file].name, loc.offset, loc.length };
}

/* Are all chunks of both sides cut alike, and their digests on record equal? */
static bool same_by_digest(const struct diff *d, const struct sd_tensor *t)
{
	const struct sd_tensor *u = d->plan_b ? sdict_tensor(d->plan_b, t->fqn) : NULL;

	if (!u || t->chunk_count == 0 || t->chunk_count != u->chunk_count)
		return false;
	for (uint32_t i = 0; i < t->chunk_count; i++) {
		const struct sd_chunk *x = &d->plan_a->chunks[t->first_chunk + i], *y = &d->plan_b->chunks[u->first_chunk + i];
		struct manifest_range rx = range_of(&d->a, d->plan_a, x->loc), ry = range_of(&d->b, d->plan_b, y->loc);
		if (t->ndim && memcmp(x->dims, y->dims, 2u * t->ndim * sizeof *x->dims) != 0)
			return false;
		if (sd_strided_of(d->plan_a, x->loc) || sd_strided_of(d->plan_b, y->loc) || !manifest_same(&rx, &ry))
			return false;
	}
	return true;
}

static FALLIBLE enum err count_bytes(const struct sd_tensor *t, uint64_t *to)
{
	uint64_t elements, bytes;

	TRY(box_numel(t->ndim, t->shape, &elements));
	TRY(num_mul(elements, dtype_bytes(t->dtype), &bytes));
	return num_add(*to, bytes, to);
}

static FALLIBLE enum err keep_common(struct diff *d, const struct sd_tensor *t, const struct sd_tensor *u, json_t *entry)
{
	uint32_t index;

	TRY(sdict_add_tensor(d->common, t->fqn, t->dtype, t->ndim, t->shape, &index));
	d->compared[index] = (struct compared){ .entry = entry, .b = u };
	return sdict_copy_chunks(d->common, index, d->plan_a, t);
}

/* Both have it, in one shape. */
static FALLIBLE enum err compare_common(struct diff *d, const struct sd_tensor *t, const struct sd_tensor *u)
{
	if (t->dtype != u->dtype) {
		d->tensors[CHANGE_DTYPE]++;
		json_t *entry = diff_put(d, t->fqn, "dtype", json_string(dtype_name(t->dtype)), json_string(dtype_name(u->dtype)));
		if (cast_check(t->dtype, u->dtype)) { /* packed: it has no numbers that others have */
			err_clear();
			return OK;
		}
		return keep_common(d, t, u, entry);
	}
	if (!same_by_digest(d, t))
		return keep_common(d, t, u, NULL);
	d->tensors[CHANGE_NONE]++;
	d->by_digest.tensors++;
	return count_bytes(t, &d->by_digest.bytes);
}

static FALLIBLE enum err compare_tensor(struct diff *d, const struct sd_tensor *t)
{
	const struct sd_tensor *u = sdict_tensor(d->b.sd, t->fqn);

	TRY(count_bytes(t, &d->total_bytes));
	if (u && box_same_shape(t->ndim, t->shape, u->ndim, u->shape))
		return compare_common(d, t, u);
	if (u) {
		d->tensors[CHANGE_SHAPE]++;
		diff_put(d, t->fqn, "shape", jtext_numbers(t->shape, t->ndim), jtext_numbers(u->shape, u->ndim));
	} else if (sdict_value(d->b.sd, t->fqn)) {
		d->tensors[CHANGE_KIND]++;
		diff_put(d, t->fqn, "kind", json_string("tensor"), json_string("value"));
	} else {
		d->tensors[CHANGE_REMOVED]++;
		diff_put(d, t->fqn, "missing", json_string(dtype_name(t->dtype)), NULL);
	}
	return OK;
}

static FALLIBLE enum err compare_tensors(struct diff *d)
{
	const struct sdict *a = d->plan_a, *b = d->b.sd;

	d->compared = mem_zalloc(a->tensor_count, sizeof *d->compared);
	NEED(d->compared, "no memory for %ju tensors", (uintmax_t)a->tensor_count);
	TRY(sdict_copy_files(d->common, a));
	for (uint64_t i = 0; i < a->tensor_count; i++)
		TRY(compare_tensor(d, &a->tensors[i]));
	each(u, b->tensors, b->tensor_count) {
		if (sdict_tensor(a, u->fqn) || sdict_value(a, u->fqn))
			continue;
		d->tensors[CHANGE_ADDED]++;
		diff_put(d, u->fqn, "missing", NULL, json_string(dtype_name(u->dtype)));
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
	e = e ?: input_value(&d->b, b, &pb, &nb);
	bool same = !e && same_value((struct str){ pa, na }, (struct str){ pb, nb });
	if (!e && !same)
		e = input_at_value(&d->a, a, input_item_value(pa, na, &va));
	if (!e && !same)
		e = input_at_value(&d->b, b, input_item_value(pb, nb, &vb));
	struct str ta = { (char *)va.text.p, va.text.len }, tb = { (char *)vb.text.p, vb.text.len };
	same = same || (va.kind == vb.kind && va.kind != ITEM_VALUE_OPAQUE && str_eq(ta, tb));
	if (!e)
		d->values[same ? CHANGE_NONE : CHANGE_VALUES]++;
	if (!e && !same)
		diff_put(d, a->fqn, "value", value_doc(&va), value_doc(&vb));
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
		if (u) {
			TRY(compare_value(d, v, u));
		} else if (sdict_tensor(b, v->fqn)) {
			d->values[CHANGE_KIND]++;
			diff_put(d, v->fqn, "kind", json_string("value"), json_string("tensor"));
		} else {
			d->values[CHANGE_REMOVED]++;
			diff_put(d, v->fqn, "missing", json_string("value"), NULL);
		}
		TRY(job_tick(d->job));
	}
	each(u, b->values, b->value_count) {
		if (sdict_tensor(a, u->fqn) || sdict_value(a, u->fqn))
			continue;
		d->values[CHANGE_ADDED]++;
		diff_put(d, u->fqn, "missing", NULL, json_string("value"));
	}
	return OK;
}

static FALLIBLE enum err compare_bytes(struct diff *d)
{
	struct load_match match = { .strict = true };
	CLEANUP(run_detach) struct run run = { .fd = -1 };
	struct load_plan plan;
	uint32_t first_a, first_b;

	TRY(load_plan_make(d->b.sd, d->common, &match, d->arena, &plan));
	TRY(input_add_files(&d->a, &d->build, false, &d->map_a));
	TRY(input_add_files(&d->b, &d->build, false, &d->map_b));
	TRY(build_sources(&d->build, d->common, input_kind(&d->a), d->map_a, input_manifest(&d->a), &first_a));
	TRY(build_sources(&d->build, d->b.sd, input_kind(&d->b), d->map_b, input_manifest(&d->b), &first_b));
	d->build.opts.near = (struct stats_near){ d->job->spec.rtol, d->job->spec.atol, true };
	d->build.opts.verify = input_verifies(d->job);
	TRY(build_diff(&d->build, d->common, first_a, first_b, &plan));
	TRY(gang_run_built(d->job, &d->build, "compare", NULL, &run));
	TRY(diff_report_run(d, &run));
	json_object_set_new(d->job->result, "compared_bytes", json_integer((json_int_t)run_bytes_total(&run)));
	gang_run_note(d->job, &run);
	return OK;
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
	if (!d->job->spec.read_all && input_manifest(&d->a) && input_manifest(&d->b))
		TRY(save_plan_make(d->b.sd, DEDUP_LOWEST_RANK, UINT64_MAX, &d->plan_b, &stats));
	TRY(sdict_new(UINT64_MAX, &d->common));
	TRY(compare_tensors(d));
	TRY(compare_values(d));
	if (!d->job->dry_run)
		TRY(compare_bytes(d));
	TRY(diff_report_totals(d));
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
	for (uint64_t i = 0; d.common && d.compared && i < d.common->tensor_count; i++)
		json_decref(d.compared[i].first);
	mem_free(d.compared);
	sdict_free(d.plan_a);
	sdict_free(d.plan_b);
	sdict_free(d.common);
	arena_free(d.arena);
	input_close(&d.a);
	input_close(&d.b);
	spec_view_free(&d.view_a);
	spec_view_free(&d.view_b);
	json_decref(d.list);
	return e;
}
