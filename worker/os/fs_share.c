/* fs_share.c: two files with the same bytes on the disk: blocks that are cloned, and links (see fs.h). */
#include <fcntl.h>
#include <linux/fs.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "os/fs_impl.h"

/* A file system without clones says so before it looks at how many bytes they are. */
bool fs_can_clone(int dirfd)
{
	CLEANUP(fs_drop) int from = -1, to = -1;

	if (fs_open(dirfd, ".", O_TMPFILE | O_RDWR, 0600, &from) || fs_open(dirfd, ".", O_TMPFILE | O_RDWR, 0600, &to)) {
		err_clear();
		return false;
	}
	struct file_clone_range range = { .src_fd = from };
	return ioctl(to, FICLONERANGE, &range) == 0;
}

enum err fs_clone(int from, uint64_t from_offset, int to, uint64_t offset, uint64_t bytes, const char *name)
{
	struct file_clone_range range = { .src_fd = from, .src_offset = from_offset, .src_length = bytes, .dest_offset = offset };

	FS_FAULT("fs.clone", "clone blocks of", name);
	return ioctl(to, FICLONERANGE, &range) < 0 ? FS_FAILED("clone blocks of", name) : OK;
}

/* Whoever opens the file to write over it would change all that share it. Root may all the same. */
static FALLIBLE enum err protect(int dirfd, const char *name, const struct stat *st)
{
	CLEANUP(fs_drop) int fd = -1;

	if (!(st->st_mode & 0222))
		return OK;
	TRY(fs_open(dirfd, name, O_RDONLY, 0, &fd));
	return fchmod(fd, st->st_mode & 07555) < 0 ? FS_FAILED("protect", name) : OK;
}

static FALLIBLE enum err check_linked(int dirfd, const char *name, uint64_t bytes, int64_t mtime_ns)
{
	struct stat st;

	TRY(fs_stat(dirfd, name, &st));
	if ((uint64_t)st.st_size != bytes || st.st_mtim.tv_sec != mtime_ns / 1000000000 || st.st_mtim.tv_nsec != mtime_ns % 1000000000)
		return ERR(CHECKPOINT_REPLACED, "'%s' was written to meanwhile", name);
	return protect(dirfd, name, &st);
}

enum err fs_link(int from_dirfd, const char *from, uint64_t bytes, int64_t mtime_ns, int dirfd, const char *name)
{
	CLEANUP(fs_place_free) struct fs_place a = FS_PLACE_NONE;

	FS_FAULT("fs.link", "link", name);
	TRY(fs_parent(from_dirfd, from, &a));
	if (linkat(a.dirfd, a.base, dirfd, name, 0) < 0)
		return FS_FAILED("link", name);
	enum err e = check_linked(dirfd, name, bytes, mtime_ns);
	if (e)
		(void)fs_unlink_here(dirfd, name);
	return e;
}

enum err fs_set_times(int fd, const struct stat *times, const char *name)
{
	const struct timespec both[2] = { times->st_atim, times->st_mtim };

	return futimens(fd, both) < 0 ? FS_FAILED("set the times of", name) : OK;
}
