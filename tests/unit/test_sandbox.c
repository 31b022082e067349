/* test_sandbox.c: each probe runs in a process of its own, which enters the sandbox first. All of them run on this host as it is, as if it
 * had no Landlock (as root, and as a user), and as if it had neither Landlock nor namespaces. */
#include "lib/t.h"

#include <fcntl.h>
#include <grp.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>

#include <seccomp.h>
#include <net/if.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/ioctl.h>

#include "base/mem.h"
#include "comm/comm.h"
#include "ctl/frame.h"
#include "io/engine.h"
#include "lib/t_comm.h"
#include "lib/t_dir.h"
#include "os/fs.h"
#include "os/mount_ns.h"
#include "os/sandbox.h"
#include "os/seg.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { SANITIZED = 1 };
#else
enum { SANITIZED = 0 };
#endif

static struct {
	struct t_dir writable, readable, outside;
	char secret[300];              /* path of a file outside */
	const char *without;           /* system calls that the host denies: "landlock_create_ruleset,unshare" */
	uid_t uid;                     /* of the process; 0: as it is */
} fx;

static int setup(void **state)
{
	(void)state;
	t_dir_make(&fx.writable);
	t_dir_make(&fx.readable);
	t_dir_make(&fx.outside);
	int fd = openat(fx.readable.fd, "f", O_CREAT | O_WRONLY, 0600);
	int sub = openat(fx.outside.fd, "secret", O_CREAT | O_WRONLY, 0600);
	snprintf(fx.secret, sizeof fx.secret, "%s/secret", fx.outside.path);
	if (fchmod(fx.writable.fd, 0777) < 0 || fchmod(fx.outside.fd, 0777) < 0 || fchmod(fx.readable.fd, 0777) < 0 || fchmod(fd, 0644) < 0)
		return 1;
	return fd < 0 || sub < 0 || write(fd, "hello", 5) != 5 || close(fd) < 0 || close(sub) < 0;
}

static int teardown(void **state)
{
	(void)state;
	t_dir_remove(&fx.writable);
	t_dir_remove(&fx.readable);
	t_dir_remove(&fx.outside);
	return 0;
}

static struct sandbox_done entered;

/* Another host, in the child: as root of a container whose seccomp profile denies calls, or as a user without capabilities. */
static void be_elsewhere(void)
{
	char names[128], *rest = names;

	/* A change of the uid takes /proc/self away, which a new program would get back. */
	if (fx.uid && (setgroups(0, NULL) < 0 || setresgid(fx.uid, fx.uid, fx.uid) < 0 || setresuid(fx.uid, fx.uid, fx.uid) < 0 ||
		       prctl(PR_SET_DUMPABLE, 1) < 0))
		_exit(101);
	if (!fx.without)
		return;
	snprintf(names, sizeof names, "%s", fx.without);
	scmp_filter_ctx ctx = seccomp_init(SCMP_ACT_ALLOW);
	for (char *name; (name = strsep(&rest, ",")) != NULL;)
		if (seccomp_rule_add(ctx, SCMP_ACT_ERRNO(EPERM), seccomp_syscall_resolve_name(name), 0) < 0)
			_exit(102);
	if (seccomp_load(ctx) < 0)
		_exit(103);
	seccomp_release(ctx);
}

/* In the child. The numbers are exit codes that tell which step failed. */
static void enter(void)
{
	const struct sandbox_root roots[] = { { fx.writable.fd, true, fx.writable.path }, { fx.readable.fd, false, fx.readable.path } };
	const struct sandbox_spec spec = { .roots = roots, .root_count = 2 };

	be_elsewhere();
	if (sandbox_enter(&spec, &entered))
		_exit(100);
}

/* The wait status of `probe` run in a child. */
static int status_of(int (*probe)(void))
{
	int status;

	fflush(NULL);
	pid_t pid = fork();
	if (pid == 0)
		_exit(probe());
	assert_int_equal(waitpid(pid, &status, 0), pid);
	return status;
}

static void expect(const char *what, int (*probe)(void))
{
	int status = status_of(probe);

	if (!WIFEXITED(status) || WEXITSTATUS(status) != 0)
		T_FAIL("%s: wait status %#x", what, (unsigned)status);
}

