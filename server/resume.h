/* resume.h: what a training goes on from: the newest checkpoint of its run that can be loaded (server/resume_choice.h).
 *
 * Verdicts and attempts are the journal's; a look-up worker opens what is chosen, so that what is advised is whole at the moment of the
 * answer. The first one that is fit ends the search. */
#pragma once
#include <jansson.h>

#include "base/buf.h"
#include "server/principal.h"
#include "base/err.h"
#include "base/str.h"

struct server;

enum { RESUME_LOOKED_MAX = 100 }; /* newest checkpoints of a run that are considered */

/* The texts and documents are copied. */
struct resume_wish {
	struct principal who;
	const char *storage;
	struct str run;
	int64_t world_size;            /* 0: as it was saved */
	json_t *layout;                /* rules, checked; NULL: none */
	bool any_optimizer;            /* optimizer state that is there for a part of a group is no objection */
	int64_t attempts_max;          /* 0: no limit */
	json_t *unwanted;              /* [{"name","why"}]; NULL: none */
	bool is_attempt;               /* the answer is taken: it counts, and is in the journal before the callback */
};

/* out: {"storage","run","checkpoint":{"storage","name"}|null,"step","why","verified","copy"?,"attempts","attempts_max",
 * "skipped":[{"name","why"}]}.
 * ERR_NOT_FOUND: the run has no checkpoint: a first start. */
typedef void (*resume_fn)(void *user, enum err e, struct buf *out);
void resume_find(struct server *s, const struct resume_wish *wish, resume_fn fn, void *user);
