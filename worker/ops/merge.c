/* merge.c: see merge.h. Tensors of integers and bools, values, and what `first_only` matches are the first checkpoint's.
 *
 * Rules are applied to each checkpoint, which gives tensors of the same names and shapes to average: as they move elements and change none,
 * that is what they would make of the result. Casts do change elements: those of averages are left out, and the result is rounded to
 * their last dtype. */
#include "ops/merge.h"

#include <math.h>
#include <stdio.h>

#include "plan/load_plan.h"
#include "tensor/cast.h"

static bool is_numeric(enum dtype d)
{
	return dtype_is_float(d) || dtype_is_complex(d);
}

static bool is_averaged(const struct merge *m, const struct sd_tensor *t)
{
	return is_numeric(t->dtype) && !strs_match(&m->job->spec.first_only, t->fqn);
}

/* Adds to an error which checkpoint it is of. */
static enum err at_checkpoint(const struct merge *m, uint32_t i, enum err e)
{
	const struct ref *ref = &m->job->spec.sources.v[i];
	struct err_info info = *err_last();

	if (!e || strchr(info.file, '/'))
		return e;
	if (!info.file[0])
		snprintf(info.file, sizeof info.file, "%s:%s", ref->storage.p, ref->name.p);
	else if (!str_ends(ref->name, info.file)) /* not the one file that the checkpoint is */
		snprintf(info.file, sizeof info.file, "%s/%.100s", ref->name.p, err_last()->file);
	err_restore(&info);
	return e;
}

/* The tensors of both must be the same, whatever their layouts and dtypes; sizes are compared by the plan. */
static FALLIBLE enum err check_tensors(const struct merge *m, const struct sdict *first, const struct sdict *other)
{
	for (uint64_t i = 0; i < first->tensor_count; i++) {
		const struct sd_tensor *t = &first->tensors[i], *u = sdict_tensor(other, t->fqn);
		if (!is_averaged(m, t))
			continue;
		if (!u)
			return err_at_fqn(ERR(MISSING_KEY, "the checkpoint lacks a tensor that the first one has"), t->fqn.p, t->fqn.n);
		if (!is_numeric(u->dtype) || dtype_is_complex(u->dtype) != dtype_is_complex(t->dtype))
			return err_at_fqn(ERR(KIND_MISMATCH, "%s here, %s in the first checkpoint", dtype_name(u->dtype),
					      dtype_name(t->dtype)), t->fqn.p, t->fqn.n);
		TRY(cast_check(dtype_is_complex(t->dtype) ? DT_COMPLEX64 : DT_FLOAT32, u->dtype));
	}
	each(u, other->tensors, other->tensor_count) {
		if (is_averaged(m, u) && !sdict_tensor(first, u->fqn))
			return err_at_fqn(ERR(MISSING_KEY, "the first checkpoint lacks this tensor"), u->fqn.p, u->fqn.n);
	}
	return OK;
}

/* The first checkpoint's tensors and values, with the other's chunks where they are averaged: the rules make the same of it. */
static FALLIBLE enum err make_alike(const struct merge *m, const struct spec_view *first, const struct sdict *other, struct spec_view *out)
{
	uint32_t index;

	*out = (struct spec_view){ .dtypes = mem_alloc(first->sd->tensor_count * sizeof *out->dtypes + 1) };
	NEED(out->dtypes, "no memory for %ju tensors", (uintmax_t)first->sd->tensor_count);
	memcpy(out->dtypes, first->dtypes, first->sd->tensor_count * sizeof *out->dtypes);
	TRY(sdict_new(UINT64_MAX, &out->sd));
	TRY(spec_copy_files(other, out->sd));
	for (uint64_t i = 0; i < first->sd->tensor_count; i++) {
		const struct sd_tensor *t = &first->sd->tensors[i], *u = is_averaged(m, t) ? sdict_tensor(other, t->fqn) : t;
		bool same = t->ndim == u->ndim;
		for (uint32_t d = 0; same && d < t->ndim; d++)
			same = t->shape[d] == u->shape[d];
		if (!same)
			return err_at_fqn(ERR(SIZE_MISMATCH, "the tensor has another shape in the first checkpoint"), t->fqn.p, t->fqn.n);
		TRY(sdict_add_tensor(out->sd, t->fqn, u->dtype, t->ndim, t->shape, &index));
		out->sd->tensors[index].blocks = t->blocks;
		if (u != t)
			TRY(sdict_copy_chunks(out->sd, index, other, u));
	}
	for (uint64_t i = 0; i < first->sd->value_count; i++) {
		TRY(sdict_add_value(out->sd, first->sd->values[i].fqn, 0, (struct sd_loc){ .file = SD_NO_FILE }, &index));
		out->sd->values[index].kind = SD_VALUE_INLINE;
	}
	return OK;
}

