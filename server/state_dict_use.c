/* state_dict_use.c: what jobs and questions do with state dicts: hold a generation. state_dict_make.c makes new generations. */
#include <stdio.h>

#include "base/list.h"
#include "base/mem.h"
#include "base/num.h"
#include "server/state_dict_impl.h"

static enum err not_sealed(const struct state_dict *sd, int64_t generation)
{
	char ranks[256];
	int64_t first;
	uint32_t missing = state_dict_missing(sd, generation, ranks, sizeof ranks, &first);

	if (missing == 0)
		return ERR(NOT_SEALED, "the ranks of state dict \"%s\" have sealed different generations", sd->name);
	if (generation < 0)
		return err_at_rank(ERR(NOT_SEALED, "state dict \"%s\": nothing is sealed by rank%s %s", sd->name, missing > 1 ? "s" : "",
				       ranks), first);
	return err_at_rank(ERR(NOT_SEALED, "state dict \"%s\": generation %jd is not sealed by rank%s %s", sd->name,
			       (intmax_t)generation, missing > 1 ? "s" : "", ranks), first);
}

/* A job that a restart takes up again may find its slots released meanwhile: LEAVING counts for it, unless the slot was released while a
 * device's memory was copied into it: then it has no image. */
static struct slot *usable(const struct state_dict *sd, uint32_t rank, int64_t generation, bool again)
{
	struct slot *sl = state_dict_slot_of(sd, rank, generation, SLOT_SEALED);

	if (!sl && again)
		sl = state_dict_slot_of(sd, rank, generation, SLOT_LEAVING);
	return sl && (sl->filling || !sl->image_bytes) ? NULL : sl;
}

static FALLIBLE enum err choose(struct state_dicts *s, const struct principal *who, struct str name, int64_t generation, bool again,
				struct state_dict **sd_out, int64_t *generation_out)
{
	struct state_dict *sd;

	TRY(state_dict_find_to_read(s, who, name, &sd));
	int64_t chosen = generation >= 0 ? generation : state_dict_newest(sd);
	for (uint32_t r = 0; r < sd->world_size; r++)
		if (chosen < 0 || !usable(sd, r, chosen, again))
			return not_sealed(sd, generation);
	*sd_out = sd;
	*generation_out = chosen;
	return OK;
}

FALLIBLE enum err state_dict_check(struct state_dicts *s, const struct principal *who, struct str name, int64_t generation,
				   int64_t *generation_out, uint64_t *image_bytes_out)
{
	struct state_dict *sd;
	uint64_t sum = 0;

	TRY(choose(s, who, name, generation, false, &sd, generation_out));
	for (uint32_t r = 0; r < sd->world_size; r++)
		TRY(num_add(sum, state_dict_slot_of(sd, r, *generation_out, SLOT_SEALED)->image_bytes, &sum));
	*image_bytes_out = sum;
	return OK;
}

FALLIBLE enum err state_dict_new_use(struct state_dict *sd, int64_t generation, const char *job, struct state_dict_use **out)
{
	struct state_dict_use *u = mem_zalloc(1, sizeof *u);

	if (u)
		u->ranks = mem_zalloc(sd->world_size, sizeof *u->ranks);
	if (!u || !u->ranks) {
		mem_free(u);
		return ERR(NO_MEMORY, "cannot use a state dict");
	}
	u->name = sd->name;
	u->world_size = sd->world_size;
	u->uid = sd->uid;
	u->generation = generation;
	u->owner = sd;
	snprintf(u->job, sizeof u->job, "%s", job);
	u->next = sd->uses;
	sd->uses = u;
	sd->refs++;
	*out = u;
	return OK;
}

static void fill_rank(struct state_dict_use *u, uint32_t rank, struct slot *sl)
{
	u->ranks[rank] = (struct state_dict_rank_use){ .rank = rank,
						       .slot = sl->number,
						       .fd = sl->fd,
						       .segment = sl->segment,
						       .bytes = sl->bytes,
						       .image_bytes = sl->image_bytes,
						       .filling = sl->filling,
						       .rewrites = sl->rewrites,
						       .ring = sl->ring };
	sl->uses++;
}

FALLIBLE enum err state_dict_hold(struct state_dict *sd, int64_t generation, const char *job, struct state_dict_use **out)
{
	struct state_dict_use *u;

	TRY(state_dict_new_use(sd, generation, job, &u));
	for (uint32_t r = 0; r < sd->world_size; r++) {
		struct slot *sl = usable(sd, r, generation, true);
		fill_rank(u, r, sl ? sl : state_dict_begun(sd, r, generation));
	}
	*out = u;
	return OK;
}

FALLIBLE enum err state_dict_use(struct state_dicts *s, const struct principal *who, struct str name, int64_t generation,
				 const char *job, struct state_dict_use **out)
{
	struct state_dict *sd;
	int64_t chosen;

	TRY(choose(s, who, name, generation, job[0] != '\0', &sd, &chosen));
	return state_dict_hold(sd, chosen, job, out);
}

FALLIBLE enum err state_dict_use_held(struct state_dicts *s, const struct principal *who, struct str name, int64_t generation,
				      struct state_dict_use **out)
{
	struct state_dict *sd;
	int64_t chosen;

	TRY(choose(s, who, name, generation, true, &sd, &chosen));
	return state_dict_hold(sd, chosen, "", out);
}

