/* state_dict_await.c: jobs that were made before their generation is sealed. Whoever waits is told when all ranks have sealed it, and has
 * its use from that moment on; or, as soon as it is certain, that it will not come: nobody waits for a trainer that is gone.
 *
 * The certainty is read off the slots each time something happens to one (state_dict_await_look): there is no second book. */
#include <stdio.h>

#include "base/list.h"
#include "base/mem.h"
#include "server/state_dict_impl.h"

struct state_dict_await {
	struct state_dict_await *next;
	struct state_dict *sd;
	int64_t generation, timeout_ms;
	char job[27];
	state_dict_news_fn fn;
	void *user;
	struct loop_timer *timer;
	struct state_dict_use *use;     /* given, for it is being filled; the receiver's */
};

void state_dict_await_missing(const struct state_dict_await *a, char *text, size_t n)
{
	char ranks[32];
	int64_t first;
	uint32_t missing = state_dict_missing(a->sd, a->generation, ranks, sizeof ranks, &first);

	snprintf(text, n, "awaiting seal%s of rank%s %s", missing > 1 ? "s" : "", missing > 1 ? "s" : "", ranks);
}

/* ---- what is certain ---- */

static bool has_slot(const struct state_dict *sd, uint32_t rank, int64_t generation)
{
	for (uint32_t k = 0; k < sd->slot_count; k++) {
		const struct slot *sl = state_dict_slot(sd, rank, k);
		if (sl->generation == generation && (sl->state == SLOT_OPEN || sl->state == SLOT_MAKING))
			return true;
	}
	return false;
}

static int64_t newest_begun(const struct state_dict *sd, uint32_t rank)
{
	int64_t newest = sd->ranks[rank].last_generation;

	if (sd->last_generation > newest)
		newest = sd->last_generation;
	for (uint32_t k = 0; k < sd->slot_count; k++) {
		const struct slot *sl = state_dict_slot(sd, rank, k);
		if (sl->state == SLOT_OPEN && sl->generation > newest)
			newest = sl->generation;
	}
	return newest;
}

/* Why this rank will never seal this generation; false: it has, or it may. */
static bool never_comes(const struct state_dict *sd, uint32_t rank, int64_t generation, char *why, size_t n)
{
	int64_t newest = newest_begun(sd, rank);

	if (state_dict_slot_of(sd, rank, generation, SLOT_SEALED) || state_dict_slot_of(sd, rank, generation, SLOT_SEALING))
		return false;
	if (newest > generation)
		snprintf(why, n, "it went on to generation %jd", (intmax_t)newest);
	else if (newest == generation && !has_slot(sd, rank, generation))
		snprintf(why, n, "it has released it");
	else if (!sd->lease_ms)
		snprintf(why, n, "the state dict was made by a job");
	else if (!sd->ranks[rank].expires_ms)
		snprintf(why, n, "its lease is over");
	else
		return false;
	return true;
}

static FALLIBLE enum err check_may_come(const struct state_dict *sd, int64_t generation)
{
	char why[80];

	for (uint32_t r = 0; r < sd->world_size; r++)
		if (never_comes(sd, r, generation, why, sizeof why))
			return err_at_rank(ERR(NOT_SEALED, "state dict \"%s\": generation %jd will not be sealed by rank %u: %s", sd->name,
					       (intmax_t)generation, r, why), r);
	return OK;
}

static bool all_begun(const struct state_dict *sd, int64_t generation)
{
	for (uint32_t r = 0; r < sd->world_size; r++)
		if (!state_dict_begun(sd, r, generation))
			return false;
	return true;
}

static bool all_given(const struct state_dict *sd, int64_t generation)
{
	for (uint32_t r = 0; r < sd->world_size; r++)
		if (!state_dict_given(sd, r, generation))
			return false;
	return true;
}

/* ---- waiting ---- */

bool state_dict_await_uses(const struct state_dict *sd, const struct state_dict_use *u)
{
	const struct state_dict_await *a = sd->awaits;

	while (a && a->use != u)
		a = a->next;
	return a != NULL;
}

static void take_out(struct state_dict_await *a)
{
	list_remove(&a->sd->awaits, a);
	loop_timer_stop(&a->timer);
}

static void lose(struct state_dict_await *a, enum err e)
{
	take_out(a);
	a->fn(a->user, NEWS_LOST, NULL, e);
	mem_free(a);
}

