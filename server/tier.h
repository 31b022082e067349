/* tier.h: storages with another one behind them (`tier.main = s3`): saves go to the fast one and are durable there; each durable checkpoint
 * is then copied to the other one under the same name, by jobs of kind replicate (flusher.c).
 *
 * What is known here, of each checkpoint that waits or has a replica, is a cache: both storages are listed at the start and now and then,
 * and what a list says counts. A replica is one whose page (worker/store/copied.h) names the content that lies in the fast storage now, or
 * whose manifest is of the same job's attempt.
 *
 * Who may serve the copy behind asks tier_has(); who may remove the fast one by itself, tier_wants(). */
#pragma once
#include <jansson.h>

#include "base/list.h"
#include "base/map.h"
#include "server/config.h"

struct buf;
struct metrics;

enum { TIER_ETAG_MAX = 64, TIER_JOB_MAX = 27 };

enum tier_state { TIER_UNKNOWN, TIER_WAITING, TIER_COPYING, TIER_REPLICATED, TIER_SKIPPED };

/* A checkpoint of the fast storage. */
struct tier_entry {
	char *name;
	enum tier_state state;
	char etag[TIER_ETAG_MAX];      /* of the content that was seen last; "": not looked at since it was saved */
	char job[TIER_JOB_MAX];        /* that saved it; "": not known */
	char copy[TIER_JOB_MAX];       /* the copy that failed last, which is tried again; "": none */
	uint64_t bytes, scan;          /* scan: number of the last one that met it */
	int64_t since_ms;              /* wall clock: durable since */
	int64_t at_ms;                 /* wall clock: replicated at; 0: before this daemon looked */
	int64_t next_ms;               /* monotone clock: not tried before */
	unsigned tries;
	uint32_t uid;                  /* whose it is; UINT32_MAX: not known */
	struct tier_entry *prev, *next;        /* of those that wait */
};

struct tier {
	const struct config_tier *how;
	struct map entries;            /* by name */
	struct tier_entry *waiting;    /* in any order */
	uint64_t waiting_count, waiting_bytes, skipped_total, failures;
	bool failing;                  /* the last copy failed for a reason of the storage's */
	char problem[32], detail[256]; /* … its code, and what it said */
};

struct tiers {
	struct tier v[CONFIG_LIST_MAX];
	uint32_t count;
};

FALLIBLE enum err tiers_new(const struct config *config, struct tiers **out);
void tiers_free(struct tiers *all);
/* NULL: nothing is behind that storage. */
struct tier *tier_of(struct tiers *all, struct str storage);
/* Is the storage behind known to have the same content? */
bool tier_has(struct tiers *all, struct str storage, struct str name);
/* Is the storage behind still to have this content, as far as is known here? Not if it has it, or it was given up; what no list has
 * shown yet is wanted, too. */
bool tier_wants(struct tiers *all, struct str storage, struct str name, struct str etag);
/* The entry of a name, made if there is none; NULL: no memory. */
struct tier_entry *tier_entry(struct tier *t, const char *name);
struct tier_entry *tier_find(const struct tier *t, struct str name);
void tier_forget(struct tier *t, struct tier_entry *e);
void tier_move(struct tier *t, struct tier_entry *e, enum tier_state state);
/* Adds `replicated` to a record that a look-up told: {"storage","at"?} or null, if something is behind its storage. */
void tier_put(struct tiers *all, const char *storage, json_t *record);
/* ,"tier":{"storage","state","waiting","bytes","seconds","skipped","error"?} of a storage with another one behind it, else nothing. */
void tier_put_state(struct tiers *all, struct str storage, struct buf *out);
void tier_fill(const struct tiers *all, struct metrics *m);
