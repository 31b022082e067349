/* job_impl.h: what the files job*.c share; nobody else includes it. */
#pragma once
#include "server/gang.h"
#include "server/job.h"
#include "server/journal.h"
#include "server/loop.h"
#include "server/state_dict.h"
#include "base/map.h"
#include "spec/spec.h"

enum { JOBS_CACHED = 256, JOB_STAGE_MAX = 48, JOB_LANE_MAX = 24 + GANG_ROOTS_MAX * GANG_ROOT_TEXT, JOB_RANKS_SHOWN = 1024,
       JOB_IDENTITY_MAX = 64, JOB_NODE_MAX = 64 };

/* The queue of a lane; its jobs are linked by lane_next. */
struct lane {
	struct lane *next;
	struct server *server;
	char key[JOB_LANE_MAX];
	struct job *first, **last, *running;
	uint64_t moves;             /* changes of first and running */
	struct loop_timer *timer;
};

/* A caller that waits for a job's end. */
struct waiter {
	struct waiter *next;
	struct job *job;
	struct server *server;
	done_fn fn;
	void *user;
	struct loop_timer *timer;
};

/* Steps of a live job through queue, gang and journal; its public state is kept beside them. */
enum job_step {
	STEP_NONE,                  /* ended */
	STEP_AWAITING,              /* its generation is not sealed yet */
	STEP_WAITING,               /* in its lane's queue, or for a retry's time */
	STEP_RECOVERING,            /* a look-up finds out whether an earlier attempt had committed */
	STEP_ON_GANG,
	STEP_MAKING,                /* the gang waits for its target's segments */
	STEP_ENDING,                /* the end is on its way to the journal */
	STEP_COUNT,
};

struct job {
	struct server *server;
	char id[JOB_ID_LEN + 1];
	enum job_kind kind;
	enum job_state state;
	enum job_step step;
	char stage[JOB_STAGE_MAX];
	int attempt, retries_left;
	uid_t uid;
	bool shared;                /* another node of the cluster may take it over (takeover.h) */
	bool held;                  /* … and may have done so while this daemon was away: etcd is asked before it goes on */
	bool takes;                 /* it was taken over: its first recovery raises the storage's fence */
	bool confirmed;             /* etcd was asked whether this node may end it */
	bool moved;                 /* another node has it */
	char moved_to[JOB_NODE_MAX + 1];       /* its name; "": not known yet */
	int64_t token;              /* of this node's ownership in etcd; 0: none is known */
	int64_t noted;              /* revision of its record in etcd, as this node wrote it; 0: not known */
	json_t *taken;              /* [{"from","to","at","attempt","why"}]; NULL: it was never taken over */
	bool marked;                /* its hold and alias are put, or on their way */
	bool dry_run, cancel_wanted, commit_asked, commit_allowed, stalled, in_journal;
	bool outcome_unknown;          /* it has failed, and whether its checkpoint was written or removed nobody could look up */
	json_t *request, *progress_ranks, *result, *error;
	json_t *stages;             /* [{"stage","at"}] of this attempt, the first 32; NULL: none yet */
	json_t *trace;              /* ids of its span (trace.h); NULL: of no trace */
	json_t *copies;             /* of a load: nodes with a copy of its checkpoint in memory (cluster.h); NULL: none is known */
	json_t *replicas;           /* of a save: [{"node","state","state_dict","generation","why"}] at neighbours; NULL: none */
	char *replicas_short;       /* … why there are fewer than asked for, until the result says it; NULL: nothing is known */
	json_t *parent;             /* of a chain's step: which one; NULL: of none */
	const char *verdict;        /* "verified", "damaged" …, found out by this attempt; NULL: nothing. Set at its end */
	struct spec spec;           /* the request as C, which points into it */
	json_t *served_from;        /* key of a reference → what the copy behind it is; NULL: none */
	json_t *error_more;         /* what the attempt's worker adds to its error (errdoc_more), until the job fails with it */
	char identity[JOB_IDENTITY_MAX];    /* of the checkpoint that the attempt reads; "": none, or not known yet */
	char *followed;             /* name of that checkpoint, as the worker found it; NULL: not told (yet), it is the source's */
	char *plan;                 /* JSON text */
	char *target;               /* "main:b", "shm:serve", "" */
	const char *storages[GANG_ROOTS_MAX]; /* sorted, without doubles; they point into spec, or to names of nodes' */
	uint32_t storage_count;
	int64_t created_ms, started_ms, finished_ms, snapshotted_ms, durable_ms, replicated_ms; /* wall clock, for the record */
	uint64_t bytes_done, bytes_total;
	uint64_t space_needed;      /* on the target's storage; 0: not known */
	double rate;                /* bytes a second, smoothed */
	int64_t stage_since_ms;     /* monotone clock */
	int64_t moved_ns[GANG_ROOTS_MAX][2];    /* monotone clock: when each storage's bytes read, and written, were last told */
	int64_t queued_ms;          /* monotone clock; when it took its place in the lane */
	int64_t begun_ms;           /* monotone clock: made or taken up, then started */
	int64_t sealed_ms;          /* monotone clock: its source was snapshotted; 0: not yet, or under an earlier daemon */
	int64_t trash_ms;           /* for so long its worker may be removing what it replaced; set by the worker's answer */
	int64_t rate_at_ms;         /* monotone clock: the last sample */
	int64_t alive_ms;           /* service time: the last byte of progress */
	int64_t marked_ms;                 /* alive_ms of the silence for which its storages were marked as stalled */
	uint64_t version;
	struct buf text;            /* the record; empty: to be made */
	struct lane *lane;
	struct job *lane_next;
	uint64_t lane_moves;        /* of its lane, when its text was made */
	struct job *live_prev, *live_next, *cache_prev, *cache_next;
	struct gang *gang;
	struct state_dict_use *source_use, *target_use;
	struct state_dict_await *await;     /* of a save with await_seal, until its source is sealed */
	bool resting;                       /* … not read before that, for it came too slowly */
	bool streamed;                      /* … read by this attempt before it was sealed */
	struct err_info lost;               /* … or why it will not be; code 0: nothing is known */
	struct state_dict_use *other_use;   /* b of a diff or compare (its a is source_use); the model of a load of optimizer state */
	struct state_dict_use **part_uses;  /* of a planned save: what holds the bytes; part_count of them */
	uint32_t part_count;
	struct state_dict_use *made_use;    /* the segments that this attempt fills: a new state dict, or a next generation */
	struct loop_timer *timer;   /* of a retry */
	struct waiter *waiters;
	job_planned_fn planned;     /* of a dry run */
	void *planned_user;
	enum job_state end_state;   /* while STEP_ENDING */
};

