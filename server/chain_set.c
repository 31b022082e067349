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

enum { RETRIES = 3, RETRIES_MAX = 10, LAST = 10 };

static FALLIBLE enum err read_doc(struct chain *c)
{
	static const char *const behind[] = { "newest", "all", NULL };
	struct jval root = JVAL_ROOT(c->base.doc), storage = jval_get(&root, "storage"), steps = jval_get(&root, "steps");
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
	json_array_foreach(json_object_get(a->base.doc, "steps"), i, step) {
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

static FALLIBLE enum err check_circles(const struct followers *all, struct chain *fresh)
{
	struct jval root = JVAL_ROOT(fresh->base.doc), steps = jval_get(&root, "steps");
	CLEANUP(mem_free_ptr) struct chain **v = mem_zalloc(all->count + 1, sizeof *v);
	struct circle c = { .v = v };
	const struct chain *back = NULL;

	NEED(v, "cannot check a chain");
	v[c.n++] = fresh;
	followers_each(struct chain, other, all)
		if (strcmp(other->base.name, fresh->base.name) != 0)
			v[c.n++] = other;
	TRY(walk(&c, 0, &back));
	if (back == fresh)
		return jval_fail(&steps, ERR_VALIDATION_FAILED, "would start the chain again: write to another storage or run");
	if (back)
		return jval_fail(&steps, ERR_VALIDATION_FAILED, "start chain \"%s\", whose checkpoints would start this one again",
				 back->base.name);
	return OK;
}

static FALLIBLE enum err check_storages(const struct server *s, const struct chain *c)
{
	struct jval root = JVAL_ROOT(c->base.doc), storage = jval_get(&root, "storage"), steps = jval_get(&root, "steps");
	struct storage *st;

	TRY(jval_failed(&storage, storage_find(s->storages, str_of(c->filter.storage), &st)));
	for (size_t i = 0; i < json_array_size(steps.j); i++) {
		struct jval step = jval_at(&steps, i), fields = jval_get(&step, chain_step_word(step.j)), to = jval_get(&fields, "storage");
		if (to.j)
			TRY(jval_failed(&to, storage_find(s->storages, str_of(json_string_value(to.j)), &st)));
	}
	return OK;
}

static enum err read_chain(struct server *s, struct follower *f, bool is_new)
{
	struct chain *c = chain_of(f);

	c->is_noted = !is_new;
	TRY(read_doc(c));
	if (!is_new)
		return OK;
	TRY(check_storages(s, c));
	return check_circles(f->all, c);
}

static void replace(struct follower *old, struct follower *fresh)
{
	struct chain *o = chain_of(old), *f = chain_of(fresh);

	o->filter = f->filter;
	o->newest = f->newest;
	o->retries = f->retries;
}

/* ---- told ---- */

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

static enum err put_status(const struct follower *f, bool is_listed, struct buf *out)
{
	const struct follower_page page = { .size = LAST };
	char next[TASK_ID_LEN + 1];
	uint64_t counts[TASK_STATE_COUNT];

	if (is_listed)
		return OK;
	TRY(journal_count_tasks(f->all->server->journal, JOURNAL_CHAIN, f->name, counts));
	buf_puts(out, ",\"status\":{");
	for (int i = 0; i < TASK_STATE_COUNT; i++)
		buf_printf(out, "\"%s\":%ju,", follower_task_states[i], (uintmax_t)counts[i]);
	buf_puts(out, "\"last\":");
	TRY(follower_put_list(f, &page, out, next));
	buf_putc(out, '}');
	return buf_status(out);
}

const struct follower_kind chain_kind = {
	.number = JOURNAL_CHAIN, .word = "chain", .words = "chains", .event = "chain.set", .size = sizeof(struct chain),
	.read = read_chain, .set = follower_set, .replace = replace, .drop = chain_drop, .put = put_status,
	.tasks = "executions", .put_task = put_members,
};
