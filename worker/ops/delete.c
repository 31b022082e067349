/* delete.c: a checkpoint goes to trash in one step, and is then removed (see commit.c). */
#include "base/mem.h"
#include "session/job.h"
#include "store/aliases.h"
#include "store/commit.h"

/* Aliases that lead to the target, and will dangle. Unreadable ones are not this job's affair. */
static json_t *aliases_of(const struct job *j)
{
	const struct ref *target = &j->spec.target;
	const char *slash = strrchr(target->name.p, '/'), *alias;
	CLEANUP(mem_free_ptr) char *run = slash ? mem_strndup(target->name.p, (size_t)(slash - target->name.p)) : mem_strdup("-");
	json_t *all = NULL, *found = json_array(), *name;
	const struct store *store;

	if (!run || stores_find(&j->worker->stores, target->storage.p, &store) || aliases_read(store, run, &all))
		err_clear();
	json_object_foreach(all, alias, name)
		if (str_is(target->name, json_string_value(name)))
			(void)json_array_append_new(found, json_string(alias));
	json_decref(all);
	return found;
}

enum err delete_job(struct job *j)
{
	const struct store_job by = job_in_store(j);

	if (j->dry_run) {
		j->result = json_pack("{s:o}", "target", ref_doc(&j->spec.target));
		return j->result ? OK : ERR(NO_MEMORY, "no memory for the plan");
	}
	TRY(job_state(j, "running", "delete", NULL, 0));
	TRY(job_send(j, FRAME_WANT_COMMIT, STR("{}"), NULL, 0));
	TRY(job_wait(j, &j->commit_ok));
	json_t *aliases = aliases_of(j);
	enum err e = commit_delete(&by, &j->spec.target);
	if (!e)
		j->result = json_pack("{s:o}", "deleted", ref_doc(&j->spec.target));
	if (j->result && json_array_size(aliases) > 0)
		(void)json_object_set(j->result, "aliases", aliases);
	json_decref(aliases);
	TRY(e);
	return j->result ? OK : ERR(NO_MEMORY, "no memory for the result");
}
