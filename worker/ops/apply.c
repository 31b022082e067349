/* apply.c: see apply.h. */
#include "ops/apply.h"

#include <stdio.h>

#include "base/num.h"
#include "format/safetensors.h"
#include "runner/target.h"

enum { INDEX_MAX = 1 << 30, PAGE = 4096, NAME_MAX_BYTES = 600 };

const struct ref *apply_source(const struct job *j)
{
	return j->kind == JOB_APPLY ? &j->spec.base : &j->spec.source;
}

/* ---- the delta ---- */

static FALLIBLE enum err at_frame(const struct apply *a, const struct sd_tensor *t, uint64_t at, enum err e)
{
	const struct sd_loc *loc = &a->delta->sd->chunks[t->first_chunk].loc;
	struct str name = a->delta->sd->files[loc->file].name;
	char text[ERR_FILE_MAX];

	snprintf(text, sizeof text, "%.200s/%.*s", a->delta->name, (int)num_min(name.n, 100), name.p);
	return err_at_fqn(err_at_file(e, text, (int64_t)(loc->offset + at)), t->fqn.p, t->fqn.n);
}

/* Takes the checksums of the tensors that lie in the file. */
static FALLIBLE enum err take_checksums(struct apply *a, uint32_t file, const struct sft *head)
{
	const struct sdict *sd = a->delta->sd;

	for (uint64_t i = 0; i < head->meta_count; i++) {
		const struct sd_tensor *t = sdict_tensor(sd, head->meta[i].key);
		if (t && sd->chunks[t->first_chunk].loc.file == file)
			TRY(arena_str(a->arena, head->meta[i].value, &a->checksums[t - sd->tensors]));
	}
	return OK;
}

static FALLIBLE enum err read_header(struct apply *a, uint32_t file)
{
	CLEANUP(arena_free_ptr) struct arena *arena = arena_new(UINT64_MAX);
	CLEANUP(store_close) struct store_at at = STORE_NOTHING;
	CLEANUP(mem_free_ptr) char *json = NULL;
	unsigned char first[8];
	struct sft head;
	uint64_t n;

	NEED(arena, "no memory for a header");
	TRY(checkpoint_open_file(a->delta, file, &at));
	TRY(store_read(at, first, sizeof first, 0, ""));
	TRY(sft_header_bytes(first, a->delta->file_bytes[file], &n));
	json = mem_alloc(n);
	NEED(json, "no memory for %ju bytes of a header", (uintmax_t)n);
	TRY(store_read(at, json, n, sizeof first, ""));
	TRY(sft_parse((struct str){ json, n }, a->delta->file_bytes[file], arena, &head));
	return take_checksums(a, file, &head);
}

static FALLIBLE enum err check_frames(const struct apply *a)
{
	const struct sdict *sd = a->delta->sd;

	for (uint64_t i = 0; i < sd->tensor_count; i++) {
		const struct sd_tensor *t = &sd->tensors[i];
		size_t digits = a->index.checksum == DELTA_ADLER32 ? 8 : 32;
		if (t->dtype != DT_UINT8 || t->ndim != 1)
			return at_frame(a, t, 0, ERR(FORMAT_SAFETENSORS, "a delta's tensors are vectors of U8"));
		if (!a->checksums[i].p)
			return at_frame(a, t, 0, ERR(FORMAT_SAFETENSORS, "the file has no checksum of the tensor"));
		if (a->checksums[i].n != digits)
			return at_frame(a, t, 0, ERR(FORMAT_SAFETENSORS, "a checksum of %zu hex digits", a->checksums[i].n));
	}
	return OK;
}

