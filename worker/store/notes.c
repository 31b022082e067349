/* notes.c: see notes.h. */
#include "store/notes.h"

#include <dirent.h>
#include <stdio.h>

#include "base/jval.h"
#include "base/mem.h"
#include "store/beside.h"
#include "store/identity.h"
#include "store/owner.h"
#include "store/staging.h"

enum { INSIDE_DEPTH_MAX = 32 };        /* folders in a folder that is removed */
enum { SWAP_TRIES = 20, GOING_MAX = 100 };

struct hold {
	bool is_held;
	int64_t owner;                 /* uid; -1: not known */
	char since[40];
	char reason[HOLD_REASON_MAX + 1];
};

bool notes_is(const char *name)
{
	struct str s = str_of(name);

	if (str_ends(s, ".tmp"))
		s.n -= 4;
	return str_ends(s, NOTES_NAME) && name[0] == '.';
}

/* The path of the notes of `name`. False: a file's name is too long for one, and it has none. */
static bool notes_path(const char *name, bool is_dir, char path[BESIDE_MAX])
{
	return is_dir ? snprintf(path, BESIDE_MAX, "%s/" NOTES_NAME, name) < BESIDE_MAX : beside_path(name, NOTES_NAME, path);
}

/* *out NULL: there is no such file. was: what it was before it was read. */
static FALLIBLE enum err read_doc_at(struct store_at folder, const char *path, json_t **out, struct stat *was, bool *is_there)
{
	CLEANUP(mem_free_ptr) void *bytes = NULL;
	uint64_t n = 0;

	*out = NULL;
	enum err e = ERR_CHECKPOINT_REPLACED; /* others write them */
	for (int i = 0; i < SWAP_TRIES && e == ERR_CHECKPOINT_REPLACED; i++)
		e = store_get(folder, path, NOTES_BYTES_MAX, &bytes, &n, was);
	*is_there = !e;
	if (e == ERR_NOT_FOUND) {
		err_clear();
		return OK;
	}
	TRY(e);
	return jval_parse((struct str){ bytes, n }, out);
}

static FALLIBLE enum err read_doc(struct store_at folder, const char *path, json_t **out)
{
	bool is_there;

	return read_doc_at(folder, path, out, NULL, &is_there);
}

static FALLIBLE enum err take_text(const struct jval *object, const char *key, char *out, size_t max)
{
	struct jval v = jval_get(object, key);
	struct str text;

	TRY(jval_must_text(object, key, &text));
	if (text.n >= max)
		return jval_fail(&v, ERR_VALIDATION_FAILED, "has more than %zu bytes", max - 1);
	memcpy(out, text.p, text.n);
	out[text.n] = '\0';
	return OK;
}

static FALLIBLE enum err parse_hold(json_t *doc, struct hold *out)
{
	struct jval root = JVAL_ROOT(doc), hold = jval_get(&root, "hold"), owner = jval_get(&hold, "owner");
	int64_t version = 0;

	TRY(jval_opt_integer(&root, "version", 1, 1, &version));
	if (version != 1)
		return ERR(VALIDATION_FAILED, "it has no version");
	if (!hold.j)
		return OK;
	TRY(jval_only(&hold, (const char *const[]){ "owner", "reason", "since", NULL }));
	TRY(jval_integer(&owner, 0, UINT32_MAX, &out->owner));
	TRY(take_text(&hold, "reason", out->reason, sizeof out->reason));
	TRY(take_text(&hold, "since", out->since, sizeof out->since));
	out->is_held = true;
	return OK;
}

static FALLIBLE enum err read_hold_at(struct store_at folder, const char *path, struct hold *out)
{
	CLEANUP(jval_drop) json_t *doc = NULL;

	TRY(read_doc(folder, path, &doc));
	return doc ? parse_hold(doc, out) : OK;
}

/* The hold that the notes at `path` say. Unreadable notes are a hold of nobody's. */
static struct hold hold_at(struct store_at folder, const char *path)
{
	struct hold hold = { .owner = -1 };

	if (read_hold_at(folder, path, &hold)) {
		hold = (struct hold){ .is_held = true, .owner = -1 };
		snprintf(hold.reason, sizeof hold.reason, "the notes in %.300s cannot be read (%.500s), which counts as a hold", path,
			 err_last()->text);
		err_clear();
	}
	return hold;
}

static struct hold hold_of(struct store_at folder, const char *name, bool is_dir)
{
	char path[BESIDE_MAX];

	return notes_path(name, is_dir, path) ? hold_at(folder, path) : (struct hold){ .owner = -1 };
}

