/* delta.c: how a checkpoint differs from its base, as a checkpoint of its own (format/delta.h): a run that compresses each tensor's
 * differences into a spool, then a save of what came of it. */
#include <ctype.h>

#include "base/num.h"
#include "ops/delta.h"
#include "runner/target.h"
#include "runner/write.h"

struct delta {
	struct job *job;
	struct input base_in, now_in;
	struct delta_side base, now;
	struct run_build build, copies;
	struct arena *arena;
	struct sdict *target;          /* frames, as U8 vectors */
	struct delta_head head;
	struct str *checksums;
	uint32_t spool_fd;
	uint64_t changed, tensor_bytes;
	json_int_t compared;           /* bytes read of both sides, with checks */
};

/* The form says how bytes of a tensor change, and nothing else. */
static FALLIBLE enum err check_pair(const struct sd_tensor *t, const struct sd_tensor *base)
{
	if (!base)
		return ERR(MISSING_KEY, "the base lacks this tensor, and a delta adds none: save or reshard a whole checkpoint");
	if (base->dtype != t->dtype)
		return ERR(KIND_MISMATCH, "%s in the base, %s now, and a delta changes no dtype: save or reshard a whole checkpoint",
			   dtype_name(base->dtype), dtype_name(t->dtype));
	if (!box_same_shape(t->ndim, t->shape, base->ndim, base->shape))
		return ERR(SIZE_MISMATCH, "another shape than in the base, and a delta changes none: save or reshard a whole checkpoint");
	return OK;
}

static FALLIBLE enum err check_pairs(const struct sdict *base, const struct sdict *now)
{
	each(t, now->tensors, now->tensor_count)
		TRY(err_at_fqn(check_pair(t, sdict_tensor(base, t->fqn)), t->fqn.p, t->fqn.n));
	each(t, base->tensors, base->tensor_count) {
		if (!sdict_tensor(now, t->fqn))
			return err_at_fqn(ERR(MISSING_KEY, "only the base has this tensor, and a delta removes none: save or reshard a "
					      "whole checkpoint"), t->fqn.p, t->fqn.n);
	}
	return OK;
}

static FALLIBLE enum err add_stream(struct delta *d, uint64_t i, uint64_t *room)
{
	const struct sdict *base = d->base.plan, *now = d->now.plan;
	const struct sd_tensor *t = &now->tensors[i];
	uint64_t other = (uint64_t)(sdict_tensor(base, t->fqn) - base->tensors), most;
	uint32_t from, to;
	struct run_stream *s;

	TRY(build_stream_tensor(&d->build, base, other, d->base.first_src, &from));
	TRY(build_stream_tensor(&d->build, now, i, d->now.first_src, &to));
	uint64_t bytes = d->build.dsts.v[to].payload_bytes;
	TRY(err_at_fqn(delta_bound(d->job->spec.encoding, bytes, &most), t->fqn.p, t->fqn.n));
	TRY(num_add(d->tensor_bytes, bytes, &d->tensor_bytes));
	TRY(num_align(most, 4096, &most));
	TRY(vec_push(&d->build.streams, &s));
	*s = (struct run_stream){ .kind = RUN_STREAM_ENCODE, .encoding = (uint8_t)d->job->spec.encoding, .base = from, .now = to,
				  .bytes = bytes, .out_at = *room };
	return num_add(*room, most, room);
}

static FALLIBLE enum err add_streams(struct delta *d)
{
	uint64_t room = 0;
	uint32_t spool;

	for (uint64_t i = 0; i < d->now.plan->tensor_count; i++)
		TRY(add_stream(d, i, &room));
	TRY(delta_spool(d->job, &d->build, room, &spool, &d->spool_fd));
	for (uint64_t i = 0; i < d->build.streams.n; i++)
		d->build.streams.v[i].out_file = spool;
	return OK;
}

