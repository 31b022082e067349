/* s3_store_recover.c: what attempts that ended left in a bucket (see s3_store.h): found by their marks, looked at, removed.
 *
 * A request of a process that was killed may still be on its way. So what another process left is not removed at once: its mark is
 * changed, which keeps the attempt from committing from then on, and a later sweep, S3_DEAD_MS behind, removes the keys. */
#include <stdio.h>
#include <string.h>

#include "base/log.h"
#include "base/mem.h"
#include "io/digest.h"
#include "store/contents.h"
#include "store/copied.h"
#include "store/fence.h"
#include "store/notes.h"
#include "store/s3_store_impl.h"

enum { UPLOAD_MS = 7 * 24 * 3600000, MARKS_MAX = 10000 };

struct marks {
	struct vec(char *) keys;
};

static enum err take_key(void *user, struct str key, const struct s3_object *object)
{
	struct marks *m = user;
	char **at;

	if (!object || m->keys.n >= MARKS_MAX)
		return OK;
	TRY(vec_push(&m->keys, &at));
	*at = mem_strndup(key.p, key.n);
	return *at ? OK : ERR(NO_MEMORY, "no memory for a list of attempts");
}

static void marks_free(struct marks *m)
{
	each(k, m->keys.v, m->keys.n)
		mem_free(*k);
	vec_free(&m->keys);
}

/* job NULL: of all. */
static FALLIBLE enum err marks_list(struct s3 *s3, const char *job, struct marks *out)
{
	char prefix[128];

	if ((size_t)snprintf(prefix, sizeof prefix, S3_MARKS "at/.dcpd-%s%s", job ? job : "", job ? "-" : "") >= sizeof prefix)
		return ERR(NAME_INVALID, "a job's id of %zu bytes", strlen(job));
	return s3_list(s3, prefix, 0, NULL, 0, NULL, take_key, out);
}

/* ---- removing ---- */

/* Is a commit without a mark (PyTorch's, a copy by another tool) the one that the page beside it tells of? */
static FALLIBLE enum err is_told(struct s3 *s3, const struct s3_folder *f, bool *out)
{
	CLEANUP(buf_free) struct buf page = BUF_INIT(MANIFEST_MAX), metadata = BUF_INIT(f->commit.bytes);
	CLEANUP(manifest_free_ptr) struct manifest *m = NULL;
	const struct s3_entry *e = s3_folder_find(f, MANIFEST_NAME);
	unsigned char xxh3[16];

	*out = !f->is_guess || !e;
	if (*out)
		return OK;
	TRY(s3_get_all(s3, e->key, NULL, &page, NULL));
	if (manifest_parse(page.p, page.len, &m))
		err_clear();
	if (!m || m->metadata_bytes != f->commit.bytes)
		return OK;
	TRY(s3_get_all(s3, f->commit.key, NULL, &metadata, NULL));
	digest_xxh3(metadata.p, metadata.len, xxh3);
	*out = memcmp(xxh3, m->metadata_xxh3, sizeof xxh3) == 0;
	return OK;
}

/* Is the attempt's data what readers of the target see? */
static FALLIBLE enum err is_seen(struct s3 *s3, const char *target, uint64_t attempt, bool *out)
{
	CLEANUP(s3_folder_free_ptr) struct s3_folder *f = mem_zalloc(1, sizeof *f);

	NEED(f, "no memory for a folder");
	TRY(s3_folder_look(s3, target, false, f));
	*out = f->commit.key && (f->attempt == attempt || f->given == attempt);
	return *out ? is_told(s3, f, out) : OK;
}

FALLIBLE enum err s3_drop_data(struct s3 *s3, const char *target, uint64_t attempt)
{
	CLEANUP(s3_folder_free_ptr) struct s3_folder *all = mem_zalloc(1, sizeof *all);
	const char *rest;
	bool seen = true;

	NEED(all, "no memory for a folder");
	TRY(attempt ? is_seen(s3, target, attempt, &seen) : OK);
	if (seen)
		return OK;
	TRY(s3_folder_look(s3, target, true, all));
	each(e, all->v.v, all->v.n)
		if (!s3_is_folder_entry(e) && s3_attempt_of(e->name, &rest) == attempt)
			TRY(s3_delete_if(s3, e->key, e->etag, NULL));
	return OK;
}

