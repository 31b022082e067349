/* listen.c: see listen.h.
 *
 * A Unix socket's file outlives its daemon. Removing it blindly would cut off a daemon that is alive, so a connect tells first
 * whether someone answers. */
#include "api/listen.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
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

static FALLIBLE enum err bind_tcp(const struct addrinfo *a, const char *address, struct http_listener *out)
{
	int one = 1, fd = socket(a->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	struct sockaddr_storage real;
	socklen_t n = sizeof real;
	char host[64] = "", port[16] = "";

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
	if (getnameinfo((struct sockaddr *)&real, n, host, sizeof host, port, sizeof port,
			NI_NUMERICHOST | NI_NUMERICSERV) != 0) {
		close(fd);
		return ERR(CONFIG, "cannot tell the address of %s", address);
	}
	out->fd = fd;
	snprintf(out->url, sizeof out->url, a->ai_family == AF_INET6 ? "%s://[%s]:%s" : "%s://%s:%s",
		 out->tls ? "https" : "http", host, port);
	return OK;
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

void listen_close(struct http_listener *l)
{
	if (l->is_unix)
		(void)unlink(l->url + strlen("unix://"));
	if (l->fd >= 0)
		close(l->fd);
	l->fd = -1;
}
