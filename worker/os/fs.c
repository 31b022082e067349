/* fs.c: opening, reading, writing and renaming beneath a root (see fs.h). Walks over directories are in fs_tree.c.
 *
 * Every path is resolved by the kernel with RESOLVE_BENEATH and without links, also for calls that have no such flag (rename,
 * unlink, mkdir): their parent directory is opened that way first, and the call gets a single component. So no check here can
 * be raced by someone who exchanges a directory for a link in between. */
#include "os/fs.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <linux/openat2.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/mem.h"
#include "os/fs_impl.h"

enum { RACE_RETRIES = 64, LOCK_LOOK_NS = 2000000 };

enum err fs_error(int sys_errno)
{
	switch (sys_errno) {
	case ENOSPC: case EDQUOT: return ERR_STORAGE_FULL;
	case EROFS: return ERR_STORAGE_READONLY;
	case ENOENT: case ENOTDIR: return ERR_NOT_FOUND;
	case EEXIST: case ENOTEMPTY: return ERR_CHECKPOINT_EXISTS;
	case EACCES: case EPERM: return ERR_FORBIDDEN;
	case ELOOP: case EXDEV: case ENAMETOOLONG: case EILSEQ: return ERR_NAME_INVALID;
	case ESTALE: case ENODEV: case ENXIO: case ENOTCONN: case EHOSTDOWN: case EHOSTUNREACH:
	case ESHUTDOWN: return ERR_STORAGE_GONE;
	case ETIMEDOUT: return ERR_STORAGE_STALLED;
	case EFAULT: return ERR_SEGMENT_SHRUNK;
	case ENOMEM: return ERR_NO_MEMORY;
	case EMFILE: case ENFILE: case EBADF: return ERR_SYSTEM;
	case ENOSYS: case EOPNOTSUPP: return ERR_UNSUPPORTED;
	default: return ERR_STORAGE_IO;
	}
}

enum err fs_failed(const char *what, const char *name, const char *place)
{
	int why = errno;
	enum err code = fs_error(why);

	err_record(code, why, place, "cannot %s '%s'", what, name);
	return err_at_file(code, name, -1);
}

enum err fs_openat2(int dirfd, const char *path, int flags, mode_t mode, uint64_t resolve, int *fd_out)
{
	struct open_how how = {
		.flags = (uint64_t)(flags | O_CLOEXEC),
		.mode = flags & (O_CREAT | __O_TMPFILE) ? mode : 0,
		.resolve = RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS | RESOLVE_NO_MAGICLINKS | resolve,
	};
	long fd;
	int tries = 0;

	/* EAGAIN: something was renamed while the kernel walked the path. */
	do
		fd = syscall(SYS_openat2, dirfd, path, &how, sizeof how);
	while (fd < 0 && (errno == EINTR || (errno == EAGAIN && ++tries < RACE_RETRIES)));
	if (fd < 0)
		return FS_FAILED("open", path);
	*fd_out = (int)fd;
	fs_count_opened((int)fd, dirfd);
	return OK;
}

enum err fs_parent(int dirfd, const char *path, struct fs_place *out)
{
	const char *slash = strrchr(path, '/'), *base = slash ? slash + 1 : path;
	char parent[4096];
	size_t n = slash ? (size_t)(slash - path) : 0;

	if (!*base || strcmp(base, ".") == 0 || strcmp(base, "..") == 0 || (slash && n == 0) || n >= sizeof parent)
		return err_at_file(ERR(NAME_INVALID, "'%s' is not a path beneath a storage", path), path, -1);
	*out = (struct fs_place){ .dirfd = dirfd, .own = -1, .base = base };
	if (!slash)
		return OK;
	memcpy(parent, path, n);
	parent[n] = '\0';
	TRY(fs_openat2(dirfd, parent, O_PATH | O_DIRECTORY, 0, 0, &out->own));
	out->dirfd = out->own;
	return OK;
}

void fs_place_free(struct fs_place *p)
{
	fs_drop(&p->own);
}

enum err fs_open_root(const char *path, int *fd_out)
{
	int fd;

