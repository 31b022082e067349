/* journal_open.c: opening the journal: versions, damage, and a file system without space.
 *
 * SQLite cannot open a WAL journal without space: the index of the WAL is a file of its own. With locking_mode = EXCLUSIVE that index is in
 * memory, so the reading connection alone can be opened, WAL included, until journal.c finds that there is space again. */
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <unistd.h>

#include "server/journal_impl.h"

enum { JOURNAL_ROOM = 1 << 20 };

/* Each step takes a journal of version n to n + 1, in one transaction with the new version number. */
static const char *const migrations[JOURNAL_VERSION] = {
	"CREATE TABLE meta(key TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;"
	"INSERT INTO meta VALUES('boot', 0), ('id', random() & 0x7fffffffffffffff);"
	"CREATE TABLE jobs(id TEXT PRIMARY KEY, kind INTEGER NOT NULL, state INTEGER NOT NULL, ended INTEGER NOT NULL,"
	" attempt INTEGER NOT NULL, uid INTEGER NOT NULL, target TEXT NOT NULL, created_ms INTEGER NOT NULL,"
	" finished_ms INTEGER NOT NULL, doc TEXT NOT NULL) WITHOUT ROWID;"
	"CREATE INDEX jobs_unended ON jobs(id) WHERE ended = 0;"
	"CREATE INDEX jobs_finished ON jobs(finished_ms) WHERE ended = 1;"
	"CREATE TABLE labels(job TEXT NOT NULL REFERENCES jobs(id) ON DELETE CASCADE, key TEXT NOT NULL, value TEXT NOT NULL,"
	" PRIMARY KEY(job, key)) WITHOUT ROWID;"
	"CREATE TABLE plans(job TEXT PRIMARY KEY REFERENCES jobs(id) ON DELETE CASCADE, plan TEXT NOT NULL);"
	"CREATE TABLE keys(scope TEXT NOT NULL, uid INTEGER NOT NULL, key TEXT NOT NULL, digest INTEGER NOT NULL,"
	" resource TEXT NOT NULL, created_ms INTEGER NOT NULL, PRIMARY KEY(scope, uid, key)) WITHOUT ROWID;"
	"CREATE INDEX keys_created ON keys(created_ms);"
	"CREATE TABLE state_dicts(name TEXT PRIMARY KEY, uid INTEGER NOT NULL, world_size INTEGER NOT NULL,"
	" slots INTEGER NOT NULL, lease_ms INTEGER NOT NULL, created_ms INTEGER NOT NULL, orphaned_ms INTEGER NOT NULL,"
	" last_generation INTEGER NOT NULL, on_owner_death TEXT NOT NULL) WITHOUT ROWID;"
	"CREATE TABLE slots(name TEXT NOT NULL REFERENCES state_dicts(name) ON DELETE CASCADE, rank INTEGER NOT NULL,"
	" slot INTEGER NOT NULL, segment TEXT NOT NULL, bytes INTEGER NOT NULL, image_bytes INTEGER NOT NULL,"
	" state INTEGER NOT NULL, generation INTEGER NOT NULL, PRIMARY KEY(name, rank, slot)) WITHOUT ROWID;",

	"CREATE TABLE storages(name TEXT PRIMARY KEY, path TEXT NOT NULL, uid INTEGER NOT NULL, expires_ms INTEGER NOT NULL)"
	" WITHOUT ROWID;"
	"CREATE TABLE workers(pid INTEGER PRIMARY KEY, start_ticks INTEGER NOT NULL);",

	/* Runs of the saves (kind 0) that succeeded (state 4): rtrim() cuts the last component, or the digits at the end. */
	"CREATE TABLE runs(storage TEXT NOT NULL, name TEXT NOT NULL, step INTEGER NOT NULL, durable_ms INTEGER NOT NULL,"
	" structure_ms INTEGER NOT NULL, digest_ms INTEGER NOT NULL, values_ms INTEGER NOT NULL, PRIMARY KEY(storage, name))"
	" WITHOUT ROWID;"
	"INSERT INTO runs SELECT storage, iif(instr(name, '/'), rtrim(rtrim(name, replace(name, '/', '')), '/'), '-') AS run,"
	" iif(rtrim(name, '0123456789') <> name, CAST(substr(name, 1 + length(rtrim(name, '0123456789'))) AS INTEGER),"
	" coalesce(json_extract(doc, '$.result.generation'), -1)), max(finished_ms), 0, 0, 0 FROM"
	" (SELECT substr(target, 1, instr(target, ':') - 1) AS storage, substr(target, instr(target, ':') + 1) AS name,"
	" finished_ms, doc FROM jobs WHERE kind = 0 AND state = 4 AND ended = 1) GROUP BY storage, run;",

	/* Ages were told by the wall clock: service time goes on from the newest of them. */
	"INSERT INTO meta VALUES('service_ms', max(1, ifnull((SELECT max(finished_ms) FROM jobs), 0),"
	" ifnull((SELECT max(created_ms) FROM keys), 0)));"
	"ALTER TABLE state_dicts ADD COLUMN orphan_since_ms INTEGER NOT NULL DEFAULT 0;"
	"UPDATE state_dicts SET orphan_since_ms = (SELECT value FROM meta WHERE key = 'service_ms');",

	"CREATE TABLE verdicts(storage TEXT NOT NULL, name TEXT NOT NULL, identity TEXT NOT NULL, at_ms INTEGER NOT NULL,"
	" doc TEXT NOT NULL, PRIMARY KEY(storage, name)) WITHOUT ROWID;"
	"CREATE INDEX verdicts_at ON verdicts(at_ms);",

	"ALTER TABLE runs ADD COLUMN tensors TEXT NOT NULL DEFAULT '';"
	"ALTER TABLE runs ADD COLUMN saved TEXT NOT NULL DEFAULT '';",

	"CREATE TABLE attempts(storage TEXT NOT NULL, name TEXT NOT NULL, identity TEXT NOT NULL, count INTEGER NOT NULL,"
	" at_ms INTEGER NOT NULL, PRIMARY KEY(storage, name)) WITHOUT ROWID;"
	"CREATE INDEX attempts_at ON attempts(at_ms);"
	"ALTER TABLE runs ADD COLUMN course TEXT NOT NULL DEFAULT '';",

	"CREATE TABLE followers(kind INTEGER NOT NULL, name TEXT NOT NULL, uid INTEGER NOT NULL, created_ms INTEGER NOT NULL,"
	" doc TEXT NOT NULL, PRIMARY KEY(kind, name)) WITHOUT ROWID;"
	"CREATE TABLE tasks(kind INTEGER NOT NULL, follower TEXT NOT NULL, id TEXT NOT NULL, state INTEGER NOT NULL,"
	" due_ms INTEGER NOT NULL, about TEXT NOT NULL, doc TEXT NOT NULL, PRIMARY KEY(kind, follower, id),"
	" FOREIGN KEY(kind, follower) REFERENCES followers(kind, name) ON DELETE CASCADE) WITHOUT ROWID;"
	"CREATE INDEX tasks_due ON tasks(kind, follower, state, due_ms);",

	/* Look-up workers are told the verdicts that are newer than those they know. */
	"ALTER TABLE verdicts ADD COLUMN number INTEGER NOT NULL DEFAULT 1;"
	"UPDATE verdicts SET number = r FROM (SELECT storage AS s, name AS n, row_number() OVER (ORDER BY at_ms, storage, name) AS r"
	" FROM verdicts) WHERE storage = s AND name = n;"
	"CREATE INDEX verdicts_number ON verdicts(number);",

	"CREATE TABLE policies(name TEXT PRIMARY KEY, uid INTEGER NOT NULL, doc TEXT NOT NULL) WITHOUT ROWID;",

	"CREATE TABLE audit(id INTEGER PRIMARY KEY AUTOINCREMENT, at_ms INTEGER NOT NULL, uid INTEGER NOT NULL, token TEXT NOT NULL,"
	" policy TEXT NOT NULL, action TEXT NOT NULL, subject TEXT NOT NULL, job TEXT NOT NULL, request TEXT NOT NULL);",

	/* Policies are kept as webhooks and chains are. */
	"INSERT INTO followers SELECT 2, name, uid, 0, doc FROM policies;"
	"DROP TABLE policies;",

	"ALTER TABLE state_dicts ADD COLUMN role TEXT NOT NULL DEFAULT '';",
};

