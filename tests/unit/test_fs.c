/* test_fs.c: nothing leaves the root, nothing is replaced by accident, errors have their codes. */
#include "lib/t.h"

#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/stat.h>

#include "base/mem.h"
#include "lib/t_dir.h"
#include "os/fs.h"

struct fixture {
	struct t_dir root;
	int fds_before;
};

static struct fixture fx;

static int setup(void **state)
{
	(void)state;
	fx.fds_before = t_count_fds();
	t_dir_make(&fx.root);
	return 0;
}

static int teardown(void **state)
{
	(void)state;
	t_dir_remove(&fx.root);
	assert_int_equal(t_count_fds(), fx.fds_before);
	return 0;
}

static void write_file(const char *path, const char *text)
{
	int fd;

	T_OK(fs_open(fx.root.fd, path, O_WRONLY | O_CREAT | O_EXCL, 0644, &fd));
	T_OK(fs_pwrite(fd, text, strlen(text), 0, path));
	T_OK(fs_fsync(fd, path));
	T_OK(fs_close(&fd));
	assert_int_equal(fd, -1);
}

static void assert_file(const char *path, const char *text)
{
	void *bytes;
	uint64_t n;

	T_OK(fs_read_all(fx.root.fd, path, 1000, &bytes, &n));
	assert_int_equal(n, strlen(text));
	assert_memory_equal(bytes, text, n);
	mem_free(bytes);
}

static void make_dir(const char *path)
{
	int fd;

	T_OK(fs_mkdirs(fx.root.fd, path, &fd));
	fs_drop(&fd);
}

static void test_nothing_leaves_the_root(void **state)
{
	static const char *const bad[] = { "../x", "..", "/etc/hostname", "a/../../x", "link", "link/hostname", "up/x",
					   "a/deep", "loop", "/" };
	struct stat st;
	int fd = -1;

	(void)state;
	make_dir("a");
	assert_int_equal(symlinkat("/etc", fx.root.fd, "link"), 0);
	assert_int_equal(symlinkat("..", fx.root.fd, "up"), 0);
	assert_int_equal(symlinkat("/etc/hostname", fx.root.fd, "a/deep"), 0);
	assert_int_equal(symlinkat("loop", fx.root.fd, "loop"), 0);
	for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
		T_ERR(NAME_INVALID, fs_open(fx.root.fd, bad[i], O_RDONLY, 0, &fd));
		T_ERR(NAME_INVALID, fs_open(fx.root.fd, bad[i], O_WRONLY | O_CREAT, 0600, &fd));
		assert_string_equal(err_last()->file, bad[i]);
	}
	T_ERR(NAME_INVALID, fs_open_dir(fx.root.fd, "link", &fd));
	T_ERR(NAME_INVALID, fs_mkdirs(fx.root.fd, "../x", &fd));
	T_ERR(NAME_INVALID, fs_mkdirs(fx.root.fd, "/x", &fd));
	T_ERR(NAME_INVALID, fs_mkdirs(fx.root.fd, "a//x", &fd));
	assert_int_not_equal(fs_mkdirs(fx.root.fd, "link/x", &fd), OK);
	T_ERR(NAME_INVALID, fs_mkdir(fx.root.fd, "link/x", 0700));
	T_ERR(NAME_INVALID, fs_mkdir(fx.root.fd, "..", 0700));
	T_ERR(NAME_INVALID, fs_rename(fx.root.fd, "a", fx.root.fd, "../a"));
	T_ERR(NAME_INVALID, fs_rename_noreplace(fx.root.fd, "a", "up/a"));
	T_ERR(NAME_INVALID, fs_unlink(fx.root.fd, "link/hostname"));
	T_ERR(NAME_INVALID, fs_remove_tree(fx.root.fd, "up/x"));
	T_ERR(NAME_INVALID, fs_remove_tree(fx.root.fd, ".."));
	T_ERR(NAME_INVALID, fs_stat(fx.root.fd, "link/hostname", &st));
	T_OK(fs_stat(fx.root.fd, "link", &st));
	assert_true(S_ISLNK(st.st_mode));
	assert_int_equal(fd, -1);
}

