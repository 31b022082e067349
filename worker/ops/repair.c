/* repair.c: makes lost or damaged metadata anew, and restores damaged parts of files from bytes that are proven to be those.
 *
 *   open ──► metadata lost or damaged: made anew (repair_metadata.c) ──► everything is compared (verify) ──► damaged places are restored in
 *   staged copies of their files (repair_places.c) ──► each staged file takes the place of the damaged one; metadata come last
 *
 * A restored byte has the digest or CRC32 that was recorded of it: nothing is guessed. So every file that is replaced is better than it
 * was, each is replaced in one step, and a repair that is killed in between has lost nothing: the next one goes on. Metadata that were
 * lost become visible only if everything that they tell of is whole: a checkpoint that can be seen is complete. */
#include "base/jtext.h"
#include "ops/repair_impl.h"


#include "format/dcp_meta.h"
#include "ops/verify.h"
#include "plan/save_plan.h"
#include "store/identity.h"

enum { OPENS_MAX = 3 };        /* as the files are; without a manifest; with metadata made anew */

enum err repair_read(void *user, uint64_t offset, void *into, size_t n)
{
	const struct repair_source *s = user;

	return store_read(s->file, into, n, s->offset + offset, "");
}

static json_t *text_doc(struct str s)
{
	return s.p ? jtext_value(s) : json_null();
}

void repair_list(json_t *list, uint64_t *count, const struct checked_place *place, const char *key, const char *text)
{
	++*count;
	if (json_array_size(list) >= REPAIR_LIST_MAX)
		return;
	json_array_append_new(list, json_pack("{s:o, s:o, s:o, s:I, s:I, s:s}", "fqn", text_doc(place->fqn), "rank",
					      place->rank < 0 ? json_null() : json_integer(place->rank), "file", text_doc(place->file),
					      "offset", (json_int_t)place->offset, "bytes", (json_int_t)place->bytes, key, text));
}

enum err repair_stage(struct repair *r)
{
	const struct store_job by = job_in_store(r->job);

	if (r->staged)
		return OK;
	r->staged = true;
	return staging_open_repair(&by, &r->job->spec, r->dir, &r->staging);
}

/* ---------------------------------------------------------------------------------------------------------- opening */

static FALLIBLE enum err open_input(struct repair *r, struct input *in)
{
	*in = (struct input){ .verifies = true, .instead = &r->instead };
	enum err e = input_open(r->job, &r->job->spec.target, in);
	return e ? e : save_plan_validate(in->sd); /* damaged metadata without a digest may say anything */
}

/* Finds out whether files are of DCP, with metadata or without. */
static enum err look(void *user, const char *name, unsigned char)
{
	struct format_file is;
	bool *is_dcp = user;

	*is_dcp |= format_file(name, &is) && is.format == FORMAT_DCP && is.role == FORMAT_PAYLOAD;
	return OK;
}

static FALLIBLE enum err make_metadata(struct repair *r)
{
	CLEANUP(manifest_free_ptr) struct manifest *m = NULL;

	if (!r->instead.no_manifest)
		TRY(checkpoint_manifest(r->dir, MANIFEST_NAME, &m));
	TRY(repair_dcp_metadata(r, m));
	r->instead.format = FORMAT_DCP;
	r->instead.metadata = DCP_METADATA;
	r->instead.bytes = (struct str){ (const char *)r->metadata.p, r->metadata.len };
	r->lost_metadata = true;
	return OK;
}

/* The checkpoint cannot be opened: finds out why, and puts what is known better into r->instead. */
static FALLIBLE enum err know_better(struct repair *r, enum err e)
{
	struct err_info why = *err_last();
	enum format format;
	bool is_dcp = false;
	int64_t rank;

	bool is_damage = checked_is_damage(e) || e == ERR_COVERAGE_HOLE || e == ERR_PLAN_INVALID || e == ERR_DUPLICATE_KEY;
	if (!is_damage || e == ERR_LIMIT_EXCEEDED || e == ERR_DTYPE_UNSUPPORTED || r->lost_metadata)
		return e;
	if (manifest_is(why.file, &rank) && rank < 0 && !r->instead.no_manifest) {
		r->instead.no_manifest = true;
		checked_warn(&r->job->checked, "manifest_lost",
			     "the manifest is damaged, and its digests are not known: CRC32s are compared instead");
		return OK;
	}
	TRY(checkpoint_format_of_dir(r->dir, &format));
	TRY(store_list(r->dir, look, &is_dcp));
	err_restore(&why);
	if (!is_dcp || format == FORMAT_DCP_RANK_LOCAL)
		return e;
	return make_metadata(r);
}

static FALLIBLE enum err open_all(struct repair *r, struct input *in)
{
	enum err e = open_input(r, in);

	for (int tries = 1; e && tries < OPENS_MAX; tries++) {
		input_close(in);
		TRY(know_better(r, e));
		e = open_input(r, in);
	}
	return e;
}

static FALLIBLE enum err open_dir(struct repair *r)
{
	const struct ref *ref = &r->job->spec.target;
	const char *file = NULL;

	TRY(stores_find(&r->job->worker->stores, ref->storage.p, &r->store));
	enum err e = checkpoint_open_dir(r->store, ref->name.p, &r->dir, &file);
	if (e == ERR_NOT_FOUND)
		return ERR(NOT_FOUND, "there is no checkpoint '%s:%s'", ref->storage.p, ref->name.p);
	TRY(e);
	if (file)
		return ERR(FORMAT_UNSUPPORTED, "'%s' is one file: nothing tells what its bytes were, or which others are the same", file);
	return OK;
}

