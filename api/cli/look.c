/* look.c: the commands that only look, rm, hold and unhold. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "api/cli/commands.h"
#include "api/cli/show.h"
#include "base/jval.h"
#include "base/mem.h"

enum { PAGE = 1000, AUDIT_SHOWN = 100 };

FALLIBLE enum err look_path(struct buf *b, const char *ref, const char *rest)
{
	const char *colon = strchr(ref, ':');

	if (!colon || colon == ref || !colon[1])
		return ERR(INVALID_REQUEST, "\"%.200s\" is no reference: STORAGE:NAME or shm:NAME", ref);
	if (args_is_shm(ref)) {
		buf_puts(b, "/v1/state-dicts/");
	} else {
		CLEANUP(mem_free_ptr) char *storage = mem_strdup(ref);
		NEED(storage, "cannot build a path");
		storage[colon - ref] = '\0';
		client_put(b, "/v1/checkpoints/%/", storage);
	}
	client_put(b, "%", colon + 1);
	buf_puts(b, rest);
	return client_end(b);
}

/* All pages of a list, or the first `limit` items (0: all), as one array in *all. */
static FALLIBLE enum err get_some(struct client *c, const char *path, const char *member, uint64_t limit, json_t *all)
{
	CLEANUP(mem_free_ptr) char *token = NULL;
	size_t i;
	json_t *item;

	do {
		CLEANUP(buf_free) struct buf url = BUF_INIT(16384);
		CLEANUP(client_drop) struct answer a = { 0 };
		uint64_t left = limit ? limit - json_array_size(all) : PAGE;
		buf_printf(&url, "%s%cpage_size=%d", path, strchr(path, '?') ? '&' : '?', (int)(left < PAGE ? left : PAGE));
		client_put(&url, "&page_token=%", token);
		TRY(client_get_at(c, &url, &a));
		json_array_foreach(json_object_get(a.json, member), i, item)
			(void)json_array_append(all, item);
		json_array_foreach(json_object_get(a.json, "problems"), i, item)
			show_problem(item);
		mem_free(token);
		token = NULL;
		if (show_text(a.json, "next_page_token")[0])
			token = mem_strdup(show_text(a.json, "next_page_token"));
	} while (token && (!limit || json_array_size(all) < limit));
	mem_free(move(token));
	return OK;
}

FALLIBLE enum err look_all(struct client *c, const char *path, const char *member, json_t *all)
{
	return get_some(c, path, member, 0, all);
}

/* Appends --filter, --sort and --run as a query's words, and reads --limit; 0: none. */
static FALLIBLE enum err put_wish(struct buf *path, const struct args *a, uint64_t *limit)
{
	static const char *const words[] = { "run", "filter", "sort" };
	const char *count = args_value(a, "limit");
	bool begun = memchr(path->p, '?', path->len);

	for (size_t i = 0; i < sizeof words / sizeof *words; i++) {
		const char *value = args_value(a, words[i]);
		if (!value)
			continue;
		buf_printf(path, "%c%s=", begun ? '&' : '?', words[i]);
		client_put(path, "%", value);
		begun = true;
	}
	*limit = 0;
	if (count && (!str_to_u64(str_of(count), limit) || *limit == 0 || *limit > INT32_MAX))
		return ERR(INVALID_REQUEST, "--limit is a number above 0");
	return OK;
}

static int by_name(const void *a, const void *b)
{
	const json_t *x = *(json_t *const *)a, *y = *(json_t *const *)b;
	int by_storage = strcmp(show_text(x, "storage"), show_text(y, "storage"));

	return by_storage ? by_storage : str_cmp_natural(str_of(show_text(x, "name")), str_of(show_text(y, "name")));
}

/* Sorts by storage and name, step-2 before step-10. The daemon's order is that of bytes, for the sake of its pages. */
static FALLIBLE enum err sort(json_t *all)
{
	size_t n = json_array_size(all);
	CLEANUP(mem_free_ptr) json_t **items = mem_zalloc(n, sizeof *items);

	NEED(items, "cannot sort a list");
	for (size_t i = 0; i < n; i++)
		items[i] = json_incref(json_array_get(all, i));
	qsort(items, n, sizeof *items, by_name);
	(void)json_array_clear(all);
	for (size_t i = 0; i < n; i++)
		(void)json_array_append_new(all, items[i]);
	return OK;
}

