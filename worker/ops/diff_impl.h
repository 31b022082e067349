/* diff_impl.h: the state of a diff, which diff.c fills and diff_report.c turns into the result. */
#pragma once
#include "runner/build.h"
#include "runner/input.h"

/* Change of a key from A to B. */
enum change { CHANGE_NONE, CHANGE_VALUES, CHANGE_DTYPE, CHANGE_SHAPE, CHANGE_KIND, CHANGE_ADDED, CHANGE_REMOVED, CHANGES };

/* A tensor whose elements are compared. */
struct compared {
	json_t *entry;                 /* of the list of differences, which has it: its dtypes differ; NULL: none so far */
	const struct sd_tensor *b;
	struct stats_diff sum;         /* over all of it */
	json_t *first;                 /* index of the first element that differs; NULL: none does */
	double moved;                  /* what movers are sorted by */
};

struct diff {
	struct job *job;
	struct input a, b;
	struct spec_view view_a, view_b;
	struct sdict *plan_a, *plan_b; /* without replicas; plan_b: NULL if no digests are compared */
	struct sdict *common;          /* of plan_a, the tensors of one shape on both sides whose elements are read */
	struct compared *compared;     /* per tensor of `common` */
	struct arena *arena;
	struct run_build build;
	uint32_t *map_a, *map_b;
	json_t *list;
	uint64_t count;                /* of differences, listed or not */
	uint64_t tensors[CHANGES], values[CHANGES];
	uint64_t total_bytes;          /* of A's tensors */
	struct { uint64_t tensors, bytes; } by_digest, by_reading; /* proved equal */
};

/* Adds a difference to the list. NULL when that is long enough: differences are counted on. Takes a and b (NULL: null). */
json_t *diff_put(struct diff *d, struct str fqn, const char *what, json_t *a, json_t *b);
/* Adds up what the run has found in each tensor, and lists those that differ. run_first: its first source of A. */
FALLIBLE enum err diff_report_run(struct diff *d, const struct run *run);
/* Sets `totals` and `unchanged` of the result. */
FALLIBLE enum err diff_report_totals(struct diff *d);
