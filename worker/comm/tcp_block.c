/* tcp_block.c: an operation on blocks of memory that stream from member to member.
 *
 * Every collective on whole buffers is a set of blocks and of who sends which to whom. A block is cut into chunks, dealt in turn to the
 * data links; both sides compute the same cut, so that a chunk that is not exactly the next one is an error. A chunk is passed on as
 * soon as it is here, while it is in the cache, with the checksum that it came with: a chain of members is a pipeline. */
#include "comm/tcp_impl.h"

#include <string.h>

#include "base/mem.h"
#include "base/num.h"
#include "base/vec.h"

enum { CHUNK_MIN = 64 << 10, CHUNK_MAX = 256 << 10, CHUNKS_WANTED = 16, CHUNKS_LONG = 64, CHAIN_ROOM = 4 << 20 };

struct blocks_op {
	struct tcp_op op;
	struct tcp_block *blocks;
	struct tcp_send *sends;
	uint32_t block_count, send_count, links;
	bool in_steps;
	uint32_t *first;               /* per peer: the first send to it that is not over */
	uint64_t *pending;             /* per peer: chunks that are still to come or go */
	uint64_t left;                 /* the same, of all */
	uint64_t *checks;
};

static unsigned char nowhere[1];

/* A large chunk saves calls, and with each call an acknowledgement and a wake-up. But the last member of a chain waits until each member
 * before has had a whole chunk: so the chunks on the way through a chain are no more than CHAIN_ROOM together. */
static uint64_t chunk_of(uint64_t bytes, uint32_t members)
{
	uint64_t most = num_min(TCP_BODY_MAX, num_min(bytes / CHUNKS_LONG, CHAIN_ROOM / members));
	uint64_t chunk = num_max(CHUNK_MIN, num_min(num_max(CHUNK_MAX, most), bytes / CHUNKS_WANTED));

	return num_min(TCP_BODY_MAX, (chunk + 4095) & ~(uint64_t)4095);
}

static uint64_t chunks_of(const struct tcp_block *b)
{
	return num_max(1, num_div_up(b->bytes, b->chunk));
}

static uint32_t length_at(const struct tcp_block *b, uint64_t offset)
{
	return (uint32_t)num_min(b->chunk, b->bytes - offset);
}

/* An empty block has one empty chunk, so that members meet. */
static bool over(const struct tcp_block *b, uint64_t offset)
{
	return offset >= num_max(1, b->bytes);
}

static enum err target(struct tcp_op *op, struct tcp_link *l, unsigned char **out)
{
	struct blocks_op *o = (struct blocks_op *)op;
	const struct tcp_head *h = &l->in;
	const struct tcp_block *b = h->stream < o->block_count ? &o->blocks[h->stream] : NULL;
	uint64_t next = b ? b->next[l->index - 1] : 0;

	if (!b || b->from != l->peer)
		return ERR(COMM_PROTOCOL, "a chunk of block %ju, which was not to come from there", (uintmax_t)h->stream);
	if (over(b, next) || h->offset != next || h->length != length_at(b, next))
		return ERR(COMM_PROTOCOL, "a chunk of %u bytes at %ju; expected was the one at %ju", h->length, (uintmax_t)h->offset,
			   (uintmax_t)next);
	*out = b->bytes ? b->p + next : nowhere;
	return OK;
}

static bool step_open(const struct blocks_op *o, uint32_t send)
{
	for (uint32_t i = 0; i < send; i++)
		if (o->blocks[i].missing)
			return false;
	return true;
}

static enum err arrived(struct tcp_op *op, struct tcp_link *l)
{
	struct blocks_op *o = (struct blocks_op *)op;
	struct tcp_mesh *m = op->g->mesh;
	struct tcp_block *b = &o->blocks[l->in.stream];
	uint32_t link = l->index - 1;

	if (b->checks)
		b->checks[b->next[link] / b->chunk] = l->in.check;
	b->next[link] += b->chunk * o->links;
	b->missing--;
	o->pending[l->peer]--;
	o->left--;
	if (o->in_steps) {
		for (uint32_t i = 0; i < o->send_count; i++)
			tcp_link_kick(tcp_link_of(m, o->sends[i].to, l->index));
		return OK;
	}
	for (uint32_t i = b->sends; i != TCP_NOBODY; i = o->sends[i].same_block)
		tcp_link_kick(tcp_link_of(m, o->sends[i].to, l->index));
	return OK;
}

/* The first use of a chunk copies and checks it, while it is in the cache for the send itself. */
static uint64_t prepare(struct tcp_block *b, uint64_t offset, uint32_t length)
{
	uint64_t *check = &b->checks[offset / b->chunk];

	if (*check == 0) {
		unsigned char *p = length ? b->p + offset : NULL; /* a block of no bytes may have no address */
		if (b->source && length)
			memcpy(p, b->source + offset, length);
		*check = tcp_check(p, length);
	}
	return *check;
}

static bool finished(const struct blocks_op *o, const struct tcp_send *s)
{
	for (uint32_t k = 0; k < o->links; k++)
		if (!over(&o->blocks[s->block], s->next[k]))
			return false;
	return true;
}

static enum err next(struct tcp_op *op, struct tcp_link *l, struct tcp_head *h, const unsigned char **body, bool *some_out)
{
	struct blocks_op *o = (struct blocks_op *)op;
	uint32_t link = l->index - 1, *first = &o->first[l->peer];