static FALLIBLE enum err open_delta(struct apply *a)
{
	struct job *j = a->job;
	uint64_t n = 0;

	TRY(checkpoint_open(&j->worker->stores, &j->spec.source, &a->delta));
	if (a->delta->format != FORMAT_DELTA)
		return ERR(FORMAT_UNSUPPORTED, "%s:%s is in the format %s, and no delta", j->spec.source.storage.p, j->spec.source.name.p,
			   format_name(a->delta->format));
	checkpoint_note(a->delta, true, &j->checked);
	TRY(err_at_file(store_get(a->delta->dir, HF_INDEX, INDEX_MAX, &a->index_text, &n, NULL), HF_INDEX, -1));
	TRY(err_at_file(delta_index_read((struct str){ a->index_text, n }, a->arena, &a->index), HF_INDEX, -1));
	TRY(arena_alloc(a->arena, a->delta->sd->tensor_count + 1, sizeof *a->checksums, &a->checksums));
	memset(a->checksums, 0, a->delta->sd->tensor_count * sizeof *a->checksums);
	for (uint32_t i = 0; i < a->delta->sd->file_count; i++)
		TRY(err_at_file(read_header(a, i), a->delta->sd->files[i].name.p, 0));
	return check_frames(a);
}

/* ---- the run ---- */

static FALLIBLE enum err add_stream(struct apply *a, uint64_t i, const uint32_t *delta_files, uint64_t *room)
{
	const struct sdict *delta = a->delta->sd;
	struct run_stream *s;
	uint32_t dst;

	TRY(build_stream_tensor(&a->build, a->base.plan, i, a->base.first_src, &dst));
	uint64_t bytes = a->build.dsts.v[dst].payload_bytes;
	TRY(vec_push(&a->build.streams, &s));
	*s = (struct run_stream){ .kind = RUN_STREAM_READ, .base = dst, .bytes = bytes };
	if (!a->changed[i])
		return OK;
	const struct sd_tensor *t = &delta->tensors[a->changed[i] - 1];
	const struct sd_loc *loc = &delta->chunks[t->first_chunk].loc;
	s->kind = RUN_STREAM_DECODE;
	s->encoding = (uint8_t)a->index.encoding;
	s->adler32 = a->index.checksum == DELTA_ADLER32;
	s->blob_file = delta_files[loc->file];
	s->blob_at = loc->offset;
	s->blob_bytes = loc->length;
	s->out_at = *room;
	TRY(num_add(*room, bytes, room));
	return num_align(*room, PAGE, room);
}

static FALLIBLE enum err add_streams(struct apply *a, struct input *base)
{
	CLEANUP(mem_free_ptr) uint32_t *delta_files = NULL;
	uint64_t room = 0;
	uint32_t spool;

	TRY(build_source_files(&a->build, a->delta, &delta_files));
	for (uint64_t i = 0; i < a->base.plan->tensor_count; i++)
		TRY(add_stream(a, i, delta_files, &room));
	TRY(delta_spool(a->job, &a->build, room, &spool, &base->spool_fd));
	for (uint64_t i = 0; i < a->build.streams.n; i++)
		a->build.streams.v[i].out_file = spool;
	base->spool_bytes = room;
	base->has_spool = true;
	return OK;
}

/* Finds the base's tensors that the delta changes. */
static FALLIBLE enum err match(struct apply *a)
{
	const struct sdict *base = a->base.plan, *delta = a->delta->sd;

	TRY(arena_alloc(a->arena, base->tensor_count + 1, sizeof *a->changed, &a->changed));
	memset(a->changed, 0, base->tensor_count * sizeof *a->changed);
	for (uint64_t i = 0; i < delta->tensor_count; i++) {
		const struct sd_tensor *t = sdict_tensor(base, delta->tensors[i].fqn);
		if (t)
			a->changed[t - base->tensors] = i + 1;
		else if (!a->missing.p)
			a->missing = delta->tensors[i].fqn;
	}
	return OK;
}

/* ---- the result ---- */

static FALLIBLE enum err check_base(const struct apply *a)
{
	char got[33], want[33], name[NAME_MAX_BYTES];

	digest_hex(a->base_content, got);
	if (!a->index.base_content.p || memcmp(got, a->index.base_content.p, 32) == 0)
		return OK;
	memcpy(want, a->index.base_content.p, 32);
	want[32] = '\0';
	delta_side_name(&a->job->spec.base, name, sizeof name);
	enum err e = ERR(BASE_MISMATCH, "the delta is of a base with the content digest %s, and %s has %s", want, name, got);
	return err_expected(e, want, got);
}

