/* table.h: an intrusive hash table keyed by text, for what comes and goes: jobs, state dicts. (base/map.h never forgets a key.)
 * The node stands first in its object; its key belongs to the object and must not change while it is in the table. */
#pragma once
#include "base/err.h"
#include "base/str.h"

struct table_node {
	struct table_node *chain;
	struct str key;
	uint64_t hash;
};

struct table {
	struct table_node **buckets;
	uint32_t bucket_count, count;
};

FALLIBLE enum err table_add(struct table *t, struct table_node *n, struct str key);   /* the key is new */
struct table_node *table_find(const struct table *t, struct str key);
void table_remove(struct table *t, struct table_node *n);
/* Any order; pass NULL for the first. Do not change the table in between, but for removing what was returned before `n`. */
struct table_node *table_next(const struct table *t, const struct table_node *n);
void table_free(struct table *t);               /* not the objects */
