/* state_dict_update.c: subscribers are brought to their publication's newest version, one job each: a redistribute with `delta`, or a load
 * with `delta` if the publication is another node's (state_dict_remote.c).
 *
 * There is no queue of versions: whenever something has happened to a state dict or a job, each subscriber that is idle, and whose
 * ranks have all taken what they have, is compared with its publication. So one that is slow skips to the newest, and one that comes
 * late begins there. The state dicts themselves are the record; after a restart the journal's jobs go on, and what is under way is
 * found by its target being busy. This stands above jobs, since an update is one. */
#include <stdio.h>

#include "base/jval.h"
#include "base/log.h"
#include "base/mem.h"
#include "server/errdoc.h"
#include "server/events.h"
#include "server/job.h"
#include "server/metrics.h"
#include "server/parts.h"
#include "server/service_clock.h"
#include "server/state_dict_impl.h"
#include "spec/spec.h"

enum { TICK_MS = 1000, RETRY_MS = 1000 };

/* The subscriber's rules, but for the layout: of a job the same words. */
static json_t *with_rules(const json_t *subscribe, json_t *request)
{
	static const char *const rules[] = { "include", "exclude", "rename", "dtype" };

	for (size_t i = 0; request && i < sizeof rules / sizeof *rules; i++) {
		json_t *rule = json_object_get(subscribe, rules[i]);
		if (!rule || json_object_set(request, rules[i], rule) == 0)
			continue;
		json_decref(request);
		request = NULL;
	}
	return request;
}

/* Of a publication on another node: the version is named, because by the time of a retry it may be gone. */
static json_t *request_from_node(const json_t *subscribe, const char *subscriber, json_int_t world_size, int64_t generation, json_t *layout)
{
	const char *publication = json_string_value(json_object_get(subscribe, "publication"));

	return json_pack("{s:s, s:{s:s, s:O, s:I}, s:{s:s, s:I, s:o}, s:b, s:{s:i}, s:{s:s, s:s}}", "kind", "load", "source", "state_dict",
			 publication, "node", json_object_get(subscribe, "node"), "generation", (json_int_t)generation, "target",
			 "state_dict", subscriber, "world_size", world_size, "layout", layout, "delta", 1, "options", "retries", 0,
			 "labels", "publication", publication, "subscriber", subscriber);
}

json_t *state_dict_update_request(const json_t *subscribe, const char *subscriber, json_int_t world_size, int64_t generation)
{
	const char *publication = json_string_value(json_object_get(subscribe, "publication"));
	const json_t *rules = json_object_get(subscribe, "layout");
	json_t *layout = rules ? json_deep_copy(rules) : json_array();

	if (json_object_get(subscribe, "node"))
		return with_rules(subscribe, request_from_node(subscribe, subscriber, world_size, generation, layout));
	return with_rules(subscribe, json_pack("{s:s, s:{s:s}, s:{s:s, s:I}, s:o, s:b, s:b, s:{s:s, s:s}}", "kind", "redistribute",
					       "source", "state_dict", publication, "target", "state_dict", subscriber, "world_size",
					       world_size, "layout", layout, "delta", 1, "type_check", 0, "labels", "publication",
					       publication, "subscriber", subscriber));
}

/* ---- one update ---- */

/* Takes `problem`. */
static void update_failed(struct state_dict *sd, json_t *problem, int64_t generation)
{
	struct state_dict_feed *f = sd->feed;

	f->stopped = OK;
	json_decref(f->problem);
	f->problem = problem;
	f->failed_generation = generation;
	f->retry_ms = clock_service_ms() + RETRY_MS;
	state_dict_emit(sd, "update_failed", generation);
}

void state_dict_update_stopped(struct state_dict *sd, enum err why)
{
	struct state_dict_feed *f = sd->feed;
	int64_t mine = state_dict_newest(sd), newest = state_dict_published(sd), last = newest > mine ? newest : mine;

	if (f->stopped == why)
		return;
	update_failed(sd, errdoc_sure(why), last < INT64_MAX ? last + 1 : last);
	f->stopped = why;
}

void state_dict_update_goes_on(struct state_dict *sd)
{
	struct state_dict_feed *f = sd->feed;

	if (!f->stopped)
		return;
	f->stopped = OK;
	json_decref(f->problem);
	f->problem = NULL;
	f->failed_generation = -1;
	f->retry_ms = 0;
}

struct asked {
	struct state_dict *sd;
	int64_t generation;
};

static void on_asked(void *user, enum err e, const char *id, bool)
{
	struct asked *a = user;
	struct state_dict_feed *f = a->sd->feed;

	f->asking = false;
	f->retry_ms = clock_service_ms() + RETRY_MS;
	if (!e)
		snprintf(f->job, sizeof f->job, "%s", id);
	else if (e != ERR_TARGET_BUSY && e != ERR_NOT_SEALED && e != ERR_DRAINING && e != ERR_CLUSTER_UNAVAILABLE &&
		 !a->sd->dead) /* else it comes by itself */
		update_failed(a->sd, errdoc_sure(e), a->generation);
	state_dict_unref(a->sd);
	mem_free(a);
}

