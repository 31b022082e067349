/* kinds.h: the kinds of jobs: kinds.def as C. A kind's row says what it reads, writes and needs. */
#pragma once
#include "spec/ref.h"

/* The numbers are in the journal. */
enum job_kind {
#define KIND(NAME, name, number, ...) JOB_##NAME = (number),
#include "spec/kinds.def"
#undef KIND
	JOB_KIND_COUNT
};

enum kind_traits {
	KIND_COMPARES = 1,             /* has "a" and "b", not "source" and "target" */
	KIND_MAKES = 2,                /* stages its target and commits it */
	KIND_REMOVES = 4,              /* removes its target */
	KIND_OPERATES = 8,             /* an operation on state dicts: a group of ranks, by comm; writes the target's next generation */
	KIND_TARGET_NEW = 16,          /* its target must not be there */
	KIND_TARGET_THERE = 32,        /* its target must be there */
	KIND_REPAIRS = 128,            /* its target is there, and single files of it are replaced */
	KIND_HAS_BASE = 256,           /* has a "base": a checkpoint or a state dict */
	KIND_ANY_FILE = 64,            /* its source, or the target that it repairs, may be any file or folder, not a checkpoint alone */
};

struct kind {
	const char *name, *lane, *arguments, *what;
	unsigned reads, writes;        /* sets of enum ref_kind */
	unsigned traits;
};

/* The row of a kind; one without anything for a number that no kind has. */
const struct kind *kind_of(enum job_kind kind);
static inline bool kind_is(enum job_kind kind, unsigned traits)
{
	return (kind_of(kind)->traits & traits) != 0;
}
/* Returns false when no kind has that name. */
bool kind_parse(struct str name, enum job_kind *out);
extern const char *const kind_names[JOB_KIND_COUNT + 1];       /* in the order of their numbers, then NULL */
