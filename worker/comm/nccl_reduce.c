/* nccl_reduce.c: reductions of device memory: NCCL's own where it has the dtype and the operation, else piece by piece on the host, each
 * piece brought to those that need its result, which sum in rank order and get the same bits. */
#include "comm/nccl_impl.h"

#include <string.h>

#include "base/mem.h"
#include "base/num.h"
#include "comm/reduce.h"

enum { PIECES_BYTES = 8 << 20 };

static bool native_type(enum dtype d, enum reduce_op op, unsigned *out)
{
	static const struct { enum dtype d; unsigned type; } types[] = {
		{ DT_FLOAT32, NCCL_FLOAT32 }, { DT_FLOAT64, NCCL_FLOAT64 }, { DT_FLOAT16, NCCL_FLOAT16 }, { DT_BFLOAT16, NCCL_BFLOAT16 },
		{ DT_INT64, NCCL_INT64 },     { DT_INT32, NCCL_INT32 },     { DT_INT8, NCCL_INT8 },	  { DT_UINT64, NCCL_UINT64 },
		{ DT_UINT32, NCCL_UINT32 },   { DT_UINT8, NCCL_UINT8 },
	};

	for (size_t i = 0; i < sizeof types / sizeof *types; i++)
		if (types[i].d == d) {
			*out = types[i].type;
			return op != REDUCE_AVG || dtype_is_float(d);
		}
	return false;
}

static unsigned native_op(enum reduce_op op)
{
	static const unsigned ops[REDUCE_OPS] = {
		[REDUCE_SUM] = NCCL_SUM, [REDUCE_AVG] = NCCL_AVG, [REDUCE_MIN] = NCCL_MIN, [REDUCE_MAX] = NCCL_MAX,
		[REDUCE_PRODUCT] = NCCL_PROD,
	};

	return ops[op];
}

/* ---- on the host ---- */

enum result { TO_ROOT, TO_ALL, SCATTERED };

struct host {
	struct comm *c;
	const unsigned char *in;       /* device */
	unsigned char *out;
	uint64_t count, item, room;    /* room: elements of a piece */
	enum result to;
	uint32_t root;
	unsigned char *mine;           /* of this piece: what goes to each target (TO_ROOT, TO_ALL: the same) */
	unsigned char *all;            /* from each member */
	struct comm_message *messages;
	uint64_t n;                    /* elements of this piece */
};

static enum err pack_piece(void *user, uint64_t i, void *out)
{
	const struct host *h = user;

	memcpy(out, h->mine + (h->to == SCATTERED ? h->messages[i].to * h->n * h->item : 0), h->messages[i].bytes);
	return OK;
}

static enum err unpack_piece(void *user, uint64_t i, const void *in)
{
	const struct host *h = user;

	memcpy(h->all + h->messages[i].from * h->room * h->item, in, h->messages[i].bytes);
	return OK;
}

static FALLIBLE enum err fetch(struct host *h, uint64_t done)
{
	uint32_t targets = h->to == SCATTERED ? h->c->size : 1;

	nccl_of(h->c)->busy = true;
	for (uint32_t t = 0; t < targets; t++)
		TRY(device_copy(nccl_of(h->c)->device, h->mine + t * h->n * h->item, h->in + (t * h->count + done) * h->item,
				h->n * h->item, DEVICE_GET));
	return comm_nccl_wait(h->c, NCCL_WAIT_ALL);
}

static FALLIBLE enum err reduce_piece(struct host *h, uint64_t done, enum dtype d, enum reduce_op op)
{
	const void *sources[COMM_RANKS_MAX];
	struct comm *c = h->c;
	uint64_t k = 0;

	TRY(fetch(h, done));
	for (uint32_t from = 0; from < c->size; from++) {
		sources[from] = h->all + from * h->room * h->item;
		for (uint32_t to = 0; to < c->size; to++)
			if (h->to != TO_ROOT || to == h->root)
				h->messages[k++] = (struct comm_message){ from, to, (uint32_t)(h->n * h->item) };
	}
	struct comm_exchange x = { h->messages, k, pack_piece, unpack_piece, h };
	TRY(comm_nccl_exchange(c, &x));
	comm_step(c);
	if ((h->to == TO_ROOT && c->rank != h->root) || h->n == 0)
		return OK;
	comm_reduce_run(h->all, sources, c->size, h->n, d, op);
	nccl_of(c)->busy = true;
	TRY(device_copy(nccl_of(c)->device, h->out + done * h->item, h->all, h->n * h->item, DEVICE_PUT));
	return comm_nccl_wait(c, NCCL_WAIT_ALL);
}

