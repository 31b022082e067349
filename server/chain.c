/* chain.c: see chain.h: executions: step after step, each a job. */
#include "server/chain_impl.h"

#include <stdio.h>
#include <unistd.h>

#include "base/jtext.h"
#include "base/jval.h"
#include "base/log.h"
#include "base/mem.h"
#include "base/num.h"
#include "server/chain_steps.h"
#include "server/errdoc.h"
#include "server/job.h"
#include "server/lookup.h"
#include "server/parts.h"
#include "server/service_clock.h"
#include "server/storage.h"
#include "server/webhook.h"

enum { RETRY_MS = 1000, RETRY_MOST_MS = 60000, REFUSED_FOR_MS = 3600000, ABOUT_MAX = 4096 + 64 };

static void pump(struct chain *c);
static void next_step(struct execution *x);

static json_t *step_of(const struct execution *x)
{
	return json_array_get(json_object_get(x->doc, "steps"), (size_t)jval_int(x->doc, "step"));
}

static void execution_free(struct execution *x)
{
	loop_timer_stop(&x->timer);
	json_decref(x->doc);
	mem_free(x);
}

void chain_drop(struct follower *f)
{
	struct chain *c = chain_of(f);
	struct execution *x = c->running;

	c->is_gone = true;
	if (x && x->is_pending) /* its callback frees both */
		return;
	if (x)
		execution_free(x);
	follower_free(f);
}

/* The end of something that was waited for. False: the chain was removed meanwhile, and both are gone. */
static bool came(struct execution *x)
{
	struct chain *c = x->chain;

	x->is_pending = false;
	if (!c->is_gone)
		return true;
	execution_free(x);
	follower_free(&c->base);
	return false;
}

/* ---- into the journal ---- */

/* "main:run1/step-100" */
static void name_about(const json_t *doc, char out[ABOUT_MAX])
{
	snprintf(out, ABOUT_MAX, "%s:%s", jval_text(doc, "storage"), jval_text(doc, "name"));
}

static void put_task(struct journal_txn *t, const struct chain *c, const char *id, enum task_state state, const json_t *doc,
		     const char *text)
{
	char about[ABOUT_MAX];

	name_about(doc, about);
	journal_put_task(t, &(struct journal_task){ .kind = JOURNAL_CHAIN, .follower = c->base.name, .id = id, .state = state,
						    .about = about, .doc = str_of(text) });
}

static struct journal_txn *row_of(struct execution *x, enum task_state state)
{
	struct journal_txn *t = journal_txn_new(x->chain->base.all->server->journal);
	CLEANUP(mem_free_ptr) char *text = jtext_of(x->doc);

	if (text)
		put_task(t, x->chain, x->id, state, x->doc, text);
	else
		journal_txn_fail(t, ERR(NO_MEMORY, "cannot keep an execution"));
	return t;
}

/* Nobody waits for the row: the steps from there on find what was done already. */
static void note_progress(struct execution *x)
{
	journal_commit(x->chain->base.all->server->journal, row_of(x, TASK_RUNNING), NULL, NULL);
}

static void on_finished(void *user, enum err e)
{
	struct execution *x = user;
	struct chain *c = x->chain;
	struct server *s = c->base.all->server;

	if (e)
		log_err("the end of a chain's execution cannot be journalled", "chain", c->base.name, "execution", x->id, NULL);
	if (!came(x))
		return;
	c->running = NULL;
	execution_free(x);
	webhooks_wake(s);
	pump(c);
}

static json_t *parent_of(const struct execution *x)
{
	return json_pack("{s:s, s:s, s:I, s:I}", "chain", x->chain->base.name, "execution", x->id, "step", jval_int(x->doc, "step"),
			 "depth", jval_int(x->doc, "depth"));
}