/* Opens the checkpoint that `from` names; again, after its sdict was used up. */
static FALLIBLE enum err open_from(struct repair *r)
{
	const struct ref *from = &r->job->spec.from;

	if (from->kind != REF_CHECKPOINT || (r->from && r->from->sd))
		return OK;
	checkpoint_free(r->from);
	r->from = NULL;
	return checkpoint_open(&r->job->worker->stores, from, &r->from);
}

/* ------------------------------------------------------------------------------------------------------- publishing */

static FALLIBLE enum err stage_text(struct repair *r, const char *name, const struct buf *text)
{
	char **at;

	if (text->len == 0)
		return OK;
	TRY(repair_stage(r));
	TRY(staging_put_file(&r->staging, name, text->p, text->len));
	TRY(vec_push(&r->files, &at));
	*at = mem_strdup(name);
	return *at ? OK : ERR(NO_MEMORY, "no memory for a name");
}

static FALLIBLE enum err publish(struct repair *r, const char *identity)
{
	char now[IDENTITY_MAX];

	TRY(job_send(r->job, FRAME_WANT_COMMIT, STR("{}"), NULL, 0));
	TRY(job_wait(r->job, &r->job->commit_ok));
	TRY(identity_of(store_top(r->store), r->job->spec.target.name.p, now));
	if (strcmp(identity, now) != 0)
		return ERR(CHECKPOINT_REPLACED, "the checkpoint was changed while it was being looked at");
	for (uint64_t i = 0; i < r->files.n; i++)
		TRY(staging_replace(&r->staging, r->files.v[i]));
	return r->instead.no_manifest ? store_drop(r->dir, MANIFEST_NAME) : OK;
}

/* Is anything to be published, and may it be seen? */
static bool is_better(const struct repair *r, bool whole)
{
	bool changes = r->files.n || r->metadata.len || r->instead.no_manifest;

	return changes && (whole || (!r->lost_metadata && !r->instead.no_manifest));
}

/* A dry run has looked at no payload: whether the checkpoint is whole is not known. */
static FALLIBLE enum err report(struct repair *r, bool whole, bool changed)
{
	json_t *more = json_pack("{s:o, s:o*, s:b, s:O, s:O, s:I, s:O, s:I}", "checkpoint", ref_doc(&r->job->spec.target), "whole",
				 r->job->dry_run ? NULL : json_boolean(whole), "changed", changed, "rebuilt", r->rebuilt, "restored",
				 r->restored, "restored_count", (json_int_t)r->restored_count, "unknown", r->unknown, "unknown_count",
				 (json_int_t)r->unknown_count);

	NEED(more, "no memory for the result");
	int failed = json_object_update(r->job->result, more);
	json_decref(more);
	if (r->job->checked.warnings)
		failed |= json_object_set(r->job->result, "warnings", r->job->checked.warnings);
	return failed ? ERR(NO_MEMORY, "no memory for the result") : OK;
}

static FALLIBLE enum err restore(struct repair *r)
{
	const struct checked *c = &r->job->checked;
	struct checked_place more = { .rank = -1 };

	TRY(open_from(r));
	TRY(repair_places(r, c->damage, c->padding));
	if (c->damage_count > json_array_size(c->damage))
		repair_list(r->unknown, &r->unknown_count, &more, "detail",
			    "more places are damaged than were looked at: repair what is left by another job");
	return OK;
}

static FALLIBLE enum err repair(struct repair *r, struct input *in)
{
	struct job *j = r->job;
	char identity[IDENTITY_MAX];

	TRY(job_state(j, "planning", "metadata", NULL, 0));
	TRY(open_dir(r));
	TRY(open_from(r));
	TRY(identity_of(store_top(r->store), j->spec.target.name.p, identity));
	TRY(open_all(r, in));
	if (j->dry_run)
		return report(r, false, false);
	TRY(verify_input(j, in));
	TRY(restore(r));
	bool whole = r->unknown_count == 0, changes = is_better(r, whole);
	if (changes) {
		TRY(stage_text(r, MANIFEST_NAME, &r->manifest_text));
		TRY(stage_text(r, DCP_METADATA, &r->metadata));
		TRY(publish(r, identity));
	}
	return report(r, whole, changes);
}

enum err repair_job(struct job *j)
{
	struct repair r = { .job = j, .dir = STORE_NOTHING, .staging = { .name = "" } };
	struct input in = { 0 };

	r.rebuilt = json_array();
	r.restored = json_array();
	r.unknown = json_array();
	j->result = json_object();
	enum err e = r.rebuilt && r.restored && r.unknown && j->result ? repair(&r, &in) : ERR(NO_MEMORY, "no memory for the result");
	input_close(&in);
	if (r.staged)
		staging_close(&r.staging);
	store_close(&r.dir);
	checkpoint_free(r.from);
	buf_free(&r.metadata);
	buf_free(&r.manifest_text);
	json_decref(r.rebuilt);
	json_decref(r.restored);
	json_decref(r.unknown);
	for (uint64_t i = 0; i < r.files.n; i++)
		mem_free(r.files.v[i]);
	vec_free(&r.files);
	return e;
}
