/* lookup_find.c: the checkpoints of a storage, or of some of its runs, that fit a filter, in an order, page by page; and the runs.
 *
 * All that can be asked for is in the tree (lookup_tree.h), so that a page of 100,000 checkpoints costs a walk over them in memory, and
 * the next one, or the same again, not even that, as long as nothing changes: the order is kept. The checkpoints of the page are looked at
 * on the disk all the same: if one is not what the tree knew, the page is chosen again. A page token is the place of the last one shown in
 * the order, so that the next page goes on there, whatever came or went. */
#include <stdlib.h>

#include "base/clock.h"
#include "base/jval.h"
#include "base/num.h"
#include "query/lookup_kept.h"
#include "query/lookup_scan.h"
#include "store/aliases.h"

enum { PAGE_MAX = 2000, CHOICES_MAX = 4, VERDICTS_MAX = 200000, AHEAD = 8 };

/* So that what was never looked at is long overdue. */
static const uint64_t questions_first = 1ull << 32;

struct finding {
	struct lookup_look look;
	struct buf *out;
	struct checkpoint_query query;
	struct checkpoint_place after;
	struct str prefix, runs;       /* runs: a glob; p NULL: all */
	const char *run;               /* NULL: not only one */
	bool has_after, is_brief, needs_verdicts;
	uint64_t size;
	struct lookup_order *order;    /* while it is made: a heap, the last one of the order on top */
	struct checkpoint_place refused; /* the latest place of this folder's that is behind all in the heap */
	bool has_refused;
	struct lookup_choice *page;    /* in `order` */
	uint64_t count;                /* on the page, with one more if there is one */
	json_t *aliases;               /* of `aliases_of`; NULL: none can be read */
	char *aliases_of, *aliases_problem;
};

/* The order of a run: the newest contents first (spec/derived.h); the time counts, for a run that was set back to an earlier step goes on
 * from there. */
static const struct checkpoint_query newest_first = { .sort = KEY_TIME, .falls = true, .of_run = true };

/* ---- verdicts ---- */

static const char *known_state(const char *state)
{
	static const char *const states[] = { "verified", "damaged", "unverified" };

	for (size_t i = 0; i < sizeof states / sizeof *states; i++)
		if (strcmp(state, states[i]) == 0)
			return states[i];
	return "";
}

static FALLIBLE enum err take_verdict(struct lookup_tree *t, const json_t *row)
{
	struct str name = str_of(json_string_value(json_array_get(row, 0)) ?: "");
	struct str identity = str_of(json_string_value(json_array_get(row, 1)) ?: "");
	struct lookup_verdict *old = map_object(&t->verdicts, name), *v = mem_alloc(sizeof *v + name.n + identity.n);

	NEED(v, "no memory for verdicts");
	t->changes++;
	char *text = (char *)(v + 1);
	memcpy(text, name.p, name.n);
	memcpy(text + name.n, identity.p, identity.n);
	*v = (struct lookup_verdict){ { text, name.n }, { text + name.n, identity.n },
				      known_state(json_string_value(json_array_get(row, 2)) ?: "") };
	if (old) {
		map_remove(&t->verdicts, name);
		mem_free(old);
	}
	enum err e = map_add(&t->verdicts, v->name, v);
	if (e)
		mem_free(v);
	return e;
}

/* *behind: the rows go on from a number that this worker has not got to. */
static FALLIBLE enum err take_verdicts(struct lookup_tree *t, const json_t *q, bool *behind)
{
	const json_t *verdicts = json_object_get(q, "verdicts"), *row;
	size_t i;

	*behind = verdicts && (uint64_t)json_integer_value(json_object_get(verdicts, "from")) > t->verdicts_at;
	if (!verdicts || *behind)
		return OK;
	json_array_foreach(json_object_get(verdicts, "rows"), i, row)
		TRY(take_verdict(t, row));
	t->verdicts_at = num_max(t->verdicts_at, (uint64_t)json_integer_value(json_object_get(verdicts, "to")));
	return OK;
}

static const char *verdict_of(const struct lookup_tree *t, const struct lookup_entry *e)
{
	const struct lookup_verdict *v = t->verdicts.raw.count ? map_object(&t->verdicts, e->facts.name) : NULL;

	return v && str_eq(v->identity, e->etag) ? v->state : known_state(e->noted.p);
}

/* ---- the choice of a page ---- */

