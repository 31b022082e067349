/* resume.c: dcpctl resume: the reference that a training goes on from, alone on standard output, for scripts that start trainings. What
 * was skipped, and why, is said on standard error. */
#include <stdio.h>
#include <string.h>

#include "api/cli/commands.h"
#include "api/cli/show.h"
#include "base/jval.h"
#include "base/mem.h"
#include "spec/layout_rules.h"

enum { ATTEMPTS_MAX = 1000000 };

static FALLIBLE enum err set(json_t *doc, const char *key, json_t *value)
{
	return json_object_set_new(doc, key, value) == 0 ? OK : ERR(NO_MEMORY, "cannot build the request");
}

static FALLIBLE enum err take_number(const struct args *a, const char *option, uint64_t min, uint64_t max, json_t *doc, const char *key)
{
	const char *text = args_value(a, option);
	uint64_t n;

	if (!text)
		return OK;
	if (!str_to_u64(str_of(text), &n) || n < min || n > max)
		return ERR(INVALID_REQUEST, "--%s is a number from %ju to %ju", option, (uintmax_t)min, (uintmax_t)max);
	return set(doc, key, json_integer((json_int_t)n));
}

static FALLIBLE enum err take_layout(const struct args *a, json_t *doc)
{
	json_t *rules = json_array(), *rule;
	const char *text;
	unsigned at = 0;

	TRY(set(doc, "layout", rules));
	while ((text = args_next(a, "layout", &at))) {
		TRY(args_layout(text, &rule));
		if (json_array_append_new(rules, rule) != 0)
			return ERR(NO_MEMORY, "cannot build the request");
	}
	return OK;
}

static FALLIBLE enum err build(const struct args *a, json_t *doc, struct buf *path)
{
	const char *run = a->words[0], *colon = strchr(run, ':');
	CLEANUP(mem_free_ptr) char *storage = mem_strdup(run);

	NEED(storage && doc, "cannot build the request");
	if (!colon || colon == run || !colon[1] || args_is_shm(run))
		return ERR(INVALID_REQUEST, "\"%.200s\" is no run: STORAGE:RUN", run);
	storage[colon - run] = '\0';
	client_put(path, "/v1/runs/%/%", storage, colon + 1);
	buf_puts(path, ":resume");
	TRY(take_number(a, "world-size", 1, LAYOUT_WORLD_MAX, doc, "world_size"));
	TRY(take_number(a, "attempts", 0, ATTEMPTS_MAX, doc, "attempts_max"));
	if (args_flag(a, "any-optimizer"))
		TRY(set(doc, "optimizer", json_string("any")));
	return take_layout(a, doc);
}

/* A look takes all of it in the query. */
static FALLIBLE enum err put_query(const json_t *doc, struct buf *path)
{
	const char *sep = "?", *key;
	json_t *value;

	json_object_foreach((json_t *)(uintptr_t)doc, key, value) {
		CLEANUP(buf_free) struct buf text = BUF_INIT(1 << 20);
		if (json_is_string(value))
			buf_puts(&text, json_string_value(value));
		else
			TRY(jval_dump(value, &text));
		buf_putc(&text, '\0');
		TRY(buf_status(&text));
		buf_printf(path, "%s%s=", sep, key);
		client_put(path, "%", (char *)text.p);
		sep = "&";
	}
	return OK;
}

static void print_words(const json_t *got)
{
	const json_t *skipped = json_object_get(got, "skipped"), *one;
	size_t i;

	json_array_foreach((json_t *)(uintptr_t)skipped, i, one)
		show_note("dcpctl: skipped %s: %s\n", show_text(one, "name"), show_text(one, "why"));
	show_note("dcpctl: %s\n", show_text(got, "why"));
}

/* 404: a first start, unless there is no such storage, which a script must not take for one. */
static int not_found(struct client *c, const char *run)
{
	CLEANUP(client_drop) struct answer got = { 0 };
	CLEANUP(buf_free) struct buf path = BUF_INIT(4096);
	CLEANUP(mem_free_ptr) char *storage = mem_strndup(run, strcspn(run, ":"));
	struct err_info info = *err_last();

	if (storage)
		client_put(&path, "/v1/storages/%", storage);
	enum err e = storage ? client_get_at(c, &path, &got) : ERR(NO_MEMORY, "cannot ask for the storage");
	if (e) {
		int code = follow_failed(c, e);
		return e == ERR_NOT_FOUND ? EXIT_USAGE : code;
	}
	err_restore(&info);
	return follow_failed(c, ERR_NOT_FOUND);
}

int resume_print(const struct command *, struct client *c, const struct args *a)
{
	CLEANUP(jval_drop) json_t *doc = json_object();
	CLEANUP(buf_free) struct buf path = BUF_INIT(1 << 20);
	CLEANUP(client_drop) struct answer got = { 0 };
	bool looks = args_flag(a, "look");
	enum err e = build(a, doc, &path);

	if (e == OK && looks)
		e = put_query(doc, &path);
	if (e == OK && !looks)
		e = client_end(&path);
	if (e == OK)
		e = looks ? client_get_at(c, &path, &got) : client_call(c, "POST", (char *)path.p, doc, &got);
	if (e)
		return e == ERR_NOT_FOUND ? not_found(c, a->words[0]) : follow_failed(c, e);
	const char *name = show_text(got.json, "checkpoint.name");
	if (args_flag(a, "json")) {
		show_json(got.json);
		return name[0] ? EXIT_DONE : EXIT_JOB_FAILED;
	}
	print_words(got.json);
	if (!name[0])
		return EXIT_JOB_FAILED; /* there are checkpoints: a script must not take it for a first start */
	show_out("%s:%s\n", show_text(got.json, "checkpoint.storage"), name);
	return EXIT_DONE;
}
