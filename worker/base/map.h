/* map.h: byte string → uint32_t, or an object. Keys are borrowed: they must outlive their entry. */
#pragma once
#include "base/table.h"

struct map_slot {
	uint32_t hash;
	uint32_t value;
	void *object;
	struct str key;
};

struct map table(struct map_slot);

#define MAP_NONE UINT32_MAX

void map_free(struct map *m);                                             /* for CLEANUP(map_free) too */
uint32_t map_get(const struct map *m, struct str key);                    /* MAP_NONE if absent */
FALLIBLE enum err map_put(struct map *m, struct str key, uint32_t value); /* replaces */
/* The value of key, which is `value` if the key is new; *found_out says which. */
FALLIBLE enum err map_intern(struct map *m, struct str key, uint32_t value, uint32_t *found_out);

void *map_object(const struct map *m, struct str key);                    /* NULL if absent */
FALLIBLE enum err map_add(struct map *m, struct str key, void *object);   /* the key is new */
void map_remove(struct map *m, struct str key);                           /* of either kind; it is there */

/* All objects in any order; those already seen may be removed meanwhile, none added. */
#define map_each(m, ptr)                                             \
	for (struct map_slot *s_ = (m)->v; s_ && s_ <= &(m)->v[(m)->raw.mask]; s_++) \
		if (s_->hash > TABLE_REMOVED && ((ptr) = s_->object))
