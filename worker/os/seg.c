/* seg.c: named segments of shared memory (see seg.h).
 *
 * Names carry 128 random bits and are created with O_EXCL, so nobody can lie in wait under a name; what is opened by name is
 * checked to be of this uid. The ACL is what lets a trainer of another uid in: a mode or a group would let in more than that one. */
#include "os/seg.h"

#include "base/num.h"

#include <acl/libacl.h>
#include <dirent.h>
#include <fcntl.h>
#include <sodium.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/acl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

enum { PREFIX_LEN = 6, OWNER_LEN = 12, RANDOM_BYTES = 16, SMALL_PAGE = 4096 };

static const char prefix[] = "/dcpd-", hex[] = "0123456789abcdef";

static bool is_hex(const char *p, size_t n)
{
	return strspn(p, hex) == n;
}

static bool has_owner(const char *name)
{
	const char *p = name + PREFIX_LEN, *random = p + 2 * OWNER_LEN + 1;

	return strncmp(name, prefix, PREFIX_LEN) == 0 && is_hex(p, 2 * OWNER_LEN) && random[-1] == '-' &&
	       is_hex(random, 2 * RANDOM_BYTES) && random[2 * RANDOM_BYTES] == '\0';
}

/* Is this a name that seg_create could have made, of this version or an earlier one? */
static bool name_ok(const char *name)
{
	return has_owner(name) || (strncmp(name, prefix, PREFIX_LEN) == 0 && is_hex(name + PREFIX_LEN, 2 * RANDOM_BYTES) &&
				   name[PREFIX_LEN + 2 * RANDOM_BYTES] == '\0');
}

bool seg_owner_of(const char *name, struct seg_owner *out)
{
	char place[OWNER_LEN + 1] = "", journal[OWNER_LEN + 1] = "";

	if (!has_owner(name))
		return false;
	memcpy(place, name + PREFIX_LEN, OWNER_LEN);
	memcpy(journal, name + PREFIX_LEN + OWNER_LEN, OWNER_LEN);
	*out = (struct seg_owner){ strtoull(place, NULL, 16), strtoull(journal, NULL, 16) };
	return true;
}

static FALLIBLE enum err make_name(const struct seg_owner *owner, char name_out[SEG_NAME_MAX])
{
	unsigned char bits[RANDOM_BYTES];

	if (getrandom(bits, sizeof bits, 0) != (ssize_t)sizeof bits)
		return ERR_SYS(SYSTEM, "cannot get random bytes for a segment's name");
	int n = snprintf(name_out, SEG_NAME_MAX, "%s%012jx%012jx-", prefix, (uintmax_t)(owner->place & SEG_OWNER_BITS),
			 (uintmax_t)(owner->journal & SEG_OWNER_BITS));
	sodium_bin2hex(name_out + n, 2 * sizeof bits + 1, bits, sizeof bits);
	return OK;
}

static enum err shm_error(int sys_errno)
{
	return sys_errno == ENOSPC || sys_errno == EDQUOT || sys_errno == ENOMEM ? ERR_SHM_EXHAUSTED : ERR_SYSTEM;
}

static enum err shm_failed(const char *what, const char *place)
{
	enum err code = shm_error(errno);

	err_record(code, errno, place, "cannot %s a segment", what);
	return code;
}

enum err seg_create(const struct seg_owner *owner, uint64_t bytes, char name_out[SEG_NAME_MAX], int *fd_out)
{
	char name[SEG_NAME_MAX];

	if (bytes > INT64_MAX)
		return ERR(LIMIT_EXCEEDED, "a segment cannot have %ju bytes", (uintmax_t)bytes);
	TRY(make_name(owner, name));
	int fd = shm_open(name, O_RDWR | O_CREAT | O_EXCL, 0600);
	if (fd < 0)
		return shm_failed("make", ERR_PLACE);
	if (ftruncate(fd, (off_t)bytes) < 0) {
		enum err e = shm_failed("size", ERR_PLACE);
		close(fd);
		(void)shm_unlink(name);
		return e;
	}
	memcpy(name_out, name, sizeof name);
	*fd_out = fd;
	return OK;
}

