/* policy_records.c: see policy_records.h. All storages are listed, one after the other: a delta in one may need a base in another. */
#include "server/policy_records.h"

#include <stdio.h>

#include "base/map.h"
#include "base/mem.h"
#include "server/catalogue.h"
#include "server/chain.h"
#include "server/job_refs.h"
#include "server/parts.h"
#include "server/tier.h"
#include "spec/retention_record.h"

enum { RECORDS_BYTES_MAX = 1 << 30 };

struct gathering {
	struct policy_gathering asked;
	struct policy_records records;
	char (*storages)[STORAGE_NAME_MAX + 1];
	uint32_t count, at;
	enum err failed;               /* of a record; it ends the gathering */
	struct err_info info;
};

static void gathering_end(struct gathering *g, enum err e)
{
	struct err_info info = *err_last();

	g->asked.fn(g->asked.user, e, &g->records);
	for (uint64_t i = 0; i < g->records.metrics.n; i++)
		json_decref(g->records.metrics.v[i]);
	vec_free(&g->records.metrics);
	vec_free(&g->records.list);
	vec_free(&g->records.etags);
	arena_free(g->records.arena);
	mem_free(g->storages);
	mem_free(g);
	err_restore(&info);
}

/* ---- records ---- */

static FALLIBLE enum err take(struct gathering *g, const struct catalogue_item *item)
{
	struct policy_records *all = &g->records;
	struct retention_record *r;
	struct str *etag, storage = str_of(g->storages[g->at]);
	json_t **metrics;

	TRY(vec_push(&all->list, &r));
	TRY(vec_push(&all->etags, &etag));
	enum err e = retention_record_read(item->record, storage, all->arena, r, etag);
	if (e) {
		all->list.n--;
		all->etags.n--;
		return e;
	}
	r->step = item->step;
	r->facts |= json_array_size(item->aliases) ? RETAIN_BIT(ALIAS) : 0;
	r->facts |= g->asked.failed(g->asked.server, storage, r->name, *etag) ? RETAIN_BIT(REFUSED) : 0;
	r->facts |= tier_wants(g->asked.server->tiers, storage, r->name, *etag) ? RETAIN_BIT(IN_USE) : 0;
	if (!r->metrics)
		return OK;
	TRY(vec_push(&all->metrics, &metrics));
	*metrics = json_incref((json_t *)(uintptr_t)r->metrics);
	return OK;
}

static void on_item(void *user, const struct catalogue_item *item)
{
	struct gathering *g = user;

	if (g->failed)
		return;
	g->failed = take(g, item);
	if (g->failed)
		g->info = *err_last();
}

/* ---- jobs ---- */

enum { USE_SELF = 1, USE_INSIDE = 2 };         /* a job uses the name itself; something in it */

struct uses {
	struct arena *arena;
	struct map names, runs;        /* "storage:name" → USE_*; "storage:run" → index of since */
	struct vec(int64_t) since;     /* when the oldest job that makes one of the run was made; wall clock */
	enum err failed;
};

static void uses_free(struct uses *u)
{
	map_free(&u->names);
	map_free(&u->runs);
	vec_free(&u->since);
}

static struct str run_in(struct str name)
{
	const char *slash = memrchr(name.p, '/', name.n);

	return slash ? (struct str){ name.p, (size_t)(slash - name.p) } : STR("-");
}

static FALLIBLE enum err put_use(struct uses *u, struct str storage, struct str name, uint32_t use)
{
	struct str key;

	TRY(arena_printf(u->arena, &key, "%.*s:%.*s", (int)storage.n, storage.p, (int)name.n, name.p));
	uint32_t before = map_get(&u->names, key);
	return map_put(&u->names, key, (before == MAP_NONE ? 0 : before) | use);
}

static FALLIBLE enum err put_run(struct uses *u, const struct job_ref *r)
{
	struct str run = run_in(r->ref->name), key;
	int64_t *since;

	TRY(arena_printf(u->arena, &key, "%s:%.*s", r->ref->storage.p, (int)run.n, run.p));
	uint32_t at = map_get(&u->runs, key);
	if (at != MAP_NONE) {
		u->since.v[at] = r->created_ms < u->since.v[at] ? r->created_ms : u->since.v[at];
		return OK;
	}
	TRY(vec_push(&u->since, &since));
	*since = r->created_ms;
	return map_put(&u->runs, key, (uint32_t)u->since.n - 1);
}

