/* h_jobs.c: /v1/jobs. */
#include "api/answers.h"
#include "api/claim.h"
#include "api/forward.h"
#include "api/guard.h"
#include "api/h_common.h"
#include "api/handlers.h"
#include "base/jval.h"
#include "spec/spec.h"
#include "api/relay.h"
#include "api/stream.h"
#include "server/cluster.h"
#include "server/job.h"
#include "server/parts.h"
#include "server/spread.h"

FALLIBLE enum err h_jobs_list(struct req *r)
{
	struct buf b = BUF_INIT(64 << 20);
	struct str filter = { 0 };
	struct h_page page;
	bool there;

	TRY(h_page_query(r, &page));
	TRY(req_query(r, "filter", &filter, &there));
	if (forward_lists(r))
		return forward_list(r, filter, page.size, page.token);
	enum err e = job_list(r->core, filter, page.size, page.token, &b);
	if (e) {
		buf_free(&b);
		return e;
	}
	return req_json(r, 200, &b);
}

static void on_planned(void *user, enum err e, const json_t *plan)
{
	req_done(user, e ? e : req_json_doc(user, 200, plan));
}

enum { REFS_MAX = 6 + SPEC_SOURCES_MAX };

/* Work for a node that is to be drained goes to another one, unless it reads or writes this host's shared memory: a trainer's save is never
 * refused. *node_out: NULL if it is done here. *own_out: no other node can do it. ERR_DRAINING: none may. */
static FALLIBLE enum err choose_node(const struct req *r, const struct spec *s, const char **node_out, bool *own_out)
{
	const struct ref *refs[REFS_MAX] = { &s->source, &s->target, &s->a, &s->b, &s->base };
	const char *storages[REFS_MAX];
	size_t n = 0;

	*node_out = NULL;
	*own_out = true;
	for (size_t i = 0; i < s->sources.n && i < SPEC_SOURCES_MAX; i++)
		refs[5 + i] = &s->sources.v[i];
	for (size_t i = 0; i < REFS_MAX; i++) {
		if (refs[i] && refs[i]->kind == REF_STATE_DICT)
			return OK;
		if (refs[i] && refs[i]->kind == REF_CHECKPOINT)
			storages[n++] = refs[i]->storage.p;
	}
	*own_out = false;
	if (!cluster_is_drained(r->core->cluster))
		return OK;
	if (r->caller.is_node)
		return ERR(DRAINING, "the node that the request was sent on to is drained, too");
	return cluster_taker(r->core->cluster, storages, n, node_out);
}

FALLIBLE enum err h_jobs_create(struct req *r)
{
	CLEANUP(spec_free) struct spec spec = { 0 };
	bool dry_run = false, is_known = false, is_own = true;
	const char *node = NULL;

	TRY(req_query_bool(r, "dry_run", &dry_run));
	TRY(spec_read(r->body, &spec));
	if (spec.replica.job.p && !r->caller.is_node)
		return ERR(FORBIDDEN, "replica is what nodes of a cluster ask of each other: a save's option neighbours does it");
	TRY(spread_check(r->core, &spec));
	if (!dry_run)
		TRY(claim_is_known(r, spec.kind, &is_known));
	if (!is_known)
		TRY(choose_node(r, &spec, &node, &is_own));
	if (node)
		return forward_to(r, node);
	if (spec.kind == JOB_DELETE) {
		TRY(auth_scope(r, SCOPE_ADMIN));
		r->audit = dry_run ? NULL : "checkpoint.delete";
	}
	if (!dry_run)
		return is_own ? h_submit(r, r->body, spec.kind) : claim_job(r, spec.kind);

	struct job_request rq = { .kind = spec.kind, .spec = r->body, .who = req_principal(r) };
	r->reads_only = true;
	req_hold(r);
	job_dry_run(r->core, &rq, on_planned, r);
	return OK;
}

/* Another node may have taken the job over meanwhile: that one answers then. */
static void on_waited(void *user, enum err e)
{
	struct req *r = user;
	bool elsewhere = false;

	if (!e && r->conn)
		e = forward_job(r, &elsewhere);
	req_done(r, e || elsewhere ? e : answers_job(r, r->parts[2]));
}

FALLIBLE enum err h_job_get(struct req *r)
{
	unsigned wait_ms = 0;

	TRY(req_query_wait(r, &wait_ms));
	if (wait_ms == 0)
		return answers_job(r, r->parts[2]);
	req_hold(r);
	job_wait(r->core, r->parts[2], wait_ms, on_waited, r);
	return OK;
}

FALLIBLE enum err h_job_events(struct req *r)
{
	enum job_state state;

	TRY(job_state_of(r->core, r->parts[2], &state));
	return stream_start(r, r->parts[2].p, relay_follow);
}

FALLIBLE enum err h_job_plan(struct req *r)
{
	struct buf b = BUF_INIT(64 << 20);

	enum err e = job_plan(r->core, r->parts[2], &b);
	if (e) {
		buf_free(&b);
		return e;
	}
	return req_json(r, 200, &b);
}

static FALLIBLE enum err answer_job(struct req *r, unsigned status)
{
	struct buf b = BUF_INIT(64 << 20);
	struct str text;

	TRY(job_text(r->core, r->parts[2], &text));
	buf_put(&b, text.p, text.n);
	return req_json(r, status, &b);
}

static void on_changed(void *user, enum err e)
{
	req_done(user, e ? e : answer_job(user, 202));
}

FALLIBLE enum err h_job_cancel(struct req *r)
{
	struct principal who = req_principal(r);

	TRY(h_no_body(r));
	req_hold(r);
	job_cancel(r->core, &who, r->parts[2], on_changed, r);
	return OK;
}

FALLIBLE enum err h_job_retry(struct req *r)
{
	struct principal who = req_principal(r);
	enum job_kind kind;

	TRY(h_no_body(r));
	TRY(job_kind_of(r->core, r->parts[2], &kind));
	if (kind == JOB_DELETE) { /* as its first attempt */
		TRY(auth_scope(r, SCOPE_ADMIN));
		r->audit = "checkpoint.delete";
		snprintf(r->audit_job, sizeof r->audit_job, "%s", r->parts[2].p);
	}
	req_hold(r);
	job_retry(r->core, &who, r->parts[2], on_changed, r);
	return OK;
}
