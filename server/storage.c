/* storage.c: see storage.h. A sorted array: there are few, and lists are shown in this order. */
#include "server/storage.h"

#include <stdio.h>
#include <stdlib.h>

#include "base/jtext.h"
#include "base/log.h"
#include "base/mem.h"
#include "base/num.h"
#include "server/config.h"
#include "server/events.h"
#include "server/job.h"
#include "server/journal.h"
#include "server/lookup.h"
#include "server/loop.h"
#include "server/metrics.h"
#include "server/sweep.h"
#include "server/worker.h"

enum { TICK_MS = 2000, PROBE_EVERY_MS = 60000, LEASE_MS = 600000, LEASE_MAX_MS = 86400000 };

struct storages {
	struct server *server;
	struct storage *items[STORAGES_MAX];
	uint32_t count;
	struct loop_timer *tick;
};

static const char *const state_texts[] = { "unknown", "ok", "stalled", "gone" };

const char *storage_state_text(enum storage_state state)
{
	return state_texts[state];
}

uint32_t storage_count(const struct server *s)
{
	return s->storages->count;
}

struct storage *storage_at(const struct server *s, uint32_t index)
{
	return s->storages->items[index];
}

FALLIBLE enum err storage_find(struct server *s, struct str name, struct storage **out)
{
	for (uint32_t i = 0; i < s->storages->count; i++)
		if (str_is(name, s->storages->items[i]->name)) {
			*out = s->storages->items[i];
			return OK;
		}
	return ERR(NOT_FOUND, "there is no storage \"%.*s\"", (int)num_min(name.n, 64), name.p);
}

void storage_root(const struct storage *st, struct worker_root *root)
{
	*root = (struct worker_root){ .path = st->path, .file_mode = st->file_mode, .file_gid = st->file_gid };
	memcpy(root->name, st->name, sizeof root->name);
}

static void free_one(struct storage *st)
{
	mem_free(st->path);
	json_decref(st->probe);
	json_decref(st->others);
	mem_free(st);
}

static FALLIBLE enum err add(struct server *s, struct str name, const char *path, struct storage **out)
{
	struct storages *all = s->storages;
	uint32_t at = all->count;

	if (all->count == STORAGES_MAX)
		return ERR(LIMIT_EXCEEDED, "there are %d storages already", STORAGES_MAX);
	struct storage *st = mem_zalloc(1, sizeof *st);
	if (!st || !(st->path = mem_strdup(path))) {
		mem_free(st);
		return ERR(NO_MEMORY, "cannot keep a storage");
	}
	snprintf(st->name, sizeof st->name, "%.*s", (int)name.n, name.p);
	st->file_mode = (mode_t)s->config->file_mode;
	st->file_gid = s->config->file_gid;
	while (at > 0 && strcmp(all->items[at - 1]->name, st->name) > 0) {
		all->items[at] = all->items[at - 1];
		at--;
	}
	all->items[at] = st;
	all->count++;
	*out = st;
	return OK;
}

static void remove_one(struct server *s, struct storage *st)
{
	struct storages *all = s->storages;
	uint32_t at = 0;

	while (all->items[at] != st)
		at++;
	memmove(&all->items[at], &all->items[at + 1], (all->count - at - 1) * sizeof *all->items);
	all->count--;
	free_one(st);
}

/* ---- state ---- */

void storage_set_state(struct server *s, struct storage *st, enum storage_state state)
{
	if (st->state == state)
		return;
	log_event(state == STORAGE_OK ? LOG_LEVEL_INFO : LOG_LEVEL_WARN, "storage changed state", "storage", st->name, "state",
		  storage_state_text(state), NULL);
	st->state = state;
	st->stalled_since_ms = state == STORAGE_STATE_STALLED ? clock_wall_ms() : 0;
	if (state == STORAGE_STATE_STALLED)
		events_emit(s->events, "storage.stalled", NULL, json_pack("{s:s}", "storage", st->name));
	events_emit(s->events, "storage.state", NULL,
		    json_pack("{s:s, s:s}", "storage", st->name, "state", storage_state_text(state)));
}

