/* hier.c: a group whose members are on several hosts, made of groups that know one way to move bytes each:
 *
 *     inside    the members of this host: shm
 *     all       every member, over tcp or nccl: messages from one to one, and failures
 *     between   the first members of the hosts, a subgroup of all: what everybody is to have crosses once per host here
 *
 * Why `all` is there although the first members could pass everything on: a message between two others would be copied twice more,
 * subgroups have other first members than their parent, and a member that dies is noticed by all at once.
 *
 * Deadlines are staggered: who waits for members of its own host gives up first, since it knows who is missing; the others hear it. */
#include <string.h>

#include "base/mem.h"
#include "comm/comm_impl.h"

enum { STAGGER_NS = 50 * 1000 * 1000 };

struct hier {
	struct comm *c;
	struct comm *inside, *all, *between;   /* between: NULL but at the first members */
	uint32_t *host;                        /* of each member: numbered as they first appear */
	uint32_t *index;                       /* of each member in its host */
	uint32_t *order;                       /* the members, host by host */
	uint32_t *starts;                      /* of each host in order[], and an end */
	uint32_t hosts;
	bool straight;                         /* order[] is 0, 1, 2 …: a host's parts lie behind one another */
};

/* ---- who is where ---- */

static void destroy(struct hier *h)
{
	if (!h)
		return;
	comm_close(h->between);
	comm_close(h->all);
	comm_close(h->inside);
	mem_free(h->host);
	mem_free(h->index);
	mem_free(h->order);
	mem_free(h->starts);
	mem_free(h);
}

/* Puts the members' hosts, numbers that mean nothing, into order. */
static void place(struct hier *h, const uint32_t *hosts)
{
	uint32_t size = h->c->size, at = 0;

	for (uint32_t r = 0; r < size; r++) {
		uint32_t first = 0;
		while (hosts[first] != hosts[r])
			first++;
		h->host[r] = first == r ? h->hosts++ : h->host[first];
	}
	h->straight = true;
	for (uint32_t k = 0; k < h->hosts; k++) {
		h->starts[k] = at;
		for (uint32_t r = 0; r < size; r++) {
			if (h->host[r] != k)
				continue;
			h->index[r] = at - h->starts[k];
			h->straight = h->straight && at == r;
			h->order[at++] = r;
		}
	}
	h->starts[h->hosts] = at;
}

static FALLIBLE enum err create(struct comm *c, const uint32_t *hosts, struct hier **out)
{
	struct hier *h = mem_zalloc(1, sizeof *h);

	NEED(h, "no memory for a group");
	h->c = c;
	h->host = mem_zalloc(c->size, sizeof *h->host);
	h->index = mem_zalloc(c->size, sizeof *h->index);
	h->order = mem_zalloc(c->size, sizeof *h->order);
	h->starts = mem_zalloc(c->size + (size_t)1, sizeof *h->starts);
	if (!h->host || !h->index || !h->order || !h->starts) {
		destroy(h);
		return ERR(NO_MEMORY, "no memory for a group of %u", c->size);
	}
	place(h, hosts);
	*out = h;
	return OK;
}

static const uint32_t *mine(const struct hier *h)
{
	return h->order + h->starts[h->host[h->c->rank]];
}

static uint32_t mine_count(const struct hier *h)
{
	uint32_t host = h->host[h->c->rank];

	return h->starts[host + 1] - h->starts[host];
}

/* ---- open, split, close ---- */

/* While one of the groups waits, the others' failures are heard, and this member shows in them that it is alive, and for whom it waits. */
static enum err tick(void *user)
{
	struct hier *h = user;
	bool late;

	if (h->inside)
		TRY(h->inside->ops->poll(h->inside));
	if (h->all)
		TRY(h->all->ops->poll(h->all));
	if (h->all && h->all->ops->show && h->inside && h->inside->waiting) {
		uint32_t late_one = h->inside->ops->stalest(h->inside->waiting);
		h->all->ops->show(h->all, late_one != UINT32_MAX ? h->inside->names[late_one] : UINT32_MAX);
	}
	return comm_wait(h->c, &late);
}

static uint32_t beyond(void *user, uint32_t rank)
{
	struct hier *h = user;

	return h->all && h->all->ops->silent ? h->all->ops->silent(h->all, rank) : UINT32_MAX;
}

static FALLIBLE enum err split_between(struct hier *h)
{
	uint32_t firsts[COMM_RANKS_MAX];

	if (h->index[h->c->rank] != 0)
		return OK;
	for (uint32_t k = 0; k < h->hosts; k++)
		firsts[k] = h->order[h->starts[k]];
	return comm_inner_split(h->all, firsts, h->hosts, &h->between);
}

