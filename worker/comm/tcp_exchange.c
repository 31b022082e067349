/* tcp_exchange.c: many messages between any members, in bounded memory.
 *
 * A message is packed when its link can take it and unpacked when it is whole; both need a slot of a small pool. That cannot lock up,
 * whatever the pattern: a slot on the receiving side is taken when a message's head is here, and by then its sender holds all of it
 * packed and waits for nobody, so the slot is free again soon. A link that finds no slot is parked or not written to, and looked at again.
 *
 * Messages of a pair are numbered, and dealt in turn to its data links; they are unpacked in order. */
#include "comm/tcp_impl.h"

#include <string.h>

#include "base/mem.h"
#include "base/num.h"
#include "base/vec.h"

enum { POOL_BYTES = 8 << 20, SLOTS_MIN = 4, SLOTS_MAX = 64, SELF_TURN = 8 };

struct pool {
	unsigned char *memory;
	unsigned char *free[SLOTS_MAX];
	uint32_t count;
};

/* The messages of one direction, grouped by peer. */
struct lists {
	uint64_t *index;               /* into the caller's list */
	uint64_t *first, *at;          /* per peer: where its part begins; the next one */
};

struct exchange_op {
	struct tcp_op op;
	const struct comm_exchange *x;
	uint32_t peers, links;
	struct lists out, in;
	struct pool packed, arriving;
	unsigned char *scratch;        /* for messages to ourselves */
	uint64_t own_at, own_left;
	uint64_t left, *pending;
	bool wake;                     /* a link may go on that could not before */
};

static FALLIBLE enum err pool_new(struct pool *p, uint32_t slot_bytes)
{
	uint64_t bytes = num_max(64, ((uint64_t)slot_bytes + 63) & ~(uint64_t)63);
	uint32_t count = (uint32_t)num_max(SLOTS_MIN, num_min(SLOTS_MAX, POOL_BYTES / bytes));

	p->memory = mem_alloc(bytes * count);
	NEED(p->memory, "no memory for messages");
	for (uint32_t i = 0; i < count; i++)
		p->free[i] = p->memory + i * bytes;
	p->count = count;
	return OK;
}

static unsigned char *take(struct pool *p)
{
	return p->count ? p->free[--p->count] : NULL;
}

static void give(struct pool *p, unsigned char *slot)
{
	p->free[p->count++] = slot;
}

static enum err target(struct tcp_op *op, struct tcp_link *l, unsigned char **out)
{
	struct exchange_op *o = (struct exchange_op *)op;
	uint64_t at = o->in.at[l->peer], number = l->in.stream, count = o->in.first[l->peer + 1] - o->in.first[l->peer];

	if (number < at || number >= count || l->index != 1 + number % o->links)
		return ERR(COMM_PROTOCOL, "message %ju of %ju, which was not to come there", (uintmax_t)number, (uintmax_t)count);
	if (number > at)
		return OK;
	uint32_t bytes = o->x->messages[o->in.index[o->in.first[l->peer] + at]].bytes;
	if (l->in.length != bytes || l->in.offset != 0)
		return ERR(COMM_PROTOCOL, "message %ju has %u bytes; expected were %u", (uintmax_t)number, l->in.length, bytes);
	*out = take(&o->arriving);
	return OK;
}

static enum err arrived(struct tcp_op *op, struct tcp_link *l)
{
	struct exchange_op *o = (struct exchange_op *)op;
	uint64_t at = o->in.at[l->peer]++;
	enum err e = o->x->unpack(o->x->user, o->in.index[o->in.first[l->peer] + at], l->body);

	o->wake = o->wake || o->links > 1 || o->arriving.count == 0;
	give(&o->arriving, l->body);
	o->pending[l->peer]--;
	o->left--;
	return e ? comm_at(op->c, e, op->c->rank) : OK;
}

static enum err next(struct tcp_op *op, struct tcp_link *l, struct tcp_head *h, const unsigned char **body, bool *some_out)
{
	struct exchange_op *o = (struct exchange_op *)op;
	uint64_t at = o->out.at[l->peer];

	if (at >= o->out.first[l->peer + 1] - o->out.first[l->peer] || l->index != 1 + at % o->links)
		return OK;
	unsigned char *slot = take(&o->packed);
	if (!slot)
		return OK;
	uint64_t index = o->out.index[o->out.first[l->peer] + at];
	l->out_owner = slot;
	h->stream = at;
	h->length = o->x->messages[index].bytes;
	enum err e = o->x->pack(o->x->user, index, slot);
	if (e)
		return comm_at(op->c, e, op->c->rank);
	h->check = tcp_check(slot, h->length);
	*body = slot;
	*some_out = true;
	o->out.at[l->peer]++;
	o->wake = o->wake || o->links > 1;
	return OK;
}

static enum err sent(struct tcp_op *op, struct tcp_link *l)
{
	struct exchange_op *o = (struct exchange_op *)op;

	/* Links that found no slot look again. */
	o->wake = o->wake || o->packed.count == 0;
	give(&o->packed, l->out_owner);
	o->pending[l->peer]--;
	o->left--;
	return OK;
}