static void test_only_files_and_directories(void **state)
{
	int fd;

	(void)state;
	assert_int_equal(mkfifoat(fx.root.fd, "fifo", 0600), 0);
	T_ERR(NAME_INVALID, fs_open(fx.root.fd, "fifo", O_RDONLY, 0, &fd));
	assert_non_null(strstr(err_last()->text, "'fifo' is neither a file nor a directory"));
	T_ERR(NOT_FOUND, fs_open(fx.root.fd, "missing", O_RDONLY, 0, &fd));
	assert_non_null(strstr(err_last()->text, "cannot open 'missing': No such file"));
	assert_int_equal(err_last()->sys_errno, ENOENT);
	write_file("f", "x");
	T_ERR(CHECKPOINT_EXISTS, fs_open(fx.root.fd, "f", O_WRONLY | O_CREAT | O_EXCL, 0600, &fd));
	T_ERR(NOT_FOUND, fs_open_dir(fx.root.fd, "f", &fd));
	T_OK(fs_open(fx.root.fd, "f", O_RDONLY, 0, &fd));
	assert_int_equal(fcntl(fd, F_GETFL) & O_NONBLOCK, 0);
	assert_int_equal(fcntl(fd, F_GETFD), FD_CLOEXEC);
	fs_drop(&fd);
	T_ERR(STORAGE_GONE, fs_open_root("/no/such/root", &fd));
	assert_null(strstr(err_last()->text, "/no/such"));
}

static void test_directories(void **state)
{
	struct stat st;
	int fd;

	(void)state;
	T_OK(fs_mkdirs(fx.root.fd, "run1/a/b", &fd));
	T_OK(fs_mkdir(fd, "c", 0700));
	T_ERR(CHECKPOINT_EXISTS, fs_mkdir(fd, "c", 0700));
	fs_drop(&fd);
	T_OK(fs_stat(fx.root.fd, "run1/a/b/c", &st));
	assert_true(S_ISDIR(st.st_mode));
	T_OK(fs_mkdirs(fx.root.fd, "run1/a/b/c", &fd));
	fs_drop(&fd);
	T_OK(fs_mkdirs(fx.root.fd, "", &fd));
	fs_drop(&fd);
	write_file("file", "x");
	assert_int_not_equal(fs_mkdirs(fx.root.fd, "file/x", &fd), OK);
}

/* Beneath a root that says so, files and directories are as it says, whatever the calls ask for. */
static void test_access(void **state)
{
	mode_t before = umask(0);
	struct stat st;
	int root = -1, fd = -1;

	(void)state;
	T_OK(fs_open_root(fx.root.path, &root));
	fs_root_access(root, 0640, getegid());
	T_OK(fs_mkdirs(root, "a/b", &fd));
	fs_drop(&fd);
	T_OK(fs_mkdir(root, "a/b/c", 0700));
	T_OK(fs_open(root, "a/b/c/f", O_CREAT | O_WRONLY, 0666, &fd));
	fs_drop(&fd);
	T_OK(fs_stat(root, "a/b/c/f", &st));
	assert_int_equal(st.st_mode & 07777, 0640);
	for (size_t i = 0; i < 3; i++) {
		T_OK(fs_stat(root, ((const char *const[]){ "a", "a/b", "a/b/c" })[i], &st));
		assert_int_equal(st.st_mode & 0777, 0750);
	}
	fs_root_access(root, 0660, (gid_t)-1);
	T_OK(fs_mkdir(root, "d", 0700));
	T_OK(fs_stat(root, "d", &st));
	assert_int_equal(st.st_mode & 0777, 0770);
	fs_root_access(root, 0600, 12345); /* a group that only root may give files to */
	enum err e = fs_mkdir(root, "e", 0700);
	assert_true(geteuid() == 0 ? e == OK : e == ERR_FORBIDDEN);
	assert_true(geteuid() == 0 ? fs_stat(root, "e", &st) == OK && st.st_gid == 12345 : fs_stat(root, "e", &st) == ERR_NOT_FOUND);
	fs_drop(&root);
	umask(before);
}

