/* jobs.c: the commands that make and steer jobs. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "api/cli/commands.h"
#include "api/cli/request.h"
#include "api/cli/show.h"
#include "api/cli/transform.h"

const char *jobs_command(enum job_kind kind)
{
	return kind == JOB_REPLICATE ? "cp" : kind_of(kind)->name;
}

bool jobs_kind(const char *name, enum job_kind *out)
{
	for (int k = 0; k < JOB_KIND_COUNT; k++)
		if (strcmp(jobs_command((enum job_kind)k), name) == 0) {
			*out = (enum job_kind)k;
			return true;
		}
	return false;
}

/* REF REF... DST */
static FALLIBLE enum err put_sources(const struct args *a, json_t *doc)
{
	json_t *sources = json_array(), *ref;

	TRY(request_set(doc, "sources", sources));
	for (unsigned i = 0; i + 1 < a->word_count; i++) {
		TRY(args_ref(a->words[i], &ref));
		if (json_array_append_new(sources, ref) != 0)
			return ERR(NO_MEMORY, "cannot build the request");
	}
	return request_ref(doc, "target", a->words[a->word_count - 1]);
}

static FALLIBLE enum err put_refs(enum job_kind kind, const struct args *a, json_t *doc)
{
	bool compares = kind_is(kind, KIND_COMPARES);

	if (kind == JOB_MERGE)
		return put_sources(a, doc);
	if (kind_is(kind, KIND_REPAIRS))
		return request_ref(doc, "target", a->words[0]);
	if (kind_is(kind, KIND_HAS_BASE)) {
		TRY(request_ref(doc, "base", a->words[0]));
		TRY(request_ref(doc, "source", a->words[1]));
		return request_ref(doc, "target", a->words[2]);
	}
	TRY(request_ref(doc, compares ? "a" : "source", a->words[0]));
	if (a->word_count > 1)
		return request_ref(doc, compares ? "b" : "target", a->words[1]);
	if (kind_is(kind, KIND_OPERATES)) /* into itself: its next generation */
		return request_ref(doc, "target", a->words[0]);
	if (kind_of(kind)->writes) /* check: a state dict that nobody makes */
		return request_ref(doc, "target", "shm:dcpctl-check");
	return OK;
}

static FALLIBLE enum err build(const struct command *self, struct client *c, const struct args *a, json_t *doc)
{
	enum job_kind kind;
	if (!jobs_kind(self->name, &kind))
		kind = JOB_LOAD; /* of "check": a dry run */

	TRY(request_set(doc, "kind", json_string(kind_names[kind])));
	TRY(put_refs(kind, a, doc));
	TRY(request_fields(a, kind, doc));
	return transform_fields(c, a, doc);
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
	CLEANUP(client_drop) struct answer got = { 0 };
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
		show_out("%s\n", id);
	if (dry_run || args_flag(a, "detach"))
		return EXIT_DONE;
	follow_catch_interrupts();
	return follow_job(c, id, &f);
}

int jobs_submit(const struct command *self, struct client *c, const struct args *a)
{
	CLEANUP(jval_drop) json_t *doc = json_object();
	enum err e = doc ? build(self, c, a, doc) : ERR(NO_MEMORY, "cannot build the request");

	return e ? follow_failed(c, e) : send_job(c, a, doc);
}

static void print_check(const char *ref, const json_t *plan)
{
	const json_t *problems = json_object_get(plan, "problems"), *item;
	size_t i;
	char x[32], y[32];

	follow_warn_of_rules(plan);
	json_array_foreach(problems, i, item)
		show_say("%s: %s\n", show_text(item, "code"), show_text(item, "detail"));
	double count = show_number(plan, "problem_count");
	if (count > (double)json_array_size(problems))
		show_say("... and %.0f more\n", count - (double)json_array_size(problems));
	if (!json_is_true(json_object_get(plan, "loads"))) {
		show_say("%s cannot be loaded so: %.0f mismatches\n", ref, count);
		return;
	}
	show_say("%s can be loaded so: %s to read, %.2f x what is needed, at most %s of memory besides the segments\n", ref,
	       show_bytes(show_number(plan, "read_bytes"), x), show_number(plan, "over_read_ratio"),
	       show_bytes(show_number(plan, "peak_memory_bytes"), y));
}

/* Can this checkpoint be loaded in that layout, or into that state dict? A dry run of a load says it, and all that does not fit. */
int jobs_check(const struct command *self, struct client *c, const struct args *a)
{
	CLEANUP(jval_drop) json_t *doc = json_object();
	CLEANUP(client_drop) struct answer got = { 0 };
	enum err e = doc ? build(self, c, a, doc) : ERR(NO_MEMORY, "cannot build the request");

	if (e == OK)
		e = client_call(c, "POST", "/v1/jobs?dry_run=true", doc, &got);
	if (e)
		return follow_failed(c, e);
	bool loads = json_is_true(json_object_get(got.json, "loads"));
	if (args_flag(a, "json"))
		show_json(got.json);
	else
		print_check(a->words[0], got.json);
	return loads ? EXIT_DONE : EXIT_DIFFERS;
}

static bool any_has(const json_t *jobs, const char *key)
{
	const json_t *one;
	size_t i;

	json_array_foreach(jobs, i, one)
		if (json_object_get(one, key))
			return true;
	return false;
}

