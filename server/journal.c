/* journal.c: see journal.h. The writing side.
 *
 * A thread rather than SQLite calls in the loop: most commits are an fsync, which waits behind a save that saturates the disk. Group
 * commit: while one commit is in flight, the next ones pile up and then share the next fsync. Each transaction runs in a savepoint,
 * so that a row that is refused takes only its own transaction back. */
#include "server/journal.h"

#include <stdarg.h>
#include <stdio.h>
#include <time.h>
#include <xxhash.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/mem.h"
#include "server/journal_impl.h"
#include "server/loop.h"

static const char *const change_sql[CHANGE_MAX] = {
	[PUT_JOB] = "INSERT INTO jobs VALUES(?1,?2,?3,?4,?5,?6,?7,?8,?9,?10) ON CONFLICT(id) DO UPDATE SET state=?3, ended=?4,"
		    " attempt=?5, finished_ms=?9, doc=?10",
	[PUT_LABEL] = "INSERT OR REPLACE INTO labels VALUES(?1,?2,?3)",
	[PUT_PLAN] = "INSERT OR REPLACE INTO plans VALUES(?1,?2)",
	[PRUNE_COUNT] = "DELETE FROM jobs WHERE id IN (SELECT id FROM jobs WHERE ended = 1"
			" ORDER BY finished_ms DESC LIMIT -1 OFFSET ?1)",
	[PRUNE_AGE] = "DELETE FROM jobs WHERE ended = 1 AND finished_ms < ?1",
	[PRUNE_KEYS] = "DELETE FROM keys WHERE created_ms < ?1",
	[PUT_WALL] = "INSERT OR REPLACE INTO meta VALUES('wall_ms', ?1)",
	[PUT_CLUSTER] = "INSERT OR REPLACE INTO meta VALUES('cluster', ?1)",
	[PUT_NOTED] = "INSERT OR REPLACE INTO meta VALUES('noted_ms', ?1)",
	[PUT_SERVICE] = "UPDATE meta SET value = ?1 WHERE key = 'service_ms'",
	[PUT_KEY] = "INSERT OR REPLACE INTO keys VALUES(?1,?2,?3,?4,?5,?6)",
	[PUT_STATE_DICT] = "INSERT INTO state_dicts VALUES(?1,?2,?3,?4,?5,?6,?7,?8,?9,?10,?11) ON CONFLICT(name) DO UPDATE SET"
			   " orphaned_ms=?7, last_generation=?8, on_owner_death=?9, orphan_since_ms=?10",
	[DELETE_STATE_DICT] = "DELETE FROM state_dicts WHERE name = ?1",
	[PUT_SLOT] = "INSERT OR REPLACE INTO slots VALUES(?1,?2,?3,?4,?5,?6,?7,?8)",
	[DELETE_SLOT] = "DELETE FROM slots WHERE name = ?1 AND rank = ?2 AND slot = ?3",
	[PUT_STORAGE] = "INSERT OR REPLACE INTO storages VALUES(?1,?2,?3,?4)",
	[DELETE_STORAGE] = "DELETE FROM storages WHERE name = ?1",
	[PUT_RUN] = "INSERT OR REPLACE INTO runs VALUES(?1,?2,?3,?4,?5,?6,?7,?8,?9,?10)",
	[DELETE_RUN] = "DELETE FROM runs WHERE storage = ?1 AND name = ?2",
	/* Numbers grow, also when the verdicts that had the greatest ones are gone. */
	[NEXT_VERDICT] = "INSERT INTO meta SELECT 'verdict', ifnull(max(number), 0) + 1 FROM verdicts WHERE true"
			 " ON CONFLICT(key) DO UPDATE SET value = max(value + 1, excluded.value)",
	[PUT_VERDICT] = "INSERT INTO verdicts VALUES(?1,?2,?3,?4,?5,(SELECT value FROM meta WHERE key = 'verdict'))"
			" ON CONFLICT(storage, name) DO UPDATE SET identity=?3, at_ms=?4, doc=?5, number=excluded.number"
			" WHERE ?6 = 0 OR identity <> ?3",
	[DELETE_VERDICT] = "DELETE FROM verdicts WHERE storage = ?1 AND name = ?2",
	[PRUNE_VERDICTS] = "DELETE FROM verdicts WHERE at_ms < (SELECT at_ms FROM verdicts ORDER BY at_ms DESC LIMIT 1 OFFSET ?1)",
	[PUT_ATTEMPT] = "INSERT INTO attempts VALUES(?1,?2,?3,1,?4) ON CONFLICT(storage, name) DO UPDATE SET"
			" count = iif(identity = ?3 AND ?5, count + 1, 1), identity=?3, at_ms=?4",
	[PRUNE_ATTEMPTS] = "DELETE FROM attempts WHERE at_ms < (SELECT at_ms FROM attempts ORDER BY at_ms DESC LIMIT 1 OFFSET ?1)",
	[PUT_WORKER] = "INSERT OR REPLACE INTO workers VALUES(?1,?2)",
	[PUT_AUDIT] = "INSERT INTO audit VALUES(NULL,?1,?2,?3,?4,?5,?6,?7,?8)",
	[PRUNE_AUDIT] = "DELETE FROM audit WHERE id <= (SELECT max(id) FROM audit) - ?1",
	[DELETE_WORKER] = "DELETE FROM workers WHERE pid = ?1",
	[PUT_FOLLOWER] = "INSERT INTO followers VALUES(?1,?2,?3,?4,?5) ON CONFLICT(kind, name) DO UPDATE SET uid=?3, created_ms=?4, doc=?5",
	[DELETE_FOLLOWER] = "DELETE FROM followers WHERE kind = ?1 AND name = ?2",
	/* Of a follower that was removed meanwhile no task is kept. */
	[PUT_TASK] = "INSERT INTO tasks SELECT ?1,?2,?3,?4,?5,?6,?7 WHERE EXISTS(SELECT 1 FROM followers WHERE kind = ?1 AND name = ?2)"
		     " ON CONFLICT(kind, follower, id) DO UPDATE SET state=?4, due_ms=?5, doc=?7",
	[SKIP_TASKS] = "UPDATE tasks SET state = ?5 WHERE kind = ?1 AND follower = ?2 AND state = ?3 AND id IN (SELECT id FROM tasks"
		       " WHERE kind = ?1 AND follower = ?2 AND state = ?3 ORDER BY id DESC LIMIT -1 OFFSET ?4)",
	[SKIP_ABOUT] = "UPDATE tasks SET state = ?5 WHERE kind = ?1 AND follower = ?2 AND state = ?3 AND about = ?4",
	[PRUNE_TASKS] = "DELETE FROM tasks WHERE kind = ?1 AND follower = ?2 AND state >= ?3 AND id IN (SELECT id FROM tasks"
			" WHERE kind = ?1 AND follower = ?2 AND state >= ?3 ORDER BY id DESC LIMIT -1 OFFSET ?4)",
};

