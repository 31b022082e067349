/* state_dict_slot.c: the life of a slot: reserve, seal, release. See the diagram in state_dict.h.
 *
 * Before the client may go on, the journal must know of a seal (the snapshot then outlives everybody) and the end of a seal
 * (else a restart would take half-overwritten pages for a snapshot). Reserving a warm slot waits for nothing, and a seal for no disk. */
#include "base/list.h"
#include "base/log.h"
#include "base/mem.h"
#include "server/state_dict_impl.h"

enum { WAIT_MAX_MS = 600000 };

struct slot_waiter {
	struct slot_waiter *next;
	struct state_dict *sd;
	uint32_t rank;
	uint64_t bytes;
	int64_t generation;
	reserved_fn fn;
	void *user;
	struct loop_timer *timer;
	struct slot *slot;             /* when it has one */
	bool fresh;
};

static const struct slot_watch *watch_of(const struct state_dict *sd)
{
	return sd->all->watch;
}

/* ---- reserve ---- */

static void answer_reserved(void *user, enum err e)
{
	struct slot_waiter *w = user;
	struct slot *sl = w->slot;
	struct reservation r = { 0 };

	if (!e) {
		r = (struct reservation){ .segment = sl->segment, .slot = sl->number, .bytes = sl->bytes,
					  .generation = w->generation, .fresh = w->fresh,
					  .lease_expires_ms = state_dict_lease_wall(w->sd, w->rank) };
	}
	w->fn(w->user, e, e ? NULL : &r);
	state_dict_unref(w->sd);
	mem_free(w);
}

/* For what a rank begins or has written. The end of a seal is no such thing: a disk that loses it leaves the segment as it is. */
static struct journal_txn *filling_txn(const struct state_dict *sd)
{
	struct journal_txn *t = journal_txn_new(sd->all->parts.journal);

	if (!sd->feed && !sd->replica) /* else other nodes know its generations */
		journal_txn_of_memory(t);
	return t;
}

static void open_slot(struct slot_waiter *w)
{
	struct slot *sl = w->slot;
	struct state_dict *sd = w->sd;

	slot_move(sl, SLOT_OPEN);
	sl->made = sl->filler_gone = false;
	slot_stop_filling(sl);
	watch_free(&sl->filler);
	sl->generation = w->generation;
	sl->image_bytes = 0;
	struct journal_txn *t = filling_txn(sd);
	state_dict_slot_row(t, sd, sl, SLOT_OPEN);
	journal_commit(sd->all->parts.journal, t, NULL, NULL);
	watch_of(sd)->changed(sd);
}

static void on_segment(void *user, enum err e)
{
	struct slot_waiter *w = user;

	if (e) {
		CLEANUP(err_restore) struct err_info info = *err_last();
		slot_move(w->slot, SLOT_FREE);
		if (!w->sd->dead)
			state_dict_serve_waiters(w->sd);
	} else {
		open_slot(w);
	}
	answer_reserved(w, e);
}

/* The best slot to hand out: one that fits, the smallest; else one whose segment must be made. An open slot of an older generation
 * was given up by its client. */
static struct slot *pick(const struct state_dict *sd, uint32_t rank, uint64_t bytes)
{
	struct slot *best = NULL;

	for (uint32_t k = 0; k < sd->slot_count; k++) {
		struct slot *sl = state_dict_slot(sd, rank, k);
		if ((sl->state != SLOT_FREE && sl->state != SLOT_OPEN) || sl->uses)
			continue;
		bool fits = sl->bytes >= bytes, best_fits = best && best->bytes >= bytes;
		if (!best || (fits && !best_fits) || (fits && sl->bytes < best->bytes) ||
		    (!fits && !best_fits && sl->bytes < best->bytes))
			best = sl;
	}
	return best;
}