/* In a mount namespace there is nothing to be denied. */
static int denied(long result)
{
	bool gone = entered.kind && strcmp(entered.kind, "mount_namespace") == 0 && (errno == ENOENT || errno == EROFS);

	return result < 0 && (errno == EPERM || errno == EACCES || gone) ? 0 : 1;
}

#define DENIED(name, call)             \
	static int name(void)          \
	{                              \
		enter();               \
		return denied(call);   \
	}

static struct { uint64_t flags, mode, resolve; } anywhere = { O_RDONLY, 0, 0 };
static struct iovec nowhere;

DENIED(open_file, open("/etc/hostname", O_RDONLY))
DENIED(open_by_openat2, syscall(SYS_openat2, AT_FDCWD, "/etc/hostname", &anywhere, sizeof anywhere))
DENIED(open_above, syscall(SYS_openat2, fx.writable.fd, "../../../../../../etc/hostname", &anywhere, sizeof anywhere))
DENIED(open_secret, syscall(SYS_openat2, AT_FDCWD, fx.secret, &anywhere, sizeof anywhere))
DENIED(open_in_place, syscall(SYS_openat2, fx.outside.fd, "secret", &anywhere, sizeof anywhere))
DENIED(make_socket, socket(AF_INET, SOCK_STREAM, 0))
DENIED(make_unix_socket, socket(AF_UNIX, SOCK_STREAM, 0))
DENIED(do_fork, syscall(SYS_fork))
DENIED(do_clone, syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0))
DENIED(make_ring, syscall(SYS_io_uring_setup, 4, &(char[256]){ 0 }))
DENIED(register_ring, syscall(SYS_io_uring_register, 3, 0, NULL, 0))
DENIED(kill_parent, kill(getppid(), 0))
DENIED(map_executable, (long)mmap(NULL, 4096, PROT_READ | PROT_EXEC, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) == -1 ? -1 : 0)
DENIED(do_mount, mount("x", "/", "tmpfs", 0, NULL))
DENIED(raise_limit, setrlimit(RLIMIT_CORE, &(struct rlimit){ 0, 0 }))
DENIED(change_root, chroot("/"))
DENIED(make_link, symlinkat("/etc", fx.writable.fd, "link"))
DENIED(give_away, fchown(fx.writable.fd, 1, (gid_t)-1))
DENIED(make_fifo, mknodat(fx.writable.fd, "fifo", S_IFIFO | 0600, 0))
DENIED(write_read_only, mkdirat(fx.readable.fd, "d", 0700))
DENIED(remove_read_only, unlinkat(fx.readable.fd, "f", 0))
DENIED(remove_outside, unlinkat(AT_FDCWD, fx.secret, 0))
DENIED(write_new_root, mkdirat(AT_FDCWD, "/d", 0700))

enum needs { NOTHING, CONFINED, LANDLOCK, LANDLOCK_4 };

static int kind(void)
{
	enter();
	return entered.kind[0];
}

static int landlock_abi(void)
{
	enter();
	return entered.landlock_abi;
}

static enum needs there_is(void)
{
	int abi = WEXITSTATUS(status_of(landlock_abi));

	return abi >= 4 ? LANDLOCK_4 : abi > 0 ? LANDLOCK : WEXITSTATUS(status_of(kind)) == 'm' ? CONFINED : NOTHING;
}

struct denied {
	const char *what;
	int (*probe)(void);
	enum needs needs;
};

static void expect_all(const struct denied *probes, size_t n)
{
	enum needs there = there_is();

	for (size_t i = 0; i < n; i++)
		if (there >= probes[i].needs)
			expect(probes[i].what, probes[i].probe);
}

