/* part_read.c: see part_read.h. The part gets an sdict of its own, so that a plan costs as much as the tensor has chunks, and so that
 * undone transforms (spool.h) change no sdict that others read. */
#include "runner/part_read.h"

#include <fcntl.h>

#include "base/num.h"
#include "os/fs.h"
#include "runner/build.h"
#include "runner/exec.h"
#include "runner/spool.h"

struct reading {
	const struct part_box *box;
	struct job job;                /* owns the spool and the target's descriptor */
	struct checkpoint part;        /* the checkpoint with this part alone; only sd and file_bytes are its own */
	struct run_build build;
	struct sdict *target;
	struct arena *arena;
	uint64_t bytes;
};

static void end(struct reading *g)
{
	run_build_free(&g->build);
	sdict_free(g->part.sd);
	mem_free(g->part.file_bytes);
	sdict_free(g->target);
	arena_free(g->arena);
	job_free(&g->job);
}

/* A checkpoint with the files and transforms of another one, and nothing in them yet. */
static FALLIBLE enum err begin(struct reading *g, struct worker *w, const struct checkpoint *from)
{
	struct checkpoint *c = &g->part;
	uint32_t id;

	must(w->lookup);
	g->job.worker = w;
	*c = *from;
	c->sd = NULL;
	c->file_bytes = mem_zalloc(from->sd->file_count, sizeof *c->file_bytes);
	NEED(c->file_bytes, "no memory for %ju files", (uintmax_t)from->sd->file_count);
	memcpy(c->file_bytes, from->file_bytes, from->sd->file_count * sizeof *c->file_bytes);
	TRY(sdict_new(UINT64_MAX, &c->sd));
	TRY(sdict_copy_files(c->sd, from->sd));
	for (uint64_t i = 0; i < from->sd->transform_count; i++)
		TRY(sdict_add_transform(c->sd, from->sd->transforms[i], &id));
	return OK;
}

/* ---------------------------------------------------------------------------------------------------------- boxes */

static FALLIBLE enum err take_tensor(struct reading *g)
{
	const struct sdict *from = g->box->checkpoint->sd;
	const struct sd_tensor *t = g->box->tensor;
	struct sdict *sd = g->part.sd;
	uint32_t index;

	TRY(sdict_add_tensor(sd, t->fqn, t->dtype, t->ndim, t->shape, &index));
	for (uint64_t i = t->first_chunk; i < t->first_chunk + t->chunk_count; i++)
		TRY(sdict_add_chunk(sd, index, from->chunks[i].dims, from->chunks[i].rank, from->chunks[i].loc));
	return spool_transforms(&g->job, &g->part, false);
}

static FALLIBLE enum err make_target(struct reading *g)
{
	const struct part_box *box = g->box;
	const struct sd_tensor *t = box->tensor;
	uint64_t at = box->fd < 0 ? (uintptr_t)box->memory : box->at;
	uint32_t index;

	TRY(sdict_new(UINT64_MAX, &g->target));
	TRY(sdict_add_file(g->target, STR("slice"), 0, &index));
	TRY(sdict_add_tensor(g->target, t->fqn, t->dtype, t->ndim, t->shape, &index));
	return sdict_add_chunk(g->target, 0, box->dims, 0, (struct sd_loc){ 0, 0, at, g->bytes });
}

/* The run's file that the box goes to. */
static FALLIBLE enum err add_target_file(struct reading *g, uint32_t *file_out)
{
	const struct part_box *box = g->box;
	uint32_t index;

	if (box->fd < 0)
		return run_add_file(&g->build, RUN_FILE_MEMORY, 0, STR("slice"), 0, file_out);
	TRY(run_add_file(&g->build, RUN_FILE_SEGMENT, 0, STR("slice"), box->at + g->bytes, file_out));
	int mine = fcntl(box->fd, F_DUPFD_CLOEXEC, 0); /* the job closes its own */
	if (mine < 0)
		return ERR_SYS(SYSTEM, "cannot duplicate a descriptor");
	enum err e = job_add_fd(&g->job, mine, &index);
	if (e) {
		fs_drop(&mine);
		return e;
	}
	g->build.files.v[*file_out].writable = true;
	g->build.files.v[*file_out].fd_index = index;
	return OK;
}

