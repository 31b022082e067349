/* tcp.c: the tcp back end: which blocks each collective streams to whom.
 *
 * Every algorithm here moves each needed byte once into each member. The sender differs: with little data the fewest steps
 * count (a tree, or each to all); with much, that every member sends as much as it receives (a chain, a ring), so that no one's wire is
 * the bottleneck. All members choose by sizes that they all know. */
#include "comm/tcp_impl.h"

#include <sodium.h>
#include <string.h>
#include <sys/socket.h>
#include <xxhash.h>

#include "base/list.h"
#include "base/mem.h"

enum {
	CHAIN_BYTES = 512 << 10,       /* a broadcast of more is a chain; of less, a tree */
	RING_BYTES = 64 << 10,         /* an all-gather of more, in a group larger than this, is a ring */
	RING_MEMBERS = 8,
	BEAT_MS = 20,
};

static struct tcp_group *group_of(const struct comm *c)
{
	return c->impl;
}

static uint32_t peer_of(const struct comm *c, uint32_t member)
{
	return group_of(c)->peers[member];
}

/* ---- open, split, close ---- */

static void on_beat(evutil_socket_t, short, void *user)
{
	((struct tcp_mesh *)user)->beaten = true;
}

static void mesh_free(struct tcp_mesh *m)
{
	for (uint32_t i = 0; m->peers && i < m->size; i++) {
		for (uint32_t k = 0; m->peers[i].links && k <= m->data_links; k++)
			tcp_link_close(&m->peers[i].links[k]);
		mem_free(m->peers[i].links);
	}
	while (m->splits) {
		struct tcp_split *s = m->splits;
		m->splits = s->next;
		mem_free(s);
	}
	if (m->beat)
		event_free(m->beat);
	if (m->base)
		event_base_free(m->base);
	mem_free(m->peers);
	mem_free(m);
}

static void group_free(struct tcp_group *g)
{
	if (!g)
		return;
	list_remove(&g->mesh->groups, g);
	mem_free(g->peers);
	mem_free(g);
}

static FALLIBLE enum err group_new(struct tcp_mesh *m, struct comm *c, const uint32_t *peers, uint64_t channel)
{
	struct tcp_group *g = mem_zalloc(1, sizeof *g);

	if (g)
		g->peers = mem_zalloc(c->size, sizeof *g->peers);
	if (!g || !g->peers) {
		mem_free(g);
		return ERR(NO_MEMORY, "no memory for a group");
	}
	g->mesh = m;
	g->c = c;
	g->channel = channel;
	g->size = c->size;
	for (uint32_t i = 0; i < c->size; i++)
		g->peers[i] = peers ? peers[i] : i;
	g->next = m->groups;
	m->groups = g;
	c->impl = g;
	return OK;
}

static FALLIBLE enum err start_base(struct tcp_mesh *m)
{
	const struct timeval beat = { 0, BEAT_MS * 1000 };
	struct event_config *config = event_config_new();

	/* One thread uses it: no locks. Nothing of the environment changes it: a worker's is the coordinator's. */
	if (config) {
		(void)event_config_set_flag(config, EVENT_BASE_FLAG_NOLOCK);
		(void)event_config_set_flag(config, EVENT_BASE_FLAG_IGNORE_ENV);
		m->base = event_base_new_with_config(config);
		event_config_free(config);
	}
	if (m->base)
		m->beat = event_new(m->base, -1, EV_PERSIST, on_beat, m);
	if (!m->beat || event_add(m->beat, &beat) < 0)
		return ERR(NO_MEMORY, "cannot make an event loop");
	return OK;
}

static enum err tcp_open(struct comm *c, const struct comm_spec *spec)
{
	struct tcp_mesh *m = mem_zalloc(1, sizeof *m);

	NEED(m, "no memory for a group");
	m->c = c;
	m->id = (struct tcp_identity){ spec->group_id, spec->generation };
	m->rank = c->rank;
	m->size = c->size;
	m->peers = mem_zalloc(c->size, sizeof *m->peers);
	enum err e = m->peers ? OK : ERR(NO_MEMORY, "no memory for %u members", c->size);
	if (!e && sodium_init() < 0)
		e = ERR(SYSTEM, "cannot start the MAC library");
	e = e ?: start_base(m);
	e = e ?: group_new(m, c, NULL, 0);
	if (!e && c->size > 1)
		e = tcp_rendezvous(m, spec);
	if (e) {
		struct err_info why = *err_last();
		why.code = e;
		if (c->impl) {
			tcp_abort(c, &why);
			group_free(c->impl);
		}
		err_restore(&why);
		e = why.code;
		c->impl = NULL;
		mesh_free(m);
	}
	return e;
}