/* ---- is it free? ---- */

static FALLIBLE enum err refuse(const struct hold *hold, const struct store *store, const char *name)
{
	if (!hold->is_held)
		return OK;
	if (hold->owner < 0)
		return ERR(CHECKPOINT_HELD, "'%s' stays: %s", name, hold->reason);
	return ERR(CHECKPOINT_HELD, "'%s' is held by uid %jd since %s, and neither removed nor replaced before `dcpctl unhold %s:%s`"
		   "%s%.600s", name, (intmax_t)hold->owner, hold->since, store->name, name, hold->reason[0] ? "; the reason: " : "",
		   hold->reason);
}

FALLIBLE enum err notes_check_free(struct store_at folder, const char *name)
{
	char above[CHECKPOINT_NAME_MAX];
	struct stat st;

	enum err e = store_stat(folder, name, &st);
	if (e == ERR_NOT_FOUND) {
		err_clear();
		return OK;
	}
	TRY(e);
	for (const char *slash = strchr(name, '/'); slash; slash = strchr(slash + 1, '/')) {
		snprintf(above, sizeof above, "%.*s", (int)(slash - name), name);
		struct hold hold = hold_of(folder, above, true);
		TRY(refuse(&hold, folder.store, above));
	}
	struct hold hold = hold_of(folder, name, S_ISDIR(st.st_mode));
	return refuse(&hold, folder.store, name);
}

struct inside {
	struct store_at folder;
	const char *name;              /* of the folder, as errors say it */
	uint32_t depth;
};

static FALLIBLE enum err check_folder(struct store_at parent, const char *entry, const char *name, uint32_t depth);

/* Notes of a file of the folder, ".{file}.dcpd-notes.json", and folders in it. */
static enum err check_inside(void *user, const char *name, unsigned char d_type)
{
	const struct inside *in = user;
	char path[CHECKPOINT_NAME_MAX];
	size_t n = strlen(name);
	struct stat st;

	if (notes_is(name) && n > sizeof NOTES_NAME && str_ends(str_of(name), NOTES_NAME)) {
		struct hold hold = hold_at(in->folder, name);
		snprintf(path, sizeof path, "%s/%.*s", in->name, (int)(n - sizeof NOTES_NAME), name + 1);
		return refuse(&hold, in->folder.store, path);
	}
	if (d_type == DT_UNKNOWN) {
		TRY(store_stat(in->folder, name, &st));
		d_type = S_ISDIR(st.st_mode) ? DT_DIR : DT_REG;
	}
	if (d_type != DT_DIR)
		return OK;
	snprintf(path, sizeof path, "%s/%s", in->name, name);
	struct hold hold = hold_of(in->folder, name, true);
	TRY(refuse(&hold, in->folder.store, path));
	return check_folder(in->folder, name, path, in->depth + 1);
}

/* A folder that cannot be looked into, or lies too deep, counts as one with a hold. */
static FALLIBLE enum err check_folder(struct store_at parent, const char *entry, const char *name, uint32_t depth)
{
	CLEANUP(store_close) struct store_at dir = STORE_NOTHING;

	if (depth > INSIDE_DEPTH_MAX)
		return ERR(CHECKPOINT_HELD, "'%s' stays: it lies too deep to be looked at for holds", name);
	TRY(store_enter(parent, entry, &dir));
	return store_list(dir, check_inside, &(struct inside){ dir, name, depth });
}

FALLIBLE enum err notes_check_removal(struct store_at folder, const char *name)
{
	struct stat st;

	TRY(notes_check_free(folder, name));
	enum err e = store_stat(folder, name, &st);
	if (e == ERR_NOT_FOUND) {
		err_clear();
		return OK;
	}
	TRY(e);
	return S_ISDIR(st.st_mode) ? check_folder(folder, name, name, 0) : OK;
}

/* ---- told and changed ---- */

void notes_put_hold(struct store_at folder, const char *name, bool is_dir, struct buf *out)
{
	struct hold hold = hold_of(folder, name, is_dir);

	if (!hold.is_held)
		return;
	if (hold.owner < 0)
		buf_puts(out, ",\"hold\":{\"owner\":null,\"since\":null,\"reason\":");
	else
		buf_printf(out, ",\"hold\":{\"owner\":%jd,\"since\":", (intmax_t)hold.owner);
	if (hold.owner >= 0) {
		buf_json_str(out, str_of(hold.since));
		buf_puts(out, ",\"reason\":");
	}
	buf_json_str(out, str_of(hold.reason));
	buf_putc(out, '}');
}