enum { VALUES_MAX = 11, STARVED_TURNS = 200, STARVED_NS = 10000000, FULL_LOOK_S = 1 };

struct value {
	char *text;                 /* NULL: the integer */
	size_t n;
	int64_t i;
};

struct row {
	struct row *next;
	enum journal_change change;
	uint32_t count;
	struct value values[VALUES_MAX];
};

struct journal_txn {
	struct journal_txn *next;
	struct journal *journal;
	struct row *first, **last;
	enum err failed;
	bool waits;                 /* journal_txn_wait */
	bool of_memory;             /* journal_txn_of_memory */
	done_fn fn;
	void (*drop)(void *user);
	void *user;
	struct err_info info;
};

/* ---- making a transaction ---- */

struct journal_txn *journal_txn_new(struct journal *j)
{
	struct journal_txn *t = mem_sure(sizeof *t);

	t->journal = j;
	t->last = &t->first;
	return t;
}

void journal_txn_fail(struct journal_txn *t, enum err e)
{
	if (t->failed)
		return;
	t->failed = e;
	t->info = *err_last();
}

void journal_txn_wait(struct journal_txn *t, void (*drop)(void *user))
{
	t->waits = true;
	t->drop = drop;
}

void journal_txn_of_memory(struct journal_txn *t)
{
	t->of_memory = true;
}

