/* seg.h: POSIX shared memory segments. The coordinator makes and keeps fds (it has no access to a byte); workers map.
 *
 * Named segments cannot be sealed by the kernel, so a peer may shrink one while we read: seg_guard() makes the SIGBUS of that an
 * ordinary ERR_SEGMENT_SHRUNK. */
#pragma once
#include <sys/types.h>
#include "base/err.h"
#include "base/vec.h"

enum { SEG_NAME_MAX = 64 };
#define SEG_OWNER_BITS ((1ull << 48) - 1)

/* Owner of a segment, as its name tells: known from the first moment and on every kernel (tmpfs has user xattrs since Linux 6.6 only).
 * SEG_OWNER_BITS of each count. */
struct seg_owner {
	uint64_t place;             /* stands for the path of a state directory */
	uint64_t journal;           /* the id of the journal that has it in a row */
};
/* Makes "/dcpd-<24 hex: owner>-<32 hex: random>" with O_EXCL, 0600; size by ftruncate only: pages come with seg_allocate. */
FALLIBLE enum err seg_create(const struct seg_owner *owner, uint64_t bytes, char name_out[SEG_NAME_MAX], int *fd_out);
/* false: the name does not say, as "/dcpd-<32 hex>" of earlier versions. */
bool seg_owner_of(const char *name, struct seg_owner *out);
/* Allocates [offset, offset + bytes): huge pages where whole ones fit and the kernel has them, else fallocate. ENOSPC →
 * ERR_SHM_EXHAUSTED. Call in steps of many MiB from a helper thread. */
FALLIBLE enum err seg_allocate(int fd, uint64_t offset, uint64_t bytes);
/* Gives `uid` read and write access by a POSIX ACL entry; others keep none. Our own uid needs nothing. */
FALLIBLE enum err seg_grant(int fd, uid_t uid);
/* Opens an existing one by name and checks that it is ours alone: owner, no access for group and others (an ACL entry for a uid
 * is fine), one link, at least `bytes` long. ERR_SEGMENT_GONE if there is none, ERR_FORBIDDEN if it is not what we made. */
FALLIBLE enum err seg_open(const char *name, uint64_t bytes, int *fd_out);
FALLIBLE enum err seg_unlink(const char *name);           /* already gone is fine */
/* Names of all segments of this uid, whichever daemon's they are. */
FALLIBLE enum err seg_list(void (*fn)(void *user, const char *name, uint64_t bytes), void *user);

struct seg_map {
	unsigned char *p;
	uint64_t bytes;
};
FALLIBLE enum err seg_map(int fd, uint64_t bytes, bool writable, struct seg_map *out); /* ERR_SEGMENT_SHRUNK if it is smaller */
void seg_unmap(struct seg_map *m);
/* Mappings that have been used. Taking them apart costs up to 0.1 s a GiB in pages of 4 KiB: that is done when nobody waits. */
struct seg_leavings {
	struct vec(struct seg_map) maps;
};
void seg_leave(struct seg_leavings *l, struct seg_map *m);  /* takes it over; l NULL: unmaps it now */
void seg_leavings_unmap(struct seg_leavings *l);
/* Maps the page at `at`, for writing too. */
FALLIBLE enum err seg_map_page(int fd, uint64_t at, struct seg_map *out);
/* Maps the ring [at, at + bytes) of a segment twice, one copy behind the other, for reading: whatever lies in it, up to `bytes` of them,
 * is in a row from its first byte on, also across the ring's end. at, bytes: multiples of a page. */
FALLIBLE enum err seg_map_ring(int fd, uint64_t at, uint64_t bytes, struct seg_map *out);
/* Enters [p, p + bytes) of a mapping into the page tables in one call instead of one fault a page. Only a hint.
 * fresh: they are new and will be written. Else those that are there are mapped 16 by 16, for writing too: a shared mapping's are. */
void seg_populate(const void *p, uint64_t bytes, bool fresh);
/* Runs fn(user) with SIGBUS turned into ERR_SEGMENT_SHRUNK. fn must not take locks or allocate. Per thread; may be nested: the innermost
 * guard ends.
 * A SIGBUS outside of a guard goes to whoever handled it before, else it ends the process. Cheap: one system call. */
FALLIBLE enum err seg_guard(void (*fn)(void *user), void *user);
