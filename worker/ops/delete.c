/* delete.c: a checkpoint goes to trash in one step, and is then removed (see commit.c). */
#include "session/job.h"
#include "store/commit.h"

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
	TRY(commit_delete(&by, &j->spec.target));
	j->result = json_pack("{s:o}", "deleted", ref_doc(&j->spec.target));
	return j->result ? OK : ERR(NO_MEMORY, "no memory for the result");
}
