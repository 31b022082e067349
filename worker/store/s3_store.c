/* s3_store.c: the table of the store on S3 (see s3_store.h): opening, reading, pages. */
#include "store/s3_store.h"

#include <dirent.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/random.h>

#include "base/mem.h"
#include "base/num.h"
#include "format/format.h"
#include "store/s3_http.h"
#include "store/s3_store_impl.h"

enum { HANDLES_MAX = 1 << 16 };

enum err s3_missing(const char *name)
{
	return err_at_file(ERR(NOT_FOUND, "there is no '%s'", name), name, -1);
}

/* ---- the storage ---- */

static const char *option(const json_t *options, const char *key)
{
	return json_string_value(json_object_get(options, key));
}

static FALLIBLE enum err set_credentials(struct s3_config *c, const char *from)
{
	if (!from)
		return OK;
	if (from[0] != '/' && strcmp(from, "env") != 0)
		return ERR(CONFIG, "credentials are \"env\" or a file's absolute path, not \"%s\"", from);
	c->credentials = from[0] == '/' ? S3_CREDENTIALS_FILE : S3_CREDENTIALS_ENV;
	c->credentials_file = from[0] == '/' ? from : NULL;
	return OK;
}

static FALLIBLE enum err open_client(struct s3_own *own, const struct store_place *place)
{
	const char *slash = strchr(place->location, '/');
	struct s3_config c = { .endpoint = option(place->options, "endpoint"), .region = option(place->options, "region") };
	char bucket[64], prefix[S3_KEY_MAX];
	size_t n = slash ? (size_t)(slash - place->location) : strlen(place->location);
	const char *rest = slash ? slash + 1 : "", *style = option(place->options, "path-style");

	size_t end = strlen(rest);
	while (end && rest[end - 1] == '/')
		end--;
	if (n < 3 || n >= sizeof bucket || end + 2 >= sizeof prefix)
		return ERR(CONFIG, "\"s3://%s\" is not s3://BUCKET/PREFIX", place->location);
	snprintf(bucket, sizeof bucket, "%.*s", (int)n, place->location);
	snprintf(prefix, sizeof prefix, "%.*s%s", (int)end, rest, end ? "/" : "");
	c.bucket = bucket;
	c.prefix = prefix;
	c.path_style = style ? strcmp(style, "true") == 0 : c.endpoint != NULL;
	TRY(set_credentials(&c, option(place->options, "credentials")));
	return s3_open(&c, &own->client);
}

bool s3_readable_of(const char *path, char *out, size_t max)
{
	const char *slash = strrchr(path, '/');
	char link[PATH_MAX];
	struct stat st;

	int n = slash ? snprintf(link, sizeof link, "%.*s/..data", (int)(slash - path), path) : -1;
	bool whole = n > 0 && (size_t)n < sizeof link && lstat(link, &st) == 0 && S_ISLNK(st.st_mode);
	return (size_t)snprintf(out, max, "%.*s", (int)(whole ? (size_t)(slash - path) : strlen(path)), path) < max;
}

/* Credentials come from where AWS's tools have them, and some from a server beside: at ports that all of these use. */
static void set_sandbox(struct store *s, const json_t *options)
{
	const char *endpoint = option(options, "endpoint"), *file = option(options, "credentials");
	const char *const places[] = { file && file[0] == '/' ? file : getenv("AWS_SHARED_CREDENTIALS_FILE"),
				       getenv("AWS_WEB_IDENTITY_TOKEN_FILE"), getenv("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE"),
				       getenv("HOME") };
	struct s3_own *own = s3_own(s);
	const char *imds = getenv("AWS_EC2_METADATA_SERVICE_ENDPOINT");
	uint32_t n = 0;

	s->ports[s->port_count++] = s3_http_port(endpoint ? endpoint : "https://");
	if (!file) {
		s->ports[s->port_count++] = 443;
		s->ports[s->port_count++] = imds ? s3_http_port(imds) : 80;
	}
	for (size_t i = 0; i < sizeof places / sizeof *places; i++) {
		bool is_home = i == 3;
		if (!places[i] || !places[i][0] || (file && (i || file[0] != '/')))
			continue;
		char path[sizeof own->readable[n]];
		if ((size_t)snprintf(path, sizeof path, "%s%s", places[i], is_home ? "/.aws" : "") >= sizeof path ||
		    !s3_readable_of(path, own->readable[n], sizeof own->readable[n]))
			continue;
		s->readable[n] = own->readable[n];
		n++;
	}
}

