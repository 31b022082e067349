/* state_dict_lease.c: what happens when trainers fall silent.
 *
 * Per rank: its half-filled slots are dropped when its lease is over. When the leases of all ranks are over, the state dict is an
 * orphan: generations that not all ranks sealed are dropped; the newest whole one is saved, if the state dict says so, and else
 * kept for a while. An orphan without anything sealed is deleted. A rank that speaks again ends the orphanage. */
#include <stdio.h>

#include "base/buf.h"
#include "base/log.h"
#include "base/mem.h"
#include "server/config.h"
#include "server/job.h"
#include "server/state_dict_own.h"

enum { TICK_MS = 500, RETRY_MS = 15000 };

void state_dict_lease_touch(struct state_dict *sd, uint32_t rank)
{
	if (sd->lease_ms)
		sd->ranks[rank].expires_ms = clock_service_ms() + sd->lease_ms;
	if (sd->orphaned_ms) {
		struct journal_txn *t = journal_txn_new(sd->server->journal);
		sd->orphaned_ms = 0;
		sd->orphan_job[0] = '\0';
		state_dict_row(t, sd);
		journal_commit(sd->server->journal, t, NULL, NULL);
	}
}

void state_dict_lease_begin(struct state_dict *sd)
{
	for (uint32_t r = 0; sd->lease_ms && r < sd->world_size; r++)
		sd->ranks[r].expires_ms = clock_service_ms() + sd->lease_ms;
}

int64_t state_dict_lease_wall(const struct state_dict *sd, uint32_t rank)
{
	int64_t expires = sd->ranks[rank].expires_ms;

	return expires ? clock_service_wall(expires) : 0;
}

static void drop_open(struct state_dict *sd, uint32_t rank)
{
	for (uint32_t k = 0; k < sd->slot_count; k++) {
		struct slot *sl = state_dict_slot(sd, rank, k);
		if (sl->state == SLOT_OPEN && sl->uses == 0)
			state_dict_free_slot(sd, sl);
		else if (sl->state == SLOT_OPEN)
			state_dict_abandon_slot(sd, sl);
	}
}

static void drop_sealed_but(struct state_dict *sd, int64_t keep)
{
	for (uint32_t i = 0; i < state_dict_slots(sd); i++) {
		struct slot *sl = state_dict_nth(sd, i);
		if (sl->state == SLOT_SEALED && sl->generation != keep && sl->uses == 0)
			state_dict_free_slot(sd, sl);
	}
}

/* ---- on_owner_death ---- */

/* "run1/step-{generation}" with the number put in. */
static json_t *fill_name(const char *name, int64_t generation)
{
	static const char hole[] = "{generation}";
	struct buf b = BUF_INIT(8192);
	const char *p = name, *at;

	while ((at = strstr(p, hole))) {
		buf_put(&b, p, (size_t)(at - p));
		buf_printf(&b, "%jd", (intmax_t)generation);
		p = at + sizeof hole - 1;
	}
	buf_puts(&b, p);
	json_t *text = buf_status(&b) == OK ? json_stringn((const char *)b.p, b.len) : NULL;
	buf_free(&b);
	return text;
}

/* What was said about one generation when it was sealed; NULL: nothing. */
static const json_t *wish_of(const struct state_dict *sd, int64_t generation)
{
	char key[24];

	snprintf(key, sizeof key, "%jd", (intmax_t)generation);
	return json_object_get(json_object_get(sd->on_owner_death, "generations"), key);
}

FALLIBLE enum err state_dict_lease_wish(struct state_dict *sd, int64_t generation, const json_t *wish)
{
	uint64_t failures = mem_failures();
	char key[24];
	const char *old;
	json_t *value;
	void *next;

	if (!sd->on_owner_death)
		sd->on_owner_death = json_object();
	json_t *wishes = json_object_get(sd->on_owner_death, "generations");
	if (!wishes)
		json_object_set_new(sd->on_owner_death, "generations", wishes = json_object());
	json_object_foreach_safe(wishes, next, old, value) { /* of generations that nobody holds any more */
		bool held = false;
		for (uint32_t i = 0; i < state_dict_slots(sd) && !held; i++) {
			snprintf(key, sizeof key, "%jd", (intmax_t)state_dict_nth(sd, i)->generation);
			held = state_dict_nth(sd, i)->state != SLOT_FREE && strcmp(key, old) == 0;
		}
		if (!held)
			json_object_del(wishes, old);
	}
	snprintf(key, sizeof key, "%jd", (intmax_t)generation);
	json_object_set_new(wishes, key, json_deep_copy(wish));
	return mem_failures() == failures ? OK : ERR(NO_MEMORY, "cannot keep what is to become of a generation");
}

