/* problems.h: what is wrong with a plan, all of it: someone who loads a checkpoint into another model wants every key that does not
 * fit, not one per attempt. Errors that speak of one key are noted and planning goes on with the next; others end it at once. */
#pragma once
#include "base/arena.h"
#include "base/err.h"
#include "base/vec.h"

enum { PROBLEMS_KEPT = 10000 };

struct problem {
	enum err code;
	int64_t rank;                    /* -1: not known */
	struct str fqn, text, expected, actual;
};

struct problems {
	struct arena *arena;             /* not its own */
	struct vec(struct problem) list; /* the first PROBLEMS_KEPT */
	uint64_t count;
};

void problems_free(struct problems *p);
/* The latest error, of code e: OK if it could be noted, else e. */
FALLIBLE enum err problems_note(struct problems *p, enum err e);
/* OK if there are none; else an error with the first one's code and key, in whose text they all are, as far as there is room. */
FALLIBLE enum err problems_raise(const struct problems *p);
