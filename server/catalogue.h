/* catalogue.h: which checkpoints a storage has, filtered and in any order, and which runs, as they lie there now.
 *
 * A run is a checkpoint's name without its last component (server/runs.h). The facts of checkpoints are kept from one question to the
 * next by a look-up worker, which looks with each what has changed (worker/query/lookup_scan.c), so that a checkpoint that was copied,
 * replaced or removed by hand counts at once. The truth is on the storage: a worker that knows nothing looks at all checkpoints once. */
#pragma once
#include <jansson.h>
#include "base/buf.h"
#include "base/err.h"
#include "base/str.h"
#include "server/loop.h"

struct server;

/* The checkpoints of a storage that are wanted. Texts that are empty say nothing. */
struct catalogue_wish {
	struct str run, prefix;
	struct str filter, sort;       /* spec/checkpoint_query.h */
	struct str after;              /* `next` of the page before */
	uint32_t size;                 /* of a page; above 0 */
	double mtbf_s;                 /* of a run: mean time between failures, for save_interval; 0: CATALOGUE_MTBF_S */
};
enum { CATALOGUE_MTBF_S = 86400 };

/* The answer is borrowed; members may be set in it. */
typedef void (*catalogue_fn)(void *user, enum err e, json_t *answer);

/* A name such as run1@best: the last '@' of its last component stands before an alias. */
bool catalogue_is_alias(const char *name);
/* name: of the checkpoint that `name` stands for: itself, if it is none such, exists exactly so, or there is no such alias. */
typedef void (*catalogue_name_fn)(void *user, enum err e, const char *name);
void catalogue_resolve(struct server *s, const char *storage, const char *name, catalogue_name_fn fn, void *user);

/* ERR_VALIDATION_FAILED, ERR_INVALID_REQUEST: the words of filter, sort and after cannot be understood. To be asked before the others. */
FALLIBLE enum err catalogue_check(const struct catalogue_wish *w);
/* {"checkpoints":[record],"next"?:text}. ERR_BUSY: too many of them are looked at for the first time. */
void catalogue_find(struct server *s, const char *storage, const struct catalogue_wish *w, catalogue_fn fn, void *user);
/* {"runs":[{"storage","run","checkpoints","bytes","holds","latest":name,"step","modified_at"}],"next_page_token"?}, by name. */
void catalogue_runs(struct server *s, const char *storage, struct str after, uint32_t size, catalogue_fn fn, void *user);
/* The page of w->run, and of the whole run {"storage","run","count","bytes","aliases":{"latest","latest-verified",…},"dangling":[alias],
 * "aliases_problem","holds":[name],"lost_work":{…},"save_interval":{…}|null}; ERR_NOT_FOUND: it has no checkpoint. */
void catalogue_run(struct server *s, const char *storage, const struct catalogue_wish *w, catalogue_fn fn, void *user);

/* A checkpoint as catalogue_each tells of it; valid during the call of the callback. */
struct catalogue_item {
	const char *name;
	struct str run;
	int64_t step;                  /* -1: none */
	int64_t at_ms;                 /* wall clock: when it became durable, else when it was written last; 0: not known */
	uint64_t bytes;
	bool is_held;
	const char *verified;          /* "verified", "damaged", "unverified"; "": nothing is known of these bytes */
	const json_t *metrics;         /* {"loss":1.5}; NULL: none */
	const json_t *aliases;         /* ["best"]: people's own that lead to it; latest and latest-verified are computed; NULL: none */
	/* Members of its record that deciding needs: name, format, bytes, modified_at, etag, verified, hold, and where known durable_at,
	 * step, metrics, labels, content_digest, made_by, parents. */
	const json_t *record;
};
typedef void (*catalogue_item_fn)(void *user, const struct catalogue_item *item);
/* fn for each checkpoint whose run the glob matches ("*": all, "-": those of one-component names), in no promised order; then
 * done(user, e), once: if e is not OK, there may be checkpoints that fn was not told. The loop goes on in between. */
void catalogue_each(struct server *s, const char *storage, const char *run_pattern, catalogue_item_fn fn, done_fn done, void *user);
