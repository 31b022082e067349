/* spread.h: a load by several hosts that reads each byte once from the storage and brings it to the others over TCP.
 *
 * Each host's daemon has a load job of its own, whose target may be cut as it likes; the leaders of their gangs form a group (comm.h). The
 * source's files are divided into units. A unit that one host alone needs is read by that host, as ever. Of all others each has an owner
 * among the hosts that need it, which reads it; windows of units go from their owners to the rest, one after the other in the order of the
 * first host's tasks: by an all-gather or a broadcast where all hosts need them (a ring or a chain with much data, a tree with little), by
 * messages where only some do. While a window is on its way the next ones are read, and the ones before are taken by the workers.
 *
 *   spread_plan.c   pure: who needs what → units, owners, windows
 *   spread_feed.c   the leader: the group, the threads that read, the thread that exchanges
 *   spread.c        all workers: reads of a source's files are served from windows, which lie in the run's memfd
 *
 * Nothing depends on it: what a window does not bring (a host has died, or is too late) is read from the storage. Each host compares all
 * that it takes with the digests of its own manifest, so that no host can pass on what the checkpoint does not say. */
#pragma once
#include <pthread.h>

#include "runner/files.h"
#include "session/job.h"

enum {
	SPREAD_HOSTS_MAX = 64,
	SPREAD_UNIT = 1 << 20,         /* bytes of a unit, which begins at a multiple of SPREAD_UNIT in its file */
	SPREAD_WINDOW_UNITS = 16,
	SPREAD_WINDOWS = 8,            /* windows in memory at a time: more than the tasks under way span, or tasks wait for each other */
	SPREAD_SLACK = 64 << 10,       /* bytes around a scan for the head of its item, and the largest gap worth reading */
	SPREAD_RANGES_MAX = 1 << 20,   /* ranges of one host */
};

struct comm;
struct spread;

/* Bytes of a file of the checkpoint that a host needs. */
struct spread_range {
	uint64_t begin, end;
	uint64_t file;                 /* number in the checkpoint's structure: the same on all hosts */
};

/* A unit that at least two hosts need. */
struct spread_unit {
	uint64_t file, number;
	uint64_t lo, hi;               /* the needed pages of the unit, as offsets in the file */
	uint64_t needers;              /* bit h: host h */
	uint64_t at;                   /* offset of the unit in its window, of whole pages: O_DIRECT reads there */
	uint32_t window, owner;
};

struct spread_window {
	uint64_t bytes, first;         /* first: of `count` units in a row, by owner where `all` */
	uint32_t count;
	bool all;                      /* every host needs every unit of the window */
};

struct spread_plan {
	struct vec(struct spread_unit) units;
	struct vec(struct spread_window) windows;
	uint64_t widest;               /* bytes of the largest window */
};

/* ranges[h]: counts[h] of them; files: bytes of each file. ERR_COMM_PROTOCOL: a range that cannot be. */
FALLIBLE enum err spread_plan_make(const struct spread_range *const *ranges, const uint64_t *counts, uint32_t hosts,
				   const uint64_t *files, uint64_t file_count, struct spread_plan *out);
void spread_plan_free(struct spread_plan *p);

/* ---- the leader ---- */

/* Joins the group that the job's `spread` tells of, and adds the windows to the tables. keys: the checkpoint's number of each run file
 * plus 1; 0: not one of its. *out NULL: the job names no group, or the load goes on without one, which its warnings tell. */
FALLIBLE enum err spread_join(struct job *j, struct run_build *b, const uint32_t *keys, struct spread **out);
FALLIBLE enum err spread_begin(struct spread *s, struct run *run);
/* Waits until the other hosts have what this one owes them; puts "spread" into the job's result. e: how the run has ended. */
FALLIBLE enum err spread_end(struct spread *s, const struct run *run, enum err e);
void spread_free(struct spread *s);

/* ---- all workers ---- */

enum spread_state { SPREAD_COMING, SPREAD_HERE, SPREAD_OVER };

/* The beginning of the run's room (run.h); windows follow on a page of their own. */
struct spread_shared {
	pthread_mutex_t lock;
	pthread_cond_t came[SPREAD_WINDOWS]; /* by slot; signals reads that its window is here, or will not come */
	pthread_cond_t change;         /* signals the leader's threads that a window was taken, or this host's part of one read */
	uint64_t widest;
	uint64_t taken;                /* scans that were served: counts up */
	uint32_t waiting;              /* reads for windows that are not here yet */
	bool broken;                   /* no window will come any more */
	bool doubted;                  /* other hosts' bytes [doubted_lo, doubted_hi) of doubted_file were not the checkpoint's */
	uint32_t doubted_file;
	uint64_t doubted_lo, doubted_hi;
	_Atomic uint64_t served_bytes; /* bytes that reads took from windows */
	_Atomic uint64_t node_bytes, own_bytes;        /* bytes of windows: from other hosts; read by this host for all */
};

/* The state that all workers of a run with windows share. */
static inline struct spread_shared *spread_shared_of(const struct run *run)
{
	return run_room(run);
}
unsigned char *spread_slot(const struct run *run, uint64_t window);
/* Room for the windows of a run. */
uint64_t spread_room(const struct spread_plan *p);
/* Makes `file`, a source that is open at *under, one that is served from windows; *out takes its place. */
void spread_wrap(struct files *f, uint32_t file, struct store_at *out);
/* The bytes of its file that a scan reads, and a little around. */
void spread_scan_span(const struct run_src *src, const struct run_scan *scan, uint64_t *lo_out, uint64_t *hi_out);
/* Calls fn for every window that has bytes of [lo, hi) of the file. units: sorted by file, then number. */
void spread_each_window(const struct run_spread_unit *units, uint64_t n, uint32_t file, uint64_t lo, uint64_t hi,
			void (*fn)(void *user, uint32_t window), void *user);
/* The scan's bytes were taken: nobody in this gang needs them any more. */
void spread_taken(struct run *run, uint64_t scan);
/* The bytes [lo, hi) of the file, as they were served, are not the checkpoint's. True: other hosts sent some of them; from now on they are
 * read from the storage. */
bool spread_doubt(struct run *run, uint32_t file, uint64_t lo, uint64_t hi);
/* Waits for a signal, WAIT_MS at most; the caller holds the lock. */
void spread_wait(struct spread_shared *s, pthread_cond_t *signal);
