/* gang.c: see gang.h.
 *
 * One run, seen from here: JOB to the leader; its RUN is relayed with the segments to the others; when all others are DONE the leader
 * hears PEERS_DONE; the leader's DONE is the run's end. The first failure counts: it cancels the rest, and the run ends when
 * everyone who was asked has answered, so that a gang that stays warm is really idle.
 *
 *   STARTING ──all said HELLO──► IDLE ──JOB──► BUSY ──all answered──► IDLE
 *        └──────── a worker died, or would not answer: ENDING (all killed) ────► gone when the last process is reaped */
#include "server/gang.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/list.h"
#include "base/log.h"
#include "base/mem.h"
#include "base/vec.h"
#include "server/service_clock.h"
#include "server/config.h"
#include "server/errdoc.h"
#include "server/gang_rendezvous.h"
#include "server/loop.h"
#include "server/metrics.h"
#include "server/storage.h"
#include "server/worker.h"

enum { CANCEL_MS = 10000, ENDING_MS = 5000, NOTICED_FDS_MAX = 200000, RUN_FDS_MAX = 16, STILL_LOOKS = 3 };

struct member {
	struct worker *worker;              /* NULL: gone */
	bool ready, asked, answered;
	int64_t heard_ms;                   /* a frame of this run, or its beginning; service time */
	uint32_t still;                     /* gang_hangs() calls in a row that found it where it was */
};

struct gang {
	struct gang *next;
	struct gangs *all;
	enum gang_state state;
	char key[GANG_ROOTS_MAX * GANG_ROOT_TEXT];
	bool network, device;
	struct member *members;
	uint32_t count, alive, ready;
	struct loop_timer *timer;           /* idle, cancel or ending: one at a time */
	/* the run; ops is NULL without one */
	const struct gang_ops *ops;
	void *user;
	char job[27];
	uint64_t generation;
	json_t *body, *result, *problem;    /* JOB's; the leader's DONE; the FAILED that failed the run */
	int *fds;
	uint32_t fd_count;
	struct gang_rendezvous meet;
	struct loop_timer *rendezvous_timer;
	bool sealed;                        /* said, or to be said when the run begins */
	bool cancelled, peers_told, lost;   /* lost: a worker ended unasked */
	int64_t trash_ms;                   /* for so long the leader removed what jobs had replaced, after the last of them */
	enum err failed;
	struct err_info info;
};

struct gangs {
	struct gang_parts parts;
	struct gang *first;
	uint64_t dropped_frames;
	bool noted, seccomp;
	bool warned;                        /* a worker that should be confined is not */
	char sandbox[16], unconfined[200];  /* the weakest of the workers without a device; why it is none */
	int landlock;
	char engine[16];
};

/* The legal moves of a gang, by the picture above. */
static const unsigned moves[GANG_STATES] = {
	[GANG_STARTING] = 1u << GANG_BUSY | 1u << GANG_ENDING,
	[GANG_IDLE] = 1u << GANG_BUSY | 1u << GANG_ENDING,
	[GANG_BUSY] = 1u << GANG_IDLE | 1u << GANG_ENDING,
};

bool gang_may_move(enum gang_state from, enum gang_state to)
{
	return moves[from] >> to & 1;
}

static void gang_move(struct gang *g, enum gang_state to)
{
	must(gang_may_move(g->state, to));
	g->state = to;
}

/* problem: the worker's document, NULL: the error is the gang's own. The first error counts. */
static void set_problem(struct gang *g, enum err e, const json_t *problem)
{
	if (g->failed && g->failed != ERR_CANCELLED)
		return;
	g->failed = e;
	g->info = *err_last();
	json_decref(g->problem);
	g->problem = json_incref((json_t *)(uintptr_t)problem);
}

static void set_failed(struct gang *g, enum err e)
{
	set_problem(g, e, NULL);
}

static void drop_run(struct gang *g)
{
	for (uint32_t i = 0; i < g->fd_count; i++)
		close(g->fds[i]);
	mem_free(g->fds);
	json_decref(g->body);
	json_decref(g->result);
	json_decref(g->problem);
	gang_rendezvous_drop(&g->meet);
	loop_timer_stop(&g->rendezvous_timer);
	g->fds = NULL;
	g->fd_count = 0;
	g->body = g->result = g->problem = NULL;
	g->ops = NULL;
	g->job[0] = '\0';
}