static enum err open_store(struct store *s, const struct store_place *place)
{
	struct s3_own *own = mem_zalloc(1, sizeof *own);

	NEED(own, "no memory for a storage");
	enum err e = open_client(own, place);
	if (e) {
		mem_free(own);
		return e;
	}
	pthread_mutex_init(&own->lock, NULL);
	s->own = own;
	s->top = 0;
	set_sandbox(s, place->options);
	return OK;
}

static enum err check(const struct store *s)
{
	(void)s;
	return OK;
}

enum err s3_check_conditions(const struct store *s)
{
	struct s3_own *own = s3_own(s);
	char key[64];
	uint64_t random = 0;

	if (__atomic_load_n(&own->conditions_hold, __ATOMIC_RELAXED))
		return OK;
	if (getrandom(&random, sizeof random, 0) != (ssize_t)sizeof random)
		return ERR_SYS(SYSTEM, "no random bytes");
	snprintf(key, sizeof key, S3_MARKS "probe-%016jx", (uintmax_t)random);
	TRY(s3_probe_conditions(own->client, key, NULL));
	__atomic_store_n(&own->conditions_hold, true, __ATOMIC_RELAXED);
	return OK;
}

/* A bucket has no end: what is free is not told. */
static enum err probe(const struct store *s, struct store_facts *out)
{
	*out = (struct store_facts){ .kind = "s3" };
	enum err e = s3_check_conditions(s);
	if (e == ERR_FORBIDDEN) { /* perhaps it may be read */
		struct err_info why = *err_last();
		struct s3_entry none;
		e = s3_look_file(s3_own(s)->client, S3_MARKS "none", &none);
		if (e == ERR_NOT_FOUND)
			return OK;
		err_restore(&why);
		return why.code;
	}
	TRY(e);
	out->writable = out->noreplace = out->exchange = true;
	return OK;
}

static uint64_t count(const struct store *s, bool written)
{
	struct s3_own *own = s3_own(s);
	struct s3_counts c = s3_counts(own->client);
	uint64_t now = written ? c.sent_bytes : c.received_bytes;

	pthread_mutex_lock(&own->lock);
	uint64_t more = now - own->counted[written];
	own->counted[written] = now;
	pthread_mutex_unlock(&own->lock);
	return more;
}

/* ---- handles ---- */

static void free_thing(struct s3_thing *t)
{
	if (!t)
		return;
	s3_folder_free(t->folder);
	s3_entry_free(&t->file);
	if (t->upload)
		s3_part_close(t->upload);
	mem_free(t);
}

static void free_thing_ptr(struct s3_thing **t)
{
	free_thing(*t);
}

static const struct s3_thing top_thing = { .kind = S3_THING_MADE };

struct s3_thing *s3_thing_at(struct store_at at)
{
	struct s3_own *own = s3_own(at.store);

	if (at.handle == 0)
		return (struct s3_thing *)&top_thing; /* nothing of it changes */
	pthread_mutex_lock(&own->lock);
	must(at.handle > 0 && (uint64_t)at.handle <= own->things.n && own->things.v[at.handle - 1]);
	struct s3_thing *t = own->things.v[at.handle - 1];
	pthread_mutex_unlock(&own->lock);
	return t;
}

