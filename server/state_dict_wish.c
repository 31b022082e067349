/* state_dict_wish.c: what is to become of a generation when its owner dies, as it was said with the seal: members of on_owner_death, by
 * generation. state_dict_orphan.c does it. */
#include <stdio.h>

#include "base/mem.h"
#include "server/state_dict_impl.h"

/* The wish that came with the seal of one generation; NULL: none. */
const json_t *state_dict_wish_of(const struct state_dict *sd, int64_t generation)
{
	char key[24];

	snprintf(key, sizeof key, "%jd", (intmax_t)generation);
	return json_object_get(json_object_get(sd->on_owner_death, "generations"), key);
}

FALLIBLE enum err state_dict_wish_set(struct state_dict *sd, int64_t generation, const json_t *wish)
{
	uint64_t failures = mem_failures();
	char key[24];
	const char *old;
	json_t *value;
	void *next;

	if (!sd->on_owner_death)
		sd->on_owner_death = json_object();
	json_t *wishes = json_object_get(sd->on_owner_death, "generations");
	if (!wishes)
		json_object_set_new(sd->on_owner_death, "generations", wishes = json_object());
	json_object_foreach_safe(wishes, next, old, value) { /* of generations that nobody holds any more */
		bool held = false;
		for (uint32_t i = 0; i < state_dict_slots(sd) && !held; i++) {
			snprintf(key, sizeof key, "%jd", (intmax_t)state_dict_nth(sd, i)->generation);
			held = state_dict_nth(sd, i)->state != SLOT_FREE && strcmp(key, old) == 0;
		}
		if (!held)
			json_object_del(wishes, old);
	}
	snprintf(key, sizeof key, "%jd", (intmax_t)generation);
	json_object_set_new(wishes, key, json_deep_copy(wish));
	return mem_failures() == failures ? OK : ERR(NO_MEMORY, "cannot keep what is to become of a generation");
}