/* A version that this rank sealed and others did not, before it went on: its publisher was killed in between. */
static void drop_unfinished(struct state_dict *sd, uint32_t rank, int64_t generation)
{
	int64_t newest = state_dict_newest(sd);

	for (uint32_t k = 0; k < sd->slot_count; k++) {
		struct slot *sl = state_dict_slot(sd, rank, k);
		if (sl->state == SLOT_SEALED && sl->generation > newest && sl->generation < generation && !sl->uses)
			state_dict_free_slot(sd, sl);
	}
}

/* true: the waiter has been dealt with. */
static bool try_reserve(struct slot_waiter *w)
{
	struct state_dict *sd = w->sd;
	struct slot *sl = state_dict_slot_of(sd, w->rank, w->generation, SLOT_OPEN);
	enum err e = OK;

	if (sl && sl->uses) { /* it begins again what a job is reading: not in the same place */
		state_dict_abandon_slot(sd, sl);
		watch_of(sd)->given_up(sd, w->rank, w->generation, "it has begun it again");
		sl = NULL;
	}
	if (!sl) /* one that is too small for this generation is made larger: a rank has one slot of a generation */
		sl = pick(sd, w->rank, w->bytes);
	if (!sl && state_dict_publishes(sd))
		drop_unfinished(sd, w->rank, w->generation);
	if (!sl && state_dict_publishes(sd))
		sd->all->yield(sd);
	if (!sl)
		return false;
	w->slot = sl;
	if (sl->bytes >= w->bytes) {
		open_slot(w);
		loop_later(sd->all->parts.loop, answer_reserved, w, OK);
		return true;
	}
	state_dict_drop_segment(sd, sl);
	slot_move(sl, SLOT_MAKING);
	sl->generation = w->generation;
	w->fresh = true;
	struct seg_wanted want = { sd, sl, state_dict_space_round(w->bytes), on_segment, w };
	e = state_dict_space_make(sd->all, &want);
	if (e) {
		slot_move(sl, SLOT_FREE);
		loop_later(sd->all->parts.loop, answer_reserved, w, e);
	}
	return true;
}

static void take_out(struct slot_waiter *w)
{
	list_remove(&w->sd->waiters, w);
	w->sd->all->waiting--;
	loop_timer_stop(&w->timer);
}

static enum err busy(const struct slot_waiter *w)
{
	return err_at_rank(ERR(SLOTS_BUSY, "all %u slots of rank %u of state dict \"%s\" are in use; release a generation first",
			       w->sd->slot_count, w->rank, w->sd->name), w->rank);
}

static void on_wait_over(void *user)
{
	struct slot_waiter *w = user;

	w->timer = NULL;
	take_out(w);
	answer_reserved(w, busy(w));
}

void state_dict_serve_waiters(struct state_dict *sd)
{
	list_each(w, sd->waiters)
		if (try_reserve(w)) /* answers later, never now: the list stays as it is */
			take_out(w);
}

void state_dict_fail_waiters(struct state_dict *sd)
{
	while (sd->waiters) {
		struct slot_waiter *w = sd->waiters;
		take_out(w);
		loop_later(sd->all->parts.loop, answer_reserved, w, ERR(NOT_FOUND, "state dict \"%s\" was deleted", sd->name));
	}
}

void state_dict_kill(struct state_dict *sd)
{
	must(!sd->dead && (!sd->uses || sd->hidden));
	map_remove(&sd->all->table, str_of(sd->name));
	loop_timer_stop(&sd->look_timer);
	sd->dead = true;
	sd->refs++;
	state_dict_feed_leave(sd);
	state_dict_fail_waiters(sd);
	watch_of(sd)->deleted(sd);
	for (uint32_t i = 0; i < state_dict_slots(sd); i++)
		state_dict_drop_segment(sd, state_dict_nth(sd, i));
	state_dict_unref(sd);
}