/* The same list may be split off again: the count tells the groups apart. Equal in all members, since all of the list count. */
static FALLIBLE enum err count_split(struct tcp_mesh *m, uint64_t digest, uint64_t *count_out)
{
	struct tcp_split *s;

	for (s = m->splits; s && s->digest != digest; s = s->next)
		;
	if (!s) {
		s = mem_zalloc(1, sizeof *s);
		NEED(s, "no memory for a group");
		s->digest = digest;
		s->next = m->splits;
		m->splits = s;
	}
	*count_out = ++s->count;
	return OK;
}

static enum err tcp_split(struct comm *parent, const uint32_t *ranks, uint32_t count, struct comm *sub)
{
	struct tcp_group *g = group_of(parent);
	uint64_t number;

	uint32_t *peers = mem_alloc(count * sizeof *peers);
	NEED(peers, "no memory for a group");
	for (uint32_t i = 0; i < count; i++)
		peers[i] = g->peers[ranks[i]];
	uint64_t digest = XXH3_64bits_withSeed(peers, count * sizeof *peers, g->channel);
	enum err e = count_split(g->mesh, digest, &number);
	if (!e) {
		uint64_t channel = XXH3_64bits_withSeed(&digest, sizeof digest, number);
		e = group_new(g->mesh, sub, peers, channel ? channel : 1);
	}
	mem_free(peers);
	return e;
}

static void tcp_close(struct comm *c)
{
	struct tcp_group *g = group_of(c);
	const struct tcp_head bye = { .type = TCP_BYE };

	if (!g)
		return;
	struct tcp_mesh *m = g->mesh;
	bool root = g->channel == 0;
	group_free(g);
	c->impl = NULL;
	if (!root)
		return;
	m->op = NULL;
	for (uint32_t i = 0; i < m->size; i++) {
		struct tcp_link *l = i == m->rank || !m->peers[i].links ? NULL : tcp_link_of(m, i, 0);
		if (!l || !l->watch)
			continue;
		tcp_link_tell(l, &bye, NULL);
		(void)shutdown(watch_fd(l->watch), SHUT_WR);
		/* A socket that is closed with something unread resets the connection, which could overtake the goodbye. */
		tcp_link_drain(l);
	}
	mesh_free(m);
}

/* ---- collectives ---- */

static enum err tcp_barrier(struct comm *c)
{
	struct tcp_block blocks[32] = { 0 };
	struct tcp_send sends[32] = { 0 };
	uint32_t n = 0;

	for (uint64_t step = 1; step < c->size; step *= 2, n++) {
		blocks[n].from = peer_of(c, (uint32_t)((c->rank + c->size - step) % c->size));
		sends[n] = (struct tcp_send){ .block = n, .to = peer_of(c, (uint32_t)((c->rank + step) % c->size)) };
	}
	return tcp_blocks_run(c, blocks, n, sends, n, true);
}

static enum err tcp_broadcast(struct comm *c, void *data, uint64_t bytes, uint32_t root)
{
	uint32_t n = c->size, at = (c->rank + n - root) % n, count = 0;
	struct tcp_block block = { .p = data, .bytes = bytes, .from = TCP_NOBODY };
	struct tcp_send sends[32] = { 0 };

#define MEMBER(place) peer_of(c, (uint32_t)(((uint64_t)(place) + root) % n))
	if (bytes > CHAIN_BYTES) {
		if (at > 0)
			block.from = MEMBER(at - 1);
		if (at + 1 < n)
			sends[count++].to = MEMBER(at + 1);
	} else {
		uint32_t low = at ? at & -at : 1U << 31;
		if (at > 0)
			block.from = MEMBER(at - low);
		/* The largest part of the tree first. */
		for (uint32_t step = low / 2; step; step /= 2)
			if (step < n - at)
				sends[count++].to = MEMBER(at + step);
	}
#undef MEMBER
	return tcp_blocks_run(c, &block, 1, sends, count, false);
}

struct part {
	struct tcp_block *blocks;
	struct tcp_send *sends;
	uint32_t count;
	uint64_t total;
};

