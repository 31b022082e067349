/* test_seg.c: segments cannot be squatted, others get in by the ACL only, and a shrunk one is an error, not a crash. */
#include "lib/t.h"

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "os/seg.h"

enum { PAGE = 4096, HUGE = 2 << 20 };

static const struct seg_owner nobody;

struct touch {
	volatile unsigned char *p;
	size_t bytes;
	unsigned sum;
};

static void touch_all(void *user)
{
	struct touch *t = user;

	for (size_t i = 0; i < t->bytes; i += PAGE)
		t->sum += t->p[i];
}

static void test_create_and_open(void **state)
{
	char name[SEG_NAME_MAX], second[SEG_NAME_MAX];
	int fd, again, other;
	struct stat st;

	(void)state;
	T_OK(seg_create(&nobody, 3 * PAGE, name, &fd));
	T_OK(seg_create(&nobody, PAGE, second, &other));
	assert_int_equal(strlen(name), SEG_NAME_MAX - 1);
	assert_string_not_equal(name, second);
	assert_int_equal(fstat(fd, &st), 0);
	assert_int_equal(st.st_mode & 07777, 0600);
	assert_int_equal(st.st_blocks, 0);
	T_OK(seg_allocate(fd, PAGE, 2 * PAGE));
	assert_int_equal(fstat(fd, &st), 0);
	assert_int_equal(st.st_blocks, 2 * PAGE / 512);
	assert_int_equal(st.st_size, 3 * PAGE);
	T_OK(seg_open(name, 3 * PAGE, &again));
	close(again);
	T_ERR(SEGMENT_SHRUNK, seg_open(name, 4 * PAGE, &again));
	T_OK(seg_unlink(name));
	T_OK(seg_unlink(name));
	T_OK(seg_unlink(second));
	T_ERR(SEGMENT_GONE, seg_open(name, 3 * PAGE, &again));
	close(fd);
	close(other);
}

/* KiB of the mapping at p that are mapped by huge pages. */
static unsigned long huge_kib(const unsigned char *p)
{
	FILE *f = fopen("/proc/self/smaps", "r");
	char line[512];
	unsigned long begin, end, kib = 0;
	bool here = false;

	assert_non_null(f);
	while (fgets(line, sizeof line, f)) {
		if (sscanf(line, "%lx-%lx ", &begin, &end) == 2)
			here = begin == (uintptr_t)p;
		else if (here && sscanf(line, "ShmemPmdMapped: %lu kB", &kib) == 1)
			break;
	}
	(void)fclose(f);
	return kib;
}

/* Does this host give huge pages to whoever asks for them? */
static bool host_has_huge_pages(void)
{
	char name[SEG_NAME_MAX];
	struct seg_map m;
	int fd;

	T_OK(seg_create(&nobody, 2 * HUGE, name, &fd));
	T_OK(seg_unlink(name));
	T_OK(seg_map(fd, 2 * HUGE, true, &m));
	memset(m.p, 1, m.bytes);
	unsigned char *whole = m.p + (-(uintptr_t)m.p & (HUGE - 1));
	bool has = madvise(whole, HUGE, 25 /* MADV_COLLAPSE */) == 0;
	seg_unmap(&m);
	close(fd);
	return has;
}

/* Allocates exactly what was asked for, as huge pages where they fit; a shrunk segment ends in an error as ever. */
static void test_huge(void **state)
{
	static const uint64_t ranges[][2] = { { 0, 8 * HUGE }, { 0, 5 * HUGE + PAGE }, { HUGE + PAGE, 4 * HUGE }, { PAGE, HUGE } };

	(void)state;
	if (!host_has_huge_pages())
		skip();
	for (size_t i = 0; i < sizeof ranges / sizeof *ranges; i++) {
		uint64_t at = ranges[i][0], bytes = ranges[i][1], first = (at + HUGE - 1) / HUGE, last = (at + bytes) / HUGE;
		char name[SEG_NAME_MAX];
		struct seg_map m;
		struct stat st;
		int fd;
		T_OK(seg_create(&nobody, 8 * HUGE, name, &fd));
		T_OK(seg_unlink(name));
		T_OK(seg_allocate(fd, at, bytes));
		assert_int_equal(fstat(fd, &st), 0);
		assert_int_equal(st.st_blocks, bytes / 512);
		assert_int_equal(st.st_size, 8 * HUGE);
		T_OK(seg_map(fd, 8 * HUGE, true, &m));
		assert_int_equal((uintptr_t)m.p % HUGE, 0);
		seg_populate(m.p + at, bytes, false);
		assert_int_equal(huge_kib(m.p), last > first ? (last - first) * HUGE / 1024 : 0);
		struct touch t = { m.p, m.bytes, 0 };
		T_OK(seg_guard(touch_all, &t));
		assert_int_equal(t.sum, 0); /* new memory holds nobody's bytes */
		assert_int_equal(ftruncate(fd, HUGE / 2), 0);
		T_ERR(SEGMENT_SHRUNK, seg_guard(touch_all, &t));
		seg_unmap(&m);
		close(fd);
	}
}

