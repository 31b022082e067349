/* write.c: see write.h. Metadata is written after the data, by the leader alone: it owns the pickle. */
#include "runner/write.h"

#include <fcntl.h>
#include <stdio.h>
#include <sys/random.h>
#include <time.h>

#include "base/clock.h"
#include "base/num.h"
#include "format/dcp_meta.h"
#include "format/gguf.h"
#include "io/digest.h"
#include "os/fs.h"
#include "runner/gang_run.h"
#include "runner/gate.h"
#include "runner/manifest_put.h"
#include "runner/plan_doc.h"
#include "runner/provenance.h"

static void uuid_of(unsigned char b[16], char out[37])
{
	b[6] = (unsigned char)((b[6] & 0x0F) | 0x40);
	b[8] = (unsigned char)((b[8] & 0x3F) | 0x80);
	snprintf(out, 37, "%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", b[0], b[1], b[2], b[3],
		 b[4], b[5], b[6], b[7], b[8], b[9], b[10], b[11], b[12], b[13], b[14], b[15]);
}

void write_uuid(char out[37])
{
	unsigned char b[16] = { 0 };

	if (getrandom(b, sizeof b, 0) != (ssize_t)sizeof b)
		memcpy(b, &(struct timespec){ .tv_sec = clock_wall_ms() }, sizeof b);
	uuid_of(b, out);
}

/* A later attempt of a save by several hosts goes on with the files of the first. The commit of an attempt that was killed may reach an
 * object storage late: both attempts' metadata are of the same bytes. */
static void make_save_id(const struct job *j, const struct write_store *store, char out[37])
{
	unsigned char b[16];

	if (!store->is_shared) {
		write_uuid(out);
		return;
	}
	digest_xxh3(j->id, strlen(j->id), b);
	uuid_of(b, out);
}

/* The target's locs: from the places that the build chose. */
static FALLIBLE enum err set_locs(struct sdict *sd, const struct build_target *t, const struct run *run)
{
	CLEANUP(mem_free_ptr) uint32_t *sd_file = mem_zalloc(run->files_n, sizeof *sd_file);

	NEED(sd_file, "no memory for %ju files", (uintmax_t)run->files_n);
	sd->file_count = 0;
	for (uint64_t i = 0; i < run->files_n; i++)
		if (run->files[i].kind == RUN_FILE_TARGET)
			TRY(sdict_add_file(sd, run_file_name(run, &run->files[i]), run->files[i].rank, &sd_file[i]));
	for (uint64_t i = 0; i < sd->chunk_count; i++) {
		const struct build_place *p = &t->chunk_places[i];
		sd->chunks[i].loc = (struct sd_loc){ sd_file[p->file], 0, p->offset, p->length };
	}
	for (uint64_t i = 0; i < sd->value_count; i++) {
		const struct build_place *p = &t->value_places[i];
		sd->values[i].loc = (struct sd_loc){ sd_file[p->file], 0, p->offset, p->length };
		sd->values[i].kind = SD_VALUE_STORED;
	}
	return OK;
}

struct metadata {
	const struct write_spec *w;
	struct dcp_meta_opts opts;
};

static enum err metadata_pieces(void *from, staging_sink sink, void *user)
{
	const struct metadata *m = from;

	return format_put_metadata(m->w->format, m->w->target, &m->opts, sink, user);
}

static FALLIBLE enum err put_metadata(struct staging *st, const struct job *j, const struct write_spec *w, struct manifest_head *head,
				      char uuid[MANIFEST_SAVE_ID])
{
	const char *name = j->spec.target.name.p;
	struct metadata m = { w, { .checkpoint_id = name, .save_id = uuid, .delta = w->delta } };
	struct staging_digest written;

	make_save_id(j, w->store, uuid);
	head->metadata_name = format_metadata(w->format);
	head->save_id = format_holds(w->format, FORMAT_VALUES) ? uuid : ""; /* it is one */
	TRY(staging_put_stream(st, head->metadata_name, metadata_pieces, &m, &written));
	memcpy(head->metadata_xxh3, written.xxh3_128, sizeof head->metadata_xxh3);
	head->metadata_bytes = written.bytes;
	return OK;
}

