/* state_dict_role.c: what makes a state dict a publication or a subscriber, and who may read it. state_dict_feed.c is what follows from
 * that. */
#include "base/list.h"
#include "base/mem.h"
#include "server/state_dict_impl.h"

FALLIBLE enum err state_dict_feed_new(struct state_dict *sd, const json_t *role)
{
	struct state_dict_feed *f = sd->feed = mem_zalloc(1, sizeof *f);

	if (f)
		f->role = json_deep_copy(role);
	if (f)
		f->taken = mem_zalloc(sd->world_size, sizeof *f->taken);
	NEED(f && f->role && f->taken, "cannot keep a publication");
	f->publishes = json_object_get(f->role, "publish") != NULL;
	f->publication = json_string_value(json_object_get(json_object_get(f->role, "subscribe"), "publication"));
	f->node = json_string_value(json_object_get(json_object_get(f->role, "subscribe"), "node"));
	f->failed_generation = f->applied = f->published = f->told = -1;
	for (uint32_t r = 0; r < sd->world_size; r++)
		f->taken[r] = -1;
	if (!f->publishes && !f->publication)
		return ERR(JOURNAL, "the journal has a role of a state dict that cannot be");
	sd->all->subscribers += !f->publishes;
	return OK;
}

void state_dict_feed_free(struct state_dict *sd)
{
	struct state_dict_feed *f = sd->feed;

	if (!f)
		return;
	sd->all->subscribers -= f->publication != NULL;
	json_decref(f->problem);
	json_decref(f->role);
	list_each(g, f->guests)
		mem_free(g);
	mem_free(f->taken);
	mem_free(f);
	sd->feed = NULL;
}

void state_dict_feed_leave(struct state_dict *sd)
{
	if (!sd->feed || !sd->feed->node)
		return;
	sd->refs++;
	sd->next = sd->all->leaving;
	sd->all->leaving = sd;
}

bool state_dict_publishes(const struct state_dict *sd)
{
	return sd->feed && sd->feed->publishes;
}

bool state_dict_subscribes(const struct state_dict *sd)
{
	return sd->feed && !sd->feed->publishes;
}

bool state_dict_may_read(const struct principal *who, const struct state_dict *sd)
{
	const json_t *one;
	size_t i;

	if (principal_may(who, sd->uid))
		return true;
	json_array_foreach(sd->feed ? json_object_get(json_object_get(sd->feed->role, "publish"), "readers") : NULL, i, one)
		if (json_integer_value(one) == (json_int_t)who->uid)
			return true;
	return false;
}