static FALLIBLE enum err ask_int(sqlite3 *db, const char *sql, int64_t *out)
{
	sqlite3_stmt *s = NULL;

	if (sqlite3_prepare_v2(db, sql, -1, &s, NULL) != SQLITE_OK)
		return journal_failed(db, "journal");
	int rc = sqlite3_step(s);
	int64_t v = rc == SQLITE_ROW ? sqlite3_column_int64(s, 0) : 0;
	enum err e = rc == SQLITE_ROW ? OK : journal_failed(db, "journal");
	sqlite3_finalize(s);
	if (!e)
		*out = v;
	return e;
}

static FALLIBLE enum err check_whole(sqlite3 *db)
{
	sqlite3_stmt *s = NULL;
	enum err e = OK;

	if (sqlite3_prepare_v2(db, "PRAGMA quick_check(1)", -1, &s, NULL) != SQLITE_OK)
		return journal_failed(db, "the journal is damaged");
	int rc = sqlite3_step(s);
	const char *said = rc == SQLITE_ROW ? (const char *)sqlite3_column_text(s, 0) : NULL;
	if (!said)
		e = journal_failed(db, "the journal is damaged");
	else if (strcmp(said, "ok") != 0)
		e = ERR(JOURNAL, "the journal is damaged: %s", said);
	sqlite3_finalize(s);
	return e;
}

