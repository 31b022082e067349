/* s3_store_trash.c: removed checkpoints that may come back (see s3_store.h).
 *
 *   .dcpd/trash/{job}/about    a page: words of the one who removed it, what lay where, and the entry's state
 *   .dcpd/trash/{job}/commit   a copy of the object whose appearance was the commit
 *   .dcpd/trash/{job}/{i}      copies of files whose names another checkpoint could have, as copies of checkpoints and assets do
 *
 * Data and pages with the attempt's number stay where they are: nobody sees them without their commit, and no other attempt has their keys.
 * So a save of dcpd's goes and comes back without a byte of its tensors being copied.
 *
 *   moving ─(the removal's claim is there)─► kept ─► back ─(the commit is there again)─► nothing
 *                                              └───► gone ─(data removed)─► nothing
 *
 * Each arrow is a write under the condition that the page is what was read: of a restore and an emptying one wins. Who dies in `back`
 * leaves it to the sweep, which waits until no request of that one can be on its way. */
#include <stdio.h>

#include "base/jtext.h"
#include "base/mem.h"
#include "os/fs.h"
#include "store/notes.h"
#include "store/owner.h"
#include "store/s3_store_impl.h"

enum { PAGE_MAX = 4 << 20, ID_MAX = 64 };
#define TRASH S3_MARKS "trash/"

struct page {
	char key[S3_PATH_MAX], id[ID_MAX + 1], etag[S3_ETAG_MAX];
	int64_t mtime_ms;
	json_t *doc;
};

static void page_free(struct page *p)
{
	json_decref(p->doc);
}

/* The id of an entry is a job's. */
static bool is_id(const char *id)
{
	size_t n = strlen(id);

	return n > 0 && n <= ID_MAX && strspn(id, "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz") == n;
}

static void entry_key(const char *id, const char *file, char out[S3_PATH_MAX])
{
	snprintf(out, S3_PATH_MAX, TRASH "%.64s/%.64s", id, file);
}

static FALLIBLE enum err not_there(const char *id)
{
	return ERR(NOT_FOUND, "there is no '%.64s' in the trash", id);
}

static FALLIBLE enum err read_page(struct s3 *s3, const char *id, struct page *out)
{
	CLEANUP(buf_free) struct buf text = BUF_INIT(PAGE_MAX);
	struct s3_object o;

	*out = (struct page){ .key = "" };
	if (!is_id(id))
		return not_there(id);
	snprintf(out->id, sizeof out->id, "%s", id);
	entry_key(id, "about", out->key);
	TRY(s3_get_all(s3, out->key, NULL, &text, &o));
	memcpy(out->etag, o.etag, sizeof out->etag);
	out->mtime_ms = o.mtime_ms;
	enum err e = jval_parse((struct str){ text.p ? (char *)text.p : "", text.len }, &out->doc);
	static const char *const members[] = { "state", "target", "commit" };
	for (size_t i = 0; i < 3 && !e; i++)
		e = json_is_string(json_object_get(out->doc, members[i])) ? OK : ERR_STORAGE_IO;
	if (!e || e == ERR_NO_MEMORY)
		return e;
	return ERR(STORAGE_IO, "the page of '%s' in the trash is not one of dcpd's", id);
}

static const char *text_of(const struct page *p, const char *member)
{
	return json_string_value(json_object_get(p->doc, member)) ?: "";
}

static uint64_t number_of(const struct page *p, const char *member)
{
	return (uint64_t)json_integer_value(json_object_get(p->doc, member));
}

static bool is_in(const struct page *p, const char *state)
{
	return strcmp(text_of(p, "state"), state) == 0;
}

static FALLIBLE enum err put_page(struct s3 *s3, struct page *p, const char *state, bool is_new)
{
	CLEANUP(mem_free_ptr) char *text = NULL;
	char etag[S3_ETAG_MAX];

	memcpy(etag, p->etag, sizeof etag);
	NEED(json_object_set_new(p->doc, "state", json_string(state)) == 0 && (text = jtext_of(p->doc)), "no memory for a page");
	if (strlen(text) > PAGE_MAX)
		return ERR(LIMIT_EXCEEDED, "the checkpoint has too many files for the trash: delete it without \"trash\"");
	return s3_put(s3, p->key, text, strlen(text), (struct s3_condition){ is_new ? S3_IF_NONE : S3_IF_ETAG, etag }, NULL, NULL, p->etag);
}

