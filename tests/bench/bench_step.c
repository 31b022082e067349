/* bench_step.c: what a training step's save costs before its first byte moves. One JSON line:
 *
 *     bench_step [tensors] [ranks]       so many tensors, Shard(0) over so many ranks; default 10000 and 4
 *
 * Each step has other values (step, lr); tensors and places are the same. */
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "bench/bench.h"
#include "base/num.h"
#include "runner/input.h"
#include "runner/plan_cache.h"
#include "runner/target.h"
#include "os/fs.h"
#include "plan/save_plan.h"

enum { RANKS_MAX = 64, STEPS = 7 };

static void ok(enum err e)
{
	if (!e)
		return;
	fprintf(stderr, "%s: %s (%s)\n", err_code_name(e), err_last()->text, err_last()->place);
	exit(1);
}

/* Values that differ from step to step: a line of JSON of about the same length. */
static void make_values(struct image_value *v, char text[2][64], uint32_t step)
{
	snprintf(text[0], sizeof text[0], "%u", 1000 + step);
	snprintf(text[1], sizeof text[1], "%.17g", 1e-3 / (1 + step));
	v[0] = (struct image_value){ .fqn = STR("step"), .kind = IMAGE_VALUE_JSON, .bytes = str_of(text[0]) };
	v[1] = (struct image_value){ .fqn = STR("lr"), .kind = IMAGE_VALUE_JSON, .bytes = str_of(text[1]) };
}

static int make_segment(uint32_t rank, uint32_t tensors, uint32_t ranks, uint32_t step, uint64_t *image_bytes)
{
	struct buf b = BUF_INIT(1u << 30);
	struct image_value values[2];
	char text[2][64], name[64];
	struct sdict *sd;
	uint32_t t, f;

	ok(sdict_new(1ull << 30, &sd));
	for (uint32_t r = 0; r < ranks; r++) {
		snprintf(name, sizeof name, "%u", r);
		ok(sdict_add_file(sd, str_of(name), r, &f));
	}
	for (uint32_t i = 0; i < tensors; i++) {
		int64_t dims[4] = { 4 * (int64_t)rank, 0, 4, 512 };
		snprintf(name, sizeof name, "model.layers.%u.mlp.weight", i);
		ok(sdict_add_tensor(sd, str_of(name), DT_BFLOAT16, 2, (const int64_t[]){ 4 * (int64_t)ranks, 512 }, &t));
		ok(sdict_add_chunk(sd, t, dims, rank, (struct sd_loc){ .file = SD_NO_FILE }));
	}
	make_values(values, text, step);
	ok(image_build(sd, rank, values, 2, &b, image_bytes));
	int fd = memfd_create("segment", MFD_CLOEXEC);
	ok(fd < 0 ? ERR_SYS(SYSTEM, "memfd_create") : fs_pwrite(fd, b.p, b.len, 0, "segment"));
	buf_free(&b);
	sdict_free(sd);
	return fd;
}

static json_t *make_entry(uint32_t tensors, uint32_t ranks, uint32_t step, int *fds)
{
	json_t *list = json_array();

	for (uint32_t r = 0; r < ranks; r++) {
		uint64_t bytes;
		fds[r] = make_segment(r, tensors, ranks, step, &bytes);
		json_array_append_new(list, json_pack("{s:i, s:i, s:I, s:s}", "rank", (int)r, "fd", (int)r, "image_bytes",
						      (json_int_t)bytes, "segment", "/dcpd-x"));
	}
	return json_pack("{s:{s:{s:i, s:i, s:o}}}", "state_dicts", "t", "world_size", (int)ranks, "generation", (int)step, "ranks", list);
}

