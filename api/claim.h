/* claim.h: a request for a job with an Idempotency-Key, of a cluster: whichever nodes it is sent to, one of them makes the job. */
#pragma once
#include "api/http.h"
#include "spec/kinds.h"

/* Has a request with this key made a job on this node? */
FALLIBLE enum err claim_is_known(struct req *r, enum job_kind kind, bool *known_out);
/* Makes the job, has the node make it that has the key, or answers with the job that the key made; holds the request. */
FALLIBLE enum err claim_job(struct req *r, enum job_kind kind);