/* error: taken; NULL: it has gone well. */
static void finish(struct execution *x, enum task_state state, json_t *error)
{
	struct chain *c = x->chain;
	struct server *s = c->base.all->server;
	CLEANUP(json_decrefp) json_t *parent = parent_of(x);
	enum event_told what = state == TASK_FAILED ? TOLD_CHAIN_FAILED : TOLD_CHAIN_DONE;
	char at[CLOCK_TEXT_MAX];

	json_object_set_new(x->doc, "finished_at", json_string(clock_text(clock_wall_ms(), at)));
	if (error)
		json_object_set(x->doc, "error", error);
	struct journal_txn *t = row_of(x, state);
	journal_prune_tasks(t, JOURNAL_CHAIN, c->base.name, FOLLOWER_KEPT);
	const struct happening h = { .what = what, .storage = jval_text(x->doc, "storage"), .name = jval_text(x->doc, "name"),
				     .job = x->job, .error = error, .parent = parent };
	if (state != TASK_SKIPPED) {
		webhooks_note(s, t, &h);
		events_emit(s->events, event_told_names[what], NULL,
			    json_pack("{s:s, s:s, s:s, s:s, s:o?}", "chain", c->base.name, "execution", x->id, "storage", h.storage, "name",
				      h.name, "error", error ? errdoc_brief(error) : NULL));
	}
	log_info("chain: an execution has ended", "chain", c->base.name, "execution", x->id, "state", follower_task_states[state], NULL);
	json_decref(error);
	x->is_pending = true;
	journal_txn_wait(t, NULL);
	journal_commit(s->journal, t, on_finished, x);
}

/* ---- a step's job ---- */

static void on_time(void *user)
{
	struct execution *x = user;

	x->timer = NULL;
	next_step(x);
}

static void again(struct execution *x, int64_t tries)
{
	int64_t ms = tries > 6 ? RETRY_MOST_MS : (int64_t)RETRY_MS << tries;

	loop_timer_start(x->chain->base.all->server->loop, ms < RETRY_MOST_MS ? ms : RETRY_MOST_MS, on_time, x, &x->timer);
}

/* The step's job was not made: a target in use, too many jobs, no space. */
static void refused(struct execution *x, enum err e)
{
	int64_t now = clock_mono_ms();

	if (x->chain->base.all->server->draining)
		return; /* the next start goes on */
	x->refused_ms = x->refused_ms ? x->refused_ms : now;
	if (err_retryable(e) && now - x->refused_ms < REFUSED_FOR_MS)
		again(x, x->refusals++);
	else
		finish(x, TASK_FAILED, errdoc_sure(e));
}

/* The job's line in the execution's record, the last one. */
static void note_job(struct execution *x, const char *state)
{
	json_t *jobs = json_object_get(x->doc, "jobs"), *last = json_array_get(jobs, json_array_size(jobs) - 1);

	if (strcmp(jval_text(last, "job"), x->job) == 0)
		json_object_set_new(last, "state", json_string(state));
	else
		json_array_append_new(jobs, json_pack("{s:s, s:s, s:s}", "step", chain_step_word(step_of(x)), "job", x->job, "state",
						      state));
}

static void job_over(struct execution *x, const char *state, const json_t *error)
{
	int64_t tries = jval_int(x->doc, "try");

	note_job(x, state);
	if (strcmp(state, "succeeded") == 0) {
		json_object_set_new(x->doc, "step", json_integer(jval_int(x->doc, "step") + 1));
		json_object_set_new(x->doc, "try", json_integer(0));
	} else if (json_is_true(json_object_get(error, "retryable")) && strcmp(state, "failed") == 0 && tries < x->chain->retries) {
		json_object_set_new(x->doc, "try", json_integer(tries + 1));
	} else {
		finish(x, TASK_FAILED, json_is_object(error) ? json_incref((json_t *)(uintptr_t)error) :
			errdoc_sure(ERR(CANCELLED, "job %s was cancelled", x->job)));
		return;
	}
	x->job[0] = '\0';
	note_progress(x);
	if (strcmp(state, "succeeded") == 0)
		next_step(x);
	else
		again(x, tries);
}

/* Looks at the job that is waited for: perhaps it has ended. */
static void look_at_job(struct execution *x)
{
	CLEANUP(json_decrefp) json_t *doc = NULL;
	enum job_state state;
	struct str text;
	struct server *s = x->chain->base.all->server;
	enum err e = job_state_of(s, str_of(x->job), &state);

	if (!e && !job_state_ended(state))
		return;
	e = e ?: job_text(s, str_of(x->job), &text);
	e = e ?: jtext_parse(text, JSON_ALLOW_NUL, &doc);
	if (e)
		finish(x, TASK_FAILED, errdoc_sure(e));
	else
		job_over(x, job_state_text(state), json_object_get(doc, "error"));
}

static void on_created(void *user, enum err e, const char *id, bool)
{
	struct execution *x = user;

	if (!came(x))
		return;
	if (e) {
		refused(x, e);
		return;
	}
	x->refused_ms = 0;
	x->refusals = 0;
	snprintf(x->job, sizeof x->job, "%s", id);
	note_job(x, "queued");
	note_progress(x);
	look_at_job(x);
}