/* ERR_NOT_FOUND: another has it. */
static FALLIBLE enum err move_page(struct s3 *s3, struct page *p, const char *state)
{
	enum err e = put_page(s3, p, state, false);

	return e == ERR_CHECKPOINT_EXISTS || e == ERR_NOT_FOUND ? not_there(p->id) : e;
}

/* ---- into it ---- */

struct moving {
	struct s3 *s3;
	json_t *keys;
	const char *id;
};

static FALLIBLE enum err move_in(struct moving *m, const struct s3_entry *e)
{
	char name[24], to[S3_PATH_MAX];

	snprintf(name, sizeof name, "%zu", json_array_size(m->keys));
	entry_key(m->id, name, to);
	TRY(s3_copy_object(m->s3, e, to, NULL, S3_ALWAYS));
	return json_array_append_new(m->keys, json_string(e->key)) == 0 ? OK : ERR(NO_MEMORY, "no memory for a list of files");
}

static enum err move_below(void *user, struct str key, const struct s3_object *o)
{
	struct s3_entry e = { .bytes = o ? o->bytes : 0 };
	char whole[S3_PATH_MAX];

	if (!o || key.n >= sizeof whole || memchr(key.p, '\0', key.n) || key.p[key.n - 1] == '/')
		return OK;
	snprintf(whole, sizeof whole, "%.*s", (int)key.n, key.p);
	memcpy(e.etag, o->etag, sizeof e.etag);
	e.key = whole;
	return move_in(user, &e);
}

/* Copies what cannot stay. */
static FALLIBLE enum err copy_files(struct moving *m, const struct s3_folder *f)
{
	const char *rest;

	each(e, f->v.v, f->v.n) {
		if (s3_is_folder_entry(e))
			TRY(s3_list(m->s3, e->key, 0, NULL, 0, NULL, move_below, m));
		else if (strcmp(e->key, f->commit.key) != 0 && !notes_is(e->name) &&
			 (!f->attempt || s3_attempt_of(strrchr(e->key, '/') + 1, &rest) != f->attempt))
			TRY(move_in(m, e));
	}
	return OK;
}

FALLIBLE enum err s3_trash_begin(const struct store *s, const struct s3_mark *m, const struct s3_folder *f, const struct s3_entry *commit,
				 uid_t owner, const char *about)
{
	struct s3 *s3 = s3_own(s)->client;
	CLEANUP(page_free) struct page p = { .key = "" };
	CLEANUP(jval_drop) json_t *words = NULL;
	char to[S3_PATH_MAX];

	if (!is_id(m->job))
		return ERR(NAME_INVALID, "'%s' cannot be the name of an entry of the trash", m->job);
	if (!commit->key)
		return ERR(UNSUPPORTED, "'%s' has no index, whose removal alone would hide it: delete it without \"trash\"", m->target);
	TRY(jval_parse(str_of(about), &words));
	TRY(s3_settle_attempt(s, m->target, m->is_file ? 0 : f->attempt));
	snprintf(p.id, sizeof p.id, "%s", m->job);
	entry_key(m->job, "about", p.key);
	p.doc = json_pack("{s:i, s:s, s:s, s:b, s:I, s:I, s:[], s:O}", "dcpd", 1, "target", m->target, "commit", commit->key, "file",
			  m->is_file,
			  "attempt", (json_int_t)f->attempt, "owner", (json_int_t)owner, "moved", "about", words);
	NEED(p.doc, "no memory for a page");
	enum err e = put_page(s3, &p, "moving", true);
	if (e == ERR_CHECKPOINT_EXISTS)
		return ERR(STATE_CONFLICT, "the trash has a checkpoint of this job already");
	TRY(e);
	fs_fault("trash.made");
	struct moving moving = { s3, json_object_get(p.doc, "moved"), p.id };
	TRY(m->is_file ? OK : copy_files(&moving, f));
	entry_key(p.id, "commit", to);
	TRY(s3_copy_object(s3, commit, to, NULL, S3_ALWAYS));
	return put_page(s3, &p, "moving", false);
}

