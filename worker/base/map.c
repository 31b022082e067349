/* map.c: see map.h. */
#include "base/map.h"

void map_free(struct map *m)
{
	table_free(m);
}

static struct map_slot *find(const struct map *m, struct str key)
{
	struct map_slot *s;

	table_find(m, table_hash(key), s, str_eq(s->key, key));
	return s;
}

uint32_t map_get(const struct map *m, struct str key)
{
	const struct map_slot *s = find(m, key);

	return s ? s->value : MAP_NONE;
}

void *map_object(const struct map *m, struct str key)
{
	const struct map_slot *s = find(m, key);

	return s ? s->object : NULL;
}

static FALLIBLE enum err intern(struct map *m, struct str key, uint32_t value, struct map_slot **out)
{
	uint32_t hash = table_hash(key);

	table_find(m, hash, *out, str_eq((*out)->key, key));
	if (*out)
		return OK;
	TRY(table_add(m, hash, out));
	(*out)->key = key;
	(*out)->value = value;
	return OK;
}

enum err map_intern(struct map *m, struct str key, uint32_t value, uint32_t *found_out)
{
	struct map_slot *s;

	TRY(intern(m, key, value, &s));
	*found_out = s->value;
	return OK;
}

enum err map_put(struct map *m, struct str key, uint32_t value)
{
	struct map_slot *s;

	TRY(intern(m, key, value, &s));
	s->value = value;
	return OK;
}

enum err map_add(struct map *m, struct str key, void *object)
{
	struct map_slot *s;

	TRY(intern(m, key, 0, &s));
	s->object = object;
	return OK;
}

void map_remove(struct map *m, struct str key)
{
	struct map_slot *s = find(m, key);

	table_remove(m, s);
}
