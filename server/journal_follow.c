/* journal_follow.c: followers and their tasks in the journal: webhooks with deliveries, chains with executions. The queue of each is here
 * and nowhere else: memory holds what is under way, and a restart goes on with what is not ended. */
#include <string.h>

#include "server/journal_impl.h"

void journal_put_follower(struct journal_txn *t, const struct journal_follower *f)
{
	journal_change(t, PUT_FOLLOWER, "iziis", (int64_t)f->kind, f->name, (int64_t)f->uid, f->created_ms, f->doc);
}

void journal_delete_follower(struct journal_txn *t, enum journal_follower_kind kind, const char *name)
{
	journal_change(t, DELETE_FOLLOWER, "iz", (int64_t)kind, name);
}

void journal_put_task(struct journal_txn *t, const struct journal_task *row)
{
	journal_change(t, PUT_TASK, "izziizs", (int64_t)row->kind, row->follower, row->id, (int64_t)row->state, row->due_ms,
		       row->about ? row->about : "", row->doc);
}

void journal_skip_tasks(struct journal_txn *t, enum journal_follower_kind kind, const char *follower, uint64_t keep)
{
	journal_change(t, SKIP_TASKS, "iziii", (int64_t)kind, follower, (int64_t)TASK_WAITING, (int64_t)keep, (int64_t)TASK_SKIPPED);
}

void journal_skip_about(struct journal_txn *t, enum journal_follower_kind kind, const char *follower, const char *about)
{
	journal_change(t, SKIP_ABOUT, "izizi", (int64_t)kind, follower, (int64_t)TASK_WAITING, about, (int64_t)TASK_SKIPPED);
}

void journal_prune_tasks(struct journal_txn *t, enum journal_follower_kind kind, const char *follower, uint64_t keep)
{
	journal_change(t, PRUNE_TASKS, "izii", (int64_t)kind, follower, (int64_t)TASK_DONE, (int64_t)keep);
}

/* ---- reading ---- */

struct walk {
	enum journal_follower_kind kind;
	const char *follower;
	journal_follower_fn follower_fn;
	journal_task_fn task_fn;
	void *user;
};

static enum err row_follower(void *user, sqlite3_stmt *s)
{
	const struct walk *w = user;
	struct str name = journal_column(s, 0);

	return w->follower_fn(w->user, &(struct journal_follower){ w->kind, name.p, (uid_t)sqlite3_column_int64(s, 1),
								   sqlite3_column_int64(s, 2), journal_column(s, 3) });
}

FALLIBLE enum err journal_read_followers(struct journal *j, enum journal_follower_kind kind, journal_follower_fn fn, void *user)
{
	return journal_ask(j, QUERY_FOLLOWERS, row_follower, &(struct walk){ .kind = kind, .follower_fn = fn, .user = user }, "i",
			   (int64_t)kind);
}

static enum err row_task(void *user, sqlite3_stmt *s)
{
	const struct walk *w = user;
	struct str id = journal_column(s, 0);
	int state = sqlite3_column_int(s, 1);

	if (id.n != TASK_ID_LEN || state < 0 || state >= TASK_STATE_COUNT)
		return ERR(JOURNAL, "the journal holds a task of \"%s\" without a proper id or state", w->follower);
	return w->task_fn(w->user, &(struct journal_task){ .kind = w->kind, .follower = w->follower, .id = id.p,
							   .state = (enum task_state)state, .due_ms = sqlite3_column_int64(s, 2),
							   .doc = journal_column(s, 3) });
}

FALLIBLE enum err journal_read_task(struct journal *j, enum journal_follower_kind kind, const char *follower, struct str id,
				    journal_task_fn fn, void *user)
{
	return journal_ask(j, QUERY_TASK, row_task, &(struct walk){ .kind = kind, .follower = follower, .task_fn = fn, .user = user },
			   "izs", (int64_t)kind, follower, id);
}

FALLIBLE enum err journal_read_tasks(struct journal *j, enum journal_follower_kind kind, const char *follower, struct str before_id,
				     uint32_t limit, journal_task_fn fn, void *user)
{
	return journal_ask(j, QUERY_TASKS, row_task, &(struct walk){ .kind = kind, .follower = follower, .task_fn = fn, .user = user },
			   "izsi", (int64_t)kind, follower, before_id, (int64_t)limit);
}

FALLIBLE enum err journal_read_due(struct journal *j, enum journal_follower_kind kind, const char *follower, enum task_state state,
				   uint32_t limit, journal_task_fn fn, void *user)
{
	return journal_ask(j, QUERY_DUE, row_task, &(struct walk){ .kind = kind, .follower = follower, .task_fn = fn, .user = user },
			   "izii", (int64_t)kind, follower, (int64_t)state, (int64_t)limit);
}

static enum err note_found(void *user, const struct journal_task *)
{
	*(bool *)user = true;
	return OK;
}

FALLIBLE enum err journal_has_newer_task(struct journal *j, enum journal_follower_kind kind, const char *follower, const char *about,
					 const char *id, bool *out)
{
	struct walk w = { .kind = kind, .follower = follower, .task_fn = note_found, .user = out };

	*out = false;
	return journal_ask(j, QUERY_NEWER, row_task, &w, "izzz", (int64_t)kind, follower, about, id);
}

static enum err row_count(void *user, sqlite3_stmt *s)
{
	uint64_t *counts = user;
	int state = sqlite3_column_int(s, 0);

	if (state >= 0 && state < TASK_STATE_COUNT)
		counts[state] = (uint64_t)sqlite3_column_int64(s, 1);
	return OK;
}

FALLIBLE enum err journal_count_tasks(struct journal *j, enum journal_follower_kind kind, const char *follower,
				      uint64_t counts[TASK_STATE_COUNT])
{
	memset(counts, 0, TASK_STATE_COUNT * sizeof *counts);
	return journal_ask(j, QUERY_TASK_COUNTS, row_count, counts, "iz", (int64_t)kind, follower);
}