static void journal_txn_free(struct journal_txn *t)
{
	if (!t)
		return;
	for (struct row *r = t->first, *next; r; r = next) {
		next = r->next;
		for (uint32_t i = 0; i < r->count; i++)
			mem_free(r->values[i].text);
		mem_free(r);
	}
	mem_free(t);
}

static void put_str(struct journal_txn *t, struct row *r, struct str s)
{
	char *copy = s.n < MEM_SURE_MAX ? mem_sure(s.n + 1) : mem_alloc(s.n + 1);
	if (!copy) {
		journal_txn_fail(t, ERR(NO_MEMORY, "cannot fill a journal row"));
		return;
	}
	if (s.n)
		memcpy(copy, s.p, s.n);
	copy[s.n] = '\0';
	r->values[r->count++] = (struct value){ .text = copy, .n = s.n };
}

void journal_change(struct journal_txn *t, enum journal_change change, const char *types, ...)
{
	struct row *r = mem_sure(sizeof *r);
	va_list ap;

	r->change = change;
	*t->last = r;
	t->last = &r->next;
	va_start(ap, types);
	for (; *types; types++)
		if (*types == 's')
			put_str(t, r, va_arg(ap, struct str));
		else if (*types == 'z')
			put_str(t, r, str_of(va_arg(ap, const char *)));
		else
			r->values[r->count++] = (struct value){ .i = va_arg(ap, int64_t) };
	va_end(ap);
}

void journal_put_job(struct journal_txn *t, const struct journal_job *job)
{
	journal_change(t, PUT_JOB, "ziiiiiziis", job->id, (int64_t)job->kind, (int64_t)job->state, (int64_t)job->ended,
		       (int64_t)job->attempt, (int64_t)job->uid, job->target, job->created_ms, job->finished_ms, job->doc);
}

void journal_put_label(struct journal_txn *t, const char *id, struct str key, struct str value)
{
	journal_change(t, PUT_LABEL, "zss", id, key, value);
}

void journal_put_plan(struct journal_txn *t, const char *id, struct str plan)
{
	journal_change(t, PUT_PLAN, "zs", id, plan);
}

void journal_prune(struct journal_txn *t, uint64_t keep, int64_t before_ms, int64_t keys_before_ms)
{
	journal_change(t, PRUNE_COUNT, "i", keep > INT64_MAX ? INT64_MAX : (int64_t)keep);
	journal_change(t, PRUNE_AGE, "i", before_ms);
	journal_change(t, PRUNE_KEYS, "i", keys_before_ms);
	journal_change(t, PRUNE_VERDICTS, "i", (int64_t)JOURNAL_VERDICTS_MAX - 1);
	journal_change(t, PRUNE_ATTEMPTS, "i", (int64_t)JOURNAL_ATTEMPTS_MAX - 1);
	journal_change(t, PRUNE_AUDIT, "i", (int64_t)JOURNAL_AUDIT_MAX);
}

void journal_put_service(struct journal_txn *t, int64_t service_ms)
{
	journal_change(t, PUT_SERVICE, "i", service_ms);
	journal_change(t, PUT_WALL, "i", clock_wall_ms());
}

void journal_put_key(struct journal_txn *t, const struct journal_key *key)
{
	journal_change(t, PUT_KEY, "zisizi", key->scope, (int64_t)key->uid, key->key, (int64_t)key->digest, key->resource, key->created_ms);
}

void journal_put_state_dict(struct journal_txn *t, const struct journal_state_dict *sd)
{
	journal_change(t, PUT_STATE_DICT, "ziiiiiiisis", sd->name, (int64_t)sd->uid, (int64_t)sd->world_size, (int64_t)sd->slots,
		       sd->lease_ms, sd->created_ms, sd->orphaned_ms, sd->last_generation, sd->on_owner_death, sd->orphan_since_ms,
		       sd->role);
}

void journal_delete_state_dict(struct journal_txn *t, const char *name)
{
	journal_change(t, DELETE_STATE_DICT, "z", name);
}

