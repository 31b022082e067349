/* journal.c: see journal.h. The writing side.
 *
 * A thread rather than SQLite calls in the loop: a commit is an fsync, which waits behind a save that saturates the disk. Group
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
	[PUT_SERVICE] = "UPDATE meta SET value = ?1 WHERE key = 'service_ms'",
	[PUT_KEY] = "INSERT OR REPLACE INTO keys VALUES(?1,?2,?3,?4,?5,?6)",
	[PUT_STATE_DICT] = "INSERT INTO state_dicts VALUES(?1,?2,?3,?4,?5,?6,?7,?8,?9,?10) ON CONFLICT(name) DO UPDATE SET"
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

enum { VALUES_MAX = 10, STARVED_TURNS = 200, STARVED_NS = 10000000, FULL_LOOK_S = 1 };

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

static struct row *add(struct journal_txn *t, enum journal_change change)
{
	struct row *r = mem_sure(sizeof *r);

	r->change = change;
	*t->last = r;
	t->last = &r->next;
	return r;
}

static void put_int(struct row *r, int64_t v)
{
	r->values[r->count++] = (struct value){ .i = v };
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
	struct row *r = add(t, change);
	va_list ap;

	va_start(ap, types);
	for (; *types; types++)
		if (*types == 's')
			put_str(t, r, va_arg(ap, struct str));
		else
			put_int(r, va_arg(ap, int64_t));
	va_end(ap);
}

void journal_put_job(struct journal_txn *t, const struct journal_job *job)
{
	struct row *r = add(t, PUT_JOB);

	put_str(t, r, str_of(job->id));
	put_int(r, job->kind);
	put_int(r, job->state);
	put_int(r, job->ended);
	put_int(r, job->attempt);
	put_int(r, job->uid);
	put_str(t, r, str_of(job->target));
	put_int(r, job->created_ms);
	put_int(r, job->finished_ms);
	put_str(t, r, job->doc);
}

void journal_put_label(struct journal_txn *t, const char *id, struct str key, struct str value)
{
	struct row *r = add(t, PUT_LABEL);

	put_str(t, r, str_of(id));
	put_str(t, r, key);
	put_str(t, r, value);
}

void journal_put_plan(struct journal_txn *t, const char *id, struct str plan)
{
	struct row *r = add(t, PUT_PLAN);

	put_str(t, r, str_of(id));
	put_str(t, r, plan);
}

void journal_prune(struct journal_txn *t, uint64_t keep, int64_t before_ms, int64_t keys_before_ms)
{
	put_int(add(t, PRUNE_COUNT), keep > INT64_MAX ? INT64_MAX : (int64_t)keep);
	put_int(add(t, PRUNE_AGE), before_ms);
	put_int(add(t, PRUNE_KEYS), keys_before_ms);
	put_int(add(t, PRUNE_VERDICTS), JOURNAL_VERDICTS_MAX - 1);
	put_int(add(t, PRUNE_ATTEMPTS), JOURNAL_ATTEMPTS_MAX - 1);
	put_int(add(t, PRUNE_AUDIT), JOURNAL_AUDIT_MAX);
}

void journal_put_service(struct journal_txn *t, int64_t service_ms)
{
	put_int(add(t, PUT_SERVICE), service_ms);
	put_int(add(t, PUT_WALL), clock_wall_ms());
}

void journal_put_key(struct journal_txn *t, const struct journal_key *key)
{
	struct row *r = add(t, PUT_KEY);

	put_str(t, r, str_of(key->scope));
	put_int(r, key->uid);
	put_str(t, r, key->key);
	put_int(r, (int64_t)key->digest);
	put_str(t, r, str_of(key->resource));
	put_int(r, key->created_ms);
}

void journal_put_state_dict(struct journal_txn *t, const struct journal_state_dict *sd)
{
	struct row *r = add(t, PUT_STATE_DICT);

	put_str(t, r, str_of(sd->name));
	put_int(r, sd->uid);
	put_int(r, sd->world_size);
	put_int(r, sd->slots);
	put_int(r, sd->lease_ms);
	put_int(r, sd->created_ms);
	put_int(r, sd->orphaned_ms);
	put_int(r, sd->last_generation);
	put_str(t, r, sd->on_owner_death);
	put_int(r, sd->orphan_since_ms);
}

void journal_delete_state_dict(struct journal_txn *t, const char *name)
{
	put_str(t, add(t, DELETE_STATE_DICT), str_of(name));
}

void journal_put_slot(struct journal_txn *t, const struct journal_slot *slot)
{
	struct row *r = add(t, PUT_SLOT);

	put_str(t, r, str_of(slot->name));
	put_int(r, slot->rank);
	put_int(r, slot->slot);
	put_str(t, r, str_of(slot->segment));
	put_int(r, (int64_t)slot->bytes);
	put_int(r, (int64_t)slot->image_bytes);
	put_int(r, slot->state);
	put_int(r, slot->generation);
}

void journal_delete_slot(struct journal_txn *t, const char *name, uint32_t rank, uint32_t slot)
{
	struct row *r = add(t, DELETE_SLOT);

	put_str(t, r, str_of(name));
	put_int(r, rank);
	put_int(r, slot);
}

void journal_put_storage(struct journal_txn *t, const struct journal_storage *st)
{
	struct row *r = add(t, PUT_STORAGE);

	put_str(t, r, str_of(st->name));
	put_str(t, r, str_of(st->path));
	put_int(r, st->uid);
	put_int(r, st->expires_ms);
}

void journal_delete_storage(struct journal_txn *t, const char *name)
{
	put_str(t, add(t, DELETE_STORAGE), str_of(name));
}

void journal_put_run(struct journal_txn *t, const struct journal_run *run)
{
	struct row *r = add(t, PUT_RUN);

	put_str(t, r, str_of(run->storage));
	put_str(t, r, str_of(run->name));
	put_int(r, run->step);
	for (int m = 0; m < RUN_MARK_COUNT; m++)
		put_int(r, run->at_ms[m]);
	put_str(t, r, str_of(run->tensors));
	put_str(t, r, str_of(run->saved));
	put_str(t, r, str_of(run->course));
}

void journal_put_verdict(struct journal_txn *t, const struct journal_verdict *v, bool unless_known)
{
	(void)add(t, NEXT_VERDICT);
	struct row *r = add(t, PUT_VERDICT);

	put_str(t, r, str_of(v->storage));
	put_str(t, r, str_of(v->name));
	put_str(t, r, str_of(v->identity));
	put_int(r, v->at_ms);
	put_str(t, r, v->doc);
	put_int(r, unless_known);
}

void journal_delete_verdict(struct journal_txn *t, const char *storage, const char *name)
{
	struct row *r = add(t, DELETE_VERDICT);

	put_str(t, r, str_of(storage));
	put_str(t, r, str_of(name));
}

void journal_put_attempt(struct journal_txn *t, const struct journal_attempts *a, bool goes_on)
{
	struct row *r = add(t, PUT_ATTEMPT);

	put_str(t, r, str_of(a->storage));
	put_str(t, r, str_of(a->name));
	put_str(t, r, str_of(a->identity));
	put_int(r, a->at_ms);
	put_int(r, goes_on);
}

void journal_delete_run(struct journal_txn *t, const char *storage, const char *name)
{
	struct row *r = add(t, DELETE_RUN);

	put_str(t, r, str_of(storage));
	put_str(t, r, str_of(name));
}

void journal_put_audit(struct journal_txn *t, const struct journal_audit *a)
{
	struct row *r = add(t, PUT_AUDIT);

	put_int(r, a->at_ms);
	put_int(r, a->uid);
	put_str(t, r, str_of(a->token));
	put_str(t, r, str_of(a->policy));
	put_str(t, r, str_of(a->action));
	put_str(t, r, str_of(a->subject));
	put_str(t, r, str_of(a->job));
	put_str(t, r, a->request);
}

void journal_put_worker(struct journal_txn *t, pid_t pid, uint64_t start_ticks)
{
	struct row *r = add(t, PUT_WORKER);

	put_int(r, pid);
	put_int(r, (int64_t)start_ticks);
}

void journal_delete_worker(struct journal_txn *t, pid_t pid)
{
	put_int(add(t, DELETE_WORKER), pid);
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

static FALLIBLE enum err try_group(struct journal *j, sqlite3_stmt **made, struct journal_txn *group)
{
	enum err e = sqlite3_get_autocommit(j->db) ? OK : journal_run(j->db, "ROLLBACK"); /* there was no memory for that */

	e = e ?: journal_run(j->db, "BEGIN IMMEDIATE");
	for (struct journal_txn *t = group; t && !e; t = t->next) {
		enum err own = t->failed ? OK : run_txn(j->db, made, t);
		if (own == ERR_NO_MEMORY || own == ERR_STORAGE_FULL)
			e = own;
		else if (own)
			journal_txn_fail(t, own);
	}
	e = e ?: journal_run(j->db, "COMMIT");
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
	put_int(add(t, PUT_CLUSTER), cluster);
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
