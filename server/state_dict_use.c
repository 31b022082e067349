/* state_dict_use.c: what jobs and questions do with state dicts: hold a generation, or make a new state dict for a load. */
#include <stdio.h>

#include "base/log.h"
#include "base/mem.h"
#include "base/num.h"
#include "server/state_dict_own.h"

static enum err not_sealed(const struct state_dict *sd, int64_t generation)
{
	char ranks[256] = "";
	size_t n = 0;
	uint32_t missing = 0;
	int64_t first = -1;

	for (uint32_t r = 0; r < sd->world_size; r++) {
		bool has = false;
		for (uint32_t k = 0; k < sd->slot_count; k++) {
			const struct slot *sl = &sd->ranks[r].slots[k];
			has |= sl->state == SLOT_SEALED && (generation < 0 || sl->generation == generation);
		}
		if (has)
			continue;
		if (missing++ == 0)
			first = r;
		if (n + 16 < sizeof ranks)
			n += (size_t)snprintf(ranks + n, sizeof ranks - n, "%s%u", missing > 1 ? ", " : "", r);
	}
	if (missing == 0)
		return ERR(NOT_SEALED, "the ranks of state dict \"%s\" have sealed different generations", sd->name);
	if (generation < 0)
		return err_at_rank(ERR(NOT_SEALED, "state dict \"%s\": nothing is sealed by rank%s %s%s", sd->name,
				       missing > 1 ? "s" : "", ranks, n + 16 >= sizeof ranks ? ", …" : ""), first);
	return err_at_rank(ERR(NOT_SEALED, "state dict \"%s\": generation %jd is not sealed by rank%s %s%s", sd->name,
			       (intmax_t)generation, missing > 1 ? "s" : "", ranks, n + 16 >= sizeof ranks ? ", …" : ""), first);
}

/* A job that a restart takes up again may find its slots released meanwhile: LEAVING counts for it. */
static struct slot *usable(const struct state_dict *sd, uint32_t rank, int64_t generation, bool again)
{
	struct slot *sl = state_dict_slot_of(sd, rank, generation, SLOT_SEALED);

	return !sl && again ? state_dict_slot_of(sd, rank, generation, SLOT_LEAVING) : sl;
}

static FALLIBLE enum err choose(struct server *s, const struct principal *who, struct str name, int64_t generation, bool again,
				struct state_dict **sd_out, int64_t *generation_out)
{
	struct state_dict *sd;

	TRY(state_dict_find(s, who, name, &sd));
	int64_t chosen = generation >= 0 ? generation : state_dict_newest(sd);
	for (uint32_t r = 0; r < sd->world_size; r++)
		if (chosen < 0 || !usable(sd, r, chosen, again))
			return not_sealed(sd, generation);
	*sd_out = sd;
	*generation_out = chosen;
	return OK;
}

FALLIBLE enum err state_dict_check(struct server *s, const struct principal *who, struct str name, int64_t generation,
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

static FALLIBLE enum err new_use(struct state_dict *sd, int64_t generation, const char *job, struct state_dict_use **out)
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
						       .slot = (uint32_t)(sl - u->owner->ranks[rank].slots),
						       .fd = sl->fd,
						       .segment = sl->segment,
						       .bytes = sl->bytes,
						       .image_bytes = sl->image_bytes };
	sl->uses++;
}

FALLIBLE enum err state_dict_use(struct server *s, const struct principal *who, struct str name, int64_t generation,
				 const char *job, struct state_dict_use **out)
{
	struct state_dict *sd;
	struct state_dict_use *u;
	int64_t chosen;

	TRY(choose(s, who, name, generation, job[0] != '\0', &sd, &chosen));
	TRY(new_use(sd, chosen, job, &u));
	for (uint32_t r = 0; r < sd->world_size; r++)
		fill_rank(u, r, usable(sd, r, chosen, true));
	*out = u;
	return OK;
}

static void unlink_use(struct state_dict_use *u)
{
	struct state_dict_use **at = &u->owner->uses;

	while (*at != u)
		at = &(*at)->next;
	*at = u->next;
}

static void free_use(struct state_dict_use *u)
{
	struct state_dict *sd = u->owner;

	unlink_use(u);
	for (uint32_t r = 0; r < sd->world_size; r++)
		if (u->ranks[r].bytes)
			sd->ranks[r].slots[u->ranks[r].slot].uses--;
	mem_free(u->ranks);
	mem_free(u);
}

