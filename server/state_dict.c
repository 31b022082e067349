/* state_dict.c: see state_dict.h. State dicts are made, deleted, and taken up from the journal. Below it, from the bottom: records
 * (state_dict_record.c), whose segments are whose (_owner), space (_space), images (_look), the life of a slot (_slot), what jobs do
 * (_use, _await, _make), leases (_lease). */
#include "server/state_dict.h"

#include <stdio.h>
#include <unistd.h>

#include "base/jtext.h"
#include "base/log.h"
#include "base/mem.h"
#include "server/service_clock.h"
#include "server/config.h"
#include "server/events.h"
#include "server/state_dict_impl.h"

/* ---- making ---- */

struct creation {
	struct state_dicts *all;
	state_dict_created_fn fn;
	void *user;
	char name[STATE_DICT_NAME_MAX + 1];
	bool existing;
	struct state_dict *made;        /* with a ref; NULL: none was made */
};

static void on_created(void *user, enum err e)
{
	struct creation *c = user;
	struct state_dict *sd = c->made;
	struct err_info info = *err_last();

	if (sd && e && !sd->dead && !sd->uses)
		state_dict_kill(sd);
	else if (sd && !e)
		state_dict_emit(sd, "created", -1);
	if (sd)
		state_dict_unref(sd);
	err_restore(&info);
	c->fn(c->user, e, c->name, c->existing);
	mem_free(c);
}

static FALLIBLE enum err check_name(struct str name)
{
	if (name.n == 0 || name.n > STATE_DICT_NAME_MAX || !str_utf8(name) || name.p[0] == '.' || name.p[0] == '-')
		return ERR(NAME_INVALID, "a state dict's name has 1 to %d bytes of UTF-8 and does not begin with . or -",
			   STATE_DICT_NAME_MAX);
	for (size_t i = 0; i < name.n; i++)
		if ((unsigned char)name.p[i] < 0x20 || name.p[i] == 0x7f || name.p[i] == '/' || name.p[i] == ':')
			return ERR(NAME_INVALID, "a state dict's name has no /, : or control characters");
	return OK;
}

static FALLIBLE enum err check_role(struct state_dicts *s, const struct state_dict_request *rq)
{
	const char *publication = json_string_value(json_object_get(json_object_get(rq->role, "subscribe"), "publication"));
	struct state_dict *sd;
	uint32_t n = 0;

	if (json_object_get(rq->role, "publish") && rq->slots == 1)
		return ERR(VALIDATION_FAILED, "a publication has at least 2 slots: its newest version stays while the next one is written");
	if (!publication)
		return OK;
	map_each(&s->table, sd)
		n += state_dict_subscribes(sd) && strcmp(sd->feed->publication, publication) == 0;
	if (n >= STATE_DICT_SUBSCRIBERS_MAX)
		return ERR(LIMIT_EXCEEDED, "publication \"%s\" has %u subscribers already", publication, n);
	return OK;
}

static FALLIBLE enum err check_request(struct state_dicts *s, const struct state_dict_request *rq)
{
	if (*s->parts.draining)
		return ERR(DRAINING, "the daemon is shutting down");
	TRY(check_name(rq->name));
	if (rq->world_size < 1 || rq->world_size > STATE_DICT_WORLD_MAX)
		return ERR(VALIDATION_FAILED, "world_size must be from 1 to %d", STATE_DICT_WORLD_MAX);
	if (rq->slots < 0 || rq->slots > STATE_DICT_SLOTS_MAX)
		return ERR(VALIDATION_FAILED, "slots must be from 1 to %d", STATE_DICT_SLOTS_MAX);
	if (rq->lease_ms < 0 || rq->lease_ms > 86400000)
		return ERR(VALIDATION_FAILED, "a lease lasts at most a day");
	return check_role(s, rq);
}

static FALLIBLE enum err seen_before(struct state_dicts *s, const struct state_dict_request *rq, bool *seen_out)
{
	struct journal_key key = { .scope = "state_dict", .uid = rq->who.uid, .key = rq->idem.key };
	bool found = false;

	*seen_out = false;
	if (rq->idem.key.n == 0)
		return OK;
	TRY(journal_read_key(s->parts.journal, &key, &found));
	if (!found)
		return OK;
	if (key.digest != journal_digest(rq->idem.body))
		return ERR(IDEMPOTENCY_MISMATCH, "the key was used to make state dict \"%s\"", key.resource);
	*seen_out = true;
	return OK;
}

