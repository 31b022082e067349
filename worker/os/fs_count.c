/* fs_count.c: which storage root a descriptor belongs to, and bytes that this process reads from and writes to each (see fs.h).
 *
 * Counted where descriptors are used, not where jobs move tensors, so that metadata, checks, look-ups and retries are in it. A
 * descriptor opened beneath a root inherits the root's number from its directory; segments and memfds have none. */
#include <stdatomic.h>

#include "os/fs_impl.h"

enum { FDS_MAX = 1 << 20 };

static _Atomic unsigned char root_of[FDS_MAX]; /* by descriptor; 0: not beneath a root */
static _Atomic uint64_t counts[1 + FS_ROOTS_MAX][2];
static _Atomic unsigned roots;

void fs_count_root(int fd)
{
	unsigned n = atomic_fetch_add(&roots, 1) + 1;

	if (fd < FDS_MAX && n <= FS_ROOTS_MAX)
		atomic_store_explicit(&root_of[fd], (unsigned char)n, memory_order_relaxed);
}

unsigned fs_root_number(int fd)
{
	return fd >= 0 && fd < FDS_MAX ? atomic_load_explicit(&root_of[fd], memory_order_relaxed) : 0;
}

void fs_count_opened(int fd, int dirfd)
{
	if (fd < FDS_MAX)
		atomic_store_explicit(&root_of[fd], (unsigned char)fs_root_number(dirfd), memory_order_relaxed);
}

void fs_count_closed(int fd)
{
	if (fd < FDS_MAX)
		atomic_store_explicit(&root_of[fd], 0, memory_order_relaxed);
}

void fs_count(int fd, bool written, uint64_t bytes)
{
	unsigned n = fs_root_number(fd);

	if (n)
		atomic_fetch_add_explicit(&counts[n][written], bytes, memory_order_relaxed);
}

uint64_t fs_count_take(int root_fd, bool written)
{
	unsigned n = fs_root_number(root_fd);

	return n ? atomic_exchange(&counts[n][written], 0) : 0;
}
