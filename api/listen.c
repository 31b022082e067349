/* listen.c: see listen.h.
 *
 * A Unix socket's file outlives its daemon. Removing it blindly would cut off a daemon that is alive, so a connect tells first
 * whether someone answers. */
#include "api/listen.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <systemd/sd-daemon.h>
#include <unistd.h>

enum { BACKLOG = 512 };

static FALLIBLE enum err check_path(const char *path)
{
	const struct sockaddr_un *a = NULL;

	if (strlen(path) == 0 || strlen(path) >= sizeof a->sun_path)
		return ERR(CONFIG, "the socket's path \"%.64s\" must have 1 to %zu bytes", path, sizeof a->sun_path - 1);
	return OK;
}

static FALLIBLE enum err listen_unix(const char *path, gid_t group, struct http_listener *out)
{
	struct sockaddr_un a = { .sun_family = AF_UNIX };
	struct stat st;
	int fd, probe;

	TRY(check_path(path));
	memcpy(a.sun_path, path, strlen(path) + 1);
	probe = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (probe < 0)
		return ERR_SYS(CONFIG, "cannot make a Unix socket");
	int live = connect(probe, (struct sockaddr *)&a, sizeof a);
	int why = errno;
	close(probe);
	if (live == 0 || why == EAGAIN)
		return ERR(CONFIG, "another daemon listens on %s", path);
	/* A file that is no socket refuses connections too, but is not ours to remove. */
	if (lstat(path, &st) == 0 && !S_ISSOCK(st.st_mode))
		return ERR(CONFIG, "%s is there and is no socket", path);
	if (why == ECONNREFUSED && unlink(path) != 0)
		return ERR_SYS(CONFIG, "cannot remove the left-over socket %s", path);

	fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (fd < 0)
		return ERR_SYS(CONFIG, "cannot make a Unix socket");
	/* Born closed, and opened to the group that --allow-group names, if any: its members are told apart by peer credentials. */
	mode_t before = umask(0177);
	int bound = bind(fd, (struct sockaddr *)&a, sizeof a);
	why = errno;
	umask(before);
	errno = why;
	if (bound != 0 || listen(fd, BACKLOG) != 0 ||
	    (group != (gid_t)-1 && (chown(path, (uid_t)-1, group) != 0 || chmod(path, 0660) != 0))) {
		enum err e = ERR_SYS(CONFIG, "cannot listen on %s", path);
		close(fd);
		return e;
	}
	out->fd = fd;
	out->is_unix = true;
	snprintf(out->url, sizeof out->url, "unix://%s", path);
	return OK;
}

static bool is_loopback(const struct sockaddr *a)
{
	if (a->sa_family == AF_INET)
		return (ntohl(((const struct sockaddr_in *)(const void *)a)->sin_addr.s_addr) >> 24) == 127;
	return IN6_IS_ADDR_LOOPBACK(&((const struct sockaddr_in6 *)(const void *)a)->sin6_addr);
}

/* Fills in out->url. */
static FALLIBLE enum err name_tcp(const struct sockaddr *a, socklen_t n, struct http_listener *out)
{
	char host[64] = "", port[16] = "";

	if (getnameinfo(a, n, host, sizeof host, port, sizeof port, NI_NUMERICHOST | NI_NUMERICSERV) != 0)
		return ERR(CONFIG, "cannot tell the address of a socket");
	snprintf(out->url, sizeof out->url, a->sa_family == AF_INET6 ? "%s://[%s]:%s" : "%s://%s:%s", out->tls ? "https" : "http",
		 host, port);
	return OK;
}

