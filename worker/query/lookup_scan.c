/* lookup_scan.c: brings what is known of a storage's checkpoints up to date before a search.
 *
 * Each directory on the way is looked at, which shows what came and went. A checkpoint that is not known yet is opened; so many
 * are that after SLICE_MS the question ends, and is asked again. One that is known can only have been changed in place. A stat() shows most
 * such changes, a look at all its files the rest: of few checkpoints all are looked at with each question, of many a share, those that were
 * looked at longest ago, for no longer than LOOKS_NS. (What a page shows is looked at in any case: lookup_find.c.) Where that is too short,
 * as the storage takes its time, the next question goes on where this one was late: each has its turn. */
#include "base/clock.h"
#include "base/num.h"
#include "query/lookup_kept.h"
#include "query/lookup_scan.h"
#include "store/checkpoint.h"

enum { DEPTH_MAX = 16, SLICE_MS = 300, MADE_MIN = 16, MARKS_AT_ONCE = 2000, FILES_AT_ONCE = 32, LOOKS_NS = 4000000 };

struct scan {
	const struct lookup_look *look;
	struct str prefix;
	bool one_folder;               /* what is in folders below does not matter */
	uint64_t scope;                /* checkpoints that may be in it */
	uint64_t made;
	int64_t looks_end_ns;          /* 0: there was no look yet */
	uint32_t depth;
	bool more;                     /* the time is up: there are checkpoints that are not known yet */
	bool late;                     /* LOOKS_NS are over: checkpoints that are known are not looked at any more */
	bool resting;                  /* the question before has looked at what is here */
	char path[LOOKUP_PATH_MAX];
};

/* Has its turn come, if `at_once` of the scope are looked at with a question? */
static bool is_due(const struct scan *s, uint64_t last, uint64_t at_once)
{
	return s->scope <= at_once || (s->look->tree->questions - last) * at_once >= s->scope;
}

/* Is the time for looks at what is known over? */
static bool is_late(struct scan *s)
{
	int64_t now = s->late || s->scope <= FILES_AT_ONCE ? 0 : clock_mono_ns();

	s->looks_end_ns = s->looks_end_ns ? s->looks_end_ns : now + LOOKS_NS; /* from the first look on: one is made in any case */
	s->late = s->late || now > s->looks_end_ns;
	return s->late;
}

/* A checkpoint that is known and is not looked at now: it is not its turn, or it is too late. */
static bool is_at_rest(struct scan *s, const struct lookup_child *c)
{
	const struct lookup_entry *e = c->entry;

	if (!e || c->dir)
		return false;
	return s->late || (s->resting && e->settled) || e->asked == s->look->tree->questions ||
	       (e->settled && !is_due(s, e->looked, FILES_AT_ONCE) && !is_due(s, e->asked, MARKS_AT_ONCE));
}

static FALLIBLE enum err look_at_entry(struct scan *s, struct lookup_child *c)
{
	return is_late(s) ? OK : lookup_entry_refresh(s->look, c, is_due(s, c->entry->looked, FILES_AT_ONCE));
}

static bool is_time_up(struct scan *s)
{
	s->more = s->more || (s->made >= MADE_MIN && clock_mono_ms() - s->look->begun_ms >= SLICE_MS);
	s->made += !s->more;
	return s->more;
}

/* Takes what is kept of the folder whose path is in hand, if its mark is the same. */
static bool take_kept(struct scan *s, struct lookup_child *c, const char *name, struct store_at dir)
{
	struct lookup_kept *kept = s->look->tree->kept;
	struct lookup_entry *e = NULL;
	struct stat st;

	if (!kept || !s->look->trusts_marks || c->is_file || c->dir || !lookup_kept_has(kept, s->path))
		return false;
	if (is_time_up(s))
		return true;
	if (store_stat(dir, name, &st) == OK) {
		struct lookup_mark mark = lookup_mark_of(&st);
		e = lookup_kept_take(kept, s->path, &mark);
	}
	err_clear();
	if (e)
		lookup_entry_take(s->look, c, e);
	return e != NULL;
}

/* The path in hand is of a checkpoint that is not known yet. */
static FALLIBLE enum err add_entry(struct scan *s, struct lookup_child *c, enum format format)
{
	struct lookup_entry *e = NULL;
	struct stat st;

	if (is_time_up(s))
		return OK;
	TRY(store_stat(store_top(s->look->store), s->path, &st));
	struct lookup_mark mark = lookup_mark_of(&st);
	TRY(lookup_entry_make(s->look->store, s->path, format, NULL, &e));
	lookup_entry_put(s->look, c, e, &mark);
	return OK;
}

static FALLIBLE enum err scan_folder(struct scan *s, struct lookup_dir *d, struct store_at dir);

