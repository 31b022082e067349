/* journal_read.c: the reading side of the journal: one connection of the loop's thread, one prepared statement per question.
 *
 * WAL lets it read while the journal thread writes; it sees what is committed. Questions are by key or give one page, so that the
 * loop is held up for microseconds, not for a scan. */
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>

#include "server/journal_impl.h"

#define JOB_COLUMNS "id, kind, state, ended, attempt, uid, target, created_ms, finished_ms, doc"
#define HAS_LABEL(k, v) " AND (?" k " = '' OR EXISTS(SELECT 1 FROM labels WHERE job = jobs.id AND key = ?" k " AND value = ?" v "))"

static const char *const query_sql[QUERY_MAX] = {
	[QUERY_UNENDED] = "SELECT " JOB_COLUMNS " FROM jobs WHERE ended = 0 ORDER BY id",
	[QUERY_ENDED] = "SELECT " JOB_COLUMNS " FROM jobs WHERE ended = 1 AND finished_ms >= ?1 ORDER BY finished_ms DESC LIMIT ?2",
	[QUERY_NEWEST_ID] = "SELECT id FROM jobs ORDER BY id DESC LIMIT 1",
	[QUERY_JOB] = "SELECT " JOB_COLUMNS " FROM jobs WHERE id = ?1",
	[QUERY_JOBS] = "SELECT " JOB_COLUMNS " FROM jobs WHERE (?1 = '' OR id < ?1) AND (?2 < 0 OR state = ?2)"
		       " AND (?3 < 0 OR kind = ?3) AND (?4 = '' OR target = ?4)" HAS_LABEL("6", "7") HAS_LABEL("8", "9")
		       HAS_LABEL("10", "11") HAS_LABEL("12", "13") " ORDER BY id DESC LIMIT ?5",
	[QUERY_PLAN] = "SELECT plan FROM plans WHERE job = ?1",
	[QUERY_KEY] = "SELECT digest, resource, created_ms FROM keys WHERE scope = ?1 AND uid = ?2 AND key = ?3",
	[QUERY_STATE_DICTS] = "SELECT name, uid, world_size, slots, lease_ms, created_ms, orphaned_ms, last_generation,"
			      " on_owner_death, orphan_since_ms, role FROM state_dicts ORDER BY name",
	[QUERY_SLOTS] = "SELECT name, rank, slot, segment, bytes, image_bytes, state, generation FROM slots"
			" ORDER BY name, rank, slot",
	[QUERY_STORAGES] = "SELECT name, path, uid, expires_ms FROM storages ORDER BY name",
	[QUERY_RUNS] = "SELECT storage, name, step, durable_ms, structure_ms, digest_ms, values_ms, tensors, saved, course FROM runs"
		       " ORDER BY max(durable_ms, structure_ms, digest_ms, values_ms) DESC LIMIT ?1",
	[QUERY_VERDICT] = "SELECT storage, name, identity, at_ms, doc FROM verdicts WHERE storage = ?1 AND name = ?2",
	[QUERY_ATTEMPTS] = "SELECT storage, name, identity, count, at_ms FROM attempts WHERE storage = ?1 AND name = ?2",
	[QUERY_VERDICT_NEWEST] = "SELECT ifnull(max(number), 0) FROM verdicts",
	[QUERY_VERDICT_NEWS] = "SELECT name, identity, iif(json_valid(doc), json_extract(doc, '$.state'), ''), number FROM verdicts"
			       " WHERE number >= ?2 AND storage = ?1 ORDER BY number LIMIT ?3",
	[QUERY_AUDIT] = "SELECT id, at_ms, uid, token, policy, action, subject, job, request FROM audit WHERE ?1 = 0 OR id < ?1"
			" ORDER BY id DESC LIMIT ?2",
	[QUERY_WORKERS] = "SELECT pid, start_ticks FROM workers",
	[QUERY_FOLLOWERS] = "SELECT name, uid, created_ms, doc FROM followers WHERE kind = ?1 ORDER BY name",
	[QUERY_TASK] = "SELECT id, state, due_ms, doc FROM tasks WHERE kind = ?1 AND follower = ?2 AND id = ?3",
	[QUERY_TASKS] = "SELECT id, state, due_ms, doc FROM tasks WHERE kind = ?1 AND follower = ?2 AND (?3 = '' OR id < ?3)"
			" ORDER BY id DESC LIMIT ?4",
	[QUERY_DUE] = "SELECT id, state, due_ms, doc FROM tasks WHERE kind = ?1 AND follower = ?2 AND state = ?3"
		      " ORDER BY due_ms, id LIMIT ?4",
	[QUERY_NEWER] = "SELECT id, state, due_ms, doc FROM tasks WHERE kind = ?1 AND follower = ?2 AND about = ?3 AND id > ?4 LIMIT 1",
	[QUERY_TASK_COUNTS] = "SELECT state, count(*) FROM tasks WHERE kind = ?1 AND follower = ?2 GROUP BY state",
};