static void test_owner(void **state)
{
	struct seg_owner owner = { .place = 0xab12, .journal = UINT64_MAX }, found;
	char name[SEG_NAME_MAX];
	int fd;

	(void)state;
	T_OK(seg_create(&owner, PAGE, name, &fd));
	assert_int_equal(strncmp(name, "/dcpd-00000000ab12ffffffffffff-", 31), 0);
	assert_true(seg_owner_of(name, &found));
	assert_int_equal(found.place, 0xab12);
	assert_int_equal(found.journal, SEG_OWNER_BITS);
	T_OK(seg_unlink(name));
	close(fd);
	static const char *const none[] = { "", "/", "/dcpd-", "/dcpd-0123456789abcdef0123456789abcdef",
					    "/dcpd-00000000ab12ffffffffffff-0123456789abcdef0123456789abcde",
					    "/dcpd-00000000ab12ffffffffffff-0123456789abcdef0123456789abcdef0",
					    "/dcpd-00000000ab12fffffffffff-0123456789abcdef0123456789abcdef",
					    "/dcpd-00000000AB12ffffffffffff-0123456789abcdef0123456789abcdef",
					    "/dcpx-00000000ab12ffffffffffff-0123456789abcdef0123456789abcdef" };
	for (size_t i = 0; i < sizeof none / sizeof *none; i++)
		assert_false(seg_owner_of(none[i], &found));
}

static void test_shortage(void **state)
{
	char name[SEG_NAME_MAX];
	int fd;

	(void)state;
	T_OK(seg_create(&nobody, PAGE, name, &fd));
	T_ERR(SHM_EXHAUSTED, seg_allocate(fd, 0, 1ull << 50));
	T_ERR(LIMIT_EXCEEDED, seg_allocate(fd, INT64_MAX, PAGE));
	T_ERR(LIMIT_EXCEEDED, seg_create(&nobody, UINT64_MAX, name, &fd));
	T_OK(seg_unlink(name));
	close(fd);
}

/* An object that another process put under a segment's name is refused: wrong mode, a second link, another owner, a link, odd names. */
static void test_squatting(void **state)
{
	static const char squat[] = "/dcpd-00000000000000000000000000000001";
	int fd, got;

	(void)state;
	(void)shm_unlink(squat);
	fd = shm_open(squat, O_RDWR | O_CREAT | O_EXCL, 0600);
	assert_true(fd >= 0);
	assert_int_equal(ftruncate(fd, PAGE), 0);
	T_OK(seg_open(squat, PAGE, &got));
	close(got);
	assert_int_equal(fchmod(fd, 0644), 0);
	T_ERR(FORBIDDEN, seg_open(squat, PAGE, &got));
	assert_int_equal(fchmod(fd, 0660), 0);
	T_ERR(FORBIDDEN, seg_open(squat, PAGE, &got));
	assert_int_equal(fchmod(fd, 0600), 0);
	assert_int_equal(link("/dev/shm/dcpd-00000000000000000000000000000001", "/dev/shm/dcpd-second"), 0);
	T_ERR(FORBIDDEN, seg_open(squat, PAGE, &got));
	assert_int_equal(unlink("/dev/shm/dcpd-second"), 0);
	if (geteuid() == 0) {
		assert_int_equal(fchown(fd, 65534, 65534), 0);
		T_ERR(FORBIDDEN, seg_open(squat, PAGE, &got));
	}
	close(fd);
	T_OK(seg_unlink(squat));
	assert_int_equal(symlink("/etc/hostname", "/dev/shm/dcpd-00000000000000000000000000000001"), 0);
	T_ERR(FORBIDDEN, seg_open(squat, 0, &got));
	T_OK(seg_unlink(squat));
	T_ERR(NAME_INVALID, seg_open("/dcpd-../../etc/passwd", 0, &got));
	T_ERR(NAME_INVALID, seg_open("/other", 0, &got));
	T_ERR(NAME_INVALID, seg_unlink("/other"));
}

