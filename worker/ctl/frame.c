/* frame.c: the control socket's framing (see frame.h).
 *
 * Both sides may be broken or hostile, so nothing is believed before it has arrived: the body's buffer grows with the bytes
 * received, not with the length announced, and descriptors are accepted only with the bytes that may carry them. Everywhere
 * else the receive call offers no room for them, so that the kernel drops a flood before it fills our table.
 *
 * Each descriptor batch has a byte of its own because a stream socket delivers descriptors with the first byte they were sent
 * with: a batch tied to a fixed place of the frame cannot be mistaken for another's. */
#include "ctl/frame.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/mem.h"
#include "base/reader.h"

enum {
	HEAD_BYTES = 24,
	BATCH_FDS = 250,                   /* the kernel's limit is 253 */
	PIECE_BYTES = 64 << 10,            /* the body grows by at most this much ahead of what arrived */
	BODY_KEEP_BYTES = 1 << 20,         /* a larger body buffer is given back after its frame */
	QUEUE_BYTES_MAX = 128 << 20,
	QUEUE_FRAMES_MAX = 4096,
};

/* One frame on its way out: `bytes` is the head and the JSON; the batch bytes are made up while sending. */
struct out {
	struct out *next;
	unsigned char *bytes;
	size_t n, sent;
	int *fds;                          /* ours, closed when sent */
	uint32_t fd_count, fds_sent;
};

struct head {
	uint16_t type;
	uint32_t json_bytes, fd_count;
	uint64_t generation;
};

struct frame_conn {
	int fd;
	bool broken;                       /* the stream cannot be understood any more */
	bool deaf;                         /* the peer takes nothing any more */
	bool delivered;                    /* the frame in `body` and `fds` was handed out */
	unsigned char raw[HEAD_BYTES];
	size_t raw_got;
	struct head head;
	struct buf body;
	int *fds;
	uint32_t fds_got, fds_cap;
	struct out *first, *last;
	size_t queued_bytes, queued_frames;
};

static void close_fds(const int *fds, uint32_t n)
{
	for (uint32_t i = 0; i < n; i++)
		if (fds[i] >= 0)
			close(fds[i]);
}

static void out_free(struct out *o)
{
	if (!o)
		return;
	if (o->fds)
		close_fds(o->fds + o->fds_sent, o->fd_count - o->fds_sent);
	mem_free(o->fds);
	mem_free(o->bytes);
	mem_free(o);
}

static void drop_queue(struct frame_conn *c)
{
	while (c->first) {
		struct out *o = c->first;
		c->first = o->next;
		out_free(o);
	}
	c->last = NULL;
	c->queued_bytes = 0;
	c->queued_frames = 0;
}

static void reset_reader(struct frame_conn *c)
{
	close_fds(c->fds, c->fds_got);
	c->fds_got = 0;
	if (c->fds_cap > BATCH_FDS) {
		mem_free(c->fds);
		c->fds = NULL;
		c->fds_cap = 0;
	}
	c->body.len = 0;
	if (c->body.cap > BODY_KEEP_BYTES || c->body.failed)
		buf_free(&c->body);
	c->raw_got = 0;
	c->delivered = false;
}

enum err frame_conn_new(int fd, struct frame_conn **out)
{
	struct frame_conn *c = mem_zalloc(1, sizeof *c);

	NEED(c, "no memory for a control connection");
	c->fd = fd;
	c->body = BUF_INIT(FRAME_JSON_MAX);
	*out = c;
	return OK;
}

void frame_conn_free(struct frame_conn *c)
{
	if (!c)
		return;
	drop_queue(c);
	reset_reader(c);
	buf_free(&c->body);
	mem_free(c->fds);
	mem_free(c);
}

bool frame_wants_write(const struct frame_conn *c)
{
	return c->first != NULL;
}

/* ---- reading ---- */

enum got { GOT_BYTES, GOT_NOTHING, GOT_CLOSED };

