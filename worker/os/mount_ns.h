/* mount_ns.h: a mount namespace of the process's own, whose tree holds the storage roots and nothing else. sandbox.h uses it where the
 * kernel has no Landlock.
 *
 * Afterwards an absolute path and ".." lead to an empty, read-only directory, and each root's descriptor stands for the same directory
 * beneath it, under its old number. Mounts beneath a root are there; those that the host makes later appear if its mounts are shared, as
 * they are under systemd. A root stays busy until the process ends, whatever the host unmounts.
 *
 * Needs CAP_SYS_ADMIN, or, with `user_ns`, a kernel that lets anyone make a user namespace. There only the caller's own uid and gid are
 * known: other users' files show OVERFLOW_ID, and no file can be given to another group. Other descriptors of directories, if the process
 * has any, still lead to the host's tree. */
#pragma once
#include "os/sandbox.h"

enum { OVERFLOW_ID = 65534 };

/* On an error err_last() says why, and the roots can be used as before. user_ns_out: the process has a user namespace of its own, which a
 * later error does not take back. */
FALLIBLE enum err mount_ns_enter(const struct sandbox_root *roots, uint32_t root_count, bool user_ns, bool *user_ns_out);