static void ask(struct server *s, struct state_dict *sd, int64_t generation)
{
	const json_t *wish = json_object_get(sd->feed->role, "subscribe");
	CLEANUP(json_decrefp) json_t *doc = state_dict_update_request(wish, sd->name, sd->world_size, generation);
	CLEANUP(spec_free) struct spec spec = { 0 };
	struct job_request rq = { .kind = sd->feed->node ? JOB_LOAD : JOB_REDISTRIBUTE, .spec = doc, .who = principal_of(sd->uid) };
	enum err e = doc ? spec_read(doc, &spec) : ERR(NO_MEMORY, "cannot ask for an update");

	if (e) {
		update_failed(sd, errdoc_sure(e), generation);
		return;
	}
	struct asked *a = mem_sure(sizeof *a);
	*a = (struct asked){ sd, generation };
	sd->feed->asking = true;
	sd->refs++;
	job_create(s, &rq, on_asked, a);
}

static void look(struct server *s, struct state_dict *sd, int64_t now)
{
	struct state_dict_feed *f = sd->feed;
	const struct principal who = principal_of(sd->uid);
	int64_t mine = state_dict_newest(sd);

	if (f->asking || f->job[0] || sd->orphaned_ms || sd->hidden)
		return;
	const struct state_dict *pub = state_dict_publication_of(sd);
	if (pub && !state_dict_may_read(&who, pub)) {
		state_dict_update_stopped(sd, ERR(FORBIDDEN, "state dict \"%s\" belongs to uid %u, which has not named uid %u among its "
						  "readers", pub->name, pub->uid, sd->uid));
		return;
	}
	if (!f->node)
		state_dict_update_goes_on(sd);
	if (f->stopped || now < f->retry_ms)
		return;
	int64_t newest = state_dict_published(sd);
	if (newest <= mine || (mine >= 0 && state_dict_feed_taken(sd) < mine))
		return;
	if (newest == f->failed_generation && !json_is_true(json_object_get(f->problem, "retryable")))
		return;
	ask(s, sd, newest);
}

static void look_at_all(void *user)
{
	struct server *s = user;
	struct state_dicts *all = s->state_dicts;
	int64_t now = clock_service_ms();
	struct state_dict *sd;

	state_dict_feed_look(all);
	if (!all->subscribers || s->draining)
		return;
	state_dict_remote_goodbyes(s);
	map_each(&all->table, sd) {
		if (!state_dict_subscribes(sd))
			continue;
		if (sd->feed->node)
			state_dict_remote_look(s, sd);
		look(s, sd, now);
	}
}

void state_dict_update_ended(struct server *s, const struct state_dict_updated *u)
{
	struct state_dict *sd = map_object(&s->state_dicts->table, u->name);

	if (!sd || !state_dict_subscribes(sd))
		return;
	struct state_dict_feed *f = sd->feed;
	f->job[0] = '\0';
	f->retry_ms = 0;
	if (!u->succeeded) {
		json_t *why = u->error ? json_deep_copy(u->error) : json_pack("{s:s, s:s}", "code", "job_cancelled", "detail",
									      "the update was cancelled");
		update_failed(sd, why, u->generation);
		return;
	}
	json_decref(f->problem);
	f->problem = NULL;
	f->failed_generation = -1;
	f->updates++;
	f->changed_bytes = (uint64_t)jval_int(u->result, "changed_bytes");
	f->kept_bytes = (uint64_t)jval_int(u->result, "kept_bytes");
	metrics_add(s->metrics, "dcpd_update_bytes_total", "what=\"changed\"", (double)f->changed_bytes);
	metrics_add(s->metrics, "dcpd_update_bytes_total", "what=\"kept\"", (double)f->kept_bytes);
}

FALLIBLE enum err state_dict_updates_start(struct server *s)
{
	TRY(events_listen(s->events, look_at_all, s, &s->state_dicts->listener));
	return loop_every(s->loop, TICK_MS, look_at_all, s, &s->state_dicts->update_tick);
}

/* ---- as the API shows them ---- */

static void put_subscribers(const struct state_dicts *all, struct state_dict *pub, struct buf *out)
{
	const char *comma = "";
	struct state_dict *sd;

	buf_puts(out, ",\"subscribers\":[");
	map_each(&all->table, sd) {
		if (!state_dict_subscribes(sd) || sd->hidden || state_dict_publication_of(sd) != pub)
			continue;
		buf_puts(out, comma);
		state_dict_put_head(sd, out);
		buf_puts(out, "}");
		comma = ",";
	}
	state_dict_put_guests(pub, comma, out);
	buf_puts(out, "]}");
}

FALLIBLE enum err state_dict_publications(struct state_dicts *all, const struct principal *who, struct str name, struct buf *out)
{
	const char *comma = "";
	struct state_dict *sd;

	if (name.n) {
		TRY(state_dict_find_to_read(all, who, name, &sd));
		if (!state_dict_publishes(sd))
			return ERR(NOT_FOUND, "state dict \"%s\" publishes nothing", sd->name);
		state_dict_put_head(sd, out);
		put_subscribers(all, sd, out);
		return buf_status(out);
	}
	buf_puts(out, "{\"publications\":[");
	map_each(&all->table, sd) {
		if (!state_dict_publishes(sd) || sd->hidden || !state_dict_may_read(who, sd))
			continue;
		buf_puts(out, comma);
		state_dict_put_head(sd, out);
		put_subscribers(all, sd, out);
		comma = ",";
	}
	buf_puts(out, "]}");
	return buf_status(out);
}
