/* nccl_move.c: collectives that move device memory as it is. Parts of different sizes, which NCCL's own gathers do not know, are grouped
 * sends and receives straight between the callers' buffers. */
#include "comm/nccl_impl.h"

enum err comm_nccl_barrier(struct comm *c)
{
	return comm_nccl_agree(c, OK);
}

enum err comm_nccl_broadcast(struct comm *c, void *data, uint64_t bytes, uint32_t root)
{
	struct nccl *g = nccl_of(c);

	TRY(comm_nccl_agree(c, OK));
	if (bytes == 0 || c->size == 1)
		return OK;
	g->busy = true;
	TRY(comm_nccl_called(c, comm_nccl_api->broadcast(data, data, bytes, NCCL_UINT8, (int)root, g->comm, comm_nccl_stream(c)),
			     "ncclBroadcast"));
	if (c->rank == root)
		c->root->counts.sent_bytes += bytes;
	else
		c->root->counts.received_bytes += bytes;
	return comm_nccl_wait(c, NCCL_WAIT_ALL);
}

/* To and from each member: bytes, and where they are; a NULL array: nothing that way. */
struct parts {
	const unsigned char *out;
	const uint64_t *out_at, *out_bytes;
	unsigned char *in;
	const uint64_t *in_at, *in_bytes;
};

static uint64_t at(const uint64_t *offsets, uint32_t r)
{
	return offsets ? offsets[r] : 0;
}

static FALLIBLE enum err move_own(struct comm *c, const struct parts *p)
{
	uint64_t bytes = p->out_bytes && p->in_bytes ? p->out_bytes[c->rank] : 0;

	if (!bytes)
		return OK;
	const unsigned char *from = p->out + at(p->out_at, c->rank);
	unsigned char *to = p->in + at(p->in_at, c->rank);
	return from != to ? device_copy(nccl_of(c)->device, to, from, bytes, DEVICE_MOVE) : OK;
}

static void post(struct comm *c, const struct parts *p, uint32_t r, struct nccl_group *to)
{
	struct nccl *g = nccl_of(c);

	if (p->out_bytes && p->out_bytes[r]) {
		comm_nccl_group_add(to, comm_nccl_api->send(p->out + at(p->out_at, r), p->out_bytes[r], NCCL_UINT8, (int)r, g->comm,
							    comm_nccl_stream(c)), "ncclSend");
		c->root->counts.sent_bytes += p->out_bytes[r];
	}
	if (comm_nccl_taken(to->r) && p->in_bytes && p->in_bytes[r]) {
		comm_nccl_group_add(to, comm_nccl_api->recv(p->in + at(p->in_at, r), p->in_bytes[r], NCCL_UINT8, (int)r, g->comm,
							    comm_nccl_stream(c)), "ncclRecv");
		c->root->counts.received_bytes += p->in_bytes[r];
	}
}

static FALLIBLE enum err move_parts(struct comm *c, const struct parts *p)
{
	struct nccl_group group;

	nccl_of(c)->busy = true;
	TRY(move_own(c, p));
	comm_nccl_group_begin(&group);
	for (uint32_t k = 0; k < c->size && comm_nccl_taken(group.r); k++)
		if (k != c->rank)
			post(c, p, k, &group);
	TRY(comm_nccl_group_end(c, &group));
	return comm_nccl_wait(c, NCCL_WAIT_ALL);
}

static void offsets_of(const struct comm *c, const uint64_t *bytes, uint64_t *offsets)
{
	uint64_t sum = 0;

	for (uint32_t r = 0; r < c->size; r++) {
		offsets[r] = sum;
		sum += bytes[r]; /* comm.c has checked the sum */
	}
}

static bool all_equal(const struct comm *c, const uint64_t *bytes)
{
	for (uint32_t r = 1; r < c->size; r++)
		if (bytes[r] != bytes[0])
			return false;
	return true;
}

enum err comm_nccl_all_gather_v(struct comm *c, const void *in, const uint64_t *bytes, void *out)
{
	uint64_t offsets[COMM_RANKS_MAX], mine[COMM_RANKS_MAX];
	struct nccl *g = nccl_of(c);

	TRY(comm_nccl_agree(c, OK));
	if (all_equal(c, bytes)) {
		if (bytes[0] == 0)
			return OK;
		g->busy = true;
		TRY(comm_nccl_called(c, comm_nccl_api->all_gather(in, out, bytes[0], NCCL_UINT8, g->comm, comm_nccl_stream(c)),
				     "ncclAllGather"));
		c->root->counts.sent_bytes += bytes[0] * (c->size - 1);
		c->root->counts.received_bytes += bytes[0] * (c->size - 1);
		return comm_nccl_wait(c, NCCL_WAIT_ALL);
	}
	offsets_of(c, bytes, offsets);
	for (uint32_t r = 0; r < c->size; r++)
		mine[r] = bytes[c->rank];
	return move_parts(c, &(struct parts){ .out = in, .out_bytes = mine, .in = out, .in_at = offsets, .in_bytes = bytes });
}

/* Each with the root alone, in one direction; the root has the parts of everybody in a row. */
static FALLIBLE enum err with_root(struct comm *c, const uint64_t *bytes, uint32_t root, bool to_root, const void *in, void *out)
{
	uint64_t offsets[COMM_RANKS_MAX], mine[COMM_RANKS_MAX];
	struct parts p = to_root ? (struct parts){ .out = in, .out_bytes = mine } : (struct parts){ .in = out, .in_bytes = mine };

	TRY(comm_nccl_agree(c, OK));
	for (uint32_t r = 0; r < c->size; r++)
		mine[r] = r == root ? bytes[c->rank] : 0;
	offsets_of(c, bytes, offsets);
	if (c->rank == root && to_root) {
		p.in = out;
		p.in_at = offsets;
		p.in_bytes = bytes;
	} else if (c->rank == root) {
		p.out = in;
		p.out_at = offsets;
		p.out_bytes = bytes;
	}
	return move_parts(c, &p);
}

enum err comm_nccl_gather(struct comm *c, const void *in, const uint64_t *bytes, void *out, uint32_t root)
{
	return with_root(c, bytes, root, true, in, out);
}

enum err comm_nccl_scatter(struct comm *c, const void *in, const uint64_t *bytes, void *out, uint32_t root)
{
	return with_root(c, bytes, root, false, in, out);
}