void storage_count_io(struct server *s, const json_t *body)
{
	const char *name;
	json_t *pair;

	json_object_foreach((json_t *)body, name, pair) {
		json_int_t r = json_integer_value(json_array_get(pair, 0)), w = json_integer_value(json_array_get(pair, 1));
		struct storage *st;
		if (r < 0 || w < 0 || storage_find(s, str_of(name), &st) != OK)
			continue;
		st->read_bytes += (uint64_t)r;
		st->written_bytes += (uint64_t)w;
	}
}

struct probe {
	struct server *server;
	char name[STORAGE_NAME_MAX + 1];
	done_fn fn;
	void *user;
};

static void on_probe(void *user, enum err e, const json_t *ok, int *fd)
{
	struct probe *p = user;
	struct err_info info = *err_last();
	struct storage *st;

	(void)fd;
	if (storage_find(p->server, str_of(p->name), &st) == OK) {
		st->probing = false;
		st->probed_ms = clock_wall_ms();
		st->fresh_ms = clock_mono_ms();
		if (!e) {
			json_decref(st->probe);
			st->probe = json_incref((json_t *)ok);
			st->free_bytes = (uint64_t)json_integer_value(json_object_get(ok, "free_bytes"));
			st->total_bytes = (uint64_t)json_integer_value(json_object_get(ok, "total_bytes"));
			storage_set_state(p->server, st, STORAGE_OK);
		}
	}
	err_restore(&info);
	if (p->fn)
		p->fn(p->user, e);
	mem_free(p);
}

void storage_probe(struct server *s, struct storage *st, done_fn fn, void *user)
{
	struct probe *p = mem_sure(sizeof *p);

	*p = (struct probe){ .server = s, .fn = fn, .user = user };
	memcpy(p->name, st->name, sizeof p->name);
	st->probing = true;
	lookup_ask(s, p->name, json_pack("{s:s, s:s}", "op", "probe", "storage", p->name), NULL, 0, on_probe, p);
}

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

	if (storage_find(c->server, str_of(c->name), &st) != OK)
		e = ERR(NOT_FOUND, "the storage was removed meanwhile");
	else if (e)
		remove_one(c->server, st);
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
	if (rq->lease_ms < 0 || rq->lease_ms > LEASE_MAX_MS)
		return ERR(VALIDATION_FAILED, "a lease lasts at most %d s", LEASE_MAX_MS / 1000);
	if (storage_find(s, rq->name, known) != OK)
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
		e = add(s, rq->name, path, &st);
		if (!e) {
			st->adhoc = true;
			st->uid = rq->who.uid;
		}
	}
	if (e) {
		loop_later(s->loop, fn, user, e);
		return;
	}
	st->expires_ms = clock_service_ms() + (rq->lease_ms ? rq->lease_ms : LEASE_MS);
	struct creation *c = mem_sure(sizeof *c);
	*c = (struct creation){ .server = s, .fn = fn, .user = user };
	memcpy(c->name, st->name, sizeof c->name);
	if (st->probe)
		journal_one(s, st, on_created, c);
	else
		storage_probe(s, st, on_first_probe, c);
}

static void forget(struct server *s, struct storage *st, done_fn fn, void *user)
{
	struct journal_txn *t = journal_txn_new(s->journal);

	journal_delete_storage(t, st->name);
	journal_commit(s->journal, t, fn, user);
	remove_one(s, st);
}

void storage_delete(struct server *s, struct str name, const struct principal *who, done_fn fn, void *user)
{
	struct storage *st = NULL;
	enum err e = storage_find(s, name, &st);

	if (!e && !st->adhoc)
		e = ERR(STATE_CONFLICT, "storage \"%s\" belongs to the configuration", st->name);
	if (!e && !principal_may(who, st->uid))
		e = ERR(FORBIDDEN, "storage \"%s\" belongs to uid %u", st->name, st->uid);
	if (!e && jobs_use_storage(s, st->name))
		e = ERR(STATE_CONFLICT, "a job uses storage \"%s\"", st->name);
	if (e)
		loop_later(s->loop, fn, user, e);
	else
		forget(s, st, fn, user);
}

/* ---- time ---- */

