/* bench_plan.c: what planning a million chunks costs. One JSON line:
 *
 *     bench_plan [tensors] [ranks]       so many tensors, Shard(0) over so many ranks; default 977 and 1024
 *     bench_plan 1 1024 1000             one tensor cut as a 1000 x 1000 grid
 *
 * held → save plan → validation → load plan onto half as many ranks. Memory: the peak, per chunk. */
#include <stdio.h>
#include <stdlib.h>

#include "bench/bench.h"
#include "plan/layout.h"
#include "plan/load_plan.h"
#include "plan/save_plan.h"

#define CAP (4ull << 30)

static void ok(enum err e)
{
	if (!e)
		return;
	fprintf(stderr, "%s: %s (%s)\n", err_code_name(e), err_last()->text, err_last()->place);
	exit(1);
}

static const struct sd_loc nowhere = { .file = SD_NO_FILE };

static void cut(struct sdict *sd, uint32_t tensors, int64_t rows, uint32_t ranks)
{
	const struct placement shard = { .kind = PLACE_SHARD };
	const struct layout_rule rule = { .match = STR("*"), .placements = &shard, .placement_count = 1 };
	const struct layout l = { &rule, 1, ranks };

	ok(layout_check(&l));
	for (uint32_t i = 0; i < tensors; i++) {
		char name[64];
		uint32_t t, matched;

		snprintf(name, sizeof name, "model.layers.%u.mlp.weight", i);
		ok(sdict_add_tensor(sd, str_of(name), DT_BFLOAT16, 2, (const int64_t[]){ rows, 4096 }, &t));
		ok(layout_apply(&l, sd, t, &matched));
	}
}

static void cut_grid(struct sdict *sd, int64_t side, uint32_t rows, uint32_t columns, uint32_t ranks)
{
	uint32_t t;

	ok(sdict_add_tensor(sd, STR("grid"), DT_BFLOAT16, 2, (const int64_t[]){ side, side }, &t));
	for (int64_t i = 0; i < (int64_t)rows * columns; i++) {
		int64_t r = i / columns, c = i % columns, h = side / rows, w = side / columns;
		ok(sdict_add_chunk(sd, t, (const int64_t[]){ r * h, c * w, h, w }, (uint32_t)(i % ranks), nowhere));
	}
}

int main(int argc, char **argv)
{
	uint32_t tensors = argc > 1 ? (uint32_t)strtoul(argv[1], NULL, 10) : 977;
	uint32_t ranks = argc > 2 ? (uint32_t)strtoul(argv[2], NULL, 10) : 1024;
	uint32_t grid = argc > 3 ? (uint32_t)strtoul(argv[3], NULL, 10) : 0;
	struct sdict *held, *target, *plan;
	struct save_plan_stats stats;
	struct load_plan loads;
	struct load_match match = { .strict = true };
	struct arena *arena = arena_new(CAP);
	double t[6];

	if (!tensors || !ranks || !arena)
		return 2;
	ok(sdict_new(CAP, &held));
	ok(sdict_new(CAP, &target));
	long before = status_kib("VmHWM:");
	t[0] = now();
	if (grid)
		cut_grid(held, (int64_t)grid * 6, grid, grid, 1024);
	else
		cut(held, tensors, (int64_t)ranks * 4, ranks);
	t[1] = now();
	long held_peak = status_kib("VmHWM:");
	ok(save_plan_make(held, DEDUP_BALANCED, CAP, &plan, &stats));
	t[2] = now();
	ok(save_plan_validate(plan));
	t[3] = now();
	long save_peak = status_kib("VmHWM:");
	uint64_t chunks = held->chunk_count, names = 0;
	for (uint64_t i = 0; i < held->tensor_count; i++)
		names += held->tensors[i].fqn.n;
	sdict_free(held);
	if (grid)
		cut_grid(target, (int64_t)grid * 6, grid / 2, grid * 3, 512);
	else
		cut(target, tensors, (int64_t)ranks * 4, ranks / 2 ? ranks / 2 : 1);
	t[4] = now();
	ok(load_plan_make(plan, target, &match, arena, &loads));
	t[5] = now();
	printf("{\"chunks\":%ju,\"layout_s\":%.3f,\"save_plan_s\":%.3f,\"validate_s\":%.3f,\"load_plan_s\":%.3f,"
	       "\"reads\":%ju,\"name_bytes_per_chunk\":%.1f,\"held_bytes_per_chunk\":%.0f,"
	       "\"save_peak_bytes_per_chunk\":%.0f,\"peak_rss_bytes\":%ju}\n",
	       (uintmax_t)chunks, t[1] - t[0], t[2] - t[1], t[3] - t[2], t[5] - t[4], (uintmax_t)loads.source_count,
	       (double)names / (double)chunks, (double)(held_peak - before) * 1024 / (double)chunks,
	       (double)(save_peak - before) * 1024 / (double)chunks, (uintmax_t)status_kib("VmHWM:") * 1024);
	return 0;
}
