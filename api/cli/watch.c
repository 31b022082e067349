/* watch.c: dcpctl watch: a run, or a job, until one has seen enough. On a terminal the run is drawn anew; elsewhere a line tells each
 * change, so that a script or a log has what happened and nothing twice. */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "api/cli/commands.h"
#include "api/cli/show.h"
#include "api/cli/term.h"
#include "base/jval.h"
#include "base/mem.h"

enum { EVERY_MS = 2000, SLICE_MS = 100, SAID_MAX = 1024 };

FALLIBLE enum err watch_wishes(const struct args *a, struct watch_wishes *out)
{
	const char *every = args_value(a, "interval"), *count = args_value(a, "count");

	*out = (struct watch_wishes){ .every_ms = EVERY_MS };
	if (every)
		TRY(args_duration(every, &out->every_ms));
	if (out->every_ms < SLICE_MS)
		return ERR(INVALID_REQUEST, "--interval is at least %d ms", SLICE_MS);
	if (count && (!str_to_u64(str_of(count), &out->count) || out->count == 0))
		return ERR(INVALID_REQUEST, "--count is a number above 0");
	return OK;
}

static void pause_for(int64_t ms)
{
	for (; ms > 0 && !client_stop; ms -= SLICE_MS)
		(void)usleep(SLICE_MS * 1000);
}

/* "newest step-5 (step 5), 12 checkpoints, 34 MiB, unsaved since …" */
static void describe(const json_t *run, char out[SAID_MAX])
{
	const json_t *newest = json_array_get(json_object_get(run, "checkpoints"), 0);
	const char *since = show_text(run, "lost_work.since");
	char text[32];

	snprintf(out, SAID_MAX, "%s:%s: %.0f checkpoints, %s, newest %s%s%s%s%s", show_text(run, "storage"), show_text(run, "run"),
		 show_number(run, "count"), show_bytes(show_number(run, "bytes"), text), show_text(newest, "name"),
		 show_text(newest, "verified.state")[0] ? ", " : "", show_text(newest, "verified.state"),
		 since[0] ? ", nothing durable since " : "", since);
}

static void tell(const json_t *run, char said[SAID_MAX])
{
	char now[SAID_MAX];

	if (show_form() == SHOW_TABLE && term_is(stdout)) {
		fputs("\033[H\033[2J", stdout);
		look_print_run(run);
	} else {
		describe(run, now);
		if (strcmp(now, said) != 0 && show_form() == SHOW_TABLE)
			show_say("%s\n", now);
		else if (strcmp(now, said) != 0)
			show_line(run);
		memcpy(said, now, sizeof now);
	}
	fflush(stdout);
}

static int watch_run(struct client *c, const char *run, const struct watch_wishes *w)
{
	const char *colon = strchr(run, ':');
	CLEANUP(mem_free_ptr) char *storage = mem_strndup(run, (size_t)(colon - run));
	char said[SAID_MAX] = "";

	follow_catch_interrupts();
	for (uint64_t n = 0; !client_stop && (!w->count || n < w->count); n++) {
		CLEANUP(buf_free) struct buf path = BUF_INIT(16384);
		CLEANUP(client_drop) struct answer got = { 0 };
		if (n)
			pause_for(w->every_ms);
		client_put(&path, "/v1/runs/%/%?page_size=20", storage, colon + 1);
		enum err e = client_stop ? OK : client_get_at(c, &path, &got);
		if (e)
			return client_stop ? EXIT_DONE : follow_failed(c, e);
		if (got.json)
			tell(got.json, said);
	}
	return EXIT_DONE;
}

int watch_one(const struct command *, struct client *c, const struct args *a)
{
	const char *what = a->words[0], *colon = strchr(what, ':');
	struct follow f = { .json = show_form() == SHOW_JSON };
	struct watch_wishes w;
	enum err e = watch_wishes(a, &w);

	if (!e && colon && (colon == what || !colon[1] || args_is_shm(what)))
		e = ERR(INVALID_REQUEST, "dcpctl watch takes a run, STORAGE:RUN, or a job's id");
	if (e)
		return follow_failed(c, e);
	if (colon)
		return watch_run(c, what, &w);
	follow_catch_interrupts();
	return follow_job(c, what, &f);
}