/* A reshard of all tensors as they are has the content that the source's record tells. */
static FALLIBLE enum err check_content(const struct write *w, const char *hex)
{
	const struct job *j = w->job;
	const struct spec *s = &j->spec;
	enum format f = w->spec->format;
	bool is_same = j->kind == JOB_RESHARD && s->verify == READ_CHECK_DIGEST && !s->include.n && !s->exclude.n && !s->rename.n &&
		       !s->dtype.n && !s->transform.count && (f == FORMAT_DCP || f == FORMAT_SAFETENSORS || f == FORMAT_TORCH);
	const char *was = json_string_value(json_object_get(json_array_get(j->parents, 0), "content_digest"));

	if (!is_same || !hex[0] || !was || strcmp(hex, was) == 0)
		return OK;
	return err_expected(ERR(DIGEST_MISMATCH, "what was written has another content digest than the source's record tells"), was, hex);
}

/* Adds the record's content digest to the result; a delta, and what is made of one, tell that of the delta's own form. */
static FALLIBLE enum err put_content_digest(struct job *j, const char *hex)
{
	if (!hex[0] || j->kind == JOB_APPLY)
		return OK;
	if (!j->result)
		j->result = json_object();
	return json_object_set_new(j->result, "content_digest", json_string(hex)) < 0 ? ERR(NO_MEMORY, "no memory for the result") : OK;
}

/* Makes the content digest; without one *unknown says why. */
static FALLIBLE enum err make_content(const struct write *w, char hex[33], const char **unknown)
{
	const struct content_items *items = w->spec->items;

	hex[0] = '\0';
	TRY(items ? content_of_items(w->run, items, hex) : content_of_target(w->run, w->target, hex));
	if (items && items->unknown)
		*unknown = items->unknown;
	else if (items)
		*unknown = "an item is no plain tensor of one piece, or not written here";
	else
		*unknown = w->target->delta ? "a delta has a digest of its own form" : "a tensor lies in blocks or in too short rows";
	*unknown = hex[0] ? NULL : *unknown;
	return OK;
}

static FALLIBLE enum err put_manifest(const struct write *w, struct manifest_head *head)
{
	char content[33];
	struct provenance p = { .plan = w->plan, .content_digest = content, .generation = head->generation,
				      .has_generation = head->has_generation };
	const struct job *j = w->job;
	CLEANUP(buf_free) struct buf b = BUF_INIT(MANIFEST_MAX);
	CLEANUP(jval_drop) json_t *record = NULL;
	char stamp[40], name[MANIFEST_NAME_MAX];
	struct str id = j->spec.hosts.id;
	time_t now = clock_wall_ms() / 1000;
	struct tm tm;

	gmtime_r(&now, &tm);
	strftime(stamp, sizeof stamp, "%Y-%m-%dT%H:%M:%SZ", &tm);
	head->created_at = stamp;
	head->job = j->id;
	head->kind = kind_of(j->kind)->name;
	head->attempt = j->attempt;
	head->hosts = j->spec.hosts.count ? (struct strs){ &id, 1 } : w->spec->hosts;
	head->uid = j->uid;
	head->unsynced = w->staging->no_sync;
	TRY(make_content(w, content, &p.content_unknown));
	TRY(check_content(w, content));
	TRY(provenance_make(j, &p, &record));
	head->record = record;
	enum err e = manifest_put(&b, head, w->run, w->staging);
	head->record = NULL;
	head->hosts = (struct strs){ 0 };
	TRY(e ?: put_content_digest(w->job, content));
	manifest_name(head->metadata_name, name);
	return staging_put_file(w->staging, name, b.p, b.len);
}

