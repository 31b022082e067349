/* fs.h: every file-system call of the engine. All paths are relative to a directory fd and are opened with openat2 beneath it,
 * without following links (RESOLVE_BENEATH | NO_SYMLINKS | NO_MAGICLINKS; NO_XDEV is not asked for: roots may hold mounts).
 * errno → code in one place (fs_error). Names in errors are the relative ones, never host paths.
 *
 * A path is relative, may have several components, and never ".." or a leading "/". fs_open opens regular files and directories
 * only, so that a planted FIFO or device cannot hold us up.
 *
 * Fault points, in builds with -DDCPD_FAULTS (tests): the environment variable DCPD_FAULT is a list, divided by commas, of
 *     POINT:N            SIGKILL at the N-th pass of POINT
 *     POINT:N:ERRNO      the N-th pass fails: ENOSPC, EIO, …; for fs_fault(), the thread's next fs_ call fails with it
 *     POINT:N+:ERRNO     every pass from the N-th on
 *     @FILE              alone: one fault at a time, which a test sets while processes run (fs_fault.c, tests/lib/faults.py)
 * Points are those that callers name with fs_fault("commit.rename"), and one in each call here: "fs.open", "fs.mkdir", "fs.stat",
 * "fs.allocate", "fs.truncate", "fs.fsync", "fs.rename", "fs.exchange", "fs.unlink", "fs.pread", "fs.pwrite", "fs.list", "fs.close",
 * "fs.clone", "fs.link". */
#pragma once
#include <sys/stat.h>
#include "base/err.h"

enum err fs_error(int sys_errno);                         /* ENOSPC → ERR_STORAGE_FULL, EROFS, ENOENT → NOT_FOUND … */
FALLIBLE enum err fs_open_root(const char *path, int *fd_out);                 /* O_DIRECTORY; may be on a dead NFS: workers only */
/* Files made beneath this root get `mode`, whatever is given to fs_open and fs_mkdir; directories get x as well where it has r; both get
 * `group` unless that is -1. The umask must be 0. */
void fs_root_access(int root_fd, mode_t mode, gid_t group);
FALLIBLE enum err fs_open(int dirfd, const char *path, int flags, mode_t mode, int *fd_out);
FALLIBLE enum err fs_open_dir(int dirfd, const char *path, int *fd_out);
FALLIBLE enum err fs_close(int *fd);                      /* checks close(); *fd = -1 */
void fs_drop(int *fd);                                    /* close without checking, for CLEANUP(fs_drop) */
FALLIBLE enum err fs_mkdir(int dirfd, const char *name, mode_t mode);          /* EEXIST → ERR_CHECKPOINT_EXISTS */
/* Creates every missing directory of `path` and fsyncs each one's parent, also of those that exist; returns the last directory's fd. */
FALLIBLE enum err fs_mkdirs(int rootfd, const char *path, int *fd_out);
FALLIBLE enum err fs_stat(int dirfd, const char *path, struct stat *out);      /* no links */
FALLIBLE enum err fs_check_root(int fd);     /* ERR_STORAGE_GONE: the directory was removed while we hold it */
FALLIBLE enum err fs_allocate(int fd, uint64_t bytes, const char *name);       /* fallocate; in memory room alone */
FALLIBLE enum err fs_truncate(int fd, uint64_t bytes, const char *name);
FALLIBLE enum err fs_fsync(int fd, const char *name);
/* ERR_CHECKPOINT_EXISTS if `to` exists. Where the file system lacks RENAME_NOREPLACE (NFS): by other means, as safe. */
FALLIBLE enum err fs_rename_noreplace(int dirfd, const char *from, const char *to);
FALLIBLE enum err fs_exchange(int dirfd, const char *a, const char *b);        /* ERR_OVERWRITE_UNSUPPORTED where refused */
FALLIBLE enum err fs_rename(int from_dirfd, const char *from, int to_dirfd, const char *to);
/* Locks a directory against others that lock it, here and, where the file system does that, on other hosts, until fs_drop(fd_out).
 * ERR_STORAGE_STALLED: somebody has it for longer than timeout_ms. A file system without locks: OK, and it is not locked. */
