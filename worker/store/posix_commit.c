/* posix_commit.c: the commit of the store on a file system: a staging directory beside the target, and one rename (see staging.h).
 *
 * An error of the rename itself is in doubt, not a failure: recovery looks at the directory and decides. */
#include <stdio.h>
#include <string.h>

#include "os/fs.h"
#include "store/identity.h"
#include "store/notes.h"
#include "store/posix_impl.h"
#include "store/posix_in_place.h"
#include "store/trash.h"

enum { STAGED_PATH_MAX = sizeof((struct staging *)0)->name + sizeof((struct staging *)0)->target };

enum err posix_stage(struct staging *s, bool keep)
{
	TRY(s->store->ops->make(store_top(s->store), s->parent_path, &s->parent));
	TRY(posix_clear(s->parent.handle, &s->by)); /* a coordinator that was killed may not know of an attempt */
	enum err e = fs_mkdir(s->parent.handle, s->name, 0755);
	if (e == ERR_CHECKPOINT_EXISTS && keep)
		err_clear();
	else if (e)
		return e;
	s->made = true;
	TRY(fs_fsync(s->parent.handle, "."));
	TRY(store_enter(s->parent, s->name, &s->dir));
	s->in_memory = fs_in_memory(s->dir.handle);
	s->direct = !s->in_memory && fs_direct_ok(s->dir.handle);
	return OK;
}

/* The path beneath the parent that the target is renamed from. */
static void staged_path(const struct staging *s, char out[STAGED_PATH_MAX])
{
	snprintf(out, STAGED_PATH_MAX, "%s%s%s", s->name, s->is_file ? "/" : "", s->is_file ? s->target : "");
}

/* The new one is durable: whatever goes wrong with the old one is no matter of this job, and the next sweep takes what is left. */
static void drop_old(struct staging *s)
{
	int parent = s->parent.handle;
	char trash[128], old[STAGED_PATH_MAX];

	staged_path(s, old);
	snprintf(trash, sizeof trash, TRASH_PREFIX "%s", s->by.id);
	if (fs_remove_tree(parent, trash) || fs_rename(parent, old, parent, trash) || trash_remove(parent, trash))
		err_clear();
}

static FALLIBLE enum err changed(const struct staging *s)
{
	return ERR(CHECKPOINT_EXISTS, "'%s' is no longer the checkpoint that was to be replaced", s->target);
}

/* An exchange has no condition of its own. So daemons exchange one after the other, and against others, who know of no lock, the
 * condition is looked at on both sides: what was exchanged by mistake is exchanged back. Of a file only the inode is compared behind it: a
 * rename changes its time. */
static FALLIBLE enum err exchange(struct staging *s, const char *staged, const char *replaces)
{
	size_t n = s->is_file ? strcspn(replaces, "-") + 1 : IDENTITY_MAX;
	char identity[IDENTITY_MAX];

	enum err e = identity_of(s->parent, s->target, identity);
	if (e == ERR_NOT_FOUND || (!e && strcmp(identity, replaces) != 0))
		return changed(s);
	TRY(e);
	TRY(fs_exchange(s->parent.handle, staged, s->target));
	s->done = true;
	if (identity_of(s->parent, staged, identity) == OK && strncmp(identity, replaces, n) == 0)
		return OK;
	err_clear();
	if (fs_exchange(s->parent.handle, staged, s->target))
		return commit_in_doubt("is there and whole", s->target);
	s->done = false;
	return changed(s);
}

/* Undoes a commit whose fsync failed (commit.h). While the undoing is not on the disk either, both directories stay as they are: after a
 * power cut the target's name may lead to each of them. */
static FALLIBLE enum err take_back(struct staging *s, bool exchanged)
{
	struct err_info info = *err_last();
	int parent = s->parent.handle;
	char staged[STAGED_PATH_MAX];

	staged_path(s, staged);
	enum err e = exchanged ? fs_exchange(parent, staged, s->target) : fs_rename_noreplace(parent, s->target, staged);
	if (e)
		return commit_in_doubt("is there and whole", s->target);
	if (fs_fsync(parent, "."))
		return commit_in_doubt("was taken back", s->target);
	s->done = false;
	err_restore(&info);
	return info.code;
}

