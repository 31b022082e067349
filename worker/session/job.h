/* job.h: one job as a worker sees it: its document, the descriptors that came with it, and its line to the coordinator.
 * The order of the messages is in ctl/README.md. */
#pragma once
#include <jansson.h>

#include "base/mem.h"
#include "base/vec.h"
#include "ctl/frame.h"
#include "io/engine.h"
#include "io/pace.h"
#include "os/seg.h"
#include "session/rank_segments.h"
#include "spec/spec.h"
#include "store/checked.h"
#include "store/identity.h"
#include "store/store.h"

struct device;
struct plan_cache;
struct lookup_cache;
struct lookup_tree;
struct stats_cache;
struct gpu_pin;
struct kept_groups;

/* State of a worker process, for its whole life. */
struct worker {
	struct frame_conn *conn;       /* NULL: none, nobody is told anything (libdcp) */
	struct io_engine *io;
	struct stores stores;
	uint32_t index, count;         /* in its gang */
	uint64_t memory_bytes;         /* for buffers */
	bool lookup;
	bool network, device;          /* the sandbox lets sockets through; there is none, for the sake of a GPU's driver */
	struct seg_leavings leavings;  /* of the jobs that have ended, until that is reported */
	struct device *gpu;            /* once a job needed it; see gpu.h */
	struct vec(struct gpu_pin) pins;
	struct kept_groups *groups;    /* with the others of the gang; NULL: none was needed yet; see group.h */
	struct plan_cache *plans;      /* NULL: none are kept */
	struct stats_cache *stats;     /* NULL: no figures of tensors are kept */
	struct lookup_cache *kept;      /* the same, of a checkpoint between questions */
	struct lookup_tree *tree;      /* names of a storage's directories between questions */
	char listen[64];               /* address or interface for them; empty: loopback */
};

/* The work of a job while it goes on, as its line to the coordinator needs to know it. */
struct job_work {
	void (*put_progress)(const struct job_work *w, struct buf *b);   /* a PROGRESS document */
	void (*seal)(struct job_work *w);              /* all sources are sealed */
	bool (*stopped)(const struct job_work *w);     /* another worker has failed: no need to rest any more */
};

struct job_dict {
	const char *name;
	struct rank_segments segments;
};

struct job {
	struct worker *worker;
	uint64_t generation;           /* of the attempt: goes into every frame */
	json_t *doc;                   /* the JOB frame's document */
	const json_t *request;         /* spec of JOB */
	struct spec spec;              /* the same as C, which points into the document */
	const char *id;
	enum job_kind kind;
	uint64_t attempt;
	uid_t uid;                     /* who asked for it: owns what it commits */
	bool admin;                    /* … and may remove and replace everything */
	const char *mark;              /* of a job that another node may take over: this daemon's; NULL: of none such */
	uint32_t turn;                 /* … and how many owners it had before (store/fence.h) */
	bool dry_run;
	int *fds;                      /* the segments of JOB, then spools, then the segments of SEGMENTS */
	uint32_t fd_count;
	uint32_t segment_count;        /* those of JOB */
	uint32_t made_at;              /* where those of SEGMENTS begin, once they are here */
	bool cancelled, peers_done, commit_ok;
	bool streams, sealed;          /* its source was being filled when it began (gate.h); it is sealed by now */
	struct job_dict *dicts;        /* JOB's state dicts */
	uint32_t dict_count;
	json_t *segments_doc;          /* the SEGMENTS frame's document, and */
	struct rank_segments segments; /* … the made segments by rank; v NULL: they are not here yet */
	struct job_work *work;         /* while it goes on */
	int64_t last_progress_ms;
	struct pace pace;              /* of its bytes; in other jobs PACE_FULL */
	int backend;                   /* enum comm_backend: how a state-dict operation moves its bytes */
	uint32_t members;              /* of the group that does it */
	json_t *met;                   /* RENDEZVOUS_ALL's, until it is taken */
	json_t *result;                /* filled in on the way; given to DONE */
	json_t *parents;               /* of the checkpoint that it makes (provenance.h); NULL: none */
	uint64_t bytes_shared;         /* with one of them, if it shares any */
	bool shares;
	json_t *error_more;            /* object, NULL: none. Members that the job's error gets beside those of err_last() */
	struct checked checked;        /* of the checkpoints that it reads */
	char identity[IDENTITY_MAX];   /* of spec.source, before it was opened; "": not known */
};

