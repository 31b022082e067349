/* journal.h: what survives a crash: jobs, plans, idempotency keys, state dicts, ad-hoc storages, worker pids, webhooks, chains. SQLite,
 * WAL, synchronous=FULL (NORMAL for what is about shared memory alone); no SQL text outside journal*.c.
 *
 * Writing: fill a transaction and hand it over; the journal thread commits all that wait as one (group commit).
 *
 *     struct journal_txn *t = journal_txn_new(j);     NULL inside is carried along: journal_commit reports ERR_NO_MEMORY
 *     journal_put_job(t, &row);
 *     journal_commit(j, t, fn, user);                 takes t; fn(user, e) from the loop when it is committed; fn may be NULL
 *
 * Transactions commit in the order of journal_commit; one that fails does not take others with it. One about shared memory
 * (journal_txn_of_memory) asks for no sync: the end of the daemon loses nothing of it, and a power cut takes the memory as well.
 *
 * Without space beside the journal nothing is written. A transaction with a callback fails with ERR_STORAGE_FULL, so that whoever asked
 * can ask again; all others are held, and written once there is space, which is looked for each second. Meanwhile requests that would
 * change something are refused (journal_may_write), and no job begins. A start without space is the same.
 *
 * Reading has a connection of its own on the loop's thread: queries by key, and one page of a list.
 *
 * Moments that decide something are in service time (clock.h); wall clock is in the records that people read, and says so. */
#pragma once
#include <jansson.h>
#include <sys/types.h>
#include "base/buf.h"
#include "server/loop.h"

struct journal;

enum { JOURNAL_VERSION = 13, JOURNAL_VERDICTS_MAX = 100000, JOURNAL_ATTEMPTS_MAX = 10000, JOURNAL_AUDIT_MAX = 100000 };

struct journal_txn;

/* Opens or makes the file, migrates an older one. ERR_JOURNAL_NEWER, ERR_JOURNAL (damaged: quick_check). *boot_out: this start's
 * number, already on disk. */
FALLIBLE enum err journal_open(const char *path, struct loop *loop, struct journal **out, uint64_t *boot_out);
FALLIBLE enum err journal_may_write(const struct journal *j);         /* ERR_STORAGE_FULL names the directory */
void journal_on_full(struct journal *j, loop_fn fn, void *user);     /* fn(user) whenever that has changed */
void journal_close(struct journal *j);      /* commits what waits; callbacks that have not run do not run */
void journal_sync(struct journal *j);       /* waits until all handed over is committed; for tests and for the end */
uint64_t journal_commits(const struct journal *j);   /* SQLite commits so far: group commit is visible here */
uint64_t journal_waiting(struct journal *j);         /* without those that are held */
bool journal_is_behind(struct journal *j);           /* changes that were handed over may not be committed yet */
uint64_t journal_id(const struct journal *j);        /* random, made with the file: whose segments are whose */
uint64_t journal_digest(struct str body);            /* of a request's body; stable over builds */
int64_t journal_service_ms(const struct journal *j); /* service time when it was last written */
int64_t journal_cluster(const struct journal *j);    /* the cluster that this state directory belonged to at the start; 0: none */
int64_t journal_noted_ms(const struct journal *j);   /* service time: jobs that ended before it are no news to the cluster; 0: not known */
int64_t journal_wall_ms(const struct journal *j);    /* wall clock when service time was last written; 0: not known */

struct journal_txn *journal_txn_new(struct journal *j);
void journal_txn_fail(struct journal_txn *t, enum err e);   /* nothing of it is written; whoever commits it hears e */
/* The transaction is held for want of space although it has a callback. drop(user) is called if the journal is closed before there is
 * space; NULL: the callback's user needs no release. */
void journal_txn_wait(struct journal_txn *t, void (*drop)(void *user));
/* All that the transaction says ends with this host's memory. fn is called when it is committed, and a power cut may still undo it. */
void journal_txn_of_memory(struct journal_txn *t);
void journal_commit(struct journal *j, struct journal_txn *t, done_fn fn, void *user);

