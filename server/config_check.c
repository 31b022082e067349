/* config_check.c: --check-config beyond the form of the options: folders, sockets and files as the daemon will find them.
 *
 * All that is wrong is said, one line each: who corrects a configuration wants one round, not six. Nothing is made. Permissions are
 * those of the user who runs the check, and the line says which. A storage may be a dead NFS, so a child process looks at it. */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "server/config.h"

enum { STORAGE_MS = 5000, PEM_HEAD = 64 << 10 };

struct check {
	FILE *to;
	unsigned wrong;
};

static void PRINTF_LIKE(4, 5) say(struct check *k, const char *what, const char *path, const char *fmt, ...)
{
	char text[256];
	va_list args;

	va_start(args, fmt);
	vsnprintf(text, sizeof text, fmt, args);
	va_end(args);
	fprintf(k->to, "dcpd: %s: %s %s\n", what, path, text);
	k->wrong++;
}

/* A directory that the daemon's user may read, enter and (mode W_OK) write. */
static void check_dir(struct check *k, const char *what, const char *path, int mode)
{
	struct stat st;

	if (stat(path, &st) != 0)
		say(k, what, path, "cannot be looked at: %s", strerror(errno));
	else if (!S_ISDIR(st.st_mode))
		say(k, what, path, "is no directory");
	else if (faccessat(AT_FDCWD, path, R_OK | X_OK, AT_EACCESS) != 0)
		say(k, what, path, "cannot be read by uid %u: %s", (unsigned)geteuid(), strerror(errno));
	else if ((mode & W_OK) && faccessat(AT_FDCWD, path, W_OK, AT_EACCESS) != 0)
		say(k, what, path, "cannot be written to by uid %u: %s", (unsigned)geteuid(), strerror(errno));
}

/* The daemon makes the state directory, so that the nearest folder above it must be there and writable. */
static void check_state_dir(struct check *k, const char *path)
{
	char parent[CONFIG_PATH_MAX];
	struct stat st;

	if (stat(path, &st) == 0 || (errno != ENOENT && errno != ENOTDIR)) {
		check_dir(k, "state-dir", path, W_OK);
		return;
	}
	snprintf(parent, sizeof parent, "%s", path);
	while (stat(parent, &st) != 0) {
		char *slash = strrchr(parent, '/');
		if (!slash)
			break;
		slash[slash == parent] = '\0';
	}
	if (!S_ISDIR(st.st_mode))
		say(k, "state-dir", path, "cannot be made: %s is no directory", parent);
	else if (faccessat(AT_FDCWD, parent, W_OK | X_OK, AT_EACCESS) != 0)
		say(k, "state-dir", path, "cannot be made in %s by uid %u: %s", parent, (unsigned)geteuid(), strerror(errno));
}

static void check_storage(struct check *k, const char *item)
{
	struct str name;
	const char *dir;
	char what[64];
	int status = 0;

	if (config_storage(item, &name, &dir) != OK)
		return; /* config_load has refused it */
	if (dir[0] != '/')
		return; /* is asked by the daemon's workers, and may be away now and then */
	snprintf(what, sizeof what, "storage %.*s", (int)name.n, name.p);
	fflush(k->to);
	pid_t child = fork();
	if (child == 0) {
		struct check own = { .to = k->to };
		/* a read-only file system is a storage to read from */
		check_dir(&own, what, dir, faccessat(AT_FDCWD, dir, W_OK, AT_EACCESS) != 0 && errno == EROFS ? R_OK : W_OK);
		fflush(k->to);
		_exit(own.wrong > 0);
	}
	if (child < 0) {
		say(k, what, dir, "cannot be looked at: %s", strerror(errno));
		return;
	}
	for (int ms = 0; waitpid(child, &status, WNOHANG) == 0; ms += 10) {
		if (ms >= STORAGE_MS) {
			kill(child, SIGKILL);
			say(k, what, dir, "does not answer");
			return;
		}
		(void)poll(NULL, 0, 10);
	}
	k->wrong += status != 0;
}

static void check_socket(struct check *k, const char *path, const char *state_dir)
{
	char folder[CONFIG_PATH_MAX];
	const char *slash = strrchr(path, '/');
	struct stat st;

	if (lstat(path, &st) == 0 && !S_ISSOCK(st.st_mode)) {
		say(k, "listen", path, "is there and is no socket");
		return;
	}
	snprintf(folder, sizeof folder, "%.*s", slash ? (int)(slash - path) + (slash == path) : 1, slash ? path : ".");
	if (strcmp(folder, state_dir) != 0) /* which the daemon makes */
		check_dir(k, "listen", folder, W_OK);
}

/* A PEM file that can be read. Whether key and certificate fit each other, the TLS library says at start. */
static void check_pem(struct check *k, const char *what, const char *path)
{
	char head[PEM_HEAD + 1];
	FILE *f = path ? fopen(path, "re") : NULL;

	if (!path)
		return;
	if (!f) {
		say(k, what, path, "cannot be read by uid %u: %s", (unsigned)geteuid(), strerror(errno));
		return;
	}
	head[fread(head, 1, PEM_HEAD, f)] = '\0';
	fclose(f);
	if (!strstr(head, "-----BEGIN "))
		say(k, what, path, "is no PEM file");
}

static void check_web_root(struct check *k, const char *path)
{
	char page[CONFIG_PATH_MAX + 16];
	unsigned before = k->wrong;

	check_dir(k, "web-root", path, R_OK);
	snprintf(page, sizeof page, "%s/index.html", path);
	if (k->wrong == before && access(page, R_OK) != 0)
		say(k, "web-root", path, "has no index.html that can be read");
}

unsigned config_check_paths(const struct config *c, FILE *to)
{
	struct check k = { .to = to };

	check_state_dir(&k, c->state_dir);
	for (uint32_t i = 0; i < c->storage.count; i++)
		check_storage(&k, c->storage.items[i]);
	for (uint32_t i = 0; i < c->listen.count; i++)
		if (strncmp(c->listen.items[i], "unix:", 5) == 0)
			check_socket(&k, c->listen.items[i] + 5, c->state_dir);
	check_pem(&k, "tls-cert", c->tls_cert);
	check_pem(&k, "tls-key", c->tls_key);
	if (c->web_root)
		check_web_root(&k, c->web_root);
	if (access(c->worker_path, X_OK) != 0)
		say(&k, "worker-path", c->worker_path, "cannot be run: %s", strerror(errno));
	return k.wrong;
}