/* Files of a folder may be held, too. A checkpoint of one file has no inside. */
static FALLIBLE enum err lock_inside(int parent, const char *name, int *lock)
{
	CLEANUP(fs_drop) int dir = -1;
	struct stat st;

	enum err e = fs_stat(parent, name, &st);
	if (e == ERR_NOT_FOUND) {
		err_clear();
		return OK;
	}
	TRY(e);
	if (!S_ISDIR(st.st_mode))
		return OK;
	TRY(fs_open_dir(parent, name, &dir));
	return fs_lock(dir, POSIX_LOCK_MS, lock);
}

/* Is nothing held of what goes? Whoever holds something needs one of these locks, too. */
static FALLIBLE enum err lock_free(const struct store *store, const char *name, int parent, const char *last, int *lock, int *inside)
{
	TRY(fs_lock(parent, POSIX_LOCK_MS, lock));
	TRY(lock_inside(parent, last, inside));
	return notes_check_removal(store_top(store), name);
}

static FALLIBLE enum err sync_folders(const struct staging *s)
{
	for (uint64_t i = s->folders.n; i-- > 0;) {
		CLEANUP(fs_drop) int dir = -1;
		TRY(fs_open_dir(s->dir.handle, s->folders.v[i], &dir));
		TRY(fs_fsync(dir, s->folders.v[i]));
	}
	return OK;
}

enum err posix_publish(struct staging *s, const char *replaces)
{
	CLEANUP(fs_drop) int lock = -1, inside = -1;
	char staged[STAGED_PATH_MAX], name[CHECKPOINT_NAME_MAX];

	staged_path(s, staged);
	TRY(sync_folders(s));
	TRY(fs_fsync(s->dir.handle, "."));
	fs_fault("commit.synced");
	fs_fault("commit.rename");
	staging_target_name(s, name, sizeof name);
	if (replaces)
		TRY(lock_free(s->store, name, s->parent.handle, s->target, &lock, &inside));
	else if (s->is_file) /* a removal that takes the pages of an earlier file of the name must not take this one's */
		TRY(fs_lock(s->parent.handle, POSIX_LOCK_MS, &lock));
	TRY(replaces ? exchange(s, staged, replaces) : fs_rename_noreplace(s->parent.handle, staged, s->target));
	s->done = true;
	fs_fault("commit.renamed");
	if (fs_fsync(s->parent.handle, ".")) /* who takes the job over may have found it committed by now, and said so */
		return s->by.mark ? commit_in_doubt("is there and whole", s->target) : take_back(s, replaces != NULL);
	if (s->is_file)
		posix_beside_keep_receipt(s->parent.handle, s->name, s->target);
	fs_drop(&inside);
	fs_drop(&lock);
	if (replaces)
		drop_old(s);
	return OK;
}

enum err posix_publish_in_place(struct staging *s, const char *metadata)
{
	CLEANUP(fs_drop) int to = -1;
	char name[CHECKPOINT_NAME_MAX];

	TRY(fs_fsync(s->dir.handle, "."));
	staging_target_name(s, name, sizeof name);
	TRY(notes_check_free(store_top(s->store), name));
	TRY(fs_mkdirs(s->parent.handle, s->target, &to));
	s->done = true; /* if it breaks off, the recovery puts back what lies in there */
	enum err e = posix_in_place_move(s, to, metadata);
	if (!e)
		s->done = false; /* posix_discard() takes what is left of it */
	return e;
}

/* Files go into the directory that was opened, whatever has its name by now: never into another checkpoint. */
static FALLIBLE enum err check_repaired(const struct staging *s)
{
	struct stat now, opened;

	TRY(fs_stat(s->repaired.handle, ".", &opened));
	enum err e = fs_stat(s->parent.handle, s->target, &now);
	if (e && e != ERR_NOT_FOUND)
		return e;
	if (e || now.st_ino != opened.st_ino || now.st_dev != opened.st_dev)
		return ERR(CHECKPOINT_REPLACED, "'%s' is no longer the checkpoint whose files were to be replaced", s->target);
	return OK;
}

