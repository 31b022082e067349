/* chain_set.c: chains are set, removed and told about. */
#include <stdio.h>

#include "base/jtext.h"
#include "base/log.h"
#include "base/mem.h"
#include "base/num.h"
#include "server/chain_impl.h"
#include "server/chain_steps.h"
#include "server/parts.h"
#include "server/service_clock.h"
#include "server/storage.h"

enum { RETRIES = 3, RETRIES_MAX = 10, DOC_BYTES_MAX = 64 << 10, LAST = 10 };

static struct chain *find(const struct server *s, struct str name)
{
	for (struct chain *c = s->chains->first; c; c = c->next)
		if (str_is(name, c->name))
			return c;
	return NULL;
}

static FALLIBLE enum err need(const struct server *s, struct str name, struct chain **out)
{
	*out = find(s, name);
	return *out ? OK : ERR(NOT_FOUND, "there is no chain \"%.*s\"", (int)num_min(name.n, 64), name.p);
}

static FALLIBLE enum err read_doc(struct chain *c)
{
	static const char *const behind[] = { "newest", "all", NULL };
	struct jval root = JVAL_ROOT(c->doc), storage = jval_get(&root, "storage"), steps = jval_get(&root, "steps");
	struct str text;
	size_t word = 0;

	TRY(jval_only(&root, (const char *const[]){ "storage", "match", "steps", "behind", "retries", NULL }));
	TRY(jval_string(&storage, &text));
	TRY(follower_read_filter(&root, &c->filter));
	TRY(jval_opt_word(&root, "behind", behind, &word));
	c->newest = word == 0;
	c->retries = RETRIES;
	TRY(jval_opt_integer(&root, "retries", 0, RETRIES_MAX, &c->retries));
	return chain_steps_check(&steps, c->filter.storage, c->filter.match);
}

FALLIBLE enum err chain_new(struct server *s, const char *name, uid_t uid, int64_t created_ms, const json_t *doc, struct chain **out)
{
	struct chain *c = mem_zalloc(1, sizeof *c);

	NEED(c, "cannot keep a chain");
	*c = (struct chain){ .all = s->chains, .uid = uid, .created_ms = created_ms, .doc = json_deep_copy(doc) };
	snprintf(c->name, sizeof c->name, "%s", name);
	enum err e = c->doc ? read_doc(c) : ERR(NO_MEMORY, "cannot keep a chain");
	if (e) {
		CLEANUP(err_restore) struct err_info info = *err_last();
		chain_free(c);
		return e;
	}
	*out = c;
	return OK;
}

/* ---- circles ---- */

struct circle {
	struct chain *const *v;        /* all chains, the one to be set first */
	uint32_t n;
	bool seen[FOLLOWERS_MAX + 1];
};

/* Could what a chain makes start another one? */
static FALLIBLE enum err starts(const struct chain *a, const struct chain *b, bool *out)
{
	const json_t *step;
	size_t i;

	*out = false;
	json_array_foreach(json_object_get(a->doc, "steps"), i, step) {
		CLEANUP(mem_free_ptr) char *run = NULL;
		const char *storage = NULL;
		TRY(chain_step_makes(step, a->filter.storage, a->filter.match, &storage, &run));
		if (run && strcmp(storage, b->filter.storage) == 0 && chain_steps_meet(run, b->filter.match ? b->filter.match : "*"))
			*out = true;
	}
	return OK;
}

/* Walks from chain `at` on; back_out: the last one before the first. Each is looked at once. */
static FALLIBLE enum err walk(struct circle *c, uint32_t start, const struct chain **back_out)
{
	uint32_t todo[FOLLOWERS_MAX + 1], n = 0;

	todo[n++] = start;
	while (n) {
		uint32_t at = todo[--n];
		for (uint32_t i = 0; i < c->n; i++) {
			bool follows = false;
			if (i != start && c->seen[i])
				continue;
			TRY(starts(c->v[at], c->v[i], &follows));
			if (follows && i == start) {
				*back_out = c->v[at];
				return OK;
			}
			if (follows) {
				c->seen[i] = true;
				todo[n++] = i;
			}
		}
	}
	return OK;
}

static FALLIBLE enum err check_circles(const struct server *s, struct chain *fresh)
{
	struct jval root = JVAL_ROOT(fresh->doc), steps = jval_get(&root, "steps");
	CLEANUP(mem_free_ptr) struct chain **v = mem_zalloc(s->chains->count + 1, sizeof *v);
	struct circle c = { .v = v };
	const struct chain *back = NULL;

	NEED(v, "cannot check a chain");
	v[c.n++] = fresh;
	for (struct chain *other = s->chains->first; other && c.n <= FOLLOWERS_MAX; other = other->next)
		if (strcmp(other->name, fresh->name) != 0)
			v[c.n++] = other;
	TRY(walk(&c, 0, &back));
	if (back == fresh)
		return jval_fail(&steps, ERR_VALIDATION_FAILED, "would start the chain again: write to another storage or run");
	if (back)
		return jval_fail(&steps, ERR_VALIDATION_FAILED, "start chain \"%s\", whose checkpoints would start this one again",
				 back->name);
	return OK;
}

