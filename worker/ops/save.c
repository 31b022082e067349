/* save.c: shared memory → a checkpoint. Each rank's segment holds its part; equal parts of several ranks are written once. */

#include "ops/planned_save.h"
#include "runner/hosts.h"
#include "runner/input.h"
#include "runner/plan_cache.h"
#include "runner/replicas.h"
#include "runner/target.h"
#include "runner/write.h"

struct save {
	struct job *job;
	struct input source;
	struct spec_view view;
	struct sdict *plan;
	struct arena *arena;
	struct replicas replicas;
	struct run_build build;
	uint32_t *file_map, *value_src;
	const struct rank_segments *entry;     /* of the source */
	json_t *casts;
	struct plan_prints prints;
	struct write_ready ready;
	struct hosts *hosts;
	struct write_store store;      /* of the hosts */
};

static FALLIBLE enum err set_dtypes(const struct spec_view *v, struct sdict *plan)
{
	for (uint64_t i = 0; i < plan->tensor_count; i++) {
		const struct sd_tensor *from = sdict_tensor(v->sd, plan->tensors[i].fqn);
		must(from != NULL);
		plan->tensors[i].dtype = v->dtypes[from - v->sd->tensors];
	}
	return OK;
}

static json_int_t generation_of(const struct save *s)
{
	return (json_int_t)s->entry->generation;
}

/* Begins the result with the figures known before anything is written. */
static FALLIBLE enum err begin_result(struct save *s, uint64_t bytes_saved, json_t *casts, bool reused)
{
	json_t *r = json_pack("{s:I, s:I, s:b}", "generation", generation_of(s), "dedup_bytes_saved", (json_int_t)bytes_saved,
			      "plan_reused", reused);

	NEED(r, "no memory for the result");
	json_decref(s->job->result);
	s->job->result = r;
	if (casts)
		json_object_set(r, "cast", casts);
	json_object_set(r, "divergent", s->replicas.list);
	return OK;
}

static struct write_spec spec_of(struct save *s, struct sdict *plan, const struct replicas *replicas)
{
	return (struct write_spec){ .format = FORMAT_DCP, .build = &s->build, .target = plan, .value_src = s->value_src,
				    .world_size = s->entry->world_size,
				    .has_generation = true, .generation = (uint64_t)generation_of(s),
				    .first_replica = replicas->first_src, .replica_count = (uint32_t)replicas->count,
				    .after_run = replicas_compare, .store = s->hosts ? &s->store : NULL };
}

static FALLIBLE enum err write_saved(struct save *s, const struct save_plan_stats *stats)
{
	struct job *j = s->job;
	struct load_plan pieces;
	uint32_t first;

	TRY(input_add_files(&s->source, &s->build, false, &s->file_map));
	TRY(build_sources(&s->build, s->plan, RUN_SRC_PLAIN, s->file_map, NULL, &first));
	TRY(replicas_find(j, s->view.sd, s->plan, s->view.dtypes, &s->replicas));
	TRY(build_sources(&s->build, s->replicas.sd, RUN_SRC_PLAIN, s->file_map, NULL, &s->replicas.first_src));
	TRY(target_identity(s->plan->chunk_count, s->arena, &pieces));
	s->value_src = mem_alloc(s->plan->value_count * sizeof *s->value_src);
	NEED(s->value_src, "no memory for %ju values", (uintmax_t)s->plan->value_count);
	memset(s->value_src, 0xFF, s->plan->value_count * sizeof *s->value_src); /* all inline */
	TRY(set_dtypes(&s->view, s->plan));
	TRY(target_casts(s->view.sd, s->plan, NULL, &s->casts));
	TRY(begin_result(s, stats->bytes_saved, s->casts, false));
	struct write_spec w = spec_of(s, s->plan, &s->replicas);
	w.pieces = &pieces;
	w.first_src = first;
	w.user = &s->replicas;
	w.ready = s->job->worker->plans && !s->prints.failed && !s->hosts ? &s->ready : NULL;
	return write_checkpoint(j, &w);
}

