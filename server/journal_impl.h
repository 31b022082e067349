/* journal_impl.h: shared by the files journal*.c; nobody else includes it. */
#pragma once
#include <pthread.h>
#include <sqlite3.h>
#include <stdatomic.h>
#include "server/config.h"
#include "server/journal.h"

enum journal_change {
	PUT_JOB, PUT_LABEL, PUT_PLAN, PRUNE_COUNT, PRUNE_AGE, PRUNE_KEYS, PUT_SERVICE, PUT_WALL, PUT_CLUSTER, PUT_NOTED, PUT_KEY,
	PUT_STATE_DICT,
	DELETE_STATE_DICT, PUT_SLOT, DELETE_SLOT, PUT_STORAGE, DELETE_STORAGE, PUT_RUN, DELETE_RUN, NEXT_VERDICT,
	PUT_VERDICT, DELETE_VERDICT, PRUNE_VERDICTS, PUT_ATTEMPT, PRUNE_ATTEMPTS, PUT_WORKER, DELETE_WORKER, PUT_FOLLOWER,
	DELETE_FOLLOWER, PUT_TASK, SKIP_TASKS, SKIP_ABOUT, PRUNE_TASKS, PUT_AUDIT, PRUNE_AUDIT, CHANGE_MAX
};

enum journal_query {
	QUERY_UNENDED, QUERY_ENDED, QUERY_NEWEST_ID, QUERY_JOB, QUERY_JOBS, QUERY_PLAN, QUERY_KEY, QUERY_STATE_DICTS, QUERY_SLOTS,
	QUERY_STORAGES, QUERY_RUNS, QUERY_VERDICT, QUERY_VERDICT_NEWEST, QUERY_VERDICT_NEWS, QUERY_ATTEMPTS, QUERY_WORKERS, QUERY_FOLLOWERS,
	QUERY_TASK, QUERY_TASKS, QUERY_DUE, QUERY_NEWER, QUERY_TASK_COUNTS, QUERY_AUDIT,
	QUERY_MAX
};

struct journal {
	sqlite3 *db;                         /* the journal thread's */
	sqlite3 *reader;                     /* the loop's */
	sqlite3_stmt *queries[QUERY_MAX];    /* of the reader, made when first used */
	struct loop *loop;
	pthread_t thread;
	pthread_mutex_t lock;
	pthread_cond_t more, idle;
	struct journal_txn *first, **last;
	uint64_t waiting;                    /* handed over and not yet committed */
	struct journal_txn *held, **held_last;   /* changes that wait for space; the thread's, or the loop's as long as there is none */
	bool stop, running;                  /* running: there is a thread */
	bool unsynced;                       /* the thread's: synchronous=NORMAL */
	bool behind;                         /* the thread's: the log has commits that no sync has followed */
	bool doubtful;                       /* the thread's: nor will one, for it has failed */
	_Atomic bool full;                   /* no space: nothing is written */
	struct loop_timer *reopen;           /* the journal was opened without space */
	loop_fn changed;                     /* full has changed */
	void *changed_user;
	char path[CONFIG_PATH_MAX + 16];
	uint64_t id;
	int64_t service_ms, wall_ms, cluster, noted_ms;
	_Atomic uint64_t commits;
};

/* Adds a change to a transaction. types: a letter for each value that follows (s: struct str, z: const char *, i: int64_t). */
void journal_change(struct journal_txn *t, enum journal_change change, const char *types, ...);
/* Binds the values that `types` lists, as journal_change, and calls row(user) for each row of the answer. */
FALLIBLE enum err journal_ask(struct journal *j, enum journal_query q, enum err (*row)(void *user, sqlite3_stmt *s), void *user,
			      const char *types, ...);
/* A column's text, valid until the next row. */
struct str journal_column(sqlite3_stmt *s, int at);
/* Records ERR_STORAGE_FULL, ERR_NO_MEMORY, or ERR_JOURNAL with SQLite's words. */
enum err journal_failed(sqlite3 *db, const char *what);
enum err journal_no_space(const struct journal *j);      /* records ERR_STORAGE_FULL, naming the directory */
/* false: not even JOURNAL_ROOM bytes are free beside the journal. A commit that just fits would be followed by one that does not. */
bool journal_has_room(const struct journal *j);
FALLIBLE enum err journal_run(sqlite3 *db, const char *sql);
/* Opens both connections, migrates, and counts the start. */
FALLIBLE enum err journal_open_files(struct journal *j, uint64_t *boot_out);
/* Opens the reading connection alone, for a file system without space; an empty journal in memory if there is no file yet. */
FALLIBLE enum err journal_open_full(struct journal *j, uint64_t *boot_out);
void journal_close_files(struct journal *j);
void journal_close_reader(struct journal *j);
