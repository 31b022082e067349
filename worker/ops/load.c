/* load.c: a checkpoint → segments, in the layout of a state dict that exists or of one that is made here; optimizer state as a model's
 * ranks need it. */
#include <stdio.h>

#include "ops/convert_rules.h"
#include "ops/apply.h"
#include "ops/exact_load.h"
#include "ops/load_delta.h"
#include "ops/optim_load.h"
#include "runner/build.h"
#include "runner/gang_run.h"
#include "runner/input.h"
#include "runner/memory.h"
#include "runner/plan_doc.h"
#include "runner/segments.h"
#include "runner/spread.h"
#include "runner/target.h"

struct load {
	struct job *job;
	struct input source;
	struct apply apply;            /* of a delta, if the job applies one */
	struct memory memory;          /* what of the source lies in segments */
	struct spec_view stored;       /* what takes part of the source */
	struct convert_rules rules;
	struct spec_view view;         /* what is loaded: that, as the rules convert it; its sdict is not its own */
	struct sdict *target;
	struct arena *arena;
	struct run_build build;
	uint32_t *source_map, *segment_files;
	uint32_t world_size;
	const struct rank_segments *existing;  /* the target's, which are filled; NULL: segments are made */
	const struct rank_segments *newest;    /* with `delta`: the target's newest generation; NULL: it has none */
	struct load_delta delta;
	struct sdict *rest;            /* with `delta`: of the target, what is loaded */
	struct load_match match;
	struct load_plan plan;
	struct spread *spread;         /* what other hosts read of the source, too; NULL: this one reads alone */
	struct problems problems;
	bool exact;                    /* as it is in another node's memory */
	bool optimizer;                /* of optimizer state, as a model's ranks need it */
	struct optim_load optim;
};

/* The files of a target are its segments, one per rank. */
static FALLIBLE enum err one_file_per_rank(struct load *l)
{
	char name[16];
	uint32_t index;

	l->target->file_count = 0;
	for (uint32_t r = 0; r < l->world_size; r++) {
		snprintf(name, sizeof name, "%u", r);
		TRY(sdict_add_file(l->target, str_of(name), r, &index));
	}
	return OK;
}

static FALLIBLE enum err cut_optimizer(struct load *l)
{
	int64_t asked = l->job->spec.world_size;

	if (l->existing)
		return ERR(STATE_DICT_EXISTS, "a load of optimizer state makes its state dict: the target exists");
	TRY(optim_load_plan(l->job, &l->view, &l->optim));
	l->world_size = l->optim.world_size;
	l->target = move(l->optim.plan.sd);
	if (asked && asked != l->world_size)
		return ERR(WORLD_MISMATCH, "the model has %u ranks, the target is to have %jd", l->world_size, (intmax_t)asked);
	return one_file_per_rank(l);
}

static FALLIBLE enum err cut(struct load *l)
{
	if (l->optimizer)
		return cut_optimizer(l);
	l->exact = !l->job->spec.delta && exact_load_is(l->job, l->existing);
	if (l->exact) {
		l->world_size = l->source.world_size;
		return exact_load_plan(l->source.sd, l->world_size, l->arena, &l->target, &l->plan);
	}
	if (l->existing) {
		l->world_size = l->existing->world_size;
		return input_images(l->existing, l->job->fds, &l->target);
	}
	bool remade = l->newest && l->job->kind == JOB_REDISTRIBUTE; /* the target keeps its world size */
	l->world_size = spec_world_size(&l->job->spec, remade ? l->newest->world_size : l->source.world_size);
	TRY(target_cut(l->job->worker, &l->view, &l->job->spec.layout, l->world_size, &l->problems,
		       &l->target, l->job->result));
	return one_file_per_rank(l);
}

static FALLIBLE enum err report(struct load *l)
{
	json_t *casts = NULL, *r = l->job->result;

	if (l->optimizer) /* the rest was not asked for */
		l->match.unexpected_count = 0;
	json_object_set_new(r, "missing", target_names(l->match.missing, l->match.missing_count));
	json_object_set_new(r, "unexpected", target_names(l->match.unexpected, l->match.unexpected_count));
	TRY(target_casts(l->view.sd, l->target, &l->problems, &casts));
	enum err e = convert_rules_casts(&l->rules, &casts);
	json_object_set_new(r, "cast", casts ? casts : json_array());
	TRY(e);
	json_object_set_new(r, "world_size", json_integer(l->world_size));
	json_object_set_new(r, "tensors", json_integer((json_int_t)l->target->tensor_count));
	json_object_set_new(r, "values", json_integer((json_int_t)(l->exact ? l->view.sd : l->target)->value_count));
	return OK;
}