static FALLIBLE enum err create(struct state_dicts *s, const struct state_dict_request *rq, struct creation *c, struct journal_txn **txn)
{
	struct state_dict *sd;

	TRY(check_request(s, rq));
	memcpy(c->name, rq->name.p, rq->name.n);
	TRY(seen_before(s, rq, &c->existing));
	if (c->existing)
		return OK;
	if (state_dict_exists(s, rq->name))
		return ERR(STATE_DICT_EXISTS, "state dict \"%s\" exists", c->name);
	TRY(state_dict_alloc(s, rq->name, (uint32_t)rq->world_size, rq->slots ? (uint32_t)rq->slots : 2, rq->who.uid, &sd));
	c->made = sd;
	sd->refs++;
	sd->lease_ms = rq->lease_ms ? rq->lease_ms : s->parts.config->lease_ms;
	sd->on_owner_death = rq->on_owner_death ? json_deep_copy(rq->on_owner_death) : NULL;
	if (rq->on_owner_death && !sd->on_owner_death)
		return ERR(NO_MEMORY, "cannot make a state dict");
	if (rq->role)
		TRY(state_dict_feed_new(sd, rq->role));
	state_dict_lease_begin(sd);
	*txn = journal_txn_new(s->parts.journal);
	state_dict_row(*txn, sd);
	if (rq->idem.key.n) {
		struct journal_key key = { .scope = "state_dict", .uid = rq->who.uid, .key = rq->idem.key,
					   .digest = journal_digest(rq->idem.body), .created_ms = clock_service_ms() };
		memcpy(key.resource, sd->name, sizeof sd->name);
		journal_put_key(*txn, &key);
	}
	return OK;
}

void state_dict_create(struct state_dicts *s, const struct state_dict_request *rq, state_dict_created_fn fn, void *user)
{
	struct creation *c = mem_sure(sizeof *c);
	struct journal_txn *txn = NULL;

	*c = (struct creation){ .all = s, .fn = fn, .user = user };
	enum err e = create(s, rq, c, &txn);
	if (txn)
		journal_commit(s->parts.journal, txn, on_created, c);
	else
		loop_later(s->parts.loop, on_created, c, e);
}

static bool only_awaited(const struct state_dict *sd)
{
	for (const struct state_dict_use *u = sd->uses; u; u = u->next)
		if (!state_dict_await_uses(sd, u))
			return false;
	return true;
}

void state_dict_delete(struct state_dicts *s, const struct principal *who, struct str name, done_fn fn, void *user)
{
	struct state_dict *sd;
	enum err e = state_dict_find(s, who, name, &sd);

	if (!e && only_awaited(sd)) /* who deletes it will not seal it: it is free as soon as the jobs have let go */
		state_dict_await_deleted(sd);
	if (!e && sd->uses)
		e = ERR(STATE_DICT_BUSY, "state dict \"%s\" is used by %s", sd->name,
			sd->uses->job[0] ? sd->uses->job : "a question");
	if (e) {
		loop_later(s->parts.loop, fn, user, e);
		return;
	}
	struct journal_txn *t = journal_txn_new(s->parts.journal);
	journal_delete_state_dict(t, sd->name);
	journal_commit(s->parts.journal, t, fn, user);
	state_dict_emit(sd, "deleted", -1);
	state_dict_kill(sd);
}

/* ---- start and end ---- */

static enum err take_row(void *user, const struct journal_state_dict *row)
{
	struct state_dicts *s = user;
	struct state_dict *sd;

	if (strlen(row->name) > STATE_DICT_NAME_MAX || row->world_size < 1 || row->world_size > STATE_DICT_WORLD_MAX ||
	    row->slots < 1 || row->slots > STATE_DICT_SLOTS_MAX)
		return ERR(JOURNAL, "the journal holds a state dict that cannot be");
	TRY(state_dict_alloc(s, str_of(row->name), row->world_size, row->slots, row->uid, &sd));
	sd->lease_ms = row->lease_ms;
	sd->created_ms = row->created_ms;
	sd->orphaned_ms = row->orphaned_ms;
	sd->orphan_since_ms = row->orphan_since_ms;
	sd->last_generation = row->last_generation;
	enum err e = row->on_owner_death.n ? jtext_parse(row->on_owner_death, 0, &sd->on_owner_death) : OK;
	if (e == ERR_NO_MEMORY)
		return e;
	if (e)
		log_err("the journal's wishes about a state dict cannot be read", "state_dict", sd->name, NULL);
	CLEANUP(json_decrefp) json_t *role = NULL;
	e = row->role.n ? jtext_parse(row->role, 0, &role) : OK;
	if (!e && json_object_get(role, "replica"))
		e = state_dict_replica_take(sd, json_incref(role));
	else if (!e && role)
		e = state_dict_feed_new(sd, role);
	if (e)
		return e;
	if (!sd->orphaned_ms)
		state_dict_lease_begin(sd);
	return OK;
}