struct aborting {
	struct s3 *s3;
	const struct s3_mark *m;
};

static enum err abort_own(void *user, struct str key, const char *id, int64_t begun_ms)
{
	const struct aborting *a = user;
	char whole[S3_PATH_MAX];

	(void)begun_ms;
	if (s3_attempt_of_key(key) != a->m->attempt)
		return OK;
	snprintf(whole, sizeof whole, "%.*s", (int)key.n, key.p);
	return s3_upload_abort(a->s3, whole, id, NULL);
}

/* Files that a commit with given names had put there, and in folders below, when it broke off: each has the attempt's mark. What is deeper
 * or longer than copies are is nobody's of dcpd. */
static FALLIBLE enum err take_back_files(struct s3 *s3, uint64_t attempt, const char *path, unsigned depth, bool *any_out)
{
	CLEANUP(s3_folder_free_ptr) struct s3_folder *f = mem_zalloc(1, sizeof *f);
	char below[S3_PATH_MAX];
	struct s3_object o;
	bool any;

	*any_out = false;
	NEED(f, "no memory for a folder");
	TRY(s3_folder_look(s3, path, true, f)); /* all: copies keep names, with the number of the attempt that saved the data */
	each(e, f->v.v, f->v.n) {
		size_t n = strlen(e->key);
		if (n > S3_KEY_MAX || (s3_is_folder_entry(e) && depth == CONTENTS_DEPTH_MAX))
			continue;
		if (s3_is_folder_entry(e)) {
			snprintf(below, sizeof below, "%.*s", (int)n - 1, e->key);
			TRY(take_back_files(s3, attempt, below, depth + 1, &any));
			TRY(any ? s3_delete(s3, e->key, NULL) : OK); /* some servers keep and list folders that are empty */
			*any_out |= any;
			continue;
		}
		enum err bad = s3_head(s3, e->key, NULL, &o);
		if (bad && bad != ERR_NOT_FOUND)
			return bad;
		if (bad || !s3_is_commit_of(o.mark, attempt))
			continue;
		TRY(s3_delete_if(s3, e->key, o.etag, NULL));
		*any_out = true;
	}
	return OK;
}

/* Removes the checkpoint that a commit replaced, where its process ended before that: data by the number of the attempt, files of given
 * names by their marks. */
static FALLIBLE enum err drop_replaced(struct s3 *s3, const struct s3_mark *m)
{
	bool seen, any;

	for (size_t i = 0; i < 2; i++) {
		TRY(s3_drop_data(s3, m->target, m->removed[i]));
		TRY(m->removed[i] ? is_seen(s3, m->target, m->removed[i], &seen) : OK);
		TRY(m->removed[i] && !seen ? take_back_files(s3, m->removed[i], m->target, 0, &any) : OK);
	}
	return OK;
}

enum err s3_drop_attempt(struct s3 *s3, const struct s3_mark *m)
{
	struct aborting a = { s3, m };
	char receipt[S3_PATH_MAX], prefix[S3_PATH_MAX + 1];

	s3_receipt_key(m, receipt);
	snprintf(prefix, sizeof prefix, "%s/", m->target);
	if (!m->is_file && !m->removes) {
		TRY(s3_drop_data(s3, m->target, m->attempt));
		TRY(drop_replaced(s3, m));
		TRY(s3_uploads_list(s3, prefix, NULL, abort_own, &a));
	}
	TRY(m->is_file ? s3_delete(s3, receipt, NULL) : OK);
	TRY(m->trash ? s3_trash_undo(s3, m->job) : OK);
	return s3_delete(s3, m->key, NULL);
}

