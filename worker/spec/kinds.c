/* kinds.c: see kinds.h. */
#include "spec/kinds.h"

static const struct kind kinds[JOB_KIND_COUNT + 1] = {
#define KIND(NAME, name, number, lane, reads, writes, traits, operation, arguments, what) \
	[number] = { #name, lane, arguments, what, reads, writes, traits },
#include "spec/kinds.def"
#undef KIND
};

const char *const kind_names[JOB_KIND_COUNT + 1] = {
#define KIND(NAME, name, number, ...) [number] = #name,
#include "spec/kinds.def"
#undef KIND
};

const struct kind *kind_of(enum job_kind kind)
{
	return &kinds[(unsigned)kind < JOB_KIND_COUNT ? kind : JOB_KIND_COUNT];
}

bool kind_parse(struct str name, enum job_kind *out)
{
	for (int k = 0; k < JOB_KIND_COUNT; k++)
		if (str_is(name, kind_names[k])) {
			*out = (enum job_kind)k;
			return true;
		}
	return false;
}
