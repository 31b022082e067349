/* t_objects.h: a store as an object store has it, in memory: flat keys, whole objects, PUT under a condition; no directories, no rename, no
 * descriptors. It fills struct store_ops, so that nothing above the store can lean on more than that.
 *
 *   part/{folder}/{file}   an upload that has begun: nobody reads it. Each byte comes once, unless it was declared late
 *   data/{folder}/{file}   bytes: finished parts of a staging, pages of a meeting place
 *   page/{name}            a checkpoint: a line "file TAB key" for each of its files. Its PUT, under If-None-Match: * or If-Match: ETag,
 *                          is the commit; nothing else makes a file visible at its name. (A checkpoint that is one file is a copy of it.)
 *
 * A key that is removed or replaced keeps its bytes for those who read it. */
#pragma once
#include <dirent.h>
#include <pthread.h>
#include <string.h>
#include "base/mem.h"
#include "base/num.h"
#include "lib/t.h"
#include "store/commit.h"
#include "store/identity.h"
#include "store/notes.h"
#include "store/staging.h"

enum { OBJ_MAX = 512, OBJ_KEY = 512, OBJ_OPEN = 128, OBJ_ANY = 0 };

struct obj {                           /* bytes that never change once they are PUT */
	unsigned refs;
	uint64_t etag, n;
	unsigned char *p;
	unsigned char *came;           /* of an upload: has this byte come? */
	bool late;
};

struct objects {
	pthread_mutex_t lock;
	uint64_t etags;
	const char *fails;             /* calls that move bytes of files whose names begin so are told to slow down; NULL: none */
	struct { char key[OBJ_KEY]; struct obj *o; } v[OBJ_MAX];
	struct { bool used, folder; char path[OBJ_KEY]; struct obj *o; } open[OBJ_OPEN];
};

static inline struct objects *objs(const struct store *s)
{
	return s->own;
}

static inline struct obj *obj_share(struct obj *o)
{
	o->refs++;
	return o;
}

static inline void obj_free(struct obj *o)
{
	if (o && --o->refs == 0) {
		mem_free(o->p);
		mem_free(o->came);
		mem_free(o);
	}
}

/* ---- the object store: find, PUT, DELETE, each whole; the caller holds the lock ---- */

static inline int obj_find(const struct objects *b, const char *key)
{
	for (int i = 0; i < OBJ_MAX; i++)
		if (b->v[i].o && strcmp(b->v[i].key, key) == 0)
			return i;
	return -1;
}

/* if_match: OBJ_ANY; UINT64_MAX: there must be none. False: 412. */
static inline bool obj_put(struct objects *b, const char *key, struct obj *o, uint64_t if_match)
{
	int i = obj_find(b, key);

	if (if_match != OBJ_ANY && (i < 0 ? 0 : b->v[i].o->etag) != (if_match == UINT64_MAX ? 0 : if_match))
		return false;
	for (int k = 0; k < OBJ_MAX && i < 0; k++)
		i = b->v[k].o ? -1 : k;
	assert_true(i >= 0 && strlen(key) < OBJ_KEY);
	obj_free(b->v[i].o);
	snprintf(b->v[i].key, OBJ_KEY, "%s", key);
	b->v[i].o = obj_share(o);
	o->etag = ++b->etags;
	return true;
}

static inline void obj_delete(struct objects *b, int i)
{
	obj_free(b->v[i].o);
	b->v[i].o = NULL;
}

static inline struct obj *obj_new(const void *p, uint64_t n)
{
	struct obj *o = mem_zalloc(1, sizeof *o);

	o->p = mem_alloc(n + 1);
	assert_non_null(o->p);
	memcpy(o->p, p, n);
	o->p[n] = '\0';
	o->n = n;
	return o;
}