/* Collects the frames of tensors that changed, and digests. */
static FALLIBLE enum err collect(struct delta *d, const struct run *run)
{
	const struct sdict *now = d->now.plan;
	char hex[33];

	TRY(arena_alloc(d->arena, now->tensor_count + 1, sizeof *d->checksums, &d->checksums));
	TRY(sdict_new(UINT64_MAX, &d->target));
	for (uint64_t i = 0; i < now->tensor_count; i++) {
		const struct run_stream *s = &run->streams[i];
		int64_t dims[2] = { 0, (int64_t)s->out_bytes };
		uint32_t index;
		if (!s->out_bytes)
			continue;
		TRY(sdict_add_tensor(d->target, now->tensors[i].fqn, DT_UINT8, 1, dims + 1, &index));
		TRY(sdict_add_chunk(d->target, index, dims, 0, (struct sd_loc){ 0, 0, s->out_at, s->out_bytes }));
		digest_hex(s->now_xxh3, hex);
		TRY(arena_str(d->arena, str_of(hex), &d->checksums[index]));
		d->changed += s->changed;
	}
	d->head.checksums = d->checksums;
	TRY(delta_content(now, run, true, d->head.content)); /* both sides have the same tensors */
	return delta_content(now, run, false, d->head.base_content);
}

/* The number at the end of a name, or the generation; `none` without. */
static uint64_t step_of(const struct ref *ref, uint64_t none)
{
	size_t n = ref->name.n;
	uint64_t step;

	if (ref->kind == REF_STATE_DICT)
		return ref->generation >= 0 ? (uint64_t)ref->generation : none;
	while (n && isdigit((unsigned char)ref->name.p[n - 1]))
		n--;
	return str_to_u64((struct str){ ref->name.p + n, ref->name.n - n }, &step) ? step : none;
}

static void set_versions(struct delta *d)
{
	const struct spec *s = &d->job->spec;
	uint64_t version = step_of(&s->target, step_of(&s->source, UINT64_MAX)), base = step_of(&s->base, UINT64_MAX);

	if (version == UINT64_MAX)
		version = base == UINT64_MAX ? 1 : base + 1;
	if (base == UINT64_MAX)
		base = version ? version - 1 : 0;
	d->head.encoding = s->encoding;
	d->head.version = version;
	d->head.base_version = base;
}

static FALLIBLE enum err save(struct delta *d)
{
	struct load_plan pieces;
	uint32_t spool, first;

	TRY(run_add_file(&d->copies, RUN_FILE_SPOOL, 0, STR("spool"), UINT64_MAX, &spool));
	d->copies.files.v[spool].fd_index = d->spool_fd;
	TRY(sdict_add_file(d->target, STR("spool"), 0, &first));
	TRY(build_sources(&d->copies, d->target, RUN_SRC_PLAIN, &spool, NULL, &first));
	TRY(target_identity(d->target->chunk_count, d->arena, &pieces));
	struct write_spec w = { .build = &d->copies, .target = d->target, .pieces = &pieces, .first_src = first, .world_size = 1,
				.format = FORMAT_DELTA, .delta = &d->head };
	return write_checkpoint(d->job, &w);
}

static json_t *digest_doc(const unsigned char digest[16])
{
	char hex[33];

	digest_hex(digest, hex);
	return json_string(hex);
}

static FALLIBLE enum err report(struct delta *d)
{
	json_t *r = d->job->result;
	json_int_t read = json_integer_value(json_object_get(r, "read_bytes"));

	json_object_set_new(r, "read_bytes", json_integer(read + d->compared)); /* and the frames, to copy them */
	json_object_set_new(r, "encoding", json_string(delta_encoding_name(d->head.encoding)));
	json_object_set_new(r, "version", json_sprintf("%06ju", (uintmax_t)d->head.version));
	json_object_set_new(r, "base_version", json_sprintf("%06ju", (uintmax_t)d->head.base_version));
	json_object_set_new(r, "base_content_digest", digest_doc(d->head.base_content));
	json_object_set_new(r, "content_digest", digest_doc(d->head.content));
	json_object_set_new(r, "changed_tensors", json_integer((json_int_t)d->target->tensor_count));
	json_object_set_new(r, "changed_bytes", json_integer((json_int_t)d->changed));
	json_object_set_new(r, "tensor_bytes", json_integer((json_int_t)d->tensor_bytes));
	return OK;
}

