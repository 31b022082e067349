/* server.c: the coordinator put together, in the order in which its parts need each other, and taken apart the other way round.
 *
 * Start: lock the state dir, open the journal, make sure that no worker of a killed daemon is left, take up state dicts, sweep
 * segments, take up jobs. Nothing here waits for a storage: what is on one is asked when the loop runs. */
#include "server/server.h"

#include <event2/event.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/jtext.h"
#include "base/log.h"
#include "base/mem.h"
#include "server/service_clock.h"
#include "server/chain.h"
#include "server/cluster.h"
#include "server/config.h"
#include "server/descriptors.h"
#include "server/device_copy.h"
#include "server/device_image.h"
#include "server/devices.h"
#include "server/errdoc.h"
#include "server/events.h"
#include "server/flusher.h"
#include "server/gang.h"
#include "server/gauges.h"
#include "server/job_impl.h"
#include "server/job_refs.h"
#include "server/journal.h"
#include "server/lookup.h"
#include "server/metrics.h"
#include "server/neighbours.h"
#include "server/parts.h"
#include "server/policy.h"
#include "server/runs.h"
#include "server/state_dict.h"
#include "server/storage.h"
#include "server/spread.h"
#include "server/sweep.h"
#include "server/tier.h"
#include "server/tracer.h"
#include "server/trash_care.h"
#include "server/unread.h"
#include "server/verdict.h"
#include "server/webhook.h"
#include "server/worker.h"

static FALLIBLE enum err make_dirs(const char *path)
{
	char part[CONFIG_PATH_MAX];

	for (const char *p = path + 1;; p++) {
		if (*p != '/' && *p != '\0')
			continue;
		snprintf(part, sizeof part, "%.*s", (int)(p - path), path);
		if (mkdir(part, *p ? 0755 : 0700) != 0 && errno != EEXIST)
			return ERR_SYS(CONFIG, "cannot make %s", part);
		if (!*p)
			return OK;
	}
}

enum { LOCK_WAIT_MS = 2000, LOCK_LOOK_MS = 5 };

/* A state directory has one daemon at a time: its lock goes with the daemon's process, however the process ends. A killed daemon may have
 * been about to start a worker: that worker has the lock until its exec, which a busy machine puts off. */
static FALLIBLE enum err lock_state_dir(const struct config *c, int *fd_out)
{
	int64_t until = clock_mono_ms() + LOCK_WAIT_MS;
	char path[CONFIG_PATH_MAX + 8];

	TRY(make_dirs(c->state_dir));
	snprintf(path, sizeof path, "%s/lock", c->state_dir);
	int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
	if (fd < 0)
		return ERR_SYS(CONFIG, "cannot open %s", path);
	while (flock(fd, LOCK_EX | LOCK_NB) != 0) {
		bool is_taken = errno == EWOULDBLOCK || errno == EINTR;
		enum err e = is_taken ? ERR_SYS(CONFIG, "another daemon uses %s", c->state_dir) : ERR_SYS(CONFIG, "cannot lock %s", path);
		if (!is_taken || clock_mono_ms() >= until) {
			close(fd);
			return e;
		}
		err_clear();
		nanosleep(&(struct timespec){ .tv_nsec = LOCK_LOOK_MS * 1000000 }, NULL);
	}
	*fd_out = fd;
	return OK;
}

static void first_probes(struct server *s)
{
	for (uint32_t i = 0; i < storage_count(s->storages); i++) {
		storage_probe(s->storages, s->lookups, storage_at(s->storages, i), NULL, NULL);
		sweep_storage(s->sweeps, storage_at(s->storages, i)->name);
	}
}

/* At once: perhaps only one directory hangs, such as a mount of its own. */
static void on_storage_hangs(void *user, struct storage *st)
{
	struct server *s = user;

	if (!st->probing)
		storage_probe(s->storages, s->lookups, st, NULL, NULL);
}

static void on_storage_soiled(void *user, const char *name)
{
	const struct server *s = user;

	sweep_storage(s->sweeps, name);
}

static void on_job_gone(struct job *j)
{
	sweep_after(j->server->sweeps, j);
}

static void on_job_ended(struct job *j)
{
	sweep_after(j->server->sweeps, j);
	if (j->verdict)
		policy_note_verdict(j->server, j->spec.source.storage.p, verdict_name_read(j), strcmp(j->verdict, "damaged") == 0);
	if (j->state == JOB_SUCCEEDED && !j->spec.only_if.is_given)
		policy_note(j->server, j->kind, &j->spec.target);
	if (j->spec.trash_ms)
		trash_care_changed(j->server, j->spec.target.storage.p);
	if (j->spec.delta && !j->dry_run)
		state_dict_update_ended(j->server, &(struct state_dict_updated){ j->spec.target.name, j->spec.source.generation,
										 j->state == JOB_SUCCEEDED, j->error, j->result });
	neighbours_ended(j);
	webhooks_wake(j->server);
	chains_wake(j->server, j->id);
	flushers_note(j->server->flushers, j);
	tracer_job_ended(j->server->tracer, j);
}