static void free_gang(struct gang *g)
{
	list_remove(&g->all->first, g);
	for (uint32_t i = 0; i < g->count; i++)
		if (g->members[i].worker)
			worker_disown(g->members[i].worker);
	loop_timer_stop(&g->timer);
	drop_run(g);
	mem_free(g->members);
	mem_free(g);
}

/* Tells the owner; the gang itself may be gone before that. */
static void end_run(struct gang *g, bool gone)
{
	const struct gang_ops *ops = g->ops;
	void *user = g->user;
	enum err e = g->failed;
	struct err_info info = g->info;
	CLEANUP(json_decrefp) json_t *said = json_incref(e ? g->problem : g->result);

	if (gone)
		free_gang(g);
	else
		drop_run(g);
	if (e)
		err_restore(&info);
	if (ops)
		ops->ended(user, e, said);
}

/* Hands the job's left-overs (the old checkpoint of an overwrite) to the sweep: the gang that would remove them is gone. */
static void sweep_roots(const struct gang *g)
{
	char name[STORAGE_NAME_MAX + 1];

	for (const char *p = g->key; *p; p += strcspn(p, ",") + 1) {
		snprintf(name, sizeof name, "%.*s", (int)strcspn(p, "="), p);
		g->all->parts.storage_soiled(g->all->parts.user, name);
	}
}

static void on_idle_over(void *user)
{
	struct gang *g = user;

	g->timer = NULL;
	if (g->trash_ms > g->all->parts.config->gang_idle_ms)
		sweep_roots(g);
	free_gang(g);
}

static void become_idle(struct gang *g)
{
	loop_timer_stop(&g->timer);
	gang_move(g, GANG_IDLE);
	for (uint32_t i = 0; i < g->count; i++) {
		g->members[i].asked = g->members[i].answered = false;
		worker_set(g->members[i].worker, "idle", NULL);
	}
	loop_timer_start(g->all->parts.loop, g->all->parts.config->gang_idle_ms, on_idle_over, g, &g->timer);
}

/* ---- ending ---- */

static void on_ending_late(void *user)
{
	struct gang *g = user;

	g->timer = NULL;
	end_run(g, true); /* a process in an uninterruptible call: it can write only to its own attempt's staging */
}

static void become_ending(struct gang *g)
{
	if (g->state == GANG_ENDING)
		return;
	gang_move(g, GANG_ENDING);
	loop_timer_stop(&g->timer);
	for (uint32_t i = 0; i < g->count; i++)
		if (g->members[i].worker) {
			worker_set(g->members[i].worker, "ending", g->job);
			worker_kill(g->members[i].worker, OK);
		}
	loop_timer_start(g->all->parts.loop, ENDING_MS, on_ending_late, g, &g->timer);
}

void gang_abort(struct gang *g, enum err why)
{
	g->failed = OK;
	set_failed(g, why);
	become_ending(g);
}

static void on_worker_ended(struct worker *w, enum err e)
{
	struct gang *g = w->owner;

	if (g->state != GANG_ENDING) {
		set_failed(g, e == ERR_WORKER_LOST && g->ops && g->count > 1 ? err_at_rank(e, w->index) : e);
		g->lost = true;
	}
	g->members[w->index].worker = NULL;
	g->alive--;
	become_ending(g);
	if (g->alive > 0)
		return;
	if ((g->lost || g->trash_ms > 0) && !*g->all->parts.draining)
		sweep_roots(g);
	end_run(g, true);
}

/* ---- the run ---- */

static void ask(struct gang *g, uint32_t i, uint16_t type, const json_t *body, const int *fds, uint32_t n)
{
	g->members[i].asked = true;
	g->members[i].answered = false;
	g->members[i].heard_ms = clock_service_ms();
	worker_set(g->members[i].worker, "busy", g->job);
	worker_send(g->members[i].worker, type, g->generation, body, fds, n);
}

static void begin_run(struct gang *g)
{
	loop_timer_stop(&g->timer);
	gang_move(g, GANG_BUSY);
	if (g->cancelled) {
		set_failed(g, ERR(CANCELLED, "cancelled before it began"));
		become_idle(g);
		end_run(g, false);
		return;
	}
	ask(g, 0, FRAME_JOB, g->body, g->fds, g->fd_count);
	if (g->sealed)
		worker_send(g->members[0].worker, FRAME_SEALED, g->generation, NULL, NULL, 0);
}

