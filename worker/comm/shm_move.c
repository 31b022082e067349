/* shm_move.c: the collectives over shared memory.
 *
 * A small part travels with the call itself: one round and it is there. Data in a window is read where it lies, by each member into its
 * own memory: every byte moves once. The rest goes through the sender's blocks (shm_flow.c): twice, but the second time from the cache.
 * Copies are done in pieces that stay below what makes memcpy bypass the cache: measured, that is half again as fast here, and members
 * that read the same source at the same time get it from the cache. */
#include "comm/shm_impl.h"

#include <string.h>

#include "base/mem.h"
#include "base/num.h"
#include "base/vec.h"
#include "os/seg.h"

enum { ALIVE_BYTES = 4 << 20 };

struct piece {
	void *dst;
	const void *src;
	size_t bytes;
};

static void copy_piece(void *user)
{
	const struct piece *p = user;

	for (size_t at = 0; at < p->bytes; at += SHM_BLOCK)
		memcpy((unsigned char *)p->dst + at, (const unsigned char *)p->src + at, num_min(p->bytes - at, SHM_BLOCK));
}

/* memcpy that a shrinking segment on either side turns into an error, and that shows signs of life on the way. */
static FALLIBLE enum err shm_copy(struct shm *s, void *dst, const void *src, uint64_t bytes)
{
	for (uint64_t at = 0; at < bytes; at += ALIVE_BYTES) {
		struct piece p = { (unsigned char *)dst + at, (const unsigned char *)src + at, num_min(bytes - at, ALIVE_BYTES) };
		if (p.dst == p.src)
			return OK;
		TRY(seg_guard(copy_piece, &p));
		if (bytes - at > ALIVE_BYTES)
			TRY(shm_alive(s));
	}
	return OK;
}

/* ---- sources ---- */

/* Puts a part where the others find it, or says how they will get it. */
static FALLIBLE enum err offer(struct shm *s, const void *in, uint64_t bytes, struct shm_post *post)
{
	const unsigned char *p = in;

	*post = (struct shm_post){ .mode = bytes ? SHM_STAGED : SHM_NOTHING };
	if (bytes == 0)
		return OK;
	if (bytes <= SHM_INLINE) {
		post->mode = SHM_INLINED;
		return shm_copy(s, shm_inline(s, s->c->rank, s->round + 1), in, bytes);
	}
	each(w, s->windows, s->window_count) {
		if (p < w->p || !num_inside((uint64_t)(p - w->p), bytes, w->bytes))
			continue;
		post->mode = SHM_WINDOW;
		post->key = w->key;
		post->offset = (uint64_t)(p - w->p);
	}
	return OK;
}

/* Finds the `bytes` that `member` offered in the round that was just reached, as this process sees them. NULL: the data comes through
 * blocks. */
static FALLIBLE enum err find(struct shm *s, uint32_t member, uint64_t bytes, const unsigned char **at_out)
{
	struct shm_post post = shm_member(s, member)->posts[s->round & 1];
	uint32_t mode = *(volatile uint32_t *)&post.mode;

	*at_out = NULL;
	if (mode == SHM_INLINED && bytes <= SHM_INLINE)
		*at_out = shm_inline(s, member, s->round);
	if (mode == SHM_STAGED || *at_out || bytes == 0)
		return OK;
	for (uint32_t i = 0; mode == SHM_WINDOW && i < s->window_count; i++) {
		const struct shm_window *w = &s->windows[i];
		if (w->key == post.key && num_inside(post.offset, bytes, w->bytes)) {
			*at_out = w->p + post.offset;
			return OK;
		}
	}
	return comm_at(s->c, ERR(COMM_PROTOCOL, "rank %u offers memory that rank %u does not have", s->c->names[member],
				 s->c->names[s->c->rank]), member);
}