/* limit: so many items at most; 0: all. */
static FALLIBLE enum err show_list(struct client *c, const char *path, const char *member, uint64_t limit, const char *const *columns,
				   const struct args *a)
{
	CLEANUP(jval_drop) json_t *all = json_array();

	TRY(all ? get_some(c, path, member, limit, all) : ERR(NO_MEMORY, "cannot list"));
	if (!args_value(a, "sort"))
		TRY(sort(all));
	if (args_flag(a, "json"))
		show_json(all);
	else
		show_table(all, columns);
	return OK;
}

/* "backends: shm, tcp; no cuda: …" and a line for each GPU. */
static void print_devices(const json_t *caps)
{
	static const char *const names[] = { "shm", "tcp", "cuda", "nccl" };
	const json_t *device, *backends = json_object_get(caps, "backends");
	const char *comma = "", *last = "";
	char x[32];
	size_t i;

	show_say("back ends: ");
	for (i = 0; i < sizeof names / sizeof *names; i++)
		if (json_is_true(json_object_get(json_object_get(backends, names[i]), "available"))) {
			show_say("%s%s", comma, names[i]);
			comma = ", ";
		}
	show_say("\n");
	for (i = 0; i < sizeof names / sizeof *names; i++) {
		const char *why = json_string_value(json_object_get(json_object_get(backends, names[i]), "reason"));
		if (why && strcmp(why, last) != 0)
			show_say("no %s: %s\n", names[i], why);
		last = why ? why : last;
	}
	json_array_foreach(json_object_get(caps, "devices"), i, device)
		show_say("GPU %zu: %s, %s\n", i, show_text(device, "name"),
		       show_bytes(show_number(device, "memory_bytes"), x));
	show_say("\n");
}

static void print_warnings(const json_t *ready)
{
	const json_t *warning;
	size_t i;

	json_array_foreach(json_object_get(ready, "warnings"), i, warning)
		show_say("WARNING: %s\n", json_string_value(warning));
}

int look_status(const struct command *, struct client *c, const struct args *a)
{
	static const char *const storages[] = { "STORAGE=name", "STATE=state", "FREE=free_bytes:bytes", "TOTAL=total_bytes:bytes",
						"BEHIND=tier.storage", "COPIES=tier.state", "WAIT=tier.waiting", "PATH=path",
						"PROBLEM=problem.detail", NULL };
	static const char *const workers[] = { "WORKER=id", "PID=pid", "ROLE=role", "STATE=state", "JOB=job", NULL };
	CLEANUP(client_drop) struct answer caps = { 0 };
	CLEANUP(client_drop) struct answer ready = { 0 };
	enum err e = client_get(c, "/v1/capabilities", &caps);
	char x[32], y[32];

	if (e)
		return follow_failed(c, e);
	if (args_flag(a, "json")) {
		show_json(caps.json);
	} else if (!show_whole(caps.json)) {
		const char *state = client_get(c, "/readyz", &ready) == OK ? show_text(ready.json, "status") : "not ready";
		show_say("dcpd %s at %s: %s\n", show_text(caps.json, "version"), client_url(c), state);
		show_say("shared memory: %s used of %s\n", show_bytes(show_number(caps.json, "shm.used_bytes"), x),
		       show_bytes(show_number(caps.json, "shm.limit_bytes"), y));
		if (show_number(caps.json, "shm.orphaned_bytes") > 0)
			show_say("orphaned: %s of it; see dcpctl ls shm:\n", show_bytes(show_number(caps.json, "shm.orphaned_bytes"), x));
		if (json_is_string(show_at(caps.json, "host.sandbox")))
			show_say("sandbox: %s\n", show_text(caps.json, "host.sandbox"));
		print_warnings(ready.json);
		print_devices(caps.json);
		e = show_list(c, "/v1/storages", "storages", 0, storages, a);
		if (e == OK) {
			show_say("\n");
			e = show_list(c, "/v1/workers", "workers", 0, workers, a);
		}
	}
	return e ? follow_failed(c, e) : EXIT_DONE;
}

