/* replicate.c: a checkpoint byte for byte at another place: every file of its folder, of whatever format, compared with the manifest's
 * digests while it is copied. A reshard makes another checkpoint of the same tensors; here the bytes themselves must be the same.
 *
 *   list the files ─► stage, copy and compare ─► list them again: unchanged? ─► manifests, the copy's own page ─► commit
 *
 * The copy is published at once by its store. A source that was written to meanwhile fails the job: a copy of halves is none. Holds stay
 * with the source (a hold says that this copy is not to be removed); record and history are in the files, and come along. */
#include "base/num.h"
#include "runner/gang_run.h"
#include "runner/input.h"
#include "runner/plan_doc.h"
#include "store/copied.h"
#include "store/identity.h"
#include "store/record.h"
#include "store/staging.h"

/* A manifest of the source: written by the leader from the bytes that were parsed. */
struct page {
	const struct contents_file *file;
	void *bytes;
	uint64_t n;
	struct manifest *manifest;     /* NULL: it is outdated, and says nothing of the files */
};

struct replicate {
	struct job *job;
	struct input source;
	struct contents files;
	struct vec(struct page) pages;
	struct run_build build;
	struct build_copier *copier;
	struct staging staging;
	char identity[IDENTITY_MAX];   /* of the source before it is read */
};

static const struct checkpoint *checkpoint_of(const struct replicate *r)
{
	return r->source.checkpoint;
}

/* The one file that the checkpoint is; NULL: it is a folder. */
static const char *single_file(const struct replicate *r)
{
	const char *name = checkpoint_of(r)->name, *slash = strrchr(name, '/');

	return !checkpoint_of(r)->single ? NULL : slash ? slash + 1 : name;
}

static FALLIBLE enum err read_page(struct replicate *r, const struct contents_file *f)
{
	struct page *p;

	TRY(vec_push(&r->pages, &p));
	p->file = f;
	TRY(store_get(checkpoint_of(r)->dir, f->name.p, MANIFEST_MAX, &p->bytes, &p->n, NULL));
	return checkpoint_of(r)->outdated[0] ? OK : manifest_parse(p->bytes, p->n, &p->manifest);
}

static bool is_manifest(const struct replicate *r, const struct contents_file *f)
{
	int64_t rank;

	return !checkpoint_of(r)->single && manifest_is(f->name.p, &rank);
}

static FALLIBLE enum err list(struct replicate *r)
{
	const struct checkpoint *c = checkpoint_of(r);

	TRY(identity_of(store_top(c->store), c->name, r->identity));
	TRY(contents_list(c->dir, single_file(r), &r->files));
	each(f, r->files.files.v, r->files.files.n)
		if (is_manifest(r, f))
			TRY(err_at_file(read_page(r, f), f->name.p, -1));
	return OK;
}

/* The digest of a whole file that a manifest of the source was written with: its metadata's. NULL: none. */
static const unsigned char *digest_of(const struct replicate *r, const struct contents_file *f)
{
	each(p, r->pages.v, r->pages.n)
		if (p->manifest && str_is(f->name, p->manifest->metadata_name) && (uint64_t)f->st.st_size == p->manifest->metadata_bytes)
			return p->manifest->metadata_xxh3;
	return NULL;
}

static FALLIBLE enum err add_files(struct replicate *r)
{
	const struct checkpoint *c = checkpoint_of(r);
	const char *slash = strrchr(c->name, '/');
	struct str path = { c->name, !c->single ? strlen(c->name) : slash ? (size_t)(slash - c->name) : 0 };
	struct build_copies how = { .source = c, .direct = r->staging.direct, .in_memory = r->staging.in_memory };

	TRY(run_add_dir(&r->build, c->store->index, path, &how.from));
	r->build.dirs.v[how.from].is_source = true;
	TRY(run_add_dir(&r->build, r->staging.store ? r->staging.store->index : 0, str_of(r->staging.path), &how.to));
	TRY(build_copies_begin(&r->build, &how, &r->copier));
	each(f, r->files.files.v, r->files.files.n) {
		struct build_copy file = { .name = f->name, .bytes = (uint64_t)f->st.st_size, .digest = digest_of(r, f) };
		if (c->single)
			file.target = str_of(r->staging.target);
		if (!is_manifest(r, f))
			TRY(err_at_file(build_copies_add(r->copier, &file), f->name.p, -1));
		TRY(job_tick(r->job));
	}
	return build_copies_end(r->copier);
}

static FALLIBLE enum err plan_doc(const struct replicate *r, json_t **out)
{
	const struct plan_figures figures = { r->files.bytes, r->files.bytes };
	json_t *doc = json_pack("{s:s, s:I, s:I}", "format", format_name(checkpoint_of(r)->format), "bytes", (json_int_t)r->files.bytes,
				"world_size", (json_int_t)checkpoint_of(r)->world_size);
	enum err e = doc ? plan_doc_files(doc, &r->build, RUN_FILE_TARGET) : ERR(NO_MEMORY, "no memory for the plan");

	e = e ?: plan_doc_figures(doc, r->job, &r->build, &figures, plan_sdict_bytes(checkpoint_of(r)->sd));
	if (e)
		json_decref(doc);
	else
		*out = doc;
	return e;
}

static FALLIBLE enum err stage(struct replicate *r)
{
	const struct store_job by = job_in_store(r->job);

	TRY(staging_open_copy(&by, &r->job->spec, checkpoint_of(r)->single, &r->staging));
	each(folder, r->files.folders.v, r->files.folders.n)
		TRY(staging_add_folder(&r->staging, folder->p));
	each(f, r->files.files.v, r->files.files.n)
		if (!is_manifest(r, f))
			TRY(staging_add_file(&r->staging, checkpoint_of(r)->single ? str_of(r->staging.target) : f->name,
					     (uint64_t)f->st.st_size, 0, 0));
	return staging_make_files(&r->staging);
}