void journal_put_slot(struct journal_txn *t, const struct journal_slot *slot)
{
	journal_change(t, PUT_SLOT, "ziiziiii", slot->name, (int64_t)slot->rank, (int64_t)slot->slot, slot->segment, (int64_t)slot->bytes,
		       (int64_t)slot->image_bytes, (int64_t)slot->state, slot->generation);
}

void journal_delete_slot(struct journal_txn *t, const char *name, uint32_t rank, uint32_t slot)
{
	journal_change(t, DELETE_SLOT, "zii", name, (int64_t)rank, (int64_t)slot);
}

void journal_put_storage(struct journal_txn *t, const struct journal_storage *st)
{
	journal_change(t, PUT_STORAGE, "zzii", st->name, st->path, (int64_t)st->uid, st->expires_ms);
}

void journal_delete_storage(struct journal_txn *t, const char *name)
{
	journal_change(t, DELETE_STORAGE, "z", name);
}

void journal_put_run(struct journal_txn *t, const struct journal_run *run)
{
	const int64_t *at = run->at_ms;

	journal_change(t, PUT_RUN, "zziiiiizzz", run->storage, run->name, run->step, at[RUN_DURABLE], at[RUN_VERIFIED_STRUCTURE],
		       at[RUN_VERIFIED_DIGEST], at[RUN_VERIFIED_VALUES], run->tensors, run->saved, run->course);
}

void journal_put_verdict(struct journal_txn *t, const struct journal_verdict *v, bool unless_known)
{
	journal_change(t, NEXT_VERDICT, "");
	journal_change(t, PUT_VERDICT, "zzzisi", v->storage, v->name, v->identity, v->at_ms, v->doc, (int64_t)unless_known);
}

void journal_delete_verdict(struct journal_txn *t, const char *storage, const char *name)
{
	journal_change(t, DELETE_VERDICT, "zz", storage, name);
}

void journal_put_attempt(struct journal_txn *t, const struct journal_attempts *a, bool goes_on)
{
	journal_change(t, PUT_ATTEMPT, "zzzii", a->storage, a->name, a->identity, a->at_ms, (int64_t)goes_on);
}

void journal_delete_run(struct journal_txn *t, const char *storage, const char *name)
{
	journal_change(t, DELETE_RUN, "zz", storage, name);
}

void journal_put_audit(struct journal_txn *t, const struct journal_audit *a)
{
	journal_change(t, PUT_AUDIT, "iizzzzzs", a->at_ms, (int64_t)a->uid, a->token, a->policy, a->action, a->subject, a->job, a->request);
}

void journal_put_worker(struct journal_txn *t, pid_t pid, uint64_t start_ticks)
{
	journal_change(t, PUT_WORKER, "ii", (int64_t)pid, (int64_t)start_ticks);
}

void journal_delete_worker(struct journal_txn *t, pid_t pid)
{
	journal_change(t, DELETE_WORKER, "i", (int64_t)pid);
}

/* ---- the journal thread ---- */

static FALLIBLE enum err run_row(sqlite3 *db, sqlite3_stmt **made, const struct row *r)
{
	if (!made[r->change] && sqlite3_prepare_v3(db, change_sql[r->change], -1, SQLITE_PREPARE_PERSISTENT,
						   &made[r->change], NULL) != SQLITE_OK)
		return journal_failed(db, "journal");

	sqlite3_stmt *s = made[r->change];
	for (uint32_t i = 0; i < r->count; i++) {
		const struct value *v = &r->values[i];
		int rc = v->text ? sqlite3_bind_text(s, (int)i + 1, v->text, (int)v->n, SQLITE_STATIC) :
				   sqlite3_bind_int64(s, (int)i + 1, v->i);
		if (rc != SQLITE_OK)
			return journal_failed(db, "journal");
	}
	int rc = sqlite3_step(s);
	enum err e = rc == SQLITE_DONE ? OK : journal_failed(db, "journal");
	sqlite3_reset(s);
	sqlite3_clear_bindings(s);
	return e;
}