static enum err no_tick(void *)
{
	return OK;
}

static FALLIBLE enum err execute(struct reading *g, struct checked *checked)
{
	const struct worker *w = g->job.worker;
	CLEANUP(run_detach) struct run run = { .fd = -1 };

	TRY(run_share(&g->build, &run));
	struct exec_spec spec = { .run = &run, .stores = &w->stores, .fds = g->job.fds, .fd_count = g->job.fd_count,
				  .io = w->io, .count = 1, .memory_bytes = w->memory_bytes, .tick = no_tick };
	enum err e = exec_run(&spec);
	if (!e)
		run_checked(&run, checked);
	return e;
}

static FALLIBLE enum err read_box(struct reading *g, struct worker *w, struct checked *checked)
{
	CLEANUP(mem_free_ptr) uint32_t *map = NULL;
	struct input in = { .job = &g->job, .checkpoint = &g->part };
	struct load_match match = { .strict = true };
	struct load_plan plan;
	uint32_t file, first;

	g->arena = arena_new(UINT64_MAX);
	NEED(g->arena, "no memory for a plan");
	TRY(begin(g, w, g->box->checkpoint));
	TRY(take_tensor(g));
	TRY(make_target(g));
	TRY(load_plan_make(g->part.sd, g->target, &match, g->arena, &plan));
	TRY(add_target_file(g, &file));
	TRY(input_add_files(&in, &g->build, false, &map));
	TRY(build_sources(&g->build, g->part.sd, build_kind(&g->part), map, g->part.manifest, &first));
	g->build.opts = (struct run_options){ .mode = RUN_FILL_SEGMENTS, .task_bytes = BUILD_TASK_BYTES, .verify = g->box->verify };
	TRY(build_fill(&g->build, g->target, &file, g->part.sd, first, &plan));
	return execute(g, checked);
}

enum err part_read_box(struct worker *w, const struct part_box *box, struct checked *checked)
{
	struct reading g = { .box = box };
	uint64_t numel;

	TRY(box_numel(box->tensor->ndim, box->dims + box->tensor->ndim, &numel));
	TRY(num_mul(numel, dtype_bytes(box->tensor->dtype), &g.bytes));
	enum err e = g.bytes ? read_box(&g, w, checked) : OK;
	end(&g);
	return e;
}

/* --------------------------------------------------------------------------------------------------------- values */

static FALLIBLE enum err read_value(struct reading *g, struct worker *w, const struct checkpoint *c, const struct sd_value *v,
				    struct checked *checked, struct item_value *out)
{
	struct input in = { .job = &g->job, .checkpoint = &g->part, .checked = checked };
	CLEANUP(mem_free_ptr) void *bytes = NULL;
	uint32_t index;
	uint64_t n;

	TRY(begin(g, w, c));
	TRY(sdict_add_value(g->part.sd, v->fqn, v->rank, v->loc, &index));
	g->part.sd->values[index].kind = v->kind;
	g->part.sd->values[index].bytes = v->bytes;
	TRY(spool_transforms(&g->job, &g->part, false));
	in.sd = g->part.sd;
	v = &in.sd->values[index];
	TRY(input_value(&in, v, &bytes, &n));
	return input_at_value(&in, v, input_item_value(bytes, n, out));
}

enum err part_read_value(struct worker *w, const struct checkpoint *c, const struct sd_value *v, struct checked *checked,
			 struct item_value *out)
{
	CLEANUP(end) struct reading g = { 0 };

	return read_value(&g, w, c, v, checked, out);
}
