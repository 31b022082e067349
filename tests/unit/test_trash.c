/* Removal behind the job's back: it proceeds bit by bit where it can, and a reader of the removed checkpoint loses no byte. */
#include "lib/t_worker.h"

#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/wait.h>
#include <time.h>

#include "store/commit.h"
#include "store/trash.h"

enum { MIB = 1 << 20, LARGE = 40 * MIB };

T_WORKER_EACH(t);
static uint64_t asked;                 /* removals */

static unsigned char at(uint64_t i) { return (unsigned char)(i * 7 / 4096 + i); }

static void fill_file(int dirfd, const char *name, uint64_t bytes)
{
	unsigned char *p = mem_alloc(bytes);
	int fd;

	assert_non_null(p);
	for (uint64_t i = 0; i < bytes; i++)
		p[i] = at(i);
	T_OK(fs_open(dirfd, name, O_CREAT | O_RDWR, 0600, &fd));
	T_OK(fs_pwrite(fd, p, bytes, 0, name));
	T_OK(fs_fsync(fd, name));
	fs_drop(&fd);
	mem_free(p);
}

static void make_dir(const char *name, int files, uint64_t bytes)
{
	char path[64];

	T_OK(fs_mkdir(t.dir.fd, name, 0700));
	for (int i = 0; i < files; i++) {
		snprintf(path, sizeof path, "%s/%d", name, i);
		fill_file(t.dir.fd, path, bytes);
	}
}

static void nap(void) { nanosleep(&(struct timespec){ .tv_nsec = 2000000 }, NULL); }

static bool at_once; /* it was gone when trash_remove returned */

static struct trash_stats remove_and_wait(int dirfd, const char *name)
{
	struct trash_stats before = trash_stats(), now = before;
	struct stat st;

	T_OK(trash_remove(dirfd, name));
	at_once = fstatat(dirfd, name, &st, AT_SYMLINK_NOFOLLOW) < 0 && trash_ms() == 0;
	asked++;
	for (int i = 0; i < T_HUNG_MS / 2 && now.removals < asked; i++, now = trash_stats())
		nap();
	assert_int_equal(now.removals, asked);
	assert_int_equal(now.held, 0);
	T_ERR(NOT_FOUND, fs_stat(dirfd, name, &st));
	now.steps -= before.steps;
	now.rests -= before.rests;
	return now;
}

/* On the disk of the tests, as it is: not of a known kind, or nearly full? */
static void need_gentleness(void)
{
	uint64_t free_bytes, total;

	T_OK(fs_free_bytes(t.dir.fd, &free_bytes, &total));
	if (!fs_is_local(t.dir.fd) || trash_is_short(free_bytes, total, 2 * (uint64_t)LARGE)) {
		print_message("a file system that nothing is removed gently from: skipped\n");
		skip();
	}
}

static void test_goes_bit_by_bit(void **state)
{
	(void)state;
	int fds = t_count_fds();
	need_gentleness();
	make_dir("x", 2, LARGE);
	T_OK(fs_mkdir(t.dir.fd, "x/deeper", 0700));
	fill_file(t.dir.fd, "x/deeper/large", LARGE);
	fill_file(t.dir.fd, "x/small", 100);
	struct trash_stats s = remove_and_wait(t.dir.fd, "x");
	assert_int_equal(s.steps, 3 * (LARGE / (8 * MIB) - 1));
	assert_true(s.rests > 0);
	assert_int_equal(t_count_fds(), fds);
	fill_file(t.dir.fd, "file", LARGE); /* a checkpoint may be one */
	assert_true(remove_and_wait(t.dir.fd, "file").steps > 0);
	assert_int_equal(remove_and_wait(t.dir.fd, "nothing").steps, 0);
	assert_int_equal(t_count_fds(), fds);
}

static void check_bytes(const unsigned char *p, uint64_t n)
{
	for (uint64_t i = 0; i < n; i++)
		if (p[i] != at(i))
			T_FAIL("byte %ju is another one", (uintmax_t)i);
}

static void check_file(int fd)
{
	unsigned char *p = mem_alloc(LARGE);

	assert_non_null(p);
	T_OK(fs_pread(fd, p, LARGE, 0, "a reader's"));
	check_bytes(p, LARGE);
	mem_free(p);
}

static void test_readers_keep_it(void **state)
{
	int open_one, mapped_one, linked_one;

	(void)state;
	make_dir("x", 4, LARGE);
	T_OK(fs_open(t.dir.fd, "x/0", O_RDONLY, 0, &open_one));
	T_OK(fs_open(t.dir.fd, "x/1", O_RDONLY, 0, &mapped_one));
	unsigned char *p = mmap(NULL, LARGE, PROT_READ, MAP_SHARED, mapped_one, 0);
	assert_true(p != MAP_FAILED);
	fs_drop(&mapped_one); /* the mapping alone holds it */
	assert_int_equal(linkat(t.dir.fd, "x/2", t.dir.fd, "kept", 0), 0);
	struct trash_stats s = remove_and_wait(t.dir.fd, "x");
	assert_true(s.steps <= LARGE / (8 * MIB) - 1); /* of the fourth, if of any */
	check_file(open_one);
	check_bytes(p, LARGE);
	munmap(p, LARGE);
	fs_drop(&open_one);
	T_OK(fs_open(t.dir.fd, "kept", O_RDONLY, 0, &linked_one));
	check_file(linked_one);
	fs_drop(&linked_one);
}