int look_ls(const struct command *, struct client *c, const struct args *a)
{
	static const char *const checkpoints[] = { "STORAGE=storage", "NAME=name", "FORMAT=format", "WORLD=world_size",
						   "SIZE=bytes:bytes", "MODIFIED=modified_at", "VERIFIED=verified:verdict", NULL };
	static const char *const dicts[] = { "NAME=name", "WORLD=world_size", "SIZE=bytes:bytes", "UID=uid", "CREATED=created_at",
					     "ORPHANED=orphaned_at", NULL };
	CLEANUP(buf_free) struct buf path = BUF_INIT(4096);
	const char *what = a->word_count ? a->words[0] : "", *colon = strchr(what, ':');
	uint64_t limit;
	enum err e;

	if (strcmp(what, "shm:") == 0 || strcmp(what, "shm") == 0) {
		e = show_list(c, "/v1/state-dicts", "state_dicts", 0, dicts, a);
		return e ? follow_failed(c, e) : EXIT_DONE;
	}
	buf_puts(&path, "/v1/checkpoints");
	if (what[0]) {
		CLEANUP(mem_free_ptr) char *storage = mem_strdup(what);
		if (storage && colon)
			storage[colon - what] = '\0';
		client_put(&path, "/%", storage);
	}
	client_put(&path, "?prefix=%", colon && colon[1] ? colon + 1 : NULL);
	e = put_wish(&path, a, &limit);
	e = e ?: client_end(&path);
	if (e == OK)
		e = show_list(c, (char *)path.p, "checkpoints", limit, checkpoints, a);
	return e ? follow_failed(c, e) : EXIT_DONE;
}

/* Keeps the items whose "fqn" matches the glob. */
static json_t *matching(const json_t *items, const char *glob)
{
	json_t *out = json_array(), *item;
	size_t i;

	json_array_foreach(items, i, item)
		if (out && str_glob(str_of(glob), str_of(show_text(item, "fqn"))))
			(void)json_array_append(out, item);
	return out;
}

static FALLIBLE enum err show_tensors(struct client *c, const char *ref, const char *glob, bool json)
{
	static const char *const tensors[] = { "TENSOR=fqn", "DTYPE=blocks|dtype", "SHAPE=shape:dims", "SIZE=bytes:bytes",
					       "CHUNKS=chunks:count", NULL };
	static const char *const values[] = { "VALUE=fqn", "IS=value", "CLASS=opaque", NULL };
	CLEANUP(buf_free) struct buf path = BUF_INIT(16384);
	CLEANUP(jval_drop) json_t *all = json_array();
	CLEANUP(jval_drop) json_t *others = json_array();

	TRY(look_path(&path, ref, "/tensors"));
	TRY(look_all(c, (char *)path.p, "tensors", all));
	if (!json)
		TRY(look_all(c, (char *)path.p, "values", others));
	CLEANUP(jval_drop) json_t *some = matching(all, glob);
	CLEANUP(jval_drop) json_t *more = matching(others, glob);
	if (json)
		show_json(some);
	else if (json_array_size(some) > 0)
		show_table(some, tensors);
	if (json_array_size(more) > 0)
		show_table(more, values);
	return OK;
}

/* "verified       damaged digest 2026-11-21T09:36:08.120Z, 3 damaged places, job 01J…" */
static void print_verdict(const json_t *v)
{
	static const char *const counts[] = { "damage_count", "unverifiable" };
	static const char *const of[] = { "damaged place", "unverifiable item" };
	CLEANUP(buf_free) struct buf b = BUF_INIT(4096);

	show_verdict(&b, v);
	for (size_t i = 0; i < sizeof counts / sizeof *counts; i++)
		if (show_number(v, counts[i]) > 0)
			buf_printf(&b, ", %.0f %s%s", show_number(v, counts[i]), of[i], show_number(v, counts[i]) > 1 ? "s" : "");
	if (buf_status(&b) == OK)
		show_say("%-14s %.*s, job %s\n", "verified", (int)b.len, (char *)b.p, show_text(v, "job"));
}

static void print_members(const json_t *doc)
{
	const char *key;
	json_t *value;

	json_object_foreach((json_t *)(uintptr_t)doc, key, value) {
		char text[32];
		if (json_is_string(value))
			show_say("%-14s %s\n", key, json_string_value(value));
		else if (strstr(key, "bytes") && json_is_number(value))
			show_say("%-14s %s\n", key, show_bytes(json_number_value(value), text));
		else if (json_is_number(value))
			show_say("%-14s %.15g\n", key, json_number_value(value));
		else if (json_is_boolean(value))
			show_say("%-14s %s\n", key, json_is_true(value) ? "yes" : "no");
		else if (strcmp(key, "verified") == 0 && json_is_object(value))
			print_verdict(value);
		else if (strcmp(key, "replicated") == 0 && json_is_object(value))
			show_say("%-14s in %s%s%s\n", key, show_text(value, "storage"), show_text(value, "at")[0] ? " since " : "",
			       show_text(value, "at"));
		else if (strcmp(key, "copied_from") == 0)
			show_say("%-14s %s:%s\n", key, show_text(value, "storage"), show_text(value, "name"));
	}
}

