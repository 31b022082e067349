/* sandbox.c: see sandbox.h. The order matters: Landlock and a mount namespace need system calls that seccomp then forbids, and the
 * namespace needs capabilities that are then dropped.
 *
 * Why an allow-list: new system calls appear with every kernel, and none of them is ours. Why EPERM and not death for most of
 * them: the C library tries calls that it can do without. */
#include "os/sandbox.h"

#include <dirent.h>
#include <execinfo.h>
#include <fcntl.h>
#include <linux/capability.h>
#include <linux/fs.h>
#include <linux/landlock.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <seccomp.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "os/mount_ns.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { SANITIZED = 1 };
#else
enum { SANITIZED = 0 };
#endif

/* ---- limits ---- */

static FALLIBLE enum err limit(__rlimit_resource_t what, uint64_t value, const char *name)
{
	struct rlimit now, want = { value, value };

	if (getrlimit(what, &now) < 0)
		return ERR_SYS(SYSTEM, "cannot read the limit on %s", name);
	if (now.rlim_max != RLIM_INFINITY && value > now.rlim_max)
		want = (struct rlimit){ now.rlim_max, now.rlim_max };
	if (setrlimit(what, &want) < 0)
		return ERR_SYS(SYSTEM, "cannot limit %s", name);
	return OK;
}

static FALLIBLE enum err set_limits(const struct sandbox_spec *spec)
{
	struct rlimit files;

	TRY(limit(RLIMIT_CORE, 0, "core files"));
	if (getrlimit(RLIMIT_NOFILE, &files) < 0)
		return ERR_SYS(SYSTEM, "cannot read the limit on open files");
	TRY(limit(RLIMIT_NOFILE, spec->open_files ? spec->open_files : files.rlim_max, "open files"));
	if (spec->data_bytes && !SANITIZED && !spec->device) /* a sanitizer maps more than any limit */
		TRY(limit(RLIMIT_DATA, spec->data_bytes, "memory"));
	if (spec->file_bytes) {
		/* The limit is an errno then, not a signal. */
		(void)signal(SIGXFSZ, SIG_IGN);
		TRY(limit(RLIMIT_FSIZE, spec->file_bytes, "the size of a file"));
	}
	return OK;
}

/* ---- capabilities ---- */

typedef struct __user_cap_data_struct capabilities[2];

static FALLIBLE enum err get_capabilities(capabilities now)
{
	struct __user_cap_header_struct head = { .version = _LINUX_CAPABILITY_VERSION_3 };

	return syscall(SYS_capget, &head, now) < 0 ? ERR_SYS(SYSTEM, "cannot read the process's capabilities") : OK;
}

/* A root worker keeps FILE_CAPABILITIES: the files of its storages may be other users', and get the group that the operator says. Without
 * confinement these still open every file of the host, but no device, module, namespace, raw socket or other user's process. */
static const uint32_t FILE_CAPABILITIES = 1u << CAP_DAC_OVERRIDE | 1u << CAP_DAC_READ_SEARCH | 1u << CAP_CHOWN | 1u << CAP_FOWNER;

static FALLIBLE enum err drop_capabilities(uint32_t kept)
{
	struct __user_cap_header_struct head = { .version = _LINUX_CAPABILITY_VERSION_3 };
	capabilities now;

	TRY(get_capabilities(now));
	now[0].effective = now[0].permitted = now[0].permitted & kept;
	now[1].effective = now[1].permitted = 0;
	now[0].inheritable = now[1].inheritable = 0;
	if (syscall(SYS_capset, &head, now) < 0)
		return ERR_SYS(SYSTEM, "cannot give up capabilities");
	return OK;
}

/* ---- Landlock ---- */

/* As the kernel knows it; the header may be older than the kernel. */
struct ruleset {
	uint64_t fs, net, scoped;
};

enum {
	ABI_REFER = 2, ABI_TRUNCATE = 3, ABI_NET = 4, ABI_IOCTL = 5, ABI_SCOPED = 6,
	NET_CONNECT = 2,
	FS_WRITE_FILE = 1 << 1, FS_READ_FILE = 1 << 2, FS_READ_DIR = 1 << 3, FS_REMOVE_DIR = 1 << 4,
	FS_REMOVE_FILE = 1 << 5, FS_MAKE_DIR = 1 << 7, FS_MAKE_REG = 1 << 8,
	FS_ALL_OF_ABI_1 = (1 << 13) - 1, FS_REFER = 1 << 13, FS_TRUNCATE = 1 << 14, FS_IOCTL_DEV = 1 << 15,
	NET_BIND = 1, NET_ALL = 3, RULE_NET_PORT = 2, SCOPED_ALL = 3,
	READ_ONLY = FS_READ_FILE | FS_READ_DIR,
	READ_WRITE = READ_ONLY | FS_WRITE_FILE | FS_REMOVE_DIR | FS_REMOVE_FILE | FS_MAKE_DIR | FS_MAKE_REG | FS_REFER |
		     FS_TRUNCATE,
};

