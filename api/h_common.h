/* h_common.h: what several handlers do the same way. */
#pragma once
#include "api/http.h"
#include "server/follower.h"
#include "server/job.h"
#include "server/lookup.h"
#include "server/principal.h"
#include "spec/kinds.h"

static inline struct principal req_principal(const struct req *r)
{
	return (struct principal){ .uid = r->caller.uid, .admin = r->caller.admin, .pid = r->caller.pid };
}

enum { H_PAGE_DEFAULT = 100, H_PAGE_MAX = 1000 };

struct h_page {
	uint32_t size;
	struct str token;
};

FALLIBLE enum err h_page_query(struct req *r, struct h_page *out);            /* ?page_size= &page_token= */
/* The Idempotency-Key, and the body's bytes as they came. */
FALLIBLE enum err h_idempotency(struct req *r, struct idempotency *out);
/* The request for a job of a checked document. */
FALLIBLE enum err h_job_request(struct req *r, const json_t *doc, enum job_kind kind, struct job_request *out);
/* 202: the job that was made, or (existing) that an earlier request with this key made. */
FALLIBLE enum err h_answer_created(struct req *r, const char *id, bool existing);
/* Makes a job of a checked document and answers 202. */
FALLIBLE enum err h_submit(struct req *r, const json_t *doc, enum job_kind kind);
/* The storage that the path names first. check: of the name behind it, such as ref_check_name; NULL: none. */
FALLIBLE enum err h_storage(struct req *r, enum err (*check)(struct str name), struct storage **out);
FALLIBLE enum err h_rank(const struct req *r, int64_t *out);   /* the rank in the path of a state dict's */
FALLIBLE enum err h_check_run(struct str name);               /* a run's name, or "-" */
FALLIBLE enum err h_no_body(const struct req *r);             /* of an action where nothing can be set: no body, or {} */
/* Ends of requests: 204; the text, as JSON; a look-up's answer, as it is. */
void h_pass_nothing(void *user, enum err e);
void h_pass_text(void *user, enum err e, struct buf *out);
void h_pass_on(void *user, enum err e, const json_t *ok, int *fd);
/* The "bytes" of the memfd that came with it are. Takes the fd. etag: see req_fd(). */
FALLIBLE enum err h_pass_fd(struct req *r, const char *content_type, const json_t *ok, int *fd, const char *etag);
/* {"op","storage","name"}: the question about one checkpoint whose path the request has. */
FALLIBLE enum err h_question(struct req *r, const char *op, json_t **out);
/* Asks it about the checkpoint that its name or alias stands for, and holds the request. Takes the question. */
void h_ask(struct req *r, json_t *question, lookup_fn fn);
/* The same of a question about what a checkpoint holds: if it is gone, or damaged, the copy in the storage behind (server/tier.h) answers,
 * and h_tell_served says so. fds go with the first question. */
void h_ask_either(struct req *r, json_t *question, const int *fds, uint32_t fd_count, lookup_fn fn);
/* Adds the header Dcpd-Served-From to an answer of the copy behind. */
FALLIBLE enum err h_tell_served(struct req *r);
/* h_pass_on of such a question. */
void h_pass_either(void *user, enum err e, const json_t *ok, int *fd);
/* Sets a text of a question; ERR_VALIDATION_FAILED if it is not UTF-8. Absent (n == 0): nothing. */
FALLIBLE enum err h_set_text(json_t *question, const char *key, struct str text);
