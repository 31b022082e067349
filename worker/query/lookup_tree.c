/* lookup_tree.c: see lookup_tree.h. */
#include "query/lookup_tree.h"

#include <dirent.h>
#include <stdlib.h>

#include "base/clock.h"
#include "query/lookup_kept.h"
#include "store/checkpoint.h"

enum { NAMES_MAX = 4 << 20 };

const char *lookup_tree_name(const struct lookup_dir *d, uint64_t i)
{
	return (const char *)d->names.p + d->children.v[i].name;
}

void lookup_tree_forget(struct lookup_tree *t, struct lookup_child *c)
{
	if (c->entry && t->kept)
		lookup_kept_waste(t->kept, c->entry);
	t->entries -= c->entry != NULL;
	t->changes += c->entry != NULL;
	t->refreshed += c->entry != NULL;
	mem_free(c->entry);
	c->entry = NULL;
}

static void dir_free(struct lookup_tree *t, struct lookup_dir *d)
{
	if (!d)
		return;
	for (uint64_t i = 0; i < d->children.n; i++) {
		dir_free(t, d->children.v[i].dir);
		lookup_tree_forget(t, &d->children.v[i]);
	}
	t->names -= d->children.n;
	vec_free(&d->children);
	buf_free(&d->names);
	mem_free(d);
}

void lookup_tree_free(struct lookup_tree *t)
{
	struct lookup_verdict *v;

	dir_free(t, t->top);
	map_each(&t->verdicts, v)
		mem_free(v);
	map_free(&t->verdicts);
	buf_free(&t->order.words);
	vec_free(&t->order.list);
	vec_free(&t->sums);
	if (t->kept)
		lookup_kept_forget(t->kept);
	*t = (struct lookup_tree){ .kept = t->kept };
}

struct lookup_child *lookup_tree_child(const struct lookup_dir *d, const char *name)
{
	uint64_t low = 0, high = d->children.n;

	while (low < high) {
		uint64_t mid = low + (high - low) / 2;
		int c = strcmp(lookup_tree_name(d, mid), name);
		if (c == 0)
			return &d->children.v[mid];
		if (c < 0)
			low = mid + 1;
		else
			high = mid;
	}
	return NULL;
}

/* ---- a directory's names ---- */

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
	struct lookup_child *c;

	if (name[0] == '.' || name[0] == '-' || !str_utf8(str_of(name)))
		return OK;
	if (d_type != DT_DIR && (d_type != DT_REG || !is_checkpoint_file(naming->dir, name)))
		return OK;
	if (d->children.n >= NAMES_MAX)
		return ERR(LIMIT_EXCEEDED, "a directory of more than %d names; use a prefix", NAMES_MAX);
	TRY(vec_push(&d->children, &c));
	*c = (struct lookup_child){ .name = d->names.len, .is_file = d_type == DT_REG };
	buf_put(&d->names, name, strlen(name) + 1);
	return buf_status(&d->names);
}

static int by_name(const void *a, const void *b, void *user)
{
	const struct lookup_child *x = a, *y = b;
	const char *names = user;

	return strcmp(names + x->name, names + y->name);
}

/* Directories and checkpoints that are still there by name keep what is known of them; each has a mark of its own. A hold of a
 * checkpoint that is one file lies beside it: nothing but a new look tells whether it has changed. */
static void take_over(struct lookup_dir *fresh, struct lookup_dir *old)
{
	uint64_t i = 0, k = 0;

	while (i < fresh->children.n && k < old->children.n) {
		struct lookup_child *to = &fresh->children.v[i], *from = &old->children.v[k];
		int c = strcmp(lookup_tree_name(fresh, i), lookup_tree_name(old, k));
		if (c == 0) {
			to->dir = move(from->dir);
			to->entry = move(from->entry);
			if (to->entry && to->is_file)
				to->entry->settled = false;
		}
		i += c <= 0;
		k += c >= 0;
	}
}

