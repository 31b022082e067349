/* policy.h: the retention policies (spec/policy.h): kept in the journal, looked at when something may go by them, and carried out by
 * ordinary delete jobs, one at a time for each storage.
 *
 * They are looked at after each durable commit and each verify in a run that one of them is for, when a policy changes, and once a minute.
 * All storages are listed for that: while one cannot be, nothing is removed, for a delta there may need a base here. A removal names the
 * conditions under which it was decided, and the worker looks at them again under the run's lock (options.only_if of a delete). */
#pragma once
#include <jansson.h>
#include "base/buf.h"
#include "server/loop.h"
#include "server/principal.h"
#include "spec/kinds.h"

struct policies;
struct ref;
struct server;

enum { POLICIES_MAX = 256 };

FALLIBLE enum err policy_all_new(struct server *s, struct policies **out);      /* reads the journal */
FALLIBLE enum err policy_all_start(struct server *s);
void policy_all_free(struct policies *all);

/* A job of this kind has just succeeded: something may go now. */
void policy_note(struct server *s, enum job_kind kind, const struct ref *target);
/* There may be a delta that no look has seen: all removals are decided anew. */
void policy_note_delta(struct server *s);
/* A job has found out that a checkpoint is whole, or damaged: the removals of that one, or of all of its run, are decided anew. */
void policy_note_verdict(struct server *s, const char *storage, const char *name, bool is_damaged);
/* ERR_STATE_CONFLICT: the job, which removes `name` and is about to commit, was decided by what is not so any more. */
FALLIBLE enum err policy_check_removal(const struct server *s, const char *job, const char *name);

/* Checks the document, and what it matches now, and keeps it. ERR_VALIDATION_FAILED: it matches no run, or every one, and does not say
 * "confirm":true. ERR_FORBIDDEN: it is another user's. Takes doc. */
void policy_put(struct server *s, const struct principal *who, const char *name, json_t *doc, done_fn fn, void *user);
void policy_delete(struct server *s, const struct principal *who, const char *name, done_fn fn, void *user);
/* The document with name, uid and status; ERR_NOT_FOUND. */
FALLIBLE enum err policy_show(const struct server *s, const char *name, struct buf *out);
FALLIBLE enum err policy_list(const struct server *s, struct buf *out);    /* {"policies":[…]} by name */

/* {"remove":[{"name","bytes","policy","why"}],"keep":[{"name","bytes","why":[…]}],"remove_bytes","over_bytes"} of the runs that the policy
 * is for, as the policies are, or, with doc, as if the policy said that. out: borrowed. Takes doc. */
typedef void (*policy_preview_fn)(void *user, enum err e, struct buf *out);
void policy_preview(struct server *s, const char *name, json_t *doc, policy_preview_fn fn, void *user);