	FS_FAULT("fs.open", "open", "the storage's root");
	do
		fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	while (fd < 0 && errno == EINTR);
	if (fd >= 0) {
		fs_count_root(fd);
		*fd_out = fd;
		return OK;
	}
	enum err code = errno == ENOENT || errno == ENOTDIR ? ERR_STORAGE_GONE : fs_error(errno);
	err_record(code, errno, ERR_PLACE, "cannot open the storage's root");
	return code;
}

enum err fs_check_root(int fd)
{
	struct stat st;

	if (fstat(fd, &st) < 0)
		return FS_FAILED("look at", ".");
	return st.st_nlink > 0 ? OK : ERR(STORAGE_GONE, "the storage's root was removed");
}

/* O_NONBLOCK keeps a FIFO from holding us up. It must go again: io_uring takes it as "fail rather than wait". */
enum err fs_open(int dirfd, const char *path, int flags, mode_t mode, int *fd_out)
{
	struct stat st;
	int fd;

	FS_FAULT("fs.open", "open", path);
	if (flags & O_CREAT)
		mode = fs_file_mode(dirfd, mode);
	TRY(fs_openat2(dirfd, path, flags | (flags & O_PATH ? 0 : O_NONBLOCK | O_NOCTTY), mode, 0, &fd));
	enum err e = OK;
	if (fstat(fd, &st) < 0)
		e = FS_FAILED("look at", path);
	else if (!S_ISREG(st.st_mode) && !S_ISDIR(st.st_mode))
		e = err_at_file(ERR(NAME_INVALID, "'%s' is neither a file nor a directory", path), path, -1);
	else if (!(flags & O_PATH) && fcntl(fd, F_SETFL, flags & ~O_NONBLOCK) < 0)
		e = FS_FAILED("open", path);
	else if (flags & O_CREAT)
		e = fs_give_group(fd, dirfd, path);
	if (e) {
		fs_drop(&fd);
		return e;
	}
	*fd_out = fd;
	return OK;
}

enum err fs_open_dir(int dirfd, const char *path, int *fd_out)
{
	FS_FAULT("fs.open", "open", path);
	return fs_openat2(dirfd, path, O_RDONLY | O_DIRECTORY, 0, 0, fd_out);
}

/* Linux frees the number even when close() fails, so it is never tried again; the error may be a late write error (NFS). */
enum err fs_close(int *fd)
{
	int was = *fd, bad;

	if (was < 0)
		return OK;
	*fd = -1;
	fs_count_closed(was);
	bad = close(was);
	FS_FAULT("fs.close", "close", "the file");
	if (bad < 0 && errno != EINTR) {
		enum err code = fs_error(errno);
		err_record(code, errno, ERR_PLACE, "cannot close the file");
		return code;
	}
	return OK;
}

void fs_drop(int *fd)
{
	if (*fd >= 0) {
		fs_count_closed(*fd);
		close(*fd);
	}
	*fd = -1;
}

enum err fs_mkdir(int dirfd, const char *name, mode_t mode)
{
	CLEANUP(fs_place_free) struct fs_place at = FS_PLACE_NONE;
	CLEANUP(fs_drop) int fd = -1;

	FS_FAULT("fs.mkdir", "make directory", name);
	TRY(fs_parent(dirfd, name, &at));
	if (mkdirat(at.dirfd, at.base, fs_dir_mode(dirfd, mode)) < 0)
		return FS_FAILED("make directory", name);
	enum err e = fs_openat2(at.dirfd, at.base, O_RDONLY | O_DIRECTORY, 0, 0, &fd);
	e = e ?: fs_give_group(fd, dirfd, name);
	if (e)
		(void)unlinkat(at.dirfd, at.base, AT_REMOVEDIR);
	return e;
}

/* A step down: opens `name`, making it first if it is missing. A directory that is there is fsynced as well: its maker may have died
 * before that. A directory whose fsync fails is removed again: a later fsync would succeed and prove nothing. */
static FALLIBLE enum err enter_or_make(int dirfd, const char *name, int *fd_out)
{
	enum err e = fs_open_dir(dirfd, name, fd_out);
	bool made = false;

	if (e == ERR_NOT_FOUND && err_last()->sys_errno == ENOENT) {
		e = fs_mkdir(dirfd, name, 0777);
		made = e == OK;
		if (made || e == ERR_CHECKPOINT_EXISTS)
			e = fs_open_dir(dirfd, name, fd_out);
	}
	TRY(e);
	e = fs_fsync(dirfd, ".");
	if (!e)
		return OK;
	fs_drop(fd_out);
	if (made)
		(void)unlinkat(dirfd, name, AT_REMOVEDIR);
	return e;
}

