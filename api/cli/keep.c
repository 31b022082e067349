/* keep.c: dcpctl's commands about how long checkpoints are kept: policies and the trash. */
#include <stdio.h>
#include <string.h>

#include "api/cli/commands.h"
#include "api/cli/show.h"
#include "base/jval.h"
#include "base/mem.h"

/* Divides "STORAGE:NAME"; *name_out is NULL where there is none. The storage is mem_free'd by the caller. */
static FALLIBLE enum err divide(const char *ref, char **storage_out, const char **name_out)
{
	const char *colon = strchr(ref, ':');

	if (args_is_shm(ref) || colon == ref || !ref[0])
		return ERR(INVALID_REQUEST, "\"%.200s\" is no storage", ref);
	*storage_out = colon ? mem_strndup(ref, (size_t)(colon - ref)) : mem_strdup(ref);
	*name_out = colon && colon[1] ? colon + 1 : NULL;
	return *storage_out ? OK : ERR(NO_MEMORY, "cannot build a path");
}

static void print_trash(const json_t *doc)
{
	static const char *const columns[] = { "ID=id", "NAME=name", "SIZE=bytes:bytes", "DELETED=deleted_at", "UNTIL=until", "UID=uid",
					       "POLICY=policy", "WHY=why", NULL };

	show_table(json_object_get(doc, "trash"), columns);
}

int keep_trash(const struct command *, struct client *c, const struct args *a)
{
	CLEANUP(buf_free) struct buf path = BUF_INIT(16384);
	CLEANUP(mem_free_ptr) char *storage = NULL;
	const char *name;
	enum err e = divide(a->words[0], &storage, &name);

	if (e == OK) {
		client_put(&path, "/v1/storages/%/trash", storage);
		if (name)
			client_put(&path, "?name=%", name);
		e = client_end(&path);
	}
	return e ? follow_failed(c, e) : follow_show(c, &path, args_flag(a, "json"), print_trash);
}

int keep_undelete(const struct command *, struct client *c, const struct args *a)
{
	CLEANUP(jval_drop) json_t *body = json_object();
	CLEANUP(buf_free) struct buf path = BUF_INIT(16384);
	CLEANUP(client_drop) struct answer got = { 0 };
	CLEANUP(mem_free_ptr) char *storage = NULL;
	const char *name = NULL, *id = args_value(a, "id");
	enum err e = divide(a->words[0], &storage, &name);

	if (e == OK && !name)
		e = ERR(INVALID_REQUEST, "dcpctl undelete STORAGE:NAME");
	if (e == OK && id && json_object_set_new(body, "id", json_string(id)) != 0)
		e = ERR(INVALID_REQUEST, "--id is not UTF-8");
	if (e == OK) {
		client_put(&path, "/v1/checkpoints/%/%:undelete", storage, name);
		e = client_end(&path);
	}
	if (e == OK)
		e = client_call(c, "POST", (char *)path.p, body, &got);
	if (e)
		return follow_failed(c, e);
	if (args_flag(a, "json"))
		show_json(got.json);
	else
		show_say("%s is there again\n", a->words[0]);
	return EXIT_DONE;
}

/* ---- policies ---- */

/* Divides "METRIC:min:2" into {"metric","mode","count"}. */
static FALLIBLE enum err put_best(json_t *keep, const char *text)
{
	const char *mode = strchr(text, ':'), *count = mode ? strchr(mode + 1, ':') : NULL;
	uint64_t n = 1;

	if (mode == text || (count && !str_to_u64(str_of(count + 1), &n)) || n > INT32_MAX)
		return ERR(INVALID_REQUEST, "\"%.100s\" is no METRIC:min|max:COUNT, such as loss:min:2", text);
	size_t metric_n = mode ? (size_t)(mode - text) : strlen(text);
	size_t mode_n = !mode ? 3 : count ? (size_t)(count - mode - 1) : strlen(mode + 1);
	json_t *best = json_pack("{s:s%, s:s%, s:I}", "metric", text, metric_n, "mode", mode ? mode + 1 : "min", mode_n, "count",
				 (json_int_t)n);
	return best && json_object_set_new(keep, "best", best) == 0 ? OK : ERR(INVALID_REQUEST, "--keep-best is not UTF-8");
}

static FALLIBLE enum err put_number(json_t *object, const char *key, const char *option, const char *text)
{
	uint64_t n = 0;

	if (!text)
		return OK;
	if (!str_to_u64(str_of(text), &n) || n > INT64_MAX)
		return ERR(INVALID_REQUEST, "--%s %.50s is no number", option, text);
	return json_object_set_new(object, key, json_integer((json_int_t)n)) == 0 ? OK : ERR(NO_MEMORY, "cannot ask");
}

static FALLIBLE enum err put_word(json_t *object, const char *key, const char *option, const char *text)
{
	if (text && json_object_set_new(object, key, json_string(text)) != 0)
		return ERR(INVALID_REQUEST, "--%s is not UTF-8", option);
	return OK;
}