/* Writes the notes, or removes them if they say nothing. Before they go, empty ones are made durable: after a power cut there are these
 * or none. Where nothing locks, ERR_STATE_CONFLICT if they are not those that `was` tells any more (NULL: none), and empty ones stay: no
 * condition guards a removal. */
static FALLIBLE enum err write_doc(struct store_at folder, const char *name, json_t *doc, const struct stat *was)
{
	CLEANUP(buf_free) struct buf text = BUF_INIT(NOTES_BYTES_MAX);

	TRY(jval_dump(doc, &text));
	TRY(buf_status(&text));
	if (!folder.store->ops->lock)
		return folder.store->ops->swap(folder, name, text.p, text.len, was);
	TRY(folder.store->ops->put(folder, name, text.p, text.len, true));
	return json_object_size(doc) > 1 ? OK : store_drop(folder, name);
}

static FALLIBLE enum err change_hold(const struct store_job *by, const char *name, struct store_at folder, const char *notes, json_t *hold)
{
	CLEANUP(jval_drop) json_t *doc = NULL;
	struct stat was;
	bool is_there;
	/* First, so that a hold which comes behind the look makes the swap fail. */
	enum err e = read_doc_at(folder, notes, &doc, &was, &is_there);
	struct err_info info = *err_last();
	struct hold old = hold_at(folder, notes);

	if (old.is_held && old.owner < 0)
		return ERR(CHECKPOINT_HELD, "'%s': %s: mend or remove that file", name, old.reason);
	if (old.is_held && !by->admin && old.owner != by->uid)
		return ERR(FORBIDDEN, "'%s' is held by uid %jd: only that one, root and dcpd's own user change the hold", name,
			   (intmax_t)old.owner);
	if (e) {
		err_restore(&info);
		return e;
	}
	if (!hold && !old.is_held)
		return OK;
	const json_t *going = json_object_get(doc, "going");
	if (hold && json_array_size(going))
		return ERR(TARGET_BUSY, "'%s' is being removed or replaced, by the job %.64s: ask again behind it", name,
			   json_string_value(json_array_get(going, 0)) ?: "of another");
	doc = doc ? doc : json_pack("{s:i}", "version", 1);
	if (!doc || (hold ? json_object_set(doc, "hold", hold) : json_object_del(doc, "hold")) != 0)
		return ERR(NO_MEMORY, "no memory for a hold");
	return write_doc(folder, notes, doc, is_there ? &was : NULL);
}

/* As change_hold(). Without locks the checkpoint may have gone since it was looked at, and its notes with it: a hold is no hold then. */
static FALLIBLE enum err set_hold(const struct store_job *by, const char *name, struct store_at folder, const char *notes, json_t *hold)
{
	const struct store *store = folder.store;
	enum err e = ERR_STATE_CONFLICT;
	enum format format = FORMAT_NONE;
	struct stat st;

	for (int i = 0; i < SWAP_TRIES && e == ERR_STATE_CONFLICT; i++)
		e = change_hold(by, name, folder, notes, hold);
	if (e || store->ops->lock || !hold)
		return e;
	e = store_stat(store_top(store), name, &st);
	e = e ?: checkpoint_recognise(store, name, &format);
	if ((e && e != ERR_NOT_FOUND) || (!e && format != FORMAT_NONE))
		return e;
	TRY(store_drop(folder, notes));
	return ERR(NOT_FOUND, "'%s' was removed meanwhile", name);
}

FALLIBLE enum err notes_set_hold(const struct store_job *by, const struct store *store, const char *name, json_t *hold)
{
	CLEANUP(store_close) struct store_at parent = STORE_NOTHING, dir = STORE_NOTHING, lock = STORE_NOTHING, inside = STORE_NOTHING;
	char above[CHECKPOINT_NAME_MAX], last[256], notes[BESIDE_MAX] = NOTES_NAME;
	enum format format;
	struct stat st;

	TRY(staging_divide(name, above, sizeof above, last, sizeof last));
	TRY(store_enter(store_top(store), above, &parent));
	if (store->ops->lock)
		TRY(store->ops->lock(parent, &lock));
	TRY(store_stat(store_top(store), name, &st));
	TRY(checkpoint_recognise(store, name, &format));
	if (format == FORMAT_NONE)
		return ERR(NOT_A_CHECKPOINT, "'%s' is no checkpoint, and is not held", name);
	if (hold)
		TRY(owner_check(by, store, name));
	if (S_ISDIR(st.st_mode)) {
		TRY(store_enter(parent, last, &dir));
		if (store->ops->lock) /* files in it are replaced and removed under its own lock */
			TRY(store->ops->lock(dir, &inside));
		return set_hold(by, name, dir, notes, hold);
	}
	return notes_path(last, false, notes) ? set_hold(by, name, parent, notes, hold)
					      : ERR(NAME_INVALID, "'%s' is too long a name for notes", last);
}