/* The job as a store sees it. */
static inline struct store_job job_in_store(const struct job *j)
{
	return (struct store_job){ .stores = &j->worker->stores, .id = j->id, .attempt = j->attempt, .uid = j->uid, .admin = j->admin,
				    .mark = j->mark, .turn = j->turn };
}

/* Reads the state dicts of j->doc, whose segments are j->fds. ERR_PROTOCOL. */
FALLIBLE enum err job_read_state_dicts(struct job *j);
/* A state dict of JOB; NULL: nothing, or the reference is to none. */
const struct rank_segments *job_state_dict(const struct job *j, const struct ref *ref);

/* Messages. Texts are taken as they are. */
FALLIBLE enum err job_send(struct job *j, enum frame_type type, struct str json, const int *fds, uint32_t fd_count);
FALLIBLE enum err job_send_json(struct job *j, enum frame_type type, const json_t *doc);
/* {"code","detail",…} of err_last(). */
void job_problem_put(struct buf *b, enum err e);
/* Tells the coordinator what this worker has read from and written to its storages since the last time, if anything. */
FALLIBLE enum err job_tell_io(struct worker *w);
FALLIBLE enum err job_state(struct job *j, const char *state, const char *stage, const json_t *plan, uint64_t bytes_total);

FALLIBLE enum err job_progress(struct job *j);

/* Takes what has come; ERR_CANCELLED. Sends progress now and then, and rests as the job's pace says. user: the job. */
enum err job_tick(void *user);
/* Waits until *flag (of this job) is true; ERR_CANCELLED, ERR_PROTOCOL. Heartbeats go on. */
FALLIBLE enum err job_wait(struct job *j, const bool *flag);
/* Waits a moment for nothing: ERR_CANCELLED. Heartbeats go on. */
FALLIBLE enum err job_pause(struct job *j, int ms);
FALLIBLE enum err job_wait_segments(struct job *j);
/* Waits until the sources are sealed, at most until then (clock_mono_ms); j->sealed says which. */
FALLIBLE enum err job_wait_sealed(struct job *j, int64_t until_ms);
/* Sends RENDEZVOUS and waits for RENDEZVOUS_ALL; *all_out: its list (json_decref). ERR_PEER_TIMEOUT. */
FALLIBLE enum err job_rendezvous(struct job *j, struct str mine, uint32_t deadline_ms, json_t **all_out);
/* Adds a descriptor of ours (a spool) behind the segments; its index. Owned by the job from then on. */
FALLIBLE enum err job_add_fd(struct job *j, int fd, uint32_t *index_out);
void job_free(struct job *j);

/* The operations of kinds.def; each fills j->result (or, for a dry run, j->result is the plan). */
FALLIBLE enum err save_job(struct job *j);
FALLIBLE enum err apply_job(struct job *j);
FALLIBLE enum err load_job(struct job *j);
FALLIBLE enum err reshard_job(struct job *j);
FALLIBLE enum err verify_job(struct job *j);
FALLIBLE enum err diff_job(struct job *j);
FALLIBLE enum err stats_job(struct job *j);
FALLIBLE enum err delta_job(struct job *j);
FALLIBLE enum err inspect_job(struct job *j);
FALLIBLE enum err repair_job(struct job *j);
FALLIBLE enum err delete_job(struct job *j);
FALLIBLE enum err replicate_job(struct job *j);
FALLIBLE enum err materialise_job(struct job *j);
FALLIBLE enum err state_dict_op_job(struct job *j);