FALLIBLE enum err s3_settle_attempt(const struct store *s, const char *target, uint64_t attempt)
{
	CLEANUP(marks_free) struct marks all = { 0 };
	struct s3 *s3 = s3_own(s)->client;
	char path[STAGING_BESIDE_MAX];
	struct s3_mark m;

	TRY(attempt ? marks_list(s3, NULL, &all) : OK);
	each(k, all.keys.v, all.keys.n) {
		TRY(staging_beside(target, strrchr(*k, '/') + 1, path));
		if (s3_attempt_at(path) != attempt)
			continue;
		enum err e = s3_mark_read(s3, *k, &m);
		e = e ?: s3_drop_attempt(s3, &m);
		if (e && e != ERR_NOT_FOUND)
			return e;
	}
	return OK;
}

static FALLIBLE enum err look(struct s3 *s3, const char *path, struct s3_folder **out)
{
	struct s3_folder *f = mem_zalloc(1, sizeof *f);

	NEED(f, "no memory for a folder");
	enum err e = s3_folder_look(s3, path, false, f);
	if (e)
		s3_folder_free(f);
	else
		*out = f;
	return e;
}

/* ---- a commit that replaces files: it goes on ---- */

static enum err take_part(void *user, const struct s3_part *part)
{
	struct s3_part *at;

	TRY(vec_push((struct s3_parts *)user, &at));
	*at = *part;
	return OK;
}

/* Makes the object of an upload, unless it is made. ERR_NOT_FOUND: the upload is gone. */
static FALLIBLE enum err make_object(struct s3 *s3, const struct s3_mark *m, const char *key, const char *id, struct s3_condition condition)
{
	CLEANUP(s3_parts_free) struct s3_parts all = { 0 };
	struct s3_object o;
	char mark[65];

	s3_attempt_mark(S3_MARK_COMMIT, m->attempt, mark);
	if (!id[0])
		return s3_put(s3, key, "", 0, condition, mark, NULL, NULL);
	enum err e = s3_upload_parts_list(s3, key, id, NULL, take_part, &all);
	e = e ?: s3_upload_complete(s3, key, id, all.v, all.n, condition, NULL, NULL);
	if (e != ERR_NOT_FOUND && e != ERR_CHECKPOINT_EXISTS)
		return e;
	enum err bad = s3_head(s3, key, NULL, &o);
	if (bad && bad != ERR_NOT_FOUND) /* whether it is made is not known: nothing is taken back */
		return bad;
	if (bad || strcmp(o.mark, mark) != 0)
		return e;
	err_clear();
	return OK;
}

static FALLIBLE enum err make_objects(struct s3 *s3, const struct s3_mark *m, const struct s3_folder *f, const char *claim_etag)
{
	CLEANUP(jval_drop) json_t *uploads = NULL;

	TRY(s3_mark_uploads(s3, m, &uploads));
	size_t n = json_array_size(uploads);
	for (size_t i = 0; i < n; i++) {
		const json_t *one = json_array_get(uploads, i);
		const char *key = json_string_value(json_array_get(one, 0)), *id = json_string_value(json_array_get(one, 1));
		struct s3_condition condition = S3_ALWAYS;
		if (!key || !id || strncmp(key, m->target, strlen(m->target)) != 0 || key[strlen(m->target)] != '/')
			return ERR(STORAGE_IO, "the mark of an attempt is not one of dcpd's");
		if (i == n - 1)
			condition = (struct s3_condition){ strcmp(key, f->claim_key) == 0 ? S3_IF_ETAG : S3_IF_NONE, claim_etag };
		TRY(make_object(s3, m, key, id, condition));
	}
	return OK;
}

/* The claim of a commit that replaces is there, so old files may be gone already: the new checkpoint is made of its uploads. Where these
 * are gone, too, nothing whole is left, and the name becomes free. */