/* Only jobs of a cluster have a node, and few were ever taken over. */
static void print_jobs(const json_t *page)
{
	const char *columns[12] = { "ID=id", "KIND=kind", "STATE=state", "STAGE=stage", "SOURCE=source|a:ref", "TARGET=target|b:ref",
				    "DONE=progress.bytes_done:bytes", "TOTAL=progress.bytes_total:bytes", "CREATED=created_at" };
	const json_t *jobs = json_object_get(page, "jobs");
	size_t n = 9;

	if (any_has(jobs, "node"))
		columns[n++] = "NODE=node";
	if (any_has(jobs, "taken_over"))
		columns[n++] = "TAKEN-OVER=taken_over:count";
	show_table(jobs, columns);
}

int jobs_list(const struct command *, struct client *c, const struct args *a)
{
	CLEANUP(buf_free) struct buf path = BUF_INIT(8192);
	const char *count = args_value(a, "limit");

	client_put(&path, "/v1/jobs?page_size=%", count ? count : "50");
	client_put(&path, "&filter=%", args_value(a, "filter"));
	return follow_show(c, &path, args_flag(a, "json"), print_jobs);
}

static void print_job(const json_t *job)
{
	static const char *const rows[] = { "id", "kind", "state", "stage", "created_at", "started_at", "finished_at",
					    "milestones.snapshotted", "milestones.durable", "milestones.replicated", "node", NULL };
	static const char *const takeovers[] = { "TAKEN-OVER=at", "FROM=from", "TO=to", "WHY=why", NULL };
	static const char *const replicas[] = { "NEIGHBOUR=node", "COPY=state", "STATE-DICT=state_dict", "WHY=why", NULL };
	static const char *const columns[] = { "RANK=rank", "DONE=bytes_done:bytes", "TOTAL=bytes_total:bytes", NULL };
	const json_t *ranks = show_at(job, "progress.ranks"), *result = json_object_get(job, "result");
	char x[32], y[32];

	if (show_whole(job))
		return;
	for (size_t i = 0; rows[i]; i++)
		if (show_text(job, rows[i])[0])
			show_say("%-12s %s\n", strrchr(rows[i], '.') ? strrchr(rows[i], '.') + 1 : rows[i], show_text(job, rows[i]));
	if (show_text(job, "waits_for.job")[0])
		show_say("%-12s %s %s%s%s\n", "behind", show_text(job, "waits_for.kind"), show_text(job, "waits_for.job"),
		       show_text(job, "waits_for.target")[0] ? " to " : "", show_text(job, "waits_for.target"));
	if (show_number(job, "progress.bytes_total") > 0)
		show_say("%-12s %s of %s\n", "bytes", show_bytes(show_number(job, "progress.bytes_done"), x),
		       show_bytes(show_number(job, "progress.bytes_total"), y));
	if (json_is_true(json_object_get(job, "node_away")))
		show_say("%-12s the node is away: this is what it told last\n", "");
	if (json_array_size(json_object_get(job, "taken_over")) > 0)
		show_table(json_object_get(job, "taken_over"), takeovers);
	if (json_array_size(json_object_get(job, "replicas")) > 0)
		show_table(json_object_get(job, "replicas"), replicas);
	if (json_array_size(ranks) > 0)
		show_table(ranks, columns);
	if (json_object_size(result) > 0)
		show_json(result);
	if (json_object_get(job, "error"))
		show_problem(json_object_get(job, "error"));
}

int jobs_one(const struct command *, struct client *c, const struct args *a)
{
	CLEANUP(buf_free) struct buf path = BUF_INIT(4096);
	struct follow f = { 0 };
	enum err e = read_timeout(a, &f);

	if (e)
		return follow_failed(c, e);
	if (args_flag(a, "follow")) {
		follow_catch_interrupts();
		return follow_job(c, a->words[0], &f);
	}
	client_put(&path, "/v1/jobs/%", a->words[0]);
	return follow_show(c, &path, f.json, print_job);
}

int jobs_act(const struct command *self, struct client *c, const struct args *a)
{
	CLEANUP(buf_free) struct buf path = BUF_INIT(4096);
	CLEANUP(client_drop) struct answer got = { 0 };
	CLEANUP(jval_drop) json_t *nothing = json_object();

	client_put(&path, "/v1/jobs/%:%", a->words[0], self->name);
	enum err e = client_end(&path);
	if (e == OK)
		e = client_call(c, "POST", (char *)path.p, nothing, &got);
	if (e)
		return follow_failed(c, e);
	if (args_flag(a, "json"))
		show_json(got.json);
	else
		show_say("%s %s\n", show_text(got.json, "id"), show_text(got.json, "state"));
	return EXIT_DONE;
}

static bool print_event(void *user, const char *line)
{
	const bool *json = user;
	CLEANUP(jval_drop) json_t *e = json_loads(line, JSON_ALLOW_NUL, NULL); /* FQNs may have NULs */

	if (*json) {
		show_line(e);
	} else if (e && strcmp(show_text(e, "type"), "lost") == 0) {
		show_out("lost: events are missing here; go by those that follow\n");
	} else if (e) {
		show_out("%s %s ", show_text(e, "time"), show_text(e, "type"));
		show_line(json_object_get(e, "data"));
	}
	return fflush(stdout) == 0;
}

int jobs_events(const struct command *, struct client *c, const struct args *a)
{
	CLEANUP(buf_free) struct buf path = BUF_INIT(4096);
	bool json = show_form() != SHOW_TABLE;

	client_put(&path, a->word_count ? "/v1/jobs/%/events" : "/v1/events", a->words[0]);
	follow_catch_interrupts();
	enum err e = client_end(&path);
	if (e == OK)
		e = client_lines(c, (char *)path.p, print_event, &json);
	return e && !client_stop ? follow_failed(c, e) : EXIT_DONE;
}
