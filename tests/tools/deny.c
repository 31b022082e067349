/* deny.c: runs a program on a host that denies system calls, as a container's seccomp profile does:
 *
 *     deny landlock_create_ruleset,unshare PROGRAM [ARGUMENT]…
 *
 * They fail with EPERM there, and in all that the program starts. */
#include <errno.h>
#include <seccomp.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

int main(int argc, char **argv)
{
	scmp_filter_ctx ctx = seccomp_init(SCMP_ACT_ALLOW);

	if (argc < 3 || !ctx) {
		fprintf(stderr, "usage: deny CALL,… PROGRAM [ARGUMENT]…\n");
		return 2;
	}
	for (char *name; (name = strsep(&argv[1], ",")) != NULL;)
		if (seccomp_rule_add(ctx, SCMP_ACT_ERRNO(EPERM), seccomp_syscall_resolve_name(name), 0) < 0) {
			fprintf(stderr, "deny: no system call '%s'\n", name);
			return 2;
		}
	if (seccomp_load(ctx) < 0) {
		fprintf(stderr, "deny: seccomp is not to be had\n");
		return 2;
	}
	seccomp_release(ctx);
	execvp(argv[2], argv + 2);
	perror(argv[2]);
	return 2;
}
