/* job_refs.c: see job_refs.h. */
#include "server/job_refs.h"

#include "server/job_impl.h"
#include "server/parts.h"

struct telling {
	job_ref_fn fn;
	void *user;
	const struct job *job;
};

static void tell(const struct telling *t, const struct ref *ref, bool is_made)
{
	if (ref->kind == REF_CHECKPOINT && ref->storage.p)
		t->fn(t->user, &(struct job_ref){ ref, is_made, t->job->id, t->job->created_ms });
}

static void tell_all(const struct telling *t)
{
	const struct spec *s = &t->job->spec;
	const struct ref *const refs[] = { &s->source, &s->a, &s->b, &s->base, &s->assets, &s->from };

	for (size_t i = 0; i < sizeof refs / sizeof *refs; i++)
		tell(t, refs[i], false);
	for (size_t i = 0; i < s->sources.n; i++)
		tell(t, &s->sources.v[i], false);
	for (uint32_t i = 0; i < s->layout.n; i++)
		if (s->layout.v[i].kind == LAYOUT_LIKE)
			tell(t, &s->layout.v[i].like_ref, false);
	for (uint32_t i = 0; i < s->transform.count; i++)
		if (s->transform.rules[i].kind == CONVERT_FROM)
			tell(t, &s->transform.rules[i].from, false);
	tell(t, &s->target, job_spec_writes_checkpoint(t->job));
}

void job_each_ref(const struct server *s, job_ref_fn fn, void *user)
{
	for (const struct job *j = s->jobs->live; j; j = j->live_next)
		tell_all(&(struct telling){ fn, user, j });
}

struct asking {
	const struct job *job;
	bool is_wanted;
};

static bool is_inside(struct str outer, struct str inner)
{
	return inner.n >= outer.n && memcmp(outer.p, inner.p, outer.n) == 0 && (inner.n == outer.n || inner.p[outer.n] == '/');
}

static void compare(void *user, const struct job_ref *r)
{
	struct asking *a = user;
	const struct ref *target = &a->job->spec.target;

	if (r->job != a->job->id && str_eq(r->ref->storage, target->storage))
		a->is_wanted = a->is_wanted || is_inside(r->ref->name, target->name) || is_inside(target->name, r->ref->name);
}

bool job_target_is_wanted(const struct job *j)
{
	struct asking a = { .job = j };

	job_each_ref(j->server, compare, &a);
	return a.is_wanted;
}
