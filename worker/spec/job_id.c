/* job_id.c: see job_id.h. */
#include "spec/job_id.h"

enum { TIME_DIGITS = 10 };

const char job_id_digits[33] = "0123456789ABCDEFGHJKMNPQRSTVWXYZ";

bool job_id_ok(struct str id)
{
	for (size_t i = 0; i < id.n; i++)
		if (!memchr(job_id_digits, id.p[i], 32))
			return false;
	return id.n == JOB_ID_LEN;
}

int64_t job_id_ms(struct str id)
{
	uint64_t ms = 0;

	if (!job_id_ok(id))
		return -1;
	for (size_t i = 0; i < TIME_DIGITS; i++)
		ms = ms << 5 | (uint64_t)((const char *)memchr(job_id_digits, id.p[i], 32) - job_id_digits);
	return (int64_t)(ms & ((UINT64_C(1) << 48) - 1));
}