/* The steps of save.c before the first byte could move. kept: the plan that save.c keeps for the next save. */
static void plan_in_full(struct job *j, uint32_t ranks, double t[4], struct plan_kept *kept)
{
	struct input in;
	struct spec_view view;
	struct run_build b = { 0 };
	struct save_plan_stats stats;
	struct load_plan pieces;
	struct arena *a = arena_new(1ull << 32);
	struct run run = { .fd = -1 };
	uint32_t first;

	t[0] = now();
	ok(input_open_noted(j, &j->spec.source, &kept->prints, &in));
	t[1] = now();
	ok(spec_select(&j->spec, in.sd, &view));
	ok(save_plan_make(view.sd, DEDUP_BALANCED, UINT64_MAX, &kept->plan, &stats));
	ok(save_plan_validate(kept->plan));
	t[2] = now();
	ok(input_add_files(&in, &b, false, &kept->segment_files));
	ok(build_sources(&b, kept->plan, RUN_SRC_PLAIN, kept->segment_files, NULL, &first));
	ok(replicas_find(j, view.sd, kept->plan, view.dtypes, &kept->replicas));
	ok(target_identity(kept->plan->chunk_count, a, &pieces));
	CLEANUP(mem_free_ptr) uint32_t *value_src = mem_alloc(kept->plan->value_count * sizeof *value_src);
	memset(value_src, 0xFF, kept->plan->value_count * sizeof *value_src);
	struct build_target target = { .format = FORMAT_DCP, .sd = kept->plan, .pieces = &pieces, .first_src = first,
				       .value_src = value_src, .world_size = ranks, .files_per_rank = 1, .task_bytes = BUILD_TASK_BYTES };
	ok(run_add_dir(&b, 0, STR("x"), &target.dir));
	b.opts.task_bytes = BUILD_TASK_BYTES;
	ok(build_target_files(&b, &target));
	ok(run_share(&b, &run));
	t[3] = now();
	run_detach(&run);
	kept->ready = (struct write_ready){ .build = b, .strings_n = b.strings.n, .target = target };
	arena_free(a);
	spec_view_free(&view);
	input_close(&in);
}

static void keep(struct job *j, struct plan_kept *kept)
{
	struct image *values[RANKS_MAX];

	for (uint32_t r = 0; r < kept->prints.count; r++)
		values[r] = kept->prints.v[r].values;
	ok(image_collect_values(values, kept->prints.count, &kept->known));
	plan_cache_keep(j, kept);
}

static int by_size(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;

	return (x > y) - (x < y);
}

int main(int argc, char **argv)
{
	uint32_t tensors = argc > 1 ? (uint32_t)strtoul(argv[1], NULL, 10) : 10000;
	uint32_t ranks = argc > 2 ? (uint32_t)strtoul(argv[2], NULL, 10) : 4;
	static struct plan_cache cache;
	struct worker w = { .plans = &cache, .count = 1 };
	json_t *spec = json_pack("{s:s, s:{s:s}, s:{s:s, s:s}, s:{}}", "kind", "save", "source", "state_dict", "t", "target",
				 "storage", "s", "name", "x", "options");
	double full[4] = { 0 }, match[STEPS], tables[STEPS], share[STEPS];

	if (!tensors || !ranks || ranks > RANKS_MAX || !spec)
		return 2;
	for (uint32_t step = 0; step <= STEPS; step++) {
		int fds[RANKS_MAX];
		struct job j = { .worker = &w, .request = spec, .doc = make_entry(tensors, ranks, step, fds), .fds = fds, .fd_count = ranks,
				 .segment_count = ranks, .kind = JOB_SAVE };
		ok(spec_read(spec, &j.spec));
		ok(job_read_state_dicts(&j));
		const struct rank_segments *entry = job_state_dict(&j, &j.spec.source);
		struct plan_kept kept = { 0 };
		struct spec_view values = { 0 };
		struct run run = { .fd = -1 };
		if (step == 0) {
			plan_in_full(&j, ranks, full, &kept);
			keep(&j, &kept);
		} else {
			double t0 = now();
			struct plan_kept *k = plan_cache_find(&j, entry, &values);
			double t1 = now();
			if (!k)
				return fprintf(stderr, "bench_step: the plan was not found again\n"), 1;
			ok(plan_kept_renew(k, entry, values.sd));
			double t2 = now();
			ok(run_share(&k->ready.build, &run));
			double t3 = now();
			match[step - 1] = t1 - t0;
			tables[step - 1] = t2 - t1;
			share[step - 1] = t3 - t2;
			run_detach(&run);
			spec_view_free(&values);
		}
		for (uint32_t r = 0; r < ranks; r++)
			close(fds[r]);
		json_decref(j.doc);
	}
	qsort(match, STEPS, sizeof *match, by_size);
	qsort(tables, STEPS, sizeof *tables, by_size);
	qsort(share, STEPS, sizeof *share, by_size);
	printf("{\"tensors\":%u,\"ranks\":%u,\"parse_ms\":%.3f,\"plan_ms\":%.3f,\"tables_ms\":%.3f,\"again_match_ms\":%.3f,"
	       "\"again_plan_ms\":%.4f,\"again_share_ms\":%.3f}\n", tensors, ranks, full[1] - full[0], full[2] - full[1], full[3] - full[2],
	       match[STEPS / 2], tables[STEPS / 2], share[STEPS / 2]);
	plan_cache_free(&cache);
	json_decref(spec);
	return 0;
}
