/* journal_impl.h: shared by journal.c, journal_open.c and journal_read.c; nobody else includes it. */
#pragma once
#include <pthread.h>
#include <sqlite3.h>
#include <stdatomic.h>
#include "server/config.h"
#include "server/journal.h"

enum journal_query {
	QUERY_UNENDED, QUERY_NEWEST_ID, QUERY_JOB, QUERY_JOBS, QUERY_PLAN, QUERY_KEY, QUERY_STATE_DICTS, QUERY_SLOTS, QUERY_STORAGES,
	QUERY_RUNS, QUERY_VERDICT, QUERY_WORKERS, QUERY_MAX
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
	uint64_t waiting;                    /* handed over and not yet on disk */
	struct journal_txn *held, **held_last;   /* changes that wait for space; the thread's, or the loop's as long as there is none */
	bool stop, running;                  /* running: there is a thread */
	_Atomic bool full;                   /* no space: nothing is written */
	struct loop_timer *reopen;           /* the journal was opened without space */
	loop_fn changed;                     /* full has changed */
	void *changed_user;
	char path[CONFIG_PATH_MAX + 16];
	uint64_t id;
	int64_t service_ms;
	_Atomic uint64_t commits;
};

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
