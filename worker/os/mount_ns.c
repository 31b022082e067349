/* mount_ns.c: see mount_ns.h.
 *
 * Why clones of the roots: a descriptor that was opened before leads by ".." to the host's tree. A clone is mounted at the new tree,
 * where ".." ends. Why slaves: a mount that the host makes beneath a root later must appear here, and no mount of this tree may appear on
 * the host. Why the old tree is detached, not only hidden by chroot: a namespace with the host's mounts keeps their file systems busy. */
#include "os/mount_ns.h"

#include <fcntl.h>
#include <limits.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/mem.h"
#include "os/fs.h"

static FALLIBLE enum err write_text(const char *path, const char *text)
{
	CLEANUP(fs_drop) int fd = open(path, O_WRONLY | O_CLOEXEC);

	if (fd < 0 || write(fd, text, strlen(text)) < 0)
		return ERR_SYS(SYSTEM, "cannot write '%s'", path);
	return OK;
}

static FALLIBLE enum err map_own_ids(uid_t uid, gid_t gid)
{
	char text[64];

	TRY(write_text("/proc/self/setgroups", "deny"));
	snprintf(text, sizeof text, "%u %u 1", uid, uid);
	TRY(write_text("/proc/self/uid_map", text));
	snprintf(text, sizeof text, "%u %u 1", gid, gid);
	return write_text("/proc/self/gid_map", text);
}

static FALLIBLE enum err leave_namespaces(bool user_ns, bool *user_ns_out)
{
	const uid_t uid = geteuid();
	const gid_t gid = getegid();

	if (unshare(CLONE_NEWNS) == 0)
		return OK;
	if (!user_ns || access("/proc/self/uid_map", W_OK) < 0)
		return ERR_SYS(SYSTEM, "cannot make a mount namespace");
	if (unshare(CLONE_NEWUSER | CLONE_NEWNS) < 0)
		return ERR_SYS(SYSTEM, "cannot make a user namespace");
	*user_ns_out = true;
	return map_own_ids(uid, gid);
}

/* An empty tmpfs, not yet attached. */
static FALLIBLE enum err new_tree(int *out)
{
	CLEANUP(fs_drop) int fs = fsopen("tmpfs", FSOPEN_CLOEXEC);

	if (fs < 0 || fsconfig(fs, FSCONFIG_SET_STRING, "size", "4k", 0) < 0 || fsconfig(fs, FSCONFIG_SET_STRING, "mode", "0755", 0) < 0 ||
	    fsconfig(fs, FSCONFIG_CMD_CREATE, NULL, NULL, 0) < 0)
		return ERR_SYS(SYSTEM, "cannot make a tmpfs");
	*out = fsmount(fs, FSMOUNT_CLOEXEC, 0);
	return *out < 0 ? ERR_SYS(SYSTEM, "cannot mount a tmpfs") : OK;
}

static FALLIBLE enum err clone_roots(const struct sandbox_root *roots, uint32_t n, int *clones)
{
	struct mount_attr read_only = { .attr_set = MOUNT_ATTR_RDONLY };

	for (uint32_t i = 0; i < n; i++) {
		clones[i] = open_tree(AT_FDCWD, roots[i].path ? roots[i].path : "", OPEN_TREE_CLONE | AT_RECURSIVE | OPEN_TREE_CLOEXEC);
		if (clones[i] < 0)
			return ERR_SYS(SYSTEM, "cannot clone the mount of storage root %u", i);
		if (!roots[i].writable && mount_setattr(clones[i], "", AT_EMPTY_PATH | AT_RECURSIVE, &read_only, sizeof read_only) < 0)
			return ERR_SYS(SYSTEM, "cannot make storage root %u read-only", i);
	}
	return OK;
}

/* Makes a directory and those above it. false: that failed, or leads into a root that is mounted already, whose links lead anywhere. */
static bool make_dirs(int tree, char *path)
{
	struct stat own, st;

	if (fstat(tree, &own) < 0)
		return false;
	for (char *end = path; *end;) {
		end += 1 + strcspn(end + 1, "/");
		char after = *end;
		*end = '\0';
		if ((mkdirat(tree, path, 0755) < 0 && errno != EEXIST) || fstatat(tree, path, &st, AT_SYMLINK_NOFOLLOW) < 0 ||
		    st.st_dev != own.st_dev)
			return false;
		*end = after;
	}
	return true;
}