static FALLIBLE enum err migrate(sqlite3 *db, const char *path)
{
	int64_t version;
	char set[64];

	TRY(ask_int(db, "PRAGMA user_version", &version));
	if (version > JOURNAL_VERSION || version < 0)
		return ERR(JOURNAL_NEWER, "%s has version %" PRId64 ", this program knows %d", path, version,
			   JOURNAL_VERSION);
	for (; version < JOURNAL_VERSION; version++) {
		snprintf(set, sizeof set, "PRAGMA user_version = %d; COMMIT", (int)version + 1);
		TRY(journal_run(db, "BEGIN EXCLUSIVE"));
		TRY(journal_run(db, migrations[version]));
		TRY(journal_run(db, set));
	}
	return OK;
}

/* Reads the rows of `meta` that both ways of opening need. */
static FALLIBLE enum err read_meta(sqlite3 *db, struct journal *j, uint64_t *boot_out)
{
	int64_t boot, id;

	TRY(ask_int(db, "SELECT value FROM meta WHERE key = 'boot'", &boot));
	TRY(ask_int(db, "SELECT value FROM meta WHERE key = 'id'", &id));
	TRY(ask_int(db, "SELECT value FROM meta WHERE key = 'service_ms'", &j->service_ms));
	TRY(ask_int(db, "SELECT ifnull((SELECT value FROM meta WHERE key = 'wall_ms'), 0)", &j->wall_ms));
	TRY(ask_int(db, "SELECT ifnull((SELECT value FROM meta WHERE key = 'cluster'), 0)", &j->cluster));
	TRY(ask_int(db, "SELECT ifnull((SELECT value FROM meta WHERE key = 'noted_ms'), 0)", &j->noted_ms));
	j->id = (uint64_t)id;
	*boot_out = (uint64_t)boot;
	return OK;
}

/* A start without space may have begun with an empty journal in memory: its id is in the names of segments. */
static FALLIBLE enum err keep_id(struct journal *j)
{
	char set[96];

	snprintf(set, sizeof set, "UPDATE meta SET value = %" PRIu64 " WHERE key = 'id'", j->id);
	return j->id ? journal_run(j->db, set) : OK;
}

