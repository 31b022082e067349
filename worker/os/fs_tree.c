/* fs_tree.c: listing and removing directories, what else must be known of a file to remove it, and the O_DIRECT probe (see fs.h).
 *
 * A tree to be removed may be hostile: links are unlinked, never followed; other file systems mounted inside are refused; the
 * depth is bounded by a table of open directories instead of the call stack. */
#include <dirent.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <linux/openat2.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "base/mem.h"
#include "os/fs_impl.h"

enum {
	DEPTH_MAX = 64,
	RESCANS_MAX = 16,              /* of a directory that others still write to */
	PROBE_BYTES = 4096,
};

static FALLIBLE enum err open_list(int dirfd, const char *name, uint64_t resolve, DIR **out)
{
	int fd;

	/* A descriptor of its own: the position of a shared one would be shared as well. */
	TRY(fs_openat2(dirfd, name, O_RDONLY | O_DIRECTORY, 0, resolve, &fd));
	DIR *d = fdopendir(fd);
	if (!d) {
		enum err e = FS_FAILED("list", name);
		close(fd);
		return e;
	}
	*out = d;
	return OK;
}

static void close_dir(DIR **d)
{
	if (*d)
		closedir(*d);
}

/* NULL at the end; name_failed tells it from an error. */
static struct dirent *next_entry(DIR *d, bool *failed_out)
{
	struct dirent *e;

	do {
		errno = 0;
		e = readdir(d);
	} while (e && (strcmp(e->d_name, ".") == 0 || strcmp(e->d_name, "..") == 0));
	*failed_out = !e && errno != 0;
	return e;
}

static unsigned char type_of(DIR *d, const struct dirent *e)
{
	struct stat st;

	if (e->d_type != DT_UNKNOWN || fstatat(dirfd(d), e->d_name, &st, AT_SYMLINK_NOFOLLOW) < 0)
		return e->d_type;
	return (unsigned char)IFTODT(st.st_mode);
}

enum err fs_list(int dirfd, fs_entry_fn fn, void *user)
{
	CLEANUP(close_dir) DIR *d = NULL;
	struct dirent *e;
	bool failed;

	FS_FAULT("fs.list", "list", ".");
	TRY(open_list(dirfd, ".", 0, &d));
	while ((e = next_entry(d, &failed)))
		TRY(fn(user, e->d_name, type_of(d, e)));
	return failed ? FS_FAILED("list", ".") : OK;
}

/* ---- removing ---- */

struct level {
	DIR *d;
	char name[256];                /* in the level above */
	int rescans;
};

struct removal {
	const char *path;              /* for messages */
	int top;                       /* descriptor that the first level's name is in */
	struct level *levels;
	uint32_t depth;
	fs_unlink_fn unlink;
	void *user;
};

static int parent_fd(const struct removal *r)
{
	return r->depth > 1 ? dirfd(r->levels[r->depth - 2].d) : r->top;
}

static FALLIBLE enum err descend(struct removal *r, int dirfd, const char *name)
{
	struct level *l = &r->levels[r->depth];

	if (r->depth == DEPTH_MAX)
		return err_at_file(ERR(LIMIT_EXCEEDED, "'%s' is more than %d directories deep", r->path, DEPTH_MAX),
				   r->path, -1);
	size_t n = strlen(name);
	if (n >= sizeof l->name)
		return err_at_file(ERR(NAME_INVALID, "a name in '%s' is too long", r->path), r->path, -1);
	TRY(open_list(dirfd, name, RESOLVE_NO_XDEV, &l->d));
	memcpy(l->name, name, n + 1);
	l->rescans = 0;
	r->depth++;
	return OK;
}

/* The innermost directory has been read to its end: it goes, or is read again if something has appeared in it. */
static FALLIBLE enum err ascend(struct removal *r)
{
	struct level *l = &r->levels[r->depth - 1];

	if (unlinkat(parent_fd(r), l->name, AT_REMOVEDIR) < 0 && errno != ENOENT) {
		if ((errno != ENOTEMPTY && errno != EEXIST) || ++l->rescans > RESCANS_MAX)
			return FS_FAILED("remove", r->path);
		rewinddir(l->d);
		return OK;
	}
	closedir(l->d);
	r->depth--;
	return OK;
}

static FALLIBLE enum err remove_levels(struct removal *r)
{
	while (r->depth > 0) {
		DIR *d = r->levels[r->depth - 1].d;
		bool failed;
		struct dirent *e = next_entry(d, &failed);
		if (failed)
			return FS_FAILED("list", r->path);
		if (!e)
			TRY(ascend(r));
		else if (type_of(d, e) == DT_DIR)
			TRY(descend(r, dirfd(d), e->d_name));
		else if (r->unlink(r->user, dirfd(d), e->d_name) < 0 && errno != ENOENT)
			return FS_FAILED("remove a file in", r->path);
	}
	return OK;
}