static void on_ready(struct worker *w, enum err e, const json_t *)
{
	struct gang *g = w->owner;

	gang_note_worker(g->all, w);
	if (e) {
		set_failed(g, e);
		become_ending(g);
		return;
	}
	g->members[w->index].ready = true;
	if (++g->ready == g->count && g->state == GANG_STARTING)
		begin_run(g);
}

static void on_cancel_late(void *user)
{
	struct gang *g = user;

	g->timer = NULL;
	log_warn("a gang did not answer a cancel", "job", g->job, NULL);
	set_failed(g, ERR(CANCELLED, "cancelled; workers that did not answer were killed"));
	become_ending(g);
}

void gang_give_up_silent(struct gang *g, int64_t ms)
{
	int64_t now = clock_service_ms(), longest = ms;
	uint32_t who = g->count;

	for (uint32_t i = 0; g->state == GANG_BUSY && i < g->count; i++) {
		const struct member *m = &g->members[i];
		if (!m->asked || m->answered || now - m->heard_ms <= longest)
			continue;
		longest = now - m->heard_ms;
		who = i;
	}
	if (who < g->count)
		gang_abort(g, err_at_rank(ERR(PEER_TIMEOUT, "worker %u of %u did not show itself in %jd ms", who, g->count, (intmax_t)longest),
					  who));
}

bool gang_hangs(struct gang *g)
{
	bool hangs = false;

	each(m, g->members, g->count) {
		if (!m->worker || !m->asked || m->answered)
			continue;
		m->still = worker_moved(m->worker) ? 0 : m->still + 1;
		hangs = hangs || m->still >= STILL_LOOKS;
	}
	return hangs;
}

/* Everyone who was asked and has not answered hears CANCEL once. */
static void cancel_rest(struct gang *g)
{
	for (uint32_t i = 0; i < g->count; i++)
		if (g->members[i].asked && !g->members[i].answered)
			worker_send(g->members[i].worker, FRAME_CANCEL, g->generation, NULL, NULL, 0);
	if (!g->timer)
		loop_timer_start(g->all->parts.loop, CANCEL_MS, on_cancel_late, g, &g->timer);
}

static bool all_answered(const struct gang *g, uint32_t from)
{
	for (uint32_t i = from; i < g->count; i++)
		if (g->members[i].asked && !g->members[i].answered)
			return false;
	return true;
}

static void after_answer(struct gang *g)
{
	bool peers = g->count > 1 && g->members[1].asked;

	if (all_answered(g, 0)) {
		if (!g->failed && g->cancelled && !g->result)
			set_failed(g, ERR(CANCELLED, "cancelled"));
		/* A root that is gone stays gone for those who hold it: another directory of its name may be there by now. */
		bool broken = g->failed && (err_blast(g->failed) == ERR_BLAST_GANG || g->failed == ERR_STORAGE_GONE);
		if (broken) {
			become_ending(g);
			return;
		}
		become_idle(g);
		end_run(g, false);
	} else if (g->failed) {
		cancel_rest(g);
	} else if (peers && !g->peers_told && all_answered(g, 1)) {
		g->peers_told = true;
		worker_send(g->members[0].worker, FRAME_PEERS_DONE, g->generation, NULL, NULL, 0);
	}
}

static void on_answer(struct gang *g, struct worker *w, bool done, const json_t *body)
{
	struct member *m = &g->members[w->index];

	if (!m->asked || m->answered) {
		worker_kill(w, ERR(PROTOCOL, "worker %s answered what it was not asked", w->id));
		return;
	}
	m->answered = true;
	if (!done) {
		enum err e = errdoc_restore(body);
		if (e == ERR_CANCELLED && g->failed)
			e = OK; /* an echo of our own cancel */
		if (e)
			set_problem(g, e, body);
	} else if (w->index == 0) {
		g->result = json_incref((json_t *)body);
		g->trash_ms = json_integer_value(json_object_get(body, "trash_ms"));
	}
	after_answer(g);
}