static void swap(struct lookup_choice *a, struct lookup_choice *b)
{
	struct lookup_choice c = *a;

	*a = *b;
	*b = c;
}

static int order(const struct finding *f, const struct lookup_choice *a, const struct lookup_choice *b)
{
	return checkpoint_query_compare(&f->query, &a->place, &b->place);
}

static void sift_down(struct finding *f)
{
	struct lookup_choice *v = f->order->list.v;

	for (uint64_t i = 0, k; (k = 2 * i + 1) < f->order->list.n; i = k) {
		k += k + 1 < f->order->list.n && order(f, &v[k + 1], &v[k]) > 0;
		if (order(f, &v[k], &v[i]) <= 0)
			return;
		swap(&v[i], &v[k]);
	}
}

/* A folder is walked in the order of names: a checkpoint that differs from a refused one in its name alone is behind it, and its name need
 * not be read. */
static bool is_refused(const struct finding *f, const struct checkpoint_place *p)
{
	const struct checkpoint_place *r = &f->refused;

	return f->has_refused && p->value == r->value && p->step == r->step && p->is_known == r->is_known;
}

static FALLIBLE enum err choose(struct finding *f, struct lookup_choice c)
{
	struct lookup_choice *last, *v = f->order->list.v;

	if (!f->order->is_whole && f->order->list.n == f->size + 1) {
		if (is_refused(f, &c.place))
			return OK;
		if (order(f, &c, &v[0]) < 0) {
			v[0] = c;
			sift_down(f);
		} else {
			f->refused = c.place;
			f->has_refused = true;
		}
		return OK;
	}
	TRY(vec_push(&f->order->list, &last));
	*last = c;
	v = f->order->list.v;
	for (uint64_t i = f->order->list.n - 1; !f->order->is_whole && i > 0 && order(f, &v[i], &v[(i - 1) / 2]) > 0; i = (i - 1) / 2)
		swap(&v[i], &v[(i - 1) / 2]);
	return OK;
}

static bool is_wanted(const struct finding *f, const struct lookup_entry *e)
{
	return lookup_starts_with(e->facts.name, f->prefix) && (!f->runs.p || str_glob(f->runs, e->facts.run)) &&
	       checkpoint_query_matches(&f->query, &e->facts);
}

static FALLIBLE enum err consider(struct finding *f, struct lookup_child *c)
{
	struct lookup_entry *e = c->entry;

	if (f->needs_verdicts)
		e->facts.verified = verdict_of(f->look.tree, e);
	if (!is_wanted(f, e))
		return OK;
	return choose(f, (struct lookup_choice){ c, checkpoint_query_place(&f->query, &e->facts) });
}

/* Entries lie all over the memory: a search that waits for each of 100,000 takes twice as long. */
static void fetch_ahead(const struct lookup_entry *e)
{
	if (!e)
		return;
	mem_prefetch(&e->facts, sizeof e->facts);
	mem_prefetch(e + 1, 1); /* the name, where there are neither metrics nor labels */
}

/* Considers the checkpoints in the folder and, unless one run is asked for, below it. Of checkpoints that differ in nothing but their
 * names, such as sizes that are all the same, the first of the order are met first: the others do not move the heap. */
static FALLIBLE enum err consider_folder(struct finding *f, const struct lookup_dir *d)
{
	f->has_refused = false;
	for (uint64_t i = 0, n = d->children.n; i < n; i++) {
		struct lookup_child *c = &d->children.v[f->query.falls ? n - 1 - i : i];
		if (i + AHEAD < n)
			fetch_ahead(d->children.v[f->query.falls ? n - 1 - i - AHEAD : i + AHEAD].entry);
		if (c->dir && !f->run) {
			TRY(consider_folder(f, c->dir));
			f->has_refused = false;
		} else if (c->entry && !c->dir) {
			TRY(consider(f, c));
		}
	}
	return OK;
}

static int by_place(const void *a, const void *b, void *user)
{
	return order(user, a, b);
}

static void put_words(const json_t *q, struct buf *out)
{
	static const char *const members[] = { "run", "runs", "prefix", "filter", "sort" };

	for (size_t i = 0; i < sizeof members / sizeof *members; i++) {
		const json_t *word = json_object_get(q, members[i]);
		buf_putc(out, word ? '+' : '-');
		buf_put(out, json_string_value(word), json_string_length(word) + (word != NULL)); /* with the zero at its end */
	}
	buf_putc(out, json_is_true(json_object_get(q, "whole")) ? '+' : '-'); /* in the order of a run */
}