enum err fs_mkdirs(int rootfd, const char *path, int *fd_out)
{
	CLEANUP(fs_drop) int at = -1;
	const char *p = path;

	TRY(fs_open_dir(rootfd, ".", &at));
	while (*p) {
		char name[256];
		size_t n = strcspn(p, "/");
		int next;
		if (n == 0 || n >= sizeof name)
			return err_at_file(ERR(NAME_INVALID, "'%s' is not a path beneath a storage", path), path, -1);
		memcpy(name, p, n);
		name[n] = '\0';
		if (strcmp(name, "..") == 0)
			return err_at_file(ERR(NAME_INVALID, "'%s' is not a path beneath a storage", path), path, -1);
		TRY(err_at_file(enter_or_make(at, name, &next), path, -1));
		fs_drop(&at);
		at = next;
		p += n;
		if (*p == '/' && *++p == '\0')
			break;
	}
	*fd_out = at;
	at = -1;
	return OK;
}

enum err fs_stat(int dirfd, const char *path, struct stat *out)
{
	CLEANUP(fs_drop) int fd = -1;

	FS_FAULT("fs.stat", "look at", path);
	TRY(fs_openat2(dirfd, path, O_PATH | O_NOFOLLOW, 0, 0, &fd));
	return fstat(fd, out) < 0 ? FS_FAILED("look at", path) : OK;
}

/* In memory the kernel would clear every page that is allocated, in this one process, before all workers write over it: that takes longer
 * than the writing. There it is enough that there is room now. */
static int allocate(int fd, off_t bytes)
{
	struct statvfs room;
	struct stat st;

	if (!fs_in_memory(fd))
		return fallocate(fd, 0, 0, bytes);
	if (fstat(fd, &st) < 0 || fstatvfs(fd, &room) < 0)
		return -1;
	if (room.f_blocks > 0 && (uint64_t)bytes > (uint64_t)st.st_blocks * 512 + (uint64_t)room.f_bavail * room.f_frsize) {
		errno = ENOSPC;
		return -1;
	}
	return st.st_size < bytes ? ftruncate(fd, bytes) : 0;
}

enum err fs_allocate(int fd, uint64_t bytes, const char *name)
{
	int bad;

	FS_FAULT("fs.allocate", "allocate", name);
	if (bytes == 0)
		return OK;
	if (bytes > INT64_MAX)
		return err_at_file(ERR(LIMIT_EXCEEDED, "'%s' cannot have %ju bytes", name, (uintmax_t)bytes), name, -1);
	do
		bad = allocate(fd, (off_t)bytes);
	while (bad < 0 && errno == EINTR);
	if (bad < 0 && (errno == EOPNOTSUPP || errno == ENOSYS))
		bad = ftruncate(fd, (off_t)bytes);
	if (bad == 0)
		return OK;
	char what[64];
	int why = errno;
	snprintf(what, sizeof what, "allocate %ju bytes for", (uintmax_t)bytes);
	errno = why;
	return FS_FAILED(what, name);
}

/* Never tried again after a failure: the kernel has dropped the pages, and a second call would report success. */
enum err fs_fsync(int fd, const char *name)
{
	FS_FAULT("fs.fsync", "sync", name);
	return fsync(fd) < 0 ? FS_FAILED("sync", name) : OK;
}

static bool refused(void)
{
	return errno == EINVAL || errno == ENOSYS || errno == EOPNOTSUPP;
}

/* Without RENAME_NOREPLACE. A file gets its new name by link(), which never replaces. A directory cannot, but rename() of a
 * directory replaces nothing but an empty one: enough, since what we guard against is losing a checkpoint. */
static int rename_by_other_means(const struct fs_place *from, const struct fs_place *to)
{
	struct stat st;

	if (fstatat(to->dirfd, to->base, &st, AT_SYMLINK_NOFOLLOW) == 0) {
		errno = EEXIST;
		return -1;
	}
	if (errno != ENOENT || fstatat(from->dirfd, from->base, &st, AT_SYMLINK_NOFOLLOW) < 0)
		return -1;
	if (S_ISDIR(st.st_mode))
		return renameat(from->dirfd, from->base, to->dirfd, to->base);
	if (linkat(from->dirfd, from->base, to->dirfd, to->base, 0) < 0)
		return -1;
	return unlinkat(from->dirfd, from->base, 0);
}