static FALLIBLE enum err run_txn(sqlite3 *db, sqlite3_stmt **made, const struct journal_txn *t)
{
	TRY(journal_run(db, "SAVEPOINT one"));
	enum err e = OK;
	for (const struct row *r = t->first; r && !e; r = r->next)
		e = run_row(db, made, r);
	if (e) {
		CLEANUP(err_restore) struct err_info info = *err_last();
		sqlite3_exec(db, "ROLLBACK TO one", NULL, NULL, NULL);
		sqlite3_exec(db, "RELEASE one", NULL, NULL, NULL);
		return e;
	}
	return journal_run(db, "RELEASE one");
}

/* A commit with synchronous=FULL syncs the whole write-ahead log, and with it what was committed before. */
static FALLIBLE enum err set_synchronous(struct journal *j, const struct journal_txn *group)
{
	bool full = false;

	for (const struct journal_txn *t = group; t && !full; t = t->next)
		full = !t->of_memory;
	if (full == !j->unsynced)
		return OK;
	j->unsynced = true; /* also if it fails half-way */
	TRY(journal_run(j->db, full ? "PRAGMA synchronous = FULL" : "PRAGMA synchronous = NORMAL"));
	j->unsynced = !full;
	return OK;
}

/* A sync that fails says so once, and what it was for may be missing from the log: commits behind it would be lost with it. So the log
 * comes to an end, and its contents into the file, before the next one. */
static FALLIBLE enum err end_doubt(struct journal *j)
{
	if (!j->doubtful)
		return OK;
	if (sqlite3_wal_checkpoint_v2(j->db, NULL, SQLITE_CHECKPOINT_TRUNCATE, NULL, NULL) != SQLITE_OK)
		return journal_failed(j->db, "journal");
	j->doubtful = j->behind = false;
	return OK;
}

static void note_end(struct journal *j, enum err e)
{
	if (!e)
		j->behind = j->unsynced;
	else if (j->behind && !j->unsynced && e != ERR_NO_MEMORY)
		j->doubtful = true;
}

static FALLIBLE enum err try_group(struct journal *j, sqlite3_stmt **made, struct journal_txn *group)
{
	enum err e = sqlite3_get_autocommit(j->db) ? OK : journal_run(j->db, "ROLLBACK"); /* there was no memory for that */

	e = e ?: end_doubt(j);
	e = e ?: set_synchronous(j, group);
	e = e ?: journal_run(j->db, "BEGIN IMMEDIATE");
	for (struct journal_txn *t = group; t && !e; t = t->next) {
		enum err own = t->failed ? OK : run_txn(j->db, made, t);
		if (own == ERR_NO_MEMORY || own == ERR_STORAGE_FULL)
			e = own;
		else if (own)
			journal_txn_fail(t, own);
	}
	e = e ?: journal_run(j->db, "COMMIT");
	note_end(j, e);
	if (e && !sqlite3_get_autocommit(j->db)) {
		CLEANUP(err_restore) struct err_info info = *err_last();
		sqlite3_exec(j->db, "ROLLBACK", NULL, NULL, NULL);
	}
	return e;
}

/* A shortage of memory is waited for: most changes have nobody who could make them again, and this thread blocks no one. */
static FALLIBLE enum err commit_group(struct journal *j, sqlite3_stmt **made, struct journal_txn *group)
{
	if (j->full && !journal_has_room(j))
		return journal_no_space(j);
	enum err e = try_group(j, made, group);
	for (int turn = 0; e == ERR_NO_MEMORY && turn < STARVED_TURNS; turn++) {
		nanosleep(&(struct timespec){ .tv_nsec = STARVED_NS }, NULL);
		e = try_group(j, made, group);
	}
	atomic_fetch_add(&j->commits, 1);
	return e == ERR_STORAGE_FULL ? journal_no_space(j) : e;
}

static void tell(void *user)
{
	struct journal_txn *t = user;

	if (t->failed)
		err_restore(&t->info);
	t->fn(t->user, t->failed);
	journal_txn_free(t);
}