enum err fs_remove_tree_by(int dirfd, const char *path, fs_unlink_fn unlink_one, void *user)
{
	CLEANUP(fs_place_free) struct fs_place at = FS_PLACE_NONE;
	struct removal r = { .path = path, .unlink = unlink_one, .user = user };

	FS_FAULT("fs.unlink", "remove", path);
	enum err e = fs_parent(dirfd, path, &at);
	if (e == ERR_NOT_FOUND)
		return OK;
	TRY(e);
	if (unlink_one(user, at.dirfd, at.base) == 0 || errno == ENOENT)
		return OK;
	if (errno != EISDIR && errno != EPERM)
		return FS_FAILED("remove", path);
	r.top = at.dirfd;
	r.levels = mem_alloc(DEPTH_MAX * sizeof *r.levels);
	NEED(r.levels, "no memory to remove '%s'", path);
	e = descend(&r, r.top, at.base);
	e = e ?: remove_levels(&r);
	while (r.depth > 0)
		closedir(r.levels[--r.depth].d);
	mem_free(r.levels);
	return e;
}

int fs_unlink_here(int dirfd, const char *name)
{
	return unlinkat(dirfd, name, 0);
}

static int unlink_plainly(void *, int dirfd, const char *name)
{
	return fs_unlink_here(dirfd, name);
}

enum err fs_remove_tree(int dirfd, const char *path)
{
	return fs_remove_tree_by(dirfd, path, unlink_plainly, NULL);
}

bool fs_is_local(int dirfd)
{
	struct statfs st;

	if (fstatfs(dirfd, &st) < 0)
		return false;
	switch (st.f_type) {
	case EXT4_SUPER_MAGIC: case XFS_SUPER_MAGIC: case BTRFS_SUPER_MAGIC: case F2FS_SUPER_MAGIC: case TMPFS_MAGIC: return true;
	default: return false;
	}
}

/* A lease for writing is given to the only descriptor of a file, and mappings count as what they were made of. It is given back at once:
 * without a name nobody comes any more. Whoever cannot have it (another's file) cannot tell. */
bool fs_is_sole(int fd)
{
	struct stat st;

	if (fstat(fd, &st) < 0 || st.st_nlink > 0 || fcntl(fd, F_SETLEASE, F_WRLCK) < 0)
		return false;
	return fcntl(fd, F_SETLEASE, F_UNLCK) == 0;
}

/* ---- O_DIRECT ---- */

/* Some file systems accept the flag and refuse the write, so a block is written. */
static bool direct_write_ok(int fd)
{
	CLEANUP(mem_free_ptr) void *block = NULL;

	if (posix_memalign(&block, PROBE_BYTES, PROBE_BYTES) != 0)
		return false;
	memset(block, 0, PROBE_BYTES);
	return pwrite(fd, block, PROBE_BYTES, PROBE_BYTES) == PROBE_BYTES;
}

static bool probe_direct(int dirfd)
{
	char name[64];
	int fd;
	bool named = false;

	enum err e = fs_openat2(dirfd, ".", O_TMPFILE | O_RDWR | O_DIRECT, 0600, 0, &fd);
	if (e) {
		snprintf(name, sizeof name, ".dcpd-probe-%d", (int)getpid());
		e = fs_openat2(dirfd, name, O_CREAT | O_EXCL | O_RDWR | O_DIRECT, 0600, 0, &fd);
		named = !e;
	}
	if (e) {
		/* A file system that refuses the flag may have made the file first. */
		(void)unlinkat(dirfd, name, 0);
		err_clear();
		return false;
	}
	bool ok = direct_write_ok(fd);
	close(fd);
	if (named)
		(void)unlinkat(dirfd, name, 0);
	return ok;
}

/* A file system that has taken one takes the next: every save asks, on its way to the first byte. */
bool fs_direct_ok(int dirfd)
{
	static struct statfs taken;
	static dev_t taken_on;
	struct statfs here;
	struct stat st;

	bool found = fstat(dirfd, &st) == 0 && fstatfs(dirfd, &here) == 0;
	if (found && st.st_dev == taken_on && here.f_type == taken.f_type && memcmp(&here.f_fsid, &taken.f_fsid, sizeof here.f_fsid) == 0)
		return true;
	bool ok = probe_direct(dirfd);
	if (found && ok) {
		taken = here;
		taken_on = st.st_dev;
	}
	return ok;
}