/* The plan's JSON for GET …/plan. */
static FALLIBLE enum err plan_doc(const struct job *j, const struct write_spec *s, const struct build_target *t, json_t **out)
{
	struct plan_figures f = { 0 };
	json_t *doc = json_pack("{s:I, s:I, s:I, s:I, s:I}", "world_size", (json_int_t)s->world_size, "bytes", (json_int_t)t->bytes,
				"tensors", (json_int_t)s->target->tensor_count, "values", (json_int_t)s->target->value_count,
				"chunks", (json_int_t)s->target->chunk_count);
	enum err e = doc ? plan_doc_files(doc, s->build, RUN_FILE_TARGET) : ERR(NO_MEMORY, "no memory for the plan");

	for (uint64_t i = 0; !s->source && i < s->target->chunk_count; i++)
		f.needed_bytes += s->target->chunks[i].loc.length;
	f.read_bytes = f.needed_bytes;
	if (!e && s->source)
		e = plan_figures_make(s->source, s->target, s->pieces, &f);
	e = e ?: plan_doc_figures(doc, j, s->build, &f, plan_sdict_bytes(s->source) + plan_sdict_bytes(s->target));
	if (!e && j->dry_run)
		e = plan_doc_cuts(doc, s->target);
	if (!e && s->shown && json_object_set(doc, "transform", s->shown) != 0)
		e = ERR(NO_MEMORY, "no memory for the plan");
	if (e)
		json_decref(doc);
	else
		*out = doc;
	return e;
}

static FALLIBLE enum err build(const struct job *j, struct write_spec *s, struct build_target *t)
{
	s->build->opts.verify = s->check_sources || s->replica_count;
	t->check_sources = s->check_sources;
	t->first_replica = s->first_replica;
	t->replica_count = s->replica_count;
	t->given = s->given;
	t->span_bytes = s->given ? 0 : gate_span(s->build);
	t->format = s->format;
	t->gguf = s->gguf;
	t->others = s->others;
	t->other_count = s->other_count;
	t->delta = s->delta;
	t->max_file_bytes = (uint64_t)j->spec.max_file_bytes;
	t->meta = s->meta;
	t->meta_count = s->meta_count;
	t->local = s->store->local;
	t->merge = s->merge;
	s->build->opts.no_sync = !j->spec.sync_files;
	if (spec_target_is_file(&j->spec)) {
		const char *slash = strrchr(j->spec.target.name.p, '/');
		t->file_name = slash ? str_of(slash + 1) : j->spec.target.name;
	}
	TRY(build_target_files(s->build, t));
	return s->items && s->items->sd ? content_want_items(s->build, t, s->items) : OK;
}

static const char *metadata_name(const struct write_spec *s)
{
	return s->metadata_name ? s->metadata_name : format_metadata(s->format);
}

static FALLIBLE enum err put_given(struct staging *st, const struct write_spec *s, struct manifest_head *head,
				   char save_id[MANIFEST_SAVE_ID])
{
	digest_xxh3(s->metadata.p, s->metadata.n, head->metadata_xxh3);
	head->metadata_bytes = s->metadata.n;
	head->metadata_name = metadata_name(s);
	manifest_save_id(s->metadata.p, s->metadata.n, save_id);
	head->save_id = save_id;
	return staging_put_file(st, head->metadata_name, s->metadata.p, s->metadata.n);
}

/* The place of each planned item: the client's metadata says the same. */
static json_t *places_doc(const struct write_spec *s, const struct build_target *t)
{
	json_t *places = json_array();

	for (uint64_t i = 0; i < s->target->chunk_count; i++)
		json_array_append_new(places, json_pack("[I, I]", (json_int_t)t->chunk_places[i].offset,
							(json_int_t)t->chunk_places[i].length));
	return places;
}

/* Adds to the result the digest of all tensors: the sum of a digest of each one's name, dtype, box and bytes, so that the order does not
 * count. Single numbers are left out: optimizers count their steps in such tensors. */
