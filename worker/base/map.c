/* map.c: linear probing, grows at 3/4. */
#include "base/map.h"

#include "base/mem.h"

uint32_t map_hash(struct str key)
{
	uint64_t h = str_hash(key);

	return (uint32_t)(h ^ h >> 32) | 1u << 31;
}

void map_free(struct map *m)
{
	mem_free(m->slots);
	*m = (struct map){ 0 };
}

static struct map_slot *probe(const struct map *m, struct str key, uint32_t hash)
{
	for (uint32_t i = hash & m->mask;; i = (i + 1) & m->mask) {
		struct map_slot *s = &m->slots[i];
		if (s->hash == 0 || (s->hash == hash && str_eq(s->key, key)))
			return s;
	}
}

uint32_t map_get(const struct map *m, struct str key)
{
	if (!m->slots)
		return MAP_NONE;
	const struct map_slot *s = probe(m, key, map_hash(key));
	return s->hash ? s->value : MAP_NONE;
}

static FALLIBLE enum err grow(struct map *m)
{
	uint64_t cap = m->slots ? ((uint64_t)m->mask + 1) * 2 : 16;

	if (cap > UINT32_MAX / 2)
		return ERR(LIMIT_EXCEEDED, "more than %u keys", m->count);
	struct map bigger = { .slots = mem_zalloc(cap, sizeof *bigger.slots), .mask = (uint32_t)cap - 1 };
	if (!bigger.slots)
		return ERR(NO_MEMORY, "no memory for %ju keys", (uintmax_t)cap);
	for (uint64_t i = 0; m->slots && i <= m->mask; i++)
		if (m->slots[i].hash)
			*probe(&bigger, m->slots[i].key, m->slots[i].hash) = m->slots[i];
	bigger.count = m->count;
	mem_free(m->slots);
	*m = bigger;
	return OK;
}

enum err map_intern(struct map *m, struct str key, uint32_t value, uint32_t *found_out)
{
	if (!m->slots || (uint64_t)m->count + 1 > ((uint64_t)m->mask + 1) / 4 * 3)
		TRY(grow(m));
	uint32_t hash = map_hash(key);
	struct map_slot *s = probe(m, key, hash);
	if (!s->hash) {
		*s = (struct map_slot){ key, value, hash };
		m->count++;
	}
	*found_out = s->value;
	return OK;
}

enum err map_put(struct map *m, struct str key, uint32_t value)
{
	uint32_t found;

	TRY(map_intern(m, key, value, &found));
	probe(m, key, map_hash(key))->value = value;
	return OK;
}
