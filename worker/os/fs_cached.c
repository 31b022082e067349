/* fs_cached.c: bytes of a file that are in memory already, mapped instead of read (see fs.h).
 *
 * A read copies them by the kernel's string instruction and looks up every page of them: 0.2 s a GiB where a copy past the caches
 * takes 0.1. Each window is mapped and unmapped by itself: mappings that stay would cost page tables that grow with the checkpoint. */
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
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

/* false as well if the kernel does not tell: it is older than 6.5, or the file is another user's. */
static bool is_cached(int fd, const struct range *r)
{
	uint64_t pages = (r->offset + r->bytes + PAGE - 1) / PAGE - r->offset / PAGE;
	struct counts counts = { 0 };

	return syscall(SYS_cachestat, fd, r, &counts, 0) == 0 && counts.cached == pages;
}

bool fs_map_cached(int fd, uint64_t offset, uint64_t n, struct fs_window *out)
{
	const struct range r = { offset, n };
	uint64_t before = offset % PAGE;
	struct stat st;

	/* behind the end of a file a mapping shows zeros, to the end of the page */
	if (n == 0 || fstat(fd, &st) < 0 || (uint64_t)st.st_size < n || (uint64_t)st.st_size - n < offset || !is_cached(fd, &r))
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
