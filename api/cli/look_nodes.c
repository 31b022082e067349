/* look_nodes.c: dcpctl's commands about the nodes of a cluster. */
#include <stdio.h>
#include <string.h>

#include "api/cli/commands.h"
#include "api/cli/show.h"
#include "base/clock.h"

enum { WAIT_MAX_MS = 60000 /* of one request */, NOTE_MS = 30000 /* a node takes note with its next beat */ };

static const char *const columns[] = { "NODE=name",	   "STATE=state", "ADVERTISE=advertise", "VERSION=version",
				       "JOBS=jobs", "STORAGES=storages", NULL };

static void print_nodes(const json_t *doc)
{
	const char *problem = json_string_value(json_object_get(doc, "problem"));

	if (problem)
		show_say("WARNING: %s is not in its cluster: %s\n", show_text(doc, "node"), problem);
	show_table(json_object_get(doc, "nodes"), columns);
}

int look_nodes(const struct command *, struct client *c, const struct args *a)
{
	CLEANUP(buf_free) struct buf path = BUF_INIT(64);

	buf_puts(&path, "/v1/nodes");
	enum err e = client_end(&path);
	return e ? follow_failed(c, e) : follow_show(c, &path, args_flag(a, "json"), print_nodes);
}

/* Asks until the node is in that state, or the time is over. */
static FALLIBLE enum err ask(struct client *c, const struct args *a, const char *verb, const char *state, int64_t wait_ms,
			     struct answer *got)
{
	int64_t end = clock_mono_ms() + wait_ms;

	for (;;) {
		CLEANUP(buf_free) struct buf path = BUF_INIT(1024);
		int64_t left = end - clock_mono_ms();
		client_put(&path, "/v1/nodes/%:", a->words[0]);
		buf_puts(&path, verb);
		if (left > 0)
			buf_printf(&path, "?wait=%jdms", (intmax_t)(left < WAIT_MAX_MS ? left : WAIT_MAX_MS));
		TRY(client_end(&path));
		client_drop(got);
		TRY(client_call(c, "POST", (char *)path.p, NULL, got));
		if (left <= 0 || strcmp(show_text(got->json, "state"), state) == 0)
			return OK;
	}
}

int look_drain(const struct command *self, struct client *c, const struct args *a)
{
	CLEANUP(client_drop) struct answer got = { 0 };
	bool drain = strcmp(self->name, "drain") == 0;
	const char *wait = args_value(a, "wait"), *wanted = drain ? "drained" : "joined";
	int64_t wait_ms = drain ? 0 : NOTE_MS;
	enum err e = wait && !str_to_ms(str_of(wait), &wait_ms) ? ERR(INVALID_REQUEST, "--wait %.50s is no time, such as 60s", wait) : OK;

	e = e ?: ask(c, a, self->name, wanted, wait_ms, &got);
	if (e)
		return follow_failed(c, e);
	if (args_flag(a, "json"))
		show_json(got.json);
	else
		show_say("%s is %s\n", a->words[0], show_text(got.json, "state"));
	return wait_ms && strcmp(show_text(got.json, "state"), wanted) != 0 ? EXIT_TIMED_OUT : EXIT_DONE;
}
