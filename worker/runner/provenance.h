/* provenance.h: what a job writes of itself into the record of the checkpoint that it makes (store/record.h): who it is, and what the
 * checkpoint was made of. */
#pragma once
#include "session/job.h"

/* Notes the checkpoints that the request names as the parents of what the job makes, as they are now: the source of a reshard, base and
 * source of a delta or of what is made of one, the members of a merge. Called before a byte of them is copied. */
FALLIBLE enum err provenance_begin(struct job *j);

/* A parent as the record lists it, as it is now, for provenance_add when its bytes have been taken. The caller frees it. */
FALLIBLE enum err provenance_parent(const struct job *j, const char *role, const struct ref *ref, json_t **out);
FALLIBLE enum err provenance_add(struct job *j, json_t *parent);

/* The facts of the checkpoint besides the job's. */
struct provenance {
	const json_t *plan;            /* as GET …/plan shows it */
	const char *content_digest;    /* 32 hex digits; "": not known */
	const char *content_unknown;   /* why; NULL: it is known */
	uint64_t generation;
	bool has_generation;
};
/* The record; the time is that of the call. The caller frees it. ERR_NO_MEMORY. */
FALLIBLE enum err provenance_make(const struct job *j, const struct provenance *p, json_t **out);
