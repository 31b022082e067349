/* tcp_net.c: the sockets of the tcp back end. Only numbers are understood as addresses: a name would need a resolver, which blocks,
 * reads files and has no place in a sandbox. An interface's IPv4 address comes from the kernel by one ioctl for the same reason. */
#include "comm/tcp_impl.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

static socklen_t length_of(const struct sockaddr_storage *at)
{
	return at->ss_family == AF_INET6 ? sizeof(struct sockaddr_in6) : sizeof(struct sockaddr_in);
}

static bool parse_number(const char *text, struct sockaddr_storage *out)
{
	struct sockaddr_in a4 = { .sin_family = AF_INET };
	struct sockaddr_in6 a6 = { .sin6_family = AF_INET6 };

	memset(out, 0, sizeof *out);
	if (inet_pton(AF_INET, text, &a4.sin_addr) == 1) {
		memcpy(out, &a4, sizeof a4);
		return true;
	}
	if (inet_pton(AF_INET6, text, &a6.sin6_addr) != 1)
		return false;
	memcpy(out, &a6, sizeof a6);
	return true;
}

static bool interface_v4(const char *name, struct sockaddr_storage *out)
{
	struct ifreq r = { 0 };
	size_t n = strlen(name);

	if (n >= sizeof r.ifr_name)
		return false;
	memcpy(r.ifr_name, name, n);
	int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	if (fd < 0)
		return false;
	bool found = ioctl(fd, SIOCGIFADDR, &r) == 0;
	close(fd);
	memset(out, 0, sizeof *out);
	memcpy(out, &r.ifr_addr, sizeof r.ifr_addr);
	return found;
}

/* Works outside the sandbox only. Link-local addresses mean nothing on another host. */
static bool interface_v6(const char *name, struct sockaddr_storage *out)
{
	struct ifaddrs *all;
	bool found = false;

	if (getifaddrs(&all) < 0)
		return false;
	for (const struct ifaddrs *i = all; i && !found; i = i->ifa_next) {
		const struct sockaddr_in6 *a = (const void *)i->ifa_addr;
		if (!a || a->sin6_family != AF_INET6 || strcmp(i->ifa_name, name) != 0 || IN6_IS_ADDR_LINKLOCAL(&a->sin6_addr))
			continue;
		memset(out, 0, sizeof *out);
		memcpy(out, a, sizeof *a);
		found = true;
	}
	freeifaddrs(all);
	return found;
}

enum err tcp_listen(const char *where, uint32_t backlog, int *fd_out, struct sockaddr_storage *at_out)
{
	struct sockaddr_storage at;
	const char *name = where ? where : "127.0.0.1";
	socklen_t n = sizeof at;
	int one = 1;

	if (!parse_number(name, &at) && !interface_v4(name, &at) && !interface_v6(name, &at))
		return ERR(BACKEND_UNAVAILABLE, "\"%s\" is neither an address nor an interface with one", name);
	int fd = socket(at.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (fd < 0)
		return ERR_SYS(BACKEND_UNAVAILABLE, "cannot make a socket");
	if (at.ss_family == AF_INET6)
		(void)setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &one, sizeof one);
	if (bind(fd, (const struct sockaddr *)&at, length_of(&at)) < 0 || listen(fd, (int)backlog) < 0 ||
	    getsockname(fd, (struct sockaddr *)&at, &n) < 0) {
		enum err e = ERR_SYS(BACKEND_UNAVAILABLE, "cannot listen on %s", name);
		close(fd);
		return e;
	}
	*fd_out = fd;
	*at_out = at;
	return OK;
}

enum err tcp_connect(const struct sockaddr_storage *at, int *fd_out)
{
	int fd = socket(at->ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);

	if (fd < 0)
		return ERR_SYS(BACKEND_UNAVAILABLE, "cannot make a socket");
	if (connect(fd, (const struct sockaddr *)at, length_of(at)) < 0 && errno != EINPROGRESS && errno != EINTR) {
		enum err e = ERR_SYS(PEER_LOST, "cannot connect");
		close(fd);
		return e;
	}
	*fd_out = fd;
	return OK;
}

/* None of these is needed to be right, only to be fast or to learn sooner that a host has vanished. */
void tcp_tune(int fd, uint32_t deadline_ms)
{
	int one = 1, idle_s = 10, count = 3;
	unsigned timeout_ms = deadline_ms;

	(void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
	(void)setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &one, sizeof one);
	(void)setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle_s, sizeof idle_s);
	(void)setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &idle_s, sizeof idle_s);
	(void)setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &count, sizeof count);
	(void)setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &timeout_ms, sizeof timeout_ms);
}
