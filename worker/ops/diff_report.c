/* diff_report.c: the result of a diff: figures of each tensor that differs, the tensors that moved most, totals. */
#include <math.h>
#include <stdlib.h>

#include "base/jtext.h"
#include "base/num.h"
#include "ops/diff_impl.h"

static json_t *real_doc(long double v)
{
	json_t *doc = json_real((double)v);

	return doc ? doc : json_string(v != v ? "nan" : "inf");
}

static json_t *count_doc(uint64_t n)
{
	return json_integer((json_int_t)n);
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

/* |a - b| / |a|: how far B is from A. */
static long double relative_l2(const struct stats_diff *s)
{
	return s->dd == 0.0L ? 0.0L : s->aa == 0.0L ? INFINITY : sqrtl(s->dd / s->aa);
}

/* NULL: one of both is zero, and has no direction. */
static json_t *cosine_doc(const struct stats_diff *s)
{
	if (s->aa == 0.0L || s->bb == 0.0L)
		return json_null();
	return real_doc(fminl(fmaxl(s->ab / (sqrtl(s->aa) * sqrtl(s->bb)), -1.0L), 1.0L));
}

static void put_figures(json_t *entry, const struct sd_tensor *t, const struct compared *c)
{
	const struct stats_diff *s = &c->sum;
	uint64_t elements = 0;

	if (box_numel(t->ndim, t->shape, &elements)) /* it was cut into chunks of no more */
		err_clear();
	json_object_set_new(entry, "elements", count_doc(elements * (t->dtype == DT_FLOAT4_E2M1FN_X2 ? 2 : 1)));
	json_object_set_new(entry, "count", count_doc(s->count));
	json_object_set_new(entry, "not_finite", count_doc(s->odd));
	json_object_set_new(entry, "max_abs", real_doc(s->max_abs));
	json_object_set_new(entry, "max_rel", real_doc(s->max_rel));
	json_object_set_new(entry, "rel_l2", real_doc(relative_l2(s)));
	json_object_set_new(entry, "l2", real_doc(sqrtl(s->dd)));
	json_object_set_new(entry, "cosine", cosine_doc(s));
	if (t->dtype == c->b->dtype)
		json_object_set_new(entry, "bits_changed", count_doc(s->bits));
	json_object_set_new(entry, "first_index", c->first ? json_incref(c->first) : json_null());
}

/* Adds up the parts of all chunks, in their order. */
static void add_up(struct diff *d, const struct run *run, const struct sd_tensor *t, struct compared *c)
{
	for (uint64_t i = t->first_chunk; i < t->first_chunk + t->chunk_count; i++) {
		const struct run_dst *side = &run->dsts[2 * i];
		for (uint64_t k = 0; k < side->part_count; k += 2) {
			const struct stats_diff *part = &run->diffs[(side->first_part + k) / 2];
			if (part->count && !c->first)
				c->first = global_index(&d->common->chunks[i], t->ndim, part->first);
			stats_diff_add(&c->sum, part);
		}
	}
	c->moved = c->sum.odd ? INFINITY : (double)relative_l2(&c->sum);
}

static FALLIBLE enum err note_tensor(struct diff *d, const struct sd_tensor *t, struct compared *c)
{
	uint64_t elements, bytes;

	TRY(box_numel(t->ndim, t->shape, &elements));
	TRY(num_mul(elements, dtype_bytes(t->dtype), &bytes));
	if (c->entry) {
		put_figures(c->entry, t, c);
	} else if (t->dtype != c->b->dtype) {
		return OK; /* counted, but not listed */
	} else if (c->sum.count) {
		d->tensors[CHANGE_VALUES]++;
		json_t *entry = diff_put(d, t->fqn, "values", NULL, NULL);
		if (entry)
			put_figures(entry, t, c);
	} else {
		d->tensors[CHANGE_NONE]++;
		d->by_reading.tensors++;
		d->by_reading.bytes += bytes;
	}
	return OK;
}

/* ------------------------------------------------------------------------------------------------------- movers */

static int by_move(const void *a, const void *b, void *user)
{
	const struct compared *all = user, *x = &all[*(const uint64_t *)a], *y = &all[*(const uint64_t *)b];

	return num_order(y->moved, x->moved) ?: num_order(x, y);
}

static json_t *mover_doc(const struct diff *d, uint64_t i)
{
	const struct sd_tensor *t = &d->common->tensors[i];
	const struct compared *c = &d->compared[i];
	json_t *doc = json_pack("{s:o, s:s, s:o}", "path", jtext_value(t->fqn), "dtype", dtype_name(c->b->dtype), "shape",
				jtext_numbers(t->shape, t->ndim));

	if (doc)
		put_figures(doc, t, c);
	return doc;
}

/* The tensors that moved most, however many differ. */
static FALLIBLE enum err put_movers(struct diff *d)
{
	CLEANUP(mem_free_ptr) uint64_t *order = mem_alloc(d->common->tensor_count * sizeof *order + 1);
	json_t *list = json_array();
	uint64_t n = 0;

	json_object_set_new(d->job->result, "movers", list);
	NEED(order, "no memory for %ju tensors", (uintmax_t)d->common->tensor_count);
	NEED(list, "no memory for the result");
	for (uint64_t i = 0; i < d->common->tensor_count; i++)
		if (d->compared[i].sum.count)
			order[n++] = i;
	qsort_r(order, n, sizeof *order, by_move, d->compared);
	for (uint64_t i = 0; i < n && i < (uint64_t)d->job->spec.top; i++)
		if (json_array_append_new(list, mover_doc(d, order[i])) < 0)
			return ERR(NO_MEMORY, "no memory for the result");
	return OK;
}

enum err diff_report_run(struct diff *d, const struct run *run)
{
	for (uint64_t i = 0; i < d->common->tensor_count; i++) {
		add_up(d, run, &d->common->tensors[i], &d->compared[i]);
		TRY(note_tensor(d, &d->common->tensors[i], &d->compared[i]));
	}
	return put_movers(d);
}

/* ------------------------------------------------------------------------------------------------------- totals */

static json_t *changes_doc(const uint64_t n[CHANGES], bool tensors)
{
	json_t *doc = json_pack("{s:I, s:I, s:I, s:I, s:I}", "added", (json_int_t)n[CHANGE_ADDED], "removed", (json_int_t)n[CHANGE_REMOVED],
				"kind", (json_int_t)n[CHANGE_KIND], "changed", (json_int_t)n[CHANGE_VALUES], "unchanged",
				(json_int_t)n[CHANGE_NONE]);

	if (tensors)
		json_object_update_new(doc, json_pack("{s:I, s:I}", "reshaped", (json_int_t)n[CHANGE_SHAPE], "retyped",
						      (json_int_t)n[CHANGE_DTYPE]));
	return doc;
}

static FALLIBLE enum err put_unchanged(struct diff *d)
{
	uint64_t bytes = d->by_digest.bytes + d->by_reading.bytes;
	json_t *doc = json_pack("{s:I, s:I, s:o, s:{s:I, s:I}, s:{s:I, s:I}}", "tensors",
				(json_int_t)(d->by_digest.tensors + d->by_reading.tensors), "bytes", (json_int_t)bytes, "share",
				json_real(d->total_bytes ? (double)bytes / (double)d->total_bytes : 1.0), "by_digest", "tensors",
				(json_int_t)d->by_digest.tensors, "bytes", (json_int_t)d->by_digest.bytes, "by_reading", "tensors",
				(json_int_t)d->by_reading.tensors, "bytes", (json_int_t)d->by_reading.bytes);

	return json_object_set_new(d->job->result, "unchanged", doc) < 0 ? ERR(NO_MEMORY, "no memory for the result") : OK;
}

enum err diff_report_totals(struct diff *d)
{
	struct stats_diff all = { 0 };
	uint64_t bits = 0;

	for (uint64_t i = 0; i < d->common->tensor_count; i++) {
		stats_diff_add(&all, &d->compared[i].sum);
		bits += d->common->tensors[i].dtype == d->compared[i].b->dtype ? d->compared[i].sum.bits : 0;
	}
	json_t *doc = json_pack("{s:o, s:o}", "tensors", changes_doc(d->tensors, true), "values", changes_doc(d->values, false));
	NEED(doc, "no memory for the result");
	json_object_set_new(d->job->result, "totals", doc);
	if (d->job->dry_run)
		return OK;
	json_object_set_new(doc, "count", count_doc(all.count));
	json_object_set_new(doc, "not_finite", count_doc(all.odd));
	json_object_set_new(doc, "bits_changed", count_doc(bits));
	json_object_set_new(doc, "max_abs", real_doc(all.max_abs));
	json_object_set_new(doc, "l2", real_doc(sqrtl(all.dd)));
	return put_unchanged(d);
}