enum err fs_rename_noreplace(int dirfd, const char *from, const char *to)
{
	CLEANUP(fs_place_free) struct fs_place a = FS_PLACE_NONE;
	CLEANUP(fs_place_free) struct fs_place b = FS_PLACE_NONE;

	FS_FAULT("fs.rename", "rename to", to);
	TRY(fs_parent(dirfd, from, &a));
	TRY(fs_parent(dirfd, to, &b));
	int bad = renameat2(a.dirfd, a.base, b.dirfd, b.base, RENAME_NOREPLACE);
	if (bad < 0 && refused())
		bad = rename_by_other_means(&a, &b);
	return bad < 0 ? FS_FAILED("rename to", to) : OK;
}

enum err fs_exchange(int dirfd, const char *a, const char *b)
{
	CLEANUP(fs_place_free) struct fs_place pa = FS_PLACE_NONE;
	CLEANUP(fs_place_free) struct fs_place pb = FS_PLACE_NONE;

	FS_FAULT("fs.exchange", "exchange", b);
	TRY(fs_parent(dirfd, a, &pa));
	TRY(fs_parent(dirfd, b, &pb));
	if (renameat2(pa.dirfd, pa.base, pb.dirfd, pb.base, RENAME_EXCHANGE) == 0)
		return OK;
	if (refused())
		return err_at_file(ERR_SYS(OVERWRITE_UNSUPPORTED, "cannot exchange '%s'", b), b, -1);
	return FS_FAILED("exchange", b);
}

enum err fs_rename(int from_dirfd, const char *from, int to_dirfd, const char *to)
{
	CLEANUP(fs_place_free) struct fs_place a = FS_PLACE_NONE;
	CLEANUP(fs_place_free) struct fs_place b = FS_PLACE_NONE;

	FS_FAULT("fs.rename", "rename to", to);
	TRY(fs_parent(from_dirfd, from, &a));
	TRY(fs_parent(to_dirfd, to, &b));
	return renameat(a.dirfd, a.base, b.dirfd, b.base) < 0 ? FS_FAILED("rename to", to) : OK;
}

enum err fs_lock(int dirfd, int timeout_ms, int *fd_out)
{
	CLEANUP(fs_drop) int fd = -1;
	int64_t until = clock_mono_ms() + timeout_ms;

	TRY(fs_open_dir(dirfd, ".", &fd));
	while (flock(fd, LOCK_EX | LOCK_NB) < 0 && (errno == EWOULDBLOCK || errno == EINTR)) {
		if (clock_mono_ms() >= until)
			return ERR(STORAGE_STALLED, "another commit holds the directory for longer than %d ms", timeout_ms);
		nanosleep(&(struct timespec){ .tv_nsec = LOCK_LOOK_NS }, NULL);
	}
	*fd_out = fd;
	fd = -1;
	return OK;
}

enum err fs_unlink(int dirfd, const char *path)
{
	CLEANUP(fs_place_free) struct fs_place at = FS_PLACE_NONE;

	FS_FAULT("fs.unlink", "remove", path);
	TRY(fs_parent(dirfd, path, &at));
	return unlinkat(at.dirfd, at.base, 0) < 0 ? FS_FAILED("remove", path) : OK;
}

/* Reads until the end or `max` bytes; a file that is being written may be larger than fstat said. */
static FALLIBLE enum err read_up_to(int fd, unsigned char *into, uint64_t max, const char *path, uint64_t *n_out)
{
	uint64_t got = 0;

	while (got < max) {
		ssize_t n = pread(fd, into + got, max - got, (off_t)got);
		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0)
			return FS_FAILED("read", path);
		if (n == 0)
			break;
		got += (uint64_t)n;
	}
	*n_out = got;
	fs_count(fd, false, got);
	return OK;
}

enum err fs_read_all_stat(int dirfd, const char *path, uint64_t max_bytes, void **bytes_out, uint64_t *n_out,
			  struct stat *st_out)
{
	CLEANUP(fs_drop) int fd = -1;
	CLEANUP(mem_free_ptr) unsigned char *bytes = NULL;
	struct stat st;
	uint64_t n = 0;

