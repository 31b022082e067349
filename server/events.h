/* events.h: what happened, for /v1/events: the last EVENTS_KEPT events in memory, with ids that grow over restarts
 * (boot number << 32 | count), so that a client can resume with Last-Event-ID. Each has "at", when it happened, beside what follows.
 *
 * Types: job.state {"job","kind","state","stage"} · job.progress {"job","progress"} · checkpoint.committed {"storage","name","job"} ·
 * checkpoint.removed {"storage","name","job","uid","policy","why","until"} · checkpoint.restored {"storage","name","id","uid"} ·
 * policy.unmet {"policy","storage","budget","bytes","over_bytes"} ·
 * checkpoint.stale {"storage","name","job","same_tensors_as"} · those of enum event_told {"storage","name","job",…} · chain.set and
 * webhook.set {"chain" or "webhook","uid","what"} · webhook.failed and webhook.dropped {"webhook",…} · worker.lost
 * {"worker","pid","job","signal"} · storage.stalled {"storage"} · storage.state {"storage","state"} · daemon.state {"state"} ·
 * state_dict.changed {"state_dict","what"} · device_image.changed {"device_image","what","state_dict","rank","device"}; what: its state, or
 * attached, detached, removed. */
#pragma once
#include <jansson.h>
#include "base/str.h"
#include "server/loop.h"

struct events;

/* Events that webhooks can be told, and chains wait for, with a checkpoint, a job or a chain as their subject. */
enum event_told {
	TOLD_DURABLE,                 /* a checkpoint was committed and is on disk */
	TOLD_VERIFIED, TOLD_DAMAGED,  /* its bytes were compared */
	TOLD_REMOVED,
	TOLD_REPLICATED,              /* a copy of it on another storage is on disk */
	TOLD_JOB_FAILED,
	TOLD_CHAIN_DONE, TOLD_CHAIN_FAILED,
	TOLD_TEST,                    /* asked for; no webhook subscribes to it */
	TOLD_COUNT
};
extern const char *const event_told_names[TOLD_COUNT + 1];     /* then NULL */

struct happening {
	enum event_told what;
	const char *storage, *name;   /* the checkpoint; NULL: it is about none */
	const char *job;              /* "": none */
	const json_t *error;          /* problem; NULL: none */
	const json_t *parent;         /* {"chain","execution","step","depth"} of a chain's job or of the chain itself; NULL: none */
};

enum { EVENTS_KEPT = 4096, EVENTS_DATA_MAX = 64 << 10 };

struct event_record {
	uint64_t id;
	int64_t wall_ms;
	const char *type;             /* "job.state" */
	char job[27];                 /* "" when it is about no job */
	struct str data;              /* JSON object */
};

FALLIBLE enum err events_new(struct loop *loop, uint64_t boot, struct events **out);
void events_free(struct events *ev);
/* Takes `data` (may be NULL on lack of memory: the event is dropped and counted). type must be a literal. */
void events_emit(struct events *ev, const char *type, const char *job, json_t *data);
uint64_t events_last_id(const struct events *ev);
/* The first event after `after` (0: the oldest kept) that is about `job` (NULL: any). false: none yet. *lost_out: events between
 * `after` and this one were overwritten, or belong to an earlier start of the daemon. The record is valid until the next emit. */
bool events_next(const struct events *ev, uint64_t after, const char *job, struct event_record *out, bool *lost_out);

/* fn is called from the loop, at most once per turn, after events came. Unlike other callbacks: many times, until unlistened. */
struct events_listener;
FALLIBLE enum err events_listen(struct events *ev, loop_fn fn, void *user, struct events_listener **out);
void events_unlisten(struct events *ev, struct events_listener **l);