static FALLIBLE enum err check_reserve(struct state_dict *sd, uint32_t rank, uint64_t bytes, int64_t generation)
{
	if (*sd->all->parts.draining)
		return ERR(DRAINING, "the daemon is shutting down");
	if (bytes == 0 || bytes > 1ull << 62)
		return ERR(VALIDATION_FAILED, "bytes must be from 1 to 2^62");
	if (generation < 0)
		return ERR(VALIDATION_FAILED, "generation must not be negative");
	int64_t last = sd->ranks[rank].last_generation > sd->last_generation ? sd->ranks[rank].last_generation :
									      sd->last_generation;
	if (generation <= last)
		return err_at_rank(ERR(GENERATION_STALE, "generation %jd is not newer than %jd", (intmax_t)generation,
				       (intmax_t)last), rank);
	return OK;
}

void state_dict_reserve(struct state_dicts *s, const struct principal *who, struct str name, int64_t rank, uint64_t bytes,
			int64_t generation, int64_t wait_ms, reserved_fn fn, void *user)
{
	struct slot_waiter *w = mem_sure(sizeof *w);
	static struct state_dict nobody = { .refs = 1 }; /* keeps the answer's path the same when there is no state dict */

	*w = (struct slot_waiter){ .rank = (uint32_t)rank, .bytes = bytes, .generation = generation, .fn = fn, .user = user };
	enum err e = state_dict_find_rank(s, who, name, rank, &w->sd);
	if (e)
		w->sd = &nobody;
	else
		e = check_reserve(w->sd, w->rank, bytes, generation);
	w->sd->refs++;
	if (!e && try_reserve(w))
		return;
	if (!e && wait_ms <= 0)
		e = busy(w);
	if (!e && s->waiting == STATE_DICT_WAITERS_MAX)
		e = ERR(BUSY, "%d reservations are waiting for slots", STATE_DICT_WAITERS_MAX);
	if (e) {
		loop_later(s->parts.loop, answer_reserved, w, e);
		return;
	}
	loop_timer_start(s->parts.loop, wait_ms < WAIT_MAX_MS ? wait_ms : WAIT_MAX_MS, on_wait_over, w, &w->timer);
	s->waiting++;
	struct slot_waiter **at = &w->sd->waiters;
	while (*at)
		at = &(*at)->next;
	*at = w;
}

void state_dict_abandon_slot(struct state_dict *sd, struct slot *sl)
{
	must(sl->state == SLOT_OPEN && sl->uses);
	slot_move(sl, SLOT_LEAVING);
	state_dict_slot_write(sd, sl, SLOT_FREE, NULL, NULL);
}

/* ---- seal ---- */

enum { PAGE = 4096 };

struct change {
	struct state_dict *sd;
	struct slot *slot;
	uint32_t rank;
	done_fn fn;
	void *user;
};

static struct change *new_change(struct state_dict *sd, struct slot *slot, uint32_t rank, done_fn fn, void *user)
{
	struct change *c = mem_sure(sizeof *c);

	*c = (struct change){ sd, slot, rank, fn, user };
	sd->refs++;
	return c;
}

static void end_change(struct change *c, enum err e)
{
	if (c->fn)
		c->fn(c->user, e);
	state_dict_unref(c->sd);
	mem_free(c);
}

static void on_sealed(void *user, enum err e)
{
	struct change *c = user;
	struct state_dict *sd = c->sd;
	struct slot *sl = c->slot;

	if (!sd->dead && sl->state == SLOT_SEALING) {
		slot_move(sl, e ? SLOT_OPEN : SLOT_SEALED);
		if (!e)
			slot_stop_filling(sl);
		if (!e)
			state_dict_look_at(sd, sl);
		if (!e && state_dict_complete(sd, sl->generation)) {
			state_dict_emit(sd, "complete", sl->generation);
			watch_of(sd)->complete(sd, sl->generation);
			if (sl->generation > sd->last_generation) {
				sd->last_generation = sl->generation;
				state_dict_write(sd);
			}
		}
		watch_of(sd)->changed(sd);
	}
	end_change(c, e);
}