/* Nobody waits for it; what is lost is at least said. */
static void forget(struct journal_txn *t)
{
	if (t->failed) {
		err_restore(&t->info);
		log_err("a change could not be journalled", NULL);
	}
	journal_txn_free(t);
}

static void hold(struct journal *j, struct journal_txn *t)
{
	t->next = NULL;
	*j->held_last = t;
	j->held_last = &t->next;
}

/* Returns the held changes, followed by `behind`. */
static struct journal_txn *take_held(struct journal *j, struct journal_txn *behind)
{
	*j->held_last = behind;
	struct journal_txn *first = j->held;
	j->held = NULL;
	j->held_last = &j->held;
	return first;
}

static void set_full(struct journal *j, bool full)
{
	if (atomic_exchange(&j->full, full) != full && j->changed)
		loop_post(j->loop, j->changed, j->changed_user);
}

/* e: how the commit of the group ended. Without space, whoever can ask again hears of it; the other changes are held, in their order. */
static void hand_out(struct journal *j, struct journal_txn *group, enum err e)
{
	struct err_info info = *err_last();

	for (struct journal_txn *t = group, *next; t; t = next) {
		next = t->next;
		if (e == ERR_STORAGE_FULL && !t->failed && (!t->fn || t->waits)) {
			hold(j, t);
			continue;
		}
		if (e) {
			err_restore(&info);
			journal_txn_fail(t, e);
		}
		if (t->fn)
			loop_post(j->loop, tell, t);
		else
			forget(t);
	}
}

/* Returns when changes wait or the journal is closed; without space also when it is time for another look. */
static void wait_for_work(struct journal *j)
{
	struct timespec until = clock_mono_in(FULL_LOOK_S * 1000);

	while (!j->first && !j->stop) {
		if (!j->full)
			pthread_cond_wait(&j->more, &j->lock);
		else if (pthread_cond_clockwait(&j->more, &j->lock, CLOCK_MONOTONIC, &until) != 0)
			return;
	}
}

static void *journal_thread(void *user)
{
	struct journal *j = user;
	sqlite3_stmt *made[CHANGE_MAX] = { NULL };

	pthread_mutex_lock(&j->lock);
	for (;;) {
		wait_for_work(j);
		if (!j->first && j->stop)
			break;
		uint64_t n = j->waiting;
		struct journal_txn *group = take_held(j, j->first);
		j->first = NULL;
		j->last = &j->first;
		pthread_mutex_unlock(&j->lock);

		enum err e = commit_group(j, made, group);
		set_full(j, e == ERR_STORAGE_FULL);
		hand_out(j, group, e);

		pthread_mutex_lock(&j->lock);
		j->waiting -= n;
		if (j->waiting == 0)
			pthread_cond_broadcast(&j->idle);
	}
	pthread_mutex_unlock(&j->lock);
	for (int i = 0; i < CHANGE_MAX; i++)
		sqlite3_finalize(made[i]);
	return NULL;
}

void journal_commit(struct journal *j, struct journal_txn *t, done_fn fn, void *user)
{
	t->fn = fn;
	t->user = user;
	if (!j->running) {
		hand_out(j, t, journal_no_space(j));
		return;
	}
	pthread_mutex_lock(&j->lock);
	*j->last = t;
	j->last = &t->next;
	j->waiting++;
	pthread_cond_signal(&j->more);
	pthread_mutex_unlock(&j->lock);
}

void journal_sync(struct journal *j)
{
	pthread_mutex_lock(&j->lock);
	while (j->waiting)
		pthread_cond_wait(&j->idle, &j->lock);
	pthread_mutex_unlock(&j->lock);
}

uint64_t journal_waiting(struct journal *j)
{
	pthread_mutex_lock(&j->lock);
	uint64_t n = j->waiting;
	pthread_mutex_unlock(&j->lock);
	return n;
}

bool journal_is_behind(struct journal *j)
{
	return j->full || journal_waiting(j) > 0;
}

uint64_t journal_id(const struct journal *j)
{
	return j->id;
}

int64_t journal_service_ms(const struct journal *j)
{
	return j->service_ms;
}

int64_t journal_cluster(const struct journal *j)
{
	return j->cluster;
}