/* As mmap, where the kernel can map huge pages of what lies at a multiple of one in the file. */
static void *map_aligned(int fd, uint64_t at, uint64_t bytes, int access)
{
	uint64_t size = (bytes + SMALL_PAGE - 1) / SMALL_PAGE * SMALL_PAGE;
	void *room = mem_space(size);

	if (!room)
		return MAP_FAILED;
	void *p = mmap(room, size, access, MAP_SHARED | MAP_FIXED, fd, (off_t)at);
	if (p == MAP_FAILED) {
		int reason = errno;
		munmap(room, size);
		errno = reason;
	}
	return p;
}

/* Has the kernel (Linux 6.1 on) allocate the whole huge pages of [offset, offset + bytes), whatever the mount's `huge` option says: a page
 * of each is allocated, and collapsed with the holes behind it. The mapping that the kernel wants for it gives no access, so no
 * SIGBUS and no byte of a peer reaches this process. What cannot be had as huge pages is left to fallocate.
 * The kernel takes a huge page from the NUMA node of that page, and interleaves nodes by page: so it is another one in each. */
static void allocate_huge(int fd, uint64_t offset, uint64_t bytes)
{
	struct stat st;

	if (fstat(fd, &st) < 0)
		return;
	uint64_t begin = num_div_up(offset, MEM_HUGE_PAGE) * MEM_HUGE_PAGE;
	uint64_t end = num_min(offset + bytes, (uint64_t)st.st_size) / MEM_HUGE_PAGE * MEM_HUGE_PAGE;
	if (end <= begin)
		return;
	for (uint64_t at = begin; at < end; at += MEM_HUGE_PAGE)
		if (fallocate(fd, 0, (off_t)(at + at / MEM_HUGE_PAGE * SMALL_PAGE % MEM_HUGE_PAGE), 1) < 0)
			return;
	void *p = map_aligned(fd, begin, end - begin, PROT_NONE);
	if (p == MAP_FAILED)
		return;
	(void)madvise(p, end - begin, MADV_COLLAPSE);
	munmap(p, end - begin);
}

enum err seg_allocate(int fd, uint64_t offset, uint64_t bytes)
{
	int bad;

	if (bytes == 0)
		return OK;
	if (offset > INT64_MAX || bytes > INT64_MAX - offset)
		return ERR(LIMIT_EXCEEDED, "%ju bytes at %ju do not fit a segment", (uintmax_t)bytes,
			   (uintmax_t)offset);
	allocate_huge(fd, offset, bytes);
	/* A signal makes tmpfs undo what it did: begin again. */
	do
		bad = fallocate(fd, 0, (off_t)offset, (off_t)bytes);
	while (bad < 0 && errno == EINTR);
	return bad < 0 ? shm_failed("allocate memory for", ERR_PLACE) : OK;
}

static void acl_drop(acl_t *acl)
{
	if (*acl)
		(void)acl_free(*acl);
}

static int set_permissions(acl_entry_t entry, bool read_write)
{
	acl_permset_t set;

	if (acl_get_permset(entry, &set) < 0 || acl_clear_perms(set) < 0)
		return -1;
	if (read_write && (acl_add_perm(set, ACL_READ) < 0 || acl_add_perm(set, ACL_WRITE) < 0))
		return -1;
	return acl_set_permset(entry, set);
}

static int add_user(acl_t *acl, uid_t uid)
{
	acl_entry_t entry;

	if (acl_create_entry(acl, &entry) < 0 || acl_set_tag_type(entry, ACL_USER) < 0 ||
	    acl_set_qualifier(entry, &uid) < 0 || set_permissions(entry, true) < 0)
		return -1;
	return acl_calc_mask(acl);
}

enum err seg_grant(int fd, uid_t uid)
{
	CLEANUP(acl_drop) acl_t acl = NULL;