static void test_sole(void **state)
{
	int fd, other;

	(void)state;
	need_gentleness();
	fill_file(t.dir.fd, "f", 100);
	T_OK(fs_open(t.dir.fd, "f", O_WRONLY, 0, &fd));
	assert_false(fs_is_sole(fd)); /* it has a name */
	T_OK(fs_open(t.dir.fd, "f", O_RDONLY, 0, &other));
	T_OK(fs_unlink(t.dir.fd, "f"));
	assert_false(fs_is_sole(fd));
	fs_drop(&other);
	assert_true(fs_is_sole(fd));
	assert_int_equal(fcntl(fd, F_GETLEASE), F_UNLCK); /* nobody who opens it has to wait for us */
	fs_drop(&fd);
}

/* A lease that is broken sends SIGIO, which ends a process that does nothing about it. */
static void test_signal_of_a_lease(void **state)
{
	(void)state;
	remove_and_wait(t.dir.fd, "nothing");
	assert_int_equal(kill(getpid(), SIGIO), 0);
}

static void test_when_space_is_short(void **state)
{
	const uint64_t gib = 1 << 30;

	(void)state;
	assert_false(trash_is_short(50 * gib, 100 * gib, gib));
	assert_true(trash_is_short(50 * gib, 100 * gib, 26 * gib));
	assert_false(trash_is_short(50 * gib, 100 * gib, 24 * gib));
	assert_true(trash_is_short(4 * gib, 100 * gib, 0));
	assert_true(trash_is_short(0, 0, 1));
	assert_true(trash_is_short(UINT64_MAX, UINT64_MAX, UINT64_MAX));
}

static uint64_t steps_on(const char *options)
{
	char path[300];
	int dir;

	T_OK(fs_mkdir(t.dir.fd, "small", 0700));
	snprintf(path, sizeof path, "%s/small", t.dir.path);
	if (mount("tmpfs", path, "tmpfs", 0, options) < 0) {
		print_message("cannot mount: skipped\n");
		skip();
	}
	T_OK(fs_open_dir(t.dir.fd, "small", &dir));
	fill_file(dir, "f", LARGE);
	uint64_t n = remove_and_wait(dir, "f").steps;
	fs_drop(&dir);
	assert_int_equal(umount2(path, MNT_DETACH), 0);
	T_OK(fs_remove_tree(t.dir.fd, "small"));
	return n;
}

static void test_full_disk_gets_it_back_at_once(void **state)
{
	(void)state;
	assert_int_equal(steps_on("size=64m"), 0);
	assert_true(at_once); /* whoever is told of it finds the space */
	assert_true(steps_on("size=400m") > 0);
}

/* It dies while the first of many files shrinks: the others are still there, and the next sweep takes them. */
static void test_killed_in_the_middle(void **state)
{
	struct commit_keep keep = { .before = NULL };
	struct store_swept swept;
	int status;

	(void)state;
	need_gentleness();
	make_dir(".dcpd-trash-01A", 6, LARGE);
	pid_t pid = fork();
	assert_true(pid >= 0);
	if (pid == 0) {
		uint64_t steps = trash_stats().steps;
		alarm(T_HUNG_MS / 1000);
		if (trash_remove(t.dir.fd, ".dcpd-trash-01A"))
			_exit(1);
		while (trash_stats().steps == steps)
			nap();
		raise(SIGKILL);
	}
	assert_int_equal(waitpid(pid, &status, 0), pid);
	assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
	int left = t_worker_entries(&t, ".dcpd-trash-01A");
	assert_true(left > 0 && left < 6);
	T_OK(posix_ops.sweep(&t.w.stores.v[0], &keep, NULL, NULL, &swept));
	assert_int_equal(swept.removed, 1);
	assert_false(t_worker_has(&t, ".dcpd-trash-01A"));
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test_setup_teardown(test_goes_bit_by_bit, setup, teardown),
		cmocka_unit_test_setup_teardown(test_readers_keep_it, setup, teardown),
		cmocka_unit_test_setup_teardown(test_sole, setup, teardown),
		cmocka_unit_test_setup_teardown(test_signal_of_a_lease, setup, teardown),
		cmocka_unit_test_setup_teardown(test_when_space_is_short, setup, teardown),
		cmocka_unit_test_setup_teardown(test_full_disk_gets_it_back_at_once, setup, teardown),
		cmocka_unit_test_setup_teardown(test_killed_in_the_middle, setup, teardown),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