struct jobs {
	enum err (*start)(struct job *j);   /* job_start_attempt, for job_queue.c below it */
	struct map table;
	struct job *live;           /* doubly linked, any order */
	uint32_t live_count, dry_count;
	struct job *cache_first, *cache_last;
	uint32_t cached;
	struct lane *lanes;
	uint64_t versions, attempts;
	struct loop_timer *tick;
	int64_t pruned_ms;          /* service time */
	uint64_t ended;             /* since the last pruning */
	struct map keys;           /* idempotency keys of creations on their way */
};

/* ---- job_move.c: the life of a job ---- */
void job_move(struct job *j, enum job_step step, enum job_state state);      /* which must be legal */
bool job_may_move(const struct job *j, enum job_step step, enum job_state state);
void job_take_up(struct job *j, enum job_state state);      /* of a new record of the journal's */

/* ---- job.c: records ---- */
FALLIBLE enum err job_alloc(struct server *s, enum job_kind kind, const json_t *spec, uid_t uid, struct job **out); /* in no list */
void job_free(struct job *j);
static inline const char *job_trace_id(const struct job *j)      /* NULL: it is of no trace */
{
	return json_string_value(json_object_get(j->trace, "trace_id"));
}
FALLIBLE enum err job_find(struct server *s, struct str id, struct job **out);      /* from memory or from the journal */
void job_live_add(struct job *j);
void job_live_remove(struct job *j);
void job_cache_add(struct job *j);
void job_cache_remove(struct job *j);
struct job_load {
	struct server *server;
	struct job *job;            /* set by job_load_row */
};
enum err job_load_row(void *user, const struct journal_job *row);    /* user: struct job_load */
FALLIBLE enum err job_ids_resume(struct journal *journal);
void job_revive(struct job *j);                      /* from the cache to the live ones */
void job_snapshotted(struct job *j);                 /* now */
/* The step of the checkpoint that the job makes: the number at its name's end, else its label `step`, else the generation. */
int64_t job_step(const struct job *j, int64_t generation);
void job_note_seen(const struct job *j);             /* tells the run of the snapshot, if there is one */
/* The state dict that a save is of; of a planned one, the one with its first part. NULL: none is held. */
static inline const struct state_dict_use *job_saved_use(const struct job *j)
{
	return j->part_uses ? j->part_uses[0] : j->source_use;
}
void job_changed(struct job *j);                     /* the text is stale; says so on the event stream */
void job_put_row(struct journal_txn *t, struct job *j, enum job_state state);   /* as it is in this state */
void job_write(struct job *j, done_fn fn, void *user);     /* its row as it is now, in a transaction of its own */
void job_id_mark(const struct journal *journal, char mark[JOB_MARK_LEN + 1]);
struct principal job_owner(const struct job *j);
void job_wake(struct job *j);                        /* its waiters: it has ended */