static FALLIBLE enum err go_on(struct s3 *s3, const struct s3_mark *m, const struct s3_folder *f, const char *claim_etag)
{
	struct s3_object o;
	char mark[65];
	bool any;

	enum err e = make_objects(s3, m, f, claim_etag);
	if (e && e != ERR_NOT_FOUND && e != ERR_CHECKPOINT_EXISTS)
		return e;
	if (e) {
		err_clear();
		TRY(take_back_files(s3, m->attempt, m->target, 0, &any));
		TRY(drop_replaced(s3, m));
	}
	e = s3_head(s3, f->claim_key, NULL, &o);
	if (e)
		return e == ERR_NOT_FOUND ? OK : e;
	s3_attempt_mark(S3_MARK_CLAIM, m->attempt, mark);
	return strcmp(o.mark, mark) == 0 ? s3_delete_if(s3, f->claim_key, o.etag, NULL) : OK;
}

/* The claim in the target, if it is this attempt's: the removal goes on, as does a commit that replaces files, another commit is taken
 * back, unless it comes first. */
static FALLIBLE enum err end_claim(const struct store *s, const struct s3_mark *m, bool *ours)
{
	CLEANUP(s3_folder_free_ptr) struct s3_folder *f = NULL;
	struct s3 *s3 = s3_own(s)->client;
	struct s3_object o;
	char mark[65];
	bool any;

	*ours = false;
	TRY(look(s3, m->target, &f));
	if (m->is_file)
		memcpy(f->claim_key, m->target, sizeof f->claim_key);
	if (!f->claim_key[0])
		return OK;
	enum err e = s3_head(s3, f->claim_key, NULL, &o);
	if (e)
		return e == ERR_NOT_FOUND ? OK : e;
	s3_attempt_mark(S3_MARK_CLAIM, m->attempt, mark);
	if (strcmp(o.mark, mark) != 0)
		return OK;
	*ours = true;
	if (m->goes_on)
		return go_on(s3, m, f, o.etag);
	if (!m->removes) { /* from now on its commit fails */
		e = s3_claim(s3, f->claim_key, (struct s3_condition){ S3_IF_ETAG, o.etag }, m, NULL, o.etag, NULL);
		*ours = !e;
		if (e == ERR_CHECKPOINT_EXISTS)
			err_clear();
		if (e)
			return e == ERR_CHECKPOINT_EXISTS ? OK : e;
	}
	TRY(m->trash ? s3_trash_end(s, m) : OK);
	if (m->is_file || m->trash) {
		TRY(notes_drop(store_top(s), m->target, !m->is_file));
		return s3_delete_if(s3, f->claim_key, o.etag, NULL);
	}
	TRY(m->removes ? s3_clear_folder(s3, f, NULL, (struct s3_hold){ f->claim_key, mark }, &any)
		       : take_back_files(s3, m->attempt, m->target, 0, &any));
	for (int i = 0; i < 2 && m->removes; i++)
		TRY(s3_drop_data(s3, m->target, m->removed[i]));
	return s3_delete_if(s3, f->claim_key, o.etag, NULL);
}

FALLIBLE enum err s3_unseal(const struct store *s, const struct s3_mark *m)
{
	CLEANUP(s3_folder_free_ptr) struct s3_folder *f = mem_zalloc(1, sizeof *f);
	CLEANUP(s3_entry_free) struct s3_entry file = { 0 };

	NEED(f, "no memory for a folder");
	TRY(notes_unseal(store_top(s), m->target, !m->is_file, m->job));
	enum err e = m->is_file ? s3_look_file(s3_own(s)->client, m->target, &file) :
				  s3_folder_look(s3_own(s)->client, m->target, false, f);
	bool alone = m->is_file ? e == ERR_NOT_FOUND : !e && f->v.n == 1 && notes_is(f->v.v[0].name);
	if (e == ERR_NOT_FOUND)
		err_clear();
	else
		TRY(e);
	return alone ? notes_drop(store_top(s), m->target, !m->is_file) : OK;
}

/* ---- recover ---- */

