/* job_refs.h: what the jobs that have not ended read and write, for whoever must leave that alone. */
#pragma once
#include "server/job.h"
#include "spec/ref.h"

struct job;

struct job_ref {
	const struct ref *ref;         /* a checkpoint */
	bool is_made;                  /* the job makes it; else it reads, changes or removes it */
	const char *job;
	int64_t created_ms;            /* wall clock */
};
typedef void (*job_ref_fn)(void *user, const struct job_ref *r);
void job_each_ref(const struct server *s, job_ref_fn fn, void *user);      /* dry runs count, too */
/* Does another job read or write what this one is about to remove? */
bool job_target_is_wanted(const struct job *j);
