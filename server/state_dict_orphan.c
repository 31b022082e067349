/* state_dict_orphan.c: state dicts whose trainer is gone: the leases of all ranks are over (state_dict_lease.c).
 *
 * Generations that not all ranks sealed are dropped; the newest whole one is saved, if the state dict says so, and else kept for a while.
 * A generation that is saved is released, and its bytes stay for the same while: the trainer that starts again loads them from there
 * (state_dict_memory.c), unless somebody needs the memory before. An orphan without anything of either kind is deleted. This stands above
 * jobs, since a save is one. */
#include <stdio.h>

#include "base/buf.h"
#include "base/log.h"
#include "base/mem.h"
#include "server/service_clock.h"
#include "server/config.h"
#include "server/job.h"
#include "server/parts.h"
#include "server/state_dict_impl.h"

enum { TICK_MS = 500, RETRY_MS = 15000 };

static void drop_sealed_but(struct state_dict *sd, int64_t keep)
{
	for (uint32_t i = 0; i < state_dict_slots(sd); i++) {
		struct slot *sl = state_dict_nth(sd, i);
		if (sl->state == SLOT_SEALED && sl->generation != keep && sl->uses == 0)
			state_dict_free_slot(sd, sl);
	}
}

/* "run1/step-{generation}" with the number put in. */
static json_t *fill_name(const char *name, int64_t generation)
{
	static const char hole[] = "{generation}";
	CLEANUP(buf_free) struct buf b = BUF_INIT(8192);
	const char *p = name, *at;

	while ((at = strstr(p, hole))) {
		buf_put(&b, p, (size_t)(at - p));
		buf_printf(&b, "%jd", (intmax_t)generation);
		p = at + sizeof hole - 1;
	}
	buf_puts(&b, p);
	json_t *text = buf_status(&b) == OK ? json_stringn((const char *)b.p, b.len) : NULL;
	return text;
}

static json_t *make_spec(const struct state_dict *sd, int64_t generation)
{
	uint64_t failures = mem_failures();
	const json_t *wish = state_dict_wish_of(sd, generation);
	const json_t *save = json_object_get(wish ? wish : sd->on_owner_death, "save");
	const char *name = json_string_value(json_object_get(save, "name"));
	json_t *target = json_deep_copy(save);
	json_t *options = json_object_get(save, "options") ? json_deep_copy(json_object_get(save, "options")) :
							     json_pack("{s:b}", "overwrite", 0);

	json_t *labels = json_object_get(save, "labels") ? json_deep_copy(json_object_get(save, "labels")) : json_object();

	json_object_del(target, "options");
	json_object_del(target, "labels");
	json_object_del(target, "metrics");
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
	if (spec && json_object_get(save, "metrics"))
		json_object_set_new(spec, "metrics", json_deep_copy(json_object_get(save, "metrics")));
	if (mem_failures() != failures) { /* it might have another name, or other options */
		json_decref(spec);
		return NULL;
	}
	return spec;
}

static void on_save_asked(void *user, enum err e, const char *id, bool)
{
	struct state_dict *sd = user;

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

static void ask_save(struct server *s, struct state_dict *sd, int64_t generation)
{
	CLEANUP(json_decrefp) json_t *spec = make_spec(sd, generation);
	struct job_request rq = { .kind = JOB_SAVE, .spec = spec, .who = { .uid = sd->uid } };

	if (!spec)
		return;
	sd->orphan_asking = true;
	sd->refs++;
	log_info("saving what a dead trainer had sealed", "state_dict", sd->name, NULL);
	job_create(s, &rq, on_save_asked, sd);
}

static void remove_orphan(struct state_dict *sd, const char *why)
{
	struct journal_txn *t = journal_txn_new(sd->all->parts.journal);

	log_info("orphaned state dict dropped", "state_dict", sd->name, "why", why, NULL);
	journal_delete_state_dict(t, sd->name);
	journal_commit(sd->all->parts.journal, t, NULL, NULL);
	state_dict_emit(sd, "dropped", sd->last_generation);
	state_dict_kill(sd);
}

/* Leaves of a state dict, all of whose generations are saved or torn, the segments of the newest checkpoint. false: there are none, or they
 * were kept long enough. */
static bool keep_memory(const struct server *s, struct state_dict *sd, int64_t now)
{
	int64_t newest = state_dict_memory_newest(sd);
	bool wanted = !json_is_true(json_object_get(sd->on_owner_death, "drop"));

	if (newest < 0 || !wanted || now - sd->orphan_since_ms > s->config->keep_sealed_ms)
		return false;
	drop_sealed_but(sd, -1);
	for (uint32_t i = 0; i < state_dict_slots(sd); i++) {
		struct slot *sl = state_dict_nth(sd, i);
		if (sl->state == SLOT_FREE && sl->generation != newest && sl->uses == 0)
			state_dict_drop_segment(sd, sl);
	}
	return true;
}

static void tend_orphan(struct server *s, struct state_dict *sd, int64_t now)
{
	int64_t newest = state_dict_newest(sd);
	const json_t *wish = state_dict_wish_of(sd, newest) ? state_dict_wish_of(sd, newest) : sd->on_owner_death;
	enum job_state state;

	if (sd->uses || sd->orphan_asking)
		return;
	drop_sealed_but(sd, newest);
	if (newest < 0 || newest == sd->saved_generation) {
		if (!keep_memory(s, sd, now))
			remove_orphan(sd, newest < 0 ? "nothing sealed by all ranks" : "saved by a job");
		return;
	}
	if (json_is_true(json_object_get(wish, "drop"))) {
		remove_orphan(sd, "as asked");
		return;
	}
	if (now - sd->orphan_since_ms > s->config->keep_sealed_ms) {
		remove_orphan(sd, "kept long enough");
		return;
	}
	if (!json_object_get(wish, "save"))
		return;
	if (sd->orphan_job[0]) {
		bool known = job_state_of(s, str_of(sd->orphan_job), &state) == OK;
		if (strcmp(sd->orphan_job, "exists") == 0 || (known && state == JOB_SUCCEEDED)) {
			remove_orphan(sd, "saved");
			return;
		}
		if (!known || job_state_ended(state))
			sd->orphan_job[0] = '\0'; /* failed: once more, after a while */
	} else if (now >= sd->orphan_retry_ms && !s->draining) {
		ask_save(s, sd, newest);
	}
}

static void on_tick(void *user)
{
	struct server *s = user;
	struct state_dicts *all = s->state_dicts;
	int64_t now = clock_service_ms();
	struct state_dict *sd;

	map_each(&all->table, sd) {
		if (sd->lease_ms && !sd->hidden && sd->orphaned_ms)
			tend_orphan(s, sd, now);
	}
}

FALLIBLE enum err state_dict_orphans_start(struct server *s)
{
	return loop_every(s->loop, TICK_MS, on_tick, s, &s->state_dicts->orphan_tick);
}