	if (uid == geteuid())
		return OK;
	acl = acl_get_fd(fd);
	if (!acl || add_user(&acl, uid) < 0 || acl_valid(acl) < 0 || acl_set_fd(fd, acl) < 0) {
		if (errno == EOPNOTSUPP || errno == ENOSYS)
			return ERR_SYS(UNSUPPORTED, "shared memory has no access lists here: user %d cannot be let in",
				       (int)uid);
		return ERR_SYS(SYSTEM, "cannot give user %d access to a segment", (int)uid);
	}
	return OK;
}

/* The group bits of a file with an ACL are its mask, so the entries are looked at one by one. */
static bool only_users_have_access(int fd, const struct stat *st)
{
	CLEANUP(acl_drop) acl_t acl = NULL;
	acl_entry_t entry;

	if ((st->st_mode & 077) == 0)
		return true;
	acl = acl_get_fd(fd);
	if (!acl)
		return false;
	for (int more = acl_get_entry(acl, ACL_FIRST_ENTRY, &entry); more == 1;
	     more = acl_get_entry(acl, ACL_NEXT_ENTRY, &entry)) {
		acl_tag_t tag;
		acl_permset_t set;
		if (acl_get_tag_type(entry, &tag) < 0 || acl_get_permset(entry, &set) < 0)
			return false;
		if (tag == ACL_USER_OBJ || tag == ACL_USER || tag == ACL_MASK)
			continue;
		if (acl_get_perm(set, ACL_READ) != 0 || acl_get_perm(set, ACL_WRITE) != 0 ||
		    acl_get_perm(set, ACL_EXECUTE) != 0)
			return false;
	}
	return true;
}

static FALLIBLE enum err check_ours(int fd, const char *name, uint64_t bytes)
{
	struct stat st;

	if (fstat(fd, &st) < 0)
		return ERR_SYS(SYSTEM, "cannot look at segment %s", name);
	if (!S_ISREG(st.st_mode) || st.st_uid != geteuid() || st.st_nlink != 1 || !only_users_have_access(fd, &st))
		return ERR(FORBIDDEN, "segment %s is not as it was made: owner %d, mode %o, %ju links", name,
			   (int)st.st_uid, (unsigned)st.st_mode & 07777, (uintmax_t)st.st_nlink);
	if ((uint64_t)st.st_size < bytes)
		return ERR(SEGMENT_SHRUNK, "segment %s has %jd bytes, expected %ju", name, (intmax_t)st.st_size,
			   (uintmax_t)bytes);
	return OK;
}

enum err seg_open(const char *name, uint64_t bytes, int *fd_out)
{
	if (!name_ok(name))
		return ERR(NAME_INVALID, "this is not the name of a segment");
	int fd = shm_open(name, O_RDWR | O_NOFOLLOW | O_NONBLOCK, 0);
	if (fd < 0) {
		if (errno == ENOENT)
			return ERR(SEGMENT_GONE, "segment %s is gone", name);
		return ERR_SYS(FORBIDDEN, "cannot open segment %s", name);
	}
	enum err e = check_ours(fd, name, bytes);
	if (e) {
		close(fd);
		return e;
	}
	*fd_out = fd;
	return OK;
}

enum err seg_unlink(const char *name)
{
	if (!name_ok(name))
		return ERR(NAME_INVALID, "this is not the name of a segment");
	if (shm_unlink(name) < 0 && errno != ENOENT)
		return ERR_SYS(SYSTEM, "cannot remove segment %s", name);
	return OK;
}

enum err seg_list(void (*fn)(void *user, const char *name, uint64_t bytes), void *user)
{
	DIR *d = opendir("/dev/shm");
	struct dirent *e;

	if (!d)
		return ERR_SYS(SYSTEM, "cannot list /dev/shm");
	while ((e = readdir(d))) {
		char name[SEG_NAME_MAX];
		struct stat st;
		if (snprintf(name, sizeof name, "/%s", e->d_name) >= (int)sizeof name || !name_ok(name))
			continue;
		if (fstatat(dirfd(d), e->d_name, &st, AT_SYMLINK_NOFOLLOW) == 0 && S_ISREG(st.st_mode) &&
		    st.st_uid == geteuid())
			fn(user, name, (uint64_t)st.st_size);
	}
	closedir(d);
	return OK;
}

