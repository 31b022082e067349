/* tree.c: dcpctl tree: a state dict as a tree of modules, with what each of them weighs. Groups are found in the sorted list of FQNs by
 * their common components: no tree is built. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "api/cli/commands.h"
#include "api/cli/show.h"
#include "api/cli/term.h"
#include "base/jval.h"
#include "base/mem.h"

enum { DEPTH_MAX = 64, LINE_BYTES_MAX = 1 << 16 };

struct leaf {
	struct str fqn;
	double bytes;
	const json_t *item;
};

struct tree {
	struct leaf *v;
	size_t n;
	unsigned depth_max;
	json_t *rows;               /* {"path","tensors","bytes",…}, for programs */
};

static int by_fqn(const void *a, const void *b)
{
	return str_cmp_natural(((const struct leaf *)a)->fqn, ((const struct leaf *)b)->fqn);
}

/* Bytes of the FQN up to the end of the component that begins at `at`. */
static size_t component_end(struct str fqn, size_t at)
{
	const char *dot = at < fqn.n ? memchr(fqn.p + at, '.', fqn.n - at) : NULL;

	return dot ? (size_t)(dot - fqn.p) : fqn.n;
}

/* The beginning of the component that is shown of an FQN up to `end`. A leaf that other FQNs go on from ("w" of "w.absmax") has none at
 * `at`, which is beyond its end: its last one is shown once more. */
static size_t component_begin(struct str fqn, size_t at, size_t end)
{
	if (at <= end)
		return at;
	const char *dot = memrchr(fqn.p, '.', end);
	return dot ? (size_t)(dot - fqn.p) + 1 : 0;
}

/* The leaves from `from` that have the same component at `at`. */
static size_t group_end(const struct tree *t, size_t from, size_t to, size_t at, size_t end)
{
	struct str first = t->v[from].fqn;
	size_t i = from + 1;

	while (i < to && component_end(t->v[i].fqn, at) == end && memcmp(t->v[i].fqn.p, first.p, end) == 0)
		i++;
	return i;
}

static FALLIBLE enum err add_row(struct tree *t, struct str path, size_t count, double bytes, const json_t *leaf)
{
	json_t *row = json_pack("{s:s%, s:I, s:I}", "path", path.p, path.n, "tensors", (json_int_t)count, "bytes", (json_int_t)bytes);

	NEED(row, "cannot list a tree");
	if (leaf) {
		(void)json_object_set(row, "dtype", json_object_get(leaf, "dtype"));
		(void)json_object_set(row, "shape", json_object_get(leaf, "shape"));
	}
	return json_array_append_new(t->rows, row) == 0 ? OK : ERR(NO_MEMORY, "cannot list a tree");
}

static void print_node(const char *rails, const char *branch, struct str name, size_t count, double bytes, const json_t *leaf)
{
	static const char *const columns[] = { "D=dtype", "S=shape:dims", NULL };
	CLEANUP(buf_free) struct buf b = BUF_INIT(LINE_BYTES_MAX);
	char text[32];

	if (leaf) {
		show_put_cell(&b, leaf, columns[0], false);
		buf_putc(&b, ' ');
		show_put_cell(&b, leaf, columns[1], false);
	} else {
		buf_printf(&b, "%zu tensor%s", count, count == 1 ? "" : "s");
	}
	if (buf_status(&b) == OK)
		show_say("%s%s%.*s  %s  %.*s\n", rails, branch, (int)name.n, name.p, show_bytes(bytes, text), (int)b.len, (char *)b.p);
}

static FALLIBLE enum err walk(struct tree *t, size_t from, size_t to, size_t at, unsigned depth, const char *rails)
{
	bool boxes = term_utf8();

	for (size_t i = from, next; i < to; i = next) {
		size_t end = component_end(t->v[i].fqn, at), begin = component_begin(t->v[i].fqn, at, end);
		double bytes = 0;
		next = group_end(t, i, to, at, end);
		/* A module with one child alone is no line of its own: "layers.0" */
		while (end < t->v[i].fqn.n && group_end(t, i, next, end + 1, component_end(t->v[i].fqn, end + 1)) == next)
			end = component_end(t->v[i].fqn, end + 1);
		bool leaf = next == i + 1 && end == t->v[i].fqn.n;
		for (size_t k = i; k < next; k++)
			bytes += t->v[k].bytes;
		TRY(add_row(t, (struct str){ t->v[i].fqn.p, end }, next - i, bytes, leaf ? t->v[i].item : NULL));
		bool last = next == to;
		print_node(rails, last ? boxes ? "└─ " : "`- " : boxes ? "├─ " : "|- ", (struct str){ t->v[i].fqn.p + begin, end - begin },
			   next - i, bytes, leaf ? t->v[i].item : NULL);
		if (leaf || depth + 1 >= t->depth_max)
			continue;
		char deeper[DEPTH_MAX * 6 + 8];
		snprintf(deeper, sizeof deeper, "%s%s", rails, last ? "   " : boxes ? "│  " : "|  ");
		TRY(walk(t, i, next, end + 1, depth + 1, deeper));
	}
	return OK;
}

static FALLIBLE enum err fill(struct tree *t, const json_t *all, const char *glob)
{
	const json_t *item;
	size_t i;

	t->v = mem_zalloc(json_array_size(all) + 1, sizeof *t->v);
	t->rows = json_array();
	NEED(t->v && t->rows, "cannot list a tree");
	json_array_foreach(all, i, item) {
		struct str fqn = str_of(show_text(item, "fqn"));
		if (fqn.n && (!glob || str_glob(str_of(glob), fqn)))
			t->v[t->n++] = (struct leaf){ fqn, show_number(item, "bytes"), item };
	}
	qsort(t->v, t->n, sizeof *t->v, by_fqn);
	return OK;
}

static FALLIBLE enum err show_tree(struct client *c, const struct args *a)
{
	static const char *const columns[] = { "PATH=path", "TENSORS=tensors", "SIZE=bytes:bytes", "DTYPE=dtype", "SHAPE=shape:dims",
					       NULL };
	CLEANUP(buf_free) struct buf path = BUF_INIT(16384);
	CLEANUP(jval_drop) json_t *all = json_array();
	struct tree t = { .depth_max = DEPTH_MAX };
	const char *depth = args_value(a, "depth");
	uint64_t n = DEPTH_MAX;
	double bytes = 0;
	char text[32];

	if (depth && (!str_to_u64(str_of(depth), &n) || n == 0 || n > DEPTH_MAX))
		return ERR(INVALID_REQUEST, "--depth is a number from 1 to %d", DEPTH_MAX);
	t.depth_max = (unsigned)n;
	TRY(look_path(&path, a->words[0], "/tensors"));
	TRY(look_all(c, (char *)path.p, "tensors", all));
	enum err e = fill(&t, all, args_value(a, "tensors"));
	for (size_t i = 0; i < t.n; i++)
		bytes += t.v[i].bytes;
	if (!e && show_form() == SHOW_TABLE)
		show_say("%s  %s  %zu tensors\n", a->words[0], show_bytes(bytes, text), t.n);
	e = e ?: walk(&t, 0, t.n, 0, 0, "");
	if (!e && show_form() == SHOW_JSON)
		show_json(t.rows);
	else if (!e && show_form() != SHOW_TABLE)
		show_table(t.rows, columns);
	mem_free(t.v);
	json_decref(t.rows);
	return e;
}

int tree_show(const struct command *, struct client *c, const struct args *a)
{
	enum err e = show_tree(c, a);

	return e ? follow_failed(c, e) : EXIT_DONE;
}