static FALLIBLE enum err open_files(struct journal *j, uint64_t *boot_out)
{
	int64_t version;

	if (sqlite3_open_v2(j->path, &j->db, SQLITE_OPEN_READWRITE | SQLITE_OPEN_CREATE | SQLITE_OPEN_NOMUTEX, NULL) != SQLITE_OK)
		return journal_failed(j->db, j->path);
	sqlite3_busy_timeout(j->db, 5000);
	TRY(ask_int(j->db, "PRAGMA user_version", &version));
	j->unsynced = j->behind = j->doubtful = false;
	if (version > JOURNAL_VERSION)
		return migrate(j->db, j->path); /* says why, before anything is written to it */
	TRY(journal_run(j->db, "PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL; PRAGMA foreign_keys = ON;"
			       "PRAGMA trusted_schema = OFF; PRAGMA cache_size = -4096; PRAGMA wal_autocheckpoint = 1000"));
	TRY(check_whole(j->db));
	TRY(migrate(j->db, j->path));
	TRY(keep_id(j));
	TRY(journal_run(j->db, "UPDATE meta SET value = value + 1 WHERE key = 'boot'"));
	TRY(read_meta(j->db, j, boot_out));
	if (sqlite3_open_v2(j->path, &j->reader, SQLITE_OPEN_READONLY | SQLITE_OPEN_NOMUTEX, NULL) != SQLITE_OK)
		return journal_failed(j->reader, j->path);
	sqlite3_busy_timeout(j->reader, 1000);
	return journal_run(j->reader, "PRAGMA trusted_schema = OFF; PRAGMA cache_size = -4096");
}

static FALLIBLE enum err open_full(struct journal *j, uint64_t *boot_out)
{
	int64_t version = 0;

	if (access(j->path, F_OK) == 0) {
		if (sqlite3_open_v2(j->path, &j->reader, SQLITE_OPEN_READWRITE | SQLITE_OPEN_NOMUTEX, NULL) != SQLITE_OK)
			return journal_failed(j->reader, j->path);
		TRY(journal_run(j->reader, "PRAGMA locking_mode = EXCLUSIVE; PRAGMA trusted_schema = OFF; PRAGMA cache_size = -4096"));
		TRY(ask_int(j->reader, "PRAGMA user_version", &version));
	}
	if (version == 0) { /* no journal, or one whose first start failed */
		journal_close_reader(j);
		if (sqlite3_open_v2(":memory:", &j->reader, SQLITE_OPEN_READWRITE | SQLITE_OPEN_NOMUTEX, NULL) != SQLITE_OK)
			return journal_failed(j->reader, "an empty journal");
	} else if (version < JOURNAL_VERSION) {
		return ERR(STORAGE_FULL, "%s is of an older version, and there is no space to migrate it", j->path);
	}
	TRY(migrate(j->reader, j->path));
	TRY(check_whole(j->reader));
	TRY(read_meta(j->reader, j, boot_out));
	++*boot_out; /* counted when there is space */
	return OK;
}

void journal_close_files(struct journal *j)
{
	journal_close_reader(j);
	sqlite3_close(j->db);
	j->db = NULL;
}

static enum err close_failed(struct journal *j, enum err e)
{
	CLEANUP(err_restore) struct err_info info = *err_last();

	journal_close_files(j);
	return e;
}

FALLIBLE enum err journal_open_files(struct journal *j, uint64_t *boot_out)
{
	enum err e = open_files(j, boot_out);

	return e ? close_failed(j, e) : OK;
}

FALLIBLE enum err journal_open_full(struct journal *j, uint64_t *boot_out)
{
	enum err e = open_full(j, boot_out);

	return e ? close_failed(j, e) : OK;
}

enum err journal_no_space(const struct journal *j)
{
	const char *end = strrchr(j->path, '/');

	return ERR(STORAGE_FULL, "the state directory %.*s is full: dcpd is read-only until there is space",
		   end ? (int)(end - j->path) : 1, end ? j->path : ".");
}

bool journal_has_room(const struct journal *j)
{
	char path[sizeof j->path + 8];

	snprintf(path, sizeof path, "%s-room", j->path);
	int fd = open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
	if (fd < 0)
		return errno != ENOSPC && errno != EDQUOT;
	int failed = posix_fallocate(fd, 0, JOURNAL_ROOM);
	close(fd);
	unlink(path);
	return failed != ENOSPC && failed != EDQUOT;
}
