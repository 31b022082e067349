/* bare_sse.c: the limit for event streams: one thread with epoll that writes the bytes of FILE, an event as dcpd sends it, to each of its
 * clients ten times a second, each in a chunk of its own, and does nothing else. A client that does not read loses events.
 *
 *     bare_sse FILE      prints its port, serves until killed */
#include <arpa/inet.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <unistd.h>

enum { CLIENTS_MAX = 4096, HEAD_ROOM = 16 };

static char event[65536];
static size_t event_bytes;
static int clients[CLIENTS_MAX];
static size_t client_count;

static const char head[] = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n";

static int listen_any(void)
{
	struct sockaddr_in at = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
	socklen_t n = sizeof at;
	int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

	if (fd < 0 || bind(fd, (struct sockaddr *)&at, n) != 0 || listen(fd, 1024) != 0 ||
	    getsockname(fd, (struct sockaddr *)&at, &n) != 0)
		return -1;
	printf("%u\n", ntohs(at.sin_port));
	fflush(stdout);
	return fd;
}

static void accept_one(int listener)
{
	char request[4096];
	int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC);

	if (fd < 0)
		return;
	if (client_count == CLIENTS_MAX || recv(fd, request, sizeof request, 0) <= 0 ||
	    send(fd, head, sizeof head - 1, MSG_NOSIGNAL) < 0) {
		close(fd);
		return;
	}
	clients[client_count++] = fd;
}

static void send_all(int timer)
{
	uint64_t ticks;

	if (read(timer, &ticks, sizeof ticks) < 0)
		return;
	for (size_t i = 0; i < client_count; i++)
		if (send(clients[i], event, event_bytes, MSG_NOSIGNAL | MSG_DONTWAIT) == 0)
			return;
}

int main(int argc, char **argv)
{
	struct itimerspec tenth = { { 0, 100000000 }, { 0, 100000000 } };
	struct rlimit files = { CLIENTS_MAX + 64, CLIENTS_MAX + 64 };
	FILE *f = argc == 2 ? fopen(argv[1], "rb") : NULL;

	if (!f)
		return fprintf(stderr, "usage: bare_sse FILE\n"), 2;
	event_bytes = fread(event + HEAD_ROOM, 1, sizeof event - HEAD_ROOM - 2, f);
	fclose(f);
	char size[HEAD_ROOM];
	int n = snprintf(size, sizeof size, "%zx\r\n", event_bytes);
	memmove(event + n, event + HEAD_ROOM, event_bytes);
	memcpy(event, size, (size_t)n);
	memcpy(event + n + event_bytes, "\r\n", 2);
	event_bytes += (size_t)n + 2;
	(void)setrlimit(RLIMIT_NOFILE, &files);
	int loop = epoll_create1(EPOLL_CLOEXEC), listener = listen_any(), timer = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC);
	struct epoll_event e = { .events = EPOLLIN };
	e.data.fd = listener;
	if (loop < 0 || listener < 0 || timer < 0 || epoll_ctl(loop, EPOLL_CTL_ADD, listener, &e) != 0)
		return perror("bare_sse"), 1;
	e.data.fd = timer;
	if (epoll_ctl(loop, EPOLL_CTL_ADD, timer, &e) != 0 || timerfd_settime(timer, 0, &tenth, NULL) != 0)
		return perror("bare_sse"), 1;
	for (;;) {
		if (epoll_wait(loop, &e, 1, -1) != 1)
			continue;
		if (e.data.fd == listener)
			accept_one(listener);
		else
			send_all(timer);
	}
}