enum err journal_failed(sqlite3 *db, const char *what)
{
	if (!db || sqlite3_errcode(db) == SQLITE_NOMEM)
		return ERR(NO_MEMORY, "%s: out of memory", what);
	int code = sqlite3_errcode(db), os = sqlite3_system_errno(db);
	if (code == SQLITE_FULL || ((code == SQLITE_IOERR || code == SQLITE_CANTOPEN) && (os == ENOSPC || os == EDQUOT)))
		return ERR(STORAGE_FULL, "%s: %s", what, sqlite3_errmsg(db));
	return ERR(JOURNAL, "%s: %s", what, sqlite3_errmsg(db));
}

FALLIBLE enum err journal_run(sqlite3 *db, const char *sql)
{
	return sqlite3_exec(db, sql, NULL, NULL, NULL) == SQLITE_OK ? OK : journal_failed(db, "journal");
}

void journal_close_reader(struct journal *j)
{
	for (int i = 0; i < QUERY_MAX; i++) {
		sqlite3_finalize(j->queries[i]);
		j->queries[i] = NULL;
	}
	sqlite3_close(j->reader);
	j->reader = NULL;
}

static FALLIBLE enum err prepare(struct journal *j, enum journal_query q, sqlite3_stmt **out)
{
	if (!j->queries[q] && sqlite3_prepare_v3(j->reader, query_sql[q], -1, SQLITE_PREPARE_PERSISTENT, &j->queries[q],
						 NULL) != SQLITE_OK)
		return journal_failed(j->reader, "journal");
	*out = j->queries[q];
	return OK;
}

static void bind_str(sqlite3_stmt *s, int at, struct str v)
{
	sqlite3_bind_text(s, at, v.p ? v.p : "", (int)v.n, SQLITE_STATIC);
}

struct str journal_column(sqlite3_stmt *s, int at)
{
	const char *p = (const char *)sqlite3_column_text(s, at);

	return p ? (struct str){ p, (size_t)sqlite3_column_bytes(s, at) } : STR("");
}

static const char *column_z(sqlite3_stmt *s, int at)
{
	const char *p = (const char *)sqlite3_column_text(s, at);

	return p ? p : "";
}

FALLIBLE enum err journal_ask(struct journal *j, enum journal_query q, enum err (*row)(void *user, sqlite3_stmt *s), void *user,
			      const char *types, ...)
{
	int rc = SQLITE_DONE;
	enum err e = OK;
	sqlite3_stmt *s = NULL;
	va_list ap;

	TRY(prepare(j, q, &s));
	va_start(ap, types);
	for (int at = 1; types[at - 1]; at++) {
		if (types[at - 1] == 's')
			bind_str(s, at, va_arg(ap, struct str));
		else if (types[at - 1] == 'z')
			bind_str(s, at, str_of(va_arg(ap, const char *)));
		else
			sqlite3_bind_int64(s, at, va_arg(ap, int64_t));
	}
	va_end(ap);
	while (!e && (rc = sqlite3_step(s)) == SQLITE_ROW)
		e = row(user, s);
	if (!e && rc != SQLITE_DONE)
		e = journal_failed(j->reader, "journal");
	sqlite3_reset(s);
	sqlite3_clear_bindings(s);
	return e;
}

