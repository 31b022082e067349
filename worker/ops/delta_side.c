/* delta_side.c: see delta.h. */
#include <stdio.h>

#include "io/content.h"
#include "ops/delta.h"
#include "plan/save_plan.h"
#include "runner/gang_run.h"
#include "runner/spool.h"

void delta_side_name(const struct ref *ref, char *out, size_t max)
{
	if (ref->kind == REF_CHECKPOINT)
		snprintf(out, max, "%s:%s", ref->storage.p, ref->name.p);
	else if (ref->generation >= 0)
		snprintf(out, max, "shm:%s, generation %jd", ref->name.p, (intmax_t)ref->generation);
	else
		snprintf(out, max, "shm:%s", ref->name.p);
}

enum err delta_side_open(const struct ref *ref, struct input *in, struct run_build *b, struct delta_side *out)
{
	struct save_plan_stats stats;

	*out = (struct delta_side){ .ref = ref, .in = in };
	TRY(save_plan_make(in->sd, DEDUP_LOWEST_RANK, UINT64_MAX, &out->plan, &stats));
	TRY(save_plan_validate(out->plan)); /* what no chunk holds would be taken for zeros */
	TRY(input_add_files(in, b, false, &out->file_map));
	return build_sources(b, out->plan, input_kind(in), out->file_map, input_manifest(in), &out->first_src);
}

void delta_side_free(struct delta_side *side)
{
	sdict_free(side->plan);
	mem_free(side->file_map);
}

enum err delta_spool(struct job *j, struct run_build *b, uint64_t bytes, uint32_t *file_out, uint32_t *fd_index_out)
{
	TRY(spool_new(j, bytes, fd_index_out));
	TRY(run_add_file(b, RUN_FILE_SPOOL, 0, STR("spool"), bytes, file_out));
	b->files.v[*file_out].fd_index = *fd_index_out;
	return OK;
}

enum err delta_content(const struct sdict *plan, const struct run *run, bool now, unsigned char out[16])
{
	CLEANUP(mem_free_ptr) unsigned char(*leaves)[16] = mem_alloc(plan->tensor_count * sizeof *leaves + 1);

	NEED(leaves, "no memory for %ju digests", (uintmax_t)plan->tensor_count);
	for (uint64_t i = 0; i < plan->tensor_count; i++) {
		const struct run_stream *s = &run->streams[i];
		memcpy(leaves[i], now && s->kind != RUN_STREAM_READ ? s->now_xxh3 : s->base_xxh3, sizeof leaves[i]);
	}
	return content_digest(plan, (const unsigned char(*)[16])leaves, out);
}

enum err delta_streams(struct job *j, struct run_build *b, const char *stage, struct run *run)
{
	TRY(build_streams(b));
	TRY(run_share(b, run));
	run_build_free(b);
	TRY(job_state(j, "running", stage, NULL, run_bytes_total(run)));
	TRY(gang_run(j, run));
	run_checked(run, &j->checked);
	return OK;
}
