/* s3_store_commit.c: attempts, how they are published, and how checkpoints go (see s3_store.h). */
#include <stdio.h>

#include "base/jtext.h"
#include "base/map.h"
#include "base/mem.h"
#include "format/format.h"
#include "os/fs.h"
#include "store/contents.h"
#include "store/identity.h"
#include "store/notes.h"
#include "store/owner.h"
#include "store/s3_store_impl.h"

/* ---- marks of attempts ---- */

/* uploads: see s3_mark_uploads(); NULL: none. */
static FALLIBLE enum err put_mark(struct s3 *s3, struct s3_mark *m, struct s3_condition condition, json_t *uploads)
{
	CLEANUP(jval_drop) json_t *doc =
		json_pack("{s:i, s:s, s:s, s:s, s:b, s:b, s:[I, I], s:b, s:b, s:b, s:I, s:s*, s:O*}", "dcpd", 1, "job", m->job, "staging",
			  m->staging, "target", m->target, "file", m->is_file, "removes", m->removes, "removed",
			  (json_int_t)m->removed[0], (json_int_t)m->removed[1], "dead", m->is_dead, "trash", m->trash, "repairs",
			  m->repairs, "of", (json_int_t)m->of, "meets", m->meets[0] ? m->meets : NULL, "uploads", uploads);
	CLEANUP(mem_free_ptr) char *text = doc ? jtext_of(doc) : NULL;

	NEED(text, "no memory for the mark of an attempt");
	if (strlen(text) > S3_MARK_BYTES_MAX)
		return ERR(LIMIT_EXCEEDED, "too many files to replace a checkpoint in an object storage by: delete it first");
	return s3_put(s3, m->key, text, strlen(text), condition, NULL, NULL, m->etag);
}

static FALLIBLE enum err take_text(const json_t *doc, const char *key, char *out, size_t max)
{
	const char *text = json_string_value(json_object_get(doc, key));

	if (!text || strlen(text) >= max)
		return ERR(STORAGE_IO, "the mark of an attempt is not one of dcpd's");
	memcpy(out, text, strlen(text) + 1);
	return OK;
}

static FALLIBLE enum err read_mark(struct s3 *s3, const char *key, struct s3_object *is, json_t **out)
{
	CLEANUP(buf_free) struct buf text = BUF_INIT(S3_MARK_BYTES_MAX);

	TRY(s3_get_all(s3, key, NULL, &text, is));
	if (jval_parse((struct str){ text.p ? (char *)text.p : "", text.len }, out))
		return ERR(STORAGE_IO, "the mark of an attempt is no JSON");
	return OK;
}

enum err s3_mark_uploads(struct s3 *s3, const struct s3_mark *m, json_t **out)
{
	CLEANUP(jval_drop) json_t *doc = NULL;
	struct s3_object o;

	TRY(read_mark(s3, m->key, &o, &doc));
	*out = json_incref(json_object_get(doc, "uploads"));
	return OK;
}

enum err s3_mark_read(struct s3 *s3, const char *key, struct s3_mark *out)
{
	CLEANUP(jval_drop) json_t *doc = NULL;
	struct s3_object o;

	*out = (struct s3_mark){ .key = "" };
	TRY(s3_join(key, "", out->key));
	TRY(read_mark(s3, key, &o, &doc));
	memcpy(out->etag, o.etag, sizeof out->etag);
	out->mtime_ms = o.mtime_ms;
	TRY(take_text(doc, "job", out->job, sizeof out->job));
	TRY(take_text(doc, "staging", out->staging, sizeof out->staging));
	TRY(take_text(doc, "target", out->target, sizeof out->target));
	TRY(json_object_get(doc, "meets") ? take_text(doc, "meets", out->meets, sizeof out->meets) : OK);
	out->is_file = json_is_true(json_object_get(doc, "file"));
	out->removes = json_is_true(json_object_get(doc, "removes"));
	for (size_t i = 0; i < 2; i++)
		out->removed[i] = (uint64_t)json_integer_value(json_array_get(json_object_get(doc, "removed"), i));
	out->is_dead = json_is_true(json_object_get(doc, "dead"));
	out->trash = json_is_true(json_object_get(doc, "trash"));
	out->repairs = json_is_true(json_object_get(doc, "repairs"));
	out->of = (uint64_t)json_integer_value(json_object_get(doc, "of"));
	out->goes_on = json_array_size(json_object_get(doc, "uploads")) > 0;
	out->attempt = s3_attempt_at(out->staging);
	return OK;
}

