/* answers.h: job records as complete HTTP responses, kept until the job changes: a poll then costs a look-up. */
#pragma once
#include "api/http.h"

struct answers;

FALLIBLE enum err answers_new(struct answers **out);
void answers_free(struct answers *a);
/* Answers GET /v1/jobs/{id} with the record as it is now; 304 if the client has it. */
FALLIBLE enum err answers_job(struct req *r, struct str id);