/* Bytes count for the root that a descriptor was opened beneath, however deep; a number that is used again brings nothing along. */
static void test_counts(void **state)
{
	int other = -1, fd;
	char text[8];

	(void)state;
	T_OK(fs_open_root(fx.root.path, &other));
	make_dir("sub");
	(void)fs_count_take(other, true);
	T_OK(fs_open(other, "sub/f", O_RDWR | O_CREAT, 0644, &fd));
	T_OK(fs_pwrite(fd, "12345", 5, 0, "f"));
	T_OK(fs_pread(fd, text, 3, 1, "f"));
	fs_count(fd, false, 100);
	int was = fd;
	T_OK(fs_close(&fd));
	assert_int_equal(fs_count_take(other, true), 5);
	assert_int_equal(fs_count_take(other, false), 103);
	assert_int_equal(fs_count_take(other, false), 0);
	int memory = memfd_create("t", MFD_CLOEXEC);
	assert_int_equal(memory, was);
	T_OK(fs_pwrite(memory, "12345", 5, 0, "m"));
	assert_int_equal(fs_count_take(other, true), 0);
	fs_drop(&memory);
	fs_drop(&other);
}

static void test_rename(void **state)
{
	(void)state;
	make_dir("staging");
	make_dir("run/step-1");
	write_file("staging/f", "new");
	write_file("run/step-1/f", "old");
	T_ERR(CHECKPOINT_EXISTS, fs_rename_noreplace(fx.root.fd, "staging", "run/step-1"));
	assert_file("run/step-1/f", "old");
	T_OK(fs_exchange(fx.root.fd, "staging", "run/step-1"));
	assert_file("run/step-1/f", "new");
	assert_file("staging/f", "old");
	T_OK(fs_rename_noreplace(fx.root.fd, "staging", "run/step-2"));
	assert_file("run/step-2/f", "old");
	T_ERR(NOT_FOUND, fs_rename_noreplace(fx.root.fd, "staging", "run/step-3"));
	T_ERR(NOT_FOUND, fs_exchange(fx.root.fd, "nothing", "run/step-1"));
	write_file("tmp", "2");
	write_file("latest", "1");
	T_OK(fs_rename(fx.root.fd, "tmp", fx.root.fd, "latest"));
	assert_file("latest", "2");
}

static void test_read_and_write(void **state)
{
	void *bytes;
	uint64_t n;
	char text[8] = "";
	int fd;

	(void)state;
	write_file("f", "hello");
	T_ERR(LIMIT_EXCEEDED, fs_read_all(fx.root.fd, "f", 4, &bytes, &n));
	T_ERR(NOT_FOUND, fs_read_all(fx.root.fd, "g", 4, &bytes, &n));
	T_ERR(NAME_INVALID, fs_read_all(fx.root.fd, ".", 4, &bytes, &n));
	T_OK(fs_open(fx.root.fd, "f", O_RDONLY, 0, &fd));
	T_OK(fs_pread(fd, text, 3, 2, "f"));
	assert_string_equal(text, "llo");
	T_ERR(STORAGE_IO, fs_pread(fd, text, 4, 2, "f"));
	assert_false(fs_pread_cached(fd, text, 4, 2));
	assert_non_null(strstr(err_last()->text, "'f' ends at 5, 4 bytes at 2"));
	assert_int_equal(err_last()->offset, 5);
	T_ERR(SYSTEM, fs_pwrite(fd, text, 1, 0, "f"));
	fs_drop(&fd);
	write_file("empty", "");
	assert_file("empty", "");
	T_OK(fs_unlink(fx.root.fd, "f"));
	T_ERR(NOT_FOUND, fs_unlink(fx.root.fd, "f"));
}

struct seen {
	int files, dirs, links;
	int stop_after;
};

static enum err count_entry(void *user, const char *name, unsigned char type)
{
	struct seen *s = user;

	assert_true(strcmp(name, ".") != 0 && strcmp(name, "..") != 0);
	s->files += type == DT_REG;
	s->dirs += type == DT_DIR;
	s->links += type == DT_LNK;
	return --s->stop_after == 0 ? ERR(CANCELLED, "enough") : OK;
}

