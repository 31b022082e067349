/* trash_care.c: see trash_care.h. A trash with something in it is looked at each minute, an empty one seldom: other daemons may use it. */
#include "server/trash_care.h"

#include <stdio.h>

#include "base/log.h"
#include "base/mem.h"
#include "server/lookup.h"
#include "server/loop.h"
#include "server/parts.h"
#include "server/service_clock.h"
#include "server/storage.h"

enum { TICK_MS = 1000, LOOK_MS = 60000, SELDOM_MS = 600000, SOON_MS = 200, LITTLE_MS = 5000 };

struct look {
	struct server *server;
	char storage[STORAGE_NAME_MAX + 1];
};

static int64_t next_look(const json_t *ok)
{
	int64_t now = clock_mono_ms(), left = json_integer_value(json_object_get(ok, "next_ms")) - clock_wall_ms();

	if (json_integer_value(json_object_get(ok, "checkpoints")) == 0)
		return now + SELDOM_MS;
	left = left < 0 && json_integer_value(json_object_get(ok, "removed")) == 0 ? LOOK_MS : left; /* no time to be trusted */
	left = left < SOON_MS ? SOON_MS : left > LOOK_MS ? LOOK_MS : left;
	int64_t busy = json_integer_value(json_object_get(ok, "busy_ms")); /* with little to unlink it is a guess on the safe side */
	return now + left + (busy > LITTLE_MS ? busy : 0);
}

static void on_looked(void *user, enum err e, const json_t *ok, int *)
{
	struct look *l = user;
	struct storage *st;

	if (json_integer_value(json_object_get(ok, "removed")) > 0)
		log_info("the time of deleted checkpoints is over", "storage", l->storage, NULL);
	if (storage_find(l->server->storages, str_of(l->storage), &st) == OK) {
		st->trash_asked = false;
		st->trash_due_ms = e ? clock_mono_ms() + LOOK_MS : next_look(ok);
		st->trash_seen = st->trash_seen || !e;
		st->trash_count = e ? st->trash_count : (uint64_t)json_integer_value(json_object_get(ok, "checkpoints"));
		st->trash_bytes = e ? st->trash_bytes : (uint64_t)json_integer_value(json_object_get(ok, "bytes"));
	}
	err_clear();
	mem_free(l);
}

static void look(struct server *s, struct storage *st, bool sane)
{
	struct look *l = mem_zalloc(1, sizeof *l);
	json_t *q = l ? json_pack("{s:s, s:s, s:I}", "op", "trash", "storage", st->name, "now", (json_int_t)(sane ? clock_wall_ms() : -1))
		      : NULL;

	if (!q) {
		mem_free(l);
		return; /* at the next tick */
	}
	l->server = s;
	snprintf(l->storage, sizeof l->storage, "%s", st->name);
	st->trash_asked = true;
	lookup_ask(s->lookups, st->name, q, NULL, 0, on_looked, l);
}

static void on_tick(void *user)
{
	struct server *s = user;
	bool sane = clock_wall_is_sane();

	for (uint32_t i = 0; i < storage_count(s->storages); i++) {
		struct storage *st = storage_at(s->storages, i);
		if (st->state == STORAGE_OK && !st->trash_asked && st->trash_due_ms <= clock_mono_ms() && !s->draining)
			look(s, st, sane);
	}
}

void trash_care_changed(struct server *s, const char *storage)
{
	struct storage *st;

	if (storage_find(s->storages, str_of(storage), &st) == OK)
		st->trash_due_ms = clock_mono_ms() + SOON_MS;
	err_clear();
}

FALLIBLE enum err trash_care_start(struct server *s)
{
	return loop_every(s->loop, TICK_MS, on_tick, s, &s->trash_tick);
}
