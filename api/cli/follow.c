/* follow.c: see follow.h. The daemon holds the poll until the job ends (?wait=), so the end is seen at once, and progress is as
 * fresh as the wait is short. A daemon that restarts carries its jobs on, so a poll that finds nobody is repeated for a while. */
#include "api/cli/follow.h"

#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "api/cli/explain.h"
#include "api/cli/show.h"
#include "api/cli/term.h"
#include "base/clock.h"
#include "base/jval.h"

enum { BAR_MS = 200, LINES_MS = 1000, LINE_EVERY_MS = 5000, PATIENCE_MS = 30000, BAR_WIDTH = 24 };

static void on_interrupt(int)
{
	client_stop = 1;
}

void follow_catch_interrupts(void)
{
	struct sigaction a = { .sa_handler = on_interrupt };

	sigemptyset(&a.sa_mask);
	(void)sigaction(SIGINT, &a, NULL);
}

/* The exit code of a request that was refused. */
static int exit_of(enum err e)
{
	switch (e) {
	case ERR_NOT_FOUND:
		return EXIT_NOT_FOUND;
	case ERR_INVALID_REQUEST:
	case ERR_INVALID_JSON:
	case ERR_VALIDATION_FAILED:
	case ERR_UNKNOWN_FIELD:
	case ERR_UNKNOWN_KIND:
	case ERR_NAME_INVALID:
	case ERR_LAYOUT_INVALID:
	case ERR_WORLD_MISMATCH:
		return EXIT_USAGE;
	default:
		return EXIT_JOB_FAILED;
	}
}

/* The next step, for somebody who reads it: a script's log has the code. */
static void advise(const char *code)
{
	struct str what, remedy;

	if (term_is(stderr) && explain_find(code, &what, &remedy))
		show_note("to do: %.*s\n", (int)remedy.n, remedy.p);
}

int follow_failed(const struct client *c, enum err e)
{
	if (client_json && c && client_problem(c))
		show_json(client_problem(c));
	if (c && client_unreachable(c))
		show_note("dcpctl: %s; is dcpd running (dcpd --storage main=DIR), and DCPD_URL or --url its address?\n", err_last()->text);
	else
		show_error();
	if (!(c && client_unreachable(c)))
		advise(err_code_name(e));
	if (e == ERR_TIMED_OUT)
		return EXIT_TIMED_OUT;
	int code = exit_of(e);
	return code == EXIT_JOB_FAILED && c && client_unreachable(c) ? EXIT_NO_DAEMON : code;
}

int follow_show(struct client *c, struct buf *path, bool json, void (*print)(const json_t *doc))
{
	CLEANUP(client_drop) struct answer got = { 0 };
	enum err e = client_get_at(c, path, &got);

	if (e)
		return follow_failed(c, e);
	(json ? show_json : print)(got.json);
	return EXIT_DONE;
}

/* Fetches a job's record once. */
static FALLIBLE enum err follow_get(struct client *c, const char *id, unsigned wait_ms, struct answer *out)
{
	CLEANUP(buf_free) struct buf path = BUF_INIT(4096);

	client_put(&path, "/v1/jobs/%", id);
	if (wait_ms)
		buf_printf(&path, "?wait=%ums", wait_ms);
	return client_get_at(c, &path, out);
}

static bool ended(const json_t *job)
{
	const char *state = show_text(job, "state");

	return strcmp(state, "succeeded") == 0 || strcmp(state, "failed") == 0 || strcmp(state, "cancelled") == 0;
}

static void put_ranks(struct buf *b, const json_t *job)
{
	const json_t *ranks = show_at(job, "progress.ranks");
	size_t i;
	json_t *r;

	json_array_foreach(ranks, i, r) {
		double total = show_number(r, "bytes_total"), done = show_number(r, "bytes_done");
		buf_printf(b, " %.0f:%.0f%%", show_number(r, "rank"), total > 0 ? 100 * done / total : 100);
	}
}

