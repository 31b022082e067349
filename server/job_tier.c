/* job_tier.c: jobs that read a checkpoint of a storage with another one behind it (tier.h): the copy behind serves them if the one that was
 * asked for is gone or damaged. The job's request then names the copy, and its result says so. */
#include <stdio.h>

#include "server/errdoc.h"
#include "base/jval.h"
#include "base/log.h"
#include "server/job_impl.h"
#include "server/parts.h"
#include "server/tier.h"
#include "server/verdict.h"

/* The key of the request under which the reference stands; NULL: of none that is only read. */
static const char *key_of(const struct job *j, const struct ref *ref)
{
	const struct { const char *key; const struct ref *ref; } read[] = { { "source", &j->spec.source }, { "a", &j->spec.a },
									    { "b", &j->spec.b },	   { "base", &j->spec.base } };

	for (size_t i = 0; i < sizeof read / sizeof *read; i++)
		if (ref == read[i].ref && ref->kind == REF_CHECKPOINT && json_object_get(j->request, read[i].key))
			return read[i].key;
	return NULL;
}

bool job_may_use_tier(const struct job *j, const struct ref *ref)
{
	return key_of(j, ref) && !kind_is(j->kind, KIND_REMOVES | KIND_REPAIRS) && !json_object_get(j->served_from, key_of(j, ref));
}

FALLIBLE enum err job_serve_from_tier(struct job *j, const struct ref *ref, enum err why)
{
	const struct tier *t = tier_of(j->server->tiers, ref->storage);
	const char *key = key_of(j, ref);
	json_t *one = json_object_get(j->request, key);

	must(t && key);
	j->served_from = j->served_from ? j->served_from : json_object();
	json_t *doc = json_pack("{s:s, s:s, s:{s:s, s:s}, s:s}", "storage", t->how->target, "name", ref->name.p, "instead_of", "storage",
				ref->storage.p, "name", ref->name.p, "why", err_code_name(why));
	log_warn("a checkpoint is served by the storage behind it", "job", j->id, "storage", ref->storage.p, "name", ref->name.p, "why",
		 err_code_name(why), NULL);
	if (!doc || json_object_set_new(j->served_from, key, doc) != 0 ||
	    json_object_set_new(one, "storage", json_string(t->how->target)) != 0)
		return ERR(NO_MEMORY, "cannot keep a job");
	return job_spec_resolve(j);
}

FALLIBLE enum err job_serve_from_neighbour(struct job *j, const json_t *copy)
{
	const struct ref *ref = &j->spec.source;
	const char *node = jval_text(copy, "node"), *name = jval_text(copy, "state_dict");
	json_int_t generation = jval_int(copy, "generation");

	j->served_from = j->served_from ? j->served_from : json_object();
	json_t *doc = json_pack("{s:s, s:s, s:I, s:{s:s, s:s}, s:s}", "node", node, "state_dict", name, "generation", generation,
				"instead_of", "storage", ref->storage.p, "name", ref->name.p, "why", err_code_name(ERR_NOT_FOUND));
	json_t *source = json_pack("{s:s, s:s, s:I}", "state_dict", name, "node", node, "generation", generation);
	log_warn("a checkpoint that its storage lacks is loaded out of a node's memory", "job", j->id, "storage", ref->storage.p, "name",
		 ref->name.p, "node", node, NULL);
	bool bad = !doc || !source || json_object_set(j->served_from, "source", doc) != 0 ||
		   json_object_set(j->request, "source", source) != 0;
	enum err e = bad ? ERR(NO_MEMORY, "cannot keep a job") : OK;
	json_decref(doc);
	json_decref(source);
	json_decref(j->copies);
	j->copies = NULL;
	TRY(e);
	return job_spec_resolve(j);
}

bool job_retry_from_tier(struct job *j, enum err e)
{
	static const enum job_kind kinds[] = { JOB_LOAD, JOB_RESHARD, JOB_APPLY, JOB_STATS };
	const struct ref *source = &j->spec.source;
	bool reads = false;

	for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
		reads = reads || j->kind == kinds[i];
	if (!reads || j->cancel_wanted || j->dry_run || !verdict_is_damage(e) || source->kind != REF_CHECKPOINT ||
	    !tier_has(j->server->tiers, source->storage, source->name) || !job_may_use_tier(j, source))
		return false;
	struct err_info info = *err_last();
	enum err again = job_serve_from_tier(j, source, e);
	if (again)
		err_restore(&info);
	return again == OK;
}

void job_note_served(struct job *j)
{
	const json_t *source = json_object_get(j->served_from, "source");

	if (!j->served_from)
		return;
	/* of a job with one source: that one's */
	errdoc_set(j->result, "served_from", source && json_object_size(j->served_from) == 1 ? json_incref((json_t *)(uintptr_t)source)
											    : json_incref(j->served_from));
}