static FALLIBLE enum err take_ref(struct uses *u, const struct job_ref *r)
{
	struct str name = r->ref->name;

	if (r->is_made)
		TRY(put_run(u, r));
	TRY(put_use(u, r->ref->storage, name, USE_SELF));
	for (size_t i = name.n; i-- > 0;)
		if (name.p[i] == '/')
			TRY(put_use(u, r->ref->storage, (struct str){ name.p, i }, USE_INSIDE));
	return OK;
}

static void on_ref(void *user, const struct job_ref *r)
{
	struct uses *u = user;

	if (!u->failed)
		u->failed = take_ref(u, r);
}

static void on_chain_ref(void *user, struct str storage, struct str name)
{
	struct uses *u = user;

	if (!u->failed)
		u->failed = put_use(u, storage, name, USE_SELF);
}

static uint32_t use_of(const struct uses *u, struct str storage, struct str name)
{
	char key[8192];
	int n = snprintf(key, sizeof key, "%.*s:%.*s", (int)storage.n, storage.p, (int)name.n, name.p);
	uint32_t use = map_get(&u->names, (struct str){ key, (size_t)n });

	return use == MAP_NONE ? 0 : use;
}

static bool is_in_use(const struct uses *u, const struct retention_record *r)
{
	if (use_of(u, r->storage, r->name))
		return true;
	for (size_t i = r->name.n; i-- > 0;) /* or a folder that it lies in */
		if (r->name.p[i] == '/' && (use_of(u, r->storage, (struct str){ r->name.p, i }) & USE_SELF))
			return true;
	return false;
}

/* A save of the run that has not ended may become an older step than this one, and the newest durable one may yet change. */
static bool is_in_flight(const struct uses *u, const struct retention_record *r)
{
	char key[8192];
	int n = snprintf(key, sizeof key, "%.*s:%.*s", (int)r->storage.n, r->storage.p, (int)r->run.n, r->run.p);
	uint32_t at = map_get(&u->runs, (struct str){ key, (size_t)n });

	return at != MAP_NONE && r->durable_ms >= u->since.v[at];
}

static FALLIBLE enum err look_at_jobs(struct gathering *g)
{
	CLEANUP(uses_free) struct uses u = { .arena = g->records.arena };

	job_each_ref(g->asked.server, on_ref, &u);
	TRY(chains_each_ref(g->asked.server, on_chain_ref, &u));
	TRY(u.failed);
	if (u.names.v == NULL)
		return OK;
	each(r, g->records.list.v, g->records.list.n) {
		r->facts |= is_in_use(&u, r) ? RETAIN_BIT(IN_USE) : 0;
		r->facts |= is_in_flight(&u, r) ? RETAIN_BIT(IN_FLIGHT) : 0;
	}
	return OK;
}

/* ---- storage by storage ---- */

static void ask_next(struct gathering *g);

/* A storage that was taken away meanwhile has no checkpoints any more. */
static void on_done(void *user, enum err e)
{
	struct gathering *g = user;
	struct storage *st;
	bool is_gone = e && storage_find(g->asked.server->storages, str_of(g->storages[g->at]), &st) == ERR_NOT_FOUND;

	if (!e && g->failed) {
		err_restore(&g->info);
		e = g->failed;
	}
	if (e && !is_gone) {
		char why[400];
		snprintf(why, sizeof why, "%.390s", err_last()->text);
		err_record(e, 0, ERR_PLACE, "storage %s cannot be listed: %s", g->storages[g->at], why);
		gathering_end(g, e);
		return;
	}
	g->at++;
	ask_next(g);
}

static void ask_next(struct gathering *g)
{
	if (g->at == g->count)
		gathering_end(g, look_at_jobs(g) ?: retention_records_share(g->records.list.v, g->records.list.n, g->records.arena));
	else
		catalogue_each(g->asked.server, g->storages[g->at], "*", on_item, on_done, g);
}

static void begin(void *user, enum err e)
{
	struct gathering *g = user;

	if (!e && (!g->records.arena || !g->storages))
		e = ERR(NO_MEMORY, "cannot look at checkpoints");
	if (e)
		gathering_end(g, e);
	else
		ask_next(g);
}

void policy_records_gather(const struct policy_gathering *asked)
{
	struct gathering *g = mem_sure(sizeof *g);
	struct storages *all = asked->server->storages;

	*g = (struct gathering){ .asked = *asked, .count = storage_count(all) };
	g->records.arena = arena_new(RECORDS_BYTES_MAX);
	g->storages = mem_zalloc(g->count + 1, sizeof *g->storages);
	for (uint32_t i = 0; i < g->count && g->storages; i++)
		memcpy(g->storages[i], storage_at(all, i)->name, sizeof g->storages[i]);
	loop_later(asked->server->loop, begin, g, OK);
}
