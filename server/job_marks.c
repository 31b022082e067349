/* job_marks.c: the hold and the alias that a save asks for with its request (options.hold, options.alias).
 *
 * They are put between the commit and the job's end: whoever sees the job succeeded, or is told of the checkpoint, finds them there. The
 * job is not ended in the journal before, so a daemon that dies in between finds the commit again, and puts them then. They lie beside
 * the checkpoint (store/notes.h, store/aliases.h), where a look-up worker writes them. A storage that does not answer is asked again a few
 * times; what cannot be put is a warning of the job, which has saved its checkpoint all the same. */
#include <stdio.h>
#include <unistd.h>

#include "base/log.h"
#include "base/mem.h"
#include "server/errdoc.h"
#include "server/job_impl.h"
#include "server/lookup.h"
#include "server/parts.h"
#include "server/runs.h"
#include "server/service_clock.h"

enum { TRIES = 5, PAUSE_MS = 1000 };

enum mark { MARK_HOLD, MARK_ALIAS, MARKS };

struct marking {
	struct job *job;
	enum mark mark;
	int tries;
	void (*done)(struct job *j);
	struct loop_timer *timer;
};

static struct str wish(const struct job *j, enum mark mark)
{
	return mark == MARK_ALIAS ? j->spec.alias : j->spec.hold;
}

/* NULL: no memory. */
static json_t *question(const struct job *j, enum mark mark)
{
	const struct ref *target = &j->spec.target;
	struct principal who = job_owner(j);
	struct str run = run_of(target->name.p);
	char since[CLOCK_TEXT_MAX];

	if (mark == MARK_HOLD)
		return json_pack("{s:s, s:s, s:s, s:I, s:b, s:{s:I, s:s, s:s}}", "op", "hold", "storage", target->storage.p, "name",
				 target->name.p, "uid", (json_int_t)who.uid, "admin", who.admin, "hold", "owner", (json_int_t)who.uid,
				 "reason", j->spec.hold.p, "since", clock_text(clock_wall_ms(), since));
	return json_pack("{s:s, s:s, s:s%, s:s, s:s, s:I, s:b}", "op", "aliases", "storage", target->storage.p, "run", run.p, run.n,
			 "alias", j->spec.alias.p, "name", target->name.p, "uid", (json_int_t)who.uid, "admin", who.admin);
}

static void next(struct marking *m);

static void on_pause_over(void *user)
{
	struct marking *m = user;

	m->timer = NULL;
	next(m);
}

static void warn(const struct job *j, enum mark mark)
{
	char detail[ERR_TEXT_MAX + 64];

	if (mark == MARK_HOLD)
		snprintf(detail, sizeof detail, "the checkpoint is not held: %s", err_last()->text);
	else
		snprintf(detail, sizeof detail, "the alias was not moved: %s", err_last()->text);
	log_warn("a save's wish could not be met", "job", j->id, "why", detail, NULL);
	errdoc_warn(j->result, mark == MARK_HOLD ? "not_held" : "alias_not_moved", detail);
}

static void on_answer(void *user, enum err e, const json_t *, int *)
{
	struct marking *m = user;
	struct job *j = m->job;

	if (e == ERR_DRAINING) { /* the next daemon ends the job */
		mem_free(m);
		return;
	}
	if (e && err_retryable(e) && ++m->tries < TRIES) {
		loop_timer_start(j->server->loop, PAUSE_MS, on_pause_over, m, &m->timer);
		return;
	}
	if (e)
		warn(j, m->mark);
	else
		(void)json_object_set_new(j->result, m->mark == MARK_HOLD ? "hold" : "alias", json_string(wish(j, m->mark).p));
	m->mark++;
	m->tries = 0;
	next(m);
}

static void next(struct marking *m)
{
	struct job *j = m->job;

	while (m->mark < MARKS && !wish(j, m->mark).n)
		m->mark++;
	if (m->mark == MARKS) {
		void (*done)(struct job *) = m->done;
		mem_free(m);
		done(j);
		return;
	}
	json_t *q = question(j, m->mark);
	if (q)
		lookup_ask(j->server->lookups, j->spec.target.storage.p, q, NULL, 0, on_answer, m);
	else
		loop_timer_start(j->server->loop, PAUSE_MS, on_pause_over, m, &m->timer);
}

bool job_marks_put(struct job *j, void (*done)(struct job *j))
{
	bool leads = !j->spec.hosts.id.p || (!j->spec.hosts.part && j->spec.hosts.index == 0);

	if (j->marked || j->kind != JOB_SAVE || !leads || (!j->spec.hold.n && !j->spec.alias.n))
		return false;
	struct marking *m = mem_sure(sizeof *m);
	*m = (struct marking){ .job = j, .done = done };
	j->marked = true;
	next(m);
	return true;
}
