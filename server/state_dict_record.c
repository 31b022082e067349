/* state_dict_record.c: state dicts in memory and as rows of the journal, and what can be read off their slots. Nothing here waits for
 * anybody or tells anybody but the event stream; the other files state_dict*.c stand on it. */
#include <stdio.h>
#include <unistd.h>

#include "base/jtext.h"
#include "base/log.h"
#include "base/mem.h"
#include "base/num.h"
#include "server/service_clock.h"
#include "server/events.h"
#include "server/state_dict_impl.h"

void state_dict_emit(struct state_dict *sd, const char *what, int64_t generation)
{
	events_emit(sd->all->parts.events, "state_dict.changed", NULL,
		    json_pack("{s:s, s:s, s:I}", "state_dict", sd->name, "what", what, "generation", (json_int_t)generation));
}

bool state_dict_exists(const struct state_dicts *s, struct str name)
{
	return map_object(&s->table, name) != NULL;
}

uint32_t state_dict_count(const struct state_dicts *s)
{
	return s->table.raw.count;
}

bool state_dict_lives(const struct state_dicts *s, struct str name)
{
	const struct state_dict *sd = map_object(&s->table, name);

	return sd && !sd->hidden && !sd->orphaned_ms;
}

uint32_t state_dict_world(const struct state_dicts *s, struct str name)
{
	const struct state_dict *sd = map_object(&s->table, name);

	return sd && !sd->hidden ? sd->world_size : 0;
}

static FALLIBLE enum err find(struct state_dicts *s, const struct principal *who, struct str name, bool to_read, struct state_dict **out)
{
	struct state_dict *sd = map_object(&s->table, name);

	if (!sd || sd->hidden)
		return ERR(NOT_FOUND, "there is no state dict \"%.*s\"", (int)num_min(name.n, STATE_DICT_NAME_MAX), name.p);
	if (to_read ? !state_dict_may_read(who, sd) : !principal_may(who, sd->uid))
		return ERR(FORBIDDEN, "state dict \"%s\" belongs to uid %u", sd->name, sd->uid);
	*out = sd;
	return OK;
}

FALLIBLE enum err state_dict_find(struct state_dicts *s, const struct principal *who, struct str name, struct state_dict **out)
{
	return find(s, who, name, false, out);
}

FALLIBLE enum err state_dict_find_to_read(struct state_dicts *s, const struct principal *who, struct str name, struct state_dict **out)
{
	return find(s, who, name, true, out);
}

/* ---- memory ---- */

void state_dict_free(struct state_dict *sd)
{
	for (uint32_t i = 0; i < state_dict_slots(sd); i++) {
		struct slot *sl = state_dict_nth(sd, i);
		if (sl->fd >= 0)
			close(sl->fd);
		watch_free(&sl->filler);
		json_decref(sl->problem);
	}
	json_decref(sd->on_owner_death);
	json_decref(sd->replica);
	state_dict_feed_free(sd);
	loop_timer_stop(&sd->look_timer);
	for (uint32_t k = 0; k < sd->slot_count; k++)
		mem_free(sd->slots[k]);
	state_dict_memory_free(sd);
	mem_free(sd->ranks);
	mem_free(sd);
}

FALLIBLE enum err state_dict_add_slots(struct state_dict *sd)
{
	uint32_t k = sd->slot_count;

	if (k == STATE_DICT_SLOTS_MAX)
		return ERR(SLOTS_BUSY, "all %u slots of state dict \"%s\" are in use", k, sd->name);
	sd->slots[k] = mem_zalloc(sd->world_size, sizeof *sd->slots[k]);
	NEED(sd->slots[k], "cannot add slots to a state dict");
	for (uint32_t r = 0; r < sd->world_size; r++)
		sd->slots[k][r] = (struct slot){ .fd = -1, .rank = r, .number = (uint16_t)k };
	sd->slot_count++;
	return OK;
}

