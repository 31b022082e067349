/* catalogue.h: what runs there are in a storage and which checkpoints each has, newest first, as they lie there now.
 *
 * A run is a checkpoint's name without its last component (server/runs.h). Nothing is remembered from one question to the next: the
 * storage is listed, page by page, so that a checkpoint that was copied, or removed by hand, counts at once. */
#pragma once
#include "base/buf.h"
#include "base/err.h"
#include "base/str.h"

struct server;

struct catalogue_page {
	uint64_t from;                 /* runs or checkpoints that are left out */
	uint32_t size;
};

/* out: the answer's JSON, which the callee may take. */
typedef void (*catalogue_fn)(void *user, enum err e, struct buf *out);

/* A name such as run1@best: the last '@' of its last component stands before an alias. */
bool catalogue_is_alias(const char *name);
/* name: of the checkpoint that `name` stands for: itself, if it is none such, exists exactly so, or there is no such alias. */
typedef void (*catalogue_name_fn)(void *user, enum err e, const char *name);
void catalogue_resolve(struct server *s, const char *storage, const char *name, catalogue_name_fn fn, void *user);

/* {"runs":[{"storage","run","checkpoints","bytes","holds","latest":name,"step","modified_at"}],"next_page_token"?}, by name. */
void catalogue_runs(struct server *s, const char *storage, struct catalogue_page page, catalogue_fn fn, void *user);
/* {"storage","run","count","bytes","checkpoints":[record with "step"],"aliases":{"latest","latest-verified"},"holds":[name],
 * "lost_work":{"since","step"},"next_page_token"?}; ERR_NOT_FOUND: it has no checkpoint. */
void catalogue_run(struct server *s, const char *storage, struct str run, struct catalogue_page page, catalogue_fn fn, void *user);