static FALLIBLE enum err open_all(struct hier *h, const struct comm_spec *spec)
{
	const struct comm_ops *inside = comm_backend_ops(spec->inside);
	const struct comm_ops *between = spec->between == COMM_NCCL ? comm_nccl_host_ops() : comm_backend_ops(spec->between);
	struct comm_spec inner = *spec;

	if (!inside || !between)
		return ERR(BACKEND_UNAVAILABLE, "this build does not have %s and %s", comm_backend_name(spec->inside),
			   comm_backend_name(spec->between));
	if (spec->inside != COMM_SHM)
		return ERR(UNSUPPORTED, "inside a host, %s cannot be beneath %s", comm_backend_name(spec->inside),
			   comm_backend_name(spec->between));
	inner.hosts = NULL;
	inner.tick = tick;
	inner.user = spec->user;
	inner.deadline_ms = h->c->spec.deadline_ms;
	struct comm_spec local = inner;
	local.rank = h->index[spec->rank];
	local.size = mine_count(h);
	local.user = h;
	TRY(comm_inner_open(inside, &local, mine(h), &h->inside));
	h->inside->beyond = beyond;
	inner.tick = NULL; /* meet and tick share `user` */
	TRY(comm_inner_open(between, &inner, NULL, &h->all));
	h->all->spec.tick = tick;
	h->all->spec.user = h;
	return split_between(h);
}

static enum err hier_open(struct comm *c, const struct comm_spec *spec)
{
	struct hier *h;

	TRY(create(c, spec->hosts, &h));
	enum err e = open_all(h, spec);
	if (e) {
		struct err_info info = *err_last();
		if (h->all)
			h->all->ops->abort(h->all, &info);
		destroy(h);
		err_restore(&info);
		return info.code;
	}
	c->impl = h;
	return OK;
}

static enum err hier_split(struct comm *parent, const uint32_t *ranks, uint32_t count, struct comm *sub)
{
	struct hier *p = parent->impl, *h;
	uint32_t hosts[COMM_RANKS_MAX], local[COMM_RANKS_MAX];

	for (uint32_t i = 0; i < count; i++)
		hosts[i] = p->host[ranks[i]];
	TRY(create(sub, hosts, &h));
	for (uint32_t i = 0; i < mine_count(h); i++)
		local[i] = p->index[ranks[mine(h)[i]]];
	enum err e = comm_inner_split(p->inside, local, mine_count(h), &h->inside);
	e = e ?: comm_inner_split(p->all, ranks, count, &h->all);
	e = e ?: split_between(h);
	if (e) {
		struct err_info info = *err_last();
		destroy(h);
		err_restore(&info);
		return e;
	}
	sub->impl = h;
	return OK;
}

static void hier_close(struct comm *c)
{
	destroy(c->impl);
	c->impl = NULL;
}

static void hier_abort(struct comm *c, struct err_info *f)
{
	struct hier *h = c->impl;

	h->all->ops->abort(h->all, f);
	h->inside->ops->abort(h->inside, f);
}

static enum err hier_poll(struct comm *c)
{
	struct hier *h = c->impl;

	TRY(h->inside->ops->poll(h->inside));
	return h->all->ops->poll(h->all);
}

static enum err hier_window_add(struct comm *c, uint64_t key, const void *p, uint64_t bytes)
{
	struct hier *h = c->impl;

	return h->inside->ops->window_add(h->inside, key, p, bytes);
}

/* ---- collectives ---- */

/* The next use of an inner group. late: how many steps later than the first its deadline is. */
static struct comm *enter(struct hier *h, struct comm *inner, uint32_t late)
{
	uint64_t number = inner->call.number + 1;

	inner->call = h->c->call;
	inner->call.number = number;
	inner->deadline_ns = h->c->deadline_ns + late * UINT64_C(1) * STAGGER_NS;
	return inner;
}

static enum err tally(struct hier *h, enum err e)
{
	const struct hier *root = h->c->root->impl;
	struct comm_counts *sum = &h->c->root->counts;

	if (root) {
		sum->copied_bytes = root->inside->counts.copied_bytes;
		sum->sent_bytes = root->all->counts.sent_bytes;
		sum->received_bytes = root->all->counts.received_bytes;
	}
	return e;
}

static enum err hier_barrier(struct comm *c)
{
	struct hier *h = c->impl;

	TRY(h->inside->ops->barrier(enter(h, h->inside, 0)));
	if (h->between)
		TRY(h->between->ops->barrier(enter(h, h->between, 1)));
	return h->inside->ops->barrier(enter(h, h->inside, 2));
}

static FALLIBLE enum err broadcast(struct hier *h, void *data, uint64_t bytes, uint32_t root)
{
	bool here = h->host[root] == h->host[h->c->rank];

	if (here)
		TRY(h->inside->ops->broadcast(enter(h, h->inside, 0), data, bytes, h->index[root]));
	if (h->between)
		TRY(h->between->ops->broadcast(enter(h, h->between, 1), data, bytes, h->host[root]));
	return here ? OK : h->inside->ops->broadcast(enter(h, h->inside, 2), data, bytes, 0);
}

static enum err hier_broadcast(struct comm *c, void *data, uint64_t bytes, uint32_t root)
{
	return tally(c->impl, broadcast(c->impl, data, bytes, root));
}

