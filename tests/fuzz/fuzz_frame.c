/* fuzz_frame.c: a hostile peer of a control connection. The input is a script: a byte says how many bytes to send (low six bits)
 * and whether descriptors go along (bit 6; the next byte says how many). After each piece the reader runs. Descriptors must
 * never be left over, and a frame that comes out must be within its limits. */
#include <fcntl.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "ctl/frame.h"

int LLVMFuzzerTestOneInput(const unsigned char *data, size_t n);

static int null_fd = -1;

/* The lowest free number grows if anything leaks. */
static int lowest_free(void)
{
	int fd = dup(null_fd);

	must(fd >= 0);
	close(fd);
	return fd;
}

static void send_piece(int to, const unsigned char *bytes, size_t n, unsigned fds)
{
	char room[CMSG_SPACE(253 * sizeof(int))] __attribute__((aligned(8))) = { 0 };
	struct iovec iov = { (void *)(uintptr_t)bytes, n };
	struct msghdr m = { .msg_iov = &iov, .msg_iovlen = 1 };

	if (fds > 253)
		fds = 253;
	if (fds) {
		struct cmsghdr *h = (struct cmsghdr *)(void *)room;
		m.msg_control = room;
		m.msg_controllen = CMSG_SPACE(fds * sizeof(int));
		h->cmsg_level = SOL_SOCKET;
		h->cmsg_type = SCM_RIGHTS;
		h->cmsg_len = CMSG_LEN(fds * sizeof(int));
		for (unsigned i = 0; i < fds; i++)
			memcpy(CMSG_DATA(h) + i * sizeof(int), &null_fd, sizeof(int));
	}
	must(sendmsg(to, &m, MSG_DONTWAIT | MSG_NOSIGNAL) == (ssize_t)n);
}

/* False when the connection is over. */
static bool read_all(struct frame_conn *c)
{
	struct frame f;
	bool got = true, closed;

	while (got) {
		if (frame_read(c, &f, &got, &closed) != OK)
			return false;
		must(!closed);
		if (!got)
			break;
		must(f.json.n <= FRAME_JSON_MAX && f.fd_count <= FRAME_FDS_MAX);
		for (uint32_t i = 0; i < f.fd_count; i++)
			must(fcntl(f.fds[i], F_GETFD) == FD_CLOEXEC);
		if (f.fd_count) {
			close(f.fds[0]);
			f.fds[0] = -1;
		}
	}
	return true;
}

int LLVMFuzzerTestOneInput(const unsigned char *data, size_t n)
{
	struct frame_conn *c;
	int ends[2];
	size_t at = 0;

	if (null_fd < 0)
		null_fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
	int before = lowest_free();
	must(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0);
	must(frame_conn_new(ends[0], &c) == OK);
	while (at + 2 < n) {
		unsigned op = data[at++], fds = op & 0x40 ? data[at++] : 0;
		size_t piece = op & 0x3F;
		if (piece == 0 || piece > n - at)
			piece = n - at < 1 ? 1 : n - at > 4096 ? 4096 : n - at;
		if (at + piece > n)
			break;
		send_piece(ends[1], data + at, piece, fds);
		at += piece;
		if (!read_all(c))
			break;
	}
	frame_conn_free(c);
	close(ends[0]);
	close(ends[1]);
	must(lowest_free() == before);
	return 0;
}