static void on_happens(struct server *s, struct journal_txn *t, const struct happening *h)
{
	webhooks_note(s, t, h);
	chains_note(s, t, h);
}

/* A checkpoint that is removed under conditions, as policies do, must be wanted by no job. */
static enum err may_commit(const struct job *j)
{
	if (!kind_is(j->kind, KIND_REMOVES) || !j->spec.only_if.is_given)
		return OK;
	if (job_target_is_wanted(j))
		return ERR(TARGET_BUSY, "%s stays: another job reads or writes it", j->target);
	return policy_check_removal(j->server, j->id, j->target);
}

static const struct server_hooks hooks = { .job_ended = on_job_ended, .job_recalled = neighbours_ended, .job_gone = on_job_gone,
					    .happens = on_happens,
					    .may_commit = may_commit, .job_noted = cluster_note_job,
					    .jobs_untold = cluster_untold, .confirm = cluster_confirm,
					    .compare = cluster_compare, .jobs_loaded = cluster_jobs_loaded,
					    .node_storage = cluster_storage, .ask_image = cluster_ask_image,
					    .find_replicas = cluster_find_replicas,
					    .replicas_enough = cluster_replicas_enough, .is_away = cluster_is_away,
					    .snapshotted = neighbours_snapshotted,
					    .spread_start = spread_start, .spread_meet = spread_meet };

/* With space again, slots that could not be freed become free, and jobs begin. */
static void on_journal_full(void *user)
{
	struct server *s = user;
	bool full = journal_may_write(s->journal) != OK;

	if (full) {
		log_err("no space for the journal", NULL);
	} else {
		log_info("there is space for the journal again: dcpd is not read-only any more", NULL);
		state_dicts_settle(s->state_dicts);
		job_lanes_wake(s);
	}
	events_emit(s->events, "daemon.state", NULL, json_pack("{s:s}", "state", full ? "degraded" : "ready"));
}

static FALLIBLE enum err build(struct server *s, struct event_base *base)
{
	s->base = base;
	s->started_ms = clock_wall_ms();
	TRY(lock_state_dir(s->config, &s->lock_fd));
	TRY(loop_new(base, &s->loop));
	TRY(metrics_new(&s->metrics));
	TRY(journal_open(s->config->journal_file, s->loop, &s->journal, &s->boot));
	journal_on_full(s->journal, on_journal_full, s);
	if (journal_may_write(s->journal) != OK)
		log_err("no space for the journal", NULL);
	clock_service_begin(journal_service_ms(s->journal));
	clock_wall_begin(journal_wall_ms(s->journal));
	TRY(events_new(s->loop, s->boot, &s->events));
	TRY(workers_new(&(struct worker_parts){ s->config, base, s->loop, s->journal, s->events, s->metrics }, &s->workers));
	TRY(unread_new(s->loop, &s->unread));
	TRY(storages_new(s->config, s->journal, s->events, &s->storages));
	TRY(gangs_new(&(struct gang_parts){ s->config, s->loop, s->metrics, s->storages, s->workers, &s->draining, on_storage_soiled, s },
		      &s->gangs));
	TRY(lookups_new(&(struct lookup_parts){ s->config, s->loop, s->storages, s->unread, s->workers, s->gangs, on_storage_hangs, s },
			&s->lookups));
	workers_sweep(s->workers);
	TRY(runs_new(s->journal, &s->runs));
	TRY(tiers_new(s->config, &s->tiers));
	TRY(policy_all_new(s));
	TRY(jobs_new(s));
	TRY(state_dicts_new(&(struct state_dict_parts){ s->config, s->loop, s->journal, s->events, s->metrics, s->lookups, s->unread,
							&s->draining }, &s->state_dicts));
	TRY(sweeps_new(&(struct sweep_parts){ s->loop, s->journal, s->storages, s->lookups, s->state_dicts, s->jobs }, &s->sweeps));
	TRY(webhooks_new(s));
	TRY(chains_new(s));
	TRY(tracer_new(s, &s->tracer));
	TRY(spreads_new(s, &s->spreads));
	TRY(cluster_new(s, &s->cluster));
	TRY(jobs_recover(s));
	TRY(neighbours_new(s, &s->neighbours));
	TRY(state_dict_orphans_start(s));
	TRY(state_dict_updates_start(s));
	TRY(flushers_new(s, &s->flushers));
	TRY(storage_care_start(s));
	TRY(trash_care_start(s));
	TRY(policy_all_start(s));
	TRY(devices_new(s->workers, &s->devices));
	TRY(descriptors_new(s->loop, &s->descriptors));
	TRY(device_copies_new(&(struct device_copy_parts){ s->loop, s->workers, s->devices, s->descriptors, s->state_dicts, s->metrics },
			      &s->device_copies));
	TRY(device_images_new(&(struct device_image_parts){ s->config, s->loop, s->events, s->devices, s->descriptors,
							    s->device_copies, s->state_dicts }, &s->device_images));
	first_probes(s);
	webhooks_wake(s);
	chains_wake(s, NULL);
	s->ready = true;
	return OK;
}

