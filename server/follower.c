/* follower.c: see follower.h. */
#include "server/follower.h"

#include <string.h>

#include "base/num.h"
#include "server/runs.h"
#include "spec/ref.h"

enum { GLOB_MAX = 1024 };

const char *const follower_task_states[TASK_STATE_COUNT] = { "waiting", "running", "done", "failed", "skipped" };

FALLIBLE enum err follower_check_name(struct str name)
{
	static const char letters[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-";
	bool good = name.n >= 1 && name.n <= FOLLOWER_NAME_MAX && memchr(letters, name.p[0], sizeof letters - 4);

	for (size_t i = 0; good && i < name.n; i++)
		good = memchr(letters, name.p[i], sizeof letters - 1) != NULL;
	return good ? OK : ERR(NAME_INVALID, "the name has 1 to %d of A-Z, a-z, 0-9, '.', '_' and '-', a letter or digit first",
			       FOLLOWER_NAME_MAX);
}

FALLIBLE enum err follower_read_filter(const struct jval *root, struct follower_filter *out)
{
	struct jval storage = jval_get(root, "storage"), match = jval_get(root, "match");
	struct str text;

	*out = (struct follower_filter){ 0 };
	if (storage.j) {
		TRY(jval_string(&storage, &text));
		TRY(jval_failed(&storage, ref_check_storage(text)));
		out->storage = text.p;
	}
	if (!match.j)
		return OK;
	TRY(jval_string(&match, &text));
	if (text.n == 0 || text.n > GLOB_MAX || strlen(text.p) != text.n)
		return jval_fail(&match, ERR_VALIDATION_FAILED, "must be a glob of 1 to %d bytes for names of runs, such as run1 or *",
				 GLOB_MAX);
	out->match = text.p;
	return OK;
}

bool follower_matches(const struct follower_filter *f, const char *storage, const char *name)
{
	if (!name)
		return !f->storage && !f->match;
	return (!f->storage || strcmp(f->storage, storage) == 0) && (!f->match || str_glob(str_of(f->match), run_of(name)));
}

/* ---- pages ---- */

struct listing {
	struct buf *out;
	follower_put_fn put;
	uint32_t shown, size;
	char last[TASK_ID_LEN + 1];
	bool more;
};

static enum err put_row(void *user, const struct journal_task *row)
{
	struct listing *l = user;

	if (l->shown == l->size) {
		l->more = true;
		return OK;
	}
	buf_printf(l->out, "%s{\"id\":\"%s\",\"state\":\"%s\"", l->shown++ ? "," : "", row->id, follower_task_states[row->state]);
	memcpy(l->last, row->id, TASK_ID_LEN);
	TRY(l->put(row, l->out));
	buf_putc(l->out, '}');
	return buf_status(l->out);
}

FALLIBLE enum err follower_put_list(struct journal *j, enum journal_follower_kind kind, const char *name, const struct follower_page *page,
				    follower_put_fn put, struct buf *out, char next[TASK_ID_LEN + 1])
{
	struct listing l = { .out = out, .put = put, .size = page->size };

	buf_putc(out, '[');
	TRY(journal_read_tasks(j, kind, name, page->before_id, page->size + 1, put_row, &l));
	buf_putc(out, ']');
	memcpy(next, l.more ? l.last : "", l.more ? sizeof l.last : 1);
	return buf_status(out);
}

FALLIBLE enum err follower_put_page(struct journal *j, enum journal_follower_kind kind, const char *name, const char *key,
				    const struct follower_page *page, follower_put_fn put, struct buf *out)
{
	char next[TASK_ID_LEN + 1];

	buf_printf(out, "{\"%s\":", key);
	TRY(follower_put_list(j, kind, name, page, put, out, next));
	if (next[0])
		buf_printf(out, ",\"next_page_token\":\"%s\"", next);
	buf_putc(out, '}');
	return buf_status(out);
}

FALLIBLE enum err follower_put_task(struct journal *j, enum journal_follower_kind kind, const char *name, struct str id,
				    follower_put_fn put, struct buf *out)
{
	struct listing l = { .out = out, .put = put, .size = 1 };

	TRY(journal_read_task(j, kind, name, id, put_row, &l));
	return l.shown ? OK : ERR(NOT_FOUND, "\"%s\" has no %.*s", name, (int)num_min(id.n, 64), id.p);
}