/* Averages are added up as they are stored. */
static void leave_out_casts(const struct merge *m, struct converted *made)
{
	for (uint64_t i = 0; i < made->sd->tensor_count; i++)
		for (uint32_t c = 0; m->averages[i] && c < made->sd->tensors[i].chunk_count; c++)
			made->views[made->sd->tensors[i].first_chunk + c].cast_count = 0;
}

static FALLIBLE enum err open_other(struct merge *m, const struct spec_view *first, const struct convert_rules *rules, uint32_t i)
{
	struct job *j = m->job;

	TRY(input_open(j, &j->spec.sources.v[i], &m->others[i - 1]));
	TRY(input_undo_transforms(j, &m->others[i - 1], false));
	TRY(spec_select(&j->spec, m->others[i - 1].sd, &m->views[i - 1]));
	TRY(check_tensors(m, first->sd, m->views[i - 1].sd));
	if (!m->rules)
		return OK;
	TRY(make_alike(m, first, m->views[i - 1].sd, &m->alike[i - 1]));
	TRY(convert_rules_like(rules, &m->alike[i - 1], &m->rules[i - 1]));
	leave_out_casts(m, &m->rules[i - 1].made);
	return OK;
}

/* Is a tensor that rules made of averages, or of none? */
static FALLIBLE enum err is_made_of_averages(const struct merge *m, const struct sdict *first, const struct converted *made,
					     const struct sd_tensor *t, bool *out)
{
	bool some = false, others = false;

	for (uint64_t c = t->first_chunk; c < t->first_chunk + t->chunk_count; c++) {
		uint32_t source = made->views[c].source;
		if (source == VIEW_ZEROS)
			continue;
		bool is = source < first->chunk_count && is_averaged(m, &first->tensors[first->chunks[source].tensor]);
		some = some || is;
		others = others || !is;
	}
	*out = some;
	if (!some || !others)
		return OK;
	enum err e = ERR(VALIDATION_FAILED, "a rule joins averages with what is the first checkpoint's alone, or of another one");
	return err_at_fqn(err_at_pointer(e, "/transform"), t->fqn.p, t->fqn.n);
}

static FALLIBLE enum err find_averages(struct merge *m, const struct sdict *first, const struct convert_rules *rules,
				       const struct sdict *view)
{
	TRY(arena_alloc(m->arena, view->tensor_count + 1, sizeof *m->averages, &m->averages));
	for (uint64_t i = 0; i < view->tensor_count; i++)
		if (rules->c.count)
			TRY(is_made_of_averages(m, first, &rules->made, &view->tensors[i], &m->averages[i]));
		else
			m->averages[i] = is_averaged(m, &view->tensors[i]);
	return OK;
}