/* ---- job_spec.c: what a spec refers to ---- */
bool job_copy_is_own(const struct job *j, const json_t *copy);       /* one of j->copies: it lies in this node's memory */
FALLIBLE enum err job_spec_resolve(struct job *j);   /* reads the request: spec, storages and target */
/* ERR_TARGET_BUSY, ERR_STATE_DICT_BUSY: a live job, dry runs apart, writes what this one would write or read. After job_spec_resolve. */
FALLIBLE enum err job_spec_check_free(const struct job *j);
bool job_spec_selects(const struct job *j);          /* not the whole source */
bool job_spec_writes_checkpoint(const struct job *j);
struct state_dict_save job_spec_as_save(const struct job *j);    /* borrowed */
bool job_spec_loads(const struct job *j);             /* into a state dict, which it makes if there is none */
bool job_spec_makes_next(const struct job *j);        /* a state dict's next generation, beside the one that is there */
bool job_spec_compares(const struct job *j);         /* it has an a and a b */

/* ---- job_state_dict_op.c: operations on state dicts ---- */
bool job_state_dict_op_is(const struct job *j);
/* Checks the request against this host: ranks in group, group in world, back end and device. Comes after job_take_uses. */
FALLIBLE enum err job_state_dict_op_check(const struct job *j);
bool job_state_dict_op_network(const struct job *j);          /* its workers need sockets */
bool job_state_dict_op_device(const struct job *j);           /* … a GPU */
json_t *job_state_dict_op_comm(const struct job *j, uint64_t group_id);    /* "comm" of JOB: new for every attempt; NULL: no memory */
void job_state_dict_op_note_result(struct job *j);            /* the generation made into the result; metrics */

/* ---- job_lane.c ---- */
FALLIBLE enum err job_lane_of(struct job *j, struct lane **out);     /* made if there is none */
void job_lane_take_out(struct job *j);               /* a waiting one */
void job_lanes_free(struct jobs *all);
uint64_t job_lane_moves(const struct job *j);        /* of a job that waits: changes whenever its lane's queue does; else 0 */
void job_lane_put(const struct job *j, struct buf *out);    /* ,"waits_for":{…}: the job that a waiting one is behind, if any */

/* ---- job_uses.c ---- */
/* Holds the list of a planned save, and has room for the one part of it that it awaits. */
FALLIBLE enum err job_use_list(struct job *j);
FALLIBLE enum err job_use_sources(struct job *j);
FALLIBLE enum err job_use_others(struct job *j);     /* what it compares with, its model, its target */
/* Of a load: what it fills. Of an operation: its companion, if that has sealed anything. */
FALLIBLE enum err job_use_target(struct job *j);
void job_drop_uses(struct job *j);
void job_drop_sources(struct job *j);                /* all but what the job made */
uint64_t job_use_bytes(const struct state_dict_use *u);     /* of its images; u may be NULL */

/* ---- job_marks.c ---- */
/* Of a save that has committed: puts the hold and the alias that it asks for, once, and calls done. False: there is nothing to put. */
bool job_marks_put(struct job *j, void (*done)(struct job *j));

