/* storage_probe.c: asks a look-up worker how much space a storage has and whether it answers at all. */
#include "base/log.h"
#include "base/mem.h"
#include "server/service_clock.h"
#include "server/errdoc.h"
#include "server/lookup.h"
#include "server/config.h"
#include "server/storage_impl.h"
#include "server/storage_speed.h"

struct probe {
	struct storages *all;
	char name[STORAGE_NAME_MAX + 1];
	done_fn fn;
	void *user;
};

static void on_probe(void *user, enum err e, const json_t *ok, int *)
{
	struct probe *p = user;
	struct err_info info = *err_last();
	struct storage *st;

	if (storage_find(p->all, str_of(p->name), &st) == OK) {
		st->probing = false;
		st->probed_ms = clock_wall_ms();
		st->fresh_ms = clock_mono_ms();
		if (!e) {
			json_decref(st->probe);
			st->probe = json_incref((json_t *)ok);
			st->free_bytes = (uint64_t)json_integer_value(json_object_get(ok, "free_bytes"));
			st->total_bytes = (uint64_t)json_integer_value(json_object_get(ok, "total_bytes"));
			if (st->total_bytes)
				storage_speed_space(&st->speed, st->fresh_ms, st->free_bytes);
			storage_set_state(p->all, st, STORAGE_OK);
		}
		if (e && st->path[0] != '/' && st->state != STORAGE_STATE_STALLED) {
			if (st->state != STORAGE_UNAVAILABLE)
				log_warn("storage does not answer", "storage", st->name, "why", info.text, NULL);
			storage_set_state(p->all, st, STORAGE_UNAVAILABLE);
		}
		json_decref(st->problem);
		err_restore(&info);
		st->problem = st->state == STORAGE_UNAVAILABLE ? errdoc_of(e) : NULL;
	}
	err_restore(&info);
	if (p->fn)
		p->fn(p->user, e);
	mem_free(p);
}

void storage_probe(struct storages *all, struct lookups *lookups, struct storage *st, done_fn fn, void *user)
{
	struct probe *p = mem_sure(sizeof *p);

	*p = (struct probe){ .all = all, .fn = fn, .user = user };
	memcpy(p->name, st->name, sizeof p->name);
	st->probing = true;
	lookup_ask(lookups, p->name, json_pack("{s:s, s:s, s:b}", "op", "probe", "storage", p->name, "id",
							  all->config->cluster && !st->adhoc), NULL, 0, on_probe, p);
}