/* Is what the latest search has sorted still the order, as far as the page needs it? */
static bool is_sorted(const struct finding *f, const struct buf *words)
{
	const struct lookup_order *o = f->order;

	return o->changes && o->changes == f->look.tree->changes && o->words.len == words->len &&
	       memcmp(o->words.p, words->p, words->len) == 0 && (o->is_whole || (!f->has_after && f->size < o->list.n));
}

/* All are sorted for a page that is not the first: those behind it are likely to be asked for next. */
static FALLIBLE enum err sort(struct finding *f, const struct lookup_dir *d, struct buf *words)
{
	struct lookup_order *o = f->order;

	o->changes = 0;
	o->list.n = 0;
	o->is_whole = f->has_after;
	TRY(vec_reserve(&o->list, 1));
	TRY(consider_folder(f, d));
	qsort_r(o->list.v, o->list.n, sizeof *o->list.v, by_place, f);
	o->is_whole = o->is_whole || o->list.n <= f->size;
	buf_free(&o->words);
	o->words = *words;
	*words = BUF_INIT(words->max);
	o->changes = f->look.tree->changes;
	return OK;
}

static FALLIBLE enum err choose_page(struct finding *f, const json_t *q, const struct lookup_dir *d)
{
	CLEANUP(buf_free) struct buf words = BUF_INIT(1 << 16);
	uint64_t low = 0;

	put_words(q, &words);
	TRY(buf_status(&words));
	if (!is_sorted(f, &words))
		TRY(sort(f, d, &words));
	for (uint64_t high = f->has_after ? f->order->list.n : 0; low < high;) {
		uint64_t mid = low + (high - low) / 2;
		if (checkpoint_query_compare(&f->query, &f->order->list.v[mid].place, &f->after) <= 0)
			low = mid + 1;
		else
			high = mid;
	}
	f->page = f->order->list.v + low;
	f->count = num_min(f->order->list.n - low, f->size + 1);
	return OK;
}

/* Looks at what the page is to show. *stale: it is not what the choice was made by. */
static FALLIBLE enum err look_at_page(struct finding *f, bool *stale)
{
	*stale = false;
	for (uint64_t i = 0; i < f->count && i < f->size; i++) {
		struct lookup_choice *c = &f->page[i];
		struct checkpoint_place was = c->place;
		if (c->child->entry->looked == f->look.tree->questions)
			continue;
		TRY(lookup_entry_refresh(&f->look, c->child, true));
		struct lookup_entry *e = c->child->entry;
		if (e) {
			e->facts.verified = f->needs_verdicts ? verdict_of(f->look.tree, e) : "";
			was.name = e->facts.name;
			c->place = checkpoint_query_place(&f->query, &e->facts);
		}
		*stale = *stale || !e || !is_wanted(f, e) || checkpoint_query_compare(&f->query, &was, &c->place) != 0;
	}
	return OK;
}

/* ---- aliases ---- */

static FALLIBLE enum err read_aliases(struct finding *f, struct str run)
{
	if (f->aliases_of && str_is(run, f->aliases_of))
		return OK;
	mem_free(f->aliases_of);
	json_decref(f->aliases);
	f->aliases = NULL;
	f->aliases_of = mem_strndup(run.p, run.n);
	NEED(f->aliases_of, "no memory for aliases");
	enum err e = aliases_read(f->look.store, f->aliases_of, &f->aliases);
	if (e != ERR_STATE_CONFLICT)
		return lookup_pass_over(e);
	mem_free(f->aliases_problem);
	f->aliases_problem = mem_strdup(err_last()->text);
	NEED(f->aliases_problem, "no memory for aliases");
	return OK;
}

static FALLIBLE enum err put_aliases_of(struct finding *f, const struct lookup_entry *e)
{
	const char *alias, *before = ",\"aliases\":[";
	json_t *name;

	TRY(read_aliases(f, e->facts.run));
	json_object_foreach(f->aliases, alias, name) {
		if (!str_is(e->facts.name, json_string_value(name)))
			continue;
		buf_puts(f->out, before);
		buf_json_str(f->out, str_of(alias));
		before = ",";
	}
	buf_puts(f->out, before[1] ? "" : "]");
	return OK;
}

/* ---- a page ---- */

