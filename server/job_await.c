/* job_await.c: saves that are made before their generation is sealed ("await_seal").
 *
 * So a trainer's rank 0 can ask for the save while the others still copy: nobody waits for the last seal but the job. It waits outside
 * its lane, with no workers, and holds nothing up. With the last seal it has its source as every other job, and queues.
 *
 * If the ranks announce their images while they fill them, it queues as soon as all have, and its workers read what is there
 * (worker/runner/gate.h) while the rest is copied. It commits after the last seal only. Where the bytes come so slowly that workers would
 * stand and wait, it gives them back and is from then on as if nothing had been announced. */
#include "base/log.h"
#include "server/service_clock.h"
#include "server/job_impl.h"
#include "server/parts.h"

enum { AWAIT_MS = 600000 };

/* The source, or the one part of a planned save, whose list is sealed already. */
static struct state_dict_use **awaited(struct job *j)
{
	return j->part_uses ? &j->part_uses[0] : &j->source_use;
}

/* Known after a restart, too: such a save is not begun again. */
static void note_ring(struct job *j)
{
	if (j->spec.ring || !state_dict_use_has_ring(*awaited(j)))
		return;
	j->spec.ring = true;
	if (json_object_set_new(json_object_get(j->request, "source"), "ring", json_true()) != 0)
		log_err("cannot note that a save reads rings", "job", j->id, NULL);
	if (j->in_journal && j->step != STEP_ENDING)
		job_write(j, NULL, NULL);
}

static void on_filling(struct job *j, struct state_dict_use *use)
{
	*awaited(j) = use;
	j->space_needed = job_use_bytes(use);
	note_ring(j);
	if (j->step == STEP_AWAITING)
		job_queue(j);
}

static void on_all_sealed(struct job *j, struct state_dict_use *use)
{
	if (use) {
		*awaited(j) = use;
		j->space_needed = job_use_bytes(use);
		note_ring(j);
	}
	j->await = NULL;
	job_snapshotted(j);
	j->alive_ms = clock_service_ms();
	job_changed(j);
	if (j->in_journal)
		j->server->hooks->snapshotted(j);
	if (j->step == STEP_AWAITING)
		job_queue(j);
	else if (j->step == STEP_ON_GANG)
		gang_sealed(j->gang);
	if (j->in_journal && j->step != STEP_ENDING) /* else its row is on its way */
		job_write(j, NULL, NULL);
}

static void on_lost(struct job *j, enum err e)
{
	j->await = NULL;
	j->lost = *err_last();
	if (j->step == STEP_ON_GANG) {
		if (!j->cancel_wanted)
			gang_fail(j->gang, e);
	} else if (j->step == STEP_WAITING || j->step == STEP_AWAITING) {
		if (j->lane)
			job_lane_take_out(j);
		loop_timer_stop(&j->timer);
		job_fail(j, e);
	} /* else it is being made, recovered, or ending: job_queue will see it, if it comes to that */
}

static void on_news(void *user, enum state_dict_news news, struct state_dict_use *use, enum err e)
{
	struct job *j = user;

	if (news == NEWS_FILLING)
		on_filling(j, use);
	else if (news == NEWS_SEALED)
		on_all_sealed(j, use);
	else if (news == NEWS_LOST)
		on_lost(j, e);
	else if (j->step == STEP_AWAITING)
		job_show_missing(j);
}

static FALLIBLE enum err begin(struct job *j, const struct principal *who)
{
	const struct ref *source = j->spec.parts.n ? &j->spec.parts.v[0] : &j->spec.source;
	int64_t timeout_s = j->spec.await_timeout_s;
	struct state_dict_wish w = { .who = who, .name = source->name, .generation = source->generation, .job = j->id,
				     .timeout_ms = timeout_s > 0 ? timeout_s * 1000 : AWAIT_MS, .fn = on_news, .user = j };

	must(!j->await && !j->source_use);
	if (j->spec.parts.n)
		TRY(job_use_list(j));
	j->lost = (struct err_info){ 0 };
	j->resting = false;
	enum err e = state_dict_await(j->server->state_dicts, &w, awaited(j), &j->await);
	if (e)
		j->lost = *err_last();
	else if (!j->await && !j->snapshotted_ms) /* sealed, and the coordinator ended before that was in the job's row */
		job_snapshotted(j);
	return e;
}

/* Also if the last seal came while its workers were giving up: what is lost fails, and nothing else. */
bool job_await_rests(struct job *j)
{
	if (!j->streamed || j->lost.code || j->cancel_wanted)
		return false;
	log_warn("a save waits for the seals without its workers", "job", j->id, NULL);
	j->resting = true;
	return true;
}

enum err job_ring_lost(enum err e)
{
	struct err_info why = *err_last();

	if (!e)
		return ERR(RING_LOST, "the daemon was restarted while the save read rings, which cannot be read again: save anew");
	return ERR(RING_LOST, "the save broke off while it read rings, which cannot be read again: save anew (%s: %s)", err_code_name(e),
		   why.text);
}

FALLIBLE enum err job_take_uses(struct job *j)
{
	struct principal who = job_owner(j);

	if (j->spec.ring)
		return job_ring_lost(OK);

	TRY(job_await_wanted(j) ? begin(j, &who) : job_use_sources(j));
	return job_use_others(j);
}