enum err posix_replace(struct staging *s, const char *name)
{
	int to = s->repaired.handle;

	TRY(check_repaired(s));
	fs_fault("commit.replace");
	TRY(err_at_file(fs_rename(s->dir.handle, name, to, name), name, -1));
	fs_fault("commit.replaced");
	return fs_fsync(to, ".") ? commit_in_doubt("has the repaired file", s->target) : OK;
}

void posix_discard(struct staging *s)
{
	if (s->made && !s->done && fs_remove_tree(s->parent.handle, s->name))
		err_clear(); /* the sweep at the next start takes it */
	store_close(&s->dir);
	store_close(&s->parent);
}

/* Of a removal after whose rename something went wrong: the opposite one. */
static FALLIBLE enum err put_back(const struct store *store, const char *moved, const char *name, int parent)
{
	struct err_info info = *err_last();

	if (fs_rename_noreplace(store->top, moved, name) || posix_beside_move(store, moved, name) || fs_fsync(parent, "."))
		return commit_in_doubt("is being deleted", name);
	err_restore(&info);
	return info.code;
}

/* Locks that are held while a checkpoint goes. */
struct removal_locks {
	int parent, inside;
};

static void unlock(struct removal_locks *locks)
{
	fs_drop(&locks->inside);
	fs_drop(&locks->parent);
}

/* Moves it to `to`, a path from the top, under the locks. Behind that, in a folder of a folder, no lock of these keeps a hold out: one that
 * came just now is seen then. */
static FALLIBLE enum err move_away(const struct store *store, const char *name, int parent, const char *last, const char *to,
				   const struct store_removal *how, struct removal_locks *locks)
{
	TRY(lock_free(store, name, parent, last, &locks->parent, &locks->inside));
	TRY(how->check ? how->check(how->user) : OK);
	fs_fault("remove.rename");
	TRY(fs_rename_noreplace(store->top, name, to));
	fs_fault("remove.renamed");
	return OK;
}

static FALLIBLE enum err remove_for_good(const struct store_job *by, const struct store *store, const char *name, int parent,
					 const char *last, const struct store_removal *how)
{
	CLEANUP(unlock) struct removal_locks locks = { -1, -1 };
	char trash[128], path[CHECKPOINT_NAME_MAX + 128];

	snprintf(trash, sizeof trash, TRASH_PREFIX "%s", by->id);
	snprintf(path, sizeof path, "%.*s%s", (int)(strlen(name) - strlen(last)), name, trash);
	TRY(move_away(store, name, parent, last, path, how, &locks));
	if (notes_check_removal(store_top(store), path) || fs_fsync(parent, "."))
		return put_back(store, path, name, parent);
	/* it is gone for good; what cannot be removed now, the next sweep takes, and a page without its file counts for nothing */
	if (posix_beside_drop(store, name))
		err_clear();
	unlock(&locks);
	if (trash_remove(parent, trash))
		err_clear();
	return OK;
}

/* The entry is on the disk before the checkpoint is in it, and the checkpoint's new place before its old one is gone. */
static FALLIBLE enum err remove_to_trash(const struct store_job *by, const struct store *store, const char *name, int parent,
					 const char *last, const struct store_removal *how)
{
	CLEANUP(unlock) struct removal_locks locks = { -1, -1 };
	char path[POSIX_TRASH_PATH_MAX];

	TRY(posix_trash_begin(store, parent, by->id, how->about, path));
	enum err e = move_away(store, name, parent, last, path, how, &locks);
	if (!e && (posix_beside_move(store, name, path) || notes_check_removal(store_top(store), path) ||
		   posix_trash_sync(store, by->id) || fs_fsync(parent, ".")))
		e = put_back(store, path, name, parent);
	if (e && e != ERR_NOT_DURABLE)
		posix_trash_end(store, by->id);
	return e;
}

enum err posix_remove(const struct store_job *by, const struct store *store, const char *name, const struct store_removal *how)
{
	CLEANUP(fs_drop) int parent = -1;
	char last[256];

	TRY(posix_open_parent(store, name, last, &parent));
	return (how->about ? remove_to_trash : remove_for_good)(by, store, name, parent, last, how);
}
