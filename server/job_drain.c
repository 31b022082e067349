/* job_drain.c: waits until a run has no save under way: what a host does before it lets a training's processes go (Slurm's epilog,
 * Kubernetes' preStop). Saves that are made meanwhile are waited for, too. */
#include "base/clock.h"
#include "base/jval.h"
#include "base/mem.h"
#include "server/job_impl.h"
#include "server/parts.h"
#include "server/runs.h"

enum { SHOWN_MAX = 1000 };

struct drain {
	struct server *server;
	char *storage, *run;
	int64_t end_ms;              /* monotone clock */
	json_t *saves;               /* {"id","name","state"} of each that was under way */
	job_drained_fn fn;
	void *user;
};

static void finish(struct drain *d, enum err e, bool drained)
{
	json_t *save;
	size_t i;

	json_array_foreach(d->saves, i, save) {
		struct job *j;
		if (job_find(d->server, str_of(json_string_value(json_object_get(save, "id"))), &j) != OK)
			err_clear(); /* its record is gone: it stays as it was seen */
		else if (json_object_set_new(save, "state", json_string(job_state_text(j->state))) != 0)
			e = ERR(NO_MEMORY, "cannot tell of the saves");
	}
	d->fn(d->user, e, drained, d->saves);
	json_decref(d->saves);
	mem_free(d->storage);
	mem_free(d->run);
	mem_free(d);
}

static bool is_under_way(const struct drain *d, const struct job *j)
{
	const struct ref *target = &j->spec.target;

	return j->kind == JOB_SAVE && !j->dry_run && j->in_journal && !job_state_ended(j->state) && str_is(target->storage, d->storage) &&
	       str_is(run_of(target->name.p), d->run);
}

static FALLIBLE enum err note(struct drain *d, const struct job *j)
{
	json_t *save;
	size_t i;

	json_array_foreach(d->saves, i, save)
		if (strcmp(json_string_value(json_object_get(save, "id")), j->id) == 0)
			return OK;
	if (json_array_size(d->saves) >= SHOWN_MAX)
		return OK;
	save = json_pack("{s:s, s:s, s:s}", "id", j->id, "name", j->spec.target.name.p, "state", job_state_text(j->state));
	return json_array_append_new(d->saves, save) == 0 ? OK : ERR(NO_MEMORY, "cannot tell of the saves");
}

static void look(void *user, enum err e)
{
	struct drain *d = user;
	int64_t left = d->end_ms - clock_mono_ms();
	const struct job *next = NULL;

	for (const struct job *j = d->server->jobs->live; j && !e; j = j->live_next)
		if (is_under_way(d, j)) {
			e = note(d, j);
			next = j;
		}
	if (e || !next || left <= 0)
		finish(d, e, !next);
	else
		job_wait(d->server, str_of(next->id), left, look, d);
}

void job_drain(struct server *s, struct str storage, struct str run, int64_t wait_ms, job_drained_fn fn, void *user)
{
	struct drain *d = mem_sure(sizeof *d);

	*d = (struct drain){ .server = s, .end_ms = clock_mono_ms() + wait_ms, .fn = fn, .user = user, .saves = json_array(),
			     .storage = mem_strndup(storage.p, storage.n), .run = mem_strndup(run.p, run.n) };
	loop_later(s->loop, look, d, d->saves && d->storage && d->run ? OK : ERR(NO_MEMORY, "cannot wait for a run"));
}
