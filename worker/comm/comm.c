/* comm.c: see comm.h. The part that all back ends share: arguments, the deadline, the comparison of calls, and that the first failure is
 * the whole group's. Why here: three back ends that each agreed on errors in their own way would agree on none. */
#include "comm/comm_impl.h"

#include <string.h>
#include <xxhash.h>

#include "base/mem.h"
#include "base/num.h"
#include "comm/reduce.h"

enum { DEADLINE_MS = 30000, TICK_NS = 40 * 1000 * 1000 };

static const char *const kind_names[COMM_KINDS] = {
	[COMM_BARRIER] = "barrier", [COMM_BROADCAST] = "broadcast", [COMM_ALL_GATHER] = "all_gather",
	[COMM_ALL_GATHER_V] = "all_gather_v", [COMM_GATHER] = "gather", [COMM_SCATTER] = "scatter", [COMM_REDUCE] = "reduce",
	[COMM_ALL_REDUCE] = "all_reduce", [COMM_REDUCE_SCATTER] = "reduce_scatter", [COMM_EXCHANGE] = "exchange",
	[COMM_ALL_TO_ALL] = "all_to_all", [COMM_SPLIT] = "split",
};

/* ---- for the back ends ---- */

enum err comm_wait(struct comm *c, bool *late_out)
{
	struct comm *root = c->root;
	uint64_t now = comm_now_ns();

	*late_out = now >= c->deadline_ns;
	if (root->spec.tick && now - root->ticked_ns >= TICK_NS) {
		root->ticked_ns = now;
		root->waiting = c;
		enum err e = root->spec.tick(root->spec.user);
		root->waiting = NULL;
		if (e)
			return comm_at(root, e, root->rank);
	}
	return OK;
}

bool comm_call_same(const struct comm_call *a, const struct comm_call *b)
{
	return a->number == b->number && a->bytes == b->bytes && a->digest == b->digest && a->root == b->root &&
	       a->kind == b->kind && a->dtype == b->dtype && a->op == b->op && a->step == b->step;
}

/* Names a call's kind; a call that another member sent may have any number there. */
static const char *kind_name(const struct comm_call *call)
{
	return call->kind < COMM_KINDS && kind_names[call->kind] ? kind_names[call->kind] : "?";
}

enum err comm_mismatch(const struct comm *c, uint32_t member, const struct comm_call *theirs)
{
	const struct comm_call *mine = &c->call;
	enum err e = ERR(COLLECTIVE_MISMATCH,
			 "rank %u calls %s (call %llu, %llu bytes, root %u, digest %08x), rank %u calls %s "
			 "(call %llu, %llu bytes, root %u, digest %08x)",
			 c->names[c->rank], kind_name(mine), (unsigned long long)mine->number, (unsigned long long)mine->bytes,
			 mine->root, (unsigned)mine->digest, c->names[member], kind_name(theirs),
			 (unsigned long long)theirs->number, (unsigned long long)theirs->bytes, theirs->root,
			 (unsigned)theirs->digest);

	return comm_at(c, e, member);
}

enum err comm_at(const struct comm *c, enum err e, uint32_t member)
{
	must(member < c->size);
	return err_at_rank(e, c->names[member]);
}

void comm_step(struct comm *c)
{
	c->call.number++;
	c->call.step++;
}

/* ---- failing together ---- */

/* The group failed with the error that err_last() tells of; what comes back is what it failed with first. */
static enum err settle(struct comm *c, enum err e)
{
	struct comm *root = c->root;

	if (!e)
		return OK;
	if (!root->failed) {
		struct err_info info = *err_last();
		info.code = e;
		root->failed = true;
		root->ops->abort(root, &info);
		root->failure = info;
	}
	err_restore(&root->failure);
	return root->failure.code;
}

static enum err failed(struct comm *c)
{
	if (!c->root->failed)
		return OK;
	err_restore(&c->root->failure);
	return c->root->failure.code;
}

static FALLIBLE enum err begin(struct comm *c, const struct comm_call *call)
{
	uint64_t number = c->call.number + 1;

	TRY(failed(c));
	c->call = *call;
	c->call.number = number;
	c->deadline_ns = comm_now_ns() + (uint64_t)c->root->spec.deadline_ms * 1000000;
	c->root->counts.collectives++;
	return OK;
}

enum err comm_check(struct comm *c)
{
	TRY(failed(c));
	return settle(c, c->root->ops->poll(c->root));
}

void comm_abort(struct comm *c, enum err e)
{
	must(e);
	if (err_last()->code != e)
		err_record(e, 0, ERR_PLACE, "the group was aborted: %s", err_title(e));
	(void)settle(c, comm_at(c, e, c->rank));
}

