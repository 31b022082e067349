/* job_spec.c: what a job's spec refers to: storages, state dicts, its target, and the jobs that are in its way. Requests from the journal
 * and from on_owner_death are read as strictly as those that a handler has checked. */
#include <stdio.h>

#include "base/jval.h"
#include "base/mem.h"
#include "server/config.h"
#include "server/job_impl.h"
#include "server/parts.h"
#include "server/storage.h"

/* The job's target is another save's: the job writes files beside its. */
static bool job_spec_is_part(const struct job *j)
{
	return j->spec.hosts.part;
}

bool job_spec_selects(const struct job *j)
{
	return j->spec.include.n || j->spec.exclude.n || j->spec.dtype.n;
}

bool job_spec_compares(const struct job *j)
{
	return kind_is(j->kind, KIND_COMPARES);
}

bool job_spec_writes_checkpoint(const struct job *j)
{
	return kind_is(j->kind, KIND_MAKES) && j->spec.target.kind == REF_CHECKPOINT;
}

struct state_dict_save job_spec_as_save(const struct job *j)
{
	return (struct state_dict_save){ .job = j->id, .hosts = j->spec.hosts.id.p, .checkpoint = j->spec.target };
}

bool job_spec_loads(const struct job *j)
{
	return (j->kind == JOB_LOAD || j->kind == JOB_APPLY) && j->spec.target.kind == REF_STATE_DICT && !job_spec_makes_next(j);
}

bool job_spec_makes_next(const struct job *j)
{
	return job_state_dict_op_is(j) || (j->kind == JOB_LOAD && j->spec.delta);
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

static FALLIBLE enum err add_node(struct job *j, const char *node)
{
	const char *storage;

	TRY(j->server->hooks->node_storage(j->server, node, &storage));
	return add_storage(j, storage);
}

/* Copies in other nodes' memory serve where they can: a node that cannot be named has none. This node's own are found as other segments. */
static void add_copies(struct job *j)
{
	const json_t *one;
	size_t i;

	json_array_foreach(j->copies, i, one)
		if (!job_copy_is_own(j, one) && add_node(j, jval_text(one, "node")))
			err_clear();
}

bool job_copy_is_own(const struct job *j, const json_t *copy)
{
	return j->server->config->node && strcmp(jval_text(copy, "node"), j->server->config->node) == 0;
}

FALLIBLE enum err job_spec_resolve(struct job *j)
{
	const struct ref *const refs[] = { &j->spec.source, &j->spec.target, &j->spec.a, &j->spec.b, &j->spec.base, &j->spec.assets,
					   &j->spec.from };
	const struct ref *target = &j->spec.target;
	const struct layout_rules *layout = &j->spec.layout;
	char text[4096 + 64] = "";

	TRY(spec_read(j->request, &j->spec));
	j->storage_count = 0;
	for (size_t i = 0; i < sizeof refs / sizeof *refs; i++)
		if (refs[i]->kind == REF_REMOTE)
			TRY(add_node(j, refs[i]->node.p));
		else if (refs[i]->storage.p)
			TRY(add_storage(j, refs[i]->storage.p));
	for (size_t i = 0; i < j->spec.sources.n; i++)
		TRY(add_storage(j, j->spec.sources.v[i].storage.p));
	for (uint32_t i = 0; i < layout->n; i++)
		if (layout->v[i].kind == LAYOUT_LIKE) /* the worker reads that checkpoint's boxes */
			TRY(add_storage(j, layout->v[i].like_ref.storage.p));
	for (uint32_t i = 0; i < j->spec.transform.count; i++)
		if (j->spec.transform.rules[i].kind == CONVERT_FROM) /* the worker reads tensors of that checkpoint */
			TRY(add_storage(j, j->spec.transform.rules[i].from.storage.p));
	add_copies(j);
	if (target->kind == REF_CHECKPOINT)
		snprintf(text, sizeof text, "%s:%s", target->storage.p, target->name.p);
	else if (target->kind == REF_STATE_DICT)
		snprintf(text, sizeof text, "shm:%s", target->name.p);
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
			return other->in_journal ? ERR(TARGET_BUSY, "job %s writes to %s", other->id, other->target) :
						   ERR(TARGET_BUSY, "another request to write to %s is being looked at", other->target);
	return OK;
}

/* A state dict that another job is about to write is no snapshot. */
static FALLIBLE enum err check_quiet(const struct job *j, const struct ref *ref)
{
	char text[STATE_DICT_NAME_MAX + 8];

	if (ref->kind != REF_STATE_DICT)
		return OK;
	snprintf(text, sizeof text, "shm:%s", ref->name.p);
	for (const struct job *other = j->server->jobs->live; other; other = other->live_next) {
		if (other == j || other->dry_run || !other->target || strcmp(other->target, text) != 0)
			continue;
		/* An operation writes the next generation beside the one that is there. */
		if (job_spec_loads(other) || state_dict_world(j->server->state_dicts, ref->name) == 0)
			return ERR(STATE_DICT_BUSY, "job %s is %s state dict \"%s\"", other->id,
				   job_spec_loads(other) ? "loading into" : "making", ref->name.p);
	}
	return OK;
}

FALLIBLE enum err job_spec_check_free(const struct job *j)
{
	TRY(check_target_free(j));
	TRY(check_quiet(j, &j->spec.source));
	TRY(check_quiet(j, &j->spec.base));
	TRY(check_quiet(j, &j->spec.a));
	TRY(check_quiet(j, &j->spec.b));
	return check_quiet(j, &j->spec.optimizer_model);
}
