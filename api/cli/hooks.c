/* hooks.c: the commands about webhooks and chains. */
#include <stdio.h>

#include "api/cli/commands.h"
#include "api/cli/request.h"
#include "api/cli/show.h"
#include "base/jval.h"
#include "base/mem.h"

static int show_page(struct client *c, const char *path, const char *member, const char *const *columns, bool json)
{
	CLEANUP(jval_drop) json_t *all = json_array();
	enum err e = all ? look_all(c, path, member, all) : ERR(NO_MEMORY, "cannot list");

	if (e)
		return follow_failed(c, e);
	if (json)
		show_json(all);
	else
		show_table(all, columns);
	return EXIT_DONE;
}

/* "/v1/webhooks/NAME", and `rest`. */
static FALLIBLE enum err put_path(struct buf *b, const char *resource, const char *name, const char *rest)
{
	buf_printf(b, "/v1/%s/", resource);
	client_put(b, "%", name);
	buf_puts(b, rest);
	return client_end(b);
}

/* Calls, and says what came of it. */
static int act(struct client *c, const char *method, const struct buf *path, const json_t *body, const struct args *a, const char *said)
{
	CLEANUP(client_drop) struct answer got = { 0 };
	enum err e = client_call(c, method, (char *)path->p, body, &got);

	if (e)
		return follow_failed(c, e);
	if (args_flag(a, "json") && got.json)
		show_json(got.json);
	else
		show_say("%s %s\n", a->words[0], said);
	return EXIT_DONE;
}

static void print_doc(const json_t *doc)
{
	if (!show_whole(doc))
		show_json(doc);
}

/* ---- webhooks ---- */

static FALLIBLE enum err read_webhook(const struct args *a, json_t *body)
{
	static const char *const texts[][2] = { { "to", "url" }, { "secret", "secret" }, { "storage", "storage" }, { "match", "match" } };
	CLEANUP(jval_drop) json_t *events = json_array();
	const char *text;
	unsigned at = 0;

	for (size_t i = 0; i < sizeof texts / sizeof *texts; i++)
		if (args_value(a, texts[i][0]))
			TRY(request_set(body, texts[i][1], json_string(args_value(a, texts[i][0]))));
	while ((text = args_next(a, "event", &at)))
		if (json_array_append_new(events, json_string(text)) != 0)
			return ERR(NO_MEMORY, "cannot keep the events");
	return request_set(body, "events", json_incref(events));
}

int hooks_webhook(const struct command *, struct client *c, const struct args *a)
{
	static const char *const columns[] = { "DELIVERY=id", "EVENT=event", "STATE=state", "ATTEMPTS=attempts", "STATUS=status|error",
					       "CREATED=created_at", "NEXT=next_at", "CHECKPOINT=name", NULL };
	CLEANUP(buf_free) struct buf path = BUF_INIT(8192);
	CLEANUP(jval_drop) json_t *body = json_object();
	const char *rest = args_flag(a, "test") ? ":test" : args_flag(a, "deliveries") ? "/deliveries" : "";
	enum err e = put_path(&path, "webhooks", a->words[0], rest);

	if (!e && (args_value(a, "to") || args_value(a, "secret") || args_value(a, "event")))
		e = body ? read_webhook(a, body) : ERR(NO_MEMORY, "cannot set a webhook");
	if (e)
		return follow_failed(c, e);
	if (args_flag(a, "rm"))
		return act(c, "DELETE", &path, NULL, a, "is removed");
	if (args_flag(a, "test"))
		return act(c, "POST", &path, NULL, a, "is sent webhook.test: see --deliveries");
	if (args_flag(a, "deliveries"))
		return show_page(c, (char *)path.p, "deliveries", columns, args_flag(a, "json"));
	if (json_object_size(body))
		return act(c, "PUT", &path, body, a, "is set");
	return follow_show(c, &path, args_flag(a, "json"), print_doc);
}

int hooks_webhooks(const struct command *, struct client *c, const struct args *a)
{
	static const char *const columns[] = { "WEBHOOK=name", "URL=url", "STORAGE=storage", "MATCH=match", "SECRET=secret", "UID=uid",
					       "CREATED=created_at", NULL };

	return show_page(c, "/v1/webhooks", "webhooks", columns, args_flag(a, "json"));
}

/* ---- chains ---- */

static const char *const execution_columns[] = { "EXECUTION=id", "STATE=state", "CHECKPOINT=checkpoint:ref", "STEP=step",
						 "CREATED=created_at", "FINISHED=finished_at", "ERROR=error.code", NULL };

/* The counts, the steps in one line, and the last executions. */
static void print_chain(const json_t *chain)
{
	static const char *const counts[] = { "running", "waiting", "done", "failed", "skipped" };
	const json_t *steps = json_object_get(chain, "steps"), *step;
	const char *word;
	json_t *fields;
	size_t i;

	show_say("%s: %s:%s, behind %s, set by uid %.0f\nsteps: ", show_text(chain, "name"), show_text(chain, "storage"),
	       show_text(chain, "match")[0] ? show_text(chain, "match") : "*",
	       show_text(chain, "behind")[0] ? show_text(chain, "behind") : "newest", show_number(chain, "uid"));
	json_array_foreach(steps, i, step)
		json_object_foreach((json_t *)(uintptr_t)step, word, fields)
			show_say("%s%s", i ? ", " : "", word);
	show_say("\n");
	for (i = 0; i < sizeof counts / sizeof *counts; i++) {
		char key[32];
		snprintf(key, sizeof key, "status.%s", counts[i]);
		show_say("%s%s %.0f", i ? ", " : "", counts[i], show_number(chain, key));
	}
	show_say("\n\n");
	show_table(show_at(chain, "status.last"), execution_columns);
}

int hooks_chain(const struct command *, struct client *c, const struct args *a)
{
	CLEANUP(buf_free) struct buf path = BUF_INIT(8192);
	CLEANUP(jval_drop) json_t *body = NULL;
	const char *file = args_value(a, "file");
	enum err e = put_path(&path, "chains", a->words[0], args_flag(a, "executions") ? "/executions" : "");

	if (!e && file)
		e = args_file("file", file, &body);
	if (e)
		return follow_failed(c, e);
	if (args_flag(a, "rm"))
		return act(c, "DELETE", &path, NULL, a, "is removed");
	if (args_flag(a, "executions"))
		return show_page(c, (char *)path.p, "executions", execution_columns, args_flag(a, "json"));
	if (file)
		return act(c, "PUT", &path, body, a, "is set");
	return follow_show(c, &path, args_flag(a, "json"), print_chain);
}

int hooks_chains(const struct command *, struct client *c, const struct args *a)
{
	static const char *const columns[] = { "CHAIN=name", "STORAGE=storage", "MATCH=match", "BEHIND=behind", "STEPS=steps:count",
					       "UID=uid", "CREATED=created_at", NULL };

	return show_page(c, "/v1/chains", "chains", columns, args_flag(a, "json"));
}
