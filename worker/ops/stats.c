/* stats.c: what the numbers of each tensor are like: range, mean, norm, NaN, Inf, zeros, histogram (tensor/stats.h).
 *
 * A job, not a look-up: it reads as much as a load does, so that it must be paced, cancelled, and done by all workers. Each byte is read
 * once, and compared with its digest while it is hot. Sums are added in the order of the scans, whoever did them, so that a second run
 * gives the same bits. */
#include <math.h>

#include "base/jtext.h"
#include "plan/save_plan.h"
#include "runner/build.h"
#include "runner/gang_run.h"
#include "runner/input.h"
#include "runner/stats_cache.h"

enum { TENSORS_MAX = 1 << 16 };       /* of one job: its result is one message, and bins are 2 KiB a tensor */

struct stats_of_all {
	struct job *job;
	struct input source;
	struct spec_view view;
	struct sdict *plan, *todo;     /* without replicas; of it, the tensors that are not in the cache */
	struct {
		uint64_t place;        /* in the plan, and in the list */
		struct stats_key key;
	} *wanted;                     /* per tensor of `todo` */
	struct run_build build;
	uint32_t *map;
	json_t *list;
};

static json_t *real_doc(long double v)
{
	json_t *doc = json_real((double)v);

	return doc ? doc : json_string(v > 0 ? "inf" : "-inf"); /* of finite elements, but too large for a double */
}

/* Integers as they are, where JSON has them. */
static json_t *key_doc(enum dtype d, uint64_t key)
{
	double real = 0;
	int64_t v = stats_key_value(d, key, &real);

	if (d == DT_UINT64 && v < 0)
		return real_doc((long double)(uint64_t)v);
	if (d != DT_INT64 && d != DT_UINT64)
		return dtype_is_float(d) ? real_doc(real) : json_integer((json_int_t)real);
	return json_integer(v);
}

static json_t *mean_doc(enum dtype d, const struct stats_sums *sums, uint64_t finite)
{
	if (!dtype_is_complex(d))
		return real_doc(sums->real / finite);
	return json_pack("[o, o]", real_doc(sums->real / finite), real_doc(sums->imag / finite));
}

/* [[exponent, negative, positive], …], where any are. */
static json_t *bins_doc(const uint64_t *bins)
{
	json_t *list = json_array();

	for (int b = 0; b < STATS_EXPONENTS; b++)
		if (bins[b] || bins[STATS_EXPONENTS + b])
			json_array_append_new(list, json_pack("[i, I, I]", STATS_FIRST + b, (json_int_t)bins[STATS_EXPONENTS + b],
							      (json_int_t)bins[b]));
	return list;
}

static FALLIBLE enum err put_tensor(struct stats_of_all *a, uint64_t place, const struct stats *s, const uint64_t *bins)
{
	const struct sd_tensor *t = &a->plan->tensors[place];
	uint64_t finite = s->count - s->nan_count - s->inf_count;
	json_t *doc = json_pack("{s:o, s:s, s:o, s:I, s:I, s:I, s:I}", "fqn", jtext_value(t->fqn), "dtype", dtype_name(t->dtype),
				"shape", jtext_numbers(t->shape, t->ndim), "count", (json_int_t)s->count, "nan", (json_int_t)s->nan_count,
				"inf", (json_int_t)s->inf_count, "zeros", (json_int_t)s->zero_count);

	if (!doc || json_array_set_new(a->list, place, doc) != 0)
		return ERR(NO_MEMORY, "no memory for the result");
	if (finite && !dtype_is_complex(t->dtype)) {
		json_object_set_new(doc, "min", key_doc(t->dtype, ~s->min_key));
		json_object_set_new(doc, "max", key_doc(t->dtype, s->max_key));
	}
	if (finite) {
		json_object_set_new(doc, "mean", mean_doc(t->dtype, &s->sums, finite));
		json_object_set_new(doc, "norm", real_doc(sqrtl(s->sums.squares)));
	}
	json_object_set_new(doc, "histogram", bins_doc(bins));
	return OK;
}

/* Adds up what the scans of the i-th tensor of `todo` have found. */
static FALLIBLE enum err collect(const struct stats_of_all *a, const struct run *run, uint64_t i, struct stats *out)
{
	const struct sd_tensor *t = &a->todo->tensors[i];
	struct run_stats *s = &run->stats[i];
	uint64_t elements;

	*out = (struct stats){ .count = atomic_load(&s->count), .nan_count = atomic_load(&s->nan_count),
			       .inf_count = atomic_load(&s->inf_count), .zero_count = atomic_load(&s->zero_count),
			       .min_key = atomic_load(&s->min_key), .max_key = atomic_load(&s->max_key) };
	for (uint64_t c = t->first_chunk; c < t->first_chunk + t->chunk_count; c++)
		for (uint64_t k = 0; k < run->srcs[c].scan_count; k++)
			stats_sums_add(&out->sums, &run->sums[run->srcs[c].first_scan + k]);
	TRY(box_numel(t->ndim, t->shape, &elements));
	if (out->count != elements * (t->dtype == DT_FLOAT4_E2M1FN_X2 ? 2 : 1))
		return err_at_fqn(ERR(INTERNAL, "%ju of %ju elements were counted", (uintmax_t)out->count, (uintmax_t)elements), t->fqn.p,
				  t->fqn.n);
	return OK;
}