/* Warns of patterns of `first_only` that no key of the first checkpoint matches: likely a name that was mistyped. */
static FALLIBLE enum err check_first_only(const struct merge *m, const struct sdict *first)
{
	const struct strs *globs = &m->job->spec.first_only;
	CLEANUP(buf_free) struct buf detail = BUF_INIT(1 << 20);
	bool any = false;

	for (size_t i = 0; i < globs->n; i++) {
		const struct strs one = { &globs->v[i], 1 };
		bool matches = false;
		for (uint64_t k = 0; k < first->tensor_count && !matches; k++)
			matches = strs_match(&one, first->tensors[k].fqn);
		for (uint64_t k = 0; k < first->value_count && !matches; k++)
			matches = strs_match(&one, first->values[k].fqn);
		if (!matches)
			buf_printf(&detail, "%s'%s'", any ? ", " : "no key of the first checkpoint matches first_only ", globs->v[i].p);
		any = any || !matches;
	}
	buf_putc(&detail, '\0');
	TRY(buf_status(&detail));
	if (any)
		checked_warn(&m->job->checked, "unmatched_first_only", (char *)detail.p);
	return OK;
}

enum err merge_open(struct job *j, const struct spec_view *stored, struct convert_rules *rules, const struct spec_view *view,
		    struct merge *m)
{
	uint32_t n = (uint32_t)j->spec.sources.n;

	*m = (struct merge){ .job = j };
	if (j->kind != JOB_MERGE)
		return OK;
	m->arena = arena_new(UINT64_MAX);
	NEED(m->arena, "no memory for a merge");
	TRY(arena_alloc(m->arena, n, sizeof *m->others, &m->others));
	TRY(arena_alloc(m->arena, n, sizeof *m->views, &m->views));
	TRY(arena_alloc(m->arena, n, sizeof *m->file_maps, &m->file_maps));
	if (rules->c.count) {
		TRY(arena_alloc(m->arena, n, sizeof *m->alike, &m->alike));
		TRY(arena_alloc(m->arena, n, sizeof *m->rules, &m->rules));
	}
	m->count = n;
	TRY(find_averages(m, stored->sd, rules, view->sd));
	if (m->rules)
		leave_out_casts(m, &rules->made);
	for (uint32_t i = 0; i < n; i++)
		m->weights[i] = j->spec.weights.n ? j->spec.weights.v[i] : 1.0 / n;
	for (uint32_t i = 1; i < n; i++)
		TRY(at_checkpoint(m, i, open_other(m, stored, rules, i)));
	return check_first_only(m, stored->sd);
}

enum err merge_tie(const struct merge *m, const struct target_ties *first, struct sdict *target)
{
	struct target_ties ties[RUN_LEGS_MAX] = { *first };
	struct spec_view made[RUN_LEGS_MAX];

	for (uint32_t i = 1; i < m->count; i++) {
		const struct convert_rules *rules = m->rules ? &m->rules[i - 1] : NULL;
		const struct spec_view *stored = rules ? &m->alike[i - 1] : &m->views[i - 1];
		made[i] = (struct spec_view){ .sd = rules ? rules->made.sd : stored->sd };
		ties[i] = (struct target_ties){ stored, &made[i], rules ? rules->made.views : NULL };
	}
	return target_tie(ties, m->count ? m->count : 1, m->averages, target);
}

/* Warns of a weight that the dtype of the tensor cannot hold: what it multiplies becomes infinite, or a NaN. */
static FALLIBLE enum err check_weights(const struct merge *m, const struct sd_tensor *t)
{
	CLEANUP(buf_free) struct buf detail = BUF_INIT(SD_FQN_MAX + 256);
	unsigned char narrow[16];
	double back = 0;

	for (uint32_t i = 0; i < m->count; i++) {
		TRY(cast_run(narrow, t->dtype, &m->weights[i], DT_FLOAT64, 1));
		TRY(cast_run(&back, DT_FLOAT64, narrow, t->dtype, 1));
		if (isfinite(back))
			continue;
		buf_printf(&detail, "weight %u, %g, is beyond the range of %s, the dtype of '%.*s': its averages overflow", i,
			   m->weights[i], dtype_name(t->dtype), (int)t->fqn.n, t->fqn.p);
		buf_putc(&detail, '\0');
		TRY(buf_status(&detail));
		checked_warn(&m->job->checked, "weight_overflow", (char *)detail.p);
		return OK;
	}
	return OK;
}

