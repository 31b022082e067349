/* jobs.c: the commands that make and steer jobs. */
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "api/cli/commands.h"
#include "api/cli/show.h"

static FALLIBLE enum err set(json_t *o, const char *key, json_t *value_new)
{
	if (json_object_set_new(o, key, value_new) != 0)
		return ERR(INVALID_REQUEST, "--%s is not UTF-8", key);
	return OK;
}

/* An object inside o, made when it is not there. */
static json_t *child(json_t *o, const char *key)
{
	if (!json_object_get(o, key))
		(void)json_object_set_new(o, key, json_object());
	return json_object_get(o, key);
}

static FALLIBLE enum err set_integer(const struct args *a, const char *option, json_t *o, const char *key)
{
	const char *text = args_value(a, option);
	uint64_t n = 0;

	if (!text)
		return OK;
	if (!str_to_u64(str_of(text), &n) || n > INT64_MAX)
		return ERR(INVALID_REQUEST, "--%s must be a number, not \"%.50s\"", option, text);
	return set(o, key, json_integer((json_int_t)n));
}

static FALLIBLE enum err set_real(const struct args *a, const char *option, json_t *o)
{
	const char *text = args_value(a, option);
	char *end = NULL;
	double n = text ? strtod(text, &end) : 0;

	if (!text)
		return OK;
	if (end == text || *end)
		return ERR(INVALID_REQUEST, "--%s must be a number, not \"%.50s\"", option, text);
	return set(o, option, json_real(n));
}

static FALLIBLE enum err set_text(const struct args *a, const char *option, json_t *o, const char *key)
{
	const char *text = args_value(a, option);

	return text ? set(o, key, json_string(text)) : OK;
}

typedef enum err (*reader)(const char *text, json_t **out);

static enum err read_plain(const char *text, json_t **out)
{
	*out = json_string(text);
	return *out ? OK : ERR(INVALID_REQUEST, "an argument is not UTF-8");
}

/* Every value of a repeated option, as an array. */
static FALLIBLE enum err set_list(const struct args *a, const char *option, json_t *o, reader read)
{
	json_t *list = NULL, *item = NULL;
	const char *text;
	unsigned at = 0;

	while ((text = args_next(a, option, &at))) {
		if (!list) {
			list = json_array();
			TRY(set(o, option, list));
		}
		TRY(read(text, &item));
		if (json_array_append_new(list, item) != 0)
			return ERR(NO_MEMORY, "cannot keep --%s", option);
	}
	return OK;
}

static FALLIBLE enum err set_labels(const struct args *a, json_t *doc)
{
	const char *text;
	unsigned at = 0;

	while ((text = args_next(a, "label", &at))) {
		const char *equals = strchr(text, '=');
		char key[128];
		if (!equals || equals == text || (size_t)(equals - text) >= sizeof key)
			return ERR(INVALID_REQUEST, "--label has the form KEY=VALUE");
		snprintf(key, sizeof key, "%.*s", (int)(equals - text), text);
		TRY(set(child(doc, "labels"), key, json_string(equals + 1)));
	}
	return OK;
}

static FALLIBLE enum err set_ref(json_t *doc, const char *key, const char *text)
{
	json_t *ref = NULL;

	TRY(args_ref(text, &ref));
	return set(doc, key, ref);
}

/* The request that the options describe; only those that the command's row allows can be there. */
static FALLIBLE enum err build(const struct command *self, const struct args *a, json_t *doc)
{
	bool is_diff = strcmp(self->name, "diff") == 0;

	TRY(set(doc, "kind", json_string(self->name)));
	TRY(set_ref(doc, is_diff ? "a" : "source", a->words[0]));
	if (a->word_count > 1)
		TRY(set_ref(doc, is_diff ? "b" : "target", a->words[1]));
	json_t *target = json_object_get(doc, "target");
	TRY(set_integer(a, "generation", json_object_get(doc, "source"), "generation"));
	if (target) {
		TRY(set_integer(a, "world-size", target, "world_size"));
		TRY(set_text(a, "format", target, "format"));
		TRY(set_list(a, "layout", target, args_layout));
	}
	TRY(set_list(a, "include", doc, read_plain));
	TRY(set_list(a, "exclude", doc, read_plain));
	TRY(set_list(a, "rename", doc, args_rename));
	TRY(set_list(a, "dtype", doc, args_pair));
	TRY(set_text(a, "level", doc, "level"));
	TRY(set_real(a, "rtol", doc));
	TRY(set_real(a, "atol", doc));
	if (args_flag(a, "no-strict"))
		TRY(set(doc, "strict", json_false()));
	if (args_flag(a, "overwrite"))
		TRY(set(child(doc, "options"), "overwrite", json_true()));
	if (args_flag(a, "files-per-rank"))
		TRY(set_integer(a, "files-per-rank", child(doc, "options"), "files_per_rank"));
	if (args_flag(a, "retries"))
		TRY(set_integer(a, "retries", child(doc, "options"), "retries"));
	if (args_flag(a, "on-divergence"))
		TRY(set_text(a, "on-divergence", child(doc, "options"), "on_divergence"));
	if (args_flag(a, "verify"))
		TRY(set_text(a, "verify", child(doc, "options"), "verify"));
	return set_labels(a, doc);
}