static FALLIBLE enum err mark_key(const char *staging, char out[S3_PATH_MAX])
{
	const char *slash = strrchr(staging, '/');

	return s3_join(S3_MARKS "at", slash ? slash + 1 : staging, out);
}

enum err s3_mark_of_staging(struct s3 *s3, const char *path, struct s3_mark *out)
{
	char key[S3_PATH_MAX];

	TRY(mark_key(path, key));
	TRY(s3_mark_read(s3, key, out));
	return strcmp(out->staging, path) == 0 && !out->is_dead ? OK : s3_missing(path);
}

void s3_receipt_key(const struct s3_mark *m, char out[S3_PATH_MAX])
{
	const char *slash = strrchr(m->staging, '/');

	snprintf(out, S3_PATH_MAX, S3_MARKS "receipt/%.900s", slash ? slash + 1 : m->staging);
}

enum err s3_mark_dead(struct s3 *s3, struct s3_mark *m)
{
	CLEANUP(jval_drop) json_t *uploads = NULL;
	char etag[S3_ETAG_MAX];

	memcpy(etag, m->etag, sizeof etag);
	m->is_dead = true;
	/* its claim may lie there, or come late: then the uploads are all there is */
	enum err e = m->goes_on ? s3_mark_uploads(s3, m, &uploads) : OK;
	e = e ?: put_mark(s3, m, (struct s3_condition){ S3_IF_ETAG, etag }, uploads);
	return e == ERR_CHECKPOINT_EXISTS || e == ERR_NOT_FOUND ? OK : e; /* somebody else looks after it */
}

static FALLIBLE enum err mark_new(const struct store *s, const char *job, const char *staging, const char *target, struct s3_mark *out)
{
	*out = (struct s3_mark){ .attempt = s3_attempt_at(staging) };
	if ((size_t)snprintf(out->job, sizeof out->job, "%s", job) >= sizeof out->job)
		return ERR(NAME_INVALID, "a job's id of %zu bytes", strlen(job));
	TRY(s3_join(staging, "", out->staging));
	TRY(s3_join(target, "", out->target));
	TRY(mark_key(staging, out->key));
	return s3_check_conditions(s);
}

static FALLIBLE enum err mark_at(const struct staging *s, struct s3_mark *out)
{
	char target[S3_PATH_MAX];

	TRY(s3_join(s->parent_path, s->target, target));
	TRY(mark_new(s->store, s->by.id, s->path, target, out));
	out->is_file = s->is_file;
	return OK;
}

enum err s3_stage(struct staging *s, bool keep)
{
	return keep ? s3_meeting_stage(s) : s3_stage_attempt(s, "");
}

enum err s3_stage_attempt(struct staging *s, const char *meets)
{
	struct s3 *client = s3_own(s->store)->client;
	struct store_swept swept;
	struct s3_mark m;

	TRY(mark_at(s, &m));
	const struct commit_keep own = { .mark = s->by.mark };
	TRY(s3_sweep(s->store, &own, m.target, s->by.id, &swept)); /* what earlier attempts of the job left */
	TRY(s3_join(meets, "", m.meets));
	m.repairs = s->repaired.store != NULL;
	m.of = m.repairs && s3_thing_at(s->repaired)->folder ? s3_thing_at(s->repaired)->folder->attempt : 0;
	TRY(put_mark(client, &m, S3_ALWAYS, NULL));
	s->made = true;
	s->number = m.attempt << S3_FILES_SHIFT;
	return store_enter(store_top(s->store), s->path, &s->dir);
}

/* ---- publishing ---- */

static FALLIBLE enum err changed(const char *name)
{
	return ERR(CHECKPOINT_EXISTS, "'%s' is no longer what was to be replaced, or something is there by now", name);
}

/* The error of a write under a condition: that nothing is there, where an ETag was told, is a condition that does not hold either. */
static enum err of_condition(enum err e, const char *name)
{
	return e == ERR_NOT_FOUND || e == ERR_CHECKPOINT_EXISTS || e == ERR_CHECKPOINT_REPLACED ? changed(name) : e;
}

/* Was the write refused, and no try of it can have been carried out? */
static bool is_refused(enum err e, bool unsure)
{
	return (e == ERR_CHECKPOINT_EXISTS || e == ERR_NOT_FOUND) && !unsure;
}