/* ---- open, split, close ---- */

static void destroy(struct comm *c)
{
	if (!c)
		return;
	mem_free(c->names);
	explicit_bzero(c->spec.secret, sizeof c->spec.secret);
	mem_free(c);
}

static FALLIBLE enum err create(uint32_t rank, uint32_t size, struct comm **out)
{
	struct comm *c = mem_zalloc(1, sizeof *c);

	NEED(c, "no memory for a group");
	c->rank = rank;
	c->size = size;
	c->names = mem_zalloc(size, sizeof *c->names);
	if (!c->names) {
		destroy(c);
		return ERR(NO_MEMORY, "no memory for a group of %u", size);
	}
	for (uint32_t r = 0; r < size; r++)
		c->names[r] = r;
	c->root = c;
	*out = c;
	return OK;
}

static bool one_host(const struct comm_spec *spec)
{
	for (uint32_t r = 1; spec->hosts && r < spec->size; r++)
		if (spec->hosts[r] != spec->hosts[0])
			return false;
	return true;
}

const struct comm_ops *comm_backend_ops(enum comm_backend b)
{
	switch (b) {
	case COMM_SHM:
		return comm_shm_ops();
	case COMM_TCP:
		return comm_tcp_ops();
	case COMM_NCCL:
		return comm_nccl_ops();
	default:
		return NULL;
	}
}

/* Each on a host of its own, or one back end for both: there is nothing to compose. */
static const struct comm_ops *choose(const struct comm_spec *spec)
{
	if (one_host(spec))
		return comm_backend_ops(spec->inside);
	return spec->inside == spec->between ? comm_backend_ops(spec->between) : comm_hier_ops();
}

const char *comm_backend_name(enum comm_backend b)
{
	static const char *const names[COMM_BACKENDS] = { [COMM_SHM] = "shm", [COMM_TCP] = "tcp", [COMM_NCCL] = "nccl" };

	return b < COMM_BACKENDS ? names[b] : "?";
}

static FALLIBLE enum err open_with(const struct comm_ops *ops, const struct comm_spec *spec, const uint32_t *names, struct comm **out)
{
	struct comm *c;

	TRY(create(spec->rank, spec->size, &c));
	c->ops = ops;
	c->spec = *spec;
	if (!c->spec.deadline_ms)
		c->spec.deadline_ms = DEADLINE_MS;
	if (names)
		memcpy(c->names, names, spec->size * sizeof *names);
	c->deadline_ns = comm_now_ns() + (uint64_t)c->spec.deadline_ms * 1000000;
	enum err e = ops->open(c, spec);
	c->spec.hosts = NULL;
	c->spec.listen = NULL;
	c->spec.meet = NULL;
	if (e) {
		destroy(c);
		return e;
	}
	*out = c;
	return OK;
}

enum err comm_open(const struct comm_spec *spec, struct comm **out)
{
	if (spec->size < 1 || spec->size > COMM_RANKS_MAX || spec->rank >= spec->size)
		return ERR(INVALID_REQUEST, "rank %u of %u: a group has 1 to %u members", spec->rank, spec->size, COMM_RANKS_MAX);
	if (spec->inside >= COMM_BACKENDS || spec->between >= COMM_BACKENDS)
		return ERR(INVALID_REQUEST, "no such communication back end");
	const struct comm_ops *ops = choose(spec);
	if (!ops)
		return ERR(BACKEND_UNAVAILABLE, "this build does not have the back end %s",
			   comm_backend_name(one_host(spec) ? spec->inside : spec->between));
	return open_with(ops, spec, NULL, out);
}

enum err comm_inner_open(const struct comm_ops *ops, const struct comm_spec *spec, const uint32_t *names, struct comm **out)
{
	return open_with(ops, spec, names, out);
}

void comm_close(struct comm *c)
{
	if (!c)
		return;
	must(c->children == 0);
	c->ops->close(c);
	if (c->parent)
		c->parent->children--;
	destroy(c);
}

static FALLIBLE enum err split_rank(const struct comm *parent, const uint32_t *ranks, uint32_t count, uint32_t *rank_out)
{
	unsigned char seen[COMM_RANKS_MAX] = { 0 };
	uint32_t mine = UINT32_MAX;

	for (uint32_t i = 0; i < count; i++) {
		if (ranks[i] >= parent->size || seen[ranks[i]])
			return ERR(INVALID_REQUEST, "rank %u is not in the group, or is listed twice", ranks[i]);
		seen[ranks[i]] = 1;
		if (ranks[i] == parent->rank)
			mine = i;
	}
	if (mine == UINT32_MAX)
		return ERR(INVALID_REQUEST, "rank %u is not in the subgroup that it wants to make", parent->rank);
	*rank_out = mine;
	return OK;
}

