/* webhook.c: see webhook.h: webhooks are set, removed and told about. Their deliveries: webhook_queue.c. */
#include "server/webhook.h"

#include <stdio.h>

#include "base/jtext.h"
#include "base/list.h"
#include "base/log.h"
#include "base/mem.h"
#include "base/near.h"
#include "base/num.h"
#include "server/config.h"
#include "server/parts.h"
#include "server/service_clock.h"
#include "server/webhook_impl.h"
#include "server/courier.h"
#include "server/webhook_sign.h"

enum { DOC_MAX = 1 << 20 };

/* ---- setting and removing ---- */

static struct webhook *find(const struct server *s, struct str name)
{
	for (struct webhook *h = s->webhooks->first; h; h = h->next)
		if (str_is(name, h->name))
			return h;
	return NULL;
}

FALLIBLE enum err webhook_need(const struct server *s, const struct principal *who, struct str name, struct webhook **out)
{
	if (!who->admin)
		return ERR(FORBIDDEN, "webhooks are for root, dcpd's own user and the holder of the token");
	*out = find(s, name);
	return *out ? OK : ERR(NOT_FOUND, "there is no webhook \"%.*s\"", (int)num_min(name.n, 64), name.p);
}

static FALLIBLE enum err read_events(const struct jval *root, unsigned *out)
{
	struct jval list = jval_get(root, "events");
	char hint[NEAR_HINT_MAX];
	struct str text;
	size_t n = 0;

	TRY(jval_array(&list, TOLD_COUNT, &n));
	if (n == 0)
		return jval_fail(&list, ERR_VALIDATION_FAILED, "names no event");
	for (size_t i = 0; i < n; i++) {
		struct jval one = jval_at(&list, i);
		unsigned what = 0;
		TRY(jval_string(&one, &text));
		while (what < TOLD_TEST && !str_is(text, event_told_names[what]))
			what++;
		if (what == TOLD_TEST)
			return jval_fail(&one, ERR_VALIDATION_FAILED, "is no event of webhooks, such as checkpoint.durable%s",
					 near_hint(text, event_told_names, hint));
		*out |= 1u << what;
	}
	return OK;
}

static FALLIBLE enum err secrets_folder(const struct server *s, char out[CONFIG_PATH_MAX + 16])
{
	int n = snprintf(out, CONFIG_PATH_MAX + 16, "%s/secrets", s->config->state_dir);

	return n > 0 && n < CONFIG_PATH_MAX + 16 ? OK : ERR(CONFIG, "the state directory's name is too long");
}

/* Reads a document into the webhook's members; full: as a request, with its secret looked at. */
static FALLIBLE enum err read_doc(struct server *s, struct webhook *h, bool full)
{
	struct jval root = JVAL_ROOT(h->doc), url = jval_get(&root, "url"), secret = jval_get(&root, "secret");
	unsigned char bytes[WEBHOOK_SECRET_MAX];
	char folder[CONFIG_PATH_MAX + 16];
	struct str text;
	size_t n;

	TRY(jval_only(&root, (const char *const[]){ "url", "secret", "events", "storage", "match", NULL }));
	TRY(jval_string(&url, &text));
	TRY(jval_failed(&url, courier_check_url(text)));
	TRY(read_events(&root, &h->events));
	TRY(follower_read_filter(&root, &h->filter));
	TRY(jval_string(&secret, &text));
	TRY(jval_failed(&secret, follower_check_name(text)));
	if (!full)
		return OK;
	TRY(secrets_folder(s, folder));
	enum err e = webhook_sign_secret(folder, text.p, bytes, &n);
	explicit_bzero(bytes, sizeof bytes);
	return jval_failed(&secret, e);
}

/* A change on its way to the journal. */
struct change {
	struct server *server;
	struct webhook *hook;          /* to be; NULL: removed */
	char name[FOLLOWER_NAME_MAX + 1];
	uid_t uid;
	done_fn fn;
	void *user;
};

static void emit_set(const struct change *c)
{
	events_emit(c->server->events, "webhook.set", NULL,
		    json_pack("{s:s, s:I, s:s}", "webhook", c->name, "uid", (json_int_t)c->uid, "what", c->hook ? "put" : "delete"));
	log_info("webhook set", "webhook", c->name, "what", c->hook ? "put" : "delete", NULL);
}

static void drop(struct webhook *h)
{
	struct webhooks *all = h->all;

	list_remove(&all->first, h);
	all->count--;
	h->is_gone = true;
	if (!h->count)
		webhook_free(h);
}

