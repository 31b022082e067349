/* The journal: which commits wait for the disk, and what comes of a sync that fails. */
#include "lib/t_journal.h"

#include <errno.h>
#include <sqlite3.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

static struct t_journal t;

/* Syncs of the journal, by SQLite's library too: the linker takes these for libc's. */
static _Atomic int syncs, failing;

static int count_sync(long number, int fd)
{
	syncs++;
	if (failing > 0) {
		failing--;
		errno = EIO;
		return -1;
	}
	return (int)syscall(number, fd);
}

int fsync(int fd)
{
	return count_sync(SYS_fsync, fd);
}

int fdatasync(int fd)
{
	return count_sync(SYS_fdatasync, fd);
}

static enum err commit(struct journal_txn *x)
{
	struct t_answer a = { 0 };

	journal_commit(t.j, x, t_done, &a);
	journal_sync(t.j);
	loop_run_posted(t.loop);
	assert_true(a.called);
	return a.e;
}

static enum err commit_slot(int64_t generation)
{
	struct journal_slot slot = { .name = "train", .segment = "/x", .bytes = 1, .generation = generation };
	struct journal_txn *x = journal_txn_new(t.j);

	journal_put_slot(x, &slot);
	journal_txn_of_memory(x);
	return commit(x);
}

static enum err commit_job(int i)
{
	struct journal_job job = { .attempt = i, .target = "main:x", .doc = STR("{}") };
	struct journal_txn *x = journal_txn_new(t.j);

	snprintf(job.id, sizeof job.id, "01AAAAAAAAAAAAAAAAAAAAAAAA");
	journal_put_job(x, &job);
	return commit(x);
}

static int setup(void **state)
{
	struct journal_state_dict sd = { .name = "train", .world_size = 1, .slots = 1, .on_owner_death = STR(""), .role = STR("") };

	(void)state;
	t_journal_make(&t);
	t_journal_reopen(&t);
	struct journal_txn *x = journal_txn_new(t.j);
	journal_put_state_dict(x, &sd);
	T_OK(commit(x));
	return 0;
}

static int teardown(void **state)
{
	(void)state;
	t_journal_remove(&t);
	return 0;
}

static enum err is_slot(void *user, const struct journal_slot *row)
{
	*(int64_t *)user = row->generation;
	return OK;
}

static void test_memory_waits_for_no_disk(void **state)
{
	int64_t generation = 0;

	(void)state;
	for (int i = 0; i < 2; i++) {
		int before = syncs;
		T_OK(commit_slot(i + 1));
		assert_int_equal(syncs, before);
		T_OK(commit_job(i));
		assert_true(syncs > before);
	}
	t_journal_reopen(&t);
	T_OK(journal_read_slots(t.j, is_slot, &generation));
	assert_int_equal(generation, 2);
}

/* The log may lack what a failed sync was for: the database's file has it before anything is committed behind it. */
static void test_nothing_is_committed_behind_a_failed_sync(void **state)
{
	char file[128];
	int64_t generation = 0;
	sqlite3 *db;
	sqlite3_stmt *s;

	(void)state;
	T_OK(commit_slot(7));
	failing = 1;
	assert_int_equal(commit_job(0), ERR_JOURNAL);
	T_OK(commit_job(1));
	snprintf(file, sizeof file, "file:%s?immutable=1", t.path); /* without the log */
	assert_int_equal(sqlite3_open_v2(file, &db, SQLITE_OPEN_READONLY | SQLITE_OPEN_URI, NULL), SQLITE_OK);
	assert_int_equal(sqlite3_prepare_v2(db, "SELECT generation FROM slots", -1, &s, NULL), SQLITE_OK);
	if (sqlite3_step(s) == SQLITE_ROW)
		generation = sqlite3_column_int64(s, 0);
	sqlite3_finalize(s);
	sqlite3_close(db);
	assert_int_equal(generation, 7);
}

#define T(fn) cmocka_unit_test_setup_teardown(fn, setup, teardown)

int main(void)
{
	const struct CMUnitTest tests[] = { T(test_memory_waits_for_no_disk), T(test_nothing_is_committed_behind_a_failed_sync) };

	return cmocka_run_group_tests_name("journal_sync", tests, NULL, NULL);
}