static FALLIBLE enum err serve_self(struct exchange_op *o)
{
	const struct comm *c = o->op.c;

	for (int turn = 0; o->own_left && turn < SELF_TURN; o->own_at++) {
		const struct comm_message *msg = &o->x->messages[o->own_at];
		if (msg->from != c->rank || msg->to != c->rank)
			continue;
		enum err e = o->x->pack(o->x->user, o->own_at, o->scratch);
		e = e ?: o->x->unpack(o->x->user, o->own_at, o->scratch);
		if (e)
			return comm_at(c, e, c->rank);
		o->own_left--;
		o->left--;
		turn++;
	}
	return OK;
}

static enum err idle(struct tcp_op *op, bool *more_out)
{
	struct exchange_op *o = (struct exchange_op *)op;
	struct tcp_group *g = op->g;

	TRY(serve_self(o));
	while (o->wake) {
		o->wake = false;
		for (uint32_t i = 0; i < g->size && !g->mesh->failed; i++) {
			if (g->peers[i] == g->mesh->rank)
				continue;
			for (uint32_t k = 1; k <= o->links; k++) {
				struct tcp_link *l = tcp_link_of(g->mesh, g->peers[i], k);
				if (l->parked)
					tcp_link_resume(l);
				tcp_link_kick(l);
			}
		}
	}
	*more_out = o->own_left != 0;
	return OK;
}

static bool done(const struct tcp_op *op)
{
	return ((const struct exchange_op *)op)->left == 0;
}

static bool needs(const struct tcp_op *op, uint32_t peer)
{
	return ((const struct exchange_op *)op)->pending[peer] != 0;
}

/* Sorts the indices of this member's messages by the other side, keeping their order. `count` of them. */
static FALLIBLE enum err lists_new(struct lists *ls, const struct exchange_op *o, const struct comm *c, bool outgoing, uint64_t count)
{
	const struct tcp_group *g = c->impl;

	ls->index = mem_alloc((count + 1) * sizeof *ls->index);
	ls->first = mem_zalloc(o->peers + 1, sizeof *ls->first);
	ls->at = mem_zalloc(o->peers, sizeof *ls->at);
	NEED(ls->index && ls->first && ls->at, "no memory for %ju messages", (uintmax_t)count);
	for (int pass = 0; pass < 2; pass++) {
		for (uint64_t i = 0; i < o->x->count; i++) {
			const struct comm_message *msg = &o->x->messages[i];
			uint32_t here = outgoing ? msg->from : msg->to, there = outgoing ? msg->to : msg->from;
			if (here != c->rank || there == c->rank)
				continue;
			uint32_t peer = g->peers[there];
			if (pass == 0)
				ls->first[peer + 1]++;
			else
				ls->index[ls->first[peer] + ls->at[peer]++] = i;
		}
		for (uint32_t i = 0; pass == 0 && i < o->peers; i++)
			ls->first[i + 1] += ls->first[i];
	}
	memset(ls->at, 0, o->peers * sizeof *ls->at);
	return OK;
}

static FALLIBLE enum err prepare(struct exchange_op *o, const struct comm *c)
{
	uint64_t out = 0, in = 0;
	uint32_t largest = 0;

	each(msg, o->x->messages, o->x->count) {
		bool from = msg->from == c->rank, to = msg->to == c->rank;
		out += from && !to;
		in += to && !from;
		o->own_left += from && to;
		if (from || to)
			largest = (uint32_t)num_max(largest, msg->bytes);
	}
	o->left = out + in + o->own_left;
	TRY(lists_new(&o->out, o, c, true, out));
	TRY(lists_new(&o->in, o, c, false, in));
	o->pending = mem_zalloc(o->peers, sizeof *o->pending);
	o->scratch = o->own_left ? mem_alloc(num_max(1, largest)) : NULL;
	if (!o->pending || (o->own_left && !o->scratch))
		return ERR(NO_MEMORY, "no memory for messages");
	for (uint32_t i = 0; i < o->peers; i++)
		o->pending[i] = o->out.first[i + 1] - o->out.first[i] + o->in.first[i + 1] - o->in.first[i];
	if (out)
		TRY(pool_new(&o->packed, largest));
	if (in)
		TRY(pool_new(&o->arriving, largest));
	return OK;
}

static void lists_free(struct lists *ls)
{
	mem_free(ls->index);
	mem_free(ls->first);
	mem_free(ls->at);
}

enum err tcp_exchange(struct comm *c, const struct comm_exchange *x)
{
	const struct tcp_mesh *m = ((struct tcp_group *)c->impl)->mesh;
	struct exchange_op o = {
		.op = { .target = target, .arrived = arrived, .next = next, .sent = sent, .idle = idle, .done = done, .needs = needs,
			.awaits = needs },
		.x = x, .peers = m->size, .links = m->data_links,
	};

	enum err e = prepare(&o, c);
	e = e ?: tcp_run(&o.op, c);
	lists_free(&o.out);
	lists_free(&o.in);
	mem_free(o.pending);
	mem_free(o.scratch);
	mem_free(o.packed.memory);
	mem_free(o.arriving.memory);
	return e;
}
