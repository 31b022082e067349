/* shm_flow.c: many messages through few blocks.
 *
 * Each member has a ring of blocks in the arena. It packs its messages into them in the order of the list, several small ones to a
 * block whoever they are for; a block is free again when all its readers have read it. The list, which all members have, decides which
 * messages share a block: no member has to be told, nor believed. A member packs when it can, unpacks when it can and sleeps when it can
 * do neither; since unpacking needs nothing from anybody, it cannot get stuck. */
#include "comm/shm_impl.h"


#include "base/mem.h"

struct cursor {
	uint64_t at, end;              /* of its messages in order[]: the batch is [at, end) */
	uint32_t readers;              /* of the batch, 0: it needs no block */
	bool mine;                     /* there is something in it for this member */
};

struct flow {
	struct shm *s;
	const struct comm_exchange *x;
	uint64_t *starts;              /* of each sender in order[], and an end */
	uint64_t *order;               /* messages by sender */
	struct cursor *cursors;        /* of each sender */
	uint64_t *seen;                /* readers of a batch: the batch that they were counted in last */
	uint64_t batches;
};

static void free_flow(struct flow *f)
{
	mem_free(f->starts);
	mem_free(f->order);
	mem_free(f->cursors);
	mem_free(f->seen);
}

static FALLIBLE enum err new_flow(struct flow *f, struct shm *s, const struct comm_exchange *x)
{
	uint32_t size = s->c->size;

	*f = (struct flow){ .s = s, .x = x };
	f->starts = mem_zalloc(size + (size_t)1, sizeof *f->starts);
	f->order = mem_zalloc(x->count, sizeof *f->order);
	f->cursors = mem_zalloc(size, sizeof *f->cursors);
	f->seen = mem_zalloc(size, sizeof *f->seen);
	if (!f->starts || !f->order || !f->cursors || !f->seen) {
		free_flow(f);
		return ERR(NO_MEMORY, "no memory for %llu messages", (unsigned long long)x->count);
	}
	for (uint64_t i = 0; i < x->count; i++)
		f->starts[x->messages[i].from + 1]++;
	for (uint32_t r = 0; r < size; r++) {
		f->starts[r + 1] += f->starts[r];
		f->cursors[r].at = f->cursors[r].end = f->starts[r];
	}
	for (uint64_t i = 0; i < x->count; i++)
		f->order[f->cursors[x->messages[i].from].at++] = i;
	for (uint32_t r = 0; r < size; r++)
		f->cursors[r].at = f->starts[r];
	return OK;
}

static const struct comm_message *message(const struct flow *f, uint64_t at)
{
	return &f->x->messages[f->order[at]];
}

static uint32_t room_of(const struct comm_message *m)
{
	return m->to == m->from ? 0 : (m->bytes + 63) & ~63u;
}

static void count_reader(struct flow *f, struct cursor *cur, uint32_t from, uint32_t to)
{
	uint32_t me = f->s->c->rank;

	if (to == SHM_ALL) {
		cur->readers = f->s->c->size - 1;
		cur->mine = from != me;
	} else if (to != from && f->seen[to] != f->batches) {
		f->seen[to] = f->batches;
		cur->readers++;
		cur->mine = cur->mine || to == me;
	}
}

/* The sender's next batch, from cursor->at on. A list has either messages for all or messages for one. */
static void next_batch(struct flow *f, uint32_t sender)
{
	struct cursor *cur = &f->cursors[sender];
	uint64_t bytes = 0;

	cur->readers = 0;
	cur->mine = false;
	cur->end = cur->at;
	f->batches++;
	while (cur->end < f->starts[sender + 1] && bytes < SHM_BLOCK) {
		const struct comm_message *m = message(f, cur->end);
		if (bytes + room_of(m) > SHM_SLOT_BYTES)
			break;
		bytes += room_of(m);
		count_reader(f, cur, sender, m->to);
		cur->end++;
	}
}

static bool done(const struct flow *f, uint32_t sender)
{
	return f->cursors[sender].at == f->starts[sender + 1];
}

static void advance(struct flow *f, uint32_t sender)
{
	struct cursor *cur = &f->cursors[sender];

	if (cur->readers)
		f->s->blocks[sender]++;
	cur->at = cur->end;
	next_batch(f, sender);
}

/* Other senders' batches that have nothing for this member only count. */
static void skip_others(struct flow *f, uint32_t sender)
{
	while (!done(f, sender) && !f->cursors[sender].mine)
		advance(f, sender);
}

static FALLIBLE enum err to_myself(struct flow *f, uint64_t index)
{
	struct shm *s = f->s;

	if (!s->scratch && !(s->scratch = mem_alloc(COMM_BLOCK_MAX)))
		return ERR(NO_MEMORY, "no memory for a message");
	TRY(f->x->pack(f->x->user, index, s->scratch));
	return f->x->unpack(f->x->user, index, s->scratch);
}

