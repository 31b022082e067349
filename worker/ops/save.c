/* save.c: shared memory → a checkpoint. Each rank's segment holds its part; equal parts of several ranks are written once. */
#include <stdio.h>

#include "base/num.h"
#include "ops/input.h"
#include "ops/replicas.h"
#include "ops/target.h"
#include "ops/write.h"

struct save {
	struct job *job;
	struct input source;
	struct spec_view view;
	struct sdict *plan;
	struct arena *arena;
	struct replicas replicas;
	struct run_build build;
	uint32_t *file_map, *value_src;
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

static FALLIBLE enum err write_saved(struct save *s, const struct save_plan_stats *stats)
{
	struct job *j = s->job;
	struct load_plan pieces;
	uint32_t first;
	json_t *casts = NULL;

	TRY(input_add_files(&s->source, &s->build, false, &s->file_map));
	TRY(build_sources(&s->build, s->plan, RUN_SRC_PLAIN, s->file_map, NULL, &first));
	TRY(replicas_find(j, s->view.sd, s->plan, s->view.dtypes, &s->replicas));
	TRY(build_sources(&s->build, s->replicas.sd, RUN_SRC_PLAIN, s->file_map, NULL, &s->replicas.first_src));
	TRY(target_identity(s->plan->chunk_count, s->arena, &pieces));
	s->value_src = mem_alloc(s->plan->value_count * sizeof *s->value_src);
	if (!s->value_src)
		return ERR(NO_MEMORY, "no memory for %ju values", (uintmax_t)s->plan->value_count);
	memset(s->value_src, 0xFF, s->plan->value_count * sizeof *s->value_src); /* all inline */
	TRY(set_dtypes(&s->view, s->plan));
	TRY(target_casts(s->view.sd, s->plan, NULL, &casts));
	j->result = json_pack("{s:I, s:I}", "generation",
			      json_integer_value(json_object_get(s->source.state_dict, "generation")), "dedup_bytes_saved",
			      (json_int_t)stats->bytes_saved);
	if (casts)
		json_object_set_new(j->result, "cast", casts);
	json_object_set(j->result, "divergent", s->replicas.list);
	struct write_spec w = { .build = &s->build, .target = s->plan, .pieces = &pieces, .first_src = first,
				.value_src = s->value_src, .world_size = s->source.world_size,
				.to = json_object_get(j->spec, "target"), .options = json_object_get(j->spec, "options"),
				.has_generation = true,
				.first_replica = s->replicas.first_src, .replica_count = (uint32_t)s->replicas.count,
				.after_run = replicas_compare, .user = &s->replicas,
				.generation = (uint64_t)json_integer_value(json_object_get(s->source.state_dict,
											   "generation")) };
	return write_checkpoint(j, &w);
}

static FALLIBLE enum err save(struct save *s)
{
	struct save_plan_stats stats = { 0 };
	const json_t *options = json_object_get(s->job->spec, "options");
	const char *divergence = json_string_value(json_object_get(options, "on_divergence"));

	s->replicas.fail = divergence && strcmp(divergence, "fail") == 0;
	TRY(job_state(s->job, "planning", "metadata", NULL, 0));
	TRY(input_open(s->job, json_object_get(s->job->spec, "source"), &s->source));
	TRY(spec_select(s->job->spec, s->source.sd, &s->view));
	TRY(replicas_values(s->view.sd, &s->replicas));
	TRY(save_plan_make(s->view.sd, target_dedup(options), UINT64_MAX, &s->plan, &stats));
	TRY(save_plan_validate(s->plan));
	s->plan->has_paths = s->plan->has_paths && !json_is_false(json_object_get(options, "flatten_state_dict"));
	s->arena = arena_new(UINT64_MAX);
	if (!s->arena)
		return ERR(NO_MEMORY, "no memory for a plan");
	return write_saved(s, &stats);
}

enum err save_job(struct job *j)
{
	struct save s = { .job = j };

	enum err e = save(&s);
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