struct journal_job {
	char id[27];
	int kind, state, attempt;
	bool ended;
	uid_t uid;
	const char *target;         /* "main:run1/step-100", "shm:serve" or "" */
	int64_t created_ms;         /* wall clock */
	int64_t finished_ms;        /* service time; 0: not yet */
	struct str doc;
};
void journal_put_job(struct journal_txn *t, const struct journal_job *row);
void journal_put_label(struct journal_txn *t, const char *id, struct str key, struct str value);   /* with the first put_job */
void journal_put_plan(struct journal_txn *t, const char *id, struct str plan);
/* Removes records of ended jobs beyond the newest `keep`, those older than before_ms, old idempotency keys, and the oldest verdicts,
 * attempts and audit rows beyond JOURNAL_VERDICTS_MAX, JOURNAL_ATTEMPTS_MAX and JOURNAL_AUDIT_MAX. */
void journal_prune(struct journal_txn *t, uint64_t keep, int64_t before_ms, int64_t keys_before_ms);
void journal_put_service(struct journal_txn *t, int64_t service_ms);
void journal_put_cluster(struct journal_txn *t, int64_t cluster);
void journal_put_noted(struct journal_txn *t, int64_t service_ms);

struct journal_key {
	const char *scope;          /* "job", "state_dict" */
	uid_t uid;
	struct str key;
	uint64_t digest;            /* of the body */
	char resource[256];
	int64_t created_ms;         /* service time */
};
void journal_put_key(struct journal_txn *t, const struct journal_key *row);

struct journal_state_dict {
	const char *name;
	uid_t uid;
	uint32_t world_size, slots;
	int64_t lease_ms, created_ms, orphaned_ms;   /* the last two: wall clock */
	int64_t orphan_since_ms;    /* service time */
	int64_t last_generation;
	struct str on_owner_death;  /* JSON or empty */
	struct str role;            /* JSON or empty: it publishes, subscribes or is a replica; never changes */
};
struct journal_slot {
	const char *name;
	uint32_t rank, slot;
	const char *segment;
	uint64_t bytes, image_bytes;
	int state;
	int64_t generation;
};
void journal_put_state_dict(struct journal_txn *t, const struct journal_state_dict *row);
void journal_delete_state_dict(struct journal_txn *t, const char *name);     /* with its slots */
void journal_put_slot(struct journal_txn *t, const struct journal_slot *row);
void journal_delete_slot(struct journal_txn *t, const char *name, uint32_t rank, uint32_t slot);

struct journal_storage {
	const char *name, *path;
	uid_t uid;
	int64_t expires_ms;         /* service time */
};
void journal_put_storage(struct journal_txn *t, const struct journal_storage *row);
void journal_delete_storage(struct journal_txn *t, const char *name);
/* The marks that a run may have reached (server/runs.h); a column each. */
enum run_mark { RUN_DURABLE, RUN_VERIFIED_STRUCTURE, RUN_VERIFIED_DIGEST, RUN_VERIFIED_VALUES, RUN_MARK_COUNT };
struct journal_run {
	const char *storage, *name;
	int64_t step;
	const int64_t *at_ms;       /* by enum run_mark */
	const char *tensors, *saved; /* digest of all tensors of the last save, and its name; "" */
	const char *course;         /* JSON of server/runs.c: the newest step seen, what saves took; "" */
};
void journal_put_run(struct journal_txn *t, const struct journal_run *row);
void journal_delete_run(struct journal_txn *t, const char *storage, const char *name);

/* A verdict on a checkpoint's bytes (server/verdict.h). */
struct journal_verdict {
	const char *storage, *name;
	const char *identity;       /* of the checkpoint that was looked at */
	int64_t at_ms;
	struct str doc;             /* JSON: `verified` of the checkpoint's record */
};
/* A verdict that is put gets a number above all others'. unless_known: a verdict on the same identity stays. */
void journal_put_verdict(struct journal_txn *t, const struct journal_verdict *row, bool unless_known);
void journal_delete_verdict(struct journal_txn *t, const char *storage, const char *name);

