/* spawn.c: see spawn.h.
 *
 * Why not posix_spawn: it can neither ask for the parent-death signal nor hand out a pidfd without a race. Why not fork: it
 * copies the page tables of a daemon for nothing, and between fork and exec a threaded process may call next to nothing.
 * clone(CLONE_VM | CLONE_VFORK) runs the few calls of child_main on a stack of their own while the caller is held; an error
 * there is seen through the shared memory. */
#include "os/spawn.h"

#include <fcntl.h>
#include <linux/close_range.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/pidfd.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#ifndef P_PIDFD
#define P_PIDFD 3
#endif

enum {
	STACK_BYTES = 64 << 10,
	FIRST_FD = 10,                 /* what the child is given is kept clear of the numbers it goes to */
};

struct plan {
	const struct spawn_spec *spec;
	char *const *argv;
	int null_fd, log_fd, control_fd;
	pid_t parent;
	int why;                       /* errno of what failed in the child */
	const char *what;
};

#ifdef __SANITIZE_THREAD__
/* It takes our clone for a fork, after which it wants no threads; ours shares nothing after the exec. */
const char *__tsan_default_options(void);
const char *__tsan_default_options(void)
{
	return "die_after_fork=0";
}
#endif

#define NO_SANITIZER __attribute__((no_sanitize_address, no_sanitize_thread, no_sanitize_undefined))

static NO_SANITIZER int give_up(struct plan *p, const char *what)
{
	p->why = errno;
	p->what = what;
	_exit(127);
}

/* Runs in the child with the parent's memory: system calls only. */
static NO_SANITIZER int child_main(void *arg)
{
	struct plan *p = arg;
	sigset_t none;

	/* Handlers are reset by exec, but ignored signals would stay ignored. */
	for (int s = 1; s < NSIG; s++) {
		struct sigaction now;
		if (sigaction(s, NULL, &now) == 0 && now.sa_handler != SIG_DFL) {
			now.sa_handler = SIG_DFL;
			now.sa_flags = 0;
			(void)sigaction(s, &now, NULL);
		}
	}
	if (prctl(PR_SET_PDEATHSIG, SIGKILL) < 0)
		return give_up(p, "ask for the parent-death signal");
	if (getppid() != p->parent)
		_exit(127);
	if (setpgid(0, 0) < 0)
		return give_up(p, "make a process group");
	if (dup2(p->null_fd, 0) < 0 || dup2(p->log_fd, 1) < 0 || dup2(p->log_fd, 2) < 0 ||
	    dup2(p->control_fd, SPAWN_CONTROL_FD) < 0)
		return give_up(p, "set up descriptors");
	if (close_range(SPAWN_CONTROL_FD + 1, ~0U, 0) < 0)
		return give_up(p, "close descriptors");
	sigemptyset(&none);
	if (sigprocmask(SIG_SETMASK, &none, NULL) < 0)
		return give_up(p, "unblock signals");
	execve(p->spec->path, p->argv, p->spec->envp ? p->spec->envp : environ);
	return give_up(p, "run");
}

static void close_fd(int *fd)
{
	if (*fd >= 0)
		close(*fd);
	*fd = -1;
}

/* Moves the descriptor out of the way of those that the child will have. */
static FALLIBLE enum err raised(int fd, int *out)
{
	int high = fcntl(fd, F_DUPFD_CLOEXEC, FIRST_FD);

	if (high < 0)
		return ERR_SYS(SYSTEM, "cannot duplicate a descriptor for a worker");
	*out = high;
	return OK;
}

static FALLIBLE enum err prepare_fds(struct plan *p, int peer)
{
	int null = open("/dev/null", O_RDWR | O_CLOEXEC);

	if (null < 0)
		return ERR_SYS(SYSTEM, "cannot open /dev/null");
	enum err e = raised(null, &p->null_fd);
	/* A daemon without a standard error has nowhere to log either. */
	int log = p->spec->log_fd >= 0 ? p->spec->log_fd : fcntl(2, F_GETFD) < 0 ? null : 2;
	e = e ?: raised(log, &p->log_fd);
	e = e ?: raised(peer, &p->control_fd);
	close(null);
	return e;
}