static void tell_readers(struct flow *f, const struct cursor *cur)
{
	uint32_t size = f->s->c->size, me = f->s->c->rank;

	f->batches++;
	for (uint64_t at = cur->at; at < cur->end; at++) {
		uint32_t to = message(f, at)->to;
		if (to == SHM_ALL) {
			for (uint32_t k = 1; k < size; k++)
				shm_ring(f->s, (me + k) % size);
			return;
		}
		if (to != me && f->seen[to] != f->batches) {
			f->seen[to] = f->batches;
			shm_ring(f->s, to);
		}
	}
}

/* *moved: a batch was sent. */
static FALLIBLE enum err send_batch(struct flow *f, bool *moved)
{
	struct shm *s = f->s;
	uint32_t me = s->c->rank;
	struct cursor *cur = &f->cursors[me];
	struct shm_slot *slot = &shm_member(s, me)->slots[s->blocks[me] % SHM_SLOTS];
	unsigned char *to = shm_slot_bytes(s, me, s->blocks[me]);

	if (done(f, me) || (cur->readers && atomic_load_explicit(&slot->left, memory_order_acquire)))
		return OK;
	for (uint64_t at = cur->at; at < cur->end; at++) {
		const struct comm_message *m = message(f, at);
		if (m->to == me) {
			TRY(to_myself(f, f->order[at]));
			continue;
		}
		TRY(f->x->pack(f->x->user, f->order[at], to));
		to += room_of(m);
	}
	if (cur->readers) {
		atomic_store_explicit(&slot->left, cur->readers, memory_order_relaxed);
		atomic_store_explicit(&slot->filled, s->blocks[me] + 1, memory_order_release);
		tell_readers(f, cur);
	}
	advance(f, me);
	*moved = true;
	return OK;
}

static FALLIBLE enum err receive_batch(struct flow *f, uint32_t sender, bool *moved)
{
	struct shm *s = f->s;
	struct cursor *cur = &f->cursors[sender];
	uint32_t me = s->c->rank;
	uint64_t block = s->blocks[sender];
	struct shm_slot *slot = &shm_member(s, sender)->slots[block % SHM_SLOTS];
	const unsigned char *from = shm_slot_bytes(s, sender, block);

	if (done(f, sender) || atomic_load_explicit(&slot->filled, memory_order_acquire) != block + 1)
		return OK;
	for (uint64_t at = cur->at; at < cur->end; at++) {
		const struct comm_message *m = message(f, at);
		if (m->to == me || m->to == SHM_ALL) {
			TRY(f->x->unpack(f->x->user, f->order[at], from));
			s->c->root->counts.copied_bytes += m->bytes;
		}
		from += room_of(m);
	}
	if (atomic_fetch_sub(&slot->left, 1) == 1)
		shm_ring(s, sender);
	advance(f, sender);
	skip_others(f, sender);
	*moved = true;
	return OK;
}

/* Whom is this member waiting for? Its own blocks are free once their readers have read them: any of the others. */
static FALLIBLE enum err check_others(const struct flow *f, bool late)
{
	const struct shm *s = f->s;
	uint32_t me = s->c->rank, suspect = (me + 1) % s->c->size;

	for (uint32_t k = 1; k < s->c->size; k++) {
		uint32_t r = (me + k) % s->c->size;
		TRY(shm_lost(s, r));
		suspect = done(f, r) ? suspect : r;
	}
	return late ? shm_late(s, suspect) : OK;
}

static FALLIBLE enum err sleep_until_rung(struct flow *f, uint32_t seen)
{
	struct shm_member *me = shm_member(f->s, f->s->c->rank);
	bool late;

	atomic_store(&me->asleep, 1);
	enum err e = shm_sleep(f->s, &me->bell, seen, &late);
	atomic_store(&me->asleep, 0);
	TRY(e);
	/* Nobody leaves before the round that ends the flow, so nobody who has left could have been waited for. */
	return atomic_load(&me->bell) == seen || late ? check_others(f, late) : OK;
}

static FALLIBLE enum err run(struct flow *f)
{
	struct comm *c = f->s->c;
	struct shm_member *me = shm_member(f->s, c->rank);

	for (uint32_t r = 0; r < c->size; r++) {
		next_batch(f, r);
		if (r != c->rank)
			skip_others(f, r);
	}
	for (;;) {
		uint32_t seen = atomic_load(&me->bell);
		bool moved = false, all = true;
		TRY(send_batch(f, &moved));
		for (uint32_t k = 1; k < c->size; k++)
			TRY(receive_batch(f, (c->rank + k) % c->size, &moved));
		for (uint32_t r = 0; r < c->size; r++)
			all = all && done(f, r);
		if (all)
			return OK;
		if (moved)
			TRY(shm_alive(f->s));
		else
			TRY(sleep_until_rung(f, seen));
	}
}

enum err shm_flow(struct shm *s, const struct comm_exchange *x)
{
	struct flow f;

	TRY(new_flow(&f, s, x));
	enum err e = run(&f);
	free_flow(&f);
	return e;
}

enum err shm_exchange(struct comm *c, const struct comm_exchange *x)
{
	struct shm *s = c->impl;
	struct shm_post nothing = { .mode = SHM_NOTHING };

	TRY(shm_arrive(s, &nothing));
	TRY(shm_flow(s, x));
	return shm_arrive(s, &nothing);
}
