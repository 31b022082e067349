/* aliases.c: see aliases.h. */
#include "store/aliases.h"

#include <stdio.h>

#include "base/jval.h"
#include "base/mem.h"
#include "store/owner.h"

enum { MOVE_TRIES = 8 };

/* The folder of the run. */
static FALLIBLE enum err enter_run(const struct store *store, const char *run, struct store_at *out)
{
	return store_enter(store_top(store), strcmp(run, "-") == 0 ? "." : run, out);
}

/* Puts the run's name before a checkpoint's. */
static json_t *whole_name(const char *run, const char *last)
{
	return strcmp(run, "-") == 0 ? json_string(last) : json_pack("s++", run, "/", last);
}

static FALLIBLE enum err check_doc(json_t *doc)
{
	struct jval root = JVAL_ROOT(doc), all = jval_get(&root, "aliases");
	int64_t version = 0;
	const char *key;
	json_t *value;

	TRY(jval_opt_integer(&root, "version", 1, 1, &version));
	if (version != 1 || !json_is_object(all.j))
		return ERR(VALIDATION_FAILED, "it has no version, or no aliases");
	if (json_object_size(all.j) > ALIASES_MAX)
		return ERR(VALIDATION_FAILED, "it has %zu aliases, %d are allowed", json_object_size(all.j), ALIASES_MAX);
	json_object_foreach(all.j, key, value) {
		struct jval one = jval_get(&all, key);
		struct str name;
		TRY(ref_check_alias(str_of(key)));
		TRY(jval_string(&one, &name));
		TRY(ref_check_name(name));
		if (memchr(name.p, '/', name.n))
			return ERR(VALIDATION_FAILED, "an alias leads out of its run");
	}
	return OK;
}

/* The page's document, or a new one. st_out: the page's; st_ino 0: there is none. */
static FALLIBLE enum err read_doc(struct store_at folder, const char *run, json_t **out, struct stat *st_out)
{
	CLEANUP(mem_free_ptr) void *bytes = NULL;
	CLEANUP(jval_drop) json_t *doc = NULL;
	uint64_t n = 0;

	enum err e = store_get(folder, ALIASES_NAME, ALIASES_BYTES_MAX, &bytes, &n, st_out);
	if (e == ERR_NOT_FOUND) {
		st_out->st_ino = 0;
		err_clear();
		*out = json_pack("{s:i, s:{}}", "version", 1, "aliases");
		return *out ? OK : ERR(NO_MEMORY, "no memory for aliases");
	}
	if (!e)
		e = jval_parse((struct str){ bytes, n }, &doc);
	if (!e)
		e = check_doc(doc);
	if (e) {
		char why[300];
		snprintf(why, sizeof why, "%.290s", err_last()->text);
		return ERR(STATE_CONFLICT, "the aliases of run '%s' cannot be read (%s): mend or remove " ALIASES_NAME, run, why);
	}
	*out = move(doc);
	return OK;
}

FALLIBLE enum err aliases_read(const struct store *store, const char *run, json_t **out)
{
	CLEANUP(store_close) struct store_at folder = STORE_NOTHING;
	CLEANUP(jval_drop) json_t *doc = NULL, *all = json_object();
	const char *alias;
	struct stat st;
	json_t *last;

	NEED(all, "no memory for aliases");
	enum err e = enter_run(store, run, &folder);
	if (!e)
		e = read_doc(folder, run, &doc, &st);
	if (e == ERR_NOT_FOUND)
		err_clear();
	else
		TRY(e);
	json_object_foreach(json_object_get(doc, "aliases"), alias, last)
		if (json_object_set_new(all, alias, whole_name(run, json_string_value(last))) != 0)
			return ERR(NO_MEMORY, "no memory for aliases");
	*out = move(all);
	return OK;
}

static FALLIBLE enum err check_condition(const struct alias_move *move, const char *now)
{
	const char *wanted = move->condition;

	if (!move->has_condition || (!wanted && !now) || (wanted && now && strcmp(wanted, now) == 0))
		return OK;
	enum err e = now ? ERR(ALIAS_MOVED, "'%s' leads to '%s'", move->alias, now)
			 : ERR(ALIAS_MOVED, "there is no alias '%s'", move->alias);
	return err_expected(e, wanted, now);
}

/* The checkpoint is there, and the user's. */
static FALLIBLE enum err check_target(const struct store_job *by, const struct store *store, const char *name)
{
	enum format format;

	TRY(checkpoint_recognise(store, name, &format));
	if (format == FORMAT_NONE)
		return ERR(NOT_FOUND, "there is no checkpoint '%s'", name);
	return owner_check(by, store, name);
}

static FALLIBLE enum err put_doc(struct store_at folder, const json_t *doc, const struct stat *was)
{
	CLEANUP(buf_free) struct buf text = BUF_INIT(ALIASES_BYTES_MAX);

	TRY(jval_dump(doc, &text));
	TRY(buf_status(&text));
	if (folder.store->ops->swap)
		return folder.store->ops->swap(folder, ALIASES_NAME, text.p, text.len, was->st_ino ? was : NULL);
	return folder.store->ops->put(folder, ALIASES_NAME, text.p, text.len, true);
}

static FALLIBLE enum err move_once(const struct store_job *by, const struct store *store, const char *run, const struct alias_move *move)
{
	CLEANUP(store_close) struct store_at folder = STORE_NOTHING, lock = STORE_NOTHING;
	CLEANUP(jval_drop) json_t *doc = NULL, *now = NULL;
	struct stat was;

	TRY(enter_run(store, run, &folder));
	if (store->ops->lock)
		TRY(store->ops->lock(folder, &lock));
	else if (!store->ops->swap)
		return ERR(UNSUPPORTED, "the storage '%s' has no aliases of one's own", store->name);
	TRY(read_doc(folder, run, &doc, &was));
	json_t *all = json_object_get(doc, "aliases");
	const char *last = json_string_value(json_object_get(all, move->alias));
	if (last)
		NEED((now = whole_name(run, last)), "no memory for an alias");
	TRY(check_condition(move, json_string_value(now)));
	if (move->name) {
		TRY(check_target(by, store, move->name));
	} else if (!now) {
		return ERR(NOT_FOUND, "run '%s' has no alias '%s'", run, move->alias);
	}
	if (!now && json_object_size(all) >= ALIASES_MAX)
		return ERR(LIMIT_EXCEEDED, "run '%s' has %d aliases already: remove some", run, ALIASES_MAX);
	enum err e = now ? owner_check(by, store, json_string_value(now)) : OK;
	if (e && e != ERR_NOT_FOUND)
		return e;
	err_clear();
	const char *slash = move->name ? strrchr(move->name, '/') : NULL;
	if (move->name ? json_object_set_new(all, move->alias, json_string(slash ? slash + 1 : move->name)) != 0
		       : json_object_del(all, move->alias) != 0)
		return ERR(NO_MEMORY, "no memory for an alias");
	return put_doc(folder, doc, &was);
}

/* Without locks somebody else's alias may come between reading and writing: then all is looked at anew. */
FALLIBLE enum err aliases_move(const struct store_job *by, const struct store *store, const char *run, const struct alias_move *move)
{
	enum err e = ERR_STATE_CONFLICT;

	for (int i = 0; i < MOVE_TRIES && e == ERR_STATE_CONFLICT; i++)
		e = move_once(by, store, run, move);
	return e;
}