/* Has the directory the same names? A file's hold lies beside it, as above. */
static bool is_as_before(const struct lookup_dir *fresh, struct lookup_dir *old)
{
	if (fresh->children.n != old->children.n)
		return false;
	for (uint64_t i = 0; i < fresh->children.n; i++)
		if (fresh->children.v[i].is_file || old->children.v[i].is_file ||
		    strcmp(lookup_tree_name(fresh, i), lookup_tree_name(old, i)) != 0)
			return false;
	return true;
}

static FALLIBLE enum err read_names(const struct lookup_look *l, struct store_at dir, const struct lookup_mark *mark,
				    struct lookup_dir **known)
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
	if (*known && is_as_before(fresh, *known)) {
		each(c, (*known)->children.v, (*known)->children.n)
			c->failed_ms = 0;
		(*known)->mark = fresh->mark;
		(*known)->settled = fresh->settled;
		(*known)->read_ms = fresh->read_ms;
		(*known)->commits = fresh->commits;
		dir_free(t, fresh);
		return OK;
	}
	if (*known)
		take_over(fresh, *known);
	t->refreshed += *known == NULL; /* the folder may have been a checkpoint */
	dir_free(t, *known);
	*known = fresh;
	t->changes++;
	return OK;
}

FALLIBLE enum err lookup_tree_look(const struct lookup_look *l, struct store_at dir, struct lookup_dir **known, enum format *format)
{
	struct stat st;

	*format = FORMAT_NONE;
	TRY(store_stat(dir, "", &st));
	struct lookup_mark mark = lookup_mark_of(&st);
	if (*known && (*known)->settled && lookup_mark_same(&(*known)->mark, &mark) &&
	    (l->trusts_marks || ((*known)->commits == l->commits && l->begun_ms - (*known)->read_ms < LOOKUP_EXPIRE_MS)))
		return OK;
	if (known != &l->tree->top)
		TRY(checkpoint_format_of_dir(dir, format));
	if (*format == FORMAT_NONE)
		return read_names(l, dir, &mark, known);
	dir_free(l->tree, *known);
	*known = NULL;
	return OK;
}

FALLIBLE enum err lookup_tree_begin(struct lookup_tree *t, const struct worker *w, const json_t *q, struct lookup_look *out,
				    struct store_at *top)
{
	const char *storage = json_string_value(json_object_get(q, "storage"));
	enum format format;

	*out = (struct lookup_look){ .tree = t, .begun_ms = clock_mono_ms(),
				     .commits = (uint64_t)json_integer_value(json_object_get(q, "commits")) };
	if (!storage)
		return ERR(VALIDATION_FAILED, "a list without a storage");
	TRY(stores_find(&w->stores, storage, &out->store));
	if (t->store != out->store || t->names > LOOKUP_NAMES_MAX)
		lookup_tree_free(t);
	t->store = out->store;
	t->changes += t->changes == 0;
	t->refreshed += t->refreshed == 0;
	TRY(store_enter(store_top(out->store), ".", top));
	out->trusts_marks = out->store->ops->watch(*top);
	return lookup_tree_look(out, *top, &t->top, &format);
}

/* ---- paths ---- */

enum err lookup_pass_over(enum err e)
{
	return e == ERR_NOT_FOUND || e == ERR_FORBIDDEN || e == ERR_NAME_INVALID ? OK : e;
}

bool lookup_starts_with(struct str s, struct str start)
{
	return s.n >= start.n && (start.n == 0 || memcmp(s.p, start.p, start.n) == 0);
}

bool lookup_path_enter(char path[LOOKUP_PATH_MAX], size_t at, const char *name)
{
	size_t n = strlen(name);

	if (at + n + 2 > LOOKUP_PATH_MAX)
		return false;
	memcpy(path + at, "/", at > 0);
	memcpy(path + at + (at > 0), name, n + 1);
	return true;
}
