/* top.c: dcpctl top: what the daemon does now, on one screen: jobs with rate and ETA, storages, shared memory, the work that would be lost.
 * The screen is made in memory and written at once, over the one before: nothing flickers. Without a terminal it is printed as it is. */
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <termios.h>
#include <unistd.h>

#include "api/cli/commands.h"
#include "api/cli/show.h"
#include "api/cli/term.h"
#include "base/jval.h"
#include "base/mem.h"
#include "base/num.h"

enum { RUNS_MAX = 64, TEXT_BYTES_MAX = 1 << 20 };

/* ---- what is shown ---- */

static json_t *line_of_job(const json_t *job)
{
	const json_t *ref = json_object_get(job, "target");
	double done = show_number(job, "progress.bytes_done"), total = show_number(job, "progress.bytes_total");
	double rate = show_number(job, "progress.rate");
	char bytes[80] = "", percent[16] = "", speed[48] = "", eta[32] = "", x[32], y[32];

	ref = ref ? ref : json_object_get(job, "source");
	ref = ref ? ref : json_object_get(job, "a");
	if (total > 0) {
		snprintf(bytes, sizeof bytes, "%s of %s", show_bytes(done, x), show_bytes(total, y));
		snprintf(percent, sizeof percent, "%.0f %%", 100 * done / total);
	}
	if (rate > 0)
		snprintf(speed, sizeof speed, "%s/s", show_bytes(rate, x));
	if (json_is_number(show_at(job, "progress.eta_s")))
		show_seconds(show_number(job, "progress.eta_s"), eta);
	return json_pack("{s:s, s:s, s:s, s:s, s:O*, s:s, s:s, s:s, s:s}", "id", show_text(job, "id"), "kind", show_text(job, "kind"),
			 "state", show_text(job, "state"), "stage", show_text(job, "stage"), "ref", ref, "percent", percent, "bytes", bytes,
			 "rate", speed, "eta", eta);
}

/* Appends the unfinished jobs, those that run first. */
static FALLIBLE enum err get_jobs(struct client *c, json_t *all)
{
	static const char *const states[] = { "committing", "running", "planning", "queued" };
	const json_t *job;
	size_t k;

	for (size_t i = 0; i < sizeof states / sizeof *states; i++) {
		CLEANUP(client_drop) struct answer got = { 0 };
		char path[80];
		snprintf(path, sizeof path, "/v1/jobs?page_size=50&filter=state%%3D%s", states[i]);
		TRY(client_get(c, path, &got));
		json_array_foreach(json_object_get(got.json, "jobs"), k, job)
			if (json_array_append_new(all, line_of_job(job)) != 0)
				return ERR(NO_MEMORY, "cannot list jobs");
	}
	return OK;
}

/* A label's value out of a line of /metrics, its escapes undone. */
static void take_label(const char *line, const char *key, char *out, size_t max)
{
	const char *p = strstr(line, key);
	size_t n = 0;

	for (p = p ? p + strlen(key) : ""; *p && *p != '"' && n + 1 < max; p++) {
		p += *p == '\\' && p[1];
		out[n++] = *p;
	}
	out[n] = '\0';
}

/* The runs whose trainer lives, with the age of their newest durable checkpoint, as metrics tell it. */
static FALLIBLE enum err get_lost(struct client *c, json_t *all)
{
	static const char family[] = "dcpd_lost_work_seconds{";
	CLEANUP(client_drop) struct answer got = { 0 };

	TRY(client_get(c, "/metrics", &got));
	buf_putc(&got.body, '\0');
	TRY(buf_status(&got.body));
	for (const char *p = (char *)got.body.p; (p = strstr(p, family)) && json_array_size(all) < RUNS_MAX; p += strlen(family)) {
		char line[1024], run[512], storage[64], lost[32];
		snprintf(line, sizeof line, "%.*s", (int)strcspn(p, "\n"), p);
		const char *value = strrchr(line, ' ');
		take_label(line, "run=\"", run, sizeof run);
		take_label(line, "storage=\"", storage, sizeof storage);
		json_t *one = json_pack("{s:s, s:s, s:s}", "storage", storage, "run", run, "lost",
					show_seconds(value ? strtod(value, NULL) : 0, lost));
		if (!one || json_array_append_new(all, one) != 0)
			return ERR(NO_MEMORY, "cannot list runs");
	}
	return OK;
}

/* Prints a table, and an empty line; nothing if the list is empty. */
static void put_list(FILE *out, const json_t *items, const char *const *columns)
{
	if (json_array_size(items) == 0)
		return;
	show_grid(out, items, json_array_size(items), columns);
	fputc('\n', out);
}

static void put_head(FILE *out, struct client *c, const json_t *caps, const json_t *jobs)
{
	CLEANUP(buf_free) struct buf b = BUF_INIT(TEXT_BYTES_MAX);
	double limit = show_number(caps, "shm.limit_bytes"), used = show_number(caps, "shm.used_bytes");
	char x[32], y[32], line[1024];

	int n = snprintf(line, sizeof line, "dcpd %s at %s   shared memory %s of %s (%.0f %%)   %zu unfinished job%s",
			 show_text(caps, "version"), client_url(c), show_bytes(used, x), show_bytes(limit, y),
			 limit > 0 ? 100 * used / limit : 0, json_array_size(jobs), json_array_size(jobs) == 1 ? "" : "s");
	term_clean(&b, line, num_min((size_t)n, sizeof line - 1), false);
	if (buf_status(&b) == OK)
		fprintf(out, "%.*s\n\n", (int)b.len, (char *)b.p);
}

