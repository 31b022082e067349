/* job_id.h: the form of a job's id: a ULID, 48 bits of milliseconds and 80 others in Crockford's base 32. */
#pragma once
#include "base/str.h"

enum { JOB_ID_LEN = 26 };

extern const char job_id_digits[33];
bool job_id_ok(struct str id);                   /* has it the form of one? */
int64_t job_id_ms(struct str id);                /* wall clock of the job's creation; -1: it has not that form */
