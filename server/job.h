/* job.h: jobs: their records, and the life of one from POST to its end.
 *
 *   queued → planning → running → committing → succeeded | failed | cancelled
 *
 * A save whose source has "await_seal" is queued, outside its lane, until all ranks have sealed its generation (job_await.c).
 * A job is in the journal before job_create's callback is called, and each end before anybody can see it. Live jobs are in
 * memory; finished ones are read from the journal when asked for (with a small cache). */
#pragma once
#include <jansson.h>
#include "base/buf.h"
#include "server/loop.h"
#include "server/principal.h"
#include "spec/job_id.h"
#include "spec/kinds.h"

struct journal;
struct server;
struct jobs;

enum { JOB_MARK_LEN = 6, JOB_PAGE_MAX = 1000 };

enum job_state { JOB_QUEUED, JOB_PLANNING, JOB_RUNNING, JOB_COMMITTING, JOB_SUCCEEDED, JOB_FAILED, JOB_CANCELLED,
		 JOB_STATE_COUNT };

extern const char *const job_state_names[JOB_STATE_COUNT + 1];  /* then NULL */
const char *job_state_text(enum job_state state);
bool job_state_ended(enum job_state state);
bool job_record_ended(const json_t *record);     /* of a record as JSON, such as another node's */

/* The body of POST /v1/jobs after its form was checked and defaults were filled in (the handler's work). spec is copied. */
struct job_request {
	enum job_kind kind;
	const json_t *spec;             /* with "kind" and, if given, "labels" */
	struct principal who;
	struct idempotency idem;
	const char *id;                 /* the job's, from job_new_id(); NULL: a new one */
	const char *traceparent;        /* the caller's header; NULL: none */
	const char *request_id;         /* for the log; NULL: none */
	const json_t *parent;           /* of a chain's step: {"chain","execution","step","depth"}; copied; NULL: none */
};
/* Checks what can be known at once (storages, state dicts sealed, target not busy), asks the storage whether the target exists
 * and has space, writes the journal, then calls back. existing: an earlier request with this key made the job. */
typedef void (*job_created_fn)(void *user, enum err e, const char *id, bool existing);
void job_create(struct server *s, const struct job_request *rq, job_created_fn fn, void *user);

/* Has a request with this key made a job here, or is it being worked on? */
bool job_key_is_known(struct server *s, const struct job_request *rq);

/* dry_run=true: plans on a gang, writes nothing, is not listed. plan: what GET …/plan would show. */
typedef void (*job_planned_fn)(void *user, enum err e, const json_t *plan);
void job_dry_run(struct server *s, const struct job_request *rq, job_planned_fn fn, void *user);

/* ERR_NOT_FOUND, ERR_FORBIDDEN, ERR_STATE_CONFLICT (committing, or ended). Callback: the wish is known to the workers, or the job
 * is cancelled already; wait for the end with job_wait. */
void job_cancel(struct server *s, const struct principal *who, struct str id, done_fn fn, void *user);
/* The same of all loads that would make such a copy. */
struct replica_withdrawal;
void job_cancel_replicas(struct server *s, const struct replica_withdrawal *w);
/* A failed or cancelled job becomes queued again: same id, attempt + 1. ERR_STATE_CONFLICT otherwise. */
void job_retry(struct server *s, const struct principal *who, struct str id, done_fn fn, void *user);
/* Calls back when the job has ended, at once if it has, or after timeout_ms; e is OK in all these cases. ERR_NOT_FOUND. */
void job_wait(struct server *s, struct str id, int64_t timeout_ms, done_fn fn, void *user);

/* Calls back when no save into the run is under way, or after wait_ms. saves: [{"id","name","state"}], those that were; at most 1,000. */
typedef void (*job_drained_fn)(void *user, enum err e, bool drained, const json_t *saves);
void job_drain(struct server *s, struct str storage, struct str run, int64_t wait_ms, job_drained_fn fn, void *user);

/* The record's JSON text, valid until the loop's next turn; cheap: kept until the job changes. */
FALLIBLE enum err job_text(struct server *s, struct str id, struct str *out);
/* A number that changes whenever the text does: for ETag and for caches of answers. 0: no such job in memory. */
uint64_t job_version(struct server *s, struct str id);
/* ERR_NOT_FOUND also while there is no plan yet. */
FALLIBLE enum err job_plan(struct server *s, struct str id, struct buf *out);
FALLIBLE enum err job_state_of(struct server *s, struct str id, enum job_state *out);
FALLIBLE enum err job_kind_of(struct server *s, struct str id, enum job_kind *out);
/* The node that has taken the job over, "": not known which; NULL: it is this node's, or not known here. */
const char *job_moved_to(struct server *s, struct str id, bool *is_here_out);
/* Could this daemon run it? No: a newer one has made it. */
FALLIBLE enum err job_check_take(struct server *s, const json_t *record);
/* Takes a job over from the node `from`: its record as etcd has it, and the token of the ownership. fn hears when it is in the journal. */
void job_take(struct server *s, const json_t *record, int64_t token, done_fn fn, void *user);

/* filter: terms joined by " AND ": state=running, kind=save, labels.KEY=value, target=main:run1/step-100; a value may be in double
 * quotes. ERR_VALIDATION_FAILED for anything else. Newest first. Appends {"jobs":[…],"next_page_token"?}. */
FALLIBLE enum err job_list(struct server *s, struct str filter, uint32_t page_size, struct str page_token, struct buf *out);

/* Does a record, as JSON, match a filter of the same form? */
FALLIBLE enum err job_matches(struct str filter, const json_t *record, bool *out);

/* A new id, of a job or of something else that sorts by time. Its end is the daemon's mark: of what jobs leave on a storage that several
 * daemons see, each knows its own. */
void job_new_id(const struct journal *journal, char id[JOB_ID_LEN + 1]);

FALLIBLE enum err jobs_new(struct server *s);
FALLIBLE enum err jobs_recover(struct server *s);    /* takes up the journal's unfinished jobs */
void jobs_free(struct jobs *j);
uint32_t jobs_live(const struct server *s);      /* not ended */
bool jobs_use_storage(const struct server *s, const char *storage);