enum err s3_thing_open(const struct store *s, struct s3_thing **thing, struct store_at *out)
{
	struct s3_own *own = s3_own(s);
	struct s3_thing **at = NULL;
	enum err e = OK;

	pthread_mutex_lock(&own->lock);
	for (uint64_t i = 0; i < own->things.n && !at; i++)
		at = own->things.v[i] ? NULL : &own->things.v[i];
	if (!at && own->things.n >= HANDLES_MAX)
		e = ERR(SYSTEM, "more than %d files are open", HANDLES_MAX);
	else if (!at)
		e = vec_push(&own->things, &at);
	if (!e) {
		*at = *thing;
		*out = (struct store_at){ s, (int)(at - own->things.v) + 1 };
	}
	pthread_mutex_unlock(&own->lock);
	if (e)
		free_thing(*thing);
	*thing = NULL;
	return e;
}

static void drop_handle(struct store_at *at)
{
	struct s3_own *own = s3_own(at->store);

	if (at->handle > 0) {
		struct s3_thing *t = s3_thing_at(*at);
		pthread_mutex_lock(&own->lock);
		own->things.v[at->handle - 1] = NULL;
		pthread_mutex_unlock(&own->lock);
		free_thing(t);
	}
	at->handle = -1;
}

/* ---- finding ---- */

static FALLIBLE enum err path_of(struct store_at at, const char *path, char out[S3_PATH_MAX])
{
	return s3_join(s3_thing_at(at)->path, strcmp(path, ".") == 0 ? "" : path, out);
}

/* Of an attempt that is under way: its files are seen by who names it. */
static bool is_staging(const char *path)
{
	const char *slash = strrchr(path, '/'), *last = slash ? slash + 1 : path;

	return str_starts(str_of(last), ".dcpd-");
}

static FALLIBLE enum err enter_staging(struct store_at folder, const char *path, struct s3_thing *t)
{
	struct s3_own *own = s3_own(folder.store);
	struct s3_mark m;

	TRY(s3_mark_of_staging(own->client, path, &m));
	s3_part_forget(own, path, true); /* of jobs that this process has done with */
	t->kind = S3_THING_STAGING;
	t->repairs = m.repairs;
	t->attempt = m.repairs ? m.of : m.attempt;
	t->is_file = m.is_file;
	memcpy(t->target, m.target, sizeof t->target);
	return OK;
}

static FALLIBLE enum err enter_folder(struct store_at folder, const char *path, struct s3_thing *t)
{
	t->kind = S3_THING_FOLDER;
	t->folder = mem_zalloc(1, sizeof *t->folder);
	NEED(t->folder, "no memory for a folder");
	TRY(s3_folder_look(s3_own(folder.store)->client, path, false, t->folder));
	return t->folder->is_there || path[0] == '\0' ? OK : s3_missing(path);
}

/* A meeting place by its key, whose files are read and written like those of a staging. */
static void set_meeting(struct s3_thing *t)
{
	t->kind = S3_THING_MADE;
	t->meets = true;
	memcpy(t->target, t->path, sizeof t->target);
}

static enum err enter(struct store_at folder, const char *path, struct store_at *out)
{
	CLEANUP(free_thing_ptr) struct s3_thing *t = mem_zalloc(1, sizeof *t);
	char whole[S3_PATH_MAX];

	*out = (struct store_at){ folder.store, -1 };
	NEED(t, "no memory for a folder");
	TRY(path_of(folder, path, whole));
	if (s3_meeting_key(whole, t->path)) {
		set_meeting(t);
		TRY(s3_meeting_look(s3_own(folder.store)->client, t->path));
		return s3_thing_open(folder.store, &t, out);
	}
	memcpy(t->path, whole, sizeof whole);
	TRY(is_staging(t->path) ? enter_staging(folder, t->path, t) : enter_folder(folder, t->path, t));
	return s3_thing_open(folder.store, &t, out);
}