/* "hold           uid 0 since 2026-11-22T23:00:00.000Z: the paper's weights" */
static void print_hold(const json_t *hold)
{
	if (!json_is_integer(json_object_get(hold, "owner")))
		show_say("%-14s %s\n", "hold", show_text(hold, "reason"));
	else
		show_say("%-14s uid %.0f since %s%s%s\n", "hold", show_number(hold, "owner"), show_text(hold, "since"),
		       show_text(hold, "reason")[0] ? ": " : "", show_text(hold, "reason"));
}

/* "metrics        loss 1.5, acc 0.25" */
static void print_pairs(const json_t *doc, const char *key)
{
	CLEANUP(buf_free) struct buf b = BUF_INIT(1 << 18);
	const char *name;
	json_t *value;

	json_object_foreach(json_object_get(doc, key), name, value) {
		buf_puts(&b, b.len ? ", " : "");
		show_put_clean(&b, name);
		buf_puts(&b, " ");
		if (json_is_string(value))
			show_put_clean(&b, json_string_value(value));
		else
			buf_printf(&b, "%.9g", json_number_value(value));
	}
	if (b.len && buf_status(&b) == OK)
		show_say("%-14s %.*s\n", key, (int)b.len, (char *)b.p);
}

/* Prints a checkpoint's job, and a line for each parent. */
static void print_origin(const json_t *doc)
{
	const json_t *made = json_object_get(doc, "made_by");
	json_t *parent;
	size_t i;

	print_pairs(doc, "metrics");
	print_pairs(doc, "labels");
	if (made)
		show_say("%-14s %s, job %s, uid %.0f\n", "made by", show_text(made, "kind"), show_text(made, "job"),
		       show_number(made, "uid"));
	json_array_foreach(json_object_get(doc, "parents"), i, parent) {
		CLEANUP(buf_free) struct buf b = BUF_INIT(1 << 16);
		show_put_clean(&b, show_text(parent, "role"));
		buf_puts(&b, " ");
		show_put_clean(&b, show_text(parent, "storage"));
		buf_puts(&b, ":");
		show_put_clean(&b, show_text(parent, "name"));
		if (buf_status(&b) == OK)
			show_say("%-14s %.*s\n", "parent", (int)b.len, (char *)b.p);
	}
}

/* One line for each slot of each rank. */
static void print_slots(const json_t *doc)
{
	static const char *const columns[] = { "RANK=rank", "SLOT=slot", "STATE=state", "GENERATION=generation",
					       "SIZE=bytes:bytes", "SEGMENT=segment", "PROBLEM=problem.code", NULL };
	CLEANUP(jval_drop) json_t *rows = json_array();
	json_t *rank, *slot;
	size_t i, k;

	json_array_foreach(json_object_get(doc, "ranks"), i, rank) {
		json_array_foreach(json_object_get(rank, "slots"), k, slot) {
			json_t *row = json_copy(slot);
			if (row && json_object_set(row, "rank", json_object_get(rank, "rank")) == 0)
				(void)json_array_append(rows, row);
			json_decref(row);
		}
	}
	if (json_array_size(rows) > 0)
		show_table(rows, columns);
}

static void print_one(const json_t *doc)
{
	if (show_whole(doc))
		return;
	print_members(doc);
	if (json_object_get(doc, "hold"))
		print_hold(json_object_get(doc, "hold"));
	print_origin(doc);
	print_slots(doc);
}

int look_show(const struct command *, struct client *c, const struct args *a)
{
	CLEANUP(buf_free) struct buf path = BUF_INIT(16384);
	const char *glob = args_value(a, "tensors");
	bool json = args_flag(a, "json");
	enum err e = glob ? show_tensors(c, a->words[0], glob, json) : look_path(&path, a->words[0], "");

	if (e)
		return follow_failed(c, e);
	return glob ? EXIT_DONE : follow_show(c, &path, json, print_one);
}