FALLIBLE enum err state_dict_alloc(struct state_dicts *s, struct str name, uint32_t world_size, uint32_t slots, uid_t uid,
				   struct state_dict **out)
{
	if (s->table.raw.count >= STATE_DICTS_MAX)
		return ERR(LIMIT_EXCEEDED, "there are %d state dicts already", STATE_DICTS_MAX);
	struct state_dict *sd = mem_zalloc(1, sizeof *sd);
	NEED(sd, "cannot make a state dict");
	sd->ranks = mem_zalloc(world_size, sizeof *sd->ranks);
	sd->world_size = world_size;
	sd->own_slots = slots;
	sd->all = s;
	sd->uid = uid;
	sd->last_generation = sd->lost_generation = -1;
	sd->saved_generation = -1;
	sd->created_ms = clock_wall_ms();
	memcpy(sd->name, name.p, name.n);
	enum err e = sd->ranks ? OK : ERR(NO_MEMORY, "cannot make a state dict");
	for (uint32_t k = 0; k < slots && !e; k++)
		e = state_dict_add_slots(sd);
	for (uint32_t r = 0; !e && r < sd->world_size; r++)
		sd->ranks[r].last_generation = -1;
	e = e ?: map_add(&s->table, (struct str){ sd->name, name.n }, sd);
	if (e) {
		state_dict_free(sd);
		return e;
	}
	*out = sd;
	return OK;
}

void state_dict_unref(struct state_dict *sd)
{
	must(sd->refs > 0);
	if (--sd->refs == 0 && sd->dead)
		state_dict_free(sd);
}

void state_dict_drop_segment(struct state_dict *sd, struct slot *sl)
{
	if (sl->fd < 0)
		return;
	close(sl->fd);
	if (seg_unlink(sl->segment) != OK)
		log_err("cannot remove a segment", "segment", sl->segment, NULL);
	sd->all->used_bytes -= sl->bytes;
	sl->fd = -1;
	sl->bytes = sl->image_bytes = 0;
	slot_stop_filling(sl);
	watch_free(&sl->filler);
	sl->segment[0] = '\0';
}

/* ---- the journal's rows ---- */

void state_dict_row(struct journal_txn *t, const struct state_dict *sd)
{
	CLEANUP(mem_free_ptr) char *text = jtext_of(sd->on_owner_death);

	if (sd->on_owner_death && !text) {
		journal_txn_fail(t, ERR(NO_MEMORY, "cannot describe a state dict"));
		return;
	}
	const json_t *its_role = sd->feed ? sd->feed->role : sd->replica;
	CLEANUP(mem_free_ptr) char *role = its_role ? jtext_of(its_role) : NULL;
	if (its_role && !role) {
		journal_txn_fail(t, ERR(NO_MEMORY, "cannot describe a state dict"));
		return;
	}
	struct journal_state_dict row = { .name = sd->name,
					  .uid = sd->uid,
					  .world_size = sd->world_size,
					  .slots = sd->own_slots,
					  .lease_ms = sd->lease_ms,
					  .created_ms = sd->created_ms,
					  .orphaned_ms = sd->orphaned_ms,
					  .orphan_since_ms = sd->orphan_since_ms,
					  .last_generation = sd->last_generation,
					  .on_owner_death = text ? str_of(text) : STR(""),
					  .role = role ? str_of(role) : STR("") };

	journal_put_state_dict(t, &row);
}

void state_dict_slot_row(struct journal_txn *t, const struct state_dict *sd, const struct slot *sl, int state)
{
	struct journal_slot row = { .name = sd->name,
				    .rank = sl->rank,
				    .slot = sl->number,
				    .segment = sl->segment,
				    .bytes = sl->bytes,
				    .image_bytes = sl->image_bytes,
				    .state = state,
				    .generation = sl->generation };

	journal_put_slot(t, &row);
}

void state_dict_write(struct state_dict *sd)
{
	struct journal_txn *t = journal_txn_new(sd->all->parts.journal);

	state_dict_row(t, sd);
	journal_commit(sd->all->parts.journal, t, NULL, NULL);
}

void state_dict_slot_write(struct state_dict *sd, const struct slot *sl, int state, done_fn fn, void *user)
{
	struct journal_txn *t = journal_txn_new(sd->all->parts.journal);

	state_dict_slot_row(t, sd, sl, state);
	journal_commit(sd->all->parts.journal, t, fn, user);
}

/* ---- what the slots hold ---- */

