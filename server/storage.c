/* storage.c: see storage.h: the records. A sorted array: there are few, and lists are shown in this order. Free space is asked for in
 * storage_probe.c; ad-hoc storages come and go in storage_care.c. */
#include "server/storage.h"

#include <stdio.h>

#include "base/jtext.h"
#include "base/list.h"
#include "base/log.h"
#include "base/mem.h"
#include "base/num.h"
#include "server/service_clock.h"
#include "server/config.h"
#include "server/events.h"
#include "server/journal.h"
#include "server/loop.h"
#include "server/storage_impl.h"
#include "server/storage_speed.h"
#include "server/worker.h"

static const char *const state_texts[] = { "unknown", "ok", "stalled", "gone", "unavailable" };

const char *storage_state_text(enum storage_state state)
{
	return state_texts[state];
}

uint32_t storage_count(const struct storages *all)
{
	return all->count;
}

struct storage *storage_at(const struct storages *all, uint32_t index)
{
	return all->items[index];
}

/* Names the storages that there are, as many as have room, for a caller who has mistyped one. */
static FALLIBLE enum err unknown_storage(const struct storages *all, struct str name)
{
	char names[160] = "none";
	size_t at = 0;

	for (uint32_t i = 0; i < all->count; i++) {
		bool fits = at + strlen(all->items[i]->name) + sizeof ", , …" <= sizeof names;
		at += (size_t)snprintf(names + at, sizeof names - at, "%s%s", at ? ", " : "", fits ? all->items[i]->name : "…");
		if (!fits)
			break;
	}
	return ERR(NOT_FOUND, "there is no storage \"%.*s\"; dcpd has: %s", (int)num_min(name.n, 64), name.p, names);
}

FALLIBLE enum err storage_find(struct storages *all, struct str name, struct storage **out)
{
	for (uint32_t i = 0; i < all->count; i++)
		if (str_is(name, all->items[i]->name)) {
			*out = all->items[i];
			return OK;
		}
	for (struct storage *st = all->nodes; st; st = st->next)
		if (str_is(name, st->name)) {
			*out = st;
			return OK;
		}
	return unknown_storage(all, name);
}

void storage_root(const struct storage *st, struct worker_root *root)
{
	*root = (struct worker_root){ .path = st->path, .file_mode = st->file_mode, .file_gid = st->file_gid,
				      .options = st->options };
	memcpy(root->name, st->name, sizeof root->name);
}

static void free_one(struct storage *st)
{
	mem_free(st->path);
	mem_free(st->io);
	storage_speed_drop(st->speed);
	json_decref(st->options);
	json_decref(st->probe);
	json_decref(st->problem);
	json_decref(st->others);
	mem_free(st);
}

FALLIBLE enum err storage_add(struct storages *all, struct str name, const char *path, struct storage **out)
{
	uint32_t at = all->count;

	if (all->count == STORAGES_MAX)
		return ERR(LIMIT_EXCEEDED, "there are %d storages already", STORAGES_MAX);
	struct storage *st = mem_zalloc(1, sizeof *st);
	if (!st || !(st->path = mem_strdup(path))) {
		mem_free(st);
		return ERR(NO_MEMORY, "cannot keep a storage");
	}
	snprintf(st->name, sizeof st->name, "%.*s", (int)name.n, name.p);
	st->file_mode = (mode_t)all->config->file_mode;
	st->file_gid = all->config->file_gid;
	while (at > 0 && strcmp(all->items[at - 1]->name, st->name) > 0) {
		all->items[at] = all->items[at - 1];
		at--;
	}
	all->items[at] = st;
	all->count++;
	*out = st;
	return OK;
}

FALLIBLE enum err storage_of_node(struct storages *all, const char *name, const char *place, json_t *options, struct storage **out)
{
	struct storage *st = all->nodes;
	char *path = mem_strdup(place);

	while (st && strcmp(st->name, name) != 0)
		st = st->next;
	struct storage *fresh = st || !path ? NULL : mem_zalloc(1, sizeof *fresh);
	if (!path || (!st && !fresh)) {
		mem_free(path);
		json_decref(options);
		return ERR(NO_MEMORY, "cannot name a node");
	}
	if (fresh) {
		*fresh = (struct storage){ .next = all->nodes, .file_gid = CONFIG_NO_GROUP, .file_mode = 0600 };
		snprintf(fresh->name, sizeof fresh->name, "%s", name);
		all->nodes = st = fresh;
	}
	mem_free(st->path);
	json_decref(st->options);
	st->path = path;
	st->options = options;
	*out = st;
	return OK;
}