struct call {
	union {
		journal_job_fn job;
		journal_state_dict_fn state_dict;
		journal_slot_fn slot;
		journal_storage_fn storage;
		journal_run_fn run;
		journal_verdict_fn verdict;
		journal_attempts_fn attempts;
		journal_verdict_news_fn verdict_news;
		journal_audit_fn audit;
		journal_worker_fn worker;
	};
	void *user;
};

static enum err row_job(void *user, sqlite3_stmt *s)
{
	const struct call *c = user;
	struct journal_job row = { .kind = sqlite3_column_int(s, 1),
				   .state = sqlite3_column_int(s, 2),
				   .ended = sqlite3_column_int(s, 3) != 0,
				   .attempt = sqlite3_column_int(s, 4),
				   .uid = (uid_t)sqlite3_column_int64(s, 5),
				   .target = column_z(s, 6),
				   .created_ms = sqlite3_column_int64(s, 7),
				   .finished_ms = sqlite3_column_int64(s, 8),
				   .doc = journal_column(s, 9) };
	struct str id = journal_column(s, 0);

	if (id.n != sizeof row.id - 1)
		return ERR(JOURNAL, "the journal holds a job without a proper id");
	memcpy(row.id, id.p, id.n);
	return c->job(c->user, &row);
}

FALLIBLE enum err journal_read_unended(struct journal *j, journal_job_fn fn, void *user)
{
	return journal_ask(j, QUERY_UNENDED, row_job, &(struct call){ .job = fn, .user = user }, "");
}

FALLIBLE enum err journal_read_ended(struct journal *j, int64_t since_ms, uint32_t limit, journal_job_fn fn, void *user)
{
	return journal_ask(j, QUERY_ENDED, row_job, &(struct call){ .job = fn, .user = user }, "ii", since_ms, (int64_t)limit);
}

static enum err row_id(void *user, sqlite3_stmt *s)
{
	snprintf(user, sizeof((struct journal_job *)0)->id, "%s", column_z(s, 0));
	return OK;
}

FALLIBLE enum err journal_read_newest_id(struct journal *j, char id_out[27])
{
	id_out[0] = '\0';
	return journal_ask(j, QUERY_NEWEST_ID, row_id, id_out, "");
}

FALLIBLE enum err journal_read_job(struct journal *j, struct str id, journal_job_fn fn, void *user)
{
	return journal_ask(j, QUERY_JOB, row_job, &(struct call){ .job = fn, .user = user }, "s", id);
}

FALLIBLE enum err journal_read_jobs(struct journal *j, const struct journal_filter *f, uint32_t limit, journal_job_fn fn,
				    void *user)
{
	const struct str *k = f->label_key, *v = f->label_value; /* those not given are empty */

	return journal_ask(j, QUERY_JOBS, row_job, &(struct call){ .job = fn, .user = user }, "siisissssssss", f->before_id,
			   (int64_t)f->state, (int64_t)f->kind, f->target, (int64_t)limit, k[0], v[0], k[1], v[1], k[2], v[2], k[3], v[3]);
}

struct plan_into {
	struct buf *out;
	bool found;
};

static enum err row_plan(void *user, sqlite3_stmt *s)
{
	struct plan_into *into = user;
	struct str text = journal_column(s, 0);

	buf_put(into->out, text.p, text.n);
	into->found = true;
	return buf_status(into->out);
}

FALLIBLE enum err journal_read_plan(struct journal *j, struct str id, struct buf *out, bool *found_out)
{
	struct plan_into into = { .out = out };

	TRY(journal_ask(j, QUERY_PLAN, row_plan, &into, "s", id));
	*found_out = into.found;
	return OK;
}

struct key_into {
	struct journal_key *key;
	bool found;
};

