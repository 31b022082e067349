/* policy.h: the retention policies (spec/policy.h): kept in the journal, looked at when something may go by them, and carried out by
 * ordinary delete jobs, one at a time for each storage.
 *
 * They are looked at after each durable commit and each verify in a run that one of them is for, when a policy changes, and once a minute.
 * All storages are listed for that: while one cannot be, nothing is removed, for a delta there may need a base here. A removal names the
 * conditions under which it was decided, and the worker looks at them again under the run's lock (options.only_if of a delete).
 *
 * One that matches no run, or every one, is kept only if its document says "confirm":true. */
#pragma once
#include <jansson.h>
#include "base/buf.h"
#include "server/loop.h"
#include "server/principal.h"
#include "spec/kinds.h"

struct ref;
struct server;

FALLIBLE enum err policy_all_new(struct server *s);      /* reads the journal */
FALLIBLE enum err policy_all_start(struct server *s);
void policy_all_free(struct server *s);

/* A job of this kind has just succeeded: something may go now. */
void policy_note(struct server *s, enum job_kind kind, const struct ref *target);
/* There may be a delta that no look has seen: all removals are decided anew. */
void policy_note_delta(struct server *s);
/* A job has found out that a checkpoint is whole, or damaged: the removals of that one, or of all of its run, are decided anew. */
void policy_note_verdict(struct server *s, const char *storage, const char *name, bool is_damaged);
/* ERR_STATE_CONFLICT: the job, which removes `name` and is about to commit, was decided by what is not so any more. */
FALLIBLE enum err policy_check_removal(const struct server *s, const char *job, const char *name);

/* {"remove":[{"name","bytes","policy","why"}],"keep":[{"name","bytes","why":[…]}],"remove_bytes","over_bytes"} of the runs that the policy
 * is for, as the policies are, or, with doc, as if the policy said that. out: borrowed. */
typedef void (*policy_preview_fn)(void *user, enum err e, struct buf *out);
void policy_preview(struct server *s, const struct principal *who, struct str name, const json_t *doc, policy_preview_fn fn,
		    void *user);
