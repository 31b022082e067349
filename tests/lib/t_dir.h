/* t_dir.h: a scratch directory for a test, removed with all that is in it. */
#pragma once
#include <dirent.h>
#include <fcntl.h>
#include <ftw.h>
#include <stdio.h>
#include <unistd.h>
#include "lib/t.h"

struct t_dir {
	char path[256];
	int fd;
};

static inline int t_dir_remove_one(const char *path, const struct stat *st, int type, struct FTW *f)
{
	(void)st;
	(void)type;
	(void)f;
	return remove(path);
}

/* Under $TMPDIR or the build folder's disk, not tmpfs: O_DIRECT and full disks are what is tested. */
static inline void t_dir_make(struct t_dir *d)
{
	const char *base = getenv("TMPDIR");

	snprintf(d->path, sizeof d->path, "%s/dcpd-test-XXXXXX", base ? base : "/tmp");
	assert_non_null(mkdtemp(d->path));
	d->fd = open(d->path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	assert_true(d->fd >= 0);
}

static inline void t_dir_remove(struct t_dir *d)
{
	close(d->fd);
	nftw(d->path, t_dir_remove_one, 16, FTW_DEPTH | FTW_PHYS);
}

static inline int t_count_fds(void)
{
	DIR *d = opendir("/proc/self/fd");
	int n = 0;

	assert_non_null(d);
	while (readdir(d))
		n++;
	closedir(d);
	return n;
}