/* As of_condition(). Of a write that may have been carried out before another took its place nobody knows whether it counted: nothing
 * repeats it, for the condition of a repeat would be the other's. */
static enum err of_write(enum err e, bool unsure, const char *name)
{
	if (unsure && (e == ERR_CHECKPOINT_EXISTS || e == ERR_NOT_FOUND))
		return ERR(STATE_CONFLICT, "'%s' was written or removed by others, and an answer of the storage was lost: whether what was "
			   "written here was there for a while is not known", name);
	return of_condition(e, name);
}

enum err s3_claim(struct s3 *s3, const char *key, struct s3_condition condition, const struct s3_mark *m, const json_t *files,
		  char etag_out[S3_ETAG_MAX], bool *lies_out)
{
	bool unsure = false;
	const struct s3_call call = { .unsure_out = &unsure };
	char mark[65];
	CLEANUP(jval_drop) json_t *doc = json_pack("{s:i, s:s, s:s, s:O*}", "dcpd_claim", 1, "job", m->job, "staging", m->staging, "files",
						   files);
	CLEANUP(mem_free_ptr) char *text = doc ? jtext_of(doc) : NULL;

	NEED(text, "no memory for a claim");
	s3_attempt_mark(S3_MARK_CLAIM, m->attempt, mark);
	if (m->is_file) { /* no checkpoint of one file is empty */
		text[0] = '\0';
	} else if (strlen(text) > S3_CLAIM_MAX) { /* the files are found by the attempt's mark, too */
		mem_free(text);
		text = mem_strdup("{\"dcpd_claim\":1}");
		NEED(text, "no memory for a claim");
	}
	enum err e = s3_put(s3, key, text, strlen(text), condition, mark, &call, etag_out);
	if (lies_out)
		*lies_out = !is_refused(e, unsure);
	return of_write(e, unsure, m->target);
}

/* The identity that is replaced must be that of the object whose ETag is told. */
static FALLIBLE enum err check_replaced(const struct staging *s, const struct s3_mark *m, const char *replaces, struct s3_folder *before,
					char etag_out[S3_ETAG_MAX])
{
	struct s3 *client = s3_own(s->store)->client;
	CLEANUP(s3_entry_free) struct s3_entry file = { 0 };
	char identity[IDENTITY_MAX], first[S3_ETAG_MAX] = "";

	for (int i = 0; i < 2; i++) {
		s3_entry_free(&file);
		if (m->is_file)
			TRY(of_condition(s3_look_file(client, m->target, &file), m->target));
		else
			TRY(s3_folder_look(client, m->target, false, before));
		snprintf(etag_out, S3_ETAG_MAX, "%s", m->is_file ? file.etag : before->commit.etag);
		if (!etag_out[0] || (i && strcmp(first, etag_out) != 0))
			return changed(m->target);
		memcpy(first, etag_out, sizeof first);
		if (i)
			break;
		enum err e = identity_of(store_top(s->store), m->target, identity);
		if (e && e != ERR_NOT_FOUND)
			return e;
		if (e || strcmp(identity, replaces) != 0)
			return changed(m->target);
		s3_folder_clear(before);
	}
	return OK;
}

/* Is the attempt still ours to publish? Who sweeps it changes its mark first. replaced: what goes by its commit, so that a sweep knows it,
 * too; NULL: nothing does. uploads: as of put_mark(). */
static FALLIBLE enum err check_mark(struct s3 *s3, const struct s3_mark *m, const struct s3_folder *replaced, json_t *uploads)
{
	struct s3_mark now;
	char etag[S3_ETAG_MAX];

	enum err e = s3_mark_of_staging(s3, m->staging, &now);
	if (!e && replaced) {
		now.removed[0] = replaced->attempt;
		now.removed[1] = replaced->given;
		memcpy(etag, now.etag, sizeof etag);
		e = put_mark(s3, &now, (struct s3_condition){ S3_IF_ETAG, etag }, uploads);
	}
	if (e == ERR_NOT_FOUND || e == ERR_CHECKPOINT_EXISTS)
		return ERR(STATE_CONFLICT, "the attempt was given up, and what it wrote is removed");
	return e;
}

/* The first try of a commit may have been carried out and its answer lost; then others may have removed that checkpoint, files and all,
 * and the repeat put the commit alone in its place again. */