/* "queued behind save 01J… to main:run1/step-5 (2 jobs ahead)"; else the stage, or the state. */
static void put_standing(struct buf *b, const json_t *job)
{
	const char *stage = show_text(job, "stage");
	const char *behind = show_text(job, "waits_for.job"), *target = show_text(job, "waits_for.target");

	if (!behind[0]) {
		buf_puts(b, stage[0] ? stage : show_text(job, "state"));
		return;
	}
	buf_printf(b, "queued behind %s %s", show_text(job, "waits_for.kind"), behind);
	if (target[0])
		buf_printf(b, " to %s", target);
	if (show_number(job, "waits_for.ahead") > 1)
		buf_printf(b, " (%.0f jobs ahead)", show_number(job, "waits_for.ahead"));
}

/* One line that replaces itself: kind, state, bar, bytes, rate, ETA, then the ranks as far as the line goes. */
static void draw_bar(const json_t *job)
{
	CLEANUP(buf_free) struct buf b = BUF_INIT(1 << 20);
	double total = show_number(job, "progress.bytes_total"), done = show_number(job, "progress.bytes_done");
	int full = total > 0 ? (int)(done / total * BAR_WIDTH) : 0;
	unsigned columns = term_columns(stderr);
	char x[32], y[32], z[32], t[32];

	buf_printf(&b, "%s ", show_text(job, "kind"));
	put_standing(&b, job);
	if (total > 0) {
		buf_puts(&b, " [");
		for (int i = 0; i < BAR_WIDTH; i++)
			buf_putc(&b, i < full ? '#' : '.');
		buf_printf(&b, "] %3.0f%% %s/%s", 100 * done / total, show_bytes(done, x), show_bytes(total, y));
		if (show_number(job, "progress.rate") > 0)
			buf_printf(&b, " %s/s", show_bytes(show_number(job, "progress.rate"), z));
		if (show_at(job, "progress.eta_s") && !ended(job))
			buf_printf(&b, " ETA %s", show_seconds(show_number(job, "progress.eta_s"), t));
		put_ranks(&b, job);
	}
	CLEANUP(buf_free) struct buf clean = BUF_INIT(1 << 20);
	term_clean(&clean, b.p ? (char *)b.p : "", b.len, false);
	if (buf_status(&b) == OK && buf_status(&clean) == OK)
		fprintf(stderr, "\r\033[K%.*s", (int)term_cut((char *)clean.p, clean.len, columns - 1), (char *)clean.p);
}

struct view {
	bool terminal, drawn;
	char last[512];             /* what was said of it */
	int64_t printed_ms;
};

static void draw(struct view *v, const json_t *job)
{
	CLEANUP(buf_free) struct buf now = BUF_INIT(1 << 16);
	char x[32], y[32], z[32];
	double total = show_number(job, "progress.bytes_total");

	if (v->terminal) {
		draw_bar(job);
		v->drawn = true;
		return;
	}
	if (!show_text(job, "waits_for.job")[0])
		buf_printf(&now, "%s ", show_text(job, "state"));
	put_standing(&now, job);
	buf_putc(&now, '\0');
	if (buf_status(&now) != OK ||
	    (strncmp((char *)now.p, v->last, sizeof v->last - 1) == 0 && clock_mono_ms() - v->printed_ms < LINE_EVERY_MS))
		return;
	snprintf(v->last, sizeof v->last, "%s", (char *)now.p);
	v->printed_ms = clock_mono_ms();
	if (ended(job))
		return;
	show_note("%s %s %s", show_text(job, "id"), show_text(job, "kind"), (char *)now.p);
	if (total > 0)
		show_note(" %s of %s, %s/s", show_bytes(show_number(job, "progress.bytes_done"), x), show_bytes(total, y),
			show_bytes(show_number(job, "progress.rate"), z));
	show_note("\n");
}

static void clear_bar(struct view *v)
{
	if (v->drawn)
		fputs("\r\033[K", stderr);
	v->drawn = false;
}

/* Ctrl-C: what shall become of the job? true: cancel it. */
static bool ask_cancel(struct view *v, const char *id)
{
	char line[16];

	clear_bar(v);
	if (!isatty(STDIN_FILENO))
		return false;
	show_note("\nJob %s goes on in the daemon. Cancel it (c) or leave it running (Enter)? ", id);
	return fgets(line, sizeof line, stdin) && (line[0] == 'c' || line[0] == 'C');
}