/* to: the parts host by host. */
static FALLIBLE enum err gather_hosts(struct hier *h, const void *in, const uint64_t *bytes, unsigned char *to)
{
	uint64_t local[COMM_RANKS_MAX], of_hosts[COMM_RANKS_MAX], begin = 0, end = 0, total = 0;
	uint32_t host = h->host[h->c->rank];

	for (uint32_t k = 0; k < h->hosts; k++) {
		of_hosts[k] = 0;
		for (uint32_t i = h->starts[k]; i < h->starts[k + 1]; i++) {
			of_hosts[k] += bytes[h->order[i]];
			if (k == host)
				local[i - h->starts[k]] = bytes[h->order[i]];
		}
		begin = k == host ? total : begin;
		total += of_hosts[k];
		end = k == host ? total : end;
	}
	TRY(h->inside->ops->all_gather_v(enter(h, h->inside, 0), in, local, to + begin));
	if (h->between)
		TRY(h->between->ops->all_gather_v(enter(h, h->between, 1), to + begin, of_hosts, to));
	TRY(h->inside->ops->broadcast(enter(h, h->inside, 2), to, begin, 0));
	return h->inside->ops->broadcast(enter(h, h->inside, 2), to + end, total - end, 0);
}

static FALLIBLE enum err all_gather_v(struct hier *h, const void *in, const uint64_t *bytes, unsigned char *out)
{
	uint64_t places[COMM_RANKS_MAX], total = 0, at = 0;

	if (h->straight)
		return gather_hosts(h, in, bytes, out);
	for (uint32_t r = 0; r < h->c->size; r++) {
		places[r] = total;
		total += bytes[r];
	}
	unsigned char *all = mem_alloc(total);
	NEED(all, "no memory for an all-gather of %llu bytes", (unsigned long long)total);
	enum err e = gather_hosts(h, in, bytes, all);
	for (uint32_t i = 0; !e && i < h->c->size; i++) {
		uint32_t r = h->order[i];
		if (bytes[r])
			memcpy(out + places[r], all + at, bytes[r]);
		at += bytes[r];
	}
	mem_free(all);
	return e;
}

static enum err hier_all_gather_v(struct comm *c, const void *in, const uint64_t *bytes, void *out)
{
	return tally(c->impl, all_gather_v(c->impl, in, bytes, out));
}

/* ---- exchange: what stays in a host goes one way, the rest the other ---- */

struct part {
	const struct comm_exchange *x;
	struct comm_message *messages;
	uint64_t *index;               /* in x */
	uint64_t count;
};

static enum err pack(void *user, uint64_t i, void *out)
{
	const struct part *p = user;

	return p->x->pack(p->x->user, p->index[i], out);
}

static enum err unpack(void *user, uint64_t i, const void *in)
{
	const struct part *p = user;

	return p->x->unpack(p->x->user, p->index[i], in);
}

/* inside: those of this host, as its members are numbered; else all that go from host to host. */
static FALLIBLE enum err pick(const struct hier *h, const struct comm_exchange *x, bool inside, struct part *p)
{
	uint32_t here = h->host[h->c->rank];

	*p = (struct part){ .x = x, .messages = mem_zalloc(x->count, sizeof *p->messages),
			    .index = mem_zalloc(x->count, sizeof *p->index) };
	NEED(p->messages && p->index, "no memory for %llu messages", (unsigned long long)x->count);
	for (uint64_t i = 0; i < x->count; i++) {
		struct comm_message m = x->messages[i];
		bool local = h->host[m.from] == h->host[m.to];
		if (local != inside || (inside && h->host[m.from] != here))
			continue;
		if (inside)
			m = (struct comm_message){ h->index[m.from], h->index[m.to], m.bytes };
		p->index[p->count] = i;
		p->messages[p->count++] = m;
	}
	return OK;
}

static FALLIBLE enum err exchange_part(struct hier *h, const struct comm_exchange *x, bool inside)
{
	struct comm *inner = enter(h, inside ? h->inside : h->all, inside ? 0 : 1);
	struct part p;
	enum err e = pick(h, x, inside, &p);

	if (!e) {
		struct comm_exchange part = { p.messages, p.count, pack, unpack, &p };
		e = inner->ops->exchange(inner, &part);
	}
	mem_free(p.messages);
	mem_free(p.index);
	return e;
}

static enum err hier_exchange(struct comm *c, const struct comm_exchange *x)
{
	struct hier *h = c->impl;
	enum err e = exchange_part(h, x, true);

	return tally(h, e ? e : exchange_part(h, x, false));
}

static const struct comm_ops ops = {
	.name = "hierarchical", .open = hier_open, .split = hier_split, .close = hier_close, .abort = hier_abort, .poll = hier_poll,
	.window_add = hier_window_add, .barrier = hier_barrier, .broadcast = hier_broadcast, .all_gather_v = hier_all_gather_v,
	.exchange = hier_exchange,
};

const struct comm_ops *comm_hier_ops(void)
{
	return &ops;
}