static json_t *make_spec(const struct state_dict *sd, int64_t generation)
{
	uint64_t failures = mem_failures();
	const json_t *wish = wish_of(sd, generation);
	const json_t *save = json_object_get(wish ? wish : sd->on_owner_death, "save");
	const char *name = json_string_value(json_object_get(save, "name"));
	json_t *target = json_deep_copy(save);
	json_t *options = json_object_get(save, "options") ? json_deep_copy(json_object_get(save, "options")) :
							     json_pack("{s:b}", "overwrite", 0);

	json_t *labels = json_object_get(save, "labels") ? json_deep_copy(json_object_get(save, "labels")) : json_object();

	json_object_del(target, "options");
	json_object_del(target, "labels");
	json_object_del(target, "hosts");
	if (!wish)
		json_object_set_new(target, "name", fill_name(name ? name : "", generation));
	if (!json_object_get(target, "format"))
		json_object_set_new(target, "format", json_string("dcp"));
	json_t *spec = json_pack("{s:s, s:{s:s, s:I}, s:o, s:o, s:o, s:[], s:[], s:[], s:[]}", "kind", "save", "source", "state_dict",
				 sd->name, "generation", (json_int_t)generation, "target", target, "options", options, "labels", labels,
				 "include", "exclude", "rename", "dtype");
	if (spec && json_object_get(save, "hosts")) /* the daemons of the others do the same, and they meet */
		json_object_set_new(spec, "hosts", json_deep_copy(json_object_get(save, "hosts")));
	if (mem_failures() != failures) { /* it might have another name, or other options */
		json_decref(spec);
		return NULL;
	}
	return spec;
}

static void on_save_asked(void *user, enum err e, const char *id, bool existing)
{
	struct state_dict *sd = user;

	(void)existing;
	sd->orphan_asking = false;
	if (!e)
		snprintf(sd->orphan_job, sizeof sd->orphan_job, "%s", id);
	else if (e == ERR_CHECKPOINT_EXISTS)
		snprintf(sd->orphan_job, sizeof sd->orphan_job, "exists"); /* its trainer had saved it before it died */
	else
		log_err("cannot save an orphaned state dict", "state_dict", sd->name, NULL);
	sd->orphan_retry_ms = clock_service_ms() + RETRY_MS;
	state_dict_unref(sd);
}

static void ask_save(struct state_dict *sd, int64_t generation)
{
	CLEANUP(json_decrefp) json_t *spec = make_spec(sd, generation);
	struct job_request rq = { .kind = JOB_SAVE, .spec = spec, .who = { .uid = sd->uid } };

	if (!spec)
		return;
	sd->orphan_asking = true;
	sd->refs++;
	log_info("saving what a dead trainer had sealed", "state_dict", sd->name, NULL);
	job_create(sd->server, &rq, on_save_asked, sd);
}

static void remove_orphan(struct state_dict *sd, const char *why)
{
	struct journal_txn *t = journal_txn_new(sd->server->journal);

	log_info("orphaned state dict dropped", "state_dict", sd->name, "why", why, NULL);
	journal_delete_state_dict(t, sd->name);
	journal_commit(sd->server->journal, t, NULL, NULL);
	state_dict_emit(sd, "dropped", sd->last_generation);
	state_dict_kill(sd);
}

/* true: it is gone. */
static bool tend_orphan(struct state_dict *sd, int64_t now)
{
	int64_t newest = state_dict_newest(sd);
	const json_t *wish = wish_of(sd, newest) ? wish_of(sd, newest) : sd->on_owner_death;
	enum job_state state;

	if (sd->uses || sd->orphan_asking)
		return false;
	drop_sealed_but(sd, newest);
	if (newest < 0) {
		remove_orphan(sd, "nothing sealed by all ranks");
		return true;
	}
	if (newest == sd->saved_generation || json_is_true(json_object_get(wish, "drop"))) {
		remove_orphan(sd, newest == sd->saved_generation ? "saved by a job" : "as asked");
		return true;
	}
	if (now - sd->orphan_since_ms > sd->server->config->keep_sealed_ms) {
		remove_orphan(sd, "kept long enough");
		return true;
	}
	if (!json_object_get(wish, "save"))
		return false;
	if (sd->orphan_job[0]) {
		bool known = job_state_of(sd->server, str_of(sd->orphan_job), &state) == OK;
		if (strcmp(sd->orphan_job, "exists") == 0 || (known && state == JOB_SUCCEEDED)) {
			remove_orphan(sd, "saved");
			return true;
		}
		if (!known || job_state_ended(state))
			sd->orphan_job[0] = '\0'; /* failed: once more, after a while */
	} else if (now >= sd->orphan_retry_ms && !sd->server->draining) {
		ask_save(sd, newest);
	}
	return false;
}

static void tend(struct state_dict *sd, int64_t now)
{
	bool all_over = true;

	if (!sd->lease_ms || sd->hidden)
		return;
	for (uint32_t r = 0; r < sd->world_size; r++) {
		if (sd->ranks[r].expires_ms > now) {
			all_over = false;
		} else if (sd->ranks[r].expires_ms) {
			sd->ranks[r].expires_ms = 0;
			drop_open(sd, r);
			state_dict_await_look(sd);
		}
	}
	if (all_over && !sd->orphaned_ms) {
		struct journal_txn *t = journal_txn_new(sd->server->journal);
		sd->orphaned_ms = clock_wall_ms();
		sd->orphan_since_ms = now;
		log_warn("all leases of a state dict are over", "state_dict", sd->name, NULL);
		state_dict_row(t, sd);
		journal_commit(sd->server->journal, t, NULL, NULL);
		state_dict_emit(sd, "orphaned", sd->last_generation);
	}
	if (sd->orphaned_ms)
		(void)tend_orphan(sd, now);
}

static void on_tick(void *user)
{
	struct server *s = user;
	struct state_dicts *all = s->state_dicts;
	int64_t now = clock_service_ms();

	for (struct table_node *n = table_next(&all->table, NULL), *next; n; n = next) {
		next = table_next(&all->table, n);
		tend((struct state_dict *)n, now);
	}
}

FALLIBLE enum err state_dict_lease_start(struct server *s)
{
	return loop_every(s->loop, TICK_MS, on_tick, s, &s->state_dicts->tick);
}