static void relay_run(struct gang *g, struct worker *w, const struct frame *f, const json_t *body)
{
	bool again = g->peers_told; /* a job of several runs, one after the other */

	if (w->index != 0 || f->fd_count < 1 || f->fd_count > RUN_FDS_MAX || g->members[0].answered ||
	    (g->count > 1 && g->members[1].asked && !again)) {
		worker_kill(w, ERR(PROTOCOL, "worker %s sent a RUN that does not fit", w->id));
		return;
	}
	if (g->failed || g->cancelled)
		return;
	CLEANUP(mem_free_ptr) int *fds = mem_zalloc((size_t)f->fd_count + g->fd_count, sizeof *fds);
	CLEANUP(json_decrefp) json_t *copy = json_copy((json_t *)body);
	if (!fds || json_object_set_new(copy, "segments", json_integer(g->fd_count)) != 0) {
		worker_kill(w, ERR(NO_MEMORY, "cannot relay a run"));
	} else {
		memcpy(fds, f->fds, f->fd_count * sizeof *fds); /* the run, and its spools */
		for (uint32_t i = 0; i < g->fd_count; i++)
			fds[f->fd_count + i] = g->fds[i];
		g->peers_told = false;
		for (uint32_t i = 1; i < g->count; i++)
			ask(g, i, FRAME_RUN, copy, fds, f->fd_count + g->fd_count);
	}
}

/* ---- meeting ---- */

static void on_rendezvous_late(void *user)
{
	struct gang *g = user;
	int64_t missing = gang_rendezvous_missing(&g->meet);

	g->rendezvous_timer = NULL;
	gang_rendezvous_drop(&g->meet);
	set_failed(g, err_at_rank(ERR(PEER_TIMEOUT, "worker %jd did not join the group in %jd ms", (intmax_t)missing,
				      (intmax_t)g->all->parts.config->comm_deadline_ms), missing));
	cancel_rest(g);
}

static void take_rendezvous(struct gang *g, struct worker *w, const json_t *body)
{
	CLEANUP(json_decrefp) json_t *all = NULL;
	bool first = !g->meet.all;

	if (g->failed || g->cancelled)
		return; /* all have heard CANCEL */
	if (!g->members[w->index].asked || g->members[w->index].answered) {
		worker_kill(w, ERR(PROTOCOL, "worker %s meets without a run", w->id));
		return;
	}
	if (w->index == 0 && g->ops->meet && g->ops->meet(g->user, body))
		return;
	enum err e = gang_rendezvous_take(&g->meet, w->index, g->count, body, &all);
	if (e) {
		worker_kill(w, e);
		return;
	}
	if (!all && first)
		loop_timer_start(g->all->parts.loop, g->all->parts.config->comm_deadline_ms, on_rendezvous_late, g, &g->rendezvous_timer);
	if (!all)
		return;
	loop_timer_stop(&g->rendezvous_timer);
	for (uint32_t i = 0; i < json_array_size(json_object_get(all, "all")); i++)
		worker_send(g->members[i].worker, FRAME_RENDEZVOUS_ALL, g->generation, all, NULL, 0);
}

static void on_frame(struct worker *w, const struct frame *f, const json_t *body)
{
	struct gang *g = w->owner;
	bool leads = w->index == 0;

	if (f->type == FRAME_IO) {
		storage_count_io(g->all->parts.storages, body);
		if (g->state == GANG_BUSY && g->ops)
			g->ops->moved(g->user, body);
		return;
	}
	if (g->state != GANG_BUSY || f->generation != g->generation) {
		g->all->dropped_frames++;
		metrics_add(g->all->parts.metrics, "dcpd_stale_frames_total", "", 1);
		return;
	}
	g->members[w->index].heard_ms = clock_service_ms();
	if (f->type == FRAME_DONE || f->type == FRAME_FAILED)
		on_answer(g, w, f->type == FRAME_DONE, body);
	else if (f->type == FRAME_RUN)
		relay_run(g, w, f, body);
	else if (f->type == FRAME_RENDEZVOUS)
		take_rendezvous(g, w, body);
	else if (f->type == FRAME_PROGRESS && leads)
		g->ops->progress(g->user, body);
	else if (f->type == FRAME_STATE && leads)
		g->ops->state(g->user, body);
	else if (f->type == FRAME_WANT_SEGMENTS && leads)
		g->ops->want_segments(g->user, body);
	else if (f->type == FRAME_WANT_COMMIT && leads && !g->failed && !g->cancelled)
		g->ops->want_commit(g->user);
	else if (f->type != FRAME_PROGRESS && (f->type != FRAME_WANT_COMMIT || !leads))
		worker_kill(w, ERR(PROTOCOL, "worker %s sent a message of type %u", w->id, f->type));
}

static const struct worker_ops worker_calls = { .ready = on_ready, .frame = on_frame, .ended = on_worker_ended };

