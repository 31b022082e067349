/* state_dict_make.c: what jobs make: the segments of a state dict's next generation.
 *
 * They are filled where nobody sees them, and announced all together when the job has succeeded and the journal says so; whatever
 * else happens, they go, and the state dict is as it was. So nobody ever meets a half-written target, also not after a crash: what
 * has no row in the journal is removed at the next start.
 *
 * Where from the slots: a free one, but the slots that a trainer asked for are left to it as long as others can be added, else a job
 * that writes into its state dict would make its next reservation wait. A generation that a job made is released by the job that makes the
 * next; its segments are unlinked, not used again: a process that has them mapped goes on reading what it mapped. */
#include "base/mem.h"
#include "base/num.h"
#include "server/state_dict_impl.h"

struct make {
	struct state_dicts *all;
	struct state_dict_use *use;
	uint32_t left;
	enum err e;
	struct err_info info;
	made_fn fn;
	void *user;
};

static void end_make(void *user, enum err e)
{
	struct make *m = user;

	if (e && !m->e) {
		m->e = e;
		m->info = *err_last();
	}
	if (m->left > 0 && --m->left > 0)
		return;
	if (m->e) {
		if (m->use)
			state_dict_drop(&m->use);
		err_restore(&m->info);
	} else {
		struct state_dict *sd = m->use->owner;
		for (uint32_t r = 0; r < sd->world_size; r++) {
			struct state_dict_rank_use *k = &m->use->ranks[r];
			struct slot *sl = state_dict_slot(sd, r, k->slot);
			slot_move(sl, SLOT_FILLING);
			sl->image_bytes = k->image_bytes;
			k->fd = sl->fd;
			k->segment = sl->segment;
			k->bytes = sl->bytes;
		}
	}
	m->fn(m->user, m->e, m->use);
	mem_free(m);
}

/* ---- slots ---- */

static struct slot *free_slot(const struct state_dict *sd, uint32_t rank, uint32_t from)
{
	for (uint32_t k = from; k < sd->slot_count; k++) {
		struct slot *sl = state_dict_slot(sd, rank, k);
		if (sl->state == SLOT_FREE && sl->uses == 0)
			return sl;
	}
	return NULL;
}

static FALLIBLE enum err pick(struct state_dict *sd, uint32_t rank, struct slot **out)
{
	struct slot *sl = free_slot(sd, rank, sd->lease_ms && !state_dict_subscribes(sd) ? sd->own_slots : 0);

	if (!sl && sd->slot_count < STATE_DICT_SLOTS_MAX) {
		TRY(state_dict_add_slots(sd));
		sl = free_slot(sd, rank, sd->slot_count - 1);
	}
	if (!sl)
		sl = free_slot(sd, rank, 0);
	if (!sl)
		return err_at_rank(ERR(SLOTS_BUSY, "all %u slots of rank %u of state dict \"%s\" are in use", sd->slot_count, rank,
				       sd->name), rank);
	*out = sl;
	return OK;
}

static FALLIBLE enum err take_slots(struct state_dict_use *u, const struct state_dict_make *want, uint64_t *total_out)
{
	struct state_dict *sd = u->owner;
	uint64_t total = 0;

	for (uint32_t r = 0; r < want->world_size; r++) {
		struct slot *sl = NULL;
		uint64_t bytes = state_dict_space_round(want->bytes[r]);
		if (want->image_bytes[r] < 8 || want->image_bytes[r] > want->bytes[r])
			return ERR(PROTOCOL, "a worker asked for a segment that cannot be");
		TRY(pick(sd, r, &sl));
		must(sl);
		u->ranks[r] = (struct state_dict_rank_use){ .rank = r, .slot = sl->number, .fd = -1, .bytes = bytes,
							   .image_bytes = want->image_bytes[r] };
		sl->uses++;
		slot_move(sl, SLOT_MAKING);
		sl->made = true;
		sl->generation = 0; /* not known before the end */
		if (state_dict_slot_fits(sl, bytes))
			continue;
		state_dict_drop_segment(sd, sl);
		TRY(num_add(total, bytes, &total));
	}
	*total_out = total;
	return OK;
}

static FALLIBLE enum err find_or_alloc(struct state_dicts *s, const struct state_dict_make *want, struct state_dict **out)
{
	struct principal who = want->who;

	who.admin = who.uid == 0;
	if (!state_dict_exists(s, want->name)) {
		TRY(state_dict_alloc(s, want->name, want->world_size, 1, want->who.uid, out));
		(*out)->hidden = true;
		(*out)->lease_ms = want->lease_ms;
		(*out)->on_owner_death = want->lease_ms ? json_pack("{s:b}", "drop", 1) : NULL;
		return OK;
	}
	if (!want->next_generation)
		return ERR(STATE_DICT_EXISTS, "state dict \"%.*s\" exists", (int)want->name.n, want->name.p);
	TRY(state_dict_find(s, &who, want->name, out));
	if ((*out)->world_size != want->world_size)
		return ERR(WORLD_MISMATCH, "state dict \"%s\" has %u ranks, the result has %u", (*out)->name, (*out)->world_size,
			   want->world_size);
	return OK;
}