static FALLIBLE enum err list_dropped(struct delta *d)
{
	const struct sdict *now = d->now.plan;
	CLEANUP(mem_free_ptr) struct str *names = mem_zalloc(now->value_count, sizeof *names);

	NEED(names, "no memory for %ju values", (uintmax_t)now->value_count);
	for (uint64_t i = 0; i < now->value_count; i++)
		names[i] = now->values[i].fqn;
	if (now->value_count)
		json_object_set_new(d->job->result, "dropped", target_names(names, now->value_count));
	return OK;
}

/* Values go into the index, unless they are many. */
static FALLIBLE enum err take_values(struct delta *d)
{
	const struct sdict *now = d->now.plan, *stored = d->now_in.sd;
	struct delta_value *values;
	uint64_t sum = 0, n;

	for (uint64_t i = 0; i < stored->value_count; i++)
		TRY(sdict_check_read(stored, &stored->values[i])); /* a tensor, and no value */
	for (uint64_t i = 0; i < now->value_count; i++) {
		const struct sd_value *v = &now->values[i];
		TRY(num_add(sum, v->kind == SD_VALUE_INLINE ? v->bytes.n : v->loc.length, &sum));
	}
	if (sum > DELTA_VALUES_BYTES)
		return list_dropped(d);
	TRY(arena_alloc(d->arena, now->value_count + 1, sizeof *values, &values));
	for (uint64_t i = 0; i < now->value_count; i++) {
		CLEANUP(mem_free_ptr) void *bytes = NULL;
		values[i] = (struct delta_value){ .fqn = now->values[i].fqn, .path = now->values[i].path };
		TRY(input_value(&d->now_in, &now->values[i], &bytes, &n));
		TRY(arena_str(d->arena, (struct str){ bytes, n }, &values[i].archive));
	}
	d->head.values = values;
	d->head.value_count = now->value_count;
	return OK;
}

static FALLIBLE enum err compare(struct delta *d)
{
	CLEANUP(run_detach) struct run run = { .fd = -1 };

	TRY(add_streams(d));
	enum err e = delta_streams(d->job, &d->build, "encode", &run);
	e = e ?: collect(d, &run);
	if (!e)
		d->compared = (json_int_t)atomic_load(&run.head->read_bytes);
	return e;
}

static FALLIBLE enum err delta(struct delta *d)
{
	struct job *j = d->job;

	d->arena = arena_new(UINT64_MAX);
	j->result = json_object();
	NEED(d->arena && j->result, "no memory for a plan");
	TRY(job_state(j, "planning", "metadata", NULL, 0));
	TRY(input_open(j, &j->spec.base, &d->base_in));
	TRY(input_open(j, &j->spec.source, &d->now_in));
	TRY(input_undo_transforms(j, &d->base_in, false));
	TRY(input_undo_transforms(j, &d->now_in, false));
	TRY(job_state(j, "planning", "plan", NULL, 0));
	d->build.opts.verify = input_verifies(j);
	TRY(delta_side_open(&j->spec.base, &d->base_in, &d->build, &d->base));
	TRY(delta_side_open(&j->spec.source, &d->now_in, &d->build, &d->now));
	TRY(check_pairs(d->base.plan, d->now.plan));
	set_versions(d);
	TRY(take_values(d));
	if (j->dry_run) { /* how large it becomes is known when all is read */
		json_object_set_new(j->result, "tensors", json_integer((json_int_t)d->now.plan->tensor_count));
		return OK;
	}
	TRY(compare(d));
	TRY(save(d));
	TRY(report(d));
	checked_report(&j->checked, j->result);
	return OK;
}

enum err delta_job(struct job *j)
{
	struct delta d = { .job = j };

	enum err e = delta(&d);
	run_build_free(&d.build);
	run_build_free(&d.copies);
	delta_side_free(&d.base);
	delta_side_free(&d.now);
	input_close(&d.base_in);
	input_close(&d.now_in);
	sdict_free(d.target);
	arena_free(d.arena);
	return e;
}