static struct ruleset handled_by(int abi, bool network)
{
	struct ruleset r = { .fs = FS_ALL_OF_ABI_1 };

	if (abi >= ABI_REFER)
		r.fs |= FS_REFER;
	if (abi >= ABI_TRUNCATE)
		r.fs |= FS_TRUNCATE;
	if (abi >= ABI_IOCTL)
		r.fs |= FS_IOCTL_DEV;
	if (abi >= ABI_NET)
		r.net = network ? NET_BIND : NET_ALL; /* peers' ports are not known yet */
	if (abi >= ABI_SCOPED)
		r.scoped = SCOPED_ALL;
	return r;
}

static size_t ruleset_bytes(int abi)
{
	return abi >= ABI_SCOPED ? 24 : abi >= ABI_NET ? 16 : 8;
}

static FALLIBLE enum err add_roots(int ruleset, uint64_t handled, const struct sandbox_spec *spec)
{
	for (uint32_t i = 0; i < spec->root_count; i++) {
		struct landlock_path_beneath_attr rule = {
			.allowed_access = handled & (spec->roots[i].writable ? READ_WRITE : READ_ONLY),
			.parent_fd = spec->roots[i].fd,
		};
		if (syscall(SYS_landlock_add_rule, ruleset, LANDLOCK_RULE_PATH_BENEATH, &rule, 0) < 0)
			return ERR_SYS(SYSTEM, "cannot let storage root %u into the sandbox", i);
	}
	return OK;
}

/* Files that the C library reads to resolve a name. */
static const char *const resolver_files[] = { "/etc/resolv.conf", "/etc/hosts", "/etc/nsswitch.conf", "/etc/host.conf", "/etc/gai.conf",
					      "/run/systemd/resolve/stub-resolv.conf", NULL };

/* Files that are not there are passed over. */
static FALLIBLE enum err add_readable(int ruleset, const char *const *paths)
{
	for (; paths && *paths; paths++) {
		int fd = open(*paths, O_PATH | O_CLOEXEC);
		struct stat st;
		if (fd < 0)
			continue;
		bool is_dir = fstat(fd, &st) == 0 && S_ISDIR(st.st_mode);
		struct landlock_path_beneath_attr rule = { .allowed_access = is_dir ? READ_ONLY : FS_READ_FILE, .parent_fd = fd };
		long bad = syscall(SYS_landlock_add_rule, ruleset, LANDLOCK_RULE_PATH_BENEATH, &rule, 0);
		close(fd);
		if (bad < 0)
			return ERR_SYS(SYSTEM, "cannot let '%s' into the sandbox", *paths);
	}
	return OK;
}

static FALLIBLE enum err add_storages(int ruleset, uint64_t handled, const struct sandbox_spec *spec)
{
	for (uint32_t i = 0; i < spec->port_count && handled & NET_CONNECT; i++) {
		const struct { uint64_t allowed, port; } rule = { NET_CONNECT, spec->ports[i] };
		if (syscall(SYS_landlock_add_rule, ruleset, RULE_NET_PORT, &rule, 0) < 0)
			return ERR_SYS(SYSTEM, "cannot let port %u into the sandbox", spec->ports[i]);
	}
	if (!spec->port_count)
		return OK;
	TRY(add_readable(ruleset, resolver_files));
	return add_readable(ruleset, spec->readable);
}

/* Port 0 stands for what the system chooses: no port that somebody relies on can be taken. */
static FALLIBLE enum err add_port(int ruleset, uint64_t handled)
{
	const struct { uint64_t allowed, port; } rule = { NET_BIND, 0 };

	if (handled && syscall(SYS_landlock_add_rule, ruleset, RULE_NET_PORT, &rule, 0) < 0)
		return ERR_SYS(SYSTEM, "cannot let TCP into the sandbox");
	return OK;
}

