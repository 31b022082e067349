/* nccl_exchange.c: many messages of host memory over NCCL. The list is cut into rounds, by all members alike, such that nobody sends or
 * gets more than a slot in one. A round is one copy to the device, one group with a send and a receive per peer, and one copy back;
 * while it is under way the last one is unpacked and the next one packed.
 *
 * A callback that fails does not stop the rounds, which would leave the others waiting: from then on what it sends is marked as of no
 * use, so that nobody unpacks it, and at the end all members hear of the error. */
#include "comm/nccl_impl.h"

#include <string.h>

#include "base/mem.h"
#include "base/vec.h"

enum { HEAD = 16, SLOT_ALL = NCCL_SLOT_BYTES + COMM_RANKS_MAX * HEAD }; /* before what a round has for a peer: is it of use? */

struct run {
	struct comm *c;
	const struct comm_exchange *x;
	uint64_t *sent, *got;          /* of each member in the round that is being cut */
	uint64_t *out_at, *in_at;      /* of each peer in a slot */
	uint64_t *out_bytes, *in_bytes;
	unsigned char *own;            /* for messages to ourselves */
	enum err failed;               /* of a callback */
	struct err_info info;
	bool stopped;                  /* another member's callback failed: it will tell */
};

struct round {
	uint64_t begin, end;           /* messages */
};

/* ---- slots ---- */

void comm_nccl_free_slots(struct nccl *g)
{
	for (uint32_t i = 0; i < NCCL_SLOTS; i++) {
		struct nccl_slot *s = &g->slots[i];
		if (g->pinned && (device_unpin(g->device, s->host_out) != OK || device_unpin(g->device, s->host_in) != OK))
			continue; /* a host page that the driver still holds is not given back */
		mem_free(s->host_out);
		mem_free(s->host_in);
		device_free(g->device, s->device_out);
		device_free(g->device, s->device_in);
		*s = (struct nccl_slot){ 0 };
	}
	g->slots_made = g->pinned = false;
}

static FALLIBLE enum err make_slots(struct nccl *g)
{
	if (g->slots_made)
		return OK;
	each(s, g->slots, NCCL_SLOTS) {
		s->host_out = mem_zalloc(1, SLOT_ALL);
		s->host_in = mem_zalloc(1, SLOT_ALL);
		NEED(s->host_out && s->host_in, "no memory for an exchange");
		TRY(device_alloc(g->device, SLOT_ALL, &s->device_out));
		TRY(device_alloc(g->device, SLOT_ALL, &s->device_in));
	}
	g->slots_made = true;
	/* Without pinned memory copies are slower, and just as right. */
	uint32_t n = 0;
	for (; n < 2 * NCCL_SLOTS; n++)
		if (device_pin(g->device, n % 2 ? g->slots[n / 2].host_in : g->slots[n / 2].host_out, SLOT_ALL) != OK)
			break;
	g->pinned = n == 2 * NCCL_SLOTS;
	while (!g->pinned && n-- > 0)
		(void)!device_unpin(g->device, n % 2 ? g->slots[n / 2].host_in : g->slots[n / 2].host_out);
	return OK;
}

static FALLIBLE enum err prepare(struct run *r)
{
	uint32_t size = r->c->size;
	uint64_t *numbers = mem_zalloc(6 * (size_t)size, sizeof *numbers);

	r->sent = numbers;
	r->own = mem_alloc(COMM_BLOCK_MAX);
	NEED(numbers && r->own, "no memory for an exchange among %u members", size);
	r->got = numbers + size;
	r->out_at = numbers + 2 * (size_t)size;
	r->in_at = numbers + 3 * (size_t)size;
	r->out_bytes = numbers + 4 * (size_t)size;
	r->in_bytes = numbers + 5 * (size_t)size;
	enum err e = make_slots(nccl_of(r->c));
	if (e) {
		CLEANUP(err_restore) struct err_info info = *err_last();
		comm_nccl_free_slots(nccl_of(r->c));
	}
	return e;
}

/* ---- rounds ---- */

static struct round next_round(struct run *r, uint64_t begin)
{
	uint64_t i = begin;

	memset(r->sent, 0, 2 * r->c->size * sizeof *r->sent);
	for (; i < r->x->count; i++) {
		const struct comm_message *m = &r->x->messages[i];
		if (m->from == m->to)
			continue;
		if (r->sent[m->from] + m->bytes > NCCL_SLOT_BYTES || r->got[m->to] + m->bytes > NCCL_SLOT_BYTES)
			break;
		r->sent[m->from] += m->bytes;
		r->got[m->to] += m->bytes;
	}
	return (struct round){ begin, i };
}

/* Places each peer's messages of a round in a slot. */
static void lay_out(struct run *r, struct round round)
{
	uint64_t out = 0, in = 0;
	uint32_t me = r->c->rank, size = r->c->size;

	memset(r->out_bytes, 0, 2 * size * sizeof *r->out_bytes);
	for (uint64_t i = round.begin; i < round.end; i++) {
		const struct comm_message *m = &r->x->messages[i];
		if (m->from == me && m->to != me)
			r->out_bytes[m->to] += m->bytes + (r->out_bytes[m->to] ? 0 : HEAD);
		else if (m->to == me && m->from != me)
			r->in_bytes[m->from] += m->bytes + (r->in_bytes[m->from] ? 0 : HEAD);
	}
	for (uint32_t p = 0; p < size; p++) {
		r->out_at[p] = out;
		r->in_at[p] = in;
		out += r->out_bytes[p];
		in += r->in_bytes[p];
	}
}