static FALLIBLE enum err check_seal(struct state_dict *sd, uint32_t rank, int64_t generation, uint64_t image_bytes,
				    bool through_ring, struct slot **slot_out)
{
	struct slot *sl = state_dict_slot_of(sd, rank, generation, SLOT_SEALED);

	*slot_out = NULL;
	if (sl && sl->image_bytes == image_bytes)
		return OK;
	if (sl)
		return err_at_rank(ERR(STATE_CONFLICT, "generation %jd is sealed with %ju bytes already", (intmax_t)generation,
				       (uintmax_t)sl->image_bytes), rank);
	sl = state_dict_slot_of(sd, rank, generation, SLOT_OPEN);
	if (!sl && generation <= sd->ranks[rank].last_generation)
		return err_at_rank(ERR(GENERATION_STALE, "generation %jd is not newer than %jd", (intmax_t)generation,
				       (intmax_t)sd->ranks[rank].last_generation), rank);
	if (!sl)
		return err_at_rank(ERR(STATE_CONFLICT, "rank %u has no open slot for generation %jd: reserve it first", rank,
				       (intmax_t)generation), rank);
	if (sl->is_written)
		return err_at_rank(ERR(STATE_CONFLICT, "generation %jd is being copied from a device: wait for that",
				       (intmax_t)generation), rank);
	if (image_bytes < 8 || (image_bytes > sl->bytes && !through_ring && !sl->ring.bytes))
		return err_at_rank(ERR(VALIDATION_FAILED, "image_bytes must be from 8 to the slot's %ju", (uintmax_t)sl->bytes), rank);
	if (sl->filling && sl->image_bytes != image_bytes)
		return err_at_rank(ERR(STATE_CONFLICT, "generation %jd is being filled with %ju bytes", (intmax_t)generation,
				       (uintmax_t)sl->image_bytes), rank);
	*slot_out = sl;
	return OK;
}

FALLIBLE enum err state_dict_fill(struct state_dicts *s, const struct principal *who, struct str name, int64_t rank, int64_t generation,
				  uint64_t image_bytes, const struct slot_ring *ring)
{
	struct state_dict *sd;
	struct slot *sl;

	TRY(state_dict_find_rank(s, who, name, rank, &sd));
	TRY(check_seal(sd, (uint32_t)rank, generation, image_bytes, ring != NULL, &sl));
	if (!sl)
		return err_at_rank(ERR(STATE_CONFLICT, "generation %jd is sealed already", (intmax_t)generation), rank);
	if (ring) {
		TRY(state_dict_ring_begin(sd, sl, ring, who->pid));
		sl->image_bytes = image_bytes;
		watch_of(sd)->changed(sd);
		return OK;
	}
	uint64_t room = (image_bytes + PAGE - 1) / PAGE * PAGE + PAGE;
	if (room > sl->bytes)
		return err_at_rank(ERR(VALIDATION_FAILED, "an image of %ju bytes that is being filled needs %ju, with the page behind it: "
				       "the slot has %ju", (uintmax_t)image_bytes, (uintmax_t)room, (uintmax_t)sl->bytes), rank);
	sl->filling = true;
	sl->image_bytes = image_bytes;
	watch_of(sd)->changed(sd);
	return OK;
}

void state_dict_seal(struct state_dicts *s, const struct principal *who, struct str name, int64_t rank, int64_t generation,
		     uint64_t image_bytes, const json_t *wish, const struct slot_ring *ring, done_fn fn, void *user)
{
	struct state_dict *sd;
	struct slot *sl = NULL;
	enum err e = state_dict_find_rank(s, who, name, rank, &sd);

	e = e ?: check_seal(sd, (uint32_t)rank, generation, image_bytes, ring != NULL, &sl);
	if (!e && (ring || (sl && sl->ring.bytes))) {
		e = state_dict_ring_seal(sl, ring, wish);
		sl = NULL;
		if (!e)
			watch_of(sd)->changed(sd);
	}
	if (!e && sl && wish)
		e = state_dict_wish_set(sd, generation, wish);
	if (e || !sl) {
		loop_later(s->parts.loop, fn, user, e);
		return;
	}
	struct journal_txn *t = filling_txn(sd);
	slot_move(sl, SLOT_SEALING);
	sl->image_bytes = image_bytes;
	sd->ranks[rank].last_generation = generation;
	state_dict_slot_row(t, sd, sl, SLOT_SEALED);
	if (wish)
		state_dict_row(t, sd);
	journal_commit(s->parts.journal, t, on_sealed, new_change(sd, sl, (uint32_t)rank, fn, user));
}