enum err comm_inner_split(struct comm *parent, const uint32_t *ranks, uint32_t count, struct comm **out)
{
	struct comm *c;
	uint32_t rank;

	TRY(split_rank(parent, ranks, count, &rank));
	TRY(create(rank, count, &c));
	for (uint32_t i = 0; i < count; i++)
		c->names[i] = parent->names[ranks[i]];
	c->ops = parent->ops;
	c->root = parent->root;
	c->parent = parent;
	c->call = (struct comm_call){ .kind = COMM_SPLIT, .bytes = count, .digest = XXH3_64bits(ranks, count * sizeof *ranks) };
	c->deadline_ns = comm_now_ns() + (uint64_t)c->root->spec.deadline_ms * 1000000;
	enum err e = parent->ops->split(parent, ranks, count, c);
	if (e) {
		destroy(c);
		return e;
	}
	parent->children++;
	*out = c;
	return OK;
}

enum err comm_split(struct comm *parent, const uint32_t *ranks, uint32_t count, struct comm **out)
{
	uint32_t rank;

	TRY(failed(parent));
	if (count < 1 || count > parent->size)
		return ERR(INVALID_REQUEST, "a subgroup of %u in a group of %u", count, parent->size);
	TRY(split_rank(parent, ranks, count, &rank));
	return settle(parent, comm_inner_split(parent, ranks, count, out));
}

enum err comm_split_mesh(struct comm *parent, const int64_t *mesh, uint32_t mesh_ndim, uint32_t dim, struct comm **out)
{
	uint32_t ranks[COMM_RANKS_MAX];
	uint64_t product = 1, stride = 1;

	if (dim >= mesh_ndim)
		return ERR(INVALID_REQUEST, "dim %u of a mesh of %u", dim, mesh_ndim);
	for (uint32_t d = 0; d < mesh_ndim; d++) {
		if (mesh[d] < 1 || mesh[d] > COMM_RANKS_MAX || product > COMM_RANKS_MAX)
			return ERR(WORLD_MISMATCH, "the mesh does not fit a group of %u", parent->size);
		product *= (uint64_t)mesh[d];
		stride *= d > dim ? (uint64_t)mesh[d] : 1;
	}
	if (product != parent->size)
		return ERR(WORLD_MISMATCH, "the mesh has %llu members, the group %u", (unsigned long long)product, parent->size);
	uint64_t mine = parent->rank / stride % (uint64_t)mesh[dim];
	for (uint64_t i = 0; i < (uint64_t)mesh[dim]; i++)
		ranks[i] = (uint32_t)(parent->rank - mine * stride + i * stride);
	return comm_split(parent, ranks, (uint32_t)mesh[dim], out);
}

uint32_t comm_rank(const struct comm *c) { return c->rank; }
uint32_t comm_size(const struct comm *c) { return c->size; }
struct comm_counts comm_counts(const struct comm *c) { return c->root->counts; }

enum err comm_window_add(struct comm *c, uint64_t key, const void *p, uint64_t bytes)
{
	TRY(failed(c));
	return c->ops->window_add ? c->ops->window_add(c, key, p, bytes) : OK;
}

/* ---- collectives ---- */

enum err comm_barrier(struct comm *c)
{
	TRY(begin(c, &(struct comm_call){ .kind = COMM_BARRIER }));
	return settle(c, c->ops->barrier(c));
}

static FALLIBLE enum err check_root(const struct comm *c, uint32_t root)
{
	return root < c->size ? OK : ERR(INVALID_REQUEST, "root %u in a group of %u", root, c->size);
}

enum err comm_broadcast(struct comm *c, void *data, uint64_t bytes, uint32_t root)
{
	TRY(check_root(c, root));
	TRY(begin(c, &(struct comm_call){ .kind = COMM_BROADCAST, .bytes = bytes, .root = root }));
	return settle(c, c->ops->broadcast(c, data, bytes, root));
}

static FALLIBLE enum err begin_parts(struct comm *c, enum comm_kind kind, const uint64_t *bytes, uint32_t root)
{
	struct comm_call call = { .kind = (uint8_t)kind, .root = root };

	TRY(check_root(c, root));
	for (uint32_t r = 0; r < c->size; r++)
		TRY(num_add(call.bytes, bytes[r], &call.bytes));
	call.digest = XXH3_64bits(bytes, c->size * sizeof *bytes);
	return begin(c, &call);
}

enum err comm_all_gather(struct comm *c, const void *in, uint64_t bytes, void *out)
{
	uint64_t parts[COMM_RANKS_MAX];

