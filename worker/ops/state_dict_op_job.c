/* state_dict_op_job.c: the job kinds on state dicts in shared memory: create, copy, offload, gather, broadcast, distribute, redistribute,
 * compare.
 *
 * All are one way: images → trees, state_dict_op_plan, new segments for every rank of the target, moves. A target's bytes are never
 * changed in place: what fails leaves the old generation as it was. */
#include <stdio.h>

#include "base/num.h"
#include "ops/state_dict_op_delta.h"
#include "ops/state_dict_op_report.h"
#include "ops/state_dict_op_tables.h"
#include "runner/exchange.h"
#include "runner/fold.h"
#include "runner/gang_run.h"
#include "runner/segments.h"
#include "runner/spec.h"
#include "runner/target.h"
#include "session/gpu.h"

enum { SIDE_SOURCE, SIDE_COMPANION };

struct op {
	struct job *job;
	struct arena *arena;
	struct state_dict_op_request rq;
	struct spec_layout layout;
	struct layout_use layout_use;
	struct state_dict_op_places places;
	struct state_dict_op_trees trees[STATE_DICT_OP_SIDES];
	const struct rank_segments *dicts[STATE_DICT_OP_SIDES];
	struct state_dict_op_plan plan;
	struct state_dict_op_images images;
	struct run_build build;
	struct state_dict_op_delta delta;
};

/* ----------------------------------------------------------------------------------------------------- request */

/* Ranks that get a result: fewer than the source has only by redistribute. */
static uint32_t target_world(const struct op *o)
{
	return o->rq.target_world ? o->rq.target_world : o->rq.world_size;
}

static FALLIBLE enum err read_request(struct op *o)
{
	const struct spec *spec = &o->job->spec;

	if (spec->root >= (int64_t)o->rq.world_size)
		return ERR(INVALID_REQUEST, "root %jd in a world of %u", (intmax_t)spec->root, o->rq.world_size);
	o->rq.group = spec->group.v;
	o->rq.group_count = (uint32_t)spec->group.n;
	o->rq.ranks_only = spec->ranks_only.v;
	o->rq.ranks_only_count = (uint32_t)spec->ranks_only.n;
	o->rq.root = (uint32_t)spec->root;
	o->rq.type_check = spec->type_check;
	o->rq.strict = spec->drop;
	o->rq.cpu_offload = spec->cpu_offload;
	o->rq.pin_memory = spec->pin_memory;
	o->rq.share_memory = spec->share_memory;
	o->rq.values = spec->values;
	if (!spec->layout.given)
		return OK;
	TRY(spec_layout_open(o->job->worker, &spec->layout, target_world(o), &o->layout));
	o->rq.layout = &o->layout.layout;
	TRY(layout_check_in_memory(o->rq.layout));
	TRY(layout_use_new(o->rq.layout, &o->layout_use));
	o->rq.layout_use = &o->layout_use;
	return OK;
}

/* ------------------------------------------------------------------------------------------------------ inputs */

static uint32_t world_of(const struct rank_segments *dict)
{
	return dict ? dict->count : 0;
}

/* The target's world as asked for, else as it is, else the source's. */
static uint32_t redistributed_world(const struct op *o)
{
	uint32_t there = world_of(o->dicts[SIDE_COMPANION]);

	if (o->job->spec.world_size)
		return (uint32_t)o->job->spec.world_size;
	return there ? there : world_of(o->dicts[SIDE_SOURCE]);
}

/* The world is as large as the larger state dict, or as is asked for. */
static FALLIBLE enum err find_dicts(struct op *o)
{
	const struct spec *spec = &o->job->spec;
	bool compare = o->rq.kind == JOB_COMPARE;

	o->dicts[SIDE_SOURCE] = job_state_dict(o->job, compare ? &spec->a : &spec->source);
	o->dicts[SIDE_COMPANION] = job_state_dict(o->job, compare ? &spec->b : &spec->target);
	if (!o->dicts[SIDE_SOURCE] || (compare && !o->dicts[SIDE_COMPANION]))
		return ERR(NOT_FOUND, "a state dict of the job is not there");
	if (!compare && str_eq(spec->target.name, spec->source.name))
		o->dicts[SIDE_COMPANION] = NULL;
	o->rq.world_size = world_of(o->dicts[SIDE_SOURCE]);
	for (uint32_t i = 0; i < STATE_DICT_OP_SIDES; i++)
		o->rq.world_size = (uint32_t)num_max(o->rq.world_size, world_of(o->dicts[i]));
	o->rq.world_size = (uint32_t)num_max(o->rq.world_size, (uint64_t)spec->world_size);
	if (o->rq.kind == JOB_REDISTRIBUTE)
		o->rq.target_world = redistributed_world(o);
	o->job->members = exchange_members(o->job, o->rq.world_size);
	return o->rq.world_size ? OK : ERR(PROTOCOL, "a state dict without ranks");
}

static FALLIBLE enum err read_trees(struct op *o)
{
	for (uint32_t i = 0; i < STATE_DICT_OP_SIDES; i++) {
		if (!o->dicts[i] || (i == SIDE_COMPANION && o->job->spec.delta)) /* the layout decides how it is cut */
			continue;
		TRY(state_dict_op_trees_read(o->job, o->dicts[i], i, o->rq.world_size, o->arena, &o->places, &o->trees[i]));
		for (uint32_t r = 0; r < o->rq.world_size; r++)
			if (o->trees[i].ranks[r])
				TRY(tree_check(o->trees[i].ranks[r], r, o->rq.world_size));
	}
	return OK;
}

