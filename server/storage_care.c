/* storage_care.c: what happens to storages while the daemon runs: ad-hoc ones come and go, free space is asked for again, what was left
 * behind is swept. It stands above jobs: a storage that a job uses does not go. */
#include <stdio.h>

#include "base/log.h"
#include "base/mem.h"
#include "base/num.h"
#include "server/service_clock.h"
#include "server/config.h"
#include "server/job.h"
#include "server/journal.h"
#include "server/loop.h"
#include "server/parts.h"
#include "server/storage_impl.h"
#include "server/sweep.h"

enum { TICK_MS = 2000, PROBE_EVERY_MS = 60000 };

/* ---- ad-hoc storages ---- */

static void journal_one(struct server *s, const struct storage *st, done_fn fn, void *user)
{
	struct journal_txn *t = journal_txn_new(s->journal);
	struct journal_storage row = { st->name, st->path, st->uid, st->expires_ms };

	journal_put_storage(t, &row);
	journal_commit(s->journal, t, fn, user);
}

struct creation {
	struct server *server;
	char name[STORAGE_NAME_MAX + 1];
	done_fn fn;
	void *user;
};

static void end_creation(struct creation *c, enum err e)
{
	c->fn(c->user, e);
	mem_free(c);
}

static void on_created(void *user, enum err e)
{
	end_creation(user, e);
}

/* The root must be one that a worker can open; otherwise nothing stays of it. */
static void on_first_probe(void *user, enum err e)
{
	struct creation *c = user;
	struct storage *st;
	struct err_info info = *err_last();

	if (storage_find(c->server->storages, str_of(c->name), &st) != OK)
		e = ERR(NOT_FOUND, "the storage was removed meanwhile");
	else if (e)
		storage_remove(c->server->storages, st);
	if (!e) {
		journal_one(c->server, st, on_created, c);
		return;
	}
	if (info.code == e)
		err_restore(&info);
	end_creation(c, e);
}

static FALLIBLE enum err check_request(struct server *s, const struct storage_request *rq, struct storage **known)
{
	char item[CONFIG_PATH_MAX + 64];
	struct str name;
	const char *dir;

	*known = NULL;
	if (s->draining)
		return ERR(DRAINING, "the daemon is shutting down");
	if (rq->path.n == 0 || rq->path.n >= CONFIG_PATH_MAX || rq->path.p[0] != '/' || memchr(rq->path.p, '\0', rq->path.n))
		return ERR(VALIDATION_FAILED, "path must be an absolute path of at most %d bytes", CONFIG_PATH_MAX - 1);
	snprintf(item, sizeof item, "%.*s=%.*s", (int)num_min(rq->name.n, 40), rq->name.p, (int)rq->path.n, rq->path.p);
	if (rq->name.n > STORAGE_NAME_MAX || config_storage(item, &name, &dir) != OK)
		return ERR(NAME_INVALID, "a storage's name is [a-z][a-z0-9_-]{0,31} and not shm");
	if (rq->lease_ms < 0 || rq->lease_ms > STORAGE_LEASE_MAX_MS)
		return ERR(VALIDATION_FAILED, "a lease lasts at most %d s", STORAGE_LEASE_MAX_MS / 1000);
	if (storage_find(s->storages, rq->name, known) != OK)
		return OK;
	if (!(*known)->adhoc || !str_is(rq->path, (*known)->path) || !principal_may(&rq->who, (*known)->uid))
		return ERR(STATE_CONFLICT, "a storage of that name exists, with another path or owner");
	return OK;
}

void storage_create(struct server *s, const struct storage_request *rq, done_fn fn, void *user)
{
	struct storage *st;
	char path[CONFIG_PATH_MAX];
	enum err e = check_request(s, rq, &st);

	if (!e && !st) {
		snprintf(path, sizeof path, "%.*s", (int)rq->path.n, rq->path.p);
		e = storage_add(s->storages, rq->name, path, &st);
		if (!e) {
			st->adhoc = true;
			st->uid = rq->who.uid;
		}
	}
	if (e) {
		loop_later(s->loop, fn, user, e);
		return;
	}
	st->expires_ms = clock_service_ms() + (rq->lease_ms ? rq->lease_ms : STORAGE_LEASE_MS);
	struct creation *c = mem_sure(sizeof *c);
	*c = (struct creation){ .server = s, .fn = fn, .user = user };
	memcpy(c->name, st->name, sizeof c->name);
	if (st->probe)
		journal_one(s, st, on_created, c);
	else
		storage_probe(s->storages, s->lookups, st, on_first_probe, c);
}

static void forget(struct server *s, struct storage *st, done_fn fn, void *user)
{
	struct journal_txn *t = journal_txn_new(s->journal);

	journal_delete_storage(t, st->name);
	journal_commit(s->journal, t, fn, user);
	storage_remove(s->storages, st);
}

/* ---- time ---- */

static void on_tick(void *user)
{
	struct server *s = user;
	struct storages *all = s->storages;
	int64_t now = clock_mono_ms();

	for (uint32_t i = all->count; i-- > 0;) {
		struct storage *st = all->items[i];
		if ((st->sweep_due || sweep_is_due(st)) && st->state == STORAGE_OK) {
			st->sweep_due = false;
			sweep_storage(s->sweeps, st->name);
		}
		if (st->expires_ms && st->expires_ms < clock_service_ms() && !jobs_use_storage(s, st->name)) {
			log_info("storage's lease is over", "storage", st->name, NULL);
			forget(s, st, NULL, NULL);
		} else if (!st->probing && st->state != STORAGE_OK && st->probed_ms && st->fresh_ms + TICK_MS <= now &&
			   st->state_ms + TICK_MS <= now) { /* a change is to be seen before the next one */
			storage_probe(s->storages, s->lookups, st, NULL, NULL);
		} else if (!st->probing && st->probed_ms && st->fresh_ms + PROBE_EVERY_MS <= now) {
			storage_probe(s->storages, s->lookups, st, NULL, NULL);
		}
	}
}

FALLIBLE enum err storage_care_start(struct server *s)
{
	return loop_every(s->loop, TICK_MS, on_tick, s, &s->storages->tick);
}
