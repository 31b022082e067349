/* parts.h: the coordinator's parts, for those of its files that hand a question on. Each part is known to its own module alone: here are
 * pointers. Set by server.c, in this order. */
#pragma once
#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>
#include "base/err.h"

struct happening;
struct job;
struct principal;
struct ref;
struct journal_txn;
struct server;

/* The calls of lower layers to higher ones, which they do not know: server.c sets these before anything runs. */
struct server_hooks {
	/* job_end.c: after everybody can see its end. */
	void (*job_ended)(struct job *j);
	/* cluster_jobs.c: it ended before this daemon began, and the one before may not have told other nodes what that means to them. */
	void (*job_recalled)(struct job *j);
	/* … and job_take.c: its end here says only that another node has it. */
	void (*job_gone)(struct job *j);
	/* job_tell.c: what a job's end means to webhooks and chains, into the end's own transaction. */
	void (*happens)(struct server *s, struct journal_txn *t, const struct happening *h);
	/* job_run.c: a worker asks whether it may commit. The error ends the job. */
	enum err (*may_commit)(const struct job *j);
	/* cluster_images.c: state dicts of other nodes as sources of jobs. */
	enum err (*node_storage)(struct server *s, const char *node, const char **storage_out);
	void (*ask_image)(struct server *s, const struct ref *ref, const struct principal *who,
			  void (*fn)(void *user, enum err e, int64_t generation), void *user);
	/* cluster_jobs.c: other nodes should know the job's record as it is now. */
	void (*job_noted)(const struct job *j);
	/* … and of how many jobs they have not heard it yet. */
	uint64_t (*jobs_untold)(const struct server *s);
	/* cluster_replicas.c: which nodes have copies of a checkpoint, or of a run's, in their memory. */
	struct cluster_search *(*find_replicas)(struct server *s, const struct ref *of, bool of_run, const struct principal *who,
						void (*fn)(void *user, const json_t *list, const char *silent), void *user);
	void (*replicas_enough)(struct cluster_search *search);
	/* cluster_forward.c: the node's lease is over, or nobody knows it. */
	bool (*is_away)(const struct server *s, const char *node);
	/* neighbours.c: the job's generation is sealed, and its row in the journal. */
	void (*snapshotted)(struct job *j);
	/* spread.c: loads by several nodes. */
	enum err (*spread_start)(struct job *j, json_t **doc_out);
	void (*spread_meet)(struct job *j, const json_t *body);
	/* Is the job still this node's? fn(user, OK, or ERR_JOB_MOVED). For shared jobs only. */
	void (*confirm)(struct job *j, void (*fn)(void *user, enum err e), void *user);
	/* A job that was taken over has found another job's checkpoint at its target. fn(user, OK, or ERR_STATE_CONFLICT: that one may be
	 * the later). */
	void (*compare)(struct job *j, const char *other, void (*fn)(void *user, enum err e), void *user);
	/* The journal's jobs are here; shared ones are held until they are resumed or given up. */
	void (*jobs_loaded)(struct server *s);
};

struct server {
	const struct server_hooks *hooks;
	const struct config *config;
	struct event_base *base;
	struct loop *loop;
	struct journal *journal;
	struct events *events;
	struct metrics *metrics;
	struct storages *storages;
	struct sweeps *sweeps;
	struct state_dicts *state_dicts;
	struct jobs *jobs;
	struct gangs *gangs;
	struct unread *unread;
	struct lookups *lookups;
	struct workers *workers;
	struct devices *devices;
	struct descriptors *descriptors;
	struct device_copies *device_copies;
	struct device_images *device_images;
	struct runs *runs;
	struct tiers *tiers;
	struct flushers *flushers;
	struct policies *policies;
	struct followers *followers[3];        /* webhooks, chains, policies: by enum journal_follower_kind */
	struct courier *courier;
	struct cluster *cluster;      /* NULL: a daemon by itself */
	struct neighbours *neighbours;
	struct spreads *spreads;
	struct tracer *tracer;        /* NULL: no spans are sent */
	int64_t started_ms;           /* wall clock */
	uint64_t boot;                /* starts of this state dir, from the journal; 1 at the first */
	bool ready;                   /* journal open, left-overs swept: /readyz */
	bool draining;                /* new work is refused with ERR_DRAINING */
	struct loop_timer *drain_timer, *trash_tick;
	int lock_fd;                  /* of the state dir */
};