static void on_changed(void *user, enum err e)
{
	struct change *c = user;
	struct webhooks *all = c->server->webhooks;
	struct webhook *old = find(c->server, str_of(c->name)), *fresh = c->hook;

	if (e && fresh) {
		CLEANUP(err_restore) struct err_info info = *err_last();
		webhook_free(fresh);
	}
	if (!e) {
		emit_set(c);
		if (old && fresh) { /* its deliveries stay */
			json_t *doc = old->doc;
			old->doc = fresh->doc;
			fresh->doc = doc;
			old->events = fresh->events;
			old->filter = fresh->filter;
			old->uid = fresh->uid;
			webhook_free(fresh);
		} else if (fresh) {
			fresh->next = all->first;
			all->first = fresh;
			all->count++;
		} else if (old) {
			drop(old);
		}
	}
	c->fn(c->user, e);
	mem_free(c);
}

static struct change *change_new(struct server *s, const struct principal *who, struct str name, done_fn fn, void *user)
{
	struct change *c = mem_sure(sizeof *c);

	*c = (struct change){ .server = s, .uid = who->uid, .fn = fn, .user = user };
	snprintf(c->name, sizeof c->name, "%.*s", (int)num_min(name.n, FOLLOWER_NAME_MAX), name.p);
	return c;
}

static FALLIBLE enum err webhook_new(struct server *s, const char *name, uid_t uid, int64_t created_ms, const json_t *doc, bool full,
				     struct webhook **out)
{
	struct webhook *h = mem_zalloc(1, sizeof *h);

	NEED(h, "cannot keep a webhook");
	*h = (struct webhook){ .all = s->webhooks, .uid = uid, .created_ms = created_ms, .doc = json_deep_copy(doc) };
	snprintf(h->name, sizeof h->name, "%s", name);
	enum err e = h->doc ? read_doc(s, h, full) : ERR(NO_MEMORY, "cannot keep a webhook");
	if (e) {
		CLEANUP(err_restore) struct err_info info = *err_last();
		webhook_free(h);
		return e;
	}
	*out = h;
	return OK;
}

static FALLIBLE enum err set_now(struct server *s, const struct principal *who, struct str name, const json_t *doc, struct change *c,
				 struct journal_txn **out)
{
	const struct webhook *old = find(s, name);

	if (!who->admin)
		return ERR(FORBIDDEN, "webhooks are for root, dcpd's own user and the holder of the token");
	TRY(follower_check_name(name));
	if (!old && s->webhooks->count >= FOLLOWERS_MAX)
		return ERR(LIMIT_EXCEEDED, "there are %d webhooks", FOLLOWERS_MAX);
	TRY(webhook_new(s, c->name, who->uid, old ? old->created_ms : clock_wall_ms(), doc, true, &c->hook));
	CLEANUP(mem_free_ptr) char *text = jtext_of(c->hook->doc);
	NEED(text, "cannot keep a webhook");
	struct journal_txn *t = journal_txn_new(s->journal);
	journal_put_follower(t, &(struct journal_follower){ JOURNAL_WEBHOOK, c->name, who->uid, c->hook->created_ms, str_of(text) });
	*out = t;
	return OK;
}

void webhook_set(struct server *s, const struct principal *who, struct str name, const json_t *doc, done_fn fn, void *user)
{
	struct change *c = change_new(s, who, name, fn, user);
	struct journal_txn *t = NULL;
	enum err e = set_now(s, who, name, doc, c, &t);

	if (e)
		loop_later(s->loop, on_changed, c, e);
	else
		journal_commit(s->journal, t, on_changed, c);
}

void webhook_delete(struct server *s, const struct principal *who, struct str name, done_fn fn, void *user)
{
	struct change *c = change_new(s, who, name, fn, user);
	struct webhook *h;
	enum err e = webhook_need(s, who, name, &h);

	if (e) {
		loop_later(s->loop, on_changed, c, e);
		return;
	}
	struct journal_txn *t = journal_txn_new(s->journal);
	journal_delete_follower(t, JOURNAL_WEBHOOK, h->name);
	journal_commit(s->journal, t, on_changed, c);
}

/* ---- telling ---- */

static FALLIBLE enum err put_hook(const struct webhook *h, struct buf *out)
{
	char at[CLOCK_TEXT_MAX];

	buf_printf(out, "{\"name\":\"%s\",\"uid\":%u,\"created_at\":\"%s\",", h->name, h->uid, clock_text(h->created_ms, at));
	struct buf doc = BUF_INIT(DOC_MAX);
	enum err e = jval_dump(h->doc, &doc);
	if (!e && doc.len > 1)
		buf_put(out, doc.p + 1, doc.len - 1);
	buf_free(&doc);
	TRY(e);
	return buf_status(out);
}