FALLIBLE enum err fs_lock(int dirfd, int timeout_ms, int *fd_out);
FALLIBLE enum err fs_unlink(int dirfd, const char *path);
/* Depth-bounded, follows no link, enters no other file system; ENOENT is fine. */
FALLIBLE enum err fs_remove_tree(int dirfd, const char *path);
/* The same, each file by a function of the caller's, which comes to fs_unlink_here(dirfd, name), and returns what that does. */
typedef int (*fs_unlink_fn)(void *user, int dirfd, const char *name);
int fs_unlink_here(int dirfd, const char *name);          /* unlinkat(): 0, or -1 and errno */
FALLIBLE enum err fs_remove_tree_by(int dirfd, const char *path, fs_unlink_fn unlink_one, void *user);
bool fs_is_local(int dirfd);                              /* a known file system of this host alone: no other host opens files there */
/* Has the file no name any more, and nobody else (here or in any process) it open or mapped? fd: open for writing, the caller's only one.
 * Somebody who is in the middle of open() is not seen. On a local file system only. SIGIO must be ignored. */
bool fs_is_sole(int fd);
FALLIBLE enum err fs_read_all(int dirfd, const char *path, uint64_t max_bytes, void **bytes_out, uint64_t *n_out); /* mem_free */
/* The same. st_out: what that very file was, before it was read. */
FALLIBLE enum err fs_read_all_stat(int dirfd, const char *path, uint64_t max_bytes, void **bytes_out, uint64_t *n_out,
				   struct stat *st_out);
FALLIBLE enum err fs_pread(int fd, void *into, size_t n, uint64_t offset, const char *name);   /* exactly n or an error */
/* Reads n bytes if all of them are in memory: in the page cache, or in a file on tmpfs. False: they are not, and `into` has anything. */
bool fs_pread_cached(int fd, void *into, size_t n, uint64_t offset);
/* Is a range of a file in the page cache? A page whose read is under way counts as cached. UNKNOWN: Linux before 6.5, a file system that
 * does not tell, or a file of another user's. Only asks: fs_pread_cached makes the kernel read ahead what is not there. */
enum fs_cached { FS_CACHED_UNKNOWN, FS_CACHED, FS_NOT_CACHED };
enum fs_cached fs_cached(int fd, uint64_t offset, uint64_t n);
/* A part of a file as a mapping. */
struct fs_window {
	const unsigned char *p;
	void *map;
	size_t bytes;                  /* of map */
};
/* Maps [offset, offset + n) for reading if all of it is in the page cache, and not still on its way there. false: read it. A file may
 * shrink meanwhile: touch the window inside seg_guard (os/seg.h) only. */
bool fs_map_cached(int fd, uint64_t offset, uint64_t n, struct fs_window *out);
void fs_unmap_cached(struct fs_window *w);
FALLIBLE enum err fs_pwrite(int fd, const void *from, size_t n, uint64_t offset, const char *name);
/* Counts bytes read or written through fd by another way than fs_pread and fs_pwrite, if fd was opened beneath a root. */
void fs_count(int fd, bool written, uint64_t bytes);
/* Bytes moved beneath root_fd by this process since the last call. */
uint64_t fs_count_take(int root_fd, bool written);
FALLIBLE enum err fs_free_bytes(int dirfd, uint64_t *free_out, uint64_t *total_out);
/* Calls fn for every entry but "." and ".."; fn's error stops the walk. */
typedef enum err (*fs_entry_fn)(void *user, const char *name, unsigned char d_type);
FALLIBLE enum err fs_list(int dirfd, fs_entry_fn fn, void *user);
/* fs_share.c. Can files here have blocks in common, each changed without harm to the other? */
bool fs_can_clone(int dirfd);
/* `bytes` of file `from` become bytes of file `to` as well: multiples of the file system's block. */
FALLIBLE enum err fs_clone(int from, uint64_t from_offset, int to, uint64_t offset, uint64_t bytes, const char *name);
/* `name`, which is not there, becomes another name of the file `from`, if that has this size and time of writing.
 * Nobody but root may write to the file any more. ERR_CHECKPOINT_REPLACED: it is another one. */
FALLIBLE enum err fs_link(int from_dirfd, const char *from, uint64_t bytes, int64_t mtime_ns, int dirfd, const char *name);
FALLIBLE enum err fs_set_times(int fd, const struct stat *times, const char *name);      /* those of access and writing */
bool fs_direct_ok(int dirfd);                             /* does O_DIRECT work here? writes a file of our own, once */
bool fs_in_memory(int dirfd);                             /* tmpfs, ramfs: no disk behind it */
void fs_fault(const char *point);                         /* nothing unless built with DCPD_FAULTS */
int fs_fault_errno(const char *point);                    /* for calls made elsewhere: 0, or the errno to fail with now */