/* ---- job_tier.c: checkpoints that the storage behind theirs serves ---- */
/* May the reference, of what the job only reads, be to the copy instead? */
bool job_may_use_tier(const struct job *j, const struct ref *ref);
/* From now on it is. why: what is wrong with the one that was asked for. */
FALLIBLE enum err job_serve_from_tier(struct job *j, const struct ref *ref, enum err why);
/* From now on the source of a load is this one of j->copies, in a node's memory: the storage lacks the checkpoint. */
FALLIBLE enum err job_serve_from_neighbour(struct job *j, const json_t *copy);
/* The attempt failed because its source is damaged: true if the next one reads the copy. */
bool job_retry_from_tier(struct job *j, enum err e);
void job_note_served(struct job *j);                 /* into the result */

/* ---- job_end.c ---- */
/* job_move, and what others hear of it: one log line, one event, one row (if `write`). */
void job_set_state(struct job *j, enum job_step step, enum job_state state, const char *stage, bool write);
void job_emit_state(const struct job *j);
const char *job_stage_label(const struct job *j);    /* its stage as a label's value: a plain word */
/* Takes `tensors_digest` out of a save's result; if the save before in the run had the same, the result gets the warning STALE_SAVE and
 * `same_tensors_as`. */
#define STALE_SAVE "stale_save"
void job_note_tensors(struct job *j);
#define JOB_NOT_REPLICATED "not_replicated"      /* a warning: fewer neighbours have a copy than options.neighbours asks for */
void job_end(struct job *j, enum job_state state);   /* result and error are set */
void job_fail(struct job *j, enum err e);

/* ---- job_tell.c ---- */
void job_tell_followers(struct journal_txn *t, const struct job *j);     /* with the end; verdict and end_state are set */
void job_tell_stream(const struct job *j);           /* once it is on disk */

/* ---- job_queue.c ---- */
void job_queue(struct job *j);                       /* it has a place in its lane from now on, or waits for its source */
bool job_await_wanted(const struct job *j);
void job_show_missing(struct job *j);                /* the ranks that it awaits as its stage */
void job_lanes_wake(struct server *s);               /* the journal can be written again: lanes that wait for that go on */
void job_lane_leave(struct job *j);                  /* a running one; the next may start */
void job_end_dry_run(struct job *j, enum err e, const json_t *body);

/* ---- job_await.c: saves that are made before their generation is sealed ---- */
FALLIBLE enum err job_take_uses(struct job *j);
FALLIBLE enum err job_ring_lost(enum err e);         /* of a save that would have to begin again, for this reason; OK: after a restart */
static inline bool job_await_has_use(const struct job *j)     /* all that it awaits is sealed, or being filled */
{
	return j->part_uses ? j->part_uses[0] != NULL : j->source_use != NULL;
}
bool job_await_rests(struct job *j);                 /* its workers waited too long: it begins again with the last seal. false: none such */

/* ---- job_take.c: jobs of a cluster that change their node ---- */
bool job_may_be_shared(const struct job *j);         /* after job_spec_resolve */
json_t *job_storage_ids(const struct job *j);        /* name → id; NULL: one is not known */
/* Another node has the job, `to` ("": not known). It ends here, now or as soon as its workers have. */
void job_give_up(struct job *j, const char *to);
void job_resume(struct job *j);                      /* a held one: it is still this node's */

/* ---- job_body.c ---- */
json_int_t job_turn(const struct job *j);        /* how many owners the job had before this node */
/* The document of an attempt, and the descriptors that go with it, which stay their segments': the caller frees the array alone.
 * group_id: of the gang, for its collectives. */
FALLIBLE enum err job_body(struct job *j, uint64_t group_id, json_t **body_out, int **fds_out, uint32_t *fd_count_out);

/* ---- job_run.c: attempts ---- */
FALLIBLE enum err job_start_attempt(struct job *j);
void job_recover(struct job *j);
void job_begin_taken(struct job *j);                 /* of another node: asks its storage what that has done, then begins */
void job_stop(struct job *j);                        /* a cancel, at whatever step */
bool job_commit_waits(const struct job *j);          /* for the journal, which lacks space: the workers stand still */
void job_watch(struct server *s);                    /* stalls; called every tick */
