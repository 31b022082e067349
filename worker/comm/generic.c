/* generic.c: collectives that are made of others, for back ends that have no better way of their own: gather and scatter are
 * exchanges; a reduction is an exchange of parts, each summed by one member in rank order, so that all get the same bits, and then a
 * gather. In rounds, so that memory is bounded whatever the tensor's size. */
#include "comm/comm_impl.h"

#include <string.h>

#include "base/mem.h"
#include "base/num.h"
#include "comm/reduce.h"

enum { PART_BYTES = 256 << 10, PARTS_BYTES = 8 << 20 };

/* ---- gather and scatter ---- */

/* One side of each message is the root, the other the member whose part it is. */
struct parts {
	const unsigned char *in;
	unsigned char *out;
	struct comm_message *messages;
	uint64_t *offsets;             /* of each message in its part */
	uint64_t *starts;              /* of each member's part */
	uint64_t count;
	bool gather;
	uint32_t me;
};

static void free_parts(struct parts *p)
{
	mem_free(p->messages);
	mem_free(p->offsets);
	mem_free(p->starts);
}

static uint32_t owner(const struct parts *p, const struct comm_message *m)
{
	return p->gather ? m->from : m->to;
}

static enum err pack_part(void *user, uint64_t i, void *out)
{
	const struct parts *p = user;
	const struct comm_message *m = &p->messages[i];

	if (m->bytes)
		memcpy(out, p->in + (p->gather ? 0 : p->starts[owner(p, m)]) + p->offsets[i], m->bytes);
	return OK;
}

static enum err unpack_part(void *user, uint64_t i, const void *in)
{
	const struct parts *p = user;
	const struct comm_message *m = &p->messages[i];

	if (m->bytes)
		memcpy(p->out + (p->gather ? p->starts[owner(p, m)] : 0) + p->offsets[i], in, m->bytes);
	return OK;
}

/* Round by round over the members, so that all of them are busy at the same time. */
static FALLIBLE enum err list_parts(struct parts *p, const struct comm *c, const uint64_t *bytes, uint32_t root)
{
	uint64_t n = 0, start = 0, longest = 0;

	for (uint32_t r = 0; r < c->size; r++) {
		n += num_div_up(bytes[r], COMM_BLOCK_MAX);
		longest = num_max(longest, bytes[r]);
	}
	p->messages = mem_zalloc(n, sizeof *p->messages);
	p->offsets = mem_zalloc(n, sizeof *p->offsets);
	p->starts = mem_zalloc(c->size, sizeof *p->starts);
	NEED(p->messages && p->offsets && p->starts, "no memory for %llu messages", (unsigned long long)n);
	for (uint32_t r = 0; r < c->size; r++) {
		p->starts[r] = start;
		start += bytes[r];
	}
	for (uint64_t off = 0; off < longest; off += COMM_BLOCK_MAX) {
		for (uint32_t r = 0; r < c->size; r++) {
			if (off >= bytes[r])
				continue;
			p->messages[p->count] = (struct comm_message){
				.from = p->gather ? r : root, .to = p->gather ? root : r,
				.bytes = (uint32_t)num_min(bytes[r] - off, COMM_BLOCK_MAX),
			};
			p->offsets[p->count++] = off;
		}
	}
	return OK;
}

static FALLIBLE enum err move_parts(struct comm *c, const void *in, const uint64_t *bytes, void *out, uint32_t root, bool gather)
{
	struct parts p = { .in = in, .out = out, .gather = gather, .me = c->rank };
	enum err e = list_parts(&p, c, bytes, root);

	if (!e) {
		struct comm_exchange x = { p.messages, p.count, pack_part, unpack_part, &p };
		e = c->ops->exchange(c, &x);
	}
	free_parts(&p);
	return e;
}

enum err comm_generic_gather(struct comm *c, const void *in, const uint64_t *bytes, void *out, uint32_t root)
{
	return move_parts(c, in, bytes, out, root, true);
}

enum err comm_generic_scatter(struct comm *c, const void *in, const uint64_t *bytes, void *out, uint32_t root)
{
	return move_parts(c, in, bytes, out, root, false);
}

/* ---- reductions ---- */

/* A round: of the part of each member that reduces, some elements; they come from everybody and are reduced there. */
struct round {
	const unsigned char *in;
	unsigned char *scratch;        /* size parts of `room` bytes, one of each member */
	struct comm_message *messages; /* size * size */
	uint64_t *at;                  /* of each member's elements of this round in `in`, in bytes */
	uint64_t *bytes;
	uint64_t room;
	uint32_t size, me;
};

static void free_round(struct round *r)
{
	mem_free(r->scratch);
	mem_free(r->messages);
	mem_free(r->at);
	mem_free(r->bytes);
}

