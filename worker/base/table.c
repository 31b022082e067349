/* table.c: see table.h. A table grows when three quarters of its slots are used; removed ones are dropped then. */
#include "base/table.h"

uint64_t table_slots(uint64_t items)
{
	uint64_t slots = 16;

	while (slots / 4 * 3 < items && slots <= UINT32_MAX)
		slots *= 2;
	return slots;
}

enum err table_fit(struct table_raw *t, uint64_t items, size_t slot_bytes)
{
	uint64_t slots = table_slots(items);

	if (slots > UINT32_MAX / 2)
		return ERR(LIMIT_EXCEEDED, "more than %u keys", t->count);
	struct table_raw to = { .v = mem_zalloc(slots, slot_bytes), .mask = (uint32_t)slots - 1, .used = t->count, .count = t->count };
	NEED(to.v, "no memory for %ju keys", (uintmax_t)slots);
	for (uint64_t i = 0; t->v && i <= t->mask; i++) {
		const char *from = (char *)t->v + i * slot_bytes;
		uint32_t at = *(const uint32_t *)from;
		if (at <= TABLE_REMOVED)
			continue;
		while (*(uint32_t *)((char *)to.v + (at & to.mask) * slot_bytes))
			at++;
		memcpy((char *)to.v + (at & to.mask) * slot_bytes, from, slot_bytes);
	}
	mem_free(t->v);
	*t = to;
	return OK;
}
