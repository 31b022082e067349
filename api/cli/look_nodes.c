/* look_nodes.c: dcpctl's commands about others than this host's trainers: nodes of a cluster, drain, which runs have, too, who is given
 * published weights, and weights that are kept for inference engines. */
#include <stdio.h>
#include <string.h>

#include "api/cli/commands.h"
#include "api/cli/request.h"
#include "api/cli/show.h"
#include "base/clock.h"
#include "base/mem.h"

enum { WAIT_MAX_MS = 60000 /* of one request */, NOTE_MS = 30000 /* a node takes note with its next beat */,
       RUN_MS = 60000 };

static const char *const columns[] = { "NODE=name",	   "STATE=state", "ADVERTISE=advertise", "VERSION=version",
				       "JOBS=jobs", "STORAGES=storages:words", NULL };

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

static void print_publications(const json_t *doc)
{
	static const char *const published[] = { "PUBLICATION=name", "VERSION=generation", "RANKS=world_size",
						 "PUBLISHED=published_at", NULL };
	static const char *const subscribed[] = { "SUBSCRIBER=name", "NODE=node", "OF=subscribe.publication", "RANKS=world_size",
						  "VERSION=generation", "APPLIED=subscription.applied", "LAG=subscription.lag_s",
						  "CHANGED=subscription.changed_bytes:bytes", "PROBLEM=subscription.problem.code", NULL };
	json_t *all = json_array(), *one;
	size_t i;

	show_table(json_object_get(doc, "publications"), published);
	json_array_foreach(json_object_get(doc, "publications"), i, one)
		json_array_extend(all, json_object_get(one, "subscribers"));
	if (json_array_size(all))
		show_table(all, subscribed);
	json_decref(all);
}

int look_publications(const struct command *, struct client *c, const struct args *a)
{
	CLEANUP(buf_free) struct buf path = BUF_INIT(64);

	buf_puts(&path, "/v1/publications");
	enum err e = client_end(&path);
	return e ? follow_failed(c, e) : follow_show(c, &path, args_flag(a, "json"), print_publications);
}

typedef bool is_done_fn(const json_t *answer);

static bool is_drained(const json_t *answer)
{
	return strcmp(show_text(answer, "state"), "drained") == 0;
}

static bool is_joined(const json_t *answer)
{
	return strcmp(show_text(answer, "state"), "joined") == 0;
}

static bool is_run_drained(const json_t *answer)
{
	return json_is_true(json_object_get(answer, "drained"));
}

/* Asks until that is so, or the time is over. base: "/v1/nodes/a". */
static FALLIBLE enum err ask(struct client *c, const struct buf *base, const char *verb, is_done_fn *is_done, int64_t wait_ms,
			     struct answer *got)
{
	int64_t end = clock_mono_ms() + wait_ms;

	for (;;) {
		CLEANUP(buf_free) struct buf path = BUF_INIT(16384);
		int64_t left = end - clock_mono_ms();
		buf_put(&path, base->p, base->len);
		buf_printf(&path, ":%s", verb);
		if (left > 0)
			buf_printf(&path, "?wait=%jdms", (intmax_t)(left < WAIT_MAX_MS ? left : WAIT_MAX_MS));
		TRY(client_end(&path));
		client_drop(got);
		TRY(client_call(c, "POST", (char *)path.p, NULL, got));
		if (left <= 0 || is_done(got->json))
			return OK;
	}
}

static bool has_failed(const json_t *saves)
{
	const json_t *save;
	size_t i;

	json_array_foreach(saves, i, save)
		if (strcmp(show_text(save, "state"), "failed") == 0)
			return true;
	return false;
}

static FALLIBLE enum err put_base(struct buf *base, const char *word, bool *is_run_out)
{
	const char *colon = strchr(word, ':');

	*is_run_out = colon != NULL;
	if (!colon) {
		client_put(base, "/v1/nodes/%", word);
		return buf_status(base);
	}
	CLEANUP(mem_free_ptr) char *storage = mem_strndup(word, (size_t)(colon - word));
	NEED(storage, "cannot build a path");
	client_put(base, "/v1/runs/%/%", storage, colon + 1);
	return buf_status(base);
}

static void say(const char *word, const struct answer *got, bool is_run, bool is_so)
{
	static const char *const saves[] = { "JOB=id", "CHECKPOINT=name", "STATE=state", NULL };
	const json_t *of_run = json_object_get(got->json, "saves");

	if (is_run && json_array_size(of_run))
		show_table(of_run, saves);
	show_say("%s is %s\n", word, !is_run ? show_text(got->json, "state") : is_so ? "drained" : "not drained");
}

