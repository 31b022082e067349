/* table.h: the one hash table: open addressing and linear probing over slots of any struct that begins with `uint32_t hash`. Keys stay
 * with the table's owner: a look-up gives a hash, and an expression that compares a slot of that hash with the key. base/map.h is a
 * table that holds its keys.
 *
 *     struct slot { uint32_t hash, item; } *s;
 *     struct table(struct slot) t = { 0 };
 *     table_find(&t, hash, s, str_eq(names[s->item], name));    s: the slot, or NULL
 *     if (!s) {
 *             TRY(table_add(&t, hash, &s));                     zeroed, but for its hash
 *             s->item = …;
 *     }
 *     table_free(&t); */
#pragma once
#include "base/mem.h"
#include "base/str.h"

struct table_raw {
	void *v;
	uint32_t mask, used, count;    /* slots - 1; slots that are not free; of these, slots that were not removed */
};

#define table(type)                   \
	{                             \
		union {               \
			type *v;      \
			struct table_raw raw; \
		};                    \
	}

enum { TABLE_REMOVED = 1 };

/* For keys that stand in an array of the owner's. */
struct table_item {
	uint32_t hash, item;
};

/* str_hash, folded to what slots take: never 0 (a free slot) nor TABLE_REMOVED. */
static inline uint32_t table_hash(struct str key)
{
	uint64_t h = str_hash(key);

	return (uint32_t)(h ^ h >> 32) | 1u << 31;
}

uint64_t table_slots(uint64_t items);                 /* slots of a table for so many: filled to three quarters at most */
FALLIBLE enum err table_fit(struct table_raw *t, uint64_t items, size_t slot_bytes);

static inline FALLIBLE enum err table_add_(struct table_raw *t, uint32_t hash, size_t bytes, void **out)
{
	char *at;

	if (!t->v || (uint64_t)t->used + 1 > ((uint64_t)t->mask + 1) / 4 * 3)
		TRY(table_fit(t, (uint64_t)t->count + t->count / 4 + 1, bytes));
	for (uint32_t i = hash;; i++) {
		at = (char *)t->v + (i & t->mask) * bytes;
		if (*(uint32_t *)at == 0)
			break;
	}
	t->used++;
	t->count++;
	*(uint32_t *)at = hash;
	*out = at;
	return OK;
}

/* Adds a slot, whose key must not be there yet. Pointers to slots end here. */
#define table_add(t, hash, slot_out)                                                             \
	({                                                                                       \
		void *at_ = NULL;                                                                \
		enum err e_ = table_add_(&(t)->raw, hash, sizeof *(t)->v, &at_);                 \
		*(slot_out) = at_;                                                               \
		e_;                                                                              \
	})
/* Makes room for so many items in all. Pointers to slots end here. */
#define table_reserve(t, items) table_fit(&(t)->raw, items, sizeof *(t)->v)

#define table_find(t, h, s, same)                                  \
	do {                                                       \
		uint32_t h_ = (h), i_ = h_;                        \
		for ((s) = NULL; (t)->v; i_++) {                   \
			(s) = &(t)->v[i_ & (t)->raw.mask];         \
			if ((s)->hash == h_ && (same))             \
				break;                             \
			if ((s)->hash == 0) {                      \
				(s) = NULL;                        \
				break;                             \
			}                                          \
		}                                                  \
	} while (0)

#define table_remove(t, s)                           \
	do {                                         \
		(s)->hash = TABLE_REMOVED;           \
		(t)->raw.count--;                    \
	} while (0)
#define table_free(t)                                \
	do {                                         \
		mem_free((t)->v);                    \
		(t)->raw = (struct table_raw){ 0 };  \
	} while (0)