/* Some servers keep folders that are empty, and list them. */
static FALLIBLE enum err delete_folders(struct s3 *s3, const char *key, size_t target)
{
	char folder[S3_PATH_MAX];
	size_t n = strlen(key);

	for (size_t i = n; i > target + 1 && n < sizeof folder; i--) {
		if (key[i - 1] != '/')
			continue;
		snprintf(folder, sizeof folder, "%.*s", (int)i, key);
		TRY(s3_delete(s3, folder, NULL));
	}
	return OK;
}

/* Removes the first `count` of what was moved from where it was. */
static FALLIBLE enum err delete_moved(struct s3 *s3, const struct page *p, size_t count)
{
	const json_t *moved = json_object_get(p->doc, "moved");
	const char *target = text_of(p, "target");

	for (int folders = 0; folders < 2; folders++)
		for (size_t i = 0; i < count && i < json_array_size(moved); i++) {
			const char *key = json_string_value(json_array_get(moved, i));
			if (key && str_starts(str_of(key), target))
				TRY(folders ? delete_folders(s3, key, strlen(target)) : s3_delete(s3, key, NULL));
		}
	return OK;
}

FALLIBLE enum err s3_trash_end(const struct store *s, const struct s3_mark *m)
{
	struct s3 *s3 = s3_own(s)->client;
	CLEANUP(page_free) struct page p = { .key = "" };

	TRY(read_page(s3, m->job, &p));
	if (is_in(&p, "moving"))
		TRY(move_page(s3, &p, "kept"));
	fs_fault("trash.kept");
	return is_in(&p, "kept") ? delete_moved(s3, &p, SIZE_MAX) : OK; /* else it is on its way back by now */
}

/* ---- entries go ---- */

static enum err delete_key(void *user, struct str key, const struct s3_object *o)
{
	char whole[S3_PATH_MAX];

	if (!o || key.n >= sizeof whole || str_ends(key, "/about"))
		return OK;
	snprintf(whole, sizeof whole, "%.*s", (int)key.n, key.p);
	return s3_delete(user, whole, NULL);
}

/* The page last, by which the rest is found. */
static FALLIBLE enum err drop_entry(struct s3 *s3, const char *id)
{
	char key[S3_PATH_MAX];

	entry_key(id, "", key);
	TRY(s3_list(s3, key, 0, NULL, 0, NULL, delete_key, s3));
	entry_key(id, "about", key);
	TRY(s3_delete(s3, key, NULL));
	entry_key(id, "", key);
	return s3_delete(s3, key, NULL); /* some servers keep folders that are empty, and list them */
}

FALLIBLE enum err s3_trash_is_open(struct s3 *s3, const char *job, bool *out)
{
	CLEANUP(page_free) struct page p = { .key = "" };

	enum err e = read_page(s3, job, &p);
	*out = !e && is_in(&p, "moving");
	if (e == ERR_NOT_FOUND)
		err_clear();
	return e == ERR_NOT_FOUND ? OK : e;
}

FALLIBLE enum err s3_trash_undo(struct s3 *s3, const char *job)
{
	bool is_open;

	TRY(s3_trash_is_open(s3, job, &is_open));
	return is_open ? drop_entry(s3, job) : OK;
}

static FALLIBLE enum err remove_data(struct s3 *s3, const struct page *p)
{
	TRY(json_is_true(json_object_get(p->doc, "file")) ? OK : s3_drop_data(s3, text_of(p, "target"), number_of(p, "attempt")));
	return drop_entry(s3, p->id);
}

enum err s3_trash_empty(const struct store *s, const char *id)
{
	struct s3 *s3 = s3_own(s)->client;
	CLEANUP(page_free) struct page p = { .key = "" };

	TRY(read_page(s3, id, &p));
	if (!is_in(&p, "kept"))
		return not_there(id);
	TRY(move_page(s3, &p, "gone"));
	return remove_data(s3, &p);
}