static int interrupted(struct client *c, struct view *v, const char *id)
{
	CLEANUP(jval_drop) json_t *nothing = json_object();
	CLEANUP(client_drop) struct answer a = { 0 };
	char path[128];

	if (!ask_cancel(v, id)) {
		show_note("job %s is left running: dcpctl job %s --follow\n", id, id);
		return EXIT_INTERRUPTED;
	}
	client_stop = 0;
	snprintf(path, sizeof path, "/v1/jobs/%.64s:cancel", id);
	enum err e = client_call(c, "POST", path, nothing, &a);
	return e ? follow_failed(c, e) : -1;
}

static void print_result(const json_t *job)
{
	const json_t *result = json_object_get(job, "result"), *value;
	const char *key;
	char x[32], y[32];
	double bytes = show_number(job, "progress.bytes_done"), rate = show_number(job, "progress.rate");

	show_say("%s %s done", show_text(job, "kind"), show_text(job, "id"));
	if (bytes > 0)
		show_say(": %s", show_bytes(bytes, x));
	if (rate > 0)
		show_say(", %s/s", show_bytes(rate, y));
	show_say("\n");
	json_object_foreach((json_t *)(uintptr_t)result, key, value) {
		if (json_is_array(value) && json_array_size(value) > 0)
			show_say("  %s: %zu\n", key, json_array_size(value));
		else if (json_is_integer(value) || json_is_real(value))
			show_say("  %s: %.15g\n", key, json_number_value(value));
		else if (json_is_boolean(value))
			show_say("  %s: %s\n", key, json_is_true(value) ? "yes" : "no");
		else if (json_is_string(value))
			show_say("  %s: %s\n", key, json_string_value(value));
	}
}

static bool is_past(const json_t *fell_back, const char *rule)
{
	const json_t *one;
	size_t i;

	json_array_foreach(fell_back, i, one)
		if (strcmp(show_text(one, "rule"), rule) == 0)
			return true;
	return false;
}

void follow_warn_of_rules(const json_t *result)
{
	const json_t *list = show_at(result, "unmatched_rules"), *past = show_at(result, "fell_back"), *one;
	double count = show_number(result, "fell_back_count");

	for (size_t i = 0; i < json_array_size(list); i++) {
		const char *match = json_string_value(json_array_get(list, i));
		show_note("dcpctl: warning: the layout rule for '%.200s' %s\n", match ? match : "",
			is_past(past, match ? match : "") ? "took no tensor" : "matches no tensor, or only what earlier rules took");
	}
	if (count > 0) {
		one = json_array_get(past, 0);
		show_note("dcpctl: warning: %.0f tensor%s lack%s the dim of a rule, such as %.200s ('%.200s'); --json lists them\n",
			count, count == 1 ? "" : "s", count == 1 ? "s" : "", show_text(one, "fqn"), show_text(one, "rule"));
	}
}

/* Prints the warnings of a job that succeeded. */
static void print_warnings(const json_t *result)
{
	const json_t *list = show_at(result, "warnings");

	for (size_t i = 0; i < json_array_size(list); i++)
		show_warning(show_text(json_array_get(list, i), "detail"));
}

static void print_differences(const json_t *result)
{
	static const char *const columns[] = { "PATH=path", "WHAT=what", "A=a", "B=b", NULL };
	const json_t *list = show_at(result, "differences");

	if (json_is_true(show_at(result, "equal")))
		show_say("equal\n");
	else if (json_array_size(list) > 0)
		show_table(list, columns);
	else
		show_say("different\n");
}

/* The differences without tensors whose values alone differ: those are listed as movers. */
static json_t *structure_of(const json_t *differences)
{
	json_t *list = json_array(), *one;
	size_t i;

	json_array_foreach((json_t *)(uintptr_t)differences, i, one)
		if (strcmp(show_text(one, "what"), "values") != 0)
			(void)json_array_append(list, one);
	return list;
}