void storage_remove(struct storages *all, struct storage *st)
{
	uint32_t at = 0;

	while (all->items[at] != st)
		at++;
	memmove(&all->items[at], &all->items[at + 1], (all->count - at - 1) * sizeof *all->items);
	all->count--;
	free_one(st);
}

/* ---- state ---- */

void storage_set_state(struct storages *all, struct storage *st, enum storage_state state)
{
	if (st->state == state || st->name[0] == '@') /* whether a node is there, the cluster knows */
		return;
	log_event(state == STORAGE_OK ? LOG_LEVEL_INFO : LOG_LEVEL_WARN, "storage changed state", "storage", st->name, "state",
		  storage_state_text(state), NULL);
	st->state = state;
	st->state_ms = clock_mono_ms();
	st->stalled_since_ms = state == STORAGE_STATE_STALLED ? clock_wall_ms() : 0;
	if (state == STORAGE_STATE_STALLED)
		events_emit(all->events, "storage.stalled", NULL, json_pack("{s:s}", "storage", st->name));
	events_emit(all->events, "storage.state", NULL,
		    json_pack("{s:s, s:s}", "storage", st->name, "state", storage_state_text(state)));
}

void storage_answered(struct storages *all, struct storage *st, enum err e)
{
	bool is_remote = st->path[0] != '/';

	if (!is_remote)
		storage_set_state(all, st, e == ERR_STORAGE_GONE ? STORAGE_STATE_GONE : STORAGE_OK);
	else if (!e && st->state != STORAGE_UNAVAILABLE)
		storage_set_state(all, st, STORAGE_OK);
}

void storage_count_io(struct storages *all, const json_t *body)
{
	const char *name;
	json_t *pair;

	json_object_foreach((json_t *)body, name, pair) {
		json_int_t r = json_integer_value(json_array_get(pair, 0)), w = json_integer_value(json_array_get(pair, 1));
		struct storage *st;
		if (r < 0 || w < 0 || storage_find(all, str_of(name), &st) != OK)
			continue;
		st->read_bytes += (uint64_t)r;
		st->written_bytes += (uint64_t)w;
	}
}

void storage_count_stage(struct storage *st, const char *stage, bool written, uint64_t bytes, int64_t ns)
{
	size_t i = 0;

	storage_speed_count(&st->speed, clock_mono_ms(), written, bytes, ns);
	st->io = st->io ? st->io : mem_zalloc(STORAGE_STAGES_MAX, sizeof *st->io);
	if (!st->io)
		return;
	while (i < STORAGE_STAGES_MAX && st->io[i].stage[0] && strcmp(st->io[i].stage, stage) != 0)
		i++;
	if (i == STORAGE_STAGES_MAX) /* more stages than there are: the last one takes them */
		i--;
	if (!st->io[i].stage[0])
		snprintf(st->io[i].stage, sizeof st->io[i].stage, "%s", stage);
	st->io[i].bytes[written] += bytes;
	st->io[i].ns[written] += ns;
}

FALLIBLE enum err storage_put_io(const struct storage *st, struct buf *out)
{
	static const char *const directions[] = { "read", "write" };

	buf_puts(out, "{\"stages\":[");
	for (const struct storage_io *io = st->io; io && io < st->io + STORAGE_STAGES_MAX && io->stage[0]; io++) {
		buf_json_member(out, io == st->io ? "{\"stage\":" : ",{\"stage\":", str_of(io->stage));
		for (int w = 0; w < 2; w++)
			if (io->bytes[w])
				buf_printf(out, ",\"%s\":{\"bytes\":%ju,\"seconds\":%.6f}", directions[w], (uintmax_t)io->bytes[w],
					   (double)io->ns[w] / 1e9);
		buf_putc(out, '}');
	}
	buf_puts(out, "],\"minutes\":");
	TRY(storage_speed_put(st->speed, clock_mono_ms(), clock_wall_ms(), out));
	buf_putc(out, '}');
	return buf_status(out);
}