static FALLIBLE enum err check_storages(const struct server *s, const struct chain *c)
{
	struct jval root = JVAL_ROOT(c->doc), storage = jval_get(&root, "storage"), steps = jval_get(&root, "steps");
	struct storage *st;

	TRY(jval_failed(&storage, storage_find(s->storages, str_of(c->filter.storage), &st)));
	for (size_t i = 0; i < json_array_size(steps.j); i++) {
		struct jval step = jval_at(&steps, i), fields = jval_get(&step, chain_step_word(step.j)), to = jval_get(&fields, "storage");
		if (to.j)
			TRY(jval_failed(&to, storage_find(s->storages, str_of(json_string_value(to.j)), &st)));
	}
	return OK;
}

/* ---- setting ---- */

/* A change on its way to the journal. */
struct change {
	struct server *server;
	struct chain *chain;           /* to be; NULL: removed */
	char name[FOLLOWER_NAME_MAX + 1];
	uid_t uid;
	done_fn fn;
	void *user;
};

static void emit_set(const struct change *c)
{
	events_emit(c->server->events, "chain.set", NULL,
		    json_pack("{s:s, s:I, s:s}", "chain", c->name, "uid", (json_int_t)c->uid, "what", c->chain ? "put" : "delete"));
	log_info("chain set", "chain", c->name, "what", c->chain ? "put" : "delete", NULL);
}

static void replace(struct chain *old, struct chain *fresh)
{
	json_t *doc = old->doc;

	old->doc = fresh->doc;
	fresh->doc = doc;
	old->filter = fresh->filter;
	old->newest = fresh->newest;
	old->retries = fresh->retries;
	old->uid = fresh->uid;
	chain_free(fresh);
}

static void on_changed(void *user, enum err e)
{
	struct change *c = user;
	struct chains *all = c->server->chains;
	struct chain *old = find(c->server, str_of(c->name)), *fresh = c->chain;

	if (e && fresh) {
		CLEANUP(err_restore) struct err_info info = *err_last();
		chain_free(fresh);
	}
	if (!e) {
		emit_set(c);
		if (old && fresh) {
			replace(old, fresh);
		} else if (fresh) {
			fresh->next = all->first;
			all->first = fresh;
			all->count++;
		} else if (old) {
			chain_drop(old);
		}
	}
	c->fn(c->user, e);
	mem_free(c);
}

static struct change *change_new(struct server *s, const struct principal *who, struct str name, done_fn fn, void *user)
{
	struct change *c = mem_sure(sizeof *c);

	*c = (struct change){ .server = s, .uid = who->uid, .fn = fn, .user = user };
	snprintf(c->name, sizeof c->name, "%.*s", (int)num_min(name.n, FOLLOWER_NAME_MAX), name.p);
	return c;
}

static FALLIBLE enum err check_owner(const struct principal *who, const struct chain *c)
{
	if (!c || principal_may(who, c->uid))
		return OK;
	return ERR(FORBIDDEN, "chain \"%s\" was set by uid %u: only that one, root and dcpd's own user change it", c->name, c->uid);
}

static FALLIBLE enum err set_now(struct server *s, const struct principal *who, struct str name, const json_t *doc, struct change *c,
				 struct journal_txn **out)
{
	const struct chain *old = find(s, name);

	TRY(follower_check_name(name));
	TRY(check_owner(who, old));
	if (!old && s->chains->count >= FOLLOWERS_MAX)
		return ERR(LIMIT_EXCEEDED, "there are %d chains", FOLLOWERS_MAX);
	TRY(chain_new(s, c->name, who->uid, old ? old->created_ms : clock_wall_ms(), doc, &c->chain));
	TRY(check_storages(s, c->chain));
	TRY(check_circles(s, c->chain));
	CLEANUP(mem_free_ptr) char *text = jtext_of(c->chain->doc);
	NEED(text, "cannot keep a chain");
	if (strlen(text) > DOC_BYTES_MAX)
		return ERR(LIMIT_EXCEEDED, "a chain has at most %d bytes", DOC_BYTES_MAX);
	struct journal_txn *t = journal_txn_new(s->journal);
	journal_put_follower(t, &(struct journal_follower){ JOURNAL_CHAIN, c->name, who->uid, c->chain->created_ms, str_of(text) });
	*out = t;
	return OK;
}

