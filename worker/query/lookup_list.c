/* lookup_list.c: a page of the checkpoints of a storage, in the order of their names' bytes.
 *
 * The names in a directory are kept between questions and read again only when the directory has changed. So a page costs what is on it:
 * directories on the way are looked at, the page's checkpoints are opened, names before it are passed by. A checkpoint's own files are
 * looked at anew each time: its files can change without a trace in any directory.
 *
 * Order: children of `a` follow `a-b`, since '-' is less than '/'. So a directory's own contents come after those siblings whose names
 * begin with its name and a byte less than '/'. Whether a name is a directory or a checkpoint is known once it is opened.
 *
 * Marks are trusted on local file systems. Elsewhere another host's change may not show in them at once, or never: there names are read
 * again after EXPIRE_MS, and when a job of this daemon has changed the storage.
 *
 * A question ends after SLICE_MS with what it has, and says where to go on: a list shares its worker with others. */
#include "query/lookup_list.h"

#include <dirent.h>
#include <stdlib.h>

#include "base/clock.h"
#include "base/num.h"
#include "store/checkpoint.h"

enum { DEPTH_MAX = 16, PAGE_MAX = 1000, SLICE_MS = 500, VISITS_MIN = 16, EXPIRE_MS = 5000, NAMES_MAX = 4 << 20, NAMES_KEPT = 1 << 20 };

struct child {
	uint64_t name;                 /* offset in the directory's names */
	struct lookup_dir *dir;        /* NULL: not known to be a directory that is no checkpoint */
	bool is_file;
};

/* A directory that is no checkpoint. */
struct lookup_dir {
	struct lookup_mark mark;
	bool settled;                  /* a later change shows in the mark, if the file system is a local one */
	int64_t read_ms;
	uint64_t commits;              /* of the question with which it was read */
	struct buf names;              /* zero-terminated */
	struct vec(struct child) children;     /* sorted: those that may be or hold checkpoints */
};

struct listing {
	struct lookup_tree *tree;
	const struct store *store;
	struct buf *out;
	struct str prefix, after;
	uint64_t left, shown, visits;
	uint64_t commits;              /* jobs of this daemon that have changed the storage, by now */
	int64_t begun_ms;
	bool trusts_marks;
	uint32_t depth;
	bool done;                     /* the page is full, or the time is up: there may be more */
	char path[4096], last[4096];   /* in hand; where the next page goes on: names beyond it are left */
};

static void dir_free(struct lookup_tree *t, struct lookup_dir *d)
{
	if (!d)
		return;
	for (uint64_t i = 0; i < d->children.n; i++)
		dir_free(t, d->children.v[i].dir);
	t->names -= d->children.n;
	vec_free(&d->children);
	buf_free(&d->names);
	mem_free(d);
}

void lookup_tree_free(struct lookup_tree *t)
{
	dir_free(t, t->top);
	*t = (struct lookup_tree){ 0 };
}

/* -------------------------------------------------------------------------------------------------- a directory's names */

static const char *name_of(const struct lookup_dir *d, uint64_t i)
{
	return (const char *)d->names.p + d->children.v[i].name;
}

struct naming {
	struct lookup_dir *d;
	struct store_at dir;
};

/* A file that cannot be looked at is none, as far as it matters here. */
static bool is_checkpoint_file(struct store_at dir, const char *name)
{
	enum format format = FORMAT_NONE;

	if (checkpoint_recognise_file(dir, name, &format))
		err_clear();
	return format != FORMAT_NONE;
}

static enum err add_name(void *user, const char *name, unsigned char d_type)
{
	const struct naming *naming = user;
	struct lookup_dir *d = naming->d;
	struct child *c;

	if (name[0] == '.' || name[0] == '-' || !str_utf8(str_of(name)))
		return OK;
	if (d_type != DT_DIR && (d_type != DT_REG || !is_checkpoint_file(naming->dir, name)))
		return OK;
	if (d->children.n >= NAMES_MAX)
		return ERR(LIMIT_EXCEEDED, "a directory of more than %d names; use a prefix", NAMES_MAX);
	TRY(vec_push(&d->children, &c));
	*c = (struct child){ .name = d->names.len, .is_file = d_type == DT_REG };
	buf_put(&d->names, name, strlen(name) + 1);
	return buf_status(&d->names);
}

static int by_name(const void *a, const void *b, void *user)
{
	const struct child *x = a, *y = b;
	const char *names = user;

	return strcmp(names + x->name, names + y->name);
}

