/* delete.c: a checkpoint goes to trash in one step, and is then removed (see commit.c). */
#include "session/job.h"
#include "store/commit.h"

enum err delete_job(struct job *j)
{
	const json_t *target = json_object_get(j->spec, "target");
	const struct store_job by = job_in_store(j);

	if (j->dry_run) {
		j->result = json_pack("{s:O}", "target", (json_t *)(uintptr_t)target);
		return j->result ? OK : ERR(NO_MEMORY, "no memory for the plan");
	}
	TRY(job_state(j, "running", "delete", NULL, 0));
	TRY(job_send(j, FRAME_WANT_COMMIT, STR("{}"), NULL, 0));
	TRY(job_wait(j, &j->commit_ok));
	TRY(commit_delete(&by, target));
	j->result = json_pack("{s:O}", "deleted", (json_t *)(uintptr_t)target);
	return j->result ? OK : ERR(NO_MEMORY, "no memory for the result");
}
