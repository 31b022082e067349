/* state_dict_ring.c: slots through which an image goes round (see state_dict.h): who fills one is watched, and those who ask are told when
 * nobody reads it any more.
 *
 * A lease would notice a rank's death after a minute. Until then the other ranks stand in their rings, without room, and the save's workers
 * with them: so the process that began to fill is watched itself, where the socket has proved which one it is. When it ends, its ring's
 * memory is given back as soon as no job reads it: a lease would keep it for a minute more. */
#include <unistd.h>

#include "base/log.h"
#include "os/spawn.h"
#include "server/metrics.h"
#include "server/state_dict_impl.h"

enum { PAGE = 4096 };

static FALLIBLE enum err ring_lost(int64_t generation, int64_t rank)
{
	return err_at_rank(ERR(RING_LOST, "nobody reads the ring of generation %jd any more", (intmax_t)generation), rank);
}

void state_dict_lose_rings(struct state_dict *sd, int64_t generation)
{
	if (generation > sd->lost_generation)
		sd->lost_generation = generation;
}

static FALLIBLE enum err check(const struct slot *sl, const struct slot_ring *r)
{
	if (r->bytes < SLOT_RING_MIN || r->bytes % PAGE || r->offset == 0 || r->offset % PAGE)
		return ERR(VALIDATION_FAILED, "a ring begins behind the image's header, on a page, and is whole pages, %d bytes at least",
			   SLOT_RING_MIN);
	if (r->bytes > sl->bytes || r->offset > sl->bytes - r->bytes || sl->bytes - r->bytes - r->offset < PAGE)
		return ERR(VALIDATION_FAILED, "a ring of %ju bytes at %ju, and the page behind it, are more than the slot's %ju",
			   (uintmax_t)r->bytes, (uintmax_t)r->offset, (uintmax_t)sl->bytes);
	if (sl->filling && (sl->ring.bytes != r->bytes || sl->ring.offset != r->offset))
		return ERR(STATE_CONFLICT, "the slot is being filled through another ring, or through none");
	return OK;
}

void state_dict_ring_drop(struct state_dict *sd, struct slot *sl)
{
	state_dict_drop_segment(sd, sl);
	metrics_add(sd->all->parts.metrics, "dcpd_rings_dropped_total", "", 1);
}

static void on_filler_gone(void *user)
{
	struct slot *sl = user;
	struct state_dict *sd = sl->filler_sd;

	watch_free(&sl->filler);
	sl->filler_gone = true;
	if (sl->state == SLOT_FREE)
		state_dict_ring_drop(sd, sl);
	if (sl->state != SLOT_OPEN || (sl->handed && sl->generation > sd->lost_generation))
		return; /* all is in the ring: the save goes on if the others' is, and the last use frees the slot */
	if (!sl->handed)
		log_warn("a rank's process has ended while it filled a ring", "state_dict", sd->name, NULL);
	state_dict_lose_rings(sd, sl->generation);
	sd->all->watch->filler_gone(sd, sl);
}

/* No watch, then its lease must do: the process is in another namespace, or has ended already. */
static void watch_filler(struct state_dict *sd, struct slot *sl, pid_t pid)
{
	int fd = -1;

	sl->filler_sd = sd;
	if (pid > 0 && spawn_pidfd(pid, &fd) == OK && loop_watch(sd->all->parts.loop, &fd, on_filler_gone, sl, &sl->filler) == OK)
		return;
	err_clear();
	if (fd >= 0)
		close(fd);
}

FALLIBLE enum err state_dict_ring_begin(struct state_dict *sd, struct slot *sl, const struct slot_ring *ring, pid_t pid)
{
	if (sl->generation <= sd->lost_generation)
		return ring_lost(sl->generation, sl->rank);
	TRY(err_at_rank(check(sl, ring), sl->rank));
	sl->filling = true;
	sl->ring = *ring;
	if (!sl->filler)
		watch_filler(sd, sl, pid);
	return OK;
}

FALLIBLE enum err state_dict_ring_seal(struct slot *sl, const struct slot_ring *ring, const json_t *wish)
{
	if (wish)
		return ERR(VALIDATION_FAILED, "on_owner_death: a generation that goes through a ring ends with its owners");
	if (!ring)
		return err_at_rank(ERR(STATE_CONFLICT, "generation %jd goes through a ring: its seal names that", (intmax_t)sl->generation),
				   sl->rank);
	if (!sl || sl->ring.bytes != ring->bytes || sl->ring.offset != ring->offset)
		return ERR(RING_LOST, "the slot is not being filled through this ring");
	sl->handed = true;
	return OK;
}

static bool lease_is_over(const struct state_dict *sd)
{
	bool over = false;

	for (uint32_t r = 0; r < sd->world_size; r++)
		over = over || (sd->lease_ms && !sd->ranks[r].expires_ms);
	return over;
}

FALLIBLE enum err state_dict_ring_check(const struct state_dict *sd, uint32_t rank, int64_t generation)
{
	if (generation <= sd->lost_generation || !state_dict_begun(sd, rank, generation) || lease_is_over(sd))
		return ring_lost(generation, rank);
	return OK;
}