/* The process is made with all signals blocked: a handler of ours must not run in it. */
static FALLIBLE enum err make_process(struct plan *p, pid_t *pid_out, int *pidfd_out)
{
	sigset_t all, before;
	int pidfd = -1;
	char *stack = mmap(NULL, STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_STACK, -1, 0);

	if (stack == MAP_FAILED)
		return ERR_SYS(NO_MEMORY, "no memory to start a worker");
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &before);
	pid_t pid = clone(child_main, stack + STACK_BYTES, CLONE_VM | CLONE_VFORK | CLONE_PIDFD | SIGCHLD, p, &pidfd);
	int why = errno;
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	munmap(stack, STACK_BYTES);
	errno = why;
	if (pid < 0)
		return ERR_SYS(SYSTEM, "cannot make a process for a worker");
	*pid_out = pid;
	*pidfd_out = pidfd;
	return OK;
}

enum err spawn_start(const struct spawn_spec *spec, struct spawn_child *child_out)
{
	char *only_path[] = { (char *)(uintptr_t)spec->path, NULL };
	struct plan p = { .spec = spec, .argv = spec->argv ? spec->argv : only_path, .null_fd = -1, .log_fd = -1,
			  .control_fd = -1, .parent = getpid() };
	struct spawn_child child = SPAWN_NONE;
	int ends[2];

	if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) < 0)
		return ERR_SYS(SYSTEM, "cannot make a control socket");
	child.control_fd = ends[0];
	enum err e = prepare_fds(&p, ends[1]);
	e = e ?: make_process(&p, &child.pid, &child.pidfd);
	close_fd(&ends[1]);
	close_fd(&p.null_fd);
	close_fd(&p.log_fd);
	close_fd(&p.control_fd);
	if (!e && p.why) {
		bool ended;
		struct spawn_exit ignored;
		e = spawn_reap(child.pidfd, -1, &ended, &ignored);
		errno = p.why;
		e = e ?: ERR_SYS(SYSTEM, "cannot start '%s': cannot %s", spec->path, p.what);
	}
	if (e) {
		spawn_release(&child);
		return e;
	}
	*child_out = child;
	return OK;
}

enum err spawn_kill(int pidfd, int signo)
{
	if (pidfd < 0 || pidfd_send_signal(pidfd, signo, NULL, 0) == 0 || errno == ESRCH)
		return OK;
	return ERR_SYS(SYSTEM, "cannot send signal %d to a worker", signo);
}

enum err spawn_pidfd(pid_t pid, int *pidfd_out)
{
	int fd = pidfd_open(pid, 0);

	if (fd < 0)
		return ERR_SYS(SYSTEM, "cannot watch process %d", (int)pid);
	*pidfd_out = fd;
	return OK;
}

enum err spawn_reap(int pidfd, int timeout_ms, bool *ended_out, struct spawn_exit *exit_out)
{
	struct pollfd p = { .fd = pidfd, .events = POLLIN };
	siginfo_t info = { 0 };

	*ended_out = false;
	if (timeout_ms != 0 && poll(&p, 1, timeout_ms) < 0 && errno != EINTR)
		return ERR_SYS(SYSTEM, "cannot wait for a worker");
	if (waitid(P_PIDFD, (id_t)pidfd, &info, WEXITED | WNOHANG) < 0)
		return ERR_SYS(SYSTEM, "cannot collect how a worker ended");
	if (info.si_pid == 0)
		return OK;
	*exit_out = (struct spawn_exit){ .signalled = info.si_code != CLD_EXITED, .code = info.si_status };
	*ended_out = true;
	return OK;
}

pid_t spawn_find_ended(void)
{
	siginfo_t info = { 0 };

	return waitid(P_ALL, 0, &info, WEXITED | WNOHANG | WNOWAIT) < 0 ? 0 : info.si_pid;
}

void spawn_collect(pid_t pid)
{
	siginfo_t info;

	(void)waitid(P_PID, (id_t)pid, &info, WEXITED | WNOHANG);
}

void spawn_release(struct spawn_child *child)
{
	close_fd(&child->pidfd);
	close_fd(&child->control_fd);
	child->pid = -1;
}