	for (uint32_t r = 0; r < c->size; r++)
		parts[r] = bytes;
	TRY(begin_parts(c, COMM_ALL_GATHER, parts, 0));
	return settle(c, c->ops->all_gather_v(c, in, parts, out));
}

enum err comm_all_gather_v(struct comm *c, const void *in, const uint64_t *bytes, void *out)
{
	TRY(begin_parts(c, COMM_ALL_GATHER_V, bytes, 0));
	return settle(c, c->ops->all_gather_v(c, in, bytes, out));
}

enum err comm_gather(struct comm *c, const void *in, const uint64_t *bytes, void *out, uint32_t root)
{
	TRY(begin_parts(c, COMM_GATHER, bytes, root));
	return settle(c, (c->ops->gather ? c->ops->gather : comm_generic_gather)(c, in, bytes, out, root));
}

enum err comm_scatter(struct comm *c, const void *in, const uint64_t *bytes, void *out, uint32_t root)
{
	TRY(begin_parts(c, COMM_SCATTER, bytes, root));
	return settle(c, (c->ops->scatter ? c->ops->scatter : comm_generic_scatter)(c, in, bytes, out, root));
}

/* A dtype without that operation is no reason to give the group up if all members agree on it. */
static FALLIBLE enum err begin_reduce(struct comm *c, enum comm_kind kind, uint64_t count, enum dtype d, enum reduce_op op, uint32_t root)
{
	struct comm_call call = { .kind = (uint8_t)kind, .bytes = count, .dtype = (uint8_t)d, .op = (uint8_t)op, .root = root };
	uint64_t total;

	TRY(check_root(c, root));
	if ((unsigned)d >= DT_COUNT || (unsigned)op >= REDUCE_OPS)
		return ERR(INVALID_REQUEST, "no such dtype or operation");
	TRY(num_mul(count, dtype_bytes(d), &total));
	TRY(num_mul(total, c->size, &total));
	TRY(begin(c, &call));
	if (comm_reduce_check(d, op) == OK)
		return OK;
	TRY(settle(c, c->ops->barrier(c)));
	return comm_reduce_check(d, op);
}

enum err comm_reduce(struct comm *c, const void *in, void *out, uint64_t count, enum dtype dtype, enum reduce_op op, uint32_t root)
{
	TRY(begin_reduce(c, COMM_REDUCE, count, dtype, op, root));
	return settle(c, (c->ops->reduce ? c->ops->reduce : comm_generic_reduce)(c, in, out, count, dtype, op, root));
}

enum err comm_all_reduce(struct comm *c, const void *in, void *out, uint64_t count, enum dtype dtype, enum reduce_op op)
{
	TRY(begin_reduce(c, COMM_ALL_REDUCE, count, dtype, op, 0));
	return settle(c, (c->ops->all_reduce ? c->ops->all_reduce : comm_generic_all_reduce)(c, in, out, count, dtype, op));
}

enum err comm_reduce_scatter(struct comm *c, const void *in, void *out, uint64_t count, enum dtype dtype, enum reduce_op op)
{
	TRY(begin_reduce(c, COMM_REDUCE_SCATTER, count, dtype, op, 0));
	return settle(c, (c->ops->reduce_scatter ? c->ops->reduce_scatter : comm_generic_reduce_scatter)(c, in, out, count, dtype, op));
}

static FALLIBLE enum err begin_exchange(struct comm *c, const struct comm_exchange *x, enum comm_kind kind)
{
	struct comm_call call = { .kind = (uint8_t)kind, .bytes = x->count };

	for (uint64_t i = 0; i < x->count; i++) {
		const struct comm_message *m = &x->messages[i];
		if (m->from >= c->size || m->to >= c->size || m->bytes > COMM_BLOCK_MAX)
			return ERR(INVALID_REQUEST, "message %llu: %u bytes from %u to %u in a group of %u", (unsigned long long)i,
				   m->bytes, m->from, m->to, c->size);
	}
	call.digest = XXH3_64bits(x->messages, x->count * sizeof *x->messages);
	return begin(c, &call);
}

enum err comm_exchange(struct comm *c, const struct comm_exchange *x)
{
	TRY(begin_exchange(c, x, COMM_EXCHANGE));
	return settle(c, c->ops->exchange(c, x));
}

enum err comm_all_to_all(struct comm *c, const struct comm_box *boxes, uint64_t count)
{
	struct comm_boxes *b;

	TRY(comm_boxes_new(c->size, boxes, count, &b));
	struct comm_exchange x = comm_boxes_exchange(b);
	enum err e = begin_exchange(c, &x, COMM_ALL_TO_ALL);
	e = e ?: settle(c, c->ops->exchange(c, &x));
	comm_boxes_free(b);
	return e;
}