static FALLIBLE enum err manifest_of(const struct store *s, const char *name, const char *page, const char *job, struct manifest **out)
{
	CLEANUP(store_close) struct store_at at = STORE_NOTHING;
	CLEANUP(manifest_free_ptr) struct manifest *m = NULL;

	enum err e = store_enter(store_top(s), name, &at);
	e = e ?: checkpoint_manifest(at, page, &m);
	if (e == ERR_NOT_FOUND || e == ERR_FORMAT_MANIFEST || e == ERR_LIMIT_EXCEEDED || e == ERR_CHECKPOINT_DAMAGED) {
		err_clear();
		return OK;
	}
	TRY(e);
	if (m && strcmp(m->job, job) == 0)
		*out = move(m);
	return OK;
}

/* The checkpoint's page, if it is the job's. Another writer's commit may have come to files of this one. */
static FALLIBLE enum err page_of(const struct store *s, const char *name, const char *job, struct manifest **out)
{
	CLEANUP(s3_folder_free_ptr) struct s3_folder *f = NULL;
	bool told = true;

	TRY(look(s3_own(s)->client, name, &f));
	TRY(f->commit.key ? is_told(s3_own(s)->client, f, &told) : OK);
	return told ? manifest_of(s, name, MANIFEST_NAME, job, out) : OK;
}

/* A checkpoint that is one file has the attempt's mark on it, and its page is the receipt. */
static FALLIBLE enum err file_of(struct s3 *s3, const struct s3_mark *m, bool *done_out, struct manifest **out)
{
	CLEANUP(buf_free) struct buf text = BUF_INIT(MANIFEST_MAX);
	char mark[65], receipt[S3_PATH_MAX];
	struct s3_object o;

	enum err e = s3_head(s3, m->target, NULL, &o);
	if (e)
		return e == ERR_NOT_FOUND ? OK : e;
	s3_attempt_mark(S3_MARK_COMMIT, m->attempt, mark);
	*done_out = strcmp(o.mark, mark) == 0;
	s3_receipt_key(m, receipt);
	if (!*done_out || s3_get_all(s3, receipt, NULL, &text, NULL) || manifest_parse(text.p, text.len, out))
		err_clear();
	return OK;
}

static FALLIBLE enum err removed(const struct store *s, const char *name, bool *out)
{
	struct stat st;

	enum err e = store_stat(store_top(s), name, &st);
	*out = e == ERR_NOT_FOUND;
	return e == ERR_NOT_FOUND ? OK : e;
}

static struct str job_of(const char *key)
{
	static const char begin[] = S3_MARKS "at/.dcpd-";
	const char *at = key + sizeof begin - 1, *dash = strlen(key) > sizeof begin ? strrchr(at, '-') : NULL;

	return dash ? (struct str){ at, (size_t)(dash - at) } : (struct str){ NULL, 0 };
}

/* mark NULL: nobody else has the job. */
static bool is_own(const char *key, const char *mark)
{
	return !mark || fence_is_of(key, job_of(key), mark);
}

/* A commit reads its mark behind its claim, which s3_recover() takes back, and before its last write, whose condition does the rest. */
enum err s3_fence(const struct store_job *by, const struct store *s, const char *name)
{
	struct s3 *s3 = s3_own(s)->client;
	CLEANUP(marks_free) struct marks all = { 0 };

	(void)name;
	TRY(marks_list(s3, by->id, &all));
	each(k, all.keys.v, all.keys.n) {
		struct s3_mark m;
		if (!fence_keeps_out(*k, job_of(*k), by))
			continue;
		enum err e = s3_mark_read(s3, *k, &m);
		e = e ?: m.is_dead ? OK : s3_mark_dead(s3, &m);
		if (e && e != ERR_NOT_FOUND)
			return e;
	}
	return OK;
}

enum err s3_recover(const struct store_job *by, const struct store *s, const char *name, bool removes, bool *done_out,
		    struct manifest **out)
{
	struct s3 *s3 = s3_own(s)->client;
	const char *job = by->id;
	CLEANUP(marks_free) struct marks all = { 0 };
	bool ours = false;

