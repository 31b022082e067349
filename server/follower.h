/* follower.h: what webhooks and chains have in common: a name, the checkpoints that each is about, and a page of its tasks. */
#pragma once
#include "base/buf.h"
#include "base/jval.h"
#include "server/journal.h"

enum { FOLLOWER_NAME_MAX = 64, FOLLOWERS_MAX = 256, FOLLOWER_QUEUE_MAX = 1000, FOLLOWER_KEPT = 1000 };

FALLIBLE enum err follower_check_name(struct str name);        /* [A-Za-z0-9][A-Za-z0-9._-]{0,63}; ERR_NAME_INVALID */

/* The checkpoints of a storage whose runs match a glob. The texts are the document's. */
struct follower_filter {
	const char *storage, *match;   /* NULL: any */
};
/* Reads "storage" and "match" of a document. */
FALLIBLE enum err follower_read_filter(const struct jval *root, struct follower_filter *out);
bool follower_matches(const struct follower_filter *f, const char *storage, const char *name);   /* name NULL: only if f wants any */

extern const char *const follower_task_states[TASK_STATE_COUNT];       /* "waiting", "running", … */
/* Members of a task's record, behind its "id" and "state": ",\"name\":…". */
typedef enum err (*follower_put_fn)(const struct journal_task *row, struct buf *out);
struct follower_page {
	struct str before_id;
	uint32_t size;
};
/* Appends […], newest first. next: the id that the next page is before; "": there is none. */
FALLIBLE enum err follower_put_list(struct journal *j, enum journal_follower_kind kind, const char *name, const struct follower_page *page,
				    follower_put_fn put, struct buf *out, char next[TASK_ID_LEN + 1]);
/* Appends {"KEY":[…],"next_page_token"}. */
FALLIBLE enum err follower_put_page(struct journal *j, enum journal_follower_kind kind, const char *name, const char *key,
				    const struct follower_page *page, follower_put_fn put, struct buf *out);
/* Appends the record of the task `id`. ERR_NOT_FOUND. */
FALLIBLE enum err follower_put_task(struct journal *j, enum journal_follower_kind kind, const char *name, struct str id,
				    follower_put_fn put, struct buf *out);