/* ---- starting ---- */

static FALLIBLE enum err keep_fds(struct gang *g, const int *fds, uint32_t n)
{
	if (n > NOTICED_FDS_MAX - g->fd_count)
		return ERR(LIMIT_EXCEEDED, "a job cannot have more than %d segments", NOTICED_FDS_MAX);
	int *grown = mem_grow(g->fds, g->fd_count + n, sizeof *grown);
	NEED(grown, "cannot keep a job's segments");
	g->fds = grown;
	for (uint32_t i = 0; i < n; i++) {
		int fd = dup(fds[i]);
		if (fd < 0)
			return ERR_SYS(SYSTEM, "cannot keep a job's segments");
		g->fds[g->fd_count++] = fd;
	}
	return OK;
}

static FALLIBLE enum err start_workers(struct gang *g, const struct worker_root *roots, uint32_t root_count)
{
	struct worker_spec spec = { .role = "gang", .count = g->count, .roots = roots, .root_count = root_count,
				    .memory_bytes = g->all->parts.config->job_memory / g->count, .network = g->network,
				    .device = g->device, .ops = &worker_calls, .owner = g };

	for (uint32_t i = 0; i < g->count; i++) {
		spec.index = i;
		TRY(worker_start(g->all->parts.workers, &spec, &g->members[i].worker));
		g->alive++;
	}
	return OK;
}

static FALLIBLE enum err new_gang(struct gangs *all, const char *key, const char *const *storages, uint32_t n,
				  const struct gang_run *run, struct gang **out)
{
	struct worker_root roots[GANG_ROOTS_MAX];
	uint32_t busy = 0;

	for (const struct gang *g = all->first; g; g = g->next)
		busy++;
	if (busy >= GANGS_MAX)
		return ERR(TOO_MANY_JOBS, "%u gangs of workers are running", busy);
	for (uint32_t i = 0; i < n; i++) {
		struct storage *st;
		TRY(storage_find(all->parts.storages, str_of(storages[i]), &st));
		storage_root(st, &roots[i]);
	}
	struct gang *g = mem_zalloc(1, sizeof *g);
	NEED(g, "cannot make a gang");
	g->all = all;
	g->network = run->network;
	g->device = run->device;
	g->count = (uint32_t)all->parts.config->workers;
	g->members = mem_zalloc(g->count, sizeof *g->members);
	snprintf(g->key, sizeof g->key, "%s", key);
	g->next = all->first;
	all->first = g;
	enum err e = g->members ? start_workers(g, roots, n) : ERR(NO_MEMORY, "cannot make a gang");
	if (e) {
		CLEANUP(err_restore) struct err_info info = *err_last();
		g->count = g->members ? g->count : 0;
		free_gang(g);
		return e;
	}
	*out = g;
	return OK;
}

static FALLIBLE enum err take_gang(struct gangs *all, const char *const *storages, uint32_t n, const struct gang_run *run,
				   struct gang **out)
{
	char key[sizeof(*out)->key] = "";

	if (n > GANG_ROOTS_MAX)
		return ERR(LIMIT_EXCEEDED, "a job cannot use more than %d storages", GANG_ROOTS_MAX);
	for (uint32_t i = 0; i < n; i++) { /* with the paths: a name may come back with another */
		struct storage *st;
		TRY(storage_find(all->parts.storages, str_of(storages[i]), &st));
		size_t used = strlen(key);
		snprintf(key + used, sizeof key - used, "%s=%08x,", st->name, (unsigned)str_hash(str_of(st->path)));
	}
	for (struct gang *g = all->first; g; g = g->next)
		if (g->state == GANG_IDLE && strcmp(g->key, key) == 0 && g->network == run->network && g->device == run->device) {
			*out = g;
			return OK;
		}
	return new_gang(all, key, storages, n, run, out);
}

FALLIBLE enum err gang_start_run(struct gangs *all, const char *const *storages, uint32_t storage_count,
				 const struct gang_run *run, struct gang **out)
{
	struct gang *g;

	TRY(take_gang(all, storages, storage_count, run, &g));
	enum err e = keep_fds(g, run->fds, run->fd_count);
	if (e) {
		CLEANUP(err_restore) struct err_info info = *err_last();
		free_gang(g);
		return e;
	}
	g->ops = run->ops;
	g->user = run->user;
	g->generation = run->generation;
	g->body = json_incref((json_t *)run->body);
	g->failed = OK;
	g->cancelled = g->peers_told = g->sealed = false;
	snprintf(g->job, sizeof g->job, "%s", run->job);
	*out = g;
	if (g->state == GANG_IDLE)
		begin_run(g); /* only sends: the answers come through the loop */
	return OK;
}