	while (*first != TCP_NOBODY && finished(o, &o->sends[*first]))
		*first = o->sends[*first].same_peer;
	for (uint32_t i = *first; i != TCP_NOBODY; i = o->sends[i].same_peer) {
		struct tcp_send *s = &o->sends[i];
		struct tcp_block *b = &o->blocks[s->block];
		uint64_t at = s->next[link];
		if (over(b, at))
			continue;
		if (o->in_steps ? !step_open(o, i) : b->from != TCP_NOBODY && b->next[link] <= at)
			continue;
		h->stream = s->block;
		h->offset = at;
		h->length = length_at(b, at);
		h->check = prepare(b, at, h->length);
		*body = b->p ? b->p + at : nowhere;
		s->next[link] += b->chunk * o->links;
		*some_out = true;
		return OK;
	}
	return OK;
}

static enum err sent(struct tcp_op *op, struct tcp_link *l)
{
	struct blocks_op *o = (struct blocks_op *)op;

	o->pending[l->peer]--;
	o->left--;
	return OK;
}

static bool done(const struct tcp_op *op)
{
	return ((const struct blocks_op *)op)->left == 0;
}

static bool needs(const struct tcp_op *op, uint32_t peer)
{
	return ((const struct blocks_op *)op)->pending[peer] != 0;
}

/* Is something ready for this send that is not taken? */
static bool ready(const struct blocks_op *o, uint32_t i)
{
	const struct tcp_send *s = &o->sends[i];
	const struct tcp_block *b = &o->blocks[s->block];

	for (uint32_t k = 0; k < o->links; k++) {
		if (tcp_link_of(o->op.g->mesh, s->to, k + 1)->sending)
			return true;
		if (!over(b, s->next[k]) && (o->in_steps ? step_open(o, i) : b->from == TCP_NOBODY || b->next[k] > s->next[k]))
			return true;
	}
	return false;
}

/* A member that relays a block does not wait for the next peer while it has no data for that peer. */
static bool awaits(const struct tcp_op *op, uint32_t peer)
{
	const struct blocks_op *o = (const struct blocks_op *)op;

	if (o->pending[peer] == 0)
		return false;
	for (uint32_t i = 0; i < o->block_count; i++)
		if (o->blocks[i].from == peer && o->blocks[i].missing)
			return true;
	for (uint32_t i = o->first[peer]; i != TCP_NOBODY; i = o->sends[i].same_peer)
		if (ready(o, i))
			return true;
	return false;
}

/* Room for what is counted per peer, and for the checksums of the blocks that are sent. */
static FALLIBLE enum err reserve(struct blocks_op *o, uint32_t peers, uint32_t members)
{
	uint64_t n = 0, *at;

	for (uint32_t i = 0; i < o->block_count; i++) {
		o->blocks[i].chunk = chunk_of(o->blocks[i].bytes, members);
		n += o->blocks[i].sends != TCP_NOBODY ? chunks_of(&o->blocks[i]) : 0;
	}
	o->first = mem_alloc(peers * sizeof *o->first);
	o->pending = mem_zalloc(peers, sizeof *o->pending);
	at = o->checks = mem_zalloc(n + 1, sizeof *o->checks);
	NEED(o->first && o->pending && at, "no memory for %u blocks", o->block_count);
	memset(o->first, 0xff, peers * sizeof *o->first);
	each(b, o->blocks, o->block_count) {
		b->checks = b->sends != TCP_NOBODY ? at : NULL;
		at += b->checks ? chunks_of(b) : 0;
	}
	return OK;
}

static FALLIBLE enum err prepare_all(struct blocks_op *o, uint32_t peers, uint32_t members)
{
	for (uint32_t i = 0; i < o->block_count; i++)
		o->blocks[i].sends = TCP_NOBODY;
	for (uint32_t i = o->send_count; i-- > 0;) {
		o->sends[i].same_block = o->blocks[o->sends[i].block].sends;
		o->blocks[o->sends[i].block].sends = i;
	}
	TRY(reserve(o, peers, members));
	each(b, o->blocks, o->block_count) {
		b->missing = b->from == TCP_NOBODY ? 0 : chunks_of(b);
		if (b->missing)
			o->pending[b->from] += b->missing;
		o->left += b->missing;
		for (uint32_t k = 0; k < o->links; k++)
			b->next[k] = k * b->chunk;
	}
	for (uint32_t i = o->send_count; i-- > 0;) {
		struct tcp_send *s = &o->sends[i];
		const struct tcp_block *b = &o->blocks[s->block];
		s->same_peer = o->first[s->to];
		o->first[s->to] = i;
		o->pending[s->to] += chunks_of(b);
		o->left += chunks_of(b);
		for (uint32_t k = 0; k < o->links; k++)
			s->next[k] = k * b->chunk;
	}
	return OK;
}

enum err tcp_blocks_run(struct comm *c, struct tcp_block *blocks, uint32_t block_count, struct tcp_send *sends, uint32_t send_count,
			bool in_steps)
{
	struct tcp_mesh *m = ((struct tcp_group *)c->impl)->mesh;
	struct blocks_op o = {
		.op = { .target = target, .arrived = arrived, .next = next, .sent = sent, .done = done, .needs = needs,
			.awaits = awaits },
		.blocks = blocks, .sends = sends, .block_count = block_count, .send_count = send_count, .in_steps = in_steps,
		.links = m->data_links,
	};

	enum err e = prepare_all(&o, m->size, c->size);
	for (uint32_t i = 0; !e && i < block_count; i++)
		if (blocks[i].source && blocks[i].sends == TCP_NOBODY && blocks[i].bytes)
			memcpy(blocks[i].p, blocks[i].source, blocks[i].bytes);
	e = e ?: tcp_run(&o.op, c);
	mem_free(o.first);
	mem_free(o.pending);
	mem_free(o.checks);
	return e;
}