static FALLIBLE enum err put_tensors_digest(struct job *j, const struct run *run, const char *metadata)
{
	uint64_t sum[2] = { 0 }, one[2];
	struct digest_stream stream;
	struct digest got;
	char hex[33];
	bool any = false;

	each(d, run->dsts, run->dsts_n) {
		struct str fqn = run_dst_fqn(run, d);
		if (d->kind != RUN_DST_TENSOR || d->bare || d->ndim == 0) /* bare: a value's bytes, which the client has made */
			continue;
		digest_begin_one(&stream, DIGEST_XXH3);
		digest_add(&stream, fqn.p, fqn.n);
		digest_add(&stream, &d->dtype, sizeof d->dtype);
		digest_add(&stream, run->dims + d->dims_at, 2ull * d->ndim * sizeof *run->dims);
		digest_add(&stream, d->xxh3_128, sizeof d->xxh3_128);
		digest_add(&stream, metadata, strlen(metadata)); /* of a rank that saves alone: its own */
		digest_end(&stream, &got);
		memcpy(one, got.xxh3_128, sizeof one);
		sum[0] += one[0];
		sum[1] += one[1];
		any = true;
	}
	if (!any)
		return OK;
	memcpy(got.xxh3_128, sum, sizeof sum);
	digest_hex(got.xxh3_128, hex);
	if (!j->result)
		j->result = json_object();
	return json_object_set_new(j->result, "tensors_digest", json_string(hex)) < 0 ? ERR(NO_MEMORY, "no memory for the result") : OK;
}

enum err write_publish(struct write *w)
{
	struct write_spec *s = w->spec;
	struct staging *st = w->staging;
	struct job *j = w->job;
	struct manifest_head head = { .world_size = s->world_size, .generation = s->generation,
				      .has_generation = s->has_generation };
	char save_id[MANIFEST_SAVE_ID];

	if (s->after_run)
		TRY(s->after_run(s->user, w->run, w->target->chunk_places));
	TRY(job_send(j, FRAME_WANT_COMMIT, STR("{}"), NULL, 0)); /* the journal's fsync and these go on side by side */
	if (!s->given && !s->again)
		TRY(set_locs(s->target, w->target, w->run));
	if (st->is_file)
		head.metadata_name = ""; /* the file says itself what is in it */
	else
		TRY(s->given ? put_given(st, s, &head, save_id) : put_metadata(st, j, s, &head, save_id));
	TRY(share_note(w->share, j, st, w->run));
	TRY(put_manifest(w, &head));
	if (j->kind == JOB_SAVE) /* its format is DCP */
		TRY(put_tensors_digest(j, w->run, head.metadata_name));
	TRY(job_wait(j, &j->commit_ok));
	if (st->in_place)
		return staging_commit_in_place(st, head.metadata_name);
	return staging_commit(st, j->spec.overwrite);
}

static FALLIBLE enum err set_result(struct job *j, const struct write_spec *s, const struct build_target *t,
				    const struct run *run)
{
	uint64_t files = 0;
	json_t *old = j->result;

	for (uint64_t i = 0; i < run->files_n; i++)
		files += run->files[i].kind == RUN_FILE_TARGET;
	json_t *r = json_pack("{s:o, s:s, s:I, s:I, s:I, s:I, s:I, s:I}", "checkpoint", ref_doc(&j->spec.target), "format",
			      format_name(s->format), "bytes", (json_int_t)t->bytes, "files", (json_int_t)files,
			      "tensors", (json_int_t)s->target->tensor_count, "values", (json_int_t)s->target->value_count,
			      "world_size", (json_int_t)s->world_size, "read_bytes",
			      (json_int_t)atomic_load(&run->head->read_bytes));
	NEED(r, "no memory for the result");
	if (old)
		json_object_update(r, old);
	json_decref(old);
	if (s->source) { /* a stored checkpoint */
		run_checked(run, &j->checked);
		checked_report(&j->checked, r);
	}
	j->result = r;
	return OK;
}

static enum err stage_alone(const struct write_store *store, struct job *j, struct staging *out)
{
	const struct store_job by = job_in_store(j);

	(void)store;
	return staging_open(&by, &j->spec, out);
}

static enum err publish_alone(const struct write_store *store, struct write *w)
{
	(void)store;
	return write_publish(w);
}