static FALLIBLE enum err enter_landlock(const struct sandbox_spec *spec, int *abi_out)
{
	long abi = syscall(SYS_landlock_create_ruleset, NULL, 0, LANDLOCK_CREATE_RULESET_VERSION);

	*abi_out = 0;
	if (abi < 1 || SANITIZED || spec->device)
		return OK;
	struct ruleset r = handled_by((int)abi, spec->network);
	int ruleset = (int)syscall(SYS_landlock_create_ruleset, &r, ruleset_bytes((int)abi), 0);
	if (ruleset < 0)
		return ERR_SYS(SYSTEM, "cannot make a Landlock ruleset");
	enum err e = add_roots(ruleset, r.fs, spec);
	if (!e)
		e = add_storages(ruleset, r.net, spec);
	if (!e && spec->network)
		e = add_port(ruleset, r.net);
	if (!e && syscall(SYS_landlock_restrict_self, ruleset, 0) < 0)
		e = ERR_SYS(SYSTEM, "cannot enter the Landlock sandbox");
	close(ruleset);
	if (!e)
		*abi_out = (int)abi;
	return e;
}

/* ---- seccomp ---- */

enum { CACHESTAT = 451 }; /* the same on all machines; libseccomp knows it from 2.5.5 on */

static const int allowed[] = {
	/* files that are open, and names beneath a directory's descriptor */
	SCMP_SYS(read), SCMP_SYS(write), SCMP_SYS(readv), SCMP_SYS(writev), SCMP_SYS(pread64), SCMP_SYS(pwrite64),
	SCMP_SYS(preadv), SCMP_SYS(pwritev), SCMP_SYS(preadv2), SCMP_SYS(pwritev2), SCMP_SYS(lseek), SCMP_SYS(close),
	SCMP_SYS(close_range), SCMP_SYS(dup), SCMP_SYS(dup2), SCMP_SYS(dup3), SCMP_SYS(fstat), SCMP_SYS(newfstatat),
	SCMP_SYS(statx), SCMP_SYS(fstatfs), SCMP_SYS(getdents64), SCMP_SYS(openat2), SCMP_SYS(mkdirat),
	SCMP_SYS(unlinkat), SCMP_SYS(linkat), SCMP_SYS(renameat), SCMP_SYS(renameat2), SCMP_SYS(fchmod),
	SCMP_SYS(ftruncate), SCMP_SYS(fallocate), SCMP_SYS(fsync), SCMP_SYS(fdatasync), SCMP_SYS(sync_file_range),
	SCMP_SYS(syncfs), SCMP_SYS(fadvise64), SCMP_SYS(readahead), SCMP_SYS(copy_file_range), SCMP_SYS(flock),
	SCMP_SYS(utimensat), SCMP_SYS(io_uring_enter),
	/* memory, threads, time, signals to ourselves */
	SCMP_SYS(munmap), SCMP_SYS(mremap), SCMP_SYS(madvise), SCMP_SYS(mlock), SCMP_SYS(mlock2), SCMP_SYS(munlock),
	SCMP_SYS(msync), SCMP_SYS(mincore), CACHESTAT, SCMP_SYS(brk), SCMP_SYS(memfd_create), SCMP_SYS(futex),
	SCMP_SYS(set_robust_list), SCMP_SYS(get_robust_list), SCMP_SYS(rseq), SCMP_SYS(set_tid_address),
	SCMP_SYS(membarrier), SCMP_SYS(exit), SCMP_SYS(exit_group), SCMP_SYS(sched_yield),
	SCMP_SYS(sched_getaffinity), SCMP_SYS(sched_setaffinity), SCMP_SYS(getcpu), SCMP_SYS(nanosleep),
	SCMP_SYS(clock_nanosleep), SCMP_SYS(clock_gettime), SCMP_SYS(clock_getres), SCMP_SYS(gettimeofday),
	SCMP_SYS(time), SCMP_SYS(rt_sigaction), SCMP_SYS(rt_sigprocmask), SCMP_SYS(rt_sigreturn),
	SCMP_SYS(rt_sigpending), SCMP_SYS(rt_sigtimedwait), SCMP_SYS(sigaltstack), SCMP_SYS(restart_syscall),
	SCMP_SYS(pause), SCMP_SYS(getpid), SCMP_SYS(gettid), SCMP_SYS(getppid), SCMP_SYS(getuid), SCMP_SYS(geteuid),
	SCMP_SYS(getgid), SCMP_SYS(getegid), SCMP_SYS(getrusage), SCMP_SYS(getrlimit), SCMP_SYS(sysinfo),
	SCMP_SYS(uname), SCMP_SYS(getrandom),
	/* waiting, and talking over the sockets that are open */
	SCMP_SYS(poll), SCMP_SYS(ppoll), SCMP_SYS(select), SCMP_SYS(pselect6), SCMP_SYS(epoll_create1),
	SCMP_SYS(epoll_ctl), SCMP_SYS(epoll_wait), SCMP_SYS(epoll_pwait), SCMP_SYS(eventfd2), SCMP_SYS(pipe2),
	SCMP_SYS(timerfd_create), SCMP_SYS(timerfd_settime), SCMP_SYS(sendmsg), SCMP_SYS(recvmsg), SCMP_SYS(sendto),
	SCMP_SYS(recvfrom), SCMP_SYS(shutdown), SCMP_SYS(getsockopt),
};

