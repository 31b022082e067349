/* claim.c: see claim.h. */
#include "api/claim.h"

#include <stdio.h>

#include "api/forward.h"
#include "api/h_common.h"
#include "base/mem.h"
#include "server/cluster.h"
#include "server/job.h"
#include "server/parts.h"

struct claimed {
	struct req *r;                         /* held */
	enum job_kind kind;
	struct cluster_claim claim;
};

static void end(struct claimed *w, enum err e)
{
	struct req *r = w->r;
	struct err_info info = *err_last();

	mem_free(w);
	err_restore(&info);
	req_done(r, e);
}

static void on_created(void *user, enum err e, const char *id, bool existing)
{
	struct claimed *w = user;
	struct err_info info = *err_last();

	if (e && e != ERR_IDEMPOTENCY_IN_FLIGHT && e != ERR_IDEMPOTENCY_MISMATCH) /* another node may do it */
		cluster_claim_drop(w->r->core->cluster, &w->claim);
	err_restore(&info);
	end(w, e ? e : h_answer_created(w->r, id, existing));
}

static void make(struct claimed *w)
{
	struct job_request rq;

	enum err e = w->r->conn ? h_job_request(w->r, w->r->body, w->kind, &rq) : ERR(DRAINING, "the daemon is shutting down");
	if (e) {
		on_created(w, e, NULL, false);
		return;
	}
	rq.id = w->claim.job;
	job_create(w->r->core, &rq, on_created, w);
}

static void on_claimed(void *user, enum err e, const struct cluster_claim *claim);

/* The node that has the key is away: what etcd knows of the job is the answer. */
static void on_record(void *user, enum err e, const json_t *doc)
{
	struct claimed *w = user;
	char location[64];

	if (!e && !json_object_get(doc, "job") && cluster_presence(w->r->core->cluster, w->claim.node) == CLUSTER_IS_UNKNOWN) {
		cluster_claim_take(w->r->core->cluster, &w->claim, on_claimed, w);
		return;
	}
	if (!e && !json_object_get(doc, "job"))
		e = ERR(CLUSTER_UNAVAILABLE, "node \"%s\", which has a request with this key, is away", w->claim.node);
	else if (!e && !w->claim.is_same)
		e = ERR(IDEMPOTENCY_MISMATCH, "the key was used for job %s, with another body", w->claim.job);
	snprintf(location, sizeof location, "/v1/jobs/%s", w->claim.job);
	w->r->audit = NULL; /* the first request is in the audit */
	e = e ? e : req_json_doc(w->r, 202, json_object_get(doc, "job"));
	e = e ? e : req_header(w->r, MHD_HTTP_HEADER_LOCATION, location);
	e = e ? e : req_header(w->r, "Idempotency-Replayed", "true");
	end(w, e);
}

static void on_claimed(void *user, enum err e, const struct cluster_claim *claim)
{
	struct claimed *w = user;

	w->claim = *claim;
	if (e)
		end(w, e);
	else if (!claim->node[0])
		make(w);
	else if (claim->is_away)
		cluster_record(w->r->core->cluster, str_of(w->claim.job), on_record, w);
	else {
		struct req *r = w->r;
		e = r->conn ? forward_to(r, claim->node) : ERR(DRAINING, "the daemon is shutting down");
		mem_free(w);
		req_done(r, e); /* forward_to holds it, too */
	}
}

FALLIBLE enum err claim_is_known(struct req *r, enum job_kind kind, bool *known_out)
{
	struct job_request rq;

	TRY(h_job_request(r, r->body, kind, &rq));
	*known_out = rq.idem.key.n > 0 && job_key_is_known(r->core, &rq);
	return OK;
}

FALLIBLE enum err claim_job(struct req *r, enum job_kind kind)
{
	struct job_request rq;

	TRY(h_job_request(r, r->body, kind, &rq));
	if (!r->core->cluster || rq.idem.key.n == 0)
		return h_submit(r, r->body, kind);
	struct claimed *w = mem_zalloc(1, sizeof *w);
	NEED(w, "cannot make a job");
	*w = (struct claimed){ .r = r, .kind = kind };
	req_hold(r);
	cluster_claim(r->core->cluster, r->caller.uid, &rq.idem, on_claimed, w);
	return OK;
}