static void test_denied(void **state)
{
	static const struct denied probes[] = {
		{ "open", open_file, NOTHING }, { "openat2", open_by_openat2, CONFINED },
		{ "openat2 above a root", open_above, CONFINED }, { "openat2 beside the roots", open_secret, CONFINED },
		{ "openat2 by a directory outside", open_in_place, LANDLOCK },
		{ "mkdir in the root directory", write_new_root, CONFINED },
		{ "socket", make_socket, NOTHING }, { "unix socket", make_unix_socket, NOTHING }, { "fork", do_fork, NOTHING },
		{ "clone", do_clone, NOTHING }, { "io_uring_setup", make_ring, NOTHING }, { "io_uring_register", register_ring, NOTHING },
		{ "kill", kill_parent, NOTHING }, { "mmap PROT_EXEC", map_executable, NOTHING }, { "mount", do_mount, NOTHING },
		{ "setrlimit", raise_limit, NOTHING }, { "chroot", change_root, NOTHING }, { "symlink", make_link, NOTHING },
		{ "fchown to another uid", give_away, NOTHING },
		{ "mknod", make_fifo, NOTHING }, { "mkdir in a read-only root", write_read_only, CONFINED },
		{ "unlink in a read-only root", remove_read_only, CONFINED }, { "unlink outside", remove_outside, CONFINED },
	};

	(void)state;
	if (SANITIZED)
		skip();
	expect_all(probes, sizeof probes / sizeof *probes);
}

static int do_exec(void)
{
	char *argv[] = { (char *)(uintptr_t) "/bin/true", NULL };

	enter();
	execv("/bin/true", argv);
	return 1;
}

static int do_ptrace(void)
{
	enter();
	(void)ptrace(PTRACE_TRACEME, 0, NULL, NULL);
	return 1;
}

static int peek_parent(void)
{
	enter();
	(void)process_vm_readv(getppid(), &nowhere, 1, &nowhere, 1, 0);
	return 1;
}

static void test_deadly(void **state)
{
	int (*const probes[])(void) = { do_exec, do_ptrace, peek_parent };

	(void)state;
	if (SANITIZED)
		skip();
	for (size_t i = 0; i < sizeof probes / sizeof *probes; i++) {
		int status = status_of(probes[i]);
		assert_true(WIFSIGNALED(status));
		assert_int_equal(WTERMSIG(status), SIGSYS);
	}
}

static enum err ignore_entry(void *user, const char *name, unsigned char type)
{
	(void)name;
	(void)type;
	++*(int *)user;
	return OK;
}

/* A whole save in small: staging, file, commit, overwrite, delete; reading where only that is allowed. */
static int file_work(void)
{
	int root = fx.writable.fd, fd, dir, entries = 0;
	void *bytes;
	uint64_t n, free_bytes, total;

	enter();
	if (fs_mkdirs(root, "run/.dcpd-1", &dir) || fs_open(dir, "f", O_RDWR | O_CREAT | O_EXCL, 0644, &fd))
		return 1;
	if (fs_allocate(fd, 8192, "f") || fs_pwrite(fd, "hello", 5, 0, "f") || fs_fsync(fd, "f") || fs_close(&fd) ||
	    fs_fsync(dir, "."))
		return 2;
	if (fs_rename_noreplace(root, "run/.dcpd-1", "run/step-1") || fs_rename_noreplace(root, "run/step-1", "moved"))
		return 3;
	if (fs_mkdir(root, "other", 0755) || fs_exchange(root, "other", "moved") || fs_list(dir, ignore_entry, &entries))
		return 4;
	if (fs_open(dir, "f", O_WRONLY, 0, &fd) || fs_unlink(dir, "f") || (fs_is_local(root) && !fs_is_sole(fd)) ||
	    fs_truncate(fd, 4096, "f") || fs_close(&fd))
		return 8;
	if (fs_remove_tree(root, "other") || fs_remove_tree(root, "moved") || fs_remove_tree(root, "run"))
		return 5;
	if (fs_read_all(fx.readable.fd, "f", 100, &bytes, &n) || n != 5 || fs_free_bytes(root, &free_bytes, &total))
		return 6;
	(void)fs_direct_ok(root);
	if (strcmp(entered.kind, "none") == 0)
		return 0;
	enum err e = fs_open(fx.readable.fd, "f", O_RDWR, 0, &fd);
	return e == ERR_FORBIDDEN || e == ERR_STORAGE_READONLY ? 0 : 7;
}

static void *thread_work(void *arg)
{
	char *p = mem_alloc(1 << 20);

	if (p)
		memset(p, 1, 1 << 20);
	mem_free(p);
	return arg;
}

static void touch(void *user)
{
	(void)*(volatile unsigned char *)user;
}