static FALLIBLE enum err check_checksum(const struct apply *a, const struct run_stream *s, const struct sd_tensor *t)
{
	const struct str want = a->checksums[t - a->delta->sd->tensors];
	char got[33], wanted[33];

	if (s->adler32)
		snprintf(got, sizeof got, "%08x", s->checksum32);
	else
		digest_hex(s->now_xxh3, got);
	if (str_is(want, got))
		return OK;
	snprintf(wanted, sizeof wanted, "%.*s", (int)want.n, want.p);
	return at_frame(a, t, 0, err_expected(ERR(DIGEST_MISMATCH, "%s", delta_fault_text(DELTA_CHECKSUM, 0)), wanted, got));
}

static FALLIBLE enum err check_streams(const struct apply *a, const struct run *run)
{
	if (a->missing.p)
		return err_at_fqn(ERR(BASE_MISMATCH, "the delta changes a tensor that the base lacks"), a->missing.p, a->missing.n);
	for (uint64_t i = 0; i < a->base.plan->tensor_count; i++) {
		const struct run_stream *s = &run->streams[i];
		if (s->kind != RUN_STREAM_DECODE)
			continue;
		const struct sd_tensor *t = &a->delta->sd->tensors[a->changed[i] - 1];
		if (s->fault)
			return at_frame(a, t, s->fault_at, ERR(FORMAT_TRANSFORM, "%s", delta_fault_text((enum delta_fault)s->fault,
													s->fault_code)));
		TRY(check_checksum(a, s, t));
	}
	return OK;
}

static FALLIBLE enum err check_content(struct apply *a)
{
	char got[33], want[33];

	digest_hex(a->content, got);
	if (!a->index.content.p || memcmp(got, a->index.content.p, 32) == 0)
		return OK;
	memcpy(want, a->index.content.p, 32);
	want[32] = '\0';
	return err_at_file(err_expected(ERR(DIGEST_MISMATCH, "what came of it has another content digest than the delta says"), want, got),
			   HF_INDEX, -1);
}

/* The CRC32s of what lies in the spool, behind the base's records: the spool's file is the last one. */
static FALLIBLE enum err add_records(struct apply *a, const struct run *run, uint32_t file)
{
	const struct sdict *plan = a->base.plan;
	struct sd_record *records;
	uint64_t n = a->applied->record_count;

	TRY(arena_alloc(a->arena, n + plan->tensor_count + 1, sizeof *records, &records));
	if (n)
		memcpy(records, a->applied->records, n * sizeof *records);
	each(s, run->streams, plan->tensor_count) {
		if (s->kind == RUN_STREAM_DECODE && s->bytes)
			records[n++] = (struct sd_record){ file, s->now_crc32, s->out_at, s->bytes };
	}
	a->applied->records = records;
	a->applied->record_count = n;
	return OK;
}

static FALLIBLE enum err add_tensor(struct apply *a, const struct run *run, uint64_t i, uint32_t file)
{
	const struct sdict *plan = a->base.plan;
	const struct sd_tensor *t = &plan->tensors[i];
	int64_t dims[2 * NDIM_MAX] = { 0 };
	uint32_t index;

	TRY(sdict_add_tensor_of(a->applied, t, &index));
	if (!run || run->streams[i].kind != RUN_STREAM_DECODE) {
		for (uint64_t c = t->first_chunk; c < t->first_chunk + t->chunk_count; c++)
			TRY(sdict_add_chunk_of(a->applied, index, &plan->chunks[c]));
		return OK;
	}
	for (uint32_t d = 0; d < t->ndim; d++)
		dims[t->ndim + d] = t->shape[d];
	return sdict_add_chunk(a->applied, index, dims, plan->chunks[t->first_chunk].rank,
			       (struct sd_loc){ file, 0, run->streams[i].out_at, run->streams[i].bytes });
}