static enum err list(struct store_at at, store_entry_fn fn, void *user)
{
	CLEANUP(s3_folder_free_ptr) struct s3_folder *fresh = NULL;
	const struct s3_thing *t = s3_thing_at(at);
	const struct s3_folder *f = t->folder;

	if (!f || t->kind != S3_THING_FOLDER) {
		fresh = mem_zalloc(1, sizeof *fresh);
		NEED(fresh, "no memory for a folder");
		TRY(s3_folder_look(s3_own(at.store)->client, t->path, false, fresh));
		f = fresh;
	}
	for (uint64_t i = 0; i < f->v.n; i++)
		TRY(fn(user, f->v.v[i].name, s3_is_folder_entry(&f->v.v[i]) ? DT_DIR : DT_REG));
	return OK;
}

static FALLIBLE enum err copy_entry(const struct s3_entry *from, struct s3_entry *out)
{
	*out = *from;
	out->name = mem_strdup(from->name);
	out->key = mem_strdup(from->key);
	if (out->name && out->key)
		return OK;
	s3_entry_free(out);
	return ERR(NO_MEMORY, "no memory for a name");
}

/* A file of a staging whose object is there. What was seen of the target is asked anew when a file is missing in it. */
static FALLIBLE enum err find_staged(struct store_at at, const char *name, struct s3_entry *out)
{
	struct s3_own *own = s3_own(at.store);
	struct s3_thing *t = s3_thing_at(at);
	struct s3_upload *u = s3_part_find(own, t->path, name);
	char side[S3_NAME_MAX + 32];

	if (u && u->waits) {
		*out = (struct s3_entry){ .name = mem_strdup(name), .key = mem_strdup(u->key), .bytes = u->bytes };
		return out->name && out->key ? OK : ERR(NO_MEMORY, "no memory for a name");
	}
	snprintf(side, sizeof side, "%s%s", "", name);
	if (s3_is_side(name) && t->attempt)
		snprintf(side, sizeof side, ".dcpd-%0*jx-%s", S3_ATTEMPT_DIGITS, (uintmax_t)t->attempt, name);
	for (int i = 0; i < 2; i++) {
		const struct s3_entry *e = t->folder ? s3_folder_find(t->folder, side) : NULL;
		if (e)
			return copy_entry(e, out);
		if (i)
			break;
		s3_folder_free(t->folder);
		t->folder = mem_zalloc(1, sizeof *t->folder);
		NEED(t->folder, "no memory for a folder");
		TRY(s3_folder_look(own->client, t->target, true, t->folder));
	}
	return s3_missing(name);
}

/* A file by its whole path. Pages and commits are seen through their folder only. */
static FALLIBLE enum err find_by_path(const struct store *s, const char *path, struct s3_entry *out)
{
	CLEANUP(s3_folder_free_ptr) struct s3_folder *f = NULL;
	const char *slash = strrchr(path, '/'), *last = slash ? slash + 1 : path, *rest;
	struct format_file is;
	char parent[S3_PATH_MAX];

	bool plain = !s3_is_side(last) && !s3_attempt_of(last, &rest) && !(format_file(last, &is) && is.role == FORMAT_METADATA);
	if (plain)
		return s3_look_file(s3_own(s)->client, path, out);
	snprintf(parent, sizeof parent, "%.*s", slash ? (int)(slash - path) : 0, path);
	f = mem_zalloc(1, sizeof *f);
	NEED(f, "no memory for a folder");
	TRY(s3_folder_look(s3_own(s)->client, parent, false, f));
	const struct s3_entry *e = s3_folder_find(f, last);
	return e && !s3_is_folder_entry(e) ? copy_entry(e, out) : s3_missing(path);
}