/* The checkpoint that was listed lies there still, and no file of it was written to. */
static FALLIBLE enum err check_unchanged(const struct replicate *r)
{
	const struct checkpoint *c = checkpoint_of(r);
	CLEANUP(store_close) struct store_at dir = STORE_NOTHING;
	struct contents now = { 0 };
	char identity[IDENTITY_MAX];
	const char *file;

	enum err e = checkpoint_open_dir(c->store, c->name, &dir, &file);
	e = e ?: identity_of(store_top(c->store), c->name, identity);
	e = e ?: contents_list(dir, single_file(r), &now);
	e = e ?: contents_same(&r->files, &now);
	contents_free(&now);
	if (e == ERR_NOT_FOUND || (!e && strcmp(identity, r->identity) != 0))
		return ERR(CHECKPOINT_REPLACED, "'%s' is no longer the checkpoint that was copied: nothing is kept of the copy", c->name);
	return e;
}

static FALLIBLE enum err put_own_page(struct replicate *r)
{
	const struct job *j = r->job;
	CLEANUP(buf_free) struct buf b = BUF_INIT(MANIFEST_MAX);
	const struct checkpoint *c = checkpoint_of(r);
	CLEANUP(record_free) struct record record = { 0 };
	if (c->single)
		TRY(record_of(store_top(c->store), c->name, &record));
	const char *made = json_string_value(json_object_get(json_object_get(record.doc, "made_by"), "job"));
	struct copied page = { .job = j->id, .kind = kind_of(j->kind)->name, .attempt = j->attempt, .world_size = c->world_size,
			       .uid = j->uid, .storage = j->spec.source.storage.p, .name = c->name, .identity = r->identity,
			       .source_job = c->manifest ? c->manifest->job : made ?: "", .files = &r->files,
			       .staged = c->single ? &r->staging : NULL, .record = record.doc };

	TRY(copied_put(&b, &page));
	/* the receipt of a target that is one file is looked for by this name (staging.h) */
	return staging_put_file(&r->staging, c->single ? MANIFEST_NAME : COPIED_NAME, b.p, b.len);
}

static FALLIBLE enum err publish(struct replicate *r)
{
	struct job *j = r->job;

	TRY(check_unchanged(r));
	TRY(job_send(j, FRAME_WANT_COMMIT, STR("{}"), NULL, 0)); /* the journal's fsync and these go on side by side */
	each(p, r->pages.v, r->pages.n)
		TRY(staging_put_file(&r->staging, p->file->name.p, p->bytes, p->n));
	TRY(put_own_page(r));
	TRY(job_wait(j, &j->commit_ok));
	return staging_commit(&r->staging, j->spec.overwrite);
}

static void note_page(struct replicate *r, const struct page *p)
{
	struct checked *c = &r->job->checked;

	if (p->manifest && p->manifest->has_edges)
		c->verified_bytes += p->n;
	else
		checked_nothing(c, &(struct checked_place){ { NULL, 0 }, -1, p->file->name, 0, p->n });
}

static FALLIBLE enum err set_result(struct replicate *r, const struct run *run)
{
	const struct checkpoint *c = checkpoint_of(r);
	struct job *j = r->job;

	each(p, r->pages.v, r->pages.n) /* a manifest ends with its own digest, unless an older version wrote it */
		note_page(r, p);
	j->result = json_pack("{s:o, s:s, s:I, s:I, s:I, s:I, s:I}", "checkpoint", ref_doc(&j->spec.target), "format",
			      format_name(c->format), "bytes", (json_int_t)r->files.bytes, "files", (json_int_t)r->files.files.n,
			      "tensors", (json_int_t)c->sd->tensor_count, "values", (json_int_t)c->sd->value_count, "world_size",
			      (json_int_t)c->world_size);
	NEED(j->result, "no memory for the result");
	if (c->manifest && c->manifest->has_generation)
		(void)json_object_set_new(j->result, "generation", json_integer((json_int_t)c->manifest->generation));
	gang_run_note(j, run);
	checked_report(&j->checked, j->result);
	return OK;
}

static FALLIBLE enum err copy(struct replicate *r, json_t *plan)
{
	CLEANUP(run_detach) struct run run = { .fd = -1 };

	TRY(gang_run_built(r->job, &r->build, "copy", plan, &run));
	TRY(publish(r));
	return set_result(r, &run);
}

static FALLIBLE enum err replicate(struct replicate *r)
{
	struct job *j = r->job;
	CLEANUP(json_decrefp) json_t *plan = NULL;

	TRY(job_state(j, "planning", "metadata", NULL, 0));
	TRY(input_open(j, &j->spec.source, &r->source));
	checked_forget_bytes(&j->checked); /* metadata are copied with all else */
	TRY(job_state(j, "planning", "plan", NULL, 0));
	TRY(list(r));
	if (!j->dry_run)
		TRY(stage(r));
	TRY(add_files(r));
	TRY(plan_doc(r, &plan));
	if (!j->dry_run)
		return copy(r, plan);
	j->result = move(plan);
	return OK;
}

enum err replicate_job(struct job *j)
{
	struct replicate r = { .job = j };

	enum err e = replicate(&r);
	staging_close(&r.staging);
	build_copies_free(r.copier);
	run_build_free(&r.build);
	each(p, r.pages.v, r.pages.n) {
		mem_free(p->bytes);
		manifest_free(p->manifest);
	}
	vec_free(&r.pages);
	contents_free(&r.files);
	input_close(&r.source);
	return e;
}
