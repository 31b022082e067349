/* tcp_link.c: one connection of the tcp back end.
 *
 * Bodies are read straight into the place that the running operation names and sent straight from the caller's memory: libevent
 * tells readiness only, since its buffers read 4 KiB at a time and copy. A body is checked while it is still in the cache. One turn
 * of a link is bounded, so that no link starves the others. */
#include "comm/tcp_impl.h"

#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include "base/mem.h"
#include "base/num.h"

enum {
	TURN_BYTES = 512 << 10,        /* a link reads or writes at most about this much before the others' turn */
	LOW_WATER_BYTES = 256 << 10,   /* of a body: less does not wake the receiver */
	QUEUE_BYTES = 32 << 10,        /* of link 0: more than a peer that does not read is worth */
	QUEUE_STATE_BYTES = 16 << 10,  /* beyond it, only an ABORT or BYE still gets in */
};

static void on_readable(void *user);
static void on_writable(void *user);

enum err tcp_link_open(struct tcp_mesh *m, uint32_t peer, uint32_t index, int fd)
{
	struct tcp_link *l = tcp_link_of(m, peer, index);

	*l = (struct tcp_link){ .mesh = m, .peer = peer, .index = index };
	enum err e = watch_new(m->base, &fd, on_readable, on_writable, l, &l->watch);
	if (e) {
		close(fd);
		return e;
	}
	if (index == 0) {
		l->queue = mem_alloc(QUEUE_BYTES);
		l->note = mem_alloc(TCP_NOTE_MAX);
		if (!l->queue || !l->note)
			e = ERR(NO_MEMORY, "no memory for a connection");
	}
	e = e ?: watch_reads(l->watch, true);
	if (e)
		tcp_link_close(l);
	return e;
}

void tcp_link_close(struct tcp_link *l)
{
	watch_free(&l->watch);
	l->parked = l->sending = false;
	mem_free(l->queue);
	mem_free(l->note);
	l->queue = l->note = NULL;
}

static void check_watch(struct tcp_link *l, enum err e)
{
	if (e)
		tcp_fail(l->mesh, e);
}

static void fail_at(struct tcp_link *l, enum err e)
{
	tcp_fail(l->mesh, tcp_at(l->mesh, e, l->peer));
}

/* ---- in ---- */

/* Finds the place for the frame whose head is in `in`. False: the link is parked, or broken. */
static bool place(struct tcp_link *l)
{
	struct tcp_mesh *m = l->mesh;
	struct tcp_op *op = m->op;
	const struct comm_call *call = op ? &op->c->call : NULL;
	unsigned char *body = NULL;
	enum err e = OK;

	if (op && l->in.channel == op->g->channel && l->in.call.number <= call->number) {
		uint32_t member = tcp_member(op->g, l->peer);
		if (member == TCP_NOBODY || l->in.call.number < call->number)
			e = ERR(COMM_PROTOCOL, "a frame of call %ju, which is over", (uintmax_t)l->in.call.number);
		else if (!comm_call_same(call, &l->in.call))
			e = comm_mismatch(op->c, member, &l->in.call);
		else
			e = op->target(op, l, &body);
	}
	l->parked = !e && !body;
	check_watch(l, watch_reads(l->watch, !e && body));
	if (e)
		fail_at(l, e);
	l->body = body;
	l->in_body = !e && body;
	l->body_got = 0;
	return l->in_body;
}

static FALLIBLE enum err take_head(struct tcp_link *l)
{
	TRY(tcp_head_get(&l->mesh->id, l->head, &l->in));
	l->head_got = 0;
	if ((l->in.type == TCP_DATA) != (l->index != 0))
		return ERR(COMM_PROTOCOL, "a frame of type %u on link %u", l->in.type, l->index);
	return OK;
}

static FALLIBLE enum err take_body(struct tcp_link *l)
{
	struct tcp_mesh *m = l->mesh;

	l->in_body = false;
	if (tcp_check(l->body, l->in.length) != l->in.check)
		return ERR(COMM_PROTOCOL, "%u bytes from another member are damaged: their checksum differs", l->in.length);
	if (l->index == 0) {
		tcp_heard(l);
		return OK;
	}
	m->c->counts.received_bytes += l->in.length;
	return m->op->arrived(m->op, l);
}

