/* merge.c: see merge.h. Tensors of integers and bools, values, and what `first_only` matches are the first checkpoint's. */
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

static FALLIBLE enum err open_other(struct merge *m, const struct sdict *first, uint32_t i)
{
	struct job *j = m->job;

	TRY(input_open(j, &j->spec.sources.v[i], &m->others[i - 1]));
	TRY(input_undo_transforms(j, &m->others[i - 1], false));
	TRY(spec_select(&j->spec, m->others[i - 1].sd, &m->views[i - 1]));
	return check_tensors(m, first, m->views[i - 1].sd);
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

enum err merge_open(struct job *j, const struct sdict *first, struct merge *m)
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
	m->count = n;
	for (uint32_t i = 0; i < n; i++)
		m->weights[i] = j->spec.weights.n ? j->spec.weights.v[i] : 1.0 / n;
	for (uint32_t i = 1; i < n; i++)
		TRY(at_checkpoint(m, i, open_other(m, first, i)));
	return check_first_only(m, first);
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
		if (is_averaged(m, &target->tensors[i]))
			TRY(add_averaged(m, target, &target->tensors[i], chunk));
	for (uint32_t i = 0; i < m->count; i++) {
		struct load_match match = { .strict = true, .a_part = true };
		const struct sdict *sd = i ? m->views[i - 1].sd : first;
		struct input *in = i ? &m->others[i - 1] : NULL;
		TRY(at_checkpoint(m, i, load_plan_make(sd, m->averaged, &match, m->arena, &plans[i])));
		srcs[i] = first_src;
		if (!in)
			continue;
		TRY(input_add_files(in, b, false, &m->file_maps[i]));
		TRY(build_sources(b, sd, input_kind(in), m->file_maps[i], input_manifest(in), &srcs[i]));
	}
	m->build = (struct build_merge){ .count = m->count, .weights = m->weights, .wide = m->job->spec.merge_dtype == MERGE_FLOAT64,
					 .chunk = chunk, .plans = plans, .first_src = srcs };
	return OK;
}

void merge_report(const struct merge *m, const struct sdict *target, json_t *result)
{
	json_object_set_new(result, "averaged", json_integer((json_int_t)m->averaged->tensor_count));
	json_object_set_new(result, "first_only", json_integer((json_int_t)(target->tensor_count - m->averaged->tensor_count)));
}

void merge_free(struct merge *m)
{
	for (uint32_t i = 0; i < m->count; i++)
		mem_free(m->file_maps[i]);
	for (uint32_t i = 0; i + 1 < m->count; i++) {
		spec_view_free(&m->views[i]);
		input_close(&m->others[i]);
	}
	sdict_free(m->averaged);
	arena_free(m->arena);
}