/* Gives an upload a length; what is new is zeros that have not come. */
static inline void obj_resize(struct obj *o, uint64_t n)
{
	unsigned char *p = mem_zalloc(n + 1, 1), *came = mem_zalloc(n + 1, 1);

	memcpy(p, o->p, num_min(n, o->n));
	if (o->came)
		memcpy(came, o->came, num_min(n, o->n));
	mem_free(o->p);
	mem_free(o->came);
	o->p = p;
	o->came = came;
	o->n = n;
}

/* ---- names ---- */

static inline bool obj_under(const char *key, const char *prefix)
{
	size_t n = strlen(prefix);

	return strncmp(key, prefix, n) == 0 && (n == 0 || key[n] == '/');
}

static inline void obj_path(const struct objects *b, struct store_at at, const char *name, char out[OBJ_KEY])
{
	const char *base = at.handle == 0 ? "" : b->open[at.handle].path;

	if (strcmp(name, ".") == 0)
		name = "";
	assert_true((size_t)snprintf(out, OBJ_KEY, "%s%s%s", base, base[0] && name[0] ? "/" : "", name) < OBJ_KEY);
}

/* The object that the page has for `file`; "" ends the walk: the i-th file's name. */
static inline struct obj *obj_of_page(const struct objects *b, const struct obj *page, const char *file, int i, char name[OBJ_KEY])
{
	const char *line = page ? (const char *)page->p : "";

	for (; *line; line = strchr(line, '\n') + 1, i--) {
		size_t n = strcspn(line, "\t"), k = strcspn(line + n + 1, "\n");
		char key[OBJ_KEY];
		snprintf(name, OBJ_KEY, "%.*s", (int)n, line);
		if (file ? strcmp(name, file) != 0 : i > 0)
			continue;
		snprintf(key, sizeof key, "%.*s", (int)k, line + n + 1);
		int at = obj_find(b, key);
		return at < 0 ? NULL : b->v[at].o;
	}
	return NULL;
}

static inline struct obj *obj_page(const struct objects *b, const char *path)
{
	char key[OBJ_KEY];

	snprintf(key, sizeof key, "page/%.500s", path);
	int i = obj_find(b, key);
	return i < 0 ? NULL : b->v[i].o;
}

/* Finds the object of a path: a file of a checkpoint, or of a staging that is named. */
static inline struct obj *obj_file(const struct objects *b, const char *path)
{
	char key[OBJ_KEY], name[OBJ_KEY];
	const char *slash = strrchr(path, '/');

	snprintf(key, sizeof key, "data/%.500s", path);
	int i = obj_find(b, key);
	if (i >= 0 || !slash)
		return i < 0 ? NULL : b->v[i].o;
	snprintf(key, sizeof key, "%.*s", (int)(slash - path), path);
	return obj_of_page(b, obj_page(b, key), slash + 1, 0, name);
}

static inline bool obj_is_folder(const struct objects *b, const char *path)
{
	char data[OBJ_KEY], page[OBJ_KEY];
	bool is = path[0] == '\0' || obj_page(b, path);

	snprintf(data, sizeof data, "data/%.500s", path);
	snprintf(page, sizeof page, "page/%.500s", path);
	for (int i = 0; i < OBJ_MAX; i++)
		is = is || (b->v[i].o && (obj_under(b->v[i].key, data) || obj_under(b->v[i].key, page)));
	for (int i = 0; i < OBJ_OPEN; i++) /* no key yet: known to who has it open */
		is = is || (b->open[i].used && b->open[i].folder && strcmp(b->open[i].path, path) == 0);
	return is;
}

static inline enum err obj_open(struct objects *b, const struct store *s, bool folder, const char *path, struct obj *o,
				struct store_at *out)
{
	for (int i = 1; i < OBJ_OPEN; i++)
		if (!b->open[i].used) {
			b->open[i].used = true;
			b->open[i].folder = folder;
			b->open[i].o = o ? obj_share(o) : NULL;
			snprintf(b->open[i].path, OBJ_KEY, "%s", path);
			*out = (struct store_at){ s, i };
			return OK;
		}
	return ERR(SYSTEM, "too much is open");
}