static FALLIBLE enum err check_own(struct staging *s, const struct s3_mark *m, const struct s3_upload *commit)
{
	CLEANUP(s3_folder_free_ptr) struct s3_folder *there = mem_zalloc(1, sizeof *there);
	struct s3 *client = s3_own(s->store)->client;
	bool is_whole = true;
	struct s3_object o;

	NEED(there, "no memory for a folder");
	enum err e = s3_head(client, commit->key, NULL, &o);
	if (e == ERR_NOT_FOUND || (!e && strcmp(o.mark, commit->mark) != 0))
		return OK; /* it was whole, and is removed or replaced since */
	TRY(e);
	TRY(s3_folder_look(client, m->target, true, there));
	each(file, s->files.v, s->files.n)
		is_whole &= s3_folder_find(there, file->name) != NULL;
	if (is_whole)
		return OK;
	e = s3_claim(client, commit->key, (struct s3_condition){ S3_IF_ETAG, o.etag }, m, NULL, o.etag, NULL);
	e = e ?: s3_delete_if(client, commit->key, o.etag, NULL);
	TRY(e == ERR_CHECKPOINT_EXISTS ? OK : e);
	return ERR(STATE_CONFLICT, "'%s' was removed by others while the answer to its commit was lost", m->target);
}

/* A process that was stopped between its look at the mark and its commit may find that its files were swept meanwhile. */
static bool is_alive(struct s3 *s3, const struct s3_mark *m)
{
	struct s3_mark now;
	bool alive = s3_mark_of_staging(s3, m->staging, &now) == OK;

	err_clear();
	return alive;
}

/* The condition is about one key: a checkpoint of another format has another. */
static FALLIBLE enum err check_free(const struct s3_folder *there)
{
	if (!there->commit.key && !there->claim_key[0])
		return OK;
	return ERR(CHECKPOINT_EXISTS, "'%s' is a checkpoint by now, or is being made one", there->path);
}

/* False: it may be there. */
static bool drop_marked(struct s3 *s3, const char *key, const char *mark)
{
	struct s3_object o;

	enum err e = s3_head(s3, key, NULL, &o);
	if (!e && strcmp(o.mark, mark) == 0)
		e = s3_delete_if(s3, key, o.etag, NULL);
	return !e || e == ERR_NOT_FOUND;
}

/* After a failure with the claim in place: files that came are this attempt's, for there were none before it. False: some are left. */
static bool take_back(struct s3_own *own, const struct s3_mark *m, const struct s3_upload *commit)
{
	CLEANUP(err_restore) struct err_info info = *err_last();
	bool is_back = true;
	char claim[65];

	for (struct s3_upload *u = s3_part_next(own, m->staging, NULL); u; u = s3_part_next(own, m->staging, u))
		is_back &= !u->waits || u == commit || drop_marked(own->client, u->key, u->mark);
	s3_attempt_mark(S3_MARK_CLAIM, m->attempt, claim);
	return is_back && drop_marked(own->client, commit->key, claim);
}

/* Claims the place of a commit that replaces nothing, then looks at the mark. In this order whoever marks the attempt as dead finds the
 * claim and takes it back (end_claim()), or is seen here: a process that was stopped behind its look, for however long, commits nothing,
 * not even if what the next owner committed is removed by then. */
static FALLIBLE enum err claim_new(struct staging *s, const struct s3_mark *m, const struct s3_upload *commit, const json_t *files,
				   char etag_out[S3_ETAG_MAX])
{
	struct s3_own *own = s3_own(s->store);
	bool lies = true;

	enum err e = s3_claim(own->client, commit->key, (struct s3_condition){ S3_IF_NONE, NULL }, m, files, etag_out, &lies);
	if (e) {
		s->made = !lies;
		return e;
	}
	e = check_mark(own->client, m, NULL, NULL);
	if (e)
		s->made = take_back(own, m, commit);
	return e;
}

/* Removes the files and the notes of what the commit has replaced. Another may replace or remove this commit in turn at any time, and put
 * files of the same names there: from then on what is left of the old one is that other's to remove. before NULL: one file, which is
 * gone. */
static void clear_replaced(struct staging *s, const struct s3_mark *m, const struct s3_upload *commit, const struct s3_folder *before,
			   const struct map *keys)
{
	const struct s3_hold hold = { commit->key, commit->mark };
	struct s3 *client = s3_own(s->store)->client;
	bool held = false;

	enum err e = before ? s3_clear_folder(client, before, keys, hold, &held) : s3_check_hold(client, hold, &held);
	e = e ?: held ? notes_drop(store_top(s->store), m->target, !m->is_file) : s3_unseal(s->store, m);
	if (e)
		err_clear();
	s->leaves = s->leaves || e || !held; /* keys that nobody sees, until the sweep that finds the mark */
}

