/* webhook.c: see webhook.h: what webhooks are. Their deliveries: webhook_queue.c. */
#include "server/webhook.h"

#include <stdio.h>

#include "base/jtext.h"
#include "base/near.h"
#include "server/config.h"
#include "server/parts.h"
#include "server/service_clock.h"
#include "server/webhook_impl.h"
#include "server/courier.h"
#include "server/webhook_sign.h"

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

/* Only when it is set must there be its secret: the daemon starts without. */
static enum err read_webhook(struct server *s, struct follower *f, bool is_new)
{
	struct webhook *h = webhook_of(f);
	struct jval root = JVAL_ROOT(f->doc), url = jval_get(&root, "url"), secret = jval_get(&root, "secret");
	unsigned char bytes[WEBHOOK_SECRET_MAX];
	char folder[CONFIG_PATH_MAX + 16];
	struct str text;
	size_t n;

	h->is_noted = !is_new;
	TRY(jval_only(&root, (const char *const[]){ "url", "secret", "events", "storage", "match", NULL }));
	TRY(jval_string(&url, &text));
	TRY(jval_failed(&url, courier_check_url(text)));
	TRY(read_events(&root, &h->events));
	TRY(follower_read_filter(&root, &h->filter));
	TRY(jval_string(&secret, &text));
	TRY(jval_failed(&secret, follower_check_name(text)));
	if (!is_new)
		return OK;
	TRY(secrets_folder(s, folder));
	enum err e = webhook_sign_secret(folder, text.p, bytes, &n);
	explicit_bzero(bytes, sizeof bytes);
	return jval_failed(&secret, e);
}

/* Its deliveries stay. */
static void replace(struct follower *old, struct follower *fresh)
{
	webhook_of(old)->events = webhook_of(fresh)->events;
	webhook_of(old)->filter = webhook_of(fresh)->filter;
}

static void drop(struct follower *f)
{
	struct webhook *h = webhook_of(f);

	h->is_gone = true;
	if (!h->count)
		webhook_free(h);
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

/* ---- start and end ---- */

static const struct follower_kind webhook_kind = {
	.number = JOURNAL_WEBHOOK, .word = "webhook", .words = "webhooks", .event = "webhook.set", .size = sizeof(struct webhook),
	.is_for_admins = true, .read = read_webhook, .set = follower_set, .replace = replace, .drop = drop,
	.tasks = "deliveries", .put_task = put_members,
};

FALLIBLE enum err webhooks_new(struct server *s)
{
	const struct config_list *allow = &s->config->webhook_allow;
	char folder[CONFIG_PATH_MAX + 16];

	TRY(secrets_folder(s, folder));
	TRY(courier_new(s->loop, folder, (const char *const *)allow->items, allow->count, &s->courier));
	return followers_new(s, &webhook_kind);
}

void webhooks_free(struct server *s)
{
	struct followers *all = s->followers[JOURNAL_WEBHOOK];

	courier_free(s->courier);
	if (all)
		followers_each(struct webhook, h, all) {
			webhook_drop_deliveries(h);
			loop_timer_stop(&h->timer);
		}
	followers_free(all);
}
