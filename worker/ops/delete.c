/* delete.c: a checkpoint goes in one step, for good or into the storage's trash (see commit.h, kept_trash.h). */
#include "base/jval.h"
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

static const char *label_of(const struct job *j, const char *key)
{
	for (size_t i = 0; i < j->spec.labels.n; i++)
		if (str_is(j->spec.labels.v[i].left, key))
			return j->spec.labels.v[i].right.p;
	return NULL;
}

/* Tells under which id the checkpoint lies in the trash, and until when. */
static void put_trash(struct job *j, const char *about)
{
	CLEANUP(jval_drop) json_t *doc = NULL;

	if (jval_parse(str_of(about), &doc))
		err_clear();
	(void)json_object_set_new(j->result, "trash", json_pack("{s:s, s:O*}", "id", j->id, "until", json_object_get(doc, "until")));
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
	const struct commit_removal how = { .only_if = &j->spec.only_if, .trash_ms = j->spec.trash_ms, .policy = label_of(j, "policy"),
					    .why = label_of(j, "why") };
	struct commit_removed removed;
	json_t *aliases = aliases_of(j);
	enum err e = commit_delete(&by, &j->spec.target, &how, &removed);
	if (!e)
		j->result = json_pack("{s:o, s:I}", "deleted", ref_doc(&j->spec.target), "bytes", (json_int_t)removed.bytes);
	if (!e && removed.about)
		put_trash(j, removed.about);
	mem_free(removed.about);
	if (j->result && json_array_size(aliases) > 0)
		(void)json_object_set(j->result, "aliases", aliases);
	json_decref(aliases);
	TRY(e);
	return j->result ? OK : ERR(NO_MEMORY, "no memory for the result");
}
