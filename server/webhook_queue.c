/* webhook_queue.c: deliveries. The queue is the journal's: memory holds the few that are under way, and the next time to look.
 *
 *   due → the checkpoint's record is asked for, at the first attempt → sent → the outcome into the journal → out of memory */
#include <stdio.h>
#include <sys/random.h>

#include "base/jtext.h"
#include "base/jval.h"
#include "base/list.h"
#include "base/log.h"
#include "base/mem.h"
#include "base/num.h"
#include "server/job.h"
#include "server/lookup.h"
#include "server/parts.h"
#include "server/service_clock.h"
#include "server/storage.h"
#include "server/verdict.h"
#include "server/webhook_impl.h"
#include "server/courier.h"
#include "server/webhook_sign.h"

enum { AT_ONCE = 4, GIVE_UP_MS = 24 * 3600000, LOOK_AGAIN_MS = 60000 };

struct delivery {
	struct delivery *next;
	struct webhook *hook;
	char id[TASK_ID_LEN + 1];
	json_t *doc;
	char *url, *secret, *body;
	struct courier_parcel parcel;
};

static void pump(struct webhook *h);

/* ---- one delivery ---- */

void webhook_free(struct webhook *h)
{
	loop_timer_stop(&h->timer);
	follower_free(&h->base);
}

static void delivery_free(struct delivery *d)
{
	json_decref(d->doc);
	mem_free(d->url);
	mem_free(d->secret);
	mem_free(d->body);
	mem_free(d);
}

void webhook_drop_deliveries(struct webhook *h)
{
	list_each(d, h->under_way)
		delivery_free(d);
}

static void delivery_end(struct delivery *d)
{
	struct webhook *h = d->hook;

	list_remove(&h->under_way, d);
	h->count--;
	delivery_free(d);
	if (!h->is_gone)
		pump(h);
	else if (!h->count)
		webhook_free(h);
}

static void on_written(void *user, enum err e)
{
	if (e)
		log_err("the outcome of a delivery cannot be journalled", NULL);
	delivery_end(user);
}

static void put_delivery(struct journal_txn *t, const char *hook, const char *id, enum task_state state, int64_t due_ms, const json_t *doc)
{
	CLEANUP(mem_free_ptr) char *text = jtext_of(doc);

	if (!text)
		journal_txn_fail(t, ERR(NO_MEMORY, "cannot keep a delivery"));
	else
		journal_put_task(t, &(struct journal_task){ .kind = JOURNAL_WEBHOOK, .follower = hook, .id = id, .state = state,
							    .due_ms = due_ms, .doc = str_of(text) });
}

/* Failed and not to be tried any more. */
static void tell_failed(const struct delivery *d)
{
	const struct webhook *h = d->hook;

	log_warn("webhook: a delivery is given up", "webhook", h->base.name, "delivery", d->id, "event", jval_text(d->doc, "event"), NULL);
	events_emit(h->base.all->server->events, "webhook.failed", NULL,
		    json_pack("{s:s, s:s, s:s, s:s}", "webhook", h->base.name, "delivery", d->id, "event", jval_text(d->doc, "event"),
			      "error", jval_text(d->doc, "said")));
}

static void write_outcome(struct delivery *d, enum task_state state, int64_t due_ms)
{
	struct journal *j = d->hook->base.all->server->journal;
	struct journal_txn *t = journal_txn_new(j);

	put_delivery(t, d->hook->base.name, d->id, state, due_ms, d->doc);
	journal_prune_tasks(t, JOURNAL_WEBHOOK, d->hook->base.name, FOLLOWER_KEPT);
	journal_txn_wait(t, NULL);
	journal_commit(j, t, on_written, d);
}