/* ---- out of it ---- */

/* Copies i, or the commit, to its place, where nothing is. */
static FALLIBLE enum err copy_back(struct s3 *s3, const struct page *p, const char *file, const char *key)
{
	uint64_t attempt = number_of(p, "attempt");
	struct s3_entry from = { .key = NULL };
	char at[S3_PATH_MAX], mark[65];
	struct s3_object o;

	entry_key(p->id, file, at);
	TRY(s3_head(s3, at, NULL, &o));
	from.key = at;
	from.bytes = o.bytes;
	memcpy(from.etag, o.etag, sizeof from.etag);
	s3_attempt_mark(S3_MARK_COMMIT, attempt, mark);
	return s3_copy_object(s3, &from, key, attempt ? mark : NULL, (struct s3_condition){ S3_IF_NONE, NULL });
}

static FALLIBLE enum err bring_back(struct s3 *s3, const struct page *p, size_t *brought)
{
	const json_t *moved = json_object_get(p->doc, "moved");
	char name[24];

	for (*brought = 0; *brought < json_array_size(moved); ++*brought) {
		const char *key = json_string_value(json_array_get(moved, *brought));
		if (!key)
			return ERR(STORAGE_IO, "the page of '%s' in the trash is not one of dcpd's", p->id);
		snprintf(name, sizeof name, "%zu", *brought);
		TRY(copy_back(s3, p, name, key));
	}
	return copy_back(s3, p, "commit", text_of(p, "commit"));
}

/* Something took the name meanwhile: what was brought goes, and the entry stays. */
static FALLIBLE enum err put_away(struct s3 *s3, struct page *p, size_t brought)
{
	TRY(delete_moved(s3, p, brought));
	return move_page(s3, p, "kept");
}

static FALLIBLE enum err check_owner(const struct store_job *by, const struct page *p)
{
	uint64_t owner = number_of(p, "owner");

	if (by->admin || owner == by->uid)
		return OK;
	return ERR(FORBIDDEN, "'%s' belongs to uid %ju: only that one, root and dcpd's own user bring it back", text_of(p, "target"),
		   (uintmax_t)owner);
}

static FALLIBLE enum err check_name(const struct store *s, const struct page *p, const char *name)
{
	char above[4096], last[256];
	struct stat st;

	if (strcmp(name, text_of(p, "target")) != 0)
		return ERR(UNSUPPORTED, "'%s' comes back under its own name only", text_of(p, "target"));
	TRY(staging_divide(name, above, sizeof above, last, sizeof last));
	TRY(staging_check_ancestors(s, above, json_is_true(json_object_get(p->doc, "file"))));
	enum err e = store_stat(store_top(s), name, &st);
	if (e != ERR_NOT_FOUND)
		return e ? e : ERR(CHECKPOINT_EXISTS, "'%s' is there: the name is taken", name);
	err_clear();
	return OK;
}

enum err s3_trash_restore(const struct store_job *by, const struct store *s, const char *id, const char *name)
{
	struct s3 *s3 = s3_own(s)->client;
	CLEANUP(page_free) struct page p = { .key = "" };
	size_t brought = 0;

	TRY(read_page(s3, id, &p));
	if (!is_in(&p, "kept"))
		return not_there(id);
	TRY(check_owner(by, &p));
	TRY(check_name(s, &p, name));
	TRY(s3_check_conditions(s));
	TRY(move_page(s3, &p, "back"));
	fs_fault("undelete.rename");
	enum err e = bring_back(s3, &p, &brought);
	fs_fault("undelete.renamed");
	bool tried = !e || brought == json_array_size(json_object_get(p.doc, "moved"));
	if (e == ERR_CHECKPOINT_EXISTS || !tried) {
		struct err_info info = *err_last();
		TRY(put_away(s3, &p, brought));
		err_restore(&info);
		return e == ERR_CHECKPOINT_EXISTS ? ERR(CHECKPOINT_EXISTS, "'%s' is there: the name is taken", name) : e;
	}
	TRY(e); /* the sweep looks what came of it */
	if (drop_entry(s3, id))
		err_clear(); /* likewise */
	return OK;
}