int look_drain(const struct command *self, struct client *c, const struct args *a)
{
	CLEANUP(client_drop) struct answer got = { 0 };
	CLEANUP(buf_free) struct buf base = BUF_INIT(16384);
	bool drain = strcmp(self->name, "drain") == 0, is_run = false;
	const char *wait = args_value(a, "wait");
	enum err e = put_base(&base, a->words[0], &is_run);
	int64_t wait_ms = !drain ? NOTE_MS : is_run ? RUN_MS : 0;
	is_done_fn *is_done = is_run ? is_run_drained : drain ? is_drained : is_joined;

	if (!e && wait && !str_to_ms(str_of(wait), &wait_ms))
		e = ERR(INVALID_REQUEST, "--wait %.50s is no time, such as 60s", wait);
	if (!e && is_run && !drain)
		e = ERR(INVALID_REQUEST, "a run is not undrained: only nodes are");
	e = e ?: ask(c, &base, self->name, is_done, wait_ms, &got);
	if (e)
		return follow_failed(c, e);
	bool is_so = is_done(got.json);
	if (args_flag(a, "json"))
		show_json(got.json);
	else
		say(a->words[0], &got, is_run, is_so);
	if (is_so)
		return is_run && has_failed(json_object_get(got.json, "saves")) ? EXIT_JOB_FAILED : EXIT_DONE;
	return wait_ms ? EXIT_TIMED_OUT : EXIT_DONE;
}

int look_forget(const struct command *, struct client *c, const struct args *a)
{
	CLEANUP(client_drop) struct answer got = { 0 };
	CLEANUP(buf_free) struct buf path = BUF_INIT(16384);

	client_put(&path, "/v1/nodes/%", a->words[0]);
	buf_puts(&path, ":forget");
	enum err e = client_end(&path);
	e = e ?: client_call(c, "POST", (char *)path.p, NULL, &got);
	if (e)
		return follow_failed(c, e);
	show_say("%s is forgotten\n", a->words[0]);
	return EXIT_DONE;
}

static void print_device_images(const json_t *doc)
{
	static const char *const kept[] = { "ID=id", "STATE=state", "STATE_DICT=state_dict", "RANK=rank", "GENERATION=generation",
					    "DEVICE=device", "BYTES=bytes:bytes", "ATTACHED=attached", "EXPIRES=expires_at",
					    "PROBLEM=problem", NULL };

	show_table(json_object_get(doc, "device_images"), kept);
}

static FALLIBLE enum err state_dict_of(const char *word, const char **out)
{
	if (!args_is_shm(word))
		return ERR(INVALID_REQUEST, "%.200s is no state dict in shared memory: shm:NAME", word);
	*out = word + strlen("shm:");
	return OK;
}

int look_device_images(const struct command *, struct client *c, const struct args *a)
{
	CLEANUP(buf_free) struct buf path = BUF_INIT(16384);
	const char *name = NULL;
	enum err e = a->word_count ? state_dict_of(a->words[0], &name) : OK;

	buf_puts(&path, "/v1/device-images");
	if (name)
		client_put(&path, "?state_dict=%", name);
	e = e ?: client_end(&path);
	return e ? follow_failed(c, e) : follow_show(c, &path, args_flag(a, "json"), print_device_images);
}

static FALLIBLE enum err put_number(const struct args *a, const char *option, json_t *body)
{
	const char *text = args_value(a, option);
	uint64_t n;

	if (!text)
		return OK;
	if (!str_to_u64(str_of(text), &n) || n > INT64_MAX)
		return ERR(INVALID_REQUEST, "--%s %.50s is no number", option, text);
	return request_set(body, option, json_integer((json_int_t)n));
}

static FALLIBLE enum err keep_request(const struct args *a, json_t *body)
{
	const char *name, *device = args_value(a, "device"), *ttl = args_value(a, "ttl");
	int64_t ms = 0;

	TRY(state_dict_of(a->words[0], &name));
	TRY(request_set(body, "state_dict", json_string(name)));
	TRY(put_number(a, "rank", body));
	TRY(put_number(a, "generation", body));
	if (device)
		TRY(request_set(body, "device", json_string(device)));
	if (ttl)
		TRY(args_duration(ttl, &ms));
	return ttl ? request_set(body, "ttl_seconds", json_integer(ms / 1000)) : OK;
}

int look_keep(const struct command *, struct client *c, const struct args *a)
{
	CLEANUP(client_drop) struct answer got = { 0 };
	json_t *body = json_object();
	enum err e = keep_request(a, body);

	e = e ?: client_call(c, "POST", "/v1/device-images", body, &got);
	json_decref(body);
	if (e)
		return follow_failed(c, e);
	if (args_flag(a, "json"))
		show_json(got.json);
	else
		show_say("%s\n", show_text(got.json, "id"));
	return EXIT_DONE;
}

int look_drop(const struct command *, struct client *c, const struct args *a)
{
	CLEANUP(client_drop) struct answer got = { 0 };
	CLEANUP(buf_free) struct buf path = BUF_INIT(16384);

	client_put(&path, "/v1/device-images/%", a->words[0]);
	enum err e = client_end(&path);
	e = e ?: client_call(c, "DELETE", (char *)path.p, NULL, &got);
	return e ? follow_failed(c, e) : EXIT_DONE;
}