static void print_unchanged(const json_t *result)
{
	char bytes[32], digest[32], reading[32];

	if (!show_at(result, "unchanged"))
		return;
	show_say("unchanged: %.0f tensors, %.1f %% of the bytes (%s: %s by digest, %s by reading)\n",
	       show_number(result, "unchanged.tensors"), 100 * show_number(result, "unchanged.share"),
	       show_bytes(show_number(result, "unchanged.bytes"), bytes),
	       show_bytes(show_number(result, "unchanged.by_digest.bytes"), digest),
	       show_bytes(show_number(result, "unchanged.by_reading.bytes"), reading));
}

static void print_diff(const json_t *result)
{
	static const char *const structure[] = { "PATH=path", "WHAT=what", "A=a", "B=b", "REL L2=rel_l2", NULL };
	static const char *const moved[] = { "MOVED=path", "DTYPE=dtype", "SHAPE=shape:dims", "REL L2=rel_l2", "COSINE=cosine",
					     "MAX ABS=max_abs", "CHANGED=count", "OF=elements", "BITS=bits_changed",
					     "NAN/INF=not_finite", NULL };
	CLEANUP(jval_drop) json_t *other = structure_of(show_at(result, "differences"));
	double changed = show_number(result, "totals.tensors.changed");

	if (json_is_true(show_at(result, "equal")))
		show_say("equal\n");
	if (json_array_size(other) > 0)
		show_table(other, structure);
	if (json_array_size(show_at(result, "movers")) > 0)
		show_table(show_at(result, "movers"), moved);
	if (!json_is_true(show_at(result, "equal")))
		show_say("tensors: %.0f changed, %.0f added, %.0f removed, %.0f reshaped, %.0f of another dtype\n", changed,
		       show_number(result, "totals.tensors.added"), show_number(result, "totals.tensors.removed"),
		       show_number(result, "totals.tensors.reshaped"), show_number(result, "totals.tensors.retyped"));
	print_unchanged(result);
}

static void print_stats(const json_t *result)
{
	static const char *const columns[] = { "TENSOR=fqn", "DTYPE=dtype", "SHAPE=shape:dims", "MIN=min", "MAX=max", "MEAN=mean",
					       "NORM=norm", "ZEROS=zeros", "NAN=nan", "INF=inf", NULL };

	show_table(show_at(result, "statistics"), columns);
}

static void print_inspect(const json_t *result)
{
	static const char *const runs[] = { "WOULD RUN=module", "NAME=name", "CALLS=calls", "FILE=file", "RECORD=record", "OFFSET=offset",
					    "ITEM=fqn", NULL };
	static const char *const broken[] = { "NOT FOLLOWED=detail", "FILE=file", "RECORD=record", "OFFSET=offset", NULL };
	const json_t *all = show_at(result, "globals"), *cannot = show_at(result, "broken"), *one;
	CLEANUP(json_decrefp) json_t *bad = json_array();
	size_t i;

	json_array_foreach((json_t *)(uintptr_t)all, i, one)
		if (json_is_true(json_object_get(one, "runs")))
			(void)json_array_append(bad, (json_t *)(uintptr_t)one);
	if (json_array_size(bad) > 0)
		show_table(bad, runs);
	if (json_array_size(cannot) > 0)
		show_table(cannot, broken);
	double pickles = show_number(result, "pickles"), files = show_number(result, "files");
	show_say("%.0f pickle%s in %.0f file%s: %s\n", pickles, pickles == 1 ? "" : "s", files, files == 1 ? "" : "s",
	       json_is_true(show_at(result, "safe")) ? "nothing but data" :
	       json_array_size(bad) > 0 ? "NOT safe to unpickle" : "not all could be followed");
}