FALLIBLE enum err webhooks_put(struct server *s, const struct principal *who, struct str after, uint32_t size, struct buf *out)
{
	const struct webhook *shown = NULL;

	if (!who->admin)
		return ERR(FORBIDDEN, "webhooks are for root, dcpd's own user and the holder of the token");
	CLEANUP(mem_free_ptr) char *last = mem_strndup(after.p ? after.p : "", after.n);
	NEED(last, "cannot list webhooks");
	buf_puts(out, "{\"webhooks\":[");
	for (uint32_t i = 0;; i++) { /* by name; there are few */
		const struct webhook *next = NULL;
		for (const struct webhook *h = s->webhooks->first; h; h = h->next)
			if (strcmp(h->name, shown ? shown->name : last) > 0 && (!next || strcmp(h->name, next->name) < 0))
				next = h;
		if (!next || i == size) {
			buf_putc(out, ']');
			if (next && shown)
				buf_printf(out, ",\"next_page_token\":\"%s\"", shown->name);
			break;
		}
		buf_puts(out, i ? "," : "");
		TRY(put_hook(next, out));
		shown = next;
	}
	buf_putc(out, '}');
	return buf_status(out);
}

FALLIBLE enum err webhook_put(struct server *s, const struct principal *who, struct str name, struct buf *out)
{
	struct webhook *h;

	TRY(webhook_need(s, who, name, &h));
	return put_hook(h, out);
}

static enum err put_members(const struct journal_task *row, struct buf *out)
{
	static const char *const shown[][2] = { { "event", "event" }, { "time", "created_at" }, { "attempts", "attempts" },
						{ "last_at", "last_at" }, { "status", "status" }, { "said", "error" },
						{ "storage", "storage" }, { "name", "name" }, { "job", "job" } };
	CLEANUP(jval_drop) json_t *doc = NULL;
	char at[CLOCK_TEXT_MAX];

	TRY(jtext_parse(row->doc, 0, &doc));
	for (size_t i = 0; i < sizeof shown / sizeof *shown; i++) {
		const json_t *v = json_object_get(doc, shown[i][0]);
		if (json_is_string(v)) {
			buf_printf(out, ",\"%s\":", shown[i][1]);
			buf_json_str(out, str_of(json_string_value(v)));
		} else if (json_is_integer(v)) {
			buf_printf(out, ",\"%s\":%jd", shown[i][1], (intmax_t)json_integer_value(v));
		}
	}
	if (row->state == TASK_WAITING)
		buf_printf(out, ",\"next_at\":\"%s\"", clock_text(clock_service_wall(row->due_ms), at));
	return buf_status(out);
}

FALLIBLE enum err webhook_put_deliveries(struct server *s, const struct principal *who, struct str name, const struct follower_page *page,
					 struct buf *out)
{
	struct webhook *h;

	TRY(webhook_need(s, who, name, &h));
	return follower_put_page(s->journal, JOURNAL_WEBHOOK, h->name, "deliveries", page, put_members, out);
}

FALLIBLE enum err webhook_put_delivery(struct server *s, struct str name, struct str id, struct buf *out)
{
	const struct webhook *h = find(s, name);

	if (!h)
		return ERR(NOT_FOUND, "there is no such webhook");
	return follower_put_task(s->journal, JOURNAL_WEBHOOK, h->name, id, put_members, out);
}

/* ---- start and end ---- */

static enum err take_hook(void *user, const struct journal_follower *row)
{
	struct server *s = user;
	CLEANUP(jval_drop) json_t *doc = NULL;
	struct webhook *h = NULL;
	enum err e = jtext_parse(row->doc, 0, &doc);

	e = e ?: webhook_new(s, row->name, row->uid, row->created_ms, doc, false, &h);
	if (e) {
		log_err("a webhook cannot be taken up", "webhook", row->name, NULL);
		return e == ERR_NO_MEMORY ? e : OK;
	}
	h->is_noted = true;
	h->next = s->webhooks->first;
	s->webhooks->first = h;
	s->webhooks->count++;
	return OK;
}

FALLIBLE enum err webhooks_new(struct server *s)
{
	const struct config_list *allow = &s->config->webhook_allow;
	char folder[CONFIG_PATH_MAX + 16];

	s->webhooks = mem_zalloc(1, sizeof *s->webhooks);
	NEED(s->webhooks, "cannot keep webhooks");
	s->webhooks->server = s;
	TRY(secrets_folder(s, folder));
	TRY(courier_new(s->loop, folder, (const char *const *)allow->items, allow->count, &s->webhooks->sender));
	return journal_read_followers(s->journal, JOURNAL_WEBHOOK, take_hook, s);
}

void webhooks_free(struct webhooks *all)
{
	if (!all)
		return;
	courier_free(all->sender);
	for (struct webhook *h = all->first, *next; h; h = next) {
		next = h->next;
		webhook_drop_deliveries(h);
		webhook_free(h);
	}
	mem_free(all);
}