static FALLIBLE enum err put_screen(FILE *out, struct client *c)
{
	static const char *const lost[] = { "RUN=run", "STORAGE=storage", "LOST IF IT ENDS=lost", NULL };
	static const char *const job[] = { "JOB=id", "KIND=kind", "STATE=state", "DONE=percent:n", "RATE=rate:n", "ETA=eta:n",
					   "STAGE=stage", "BYTES=bytes:n", "ON=ref:ref", NULL };
	static const char *const storage[] = { "STORAGE=name", "STATE=state", "FREE=free_bytes:bytes", "TOTAL=total_bytes:bytes",
					       "BEHIND=tier.storage", "WAIT=tier.waiting:n", NULL };
	CLEANUP(jval_drop) json_t *jobs = json_array();
	CLEANUP(jval_drop) json_t *runs = json_array();
	CLEANUP(client_drop) struct answer caps = { 0 };
	CLEANUP(client_drop) struct answer storages = { 0 };

	NEED(jobs && runs, "cannot list");
	TRY(client_get(c, "/v1/capabilities", &caps));
	TRY(client_get(c, "/v1/storages", &storages));
	TRY(get_jobs(c, jobs));
	TRY(get_lost(c, runs));
	put_head(out, c, caps.json, jobs);
	put_list(out, runs, lost);
	put_list(out, jobs, job);
	put_list(out, json_object_get(storages.json, "storages"), storage);
	return OK;
}

/* ---- the terminal ---- */

static struct termios before;

static void enter(void)
{
	struct termios raw;

	if (tcgetattr(STDIN_FILENO, &before) == 0) {
		raw = before;
		raw.c_lflag &= ~(tcflag_t)(ICANON | ECHO);
		(void)tcsetattr(STDIN_FILENO, TCSANOW, &raw);
	}
	fputs("\033[?1049h\033[?25l", stdout); /* the other screen, no cursor */
}

static void leave(void)
{
	fputs("\033[?25h\033[?1049l", stdout);
	fflush(stdout);
	(void)tcsetattr(STDIN_FILENO, TCSANOW, &before);
}

/* Writes as many lines as there is room for, each over the one before. */
static void paint(const char *text)
{
	unsigned rows = term_rows(stdout);

	fputs("\033[H", stdout);
	for (unsigned y = 0; y + 1 < rows && *text; y++) {
		size_t n = strcspn(text, "\n");
		printf("%.*s\033[K\n", (int)n, text);
		text += n + (text[n] == '\n');
	}
	printf("\033[J%sq: quit%s", term_colour(stdout, TERM_DIM), term_colour(stdout, TERM_PLAIN));
	fflush(stdout);
}

/* Waits; true: a q was typed, or Ctrl-C. A change of the terminal's size ends the wait. */
static bool wants_end(int64_t ms)
{
	struct pollfd in = { .fd = STDIN_FILENO, .events = POLLIN };
	char key = 0;

	if (poll(&in, 1, (int)ms) > 0 && (in.revents & (POLLIN | POLLHUP)) && read(STDIN_FILENO, &key, 1) <= 0)
		return true;
	return client_stop || key == 'q' || key == 'Q';
}

static FALLIBLE enum err show_once(struct client *c, bool full)
{
	CLEANUP(mem_free_ptr) char *text = mem_zalloc(TEXT_BYTES_MAX + 1, 1);
	FILE *out = text ? fmemopen(text, TEXT_BYTES_MAX, "w") : NULL;

	NEED(out, "cannot make a screen");
	if (full)
		term_stands_for_stdout(out);
	enum err e = put_screen(out, c);
	term_stands_for_stdout(NULL);
	fclose(out);
	if (!e && full)
		paint(text);
	else if (!e)
		fputs(text, stdout);
	fflush(stdout);
	return e;
}

int top_show(const struct command *, struct client *c, const struct args *a)
{
	bool full = term_is(stdout) && isatty(STDIN_FILENO) && show_form() == SHOW_TABLE;
	struct watch_wishes w;
	enum err e = watch_wishes(a, &w);

	if (!e && show_form() != SHOW_TABLE)
		e = ERR(INVALID_REQUEST, "dcpctl top is for people: dcpctl jobs, status and runs have --output");
	if (!full && !w.count)
		w.count = 1;
	if (e)
		return follow_failed(c, e);
	follow_catch_interrupts();
	if (full)
		enter();
	for (uint64_t n = 0; !e && !client_stop && (!w.count || n < w.count); n++) {
		e = show_once(c, full);
		bool last = w.count && n + 1 >= w.count;
		if (!e && full && wants_end(w.every_ms))
			break;
		if (!e && !full && !last)
			(void)poll(NULL, 0, (int)w.every_ms);
	}
	if (full)
		leave();
	return e && !client_stop ? follow_failed(c, e) : EXIT_DONE;
}
