/* policy_records.h: the checkpoints of all storages as retention sees them (spec/retention.h): records, with what is known here besides:
 * aliases, jobs that have not ended, what a storage behind is still to have, removals that failed. */
#pragma once
#include "base/arena.h"
#include "base/vec.h"
#include "server/storage.h"
#include "spec/retention.h"

struct server;

struct policy_records {
	struct arena *arena;
	struct vec(struct retention_record) list;
	struct vec(struct str) etags;  /* of the same checkpoints */
	struct vec(json_t *) metrics;
};

/* e is not OK: a storage could not be listed, and nothing may be removed: err_last() names it. records: the callee's during the call. */
typedef void (*policy_records_fn)(void *user, enum err e, const struct policy_records *records);
/* failed: has the removal of this very checkpoint failed lately? */
struct policy_gathering {
	struct server *server;
	policy_records_fn fn;
	bool (*failed)(const struct server *s, struct str storage, struct str name, struct str etag);
	void *user;
};
void policy_records_gather(const struct policy_gathering *g);