/* ---- without locks ---- */

static FALLIBLE enum err check_hold(const json_t *doc, const struct store *store, const char *name)
{
	struct hold hold = { .owner = -1 };

	if (doc && parse_hold((json_t *)doc, &hold)) {
		struct err_info why = *err_last();
		return ERR(CHECKPOINT_HELD, "'%s' stays: its notes cannot be read (%.500s), which counts as a hold", name, why.text);
	}
	return refuse(&hold, store, name);
}

static FALLIBLE enum err name_going(json_t *doc, const char *job, bool begins)
{
	json_t *going = json_object_get(doc, "going");
	size_t at = 0;

	while (at < json_array_size(going) && strcmp(json_string_value(json_array_get(going, at)) ?: "", job) != 0)
		at++;
	bool is_in = at < json_array_size(going);
	if (begins == is_in)
		return OK;
	if (begins && json_array_size(going) >= GOING_MAX)
		return ERR(LIMIT_EXCEEDED, "more than %d jobs remove or replace it", GOING_MAX);
	if (begins && !json_is_array(going) && json_object_set_new(doc, "going", going = json_array()) != 0)
		return ERR(NO_MEMORY, "no memory for notes");
	if (begins ? json_array_append_new(going, json_string(job)) : json_array_remove(going, at))
		return ERR(NO_MEMORY, "no memory for notes");
	return json_array_size(going) || json_object_del(doc, "going") == 0 ? OK : ERR(NO_MEMORY, "no memory for notes");
}

static FALLIBLE enum err change_going(struct store_at folder, const char *name, bool is_dir, const char *job, bool begins)
{
	enum err e = ERR_STATE_CONFLICT;
	char page[BESIDE_MAX];
	struct stat was;
	bool is_there;

	if (!notes_path(name, is_dir, page))
		return OK;
	for (int i = 0; i < SWAP_TRIES && e == ERR_STATE_CONFLICT; i++) {
		CLEANUP(jval_drop) json_t *doc = NULL;
		e = read_doc_at(folder, page, &doc, &was, &is_there);
		if (e && is_there)
			return ERR(CHECKPOINT_HELD, "'%s' stays: its notes cannot be read, which counts as a hold", name);
		TRY(e);
		TRY(begins ? check_hold(doc, folder.store, name) : OK);
		if (!is_there && !begins)
			return OK;
		doc = doc ? doc : json_pack("{s:i}", "version", 1);
		NEED(doc, "no memory for notes");
		TRY(name_going(doc, job, begins));
		e = write_doc(folder, page, doc, is_there ? &was : NULL);
	}
	return e;
}

FALLIBLE enum err notes_seal(struct store_at folder, const char *name, bool is_dir, const char *job)
{
	return change_going(folder, name, is_dir, job, true);
}

FALLIBLE enum err notes_unseal(struct store_at folder, const char *name, bool is_dir, const char *job)
{
	return change_going(folder, name, is_dir, job, false);
}

FALLIBLE enum err notes_drop(struct store_at folder, const char *name, bool is_dir)
{
	char page[BESIDE_MAX];

	return notes_path(name, is_dir, page) ? store_drop(folder, page) : OK;
}

/* ---- verified ---- */

static FALLIBLE enum err change_verified(struct store_at dir, const char *page, const struct notes_verdict *v)
{
	CLEANUP(jval_drop) json_t *doc = NULL, *verdict = json_copy(v->doc);
	struct hold hold = { .owner = -1 };

	TRY(read_hold_at(dir, page, &hold)); /* unreadable ones stay as they are */
	TRY(read_doc(dir, page, &doc));
	doc = doc ? doc : json_pack("{s:i}", "version", 1);
	if (!doc || !verdict || json_object_set_new(verdict, "identity", json_string(v->identity)) != 0 ||
	    json_object_set_new(verdict, "made", json_string(v->made)) != 0 || json_object_set(doc, "verified", verdict) != 0)
		return ERR(NO_MEMORY, "no memory for notes");
	return write_doc(dir, page, doc, NULL);
}

