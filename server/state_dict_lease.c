/* state_dict_lease.c: what happens when trainers fall silent. Per rank: its half-filled slots are dropped when its lease is over. When the
 * leases of all ranks are over, the state dict is an orphan (state_dict_orphan.c) until a rank speaks again. */
#include "base/log.h"
#include "server/service_clock.h"
#include "server/state_dict_impl.h"

enum { TICK_MS = 500 };

static void drop_open(struct state_dict *sd, uint32_t rank)
{
	for (uint32_t k = 0; k < sd->slot_count; k++) {
		struct slot *sl = state_dict_slot(sd, rank, k);
		if (sl->state == SLOT_OPEN && sl->uses == 0)
			state_dict_free_slot(sd, sl);
		else if (sl->state == SLOT_OPEN)
			state_dict_abandon_slot(sd, sl);
	}
}

static void tend(struct state_dict *sd, int64_t now)
{
	bool all_over = true;

	if (!sd->lease_ms || sd->hidden)
		return;
	for (uint32_t r = 0; r < sd->world_size; r++) {
		if (sd->ranks[r].expires_ms > now) {
			all_over = false;
		} else if (sd->ranks[r].expires_ms) {
			sd->ranks[r].expires_ms = 0;
			drop_open(sd, r);
			state_dict_await_look(sd);
		}
	}
	if (all_over && !sd->orphaned_ms) {
		sd->orphaned_ms = clock_wall_ms();
		sd->orphan_since_ms = now;
		log_warn("all leases of a state dict are over", "state_dict", sd->name, NULL);
		state_dict_write(sd);
		state_dict_emit(sd, "orphaned", sd->last_generation);
	}
}

static void on_tick(void *user)
{
	struct state_dicts *s = user;
	struct state_dicts *all = s;
	int64_t now = clock_service_ms();
	struct state_dict *sd;

	map_each(&all->table, sd)
		tend(sd, now);
}

FALLIBLE enum err state_dict_lease_start(struct state_dicts *s)
{
	return loop_every(s->parts.loop, TICK_MS, on_tick, s, &s->tick);
}