static FALLIBLE enum err take(struct shm *s, void *out, const unsigned char *from, uint64_t bytes)
{
	s->c->root->counts.copied_bytes += bytes;
	return shm_copy(s, out, from, bytes);
}

static FALLIBLE enum err finish(struct shm *s)
{
	struct shm_post nothing = { .mode = SHM_NOTHING };

	comm_step(s->c);
	return shm_arrive(s, &nothing);
}

/* ---- parts through blocks ---- */

/* The staged parts of a collective as messages: cut into blocks, of all parts in turn. */
struct staged {
	struct shm *s;
	const unsigned char *in;
	unsigned char *out;
	struct comm_message *messages;
	uint64_t *in_offsets, *out_offsets;
	uint64_t count, room;
};

static void free_staged(struct staged *g)
{
	mem_free(g->messages);
	mem_free(g->in_offsets);
	mem_free(g->out_offsets);
}

static enum err pack(void *user, uint64_t i, void *out)
{
	const struct staged *g = user;

	return shm_copy(g->s, out, g->in + g->in_offsets[i], g->messages[i].bytes);
}

static enum err unpack(void *user, uint64_t i, const void *in)
{
	const struct staged *g = user;

	return shm_copy(g->s, g->out + g->out_offsets[i], in, g->messages[i].bytes);
}

static FALLIBLE enum err new_staged(struct staged *g, struct shm *s, const void *in, void *out, uint64_t room)
{
	*g = (struct staged){ .s = s, .in = in, .out = out, .room = room };
	g->messages = mem_zalloc(room, sizeof *g->messages);
	g->in_offsets = mem_zalloc(room, sizeof *g->in_offsets);
	g->out_offsets = mem_zalloc(room, sizeof *g->out_offsets);
	if (g->messages && g->in_offsets && g->out_offsets)
		return OK;
	free_staged(g);
	return ERR(NO_MEMORY, "no memory for %llu blocks", (unsigned long long)room);
}

static void add_part(struct staged *g, uint32_t from, uint32_t to, uint64_t bytes, uint64_t in_at, uint64_t out_at)
{
	for (uint64_t off = 0; off < bytes; off += SHM_BLOCK) {
		must(g->count < g->room);
		g->messages[g->count] = (struct comm_message){ from, to, (uint32_t)num_min(bytes - off, SHM_BLOCK) };
		g->in_offsets[g->count] = in_at + off;
		g->out_offsets[g->count++] = out_at + off;
	}
}

static FALLIBLE enum err run_staged(struct staged *g)
{
	struct comm_exchange x = { g->messages, g->count, pack, unpack, g };
	enum err e = g->count ? shm_flow(g->s, &x) : OK;

	free_staged(g);
	return e;
}

/* ---- collectives ---- */

enum err shm_barrier(struct comm *c)
{
	struct shm_post nothing = { .mode = SHM_NOTHING };

	return shm_arrive(c->impl, &nothing);
}

enum err shm_broadcast(struct comm *c, void *data, uint64_t bytes, uint32_t root)
{
	struct shm *s = c->impl;
	struct shm_post post = { .mode = SHM_NOTHING };
	const unsigned char *from;
	bool mine = c->rank == root;

	if (mine)
		TRY(offer(s, data, bytes, &post));
	TRY(shm_arrive(s, &post));
	TRY(find(s, root, bytes, &from));
	if (!mine && from)
		TRY(take(s, data, from, bytes));
	if (bytes <= SHM_INLINE)
		return OK;
	if (!from) {
		struct staged g;
		TRY(new_staged(&g, s, data, data, num_div_up(bytes, SHM_BLOCK)));
		add_part(&g, root, SHM_ALL, bytes, 0, 0);
		TRY(run_staged(&g));
	}
	return finish(s);
}