static FALLIBLE enum err check_size(int fd, uint64_t bytes)
{
	struct stat st;

	if (fstat(fd, &st) < 0)
		return ERR_SYS(SYSTEM, "cannot look at a segment");
	if (st.st_size < 0 || (uint64_t)st.st_size < bytes)
		return ERR(SEGMENT_SHRUNK, "the segment has %jd bytes, expected %ju", (intmax_t)st.st_size,
			   (uintmax_t)bytes);
	return OK;
}

enum err seg_map(int fd, uint64_t bytes, bool writable, struct seg_map *out)
{
	void *p = NULL;

	TRY(check_size(fd, bytes));
	if (bytes) {
		p = map_aligned(fd, 0, bytes, PROT_READ | (writable ? PROT_WRITE : 0));
		if (p == MAP_FAILED)
			return ERR_SYS(SYSTEM, "cannot map a segment of %ju bytes", (uintmax_t)bytes);
	}
	*out = (struct seg_map){ p, bytes };
	return OK;
}

enum err seg_map_page(int fd, uint64_t at, struct seg_map *out)
{
	void *p = mmap(NULL, SMALL_PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, (off_t)at);

	if (p == MAP_FAILED)
		return ERR_SYS(SYSTEM, "cannot map a page of a segment");
	*out = (struct seg_map){ p, SMALL_PAGE };
	return OK;
}

enum err seg_map_ring(int fd, uint64_t at, uint64_t bytes, struct seg_map *out)
{
	struct seg_map room = { NULL, 2 * bytes };
	struct stat st;

	if (fstat(fd, &st) < 0)
		return ERR_SYS(SYSTEM, "cannot look at a segment");
	if (st.st_size < 0 || (uint64_t)st.st_size < at || (uint64_t)st.st_size - at < bytes)
		return ERR(SEGMENT_SHRUNK, "the segment has %jd bytes, expected a ring of %ju at %ju", (intmax_t)st.st_size,
			   (uintmax_t)bytes, (uintmax_t)at);
	room.p = mmap(NULL, room.bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (room.p == MAP_FAILED)
		return ERR_SYS(SYSTEM, "cannot map a ring of %ju bytes", (uintmax_t)bytes);
	for (int i = 0; i < 2; i++)
		if (mmap(room.p + i * bytes, bytes, PROT_READ, MAP_SHARED | MAP_FIXED, fd, (off_t)at) == MAP_FAILED) {
			enum err e = ERR_SYS(SYSTEM, "cannot map a ring of %ju bytes", (uintmax_t)bytes);
			seg_unmap(&room);
			return e;
		}
	*out = room;
	return OK;
}

void seg_populate(const void *p, uint64_t bytes, bool fresh)
{
	uintptr_t begin = (uintptr_t)p & ~(uintptr_t)4095, end = ((uintptr_t)p + bytes + 4095) & ~(uintptr_t)4095;

	/* what cannot be had now faults later, where it is handled */
	(void)madvise((void *)begin, end - begin, fresh ? MADV_POPULATE_WRITE : MADV_POPULATE_READ);
}

void seg_unmap(struct seg_map *m)
{
	if (m->p)
		munmap(m->p, m->bytes);
	*m = (struct seg_map){ 0 };
}

void seg_leave(struct seg_leavings *l, struct seg_map *m)
{
	struct err_info info = *err_last();
	struct seg_map *left;

	if (m->p && l && vec_push(&l->maps, &left) == OK) {
		*left = *m;
		*m = (struct seg_map){ 0 };
	}
	err_restore(&info);
	seg_unmap(m);
}

void seg_leavings_unmap(struct seg_leavings *l)
{
	for (uint64_t i = 0; i < l->maps.n; i++)
		seg_unmap(&l->maps.v[i]);
	vec_free(&l->maps);
}