	*done_out = false;
	TRY(marks_list(s3, job, &all));
	each(k, all.keys.v, all.keys.n) {
		struct s3_mark m;
		enum err e = s3_mark_read(s3, *k, &m);
		if (!e && !m.is_dead && !is_own(*k, by->mark))
			continue; /* its daemon is at it */
		e = e ?: end_claim(s, &m, &ours);
		if (!e && m.is_file && !*done_out)
			e = file_of(s3, &m, done_out, out);
		if (e && e != ERR_NOT_FOUND)
			return e;
	}
	if (removes)
		TRY(removed(s, name, done_out));
	if (!removes && !*done_out)
		TRY(manifest_of(s, name, COPIED_NAME, job, out));
	if (!removes && !*done_out && !*out)
		TRY(page_of(s, name, job, out));
	*done_out = *done_out || (!removes && *out);
	struct store_swept swept;
	return s3_sweep(s, &(struct commit_keep){ .mark = by->mark }, name, job, &swept);
}

/* ---- sweep ---- */

/* Is another daemon's attempt given up? Nothing of it has changed between two sweeps, and it is old. */
static bool is_abandoned(const struct commit_keep *k, const struct s3_mark *m, int64_t now_ms)
{
	const char *before = json_string_value(json_object_get(k->watched, m->key));

	if (before && strcmp(before, m->etag) == 0 && now_ms - m->mtime_ms > S3_OTHERS_MS)
		return true;
	if (k->others)
		(void)json_object_set_new(k->others, m->key, json_string(m->etag));
	return false;
}

static bool is_kept(const struct commit_keep *k, const char *key, const struct s3_mark *m, int64_t now_ms)
{
	struct str job = job_of(key);

	if (!k || !job.p)
		return !job.p;
	if (k->before && str_cmp(job, str_of(k->before)) >= 0)
		return true;
	for (size_t i = 0; i < json_array_size(k->jobs); i++)
		if (str_is(job, json_string_value(json_array_get(k->jobs, i))))
			return true;
	return k->mark && !fence_is_of(key, job, k->mark) && !is_abandoned(k, m, now_ms);
}

/* A dead one goes when no request of it can be on its way any more. Until then it is told as later, or as another's, so that a sweep
 * comes. */
static FALLIBLE enum err sweep_dead(const struct store *s, struct s3_mark *m, const struct commit_keep *k, struct store_swept *out)
{
	struct s3 *s3 = s3_own(s)->client;
	bool ours;
	int64_t age = s3_now_ms(s3) - m->mtime_ms, left = age < 0 ? S3_DEAD_MS : S3_DEAD_MS - age;

	if (left > 0) {
		out->later_ms = left > out->later_ms ? left : out->later_ms;
		if (k && k->others)
			(void)json_object_set_new(k->others, m->key, json_string(m->etag));
		return OK;
	}
	TRY(end_claim(s, m, &ours)); /* it came late */
	if (m->meets[0] && age < S3_OTHERS_MS) { /* another host may not know yet, and write its files to their end */
		out->later_ms = S3_OTHERS_MS - age;
		return s3_drop_data(s3, m->target, m->attempt);
	}
	TRY(s3_drop_attempt(s3, m));
	out->removed++;
	return OK;
}

/* Notes that cannot be read keep their seal, and nothing else from going. */
static FALLIBLE enum err unseal(const struct store *s, const struct s3_mark *m)
{
	enum err e = s3_unseal(s, m);

	if (e != ERR_CHECKPOINT_HELD)
		return e;
	log_warn("a job that is over stays in notes that cannot be read", "storage", s->name, "name", m->target, "job", m->job, NULL);
	err_clear();
	return OK;
}