/* Directories that are still there by name keep what is known beneath them; each has a mark of its own. */
static void take_over(struct lookup_dir *fresh, struct lookup_dir *old)
{
	uint64_t i = 0, k = 0;

	while (i < fresh->children.n && k < old->children.n) {
		int c = strcmp(name_of(fresh, i), name_of(old, k));
		if (c == 0)
			fresh->children.v[i].dir = move(old->children.v[k].dir);
		i += c <= 0;
		k += c >= 0;
	}
}

static FALLIBLE enum err read_names(struct listing *l, struct store_at dir, const struct lookup_mark *mark, struct lookup_dir **known)
{
	struct lookup_dir *fresh = mem_zalloc(1, sizeof *fresh);
	struct lookup_tree *t = l->tree;

	NEED(fresh, "no memory for a list");
	*fresh = (struct lookup_dir){ .mark = *mark, .settled = lookup_mark_settled(mark), .read_ms = l->begun_ms, .commits = l->commits,
				      .names = BUF_INIT(1 << 30) };
	enum err e = store_list(dir, add_name, &(struct naming){ fresh, dir });
	t->names += fresh->children.n;
	if (e) {
		dir_free(t, fresh);
		return e;
	}
	if (fresh->children.n)
		qsort_r(fresh->children.v, fresh->children.n, sizeof *fresh->children.v, by_name, fresh->names.p);
	if (*known)
		take_over(fresh, *known);
	dir_free(t, *known);
	*known = fresh;
	return OK;
}

/* Makes *known what the directory holds now, or NULL if it is a checkpoint. The root of a storage is none, whatever lies there. */
static FALLIBLE enum err look_again(struct listing *l, struct store_at dir, struct lookup_dir **known, enum format *format)
{
	struct stat st;

	*format = FORMAT_NONE;
	TRY(store_stat(dir, "", &st));
	struct lookup_mark mark = lookup_mark_of(&st);
	if (*known && (*known)->settled && lookup_mark_same(&(*known)->mark, &mark) &&
	    (l->trusts_marks || ((*known)->commits == l->commits && l->begun_ms - (*known)->read_ms < EXPIRE_MS)))
		return OK;
	if (known != &l->tree->top)
		TRY(checkpoint_format_of_dir(dir, format));
	if (*format == FORMAT_NONE)
		return read_names(l, dir, &mark, known);
	dir_free(l->tree, *known);
	*known = NULL;
	return OK;
}

/* ------------------------------------------------------------------------------------------------------------ the page */

/* Gone meanwhile, or not for us to see. */
static enum err pass_over(enum err e)
{
	return e == ERR_NOT_FOUND || e == ERR_FORBIDDEN || e == ERR_NAME_INVALID ? OK : e;
}

static bool starts_with(struct str s, struct str start)
{
	return s.n >= start.n && (start.n == 0 || memcmp(s.p, start.p, start.n) == 0);
}

/* Is nothing wanted of this path and what is beneath it? */
static bool is_passed(const struct listing *l)
{
	struct str path = str_of(l->path);

	if (!starts_with(path, l->prefix) && !starts_with(l->prefix, path))
		return true;
	if (l->after.n > path.n && starts_with(l->after, path))
		return (unsigned char)l->after.p[path.n] > '/';
	return str_cmp(path, l->after) < 0; /* what is beneath it compares in the same way */
}

/* The path in hand is dealt with, or about to be entered. */
static void note_visit(struct listing *l)
{
	memcpy(l->last, l->path, strlen(l->path) + 1);
	if (++l->visits >= VISITS_MIN && clock_mono_ms() - l->begun_ms >= SLICE_MS)
		l->done = true;
}

static FALLIBLE enum err put_checkpoint(struct listing *l, enum format format)
{
	size_t len = l->out->len;

	if (starts_with(str_of(l->path), l->prefix) && str_cmp(str_of(l->path), l->after) > 0) {
		if (l->left == 0) {
			l->done = true;
			return OK;
		}
		buf_puts(l->out, l->shown ? ",{" : "{");
		enum err e = lookup_put_summary(l->store, l->path, format, l->out);
		buf_puts(l->out, "}");
		TRY(buf_status(l->out));
		if (e)
			l->out->len = len;
		TRY(pass_over(e));
		l->shown += e == OK;
		l->left -= e == OK;
	}
	note_visit(l);
	return OK;
}