static inline enum err obj_missing(const char *name)
{
	return err_at_file(ERR(NOT_FOUND, "there is no '%s'", name), name, -1);
}

#define OBJ_LOCKED(s)                                 \
	struct objects *b = objs(s);                  \
	CLEANUP(obj_unlock) struct objects *held_ = b; \
	pthread_mutex_lock(&b->lock)

static inline void obj_unlock(struct objects **b)
{
	pthread_mutex_unlock(&(*b)->lock);
}

/* ---- struct store_ops: reading ---- */

static inline enum err objects_open(struct store *s, const struct store_place *place)
{
	(void)place;
	s->own = mem_zalloc(1, sizeof(struct objects));
	pthread_mutex_init(&objs(s)->lock, NULL);
	s->top = 0;
	return OK;
}

static inline enum err objects_check(const struct store *s)
{
	(void)s;
	return OK;
}

static inline enum err objects_probe(const struct store *s, struct store_facts *out)
{
	(void)s;
	*out = (struct store_facts){ .free_bytes = 1 << 30, .total_bytes = 1 << 30, .kind = "objects", .writable = true };
	return OK;
}

static inline uint64_t objects_count(const struct store *s, bool written)
{
	(void)s, (void)written;
	return 0;
}

static inline enum err objects_enter(struct store_at folder, const char *path, struct store_at *out)
{
	OBJ_LOCKED(folder.store);
	char full[OBJ_KEY];

	obj_path(b, folder, path, full);
	*out = (struct store_at){ folder.store, -1 };
	return obj_is_folder(b, full) ? obj_open(b, folder.store, true, full, obj_page(b, full), out) : obj_missing(path);
}

static inline int obj_by_text(const void *a, const void *b)
{
	return strcmp(a, b);
}

/* Next names below the folder: of a checkpoint its files; else those of its data, and what is published below. */
static inline enum err objects_list(struct store_at folder, store_entry_fn fn, void *user)
{
	static const char *const kinds[] = { "data", "page" };
	char (*names)[OBJ_KEY] = mem_zalloc(OBJ_MAX, sizeof *names), prefix[OBJ_KEY], name[OBJ_KEY];
	unsigned char types[OBJ_MAX];
	struct objects *b = objs(folder.store);
	int n = 0;

	pthread_mutex_lock(&b->lock);
	struct obj *page = folder.handle ? b->open[folder.handle].o : NULL;
	while (page && obj_of_page(b, page, NULL, n, names[n]))
		types[n++] = DT_REG;
	for (int i = 0; i < 2 * OBJ_MAX && !page; i++) {
		const char *key = b->v[i / 2].key;
		obj_path(b, folder, "", name);
		snprintf(prefix, sizeof prefix, "%s%s%.500s", kinds[i & 1], name[0] ? "/" : "", name);
		if (!b->v[i / 2].o || !obj_under(key, prefix))
			continue;
		const char *rest = key + strlen(prefix) + 1;
		bool deep = strchr(rest, '/'), known = false;
		if (deep && !(i & 1)) /* a staging below, which nobody has named */
			continue;
		snprintf(name, sizeof name, "%.*s", (int)strcspn(rest, "/"), rest);
		for (int k = 0; k < n; k++)
			known = known || strcmp(names[k], name) == 0;
		if (!known) {
			types[n] = i & 1 ? DT_DIR : DT_REG;
			memcpy(names[n++], name, sizeof name);
		}
	}
	pthread_mutex_unlock(&b->lock);
	enum err e = OK;
	for (int i = 0; i < n && !e; i++)
		e = fn(user, names[i], types[i]);
	mem_free(names);
	return e;
}