/* The policy that the options say; an empty object: none of them was given. */
static FALLIBLE enum err policy_of(const struct args *a, json_t *doc)
{
	json_t *keep = json_object();

	if (!keep || !doc || json_object_set_new(doc, "keep", keep) != 0)
		return ERR(NO_MEMORY, "cannot ask");
	TRY(put_word(doc, "storage", "storage", args_value(a, "storage")));
	TRY(put_word(doc, "match", "match", args_value(a, "match")));
	TRY(put_number(keep, "last", "keep-last", args_value(a, "keep-last")));
	TRY(put_number(keep, "every_steps", "keep-every-steps", args_value(a, "keep-every-steps")));
	TRY(put_word(keep, "every", "keep-every", args_value(a, "keep-every")));
	if (args_value(a, "keep-best"))
		TRY(put_best(keep, args_value(a, "keep-best")));
	TRY(put_word(keep, "ttl", "ttl", args_value(a, "ttl")));
	TRY(put_number(keep, "bytes", "bytes", args_value(a, "bytes")));
	TRY(put_word(doc, "trash", "trash", args_value(a, "trash")));
	if ((args_flag(a, "verified-only") && json_object_set_new(doc, "verified_only", json_true()) != 0) ||
	    (args_flag(a, "paused") && json_object_set_new(doc, "paused", json_true()) != 0) ||
	    (args_flag(a, "confirm") && json_object_set_new(doc, "confirm", json_true()) != 0))
		return ERR(NO_MEMORY, "cannot ask");
	if (json_object_size(keep) == 0)
		json_object_del(doc, "keep");
	return OK;
}

static void print_preview(const json_t *doc)
{
	static const char *const columns[] = { "REMOVE=name", "SIZE=bytes:bytes", "WHY=why", "POLICY=policy", NULL };
	static const char *const stay[] = { "KEEP=name", "SIZE=bytes:bytes", "WHY=why", NULL };
	char text[32];

	show_table(json_object_get(doc, "remove"), columns);
	show_say("\n");
	show_table(json_object_get(doc, "keep"), stay);
	show_say("\n%zu would go, %s\n", json_array_size(json_object_get(doc, "remove")),
		 show_bytes(show_number(doc, "remove_bytes"), text));
	if (show_number(doc, "over_bytes") > 0)
		show_say("the budget is exceeded by %s that must stay\n", show_bytes(show_number(doc, "over_bytes"), text));
}

/* Reasons are a list: joined for a table. */
static void join_reasons(json_t *doc)
{
	json_t *one, *reason;
	size_t i, k;

	json_array_foreach(json_object_get(doc, "keep"), i, one) {
		char text[256] = "";
		size_t n = 0;
		json_array_foreach(json_object_get(one, "why"), k, reason)
			if (n < sizeof text)
				n += (size_t)snprintf(text + n, sizeof text - n, "%s%s", k ? ", " : "", json_string_value(reason));
		(void)json_object_set_new(one, "why", json_string(text));
	}
}

static int show_preview(struct client *c, const struct args *a, const json_t *doc)
{
	CLEANUP(buf_free) struct buf path = BUF_INIT(4096);
	CLEANUP(client_drop) struct answer got = { 0 };
	enum err e;

	client_put(&path, "/v1/policies/%:preview", a->words[0]);
	e = client_end(&path);
	if (e == OK)
		e = client_call(c, "POST", (char *)path.p, doc, &got);
	if (e)
		return follow_failed(c, e);
	if (args_flag(a, "json")) {
		show_json(got.json);
		return EXIT_DONE;
	}
	join_reasons(got.json);
	print_preview(got.json);
	return EXIT_DONE;
}

static void print_policy(const json_t *doc)
{
	if (!show_whole(doc))
		show_json(doc);
}

int keep_policy(const struct command *, struct client *c, const struct args *a)
{
	CLEANUP(jval_drop) json_t *doc = json_object();
	CLEANUP(buf_free) struct buf path = BUF_INIT(4096);
	CLEANUP(client_drop) struct answer got = { 0 };
	bool removes = args_flag(a, "rm");
	enum err e = policy_of(a, doc);
	bool given = e == OK && json_object_size(doc) > 0;

	if (e == OK && removes && (given || args_flag(a, "preview")))
		e = ERR(INVALID_REQUEST, "--rm removes the policy: it goes with no other option");
	if (e == OK && args_flag(a, "preview"))
		return show_preview(c, a, given ? doc : NULL);
	client_put(&path, "/v1/policies/%", a->words[0]);
	e = e ?: client_end(&path);
	if (e == OK && !given && !removes)
		return follow_show(c, &path, args_flag(a, "json"), print_policy);
	if (e == OK)
		e = client_call(c, removes ? "DELETE" : "PUT", (char *)path.p, removes ? NULL : doc, &got);
	if (e)
		return follow_failed(c, e);
	if (args_flag(a, "json") && !removes)
		show_json(got.json);
	else
		show_say("policy %s is %s\n", a->words[0], removes ? "gone" : "kept");
	return EXIT_DONE;
}

static void print_policies(const json_t *doc)
{
	static const char *const columns[] = { "NAME=name", "STORAGE=storage", "MATCH=match", "CHECKPOINTS=status.checkpoints",
					       "SIZE=status.bytes:bytes", "TO REMOVE=status.to_remove", "REMOVED=status.removed",
					       "OVER=status.over_bytes:bytes", "PROBLEM=status.problem", NULL };

	show_table(json_object_get(doc, "policies"), columns);
}

int keep_policies(const struct command *, struct client *c, const struct args *a)
{
	CLEANUP(buf_free) struct buf path = BUF_INIT(4096);

	client_put(&path, "/v1/policies");
	return follow_show(c, &path, args_flag(a, "json"), print_policies);
}