static FALLIBLE enum err bind_tcp(const struct addrinfo *a, const char *address, struct http_listener *out)
{
	int one = 1, fd = socket(a->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	struct sockaddr_storage real;
	socklen_t n = sizeof real;

	if (fd < 0)
		return ERR_SYS(CONFIG, "cannot make a socket for %s", address);
	(void)setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
	(void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
	if (a->ai_family == AF_INET6)
		(void)setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &one, sizeof one);
	if (bind(fd, a->ai_addr, a->ai_addrlen) != 0 || listen(fd, BACKLOG) != 0 ||
	    getsockname(fd, (struct sockaddr *)&real, &n) != 0) {
		enum err e = ERR_SYS(CONFIG, "cannot listen on %s", address);
		close(fd);
		return e;
	}
	out->fd = fd;
	enum err e = name_tcp((struct sockaddr *)&real, n, out);
	if (e)
		close(fd);
	return e;
}

/* The addresses that HOST:PORT stands for; the caller frees the list. */
static FALLIBLE enum err resolve(const char *address, bool tls, bool insecure, struct addrinfo **out)
{
	const char *colon = strrchr(address, ':'), *port = colon ? colon + 1 : address;
	struct addrinfo hints = { .ai_socktype = SOCK_STREAM, .ai_flags = AI_PASSIVE | AI_NUMERICSERV }, *list = NULL;
	char host[256] = "127.0.0.1";
	uint64_t number = 0;

	if (!str_to_u64(str_of(port), &number) || number > 65535)
		return ERR(CONFIG, "\"%.100s\" is no address: unix:PATH, HOST:PORT or PORT", address);
	if (colon) {
		size_t n = (size_t)(colon - address), from = n > 2 && address[0] == '[' && address[n - 1] == ']';
		if (n == 0 || n >= sizeof host)
			return ERR(CONFIG, "\"%.100s\" has no host", address);
		snprintf(host, sizeof host, "%.*s", (int)(n - 2 * from), address + from);
	}
	if (getaddrinfo(host, port, &hints, &list) != 0 || !list)
		return ERR(CONFIG, "the host \"%.100s\" is not known", host);
	if (!is_loopback(list->ai_addr) && !tls && !insecure) {
		freeaddrinfo(list);
		return ERR(CONFIG, "%s is beyond loopback: give --tls-cert and --tls-key, or --insecure-http", address);
	}
	*out = list;
	return OK;
}

static FALLIBLE enum err listen_tcp(const char *address, bool insecure, struct http_listener *out)
{
	struct addrinfo *list;

	TRY(resolve(address, out->tls, insecure, &list));
	enum err e = bind_tcp(list, address, out);
	freeaddrinfo(list);
	return e;
}

FALLIBLE enum err listen_check(const char *address, bool tls, bool insecure)
{
	struct addrinfo *list;

	if (str_starts(str_of(address), "unix:"))
		return check_path(address + 5);
	TRY(resolve(address, tls, insecure, &list));
	freeaddrinfo(list);
	return OK;
}

FALLIBLE enum err listen_open(const char *address, bool tls, bool insecure, gid_t group, struct http_listener *out)
{
	struct http_listener l = { .fd = -1, .tls = tls };

	if (str_starts(str_of(address), "unix:")) {
		l.tls = false;
		TRY(listen_unix(address + 5, group, &l));
	} else {
		TRY(listen_tcp(address, insecure, &l));
	}
	*out = l;
	return OK;
}

/* ---- sockets of a service manager ---- */

FALLIBLE enum err listen_given_take(struct listen_given *out)
{
	int n = sd_listen_fds(1);

	*out = (struct listen_given){ .count = 0 };
	if (n < 0)
		return ERR(CONFIG, "cannot take over the sockets of LISTEN_FDS: %s", strerror(-n));
	for (int i = 0; i < n; i++) {
		int fd = SD_LISTEN_FDS_START + i, flags = fcntl(fd, F_GETFL);
		if (i >= LISTEN_GIVEN_MAX)
			return ERR(CONFIG, "LISTEN_FDS has %d sockets, at most %d are taken over", n, LISTEN_GIVEN_MAX);
		if (flags < 0 || sd_is_socket(fd, AF_UNSPEC, SOCK_STREAM, 1) <= 0)
			return ERR(CONFIG, "descriptor %d of LISTEN_FDS is no stream socket that listens", fd);
		if (fcntl(fd, F_SETFL, flags | O_NONBLOCK) != 0)
			return ERR_SYS(CONFIG, "cannot take over descriptor %d of LISTEN_FDS", fd);
		out->fd[out->count++] = fd;
	}
	return OK;
}

static bool is_same(const struct sockaddr *a, const struct sockaddr *b)
{
	if (a->sa_family != b->sa_family)
		return false;
	if (a->sa_family == AF_INET) {
		const struct sockaddr_in *x = (const void *)a, *y = (const void *)b;
		return x->sin_port == y->sin_port && x->sin_addr.s_addr == y->sin_addr.s_addr;
	}
	const struct sockaddr_in6 *x = (const void *)a, *y = (const void *)b;
	return x->sin6_port == y->sin6_port && memcmp(&x->sin6_addr, &y->sin6_addr, sizeof x->sin6_addr) == 0;
}

/* Is the socket's own address `real` the one that `address` names? */
static FALLIBLE enum err is_named(const struct sockaddr *real, const char *address, bool *out)
{
	struct addrinfo *list;

	*out = false;
	if (str_starts(str_of(address), "unix:")) {
		const struct sockaddr_un *u = (const void *)real;
		*out = real->sa_family == AF_UNIX && strncmp(u->sun_path, address + 5, sizeof u->sun_path) == 0;
		return OK;
	}
	if (real->sa_family != AF_INET && real->sa_family != AF_INET6)
		return OK;
	TRY(resolve(address, true, true, &list));
	*out = is_same(real, list->ai_addr);
	freeaddrinfo(list);
	return OK;
}

/* getsockname, with a path's end: sun_path need not have one. */
static FALLIBLE enum err address_of(int fd, struct sockaddr_storage *out, socklen_t *n_out)
{
	*out = (struct sockaddr_storage){ 0 };
	*n_out = sizeof *out - 1;
	if (getsockname(fd, (struct sockaddr *)out, n_out) != 0)
		return ERR_SYS(CONFIG, "cannot tell the address of descriptor %d", fd);
	return OK;
}

FALLIBLE enum err listen_given_use(struct listen_given *g, const char *address, bool tls, struct http_listener *out)
{
	struct http_listener l = { .fd = -1, .is_given = true, .is_unix = str_starts(str_of(address), "unix:") };
	struct sockaddr_storage real;
	socklen_t n;
	int one = 1;

	l.tls = tls && !l.is_unix;
	*out = (struct http_listener){ .fd = -1 };
	for (uint32_t i = 0; i < g->count; i++) {
		bool same;
		TRY(address_of(g->fd[i], &real, &n));
		TRY(is_named((struct sockaddr *)&real, address, &same));
		if (!same)
			continue;
		l.fd = g->fd[i];
		g->fd[i] = g->fd[--g->count];
		*out = l;
		if (l.is_unix) {
			snprintf(out->url, sizeof out->url, "unix://%s", address + 5);
			return OK;
		}
		(void)setsockopt(l.fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
		return name_tcp((struct sockaddr *)&real, n, out);
	}
	return OK;
}

FALLIBLE enum err listen_given_end(struct listen_given *g)
{
	struct http_listener l = { .fd = -1 };
	struct sockaddr_storage real;
	socklen_t n;

	if (g->count == 0)
		return OK;
	enum err e = address_of(g->fd[0], &real, &n);
	if (e == OK && real.ss_family == AF_UNIX)
		snprintf(l.url, sizeof l.url, "unix:%s", ((struct sockaddr_un *)(void *)&real)->sun_path);
	else if (e == OK)
		e = name_tcp((struct sockaddr *)&real, n, &l);
	for (uint32_t i = 0; i < g->count; i++)
		close(g->fd[i]);
	g->count = 0;
	return e ?: ERR(CONFIG, "the service manager listens on %s, which no `listen` names: add it, or take it out of the socket unit",
			l.url);
}

void listen_close(struct http_listener *l)
{
	if (l->is_unix && !l->is_given)
		(void)unlink(l->url + strlen("unix://"));
	if (l->fd >= 0)
		close(l->fd);
	l->fd = -1;
}