static FALLIBLE enum err read_timeout(const struct args *a, struct follow *f)
{
	const char *text = args_value(a, "timeout");

	f->json = args_flag(a, "json");
	return text ? args_duration(text, &f->timeout_ms) : OK;
}

/* Sends a job's request, then does what --dry-run, --detach or neither says. */
static int send_job(struct client *c, const struct args *a, const json_t *doc)
{
	bool dry_run = args_flag(a, "dry-run");
	struct follow f = { 0 };
	struct answer got = { 0 };
	enum err e = read_timeout(a, &f);
	char id[64];

	if (e == OK)
		e = client_call(c, "POST", dry_run ? "/v1/jobs?dry_run=true" : "/v1/jobs", doc, &got);
	if (e)
		return follow_failed(c, e);
	snprintf(id, sizeof id, "%s", show_text(got.json, "id"));
	if (dry_run || (args_flag(a, "detach") && f.json))
		show_json(got.json);
	else if (args_flag(a, "detach"))
		puts(id);
	client_drop(&got);
	if (dry_run || args_flag(a, "detach"))
		return EXIT_DONE;
	follow_catch_interrupts();
	return follow_job(c, id, &f);
}

int jobs_submit(const struct command *self, struct client *c, const struct args *a)
{
	json_t *doc = json_object();
	enum err e = doc ? build(self, a, doc) : ERR(NO_MEMORY, "cannot build the request");
	int code = e ? follow_failed(c, e) : send_job(c, a, doc);

	json_decref(doc);
	return code;
}

/* Can this checkpoint be loaded in that layout? A dry run of a load says it, and what it would read. */
int jobs_check(const struct command *self, struct client *c, const struct args *a)
{
	json_t *doc = json_pack("{s:s,s:{s:s}}", "kind", "load", "target", "state_dict", "dcpctl-check");
	json_t *target = doc ? json_object_get(doc, "target") : NULL;
	struct answer got = { 0 };
	enum err e = doc ? set_ref(doc, "source", a->words[0]) : ERR(NO_MEMORY, "cannot build the request");

	(void)self;
	if (e == OK)
		e = set_integer(a, "world-size", target, "world_size");
	if (e == OK)
		e = set_list(a, "layout", target, args_layout);
	if (e == OK)
		e = client_call(c, "POST", "/v1/jobs?dry_run=true", doc, &got);
	json_decref(doc);
	if (e)
		return follow_failed(c, e);
	if (args_flag(a, "json"))
		show_json(got.json);
	else
		printf("%s can be loaded so\n", a->words[0]);
	client_drop(&got);
	return EXIT_DONE;
}

int jobs_list(const struct command *self, struct client *c, const struct args *a)
{
	static const char *const columns[] = { "ID=id", "KIND=kind", "STATE=state", "STAGE=stage", "DONE=progress.bytes_done:bytes",
					       "TOTAL=progress.bytes_total:bytes", "CREATED=created_at", NULL };
	CLEANUP(buf_free) struct buf path = BUF_INIT(8192);
	const char *filter = args_value(a, "filter"), *count = args_value(a, "limit");
	struct answer got = { 0 };
	enum err e;

	(void)self;
	buf_puts(&path, "/v1/jobs?page_size=");
	client_put_part(&path, count ? count : "50");
	if (filter) {
		buf_puts(&path, "&filter=");
		client_put_part(&path, filter);
	}
	buf_putc(&path, '\0');
	e = buf_status(&path);
	if (e == OK)
		e = client_get(c, (char *)path.p, &got);
	if (e)
		return follow_failed(c, e);
	if (args_flag(a, "json"))
		show_json(got.json);
	else
		show_table(json_object_get(got.json, "jobs"), columns);
	client_drop(&got);
	return EXIT_DONE;
}