/* A worker's work besides files: threads, memory, descriptors, a segment that shrinks. */
static int other_work(void)
{
	struct frame_conn *a, *b;
	struct frame f;
	struct seg_map m;
	bool got, closed;
	int sv[2];
	pthread_t t[4];

	if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sv) < 0)
		return 1;
	enter();
	int mem = memfd_create("run", MFD_CLOEXEC | MFD_ALLOW_SEALING);
	if (mem < 0 || ftruncate(mem, 8192) < 0 || frame_conn_new(sv[0], &a) || frame_conn_new(sv[1], &b))
		return 2;
	if (frame_send(a, FRAME_RUN, 1, STR("{}"), &mem, 1) || frame_wait(b, 1000, &f, &got, &closed) || !got ||
	    f.fd_count != 1)
		return 3;
	if (seg_map(f.fds[0], 8192, true, &m) || ftruncate(mem, 0) < 0 || seg_guard(touch, m.p) != ERR_SEGMENT_SHRUNK)
		return 4;
	for (int i = 0; i < 4; i++)
		if (pthread_create(&t[i], NULL, thread_work, NULL) != 0)
			return 5;
	for (int i = 0; i < 4; i++)
		pthread_join(t[i], NULL);
	if (fcntl(mem, F_ADD_SEALS, F_SEAL_GROW) < 0)
		return 6;
	fprintf(stderr, "%s", "");
	return 0;
}

static int engine_work(enum io_engine_kind kind)
{
	struct io_engine *e;
	struct io_op *done, op;
	char text[8] = "";
	int fd;

	if (io_engine_open(kind, 4, &e))
		return kind == IO_URING ? 0 : 1;
	enter();
	if (fs_open(fx.writable.fd, "data", O_RDWR | O_CREAT, 0600, &fd))
		return 2;
	op = (struct io_op){ .kind = IO_WRITE, .fd = fd, .buf = (char[]){ "hello" }, .bytes = 5 };
	if (io_submit(e, &op) || io_wait(e, &done) || op.error)
		return 3;
	op = (struct io_op){ .kind = IO_FSYNC, .fd = fd };
	if (io_submit(e, &op) || io_wait(e, &done) || op.error)
		return 4;
	op = (struct io_op){ .kind = IO_READ, .fd = fd, .buf = text, .bytes = 5 };
	if (io_submit(e, &op) || io_wait(e, &done) || op.error || strcmp(text, "hello") != 0)
		return 5;
	io_engine_close(e);
	return 0;
}

static int ring_work(void) { return engine_work(IO_URING); }
static int pool_work(void) { return engine_work(IO_THREADS); }

static void test_work_goes_on(void **state)
{
	(void)state;
	expect("files", file_work);
	expect("threads, memory, descriptors", other_work);
	expect("io_uring", ring_work);
	expect("thread pool", pool_work);
}

static int report(void)
{
	struct rlimit core, files;

	enter();
	if (getrlimit(RLIMIT_CORE, &core) < 0 || core.rlim_max != 0)
		return 1;
	if (getrlimit(RLIMIT_NOFILE, &files) < 0 || files.rlim_cur != files.rlim_max)
		return 2;
	if (SANITIZED)
		return entered.seccomp || strcmp(entered.kind, "none") != 0 ? 3 : 0;
	if ((strcmp(entered.kind, "landlock") == 0) != (entered.landlock_abi > 0) ||
	    (strcmp(entered.kind, "none") == 0) != (entered.why[0] != '\0'))
		return 5;
	return entered.seccomp && entered.landlock_abi >= 0 ? 0 : 4;
}

static int limits(void)
{
	const struct sandbox_root roots[] = { { fx.writable.fd, true, fx.writable.path } };
	const struct sandbox_spec spec = { roots, 1, 256 << 20, 1 << 20, 100, .network = false };
	int fd;

	if (sandbox_enter(&spec, &entered) || fs_open(fx.writable.fd, "big", O_RDWR | O_CREAT, 0600, &fd))
		return 1;
	if (fs_pwrite(fd, "x", 1, 1 << 20, "big") == OK || err_last()->sys_errno != EFBIG)
		return 2;
	for (int i = 0; i < 100; i++)
		if (dup(fd) < 0)
			return SANITIZED || !mem_alloc(300 << 20) ? 0 : 4;
	return 3;
}

static void *sleeper(void *arg)
{
	(void)arg;
	return (void *)(uintptr_t)(unsigned)pause();
}