/* ---- all of them ---- */

struct walk {
	const struct store *store;
	store_trash_fn fn;
	void *user;
	struct store_swept *swept;
};

static enum err tell_entry(void *user, struct str key, const struct s3_object *o)
{
	const struct walk *w = user;
	CLEANUP(page_free) struct page p = { .key = "" };
	CLEANUP(mem_free_ptr) char *text = NULL;
	char id[ID_MAX + 2];

	if (o || key.n < sizeof TRASH || key.n - sizeof TRASH >= sizeof id)
		return OK;
	snprintf(id, sizeof id, "%.*s", (int)(key.n - sizeof TRASH), key.p + sizeof TRASH - 1);
	enum err e = read_page(s3_own(w->store)->client, id, &p);
	if (e == ERR_NOT_FOUND) {
		err_clear();
		return OK;
	}
	if (e == ERR_STORAGE_IO || e == ERR_LIMIT_EXCEEDED) {
		err_clear();
		return is_id(id) ? w->fn(w->user, id, NULL) : OK;
	}
	TRY(e);
	if (!is_in(&p, "kept"))
		return OK;
	text = jtext_of(json_object_get(p.doc, "about"));
	NEED(text, "no memory for a list");
	return w->fn(w->user, id, text);
}

enum err s3_trash_list(const struct store *s, store_trash_fn fn, void *user)
{
	struct walk w = { .store = s, .fn = fn, .user = user };

	return s3_list(s3_own(s)->client, TRASH, '/', NULL, 0, NULL, tell_entry, &w);
}

/* An entry that was on its way back: its commit is there, and the rest goes, or what came goes. */
static FALLIBLE enum err settle_back(const struct store *s, struct page *p)
{
	struct s3 *s3 = s3_own(s)->client;
	const json_t *moved = json_object_get(p->doc, "moved");
	struct s3_object o;

	enum err e = s3_head(s3, text_of(p, "commit"), NULL, &o);
	if (e && e != ERR_NOT_FOUND)
		return e;
	if (!e && (!number_of(p, "attempt") || s3_is_commit_of(o.mark, number_of(p, "attempt"))))
		return drop_entry(s3, p->id);
	for (size_t i = 0; i < json_array_size(moved); i++) {
		const char *key = json_string_value(json_array_get(moved, i));
		e = key ? s3_head(s3, key, NULL, &o) : ERR_NOT_FOUND;
		if (e && e != ERR_NOT_FOUND)
			return e;
		if (!e && s3_is_commit_of(o.mark, number_of(p, "attempt")))
			TRY(s3_delete(s3, key, NULL));
	}
	err_clear();
	return move_page(s3, p, "kept");
}

static enum err sweep_entry(void *user, struct str key, const struct s3_object *o)
{
	const struct walk *w = user;
	struct s3 *s3 = s3_own(w->store)->client;
	CLEANUP(page_free) struct page p = { .key = "" };
	char id[ID_MAX + 2];

	if (o || key.n < sizeof TRASH || key.n - sizeof TRASH >= sizeof id)
		return OK;
	snprintf(id, sizeof id, "%.*s", (int)(key.n - sizeof TRASH), key.p + sizeof TRASH - 1);
	enum err e = read_page(s3, id, &p);
	if (!e && is_in(&p, "gone"))
		e = remove_data(s3, &p);
	else if (!e && is_in(&p, "back") && s3_now_ms(s3) - p.mtime_ms > S3_DEAD_MS)
		e = settle_back(w->store, &p);
	else
		return e == ERR_NOT_FOUND || e == ERR_STORAGE_IO || e == ERR_LIMIT_EXCEEDED ? (err_clear(), OK) : e;
	w->swept->removed++;
	return e == ERR_NOT_FOUND ? OK : e;
}

FALLIBLE enum err s3_trash_sweep(const struct store *s, struct store_swept *out)
{
	struct walk w = { .store = s, .swept = out };

	return s3_list(s3_own(s)->client, TRASH, '/', NULL, 0, NULL, sweep_entry, &w);
}
