/* fs_cached.c: bytes of a file that are in memory already, mapped instead of read (see fs.h).
 *
 * A read copies them by the kernel's string instruction and looks up every page of them: 0.2 s a GiB where a copy past the caches
 * takes 0.1. Each window is mapped and unmapped by itself: mappings that stay would cost page tables that grow with the checkpoint. */
#include <errno.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include "os/fs.h"

#ifndef SYS_cachestat
#define SYS_cachestat 451
#endif

enum { PAGE = 4096 };

/* The kernel's struct cachestat_range, and the first number of its struct cachestat. */
struct range {
	uint64_t offset, bytes;
};

struct counts {
	uint64_t cached, others[4];
};

enum fs_cached fs_cached(int fd, uint64_t offset, uint64_t n)
{
	const struct range r = { offset, n };
	struct counts counts = { 0 };

	if (n == 0 || offset > INT64_MAX || n > INT64_MAX - offset || syscall(SYS_cachestat, fd, &r, &counts, 0) < 0)
		return FS_CACHED_UNKNOWN;
	return counts.cached == (offset + n - 1) / PAGE - offset / PAGE + 1 ? FS_CACHED : FS_NOT_CACHED;
}

/* Is the page of a byte not only in the page cache, but read, too? A fault in a page that is not would wait for the disk. Ranges are read
 * from their begin to their end: the answers for both ends are that for all between. */
static bool is_read(int fd, uint64_t at)
{
	char byte;
	ssize_t got = preadv2(fd, &(struct iovec){ &byte, 1 }, 1, (off_t)at, RWF_NOWAIT);

	return got == 1 || (got < 0 && errno == EOPNOTSUPP); /* tmpfs */
}

bool fs_map_cached(int fd, uint64_t offset, uint64_t n, struct fs_window *out)
{
	uint64_t before = offset % PAGE;
	struct stat st;

	/* behind the end of a file a mapping shows zeros, to the end of the page */
	if (fstat(fd, &st) < 0 || (uint64_t)st.st_size < n || (uint64_t)st.st_size - n < offset)
		return false;
	if (fs_cached(fd, offset, n) != FS_CACHED || !is_read(fd, offset + n - 1) || !is_read(fd, offset))
		return false;
	void *map = mmap(NULL, before + n, PROT_READ, MAP_SHARED, fd, (off_t)(offset - before));
	if (map == MAP_FAILED)
		return false;
	*out = (struct fs_window){ (unsigned char *)map + before, map, before + n };
	if (madvise(map, before + n, MADV_POPULATE_READ) < 0) {
		fs_unmap_cached(out);
		return false;
	}
	return true;
}

void fs_unmap_cached(struct fs_window *w)
{
	munmap(w->map, w->bytes);
	*w = (struct fs_window){ 0 };
}
