/* lookup_cache.c: see lookup_cache.h. Nobody tells a look-up worker what happens to a checkpoint, so each question looks: its files must be
 * those that it had, by name, identity, size and times.
 *
 * A file that is written twice within a tick of the file system's clock shows it only once. So times count from SETTLED_S on: what was
 * changed a moment before it was read is not kept. */
#include "query/lookup_cache.h"

#include <dirent.h>

#include "base/clock.h"
#include "base/num.h"
#include "io/digest.h"
#include "store/parts.h"

enum { SETTLED_S = 2 };

struct lookup_mark lookup_mark_of(const struct stat *st)
{
	return (struct lookup_mark){ st->st_dev, st->st_ino, st->st_size, st->st_ctim, st->st_mtim };
}

bool lookup_mark_same(const struct lookup_mark *a, const struct lookup_mark *b)
{
	return a->dev == b->dev && a->ino == b->ino && a->size == b->size && clock_same(a->changed, b->changed) &&
	       clock_same(a->written, b->written);
}

static bool is_settled(int64_t changed_s)
{
	return changed_s < clock_wall_ms() / 1000 - SETTLED_S;
}

bool lookup_mark_settled(const struct lookup_mark *m)
{
	return is_settled(m->changed.tv_sec);
}

/* A sum over the files, in any order: each adds the digest of its name and mark. */
struct look {
	struct store_at dir;
	struct lookup_state *out;
};

static enum err add_file(void *user, const char *name, unsigned char type)
{
	struct look *l = user;
	unsigned char digest[16];
	uint64_t words[2];
	struct {
		struct lookup_mark mark;
		unsigned char name[16];
	} is = { 0 };
	struct stat st;

	if (type != DT_DIR) { /* of folders the name says enough: parts_list enters those that are part of a checkpoint */
		TRY(store_stat(l->dir, name, &st));
		is.mark = lookup_mark_of(&st);
	}
	digest_xxh3(name, strlen(name), is.name);
	digest_xxh3(&is, sizeof is, digest);
	memcpy(words, digest, sizeof words);
	l->out->sum[0] += words[0];
	l->out->sum[1] += words[1];
	l->out->newest = num_max(l->out->newest, is.mark.changed.tv_sec);
	return OK;
}

/* *dir: where its files are. */
static FALLIBLE enum err look(const struct store *store, const char *name, struct store_at *dir, struct lookup_state *out)
{
	const char *single;

	*out = (struct lookup_state){ 0 };
	TRY(checkpoint_open_dir(store, name, dir, &single));
	struct look l = { *dir, out };
	return single ? add_file(&l, single, DT_REG) : parts_list(*dir, add_file, &l);
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

static bool is_it(const struct lookup_cache *k, const struct store *store, const char *name, const struct lookup_state *is)
{
	const struct checkpoint *c = k->checkpoint;

	return c && c->store == store && strcmp(c->name, name) == 0 && memcmp(k->state.sum, is->sum, sizeof is->sum) == 0;
}

enum err lookup_checkpoint(struct worker *w, const json_t *q, struct checkpoint **out)
{
	const char *storage = json_string_value(json_object_get(q, "storage")), *name = json_string_value(json_object_get(q, "name"));
	struct lookup_cache *k = w->kept;
	CLEANUP(store_close) struct store_at dir = STORE_NOTHING;
	struct lookup_state is;
	const struct store *store = NULL;

	if (!storage || !name)
		return ERR(VALIDATION_FAILED, "not a checkpoint's reference");
	const struct ref ref = ref_checkpoint(storage, name);
	if (!k || stores_find(&w->stores, storage, &store) || look(store, name, &dir, &is)) {
		err_clear(); /* opening it says what is wrong, if anything is */
		return checkpoint_open(&w->stores, &ref, out);
	}
	if (is_it(k, store, name, &is)) {
		lookup_cache_rest(k);
		k->checkpoint->dir = dir;
		dir = STORE_NOTHING;
		*out = checkpoint_share(k->checkpoint);
		return OK;
	}
	err_clear();
	lookup_cache_free(k); /* first: there may be no room for two large ones */
	TRY(checkpoint_open(&w->stores, &ref, out));
	if (strcmp((*out)->name, name) == 0 && is_settled(is.newest)) /* not a folder that stands for the step in it */
		*k = (struct lookup_cache){ checkpoint_share(*out), is };
	return OK;
}