static void on_tick(void *user)
{
	struct storages *all = user;
	struct server *s = all->server;
	int64_t now = clock_mono_ms();

	for (uint32_t i = all->count; i-- > 0;) {
		struct storage *st = all->items[i];
		if ((st->sweep_due || sweep_is_due(st)) && st->state == STORAGE_OK) {
			st->sweep_due = false;
			sweep_storage(s, st->name);
		}
		if (st->expires_ms && st->expires_ms < clock_service_ms() && !jobs_use_storage(s, st->name)) {
			log_info("storage's lease is over", "storage", st->name, NULL);
			forget(s, st, NULL, NULL);
		} else if (!st->probing && st->state != STORAGE_OK && st->fresh_ms + TICK_MS <= now && st->probed_ms) {
			storage_probe(s, st, NULL, NULL);
		} else if (!st->probing && st->probed_ms && st->fresh_ms + PROBE_EVERY_MS <= now) {
			storage_probe(s, st, NULL, NULL);
		}
	}
}

FALLIBLE enum err storage_put(const struct storage *st, struct buf *out)
{
	char stamp[CLOCK_TEXT_MAX];
	const char *key;
	json_t *value;

	buf_puts(out, "{\"name\":");
	buf_json_str(out, str_of(st->name));
	buf_puts(out, ",\"path\":");
	buf_json_str(out, str_of(st->path));
	buf_printf(out, ",\"adhoc\":%s,\"state\":\"%s\"", st->adhoc ? "true" : "false", storage_state_text(st->state));
	if (st->expires_ms)
		buf_printf(out, ",\"lease_expires_at\":\"%s\"", clock_text(clock_service_wall(st->expires_ms), stamp));
	if (st->stalled_since_ms)
		buf_printf(out, ",\"stalled_since\":\"%s\"", clock_text(st->stalled_since_ms, stamp));
	if (st->probed_ms)
		buf_printf(out, ",\"probed_at\":\"%s\"", clock_text(st->probed_ms, stamp));
	json_object_foreach(st->probe, key, value) {
		char *text = jtext_of(value);
		if (!text)
			return ERR(NO_MEMORY, "cannot show a storage");
		buf_putc(out, ',');
		buf_json_str(out, str_of(key));
		buf_putc(out, ':');
		buf_puts(out, text);
		mem_free(text);
	}
	buf_putc(out, '}');
	return buf_status(out);
}

/* ---- start and reload ---- */

static FALLIBLE enum err take_config(struct server *s, const struct config *c)
{
	for (uint32_t i = 0; i < c->storage.count; i++) {
		struct config_access access;
		struct str name;
		const char *dir;
		struct storage *st;
		TRY(config_storage(c->storage.items[i], &name, &dir));
		TRY(config_access_of(c, name, &access));
		if (storage_find(s, name, &st) == OK) {
			if (strcmp(st->path, dir) != 0)
				return ERR(CONFIG, "storage \"%s\" has another path now; that needs a restart", st->name);
			st->adhoc = false;
			st->expires_ms = 0;
		} else {
			TRY(add(s, name, dir, &st));
		}
		st->file_mode = access.mode;
		st->file_gid = access.gid;
	}
	return OK;
}

static enum err take_row(void *user, const struct journal_storage *row)
{
	struct server *s = user;
	struct storage *st;

	if (storage_find(s, str_of(row->name), &st) == OK || strlen(row->name) > STORAGE_NAME_MAX)
		return OK; /* the configuration names it now */
	TRY(add(s, str_of(row->name), row->path, &st));
	st->adhoc = true;
	st->uid = row->uid;
	/* The whole lease again, at least: the daemon was down, not who holds it. */
	uint64_t now = (uint64_t)clock_service_ms();
	st->expires_ms = (int64_t)num_min(num_max((uint64_t)row->expires_ms, now + LEASE_MS), now + LEASE_MAX_MS);
	return OK;
}

FALLIBLE enum err storages_new(struct server *s)
{
	s->storages = mem_zalloc(1, sizeof *s->storages);
	if (!s->storages)
		return ERR(NO_MEMORY, "cannot keep storages");
	s->storages->server = s;
	TRY(take_config(s, s->config));
	TRY(journal_read_storages(s->journal, take_row, s));
	return loop_every(s->loop, TICK_MS, on_tick, s->storages, &s->storages->tick);
}

FALLIBLE enum err storages_reload(struct server *s, const struct config *fresh)
{
	return take_config(s, fresh);
}

void storages_free(struct storages *all)
{
	if (!all)
		return;
	for (uint32_t i = 0; i < all->count; i++)
		free_one(all->items[i]);
	loop_timer_stop(&all->tick);
	mem_free(all);
}
