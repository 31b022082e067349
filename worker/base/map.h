/* map.h: byte string → uint32_t, open addressing; keys are borrowed (they must outlive the map). */
#pragma once
#include "base/err.h"
#include "base/str.h"

struct map_slot {
	struct str key;
	uint32_t value;
	uint32_t hash;         /* 0: free */
};

struct map {
	struct map_slot *slots;
	uint32_t count, mask;
};

#define MAP_NONE UINT32_MAX

void map_free(struct map *m);                                             /* for CLEANUP(map_free) too */
uint32_t map_get(const struct map *m, struct str key);                    /* MAP_NONE if absent */
FALLIBLE enum err map_put(struct map *m, struct str key, uint32_t value); /* replaces */
/* The value of key, which is `value` if the key is new; *found_out says which. */
FALLIBLE enum err map_intern(struct map *m, struct str key, uint32_t value, uint32_t *found_out);

/* The hash that maps use: str_hash, folded, never 0. For tables that keep their keys elsewhere. */
uint32_t map_hash(struct str key);
