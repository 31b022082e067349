/* storage.h: the storage roots: those of the configuration, and ad-hoc ones that live with a lease.
 *
 * The coordinator knows a root by its text only; what is on it is asked of a look-up worker (lookup.h). */
#pragma once
#include <jansson.h>
#include "base/buf.h"
#include "server/loop.h"
#include "server/principal.h"

struct server;
struct lookups;
struct storages;
struct config;
struct events;
struct journal;
struct storage_speed;

enum { STORAGES_MAX = 256, STORAGE_NAME_MAX = 65 };

enum storage_state { STORAGE_UNKNOWN, STORAGE_OK, STORAGE_STATE_STALLED, STORAGE_STATE_GONE, STORAGE_UNAVAILABLE };

enum { STORAGE_STAGES_MAX = 24, STORAGE_STAGE_MAX = 24 };

/* Bytes and time of one stage of jobs: [0] read, [1] written. */
struct storage_io {
	char stage[STORAGE_STAGE_MAX];
	uint64_t bytes[2];
	int64_t ns[2];
};

struct storage {
	char name[STORAGE_NAME_MAX + 1];
	char *path;
	json_t *options;                /* what the configuration says of it for its workers; NULL: nothing */
	bool adhoc;
	uid_t uid;                      /* of an ad-hoc one: who made it */
	int64_t expires_ms;             /* service time; 0: never */
	mode_t file_mode;               /* of what is made there, */
	gid_t file_gid;                 /* CONFIG_NO_GROUP: as the directory gives it */
	enum storage_state state;
	int64_t stalled_since_ms;       /* wall clock, while stalled */
	/* the latest probe; 0 before it */
	uint64_t free_bytes, total_bytes;
	int64_t probed_ms;              /* wall clock, for the record */
	int64_t fresh_ms;               /* monotone clock: when the probe came */
	int64_t state_ms;               /* the same: when the state changed */
	uint64_t commits;           /* jobs that have changed what lies here, since the start */
	uint64_t verdicts_told;     /* number of the verdict up to which its look-up worker is thought to know all */
	bool sweep_due;             /* a sweep failed: again, once the storage answers */
	json_t *others;             /* what a sweep left alone as other daemons': path → state, see sweep.c. NULL: nothing */
	int64_t others_ms;          /* service time of that sweep */
	bool probing;
	uint64_t trash_bytes, trash_count;  /* deleted checkpoints that may come back, at the latest look */
	bool trash_seen;                /* it was looked at */
	bool trash_asked;
	int64_t trash_due_ms;           /* monotone clock: the next look */
	uint64_t read_bytes, written_bytes; /* by workers, since it is known here */
	struct storage_io *io;          /* of that, by stage: STORAGE_STAGES_MAX, those in use first; NULL: none yet */
	struct storage_speed *speed;    /* of that, and of free space, by minute */
	json_t *probe;                  /* its answer as it came, or NULL */
	struct storage *next;           /* of those that stand for nodes */
	json_t *problem;                /* why it is unavailable, as a problem; else NULL */
};

FALLIBLE enum err storages_new(const struct config *c, struct journal *j, struct events *ev, struct storages **out);
void storages_free(struct storages *st);
FALLIBLE enum err storage_care_start(struct server *s);    /* probes and sweeps now and then, ends leases */
FALLIBLE enum err storages_reload(struct storages *all, const struct config *fresh);  /* adds those that are new */

/* ERR_NOT_FOUND names it. The pointer is valid until the loop's next turn. */
FALLIBLE enum err storage_find(struct storages *all, struct str name, struct storage **out);
/* A storage "@NODE" stands for another node's state dicts: known to jobs and their workers alone, and in no list. Takes options; a place
 * or options that changed replace those before. */
FALLIBLE enum err storage_of_node(struct storages *all, const char *name, const char *place, json_t *options, struct storage **out);
uint32_t storage_count(const struct storages *all);
struct storage *storage_at(const struct storages *all, uint32_t index);  /* in the order of their names */
const char *storage_state_text(enum storage_state state);            /* "unknown" "ok" "stalled" "gone" "unavailable" */
/* Describes the storage for a worker; root->path points into the storage. */
struct worker_root;
void storage_root(const struct storage *st, struct worker_root *root);
/* {"name","path","adhoc","state","free_bytes","total_bytes","fs","direct_io",…,"lease_expires_at"} as jobs' records are: text. */
FALLIBLE enum err storage_put(const struct storage *st, struct buf *out);
/* {"stages":[{"stage","read":{"bytes","seconds"},"write":{…}}],"minutes":[…]}: what was moved, since the start and lately. */
FALLIBLE enum err storage_put_io(const struct storage *st, struct buf *out);

/* An ad-hoc root. Same name and path again: renews the lease. The path must be absolute and a look-up worker must be able to open
 * it. Only for admins over the Unix socket: the handler checks that. */
struct storage_request {
	struct str name, path;
	int64_t lease_ms;               /* 0: the default, 10 minutes */
	struct principal who;
};
void storage_create(struct server *s, const struct storage_request *rq, done_fn fn, void *user);

/* Modules report what they see. */
/* body: {"main":[bytes read, bytes written],…} of a worker; names that are not known are passed over. */
void storage_count_io(struct storages *all, const json_t *body);
/* Counts a stage of a job (a short plain word), in which `bytes` were read from the storage, or written to it. ns: how long it took the
 * job. */
void storage_count_stage(struct storage *st, const char *stage, bool written, uint64_t bytes, int64_t ns);
void storage_set_state(struct storages *all, struct storage *st, enum storage_state state);
/* A look-up worker has answered, with e. A storage behind a network is unavailable while probes fail, for whatever reason, and ok again
 * when one does not: other questions may need less of it. */
void storage_answered(struct storages *all, struct storage *st, enum err e);
/* Asks for free space again; the answer lands in the storage. fn may be NULL. */
void storage_probe(struct storages *all, struct lookups *lookups, struct storage *st, done_fn fn, void *user);