FALLIBLE enum err notes_set_verified(const struct store *store, const char *name, const struct notes_verdict *v)
{
	CLEANUP(store_close) struct store_at dir = STORE_NOTHING, lock = STORE_NOTHING;
	char now[IDENTITY_MAX], above[CHECKPOINT_NAME_MAX], last[256], page[BESIDE_MAX] = NOTES_NAME;
	struct stat st;

	if (!store->ops->lock) /* nothing would keep a removal out meanwhile */
		return OK;
	TRY(store_stat(store_top(store), name, &st));
	TRY(staging_divide(name, above, sizeof above, last, sizeof last));
	if (!S_ISDIR(st.st_mode) && !beside_path(last, NOTES_NAME, page))
		return OK;
	TRY(store_enter(store_top(store), S_ISDIR(st.st_mode) ? name : above, &dir));
	TRY(store->ops->lock(dir, &lock));
	TRY(identity_of(store_top(store), name, now));
	return strcmp(now, v->identity) == 0 ? change_verified(dir, page, v) : OK;
}

/* The members of a verdict that lists show, if they are of the form. */
static FALLIBLE enum err take_verdict(const struct jval *v, json_t **out)
{
	static const char *const texts[] = { "state", "level", "at", "job", "content_digest" };
	static const char *const counts[] = { "unverifiable", "unverified_bytes", "damage_count" };
	CLEANUP(jval_drop) json_t *doc = json_object();

	NEED(doc, "no memory for notes");
	for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
		struct jval one = jval_get(v, texts[i]);
		struct str text;
		if (!one.j && i == 4)
			continue;
		TRY(jval_string(&one, &text));
		if (text.n > 64 || json_object_set(doc, texts[i], one.j) != 0)
			return jval_fail(&one, ERR_VALIDATION_FAILED, "has more than 64 bytes");
	}
	for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
		struct jval one = jval_get(v, counts[i]);
		int64_t n;
		if (!one.j)
			continue;
		TRY(jval_integer(&one, 0, INT64_MAX, &n));
		if (json_object_set(doc, counts[i], one.j) != 0)
			return ERR(NO_MEMORY, "no memory for notes");
	}
	*out = move(doc);
	return OK;
}

static FALLIBLE enum err put_verified(struct store_at dir, const char *page, const char *identity, const char *made,
				      struct buf *out)
{
	CLEANUP(jval_drop) json_t *doc = NULL, *verdict = NULL;

	TRY(read_doc(dir, page, &doc));
	struct jval root = JVAL_ROOT(doc), v = jval_get(&root, "verified");
	const char *of = json_string_value(json_object_get(v.j, "identity")), *by = json_string_value(json_object_get(v.j, "made"));
	bool same = of && strcmp(of, identity) == 0;
	size_t top = strcspn(identity, "-") + 1; /* the directory's inode number, with the '-' */
	if (!of || !by || strcmp(by, made) != 0 || (!same && strncmp(of, identity, top) == 0))
		return OK; /* the directory or file is the same, and its bytes are others */
	TRY(take_verdict(&v, &verdict));
	const char *state = json_string_value(json_object_get(verdict, "state"));
	bool known = strcmp(state, "verified") == 0 || strcmp(state, "damaged") == 0 || strcmp(state, "unverified") == 0;
	if (known && !same &&
	    (json_object_set_new(verdict, "copied", json_string(state)) != 0 ||
	     json_object_set_new(verdict, "state", json_string("unverified")) != 0))
		return ERR(NO_MEMORY, "no memory for notes");
	if (!known)
		return OK;
	buf_puts(out, ",\"verified\":");
	return jval_dump(verdict, out);
}

void notes_put_verified(struct store_at at, const char *file, const char *identity, const char *made, struct buf *out)
{
	char page[BESIDE_MAX] = NOTES_NAME;
	size_t len = out->len;

	bool has_page = !file || beside_path(file, NOTES_NAME, page);
	if (has_page && put_verified(at, page, identity, made, out)) { /* the hold tells of unreadable notes */
		err_clear();
		out->len = len;
	}
}

bool notes_tell_damage(struct store_at dir, const char *identity, const char *made)
{
	CLEANUP(buf_free) struct buf out = BUF_INIT(NOTES_BYTES_MAX);

	notes_put_verified(dir, NULL, identity, made, &out);
	return out.len && (memmem(out.p, out.len, "\"state\":\"damaged\"", strlen("\"state\":\"damaged\"")) ||
			   memmem(out.p, out.len, "\"copied\":\"damaged\"", strlen("\"copied\":\"damaged\"")));
}