static void print_lineage(const json_t *doc)
{
	static const char *const columns[] = { "PARENT=parent", "ROLE=role", "CHILD=child", "STATE=state", NULL };
	const json_t *edges = json_object_get(doc, "edges");

	if (json_array_size(edges))
		show_table(edges, columns);
	else
		show_say("no record tells of parents or children\n");
	if (json_is_true(json_object_get(doc, "truncated")))
		show_warning("there is more of it, or some storage could not be looked at");
}

int look_lineage(const struct command *, struct client *c, const struct args *a)
{
	CLEANUP(buf_free) struct buf path = BUF_INIT(16384);
	enum err e = args_is_shm(a->words[0]) ? ERR(INVALID_REQUEST, "only checkpoints have a lineage, and %s is a state dict", a->words[0])
					      : look_path(&path, a->words[0], "/lineage");

	return e ? follow_failed(c, e) : follow_show(c, &path, args_flag(a, "json"), print_lineage);
}

/* On a terminal somebody may have mistyped a name: shows what would go, and asks. A script is not asked. */
static FALLIBLE enum err ask_rm(struct client *c, const char *ref, const char *trash, const char *path, bool *yes_out)
{
	CLEANUP(client_drop) struct answer got = { 0 };
	char line[16], text[32];

	*yes_out = true;
	if (!isatty(STDIN_FILENO) || !isatty(STDERR_FILENO))
		return OK;
	TRY(client_get(c, path, &got));
	show_note("Remove %s (", ref);
	if (show_text(got.json, "format")[0])
		show_note("%s, ", show_text(got.json, "format"));
	show_note("%s", show_bytes(show_number(got.json, "bytes"), text));
	if (show_text(got.json, "modified_at")[0])
		show_note(", of %s", show_text(got.json, "modified_at"));
	show_note(") %s%s? [y/N] ", trash ? "into the trash, for " : "for good", trash ? trash : "");
	*yes_out = fgets(line, sizeof line, stdin) && (line[0] == 'y' || line[0] == 'Y');
	return OK;
}

int look_rm(const struct command *, struct client *c, const struct args *a)
{
	CLEANUP(buf_free) struct buf path = BUF_INIT(16384);
	struct follow f = { .json = args_flag(a, "json") };
	CLEANUP(client_drop) struct answer got = { 0 };
	bool yes = true;
	char id[64];
	const char *trash = args_value(a, "trash");
	enum err e = look_path(&path, a->words[0], "");

	if (e == OK && trash && args_is_shm(a->words[0]))
		e = ERR(INVALID_REQUEST, "--trash is for checkpoints, and %s is a state dict", a->words[0]);
	if (e == OK && args_value(a, "timeout"))
		e = args_duration(args_value(a, "timeout"), &f.timeout_ms);
	if (e == OK && !args_flag(a, "yes"))
		e = ask_rm(c, a->words[0], trash, (char *)path.p, &yes);
	if (!yes) {
		show_note("%s stays\n", a->words[0]);
		return EXIT_INTERRUPTED;
	}
	if (e == OK && trash) {
		path.len--; /* its NUL */
		client_put(&path, "?trash=%", trash);
		e = client_end(&path);
	}
	if (e == OK)
		e = client_call(c, "DELETE", (char *)path.p, NULL, &got);
	if (e)
		return follow_failed(c, e);
	snprintf(id, sizeof id, "%s", show_text(got.json, "id"));
	if (got.status != 202) {
		if (!f.json)
			show_say("%s is gone\n", a->words[0]);
		return EXIT_DONE;
	}
	if (args_flag(a, "detach")) {
		show_out("%s\n", id);
		return EXIT_DONE;
	}
	follow_catch_interrupts();
	return follow_job(c, id, &f);
}

static bool dangles(const json_t *run, const char *alias)
{
	const json_t *one;
	size_t i;

	json_array_foreach(json_object_get(run, "dangling"), i, one)
		if (json_is_string(one) && strcmp(json_string_value(one), alias) == 0)
			return true;
	return false;
}