/* Under the path that the host has for it, so that /proc/PID/fd, lsof and strace show that; where this cannot be, under its number. */
static FALLIBLE enum err make_place(int tree, uint32_t i, const char *path, char place[PATH_MAX])
{
	path += strspn(path, "/");
	snprintf(place, PATH_MAX, "%s", path);
	if (path[0] && strlen(path) < PATH_MAX && !strstr(path, "..") && make_dirs(tree, place))
		return OK;
	snprintf(place, PATH_MAX, "%u", i);
	return make_dirs(tree, place) ? OK : ERR_SYS(SYSTEM, "cannot make a place for storage root %u", i);
}

/* Mounts the clone in the tree and puts a descriptor of its root directory in the place of the old one. */
static FALLIBLE enum err put_root(int tree, uint32_t i, int clone, const struct sandbox_root *r)
{
	struct stat before, now;
	char place[PATH_MAX];

	TRY(make_place(tree, i, r->path, place));
	if (move_mount(clone, "", tree, place, MOVE_MOUNT_F_EMPTY_PATH) < 0)
		return ERR_SYS(SYSTEM, "cannot mount storage root %u", i);
	CLEANUP(fs_drop) int root = openat(tree, place, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	if (root < 0 || fstat(r->fd, &before) < 0 || fstat(root, &now) < 0)
		return ERR_SYS(SYSTEM, "cannot open storage root %u anew", i);
	if (before.st_dev != now.st_dev || before.st_ino != now.st_ino)
		return ERR(SYSTEM, "storage root %u was replaced meanwhile", i);
	return dup3(root, r->fd, O_CLOEXEC) < 0 ? ERR_SYS(SYSTEM, "cannot replace a descriptor") : OK;
}

/* pivot_root(".", ".") puts the old tree on top of the new one, where "." still is when it is detached: pivot_root(2). */
static FALLIBLE enum err change_root(int tree)
{
	if (fchdir(tree) < 0 || syscall(SYS_pivot_root, ".", ".") < 0)
		return ERR_SYS(SYSTEM, "cannot change the root directory");
	if (umount2(".", MNT_DETACH) < 0 || chdir("/") < 0)
		return ERR_SYS(SYSTEM, "cannot leave the old root directory");
	if (mount(NULL, "/", NULL, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL) < 0)
		return ERR_SYS(SYSTEM, "cannot make the new root directory read-only");
	return OK;
}

static FALLIBLE enum err build_tree(const struct sandbox_root *roots, uint32_t n, int *clones)
{
	CLEANUP(fs_drop) int tree = -1;

	if (mount(NULL, "/", NULL, MS_REC | MS_SLAVE, NULL) < 0)
		return ERR_SYS(SYSTEM, "cannot keep mounts from the host");
	/* The clones come first: one of "/" would hold the new tree on its top. */
	TRY(clone_roots(roots, n, clones));
	TRY(new_tree(&tree));
	if (move_mount(tree, "", AT_FDCWD, "/", MOVE_MOUNT_F_EMPTY_PATH) < 0)
		return ERR_SYS(SYSTEM, "cannot attach a tmpfs");
	for (uint32_t i = 0; i < n; i++)
		TRY(put_root(tree, i, clones[i], &roots[i]));
	return change_root(tree);
}

enum err mount_ns_enter(const struct sandbox_root *roots, uint32_t root_count, bool user_ns, bool *user_ns_out)
{
	CLEANUP(mem_free_ptr) int *clones = mem_zalloc(root_count + 1, sizeof *clones);

	*user_ns_out = false;
	NEED(clones, "no memory for %u storage roots", root_count);
	for (uint32_t i = 0; i < root_count; i++)
		clones[i] = -1;
	enum err e = leave_namespaces(user_ns, user_ns_out);
	e = e ?: build_tree(roots, root_count, clones);
	for (uint32_t i = 0; i < root_count; i++)
		fs_drop(&clones[i]);
	return e;
}