static enum err row_key(void *user, sqlite3_stmt *s)
{
	struct key_into *into = user;
	struct str resource = journal_column(s, 1);

	if (resource.n >= sizeof into->key->resource)
		return ERR(JOURNAL, "the journal holds a key of something with too long a name");
	into->key->digest = (uint64_t)sqlite3_column_int64(s, 0);
	memcpy(into->key->resource, resource.p, resource.n);
	into->key->resource[resource.n] = '\0';
	into->key->created_ms = sqlite3_column_int64(s, 2);
	into->found = true;
	return OK;
}

FALLIBLE enum err journal_read_key(struct journal *j, struct journal_key *row, bool *found_out)
{
	struct key_into into = { .key = row };

	TRY(journal_ask(j, QUERY_KEY, row_key, &into, "sis", str_of(row->scope), (int64_t)row->uid, row->key));
	*found_out = into.found;
	return OK;
}

static enum err row_state_dict(void *user, sqlite3_stmt *s)
{
	const struct call *c = user;
	struct journal_state_dict row = { .name = column_z(s, 0),
					  .uid = (uid_t)sqlite3_column_int64(s, 1),
					  .world_size = (uint32_t)sqlite3_column_int64(s, 2),
					  .slots = (uint32_t)sqlite3_column_int64(s, 3),
					  .lease_ms = sqlite3_column_int64(s, 4),
					  .created_ms = sqlite3_column_int64(s, 5),
					  .orphaned_ms = sqlite3_column_int64(s, 6),
					  .last_generation = sqlite3_column_int64(s, 7),
					  .on_owner_death = journal_column(s, 8),
					  .orphan_since_ms = sqlite3_column_int64(s, 9),
					  .role = journal_column(s, 10) };

	return c->state_dict(c->user, &row);
}

FALLIBLE enum err journal_read_state_dicts(struct journal *j, journal_state_dict_fn fn, void *user)
{
	return journal_ask(j, QUERY_STATE_DICTS, row_state_dict, &(struct call){ .state_dict = fn, .user = user }, "");
}

static enum err row_slot(void *user, sqlite3_stmt *s)
{
	const struct call *c = user;
	struct journal_slot row = { .name = column_z(s, 0),
				    .rank = (uint32_t)sqlite3_column_int64(s, 1),
				    .slot = (uint32_t)sqlite3_column_int64(s, 2),
				    .segment = column_z(s, 3),
				    .bytes = (uint64_t)sqlite3_column_int64(s, 4),
				    .image_bytes = (uint64_t)sqlite3_column_int64(s, 5),
				    .state = sqlite3_column_int(s, 6),
				    .generation = sqlite3_column_int64(s, 7) };

	return c->slot(c->user, &row);
}

FALLIBLE enum err journal_read_slots(struct journal *j, journal_slot_fn fn, void *user)
{
	return journal_ask(j, QUERY_SLOTS, row_slot, &(struct call){ .slot = fn, .user = user }, "");
}

static enum err row_storage(void *user, sqlite3_stmt *s)
{
	const struct call *c = user;
	struct journal_storage row = { .name = column_z(s, 0),
				       .path = column_z(s, 1),
				       .uid = (uid_t)sqlite3_column_int64(s, 2),
				       .expires_ms = sqlite3_column_int64(s, 3) };

	return c->storage(c->user, &row);
}

FALLIBLE enum err journal_read_storages(struct journal *j, journal_storage_fn fn, void *user)
{
	return journal_ask(j, QUERY_STORAGES, row_storage, &(struct call){ .storage = fn, .user = user }, "");
}

static enum err row_run(void *user, sqlite3_stmt *s)
{
	const struct call *c = user;
	int64_t at_ms[RUN_MARK_COUNT];

	for (int m = 0; m < RUN_MARK_COUNT; m++)
		at_ms[m] = sqlite3_column_int64(s, 3 + m);
	const struct journal_run row = { column_z(s, 0), column_z(s, 1), sqlite3_column_int64(s, 2), at_ms,
					 column_z(s, 3 + RUN_MARK_COUNT), column_z(s, 4 + RUN_MARK_COUNT),
					 column_z(s, 5 + RUN_MARK_COUNT) };
	return c->run(c->user, &row);
}