static FALLIBLE enum err receive(struct frame_conn *c, struct msghdr *m, size_t *n_out, enum got *got_out)
{
	ssize_t n;

	do
		n = recvmsg(c->fd, m, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
	while (n < 0 && errno == EINTR);
	*n_out = n > 0 ? (size_t)n : 0;
	*got_out = n > 0 ? GOT_BYTES : GOT_CLOSED;
	if (n >= 0 || errno == ECONNRESET || errno == EPIPE)
		return OK;
	if (errno != EAGAIN && errno != EWOULDBLOCK)
		return ERR_SYS(SYSTEM, "cannot receive from the control socket");
	*got_out = GOT_NOTHING;
	return OK;
}

static FALLIBLE enum err receive_plain(struct frame_conn *c, void *into, size_t want, size_t *n_out, enum got *got_out)
{
	struct iovec iov = { into, want };
	struct msghdr m = { .msg_iov = &iov, .msg_iovlen = 1 };

	TRY(receive(c, &m, n_out, got_out));
	if (m.msg_flags & MSG_CTRUNC)
		return ERR(PROTOCOL, "descriptors where the frame has none");
	return OK;
}

static FALLIBLE enum err parse_head(const unsigned char raw[HEAD_BYTES], struct head *out)
{
	struct reader r = reader_of(raw, HEAD_BYTES);
	const unsigned char *magic = reader_take(&r, 4);
	uint16_t version = reader_u16(&r);
	struct head h = { .type = reader_u16(&r) };

	h.json_bytes = reader_u32(&r);
	h.fd_count = reader_u32(&r);
	h.generation = reader_u64(&r);
	if (memcmp(magic, "DCPD", 4) != 0)
		return ERR(PROTOCOL, "a frame does not begin with the magic");
	if (version != FRAME_VERSION)
		return ERR(PROTOCOL, "frame version %u, expected %d", version, FRAME_VERSION);
	if (h.json_bytes > FRAME_JSON_MAX)
		return ERR(PROTOCOL, "a frame announces %u bytes of JSON, at most %d are allowed", h.json_bytes,
			   FRAME_JSON_MAX);
	if (h.fd_count > FRAME_FDS_MAX)
		return ERR(PROTOCOL, "a frame announces %u descriptors, at most %d are allowed", h.fd_count,
			   FRAME_FDS_MAX);
	*out = h;
	return OK;
}

static FALLIBLE enum err room_for_batch(struct frame_conn *c)
{
	if (c->fds_cap - c->fds_got >= BATCH_FDS)
		return OK;
	uint32_t cap = c->fds_cap * 2 + BATCH_FDS;
	int *fds = mem_grow(c->fds, cap, sizeof *fds);
	NEED(fds, "no memory for %u descriptors", cap);
	c->fds = fds;
	c->fds_cap = cap;
	return OK;
}

/* Puts every descriptor of the message behind those already received; more than fit the batch are closed and counted. */
static uint32_t take_fds(struct frame_conn *c, struct msghdr *m)
{
	uint32_t total = 0;

	for (struct cmsghdr *h = CMSG_FIRSTHDR(m); h; h = CMSG_NXTHDR(m, h)) {
		if (h->cmsg_level != SOL_SOCKET || h->cmsg_type != SCM_RIGHTS || h->cmsg_len < CMSG_LEN(0))
			continue;
		size_t n = (h->cmsg_len - CMSG_LEN(0)) / sizeof(int);
		for (size_t i = 0; i < n; i++, total++) {
			int fd;
			memcpy(&fd, CMSG_DATA(h) + i * sizeof fd, sizeof fd);
			if (total < BATCH_FDS)
				c->fds[c->fds_got + total] = fd;
			else
				close(fd);
		}
	}
	c->fds_got += total < BATCH_FDS ? total : BATCH_FDS;
	return total;
}

static FALLIBLE enum err receive_batch(struct frame_conn *c, enum got *got_out)
{
	union {
		struct cmsghdr align;
		char room[CMSG_SPACE(253 * sizeof(int))];
	} control;
	unsigned char byte = 0;
	struct iovec iov = { &byte, 1 };
	struct msghdr m = { .msg_iov = &iov, .msg_iovlen = 1, .msg_control = control.room,
			    .msg_controllen = sizeof control.room };
	uint32_t left = c->head.fd_count - c->fds_got, want = left < BATCH_FDS ? left : BATCH_FDS;
	size_t n;

	TRY(room_for_batch(c));
	TRY(receive(c, &m, &n, got_out));
	if (*got_out != GOT_BYTES)
		return OK;
	uint32_t got = take_fds(c, &m);
	if (m.msg_flags & MSG_CTRUNC)
		return ERR(SYSTEM, "%u of %u descriptors were lost: the limit on open files is too low", want - got,
			   want);
	if (got != want || byte != 0)
		return ERR(PROTOCOL, "a batch of %u descriptors came with byte %u, expected %u", got, byte, want);
	return OK;
}

static FALLIBLE enum err receive_body(struct frame_conn *c, enum got *got_out)
{
	size_t left = c->head.json_bytes - c->body.len, piece = left < PIECE_BYTES ? left : PIECE_BYTES, n = 0;
	unsigned char *at;

	TRY(buf_reserve(&c->body, piece, &at));
	enum err e = receive_plain(c, at, piece, &n, got_out);
	c->body.len -= piece - n;
	return e;
}

/* Reads on until a whole frame is there (GOT_BYTES), nothing more comes, or the peer is gone. */
static FALLIBLE enum err advance(struct frame_conn *c, enum got *got_out)
{
	*got_out = GOT_BYTES;
	while (c->raw_got < HEAD_BYTES) {
		size_t n;
		TRY(receive_plain(c, c->raw + c->raw_got, HEAD_BYTES - c->raw_got, &n, got_out));
		if (*got_out != GOT_BYTES)
			return OK;
		c->raw_got += n;
		if (c->raw_got == HEAD_BYTES)
			TRY(parse_head(c->raw, &c->head));
	}
	while (*got_out == GOT_BYTES && c->body.len < c->head.json_bytes)
		TRY(receive_body(c, got_out));
	while (*got_out == GOT_BYTES && c->fds_got < c->head.fd_count)
		TRY(receive_batch(c, got_out));
	return OK;
}

enum err frame_read(struct frame_conn *c, struct frame *f, bool *got_out, bool *closed_out)
{
	enum got got;

	*got_out = *closed_out = false;
	if (c->broken)
		return ERR(PROTOCOL, "the control connection is broken");
	if (c->delivered)
		reset_reader(c);
	enum err e = advance(c, &got);
	if (e) {
		c->broken = true;
		reset_reader(c);
		return e;
	}
	if (got == GOT_CLOSED) {
		reset_reader(c);
		*closed_out = true;
		return OK;
	}
	if (got == GOT_NOTHING)
		return OK;
	c->delivered = true;
	*f = (struct frame){ .type = c->head.type, .generation = c->head.generation,
			     .json = { c->body.len ? (const char *)c->body.p : "", c->body.len },
			     .fds = c->fds, .fd_count = c->fds_got };
	*got_out = true;
	return OK;
}

/* ---- writing ---- */

/* more_out: everything offered was taken, so that the socket may take more. */
static FALLIBLE enum err transmit(struct frame_conn *c, const struct msghdr *m, size_t *n_out, bool *more_out)
{
	ssize_t n;

	do
		n = sendmsg(c->fd, m, MSG_DONTWAIT | MSG_NOSIGNAL);
	while (n < 0 && errno == EINTR);
	*n_out = n > 0 ? (size_t)n : 0;
	*more_out = n > 0;
	if (n >= 0)
		return OK;
	/* ETOOMANYREFS: too many descriptors are in flight; the peer takes some, and we go on. */
	if (errno == EAGAIN || errno == EWOULDBLOCK || errno == ENOBUFS || errno == ETOOMANYREFS)
		return OK;
	c->deaf = true;
	if (errno == EPIPE || errno == ECONNRESET)
		return ERR(WORKER_LOST, "the other end of the control socket is gone");
	return ERR_SYS(SYSTEM, "cannot send on the control socket");
}

static FALLIBLE enum err transmit_batch(struct frame_conn *c, const int *fds, uint32_t n, bool *more_out)
{
	union {
		struct cmsghdr align;
		char room[CMSG_SPACE(BATCH_FDS * sizeof(int))];
	} control = { 0 };
	unsigned char byte = 0;
	size_t sent;
	struct iovec iov = { &byte, 1 };
	struct msghdr m = { .msg_iov = &iov, .msg_iovlen = 1, .msg_control = control.room,
			    .msg_controllen = CMSG_SPACE(n * sizeof(int)) };
	struct cmsghdr *h = CMSG_FIRSTHDR(&m);

	h->cmsg_level = SOL_SOCKET;
	h->cmsg_type = SCM_RIGHTS;
	h->cmsg_len = CMSG_LEN(n * sizeof(int));
	memcpy(CMSG_DATA(h), fds, n * sizeof(int));
	return transmit(c, &m, &sent, more_out);
}

/* Sends what the socket takes of one frame. `fds` are o's own, or the caller's at the first try. */
static FALLIBLE enum err push(struct frame_conn *c, struct out *o, const int *fds, bool *done_out)
{
	bool more = true;

	while (more && o->sent < o->n) {
		struct iovec iov = { o->bytes + o->sent, o->n - o->sent };
		struct msghdr m = { .msg_iov = &iov, .msg_iovlen = 1 };
		size_t n;
		TRY(transmit(c, &m, &n, &more));
		o->sent += n;
	}
	while (more && o->fds_sent < o->fd_count) {
		uint32_t left = o->fd_count - o->fds_sent, n = left < BATCH_FDS ? left : BATCH_FDS;
		TRY(transmit_batch(c, fds + o->fds_sent, n, &more));
		if (!more)
			break;
		if (o->fds)
			close_fds(o->fds + o->fds_sent, n);
		o->fds_sent += n;
	}
	*done_out = o->sent == o->n && o->fds_sent == o->fd_count;
	return OK;
}

enum err frame_flush(struct frame_conn *c, bool *empty_out)
{
	*empty_out = false;
	if (c->deaf) {
		drop_queue(c);
		return ERR(WORKER_LOST, "the other end of the control socket is gone");
	}
	while (c->first) {
		struct out *o = c->first;
		bool done;
		enum err e = push(c, o, o->fds, &done);
		if (e)
			drop_queue(c);
		if (e || !done)
			return e;
		c->first = o->next;
		if (!c->first)
			c->last = NULL;
		c->queued_bytes -= o->n;
		c->queued_frames--;
		out_free(o);
	}
	*empty_out = true;
	return OK;
}

static FALLIBLE enum err out_new(uint16_t type, uint64_t generation, struct str json, uint32_t fd_count, struct out **out)
{
	struct out *o = mem_zalloc(1, sizeof *o);
	struct buf b = BUF_INIT(HEAD_BYTES + json.n);

	buf_puts(&b, "DCPD");
	buf_le16(&b, FRAME_VERSION);
	buf_le16(&b, type);
	buf_le32(&b, (uint32_t)json.n);
	buf_le32(&b, fd_count);
	buf_le64(&b, generation);
	buf_put(&b, json.p, json.n);
	if (!o || buf_status(&b) != OK) {
		mem_free(o);
		buf_free(&b);
		return ERR(NO_MEMORY, "no memory for a frame of %zu bytes", json.n);
	}
	*o = (struct out){ .bytes = b.p, .n = b.len, .fd_count = fd_count };
	*out = o;
	return OK;
}

/* Gives o copies of the descriptors that are still to be sent. */
static FALLIBLE enum err keep_fds(struct out *o, const int *fds)
{
	uint32_t i;

	if (o->fds_sent == o->fd_count)
		return OK;
	int *own = mem_alloc(o->fd_count * sizeof *own);
	NEED(own, "no memory for %u descriptors", o->fd_count);
	for (i = o->fds_sent; i < o->fd_count; i++) {
		own[i] = fcntl(fds[i], F_DUPFD_CLOEXEC, 3);
		if (own[i] < 0)
			break;
	}
	if (i < o->fd_count) {
		int why = errno;
		close_fds(own + o->fds_sent, i - o->fds_sent);
		mem_free(own);
		errno = why;
		return ERR_SYS(SYSTEM, "cannot duplicate descriptor %u of %u", i, o->fd_count);
	}
	o->fds = own;
	return OK;
}

enum err frame_send(struct frame_conn *c, uint16_t type, uint64_t generation, struct str json, const int *fds,
		    uint32_t fd_count)
{
	struct out *o;
	bool done = false;

	if (json.n > FRAME_JSON_MAX || fd_count > FRAME_FDS_MAX)
		return ERR(LIMIT_EXCEEDED, "a frame of %zu bytes and %u descriptors is too large", json.n, fd_count);
	if (c->deaf)
		return ERR(WORKER_LOST, "the other end of the control socket is gone");
	if (c->queued_frames >= QUEUE_FRAMES_MAX || c->queued_bytes + json.n > QUEUE_BYTES_MAX)
		return ERR(LIMIT_EXCEEDED, "%zu frames wait: the peer does not read", c->queued_frames);
	TRY(out_new(type, generation, json, fd_count, &o));
	enum err e = c->first ? OK : push(c, o, fds, &done);
	if (!e && !done)
		e = keep_fds(o, fds);
	if (e || done) {
		if (e && o->sent)
			c->deaf = true; /* half a frame is out: nothing that follows could be understood */
		out_free(o);
		return e;
	}
	if (c->last)
		c->last->next = o;
	else
		c->first = o;
	c->last = o;
	c->queued_bytes += o->n;
	c->queued_frames++;
	return OK;
}

/* ---- blocking ---- */

enum err frame_wait(struct frame_conn *c, int timeout_ms, struct frame *f, bool *got_out, bool *closed_out)
{
	int64_t end = clock_mono_ms() + timeout_ms;

	for (;;) {
		bool empty;
		/* A peer that takes nothing more may still have said something: reading tells. */
		if (frame_wants_write(c))
			(void)(frame_flush(c, &empty) == OK);
		TRY(frame_read(c, f, got_out, closed_out));
		if (*got_out || *closed_out)
			return OK;
		int64_t left = timeout_ms < 0 ? -1 : end - clock_mono_ms();
		if (timeout_ms >= 0 && left <= 0)
			return OK;
		struct pollfd p = { .fd = c->fd, .events = (short)(POLLIN | (c->first ? POLLOUT : 0)) };
		if (poll(&p, 1, (int)left) < 0 && errno != EINTR)
			return ERR_SYS(SYSTEM, "cannot wait for the control socket");
	}
}
