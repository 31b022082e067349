/* fence.c: see fence.h. */
#include "store/fence.h"

#include <stdio.h>
#include <stdlib.h>

#include "base/mem.h"
#include "store/staging.h"

enum { PAGE_MAX = 512, FENCE_NAME_MAX = 128 };

static const char suffix[] = "-fence";

bool fence_is(const char *name)
{
	const char *dash = strrchr(name, '-');

	return str_starts(str_of(name), ".dcpd-") && dash && str_starts(str_of(dash), suffix);
}

bool fence_is_of(const char *name, struct str job, const char *mark)
{
	const char *dash = strrchr(name, '-'), *dot = dash ? strrchr(dash, '.') : NULL;

	return dot ? str_is(str_of(dot + 1), mark) : str_ends(job, mark);
}

/* The first owner's names have none. */
static unsigned long turn_of(const char *name)
{
	const char *dash = strrchr(name, '-'), *plus = dash ? strchr(dash, '+') : NULL;

	return plus ? strtoul(plus + 1, NULL, 10) : 0;
}

bool fence_keeps_out(const char *name, struct str job, const struct store_job *by)
{
	return !fence_is(name) && !fence_is_of(name, job, by->mark) && turn_of(name) < by->turn;
}

static void name_fence(const struct store_job *by, uint32_t turn, char out[FENCE_NAME_MAX])
{
	snprintf(out, FENCE_NAME_MAX, ".dcpd-%.64s%s+%u", by->id, suffix, turn);
}

/* The folder of the target. make: with all above it. */
static FALLIBLE enum err enter(const struct store *store, const char *target, bool make, struct store_at *folder)
{
	char parent[4096], last[256];

	TRY(staging_divide(target, parent, sizeof parent, last, sizeof last));
	return make ? store->ops->make(store_top(store), parent, folder) : store_enter(store_top(store), parent, folder);
}

static FALLIBLE enum err look(const struct store_job *by, struct store_at folder)
{
	CLEANUP(mem_free_ptr) void *page = NULL;
	char name[FENCE_NAME_MAX];
	uint64_t n = 0;

	name_fence(by, by->turn, name);
	enum err e = store_get(folder, name, PAGE_MAX, &page, &n, NULL);
	if (e == ERR_NOT_FOUND) {
		err_clear();
		return OK;
	}
	return e ? e : ERR(JOB_MOVED, "job %s was taken over by another node", by->id);
}

enum err fence_check(const struct store_job *by, const struct store *store, const char *target)
{
	CLEANUP(store_close) struct store_at folder = STORE_NOTHING;

	if (!by->mark)
		return OK;
	enum err e = enter(store, target, false, &folder);
	if (e == ERR_NOT_FOUND) {
		err_clear();
		return OK;
	}
	return e ? e : look(by, folder);
}

enum err fence_drop(const struct store *store, const char *target, const char *job, uint32_t turn)
{
	CLEANUP(store_close) struct store_at folder = STORE_NOTHING;
	char name[FENCE_NAME_MAX];

	name_fence(&(struct store_job){ .id = job }, turn, name);
	enum err e = enter(store, target, false, &folder);
	if (e == ERR_NOT_FOUND) {
		err_clear();
		return OK;
	}
	return e ? e : store->ops->drop(folder, name);
}

enum err fence_raise(const struct store_job *by, const struct store *store, const char *target, bool lock)
{
	CLEANUP(store_close) struct store_at folder = STORE_NOTHING, held = STORE_NOTHING;
	char name[FENCE_NAME_MAX], page[128];

	TRY(enter(store, target, true, &folder));
	if (lock && store->ops->lock)
		TRY(store->ops->lock(folder, &held));
	int n = snprintf(page, sizeof page, "{\"turn\":%u,\"mark\":\"%.6s\"}\n", by->turn, by->mark);
	for (uint32_t turn = 0; turn < by->turn; turn++) {
		name_fence(by, turn, name);
		TRY(store->ops->put(folder, name, page, (uint64_t)n, true));
	}
	return look(by, folder);
}