static FALLIBLE enum err reduce_on_host(struct host *h, enum dtype d, enum reduce_op op)
{
	uint64_t size = h->c->size, done = 0;
	enum err e = OK;

	h->item = dtype_bytes(d);
	h->room = num_max(num_min(COMM_BLOCK_MAX, PIECES_BYTES / size) / h->item, 1);
	h->mine = mem_alloc((h->to == SCATTERED ? size : 1) * h->room * h->item);
	h->all = mem_alloc(size * h->room * h->item);
	h->messages = mem_zalloc(size * size, sizeof *h->messages);
	if (!h->mine || !h->all || !h->messages)
		e = ERR(NO_MEMORY, "no memory for a reduction over %ju members", (uintmax_t)size);
	do {
		h->n = num_min(h->count - done, h->room);
		e = e ?: reduce_piece(h, done, d, op);
		done += h->n;
	} while (!e && done < h->count);
	mem_free(h->mine);
	mem_free(h->all);
	mem_free(h->messages);
	return e;
}

/* ---- the three ---- */

static FALLIBLE enum err end_native(struct comm *c, nccl_result r, const char *call, uint64_t sent, uint64_t received)
{
	TRY(comm_nccl_called(c, r, call));
	c->root->counts.sent_bytes += sent;
	c->root->counts.received_bytes += received;
	return comm_nccl_wait(c, NCCL_WAIT_ALL);
}

/* Done on the host, or nothing to do: *native false. Else the members agree, and NCCL may be called. */
static FALLIBLE enum err begin(struct host *h, enum dtype d, enum reduce_op op, unsigned *type, bool *native)
{
	*native = native_type(d, op, type);
	if (!*native)
		return reduce_on_host(h, d, op);
	TRY(comm_nccl_agree(h->c, OK));
	*native = h->count > 0;
	nccl_of(h->c)->busy = nccl_of(h->c)->busy || *native;
	return OK;
}

static FALLIBLE enum err reduce_by(struct host *h, enum dtype d, enum reduce_op op)
{
	struct comm *c = h->c;
	uint64_t bytes = h->count * dtype_bytes(d), others = bytes * (c->size - 1), n = h->count;
	bool native, is_root = c->rank == h->root;
	unsigned type;

	TRY(begin(h, d, op, &type, &native));
	if (!native)
		return OK;
	const struct nccl_api *api = comm_nccl_api;
	unsigned how = native_op(op);
	switch (h->to) {
	case TO_ROOT:
		return end_native(c, api->reduce(h->in, is_root ? h->out : NULL, n, type, how, (int)h->root, nccl_of(c)->comm,
						 comm_nccl_stream(c)), "ncclReduce", is_root ? 0 : bytes, is_root ? others : 0);
	case TO_ALL:
		return end_native(c, api->all_reduce(h->in, h->out, n, type, how, nccl_of(c)->comm, comm_nccl_stream(c)),
				  "ncclAllReduce", bytes, bytes);
	case SCATTERED:
		return end_native(c, api->reduce_scatter(h->in, h->out, n, type, how, nccl_of(c)->comm, comm_nccl_stream(c)),
				  "ncclReduceScatter", others, others);
	}
	return ERR(INTERNAL, "a reduction of form %d", (int)h->to);
}

enum err comm_nccl_reduce(struct comm *c, const void *in, void *out, uint64_t count, enum dtype d, enum reduce_op op, uint32_t root)
{
	return reduce_by(&(struct host){ .c = c, .in = in, .out = out, .count = count, .to = TO_ROOT, .root = root }, d, op);
}

enum err comm_nccl_all_reduce(struct comm *c, const void *in, void *out, uint64_t count, enum dtype d, enum reduce_op op)
{
	return reduce_by(&(struct host){ .c = c, .in = in, .out = out, .count = count, .to = TO_ALL }, d, op);
}

enum err comm_nccl_reduce_scatter(struct comm *c, const void *in, void *out, uint64_t count, enum dtype d, enum reduce_op op)
{
	return reduce_by(&(struct host){ .c = c, .in = in, .out = out, .count = count, .to = SCATTERED }, d, op);
}