static inline enum err objects_stat(struct store_at at, const char *path, struct stat *out)
{
	OBJ_LOCKED(at.store);
	char full[OBJ_KEY], in_page[OBJ_KEY];

	obj_path(b, at, path, full);
	struct obj *own = at.handle ? b->open[at.handle].o : NULL;
	struct obj *o = !path[0] ? own : own ? obj_of_page(b, own, path, 0, in_page) : obj_file(b, full);
	bool file = path[0] ? o != NULL : at.handle && !b->open[at.handle].folder;
	if (!file && !obj_is_folder(b, full))
		return obj_missing(path);
	o = file || !path[0] ? o : obj_page(b, full);
	*out = (struct stat){ .st_mode = file ? S_IFREG | 0644 : S_IFDIR | 0755, .st_uid = geteuid(), .st_ino = o ? o->etag : 1 };
	out->st_size = file && o ? (off_t)o->n : 0;
	out->st_mtim.tv_sec = out->st_ctim.tv_sec = o ? (time_t)o->etag : 0;
	return OK;
}

static inline bool objects_watch(struct store_at folder)
{
	(void)folder;
	return false;
}

static inline enum err objects_open_file(struct store_at folder, const char *name, unsigned flags, struct store_at *out)
{
	OBJ_LOCKED(folder.store);
	char full[OBJ_KEY], in_page[OBJ_KEY];

	obj_path(b, folder, name, full);
	*out = (struct store_at){ folder.store, -1 };
	struct obj *page = folder.handle ? b->open[folder.handle].o : NULL;
	struct obj *o = page ? obj_of_page(b, page, name, 0, in_page) : obj_file(b, full);
	char part[OBJ_KEY];
	snprintf(part, sizeof part, "part/%.500s", full);
	int begun = obj_find(b, part);
	if (flags & STORE_NEW && (o || begun >= 0))
		return err_at_file(ERR(CHECKPOINT_EXISTS, "'%s' is there", name), name, -1);
	if (flags & STORE_NEW) {
		o = obj_new("", 0);
		o->late = flags & STORE_LATE;
		(void)obj_put(b, part, o, OBJ_ANY);
	} else if (flags & STORE_WRITE) { /* what is finished is never written again */
		o = begun >= 0 ? b->v[begun].o : NULL;
	}
	return o ? obj_open(b, folder.store, false, full, o, out) : obj_missing(name);
}

static inline enum err obj_slow(const struct objects *b, struct store_at file)
{
	const char *path = b->open[file.handle].path, *slash = strrchr(path, '/');

	if (!b->fails || strncmp(slash ? slash + 1 : path, b->fails, strlen(b->fails)) != 0)
		return OK;
	return ERR(STORAGE_STALLED, "SlowDown: reduce your request rate");
}

static inline enum err objects_read(struct store_at file, void *into, size_t n, uint64_t offset, const char *name)
{
	OBJ_LOCKED(file.store);
	const struct obj *o = b->open[file.handle].o;

	TRY(obj_slow(b, file));
	if (!num_inside(offset, n, o->n))
		return err_at_file(ERR(STORAGE_IO, "'%s' ends at %ju", name, (uintmax_t)o->n), name, (int64_t)offset);
	memcpy(into, o->p + offset, n);
	return OK;
}

static inline enum err objects_get(struct store_at folder, const char *name, uint64_t max, void **bytes_out, uint64_t *n_out,
				   struct stat *st_out)
{
	struct store_at file;
	struct stat st;

	TRY(objects_open_file(folder, name, STORE_READ, &file));
	enum err e = objects_stat(file, "", &st);
	if (!e && (uint64_t)st.st_size > max)
		e = err_at_file(ERR(LIMIT_EXCEEDED, "'%s' has %jd bytes", name, (intmax_t)st.st_size), name, -1);
	if (!e) {
		*n_out = (uint64_t)st.st_size;
		*bytes_out = mem_alloc(*n_out + 1);
		e = objects_read(file, *bytes_out, *n_out, 0, name);
	}
	if (st_out)
		*st_out = st;
	store_close(&file);
	return e;
}

