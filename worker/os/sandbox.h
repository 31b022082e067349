/* sandbox.h: a worker gives up what it does not need, before it reads the first byte that others wrote.
 *
 *     open the roots, make the I/O engine (io_engine_open), map nothing hostile yet
 *     sandbox_enter(&spec, &done)      from a process with ONE thread: threads that exist already would stay outside
 *     done.kind, .seccomp              what was achieved, for HELLO
 *
 * Afterwards: no new privileges, and of capabilities only those that access to files and their ownership need; files only beneath the
 * roots (by Landlock, or without it by a mount namespace where the process may make one: mount_ns.h), and only by openat2 on a root's
 * descriptor; no sockets, no new processes, no programs, no tracing, no memory that is both written and executed, no io_uring_setup (the
 * ring made before works on). With `ports`, TCP connects to these (where Landlock knows ports), and names are resolved: UDP, a few files
 * of /etc, and open() for reading. With `network`, TCP over IPv4 and IPv6 is added, and nothing else of sockets: what the tcp back end of
 * comm uses. Threads, memory, the descriptors held, memfd_create and descriptor passing work. A forbidden call fails with EPERM; exec and
 * ptrace, which nothing of ours ever tries, end the process. The confinement cannot be undone, only tightened.
 *
 * A host without confinement or without seccomp is no error: `done` says so, and the coordinator shows it. Builds with address or
 * thread sanitizer skip all, since their run time needs what is forbidden. */
#pragma once
#include "base/err.h"

struct sandbox_root {
	int fd;                        /* of the directory; a mount namespace replaces what is open under this number */
	bool writable;
	const char *path;              /* of the directory; only a mount namespace needs it */
};

struct sandbox_spec {
	const struct sandbox_root *roots;
	uint32_t root_count;
	uint64_t data_bytes;           /* of private memory (RLIMIT_DATA; segments do not count); 0: no limit */
	uint64_t file_bytes;           /* of one file (RLIMIT_FSIZE): a larger write fails with EFBIG; 0: no limit */
	uint64_t open_files;           /* 0: as many as the hard limit allows */
	bool network;                  /* TCP: connect anywhere, listen on ports that the system chooses */
	const uint16_t *ports;         /* TCP ports of storages that the process connects to, and names are resolved for; … */
	uint32_t port_count;
	const char *const *readable;   /* files and directories that are read for that: credentials; NULL ends them. May be NULL */
	bool device;                   /* a GPU's driver opens devices and libraries: limits only, no confinement, no seccomp */
	bool gives_groups;             /* files get a group other than the process's own: rules out a user namespace */
};

struct sandbox_done {
	const char *kind;              /* of the confinement to the roots: "landlock", "mount_namespace" or "none" */
	char why[200];                 /* why it is "none"; "" if it was not tried */
	int landlock_abi;              /* 0: none */
	bool seccomp;
};

FALLIBLE enum err sandbox_enter(const struct sandbox_spec *spec, struct sandbox_done *done_out);
