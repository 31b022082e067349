/* t_target.h: a target checkpoint in the making: what the tests of build_files.c and build_diff.c begin and end with. */
#pragma once
#include "lib/t.h"

#include "lib/t_build.h"

static struct sdict *sd;
static struct run_build b;
static struct arena *arena;
static struct load_plan plan;
static struct build_target target;

static inline int t_target_setup(void **state)
{
	(void)state;
	memset(&b, 0, sizeof b);
	memset(&target, 0, sizeof target);
	T_OK(sdict_new(UINT64_MAX, &sd));
	arena = arena_new(UINT64_MAX);
	return 0;
}

/* A plan in which each chunk of sd has one source, that of its own number. */
static inline void t_target_one_to_one(void)
{
	T_OK(arena_alloc(arena, sd->chunk_count + 1, sizeof *plan.first, &plan.first));
	T_OK(arena_alloc(arena, sd->chunk_count + 1, sizeof *plan.sources, &plan.sources));
	for (uint64_t i = 0; i <= sd->chunk_count; i++) {
		plan.first[i] = i;
		plan.sources[i] = (uint32_t)i;
	}
	plan.source_count = sd->chunk_count;
}

static inline int t_target_teardown(void **state)
{
	(void)state;
	mem_free(target.chunk_places);
	mem_free(target.value_places);
	run_build_free(&b);
	sdict_free(sd);
	arena_free(arena);
	return 0;
}