static inline void objects_close(struct store_at *at)
{
	OBJ_LOCKED(at->store);

	if (at->handle > 0) {
		if (b->open[at->handle].o)
			obj_free(b->open[at->handle].o);
		b->open[at->handle].used = false;
	}
	at->handle = -1;
}

/* ---- parts: an upload until finish(), which makes the object ---- */

static inline enum err objects_write(struct store_at file, const void *from, size_t n, uint64_t offset, const char *name)
{
	OBJ_LOCKED(file.store);
	struct obj *o = b->open[file.handle].o;

	TRY(obj_slow(b, file));
	if (offset + n > o->n)
		obj_resize(o, offset + n);
	if (!o->late && n && memchr(o->came + offset, 1, n))
		return err_at_file(ERR(INTERNAL, "bytes of '%s' are written twice", name), name, (int64_t)offset);
	memcpy(o->p + offset, from, n);
	memset(o->came + offset, 1, n);
	return OK;
}

static inline enum err objects_resize(struct store_at file, uint64_t bytes, const char *name)
{
	OBJ_LOCKED(file.store);

	(void)name;
	obj_resize(b->open[file.handle].o, bytes);
	return OK;
}

static inline enum err objects_finish(struct store_at *file, bool durable, const char *name)
{
	(void)durable;
	{
		OBJ_LOCKED(file->store);
		char key[OBJ_KEY];
		snprintf(key, sizeof key, "part/%.500s", b->open[file->handle].path);
		int i = obj_find(b, key);
		if (i < 0 || b->v[i].o != b->open[file->handle].o)
			return ERR(INTERNAL, "'%s' was finished before", name);
		memcpy(key, "data", 4);
		(void)obj_put(b, key, b->v[i].o, OBJ_ANY);
		obj_delete(b, i);
	}
	objects_close(file);
	return OK;
}

/* ---- meeting places ---- */

static inline enum err objects_make(struct store_at folder, const char *path, struct store_at *out)
{
	OBJ_LOCKED(folder.store);
	char full[OBJ_KEY];

	obj_path(b, folder, path, full);
	return obj_open(b, folder.store, true, full, NULL, out);
}

static inline enum err objects_put(struct store_at folder, const char *name, const void *bytes, uint64_t n, bool durable)
{
	OBJ_LOCKED(folder.store);
	char full[OBJ_KEY], key[OBJ_KEY];
	struct obj *o = obj_share(obj_new(bytes, n));

	(void)durable;
	obj_path(b, folder, name, full);
	snprintf(key, sizeof key, "data/%.500s", full);
	(void)obj_put(b, key, o, OBJ_ANY);
	obj_free(o);
	return OK;
}

static inline enum err objects_swap(struct store_at folder, const char *name, const void *bytes, uint64_t n, const struct stat *was)
{
	OBJ_LOCKED(folder.store);
	char full[OBJ_KEY], key[OBJ_KEY];
	struct obj *o = obj_share(obj_new(bytes, n));

	obj_path(b, folder, name, full);
	snprintf(key, sizeof key, "data/%.500s", full);
	bool same = obj_put(b, key, o, was ? was->st_ino : UINT64_MAX);
	obj_free(o);
	return same ? OK : ERR(STATE_CONFLICT, "'%s' is another one by now", name);
}

static inline enum err objects_drop(struct store_at folder, const char *path)
{
	OBJ_LOCKED(folder.store);
	char full[OBJ_KEY];

	obj_path(b, folder, path, full);
	for (int i = 0; i < OBJ_MAX; i++)
		if (b->v[i].o && (strncmp(b->v[i].key, "data/", 5) == 0 || strncmp(b->v[i].key, "part/", 5) == 0) &&
		    obj_under(b->v[i].key + 5, full))
			obj_delete(b, i);
	return OK;
}