static void note(struct run *r, enum err e)
{
	if (!e || r->failed)
		return;
	r->failed = e;
	r->info = *err_last();
}

static bool stops(const struct run *r)
{
	return r->failed || r->stopped;
}

static void pack(struct run *r, struct round round, struct nccl_slot *s)
{
	uint32_t me = r->c->rank;

	lay_out(r, round);
	for (uint64_t i = round.begin; i < round.end && !stops(r); i++) {
		const struct comm_message *m = &r->x->messages[i];
		if (m->from != me)
			continue;
		unsigned char *at = m->to == me ? r->own : s->host_out + r->out_at[m->to] + HEAD;
		note(r, r->x->pack(r->x->user, i, at));
		if (m->to == me && !r->failed)
			note(r, r->x->unpack(r->x->user, i, at));
		else if (m->to != me)
			r->out_at[m->to] += m->bytes;
	}
	lay_out(r, round);
	for (uint32_t p = 0; p < r->c->size; p++)
		if (r->out_bytes[p])
			s->host_out[r->out_at[p]] = !stops(r);
}

static void unpack(struct run *r, struct round round, const struct nccl_slot *s)
{
	uint32_t me = r->c->rank;

	lay_out(r, round);
	for (uint32_t p = 0; p < r->c->size; p++)
		if (r->in_bytes[p] && s->host_in[r->in_at[p]] != 1)
			r->stopped = true;
	for (uint64_t i = round.begin; i < round.end && !stops(r); i++) {
		const struct comm_message *m = &r->x->messages[i];
		if (m->to != me || m->from == me)
			continue;
		note(r, r->x->unpack(r->x->user, i, s->host_in + r->in_at[m->from] + HEAD));
		r->in_at[m->from] += m->bytes;
	}
}

static FALLIBLE enum err post(struct run *r, const struct nccl_slot *s)
{
	struct comm *c = r->c;
	struct nccl *g = nccl_of(c);
	struct nccl_group group;

	comm_nccl_group_begin(&group);
	for (uint32_t p = 0; p < c->size && comm_nccl_taken(group.r); p++) {
		if (r->out_bytes[p])
			comm_nccl_group_add(&group, comm_nccl_api->send((char *)s->device_out + r->out_at[p], r->out_bytes[p], NCCL_UINT8,
									(int)p, g->comm, comm_nccl_stream(c)), "ncclSend");
		if (comm_nccl_taken(group.r) && r->in_bytes[p])
			comm_nccl_group_add(&group, comm_nccl_api->recv((char *)s->device_in + r->in_at[p], r->in_bytes[p], NCCL_UINT8,
									(int)p, g->comm, comm_nccl_stream(c)), "ncclRecv");
		c->root->counts.sent_bytes += r->out_bytes[p];
		c->root->counts.received_bytes += r->in_bytes[p];
	}
	return comm_nccl_group_end(c, &group);
}

/* Packs a round and begins it. */
static FALLIBLE enum err begin_round(struct run *r, struct round round, uint32_t slot)
{
	struct nccl *g = nccl_of(r->c);
	struct nccl_slot *s = &g->slots[slot];
	uint64_t out = 0, in = 0;

	pack(r, round, s);
	for (uint32_t p = 0; p < r->c->size; p++) {
		out += r->out_bytes[p];
		in += r->in_bytes[p];
	}
	g->busy = true;
	TRY(device_copy(g->device, s->device_out, s->host_out, out, DEVICE_PUT));
	TRY(post(r, s));
	TRY(device_copy(g->device, s->host_in, s->device_in, in, DEVICE_GET));
	return device_mark(g->device, slot);
}

static FALLIBLE enum err run_rounds(struct run *r)
{
	struct round last = { 0 };
	uint64_t done = 0, n = 0;

	for (; done < r->x->count; n++) {
		struct round now = next_round(r, done);
		TRY(begin_round(r, now, n % NCCL_SLOTS));
		if (n > 0) {
			TRY(comm_nccl_wait(r->c, (int)((n - 1) % NCCL_SLOTS)));
			unpack(r, last, &nccl_of(r->c)->slots[(n - 1) % NCCL_SLOTS]);
		}
		last = now;
		done = now.end;
	}
	TRY(comm_nccl_wait(r->c, NCCL_WAIT_ALL));
	if (n > 0)
		unpack(r, last, &nccl_of(r->c)->slots[(n - 1) % NCCL_SLOTS]);
	return OK;
}

enum err comm_nccl_exchange(struct comm *c, const struct comm_exchange *x)
{
	struct run r = { .c = c, .x = x };

	enum err e = prepare(&r);
	e = comm_nccl_agree(c, e);
	e = e ?: run_rounds(&r);
	if (!e) {
		comm_step(c);
		if (r.failed)
			err_restore(&r.info);
		e = comm_nccl_agree(c, r.failed);
		if (!e && r.stopped)
			e = ERR(COMM_PROTOCOL, "a member sent what it marked as of no use, and told no error");
	}
	mem_free(r.sent);
	mem_free(r.own);
	return e;
}