void gang_send_segments(struct gang *g, const json_t *body, const int *fds, uint32_t fd_count)
{
	if (g->state != GANG_BUSY || g->failed || g->cancelled)
		return;
	enum err e = keep_fds(g, fds, fd_count);
	if (e)
		gang_abort(g, e);
	else
		worker_send(g->members[0].worker, FRAME_SEGMENTS, g->generation, body, fds, fd_count);
}

void gang_sealed(struct gang *g)
{
	g->sealed = true;
	if (g->state == GANG_BUSY && !g->members[0].answered)
		worker_send(g->members[0].worker, FRAME_SEALED, g->generation, NULL, NULL, 0);
}

void gang_met(struct gang *g, const json_t *body)
{
	if (g->state == GANG_BUSY && !g->members[0].answered)
		worker_send(g->members[0].worker, FRAME_RENDEZVOUS_ALL, g->generation, body, NULL, 0);
}

void gang_commit_ok(struct gang *g)
{
	if (g->state == GANG_BUSY)
		worker_send(g->members[0].worker, FRAME_COMMIT_OK, g->generation, NULL, NULL, 0);
}

void gang_cancel(struct gang *g)
{
	if (g->cancelled)
		return;
	g->cancelled = true;
	if (g->state == GANG_BUSY)
		cancel_rest(g);
}

void gang_fail(struct gang *g, enum err why)
{
	if (g->state != GANG_BUSY) {
		gang_abort(g, why);
		return;
	}
	set_failed(g, why);
	cancel_rest(g);
}

/* ---- all of them ---- */

void gang_note_worker(struct gangs *gs, const struct worker *w)
{
	bool confined = strcmp(w->sandbox, "none") != 0;

	if (!confined && !w->device && !gs->warned) {
		gs->warned = true;
		log_warn("workers are not confined to the storages: this kernel has no Landlock, or it is denied to dcpd", "uid",
			 geteuid() == 0 ? "0" : "dcpd's own", "mount_namespace", w->unconfined, "advice", "run dcpd as a user that owns only "
			 "the storages, or enable Landlock (lsm= on the kernel's command line, the container's seccomp profile)", NULL);
	}
	if (!gs->warned && confined && strcmp(gs->sandbox, w->sandbox) != 0)
		log_info("workers are confined to the storages", "sandbox", w->sandbox, NULL);
	gs->noted = true;
	if (!w->device) {
		snprintf(gs->sandbox, sizeof gs->sandbox, "%s", gs->warned ? "none" : w->sandbox);
		if (!confined)
			snprintf(gs->unconfined, sizeof gs->unconfined, "%s", w->unconfined);
	}
	gs->landlock = w->landlock;
	gs->seccomp = w->seccomp;
	snprintf(gs->engine, sizeof gs->engine, "%s", w->engine);
}

const char *gang_unconfined(const struct gangs *gs)
{
	return gs->warned ? gs->unconfined : NULL;
}

FALLIBLE enum err gang_put_capabilities(const struct gangs *gs, struct buf *out)
{
	if (!gs->noted) {
		buf_puts(out, "{\"engine\":null,\"sandbox\":null,\"landlock\":null,\"seccomp\":null}");
		return buf_status(out);
	}
	buf_json_member(out, "{\"engine\":", str_of(gs->engine));
	buf_puts(out, ",\"sandbox\":");
	if (gs->sandbox[0])
		buf_json_str(out, str_of(gs->sandbox));
	else
		buf_puts(out, "null"); /* only workers with a device have started */
	buf_printf(out, ",\"landlock\":%d,\"seccomp\":%s}", gs->landlock, gs->seccomp ? "true" : "false");
	return buf_status(out);
}

FALLIBLE enum err gangs_new(const struct gang_parts *parts, struct gangs **out)
{
	*out = mem_zalloc(1, sizeof **out);
	NEED(*out, "cannot keep gangs");
	(*out)->parts = *parts;
	return OK;
}

void gangs_free(struct gangs *gs)
{
	if (!gs)
		return;
	while (gs->first) {
		gs->first->ops = NULL;
		free_gang(gs->first);
	}
	mem_free(gs);
}
