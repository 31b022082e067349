/* journal_sql.h: what journal.c and journal_read.c share; nobody else includes it. */
#pragma once
#include <pthread.h>
#include <sqlite3.h>
#include <stdatomic.h>
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
	bool stop, running;
	uint64_t id;
	int64_t service_ms;
	_Atomic uint64_t commits;
};

enum err journal_failed(sqlite3 *db, const char *what);  /* records ERR_JOURNAL with SQLite's words, or ERR_NO_MEMORY */
void journal_close_reader(struct journal *j);