static void on_timeout(void *user)
{
	struct state_dict_await *a = user;
	char ranks[256];
	int64_t first;
	uint32_t missing = state_dict_missing(a->sd, a->generation, ranks, sizeof ranks, &first);

	a->timer = NULL;
	lose(a, err_at_rank(ERR(NOT_SEALED, "state dict \"%s\": generation %jd was not sealed by rank%s %s in %jd s", a->sd->name,
				(intmax_t)a->generation, missing > 1 ? "s" : "", ranks, (intmax_t)(a->timeout_ms / 1000)), first));
}

static void all_sealed(struct state_dict_await *a)
{
	struct state_dict_use *use = NULL;
	enum err e = a->use ? OK : state_dict_hold(a->sd, a->generation, a->job, &use);

	if (e) {
		lose(a, e);
		return;
	}
	take_out(a);
	a->fn(a->user, NEWS_SEALED, use, OK);
	mem_free(a);
}

static void look(struct state_dict_await *a)
{
	for (uint32_t r = 0; a->use && r < a->sd->world_size; r++)
		a->use->ranks[r].filling = state_dict_slot(a->sd, r, a->use->ranks[r].slot)->filling;
	if (all_given(a->sd, a->generation)) {
		all_sealed(a);
		return;
	}
	enum err e = check_may_come(a->sd, a->generation);
	if (!e && !a->use && all_begun(a->sd, a->generation)) {
		e = state_dict_hold(a->sd, a->generation, a->job, &a->use);
		if (!e)
			a->fn(a->user, NEWS_FILLING, a->use, OK);
	}
	if (e)
		lose(a, e);
	else
		a->fn(a->user, NEWS_MORE, NULL, OK);
}

void state_dict_await_look(struct state_dict *sd)
{
	list_each(a, sd->awaits)
		look(a);
}

static void given_up(struct state_dict *sd, uint32_t rank, int64_t generation, const char *why)
{
	list_each(a, sd->awaits)
		if (a->generation == generation)
			lose(a, err_at_rank(ERR(NOT_SEALED, "state dict \"%s\": generation %jd will not be sealed by rank %u: %s",
						sd->name, (intmax_t)generation, rank, why), rank));
}

static void filler_gone(struct state_dict *sd, struct slot *sl)
{
	int64_t generation = sl->generation;

	if (sl->uses)
		state_dict_abandon_slot(sd, sl);
	else
		state_dict_free_slot(sd, sl);
	given_up(sd, sl->rank, generation, "its process has ended");
}

void state_dict_await_deleted(struct state_dict *sd)
{
	while (sd->awaits) {
		char ranks[256];
		int64_t first;
		uint32_t missing = state_dict_missing(sd, sd->awaits->generation, ranks, sizeof ranks, &first);
		enum err e = ERR(NOT_SEALED, "state dict \"%s\" was deleted before rank%s %s sealed generation %jd", sd->name,
				 missing > 1 ? "s" : "", ranks, (intmax_t)sd->awaits->generation);
		lose(sd->awaits, err_at_rank(e, first));
	}
}

const struct slot_watch state_dict_await_watch = { .changed = state_dict_await_look, .given_up = given_up,
						   .filler_gone = filler_gone,
						   .deleted = state_dict_await_deleted, .complete = state_dict_feed_complete };

FALLIBLE enum err state_dict_await(struct state_dicts *s, const struct state_dict_wish *w, struct state_dict_use **use_out,
				   struct state_dict_await **out)
{
	struct state_dict *sd;

	TRY(state_dict_find(s, w->who, w->name, &sd));
	enum err e = state_dict_use(s, w->who, w->name, w->generation, w->job, use_out);
	if (e != ERR_NOT_SEALED)
		return e;
	TRY(check_may_come(sd, w->generation));
	struct state_dict_await *a = mem_zalloc(1, sizeof *a);
	NEED(a, "cannot wait for a seal");
	*a = (struct state_dict_await){ .next = sd->awaits, .sd = sd, .generation = w->generation, .timeout_ms = w->timeout_ms,
					.fn = w->fn, .user = w->user };
	snprintf(a->job, sizeof a->job, "%s", w->job);
	loop_timer_start(s->parts.loop, w->timeout_ms, on_timeout, a, &a->timer);
	sd->awaits = a;
	*out = a;
	look(a); /* they may be filling already */
	return OK;
}

void state_dict_await_stop(struct state_dict_await **await)
{
	struct state_dict_await *a = *await;

	*await = NULL;
	if (!a)
		return;
	take_out(a);
	mem_free(a);
}