/* Takes what is whole: a head, a body, the next head. False: the link is not to be read on. */
static bool advance(struct tcp_link *l)
{
	enum err e = OK;

	/* A group that failed still hears the others' reports of the failure. */
	while (!e && l->watch && (l->index == 0 || !l->mesh->failed)) {
		if (l->in_body ? l->body_got < l->in.length : l->head_got < TCP_HEAD_BYTES)
			return true;
		if (l->in_body) {
			e = take_body(l);
			continue;
		}
		e = take_head(l);
		if (!e && l->index == 0) {
			l->body = l->note;
			l->body_got = 0;
			l->in_body = true;
		} else if (!e && !place(l)) {
			return false;
		}
	}
	if (e)
		fail_at(l, e);
	return !e && l->index == 0 && l->watch;
}

/* The rest of the body, and the next head with it: one call instead of two. */
static ssize_t receive(struct tcp_link *l, size_t *want_out)
{
	struct iovec v[2];
	size_t n = 0;

	if (l->in_body)
		v[n++] = (struct iovec){ l->body + l->body_got, l->in.length - l->body_got };
	v[n++] = (struct iovec){ l->head + l->head_got, TCP_HEAD_BYTES - l->head_got };
	struct msghdr h = { .msg_iov = v, .msg_iovlen = n };
	*want_out = v[0].iov_len + (n > 1 ? v[1].iov_len : 0);
	ssize_t got = recvmsg(watch_fd(l->watch), &h, MSG_DONTWAIT);
	if (got <= 0)
		return got;
	size_t body = n > 1 ? (size_t)num_min((uint64_t)got, v[0].iov_len) : 0;
	l->body_got += (uint32_t)body;
	l->head_got += (uint32_t)((size_t)got - body);
	return got;
}

/* Lets a data socket count as readable from LOW_WATER_BYTES of the body on, or from the body's end: each wake-up of a receiver costs
 * as much as copying tens of KiB. The kernel wakes at the end of the stream, and where its buffer holds less. An error is none of
 * the link's: the socket is readable more often then. */
static void set_low_water(struct tcp_link *l)
{
	int low = 1;

	if (!l->watch || l->index == 0)
		return;
	if (l->in_body && l->body_got < l->in.length)
		low = (int)num_min(LOW_WATER_BYTES, l->in.length - l->body_got);
	if (low != l->low_water && setsockopt(watch_fd(l->watch), SOL_SOCKET, SO_RCVLOWAT, &low, sizeof low) == 0)
		l->low_water = low;
}

static void read_turn(struct tcp_link *l, size_t budget)
{
	for (;;) {
		size_t want;
		ssize_t got = receive(l, &want);
		if (got < 0 && (errno == EAGAIN || errno == EINTR))
			return;
		if (got <= 0) {
			tcp_broken(l, got < 0 ? errno : 0);
			return;
		}
		bool was_head = !l->in_body;
		if (!advance(l))
			return;
		/* Less than there was room for: nothing more is here. A head alone is always all that there was room for. */
		if (((size_t)got < want && !was_head) || (size_t)got >= budget)
			return;
		budget -= (size_t)got;
	}
}

static void on_readable(void *user)
{
	struct tcp_link *l = user;

	if (l->index && (!l->mesh->op || l->mesh->failed)) {
		check_watch(l, watch_reads(l->watch, false));
		return;
	}
	read_turn(l, TURN_BYTES);
	set_low_water(l);
}

void tcp_link_drain(struct tcp_link *l)
{
	if (l->watch && !l->mesh->peers[l->peer].gone)
		read_turn(l, QUEUE_BYTES);
}

void tcp_link_resume(struct tcp_link *l)
{
	if (!l->watch || l->mesh->failed)
		return;
	if (!l->parked) {
		check_watch(l, watch_reads(l->watch, true));
		return;
	}
	if (place(l))
		(void)advance(l);
	set_low_water(l);
}

/* ---- out ---- */