static int with_threads(void)
{
	struct sandbox_done done;
	const struct sandbox_spec spec = { 0 };
	pthread_t t;

	if (pthread_create(&t, NULL, sleeper, NULL) != 0)
		return 1;
	return SANITIZED || sandbox_enter(&spec, &done) == ERR_INTERNAL ? 0 : 2;
}

static int bad_root(void)
{
	const struct sandbox_root roots[] = { { 999, true, "/" } };
	const struct sandbox_spec spec = { roots, 1, 0, 0, 0, .network = false };
	struct sandbox_done done;

	enum err e = sandbox_enter(&spec, &done);
	return SANITIZED || e == ERR_SYSTEM ? 0 : 1;
}

static void test_entering(void **state)
{
	(void)state;
	expect("report", report);
	expect("limits", limits);
	expect("several threads", with_threads);
	expect("a root that is not open", bad_root);
}

/* ---- network ---- */

static void enter_with_network(void)
{
	const struct sandbox_root roots[] = { { fx.writable.fd, true, fx.writable.path } };
	const struct sandbox_spec spec = { .roots = roots, .root_count = 1, .network = true };

	be_elsewhere();
	if (sandbox_enter(&spec, &entered))
		_exit(100);
}

#define NETWORK_DENIED(name, call)     \
	static int name(void)          \
	{                              \
		enter_with_network();  \
		return denied(call);   \
	}

static int tcp_socket(void)
{
	int fd = socket(AF_INET, SOCK_STREAM, 0);

	return fd < 0 ? _exit(50), 0 : fd;
}

static struct sockaddr_in well_known = { .sin_family = AF_INET, .sin_port = 0x5000 };
static struct ifreq loopback = { .ifr_name = "lo" };

NETWORK_DENIED(net_unix, socket(AF_UNIX, SOCK_STREAM, 0))
NETWORK_DENIED(net_udp, socket(AF_INET, SOCK_DGRAM, 0))
NETWORK_DENIED(net_raw, socket(AF_INET, SOCK_RAW, IPPROTO_ICMP))
NETWORK_DENIED(net_netlink, socket(AF_NETLINK, SOCK_RAW, 0))
NETWORK_DENIED(net_option, setsockopt(tcp_socket(), SOL_SOCKET, SO_BINDTODEVICE, "lo", 3))
NETWORK_DENIED(net_ioctl, ioctl(tcp_socket(), SIOCSIFADDR, &loopback))
NETWORK_DENIED(net_bind, bind(tcp_socket(), (struct sockaddr *)&well_known, sizeof well_known))
NETWORK_DENIED(net_file, open("/etc/hostname", O_RDONLY))

static void sandbox_before(struct t_group *g, uint32_t rank)
{
	(void)g;
	(void)rank;
	enter_with_network();
}

static int gather_in_sandbox(struct t_group *g, struct comm *c)
{
	unsigned char mine = (unsigned char)(g->rank + 1), all[3] = { 0 };

	if (comm_all_gather(c, &mine, 1, all) || comm_barrier(c))
		return 1;
	return all[0] == 1 && all[1] == 2 && all[2] == 3 ? 0 : 2;
}

static void test_network(void **state)
{
	static const char *const addresses[] = { "127.0.0.1", "::1", "lo" };
	static const struct denied probes[] = {
		{ "unix socket", net_unix, NOTHING }, { "udp", net_udp, NOTHING }, { "raw socket", net_raw, NOTHING },
		{ "netlink", net_netlink, NOTHING }, { "SO_BINDTODEVICE", net_option, NOTHING }, { "SIOCSIFADDR", net_ioctl, NOTHING },
		{ "bind to port 80", net_bind, LANDLOCK_4 }, { "open", net_file, NOTHING },
	};

	(void)state;
	for (size_t i = 0; i < sizeof addresses / sizeof *addresses; i++) {
		struct t_group g = { .spec = { .size = 3, .inside = COMM_TCP, .listen = addresses[i] }, .before = sandbox_before,
				     .body = gather_in_sandbox };
		t_group_run(&g);
	}
	if (SANITIZED)
		skip();
	expect_all(probes, sizeof probes / sizeof *probes);
}

/* ---- with shared memory: the arena is handed over before, as a descriptor ---- */