static void test_list(void **state)
{
	struct seen all = { 0 }, some = { .stop_after = 2 };

	(void)state;
	make_dir("d");
	write_file("a", "");
	write_file("b", "");
	assert_int_equal(symlinkat("a", fx.root.fd, "l"), 0);
	T_OK(fs_list(fx.root.fd, count_entry, &all));
	assert_true(all.files == 2 && all.dirs == 1 && all.links == 1);
	T_ERR(CANCELLED, fs_list(fx.root.fd, count_entry, &some));
	all = (struct seen){ 0 };
	T_OK(fs_list(fx.root.fd, count_entry, &all));
	assert_int_equal(all.files + all.dirs + all.links, 4);
}

static void test_remove_tree(void **state)
{
	struct t_dir other;
	struct stat st;
	char name[64];

	(void)state;
	t_dir_make(&other);
	assert_int_equal(mkdirat(other.fd, "precious", 0700), 0);
	make_dir("t/a/b/c/d");
	assert_int_equal(symlinkat(other.path, fx.root.fd, "t/a/out"), 0);
	for (int i = 0; i < 300; i++) {
		snprintf(name, sizeof name, "t/a/b/%d", i);
		write_file(name, "x");
	}
	T_OK(fs_remove_tree(fx.root.fd, "t"));
	T_ERR(NOT_FOUND, fs_stat(fx.root.fd, "t", &st));
	assert_int_equal(fstatat(other.fd, "precious", &st, 0), 0);
	T_OK(fs_remove_tree(fx.root.fd, "t"));
	T_OK(fs_remove_tree(fx.root.fd, "t/x"));
	write_file("file", "x");
	T_OK(fs_remove_tree(fx.root.fd, "file"));
	assert_int_equal(symlinkat(other.path, fx.root.fd, "l"), 0);
	T_OK(fs_remove_tree(fx.root.fd, "l"));
	assert_int_equal(fstatat(other.fd, "precious", &st, 0), 0);
	t_dir_remove(&other);
}

static void test_remove_tree_is_bounded(void **state)
{
	int fd = dup(fx.root.fd);
	struct stat st;

	(void)state;
	for (int i = 0; i < 80; i++) {
		assert_int_equal(mkdirat(fd, "d", 0700), 0);
		int next = openat(fd, "d", O_RDONLY | O_DIRECTORY);
		assert_true(next >= 0);
		close(fd);
		fd = next;
	}
	close(fd);
	T_ERR(LIMIT_EXCEEDED, fs_remove_tree(fx.root.fd, "d"));
	T_OK(fs_stat(fx.root.fd, "d", &st));
}

static void mount_small(const char *name, const char *options)
{
	char path[300];

	make_dir(name);
	snprintf(path, sizeof path, "%s/%s", fx.root.path, name);
	if (mount("tmpfs", path, "tmpfs", 0, options) < 0) {
		print_message("cannot mount: skipped\n");
		skip();
	}
}

static void unmount(const char *name)
{
	char path[300];

	snprintf(path, sizeof path, "%s/%s", fx.root.path, name);
	assert_int_equal(umount2(path, MNT_DETACH), 0);
}

static void test_full_disk(void **state)
{
	static char block[65536];
	uint64_t free_bytes, total;
	int fd, dir;
	enum err e = OK;

	(void)state;
	mount_small("small", "size=1m");
	T_OK(fs_open_dir(fx.root.fd, "small", &dir));
	T_OK(fs_free_bytes(dir, &free_bytes, &total));
	assert_int_equal(total, 1 << 20);
	T_OK(fs_open(dir, "f", O_RDWR | O_CREAT, 0600, &fd));
	T_ERR(STORAGE_FULL, fs_allocate(fd, 2 << 20, "f"));
	assert_string_equal(err_last()->file, "f");
	for (uint64_t at = 0; !e && at < 2 << 20; at += sizeof block)
		e = fs_pwrite(fd, block, sizeof block, at, "f");
	assert_int_equal(e, ERR_STORAGE_FULL);
	T_OK(fs_close(&fd));
	T_ERR(LIMIT_EXCEEDED, fs_allocate(dir, UINT64_MAX, "f"));
	fs_drop(&dir);
	unmount("small");
}

