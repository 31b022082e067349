/* follower.c: see follower.h. */
#include "server/follower.h"

#include <stdio.h>
#include <string.h>

#include "base/jtext.h"
#include "base/list.h"
#include "base/log.h"
#include "base/mem.h"
#include "base/num.h"
#include "server/events.h"
#include "server/parts.h"
#include "server/runs.h"
#include "server/service_clock.h"
#include "spec/ref.h"

enum { GLOB_MAX = 1024, DOC_BYTES_MAX = 64 << 10 };

const char *const follower_task_states[TASK_STATE_COUNT] = { "waiting", "running", "done", "failed", "skipped" };

/* ---- one of them ---- */

FALLIBLE enum err follower_check_name(struct str name)
{
	static const char letters[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-";
	bool good = name.n >= 1 && name.n <= FOLLOWER_NAME_MAX && memchr(letters, name.p[0], sizeof letters - 4);

	for (size_t i = 0; good && i < name.n; i++)
		good = memchr(letters, name.p[i], sizeof letters - 1) != NULL;
	return good ? OK : ERR(NAME_INVALID, "the name has 1 to %d of A-Z, a-z, 0-9, '.', '_' and '-', a letter or digit first",
			       FOLLOWER_NAME_MAX);
}

void follower_free(struct follower *f)
{
	if (f)
		json_decref(f->doc);
	mem_free(f);
}

static void free_unless_taken(struct follower **f)
{
	CLEANUP(err_restore) struct err_info info = *err_last();
	follower_free(*f);
}

struct follower *follower_find(const struct followers *all, struct str name)
{
	struct follower *f = all->first;

	while (f && !str_is(name, f->name))
		f = f->next;
	return f;
}

static FALLIBLE enum err check_admin(const struct followers *all, const struct principal *who)
{
	if (who->admin || !all->kind->is_for_admins)
		return OK;
	return ERR(FORBIDDEN, "%s are for root, dcpd's own user and the holder of the token", all->kind->words);
}

FALLIBLE enum err follower_need(const struct followers *all, const struct principal *who, struct str name, struct follower **out)
{
	TRY(check_admin(all, who));
	*out = follower_find(all, name);
	return *out ? OK : ERR(NOT_FOUND, "there is no %s \"%.*s\"", all->kind->word, (int)num_min(name.n, 64), name.p);
}

static FALLIBLE enum err read_new(struct followers *all, const struct journal_follower *row, const json_t *doc, bool is_new,
				  struct follower **out)
{
	CLEANUP(free_unless_taken) struct follower *f = mem_zalloc(1, all->kind->size);

	NEED(f, "cannot keep what is set under a name");
	*f = (struct follower){ .all = all, .uid = row->uid, .created_ms = row->created_ms, .doc = json_deep_copy(doc) };
	snprintf(f->name, sizeof f->name, "%s", row->name);
	NEED(f->doc, "cannot keep what is set under a name");
	TRY(all->kind->read(all->server, f, is_new));
	*out = f;
	f = NULL;
	return OK;
}

FALLIBLE enum err follower_new(struct followers *all, uid_t uid, struct str name, const json_t *doc, struct follower **out)
{
	const struct follower *old = follower_find(all, name);
	char text[FOLLOWER_NAME_MAX + 1];

	TRY(follower_check_name(name));
	snprintf(text, sizeof text, "%.*s", (int)name.n, name.p);
	return read_new(all, &(struct journal_follower){ .name = text, .uid = uid, .created_ms = old ? old->created_ms : clock_wall_ms() },
			doc, true, out);
}

/* ---- set and removed ---- */

/* A change on its way to the journal. */
struct change {
	struct followers *all;
	struct follower *fresh;        /* to be; NULL: removed */
	bool is_counted;               /* in all->coming */
	char name[FOLLOWER_NAME_MAX + 1];
	uid_t uid;                     /* whose change it is */
	done_fn fn;
	void *user;
};

static void insert(struct followers *all, struct follower *f)
{
	struct follower **at = &all->first;

	while (*at && strcmp((*at)->name, f->name) < 0)
		at = &(*at)->next;
	f->next = *at;
	*at = f;
	all->count++;
}

static void tell(const struct change *c)
{
	const struct follower_kind *k = c->all->kind;
	const char *what = c->fresh ? "put" : "delete";

	if (k->event)
		events_emit(c->all->server->events, k->event, NULL,
			    json_pack("{s:s, s:I, s:s}", k->word, c->name, "uid", (json_int_t)c->uid, "what", what));
	log_info("set by a user", k->word, c->name, "what", what, NULL);
}

static void apply(const struct change *c)
{
	struct followers *all = c->all;
	struct follower *old = follower_find(all, str_of(c->name)), *fresh = c->fresh;

	if (old && fresh) {
		json_t *doc = old->doc;
		old->doc = fresh->doc;
		old->uid = fresh->uid;
		all->kind->replace(old, fresh);
		fresh->doc = doc;
		follower_free(fresh);
	} else if (fresh) {
		insert(all, fresh);
	} else if (old) {
		list_remove(&all->first, old);
		all->count--;
		all->kind->drop(old);
	}
	if (all->kind->changed)
		all->kind->changed(all->server);
}

static void on_changed(void *user, enum err e)
{
	struct change *c = user;

	c->all->coming -= c->is_counted;
	if (e) {
		free_unless_taken(&c->fresh);
	} else {
		tell(c);
		apply(c);
	}
	c->fn(c->user, e);
	mem_free(c);
}

static struct change *change_new(struct followers *all, const struct principal *who, const char *name, done_fn fn, void *user)
{
	struct change *c = mem_sure(sizeof *c);

	*c = (struct change){ .all = all, .uid = who->uid, .fn = fn, .user = user };
	snprintf(c->name, sizeof c->name, "%s", name);
	return c;
}

static FALLIBLE enum err check_owner(const struct principal *who, const struct follower *f)
{
	if (principal_may(who, f->uid))
		return OK;
	return ERR(FORBIDDEN, "%s \"%s\" was set by uid %u: only that one, root and dcpd's own user change it", f->all->kind->word, f->name,
		   f->uid);
}

/* May `who` set this name now? */
static FALLIBLE enum err check_set(const struct followers *all, const struct principal *who, struct str name)
{
	const struct follower *old = follower_find(all, name);

	TRY(check_admin(all, who));
	TRY(follower_check_name(name));
	if (old)
		return check_owner(who, old);
	if (all->count + all->coming >= FOLLOWERS_MAX)
		return ERR(LIMIT_EXCEEDED, "there are %d %s already: remove some", FOLLOWERS_MAX, all->kind->words);
	return OK;
}

FALLIBLE enum err follower_make(struct followers *all, const struct principal *who, struct str name, const json_t *doc,
				struct follower **out)
{
	TRY(check_set(all, who, name));
	return follower_new(all, who->uid, name, doc, out);
}

static FALLIBLE enum err journal_it(const struct follower *fresh, const struct principal *who, struct journal_txn **out)
{
	const struct follower_kind *k = fresh->all->kind;
	CLEANUP(mem_free_ptr) char *text = jtext_of(fresh->doc);

	TRY(check_set(fresh->all, who, str_of(fresh->name))); /* again: there may have been time between */
	NEED(text, "cannot keep what is set under a name");
	if (strlen(text) > DOC_BYTES_MAX)
		return ERR(LIMIT_EXCEEDED, "the document of a %s has at most %d bytes", k->word, DOC_BYTES_MAX);
	*out = journal_txn_new(fresh->all->server->journal);
	journal_put_follower(*out, &(struct journal_follower){ k->number, fresh->name, fresh->uid, fresh->created_ms, str_of(text) });
	return OK;
}

void follower_keep(struct follower *fresh, const struct principal *who, done_fn fn, void *user)
{
	struct followers *all = fresh->all;
	struct change *c = change_new(all, who, fresh->name, fn, user);
	struct journal_txn *t = NULL;
	enum err e = journal_it(fresh, who, &t);

	c->fresh = fresh;
	if (e) {
		loop_later(all->server->loop, on_changed, c, e);
		return;
	}
	c->is_counted = true; /* a replacement, too: what it replaces may go first */
	all->coming++;
	journal_commit(all->server->journal, t, on_changed, c);
}

void follower_set(struct followers *all, const struct principal *who, struct str name, const json_t *doc, done_fn fn, void *user)
{
	struct follower *fresh = NULL;
	enum err e = follower_make(all, who, name, doc, &fresh);

	if (e)
		loop_later(all->server->loop, fn, user, e);
	else
		follower_keep(fresh, who, fn, user);
}

void follower_remove(struct followers *all, const struct principal *who, struct str name, done_fn fn, void *user)
{
	struct follower *old;
	enum err e = follower_need(all, who, name, &old);

	e = e ?: check_owner(who, old);
	if (e) {
		loop_later(all->server->loop, fn, user, e);
		return;
	}
	struct journal_txn *t = journal_txn_new(all->server->journal);
	journal_delete_follower(t, all->kind->number, old->name);
	journal_commit(all->server->journal, t, on_changed, change_new(all, who, old->name, fn, user));
}

/* ---- told ---- */

static FALLIBLE enum err put_one(const struct follower *f, bool is_listed, struct buf *out)
{
	CLEANUP(mem_free_ptr) char *doc = jtext_of(f->doc);
	char at[CLOCK_TEXT_MAX];

	NEED(doc, "cannot show what was set under a name");
	buf_printf(out, "{\"name\":\"%s\",\"uid\":%u,", f->name, f->uid);
	if (f->created_ms)
		buf_printf(out, "\"created_at\":\"%s\",", clock_text(f->created_ms, at));
	buf_put(out, doc + 1, strlen(doc) - 2);
	if (f->all->kind->put)
		TRY(f->all->kind->put(f, is_listed, out));
	buf_putc(out, '}');
	return buf_status(out);
}

FALLIBLE enum err follower_put(const struct followers *all, const struct principal *who, struct str name, struct buf *out)
{
	struct follower *f;

	TRY(follower_need(all, who, name, &f));
	return put_one(f, false, out);
}

FALLIBLE enum err followers_put(const struct followers *all, const struct principal *who, struct str after, uint32_t size,
			       struct buf *out)
{
	CLEANUP(mem_free_ptr) char *last = mem_strndup(after.p ? after.p : "", after.n);
	const struct follower *f = all->first, *shown = NULL;

	TRY(check_admin(all, who));
	NEED(last, "cannot list what was set under names");
	while (f && strcmp(f->name, last) <= 0)
		f = f->next;
	buf_printf(out, "{\"%s\":[", all->kind->words);
	for (; f && size; f = f->next, size--) {
		buf_puts(out, shown ? "," : "");
		TRY(put_one(f, true, out));
		shown = f;
	}
	buf_putc(out, ']');
	if (f && shown)
		buf_printf(out, ",\"next_page_token\":\"%s\"", shown->name);
	buf_putc(out, '}');
	return buf_status(out);
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

/* ---- tasks ---- */

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

FALLIBLE enum err follower_put_list(const struct follower *f, const struct follower_page *page, struct buf *out,
				   char next[TASK_ID_LEN + 1])
{
	const struct follower_kind *k = f->all->kind;
	struct listing l = { .out = out, .put = k->put_task, .size = page->size };

	buf_putc(out, '[');
	TRY(journal_read_tasks(f->all->server->journal, k->number, f->name, page->before_id, page->size + 1, put_row, &l));
	buf_putc(out, ']');
	memcpy(next, l.more ? l.last : "", l.more ? sizeof l.last : 1);
	return buf_status(out);
}

FALLIBLE enum err follower_put_page(const struct follower *f, const struct follower_page *page, struct buf *out)
{
	char next[TASK_ID_LEN + 1];

	buf_printf(out, "{\"%s\":", f->all->kind->tasks);
	TRY(follower_put_list(f, page, out, next));
	if (next[0])
		buf_printf(out, ",\"next_page_token\":\"%s\"", next);
	buf_putc(out, '}');
	return buf_status(out);
}

FALLIBLE enum err follower_put_task(const struct follower *f, struct str id, struct buf *out)
{
	const struct follower_kind *k = f->all->kind;
	struct listing l = { .out = out, .put = k->put_task, .size = 1 };

	TRY(journal_read_task(f->all->server->journal, k->number, f->name, id, put_row, &l));
	return l.shown ? OK : ERR(NOT_FOUND, "\"%s\" has no %.*s", f->name, (int)num_min(id.n, 64), id.p);
}

/* ---- start and end ---- */

static enum err take_row(void *user, const struct journal_follower *row)
{
	struct followers *all = user;
	CLEANUP(jval_drop) json_t *doc = NULL;
	struct follower *f = NULL;
	enum err e = jtext_parse(row->doc, 0, &doc);

	if (all->count == FOLLOWERS_MAX)
		e = ERR(LIMIT_EXCEEDED, "there are more than %d %s", FOLLOWERS_MAX, all->kind->words);
	e = e ?: follower_check_name(str_of(row->name));
	e = e ?: read_new(all, row, doc, false, &f);
	if (e == ERR_NO_MEMORY)
		return e;
	if (e)
		log_err("what was set under a name cannot be taken up", all->kind->word, row->name, NULL);
	else
		insert(all, f);
	return OK;
}

FALLIBLE enum err followers_new(struct server *s, const struct follower_kind *kind)
{
	struct followers *all = s->followers[kind->number] = mem_zalloc(1, sizeof *all);

	NEED(all, "cannot keep what is set under names");
	*all = (struct followers){ .server = s, .kind = kind };
	return journal_read_followers(s->journal, kind->number, take_row, all);
}

void followers_free(struct followers *all)
{
	if (!all)
		return;
	list_each(f, all->first)
		follower_free(f);
	mem_free(all);
}

struct followers *followers_of(const struct server *s, struct str words)
{
	for (size_t i = 0; i < JOURNAL_FOLLOWER_KINDS; i++)
		if (s->followers[i] && str_is(words, s->followers[i]->kind->words))
			return s->followers[i];
	return NULL;
}

_Static_assert(sizeof ((struct server *)0)->followers / sizeof(struct followers *) == JOURNAL_FOLLOWER_KINDS, "a kind has no place");
