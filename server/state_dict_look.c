/* state_dict_look.c: a look-up worker reads the headers of sealed slots soon after the seal, off the trainer's path. A slot without a valid
 * image is marked until it holds another generation: the trainer hears of it before the save, which may come much later, fails.
 *
 * A look begins LOOK_MS after the seal, so that ranks that seal together are one question; one look at a time runs for a state dict. A slot
 * may be released and filled again meanwhile: an answer counts only for the generation that was asked about (a rank never seals a
 * generation twice), so a look keeps no slot from reuse. */
#include "base/log.h"
#include "base/mem.h"
#include "server/errdoc.h"
#include "server/lookup.h"
#include "server/state_dict_impl.h"

enum { LOOK_MS = 100, SLOTS_A_LOOK = 256 };

struct look {
	struct state_dict *sd;             /* counted in its refs */
	uint32_t count;
	struct {
		struct slot *slot;
		int64_t generation;
	} slots[SLOTS_A_LOOK];
};

static void on_look_time(void *user);

static void look_later(struct state_dict *sd)
{
	if (sd->look_timer || sd->looking || sd->dead)
		return;
	loop_timer_start(sd->all->parts.loop, LOOK_MS, on_look_time, sd, &sd->look_timer);
}

void state_dict_look_at(struct state_dict *sd, struct slot *sl)
{
	sl->look = true;
	look_later(sd);
}

static bool holds(const struct slot *sl, int64_t generation)
{
	return sl->generation == generation && (sl->state == SLOT_SEALED || (sl->state == SLOT_LEAVING && !sl->filling));
}

const json_t *state_dict_slot_problem(const struct slot *sl)
{
	return sl->problem && holds(sl, sl->problem_generation) ? sl->problem : NULL;
}

/* bad: {"at": index into the question's ranks, "problem"} */
static void mark(struct look *l, const json_t *bad)
{
	json_int_t at = json_is_integer(json_object_get(bad, "at")) ? json_integer_value(json_object_get(bad, "at")) : -1;

	if (at < 0 || at >= l->count || !holds(l->slots[at].slot, l->slots[at].generation))
		return;
	struct slot *sl = l->slots[at].slot;
	enum err e = errdoc_restore(json_object_get(bad, "problem"));
	json_decref(sl->problem);
	sl->problem = errdoc_of(e);
	sl->problem_generation = sl->generation;
	log_err("a sealed slot holds no image", "state_dict", l->sd->name, NULL);
	state_dict_emit(l->sd, "bad_image", sl->generation);
}

static void on_looked(void *user, enum err e, const json_t *ok, int *)
{
	struct look *l = user;
	struct state_dict *sd = l->sd;
	const json_t *bad;
	size_t i;

	json_array_foreach(json_object_get(ok, "bad"), i, bad)
		if (!sd->dead)
			mark(l, bad);
	if (e && e != ERR_DRAINING) /* a save still tells of a bad image */
		log_err("sealed slots could not be looked at", "state_dict", sd->name, NULL);
	sd->looking = false;
	look_later(sd); /* at slots that were sealed meanwhile, and those beyond SLOTS_A_LOOK; it ends when there are none */
	state_dict_unref(sd);
	mem_free(l);
}

/* The question's "ranks", with their descriptors in fds. Slots that were released since are passed over. */
static json_t *gather(struct state_dict *sd, struct look *l, int *fds)
{
	json_t *ranks = json_array();

	for (uint32_t k = 0; k < state_dict_slots(sd) && l->count < SLOTS_A_LOOK; k++) {
		struct slot *sl = state_dict_nth(sd, k);
		if (!sl->look)
			continue;
		sl->look = false;
		if (sl->state != SLOT_SEALED || sl->made || sl->fd < 0)
			continue;
		json_t *one = json_pack("{s:i, s:i, s:I, s:I, s:I}", "rank", (int)sl->rank, "fd", (int)l->count, "bytes",
					(json_int_t)sl->bytes, "image_bytes", (json_int_t)sl->image_bytes, "generation",
					(json_int_t)sl->generation);
		if (json_array_append_new(ranks, one) != 0)
			break;
		fds[l->count] = sl->fd;
		l->slots[l->count].slot = sl;
		l->slots[l->count++].generation = sl->generation;
	}
	return ranks;
}

static void on_look_time(void *user)
{
	struct state_dict *sd = user;
	struct look *l = mem_zalloc(1, sizeof *l);
	int fds[SLOTS_A_LOOK];

	sd->look_timer = NULL;
	json_t *ranks = l ? gather(sd, l, fds) : NULL;
	json_t *question = ranks && l->count ? json_pack("{s:s, s:s, s:O}", "op", "images", "state_dict", sd->name, "ranks", ranks) : NULL;
	json_decref(ranks);
	if (!question) { /* no slot is left, or no memory: a save still tells of a bad image */
		mem_free(l);
		return;
	}
	l->sd = sd;
	sd->refs++;
	sd->looking = true;
	lookup_ask(sd->all->parts.lookups, NULL, question, fds, l->count, on_looked, l);
}

void state_dict_look_at_all(struct state_dicts *s)
{
	struct state_dict *sd;

	map_each(&s->table, sd) {
		for (uint32_t k = 0; k < state_dict_slots(sd); k++)
			if (state_dict_nth(sd, k)->state == SLOT_SEALED)
				state_dict_look_at(sd, state_dict_nth(sd, k));
	}
}
