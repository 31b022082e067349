/* nccl_host.c: NCCL between hosts whose members share memory (hier.c): buffers are host memory there, and go as messages, through the
 * pinned slots of an exchange. */
#include "comm/nccl_impl.h"

#include <string.h>

#include "base/num.h"
#include "base/vec.h"

struct place {
	uint64_t from, to;             /* offsets of a message in the sender's and the receiver's buffer */
};

struct hosted {
	const unsigned char *in;
	unsigned char *out;
	struct vec(struct comm_message) messages;
	struct vec(struct place) places;
};

static enum err pack(void *user, uint64_t i, void *out)
{
	const struct hosted *h = user;

	memcpy(out, h->in + h->places.v[i].from, h->messages.v[i].bytes);
	return OK;
}

static enum err unpack(void *user, uint64_t i, const void *in)
{
	const struct hosted *h = user;

	memcpy(h->out + h->places.v[i].to, in, h->messages.v[i].bytes);
	return OK;
}

/* Adds messages that bring `bytes` of this member's buffer at `from` to every other member's buffer at `to`. */
static FALLIBLE enum err add(struct hosted *h, const struct comm *c, uint32_t from, uint64_t bytes, uint64_t to)
{
	for (uint64_t done = 0; done < bytes;) {
		uint32_t n = (uint32_t)num_min(bytes - done, COMM_BLOCK_MAX);
		for (uint32_t r = 0; r < c->size; r++) {
			struct comm_message *m;
			struct place *p;
			if (r == from)
				continue;
			TRY(vec_push(&h->messages, &m));
			TRY(vec_push(&h->places, &p));
			*m = (struct comm_message){ from, r, n };
			*p = (struct place){ done, to + done };
		}
		done += n;
	}
	return OK;
}

/* Without memory for the list a member cannot take part: the caller aborts the group. */
static FALLIBLE enum err exchange(struct comm *c, struct hosted *h, enum err e)
{
	struct comm_exchange x = { h->messages.v, h->messages.n, pack, unpack, h };

	e = e ?: comm_nccl_exchange(c, &x);
	vec_free(&h->messages);
	vec_free(&h->places);
	return e;
}

enum err comm_nccl_host_broadcast(struct comm *c, void *data, uint64_t bytes, uint32_t root)
{
	struct hosted h = { .in = data, .out = data };

	return exchange(c, &h, add(&h, c, root, bytes, 0));
}

enum err comm_nccl_host_all_gather_v(struct comm *c, const void *in, const uint64_t *bytes, void *out)
{
	struct hosted h = { .in = in, .out = out };
	uint64_t at = 0, mine = 0;
	enum err e = OK;

	for (uint32_t r = 0; r < c->size; r++) {
		e = e ?: add(&h, c, r, bytes[r], at);
		mine = r == c->rank ? at : mine;
		at += bytes[r]; /* comm.c has checked the sum */
	}
	if (!e && bytes[c->rank] && h.out + mine != h.in)
		memmove(h.out + mine, in, bytes[c->rank]);
	return exchange(c, &h, e);
}