/* Exit code: 0 read and write, 1 refused. */
static int open_as(uid_t uid, const char *name)
{
	int status;
	pid_t pid = fork();

	if (pid == 0) {
		if (setgid(65000) < 0 || setuid(uid) < 0)
			_exit(2);
		_exit(shm_open(name, O_RDWR, 0) >= 0 ? 0 : 1);
	}
	assert_int_equal(waitpid(pid, &status, 0), pid);
	assert_true(WIFEXITED(status));
	return WEXITSTATUS(status);
}

static void test_grant(void **state)
{
	char name[SEG_NAME_MAX];
	int fd, again;

	(void)state;
	if (geteuid() != 0)
		skip();
	T_OK(seg_create(&nobody, PAGE, name, &fd));
	assert_int_equal(open_as(12345, name), 1);
	T_OK(seg_grant(fd, 12345));
	T_OK(seg_grant(fd, geteuid()));
	assert_int_equal(open_as(12345, name), 0);
	assert_int_equal(open_as(12346, name), 1);
	T_OK(seg_open(name, PAGE, &again));
	close(again);
	T_OK(seg_unlink(name));
	close(fd);
}

struct listed {
	const char *want[2];
	int found;
};

static void note(void *user, const char *name, uint64_t bytes)
{
	struct listed *l = user;

	for (int i = 0; i < 2; i++)
		if (strcmp(name, l->want[i]) == 0 && bytes == (uint64_t)(i + 1) * PAGE)
			l->found++;
}

static void test_list(void **state)
{
	char a[SEG_NAME_MAX], b[SEG_NAME_MAX];
	struct listed l = { { a, b }, 0 };
	int fa, fb;

	(void)state;
	T_OK(seg_create(&nobody, PAGE, a, &fa));
	T_OK(seg_create(&nobody, 2 * PAGE, b, &fb));
	T_OK(seg_list(note, &l));
	assert_int_equal(l.found, 2);
	T_OK(seg_unlink(a));
	T_OK(seg_unlink(b));
	l.found = 0;
	T_OK(seg_list(note, &l));
	assert_int_equal(l.found, 0);
	close(fa);
	close(fb);
}

static void shrink_and_touch(void)
{
	char name[SEG_NAME_MAX];
	struct seg_map m;
	int fd;

	T_OK(seg_create(&nobody, 8 * PAGE, name, &fd));
	T_OK(seg_unlink(name));
	T_OK(seg_map(fd, 8 * PAGE, true, &m));
	memset(m.p, 1, m.bytes);
	struct touch t = { m.p, m.bytes, 0 };
	T_OK(seg_guard(touch_all, &t));
	assert_int_equal(t.sum, 8);
	assert_int_equal(ftruncate(fd, 3 * PAGE), 0);
	T_ERR(SEGMENT_SHRUNK, seg_guard(touch_all, &t));
	T_ERR(SEGMENT_SHRUNK, seg_guard(touch_all, &t));
	t.bytes = 3 * PAGE;
	t.sum = 0;
	T_OK(seg_guard(touch_all, &t));
	assert_int_equal(t.sum, 3);
	seg_unmap(&m);
	assert_null(m.p);
	T_ERR(SEGMENT_SHRUNK, seg_map(fd, 8 * PAGE, false, &m));
	T_OK(seg_map(fd, 0, false, &m));
	seg_unmap(&m);
	close(fd);
}

static void test_shrunk(void **state)
{
	(void)state;
	shrink_and_touch();
}

struct nested {
	struct touch *first, *gone, *last;
	enum err inner;
};

static void touch_in_turn(void *user)
{
	struct nested *n = user;

	touch_all(n->first);
	n->inner = seg_guard(touch_all, n->gone);
	touch_all(n->last);
}

/* The inner guard takes what it covers, and leaves the outer one as it was. */
static void test_nested_guards(void **state)
{
	char name[SEG_NAME_MAX];
	struct seg_map m;
	int fd;

	(void)state;
	T_OK(seg_create(&nobody, 4 * PAGE, name, &fd));
	T_OK(seg_unlink(name));
	T_OK(seg_map(fd, 4 * PAGE, true, &m));
	memset(m.p, 1, m.bytes);
	assert_int_equal(ftruncate(fd, 2 * PAGE), 0);
	struct touch there = { m.p, PAGE, 0 }, behind = { m.p + PAGE, PAGE, 0 }, gone = { m.p, 4 * PAGE, 0 };
	struct nested fine = { &there, &behind, &there, OK }, inside = { &there, &gone, &behind, OK },
		      outside = { &there, &gone, &gone, OK };
	T_OK(seg_guard(touch_in_turn, &fine));
	T_OK(fine.inner);
	T_OK(seg_guard(touch_in_turn, &inside));
	T_ERR(SEGMENT_SHRUNK, inside.inner);
	assert_int_equal(behind.sum, 2);
	T_ERR(SEGMENT_SHRUNK, seg_guard(touch_in_turn, &outside));
	T_ERR(SEGMENT_SHRUNK, outside.inner);
	T_OK(seg_guard(touch_all, &there));
	seg_unmap(&m);
	close(fd);
}