static FALLIBLE enum err find_file(struct store_at at, const char *name, struct s3_entry *out)
{
	const struct s3_thing *t = s3_thing_at(at);
	char path[S3_PATH_MAX];

	*out = (struct s3_entry){ 0 };
	if (t->kind == S3_THING_STAGING)
		return find_staged(at, name, out);
	if (t->kind == S3_THING_FOLDER && !strchr(name, '/')) {
		const struct s3_entry *e = s3_folder_find(t->folder, name);
		return e && !s3_is_folder_entry(e) ? copy_entry(e, out) : s3_missing(name);
	}
	TRY(path_of(at, name, path));
	return find_by_path(at.store, path, out);
}

static FALLIBLE enum err stat_path(struct store_at at, const char *name, struct stat *out)
{
	CLEANUP(s3_folder_free_ptr) struct s3_folder *f = mem_zalloc(1, sizeof *f);
	CLEANUP(s3_entry_free) struct s3_entry file = { 0 };
	const struct s3_thing *t = s3_thing_at(at);
	char path[S3_PATH_MAX];
	struct s3_mark m;

	NEED(f, "no memory for a folder");
	const struct s3_entry *seen = t->kind == S3_THING_FOLDER && !strchr(name, '/') ? s3_folder_find(t->folder, name) : NULL;
	bool is_folder = seen && s3_is_folder_entry(seen);
	if (t->kind == S3_THING_STAGING || (seen && !is_folder)) {
		TRY(find_file(at, name, &file));
		s3_stat_file(&file, out);
		return OK;
	}
	TRY(path_of(at, name, path));
	if (is_staging(path) && !s3_is_side(strrchr(path, '/') ? strrchr(path, '/') + 1 : path)) {
		enum err e = s3_mark_of_staging(s3_own(at.store)->client, path, &m);
		if (e != ERR_NOT_FOUND) {
			s3_stat_folder(f, out);
			return e;
		}
	}
	TRY(s3_folder_look(s3_own(at.store)->client, path, false, f));
	if (f->is_there || !path[0]) {
		s3_stat_folder(f, out);
		return OK;
	}
	TRY(find_by_path(at.store, path, &file));
	s3_stat_file(&file, out);
	return OK;
}

static enum err stat_of(struct store_at at, const char *path, struct stat *out)
{
	const struct s3_thing *t = s3_thing_at(at);
	const struct s3_folder none = { .path = "" };

	if (path[0] && strcmp(path, ".") != 0)
		return stat_path(at, path, out);
	if (t->kind == S3_THING_FILE) {
		s3_stat_file(&t->file, out);
	} else if (t->kind == S3_THING_PART) {
		const struct s3_entry e = { .bytes = t->upload->bytes };
		s3_stat_file(&e, out);
	} else {
		s3_stat_folder(t->folder && t->kind == S3_THING_FOLDER ? t->folder : &none, out);
	}
	return OK;
}

static bool watch(struct store_at folder)
{
	(void)folder;
	return false;
}

/* ---- files ---- */

static enum err open_file(struct store_at folder, const char *name, unsigned flags, struct store_at *out)
{
	const struct s3_thing *at = s3_thing_at(folder);
	CLEANUP(free_thing_ptr) struct s3_thing *t = NULL;

	*out = (struct store_at){ folder.store, -1 };
	if (flags & (STORE_NEW | STORE_WRITE)) {
		if (at->kind != S3_THING_STAGING && !at->meets)
			return ERR(UNSUPPORTED, "files are written to an object storage in stagings");
		return s3_part_open(folder, name, flags, out);
	}
	t = mem_zalloc(1, sizeof *t);
	NEED(t, "no memory for an open file");
	t->kind = S3_THING_FILE;
	TRY(err_at_file(find_file(folder, name, &t->file), name, -1));
	return s3_thing_open(folder.store, &t, out);
}

static enum err read_at(struct store_at file, void *into, size_t n, uint64_t offset, const char *name)
{
	const struct s3_thing *t = s3_thing_at(file);