void journal_put_cluster(struct journal_txn *t, int64_t cluster)
{
	journal_change(t, PUT_CLUSTER, "i", cluster);
}

int64_t journal_noted_ms(const struct journal *j)
{
	return j->noted_ms;
}

void journal_put_noted(struct journal_txn *t, int64_t service_ms)
{
	journal_change(t, PUT_NOTED, "i", service_ms);
}

int64_t journal_wall_ms(const struct journal *j)
{
	return j->wall_ms;
}

uint64_t journal_digest(struct str body)
{
	return XXH3_64bits(body.p ? body.p : "", body.n);
}

uint64_t journal_commits(const struct journal *j)
{
	return atomic_load(&j->commits);
}

/* ---- start and end ---- */

static FALLIBLE enum err start_thread(struct journal *j)
{
	if (pthread_create(&j->thread, NULL, journal_thread, j) != 0)
		return ERR(SYSTEM, "cannot start the journal thread");
	j->running = true;
	return OK;
}

/* There is space: the journal is opened as at any start, and the thread writes what was held. */
static void on_reopen(void *user)
{
	struct journal *j = user;
	uint64_t boot;

	if (!journal_has_room(j))
		return;
	journal_close_reader(j); /* lets go of the file */
	enum err e = journal_open_files(j, &boot);
	e = e ?: start_thread(j);
	if (!e) {
		loop_timer_stop(&j->reopen);
		pthread_mutex_lock(&j->lock);
		pthread_cond_signal(&j->more);
		pthread_mutex_unlock(&j->lock);
		return;
	}
	if (e != ERR_STORAGE_FULL)
		log_err("the journal cannot be opened for writing", NULL);
	journal_close_files(j);
	if (journal_open_full(j, &boot) != OK)
		log_err("the journal cannot be read", NULL);
}

static FALLIBLE enum err open_any(struct journal *j, uint64_t *boot_out)
{
	enum err e = journal_has_room(j) ? journal_open_files(j, boot_out) : ERR_STORAGE_FULL;

	if (!e)
		return start_thread(j);
	if (e != ERR_STORAGE_FULL)
		return e;
	j->full = true;
	TRY(journal_open_full(j, boot_out));
	return loop_every(j->loop, FULL_LOOK_S * 1000, on_reopen, j, &j->reopen);
}

FALLIBLE enum err journal_open(const char *path, struct loop *loop, struct journal **out, uint64_t *boot_out)
{
	struct journal *j = mem_zalloc(1, sizeof *j);

	NEED(j, "cannot open the journal");
	pthread_mutex_init(&j->lock, NULL);
	pthread_cond_init(&j->more, NULL);
	pthread_cond_init(&j->idle, NULL);
	j->loop = loop;
	j->last = &j->first;
	j->held_last = &j->held;
	snprintf(j->path, sizeof j->path, "%s", path);
	enum err e = open_any(j, boot_out);
	if (e) {
		CLEANUP(err_restore) struct err_info info = *err_last();
		journal_close(j);
		return e;
	}
	*out = j;
	return OK;
}

FALLIBLE enum err journal_may_write(const struct journal *j)
{
	return j->full ? journal_no_space(j) : OK;
}

void journal_on_full(struct journal *j, loop_fn fn, void *user)
{
	j->changed = fn;
	j->changed_user = user;
}

void journal_close(struct journal *j)
{
	if (!j)
		return;
	if (j->running) {
		pthread_mutex_lock(&j->lock);
		j->stop = true;
		pthread_cond_signal(&j->more);
		pthread_mutex_unlock(&j->lock);
		pthread_join(j->thread, NULL);
	}
	loop_timer_stop(&j->reopen);
	for (struct journal_txn *t = take_held(j, NULL), *next; t; t = next) {
		next = t->next;
		if (t->drop)
			t->drop(t->user);
		journal_txn_free(t);
	}
	journal_close_files(j);
	pthread_mutex_destroy(&j->lock);
	pthread_cond_destroy(&j->more);
	pthread_cond_destroy(&j->idle);
	mem_free(j);
}