/* sealed_out: holds are kept out of the replacement. */
static FALLIBLE enum err commit_one(struct staging *s, const struct s3_mark *m, struct s3_upload *commit, const char *replaces,
				    bool *sealed_out)
{
	CLEANUP(s3_folder_free_ptr) struct s3_folder *before = mem_zalloc(1, sizeof *before);
	struct s3 *client = s3_own(s->store)->client;
	char etag[S3_ETAG_MAX] = "";

	NEED(before, "no memory for a folder");
	if (replaces) {
		TRY(check_replaced(s, m, replaces, before, etag));
		*sealed_out = true; /* even if the answer is lost */
		TRY(notes_seal(store_top(s->store), m->target, !m->is_file, m->job));
	} else if (!m->is_file) {
		TRY(s3_folder_look(client, m->target, false, before));
		TRY(check_free(before));
	}
	const bool claims = s->by.mark && !replaces; /* another node may take the job over */
	TRY(claims ? claim_new(s, m, commit, NULL, etag) : check_mark(client, m, replaces && !m->is_file ? before : NULL, NULL));
	fs_fault("commit.rename");
	const struct s3_condition condition = { replaces || claims ? S3_IF_ETAG : S3_IF_NONE, etag };
	enum err e = s3_part_complete(commit, condition);
	fs_fault("commit.renamed");
	s->made = !e || is_refused(e, commit->unsure); /* else it may yet come true: a sweep looks later */
	if (e && claims)
		s->made = s->made && take_back(s3_own(s->store), m, commit);
	TRY(of_write(e, commit->unsure, m->target));
	if (!m->is_file && (commit->unsure || (s->by.mark && !is_alive(client, m)))) {
		s->made = false;
		TRY(check_own(s, m, commit));
	}
	s->done = true;
	if (replaces)
		clear_replaced(s, m, commit, m->is_file ? NULL : before, NULL);
	return OK;
}

/* ---- files whose names are given: all appear in the commit ---- */

static struct s3_upload *find_commit(struct s3_own *own, const char *staging, uint32_t *count)
{
	struct s3_upload *found = s3_part_find(own, staging, DCP_METADATA);
	struct format_file file;

	*count = found ? 1 : 0;
	for (struct s3_upload *u = s3_part_next(own, staging, NULL); u && !*count; u = s3_part_next(own, staging, u))
		if (format_file(u->name, &file) && file.role == FORMAT_METADATA)
			found = u;
	for (struct s3_upload *u = s3_part_next(own, staging, NULL); u && strcmp(found ? found->name : "", DCP_METADATA) != 0;
	     u = s3_part_next(own, staging, u))
		*count += format_file(u->name, &file) && file.role == FORMAT_METADATA;
	return found;
}

static FALLIBLE enum err put_files(struct s3_own *own, const struct s3_mark *m, const struct s3_upload *commit, bool replaces)
{
	const struct s3_condition condition = { replaces ? S3_IF_ANY : S3_IF_NONE, NULL };

	for (struct s3_upload *u = s3_part_next(own, m->staging, NULL); u; u = s3_part_next(own, m->staging, u))
		if (u->waits && u != commit)
			TRY(s3_part_complete(u, condition));
	return OK;
}

static bool is_unsure(struct s3_own *own, const struct s3_mark *m)
{
	bool unsure = false;

	for (struct s3_upload *u = s3_part_next(own, m->staging, NULL); u; u = s3_part_next(own, m->staging, u))
		unsure |= u->unsure;
	return unsure;
}

/* before: what is replaced, whose files may be there; NULL: nothing is. */
static FALLIBLE enum err list_files(struct s3_own *own, const struct s3_mark *m, const struct s3_upload *commit,
				    const struct s3_folder *there, const struct s3_folder *before, json_t **out)
{
	json_t *names = *out = json_array();

	for (struct s3_upload *u = s3_part_next(own, m->staging, NULL); u; u = s3_part_next(own, m->staging, u)) {
		if (!u->waits || u == commit)
			continue;
		if (s3_folder_find(there, u->name) && !(before && s3_folder_find(before, u->name)))
			return ERR(CHECKPOINT_EXISTS, "'%s' has a file '%s' already, which nothing here made", m->target, u->name);
		if (json_array_append_new(names, json_string(u->name)) != 0)
			return ERR(NO_MEMORY, "no memory for a list of files");
	}
	return OK;
}