static const int deadly[] = { SCMP_SYS(execve), SCMP_SYS(execveat), SCMP_SYS(ptrace), SCMP_SYS(process_vm_readv),
			      SCMP_SYS(process_vm_writev) };

static const int fcntl_commands[] = { F_DUPFD, F_DUPFD_CLOEXEC, F_GETFD, F_SETFD, F_GETFL, F_SETFL, F_ADD_SEALS,
				      F_GET_SEALS, F_SETLK, F_GETLK, F_OFD_SETLK, F_OFD_GETLK, F_SETLEASE };

#define COUNT(a) (sizeof(a) / sizeof *(a))

static int add_lists(scmp_filter_ctx ctx)
{
	int bad = 0;

	for (size_t i = 0; !bad && i < COUNT(allowed); i++)
		bad = seccomp_rule_add(ctx, SCMP_ACT_ALLOW, allowed[i], 0);
	for (size_t i = 0; !bad && i < COUNT(deadly); i++)
		bad = seccomp_rule_add(ctx, SCMP_ACT_KILL_PROCESS, deadly[i], 0);
	for (size_t i = 0; !bad && i < COUNT(fcntl_commands); i++)
		bad = seccomp_rule_add(ctx, SCMP_ACT_ALLOW, SCMP_SYS(fcntl), 1,
				       SCMP_A1(SCMP_CMP_EQ, (scmp_datum_t)fcntl_commands[i]));
	return bad;
}

/* Calls that are harmless with some arguments only. */
static int add_conditions(scmp_filter_ctx ctx)
{
	scmp_datum_t self = (scmp_datum_t)getpid();
	int bad = 0;

#define ALLOW_IF(call, ...) (bad = bad ? bad : seccomp_rule_add(ctx, SCMP_ACT_ALLOW, SCMP_SYS(call), __VA_ARGS__))
	ALLOW_IF(mmap, 1, SCMP_A2(SCMP_CMP_MASKED_EQ, PROT_EXEC, 0));
	ALLOW_IF(mprotect, 1, SCMP_A2(SCMP_CMP_MASKED_EQ, PROT_EXEC, 0));
	ALLOW_IF(clone, 1, SCMP_A0(SCMP_CMP_MASKED_EQ, CLONE_THREAD, CLONE_THREAD));
	ALLOW_IF(prctl, 1, SCMP_A0(SCMP_CMP_EQ, PR_SET_NAME));
	ALLOW_IF(prlimit64, 2, SCMP_A0(SCMP_CMP_EQ, 0), SCMP_A2(SCMP_CMP_EQ, 0));
	ALLOW_IF(kill, 1, SCMP_A0(SCMP_CMP_EQ, self));
	ALLOW_IF(tgkill, 1, SCMP_A0(SCMP_CMP_EQ, self));
	ALLOW_IF(fchown, 1, SCMP_A1(SCMP_CMP_MASKED_EQ, UINT32_MAX, UINT32_MAX)); /* the group alone */
	ALLOW_IF(ioctl, 1, SCMP_A1(SCMP_CMP_EQ, TCGETS));
	ALLOW_IF(ioctl, 1, SCMP_A1(SCMP_CMP_EQ, FICLONERANGE)); /* of two files that are open */
#undef ALLOW_IF
	/* Its flags are in memory, where no filter can look; the C library then takes clone. */
	if (!bad)
		bad = seccomp_rule_add(ctx, SCMP_ACT_ERRNO(ENOSYS), SCMP_SYS(clone3), 0);
	return bad;
}