struct slot *state_dict_slot_of(const struct state_dict *sd, uint32_t rank, int64_t generation, enum slot_state state)
{
	for (uint32_t k = 0; k < sd->slot_count; k++) {
		struct slot *sl = state_dict_slot(sd, rank, k);
		if (sl->state == state && sl->generation == generation)
			return sl;
	}
	return NULL;
}

struct slot *state_dict_begun(const struct state_dict *sd, uint32_t rank, int64_t generation)
{
	struct slot *sl = state_dict_slot_of(sd, rank, generation, SLOT_SEALED);

	if (!sl)
		sl = state_dict_slot_of(sd, rank, generation, SLOT_SEALING);
	if (!sl)
		sl = state_dict_slot_of(sd, rank, generation, SLOT_OPEN);
	return sl && (sl->filling || sl->state == SLOT_SEALED) ? sl : NULL;
}

bool state_dict_given(const struct state_dict *sd, uint32_t rank, int64_t generation)
{
	const struct slot *sl = state_dict_slot_of(sd, rank, generation, SLOT_OPEN);

	return state_dict_slot_of(sd, rank, generation, SLOT_SEALED) || (sl && sl->handed);
}

bool state_dict_complete(const struct state_dict *sd, int64_t generation)
{
	for (uint32_t r = 0; r < sd->world_size; r++)
		if (!state_dict_slot_of(sd, r, generation, SLOT_SEALED))
			return false;
	return true;
}

int64_t state_dict_newest(const struct state_dict *sd)
{
	int64_t best = -1;

	for (uint32_t k = 0; k < sd->slot_count; k++) {
		const struct slot *sl = state_dict_slot(sd, 0, k);
		if (sl->state == SLOT_SEALED && sl->generation > best && state_dict_complete(sd, sl->generation))
			best = sl->generation;
	}
	return best;
}

uint32_t state_dict_missing(const struct state_dict *sd, int64_t generation, char *ranks, size_t n, int64_t *first_out)
{
	uint32_t missing = 0;
	size_t used = 0;
	bool full = false;

	*first_out = -1;
	ranks[0] = '\0';
	for (uint32_t r = 0; r < sd->world_size; r++) {
		bool has = false;
		for (uint32_t k = 0; k < sd->slot_count; k++) {
			const struct slot *sl = state_dict_slot(sd, r, k);
			has |= sl->state == SLOT_SEALED && (generation < 0 || sl->generation == generation);
		}
		if (has)
			continue;
		if (missing++ == 0)
			*first_out = r;
		if (used + 16 < n)
			used += (size_t)snprintf(ranks + used, n - used, "%s%u", missing > 1 ? ", " : "", r);
		else if (!full)
			used += (size_t)snprintf(ranks + used, n - used, ", …");
		full = used + 16 >= n;
	}
	return missing;
}

/* ---- leases ---- */

static void touch_lease(struct state_dict *sd, uint32_t rank)
{
	if (sd->lease_ms)
		sd->ranks[rank].expires_ms = clock_service_ms() + sd->lease_ms;
	if (sd->orphaned_ms) {
		sd->orphaned_ms = 0;
		sd->orphan_job[0] = '\0';
		state_dict_write(sd);
	}
}

FALLIBLE enum err state_dict_find_rank(struct state_dicts *s, const struct principal *who, struct str name, int64_t rank,
				       struct state_dict **out)
{
	struct state_dict *sd;

	TRY(state_dict_find(s, who, name, &sd));
	if (rank < 0 || rank >= sd->world_size)
		return ERR(NOT_FOUND, "state dict \"%s\" has ranks 0 to %u", sd->name, sd->world_size - 1);
	touch_lease(sd, (uint32_t)rank);
	*out = sd;
	return OK;
}

void state_dict_lease_begin(struct state_dict *sd)
{
	for (uint32_t r = 0; sd->lease_ms && r < sd->world_size; r++)
		sd->ranks[r].expires_ms = clock_service_ms() + sd->lease_ms;
}

int64_t state_dict_lease_wall(const struct state_dict *sd, uint32_t rank)
{
	int64_t expires = sd->ranks[rank].expires_ms;

	return expires ? clock_service_wall(expires) : 0;
}