const struct write_store write_alone = { .stage = stage_alone, .publish = publish_alone };

/* The CRC-32 fields of the file, now that the payloads that they speak of have been written. */
static FALLIBLE enum err put_crcs(const struct build_target *t, struct staging *st, const struct run *run)
{
	CLEANUP(mem_free_ptr) struct staging_field *fields = mem_alloc(t->crcs.n * sizeof *fields + 1);

	NEED(fields, "no memory for %ju checksums", (uintmax_t)t->crcs.n);
	for (uint64_t i = 0; i < t->crcs.n; i++) {
		const struct build_crc *c = &t->crcs.v[i];
		const struct run_dst *d = &run->dsts[c->dst];
		fields[i] = (struct staging_field){ c->offset, digest_crc32_combine(c->leading_crc32, d->crc32, d->payload_bytes) };
	}
	return staging_end_late(st, 0, fields, t->crcs.n);
}

static unsigned how_made(const struct run_file *f)
{
	return (f->late ? STAGING_LATE : 0) | (f->sparse ? STAGING_SPARSE : 0) | (f->base ? STAGING_UNMADE : 0);
}

static FALLIBLE enum err make_files(struct staging *st, const struct run *run)
{
	for (uint64_t i = 0; i < run->files_n; i++)
		if (run->files[i].kind == RUN_FILE_TARGET)
			TRY(staging_add_file(st, run_file_name(run, &run->files[i]), run->files[i].bytes, run->files[i].rank,
					     how_made(&run->files[i])));
	return staging_make_files(st);
}

static FALLIBLE enum err run_it(struct job *j, struct write_spec *s, struct build_target *t, struct staging *st, struct share *share,
				json_t *plan)
{
	CLEANUP(run_detach) struct run run = { .fd = -1 };

	if (j->streams && s->build->gates.n == 0)
		TRY(gate_tasks(s->build));
	TRY(run_share(s->build, &run));
	if (!s->ready && !s->again)
		run_build_free(s->build);
	enum err e = j->streams ? gate_sort(&run) : OK;
	e = e ?: make_files(st, &run);
	e = e ?: job_state(j, "running", "copy", plan, run_bytes_total(&run));
	if (!e && st->number && s->format == FORMAT_DCP && !s->given)
		e = run_write_whole_files(&run);
	e = e ?: gang_run(j, &run);
	if (!e && t->crcs.n)
		e = put_crcs(t, st, &run);
	e = e ?: s->store->publish(s->store, &(struct write){ j, s, t, st, share, &run, plan });
	e = e ?: set_result(j, s, t, &run);
	return e ?: share_report(share, j, &run, j->result);
}

/* As wide as a worker's memory allows: a task takes 3.25 times its bytes (exec.c). */
static uint32_t wide_task(uint64_t memory_bytes)
{
	uint64_t room = memory_bytes / 4 & ~(uint64_t)(BUILD_TASK_BYTES - 1);

	return (uint32_t)num_min(num_max(room, BUILD_TASK_BYTES), BUILD_WIDE_TASK_BYTES);
}

static bool is_alone(const struct write_spec *s)
{
	return !s->store->is_shared && !s->store->local;
}

/* Makes the staging directory. What is to stay in the page cache is written through it. */
static FALLIBLE enum err stage(struct job *j, const struct write_spec *s, struct staging *st)
{
	TRY(s->store->stage(s->store, j, st));
	TRY(provenance_begin(j));
	st->direct = st->direct && j->spec.cache != PAGE_CACHE_KEEP;
	return OK;
}

