/* fence.c: see fence.h. */
#include "store/fence.h"

#include <stdio.h>

#include "base/jval.h"
#include "base/mem.h"
#include "store/staging.h"

enum { PAGE_MAX = 512 };

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

/* The folder of the target, made if it has to be, and the fence's name in it. */
static FALLIBLE enum err place(const struct store_job *by, const struct store *store, const char *target, bool make,
			       struct store_at *folder, char name[128])
{
	char parent[4096], last[256];

	TRY(staging_divide(target, parent, sizeof parent, last, sizeof last));
	snprintf(name, 128, ".dcpd-%.64s%s", by->id, suffix);
	return make ? store->ops->make(store_top(store), parent, folder) : store_enter(store_top(store), parent, folder);
}

/* ERR_JOB_MOVED: a later owner's. A page that cannot be read fences all but the one who writes it anew. */
static FALLIBLE enum err read_page(const struct store_job *by, struct store_at folder, const char *name)
{
	CLEANUP(mem_free_ptr) void *bytes = NULL;
	CLEANUP(jval_drop) json_t *doc = NULL;
	uint64_t n = 0;

	enum err e = store_get(folder, name, PAGE_MAX, &bytes, &n, NULL);
	if (e == ERR_NOT_FOUND) {
		err_clear();
		return OK;
	}
	TRY(e);
	TRY(jval_parse((struct str){ bytes, n }, &doc));
	const char *mark = jval_text(doc, "mark");
	if (jval_int(doc, "token") <= (json_int_t)by->token || (mark && strcmp(mark, by->mark) == 0))
		return OK;
	return ERR(JOB_MOVED, "job %s was taken over by another node", by->id);
}

enum err fence_check(const struct store_job *by, const struct store *store, const char *target)
{
	CLEANUP(store_close) struct store_at folder = STORE_NOTHING;
	char name[128];

	if (!by->mark)
		return OK;
	enum err e = place(by, store, target, false, &folder, name);
	if (e == ERR_NOT_FOUND) {
		err_clear();
		return OK;
	}
	return e ? e : read_page(by, folder, name);
}

enum err fence_raise(const struct store_job *by, const struct store *store, const char *target, bool lock)
{
	CLEANUP(store_close) struct store_at folder = STORE_NOTHING, held = STORE_NOTHING;
	char name[128], page[128];

	TRY(place(by, store, target, true, &folder, name));
	if (lock && store->ops->lock)
		TRY(store->ops->lock(folder, &held));
	TRY(read_page(by, folder, name));
	int n = snprintf(page, sizeof page, "{\"token\":%ju,\"mark\":\"%.6s\"}\n", (uintmax_t)by->token, by->mark);
	return store->ops->put(folder, name, page, (uint64_t)n, true);
}