static void on_sent(struct courier_parcel *p)
{
	struct delivery *d = (struct delivery *)(void *)((char *)p - offsetof(struct delivery, parcel));
	int64_t attempts = json_integer_value(json_object_get(d->doc, "attempts")) + 1, now = clock_service_ms();
	int64_t since = json_integer_value(json_object_get(d->doc, "since_ms"));
	bool taken = p->status >= 200 && p->status < 300;
	enum task_state state = TASK_WAITING;
	char at[CLOCK_TEXT_MAX];
	uint32_t random = 0;

	json_object_set_new(d->doc, "attempts", json_integer(attempts));
	json_object_set_new(d->doc, "last_at", json_string(clock_text(clock_wall_ms(), at)));
	json_object_set_new(d->doc, "status", p->status ? json_integer(p->status) : json_null());
	json_object_set_new(d->doc, "said", p->error[0] ? json_string(p->error) : json_null());
	if (taken)
		state = TASK_DONE;
	else if (p->is_refused || now - since >= GIVE_UP_MS)
		state = TASK_FAILED;
	if (state == TASK_DONE)
		json_object_del(d->doc, "checkpoint");
	if (state == TASK_FAILED)
		tell_failed(d);
	(void)!getrandom(&random, sizeof random, GRND_NONBLOCK);
	int64_t pause = webhook_sign_backoff_ms((unsigned)num_min((uint64_t)attempts, 64), random);
	write_outcome(d, state, state == TASK_WAITING ? now + pause : 0);
}

/* The body: the same for every attempt. */
static FALLIBLE enum err make_body(struct delivery *d)
{
	static const char *const kept[] = { "time", "checkpoint", "job", "error", "chain", "execution" };
	CLEANUP(jval_drop) json_t *body = json_pack("{s:s, s:s, s:s}", "id", d->id, "event", jval_text(d->doc, "event"), "webhook",
						    d->hook->base.name);
	uint64_t failures = mem_failures();

	NEED(body, "cannot send a webhook");
	for (size_t i = 0; i < sizeof kept / sizeof *kept; i++)
		if (json_object_get(d->doc, kept[i]))
			json_object_set(body, kept[i], json_object_get(d->doc, kept[i]));
	d->body = jtext_of(body);
	d->url = mem_strdup(jval_text(d->hook->base.doc, "url"));
	d->secret = mem_strdup(jval_text(d->hook->base.doc, "secret"));
	if (!d->body || !d->url || !d->secret || mem_failures() != failures)
		return ERR(NO_MEMORY, "cannot send a webhook");
	return OK;
}

static void send_it(struct delivery *d)
{
	enum err e = make_body(d);

	if (e) {
		snprintf(d->parcel.error, sizeof d->parcel.error, "%s", "out of memory");
		on_sent(&d->parcel);
		return;
	}
	d->parcel = (struct courier_parcel){ .url = d->url, .secret = d->secret, .delivery = d->id, .body = str_of(d->body),
					     .fn = on_sent };
	courier_send(d->hook->base.all->server->courier, &d->parcel);
}

/* A checkpoint that is not there any more, or cannot be looked at, is told by its name. */
static void on_shown(void *user, enum err e, const json_t *ok, int *)
{
	struct delivery *d = user;
	const char *storage = jval_text(d->doc, "storage"), *name = jval_text(d->doc, "name");
	json_t *record = e ? NULL : json_deep_copy(ok);

	if (record) {
		verdict_put(d->hook->base.all->server->journal, storage, record);
		json_object_set_new(record, "storage", json_string(storage));
	} else {
		record = json_pack("{s:s, s:s}", "storage", storage, "name", name);
	}
	json_object_set_new(d->doc, "checkpoint", record);
	send_it(d);
}

static void begin(struct delivery *d)
{
	struct server *s = d->hook->base.all->server;
	const char *storage = jval_text(d->doc, "storage");
	struct storage *st;

	if (!storage[0] || json_object_get(d->doc, "checkpoint")) {
		send_it(d);
		return;
	}
	bool is_removed = strcmp(jval_text(d->doc, "event"), event_told_names[TOLD_REMOVED]) == 0;
	json_t *q = json_pack("{s:s, s:s, s:O}", "op", "show", "storage", storage, "name", json_object_get(d->doc, "name"));
	if (is_removed || !q || storage_find(s->storages, str_of(storage), &st) != OK) {
		json_decref(q);
		on_shown(d, ERR_NOT_FOUND, NULL, NULL);
		return;
	}
	lookup_ask(s->lookups, st->name, q, NULL, 0, on_shown, d);
}

/* ---- a webhook's queue ---- */

struct look {
	struct webhook *hook;
	int64_t now, next;             /* next: of the first one that is not due; 0: none */
};

