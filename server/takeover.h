/* takeover.h: who may run, commit, take over and end a job of a cluster: the decisions alone, without a call of any system. The daemon
 * (cluster_jobs.c, cluster_take.c) and the simulation (tests/unit/test_takeover.c) both ask here.
 *
 * A job is *shared* if it reads and writes only storages that other nodes may have. In etcd it has two keys:
 *
 *   PREFIX/jobs/ID        its record, and its owner's name; written by its owner alone, if nobody else has written it since
 *   PREFIX/live/NODE/ID   NODE owns it, and it has not ended. The key's revision is the token of this ownership
 *   PREFIX/left/NODE/ID   it was taken from NODE, whose journal may say otherwise: it may have ended there unheard. NODE removes the key
 *
 *   made      owner:  absent live/A, jobs as it was          → put live/A, jobs
 *   state     owner:  jobs as it was                         → put jobs
 *   taken     other:  absent alive/A, live/A as it was seen,
 *                     own alive/B, jobs as it was            → delete live/A, put left/A, live/B, jobs; then the storage's fences
 *   taken up  A itself, whose journal lacks it: the same     → put live/A, jobs, as the next owner
 *   end       owner:  jobs as it was                         → delete live/A, put jobs
 *
 * What an owner does between two of these, etcd does not see. A commit is fenced by the storage, always. Beyond that the owner asks etcd
 * before it commits or ends a job, if its lease may be over; without an answer it goes on, for while etcd is away nobody takes anything
 * over, and of an owner that is cut off alone the storage's fence keeps the commit. An end that was noted before the owner heard that it
 * had lost the job gives way to the new owner's. */
#pragma once
#include <stdbool.h>
#include <stdint.h>

/* ---- before a commit or an end ---- */
enum takeover_gate { TAKEOVER_GO, TAKEOVER_ASK, TAKEOVER_MOVED };
/* renewed_ms: when the lease was last asked for with success, 0: never; both in a clock that goes on in a suspend. token 0: not in etcd. */
enum takeover_gate takeover_gate(int64_t token, int64_t renewed_ms, int64_t ttl_ms, int64_t now_ms);
/* etcd's answer to it, or its silence. */
enum takeover_answer { TAKEOVER_SILENT, TAKEOVER_OWN, TAKEOVER_OTHERS };
enum takeover_gate takeover_after(enum takeover_answer answer);

/* ---- a job of a node that is away ---- */
struct takeover_offer {
	bool owner_is_away, has_storages, takes_work;   /* takes_work: this node is joined, not drained, and has room */
	bool has_record;               /* with its whole request */
};
bool takeover_may_take(const struct takeover_offer *o);

/* ---- a job that was taken over finds another job's checkpoint at its target ---- */
struct takeover_found {
	bool has_records;              /* etcd has a record of either job */
	bool other_ended;              /* … and the other one's says that it has ended */
	int64_t own_made, other_changed;        /* revisions: when etcd heard of this job first, and of the other one last */
	bool by_one_daemon;            /* one daemon has made both ids, which are in the order of its requests */
	bool id_is_later;              /* the other one's, by the clocks of their daemons */
};
/* May this job have committed before the other one did, so that to do it again would undo the other one? */
bool takeover_is_later(const struct takeover_found *f);

/* ---- what became of an attempt ---- */
struct takeover_outcome {
	bool failed;                   /* the attempt ended with an error */
	bool fenced;                   /* the storage, or etcd, says that another node has the job */
	bool was_asked, committed;     /* the storage was asked what is there; the job's own checkpoint is */
};
enum takeover_end { TAKEOVER_SUCCEEDED, TAKEOVER_FAILED, TAKEOVER_GIVEN_UP };
enum takeover_end takeover_end(const struct takeover_outcome *o);

/* ---- a job of this node's, in etcd or in its journal, when the node has joined ---- */
struct takeover_known {
	bool in_live;                  /* live/SELF/ID is there */
	bool has_record, record_is_own;
	bool has_row, is_moved;        /* in the journal; … as one that another node has */
	bool was_known;                /* etcd has had it, the journal says: without a record it was pruned, and somebody has ended it */
	uint64_t record_turn, row_turn;/* owners that it had before, as etcd and as the journal say (worker/store/fence.h) */
};
enum takeover_own {
	TAKEOVER_GO_ON, TAKEOVER_REGISTER,
	TAKEOVER_IS_GONE,
	TAKEOVER_TAKE_UP,              /* the journal lacks it: this daemon becomes its next owner */
	TAKEOVER_YIELD,                /* another daemon of this node's name had it since: to be given up, then taken up */
	TAKEOVER_FORGET,               /* it was given up, and registered by mistake: its record was pruned meanwhile */
};
enum takeover_own takeover_own(const struct takeover_known *k);