/* Was the commit of the mark's attempt made? It was the last request that makes anything; of several hosts none needs to meet any more. */
static FALLIBLE enum err is_committed(struct s3 *s3, const struct s3_mark *m, bool *out)
{
	*out = false;
	return m->removes || m->is_file || m->trash ? OK : is_seen(s3, m->target, m->attempt, out);
}

/* k NULL: of one job, of which a later attempt may go on with what several hosts have written, unless that is committed. */
static FALLIBLE enum err sweep_mark(const struct store *s, const char *key, const struct commit_keep *k, struct store_swept *out)
{
	struct s3 *s3 = s3_own(s)->client;
	struct s3_mark m;
	bool ours, ends, committed = false;

	enum err e = s3_mark_read(s3, key, &m);
	if (e)
		return e == ERR_NOT_FOUND ? OK : e;
	if (m.is_dead)
		return sweep_dead(s, &m, k, out);
	TRY(m.meets[0] && !k ? is_committed(s3, &m, &committed) : OK);
	if (m.meets[0] && !k && !committed)
		return OK;
	if (is_kept(k, key, &m, s3_now_ms(s3)))
		return OK;
	TRY(end_claim(s, &m, &ours));
	TRY(unseal(s, &m));
	out->removed++;
	ends = m.removes || m.is_file;
	if (m.trash) { /* its claim may be on its way, and needs the entry */
		TRY(s3_trash_is_open(s3, m.job, &ends));
		ends = !ends;
	}
	TRY(is_committed(s3, &m, &committed));
	if (committed && m.meets[0]) /* its leader was killed before it could say goodbye */
		TRY(s3_meeting_drop(s3, m.meets));
	if (ends || committed)
		return s3_drop_attempt(s3, &m);
	TRY(s3_mark_dead(s3, &m));
	e = s3_mark_read(s3, key, &m);
	if (e)
		return e == ERR_NOT_FOUND ? OK : e;
	return m.is_dead ? sweep_dead(s, &m, k, out) : OK;
}

struct olds {
	struct s3 *s3;
	struct store_swept *out;
};

/* An upload whose mark is gone, or that never had one: a process died between. It costs money, and nobody sees it. */
static enum err abort_old(void *user, struct str key, const char *id, int64_t begun_ms)
{
	const struct olds *o = user;
	char whole[S3_PATH_MAX];

	if (begun_ms <= 0 || s3_now_ms(o->s3) - begun_ms < UPLOAD_MS || key.n >= sizeof whole)
		return OK;
	snprintf(whole, sizeof whole, "%.*s", (int)key.n, key.p);
	TRY(s3_upload_abort(o->s3, whole, id, NULL));
	o->out->removed++;
	return OK;
}

/* A mark that cannot be read, or whose target cannot, ends no sweep: the first such error is kept for the end. */
static FALLIBLE enum err unless_of_mark(enum err e, struct err_info *first)
{
	if (e != ERR_STORAGE_IO && e != ERR_LIMIT_EXCEEDED && e != ERR_NAME_INVALID)
		return e;
	if (!first->code)
		*first = *err_last();
	err_clear();
	return OK;
}

enum err s3_sweep(const struct store *s, const struct commit_keep *keep, const char *name, const char *job, struct store_swept *out)
{
	CLEANUP(marks_free) struct marks all = { 0 };
	struct err_info first = { .code = OK };

	(void)name;
	*out = (struct store_swept){ 0 };
	TRY(marks_list(s3_own(s)->client, job, &all));
	each(k, all.keys.v, all.keys.n)
		if (!job || !keep || (is_own(*k, keep->mark) && !staging_is_later(*k, keep->attempt)))
			TRY(unless_of_mark(sweep_mark(s, *k, job ? NULL : keep, out), &first));
	struct olds olds = { s3_own(s)->client, out };
	TRY(job ? OK : s3_uploads_list(olds.s3, "", NULL, abort_old, &olds));
	TRY(job ? OK : s3_meeting_sweep(olds.s3, out));
	TRY(job ? OK : s3_trash_sweep(s, out));
	if (first.code)
		err_restore(&first);
	return first.code;
}
