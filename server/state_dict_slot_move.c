/* state_dict_slot_move.c: the only place where a slot's state changes, by a table of legal moves. A slot that is handed out while it
 * is read, or read while it is filled, would be a torn snapshot: the daemon rather ends. */
#include "server/service_clock.h"
#include "server/state_dict_impl.h"

#define B(x) (1u << (x))

static const uint32_t moves[SLOT_STATES] = {
	[SLOT_FREE] = B(SLOT_OPEN) | B(SLOT_MAKING),
	[SLOT_OPEN] = B(SLOT_OPEN) | B(SLOT_MAKING) | B(SLOT_SEALING) | B(SLOT_LEAVING) | B(SLOT_FREEING),
	[SLOT_SEALED] = B(SLOT_LEAVING) | B(SLOT_FREEING),
	[SLOT_LEAVING] = B(SLOT_FREEING),
	[SLOT_MAKING] = B(SLOT_OPEN) | B(SLOT_FILLING) | B(SLOT_FREE),
	[SLOT_SEALING] = B(SLOT_SEALED) | B(SLOT_OPEN),
	[SLOT_FREEING] = B(SLOT_FREE) | B(SLOT_LEAVING),
	[SLOT_FILLING] = B(SLOT_SEALED) | B(SLOT_FREE),
};

bool slot_may_move(const struct slot *sl, enum slot_state to)
{
	return moves[sl->state] & B(to);
}

void slot_move(struct slot *sl, enum slot_state to)
{
	must(slot_may_move(sl, to));
	if (to == SLOT_OPEN && sl->state != SLOT_SEALING)
		sl->opened_ms = clock_mono_ms();
	sl->state = (uint8_t)to;
}

void slot_take_up(struct slot *sl, enum slot_state state)
{
	must(sl->state == SLOT_FREE);
	sl->state = (uint8_t)state;
}

void slot_stop_filling(struct slot *sl)
{
	sl->filling = sl->handed = false;
	sl->ring = (struct slot_ring){ 0 };
}