/* Brings all bytes to the server, and lists the uploads for a recovery, the commit's behind the others. keys: those of their files. */
static FALLIBLE enum err park(struct s3_own *own, const struct s3_mark *m, struct s3_upload *commit, struct map *keys, json_t **out)
{
	json_t *all = *out = json_array();
	struct s3_upload *u = NULL;

	NEED(all, "no memory for a list of files");
	do {
		u = s3_part_next(own, m->staging, u);
		struct s3_upload *one = u ? u : commit;
		if (!one->waits || u == commit)
			continue;
		TRY(s3_part_park(one));
		TRY(map_put(keys, str_of(one->key), 0));
		if (json_array_append_new(all, json_pack("[s, s]", one->key, one->id)) != 0)
			return ERR(NO_MEMORY, "no memory for a list of files");
	} while (u);
	return OK;
}

static FALLIBLE enum err publish_new(struct staging *s, const struct s3_mark *m, struct s3_upload *commit)
{
	CLEANUP(s3_folder_free_ptr) struct s3_folder *there = mem_zalloc(1, sizeof *there);
	CLEANUP(jval_drop) json_t *files = NULL;
	struct s3_own *own = s3_own(s->store);
	char etag[S3_ETAG_MAX];

	NEED(there, "no memory for a folder");
	TRY(s3_folder_look(own->client, m->target, true, there));
	TRY(check_free(there));
	TRY(list_files(own, m, commit, there, NULL, &files));
	TRY(claim_new(s, m, commit, files, etag));
	fs_fault("commit.rename");
	enum err e = put_files(own, m, commit, false);
	e = e ?: s3_part_complete(commit, (struct s3_condition){ S3_IF_ETAG, etag });
	fs_fault("commit.renamed");
	bool unsure = is_unsure(own, m);
	s->made = !e || (is_refused(e, unsure) && take_back(own, m, commit));
	TRY(of_write(e, unsure, m->target));
	s->done = true;
	return OK;
}

/* The claim takes the place of the old commit, so that nobody sees files of both, when all bytes of the new one are on the server; from
 * then on it goes on only, by whoever finds the mark if this process ends (s3_store_recover.c). */
static FALLIBLE enum err replace_old(struct staging *s, const struct s3_mark *m, struct s3_upload *commit, struct s3_folder *before,
				     const char *old_etag, const struct map *keys)
{
	struct s3_own *own = s3_own(s->store);
	const char *old = before->commit.key;
	bool lies = true, same = strcmp(old, commit->key) == 0;
	char etag[S3_ETAG_MAX];

	enum err e = s3_claim(own->client, old, (struct s3_condition){ S3_IF_ETAG, old_etag }, m, NULL, etag, &lies);
	s->made = !e || !lies;
	TRY(e);
	s->made = false;
	fs_fault("commit.rename");
	TRY(put_files(own, m, commit, true));
	TRY(s3_part_complete(commit, same ? (struct s3_condition){ S3_IF_ETAG, etag } : (struct s3_condition){ S3_IF_NONE, NULL }));
	fs_fault("commit.renamed");
	s->done = true;
	if (!same && s3_delete_if(own->client, old, etag, NULL)) {
		err_clear();
		s->leaves = true;
	}
	clear_replaced(s, m, commit, before, keys);
	return OK;
}

static FALLIBLE enum err publish_over(struct staging *s, const struct s3_mark *m, struct s3_upload *commit, const char *replaces,
				      bool *sealed_out)
{
	CLEANUP(s3_folder_free_ptr) struct s3_folder *there = mem_zalloc(1, sizeof *there), *before = mem_zalloc(1, sizeof *before);
	CLEANUP(jval_drop) json_t *files = NULL, *uploads = NULL;
	CLEANUP(map_free) struct map keys = { 0 };
	struct s3_own *own = s3_own(s->store);
	char etag[S3_ETAG_MAX];

	NEED(there && before, "no memory for a folder");
	TRY(park(own, m, commit, &keys, &uploads));
	TRY(check_replaced(s, m, replaces, before, etag));
	TRY(s3_folder_look(own->client, m->target, true, there));
	TRY(list_files(own, m, commit, there, before, &files));
	*sealed_out = true; /* even if the answer is lost */
	TRY(notes_seal(store_top(s->store), m->target, true, m->job));
	TRY(check_mark(own->client, m, before, uploads));
	enum err e = replace_old(s, m, commit, before, etag, &keys);
	if (e && !s->made) /* the claim lies there, or may come */
		s3_part_leave(own, m->staging);
	return e;
}

