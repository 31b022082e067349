/* lookup_cache.c: see lookup_cache.h. Nobody tells a look-up worker what happens to a checkpoint, so each question looks: its directory,
 * metadata and manifest must be the very files, untouched, and the files of its items as long as they were.
 *
 * A file that is written twice within a tick of the file system's clock shows it only once. So times count from SETTLED_S on: what was
 * changed a moment before it was read is not kept. */
#include "query/lookup_cache.h"

#include "base/clock.h"

enum { SETTLED_S = 2 };

struct lookup_mark lookup_mark_of(const struct stat *st)
{
	return (struct lookup_mark){ st->st_dev, st->st_ino, st->st_size, st->st_ctim, st->st_mtim };
}

static bool same_time(struct timespec a, struct timespec b)
{
	return a.tv_sec == b.tv_sec && a.tv_nsec == b.tv_nsec;
}

bool lookup_mark_same(const struct lookup_mark *a, const struct lookup_mark *b)
{
	return a->dev == b->dev && a->ino == b->ino && a->size == b->size && same_time(a->changed, b->changed) &&
	       same_time(a->written, b->written);
}

static bool same_marks(const struct lookup_marks *a, const struct lookup_marks *b)
{
	return lookup_mark_same(&a->dir, &b->dir) && lookup_mark_same(&a->metadata, &b->metadata) &&
	       lookup_mark_same(&a->manifest, &b->manifest);
}

bool lookup_mark_settled(const struct lookup_mark *m)
{
	return m->changed.tv_sec < clock_wall_ms() / 1000 - SETTLED_S;
}

static FALLIBLE enum err look(struct store_at dir, struct lookup_marks *out)
{
	struct stat st;

	TRY(store_stat(dir, "", &st));
	*out = (struct lookup_marks){ .dir = lookup_mark_of(&st) };
	TRY(store_stat(dir, DCP_METADATA, &st));
	out->metadata = lookup_mark_of(&st);
	enum err e = store_stat(dir, MANIFEST_NAME, &st);
	if (e == OK)
		out->manifest = lookup_mark_of(&st);
	return e == ERR_NOT_FOUND ? OK : e;
}

static bool same_sizes(const struct checkpoint *c, struct store_at dir)
{
	char name[4096];
	struct stat st;

	for (uint64_t i = 0; i < c->sd->file_count; i++) {
		const struct sd_file *f = &c->sd->files[i];
		memcpy(name, f->name.p, f->name.n); /* it was a file's name when it was opened */
		name[f->name.n] = '\0';
		if (store_stat(dir, name, &st) != OK || !S_ISREG(st.st_mode) || (uint64_t)st.st_size != c->file_bytes[i])
			return false;
	}
	return true;
}

void lookup_cache_free(struct lookup_cache *k)
{
	checkpoint_free(k->checkpoint);
	*k = (struct lookup_cache){ 0 };
}

void lookup_cache_rest(struct lookup_cache *k)
{
	if (k->checkpoint)
		store_close(&k->checkpoint->dir);
}

static bool is_it(const struct lookup_cache *k, const struct store *store, const char *name, const struct lookup_marks *m,
		  struct store_at dir)
{
	const struct checkpoint *c = k->checkpoint;

	return c && c->store == store && strcmp(c->name, name) == 0 && same_marks(&k->marks, m) && same_sizes(c, dir);
}

enum err lookup_checkpoint(struct worker *w, const json_t *q, struct checkpoint **out)
{
	const char *storage = json_string_value(json_object_get(q, "storage")), *name = json_string_value(json_object_get(q, "name"));
	struct lookup_cache *k = w->kept;
	CLEANUP(store_close) struct store_at dir = STORE_NOTHING;
	struct lookup_marks m;
	const struct store *store = NULL;

	if (!storage || !name)
		return ERR(VALIDATION_FAILED, "not a checkpoint's reference");
	const struct ref ref = ref_checkpoint(storage, name);
	if (!k || stores_find(&w->stores, storage, &store) || store_enter(store_top(store), name, &dir) || look(dir, &m)) {
		err_clear(); /* opening it says what is wrong, if anything is */
		return checkpoint_open(&w->stores, &ref, out);
	}
	if (is_it(k, store, name, &m, dir)) {
		lookup_cache_rest(k);
		k->checkpoint->dir = dir;
		dir = STORE_NOTHING;
		*out = checkpoint_share(k->checkpoint);
		return OK;
	}
	err_clear();
	lookup_cache_free(k); /* first: there may be no room for two large ones */
	TRY(checkpoint_open(&w->stores, &ref, out));
	if (format_is_dcp((*out)->format) && lookup_mark_settled(&m.dir) && lookup_mark_settled(&m.metadata) &&
	    lookup_mark_settled(&m.manifest))
		*k = (struct lookup_cache){ checkpoint_share(*out), m };
	return OK;
}
