/* fs_access.c: mode and group of what is made beneath a storage root (see fs.h).
 *
 * Set where files are made, not by a walk behind the commit: a staging directory that is renamed into place has the right modes, and a
 * descriptor that somebody opened in between has no more rights than later. The process's umask must be 0 for it. */
#include <unistd.h>

#include "os/fs_impl.h"

struct access {
	bool set;
	mode_t mode;
	gid_t group;
};

static struct access accesses[1 + FS_ROOTS_MAX];   /* by root's number; 0: no root */

void fs_root_access(int root_fd, mode_t mode, gid_t group)
{
	unsigned n = fs_root_number(root_fd);

	if (n)
		accesses[n] = (struct access){ true, mode, group };
}

mode_t fs_file_mode(int dirfd, mode_t given)
{
	const struct access *a = &accesses[fs_root_number(dirfd)];

	return a->set ? a->mode : given;
}

mode_t fs_dir_mode(int dirfd, mode_t given)
{
	const struct access *a = &accesses[fs_root_number(dirfd)];

	return a->set ? a->mode | (a->mode & 0444) >> 2 : given;
}

enum err fs_give_group(int fd, int dirfd, const char *name)
{
	const struct access *a = &accesses[fs_root_number(dirfd)];
	struct stat st;

	if (!a->set || a->group == (gid_t)-1 || (fstat(fd, &st) == 0 && st.st_gid == a->group))
		return OK;
	return fchown(fd, (uid_t)-1, a->group) < 0 ? FS_FAILED("give to its group", name) : OK;
}