/* A block per member, at its place of `all` (NULL: not here), all of them empty and here until somebody says otherwise. */
static FALLIBLE enum err parts_new(const struct comm *c, const void *all, const uint64_t *bytes, struct part *p)
{
	*p = (struct part){ .blocks = mem_zalloc(c->size, sizeof *p->blocks), .sends = mem_zalloc(c->size, sizeof *p->sends) };
	if (!p->blocks || !p->sends) {
		mem_free(p->blocks);
		mem_free(p->sends);
		return ERR(NO_MEMORY, "no memory for %u blocks", c->size);
	}
	for (uint32_t i = 0; i < c->size; i++) {
		p->blocks[i] = (struct tcp_block){ .from = TCP_NOBODY };
		if (all) {
			p->blocks[i].p = (unsigned char *)(uintptr_t)all + p->total;
			p->blocks[i].bytes = bytes[i];
		}
		p->total += bytes[i];
	}
	return OK;
}

static FALLIBLE enum err parts_run(struct comm *c, struct part *p)
{
	enum err e = tcp_blocks_run(c, p->blocks, c->size, p->sends, p->count, false);

	mem_free(p->blocks);
	mem_free(p->sends);
	return e;
}

static void add_send(const struct comm *c, struct part *p, uint32_t block, uint32_t to)
{
	p->sends[p->count++] = (struct tcp_send){ .block = block, .to = peer_of(c, to) };
}

static enum err tcp_all_gather_v(struct comm *c, const void *in, const uint64_t *bytes, void *out)
{
	uint32_t n = c->size, me = c->rank;
	struct part p;

	TRY(parts_new(c, out, bytes, &p));
	bool ring = n > RING_MEMBERS && p.total / n > RING_BYTES;
	for (uint32_t i = 1; i < n; i++) {
		uint32_t other = (me + i) % n;
		p.blocks[other].from = peer_of(c, ring ? (me + n - 1) % n : other);
	}
	for (uint32_t i = 0; i + 1 < n; i++)
		add_send(c, &p, ring ? (me + n - i) % n : me, ring ? (me + 1) % n : (me + 1 + i) % n);
	if (in != p.blocks[me].p)
		p.blocks[me].source = in;
	return parts_run(c, &p);
}

static enum err tcp_gather(struct comm *c, const void *in, const uint64_t *bytes, void *out, uint32_t root)
{
	struct part p;

	TRY(parts_new(c, c->rank == root ? out : NULL, bytes, &p));
	struct tcp_block *mine = &p.blocks[c->rank];
	if (c->rank != root) {
		*mine = (struct tcp_block){ .p = (unsigned char *)(uintptr_t)in, .bytes = bytes[c->rank], .from = TCP_NOBODY };
		add_send(c, &p, c->rank, root);
		return parts_run(c, &p);
	}
	for (uint32_t i = 0; i < c->size; i++)
		if (i != root)
			p.blocks[i].from = peer_of(c, i);
	if (in != mine->p)
		mine->source = in;
	return parts_run(c, &p);
}

static enum err tcp_scatter(struct comm *c, const void *in, const uint64_t *bytes, void *out, uint32_t root)
{
	struct part p;

	TRY(parts_new(c, c->rank == root ? in : NULL, bytes, &p));
	if (c->rank != root) {
		p.blocks[c->rank] = (struct tcp_block){ .p = out, .bytes = bytes[c->rank], .from = peer_of(c, root) };
		return parts_run(c, &p);
	}
	for (uint32_t i = 1; i < c->size; i++)
		add_send(c, &p, (root + i) % c->size, (root + i) % c->size);
	if (out != p.blocks[root].p && bytes[root])
		memcpy(out, p.blocks[root].p, bytes[root]);
	return parts_run(c, &p);
}

const struct comm_ops *comm_tcp_ops(void)
{
	static const struct comm_ops ops = {
		.name = "tcp", .open = tcp_open, .split = tcp_split, .close = tcp_close, .abort = tcp_abort, .poll = tcp_poll,
		.show = tcp_show, .silent = tcp_silent,
		.barrier = tcp_barrier, .broadcast = tcp_broadcast, .all_gather_v = tcp_all_gather_v, .exchange = tcp_exchange,
		.gather = tcp_gather, .scatter = tcp_scatter,
	};

	return &ops;
}