FALLIBLE enum err server_new(const struct config *config, struct event_base *base, struct server **out)
{
	struct server *s;

	jtext_init();
	TRY(mem_reserve());
	TRY(errdoc_init());
	s = mem_zalloc(1, sizeof *s);
	NEED(s, "cannot start");
	s->hooks = &hooks;
	s->config = config;
	s->lock_fd = -1;
	enum err e = build(s, base);
	if (e) {
		CLEANUP(err_restore) struct err_info info = *err_last();
		server_free(s);
		return e;
	}
	*out = s;
	return OK;
}

void server_free(struct server *s)
{
	if (!s)
		return;
	loop_timer_stop(&s->drain_timer);
	loop_timer_stop(&s->trash_tick);
	s->draining = true;
	cluster_leave(s->cluster);
	if (s->journal) {
		struct journal_txn *t = journal_txn_new(s->journal);
		journal_put_service(t, clock_service_ms());
		journal_commit(s->journal, t, NULL, NULL);
	}
	for (int turn = 0; turn < 3 && s->journal; turn++) { /* what is on its way to the disk is seen through */
		journal_sync(s->journal);
		loop_run_posted(s->loop);
	}
	device_copies_end(s->device_copies);
	gangs_free(s->gangs);
	lookups_end(s->lookups);
	if (s->loop)
		loop_run_posted(s->loop); /* what they told their askers may have been passed on */
	lookups_free(s->lookups);
	flushers_free(s->flushers);
	chains_free(s);
	webhooks_free(s);
	cluster_free(s->cluster);
	neighbours_free(s->neighbours);
	spreads_free(s->spreads);
	s->spreads = NULL;
	s->neighbours = NULL;
	s->cluster = NULL;
	device_copies_free(s->device_copies);
	descriptors_free(s->descriptors);
	device_images_free(s->device_images);
	devices_free(s->devices);
	workers_free(s->workers);
	policy_all_free(s);
	tracer_free(s->tracer);
	jobs_free(s->jobs);
	state_dicts_free(s->state_dicts);
	sweeps_free(s->sweeps);
	storages_free(s->storages);
	runs_free(s->runs);
	tiers_free(s->tiers);
	journal_close(s->journal);
	events_free(s->events);
	metrics_free(s->metrics);
	unread_free(s->unread);
	loop_free(s->loop);
	if (s->lock_fd >= 0)
		close(s->lock_fd);
	mem_free(s);
}

void server_measure(struct server *s)
{
	gauges_fill(&(struct gauge_parts){ s->metrics, s->jobs, s->journal, s->runs, s->tiers, s->state_dicts, s->storages,
					   s->workers, s->device_images, s->config->neighbour_memory, s->started_ms });
	cluster_fill(s->cluster, s->metrics);
}

/* ---- the end ---- */

static void on_drain_over(void *user)
{
	struct server *s = user;

	s->drain_timer = NULL;
	log_warn("jobs still run: they are kept for the next start", NULL);
	for (struct job *j = s->jobs->live; j; j = j->live_next)
		if (j->gang && j->state != JOB_COMMITTING)
			gang_cancel(j->gang);
}

void server_drain(struct server *s)
{
	if (s->draining)
		return;
	s->draining = true;
	log_info("draining", NULL);
	loop_timer_start(s->loop, s->config->drain_ms, on_drain_over, s, &s->drain_timer);
}

bool server_drained(const struct server *s)
{
	if (!s->draining || journal_waiting(s->journal))
		return false;
	bool full = journal_may_write(s->journal) != OK; /* then no job ends: the next start finds out how it did */
	for (const struct job *j = s->jobs->live; j; j = j->live_next)
		if ((j->gang && !job_commit_waits(j)) || (j->step == STEP_ENDING && !full) || j->step == STEP_MAKING)
			return false;
	return true;
}

FALLIBLE enum err server_reload(struct server *s, const struct config *fresh)
{
	uint32_t before = storage_count(s->storages);

	log_init("dcpd", fresh->log_json, LOG_LEVEL_INFO);
	devices_probe(s->devices);
	TRY(storages_reload(s->storages, fresh));
	if (storage_count(s->storages) != before)
		first_probes(s);
	return OK;
}