/* The segments as run files; a dry run has made none. Made ones come behind those of the JOB frame, in rank order. */
static FALLIBLE enum err add_segments(struct load *l)
{
	const struct rank_segments *s = l->existing ? l->existing : &l->job->segments;
	const struct rank_segment none = { .name = "segment" };

	if (s->v && s->count != l->world_size)
		return ERR(PROTOCOL, "%u segments for %u ranks", s->count, l->world_size);
	l->segment_files = mem_zalloc(l->world_size, sizeof *l->segment_files);
	NEED(l->segment_files, "no memory for %u segments", l->world_size);
	for (uint32_t i = 0; i < l->world_size; i++)
		TRY(input_add_segment(&l->build, s->v ? &s->v[i] : &none, i, true, &l->segment_files[i]));
	return OK;
}

/* The part of the target that the run fills. */
static const struct sdict *filled(const struct load *l)
{
	return l->rest ? l->rest : l->target;
}

/* The plan's JSON; a dry run's has the entries that do not fit too. */
static FALLIBLE enum err plan_doc(const struct load *l, json_t *doc)
{
	struct plan_figures f;
	json_t *table;

	TRY(convert_rules_table(&l->rules, &l->view, &table));
	if (table)
		json_object_set_new(doc, "transform", table);
	TRY(plan_figures_make(l->view.sd, filled(l), &l->plan, &f));
	TRY(plan_doc_files(doc, &l->build, input_kind(&l->source) == RUN_SRC_ITEM ? RUN_FILE_SOURCE : RUN_FILE_SEGMENT));
	return plan_doc_figures(doc, l->job, &l->build, &f,
				plan_sdict_bytes(l->source.sd) + plan_sdict_bytes(l->stored.sd) + plan_sdict_bytes(l->target));
}

static FALLIBLE enum err build(struct load *l)
{
	uint32_t first, first_view;

	TRY(add_segments(l));
	TRY(input_add_files(&l->source, &l->build, false, &l->source_map));
	TRY(build_sources(&l->build, l->stored.sd, input_kind(&l->source), l->source_map, input_manifest(&l->source), &first));
	if (l->rules.c.count == 0) { /* else elements go through views of their sources, block by block */
		const struct memory_lists lists = { json_object_get(l->job->doc, "memory"), l->job->fds, l->job->segment_count,
						    &l->job->worker->stores };
		memory_open(&lists, input_manifest(&l->source), &l->memory);
		TRY(memory_place(&l->memory, &l->build, l->stored.sd, first));
	}
	l->build.opts = (struct run_options){ .mode = RUN_FILL_SEGMENTS, .task_bytes = BUILD_TASK_BYTES,
					      .verify = input_verifies(l->job),
					      .past_cache = l->rules.c.count == 0 && l->job->spec.cache != PAGE_CACHE_KEEP };
	TRY(convert_rules_sources(&l->rules, &l->build, first, &first_view));
	if (l->rules.c.count)
		return build_fill_views(&l->build, l->target, l->segment_files, first_view, &l->plan);
	return build_fill(&l->build, filled(l), l->segment_files, l->view.sd, first, &l->plan);
}

/* Meets the other hosts that load the same. Conversion rules read sources in no order that could be told beforehand. */
static FALLIBLE enum err meet_hosts(struct load *l)
{
	CLEANUP(mem_free_ptr) uint32_t *keys = mem_zalloc(l->build.files.n + 1, sizeof *keys);

	NEED(keys, "no memory for %ju files", (uintmax_t)l->build.files.n);
	if (!l->source.checkpoint || l->rules.c.count || l->delta.behind)
		return OK;
	for (uint32_t i = 0; i < l->source.checkpoint->sd->file_count; i++)
		keys[l->source_map[i]] = i + 1;
	return spread_join(l->job, &l->build, keys, &l->spread);
}

static FALLIBLE enum err run_built(struct load *l, const json_t *plan, struct run *run)
{
	enum err e = run_share(&l->build, run);

	run_build_free(&l->build);
	TRY(e);
	TRY(spread_begin(l->spread, run));
	TRY(job_state(l->job, "running", "copy", plan, run_bytes_total(run)));
	return spread_end(l->spread, run, gang_run(l->job, run));
}