static void test_read_only_and_foreign_mounts(void **state)
{
	int fd, dir;
	struct stat st;
	char path[300];

	(void)state;
	mount_small("ro", "size=1m");
	T_OK(fs_open_dir(fx.root.fd, "ro", &dir));
	T_OK(fs_open(dir, "f", O_RDWR | O_CREAT, 0600, &fd));
	fs_drop(&fd);
	/* A mount inside a tree stops its removal, and keeps what it holds. */
	assert_int_not_equal(fs_remove_tree(fx.root.fd, "ro"), OK);
	T_OK(fs_stat(dir, "f", &st));
	snprintf(path, sizeof path, "%s/ro", fx.root.path);
	assert_int_equal(mount(NULL, path, NULL, MS_REMOUNT | MS_RDONLY, NULL), 0);
	T_ERR(STORAGE_READONLY, fs_open(dir, "g", O_RDWR | O_CREAT, 0600, &fd));
	T_ERR(STORAGE_READONLY, fs_mkdir(dir, "d", 0700));
	T_ERR(STORAGE_READONLY, fs_unlink(dir, "f"));
	T_ERR(STORAGE_READONLY, fs_rename_noreplace(dir, "f", "g"));
	fs_drop(&dir);
	unmount("ro");
}

static void test_one_holds_a_directory_at_a_time(void **state)
{
	int first = -1, second = -1;

	(void)state;
	T_OK(fs_lock(fx.root.fd, 0, &first));
	T_ERR(STORAGE_STALLED, fs_lock(fx.root.fd, 5, &second));
	assert_int_equal(second, -1);
	fs_drop(&first);
	T_OK(fs_lock(fx.root.fd, 0, &second));
	fs_drop(&second);
}

static void test_direct_probe(void **state)
{
	struct seen all = { 0 };
	int proc = open("/proc/self", O_RDONLY | O_DIRECTORY);

	(void)state;
	(void)fs_direct_ok(fx.root.fd);
	T_OK(fs_list(fx.root.fd, count_entry, &all));
	assert_int_equal(all.files, 0);
	assert_false(fs_direct_ok(proc));
	close(proc);
}

static void test_codes(void **state)
{
	(void)state;
	assert_int_equal(fs_error(EDQUOT), ERR_STORAGE_FULL);
	assert_int_equal(fs_error(ESTALE), ERR_STORAGE_GONE);
	assert_int_equal(fs_error(EIO), ERR_STORAGE_IO);
	assert_int_equal(fs_error(EACCES), ERR_FORBIDDEN);
	assert_int_equal(fs_error(EFAULT), ERR_SEGMENT_SHRUNK);
}

#define WITH_ROOT(fn) cmocka_unit_test_setup_teardown(fn, setup, teardown)

/* Files on tmpfs are read at once, though it knows no RWF_NOWAIT. */
/* A kernel that moves a page to make room for a huge one lets nobody read it for that moment. */
#define WHEN_AT_REST(what) ({ \
	int tries = 0; \
	while (!(what) && ++tries < 1000) \
		usleep(1000); \
	tries < 1000; \
})

static void test_cached(void **state)
{
	int fd = memfd_create("cached", MFD_CLOEXEC);
	char text[4] = "";

	(void)state;
	assert_true(fd >= 0 && fs_in_memory(fd));
	T_OK(fs_pwrite(fd, "abcdef", 6, 0, "m"));
	assert_true(fs_pread_cached(fd, text, 3, 2));
	assert_string_equal(text, "cde");
	assert_false(fs_pread_cached(fd, text, 3, 4));
	T_OK(fs_close(&fd));
	write_file("f", "abcdef"); /* its page is in the cache */
	T_OK(fs_open(fx.root.fd, "f", O_RDONLY, 0, &fd));
	assert_true(WHEN_AT_REST(fs_pread_cached(fd, text, 3, 1)));
	assert_string_equal(text, "bcd");
	T_OK(fs_close(&fd));
}