static void no_network_before(struct t_group *g, uint32_t rank)
{
	(void)g;
	(void)rank;
	enter();
}

/* Small, in blocks, and in a subgroup, which maps the arena anew; then a member's death, which the kernel tells through the robust list. */
static int shm_in_sandbox(struct t_group *g, struct comm *c)
{
	enum { BYTES = 1 << 20 };
	const uint32_t back[] = { 2, 1, 0 };
	unsigned char mine = (unsigned char)(g->rank + 1), all[3] = { 0 };
	unsigned char *part = calloc(1, BYTES), *parts = malloc((size_t)3 * BYTES);
	struct comm *sub;

	if (!part || !parts)
		return 1;
	part[BYTES - 1] = mine;
	if (comm_all_gather(c, &mine, 1, all) || comm_all_gather(c, part, BYTES, parts) || comm_split(c, back, 3, &sub) ||
	    comm_broadcast(sub, part, BYTES, 0))
		return 2;
	comm_close(sub);
	if (all[2] != 3 || parts[BYTES - 1] != 1 || parts[3 * BYTES - 1] != 3 || part[BYTES - 1] != 3)
		return 3;
	/* A rank that dies while another still receives from it has died within the broadcast. */
	atomic_fetch_add(&g->shared->flags[0], 1);
	while (g->rank == 1 && atomic_load(&g->shared->flags[0]) < 3)
		t_sleep_ms(1);
	if (g->rank == 1)
		_exit(0);
	enum err e = comm_barrier(c);
	free(part);
	free(parts);
	return e == ERR_PEER_LOST && err_last()->rank == 1 ? 0 : 4;
}

static void test_shared_memory(void **state)
{
	struct t_group g = { .spec = { .size = 3, .inside = COMM_SHM, .deadline_ms = 20000 }, .before = no_network_before,
			     .body = shm_in_sandbox };

	(void)state;
	T_OK(comm_arena_new(3, &g.spec.arena_fd));
	t_group_run(&g);
	close(g.spec.arena_fd);
}

/* ---- where there is no Landlock ---- */

/* Roots inside of roots, by links too, and the same one twice: each descriptor keeps its directory, and leads nowhere else. */
static int nested_roots(void)
{
	char inner[300], linked[300], links_way[300];
	struct stat before[4], now;
	struct sandbox_root roots[4];

	snprintf(inner, sizeof inner, "%s/inner", fx.writable.path);
	snprintf(linked, sizeof linked, "%s/link", fx.writable.path);
	snprintf(links_way, sizeof links_way, "%s/link/far", fx.writable.path);
	be_elsewhere();
	if ((mkdir(inner, 0755) < 0 && errno != EEXIST) || (symlink(fx.outside.path, linked) < 0 && errno != EEXIST) ||
	    (mkdirat(fx.outside.fd, "far", 0755) < 0 && errno != EEXIST))
		return 1;
	const char *const paths[] = { fx.writable.path, inner, links_way, inner };
	for (int i = 0; i < 4; i++) {
		roots[i] = (struct sandbox_root){ open(paths[i], O_RDONLY | O_DIRECTORY), true, paths[i] };
		if (roots[i].fd < 0 || fstat(roots[i].fd, &before[i]) < 0)
			return 2;
	}
	if (sandbox_enter(&(struct sandbox_spec){ .roots = roots, .root_count = 4 }, &entered))
		return 3;
	for (int i = 0; i < 4; i++)
		if (fstat(roots[i].fd, &now) < 0 || now.st_dev != before[i].st_dev || now.st_ino != before[i].st_ino)
			return 4 + i;
	if (strcmp(entered.kind, "none") == 0)
		return 0;
	return denied(syscall(SYS_openat2, roots[2].fd, "../secret", &anywhere, sizeof anywhere)) ||
	       denied(syscall(SYS_openat2, roots[2].fd, "../../../../../../etc/hostname", &anywhere, sizeof anywhere)) ? 9 : 0;
}

static void test_nested_roots(void **state)
{
	(void)state;
	if (SANITIZED)
		skip();
	expect("nested roots", nested_roots);
}

/* May a process here have a mount namespace, and what sandbox.c begins with? */
static int may_unshare(void)
{
	be_elsewhere();
	if (unshare(fx.uid ? CLONE_NEWUSER | CLONE_NEWNS : CLONE_NEWNS) < 0)
		return 1;
	return mount(NULL, "/", NULL, MS_REC | MS_SLAVE, NULL) < 0;
}