static inline enum err objects_adopt(struct staging *s, struct store_at from, const char *name)
{
	OBJ_LOCKED(s->store);
	char full[OBJ_KEY], key[OBJ_KEY];

	obj_path(b, from, name, full);
	snprintf(key, sizeof key, "data/%.500s", full);
	int i = obj_find(b, key);
	if (i < 0)
		return obj_missing(name);
	snprintf(key, sizeof key, "data/%.300s/%.200s", s->path, name);
	(void)obj_put(b, key, b->v[i].o, OBJ_ANY); /* a copy on the server's side */
	obj_delete(b, i);
	return OK;
}

/* ---- the commit ---- */

/* Does a checkpoint have the file? */
static inline bool obj_is_used(const struct objects *b, const char *key)
{
	char line[OBJ_KEY + 2];

	snprintf(line, sizeof line, "\t%s\n", key);
	for (int i = 0; i < OBJ_MAX; i++)
		if (b->v[i].o && obj_under(b->v[i].key, "page") && strstr((const char *)b->v[i].o->p, line))
			return true;
	return false;
}

/* Removes stagings of the job, or, NULL, of all that `keep` does not name, and counts them; what is published stays. */
static inline uint64_t obj_clear(struct objects *b, const char *job, const struct commit_keep *k)
{
	const json_t *keep = k ? k->jobs : NULL;
	uint64_t removed = 0;

	for (int i = 0; i < OBJ_MAX; i++) {
		const char *own = b->v[i].o ? strstr(b->v[i].key, "/.dcpd-") : NULL;
		bool kept = !own || str_ends(str_of(own), NOTES_NAME) || obj_is_used(b, b->v[i].key);
		char id[OBJ_KEY];
		for (size_t at = 0; at < json_array_size(keep) && !kept; at++) {
			snprintf(id, sizeof id, "/.dcpd-%s-", json_string_value(json_array_get(keep, at)));
			kept = strncmp(own, id, strlen(id)) == 0;
		}
		snprintf(id, sizeof id, "/.dcpd-%s-", job ? job : "");
		kept = kept || (job && strncmp(own, id, strlen(id)) != 0);
		if (kept || (k && k->attempt && strtoull(own + strlen(id), NULL, 10) > k->attempt))
			continue;
		obj_delete(b, i);
		removed++;
	}
	return removed;
}

static inline enum err objects_stage(struct staging *s, bool keep)
{
	char path[OBJ_KEY];
	{
		OBJ_LOCKED(s->store);
		(void)obj_clear(b, s->by.id, NULL);
		snprintf(path, sizeof path, "%.500s", s->path);
		if (!keep && obj_is_folder(b, path))
			return ERR(CHECKPOINT_EXISTS, "'%s' is there", s->name);
	}
	s->made = true;
	return objects_make(store_top(s->store), path, &s->dir);
}

/* The new page, or the one file that is published; the caller holds the lock for the look at the keys alone. */
static inline struct obj *obj_new_page(struct objects *b, const struct staging *s)
{
	char prefix[OBJ_KEY], text[OBJ_MAX * 64];
	size_t n = 0;

	if (s->is_file) {
		snprintf(prefix, sizeof prefix, "data/%.300s/%.200s", s->path, s->target);
		int i = obj_find(b, prefix);
		return i < 0 ? obj_new("", 0) : obj_new(b->v[i].o->p, b->v[i].o->n); /* a copy on the server's side */
	}
	snprintf(prefix, sizeof prefix, "data/%.500s", s->path);
	text[0] = '\0';
	for (int i = 0; i < OBJ_MAX; i++)
		if (b->v[i].o && obj_under(b->v[i].key, prefix))
			n += (size_t)snprintf(text + n, sizeof text - n, "%s\t%s\n", b->v[i].key + strlen(prefix) + 1, b->v[i].key);
	return obj_new(text, n);
}