/* Sets what depends on the place: how bytes get there, how many at a time, and what an earlier checkpoint has of them. */
static FALLIBLE enum err begin_target(struct job *j, const struct write_spec *s, const struct staging *st, struct build_target *t,
				      struct share *share)
{
	TRY(run_add_dir(s->build, st->store ? st->store->index : 0, str_of(st->path), &t->dir));
	t->number = st->number;
	t->direct = st->direct;
	t->in_memory = st->in_memory;
	bool quantises = s->gguf && s->gguf->quantises; /* a task is read as four times its bytes */
	t->is_wide = s->transposes && !quantises && !s->merge;
	t->task_bytes = s->merge || quantises || (st->in_memory && !s->store->is_shared) ? BUILD_MEMORY_TASK_BYTES : BUILD_TASK_BYTES;
	if (t->is_wide)
		t->task_bytes = wide_task(j->worker->memory_bytes);
	if (!s->given && gate_span(s->build)) /* a small ring: several tasks go through it at a time */
		t->task_bytes = (uint32_t)num_min(t->task_bytes, gate_span(s->build) & ~(uint64_t)(FILE_PLAN_PAGE - 1));
	if (!j->dry_run)
		TRY(share_open(j, st, is_alone(s), share));
	t->cut = share->cuts && !s->given;
	return OK;
}

static FALLIBLE enum err write_staged(struct job *j, struct write_spec *s, struct build_target *t, struct staging *st)
{
	CLEANUP(share_close) struct share share = { .how = SHARE_NOTHING };
	struct share_marks marks = { 0 };
	json_t *plan = NULL;

	if (!j->dry_run)
		TRY(stage(j, s, st));
	st->local = s->store->local;
	TRY(begin_target(j, s, st, t, &share));
	TRY(build(j, s, t));
	TRY(plan_doc(j, s, t, &plan));
	if (j->dry_run && s->given)
		json_object_set_new(plan, "places", places_doc(s, t));
	if (j->dry_run) {
		if (j->result)
			json_object_update(plan, j->result);
		json_decref(j->result);
		j->result = plan;
		return OK;
	}
	enum err e = share_build(&share, st, s->build, &marks);
	e = e ?: run_it(j, s, t, st, &share, plan);
	if (!e && s->ready && !st->number) { /* numbers are one attempt's */
		*s->ready = (struct write_ready){ .build = *s->build, .strings_n = s->build->strings.n, .target = *t,
						  .marks = marks, .plan = json_incref(plan) };
		*s->build = (struct run_build){ 0 };
		t->chunk_places = t->value_places = NULL;
	}
	json_decref(plan);
	return e;
}

void write_ready_free(struct write_ready *r)
{
	run_build_free(&r->build);
	mem_free(r->target.chunk_places);
	mem_free(r->target.value_places);
	json_decref(r->plan);
	*r = (struct write_ready){ 0 };
}

enum err write_again(struct job *j, struct write_spec *s, struct write_ready *r, bool *stale_out)
{
	CLEANUP(staging_close) struct staging st = { .name = "" };
	CLEANUP(share_close) struct share share = { .how = SHARE_NOTHING };
	struct run_dir *d = &r->build.dirs.v[r->target.dir];

	s->build = &r->build;
	s->again = true;
	s->store = &write_alone;
	r->build.opts.no_sync = !j->spec.sync_files;
	enum err e = stage(j, s, &st);
	e = e ?: share_open(j, &st, true, &share);
	*stale_out = !e && (st.store->index != d->root || st.direct != r->target.direct || st.in_memory != r->target.in_memory ||
			    share.cuts != r->target.cut);
	if (!e && !*stale_out) {
		d->path_len = (uint32_t)strlen(st.path);
		e = run_add_string(&r->build, str_of(st.path), &d->path_at);
		e = e ?: share_build(&share, &st, &r->build, &r->marks);
		e = e ?: run_it(j, s, &r->target, &st, &share, r->plan);
	}
	return e;
}

enum err write_checkpoint(struct job *j, struct write_spec *s)
{
	struct build_target t = { .sd = s->target, .pieces = s->pieces, .first_src = s->first_src, .value_src = s->value_src,
				  .world_size = s->world_size, .files_per_rank = (uint32_t)j->spec.files_per_rank };
	struct staging st = { .name = "" };

	if (!s->store)
		s->store = &write_alone;
	enum err e = write_staged(j, s, &t, &st);
	staging_close(&st);
	mem_free(t.chunk_places);
	mem_free(t.value_places);
	vec_free(&t.crcs);
	return e;
}