static FALLIBLE enum err begin_make(struct make *m, const struct state_dict_make *want)
{
	struct state_dicts *s = m->all;
	struct state_dict *sd;
	uint64_t total = 0, adopted = 0;

	TRY(find_or_alloc(s, want, &sd));
	enum err e = state_dict_new_use(sd, want->at_least, want->job, &m->use);
	if (e) {
		if (sd->hidden)
			state_dict_kill(sd);
		return e;
	}
	m->use->makes = true;
	TRY(take_slots(m->use, want, &total));
	if (want->replica)
		TRY(state_dict_replica_admit(sd, want->replica, m->use, total, &adopted));
	TRY(state_dict_space_clear(s, total - adopted)); /* at once, so that a shortage is named as a whole */
	m->left = 1; /* ours, so that it cannot end while we ask for more */
	for (uint32_t r = 0; r < want->world_size && !m->e; r++) {
		struct slot *sl = state_dict_slot(sd, r, m->use->ranks[r].slot);
		struct seg_wanted w = { sd, sl, m->use->ranks[r].bytes, end_make, m };
		if (sl->fd >= 0)
			continue;
		m->left++;
		e = state_dict_space_make(s, &w);
		if (e)
			end_make(m, e);
	}
	return OK;
}

void state_dict_make(struct state_dicts *s, const struct state_dict_make *want, made_fn fn, void *user)
{
	struct make *m = mem_sure(sizeof *m);

	*m = (struct make){ .all = s, .fn = fn, .user = user };
	enum err e = begin_make(m, want);
	if (e)
		m->left = 0;
	loop_later(s->parts.loop, end_make, m, e);
}

void state_dict_make_stop(struct state_dicts *s, struct str name)
{
	struct state_dict *sd = map_object(&s->table, name);

	if (sd && sd->hidden)
		state_dict_kill(sd); /* what arrives from now on is removed, see state_dict_space.c */
}

/* ---- the end of the job ---- */

/* One more than anything a client has seen or been promised. */
static int64_t next_generation(const struct state_dict *sd, int64_t at_least)
{
	int64_t last = sd->last_generation;

	for (uint32_t r = 0; r < sd->world_size; r++)
		if (sd->ranks[r].last_generation > last)
			last = sd->ranks[r].last_generation;
	for (uint32_t i = 0; i < state_dict_slots(sd); i++) {
		const struct slot *sl = state_dict_nth(sd, i);
		if (sl->state == SLOT_FILLING && state_dict_subscribes(sd)) /* its own: a version may be 0, too */
			continue;
		if (sl->state != SLOT_FREE && sl->generation > last)
			last = sl->generation;
	}
	if (last == INT64_MAX) /* a client's choice: nothing is newer than that */
		return last;
	return last + 1 > at_least ? last + 1 : at_least;
}

/* A subscriber's ranks use the older version until they say that they have taken the new one. */
static bool superseded(const struct slot *sl, const struct state_dict_use *u)
{
	return !state_dict_subscribes(u->owner) && sl->state == SLOT_SEALED && sl->made && sl->generation < u->generation;
}

FALLIBLE enum err state_dict_keep(struct state_dict_use *u, struct journal_txn *txn)
{
	struct state_dict *sd = u->owner;

	if (!u->makes)
		return OK;
	if (!u->numbered) {
		u->generation = next_generation(sd, u->generation);
		u->numbered = true;
		sd->last_generation = u->generation; /* from now on nobody reserves it */
	}
	state_dict_row(txn, sd);
	for (uint32_t r = 0; r < sd->world_size; r++) {
		struct slot *sl = state_dict_slot(sd, r, u->ranks[r].slot);
		sl->generation = sd->ranks[r].last_generation = u->generation;
		state_dict_slot_row(txn, sd, sl, SLOT_MADE);
	}
	for (uint32_t i = 0; i < state_dict_slots(sd); i++)
		if (superseded(state_dict_nth(sd, i), u))
			state_dict_slot_row(txn, sd, state_dict_nth(sd, i), SLOT_LEAVING);
	return OK;
}

void state_dict_announce(struct state_dict_use *u)
{
	struct state_dict *sd = u->owner;
	bool fresh = sd->hidden;

	if (!u->makes || !u->numbered)
		return;
	for (uint32_t i = 0; i < state_dict_slots(sd); i++)
		if (superseded(state_dict_nth(sd, i), u))
			slot_move(state_dict_nth(sd, i), SLOT_LEAVING); /* freed with the last use, ours at the latest */
	for (uint32_t r = 0; r < sd->world_size; r++)
		slot_move(state_dict_slot(sd, r, u->ranks[r].slot), SLOT_SEALED);
	if (fresh)
		state_dict_lease_begin(sd);
	sd->hidden = false;
	u->makes = false;
	state_dict_emit(sd, fresh ? "created" : "complete", u->generation);
	if (sd->replica)
		state_dict_replica_kept(sd);
}

void state_dict_drop(struct state_dict_use **use)
{
	struct state_dict *sd = (*use)->owner;
	bool kill = sd->hidden && !sd->dead && (*use)->makes;

	sd->refs++;
	state_dict_unuse(use);
	if (kill && !sd->uses)
		state_dict_kill(sd);
	state_dict_unref(sd);
}