/* The next step of the same training may be the same but for its values. */
static void keep(struct save *s, const struct save_plan_stats *stats)
{
	CLEANUP(mem_free_ptr) struct image **images = mem_zalloc(s->prints.count, sizeof(struct image *));
	struct plan_kept k = { .plan = move(s->plan), .ready = s->ready, .replicas = s->replicas, .segment_files = move(s->file_map),
			       .casts = move(s->casts), .prints = s->prints, .bytes_saved = stats->bytes_saved };

	for (uint32_t i = 0; images && i < s->prints.count; i++)
		images[i] = s->prints.v[i].values;
	s->ready = (struct write_ready){ 0 };
	s->prints = (struct plan_prints){ 0 };
	s->replicas = (struct replicas){ 0 };
	json_decref(k.replicas.list);
	k.replicas.list = NULL;
	if (!images || image_collect_values(images, k.prints.count, &k.known) != OK)
		k.prints.failed = true;
	plan_cache_keep(s->job, &k);
}

static FALLIBLE enum err save(struct save *s)
{
	struct save_plan_stats stats = { 0 };

	if (s->hosts)
		TRY(hosts_input(s->hosts, &s->source));
	else
		TRY(input_open_noted(s->job, &s->job->spec.source, s->job->dry_run ? NULL : &s->prints, &s->source));
	if (s->hosts)
		s->entry = s->source.state_dict;
	TRY(spec_select(&s->job->spec, s->source.sd, &s->view));
	TRY(replicas_values(s->view.sd, &s->replicas));
	TRY(save_plan_make(s->view.sd, s->job->spec.dedup, UINT64_MAX, &s->plan, &stats));
	TRY(save_plan_validate(s->plan));
	s->plan->has_paths = s->plan->has_paths && s->job->spec.flatten;
	s->arena = arena_new(UINT64_MAX);
	NEED(s->arena, "no memory for a plan");
	TRY(write_saved(s, &stats));
	if (s->ready.plan)
		keep(s, &stats);
	return OK;
}

/* As a step before was saved. *stale_out: it has to be planned after all. */
static FALLIBLE enum err save_again(struct save *s, struct plan_kept *k, bool *stale_out)
{
	TRY(replicas_values(s->view.sd, &s->replicas));
	TRY(plan_kept_renew(k, s->entry, s->view.sd));
	TRY(begin_result(s, k->bytes_saved, k->casts, true));
	k->replicas.job = s->job;
	k->replicas.plan = k->plan;
	k->replicas.fail = s->replicas.fail;
	k->replicas.list = json_incref(s->replicas.list);
	struct write_spec w = spec_of(s, k->plan, &k->replicas);
	w.user = &k->replicas;
	enum err e = write_again(s->job, &w, &k->ready, stale_out);
	json_decref(k->replicas.list);
	k->replicas.list = NULL;
	return e;
}

/* A rank that is not sealed yet. */
static bool is_filling(const struct rank_segments *s)
{
	bool any = false;

	for (uint32_t i = 0; s && i < s->count; i++)
		any = any || s->v[i].filling;
	return any;
}

static FALLIBLE enum err find_and_save(struct save *s)
{
	bool fail = s->job->spec.on_divergence == DIVERGENCE_FAIL, stale = true;

	s->replicas.fail = fail;
	s->entry = job_state_dict(s->job, &s->job->spec.source);
	s->job->streams = is_filling(s->entry);
	TRY(job_state(s->job, "planning", "metadata", NULL, 0));
	if (s->hosts)
		return hosts_end_again(s->hosts, hosts_written(s->hosts) ? hosts_await_again(s->hosts) : save(s));
	struct plan_kept *k = s->entry ? plan_cache_find(s->job, s->entry, &s->view) : NULL;
	if (!k)
		return save(s);
	enum err e = save_again(s, k, &stale);
	if (e || stale)
		plan_cache_drop(s->job->worker->plans, k);
	if (e || !stale)
		return e;
	replicas_free(&s->replicas);
	s->replicas.fail = fail;
	spec_view_free(&s->view);
	return save(s);
}

enum err save_job(struct job *j)
{
	struct save s = { .job = j };

	if (j->spec.parts.v)
		return planned_save_job(j);
	enum err e = hosts_open(j, &s.hosts);
	if (s.hosts)
		s.store = hosts_store(s.hosts);
	e = e ?: find_and_save(&s);
	hosts_close(s.hosts, e);
	plan_prints_free(&s.prints);
	write_ready_free(&s.ready);
	json_decref(s.casts);
	run_build_free(&s.build);
	mem_free(s.file_map);
	mem_free(s.value_src);
	replicas_free(&s.replicas);
	sdict_free(s.plan);
	arena_free(s.arena);
	spec_view_free(&s.view);
	input_close(&s.source);
	return e;
}