/* Allows the calls of comm's tcp back end, down to the options that it sets. */
static int add_network(scmp_filter_ctx ctx)
{
	static const int calls[] = { SCMP_SYS(bind), SCMP_SYS(listen), SCMP_SYS(accept4), SCMP_SYS(connect), SCMP_SYS(getsockname) };
	static const struct { int level, name; } options[] = {
		{ SOL_SOCKET, SO_KEEPALIVE }, { IPPROTO_IPV6, IPV6_V6ONLY }, { IPPROTO_TCP, TCP_NODELAY }, { IPPROTO_TCP, TCP_KEEPIDLE },
		{ IPPROTO_TCP, TCP_KEEPINTVL }, { IPPROTO_TCP, TCP_KEEPCNT }, { IPPROTO_TCP, TCP_USER_TIMEOUT },
	};
	static const scmp_datum_t families[] = { AF_INET, AF_INET6 };
	const scmp_datum_t kind = ~(scmp_datum_t)(SOCK_CLOEXEC | SOCK_NONBLOCK) & UINT32_MAX;
	int bad = 0;

	for (size_t i = 0; !bad && i < COUNT(calls); i++)
		bad = seccomp_rule_add(ctx, SCMP_ACT_ALLOW, calls[i], 0);
	for (size_t i = 0; !bad && i < COUNT(families); i++)
		bad = seccomp_rule_add(ctx, SCMP_ACT_ALLOW, SCMP_SYS(socket), 3, SCMP_A0(SCMP_CMP_EQ, families[i]),
				       SCMP_A1(SCMP_CMP_MASKED_EQ, kind, SOCK_STREAM), SCMP_A2(SCMP_CMP_EQ, 0));
	for (size_t i = 0; !bad && i < COUNT(options); i++)
		bad = seccomp_rule_add(ctx, SCMP_ACT_ALLOW, SCMP_SYS(setsockopt), 2, SCMP_A1(SCMP_CMP_EQ, (scmp_datum_t)options[i].level),
				       SCMP_A2(SCMP_CMP_EQ, (scmp_datum_t)options[i].name));
	if (!bad)
		bad = seccomp_rule_add(ctx, SCMP_ACT_ALLOW, SCMP_SYS(ioctl), 1, SCMP_A1(SCMP_CMP_EQ, SIOCGIFADDR));
	return bad;
}

/* Allows what a client of object storages needs: TCP, names over UDP, open() for reading, which Landlock narrows. */
static int add_storage_clients(scmp_filter_ctx ctx)
{
	static const int calls[] = { SCMP_SYS(connect), SCMP_SYS(getsockname), SCMP_SYS(getpeername), SCMP_SYS(sendmmsg),
				     SCMP_SYS(recvmmsg) };
	static const scmp_datum_t families[] = { AF_INET, AF_INET6 }, kinds[] = { SOCK_STREAM, SOCK_DGRAM };
	static const scmp_datum_t levels[] = { SOL_SOCKET, IPPROTO_TCP, IPPROTO_IP, IPPROTO_IPV6 };
	const scmp_datum_t kind = ~(scmp_datum_t)(SOCK_CLOEXEC | SOCK_NONBLOCK) & UINT32_MAX;
	int bad = 0;

	for (size_t i = 0; !bad && i < COUNT(calls); i++)
		bad = seccomp_rule_add(ctx, SCMP_ACT_ALLOW, calls[i], 0);
	for (size_t i = 0; !bad && i < COUNT(families) * COUNT(kinds); i++)
		bad = seccomp_rule_add(ctx, SCMP_ACT_ALLOW, SCMP_SYS(socket), 2, SCMP_A0(SCMP_CMP_EQ, families[i / 2]),
				       SCMP_A1(SCMP_CMP_MASKED_EQ, kind, kinds[i % 2]));
	if (!bad) /* the resolver's thread wakes its caller */
		bad = seccomp_rule_add(ctx, SCMP_ACT_ALLOW, SCMP_SYS(socketpair), 1, SCMP_A0(SCMP_CMP_EQ, AF_UNIX));
	for (size_t i = 0; !bad && i < COUNT(levels); i++)
		bad = seccomp_rule_add(ctx, SCMP_ACT_ALLOW, SCMP_SYS(setsockopt), 1, SCMP_A1(SCMP_CMP_EQ, levels[i]));
	if (!bad)
		bad = seccomp_rule_add(ctx, SCMP_ACT_ALLOW, SCMP_SYS(openat), 1,
				       SCMP_A2(SCMP_CMP_MASKED_EQ, O_ACCMODE | O_CREAT | O_TRUNC, O_RDONLY));
	if (!bad)
		bad = seccomp_rule_add(ctx, SCMP_ACT_ALLOW, SCMP_SYS(ioctl), 1, SCMP_A1(SCMP_CMP_EQ, FIONREAD));
	if (!bad)
		bad = seccomp_rule_add(ctx, SCMP_ACT_ALLOW, SCMP_SYS(fcntl), 1, SCMP_A1(SCMP_CMP_EQ, F_SETFL));
	return bad;
}

