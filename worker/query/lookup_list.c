/* lookup_list.c: a page of the checkpoints of a storage, in the order of their names' bytes.
 *
 * The names in a directory are kept between questions and read again only when the directory has changed (lookup_tree.h). So a page costs
 * what is on it: directories on the way are looked at, the page's checkpoints are opened, names before it are passed by. A checkpoint's own
 * files are looked at anew each time: its files can change without a trace in any directory.
 *
 * Order: children of `a` follow `a-b`, since '-' is less than '/'. So a directory's own contents come after those siblings whose names
 * begin with its name and a byte less than '/'. Whether a name is a directory or a checkpoint is known once it is opened.
 *
 * A question ends after SLICE_MS with what it has, and says where to go on: a list shares its worker with others. */
#include "query/lookup_tree.h"

#include "base/clock.h"
#include "base/num.h"
#include "store/checkpoint.h"

enum { DEPTH_MAX = 16, PAGE_MAX = 1000, SLICE_MS = 500, VISITS_MIN = 16 };

struct listing {
	struct lookup_look look;
	struct buf *out;
	struct str prefix, after;
	uint64_t left, shown, visits;
	uint32_t depth;
	bool done;                     /* the page is full, or the time is up: there may be more */
	char path[LOOKUP_PATH_MAX], last[LOOKUP_PATH_MAX]; /* in hand; where the next page goes on: names beyond it are left */
};

/* ------------------------------------------------------------------------------------------------------------ the page */

/* Is nothing wanted of this path and what is beneath it? */
static bool is_passed(const struct listing *l)
{
	struct str path = str_of(l->path);

	if (!lookup_starts_with(path, l->prefix) && !lookup_starts_with(l->prefix, path))
		return true;
	if (l->after.n > path.n && lookup_starts_with(l->after, path))
		return (unsigned char)l->after.p[path.n] > '/';
	return str_cmp(path, l->after) < 0; /* what is beneath it compares in the same way */
}

/* The path in hand is dealt with, or about to be entered. */
static void note_visit(struct listing *l)
{
	memcpy(l->last, l->path, strlen(l->path) + 1);
	if (++l->visits >= VISITS_MIN && clock_mono_ms() - l->look.begun_ms >= SLICE_MS)
		l->done = true;
}

static FALLIBLE enum err put_checkpoint(struct listing *l, enum format format)
{
	size_t len = l->out->len;

	if (lookup_starts_with(str_of(l->path), l->prefix) && str_cmp(str_of(l->path), l->after) > 0) {
		if (l->left == 0) {
			l->done = true;
			return OK;
		}
		buf_puts(l->out, l->shown ? ",{" : "{");
		enum err e = lookup_put_summary(l->look.store, l->path, format, l->out);
		buf_puts(l->out, "}");
		TRY(buf_status(l->out));
		if (e)
			l->out->len = len;
		TRY(lookup_pass_over(e));
		l->shown += e == OK;
		l->left -= e == OK;
	}
	note_visit(l);
	return OK;
}

/* Opens the child whose path is in hand, and puts it on the page if it is a checkpoint. *out is open if it is a directory to enter. */
static FALLIBLE enum err open_child(struct listing *l, struct lookup_child *c, const char *name, struct store_at dir, struct store_at *out)
{
	enum format format;

	enum err e;

	if (c->is_file) {
		e = checkpoint_recognise_file(dir, name, &format);
		return e || format == FORMAT_NONE ? lookup_pass_over(e) : put_checkpoint(l, format);
	}
	e = store_enter(dir, name, out);
	e = e ?: lookup_tree_look(&l->look, *out, &c->dir, &format);
	if (e || format != FORMAT_NONE)
		store_close(out);
	else
		note_visit(l);
	if (e)
		return lookup_pass_over(e);
	return format == FORMAT_NONE ? OK : put_checkpoint(l, format);
}

/* The end of those children beyond `i` that come before what directory `i` holds. */
static uint64_t before_contents(const struct lookup_dir *d, uint64_t i, uint64_t to)
{
	struct str name = str_of(lookup_tree_name(d, i));
	uint64_t k = i + 1;

	while (k < to && lookup_starts_with(str_of(lookup_tree_name(d, k)), name) && (unsigned char)lookup_tree_name(d, k)[name.n] < '/')
		k++;
	return k;
}

/* Lists children from … to of the directory whose path is in hand, with what is beneath them. */
static FALLIBLE enum err list_dir(struct listing *l, struct lookup_dir *d, struct store_at dir, uint64_t from, uint64_t to)
{
	size_t at = strlen(l->path);
	enum err e = OK;

	for (uint64_t i = from, next; i < to && !l->done && !e; i = next) {
		struct lookup_child *c = &d->children.v[i];
		CLEANUP(store_close) struct store_at below = STORE_NOTHING;
		next = i + 1;
		if (!lookup_path_enter(l->path, at, lookup_tree_name(d, i)) || is_passed(l))
			continue;
		e = open_child(l, c, lookup_tree_name(d, i), dir, &below);
		if (e || !below.store || below.handle < 0 || l->done)
			continue;
		next = before_contents(d, i, to);
		if (next > i + 1) {
			store_close(&below); /* a long row of such names needs no long row of descriptors */
			l->path[at] = '\0';
			e = list_dir(l, d, dir, i + 1, next);
			if (e || l->done || !lookup_path_enter(l->path, at, lookup_tree_name(d, i)) ||
			    store_enter(dir, lookup_tree_name(d, i), &below) != OK)
				continue;
		}
		if (++l->depth <= DEPTH_MAX)
			e = list_dir(l, c->dir, below, 0, c->dir->children.n);
		l->depth--;
	}
	l->path[at] = '\0';
	return e;
}

enum err lookup_list(struct worker *w, const json_t *q, struct buf *out)
{
	const char *prefix = json_string_value(json_object_get(q, "prefix")), *after = json_string_value(json_object_get(q, "after"));
	struct listing l = { .out = out, .prefix = str_of(prefix ? prefix : ""), .after = str_of(after ? after : ""),
			     .left = (uint64_t)num_min(json_integer_value(json_object_get(q, "page_size")), PAGE_MAX) };
	CLEANUP(store_close) struct store_at top = STORE_NOTHING;

	if (l.after.n >= sizeof l.last)
		return ERR(VALIDATION_FAILED, "a list from a name that is too long");
	memcpy(l.last, l.after.p, l.after.n);
	TRY(lookup_tree_begin(w->tree, w, q, &l.look, &top));
	buf_puts(out, "{\"checkpoints\":[");
	TRY(list_dir(&l, l.look.tree->top, top, 0, l.look.tree->top->children.n));
	buf_puts(out, "]");
	if (l.done)
		buf_json_member(out, ",\"next\":", str_of(l.last));
	buf_puts(out, "}");
	return OK;
}