static FALLIBLE enum err execute(struct load *l)
{
	CLEANUP(run_detach) struct run run = { .fd = -1 };
	json_t *r = l->job->result, *plan = json_copy(r);

	enum err e = plan ? plan_doc(l, plan) : ERR(NO_MEMORY, "no memory for the plan");
	e = e ?: meet_hosts(l);
	e = e ?: run_built(l, plan, &run);
	json_decref(plan);
	spread_free(l->spread); /* its threads use the run */
	l->spread = NULL;
	TRY(e);
	if (l->rest)
		TRY(load_delta_end(l->job, &l->delta));
	json_object_set_new(r, "bytes", json_integer((json_int_t)run_bytes_total(&run)));
	gang_run_note(l->job, &run);
	json_object_set_new(r, "bytes_from_memory", json_integer((json_int_t)atomic_load(&run.head->memory_bytes)));
	json_object_set_new(r, "bytes_from_neighbours", json_integer((json_int_t)atomic_load(&run.head->neighbour_bytes)));
	checked_report(&l->job->checked, r);
	return OK;
}

/* "loads" says whether the job would succeed. */
static FALLIBLE enum err dry_run(struct load *l)
{
	json_t *doc = l->job->result;

	json_object_set_new(doc, "chunks", json_integer((json_int_t)l->target->chunk_count));
	json_object_set_new(doc, "loads", json_boolean(l->problems.count == 0));
	TRY(plan_doc_problems(doc, &l->problems));
	return plan_doc(l, doc);
}

/* The images of a target that is there, or that is made. */
static FALLIBLE enum err place(struct load *l)
{
	struct segments_form form = { .values_everywhere = true, .plain = l->optim.plan.plain, .outers = l->optim.plan.outers };
	bool delta = l->job->spec.delta;

	if (l->existing)
		return l->job->dry_run ? OK : segments_set_values(l->job, l->existing, &l->source, l->view.sd);
	if (l->exact)
		return exact_load_headers(l->job, &l->source);
	if (delta)
		TRY(load_delta_size(l->target, l->world_size, &l->delta));
	form.behind = l->delta.behind;
	form.image_bytes = l->delta.image_bytes;
	TRY(segments_make(l->job, &l->source, l->optimizer ? l->target : l->view.sd, l->target, l->world_size,
			  l->optimizer || delta ? &form : NULL));
	if (!delta || l->job->dry_run)
		return OK;
	return load_delta_begin(l->job, &l->source, l->view.sd, l->newest, l->arena, &l->delta, &l->rest, &l->plan);
}

/* With `delta` a target that is there gets a new generation. */
static void find_target(struct load *l)
{
	const struct rank_segments *there = job_state_dict(l->job, &l->job->spec.target);

	*(l->job->spec.delta ? &l->newest : &l->existing) = there;
}

static FALLIBLE enum err load(struct load *l)
{
	l->job->result = json_object();
	l->arena = arena_new(UINT64_MAX);
	NEED(l->job->result && l->arena, "no memory for a plan");
	l->problems.arena = l->arena;
	l->optimizer = l->job->spec.optimizer_key.n > 0;
	find_target(l);
	TRY(job_state(l->job, "planning", "metadata", NULL, 0));
	TRY(input_open(l->job, apply_source(l->job), &l->source));
	TRY(input_undo_transforms(l->job, &l->source, false));
	TRY(apply_open(l->job, &l->source, &l->apply));
	apply_report(&l->apply, l->job->result);
	TRY(spec_select(&l->job->spec, l->source.sd, &l->stored));
	TRY(convert_rules_apply(l->job, &l->stored, NULL, &l->rules, &l->view));
	TRY(cut(l));
	TRY(job_state(l->job, "planning", "plan", NULL, 0));
	l->match.problems = &l->problems;
	l->match.strict = l->job->spec.strict;
	if (!l->exact)
		TRY(load_plan_make(l->view.sd, l->target, &l->match, l->arena, &l->plan));
	TRY(report(l));
	if (!l->job->dry_run)
		TRY(problems_raise(&l->problems));
	TRY(place(l));
	TRY(build(l));
	return l->job->dry_run ? dry_run(l) : execute(l);
}

enum err load_job(struct job *j)
{
	struct load l = { .job = j };

	enum err e = load(&l);
	run_build_free(&l.build);
	memory_close(&l.memory);
	mem_free(l.source_map);
	mem_free(l.segment_files);
	load_delta_free(&l.delta);
	sdict_free(l.rest);
	sdict_free(l.target);
	problems_free(&l.problems);
	arena_free(l.arena);
	mem_free(l.view.dtypes);
	convert_rules_free(&l.rules);
	apply_free(&l.apply);
	spec_view_free(&l.stored);
	optim_load_free(&l.optim);
	input_close(&l.source);
	return e;
}