static void print_repair(const json_t *result)
{
	static const char *const rebuilt[] = { "REBUILT=file", "BY=by", "PROVEN=proven", "BYTES=bytes", NULL };
	static const char *const restored[] = { "RESTORED=fqn", "RANK=rank", "FILE=file", "OFFSET=offset", "BYTES=bytes", "BY=by", NULL };
	static const char *const unknown[] = { "NOT KNOWN=fqn", "RANK=rank", "FILE=file", "OFFSET=offset", "BYTES=bytes", "WHY=detail",
					       NULL };
	bool whole = json_is_true(show_at(result, "whole")), changed = json_is_true(show_at(result, "changed"));
	double count = show_number(result, "unknown_count");

	if (json_array_size(show_at(result, "rebuilt")) > 0)
		show_table(show_at(result, "rebuilt"), rebuilt);
	if (json_array_size(show_at(result, "restored")) > 0)
		show_table(show_at(result, "restored"), restored);
	if (json_array_size(show_at(result, "unknown")) > 0)
		show_table(show_at(result, "unknown"), unknown);
	if (whole)
		show_say("%s\n", changed ? "repaired: the checkpoint is whole" : "nothing to repair: the checkpoint is whole");
	else
		show_say("%s: %.0f %s still damaged\n", changed ? "repaired in part" : "nothing was changed", count,
		       count == 1 ? "place is" : "places are");
}

/* Kinds whose result is more than a line: how it is shown, and the member that is true when there is nothing to find (exit 1 else). */
static const struct ending {
	const char *kind;
	void (*print)(const json_t *result);
	const char *good;
} endings[] = {
	{ "diff", print_diff, "equal" },
	{ "compare", print_differences, "equal" },
	{ "stats", print_stats, NULL },
	{ "inspect", print_inspect, "safe" },
	{ "repair", print_repair, "whole" },
};

static const struct ending *ending_of(const char *kind)
{
	for (size_t i = 0; i < sizeof endings / sizeof *endings; i++)
		if (strcmp(endings[i].kind, kind) == 0)
			return &endings[i];
	return NULL;
}

/* How a job that ended went: prints and gives the exit code. */
static int follow_end(const json_t *job, bool json)
{
	const char *state = show_text(job, "state");
	const json_t *result = json_object_get(job, "result");
	const struct ending *ending = ending_of(show_text(job, "kind"));
	bool ok = strcmp(state, "succeeded") == 0;

	if (json)
		show_json(job);
	else if (show_form() == SHOW_NDJSON || (show_form() == SHOW_CSV && !ending))
		(void)show_whole(job);
	else if (ok && ending)
		ending->print(result);
	else if (ok)
		print_result(job);
	if (ok && !json) {
		print_warnings(result);
		follow_warn_of_rules(result);
	}
	if (ok)
		return ending && ending->good && !json_is_true(json_object_get(result, ending->good)) ? EXIT_DIFFERS : EXIT_DONE;
	if (json_object_get(job, "error")) {
		show_problem(json_object_get(job, "error"));
		advise(show_text(job, "error.code"));
	} else
		show_note("dcpctl: job %s is %s\n", show_text(job, "id"), state);
	return strcmp(show_text(job, "error.code"), "not_found") == 0 ? EXIT_NOT_FOUND : EXIT_JOB_FAILED;
}

int follow_job(struct client *c, const char *id, const struct follow *f)
{
	struct view v = { .terminal = isatty(STDERR_FILENO) && !f->json };
	int64_t start = clock_mono_ms(), lost = 0;

	for (;;) {
		int64_t left = f->timeout_ms ? start + f->timeout_ms - clock_mono_ms() : INT64_MAX;
		unsigned wait = v.terminal ? BAR_MS : LINES_MS;
		struct answer a = { 0 };
		enum err e;

		if (left <= 0) {
			clear_bar(&v);
			show_note("dcpctl: timed_out: job %s still runs\n", id);
			return EXIT_TIMED_OUT;
		}
		e = client_stop ? ERR_CANCELLED : follow_get(c, id, left < wait ? (unsigned)left : wait, &a);
		if (e == ERR_CANCELLED && client_stop) {
			int code = interrupted(c, &v, id);
			if (code >= 0)
				return code;
			continue;
		}
		if (e && (client_unreachable(c) || e == ERR_DRAINING)) {
			lost = lost ? lost : clock_mono_ms();
			if (clock_mono_ms() - lost < PATIENCE_MS) {
				(void)usleep(200000);
				continue;
			}
		}
		if (e) {
			clear_bar(&v);
			return follow_failed(c, e);
		}
		lost = 0;
		draw(&v, a.json);
		if (ended(a.json)) {
			clear_bar(&v);
			int code = follow_end(a.json, f->json);
			client_drop(&a);
			return code;
		}
		client_drop(&a);
	}
}