/* Opens the child whose path is in hand, and puts it on the page if it is a checkpoint. *out is open if it is a directory to enter. */
static FALLIBLE enum err open_child(struct listing *l, struct child *c, const char *name, struct store_at dir, struct store_at *out)
{
	enum format format;

	enum err e;

	if (c->is_file) {
		e = checkpoint_recognise_file(dir, name, &format);
		return e || format == FORMAT_NONE ? pass_over(e) : put_checkpoint(l, format);
	}
	e = store_enter(dir, name, out);
	e = e ?: look_again(l, *out, &c->dir, &format);
	if (e || format != FORMAT_NONE)
		store_close(out);
	else
		note_visit(l);
	if (e)
		return pass_over(e);
	return format == FORMAT_NONE ? OK : put_checkpoint(l, format);
}

/* The end of those children beyond `i` that come before what directory `i` holds. */
static uint64_t before_contents(const struct lookup_dir *d, uint64_t i, uint64_t to)
{
	struct str name = str_of(name_of(d, i));
	uint64_t k = i + 1;

	while (k < to && starts_with(str_of(name_of(d, k)), name) && (unsigned char)name_of(d, k)[name.n] < '/')
		k++;
	return k;
}

/* The path becomes that of a child of the directory whose path has `at` bytes. false: it would be too long. */
static bool enter(struct listing *l, size_t at, const char *name)
{
	size_t n = strlen(name);

	if (at + n + 2 > sizeof l->path)
		return false;
	memcpy(l->path + at, "/", at > 0);
	memcpy(l->path + at + (at > 0), name, n + 1);
	return true;
}

/* Lists children from … to of the directory whose path is in hand, with what is beneath them. */
static FALLIBLE enum err list_dir(struct listing *l, struct lookup_dir *d, struct store_at dir, uint64_t from, uint64_t to)
{
	size_t at = strlen(l->path);
	enum err e = OK;

	for (uint64_t i = from, next; i < to && !l->done && !e; i = next) {
		struct child *c = &d->children.v[i];
		CLEANUP(store_close) struct store_at below = STORE_NOTHING;
		next = i + 1;
		if (!enter(l, at, name_of(d, i)) || is_passed(l))
			continue;
		e = open_child(l, c, name_of(d, i), dir, &below);
		if (e || !below.store || below.handle < 0 || l->done)
			continue;
		next = before_contents(d, i, to);
		if (next > i + 1) {
			store_close(&below); /* a long row of such names needs no long row of descriptors */
			l->path[at] = '\0';
			e = list_dir(l, d, dir, i + 1, next);
			if (e || l->done || !enter(l, at, name_of(d, i)) || store_enter(dir, name_of(d, i), &below) != OK)
				continue;
		}
		if (++l->depth <= DEPTH_MAX)
			e = list_dir(l, c->dir, below, 0, c->dir->children.n);
		l->depth--;
	}
	l->path[at] = '\0';
	return e;
}

static FALLIBLE enum err list_root(struct listing *l)
{
	CLEANUP(store_close) struct store_at top = STORE_NOTHING;
	enum format format;

	TRY(store_enter(store_top(l->store), ".", &top));
	l->trusts_marks = l->store->ops->watch(top);
	TRY(look_again(l, top, &l->tree->top, &format));
	return list_dir(l, l->tree->top, top, 0, l->tree->top->children.n);
}

enum err lookup_list(struct worker *w, const json_t *q, struct buf *out)
{
	const char *storage = json_string_value(json_object_get(q, "storage"));
	const char *prefix = json_string_value(json_object_get(q, "prefix")), *after = json_string_value(json_object_get(q, "after"));
	struct listing l = { .tree = w->tree, .out = out, .prefix = str_of(prefix ? prefix : ""),
			     .after = str_of(after ? after : ""), .begun_ms = clock_mono_ms(),
			     .commits = (uint64_t)json_integer_value(json_object_get(q, "commits")),
			     .left = (uint64_t)num_min(json_integer_value(json_object_get(q, "page_size")), PAGE_MAX) };

	if (!storage || l.after.n >= sizeof l.last)
		return ERR(VALIDATION_FAILED, "a list without a storage, or from a name that is too long");
	TRY(stores_find(&w->stores, storage, &l.store));
	if (l.tree->store != l.store || l.tree->names > NAMES_KEPT)
		lookup_tree_free(l.tree);
	l.tree->store = l.store;
	memcpy(l.last, l.after.p, l.after.n);
	buf_puts(out, "{\"checkpoints\":[");
	TRY(list_root(&l));
	buf_puts(out, "]");
	if (l.done) {
		buf_json_member(out, ",\"next\":", str_of(l.last));
	}
	buf_puts(out, "}");
	return OK;
}