static inline enum err objects_publish(struct staging *s, const char *replaces)
{
	char name[OBJ_KEY], key[OBJ_KEY], identity[IDENTITY_MAX];
	struct objects *b = objs(s->store);

	snprintf(name, sizeof name, "%.300s%s%.200s", s->parent_path, s->parent_path[0] ? "/" : "", s->target);
	snprintf(key, sizeof key, "%s/%.500s", s->is_file ? "data" : "page", name);
	pthread_mutex_lock(&b->lock);
	const struct obj *old = s->is_file ? obj_file(b, name) : obj_page(b, name);
	uint64_t etag = old ? old->etag : UINT64_MAX;
	struct obj *page = obj_share(obj_new_page(b, s));
	pthread_mutex_unlock(&b->lock);
	bool same = !replaces ? etag == UINT64_MAX : etag != UINT64_MAX && !identity_of(store_top(s->store), name, identity) &&
							     strcmp(identity, replaces) == 0;
	err_clear();
	pthread_mutex_lock(&b->lock);
	s->done = same && obj_put(b, key, page, etag);
	obj_free(page);
	pthread_mutex_unlock(&b->lock);
	return s->done ? OK : ERR(CHECKPOINT_EXISTS, "'%s' is another one now", name);
}

static inline void objects_discard(struct staging *s)
{
	if (s->made && !s->done)
		(void)!objects_drop(store_top(s->store), s->path);
	store_close(&s->dir);
}

static inline enum err objects_remove(const struct store_job *by, const struct store *s, const char *name,
				      const struct store_removal *how)
{
	char key[OBJ_KEY];

	(void)by;
	TRY(how->check ? how->check(how->user) : OK);
	OBJ_LOCKED(s);
	snprintf(key, sizeof key, "page/%.500s", name);
	int i = obj_find(b, key);
	if (i < 0)
		i = obj_find(b, memcpy(key, "data", 4));
	if (i < 0)
		return obj_missing(name);
	obj_delete(b, i);
	return OK;
}

static inline enum err objects_fence(const struct store_job *by, const struct store *s, const char *name)
{
	(void)by, (void)s, (void)name;
	return OK;
}

static inline enum err objects_recover(const struct store_job *by, const struct store *s, const char *name, bool removes, bool *done_out,
				       struct manifest **out)
{
	const char *job = by->id;
	struct store_at at;

	*done_out = removes;
	if (objects_enter(store_top(s), name, &at) == OK) {
		enum err e = removes ? OK : checkpoint_manifest(at, MANIFEST_NAME, out);
		*done_out = !removes && *out && strcmp((*out)->job, job) == 0;
		store_close(&at);
		TRY(e);
	}
	err_clear();
	OBJ_LOCKED(s);
	(void)obj_clear(b, job, NULL);
	return OK;
}

static inline enum err objects_sweep(const struct store *s, const struct commit_keep *keep, const char *name, const char *job,
				     struct store_swept *out)
{
	OBJ_LOCKED(s);

	(void)name;
	*out = (struct store_swept){ obj_clear(b, job, keep), 0 };
	return OK;
}

static const struct store_ops objects_ops = {
	objects_open, objects_check, objects_probe, objects_count, NULL,
	objects_enter, objects_list, objects_stat, objects_watch, objects_open_file, objects_read, objects_get, objects_close, NULL,
	objects_write, objects_resize, objects_finish,
	objects_stage, objects_publish, NULL, NULL, objects_discard, objects_remove, objects_fence,
	objects_recover, objects_sweep,
	NULL, NULL, NULL,
	objects_make, objects_put, objects_adopt, objects_drop, NULL, objects_swap,
	NULL, NULL, NULL, NULL, NULL, false, NULL,
};

static inline void objects_free(struct store *s)
{
	struct objects *b = objs(s);

	for (int i = 0; i < OBJ_MAX; i++)
		obj_free(b->v[i].o);
	pthread_mutex_destroy(&b->lock);
	mem_free(b);
}