	TRY(fs_open(dirfd, path, O_RDONLY, 0, &fd));
	FS_FAULT("fs.pread", "read", path);
	if (fstat(fd, &st) < 0)
		return FS_FAILED("look at", path);
	if (!S_ISREG(st.st_mode))
		return err_at_file(ERR(NAME_INVALID, "'%s' is not a file", path), path, -1);
	if ((uint64_t)st.st_size > max_bytes)
		return err_at_file(ERR(LIMIT_EXCEEDED, "'%s' has %jd bytes, at most %ju are read", path,
				       (intmax_t)st.st_size, (uintmax_t)max_bytes), path, -1);
	bytes = mem_alloc((uint64_t)st.st_size + 1);
	NEED(bytes, "no memory for the %jd bytes of '%s'", (intmax_t)st.st_size, path);
	TRY(read_up_to(fd, bytes, (uint64_t)st.st_size + 1, path, &n));
	if (n > (uint64_t)st.st_size)
		return err_at_file(ERR(STORAGE_IO, "'%s' grew while it was read", path), path, st.st_size);
	*bytes_out = move(bytes);
	*n_out = n;
	*st_out = st;
	return OK;
}

enum err fs_read_all(int dirfd, const char *path, uint64_t max_bytes, void **bytes_out, uint64_t *n_out)
{
	struct stat st;

	return fs_read_all_stat(dirfd, path, max_bytes, bytes_out, n_out, &st);
}

bool fs_in_memory(int dirfd)
{
	struct statfs st;

	return fstatfs(dirfd, &st) == 0 && (st.f_type == TMPFS_MAGIC || st.f_type == RAMFS_MAGIC);
}

enum err fs_truncate(int fd, uint64_t bytes, const char *name)
{
	FS_FAULT("fs.truncate", "truncate", name);
	if (ftruncate(fd, (off_t)bytes) < 0)
		return FS_FAILED("truncate", name);
	return OK;
}

enum err fs_pread(int fd, void *into, size_t n, uint64_t offset, const char *name)
{
	size_t done = 0;

	FS_FAULT("fs.pread", "read", name);
	while (done < n) {
		ssize_t got = pread(fd, (char *)into + done, n - done, (off_t)(offset + done));
		if (got < 0 && errno == EINTR)
			continue;
		if (got < 0)
			return FS_FAILED("read", name);
		if (got == 0)
			return err_at_file(ERR(STORAGE_IO, "'%s' ends at %ju, %zu bytes at %ju were expected", name,
					       (uintmax_t)(offset + done), n, (uintmax_t)offset),
					   name, (int64_t)(offset + done));
		done += (size_t)got;
	}
	fs_count(fd, false, n);
	return OK;
}

bool fs_pread_cached(int fd, void *into, size_t n, uint64_t offset)
{
	struct iovec piece = { into, n };
	ssize_t got = preadv2(fd, &piece, 1, (off_t)offset, RWF_NOWAIT);

	if (got < 0 && errno == EOPNOTSUPP && fs_in_memory(fd)) /* tmpfs knows no RWF_NOWAIT, and never waits */
		got = pread(fd, into, n, (off_t)offset);
	if (got != (ssize_t)n)
		return false;
	fs_count(fd, false, n);
	return true;
}

enum err fs_pwrite(int fd, const void *from, size_t n, uint64_t offset, const char *name)
{
	size_t done = 0;

	FS_FAULT("fs.pwrite", "write", name);
	while (done < n) {
		ssize_t put = pwrite(fd, (const char *)from + done, n - done, (off_t)(offset + done));
		if (put < 0 && errno == EINTR)
			continue;
		if (put < 0)
			return FS_FAILED("write", name);
		done += (size_t)put;
	}
	fs_count(fd, true, n);
	return OK;
}

enum err fs_free_bytes(int dirfd, uint64_t *free_out, uint64_t *total_out)
{
	struct statvfs v;

	FS_FAULT("fs.stat", "look at", ".");
	if (fstatvfs(dirfd, &v) < 0)
		return FS_FAILED("ask for the free space of", ".");
	*free_out = (uint64_t)v.f_bavail * v.f_frsize;
	*total_out = (uint64_t)v.f_blocks * v.f_frsize;
	return OK;
}