/* The new side's values, those of the base that it lacks left out. */
static FALLIBLE enum err add_values(struct apply *a)
{
	uint32_t index;

	for (uint64_t i = 0; i < a->index.values.n; i++) {
		const struct delta_value *v = &a->index.values.v[i];
		TRY(err_at_fqn(sdict_add_value(a->applied, v->fqn, 0, (struct sd_loc){ .file = SD_NO_FILE }, &index), v->fqn.p, v->fqn.n));
		a->applied->values[index].kind = SD_VALUE_INLINE;
		a->applied->values[index].bytes = v->archive;
		a->applied->values[index].path = v->path;
	}
	return OK;
}

/* run NULL: a dry run, which shows the base's tensors where they are. */
static FALLIBLE enum err show(struct apply *a, const struct run *run, struct input *base)
{
	uint32_t file;

	TRY(sdict_new(UINT64_MAX, &a->applied));
	sdict_borrow(a->applied, a->base.plan);
	TRY(sdict_copy_files(a->applied, base->sd));
	if (run)
		TRY(sdict_add_file(a->applied, STR("spool"), 0, &file));
	for (uint64_t i = 0; i < a->base.plan->tensor_count; i++)
		TRY(add_tensor(a, run, i, run ? file : 0));
	if (run)
		TRY(add_records(a, run, file));
	TRY(err_at_file(add_values(a), HF_INDEX, -1));
	a->applied->has_paths = a->base.plan->has_paths;
	base->sd = a->applied;
	return OK;
}

static FALLIBLE enum err decode(struct apply *a, struct input *base, struct run *run)
{
	TRY(delta_streams(a->job, &a->build, "apply", run));
	TRY(delta_content(a->base.plan, run, false, a->base_content));
	TRY(check_base(a));
	TRY(check_streams(a, run));
	TRY(delta_content(a->base.plan, run, true, a->content));
	TRY(check_content(a));
	return show(a, run, base);
}

enum err apply_open(struct job *j, struct input *base, struct apply *a)
{
	CLEANUP(run_detach) struct run run = { .fd = -1 };

	*a = (struct apply){ .job = j };
	if (j->kind != JOB_APPLY)
		return OK;
	a->arena = arena_new(UINT64_MAX);
	NEED(a->arena, "no memory for a delta");
	TRY(open_delta(a));
	a->build.opts.verify = input_verifies(j);
	TRY(delta_side_open(&j->spec.base, base, &a->build, &a->base));
	TRY(match(a));
	if (j->dry_run)
		return show(a, NULL, base);
	TRY(add_streams(a, base));
	return decode(a, base, &run);
}

static void put_digest(json_t *result, const char *key, const unsigned char digest[16])
{
	char hex[33];

	digest_hex(digest, hex);
	json_object_set_new(result, key, json_string(hex));
}

void apply_report(const struct apply *a, json_t *result)
{
	const struct sdict *plan = a->base.plan;
	CLEANUP(mem_free_ptr) struct str *names = a->arena ? mem_zalloc(plan->value_count, sizeof *names) : NULL;

	if (!names)
		return;
	for (uint64_t i = 0; i < plan->value_count; i++)
		names[i] = plan->values[i].fqn;
	if (plan->value_count && !a->index.has_values) /* they would be those of another step */
		json_object_set_new(result, "dropped", target_names(names, plan->value_count));
	json_object_set_new(result, "changed_tensors", json_integer((json_int_t)a->delta->sd->tensor_count));
	if (a->job->dry_run)
		return;
	put_digest(result, "base_content_digest", a->base_content);
	put_digest(result, "content_digest", a->content);
}

enum err apply_job(struct job *j)
{
	return j->spec.target.kind == REF_STATE_DICT ? load_job(j) : reshard_job(j);
}

void apply_free(struct apply *a)
{
	run_build_free(&a->build);
	delta_side_free(&a->base);
	checkpoint_free(a->delta);
	mem_free(a->index_text);
	vec_free(&a->index.values);
	sdict_free(a->applied);
	arena_free(a->arena);
}