/* A segment that is gone or is not as it was costs its slot only. */
static enum err take_slot(void *user, const struct journal_slot *row)
{
	struct state_dicts *s = user;
	struct state_dict *sd = map_object(&s->table, str_of(row->name));
	int fd;

	if (!sd || row->rank >= sd->world_size || row->slot >= STATE_DICT_SLOTS_MAX || strlen(row->segment) >= SEG_NAME_MAX ||
	    row->bytes == 0)
		return OK;
	while (sd->slot_count <= row->slot) /* added by jobs */
		TRY(state_dict_add_slots(sd));
	enum err e = seg_open(row->segment, row->bytes, &fd);
	if (!e && (e = state_dict_owner_take(s, row->segment, fd)))
		close(fd);
	if (e) {
		if (row->state != SLOT_FREE) /* a free one may have been dropped to make room */
			log_err("a segment cannot be taken up again", "state_dict", sd->name, "segment", row->segment, NULL);
		return OK;
	}
	struct slot *sl = state_dict_slot(sd, row->rank, row->slot);
	sl->fd = fd;
	sl->bytes = row->bytes;
	sl->image_bytes = row->image_bytes;
	sl->generation = row->generation;
	sl->made = row->state == SLOT_MADE || sd->lease_ms == 0; /* without a lease: all it has was made by jobs */
	if (row->state == SLOT_MADE || row->state == SLOT_SEALED)
		slot_take_up(sl, SLOT_SEALED);
	else if (row->state == SLOT_OPEN || row->state == SLOT_LEAVING)
		slot_take_up(sl, (enum slot_state)row->state);
	snprintf(sl->segment, sizeof sl->segment, "%s", row->segment);
	if (sl->state != SLOT_FREE && sl->state != SLOT_OPEN && sl->generation > sd->ranks[row->rank].last_generation)
		sd->ranks[row->rank].last_generation = sl->generation;
	s->used_bytes += sl->bytes;
	return OK;
}

/* Slots that were released while a job of the previous daemon was reading them, or while the journal could not be written. They become free
 * unless a job holds them. */
void state_dicts_settle(struct state_dicts *s)
{
	struct state_dict *sd;

	map_each(&s->table, sd) {
		for (uint32_t i = 0; i < state_dict_slots(sd); i++)
			if (state_dict_nth(sd, i)->state == SLOT_LEAVING && state_dict_nth(sd, i)->uses == 0)
				state_dict_free_slot(sd, state_dict_nth(sd, i));
	}
}

FALLIBLE enum err state_dicts_new(const struct state_dict_parts *parts, struct state_dicts **out)
{
	struct state_dicts *s = *out = mem_zalloc(1, sizeof *s);

	NEED(s, "cannot keep state dicts");
	s->parts = *parts;
	s->watch = &state_dict_await_watch;
	s->yield = state_dict_readings_yield;
	TRY(state_dict_owner_new(s));
	TRY(journal_read_state_dicts(parts->journal, take_row, s));
	TRY(journal_read_slots(parts->journal, take_slot, s));
	TRY(state_dict_owner_sweep(s));
	TRY(state_dict_space_new(s));
	state_dict_replicas_recall(s);
	state_dict_look_at_all(s);
	return state_dict_lease_start(s);
}

void state_dicts_free(struct state_dicts *all)
{
	struct state_dict *sd;

	if (!all)
		return;
	state_dict_space_free(all);
	loop_timer_stop(&all->tick);
	loop_timer_stop(&all->orphan_tick);
	state_dict_readings_free(all);
	loop_timer_stop(&all->update_tick);
	events_unlisten(all->parts.events, &all->listener);
	state_dict_feed_end(all);
	map_each(&all->table, sd) {
		state_dict_fail_waiters(sd);
		while (sd->uses)
			state_dict_unuse(&(struct state_dict_use *){ sd->uses });
		state_dict_free(sd);
	}
	map_free(&all->table);
	mem_free(all);
}