/* ---- release ---- */

static void on_freed(void *user, enum err e)
{
	struct change *c = user;

	if (!c->sd->dead && c->slot->state == SLOT_FREEING) {
		/* A journal that cannot be written leaves the slot as it was: handing it out could pass torn pages for a snapshot. */
		slot_move(c->slot, e ? SLOT_LEAVING : SLOT_FREE);
		if (!e && c->slot->filler_gone)
			state_dict_ring_drop(c->sd, c->slot);
		else if (!e && c->slot->made) /* who has it mapped goes on reading it: its pages are not used again */
			state_dict_drop_segment(c->sd, c->slot);
		c->slot->made = c->slot->made && e;
		if (e)
			log_err("cannot free a slot", "state_dict", c->sd->name, NULL);
		else
			state_dict_serve_waiters(c->sd);
	}
	end_change(c, e);
}

static void free_slot(struct state_dict *sd, struct slot *sl, done_fn fn, void *user)
{
	struct journal_txn *t = journal_txn_new(sd->all->parts.journal);

	must(sl->uses == 0);
	if (sl->bytes && (sl->made || sl->filler_gone))
		journal_delete_slot(t, sd->name, sl->rank, sl->number);
	else if (sl->bytes)
		state_dict_slot_row(t, sd, sl, SLOT_FREE);
	slot_move(sl, SLOT_FREEING);
	slot_stop_filling(sl);
	journal_commit(sd->all->parts.journal, t, on_freed, new_change(sd, sl, 0, fn, user));
}

void state_dict_free_slot(struct state_dict *sd, struct slot *sl)
{
	free_slot(sd, sl, NULL, NULL);
}

void state_dict_release(struct state_dicts *s, const struct principal *who, struct str name, int64_t rank, int64_t generation,
			const char *why, done_fn fn, void *user)
{
	struct state_dict *sd;
	struct slot *sl = NULL;
	enum err e = state_dict_find_rank(s, who, name, rank, &sd);

	if (!e) {
		sl = state_dict_slot_of(sd, (uint32_t)rank, generation, SLOT_SEALED);
		if (!sl)
			sl = state_dict_slot_of(sd, (uint32_t)rank, generation, SLOT_OPEN);
	}
	if (e || !sl) {
		loop_later(s->parts.loop, fn, user, e);
	} else if (sl->uses && sl->state == SLOT_OPEN) {
		state_dict_abandon_slot(sd, sl);
		loop_later(s->parts.loop, fn, user, OK);
	} else if (sl->uses) {
		slot_move(sl, SLOT_LEAVING);
		state_dict_slot_write(sd, sl, SLOT_LEAVING, fn, user);
	} else {
		free_slot(sd, sl, fn, user);
	}
	if (!e) {
		state_dict_lose_rings(sd, generation);
		watch_of(sd)->given_up(sd, (uint32_t)rank, generation, why ? why : "it has released it");
	}
}

FALLIBLE enum err state_dict_renew(struct state_dicts *s, const struct principal *who, struct str name, int64_t rank, int64_t generation,
				   int64_t *expires_ms_out)
{
	struct state_dict *sd;

	TRY(state_dict_find_rank(s, who, name, rank, &sd));
	if (generation >= 0)
		TRY(state_dict_ring_check(sd, (uint32_t)rank, generation));
	*expires_ms_out = state_dict_lease_wall(sd, (uint32_t)rank);
	return OK;
}