static FALLIBLE enum err put_page(struct finding *f)
{
	uint64_t shown = num_min(f->count, f->size);

	buf_puts(f->out, "\"checkpoints\":[");
	for (uint64_t i = 0; i < shown; i++) {
		const struct lookup_entry *e = f->page[i].child->entry;
		buf_puts(f->out, f->out->p[f->out->len - 1] == '[' ? "{" : ",{");
		buf_put(f->out, e->record.p, f->is_brief ? e->brief : e->record.n);
		if (f->is_brief) {
			TRY(put_aliases_of(f, e));
			buf_puts(f->out, verdict_of(f->look.tree, e)[0] ? ",\"verdict\":true" : ""); /* saves looks into the journal */
		}
		buf_putc(f->out, '}');
	}
	buf_putc(f->out, ']');
	if (shown == f->count || shown == 0)
		return OK;
	CLEANUP(buf_free) struct buf token = BUF_INIT(1 << 16);
	checkpoint_query_put_token(&f->query, &f->page[shown - 1].place, &token);
	TRY(buf_status(&token));
	buf_json_member(f->out, ",\"next\":", (struct str){ (const char *)token.p, token.len });
	return OK;
}

/* ---- runs ---- */

static bool is_newer(const struct lookup_entry *a, const struct lookup_entry *b)
{
	if (!b)
		return true;
	struct checkpoint_place x = checkpoint_query_place(&newest_first, &a->facts), y = checkpoint_query_place(&newest_first, &b->facts);
	return checkpoint_query_compare(&newest_first, &x, &y) < 0;
}

static void add_up(struct finding *f, struct lookup_sum *s, const struct lookup_entry *e)
{
	s->count++;
	s->bytes += e->facts.bytes;
	s->holds += e->facts.is_held;
	if (is_newer(e, s->newest))
		s->newest = e;
	if (is_newer(e, s->verified) && strcmp(verdict_of(f->look.tree, e), "verified") == 0)
		s->verified = e;
}

/* A run is what is in one folder. */
static FALLIBLE enum err sum_folder(struct finding *f, const struct lookup_dir *d)
{
	struct lookup_sum s = { .count = 0 }, *row;

	each(c, d->children.v, d->children.n) {
		if (c->dir)
			TRY(sum_folder(f, c->dir));
		else if (c->entry)
			add_up(f, &s, c->entry);
	}
	if (s.count == 0)
		return OK;
	TRY(vec_push(&f->look.tree->sums, &row));
	*row = s;
	row->run = s.newest->facts.run;
	return OK;
}

static int by_run(const void *a, const void *b)
{
	return str_cmp(((const struct lookup_sum *)a)->run, ((const struct lookup_sum *)b)->run);
}

static void put_text(struct buf *b, const char *key, struct str text)
{
	buf_printf(b, "\"%s\":", key);
	if (text.n)
		buf_json_str(b, text);
	else
		buf_puts(b, "null");
}

static void put_step(struct buf *b, const struct lookup_entry *e)
{
	if (e->facts.step >= 0)
		buf_printf(b, ",\"step\":%jd", (intmax_t)e->facts.step);
	else
		buf_puts(b, ",\"step\":null");
}

static void put_sum(const struct finding *f, const struct lookup_sum *s)
{
	struct buf *b = f->out;

	buf_puts(b, "{");
	put_text(b, "storage", str_of(f->look.store->name));
	buf_puts(b, ",");
	put_text(b, "run", s->run);
	buf_printf(b, ",\"checkpoints\":%ju,\"bytes\":%ju,\"holds\":%ju,", (uintmax_t)s->count, (uintmax_t)s->bytes, (uintmax_t)s->holds);
	put_text(b, "latest", s->newest->facts.name);
	buf_puts(b, ",");
	put_text(b, "modified_at", s->newest->time);
	put_step(b, s->newest);
	buf_puts(b, "}");
}

static FALLIBLE enum err sum_up(struct finding *f)
{
	struct lookup_tree *t = f->look.tree;

	if (t->summed_at == t->changes)
		return OK;
	t->summed_at = 0;
	t->sums.n = 0;
	TRY(vec_reserve(&t->sums, 1));
	TRY(sum_folder(f, t->top));
	qsort(t->sums.v, t->sums.n, sizeof *t->sums.v, by_run);
	t->summed_at = t->changes;
	return OK;
}