/* Every other member's part that can be read where it is; the others are added to g. out: NULL where nothing is taken. */
static FALLIBLE enum err take_parts(struct shm *s, const uint64_t *bytes, unsigned char *out, struct staged *g, uint32_t to)
{
	uint64_t starts[COMM_RANKS_MAX], at = 0;
	uint32_t size = s->c->size, me = s->c->rank;

	for (uint32_t r = 0; r < size; r++) {
		starts[r] = at;
		at += bytes[r];
	}
	/* First what has to be known for the list, in the same order everywhere. */
	for (uint32_t r = 0; r < size; r++) {
		const unsigned char *from;
		TRY(find(s, r, bytes[r], &from));
		if (!from && r != to)
			add_part(g, r, to, bytes[r], 0, starts[r]);
	}
	/* Each begins with another one's, so that no memory is asked for by all at once. */
	for (uint32_t k = 1; k < size && out; k++) {
		uint32_t r = (me + k) % size;
		const unsigned char *from;
		TRY(find(s, r, bytes[r], &from));
		if (from)
			TRY(take(s, out + starts[r], from, bytes[r]));
	}
	return out && bytes[me] ? shm_copy(s, out + starts[me], g->in, bytes[me]) : OK;
}

static uint64_t blocks_of(const uint64_t *bytes, uint32_t size, bool *large_out)
{
	uint64_t n = 0;

	*large_out = false;
	for (uint32_t r = 0; r < size; r++) {
		n += num_div_up(bytes[r], SHM_BLOCK);
		*large_out = *large_out || bytes[r] > SHM_INLINE;
	}
	return n;
}

/* to: SHM_ALL, or the root that alone gets the parts. */
static FALLIBLE enum err collect(struct comm *c, const void *in, const uint64_t *bytes, void *out, uint32_t to)
{
	struct shm *s = c->impl;
	struct shm_post post;
	struct staged g;
	bool large;
	uint64_t blocks = blocks_of(bytes, c->size, &large);

	TRY(offer(s, in, bytes[c->rank], &post));
	TRY(shm_arrive(s, &post));
	TRY(new_staged(&g, s, in, out, blocks));
	enum err e = take_parts(s, bytes, to == SHM_ALL || to == c->rank ? out : NULL, &g, to);
	if (e) {
		free_staged(&g);
		return e;
	}
	TRY(run_staged(&g));
	return large ? finish(s) : OK;
}

enum err shm_all_gather_v(struct comm *c, const void *in, const uint64_t *bytes, void *out)
{
	return collect(c, in, bytes, out, SHM_ALL);
}

enum err shm_gather(struct comm *c, const void *in, const uint64_t *bytes, void *out, uint32_t root)
{
	return collect(c, in, bytes, out, root);
}

enum err shm_scatter(struct comm *c, const void *in, const uint64_t *bytes, void *out, uint32_t root)
{
	struct shm *s = c->impl;
	struct shm_post post = { .mode = SHM_NOTHING };
	const unsigned char *from = NULL;
	uint64_t starts[COMM_RANKS_MAX], total = 0;
	bool large;
	uint64_t blocks = blocks_of(bytes, c->size, &large);

	for (uint32_t r = 0; r < c->size; r++) {
		starts[r] = total;
		total += bytes[r];
	}
	if (c->rank == root)
		TRY(offer(s, in, total, &post));
	TRY(shm_arrive(s, &post));
	TRY(find(s, root, total, &from));
	if (c->rank == root && bytes[root])
		TRY(shm_copy(s, out, (const unsigned char *)in + starts[root], bytes[root]));
	else if (from && bytes[c->rank])
		TRY(take(s, out, from + starts[c->rank], bytes[c->rank]));
	if (total <= SHM_INLINE)
		return OK;
	if (!from) {
		struct staged g;
		TRY(new_staged(&g, s, in, out, blocks));
		for (uint32_t r = 0; r < c->size; r++)
			if (r != root)
				add_part(&g, root, r, bytes[r], starts[r], 0);
		TRY(run_staged(&g));
	}
	return finish(s);
}