static FALLIBLE enum err new_round(struct round *r, const struct comm *c, const void *in, uint32_t item)
{
	uint64_t room = num_min(PART_BYTES, PARTS_BYTES / c->size) / item * item;

	*r = (struct round){ .in = in, .size = c->size, .me = c->rank, .room = num_max(room, item) };
	r->scratch = mem_alloc(r->room * c->size);
	r->messages = mem_zalloc((size_t)c->size * c->size, sizeof *r->messages);
	r->at = mem_zalloc(c->size, sizeof *r->at);
	r->bytes = mem_zalloc(c->size, sizeof *r->bytes);
	if (r->scratch && r->messages && r->at && r->bytes)
		return OK;
	free_round(r);
	return ERR(NO_MEMORY, "no memory for a reduction over %u members", c->size);
}

static enum err pack_round(void *user, uint64_t i, void *out)
{
	const struct round *r = user;

	if (r->messages[i].bytes)
		memcpy(out, r->in + r->at[r->messages[i].to], r->messages[i].bytes);
	return OK;
}

static enum err unpack_round(void *user, uint64_t i, const void *in)
{
	const struct round *r = user;

	memcpy(r->scratch + r->messages[i].from * r->room, in, r->messages[i].bytes);
	return OK;
}

/* at[] and bytes[] are set; reduces this member's elements into out. */
static FALLIBLE enum err run_round(struct comm *c, struct round *r, void *out, enum dtype d, enum reduce_op op)
{
	const void *sources[COMM_RANKS_MAX];
	uint64_t n = 0;

	for (uint32_t k = 0; k < r->size; k++) {
		for (uint32_t to = 0; to < r->size; to++) {
			/* Each begins with another one, so that nobody is written to by all at once. */
			uint32_t from = (to + k) % r->size;
			r->messages[n++] = (struct comm_message){ from, to, (uint32_t)r->bytes[to] };
		}
		sources[k] = r->scratch + k * r->room;
	}
	struct comm_exchange x = { r->messages, n, pack_round, unpack_round, r };
	TRY(c->ops->exchange(c, &x));
	if (r->bytes[r->me])
		comm_reduce_run(out, sources, r->size, r->bytes[r->me] / dtype_bytes(d), d, op);
	comm_step(c);
	return OK;
}

/* The elements [first, first + count) of in, all of one round: reduced by parts, then brought to the root or to all. */
static FALLIBLE enum err reduce_piece(struct comm *c, struct round *r, unsigned char *out, uint64_t first, uint64_t count,
				      enum dtype d, enum reduce_op op, const uint32_t *root)
{
	uint64_t item = dtype_bytes(d), each = num_div_up(count, r->size);
	unsigned char *mine = r->scratch + r->me * r->room;

	for (uint32_t k = 0; k < r->size; k++) {
		uint64_t begin = num_min(k * each, count), end = num_min(begin + each, count);
		r->at[k] = (first + begin) * item;
		r->bytes[k] = (end - begin) * item;
	}
	TRY(run_round(c, r, mine, d, op));
	enum err e;
	if (root)
		e = (c->ops->gather ? c->ops->gather : comm_generic_gather)(c, mine, r->bytes, out ? out + first * item : NULL, *root);
	else
		e = c->ops->all_gather_v(c, mine, r->bytes, out + first * item);
	comm_step(c);
	return e;
}

static FALLIBLE enum err reduce(struct comm *c, const void *in, void *out, uint64_t count, enum dtype d, enum reduce_op op,
				const uint32_t *root)
{
	struct round r;
	enum err e = OK;

	TRY(new_round(&r, c, in, dtype_bytes(d)));
	uint64_t most = r.room / dtype_bytes(d) * c->size, done = 0;
	do {
		uint64_t n = num_min(count - done, most);
		e = reduce_piece(c, &r, root && *root != c->rank ? NULL : out, done, n, d, op, root);
		done += n;
	} while (!e && done < count);
	free_round(&r);
	return e;
}

enum err comm_generic_reduce(struct comm *c, const void *in, void *out, uint64_t count, enum dtype d, enum reduce_op op, uint32_t root)
{
	return reduce(c, in, out, count, d, op, &root);
}

enum err comm_generic_all_reduce(struct comm *c, const void *in, void *out, uint64_t count, enum dtype d, enum reduce_op op)
{
	return reduce(c, in, out, count, d, op, NULL);
}

enum err comm_generic_reduce_scatter(struct comm *c, const void *in, void *out, uint64_t count, enum dtype d, enum reduce_op op)
{
	uint64_t item = dtype_bytes(d), done = 0;
	struct round r;
	enum err e = OK;

	TRY(new_round(&r, c, in, dtype_bytes(d)));
	do {
		uint64_t n = num_min(count - done, r.room / item);
		for (uint32_t k = 0; k < c->size; k++) {
			r.at[k] = (k * count + done) * item;
			r.bytes[k] = n * item;
		}
		e = run_round(c, &r, (unsigned char *)out + done * item, d, op);
		done += n;
	} while (!e && done < count);
	free_round(&r);
	return e;
}