static bool is_under_way(const struct webhook *h, const char *id)
{
	for (const struct delivery *d = h->under_way; d; d = d->next)
		if (strcmp(d->id, id) == 0)
			return true;
	return false;
}

static enum err take(void *user, const struct journal_task *row)
{
	struct look *l = user;
	struct webhook *h = l->hook;

	if (is_under_way(h, row->id) || h->count == AT_ONCE || l->next)
		return OK;
	if (row->due_ms > l->now) {
		l->next = row->due_ms;
		return OK;
	}
	struct delivery *d = mem_zalloc(1, sizeof *d);
	NEED(d, "cannot deliver");
	d->hook = h;
	memcpy(d->id, row->id, TASK_ID_LEN);
	enum err e = jtext_parse(row->doc, 0, &d->doc);
	if (e) {
		delivery_free(d);
		return e;
	}
	d->next = h->under_way;
	h->under_way = d;
	h->count++;
	return OK;
}

static void on_time(void *user)
{
	struct webhook *h = user;

	h->timer = NULL;
	pump(h);
}

static void pump(struct webhook *h)
{
	struct server *s = h->base.all->server;
	struct look l = { .hook = h, .now = clock_service_ms() };
	struct delivery *before = h->under_way;

	loop_timer_stop(&h->timer);
	if (s->draining)
		return;
	enum err e = journal_read_due(s->journal, JOURNAL_WEBHOOK, h->base.name, TASK_WAITING, 2 * AT_ONCE + 1, take, &l);
	if (e)
		log_err("deliveries cannot be read", "webhook", h->base.name, NULL);
	int64_t ms = e ? LOOK_AGAIN_MS : l.next ? (int64_t)num_min((uint64_t)(l.next - l.now), LOOK_AGAIN_MS) : 0;
	if (ms)
		loop_timer_start(s->loop, ms, on_time, h, &h->timer);
	for (struct delivery *d = h->under_way, *next; d != before; d = next) {
		next = d->next;
		begin(d);
	}
}

static void count_dropped(struct webhook *h)
{
	struct server *s = h->base.all->server;
	uint64_t counts[TASK_STATE_COUNT];

	if (journal_count_tasks(s->journal, JOURNAL_WEBHOOK, h->base.name, counts) != OK)
		return;
	if (counts[TASK_WAITING] >= FOLLOWER_QUEUE_MAX && counts[TASK_SKIPPED] > h->skipped) {
		log_warn("webhook: the oldest deliveries were dropped", "webhook", h->base.name, NULL);
		events_emit(s->events, "webhook.dropped", NULL,
			    json_pack("{s:s, s:I}", "webhook", h->base.name, "dropped", (json_int_t)(counts[TASK_SKIPPED] - h->skipped)));
	}
	h->skipped = counts[TASK_SKIPPED];
}

void webhooks_wake(struct server *s)
{
	followers_each(struct webhook, h, s->followers[JOURNAL_WEBHOOK]) {
		if (!h->is_noted)
			continue;
		h->is_noted = journal_is_behind(s->journal); /* what was noted may not be there yet: another wake follows it */
		count_dropped(h);
		pump(h);
	}
}

/* ---- what happens ---- */

static json_t *describe(const struct happening *h)
{
	json_t *doc = json_pack("{s:s, s:i, s:I}", "event", event_told_names[h->what], "attempts", 0, "since_ms",
				(json_int_t)clock_service_ms());
	const char *const copied[] = { "chain", "execution" };
	char at[CLOCK_TEXT_MAX];

	json_object_set_new(doc, "time", json_string(clock_text(clock_wall_ms(), at)));
	if (h->name) {
		json_object_set_new(doc, "storage", json_string(h->storage));
		json_object_set_new(doc, "name", json_string(h->name));
	}
	if (h->job && h->job[0])
		json_object_set_new(doc, "job", json_string(h->job));
	if (h->error)
		json_object_set(doc, "error", (json_t *)(uintptr_t)h->error);
	for (size_t i = 0; i < sizeof copied / sizeof *copied; i++)
		if (json_object_get(h->parent, copied[i]))
			json_object_set(doc, copied[i], json_object_get(h->parent, copied[i]));
	return doc;
}