static FALLIBLE enum err put_runs(struct finding *f, struct str after)
{
	const struct lookup_tree *t = f->look.tree;
	uint64_t shown = 0, i = 0;

	TRY(sum_up(f));
	buf_puts(f->out, "{\"runs\":[");
	for (; i < t->sums.n && shown < f->size; i++) {
		if (str_cmp(t->sums.v[i].run, after) <= 0)
			continue;
		buf_puts(f->out, shown++ ? "," : "");
		put_sum(f, &t->sums.v[i]);
	}
	buf_puts(f->out, "]");
	if (shown && i < t->sums.n)
		buf_json_member(f->out, ",\"next_page_token\":", t->sums.v[i - 1].run);
	buf_puts(f->out, "}");
	return OK;
}

/* An alias to what is no checkpoint any more dangles. */
static bool is_there(const struct lookup_dir *d, const char *name)
{
	const char *slash = strrchr(name, '/');
	const struct lookup_child *c = lookup_tree_child(d, slash ? slash + 1 : name);

	return c && c->entry && !c->dir;
}

static FALLIBLE enum err put_aliases(struct finding *f, const struct lookup_dir *d, const struct lookup_sum *s)
{
	const char *alias, *comma = "";
	json_t *name;

	TRY(read_aliases(f, str_of(f->run)));
	buf_puts(f->out, ",\"aliases\":{");
	put_text(f->out, "latest", s->newest->facts.name);
	buf_puts(f->out, ",");
	put_text(f->out, "latest-verified", s->verified ? s->verified->facts.name : STR(""));
	json_object_foreach(f->aliases, alias, name) {
		buf_puts(f->out, ",");
		buf_json_str(f->out, str_of(alias));
		buf_puts(f->out, ":");
		buf_json_str(f->out, str_of(json_string_value(name)));
	}
	buf_puts(f->out, "},\"dangling\":[");
	json_object_foreach(f->aliases, alias, name) {
		if (is_there(d, json_string_value(name)))
			continue;
		buf_puts(f->out, comma);
		buf_json_str(f->out, str_of(alias));
		comma = ",";
	}
	buf_puts(f->out, "],");
	put_text(f->out, "aliases_problem", f->aliases_problem ? str_of(f->aliases_problem) : STR(""));
	return OK;
}

/* Puts the members about the whole run in front of the page. A run without a checkpoint is none. */
static FALLIBLE enum err put_run(struct finding *f, const struct lookup_dir *d)
{
	struct lookup_sum s = { .run = str_of(f->run) };
	const char *comma = "";

	each(c, d->children.v, d->children.n)
		if (c->entry && !c->dir)
			add_up(f, &s, c->entry);
	if (s.count == 0)
		return ERR(NOT_FOUND, "there is no checkpoint of a run %s:%s", f->look.store->name, f->run);
	put_text(f->out, "storage", str_of(f->look.store->name));
	buf_puts(f->out, ",");
	put_text(f->out, "run", s.run);
	buf_printf(f->out, ",\"count\":%ju,\"bytes\":%ju", (uintmax_t)s.count, (uintmax_t)s.bytes);
	TRY(put_aliases(f, d, &s));
	buf_puts(f->out, ",\"lost_work\":{");
	put_text(f->out, "since", s.newest->time);
	put_step(f->out, s.newest);
	buf_puts(f->out, "},\"holds\":[");
	each(c, d->children.v, d->children.n) {
		if (!c->entry || c->dir || !c->entry->facts.is_held)
			continue;
		buf_puts(f->out, comma);
		buf_json_str(f->out, c->entry->facts.name);
		comma = ",";
	}
	buf_puts(f->out, "],");
	return OK;
}

/* ---- questions ---- */

static void finding_free(struct finding *f)
{
	json_decref(f->aliases);
	mem_free(f->aliases_of);
	mem_free(f->aliases_problem);
}

static void put_more(const struct finding *f)
{
	buf_printf(f->out, "{\"more\":true,\"found\":%ju}", (uintmax_t)f->look.tree->entries);
}

/* Brings tree and verdicts up to date. *done: the answer is made. */
static FALLIBLE enum err begin(struct finding *f, struct worker *w, const json_t *q, struct store_at *top, bool *done)
{
	struct lookup_tree *t = w->tree;

	if (t->verdicts.raw.count > VERDICTS_MAX)
		lookup_tree_free(t); /* names come and go: all is found anew */
	TRY(lookup_tree_begin(t, w, q, &f->look, top));
	t->questions = t->questions ? t->questions + 1 : questions_first;
	if (t->kept && f->look.trusts_marks)
		lookup_kept_read(t->kept);
	f->order = &t->order;
	TRY(take_verdicts(t, q, done));
	if (*done) {
		buf_printf(f->out, "{\"behind\":%ju}", (uintmax_t)t->verdicts_at);
	} else if (json_is_true(json_object_get(q, "only_verdicts"))) {
		*done = true;
		put_more(f);
	}
	f->size = (uint64_t)num_min(json_integer_value(json_object_get(q, "page_size")), PAGE_MAX);
	return OK;
}