FALLIBLE enum err storage_put(const struct storage *st, struct buf *out)
{
	char stamp[CLOCK_TEXT_MAX];
	const char *key;
	json_t *value;
	int64_t grown, grown_ms;

	buf_json_member(out, "{\"name\":", str_of(st->name));
	buf_json_member(out, ",\"path\":", str_of(st->path));
	buf_printf(out, ",\"adhoc\":%s,\"state\":\"%s\"", st->adhoc ? "true" : "false", storage_state_text(st->state));
	if (st->expires_ms)
		buf_printf(out, ",\"lease_expires_at\":\"%s\"", clock_text(clock_service_wall(st->expires_ms), stamp));
	if (st->problem) {
		CLEANUP(mem_free_ptr) char *problem = jtext_of(st->problem);
		NEED(problem, "cannot show a storage");
		buf_printf(out, ",\"problem\":%s", problem);
	}
	if (st->stalled_since_ms)
		buf_printf(out, ",\"stalled_since\":\"%s\"", clock_text(st->stalled_since_ms, stamp));
	if (st->probed_ms)
		buf_printf(out, ",\"probed_at\":\"%s\"", clock_text(st->probed_ms, stamp));
	json_object_foreach(st->probe, key, value) {
		char *text = jtext_of(value);
		NEED(text, "cannot show a storage");
		buf_putc(out, ',');
		buf_json_str(out, str_of(key));
		buf_putc(out, ':');
		buf_puts(out, text);
		mem_free(text);
	}
	if (storage_speed_growth(st->speed, clock_mono_ms(), &grown, &grown_ms))
		buf_printf(out, ",\"growth\":{\"bytes\":%jd,\"seconds\":%jd}", (intmax_t)grown, (intmax_t)(grown_ms / 1000));
	if (st->trash_seen)
		buf_printf(out, ",\"trash\":{\"checkpoints\":%ju,\"bytes\":%ju}", (uintmax_t)st->trash_count, (uintmax_t)st->trash_bytes);
	buf_putc(out, '}');
	return buf_status(out);
}

/* ---- start and reload ---- */

static FALLIBLE enum err take_config(struct storages *all, const struct config *c)
{
	for (uint32_t i = 0; i < c->storage.count; i++) {
		struct config_access access;
		struct str name;
		const char *dir;
		struct storage *st;
		json_t *options;
		TRY(config_storage(c->storage.items[i], &name, &dir));
		TRY(config_access_of(c, name, &access));
		if (storage_find(all, name, &st) == OK) {
			if (strcmp(st->path, dir) != 0)
				return ERR(CONFIG, "storage \"%s\" has another path now; that needs a restart", st->name);
			st->adhoc = false;
			st->expires_ms = 0;
		} else {
			TRY(storage_add(all, name, dir, &st));
		}
		st->file_mode = access.mode;
		st->file_gid = access.gid;
		TRY(config_s3_options(c, name, &options));
		json_decref(st->options);
		st->options = options;
	}
	return OK;
}

static enum err take_row(void *user, const struct journal_storage *row)
{
	struct storages *all = user;
	struct storage *st;

	if (storage_find(all, str_of(row->name), &st) == OK || strlen(row->name) > STORAGE_NAME_MAX)
		return OK; /* the configuration names it now */
	TRY(storage_add(all, str_of(row->name), row->path, &st));
	st->adhoc = true;
	st->uid = row->uid;
	/* The whole lease again, at least: the daemon was down, not who holds it. */
	uint64_t now = (uint64_t)clock_service_ms();
	st->expires_ms = (int64_t)num_min(num_max((uint64_t)row->expires_ms, now + STORAGE_LEASE_MS), now + STORAGE_LEASE_MAX_MS);
	return OK;
}

FALLIBLE enum err storages_new(const struct config *c, struct journal *j, struct events *ev, struct storages **out)
{
	struct storages *all = *out = mem_zalloc(1, sizeof *all);

	NEED(all, "cannot keep storages");
	*all = (struct storages){ .config = c, .journal = j, .events = ev };
	TRY(take_config(all, c));
	return journal_read_storages(j, take_row, all);
}

FALLIBLE enum err storages_reload(struct storages *all, const struct config *fresh)
{
	return take_config(all, fresh);
}

void storages_free(struct storages *all)
{
	if (!all)
		return;
	for (uint32_t i = 0; i < all->count; i++)
		free_one(all->items[i]);
	list_each(st, all->nodes)
		free_one(st);
	loop_timer_stop(&all->tick);
	mem_free(all);
}