static FALLIBLE enum err publish_given(struct staging *s, const struct s3_mark *m, const char *replaces, bool *sealed_out)
{
	uint32_t count;

	struct s3_upload *commit = find_commit(s3_own(s->store), m->staging, &count);
	if (count != 1)
		return ERR(UNSUPPORTED, "no file of this format is such that it alone makes the others a checkpoint: an object storage has "
			   "no other way to publish them at once");
	return replaces ? publish_over(s, m, commit, replaces, sealed_out) : publish_new(s, m, commit);
}

/* Holds are kept out of a replacement. Of one in doubt they are until a sweep knows. */
static FALLIBLE enum err publish(struct staging *s, const struct s3_mark *m, struct s3_upload *commit, bool given, const char *replaces)
{
	bool sealed = false;

	enum err e = given ? publish_given(s, m, replaces, &sealed) : commit_one(s, m, commit, replaces, &sealed);
	if (e && sealed && s->made) {
		struct err_info info = *err_last();
		if (s3_unseal(s->store, m)) {
			err_clear();
			s->made = false; /* the mark stays, for the sweep that lifts the seal */
		}
		err_restore(&info);
	}
	return e;
}

/* ---- the table's ---- */

static FALLIBLE enum err check_finished(struct s3_own *own, const struct s3_mark *m, uint32_t *given, struct s3_upload **commit)
{
	const char *slash = strrchr(m->target, '/'), *file = slash ? slash + 1 : m->target;

	*given = 0;
	*commit = s3_part_find(own, m->staging, m->is_file ? file : DCP_METADATA);
	for (struct s3_upload *u = s3_part_next(own, m->staging, NULL); u; u = s3_part_next(own, m->staging, u)) {
		if (u->waits && !u->is_finished)
			return ERR(INTERNAL, "'%s' was not written to its end", u->name);
		if (u->waits && u->is_spent)
			return ERR(STATE_CONFLICT, "'%s' was written by others while this checkpoint's files were put there: save it again",
				   m->target);
		*given += u->waits && u != *commit;
	}
	return OK;
}

enum err s3_publish(struct staging *s, const char *replaces)
{
	struct s3_own *own = s3_own(s->store);
	struct s3_upload *commit;
	struct s3_mark m;
	uint32_t given;

	TRY(mark_at(s, &m));
	TRY(check_finished(own, &m, &given, &commit));
	fs_fault("commit.synced");
	if (m.is_file && !commit)
		return ERR(INTERNAL, "the checkpoint's one file was not written");
	enum err e = publish(s, &m, commit, given || !commit, replaces);
	TRY(s->made ? e : err_in_doubt(e));
	s3_part_forget(own, m.staging, false);
	/* a file has nothing else that tells of the job: the sweep behind it takes its mark and receipt */
	if (!m.is_file && !s->leaves && s3_delete(own->client, m.key, NULL))
		err_clear();
	return OK;
}

/* Other hosts may still write files of the attempt: its mark stays, so that a sweep finds them, and no later attempt goes on with it. */
static FALLIBLE enum err give_up(struct s3 *s3, struct s3_mark *m)
{
	struct s3_mark now;

	enum err e = s3_mark_of_staging(s3, m->staging, &now);
	if (e && e != ERR_NOT_FOUND)
		return e;
	if (e || !now.meets[0])
		return s3_drop_attempt(s3, m);
	TRY(s3_mark_dead(s3, &now));
	return s3_drop_data(s3, m->target, m->attempt);
}

void s3_discard(struct staging *s)
{
	CLEANUP(err_restore) struct err_info info = *err_last();
	struct s3_mark m;

	store_close(&s->dir);
	if (!s->store || !s3_own(s->store))
		return;
	s3_part_forget(s3_own(s->store), s->path, false);
	if (s->made && !s->done && (mark_at(s, &m) || give_up(s3_own(s->store)->client, &m)))
		err_clear(); /* the sweep finds the mark */
}

