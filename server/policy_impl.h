/* policy_impl.h: what policy*.c share. */
#pragma once
#include "base/map.h"
#include "base/vec.h"
#include "server/follower.h"
#include "server/job.h"
#include "server/policy.h"
#include "server/policy_records.h"
#include "server/storage.h"

struct policy_entry {
	struct follower base;          /* its uid: in whose name it removes */
	struct policy policy;          /* points into the document */
	struct retention_sum sum;      /* when it was last looked at: */
	int64_t looked_ms;             /* wall clock; 0: not yet */
	uint64_t removed, removed_bytes, failed;       /* since the start */
};

static inline struct policy_entry *policy_of(struct follower *f)
{
	return (struct policy_entry *)(void *)f;
}

/* A removal that was decided. */
struct removal {
	struct removal *next;
	char *name, *etag;
	char policy[FOLLOWER_NAME_MAX + 1];
	enum retention_why why;
	uid_t uid;
	int64_t trash_ms;
	uint64_t bytes;
	json_t *present;               /* names that must be there when it goes */
};

/* The removals of a storage, one after the other. */
struct remover {
	struct remover *next;
	struct server *server;
	char storage[STORAGE_NAME_MAX + 1];
	struct removal *queue;
	struct removal *running;
	char job[JOB_ID_LEN + 1];      /* of the running one; "": not made yet */
	bool is_stale;                 /* what the running one was decided by is not so any more */
	int64_t rest_until_ms;         /* monotone clock: what went before is still being unlinked */
};

struct policies {
	struct server *server;
	struct followers *list;
	struct remover *removers;
	struct map failed;             /* "storage:name:etag" of removals that failed → when that is forgotten, in s, monotone clock */
	struct arena *failed_keys;
	char problem[400];             /* why nothing is removed; "": nothing is in the way */
	bool is_due, is_looking;
	bool is_overtaken;             /* a delta was made since the look began: it may not have seen it */
	json_t *doubted;               /* object of keys: checkpoints and runs of which more is known than when the look began */
	int64_t due_ms, looked_ms, cost_ms;    /* monotone clock: when to look; when it was looked last; how long that took */
	struct loop_timer *tick;
};

void policy_changed(struct server *s);         /* what was decided by the policies as they were does not count any more */
bool policy_removal_failed(const struct server *s, struct str storage, struct str name, struct str etag); /* of policy_gathering */
void policy_all_stop(struct policies *all);