static FALLIBLE enum err put_all(struct stats_of_all *a, const struct run *run)
{
	uint64_t bins[STATS_BINS];
	struct stats s;

	for (uint64_t i = 0; i < a->todo->tensor_count; i++) {
		TRY(collect(a, run, i, &s));
		for (unsigned b = 0; b < STATS_BINS; b++)
			bins[b] = atomic_load(&run->bins[i * STATS_BINS + b]);
		TRY(put_tensor(a, a->wanted[i].place, &s, bins));
		if (a->job->worker->stats)
			stats_cache_put(a->job->worker->stats, &a->wanted[i].key, &s, bins);
	}
	return OK;
}

/* Lists what the cache has; what it has not is to be read. */
static FALLIBLE enum err find_todo(struct stats_of_all *a)
{
	const struct sdict *plan = a->plan;
	uint64_t bins[STATS_BINS];
	uint32_t index;

	if (a->job->worker->stats)
		stats_cache_read(a->job->worker->stats);
	a->wanted = mem_zalloc(plan->tensor_count, sizeof *a->wanted);
	NEED(a->wanted, "no memory for a plan");
	TRY(sdict_new(UINT64_MAX, &a->todo));
	TRY(sdict_copy_files(a->todo, plan));
	for (uint64_t i = 0; i < plan->tensor_count; i++) {
		const struct sd_tensor *t = &plan->tensors[i];
		struct stats_key key = { 0 };
		struct stats s;
		if (json_array_append_new(a->list, json_null()) != 0)
			return ERR(NO_MEMORY, "no memory for the result");
		if (input_verifies(a->job))
			stats_key_of(plan, t, input_manifest(&a->source), &key);
		if (a->job->worker->stats && stats_cache_get(a->job->worker->stats, &key, &s, bins)) {
			TRY(put_tensor(a, i, &s, bins));
			continue;
		}
		TRY(sdict_add_tensor(a->todo, t->fqn, t->dtype, t->ndim, t->shape, &index));
		a->wanted[index].place = i;
		a->wanted[index].key = key;
		TRY(sdict_copy_chunks(a->todo, index, plan, t));
	}
	return OK;
}

static FALLIBLE enum err count_all(struct stats_of_all *a)
{
	CLEANUP(run_detach) struct run run = { .fd = -1 };
	uint32_t first;

	TRY(input_add_files(&a->source, &a->build, false, &a->map));
	TRY(build_sources(&a->build, a->todo, input_kind(&a->source), a->map, input_manifest(&a->source), &first));
	a->build.opts = (struct run_options){ .mode = RUN_STATS, .task_bytes = BUILD_TASK_BYTES, .values = true,
					      .verify = input_verifies(a->job) };
	TRY(build_all_stats(&a->build, first));
	TRY(gang_run_built(a->job, &a->build, "read", NULL, &run));
	TRY(put_all(a, &run));
	gang_run_note(a->job, &run);
	return OK;
}

static FALLIBLE enum err stats(struct stats_of_all *a)
{
	struct save_plan_stats saved;

	a->job->result = json_object();
	a->list = json_array();
	NEED(a->job->result && a->list, "no memory for the result");
	TRY(job_state(a->job, "planning", "metadata", NULL, 0));
	TRY(input_open(a->job, &a->job->spec.source, &a->source));
	TRY(input_undo_transforms(a->job, &a->source, false));
	TRY(input_select(&a->source, &a->job->spec, &a->view));
	if (a->source.sd->tensor_count > TENSORS_MAX)
		return ERR(LIMIT_EXCEEDED, "%ju tensors; at most %d at once: name fewer (include)", (uintmax_t)a->source.sd->tensor_count,
			   TENSORS_MAX);
	if (a->source.sd->tensor_count == 0 && a->job->spec.include.n)
		return ERR(NOT_FOUND, "no tensor has a name that matches");
	TRY(save_plan_make(a->source.sd, DEDUP_LOWEST_RANK, UINT64_MAX, &a->plan, &saved));
	TRY(save_plan_validate(a->plan));
	TRY(find_todo(a));
	uint64_t all = a->plan->tensor_count;
	json_object_set_new(a->job->result, "tensors", json_integer((json_int_t)all));
	json_object_set_new(a->job->result, "cached", json_integer((json_int_t)(all - a->todo->tensor_count)));
	if (!a->job->dry_run) {
		TRY(count_all(a));
		json_object_set(a->job->result, "statistics", a->list);
	}
	if (a->source.checkpoint)
		checked_report(&a->job->checked, a->job->result);
	return OK;
}

enum err stats_job(struct job *j)
{
	struct stats_of_all a = { .job = j };

	enum err e = stats(&a);
	run_build_free(&a.build);
	mem_free(a.map);
	mem_free(a.wanted);
	sdict_free(a.plan);
	sdict_free(a.todo);
	input_close(&a.source);
	spec_view_free(&a.view);
	json_decref(a.list);
	return e;
}
