/* job_spec.c: what a job's spec refers to: storages, state dicts, its target, and the jobs that are in its way. The form was checked by
 * the handler; a spec from the journal or from on_owner_death is trusted no more than that: nothing here believes in a member's type. */
#include <stdio.h>

#include "base/mem.h"
#include "server/job_impl.h"
#include "server/parts.h"
#include "server/storage.h"

struct job_ref job_spec_ref(const json_t *spec, const char *member)
{
	const json_t *o = json_object_get(spec, member);
	const json_t *generation = json_object_get(o, "generation");

	return (struct job_ref){ .storage = json_string_value(json_object_get(o, "storage")),
				 .name = json_string_value(json_object_get(o, "name")),
				 .state_dict = json_string_value(json_object_get(o, "state_dict")),
				 .generation = json_is_integer(generation) ? json_integer_value(generation) : -1 };
}

struct job_ref job_spec_model(const json_t *spec)
{
	return job_spec_ref(json_object_get(spec, "optimizer"), "model");
}

bool job_spec_overwrites(const json_t *spec)
{
	return json_is_true(json_object_get(json_object_get(spec, "options"), "overwrite"));
}

bool job_spec_beside(const json_t *spec)
{
	const char *word = json_string_value(json_object_get(json_object_get(spec, "options"), "beside"));

	return word && strcmp(word, "never") != 0;
}

/* The job's target is another save's: the job writes files beside its. */
static bool job_spec_is_part(const struct job *j)
{
	return json_is_true(json_object_get(json_object_get(j->spec, "hosts"), "part"));
}

bool job_spec_selects(const json_t *spec)
{
	return json_array_size(json_object_get(spec, "include")) || json_array_size(json_object_get(spec, "exclude")) ||
	       json_array_size(json_object_get(spec, "dtype"));
}

bool job_spec_compares(const struct job *j)
{
	return kind_is(j->kind, KIND_COMPARES);
}

bool job_spec_writes_checkpoint(const struct job *j)
{
	return kind_is(j->kind, KIND_MAKES);
}

static FALLIBLE enum err add_storage(struct job *j, const char *name)
{
	struct storage *st;
	uint32_t at = j->storage_count;

	TRY(storage_find(j->server->storages, str_of(name), &st));
	for (uint32_t i = 0; i < j->storage_count; i++)
		if (strcmp(j->storages[i], name) == 0)
			return OK;
	if (j->storage_count == GANG_ROOTS_MAX)
		return ERR(LIMIT_EXCEEDED, "a job cannot use more than %d storages", GANG_ROOTS_MAX);
	for (; at > 0 && strcmp(j->storages[at - 1], name) > 0; at--)
		j->storages[at] = j->storages[at - 1];
	j->storages[at] = name;
	j->storage_count++;
	return OK;
}

/* {"match":…,"like":"main:other"}: the worker reads that checkpoint's boxes. */
static FALLIBLE enum err add_likes(struct job *j)
{
	json_t *target = json_object_get(j->spec, "target");
	const json_t *rule;
	size_t i;

	json_decref(j->likes);
	j->likes = NULL;
	json_array_foreach(json_object_get(target, "layout"), i, rule) {
		const char *like = json_string_value(json_object_get(rule, "like"));
		const char *colon = like ? strchr(like, ':') : NULL;
		if (!colon || strncmp(like, "shm:", 4) == 0)
			continue;
		json_t *name = json_stringn(like, (size_t)(colon - like));
		if (!j->likes)
			j->likes = json_array();
		if (!j->likes || !name || json_array_append_new(j->likes, name) != 0)
			return ERR(NO_MEMORY, "cannot resolve a layout");
		TRY(add_storage(j, json_string_value(name)));
	}
	return OK;
}

FALLIBLE enum err job_spec_resolve(struct job *j)
{
	static const char *const members[] = { "source", "target", "a", "b" };
	struct job_ref target = job_spec_ref(j->spec, "target");
	char text[4096 + 64] = "";

	j->storage_count = 0;
	for (size_t i = 0; i < sizeof members / sizeof *members; i++) {
		struct job_ref ref = job_spec_ref(j->spec, members[i]);
		if (ref.storage)
			TRY(add_storage(j, ref.storage));
	}
	TRY(add_likes(j));
	if (target.storage && target.name)
		snprintf(text, sizeof text, "%s:%s", target.storage, target.name);
	else if (target.state_dict)
		snprintf(text, sizeof text, "shm:%s", target.state_dict);
	mem_free(j->target);
	j->target = mem_strdup(text);
	return j->target ? OK : ERR(NO_MEMORY, "cannot keep a job");
}

/* ---- other jobs ---- */

static bool same_or_inside(const char *a, const char *b)
{
	size_t n = strlen(a);

	return n && strncmp(a, b, n) == 0 && (b[n] == '\0' || b[n] == '/');
}

static FALLIBLE enum err check_target_free(const struct job *j)
{
	if (!j->target[0])
		return OK;
	for (const struct job *other = j->server->jobs->live; other; other = other->live_next)
		if (other != j && !other->dry_run && other->target && !job_spec_is_part(j) && !job_spec_is_part(other) &&
		    (same_or_inside(other->target, j->target) || same_or_inside(j->target, other->target)))
			return ERR(TARGET_BUSY, "job %s writes to %s", other->id, other->target);
	return OK;
}

/* A state dict that another job is about to write is no snapshot. */
static FALLIBLE enum err check_quiet(const struct job *j, struct job_ref ref)
{
	char text[STATE_DICT_NAME_MAX + 8];

	if (!ref.state_dict)
		return OK;
	snprintf(text, sizeof text, "shm:%s", ref.state_dict);
	for (const struct job *other = j->server->jobs->live; other; other = other->live_next) {
		if (other == j || other->dry_run || !other->target || strcmp(other->target, text) != 0)
			continue;
		/* An operation writes the next generation beside the one that is there. */
		if (other->kind == JOB_LOAD || state_dict_world(j->server, str_of(ref.state_dict)) == 0)
			return ERR(STATE_DICT_BUSY, "job %s is %s state dict \"%s\"", other->id,
				   other->kind == JOB_LOAD ? "loading into" : "making", ref.state_dict);
	}
	return OK;
}

FALLIBLE enum err job_spec_check_free(const struct job *j)
{
	TRY(check_target_free(j));
	TRY(check_quiet(j, job_spec_ref(j->spec, "source")));
	TRY(check_quiet(j, job_spec_ref(j->spec, "a")));
	TRY(check_quiet(j, job_spec_ref(j->spec, "b")));
	return check_quiet(j, job_spec_model(j->spec));
}
