/* aliases.h: names of people's own for checkpoints of a run: `best`, as in main:run1@best.
 *
 * They lie in the run's folder, which all its checkpoints are in, as names without the run's: a folder that is copied or moved has them,
 * and every daemon on the storage sees the same. A move is a compare-and-set under the lock that commits take (store.h), and one page
 * that is replaced whole: no reader finds an alias that is half moved. `latest` and
 * `latest-verified` are computed (server/catalogue.h).
 *
 *     {"version":1,"aliases":{"best":"step-300"}} */
#pragma once
#include <jansson.h>

#include "store/checkpoint.h"

#define ALIASES_NAME ".dcpd-aliases.json"

enum { ALIASES_BYTES_MAX = 1 << 20, ALIASES_MAX = 1000 /* of a run */ };

/* *out: {"best":"run1/step-300"}, a new object, empty if the run has none. run "-": names of one component. ERR_STATE_CONFLICT: the page
 * cannot be read, and says why. */
FALLIBLE enum err aliases_read(const struct store *store, const char *run, json_t **out);
struct alias_move {
	const char *alias, *name;      /* name NULL: it goes */
	bool has_condition;            /* it is to lead to this by now: */
	const char *condition;         /* NULL: nowhere */
};
/* ERR_ALIAS_MOVED with `actual` if the condition does not hold; ERR_NOT_FOUND: no such checkpoint, or no such alias to remove;
 * ERR_LIMIT_EXCEEDED: the run has ALIASES_MAX; ERR_FORBIDDEN: what it is to lead to, or leads to, is another user's. OK: it survives a
 * power cut. */
FALLIBLE enum err aliases_move(const struct store_job *by, const struct store *store, const char *run, const struct alias_move *move);