static FALLIBLE enum err scan_child(struct scan *s, struct lookup_child *c, const char *name, struct store_at dir)
{
	CLEANUP(store_close) struct store_at below = STORE_NOTHING;
	enum format format = FORMAT_NONE;
	enum err e;

	if (c->entry && !c->dir)
		TRY(look_at_entry(s, c));
	if (c->entry && !c->dir)
		return OK; /* else it is a folder now, or gone */
	if (c->failed_ms && s->look->begun_ms - c->failed_ms < LOOKUP_EXPIRE_MS)
		return OK;
	if (take_kept(s, c, name, dir))
		return OK;
	if (c->is_file) {
		e = checkpoint_recognise_file(dir, name, &format);
	} else {
		e = store_enter(dir, name, &below);
		e = e ?: lookup_tree_look(s->look, below, &c->dir, &format);
	}
	if (c->dir)
		lookup_tree_forget(s->look->tree, c);
	if (!e && format != FORMAT_NONE)
		e = add_entry(s, c, format);
	else if (!e && c->dir && !s->one_folder && s->depth < DEPTH_MAX) {
		s->depth++;
		e = scan_folder(s, c->dir, below);
		s->depth--;
		return e;
	}
	c->failed_ms = e ? s->look->begun_ms : 0;
	return lookup_pass_over(e);
}

static bool is_passed(const struct scan *s)
{
	struct str path = str_of(s->path);

	return !lookup_starts_with(path, s->prefix) && !lookup_starts_with(s->prefix, path);
}

/* Are all in the folder known, with none whose turn it is? Then it is passed by, so that many cost what few do. */
static bool is_quiet(struct scan *s, const struct lookup_dir *d)
{
	if (d->quiet_at != s->look->tree->refreshed || s->scope <= FILES_AT_ONCE)
		return false;
	return s->resting || (!is_due(s, d->asked, MARKS_AT_ONCE) && !is_due(s, d->looked, FILES_AT_ONCE)) || is_late(s);
}

/* All of the folder have been passed. */
static void note_quiet(const struct scan *s, struct lookup_dir *d)
{
	d->quiet_at = s->look->tree->refreshed;
	d->asked = d->looked = s->look->tree->questions;
	each(c, d->children.v, d->children.n) {
		if (!c->entry || c->dir || !c->entry->settled) {
			d->quiet_at = 0;
			return;
		}
		d->asked = num_min(d->asked, c->entry->asked);
		d->looked = num_min(d->looked, c->entry->looked);
	}
}

/* The folder whose path is in hand. */
static FALLIBLE enum err scan_folder(struct scan *s, struct lookup_dir *d, struct store_at dir)
{
	size_t at = strlen(s->path);
	bool all = lookup_starts_with(str_of(s->path), s->prefix), resting = s->resting, was_late = s->late;
	enum err e = OK;

	if (all && is_quiet(s, d))
		return OK;

	if (s->look->tree->names > LOOKUP_NAMES_MAX)
		return ERR(LIMIT_EXCEEDED, "more than %d names are too many to filter or to sort: ask for a run, or by names",
			   LOOKUP_NAMES_MAX);
	uint64_t from = d->looks_from;
	for (uint64_t i = 0; i < d->children.n && !s->more && !e; i++) {
		s->resting = resting || i < from;
		if (!is_at_rest(s, &d->children.v[i]) && lookup_path_enter(s->path, at, lookup_tree_name(d, i)) && !is_passed(s))
			e = scan_child(s, &d->children.v[i], lookup_tree_name(d, i), dir);
		if (s->late && !was_late)
			d->looks_from = i;
		was_late = s->late;
	}
	if (!s->late && !resting)
		d->looks_from = 0;
	s->resting = resting;
	s->path[at] = '\0';
	if (all && !s->more && !e)
		note_quiet(s, d);
	return e;
}

FALLIBLE enum err lookup_scan(const struct lookup_look *look, struct store_at top, struct str prefix, bool *more_out)
{
	struct scan s = { .look = look, .prefix = prefix, .scope = look->tree->entries };

	enum err e = scan_folder(&s, look->tree->top, top);
	*more_out = s.more;
	if (look->tree->kept && prefix.n == 0 && !s.more && !e)
		lookup_kept_drop(look->tree->kept);
	return e;
}

FALLIBLE enum err lookup_scan_run(const struct lookup_look *look, struct store_at top, const char *run, struct lookup_dir **out,
				  bool *more_out)
{
	struct scan s = { .look = look, .one_folder = true };
	CLEANUP(store_close) struct store_at dir = STORE_NOTHING;
	struct lookup_dir *d = look->tree->top;
	enum format format;

	*out = NULL;
	*more_out = false;
	for (const char *p = run; d && strcmp(run, "-") != 0 && *p; p += *p == '/') {
		struct store_at below = STORE_NOTHING;
		char name[LOOKUP_PATH_MAX];
		size_t n = strcspn(p, "/");
		if (n >= sizeof name)
			return OK;
		memcpy(name, p, n);
		name[n] = '\0';
		p += n;
		struct lookup_child *c = lookup_tree_child(d, name);
		enum err e = c ? store_enter(dir.store ? dir : top, name, &below) : ERR_NOT_FOUND;
		store_close(&dir);
		dir = below;
		e = e ?: lookup_tree_look(look, dir, &c->dir, &format);
		if (e)
			return lookup_pass_over(e);
		d = c->dir; /* NULL: a checkpoint */
		if (d)
			lookup_tree_forget(look->tree, c);
	}
	if (!d)
		return OK;
	if (!lookup_path_enter(s.path, 0, strcmp(run, "-") == 0 ? "" : run))
		return OK;
	s.scope = d->children.n;
	*out = d;
	enum err e = scan_folder(&s, d, dir.store ? dir : top);
	*more_out = s.more;
	return e;
}
