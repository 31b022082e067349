/* resume_choice.h: which checkpoint of a run a training goes on from: pure, over what is known of each.
 *
 * The newest one that can be loaded, unless it was tried too often. An attempt counts as long as nothing came of it: a checkpoint that
 * became durable after the last attempt is progress, and the count begins anew. */
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { RESUME_ATTEMPTS = 3 };

/* A checkpoint of the run. */
struct resume_candidate {
	const char *name;
	const char *damaged, *unwanted;     /* why not: a verdict on its bytes; the caller's word. NULL: no objection */
	const char *unloadable;             /* what a look at its structure found; NULL: it can be loaded, or was not looked at */
	bool is_looked_at;
	const void *copy;                   /* not durable: the copy in a node's memory that it is all of (resume.c); NULL: durable */
	int64_t durable_ms;                 /* wall clock; 0: not known; of a copy: when it was made */
	int64_t attempts, attempted_ms;     /* on record for the content that lies there now; the last one's wall clock */
};

/* They rank in this order: what comes first is the reason that is told. */
enum resume_fate { RESUME_UNWANTED, RESUME_DAMAGED, RESUME_UNLOADABLE, RESUME_EXHAUSTED, RESUME_FIT };

/* all: the newest first. Attempts with all[i] since the last progress. */
int64_t resume_attempts(const struct resume_candidate *all, size_t i, int64_t now_ms);
/* attempts_max 0: no limit. One that was not looked at counts as loadable. */
enum resume_fate resume_fate_of(const struct resume_candidate *all, size_t i, int64_t attempts_max, int64_t now_ms);
/* The first one that is fit; n: none. The caller looks at it if it was not looked at, and chooses again. */
size_t resume_choose(const struct resume_candidate *all, size_t n, int64_t attempts_max, int64_t now_ms);
