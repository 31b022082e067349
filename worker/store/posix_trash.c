/* posix_trash.c: removed checkpoints that may come back, of the store on a file system: one folder at the storage's top, so that a list
 * of them need not walk the storage.
 *
 *   .dcpd-trash/{job}/about.json    what lay where, who removed it and until when it is kept: the delete job's words
 *   .dcpd-trash/{job}/item          the checkpoint, a folder or a file
 *   .dcpd-trash/{job}/.item.dcpd…   the pages that lay beside a file (beside.h)
 *
 * The page is durable before the checkpoint is moved there by one rename, and stays until the checkpoint is out of it again. An entry
 * without a checkpoint was left by a crash: of a removal that did not come to its rename, or behind an undelete. Whoever takes something
 * out of an entry holds the trash's lock. */
#include <stdio.h>
#include <string.h>

#include "os/fs.h"
#include "store/owner.h"
#include "store/posix_impl.h"
#include "store/trash.h"

#define TRASH_DIR ".dcpd-trash"
#define ITEM "item"
#define ABOUT "about.json"

enum { ABOUT_BYTES_MAX = 1 << 16, ID_MAX = 64 };

static void entry_path(const char *id, const char *file, char path[POSIX_TRASH_PATH_MAX])
{
	snprintf(path, POSIX_TRASH_PATH_MAX, TRASH_DIR "/%.64s%s%s", id, file[0] ? "/" : "", file);
}

/* The id of an entry is a job's: it names nothing outside the trash. */
static bool is_id(const char *id)
{
	size_t n = strlen(id);

	return n > 0 && n <= ID_MAX && strspn(id, "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz") == n;
}

enum err posix_trash_has(const struct store *store, const char *job, bool *out)
{
	char path[POSIX_TRASH_PATH_MAX];
	struct stat st;

	entry_path(job, ITEM, path);
	enum err e = fs_stat(store->top, path, &st);
	if (e == ERR_NOT_FOUND)
		err_clear();
	*out = e == OK;
	return e == ERR_NOT_FOUND ? OK : e;
}

static FALLIBLE enum err check_same_device(const struct store *store, int parent)
{
	struct stat a, b;

	TRY(fs_stat(store->top, TRASH_DIR, &a));
	TRY(fs_stat(parent, ".", &b));
	if (a.st_dev != b.st_dev)
		return ERR(UNSUPPORTED, "it lies on another file system than the storage's trash: delete it without \"trash\"");
	return OK;
}

static FALLIBLE enum err put_about(const struct store *store, const char *id, const char *about)
{
	CLEANUP(store_close) struct store_at entry = STORE_NOTHING;
	char path[POSIX_TRASH_PATH_MAX];

	entry_path(id, "", path);
	TRY(store_enter(store_top(store), path, &entry));
	return store->ops->put(entry, ABOUT, about, strlen(about), true);
}

enum err posix_trash_begin(const struct store *store, int parent, const char *job, const char *about,
			   char path[POSIX_TRASH_PATH_MAX])
{
	CLEANUP(fs_drop) int trash = -1;
	bool has;

	TRY(posix_trash_has(store, job, &has));
	if (has)
		return ERR(STATE_CONFLICT, "the trash has a checkpoint of this job already");
	TRY(fs_mkdirs(store->top, TRASH_DIR, &trash));
	TRY(check_same_device(store, parent));
	enum err e = fs_mkdir(trash, job, 0755);
	if (e && e != ERR_CHECKPOINT_EXISTS) /* of an earlier attempt */
		return e;
	err_clear();
	e = put_about(store, job, about);
	e = e ?: fs_fsync(trash, ".");
	fs_fault("trash.made");
	if (e)
		posix_trash_end(store, job);
	entry_path(job, ITEM, path);
	return e;
}

enum err posix_trash_sync(const struct store *store, const char *job)
{
	CLEANUP(fs_drop) int entry = -1;
	char path[POSIX_TRASH_PATH_MAX];

	entry_path(job, "", path);
	TRY(fs_open_dir(store->top, path, &entry));
	return fs_fsync(entry, ".");
}

enum err posix_trash_follow(const struct store *store, const char *job, const char *name)
{
	char path[POSIX_TRASH_PATH_MAX];

	entry_path(job, ITEM, path);
	return posix_beside_follow(store, name, path);
}

/* Keeps what caused it as this thread's latest error. */
void posix_trash_end(const struct store *store, const char *job)
{
	CLEANUP(err_restore) struct err_info info = *err_last();
	char path[POSIX_TRASH_PATH_MAX];
	bool has = true;

	entry_path(job, "", path);
	if (posix_trash_has(store, job, &has) || has || fs_remove_tree(store->top, path))
		err_clear(); /* the next sweep takes it */
}

/* ---- the list ---- */

struct walk {
	const struct store *store;
	store_trash_fn fn;
	void *user;
	const struct commit_keep *keep;        /* of a sweep: */
	uint64_t removed;
};

static enum err tell_entry(void *user, const char *id, unsigned char)
{
	const struct walk *w = user;
	CLEANUP(mem_free_ptr) char *about = NULL;
	char path[POSIX_TRASH_PATH_MAX];
	void *bytes = NULL;
	uint64_t n = 0;
	bool has = false;