	if (!num_inside(offset, n, t->file.bytes))
		return err_at_file(ERR(STORAGE_IO, "the file ends at %ju, %zu bytes at %ju were expected", (uintmax_t)t->file.bytes, n,
				       (uintmax_t)offset), name, (int64_t)offset);
	if (n == 0)
		return OK;
	return err_at_file(s3_get(s3_own(file.store)->client, t->file.key, offset, into, n, t->file.etag, NULL, NULL), name,
			   (int64_t)offset);
}

/* ---- pages ---- */

static enum err make(struct store_at folder, const char *path, struct store_at *out)
{
	CLEANUP(free_thing_ptr) struct s3_thing *t = mem_zalloc(1, sizeof *t);
	char whole[S3_PATH_MAX];

	*out = (struct store_at){ folder.store, -1 };
	NEED(t, "no memory for a folder");
	t->kind = S3_THING_MADE;
	TRY(path_of(folder, path, whole));
	memcpy(t->path, whole, sizeof whole);
	if (s3_meeting_key(whole, t->path)) {
		set_meeting(t);
		TRY(s3_meeting_make(s3_own(folder.store)->client, t->path));
	}
	return s3_thing_open(folder.store, &t, out);
}

static enum err put(struct store_at folder, const char *name, const void *bytes, uint64_t n, bool durable)
{
	char key[S3_PATH_MAX];

	(void)durable;
	TRY(path_of(folder, name, key));
	return s3_put(s3_own(folder.store)->client, key, bytes, n, S3_ALWAYS, NULL, NULL, NULL);
}

static enum err swap(struct store_at folder, const char *name, const void *bytes, uint64_t n, const struct stat *was)
{
	CLEANUP(s3_entry_free) struct s3_entry now = { 0 };
	struct s3 *client = s3_own(folder.store)->client;
	struct s3_condition condition = { S3_IF_NONE, NULL };
	char key[S3_PATH_MAX];
	struct stat st;

	TRY(path_of(folder, name, key));
	if (was) {
		enum err e = s3_look_file(client, key, &now);
		if (e && e != ERR_NOT_FOUND)
			return e;
		s3_stat_file(&now, &st);
		if (e || st.st_ino != was->st_ino)
			return ERR(STATE_CONFLICT, "'%s' is another one by now", name);
		condition = (struct s3_condition){ S3_IF_ETAG, now.etag };
	}
	enum err e = s3_put(client, key, bytes, n, condition, NULL, NULL, NULL);
	return e == ERR_CHECKPOINT_EXISTS || e == ERR_NOT_FOUND ? ERR(STATE_CONFLICT, "'%s' is another one by now", name) : e;
}

static enum err drop(struct store_at folder, const char *path)
{
	char key[S3_PATH_MAX], meeting[S3_PATH_MAX];

	const struct s3_thing *t = s3_thing_at(folder);
	const struct s3_entry *e = t->kind == S3_THING_FOLDER ? s3_folder_find(t->folder, path) : NULL;

	TRY(e ? s3_join(e->key, "", key) : path_of(folder, path, key));
	if (s3_meeting_key(key, meeting))
		return s3_meeting_drop(s3_own(folder.store)->client, meeting);
	if (t->kind == S3_THING_STAGING)
		return OK; /* keys of an attempt are its own */
	return s3_delete(s3_own(folder.store)->client, key, NULL);
}

const struct store_ops s3_ops = {
	open_store, check, probe, count, NULL,
	enter, list, stat_of, watch, open_file, read_at, NULL, drop_handle, NULL,
	s3_part_write, s3_part_resize, s3_part_finish,
	s3_stage, s3_publish, NULL, s3_replace, s3_discard, s3_remove, s3_fence, s3_recover, s3_sweep,
	s3_trash_list, s3_trash_restore, s3_trash_empty,
	make, put, s3_adopt, drop, NULL, swap,
	s3_clones, s3_clone, s3_part_link, NULL, NULL, true, NULL,
};