static FALLIBLE enum err add_averaged(struct merge *m, const struct sdict *target, const struct sd_tensor *t, uint32_t *chunk)
{
	uint32_t index;

	TRY(cast_check(t->dtype, dtype_is_complex(t->dtype) ? DT_COMPLEX64 : DT_FLOAT32));
	TRY(check_weights(m, t));
	TRY(sdict_add_tensor(m->averaged, t->fqn, t->dtype, t->ndim, t->shape, &index));
	for (uint64_t c = t->first_chunk; c < t->first_chunk + t->chunk_count; c++) {
		chunk[c] = (uint32_t)m->averaged->chunk_count;
		TRY(sdict_add_chunk(m->averaged, index, target->chunks[c].dims, target->chunks[c].rank, (struct sd_loc){ 0 }));
	}
	return OK;
}

enum err merge_sources(struct merge *m, const struct sdict *first, const struct sdict *target, struct run_build *b, uint32_t first_src)
{
	struct load_plan *plans;
	uint32_t *chunk, *srcs;

	TRY(arena_alloc(m->arena, target->chunk_count + 1, sizeof *chunk, &chunk));
	TRY(arena_alloc(m->arena, m->count, sizeof *srcs, &srcs));
	TRY(arena_alloc(m->arena, m->count, sizeof *plans, &plans));
	TRY(sdict_new(UINT64_MAX, &m->averaged));
	memset(chunk, 0xFF, target->chunk_count * sizeof *chunk);
	for (uint64_t i = 0; i < target->tensor_count; i++)
		if (m->averages[sdict_tensor(first, target->tensors[i].fqn) - first->tensors] && !target->tensors[i].tied_to)
			TRY(add_averaged(m, target, &target->tensors[i], chunk));
	for (uint32_t i = 0; i < m->count; i++) {
		struct load_match match = { .strict = true, .a_part = true };
		const struct spec_view *stored = !i ? NULL : m->rules ? &m->alike[i - 1] : &m->views[i - 1];
		const struct sdict *sd = !i ? first : m->rules ? m->rules[i - 1].made.sd : stored->sd;
		struct input *in = i ? &m->others[i - 1] : NULL;
		TRY(at_checkpoint(m, i, load_plan_make(sd, m->averaged, &match, m->arena, &plans[i])));
		srcs[i] = first_src;
		if (!in)
			continue;
		TRY(input_add_files(in, b, false, &m->file_maps[i]));
		TRY(build_sources(b, stored->sd, input_kind(in), m->file_maps[i], input_manifest(in), &srcs[i]));
		if (m->rules)
			TRY(convert_rules_sources(&m->rules[i - 1], b, srcs[i], &srcs[i]));
	}
	m->build = (struct build_merge){ .count = m->count, .weights = m->weights, .wide = m->job->spec.merge_dtype == MERGE_FLOAT64,
					 .chunk = chunk, .plans = plans, .first_src = srcs };
	return OK;
}

void merge_report(const struct merge *m, const struct sdict *target, json_t *result)
{
	json_int_t n = 0;

	for (uint64_t i = 0; i < target->tensor_count; i++)
		n += m->averages[i];
	json_object_set_new(result, "averaged", json_integer(n));
	json_object_set_new(result, "first_only", json_integer((json_int_t)target->tensor_count - n));
}

void merge_free(struct merge *m)
{
	for (uint32_t i = 0; i < m->count; i++)
		mem_free(m->file_maps[i]);
	for (uint32_t i = 0; i + 1 < m->count; i++) {
		if (m->rules) {
			convert_rules_free(&m->rules[i]);
			spec_view_free(&m->alike[i]);
		}
		spec_view_free(&m->views[i]);
		input_close(&m->others[i]);
	}
	sdict_free(m->averaged);
	arena_free(m->arena);
}