static void make_job(struct execution *x)
{
	struct chain *c = x->chain;
	CLEANUP(json_decrefp) json_t *request = NULL;
	CLEANUP(json_decrefp) json_t *parent = parent_of(x);
	struct jval step = JVAL_ROOT(step_of(x));
	struct job_request rq = { .who = principal_of(c->base.uid), .parent = parent };
	char key[96];
	enum err e = chain_step_request(&step, c->base.name, jval_text(x->doc, "storage"), jval_text(x->doc, "name"), &rq.kind, &request);

	if (e) {
		finish(x, TASK_FAILED, errdoc_sure(e));
		return;
	}
	/* No caller's key can be like it: headers have no control characters. */
	snprintf(key, sizeof key, "\001chain:%s:%jd:%jd", x->id, (intmax_t)jval_int(x->doc, "step"), (intmax_t)jval_int(x->doc, "try"));
	rq.spec = request;
	rq.idem = (struct idempotency){ str_of(key), str_of(key) };
	x->is_pending = true;
	job_create(c->base.all->server, &rq, on_created, x);
}

/* Does the execution end with the removal of its checkpoint? */
static bool removes(const struct execution *x)
{
	const json_t *steps = json_object_get(x->doc, "steps");
	const char *word = chain_step_word(json_array_get(steps, json_array_size(steps) - 1));

	return word && strcmp(word, "delete") == 0;
}

/* The checkpoint was saved anew, here or by another daemon, since the execution has begun. */
static FALLIBLE enum err is_replaced(const struct execution *x, const json_t *shown, bool *out)
{
	const struct chain *c = x->chain;
	const char *was = jval_text(x->doc, "etag"), *is = jval_text(shown, "etag");
	char about[ABOUT_MAX];

	name_about(x->doc, about);
	TRY(journal_has_newer_task(c->base.all->server->journal, JOURNAL_CHAIN, c->base.name, about, x->id, out));
	*out = *out || (is[0] && strcmp(is, was) != 0);
	return OK;
}

/* The last step removes the checkpoint that the steps before were about, never another one that has its name by now. */
static void on_shown(void *user, enum err e, const json_t *ok, int *)
{
	struct execution *x = user;
	bool replaced = false, first = !json_object_get(x->doc, "etag");

	if (!came(x))
		return;
	if (first && e) {
		refused(x, e);
		return;
	}
	if (first) {
		json_object_set_new(x->doc, "etag", json_string(jval_text(ok, "etag")));
		note_progress(x);
		next_step(x);
		return;
	}
	e = is_replaced(x, ok, &replaced); /* one that is not there any more: perhaps the job has removed it already */
	if (e)
		finish(x, TASK_FAILED, errdoc_sure(e));
	else if (replaced)
		finish(x, TASK_SKIPPED, errdoc_sure(ERR(CHECKPOINT_REPLACED, "the checkpoint was replaced before the chain removed it")));
	else
		make_job(x);
}

static void next_step(struct execution *x)
{
	struct server *s = x->chain->base.all->server;
	const char *word = chain_step_word(step_of(x));
	struct storage *st;

	if (s->draining)
		return;
	if (!word) {
		finish(x, TASK_DONE, NULL);
		return;
	}
	bool looks = removes(x) && (strcmp(word, "delete") == 0 || !json_object_get(x->doc, "etag"));
	if (!looks || storage_find(s->storages, str_of(jval_text(x->doc, "storage")), &st) != OK) {
		make_job(x);
		return;
	}
	x->is_pending = true;
	lookup_ask(s->lookups, st->name, json_pack("{s:s, s:s, s:s}", "op", "show", "storage", st->name, "name", jval_text(x->doc, "name")),
		   NULL, 0, on_shown, x);
}

/* ---- a chain's queue ---- */

static enum err take(void *user, const struct journal_task *row)
{
	struct chain *c = user;
	struct execution *x = mem_zalloc(1, sizeof *x);

	NEED(x, "cannot take up an execution");
	x->chain = c;
	memcpy(x->id, row->id, TASK_ID_LEN);
	enum err e = jtext_parse(row->doc, 0, &x->doc);
	if (!e && row->state == TASK_WAITING) { /* the steps as they are now */
		json_object_set(x->doc, "steps", json_object_get(c->base.doc, "steps"));
		json_object_set_new(x->doc, "step", json_integer(0));
		json_object_set_new(x->doc, "try", json_integer(0));
		json_object_set_new(x->doc, "jobs", json_array());
	}
	if (e || !json_is_array(json_object_get(x->doc, "jobs"))) {
		execution_free(x);
		return e ? e : ERR(NO_MEMORY, "cannot take up an execution");
	}
	c->running = x;
	return OK;
}

