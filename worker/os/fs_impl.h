/* fs_impl.h: what fs*.c share: opening beneath a directory, splitting a path into parent and last component, and errors. */
#pragma once
#include "os/fs.h"

/* Records errno as "cannot WHAT 'NAME'" with the code of fs_error. */
enum err fs_failed(const char *what, const char *name, const char *place);
#define FS_FAILED(what, name) fs_failed((what), (name), ERR_PLACE)

/* Fails the function here if the tests ask for it; nothing in ordinary builds. */
#ifdef DCPD_FAULTS
int fs_fault_pending(const char *point);
#define FS_FAULT(point, what, name)                                \
	do {                                                       \
		int fault_ = fs_fault_pending(point);              \
		if (fault_) {                                      \
			errno = fault_;                            \
			return fs_failed((what), (name), ERR_PLACE); \
		}                                                  \
	} while (0)
#else
#define FS_FAULT(point, what, name) ((void)0)
#endif

FALLIBLE enum err fs_openat2(int dirfd, const char *path, int flags, mode_t mode, uint64_t resolve, int *fd_out);

void fs_count_root(int fd);                    /* fd is a storage root: what is opened beneath it counts for it */
void fs_count_opened(int fd, int dirfd);       /* fd was opened beneath dirfd */
void fs_count_closed(int fd);                  /* before close() */

struct fs_place {
	int dirfd;             /* of the parent: the caller's, or own */
	int own;
	const char *base;      /* the last component, inside the path given */
};
#define FS_PLACE_NONE ((struct fs_place){ .dirfd = -1, .own = -1 })
FALLIBLE enum err fs_parent(int dirfd, const char *path, struct fs_place *out);
void fs_place_free(struct fs_place *p);

enum { FS_ROOTS_MAX = 64 };
unsigned fs_root_number(int fd);                          /* of the storage root that fd was opened beneath; 0: none */
mode_t fs_file_mode(int dirfd, mode_t given);             /* what is made in dirfd gets this mode, */
mode_t fs_dir_mode(int dirfd, mode_t given);
FALLIBLE enum err fs_give_group(int fd, int dirfd, const char *name); /* and this group */
