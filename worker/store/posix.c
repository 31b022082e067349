/* posix.c: the table of the store on a file system (see posix.h): opening, reading, writing and meeting, each a call of os/fs.h. */
#include "store/posix.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "os/fs.h"
#include "store/posix_impl.h"

/* ---- the storage ---- */

static enum err open_store(struct store *s, const struct store_place *place)
{
	TRY(fs_open_root(place->location, &s->top));
	fs_root_access(s->top, place->mode, place->group);
	return OK;
}

static enum err check(const struct store *s)
{
	return fs_check_root(s->top);
}

static enum err scratch(const struct store *s, int *fd_out)
{
	return fs_open(s->top, ".", O_TMPFILE | O_RDWR, 0600, fd_out);
}

static const char *fs_name(long magic)
{
	static const struct { long magic; const char *name; } names[] = {
		{ 0xEF53, "ext4" },	  { 0x01021994, "tmpfs" },    { 0x58465342, "xfs" },	 { 0x9123683E, "btrfs" },
		{ 0x6969, "nfs" },	  { 0x794C7630, "overlayfs" }, { 0x0BD00BD0, "lustre" }, { 0x65735546, "fuse" },
		{ 0x2FC12FC1, "zfs" },
	};

	for (size_t i = 0; i < sizeof names / sizeof *names; i++)
		if (names[i].magic == magic)
			return names[i].name;
	return "other";
}

static enum err probe(const struct store *s, struct store_facts *out)
{
	struct statfs st;
	int fd = -1;

	TRY(fs_free_bytes(s->top, &out->free_bytes, &out->total_bytes));
	out->writable = scratch(s, &fd) == OK;
	fs_drop(&fd);
	out->kind = fstatfs(s->top, &st) == 0 ? fs_name((long)st.f_type) : "other";
	out->direct = out->writable && fs_direct_ok(s->top);
	/* renameat2's flags work where the file system knows them; those that do not are few and named */
	out->noreplace = out->exchange = strcmp(out->kind, "nfs") != 0 && strcmp(out->kind, "fuse") != 0;
	return OK;
}

static uint64_t count(const struct store *s, bool written)
{
	return fs_count_take(s->top, written);
}

/* ---- reading ---- */

static enum err enter(struct store_at folder, const char *path, struct store_at *out)
{
	*out = (struct store_at){ folder.store, -1 };
	return fs_open_dir(folder.handle, path[0] ? path : ".", &out->handle);
}

static enum err list(struct store_at folder, store_entry_fn fn, void *user)
{
	return fs_list(folder.handle, fn, user);
}

static enum err stat_of(struct store_at at, const char *path, struct stat *out)
{
	if (path[0])
		return fs_stat(at.handle, path, out);
	return fstat(at.handle, out) < 0 ? ERR_SYS(STORAGE_IO, "cannot look at what is open") : OK;
}

static bool watch(struct store_at folder)
{
	return fs_is_local(folder.handle);
}

static enum err open_file(struct store_at folder, const char *name, unsigned flags, struct store_at *out)
{
	int how = (flags & STORE_NEW ? O_WRONLY | O_CREAT | O_EXCL : flags & STORE_WRITE ? O_RDWR : O_RDONLY) |
		  (flags & STORE_DIRECT ? O_DIRECT : 0);

	*out = (struct store_at){ folder.store, -1 };
	return err_at_file(fs_open(folder.handle, name, how, 0644, &out->handle), name, -1);
}

static enum err read_at(struct store_at file, void *into, size_t n, uint64_t offset, const char *name)
{
	return fs_pread(file.handle, into, n, offset, name);
}

static enum err get(struct store_at folder, const char *name, uint64_t max, void **bytes_out, uint64_t *n_out, struct stat *st_out)
{
	struct stat st;

	return fs_read_all_stat(folder.handle, name, max, bytes_out, n_out, st_out ? st_out : &st);
}

static void drop_handle(struct store_at *at)
{
	fs_drop(&at->handle);
}

static int fd_of(struct store_at file)
{
	return file.handle;
}

/* ---- parts ---- */

