/* gang.h: gangs: the sets of workers that run jobs, kept warm. See worker/ctl/README.md for what is said to them.
 *
 * A gang is keyed by what its sandbox lets through (Landlock only tightens): its set of storage roots, sockets, a GPU. It runs one
 * attempt at a time.
 * A worker that dies aborts its gang, never another one. */
#pragma once
#include <jansson.h>
#include "base/buf.h"

struct config;
struct loop;
struct metrics;
struct storages;
struct workers;
struct gangs;

enum { GANG_ROOTS_MAX = 16, GANG_ROOT_TEXT = 80, GANGS_MAX = 64 };

/* The abilities of this host and build, by the first worker's word: {"engine","sandbox","landlock","seccomp"}; members are null before. */
FALLIBLE enum err gang_put_capabilities(const struct gangs *gs, struct buf *out);
struct worker;
void gang_note_worker(struct gangs *gs, const struct worker *w);   /* what it said of this host */

/* ---- for job_run.c ---- */

struct gang;
enum gang_state { GANG_STARTING, GANG_IDLE, GANG_BUSY, GANG_ENDING, GANG_STATES };
bool gang_may_move(enum gang_state from, enum gang_state to);    /* ENDING is the last */

/* Callbacks of a run to its owner. Message bodies are borrowed. No callback is made before gang_run has returned. */
struct gang_ops {
	void (*state)(void *user, const json_t *body);
	void (*progress)(void *user, const json_t *body);
	void (*moved)(void *user, const json_t *body);    /* FRAME_IO; the storages have counted it */
	void (*want_segments)(void *user, const json_t *body);
	void (*want_commit)(void *user);
	/* Takes the leader's RENDEZVOUS. True: the leader's group is of several daemons, and gang_met() follows. May be NULL. */
	bool (*meet)(void *user, const json_t *body);
	/* Once, and last. OK: body is the leader's DONE; else the problem that a worker sent, NULL if none did. ERR_CANCELLED: cancelled
	 * as asked. ERR_WORKER_LOST etc.: the gang is gone and no process of it runs any more. */
	void (*ended)(void *user, enum err e, const json_t *body);
};

struct gang_run {
	const char *job;                /* id, for /v1/workers */
	uint64_t generation;            /* of the attempt: never used twice */
	const json_t *body;             /* of JOB */
	const int *fds;                 /* the segments; duplicated */
	uint32_t fd_count;
	bool network, device;           /* workers that may open sockets, or a GPU */
	const struct gang_ops *ops;
	void *user;
};

/* Takes a warm gang of exactly these storages, or starts one. ERR_TOO_MANY_JOBS when GANGS_MAX are busy. */
FALLIBLE enum err gang_start_run(struct gangs *all, const char *const *storages, uint32_t storage_count,
				 const struct gang_run *run, struct gang **out);
void gang_send_segments(struct gang *g, const json_t *body, const int *fds, uint32_t fd_count);
/* The source that the run began to read while it was being filled is sealed. */
void gang_sealed(struct gang *g);
void gang_commit_ok(struct gang *g);
void gang_met(struct gang *g, const json_t *body);      /* RENDEZVOUS_ALL, for the leader */
/* The run ends soon with ERR_CANCELLED, or as it would have: workers that do not answer in 10 s are killed. */
void gang_cancel(struct gang *g);
/* The run ends soon with the latest error, and the gang goes on: for what is no worker's fault. */
void gang_fail(struct gang *g, enum err why);
/* Kills the gang if a worker of it that has not answered yet has said nothing for so long; `ended` names it. */
void gang_give_up_silent(struct gang *g, int64_t ms);
/* To be asked once a second while a run shows no progress: has a worker that has not answered been in one system call for a few seconds
 * (worker_moved)? */
bool gang_hangs(struct gang *g);
/* Kills the gang; `ended` follows with the latest error. */
void gang_abort(struct gang *g, enum err why);

/* The parts below that gangs use. */
struct gang_parts {
	const struct config *config;
	struct loop *loop;
	struct metrics *metrics;
	struct storages *storages;
	struct workers *workers;
	const bool *draining;           /* nothing is swept any more */
	/* Jobs may have left something in the storage that nobody removes. */
	void (*storage_soiled)(void *user, const char *name);
	void *user;
};
FALLIBLE enum err gangs_new(const struct gang_parts *parts, struct gangs **out);
void gangs_free(struct gangs *gs);              /* before workers_free */
/* Why workers without Landlock have no mount namespace either, and can open files beside the storages; NULL: they are confined. */
const char *gang_unconfined(const struct gangs *gs);