	if (!is_id(id))
		return OK;
	TRY(posix_trash_has(w->store, id, &has));
	if (!has)
		return OK;
	entry_path(id, ABOUT, path);
	if (fs_read_all(w->store->top, path, ABOUT_BYTES_MAX, &bytes, &n)) {
		err_clear();
		return w->fn(w->user, id, NULL);
	}
	about = mem_strndup(bytes, n);
	mem_free(bytes);
	NEED(about, "no memory for a list");
	return w->fn(w->user, id, about);
}

static FALLIBLE enum err each_entry(struct walk *w, fs_entry_fn fn)
{
	CLEANUP(fs_drop) int trash = -1;

	enum err e = fs_open_dir(w->store->top, TRASH_DIR, &trash);
	if (e == ERR_NOT_FOUND)
		err_clear();
	return e ? (e == ERR_NOT_FOUND ? OK : e) : fs_list(trash, fn, w);
}

enum err posix_trash_list(const struct store *store, store_trash_fn fn, void *user)
{
	return each_entry(&(struct walk){ .store = store, .fn = fn, .user = user }, tell_entry);
}

/* Another daemon's is that one's to sweep. */
static bool lets_go(const struct commit_keep *k, const char *id)
{
	struct str job = str_of(id);

	if ((k->before && str_cmp(job, str_of(k->before)) >= 0) || (k->mark && !str_ends(job, k->mark)))
		return false;
	for (size_t i = 0; i < json_array_size(k->jobs); i++)
		if (str_is(job, json_string_value(json_array_get(k->jobs, i))))
			return false;
	return true;
}

static enum err sweep_entry(void *user, const char *id, unsigned char)
{
	struct walk *w = user;
	char path[POSIX_TRASH_PATH_MAX];
	bool has = true;

	if (!is_id(id) || !lets_go(w->keep, id))
		return OK;
	TRY(posix_trash_has(w->store, id, &has));
	if (has)
		return OK;
	entry_path(id, "", path);
	TRY(fs_remove_tree(w->store->top, path));
	w->removed++;
	return OK;
}

enum err posix_trash_sweep(const struct store *store, const struct commit_keep *keep, uint64_t *removed_out)
{
	struct walk w = { .store = store, .keep = keep };

	enum err e = each_entry(&w, sweep_entry);
	*removed_out += w.removed;
	return e;
}

/* ---- out of it ---- */

static FALLIBLE enum err lock_entry(const struct store *store, const char *id, int *trash, int *lock)
{
	bool has = false;

	if (!is_id(id))
		return ERR(NOT_FOUND, "there is no '%.64s' in the trash", id);
	enum err e = fs_open_dir(store->top, TRASH_DIR, trash);
	e = e ?: fs_lock(*trash, POSIX_LOCK_MS, lock);
	e = e ?: posix_trash_has(store, id, &has);
	return e && e != ERR_NOT_FOUND ? e : has ? OK : ERR(NOT_FOUND, "there is no '%s' in the trash", id);
}

static FALLIBLE enum err move_out(const struct store *store, const char *id, const char *from, const char *name, int parent)
{
	fs_fault("undelete.rename");
	enum err e = posix_beside_move(store, from, name);
	bool moved = !e && (e = fs_rename_noreplace(store->top, from, name)) == OK;
	fs_fault("undelete.renamed");
	if (!e && fs_fsync(parent, ".") == OK && posix_trash_sync(store, id) == OK)
		return OK;
	struct err_info info = *err_last();
	if ((moved && fs_rename_noreplace(store->top, name, from)) || posix_beside_move(store, name, from) || fs_fsync(parent, "."))
		return commit_in_doubt("is there again", name);
	err_restore(&info);
	return info.code;
}

enum err posix_trash_restore(const struct store_job *by, const struct store *store, const char *id, const char *name)
{
	CLEANUP(fs_drop) int trash = -1, lock = -1, parent_lock = -1;
	CLEANUP(store_close) struct store_at parent = STORE_NOTHING;
	char from[POSIX_TRASH_PATH_MAX], above[4096], last[256];
	struct stat st;

	TRY(lock_entry(store, id, &trash, &lock));
	entry_path(id, ITEM, from);
	TRY(owner_check(by, store, from));
	TRY(fs_stat(store->top, from, &st));
	TRY(staging_divide(name, above, sizeof above, last, sizeof last));
	TRY(staging_check_ancestors(store, above, S_ISREG(st.st_mode)));
	TRY(store->ops->make(store_top(store), above, &parent));
	TRY(fs_lock(parent.handle, POSIX_LOCK_MS, &parent_lock));
	enum err e = fs_stat(parent.handle, last, &st);
	if (e != ERR_NOT_FOUND)
		return e ? e : ERR(CHECKPOINT_EXISTS, "'%s' is there: the name is taken", name);
	err_clear();
	TRY(move_out(store, id, from, name, parent.handle));
	posix_trash_end(store, id);
	return OK;
}

enum err posix_trash_empty(const struct store *store, const char *id)
{
	CLEANUP(fs_drop) int trash = -1, lock = -1;
	char from[POSIX_TRASH_PATH_MAX], to[POSIX_TRASH_PATH_MAX];

	TRY(lock_entry(store, id, &trash, &lock));
	entry_path(id, ITEM, from);
	snprintf(to, sizeof to, TRASH_PREFIX "%s", id);
	TRY(fs_rename_noreplace(store->top, from, to));
	posix_trash_end(store, id);
	fs_drop(&lock);
	if (trash_remove(store->top, to))
		err_clear(); /* the next sweep takes it */
	return OK;
}