static void print_job(const json_t *job)
{
	static const char *const rows[] = { "id", "kind", "state", "stage", "created_at", "started_at", "finished_at",
					    "milestones.snapshotted", "milestones.durable", NULL };
	static const char *const columns[] = { "RANK=rank", "DONE=bytes_done:bytes", "TOTAL=bytes_total:bytes", NULL };
	const json_t *ranks = show_at(job, "progress.ranks"), *result = json_object_get(job, "result");
	char x[32], y[32];

	for (size_t i = 0; rows[i]; i++)
		if (show_text(job, rows[i])[0])
			printf("%-12s %s\n", strrchr(rows[i], '.') ? strrchr(rows[i], '.') + 1 : rows[i], show_text(job, rows[i]));
	if (show_number(job, "progress.bytes_total") > 0)
		printf("%-12s %s of %s\n", "bytes", show_bytes(show_number(job, "progress.bytes_done"), x),
		       show_bytes(show_number(job, "progress.bytes_total"), y));
	if (json_array_size(ranks) > 0)
		show_table(ranks, columns);
	if (json_object_size(result) > 0)
		show_json(result);
	if (json_object_get(job, "error"))
		show_problem(json_object_get(job, "error"));
}

int jobs_one(const struct command *self, struct client *c, const struct args *a)
{
	struct follow f = { 0 };
	struct answer got = { 0 };
	enum err e = read_timeout(a, &f);

	(void)self;
	if (e)
		return follow_failed(c, e);
	if (args_flag(a, "follow")) {
		follow_catch_interrupts();
		return follow_job(c, a->words[0], &f);
	}
	e = follow_get(c, a->words[0], 0, &got);
	if (e)
		return follow_failed(c, e);
	if (f.json)
		show_json(got.json);
	else
		print_job(got.json);
	client_drop(&got);
	return EXIT_DONE;
}

int jobs_act(const struct command *self, struct client *c, const struct args *a)
{
	CLEANUP(buf_free) struct buf path = BUF_INIT(4096);
	struct answer got = { 0 };
	json_t *nothing = json_object();
	enum err e;

	buf_puts(&path, "/v1/jobs/");
	client_put_part(&path, a->words[0]);
	buf_printf(&path, ":%s", self->name);
	buf_putc(&path, '\0');
	e = buf_status(&path);
	if (e == OK)
		e = client_call(c, "POST", (char *)path.p, nothing, &got);
	json_decref(nothing);
	if (e)
		return follow_failed(c, e);
	if (args_flag(a, "json"))
		show_json(got.json);
	else
		printf("%s %s\n", show_text(got.json, "id"), show_text(got.json, "state"));
	client_drop(&got);
	return EXIT_DONE;
}

static bool print_event(void *user, const char *line)
{
	const bool *json = user;
	json_t *e = json_loads(line, 0, NULL);

	if (*json) {
		puts(line);
	} else if (e) {
		printf("%s %s ", show_text(e, "time"), show_text(e, "type"));
		(void)json_dumpf(json_object_get(e, "data"), stdout, JSON_COMPACT);
		putchar('\n');
	}
	json_decref(e);
	return fflush(stdout) == 0;
}

int jobs_events(const struct command *self, struct client *c, const struct args *a)
{
	CLEANUP(buf_free) struct buf path = BUF_INIT(4096);
	bool json = args_flag(a, "json");
	enum err e;

	(void)self;
	buf_puts(&path, "/v1/");
	if (a->word_count > 0) {
		buf_puts(&path, "jobs/");
		client_put_part(&path, a->words[0]);
		buf_putc(&path, '/');
	}
	buf_puts(&path, "events");
	buf_putc(&path, '\0');
	follow_catch_interrupts();
	e = buf_status(&path);
	if (e == OK)
		e = client_lines(c, (char *)path.p, print_event, &json);
	return e && !client_stop ? follow_failed(c, e) : EXIT_DONE;
}