/* How often a training has begun from a checkpoint (server/resume.h). */
struct journal_attempts {
	const char *storage, *name;
	const char *identity;       /* of the checkpoint that lay there */
	int64_t count, at_ms;       /* the last one's wall clock */
};
/* Counts one more attempt, at row->at_ms. The count goes on from the row that is there if that has the same identity and `goes_on`; else
 * it begins with 1. */
void journal_put_attempt(struct journal_txn *t, const struct journal_attempts *row, bool goes_on);
/* A change by a caller or a policy (server/audit.h). Texts are "" where they do not apply. */
struct journal_audit {
	int64_t id;                 /* grows; read, not put */
	int64_t at_ms;              /* wall clock */
	uid_t uid;
	const char *token, *policy, *action, *subject, *job;
	struct str request;         /* JSON */
};
void journal_put_audit(struct journal_txn *t, const struct journal_audit *row);
/* Running workers, so that the next start can be sure that the ones of a killed daemon are gone. */
void journal_put_worker(struct journal_txn *t, pid_t pid, uint64_t start_ticks);
void journal_delete_worker(struct journal_txn *t, pid_t pid);

/* A follower acts when a checkpoint changes: a webhook, a chain or a policy. Tasks of the first two: deliveries, executions. Numbers are
 * the journal's. */
enum journal_follower_kind { JOURNAL_WEBHOOK, JOURNAL_CHAIN, JOURNAL_POLICY, JOURNAL_FOLLOWER_KINDS };
enum task_state { TASK_WAITING, TASK_RUNNING, TASK_DONE, TASK_FAILED, TASK_SKIPPED, TASK_STATE_COUNT };
enum { TASK_ID_LEN = 26 };
struct journal_follower {
	enum journal_follower_kind kind;
	const char *name;
	uid_t uid;                  /* who set it */
	int64_t created_ms;         /* wall clock; 0: not known */
	struct str doc;
};
struct journal_task {
	enum journal_follower_kind kind;
	const char *follower, *id;  /* ids sort by time */
	enum task_state state;
	int64_t due_ms;             /* service time */
	const char *about;          /* the checkpoint, NULL: none; not read */
	struct str doc;
};
void journal_put_follower(struct journal_txn *t, const struct journal_follower *row);
void journal_delete_follower(struct journal_txn *t, enum journal_follower_kind kind, const char *name);   /* with its tasks */
void journal_put_task(struct journal_txn *t, const struct journal_task *row);      /* nothing if its follower is gone */
/* Waiting tasks of a follower beyond the newest `keep` become skipped ones. */
void journal_skip_tasks(struct journal_txn *t, enum journal_follower_kind kind, const char *follower, uint64_t keep);
/* Waiting tasks of a follower about the checkpoint `about` become skipped ones. */
void journal_skip_about(struct journal_txn *t, enum journal_follower_kind kind, const char *follower, const char *about);
/* Ended tasks of a follower beyond the newest `keep` go. */
void journal_prune_tasks(struct journal_txn *t, enum journal_follower_kind kind, const char *follower, uint64_t keep);

/* ---- reading (the loop's thread) ---- rows are valid during the callback; its error stops the walk. */
typedef enum err (*journal_job_fn)(void *user, const struct journal_job *row);
typedef enum err (*journal_state_dict_fn)(void *user, const struct journal_state_dict *row);
typedef enum err (*journal_slot_fn)(void *user, const struct journal_slot *row);
typedef enum err (*journal_storage_fn)(void *user, const struct journal_storage *row);
typedef enum err (*journal_verdict_fn)(void *user, const struct journal_verdict *row);
typedef enum err (*journal_attempts_fn)(void *user, const struct journal_attempts *row);
typedef enum err (*journal_verdict_news_fn)(void *user, const char *name, const char *identity, const char *state, uint64_t number);
typedef enum err (*journal_run_fn)(void *user, const struct journal_run *row);
typedef enum err (*journal_audit_fn)(void *user, const struct journal_audit *row);
typedef enum err (*journal_worker_fn)(void *user, pid_t pid, uint64_t start_ticks);