FALLIBLE enum err journal_read_runs(struct journal *j, uint32_t limit, journal_run_fn fn, void *user)
{
	return journal_ask(j, QUERY_RUNS, row_run, &(struct call){ .run = fn, .user = user }, "i", (int64_t)limit);
}

static enum err row_audit(void *user, sqlite3_stmt *s)
{
	const struct call *c = user;

	return c->audit(c->user, &(struct journal_audit){ sqlite3_column_int64(s, 0), sqlite3_column_int64(s, 1),
							  (uid_t)sqlite3_column_int64(s, 2), column_z(s, 3), column_z(s, 4), column_z(s, 5),
							  column_z(s, 6), column_z(s, 7), journal_column(s, 8) });
}

FALLIBLE enum err journal_read_audit(struct journal *j, int64_t before, uint32_t limit, journal_audit_fn fn, void *user)
{
	return journal_ask(j, QUERY_AUDIT, row_audit, &(struct call){ .audit = fn, .user = user }, "ii", before, (int64_t)limit);
}

static enum err row_worker(void *user, sqlite3_stmt *s)
{
	const struct call *c = user;

	return c->worker(c->user, (pid_t)sqlite3_column_int64(s, 0), (uint64_t)sqlite3_column_int64(s, 1));
}

FALLIBLE enum err journal_read_workers(struct journal *j, journal_worker_fn fn, void *user)
{
	return journal_ask(j, QUERY_WORKERS, row_worker, &(struct call){ .worker = fn, .user = user }, "");
}

static enum err row_verdict(void *user, sqlite3_stmt *s)
{
	const struct call *c = user;

	return c->verdict(c->user, &(struct journal_verdict){ column_z(s, 0), column_z(s, 1), column_z(s, 2), sqlite3_column_int64(s, 3),
							      journal_column(s, 4) });
}

FALLIBLE enum err journal_read_verdict(struct journal *j, struct str storage, struct str name, journal_verdict_fn fn, void *user)
{
	return journal_ask(j, QUERY_VERDICT, row_verdict, &(struct call){ .verdict = fn, .user = user }, "ss", storage, name);
}

static enum err row_attempts(void *user, sqlite3_stmt *s)
{
	const struct call *c = user;

	return c->attempts(c->user, &(struct journal_attempts){ column_z(s, 0), column_z(s, 1), column_z(s, 2), sqlite3_column_int64(s, 3),
								sqlite3_column_int64(s, 4) });
}

FALLIBLE enum err journal_read_attempts(struct journal *j, struct str storage, struct str name, journal_attempts_fn fn, void *user)
{
	return journal_ask(j, QUERY_ATTEMPTS, row_attempts, &(struct call){ .attempts = fn, .user = user }, "ss", storage, name);
}

static enum err row_newest(void *user, sqlite3_stmt *s)
{
	*(uint64_t *)user = (uint64_t)sqlite3_column_int64(s, 0);
	return OK;
}

static enum err row_verdict_news(void *user, sqlite3_stmt *s)
{
	const struct call *c = user;

	return c->verdict_news(c->user, column_z(s, 0), column_z(s, 1), column_z(s, 2), (uint64_t)sqlite3_column_int64(s, 3));
}

FALLIBLE enum err journal_read_verdict_news(struct journal *j, struct str storage, uint64_t from, uint32_t limit, uint64_t *newest_out,
					    journal_verdict_news_fn fn, void *user)
{
	TRY(journal_ask(j, QUERY_VERDICT_NEWEST, row_newest, newest_out, ""));
	return journal_ask(j, QUERY_VERDICT_NEWS, row_verdict_news, &(struct call){ .verdict_news = fn, .user = user }, "sii", storage,
		   (int64_t)from, (int64_t)limit);
}