static FALLIBLE enum err runs(struct finding *f, struct worker *w, const json_t *q)
{
	CLEANUP(store_close) struct store_at top = STORE_NOTHING;
	bool done, more = false;

	TRY(begin(f, w, q, &top, &done));
	if (done)
		return OK;
	TRY(lookup_scan(&f->look, top, STR(""), &more));
	if (!more)
		return put_runs(f, jval_str(q, "after"));
	put_more(f);
	return OK;
}

static FALLIBLE enum err read_question(struct finding *f, const json_t *q)
{
	struct str after = jval_str(q, "after");

	f->run = json_string_value(json_object_get(q, "run"));
	f->runs = json_object_get(q, "runs") ? jval_str(q, "runs") : (struct str){ 0 };
	f->prefix = jval_str(q, "prefix");
	f->is_brief = json_is_true(json_object_get(q, "brief"));
	TRY(checkpoint_query_read(jval_str(q, "filter"), jval_str(q, "sort"), &f->query));
	f->query.of_run = json_is_true(json_object_get(q, "whole"));
	f->has_after = after.n > 0;
	if (f->has_after)
		TRY(checkpoint_query_read_token(&f->query, after, &f->after));
	for (uint32_t i = 0; i < f->query.term_count; i++)
		f->needs_verdicts = f->needs_verdicts || f->query.terms[i].key == KEY_VERIFIED;
	return OK;
}

/* Is one of those on the page no checkpoint any more? Its place in the order went with it. */
static bool has_gone(const struct finding *f)
{
	for (uint64_t i = 0; i < f->count && i < f->size; i++)
		if (!f->page[i].child->entry)
			return true;
	return false;
}

/* Chooses the page: again, if what it is to show is not what was known. *out: the folder that the choice is of. *more: ask again. */
static FALLIBLE enum err settle_page(struct finding *f, const json_t *q, struct store_at top, const struct lookup_dir **out, bool *more)
{
	static const struct lookup_dir none;
	struct lookup_dir *d = f->look.tree->top;
	bool stale = true;

	for (int i = 0; stale && i < CHOICES_MAX; i++) {
		TRY(f->run ? lookup_scan_run(&f->look, top, f->run, &d, more) : lookup_scan(&f->look, top, f->prefix, more));
		*out = d ? d : &none;
		if (*more)
			return OK;
		TRY(choose_page(f, q, *out));
		stale = false;
		TRY(f->is_brief ? OK : look_at_page(f, &stale));
	}
	*more = has_gone(f);
	return OK;
}

static FALLIBLE enum err find(struct finding *f, struct worker *w, const json_t *q)
{
	CLEANUP(store_close) struct store_at top = STORE_NOTHING;
	const struct lookup_dir *d = NULL;
	bool done, more = false;

	TRY(read_question(f, q));
	TRY(begin(f, w, q, &top, &done));
	if (done)
		return OK;
	TRY(settle_page(f, q, top, &d, &more));
	if (more) {
		put_more(f);
		return OK;
	}
	buf_puts(f->out, "{");
	if (json_is_true(json_object_get(q, "whole")))
		TRY(put_run(f, d));
	TRY(put_page(f));
	buf_puts(f->out, "}");
	return OK;
}

static void keep_news(const struct lookup_tree *t)
{
	CLEANUP(err_restore) struct err_info info = *err_last();

	if (t->kept)
		lookup_kept_flush(t->kept, t);
}

enum err lookup_find(struct worker *w, const json_t *q, struct buf *out)
{
	struct finding f = { .out = out };

	enum err e = find(&f, w, q);
	finding_free(&f);
	keep_news(w->tree);
	return e;
}

enum err lookup_runs(struct worker *w, const json_t *q, struct buf *out)
{
	struct finding f = { .out = out };

	enum err e = runs(&f, w, q);
	finding_free(&f);
	keep_news(w->tree);
	return e;
}
