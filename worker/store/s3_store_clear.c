/* s3_store_clear.c: files of a checkpoint that was replaced or removed go (see s3_store.h).
 *
 * They go by their keys, and keys can be used again: copies, and formats with an index, have the names that they are given. The
 * process that deletes may be stopped for any time before any request; meanwhile another may replace or remove what it has put
 * there, or a sweep may end its removal, and a new checkpoint have files under the same keys. So before each request the caller's
 * own commit or claim must lie there still, and each object goes under the condition that it has the ETag that was listed. */
#include <stdio.h>

#include "base/map.h"
#include "base/mem.h"
#include "store/contents.h"
#include "store/s3_store_impl.h"

enum { DELETES = S3_LIST_PAGE };

struct deleting {
	struct s3 *s3;
	struct s3_hold hold;
	const struct map *stay;        /* keys; NULL: none */
	bool is_lost;                  /* another has the target by now: nothing more is deleted */
	const char *keys[DELETES], *etags[DELETES];
	size_t n;
};

static bool stays(const struct map *stay, const char *key)
{
	return stay && map_get(stay, str_of(key)) != MAP_NONE;
}

enum err s3_check_hold(struct s3 *s3, struct s3_hold hold, bool *held)
{
	struct s3_object o;

	*held = !hold.key;
	if (*held)
		return OK;
	enum err e = s3_head(s3, hold.key, NULL, &o);
	*held = !e && str_starts(str_of(o.mark), hold.mark); /* behind it a repair's may follow */
	if (e == ERR_NOT_FOUND)
		err_clear();
	return e == ERR_NOT_FOUND ? OK : e;
}

/* The look at the hold comes behind the list that the keys are from: what another puts there, it puts behind its own claim. */
static FALLIBLE enum err flush(struct deleting *d)
{
	size_t n = d->n;
	bool held;

	d->n = 0;
	if (!n || d->is_lost)
		return OK;
	TRY(s3_check_hold(d->s3, d->hold, &held));
	d->is_lost = !held;
	return held ? s3_delete_many(d->s3, d->keys, d->etags, n, NULL) : OK;
}

static FALLIBLE enum err add_deleted(struct deleting *d, const struct s3_entry *e)
{
	d->keys[d->n] = e->key;
	d->etags[d->n++] = e->etag;
	return d->n == DELETES ? flush(d) : OK;
}

/* *stays_out: a key below stays. */
static FALLIBLE enum err clear_below(struct deleting *above, const char *key, unsigned depth, bool *stays_out)
{
	CLEANUP(s3_folder_free_ptr) struct s3_folder *f = mem_zalloc(1, sizeof *f);
	CLEANUP(mem_free_ptr) struct deleting *d = mem_zalloc(1, sizeof *d);
	char path[S3_PATH_MAX];
	bool below;

	NEED(f && d, "no memory for a folder");
	if (depth > CONTENTS_DEPTH_MAX)
		return ERR(LIMIT_EXCEEDED, "folders more than %d deep in a checkpoint", CONTENTS_DEPTH_MAX);
	snprintf(path, sizeof path, "%.*s", (int)strlen(key) - 1, key);
	TRY(s3_folder_look(above->s3, path, false, f));
	*d = (struct deleting){ .s3 = above->s3, .hold = above->hold, .stay = above->stay, .is_lost = above->is_lost };
	*stays_out = false;
	each(e, f->v.v, f->v.n) {
		below = stays(d->stay, e->key);
		if (s3_is_folder_entry(e))
			TRY(clear_below(d, e->key, depth + 1, &below));
		else if (!below)
			TRY(add_deleted(d, e));
		*stays_out |= below;
	}
	TRY(flush(d));
	above->is_lost = d->is_lost;
	*stays_out |= d->is_lost;
	return *stays_out ? OK : s3_delete(above->s3, key, NULL); /* some servers keep folders that are empty, and list them */
}

enum err s3_clear_folder(struct s3 *s3, const struct s3_folder *f, const struct map *stay, struct s3_hold hold, bool *held_out)
{
	CLEANUP(mem_free_ptr) struct deleting *d = mem_zalloc(1, sizeof *d);
	bool below;

	NEED(d, "no memory for a folder");
	*d = (struct deleting){ .s3 = s3, .hold = hold, .stay = stay };
	each(e, f->v.v, f->v.n) {
		if (s3_is_folder_entry(e))
			TRY(clear_below(d, e->key, 1, &below));
		else if ((!f->commit.key || strcmp(e->key, f->commit.key) != 0) && !stays(stay, e->key)) /* its place has a new owner */
			TRY(add_deleted(d, e));
	}
	TRY(flush(d));
	*held_out = false;
	return d->is_lost ? OK : s3_check_hold(s3, hold, held_out);
}