/* Steps at risk, and how often to save. */
static void print_course(const json_t *run)
{
	double steps = show_number(run, "lost_work.steps"), async = show_number(run, "save_interval.async_s");
	char save[32], young[32], daly[32], mtbf[32], text[32];

	if (steps > 0)
		show_say("%-16s %.0f steps, up to step %.0f\n", "", steps, show_number(run, "lost_work.seen_step"));
	if (!json_is_object(json_object_get(run, "save_interval")))
		return;
	show_say("%-16s every %s (Young), %s (Daly) with a failure every %s; a save takes %s", "save",
	       show_seconds(show_number(run, "save_interval.young_s"), young), show_seconds(show_number(run, "save_interval.daly_s"), daly),
	       show_seconds(show_number(run, "save_interval.mtbf_s"), mtbf),
	       show_seconds(show_number(run, "save_interval.measured_save_s"), save));
	if (async > 0)
		show_say("; every %s if only the copy is waited for", show_seconds(async, text));
	show_say("\n");
}

/* "STEP NAME …" of the newest checkpoints, below what is said of the whole run. */
void look_print_run(const json_t *run)
{
	static const char *const columns[] = { "STEP=step", "NAME=name", "FORMAT=format", "SIZE=bytes:bytes", "MODIFIED=modified_at",
					       "VERIFIED=verified:verdict", "HELD=hold.since", NULL };
	const json_t *aliases = json_object_get(run, "aliases"), *since = show_at(run, "lost_work.since");
	char text[32];
	const char *alias;
	json_t *name;

	show_say("%s:%s: %.0f checkpoints, %s\n", show_text(run, "storage"), show_text(run, "run"), show_number(run, "count"),
	       show_bytes(show_number(run, "bytes"), text));
	json_object_foreach((json_t *)(uintptr_t)aliases, alias, name)
		if (json_is_string(name))
			show_say("%-16s %s%s\n", alias, json_string_value(name), dangles(run, alias) ? " (not there any more)" : "");
	if (json_is_string(since))
		show_say("%-16s since %s\n", "lost if it ends", json_string_value(since));
	print_course(run);
	show_say("\n");
	show_table(json_object_get(run, "checkpoints"), columns);
}

/* The runs of one storage, or of all. */
static FALLIBLE enum err show_runs(struct client *c, const char *storage, bool json)
{
	static const char *const columns[] = { "STORAGE=storage", "RUN=run", "CHECKPOINTS=checkpoints", "SIZE=bytes:bytes", "STEP=step",
					       "LATEST=latest", "MODIFIED=modified_at", "HELD=holds", NULL };
	CLEANUP(jval_drop) json_t *storages = storage ? json_pack("[{s:s}]", "name", storage) : json_array();
	CLEANUP(jval_drop) json_t *all = json_array();
	json_t *st;
	size_t i;

	TRY(storages && all ? OK : ERR(NO_MEMORY, "cannot list"));
	if (!storage)
		TRY(look_all(c, "/v1/storages", "storages", storages));
	json_array_foreach(storages, i, st) {
		CLEANUP(buf_free) struct buf path = BUF_INIT(4096);
		client_put(&path, "/v1/runs?storage=%", show_text(st, "name"));
		TRY(client_end(&path));
		TRY(look_all(c, (char *)path.p, "runs", all));
	}
	if (json)
		show_json(all);
	else
		show_table(all, columns);
	return OK;
}

int look_runs(const struct command *, struct client *c, const struct args *a)
{
	const char *what = a->word_count ? a->words[0] : NULL, *colon = what ? strchr(what, ':') : NULL;
	CLEANUP(buf_free) struct buf path = BUF_INIT(16384);
	CLEANUP(mem_free_ptr) char *storage = what ? mem_strdup(what) : NULL;
	uint64_t limit;
	enum err e;

	if (!colon || !colon[1]) {
		if (storage && colon)
			storage[colon - what] = '\0';
		e = show_runs(c, storage, args_flag(a, "json"));
		return e ? follow_failed(c, e) : EXIT_DONE;
	}
	storage[colon - what] = '\0';
	client_put(&path, "/v1/runs/%/%", storage, colon + 1);
	if (args_value(a, "mtbf"))
		client_put(&path, "?mtbf=%", args_value(a, "mtbf"));
	e = put_wish(&path, a, &limit);
	if (limit)
		buf_printf(&path, "%cpage_size=%ju", memchr(path.p, '?', path.len) ? '&' : '?', (uintmax_t)limit);
	e = e ?: client_end(&path);
	return e ? follow_failed(c, e) : follow_show(c, &path, args_flag(a, "json"), look_print_run);
}

