/* worker.h: one worker process as the coordinator sees it: started, greeted, spoken to, watched through its pidfd, reaped.
 * Its use (gang, look-ups) is its owner's matter. */
#pragma once
#include <jansson.h>
#include "base/buf.h"
#include "ctl/frame.h"
#include "os/spawn.h"
#include "os/watch.h"

struct worker;
struct config;

struct worker_root {
	char name[66];
	char *path;
	mode_t file_mode;                  /* of what is made there */
	gid_t file_gid;                    /* CONFIG_NO_GROUP: as the directory gives it */
	json_t *options;                   /* the storage's; NULL: none */
};

struct worker_ops {
	/* HELLO came, the build is ours, and all roots could be opened (e OK), or one could not: then e says why, and the worker is
	 * of no use. hello: its greeting. */
	void (*ready)(struct worker *w, enum err e, const json_t *hello);
	/* A frame with its body (an object). fds not taken (set to -1) are closed afterwards. */
	void (*frame)(struct worker *w, const struct frame *f, const json_t *body);
	/* The process has ended and was reaped; err_last() says how (ERR_WORKER_LOST, ERR_PROTOCOL). Called once, and it is the last
	 * call about w: the owner forgets it. */
	void (*ended)(struct worker *w, enum err e);
};

struct worker_spec {
	const char *role;                  /* "gang", "lookup", "device", "holder", "probe" */
	uint32_t index, count;
	const struct worker_root *roots;
	uint32_t root_count;
	uint64_t memory_bytes;
	bool network, device;              /* what its sandbox lets through */
	const int *keep_fd;                /* of a file in which it keeps what it finds out; NULL: none. Gangs have one of all */
	const struct worker_ops *ops;
	void *owner;
};

struct worker {
	struct workers *all;
	struct worker *next;               /* all of them */
	void *owner;                       /* NULL: disowned, waits to be reaped */
	const struct worker_ops *ops;
	struct spawn_child child;
	struct frame_conn *conn;
	struct watch *exit, *control;      /* own the pidfd and the socket */
	struct loop_timer *hello_timer;
	uint64_t number;
	uint32_t index;
	const char *role;
	int64_t started_ms;
	bool greeted, killed, hung_up;
	bool seen_ended;                   /* a zombie at the latest look */
	uint64_t switches;                 /* of its main thread, at the latest worker_moved() */
	enum err lost;                     /* why we ended it; else how it ended by itself */
	struct err_info lost_info;
	char id[32], state[16], job[27], engine[16], storages[160];
	char sandbox[16];                  /* what confines it to its storages: "landlock", "mount_namespace" or "none" */
	char unconfined[200];              /* why it has no mount namespace either; else "" */
	int landlock;
	bool seccomp, device;              /* device: nothing confines it */
};

/* $STATE/NAME.cache, which holds nothing that cannot be found out again; -1: it cannot be opened. */
int worker_open_kept(const struct config *config, const char *name);
FALLIBLE enum err worker_start(struct workers *all, const struct worker_spec *spec, struct worker **out);
/* Failures end the worker; ops->ended tells. body is borrowed. */
void worker_send(struct worker *w, uint16_t type, uint64_t generation, const json_t *body, const int *fds, uint32_t fd_count);
/* SIGKILL. ops->ended follows, with this thread's latest error if `why` is not OK. */
void worker_kill(struct worker *w, enum err why);
/* Kills it and forgets the owner: no call comes any more. It is reaped in the background. */
void worker_disown(struct worker *w);
/* Blocks until the worker's process, which was killed, has ended and writes to no memory any more. For the daemon's own end, not for its
 * loop. false: it has not ended in ms milliseconds. */
bool worker_await_end(const struct worker *w, int ms);
void worker_set(struct worker *w, const char *state, const char *job);   /* what /v1/workers shows */
/* Has the process run since the last call? false: it has been in one system call all the time, such as one that a file system does not
 * answer. Needs no help of the worker's: the kernel counts how often its main thread was scheduled. */
bool worker_moved(struct worker *w);

/* The parts below that workers use. */
struct worker_parts {
	const struct config *config;
	struct event_base *base;
	struct loop *loop;
	struct journal *journal;
	struct events *events;
	struct metrics *metrics;
};
FALLIBLE enum err workers_new(const struct worker_parts *parts, struct workers **out);
/* Appends {"workers":[{"id","pid","role":"gang"|"lookup"|"device"|"holder","index","state":"starting"|"idle"|"busy"|"ending","job",
 * "storages":[…],"engine","sandbox","landlock","seccomp","started_at"}…],"next_page_token"?}: at most `most` of them, newest first, with a
 * number below `before`, which the token is. */
FALLIBLE enum err worker_put_page(const struct workers *all, uint32_t most, uint64_t before, struct buf *out);
void workers_free(struct workers *all);       /* kills all, waits a moment for each */
uint32_t workers_count(const struct workers *all, const char *role, const char *state);
/* Kills workers that a killed daemon left behind; returns when they are gone, at the latest after a few seconds. */
void workers_sweep(struct workers *all);