/* The copies that the trash has took their time: is the removal still ours, and its entry there? */
static FALLIBLE enum err check_removal(struct s3 *s3, const struct s3_mark *m)
{
	struct s3_mark now;

	enum err e = s3_mark_of_staging(s3, m->staging, &now);
	return e == ERR_NOT_FOUND ? ERR(STATE_CONFLICT, "the removal was given up") : e;
}

/* The object whose appearance made the checkpoint is replaced by a claim under the condition that it is `commit`: nothing else would keep
 * a new checkpoint out before the DELETE, which not every server makes conditional. *lies_out: as of s3_claim(). */
static FALLIBLE enum err take_away(const struct store *s, const struct s3_mark *m, const struct s3_folder *f,
				   const struct s3_entry *commit, const struct store_removal *how, bool *lies_out)
{
	struct s3 *client = s3_own(s)->client;
	char etag[S3_ETAG_MAX], claim[65];
	bool held = true;

	s3_attempt_mark(S3_MARK_CLAIM, m->attempt, claim);
	TRY(m->trash ? check_removal(client, m) : OK);
	TRY(how->check ? how->check(how->user) : OK);
	fs_fault("remove.rename");
	enum err e = commit->key ? s3_claim(client, commit->key, (struct s3_condition){ S3_IF_ETAG, commit->etag }, m, NULL, etag, lies_out)
				 : OK;
	fs_fault("remove.renamed");
	if (e == ERR_CHECKPOINT_EXISTS)
		return ERR(CHECKPOINT_REPLACED, "'%s' was replaced meanwhile", m->target);
	e = e ?: m->trash ? s3_trash_end(s, m) : m->is_file ? OK : s3_clear_folder(client, f, NULL, (struct s3_hold){ commit->key, claim },
										   &held);
	e = e ?: held ? notes_drop(store_top(s), m->target, !m->is_file) : s3_unseal(s, m);
	return e || !commit->key ? e : s3_delete_if(client, commit->key, etag, NULL);
}

static FALLIBLE enum err put_in_trash(const struct store_job *by, const struct store *s, const struct s3_mark *m,
				      const struct s3_folder *f, const struct s3_entry *commit, const char *about)
{
	uid_t owner;

	TRY(owner_find(s, m->target, by->uid, &owner));
	return s3_trash_begin(s, m, f, commit, owner, about);
}

enum err s3_remove(const struct store_job *by, const struct store *s, const char *name, const struct store_removal *how)
{
	CLEANUP(s3_folder_free_ptr) struct s3_folder *f = mem_zalloc(1, sizeof *f);
	CLEANUP(s3_entry_free) struct s3_entry file = { 0 };
	struct s3 *client = s3_own(s)->client;
	char staging[STAGING_BESIDE_MAX], own[STAGING_NAME_MAX];
	struct s3_mark m;

	NEED(f, "no memory for a folder");
	/* Without the right to delete, the claim would hide a checkpoint whose objects stay: S3 checks the right before the key. */
	TRY(s3_delete(client, S3_MARKS "none", NULL));
	TRY(s3_folder_look(client, name, false, f));
	TRY(f->is_there ? OK : s3_look_file(client, name, &file));
	staging_name(by, own);
	TRY(staging_beside(name, own, staging));
	TRY(mark_new(s, by->id, staging, name, &m));
	m.removes = true;
	m.trash = how->about != NULL;
	m.is_file = !f->is_there;
	m.removed[0] = f->attempt;
	m.removed[1] = f->given;
	TRY(put_mark(client, &m, S3_ALWAYS, NULL));
	const struct s3_entry *commit = m.is_file ? &file : &f->commit;
	bool lies = false;
	enum err e = notes_seal(store_top(s), name, !m.is_file, m.job);
	e = e ?: m.trash ? put_in_trash(by, s, &m, f, commit, how->about) : OK;
	e = e ?: take_away(s, &m, f, commit, how, &lies);
	if (e && lies)
		return err_in_doubt(e); /* who finds the mark goes on */
	struct err_info info = *err_last();
	/* a seal that could not be lifted, or whose answer was lost, goes with the mark: the sweep that finds the mark lifts it */
	if ((e && s3_unseal(s, &m)) || (e && m.trash && s3_trash_undo(client, m.job)) || s3_delete(client, m.key, NULL))
		err_clear();
	if (e)
		err_restore(&info);
	return e;
}