int look_alias(const struct command *, struct client *c, const struct args *a)
{
	const char *run = a->words[0], *alias = a->words[1], *last = a->word_count > 2 ? a->words[2] : NULL, *colon = strchr(run, ':');
	const char *condition = args_value(a, "if");
	CLEANUP(jval_drop) json_t *body = json_object();
	CLEANUP(buf_free) struct buf path = BUF_INIT(16384);
	CLEANUP(client_drop) struct answer got = { 0 };
	CLEANUP(mem_free_ptr) char *storage = mem_strdup(run);
	enum err e = OK;

	if (!colon || colon == run || !colon[1] || args_is_shm(run) || !last == !args_flag(a, "remove"))
		e = ERR(INVALID_REQUEST, "dcpctl alias STORAGE:RUN ALIAS NAME, or --remove in place of NAME");
	if (e == OK && storage && body) {
		const char *of = strcmp(colon + 1, "-") == 0 || (last && strchr(last, '/')) ? NULL : colon + 1;
		storage[colon - run] = '\0';
		client_put(&path, "/v1/runs/%/%/aliases/%", storage, colon + 1, alias);
		if (last)
			(void)json_object_set_new(body, "name", of ? json_pack("s++", of, "/", last) : json_string(last));
		if (condition)
			(void)json_object_set_new(body, "if", condition[0] ? json_string(condition) : json_null());
		e = client_end(&path);
	}
	if (e == OK)
		e = client_call(c, last ? "PUT" : "DELETE", (char *)path.p, body, &got);
	if (e)
		return follow_failed(c, e);
	if (args_flag(a, "json"))
		show_json(got.json);
	else if (last)
		show_say("%s@%s is %s\n", run, alias, show_text(got.json, "name"));
	else
		show_say("%s@%s is gone\n", run, alias);
	return EXIT_DONE;
}

int look_hold(const struct command *self, struct client *c, const struct args *a)
{
	bool holds = strcmp(self->name, "hold") == 0;
	CLEANUP(jval_drop) json_t *body = holds ? json_object() : NULL;
	CLEANUP(buf_free) struct buf path = BUF_INIT(16384);
	CLEANUP(client_drop) struct answer got = { 0 };
	const char *reason = args_value(a, "reason");
	enum err e = args_is_shm(a->words[0]) ? ERR(INVALID_REQUEST, "only checkpoints are held, and %s is a state dict", a->words[0])
					      : look_path(&path, a->words[0], "/hold");

	if (e == OK && reason && json_object_set_new(body, "reason", json_string(reason)) != 0)
		e = ERR(INVALID_REQUEST, "--reason is not UTF-8");
	if (e == OK)
		e = client_call(c, holds ? "PUT" : "DELETE", (char *)path.p, body, &got);
	if (e)
		return follow_failed(c, e);
	if (args_flag(a, "json"))
		show_json(got.json);
	else
		show_say("%s is %s\n", a->words[0], holds ? "held" : "not held");
	return EXIT_DONE;
}

static void print_transforms(const json_t *doc)
{
	static const char *const columns[] = { "NAME=name", "DESCRIPTION=description", NULL };

	show_table(json_object_get(doc, "transforms"), columns);
}

int look_transforms(const struct command *, struct client *c, const struct args *a)
{
	CLEANUP(buf_free) struct buf path = BUF_INIT(8192);

	client_put(&path, a->word_count ? "/v1/transforms/%" : "/v1/transforms", a->words[0]);
	return follow_show(c, &path, a->word_count || args_flag(a, "json"), print_transforms);
}

int look_audit(const struct command *, struct client *c, const struct args *a)
{
	static const char *const columns[] = { "TIME=time", "UID=uid", "TOKEN=token", "POLICY=policy", "ACTION=action", "SUBJECT=subject",
					       "JOB=job", NULL };
	CLEANUP(jval_drop) json_t *all = json_array();
	CLEANUP(buf_free) struct buf path = BUF_INIT(64);
	uint64_t limit = 0;

	enum err e = all ? put_wish(&path, a, &limit) : ERR(NO_MEMORY, "cannot list");
	e = e ?: get_some(c, "/v1/audit", "audit", limit ? limit : AUDIT_SHOWN, all);
	if (e)
		return follow_failed(c, e);
	if (args_flag(a, "json"))
		show_json(all);
	else
		show_table(all, columns);
	return EXIT_DONE;
}