static FALLIBLE enum err check_folds(const struct op *o)
{
	for (uint64_t i = 0; i < o->plan.move_count; i++) {
		const struct state_dict_op_move *m = &o->plan.moves[i];
		struct run_move probe = { .op = m->op, .divisor = m->divisor };
		if (!m->reduce || (i > 0 && m[-1].from == m->from))
			continue;
		enum err e = fold_check(m->from->tensor.dtype, &probe);
		struct str fqn = m->from_shard < m->from->tensor.shard_count
					 ? o->places.v[m->from->tensor.shards[m->from_shard].at].fqn : STR("");
		if (e)
			return err_at_rank(err_at_fqn(e, fqn.p, fqn.n), m->from_rank);
	}
	return OK;
}

static FALLIBLE enum err plan(struct op *o)
{
	TRY(job_state(o->job, "planning", "metadata", NULL, 0));
	TRY(find_dicts(o));
	TRY(read_request(o));
	TRY(read_trees(o));
	TRY(job_state(o->job, "planning", "plan", NULL, 0));
	TRY(state_dict_op_plan(&o->rq, o->trees[SIDE_SOURCE].ranks, o->trees[SIDE_COMPANION].ranks, NULL, o->arena, &o->plan));
	TRY(check_folds(o));
	return state_dict_op_report_plan(o->job, &o->rq, &o->plan);
}

/* --------------------------------------------------------------------------------------------------- execution */

static FALLIBLE enum err execute(struct op *o, bool compare)
{
	CLEANUP(run_detach) struct run run = { .fd = -1 };
	bool delta = o->job->spec.delta;
	const struct rank_segments *companion = o->dicts[SIDE_COMPANION];
	struct state_dict_op_tables t = { .dicts = { o->dicts[SIDE_SOURCE], delta ? NULL : companion },
					  .made = compare ? NULL : &o->job->segments, .places = &o->places,
					  .images = compare ? NULL : &o->images, .plan = &o->plan, .by_digest = delta };

	TRY(state_dict_op_tables_make(&t, &o->build));
	if (delta)
		TRY(state_dict_op_delta_begin(o->job, companion, &o->images, &o->build, &o->delta));
	if (!compare)
		TRY(segments_put_headers(o->job, o->images.headers));
	o->build.opts.near = (struct stats_near){ .rtol = o->job->spec.rtol, .atol = o->job->spec.atol };
	TRY(gang_run_built(o->job, &o->build, compare ? "compare" : "copy", NULL, &run));
	if (delta) {
		TRY(state_dict_op_delta_end(o->job, &o->images, &run, &o->delta));
		json_object_set_new(o->job->result, "changed_bytes", json_integer((json_int_t)o->delta.changed_bytes));
		json_object_set_new(o->job->result, "kept_bytes", json_integer((json_int_t)o->delta.kept_bytes));
		json_object_set_new(o->job->result, "changed_tensors", json_integer((json_int_t)o->delta.changed_tensors));
	}
	return state_dict_op_report_run(o->job, &run, &o->places, compare);
}

/* Not being able to is no failure of the job: the memory is there, and the result says so. */
static void pin(struct op *o)
{
	enum err e = o->rq.pin_memory ? gpu_pin_made(o->job) : OK;

	json_object_set_new(o->job->result, "pinned", json_boolean(o->rq.pin_memory && !e));
	if (e)
		json_object_set_new(o->job->result, "pin_problem", json_string(err_last()->text));
}

static FALLIBLE enum err operate(struct op *o)
{
	bool compare = o->rq.kind == JOB_COMPARE;

	o->job->result = json_object();
	o->arena = arena_new(UINT64_MAX);
	NEED(o->job->result && o->arena, "no memory for a plan");
	TRY(exchange_choose(o->job));
	TRY(plan(o));
	if (compare && (!o->plan.move_count || o->job->dry_run))
		return OK;
	if (!compare) {
		TRY(state_dict_op_images_make(o->plan.target, target_world(o), o->trees, o->arena, &o->images));
		if (o->job->spec.delta)
			TRY(state_dict_op_delta_size(&o->plan, &o->images, &o->delta));
		json_object_set_new(o->job->result, "tensors", json_integer((json_int_t)o->images.tensors));
		json_object_set_new(o->job->result, "values", json_integer((json_int_t)o->images.values));
		TRY(segments_ask(o->job, o->images.world_size, o->images.image_bytes, o->delta.bytes));
	}
	if (o->job->dry_run)
		return OK;
	TRY(execute(o, compare));
	if (!compare)
		pin(o);
	return OK;
}

enum err state_dict_op_job(struct job *j)
{
	struct op o = { .job = j, .rq.kind = j->kind };

	if (spec_has_rules(&j->spec)) /* of a redistribute with `delta`: a load out of this node's own memory */
		return load_job(j);
	enum err e = operate(&o);
	run_build_free(&o.build);
	state_dict_op_delta_free(&o.delta);
	state_dict_op_images_free(&o.images);
	for (uint32_t i = 0; i < STATE_DICT_OP_SIDES; i++)
		state_dict_op_trees_free(&o.trees[i]);
	vec_free(&o.places);
	layout_use_free(&o.layout_use);
	spec_layout_free(&o.layout);
	arena_free(o.arena);
	return e;
}