/* True: all of the frame is out. */
static bool push(struct tcp_link *l)
{
	uint32_t head = l->out_sent < TCP_HEAD_BYTES ? TCP_HEAD_BYTES - l->out_sent : 0;
	uint32_t body = l->out_sent > TCP_HEAD_BYTES ? l->out_sent - TCP_HEAD_BYTES : 0;
	struct iovec v[2] = { { l->out_head + TCP_HEAD_BYTES - head, head },
			      { (void *)((uintptr_t)l->out_body + body), l->out_bytes - body } };
	struct msghdr h = { .msg_iov = v + !head, .msg_iovlen = head ? 2 : 1 };
	ssize_t n = sendmsg(watch_fd(l->watch), &h, MSG_DONTWAIT | MSG_NOSIGNAL);

	if (n < 0 && errno != EAGAIN && errno != EINTR) {
		tcp_broken(l, errno);
		return false;
	}
	if (n > 0)
		l->out_sent += (uint32_t)n;
	return l->out_sent == TCP_HEAD_BYTES + l->out_bytes;
}

/* Takes the operation's next frame. False: there is none. */
static bool load(struct tcp_link *l)
{
	struct tcp_op *op = l->mesh->op;
	struct tcp_head h = { .type = TCP_DATA, .channel = op->g->channel, .call = op->c->call };
	bool some = false;
	enum err e = op->next(op, l, &h, &l->out_body, &some);

	if (e)
		tcp_fail(l->mesh, e);
	if (e || !some)
		return false;
	tcp_head_put(&l->mesh->id, &h, l->out_head);
	l->out_bytes = h.length;
	l->out_sent = 0;
	l->sending = true;
	return true;
}

static void write_data(struct tcp_link *l)
{
	struct tcp_mesh *m = l->mesh;

	for (size_t budget = TURN_BYTES; !m->failed && m->op && l->watch;) {
		if (!l->sending && !load(l)) {
			check_watch(l, watch_writes(l->watch, false));
			return;
		}
		if (!push(l))
			break;
		l->sending = false;
		m->c->counts.sent_bytes += l->out_bytes;
		enum err e = m->op->sent ? m->op->sent(m->op, l) : OK;
		if (e)
			tcp_fail(m, e);
		if (budget <= l->out_bytes)
			break;
		budget -= l->out_bytes;
	}
	if (l->watch)
		check_watch(l, watch_writes(l->watch, true));
}

static void write_queue(struct tcp_link *l)
{
	if (!l->watch)
		return;
	while (l->queued) {
		ssize_t n = send(watch_fd(l->watch), l->queue, l->queued, MSG_DONTWAIT | MSG_NOSIGNAL);
		if (n < 0 && (errno == EAGAIN || errno == EINTR))
			break;
		if (n < 0) {
			/* The peer's earlier messages are still to be read; they tell how the peer ended. */
			l->queued = 0;
			break;
		}
		l->queued -= (uint32_t)n;
		memmove(l->queue, l->queue + n, l->queued);
	}
	check_watch(l, watch_writes(l->watch, l->queued != 0));
}

static void on_writable(void *user)
{
	struct tcp_link *l = user;

	if (l->index == 0)
		write_queue(l);
	else if (l->mesh->op && !l->mesh->failed)
		write_data(l);
	else
		check_watch(l, watch_writes(l->watch, false));
}

void tcp_link_kick(struct tcp_link *l)
{
	if (l->watch && !watch_is_writing(l->watch) && !l->mesh->failed)
		write_data(l);
}

void tcp_link_tell(struct tcp_link *l, const struct tcp_head *h, const unsigned char *body)
{
	uint32_t n = TCP_HEAD_BYTES + h->length;
	struct tcp_head with = *h;

	if (!l->watch || n > QUEUE_BYTES - l->queued || (h->type == TCP_STATE && l->queued > QUEUE_STATE_BYTES))
		return;
	with.check = tcp_check(body, h->length);
	tcp_head_put(&l->mesh->id, &with, l->queue + l->queued);
	if (h->length)
		memcpy(l->queue + l->queued + TCP_HEAD_BYTES, body, h->length);
	l->queued += n;
	write_queue(l);
}