void state_dict_unuse(struct server *s, struct state_dict_use **use)
{
	struct state_dict_use *u = *use;

	(void)s;
	*use = NULL;
	if (!u)
		return;
	struct state_dict *sd = u->owner;
	free_use(u);
	for (uint32_t i = 0; !sd->dead && i < sd->world_size * sd->slot_count; i++)
		if (sd->all_slots[i].state == SLOT_LEAVING && sd->all_slots[i].uses == 0)
			state_dict_free_slot(sd, &sd->all_slots[i]);
	if (!sd->dead)
		state_dict_serve_waiters(sd);
	state_dict_unref(sd);
}

/* ---- the target of a load ---- */

struct make {
	struct server *server;
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
			state_dict_drop(m->server, &m->use);
		err_restore(&m->info);
	} else {
		struct state_dict *sd = m->use->owner;
		for (uint32_t r = 0; r < sd->world_size; r++) {
			struct slot *sl = &sd->ranks[r].slots[0];
			sl->state = SLOT_SEALED;
			fill_rank(m->use, r, sl);
		}
	}
	m->fn(m->user, m->e, m->use);
	mem_free(m);
}

static FALLIBLE enum err begin_make(struct make *m, const struct state_dict_make *want)
{
	struct server *s = m->server;
	struct state_dict *sd;
	uint64_t total = 0;

	if (state_dict_exists(s, want->name))
		return ERR(STATE_DICT_EXISTS, "state dict \"%.*s\" exists", (int)want->name.n, want->name.p);
	for (uint32_t r = 0; r < want->world_size; r++) {
		if (want->image_bytes[r] < 8 || want->image_bytes[r] > want->bytes[r])
			return ERR(PROTOCOL, "a worker asked for a segment that cannot be");
		TRY(num_add(total, state_dict_space_round(want->bytes[r]), &total));
	}
	TRY(state_dict_space_clear(s, total)); /* at once, so that a shortage is named as a whole */
	TRY(state_dict_alloc(s, want->name, want->world_size, 1, want->who.uid, &sd));
	sd->made_by_load = true;
	sd->lease_ms = want->lease_ms;
	sd->on_owner_death = want->lease_ms ? json_pack("{s:b}", "drop", 1) : NULL;
	enum err e = new_use(sd, 0, want->job, &m->use);
	if (e) {
		state_dict_kill(sd);
		return e;
	}
	m->left = 1; /* ours, so that it cannot end while we ask for more */
	for (uint32_t r = 0; r < want->world_size && !m->e; r++) {
		struct slot *sl = &sd->ranks[r].slots[0];
		struct seg_wanted w = { sd, sl, state_dict_space_round(want->bytes[r]), end_make, m };
		sl->image_bytes = want->image_bytes[r];
		sl->state = SLOT_MAKING;
		m->left++;
		e = state_dict_space_make(s, &w);
		if (e)
			end_make(m, e);
	}
	return OK;
}

void state_dict_make(struct server *s, const struct state_dict_make *want, made_fn fn, void *user)
{
	struct make *m = mem_zalloc(1, sizeof *m);

	must(m);
	*m = (struct make){ .server = s, .fn = fn, .user = user };
	enum err e = begin_make(m, want);
	if (e)
		m->left = 0;
	loop_later(s->loop, end_make, m, e);
}

FALLIBLE enum err state_dict_keep(struct server *s, struct state_dict_use *use, struct journal_txn *txn)
{
	struct state_dict *sd = use->owner;

	(void)s;
	if (!sd->made_by_load)
		return OK;
	sd->made_by_load = false;
	sd->last_generation = 0;
	state_dict_row(txn, sd);
	for (uint32_t r = 0; r < sd->world_size; r++) {
		sd->ranks[r].last_generation = 0;
		if (sd->lease_ms)
			sd->ranks[r].expires_ms = clock_wall_ms() + sd->lease_ms;
		state_dict_slot_row(txn, sd, &sd->ranks[r].slots[0], SLOT_SEALED);
	}
	state_dict_emit(sd, "created", 0);
	return OK;
}

void state_dict_saved(struct state_dict_use *use)
{
	if (use->generation > use->owner->saved_generation)
		use->owner->saved_generation = use->generation;
}

void state_dict_drop(struct server *s, struct state_dict_use **use)
{
	struct state_dict *sd = (*use)->owner;
	bool kill = sd->made_by_load;

	(void)s;
	sd->refs++;
	state_dict_unuse(s, use);
	if (kill && !sd->uses)
		state_dict_kill(sd);
	state_dict_unref(sd);
}
