/* bare_mhd.c: the limit for REST requests: libmicrohttpd as dcpd uses it (epoll, driven from outside, one thread), with nothing
 * behind it. Answers every GET with the bytes of FILE and the headers given, so that both sides send the same.
 *
 *     bare_mhd FILE [NAME VALUE]…      prints its port, serves until killed */
#include <arpa/inet.h>
#include <microhttpd.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>

static char body[65536];
static size_t body_bytes;
static char **headers;

static enum MHD_Result answer(void *user, struct MHD_Connection *c, const char *url, const char *method,
			      const char *version, const char *data, size_t *data_bytes, void **state)
{
	static int seen;

	(void)url, (void)method, (void)version, (void)data, (void)data_bytes, (void)user;
	if (!*state) {
		*state = &seen;
		return MHD_YES;
	}
	struct MHD_Response *r = MHD_create_response_from_buffer(body_bytes, body, MHD_RESPMEM_PERSISTENT);
	if (!r)
		return MHD_NO;
	for (char **h = headers; h[0] && h[1]; h += 2)
		MHD_add_response_header(r, h[0], h[1]);
	enum MHD_Result ok = MHD_queue_response(c, 200, r);
	MHD_destroy_response(r);
	return ok;
}

int main(int argc, char **argv)
{
	FILE *f = argc >= 2 ? fopen(argv[1], "rb") : NULL;
	struct sockaddr_in at = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };

	if (!f)
		return fprintf(stderr, "usage: bare_mhd FILE [NAME VALUE]...\n"), 2;
	headers = argv + 2;
	body_bytes = fread(body, 1, sizeof body, f);
	fclose(f);
	struct MHD_Daemon *d = MHD_start_daemon(MHD_USE_EPOLL, 0, NULL, NULL, answer, NULL, MHD_OPTION_SOCK_ADDR,
						(struct sockaddr *)&at, MHD_OPTION_CONNECTION_LIMIT, 1000u, MHD_OPTION_END);
	const union MHD_DaemonInfo *port = d ? MHD_get_daemon_info(d, MHD_DAEMON_INFO_BIND_PORT) : NULL;
	const union MHD_DaemonInfo *ep = d ? MHD_get_daemon_info(d, MHD_DAEMON_INFO_EPOLL_FD) : NULL;
	if (!port || !ep)
		return fprintf(stderr, "bare_mhd: cannot start\n"), 1;
	printf("%u\n", (unsigned)port->port);
	fflush(stdout);
	/* MHD's descriptors are in an epoll of its own: watch that one, as dcpd's event loop does. */
	int loop = epoll_create1(EPOLL_CLOEXEC);
	struct epoll_event e = { .events = EPOLLIN };
	if (loop < 0 || epoll_ctl(loop, EPOLL_CTL_ADD, ep->epoll_fd, &e) != 0)
		return perror("epoll"), 1;
	for (;;) {
		MHD_UNSIGNED_LONG_LONG ms;
		int wait = MHD_get_timeout(d, &ms) == MHD_YES ? (int)(ms < 1000 ? ms : 1000) : 1000;

		(void)epoll_wait(loop, &e, 1, wait);
		MHD_run(d);
	}
}