/* Cached pages can be mapped, from any byte to any; what is not cached, or lies behind the file's end, is left to a read. */
static void test_map_cached(void **state)
{
	static unsigned char bytes[20 * 4096];
	struct fs_window w;
	int fd;

	(void)state;
	for (size_t i = 0; i < sizeof bytes; i++)
		bytes[i] = (unsigned char)(i * 2654435761u >> 13);
	T_OK(fs_open(fx.root.fd, "f", O_RDWR | O_CREAT, 0600, &fd));
	T_OK(fs_pwrite(fd, bytes, sizeof bytes, 0, "f"));
	if (!fs_map_cached(fd, 0, sizeof bytes, &w)) {
		fs_drop(&fd);
		skip(); /* before Linux 6.5 */
	}
	fs_unmap_cached(&w);
	assert_null(w.map);
	for (uint64_t at = 1; at < sizeof bytes; at += 5555) {
		uint64_t n = (sizeof bytes - at) / (at % 3 + 1);
		assert_true(WHEN_AT_REST(fs_map_cached(fd, at, n, &w)));
		assert_memory_equal(w.p, bytes + at, n);
		fs_unmap_cached(&w);
	}
	assert_false(fs_map_cached(fd, 0, 0, &w));
	assert_false(fs_map_cached(fd, 1, sizeof bytes, &w));
	assert_false(fs_map_cached(fd, UINT64_MAX - 1, 4096, &w));
	assert_false(fs_map_cached(fd, 4096, UINT64_MAX, &w));
	assert_int_equal(fsync(fd), 0);
	assert_int_equal(posix_fadvise(fd, 8 * 4096, 4096, POSIX_FADV_DONTNEED), 0);
	if (fs_cached(fd, 8 * 4096, 4096) == FS_NOT_CACHED) { /* else on tmpfs */
		assert_false(fs_map_cached(fd, 0, sizeof bytes, &w));
		assert_false(fs_map_cached(fd, 8 * 4096 + 4095, 1, &w));
		assert_true(WHEN_AT_REST(fs_map_cached(fd, 0, 8 * 4096, &w)));
		fs_unmap_cached(&w);
		assert_int_equal(fs_cached(fd, 0, 8 * 4096), FS_CACHED);
		assert_int_equal(fs_cached(fd, 0, 8 * 4096 + 1), FS_NOT_CACHED);
		assert_int_equal(fs_cached(fd, 8 * 4096, 4096), FS_NOT_CACHED); /* nobody has read it by asking */
		assert_int_equal(fs_cached(fd, 9 * 4096, 100), FS_CACHED);
	}
	assert_int_equal(fs_cached(fd, 0, 0), FS_CACHED_UNKNOWN);
	assert_int_equal(fs_cached(fd, UINT64_MAX, 1), FS_CACHED_UNKNOWN);
	assert_int_equal(fs_cached(-1, 0, 1), FS_CACHED_UNKNOWN);
	T_OK(fs_close(&fd));
	T_OK(fs_unlink(fx.root.fd, "f"));
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		WITH_ROOT(test_nothing_leaves_the_root),
		WITH_ROOT(test_only_files_and_directories),
		WITH_ROOT(test_directories),
		WITH_ROOT(test_counts), WITH_ROOT(test_access),
		WITH_ROOT(test_rename),
		WITH_ROOT(test_read_and_write), WITH_ROOT(test_cached), WITH_ROOT(test_map_cached),
		WITH_ROOT(test_list),
		WITH_ROOT(test_remove_tree),
		WITH_ROOT(test_remove_tree_is_bounded),
		WITH_ROOT(test_full_disk),
		WITH_ROOT(test_read_only_and_foreign_mounts),
		WITH_ROOT(test_direct_probe), WITH_ROOT(test_one_holds_a_directory_at_a_time),
		cmocka_unit_test(test_codes),
	};

	return cmocka_run_group_tests_name("fs", tests, NULL, NULL);
}