enum { JOURNAL_FILTER_LABELS = 4 };
struct journal_filter {
	int state, kind;            /* -1: any */
	struct str target;          /* n == 0: any */
	struct str label_key[JOURNAL_FILTER_LABELS], label_value[JOURNAL_FILTER_LABELS];
	uint32_t label_count;
	struct str before_id;       /* n == 0: from the newest */
};
FALLIBLE enum err journal_read_unended(struct journal *j, journal_job_fn fn, void *user);   /* oldest first */
/* The newest that ended in service time since_ms or later. */
FALLIBLE enum err journal_read_ended(struct journal *j, int64_t since_ms, uint32_t limit, journal_job_fn fn, void *user);
FALLIBLE enum err journal_read_newest_id(struct journal *j, char id_out[27]);               /* "" if there are no jobs */
FALLIBLE enum err journal_read_job(struct journal *j, struct str id, journal_job_fn fn, void *user); /* no row: fn is not called */
FALLIBLE enum err journal_read_jobs(struct journal *j, const struct journal_filter *f, uint32_t limit, journal_job_fn fn,
				    void *user);
FALLIBLE enum err journal_read_plan(struct journal *j, struct str id, struct buf *out, bool *found_out);
FALLIBLE enum err journal_read_key(struct journal *j, struct journal_key *row, bool *found_out); /* by scope, uid and key */
FALLIBLE enum err journal_read_state_dicts(struct journal *j, journal_state_dict_fn fn, void *user);
FALLIBLE enum err journal_read_slots(struct journal *j, journal_slot_fn fn, void *user);
FALLIBLE enum err journal_read_storages(struct journal *j, journal_storage_fn fn, void *user);
FALLIBLE enum err journal_read_runs(struct journal *j, uint32_t limit, journal_run_fn fn, void *user);     /* the newest */
/* Newest first, those before an id (0: from the newest). */
FALLIBLE enum err journal_read_audit(struct journal *j, int64_t before, uint32_t limit, journal_audit_fn fn, void *user);
FALLIBLE enum err journal_read_workers(struct journal *j, journal_worker_fn fn, void *user);
/* Verdicts of a storage with that number or a greater one, in the order of the numbers, at most `limit`. *newest_out: the greatest number
 * of all, by which every row of it and below can be read. */
FALLIBLE enum err journal_read_verdict_news(struct journal *j, struct str storage, uint64_t from, uint32_t limit, uint64_t *newest_out,
					    journal_verdict_news_fn fn, void *user);
/* No row: fn is not called. */
FALLIBLE enum err journal_read_verdict(struct journal *j, struct str storage, struct str name, journal_verdict_fn fn, void *user);
FALLIBLE enum err journal_read_attempts(struct journal *j, struct str storage, struct str name, journal_attempts_fn fn, void *user);

typedef enum err (*journal_follower_fn)(void *user, const struct journal_follower *row);
typedef enum err (*journal_task_fn)(void *user, const struct journal_task *row);
FALLIBLE enum err journal_read_followers(struct journal *j, enum journal_follower_kind kind, journal_follower_fn fn, void *user);
/* No row: fn is not called. */
FALLIBLE enum err journal_read_task(struct journal *j, enum journal_follower_kind kind, const char *follower, struct str id,
				    journal_task_fn fn, void *user);
/* Newest first, those before an id (n == 0: from the newest). */
FALLIBLE enum err journal_read_tasks(struct journal *j, enum journal_follower_kind kind, const char *follower, struct str before_id,
				     uint32_t limit, journal_task_fn fn, void *user);
/* Tasks of a follower in a state, by due_ms, then by id. */
FALLIBLE enum err journal_read_due(struct journal *j, enum journal_follower_kind kind, const char *follower, enum task_state state,
				   uint32_t limit, journal_task_fn fn, void *user);
/* Is there a task about the same checkpoint with a higher id? */
FALLIBLE enum err journal_has_newer_task(struct journal *j, enum journal_follower_kind kind, const char *follower, const char *about,
					 const char *id, bool *out);
FALLIBLE enum err journal_count_tasks(struct journal *j, enum journal_follower_kind kind, const char *follower,
				      uint64_t counts[TASK_STATE_COUNT]);