static void note_one(struct webhook *h, struct journal_txn *t, const json_t *doc, char id[TASK_ID_LEN + 1])
{
	job_new_id(h->base.all->server->journal, id);
	put_delivery(t, h->base.name, id, TASK_WAITING, clock_service_ms(), doc);
	journal_skip_tasks(t, JOURNAL_WEBHOOK, h->base.name, FOLLOWER_QUEUE_MAX);
	h->is_noted = true;
}

void webhooks_note(struct server *s, struct journal_txn *t, const struct happening *what)
{
	CLEANUP(jval_drop) json_t *doc = NULL;
	uint64_t failures = mem_failures();
	char id[TASK_ID_LEN + 1];

	followers_each(struct webhook, h, s->followers[JOURNAL_WEBHOOK]) {
		if (!(h->events >> what->what & 1) || !follower_matches(&h->filter, what->storage, what->name))
			continue;
		doc = doc ? doc : describe(what);
		note_one(h, t, doc, id);
	}
	if (mem_failures() != failures)
		journal_txn_fail(t, ERR(NO_MEMORY, "cannot keep a delivery"));
}

/* ---- again, and a test ---- */

/* A caller that waits until a delivery is in the journal. */
struct asked {
	struct server *server;
	char id[TASK_ID_LEN + 1];
	webhook_fn fn;
	void *user;
};

static void on_asked(void *user, enum err e)
{
	struct asked *a = user;

	if (!e)
		webhooks_wake(a->server);
	a->fn(a->user, e, a->id);
	mem_free(a);
}

static struct asked *asked_new(struct server *s, webhook_fn fn, void *user)
{
	struct asked *a = mem_sure(sizeof *a);

	*a = (struct asked){ .server = s, .fn = fn, .user = user };
	return a;
}

static enum err keep_doc(void *user, const struct journal_task *row)
{
	return jtext_parse(row->doc, 0, user);
}

static FALLIBLE enum err retry_now(struct server *s, const struct principal *who, struct str name, const char *id, struct journal_txn **out)
{
	CLEANUP(jval_drop) json_t *doc = NULL;
	struct follower *f;

	TRY(follower_need(s->followers[JOURNAL_WEBHOOK], who, name, &f));
	struct webhook *h = webhook_of(f);
	TRY(journal_read_task(s->journal, JOURNAL_WEBHOOK, h->base.name, str_of(id), keep_doc, &doc));
	if (!doc)
		return ERR(NOT_FOUND, "webhook \"%s\" has no delivery %.64s", h->base.name, id);
	if (is_under_way(h, id))
		return ERR(STATE_CONFLICT, "delivery %s is on its way", id);
	if (json_object_set_new(doc, "since_ms", json_integer(clock_service_ms())) != 0)
		return ERR(NO_MEMORY, "cannot deliver again");
	struct journal_txn *t = journal_txn_new(s->journal);
	put_delivery(t, h->base.name, id, TASK_WAITING, clock_service_ms(), doc);
	h->is_noted = true;
	*out = t;
	return OK;
}

void webhook_retry(struct server *s, const struct principal *who, struct str name, struct str id, webhook_fn fn, void *user)
{
	struct asked *a = asked_new(s, fn, user);
	struct journal_txn *t = NULL;

	snprintf(a->id, sizeof a->id, "%.*s", (int)num_min(id.n, TASK_ID_LEN), id.p);
	enum err e = retry_now(s, who, name, a->id, &t);

	if (e)
		loop_later(s->loop, on_asked, a, e);
	else
		journal_commit(s->journal, t, on_asked, a);
}

void webhook_test(struct server *s, const struct principal *who, struct str name, webhook_fn fn, void *user)
{
	struct asked *a = asked_new(s, fn, user);
	struct follower *f;
	enum err e = follower_need(s->followers[JOURNAL_WEBHOOK], who, name, &f);

	if (e) {
		loop_later(s->loop, on_asked, a, e);
		return;
	}
	CLEANUP(jval_drop) json_t *doc = describe(&(struct happening){ .what = TOLD_TEST });
	struct journal_txn *t = journal_txn_new(s->journal);
	note_one(webhook_of(f), t, doc, a->id);
	journal_commit(s->journal, t, on_asked, a);
}
