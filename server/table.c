/* table.c: see table.h. Chained, a power of two of buckets, doubled when full; it never shrinks. */
#include "server/table.h"

#include "base/mem.h"

static FALLIBLE enum err grow(struct table *t)
{
	uint32_t count = t->bucket_count ? t->bucket_count * 2 : 64;
	struct table_node **buckets = mem_zalloc(count, sizeof *buckets);

	if (!buckets)
		return ERR(NO_MEMORY, "cannot grow a table");
	for (uint32_t i = 0; i < t->bucket_count; i++)
		for (struct table_node *n = t->buckets[i], *next; n; n = next) {
			next = n->chain;
			n->chain = buckets[n->hash & (count - 1)];
			buckets[n->hash & (count - 1)] = n;
		}
	mem_free(t->buckets);
	t->buckets = buckets;
	t->bucket_count = count;
	return OK;
}

FALLIBLE enum err table_add(struct table *t, struct table_node *n, struct str key)
{
	if (t->count == t->bucket_count)
		TRY(grow(t));
	n->key = key;
	n->hash = str_hash(key);
	n->chain = t->buckets[n->hash & (t->bucket_count - 1)];
	t->buckets[n->hash & (t->bucket_count - 1)] = n;
	t->count++;
	return OK;
}

struct table_node *table_find(const struct table *t, struct str key)
{
	if (!t->count)
		return NULL;
	uint64_t hash = str_hash(key);
	struct table_node *n = t->buckets[hash & (t->bucket_count - 1)];
	while (n && (n->hash != hash || !str_eq(n->key, key)))
		n = n->chain;
	return n;
}

void table_remove(struct table *t, struct table_node *n)
{
	struct table_node **at = &t->buckets[n->hash & (t->bucket_count - 1)];

	while (*at != n)
		at = &(*at)->chain;
	*at = n->chain;
	t->count--;
}

struct table_node *table_next(const struct table *t, const struct table_node *n)
{
	uint32_t i = 0;

	if (n && n->chain)
		return n->chain;
	if (n)
		i = (uint32_t)(n->hash & (t->bucket_count - 1)) + 1;
	for (; i < t->bucket_count; i++)
		if (t->buckets[i])
			return t->buckets[i];
	return NULL;
}

void table_free(struct table *t)
{
	mem_free(t->buckets);
	*t = (struct table){ 0 };
}