static enum err write_at(struct store_at file, const void *from, size_t n, uint64_t offset, const char *name)
{
	return fs_pwrite(file.handle, from, n, offset, name);
}

static enum err resize(struct store_at file, uint64_t bytes, const char *name)
{
	struct stat st;

	TRY(stat_of(file, "", &st));
	return (uint64_t)st.st_size > bytes ? fs_truncate(file.handle, bytes, name) : fs_allocate(file.handle, bytes, name);
}

static enum err finish(struct store_at *file, bool durable, const char *name)
{
	enum err e = durable ? fs_fsync(file->handle, name) : OK;

	e = e ?: fs_close(&file->handle);
	fs_drop(&file->handle);
	return e;
}

/* ---- meeting places ---- */

static enum err make(struct store_at folder, const char *path, struct store_at *out)
{
	*out = (struct store_at){ folder.store, -1 };
	return fs_mkdirs(folder.handle, path, &out->handle);
}

static enum err put(struct store_at folder, const char *name, const void *bytes, uint64_t n, bool durable)
{
	struct store_at file = { folder.store, -1 };
	char tmp[256];

	if ((size_t)snprintf(tmp, sizeof tmp, "%s.tmp", name) >= sizeof tmp)
		return ERR(NAME_INVALID, "'%s' is too long for a page", name);
	enum err e = fs_open(folder.handle, tmp, O_CREAT | O_TRUNC | O_WRONLY, 0644, &file.handle);
	e = e ?: fs_pwrite(file.handle, bytes, n, 0, name);
	e = e ?: finish(&file, durable, name);
	fs_drop(&file.handle);
	e = e ?: fs_rename(folder.handle, tmp, folder.handle, name);
	if (e) {
		CLEANUP(err_restore) struct err_info info = *err_last();
		if (fs_unlink(folder.handle, tmp))
			err_clear(); /* the next page of that name takes its place */
		return e;
	}
	return durable ? fs_fsync(folder.handle, ".") : OK;
}

static enum err adopt(struct staging *s, struct store_at from, const char *name)
{
	return err_at_file(fs_rename(from.handle, name, s->dir.handle, name), name, -1);
}

static enum err drop(struct store_at folder, const char *path)
{
	return fs_remove_tree(folder.handle, path);
}

static enum err lock(struct store_at folder, struct store_at *out)
{
	*out = (struct store_at){ folder.store, -1 };
	return fs_lock(folder.handle, POSIX_LOCK_MS, &out->handle);
}

/* ---- shared bytes ---- */

static bool clones(struct store_at folder)
{
	return fs_can_clone(folder.handle);
}

static enum err clone_range(struct store_at from, uint64_t from_offset, struct store_at to, uint64_t offset, uint64_t bytes,
			    const char *name)
{
	return fs_clone(from.handle, from_offset, to.handle, offset, bytes, name);
}

static enum err link_part(struct store_at of, const char *of_name, const struct stat *is, struct store_at to, const char *name)
{
	int64_t mtime_ns = (int64_t)is->st_mtim.tv_sec * 1000000000 + is->st_mtim.tv_nsec;

	return fs_link(of.handle, of_name, (uint64_t)is->st_size, mtime_ns, to.handle, name);
}

static enum err stamp(struct store_at file, const struct stat *times, const char *name)
{
	return fs_set_times(file.handle, times, name);
}

static enum err extend(struct store_at file, uint64_t bytes, const char *name)
{
	return fs_truncate(file.handle, bytes, name);
}

const struct store_ops posix_ops = {
	open_store, check, probe, count, scratch,
	enter, list, stat_of, watch, open_file, read_at, get, drop_handle, fd_of,
	write_at, resize, finish,
	posix_stage, posix_publish, posix_publish_in_place, posix_replace, posix_discard, posix_remove, posix_fence,
	posix_recover, posix_sweep,
	posix_trash_list, posix_trash_restore, posix_trash_empty,
	make, put, adopt, drop, lock, NULL,
	clones, clone_range, link_part, stamp, extend, false, NULL,
};

struct store_at posix_at(int fd)
{
	static const struct store bare = { .ops = &posix_ops, .top = -1 };

	return (struct store_at){ &bare, fd };
}