/* Whoever leaves a mapping has it no more; the pages go with the last one. */
static void test_leavings(void **state)
{
	struct seg_leavings left = { 0 };
	char name[SEG_NAME_MAX];
	struct seg_map m;
	unsigned char here;
	int fd;

	(void)state;
	T_OK(seg_create(&nobody, PAGE, name, &fd));
	T_OK(seg_unlink(name));
	for (int i = 0; i < 3; i++) {
		T_OK(seg_map(fd, PAGE, false, &m));
		unsigned char *p = m.p;
		seg_leave(i ? &left : NULL, &m);
		assert_null(m.p);
		assert_int_equal(mincore(p, PAGE, &here), i ? 0 : -1);
	}
	seg_leave(&left, &m); /* none */
	assert_int_equal(left.maps.n, 2);
	unsigned char *p = left.maps.v[1].p;
	seg_leavings_unmap(&left);
	assert_int_equal(left.maps.n, 0);
	assert_int_equal(mincore(p, PAGE, &here), -1);
	close(fd);
}

/* Another library put its handler in after ours. */
static void test_guard_survives_other_handlers(void **state)
{
	struct sigaction old;

	(void)state;
	signal(SIGBUS, SIG_DFL);
	shrink_and_touch();
	sigaction(SIGBUS, NULL, &old);
	signal(SIGBUS, SIG_IGN);
	shrink_and_touch();
	sigaction(SIGBUS, &old, NULL);
}

static volatile int failures;

static void *many_shrunk(void *arg)
{
	struct touch *t = arg;

	for (int i = 0; i < 200; i++)
		if (seg_guard(touch_all, t) != ERR_SEGMENT_SHRUNK)
			__atomic_fetch_add(&failures, 1, __ATOMIC_RELAXED);
	return NULL;
}

static void test_threads(void **state)
{
	char name[SEG_NAME_MAX];
	struct seg_map m;
	pthread_t threads[4];
	struct touch t[4];
	int fd;

	(void)state;
	T_OK(seg_create(&nobody, 2 * PAGE, name, &fd));
	T_OK(seg_unlink(name));
	T_OK(seg_map(fd, 2 * PAGE, false, &m));
	assert_int_equal(ftruncate(fd, 0), 0);
	for (int i = 0; i < 4; i++) {
		t[i] = (struct touch){ m.p, m.bytes, 0 };
		assert_int_equal(pthread_create(&threads[i], NULL, many_shrunk, &t[i]), 0);
	}
	for (int i = 0; i < 4; i++)
		pthread_join(threads[i], NULL);
	assert_int_equal(failures, 0);
	seg_unmap(&m);
	close(fd);
}

/* Outside of a guard SIGBUS ends the process as ever, whether it was a bad access or sent. */
static void test_unguarded(void **state)
{
	(void)state;
	for (int sent = 0; sent < 2; sent++) {
		int status;
		pid_t pid = fork();
		if (pid == 0) {
			char name[SEG_NAME_MAX];
			struct seg_map m;
			int fd;
			struct touch t = { 0 };
			signal(SIGBUS, SIG_DFL);
			if (seg_guard(touch_all, &t) || seg_create(&nobody, PAGE, name, &fd) || seg_unlink(name) ||
			    seg_map(fd, PAGE, false, &m) || ftruncate(fd, 0) < 0)
				_exit(1);
			t = (struct touch){ m.p, PAGE, 0 };
			if (sent)
				raise(SIGBUS);
			else
				touch_all(&t);
			_exit(0);
		}
		assert_int_equal(waitpid(pid, &status, 0), pid);
		assert_true(WIFSIGNALED(status));
		assert_int_equal(WTERMSIG(status), SIGBUS);
	}
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_create_and_open), cmocka_unit_test(test_huge), cmocka_unit_test(test_owner),
		cmocka_unit_test(test_shortage),
		cmocka_unit_test(test_squatting),
		cmocka_unit_test(test_grant),
		cmocka_unit_test(test_list),
		cmocka_unit_test(test_shrunk), cmocka_unit_test(test_nested_guards),
		cmocka_unit_test(test_leavings),
		cmocka_unit_test(test_guard_survives_other_handlers),
		cmocka_unit_test(test_threads),
		cmocka_unit_test(test_unguarded),
	};
	return cmocka_run_group_tests_name("seg", tests, NULL, NULL);
}