static void test_kind(void **state)
{
	int got = WEXITSTATUS(status_of(kind));

	(void)state;
	if (SANITIZED)
		skip();
	if (strstr(fx.without ? fx.without : "", "unshare"))
		assert_int_equal(got, 'n');
	else if (fx.without && WEXITSTATUS(status_of(may_unshare)) == 0)
		assert_int_equal(got, 'm');
	else
		print_message("%s: %s\n", fx.without ? fx.without : "as it is", got == 'l' ? "Landlock" : got == 'm' ? "namespace" : "-");
}

static int keeps_no_capability(void)
{
	char text[4096];
	int fd = open("/proc/self/status", O_RDONLY);

	enter();
	ssize_t n = pread(fd, text, sizeof text - 1, 0);
	text[n > 0 ? n : 0] = '\0';
	return strstr(text, "CapEff:\t0000000000000000") && strstr(text, "CapPrm:\t0000000000000000") ? 0 : 1;
}

static void test_capabilities_of_a_user(void **state)
{
	(void)state;
	if (SANITIZED || (!fx.uid && geteuid() == 0))
		skip();
	expect("no capability", keeps_no_capability);
}

/* The process stands in for a host whose mounts are shared, as under systemd; its child for a worker that is there before the mount. */
static int sees_later_mounts(void)
{
	char inside[300], late[310];
	int say[2], found;

	if (unshare(CLONE_NEWNS) < 0 || mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) < 0 ||
	    mount("t", fx.writable.path, "tmpfs", 0, NULL) < 0 || mount(NULL, fx.writable.path, NULL, MS_SHARED, NULL) < 0)
		return 77;
	snprintf(inside, sizeof inside, "%s/inside", fx.writable.path);
	if (mkdir(inside, 0755) < 0 || pipe(say) < 0)
		return 1;
	fx.writable.fd = open(fx.writable.path, O_RDONLY | O_DIRECTORY);
	pid_t pid = fork();
	if (pid == 0) {
		char c;
		enter();
		struct stat st;
		_exit(read(say[0], &c, 1) == 1 && fs_stat(fx.writable.fd, "inside/late", &st) == OK ? 0 : 3);
	}
	struct timespec a_moment = { .tv_nsec = 200000000 };
	nanosleep(&a_moment, NULL);
	snprintf(late, sizeof late, "%s/late", inside);
	if (mount("t", inside, "tmpfs", 0, NULL) < 0 || mkdir(late, 0755) < 0 || write(say[1], "x", 1) != 1)
		return 2;
	return waitpid(pid, &found, 0) == pid && WIFEXITED(found) ? WEXITSTATUS(found) : 4;
}

static void test_mounts_that_come_later(void **state)
{
	(void)state;
	if (SANITIZED || fx.uid || WEXITSTATUS(status_of(may_unshare)) != 0)
		skip();
	int got = WEXITSTATUS(status_of(sees_later_mounts));
	if (got == 77)
		skip();
	assert_int_equal(got, 0);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_kind),
		cmocka_unit_test(test_denied),
		cmocka_unit_test(test_deadly),
		cmocka_unit_test(test_work_goes_on),
		cmocka_unit_test(test_entering),
		cmocka_unit_test(test_network),
		cmocka_unit_test(test_shared_memory),
		cmocka_unit_test(test_capabilities_of_a_user),
		cmocka_unit_test(test_mounts_that_come_later),
		cmocka_unit_test(test_nested_roots),
	};
	int failed = cmocka_run_group_tests_name("sandbox", tests, setup, teardown);

	if (SANITIZED)
		return failed;
	fx.without = "landlock_create_ruleset";
	failed += cmocka_run_group_tests_name("sandbox without Landlock", tests, setup, teardown);
	if (geteuid() == 0) {
		fx.uid = 4242;
		failed += cmocka_run_group_tests_name("a user's sandbox without Landlock", tests, setup, teardown);
		fx.uid = 0;
	}
	fx.without = "landlock_create_ruleset,unshare";
	failed += cmocka_run_group_tests_name("sandbox without Landlock and namespaces", tests, setup, teardown);
	return failed;
}