FALLIBLE enum err state_dict_use_rank(struct state_dicts *s, const struct principal *who, struct str name, int64_t rank, int64_t generation,
				      bool to_write, struct state_dict_use **out)
{
	struct state_dict_use *u;
	struct state_dict *sd;

	TRY(state_dict_find_rank(s, who, name, rank, &sd));
	struct slot *sl = to_write ? state_dict_slot_of(sd, (uint32_t)rank, generation, SLOT_OPEN)
				   : usable(sd, (uint32_t)rank, generation, false);
	if (!sl)
		return err_at_rank(ERR(STATE_CONFLICT, to_write ? "rank %jd has no open slot for generation %jd: reserve it first"
								: "rank %jd has not sealed generation %jd", (intmax_t)rank,
				       (intmax_t)generation), rank);
	bool through_ring = to_write && sl->ring.bytes; /* the save reads it meanwhile, below what its filler says is there */
	if (through_ring)
		TRY(state_dict_ring_check(sd, (uint32_t)rank, generation));
	if (to_write && (sl->is_written || (!through_ring && (sl->uses || sl->filling))))
		return err_at_rank(ERR(STATE_CONFLICT, "the slot of generation %jd is being filled already", (intmax_t)generation), rank);
	TRY(state_dict_new_use(sd, generation, "", &u));
	fill_rank(u, (uint32_t)rank, sl);
	u->ranks[rank].ring = (struct slot_ring){ 0 }; /* the end of this use is not the end of the ring's reader */
	sl->is_written = u->writes = to_write;
	*out = u;
	return OK;
}

bool state_dict_is_latest(const struct state_dicts *s, struct str name, int64_t generation)
{
	const struct state_dict *sd = map_object(&s->table, name);
	bool latest = false;

	for (uint32_t k = 0; sd && k < sd->slot_count; k++) {
		const struct slot *sl = state_dict_slot(sd, 0, k);
		latest = latest || (sl->generation == generation && !sl->filler_gone);
	}
	return latest;
}

bool state_dict_use_has_ring(const struct state_dict_use *u)
{
	for (uint32_t r = 0; u && r < u->world_size; r++)
		if (u->ranks[r].ring.bytes)
			return true;
	return false;
}

void state_dict_rewrite(struct state_dict_use *u)
{
	for (uint32_t r = 0; !u->rewrites && r < u->world_size; r++) {
		struct slot *sl = state_dict_slot(u->owner, r, u->ranks[r].slot);
		sl->rewriters++;
		sl->rewrites++;
	}
	u->rewrites = true;
}

bool state_dict_is_rewritten(const struct state_dict_use *u, uint32_t rank)
{
	const struct slot *sl = state_dict_slot(u->owner, rank, u->ranks[rank].slot);

	return sl->rewriters || sl->rewrites != u->ranks[rank].rewrites;
}

static void free_use(struct state_dict_use *u)
{
	struct state_dict *sd = u->owner;

	list_remove(&u->owner->uses, u);
	if (state_dict_use_has_ring(u))
		state_dict_lose_rings(sd, u->generation);
	for (uint32_t r = 0; r < sd->world_size; r++) {
		if (!u->ranks[r].bytes)
			continue;
		struct slot *sl = state_dict_slot(sd, r, u->ranks[r].slot);
		sl->uses--;
		sl->is_written = sl->is_written && !u->writes;
		sl->rewriters -= u->rewrites;
		sl->rewrites += u->rewrites;
		if (sl->state == SLOT_MAKING || sl->state == SLOT_FILLING) { /* it came to nothing */
			state_dict_drop_segment(sd, sl);
			slot_move(sl, SLOT_FREE);
		}
	}
	mem_free(u->ranks);
	mem_free(u);
}

void state_dict_unuse(struct state_dict_use **use)
{
	struct state_dict_use *u = *use;

	*use = NULL;
	if (!u)
		return;
	struct state_dict *sd = u->owner;
	int64_t generation = u->generation;
	free_use(u);
	for (uint32_t i = 0; !sd->dead && i < state_dict_slots(sd); i++) {
		struct slot *sl = state_dict_nth(sd, i);
		bool left = sl->state == SLOT_LEAVING || (sl->state == SLOT_OPEN && sl->filler_gone && sl->generation == generation);
		if (left && sl->uses == 0)
			state_dict_free_slot(sd, sl);
	}
	if (!sd->dead)
		state_dict_serve_waiters(sd);
	state_dict_unref(sd);
}

int64_t state_dict_begun_ms(const struct state_dict_use *use)
{
	int64_t first = 0;

	for (uint32_t i = 0; i < use->world_size; i++) {
		const struct state_dict_rank_use *u = &use->ranks[i];
		int64_t ms = use->owner->slots[u->slot][u->rank].opened_ms;
		if (!ms)
			return 0;
		first = first && first < ms ? first : ms;
	}
	return first;
}

void state_dict_saved(struct state_dict_use *use, const struct state_dict_save *save)
{
	if (!state_dict_use_has_ring(use))
		state_dict_memory_note(use, save);
	if (use->generation > use->owner->saved_generation)
		use->owner->saved_generation = use->generation;
	/* Another run must not save it again: by then its name may hold something newer. */
	json_t *wishes = json_object_get(use->owner->on_owner_death, "generations");
	char key[24];
	snprintf(key, sizeof key, "%jd", (intmax_t)use->generation);
	if (!json_object_get(wishes, key))
		return;
	json_object_set_new(wishes, key, json_pack("{s:b}", "drop", 1));
	state_dict_write(use->owner);
}
