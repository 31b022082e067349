/* spawn.h: starting a worker process, and ending it.
 *
 *     spawn_start(&spec, &child)       the program runs with one end of a Unix stream socket as descriptor 3
 *     child.control_fd                 the other end, for frame_conn_new
 *     child.pidfd                      readable (poll, epoll) when the process has ended
 *     spawn_kill(pidfd, SIGKILL)       never hits another process: it goes through the pidfd
 *     spawn_reap(pidfd, 0, …)          collects how it ended; closes nothing, since an event loop may watch the pidfd
 *     spawn_release(&child)            closes what the caller has not moved elsewhere; does not kill
 *     spawn_find_ended()               finds a zombie among all children, whatever became of its pidfd
 *
 * The child has /dev/null as standard input, ours (or `log_fd`) as output and error, descriptor 3, and no others; all signals
 * at their defaults and none blocked; a process group of its own, so that Ctrl-C at a terminal reaches the daemon only.
 * It gets SIGKILL when the THREAD that called spawn_start ends: call it from a thread that lives as long as the process.
 * Safe in a process with threads: nothing of the program runs between the fork and the exec. */
#pragma once
#include <sys/types.h>
#include "base/err.h"

enum { SPAWN_CONTROL_FD = 3 };

struct spawn_spec {
	const char *path;              /* of the program; no search */
	char *const *argv;             /* NULL-terminated; NULL: only the path */
	char *const *envp;             /* NULL: ours */
	int log_fd;                    /* its output and error; -1: our standard error */
};

struct spawn_child {
	pid_t pid;
	int pidfd, control_fd;         /* -1 when closed, or moved to another owner */
};

struct spawn_exit {
	bool signalled;                /* ended by a signal, else by itself */
	int code;                      /* the signal's number, or the exit code */
};

#define SPAWN_NONE ((struct spawn_child){ .pid = -1, .pidfd = -1, .control_fd = -1 })

FALLIBLE enum err spawn_start(const struct spawn_spec *spec, struct spawn_child *child_out);
FALLIBLE enum err spawn_kill(int pidfd, int signo);            /* already ended, or no pidfd (-1), is fine */
/* Waits up to timeout_ms (-1: for ever) for the end. ended_out false: it still runs. Fails for a child that was collected before. */
FALLIBLE enum err spawn_reap(int pidfd, int timeout_ms, bool *ended_out, struct spawn_exit *exit_out);
/* A descriptor that becomes readable when the process ends, whoever its parent is. ERR_SYSTEM: there is none of that number here. */
FALLIBLE enum err spawn_pidfd(pid_t pid, int *pidfd_out);
/* The pid of a child that has ended and was not collected yet, without collecting it; 0: there is none. One waitid call. */
pid_t spawn_find_ended(void);
void spawn_collect(pid_t pid);                                 /* for an ended child without a pidfd; never waits */
void spawn_release(struct spawn_child *child);
