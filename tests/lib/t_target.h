/* t_target.h: a target checkpoint in the making: what the tests of build_files.c and build_other.c begin and end with. */
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