static FALLIBLE enum err enter_seccomp(bool network, bool clients, bool *entered_out)
{
	*entered_out = false;
	if (SANITIZED || prctl(PR_GET_SECCOMP) < 0)
		return OK;
	scmp_filter_ctx ctx = seccomp_init(SCMP_ACT_ERRNO(EPERM));
	NEED(ctx, "no memory for a seccomp filter");
	int bad = add_lists(ctx);
	if (!bad)
		bad = add_conditions(ctx);
	if (!bad && network)
		bad = add_network(ctx);
	if (!bad && clients)
		bad = add_storage_clients(ctx);
	/* As a tree, most calls take a few comparisons instead of a hundred. */
	if (!bad)
		bad = seccomp_attr_set(ctx, SCMP_FLTATR_CTL_OPTIMIZE, 2);
	if (!bad)
		bad = seccomp_load(ctx);
	seccomp_release(ctx);
	if (bad) {
		errno = -bad;
		return ERR_SYS(SYSTEM, "cannot enter the seccomp sandbox");
	}
	*entered_out = true;
	return OK;
}

/* ---- all ---- */

/* In a user namespace root loses what it may do to other users' files, and nobody could not tell its own files from theirs. */
static FALLIBLE enum err user_ns_fits(const struct sandbox_spec *spec, bool *fits_out)
{
	capabilities now;

	TRY(get_capabilities(now));
	*fits_out = !spec->gives_groups && geteuid() != 0 && geteuid() != OVERFLOW_ID && !now[0].permitted && !now[1].permitted;
	return OK;
}

/* Landlock, or a mount namespace where there is none. */
static FALLIBLE enum err confine(const struct sandbox_spec *spec, struct sandbox_done *done)
{
	bool fits, user_ns = false;

	done->kind = "none";
	if (spec->device)
		return OK;
	TRY(enter_landlock(spec, &done->landlock_abi));
	if (done->landlock_abi > 0) {
		done->kind = "landlock";
	} else if (!SANITIZED) {
		TRY(user_ns_fits(spec, &fits));
		if (mount_ns_enter(spec->roots, spec->root_count, fits, &user_ns) == OK) {
			done->kind = "mount_namespace";
		} else {
			const char *reason = strerrordesc_np(err_last()->sys_errno);
			snprintf(done->why, sizeof done->why, "%.120s%s%.60s", err_last()->text, reason ? ": " : "", reason ? reason : "");
			err_clear();
		}
	}
	/* Capabilities of a user namespace would open files against their modes: the host gave the process none. */
	return drop_capabilities(user_ns ? 0 : FILE_CAPABILITIES);
}

static FALLIBLE enum err check_single_thread(void)
{
	DIR *d = opendir("/proc/self/task");
	int entries = 0;

	/* Without /proc there is no telling. */
	if (!d)
		return OK;
	while (readdir(d))
		entries++;
	closedir(d);
	return entries > 3 && !SANITIZED ? ERR(INTERNAL, "the sandbox is entered with %d threads", entries - 2) : OK;
}

enum err sandbox_enter(const struct sandbox_spec *spec, struct sandbox_done *done_out)
{
	struct sandbox_done done = { 0 };
	void *frame;

	TRY(check_single_thread());
	/* The first backtrace loads a library, which a failed must() could not do later. */
	(void)backtrace(&frame, 1);
	if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0)
		return ERR_SYS(SYSTEM, "cannot give up new privileges");
	TRY(set_limits(spec));
	TRY(confine(spec, &done));
	if (!spec->device)
		TRY(enter_seccomp(spec->network, spec->port_count > 0, &done.seccomp));
	*done_out = done;
	return OK;
}