static void pump(struct chain *c)
{
	struct server *s = c->base.all->server;

	if (c->running || s->draining)
		return;
	enum err e = journal_read_due(s->journal, JOURNAL_CHAIN, c->base.name, TASK_RUNNING, 1, take, c);
	if (!e && !c->running) {
		e = journal_read_due(s->journal, JOURNAL_CHAIN, c->base.name, TASK_WAITING, 1, take, c);
		if (!e && c->running)
			note_progress(c->running);
	}
	if (e)
		log_err("a chain's executions cannot be read", "chain", c->base.name, NULL);
	if (c->running)
		next_step(c->running);
}

void chains_wake(struct server *s, const char *job)
{
	followers_each(struct chain, c, s->followers[JOURNAL_CHAIN]) {
		struct execution *x = c->running;
		if (job && x && !x->is_pending && strcmp(x->job, job) == 0)
			look_at_job(x);
		if (!c->is_noted)
			continue;
		c->is_noted = journal_is_behind(s->journal); /* what was noted may not be there yet: another wake follows it */
		pump(c);
	}
}

/* ---- checkpoints ---- */

/* Does a checkpoint that a chain's job has made start this one? */
static bool may_follow(const struct chain *c, const struct happening *h)
{
	if (strcmp(jval_text(h->parent, "chain"), c->base.name) == 0)
		return false;
	if (jval_int(h->parent, "depth") < CHAIN_DEPTH_MAX)
		return true;
	log_warn("chain: not started, for chains have started each other too deep", "chain", c->base.name, "name", h->name, NULL);
	return false;
}

static void note_one(struct chain *c, struct journal_txn *t, const struct happening *h)
{
	char id[TASK_ID_LEN + 1], at[CLOCK_TEXT_MAX], about[ABOUT_MAX];
	CLEANUP(json_decrefp) json_t *doc =
		json_pack("{s:s, s:s, s:s, s:I, s:s}", "storage", h->storage, "name", h->name, "job", h->job, "depth",
			  jval_int(h->parent, "depth") + 1, "created_at", clock_text(clock_wall_ms(), at));
	CLEANUP(mem_free_ptr) char *text = jtext_of(doc);

	if (!text) {
		journal_txn_fail(t, ERR(NO_MEMORY, "cannot keep an execution"));
		return;
	}
	job_new_id(c->base.all->server->journal, id);
	name_about(doc, about);
	journal_skip_about(t, JOURNAL_CHAIN, c->base.name, about); /* they would be about this one */
	put_task(t, c, id, TASK_WAITING, doc, text);
	journal_skip_tasks(t, JOURNAL_CHAIN, c->base.name, c->newest ? 1 : FOLLOWER_QUEUE_MAX);
	c->is_noted = true;
}

void chains_note(struct server *s, struct journal_txn *t, const struct happening *h)
{
	if (h->what != TOLD_DURABLE)
		return;
	followers_each(struct chain, c, s->followers[JOURNAL_CHAIN])
		if (follower_matches(&c->filter, h->storage, h->name) && may_follow(c, h))
			note_one(c, t, h);
}

struct refs {
	chain_ref_fn fn;
	void *user;
};

static enum err tell_ref(void *user, const struct journal_task *row)
{
	const struct refs *r = user;
	CLEANUP(json_decrefp) json_t *doc = NULL;

	TRY(jtext_parse(row->doc, 0, &doc));
	r->fn(r->user, str_of(jval_text(doc, "storage")), str_of(jval_text(doc, "name")));
	return OK;
}

FALLIBLE enum err chains_each_ref(const struct server *s, chain_ref_fn fn, void *user)
{
	struct refs r = { fn, user };

	followers_each(const struct chain, c, s->followers[JOURNAL_CHAIN]) {
		TRY(journal_read_due(s->journal, JOURNAL_CHAIN, c->base.name, TASK_RUNNING, 1, tell_ref, &r));
		TRY(journal_read_due(s->journal, JOURNAL_CHAIN, c->base.name, TASK_WAITING, FOLLOWER_QUEUE_MAX, tell_ref, &r));
	}
	return OK;
}

/* ---- start and end ---- */

FALLIBLE enum err chains_new(struct server *s)
{
	return followers_new(s, &chain_kind);
}

void chains_free(struct server *s)
{
	struct followers *all = s->followers[JOURNAL_CHAIN];

	if (all)
		followers_each(struct chain, c, all)
			if (c->running)
				execution_free(c->running);
	followers_free(all);
}