void chain_set(struct server *s, const struct principal *who, struct str name, const json_t *doc, done_fn fn, void *user)
{
	struct change *c = change_new(s, who, name, fn, user);
	struct journal_txn *t = NULL;
	enum err e = set_now(s, who, name, doc, c, &t);

	if (e)
		loop_later(s->loop, on_changed, c, e);
	else
		journal_commit(s->journal, t, on_changed, c);
}

void chain_delete(struct server *s, const struct principal *who, struct str name, done_fn fn, void *user)
{
	struct change *c = change_new(s, who, name, fn, user);
	struct chain *old;
	enum err e = need(s, name, &old);

	e = e ?: check_owner(who, old);
	if (e) {
		loop_later(s->loop, on_changed, c, e);
		return;
	}
	struct journal_txn *t = journal_txn_new(s->journal);
	journal_delete_follower(t, JOURNAL_CHAIN, old->name);
	journal_commit(s->journal, t, on_changed, c);
}

/* ---- telling ---- */

static enum err put_members(const struct journal_task *row, struct buf *out)
{
	static const char *const shown[] = { "job", "depth", "step", "jobs", "error", "created_at", "finished_at" };
	CLEANUP(json_decrefp) json_t *doc = NULL;

	TRY(jtext_parse(row->doc, 0, &doc));
	json_t *storage = json_object_get(doc, "storage"), *name = json_object_get(doc, "name");
	buf_json_member(out, ",\"checkpoint\":{\"storage\":", str_of(json_string_value(storage) ?: ""));
	buf_json_member(out, ",\"name\":", str_of(json_string_value(name) ?: ""));
	buf_putc(out, '}');
	for (size_t i = 0; i < sizeof shown / sizeof *shown; i++) {
		const json_t *v = json_object_get(doc, shown[i]);
		if (!v)
			continue;
		buf_printf(out, ",\"%s\":", shown[i]);
		if (json_is_string(v))
			buf_json_str(out, str_of(json_string_value(v)));
		else if (json_is_integer(v))
			buf_printf(out, "%jd", (intmax_t)json_integer_value(v));
		else
			TRY(jval_dump(v, out));
	}
	return buf_status(out);
}

/* The chain without its last brace. */
static FALLIBLE enum err put_head(const struct chain *c, struct buf *out)
{
	CLEANUP(mem_free_ptr) char *doc = jtext_of(c->doc);
	char at[CLOCK_TEXT_MAX];

	NEED(doc, "cannot show a chain");
	buf_printf(out, "{\"name\":\"%s\",\"uid\":%u,\"created_at\":\"%s\",", c->name, c->uid, clock_text(c->created_ms, at));
	buf_put(out, doc + 1, strlen(doc) - 2);
	return buf_status(out);
}

FALLIBLE enum err chain_put(struct server *s, struct str name, struct buf *out)
{
	const struct follower_page page = { .size = LAST };
	char next[TASK_ID_LEN + 1];
	uint64_t counts[TASK_STATE_COUNT];
	struct chain *c;

	TRY(need(s, name, &c));
	TRY(put_head(c, out));
	TRY(journal_count_tasks(s->journal, JOURNAL_CHAIN, c->name, counts));
	buf_puts(out, ",\"status\":{");
	for (int i = 0; i < TASK_STATE_COUNT; i++)
		buf_printf(out, "\"%s\":%ju,", follower_task_states[i], (uintmax_t)counts[i]);
	buf_puts(out, "\"last\":");
	TRY(follower_put_list(s->journal, JOURNAL_CHAIN, c->name, &page, put_members, out, next));
	buf_puts(out, "}}");
	return buf_status(out);
}

FALLIBLE enum err chains_put(struct server *s, struct str after, uint32_t size, struct buf *out)
{
	CLEANUP(mem_free_ptr) char *last = mem_strndup(after.p ? after.p : "", after.n);
	const struct chain *shown = NULL;

	NEED(last, "cannot list chains");
	buf_puts(out, "{\"chains\":[");
	for (uint32_t i = 0;; i++) { /* by name; there are few */
		const struct chain *next = NULL;
		for (const struct chain *c = s->chains->first; c; c = c->next)
			if (strcmp(c->name, shown ? shown->name : last) > 0 && (!next || strcmp(c->name, next->name) < 0))
				next = c;
		if (!next || i == size) {
			buf_putc(out, ']');
			if (next && shown)
				buf_printf(out, ",\"next_page_token\":\"%s\"", shown->name);
			break;
		}
		buf_puts(out, i ? "," : "");
		TRY(put_head(next, out));
		buf_putc(out, '}');
		shown = next;
	}
	buf_putc(out, '}');
	return buf_status(out);
}

FALLIBLE enum err chain_put_executions(struct server *s, struct str name, const struct follower_page *page, struct buf *out)
{
	struct chain *c;

	TRY(need(s, name, &c));
	return follower_put_page(s->journal, JOURNAL_CHAIN, c->name, "executions", page, put_members, out);
}
