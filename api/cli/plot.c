/* plot.c: dcpctl plot: how a tensor is cut over ranks and files, in characters: a box for each chunk, to scale, with its ranks inside;
 * below it where each chunk lies. Two dims are drawn: those that are cut most. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "api/cli/commands.h"
#include "api/cli/show.h"
#include "api/cli/term.h"
#include "base/jval.h"
#include "base/mem.h"
#include "base/num.h"

enum { DIMS_MAX = 64, COLUMNS_MAX = 96, LINES_MAX = 24, LISTED_MAX = 64, CHUNKS_MAX = 4096, LABEL_MAX = 48 };
enum { UP = 1, DOWN = 2, LEFT = 4, RIGHT = 8 };

struct canvas {
	unsigned w, h;                              /* the last column and line */
	unsigned char lines[LINES_MAX + 1][COLUMNS_MAX + 1];
	char text[LINES_MAX + 1][COLUMNS_MAX + 1];  /* 0: nothing */
};

/* The box of a chunk within the two dims drawn, and the ranks that hold it. */
struct box {
	uint64_t at[2], size[2];
	char label[LABEL_MAX];
};

static uint64_t number_at(const json_t *list, size_t i)
{
	json_int_t n = json_integer_value(json_array_get(list, i));

	return n > 0 ? (uint64_t)n : 0;
}

/* How many chunks begin beyond the tensor's edge in this dim: 0 if it is not cut. */
static size_t cuts_of(const json_t *chunks, size_t dim)
{
	const json_t *c;
	size_t n = 0, i;

	json_array_foreach(chunks, i, c)
		n += number_at(json_object_get(c, "offsets"), dim) > 0;
	return n;
}

/* Sets dims[0] (downwards) and dims[1] (to the right). DIMS_MAX: there is none; it counts as one of size 1. */
static void choose_dims(const json_t *tensor, size_t dims[2])
{
	const json_t *chunks = json_object_get(tensor, "chunks");
	size_t n = json_array_size(json_object_get(tensor, "shape")), most = n, second = n;

	for (size_t d = 0; d < n; d++)
		if (most == n || cuts_of(chunks, d) > cuts_of(chunks, most))
			most = d;
	for (size_t d = 0; d < n; d++)
		if (d != most && (second == n || cuts_of(chunks, d) > cuts_of(chunks, second)))
			second = d;
	dims[0] = n == 0 ? DIMS_MAX : n == 1 ? DIMS_MAX : most < second ? most : second;
	dims[1] = n == 0 ? DIMS_MAX : n == 1 ? 0 : most < second ? second : most;
}

/* Scales an index to an axis of so many cells; beyond its end it is cells + 1, whatever a daemon says of a chunk. */
static unsigned place(uint64_t index, uint64_t size, unsigned cells)
{
	return index > size ? cells + 1 : size ? (unsigned)((double)index / (double)size * cells + 0.5) : 0;
}

static void draw_box(struct canvas *c, const struct box *b, const uint64_t sizes[2])
{
	unsigned y0 = place(b->at[0], sizes[0], c->h), y1 = place(b->at[0] + b->size[0], sizes[0], c->h);
	unsigned x0 = place(b->at[1], sizes[1], c->w), x1 = place(b->at[1] + b->size[1], sizes[1], c->w);

	/* The box has nothing, is too thin to be seen, or lies elsewhere. */
	if (y0 >= y1 || x0 >= x1 || y1 > c->h || x1 > c->w)
		return;
	for (unsigned x = x0; x <= x1; x++) {
		c->lines[y0][x] |= (unsigned char)((x > x0 ? LEFT : 0) | (x < x1 ? RIGHT : 0));
		c->lines[y1][x] |= (unsigned char)((x > x0 ? LEFT : 0) | (x < x1 ? RIGHT : 0));
	}
	for (unsigned y = y0; y <= y1; y++) {
		c->lines[y][x0] |= (unsigned char)((y > y0 ? UP : 0) | (y < y1 ? DOWN : 0));
		c->lines[y][x1] |= (unsigned char)((y > y0 ? UP : 0) | (y < y1 ? DOWN : 0));
	}
	size_t n = strlen(b->label), room = x1 - x0 - 1;
	if (y1 - y0 < 2 || n == 0 || n > room)
		return;
	memcpy(&c->text[(y0 + y1) / 2][x0 + 1 + (room - n) / 2], b->label, n);
}

static void print_canvas(const struct canvas *c)
{
	static const char *const boxes[16] = { " ", "│", "│", "│", "─", "┘", "┐", "┤", "─", "└", "┌", "├", "─", "┴", "┬", "┼" };
	static const char *const plain[16] = { " ", "|", "|", "|", "-", "+", "+", "+", "-", "+", "+", "+", "-", "+", "+", "+" };

	for (unsigned y = 0; y <= c->h; y++) {
		CLEANUP(buf_free) struct buf line = BUF_INIT(COLUMNS_MAX * 8);
		for (unsigned x = 0; x <= c->w; x++)
			if (c->text[y][x])
				buf_putc(&line, (unsigned char)c->text[y][x]);
			else
				buf_puts(&line, (term_utf8() ? boxes : plain)[c->lines[y][x] & 15]);
		if (buf_status(&line) == OK)
			show_say("  %.*s\n", (int)line.len, (char *)line.p);
	}
}

/* Replicas have the same box: their ranks stand in one. */
static void add_rank(struct box *b, const json_t *chunk)
{
	size_t n = strlen(b->label);
	const json_t *rank = json_object_get(chunk, "rank");

	if (json_is_integer(rank))
		snprintf(b->label + n, sizeof b->label - n, "%s%jd", n ? "," : "", (intmax_t)json_integer_value(rank));
}

static uint64_t within(const json_t *list, size_t dim, uint64_t without)
{
	return dim == DIMS_MAX ? without : number_at(list, dim);
}

/* Does the chunk hold index 0 of all dims that are not drawn? */
static bool is_in_front(const json_t *chunk, const size_t dims[2])
{
	const json_t *offsets = json_object_get(chunk, "offsets");

	for (size_t d = 0; d < json_array_size(offsets); d++)
		if (d != dims[0] && d != dims[1] && number_at(offsets, d) > 0)
			return false;
	return true;
}

static FALLIBLE enum err draw(const json_t *tensor, const size_t dims[2], unsigned columns)
{
	const json_t *shape = json_object_get(tensor, "shape"), *chunks = json_object_get(tensor, "chunks"), *chunk;
	uint64_t sizes[2] = { within(shape, dims[0], 1), within(shape, dims[1], 1) };
	CLEANUP(mem_free_ptr) struct box *boxes = mem_zalloc(CHUNKS_MAX, sizeof *boxes);
	CLEANUP(mem_free_ptr) struct canvas *c = mem_zalloc(1, sizeof *c);
	size_t n = 0, i;

	NEED(boxes && c, "cannot draw");
	c->w = (unsigned)num_min(num_max(sizes[1], 1) * 6, columns);
	c->h = (unsigned)num_min(num_max(sizes[0], 1) * 2, dims[0] == DIMS_MAX ? 2 : LINES_MAX);
	json_array_foreach(chunks, i, chunk) {
		const json_t *offsets = json_object_get(chunk, "offsets"), *size = json_object_get(chunk, "sizes");
		struct box b = { .at = { within(offsets, dims[0], 0), within(offsets, dims[1], 0) },
				 .size = { within(size, dims[0], 1), within(size, dims[1], 1) } };
		size_t k = 0;
		if (!is_in_front(chunk, dims))
			continue;
		while (k < n && (memcmp(boxes[k].at, b.at, sizeof b.at) != 0 || memcmp(boxes[k].size, b.size, sizeof b.size) != 0))
			k++;
		if (k == CHUNKS_MAX)
			break;
		if (k == n)
			boxes[n++] = b;
		add_rank(&boxes[k], chunk);
	}
	for (i = 0; i < n; i++)
		draw_box(c, &boxes[i], sizes);
	print_canvas(c);
	return OK;
}

static void print_plot(const json_t *tensor)
{
	static const char *const columns[] = { "RANK=rank", "OFFSETS=offsets:dims", "SIZES=sizes:dims", "FILE=file", "AT=offset",
					       "BYTES=length:bytes", NULL };
	const json_t *chunks = json_object_get(tensor, "chunks"), *shape = json_object_get(tensor, "shape");
	size_t dims[2], listed = json_array_size(chunks), shown = listed < LISTED_MAX ? listed : LISTED_MAX;
	double all = show_number(tensor, "chunk_count");
	unsigned width = term_columns(stdout) - 4;
	char text[32];

	choose_dims(tensor, dims);
	show_say("%s  %s  ", show_text(tensor, "fqn"), show_text(tensor, "dtype"));
	for (size_t d = 0; d < json_array_size(shape); d++)
		show_say("%s%ju", d ? " x " : "", (uintmax_t)number_at(shape, d));
	show_say("  %s, %.0f chunk%s; in a box: the ranks that hold it\n", show_bytes(show_number(tensor, "bytes"), text), all,
		 all == 1 ? "" : "s");
	if (dims[1] != DIMS_MAX && dims[0] != DIMS_MAX)
		show_say("  down: dim %zu, to the right: dim %zu%s\n", dims[0], dims[1],
			 json_array_size(shape) > 2 ? "; of the other dims index 0 is shown" : "");
	if (draw(tensor, dims, width < COLUMNS_MAX ? width : COLUMNS_MAX))
		show_error();
	show_grid(stdout, chunks, shown, columns);
	if (all > (double)shown)
		show_say("and %.0f more (--output csv lists %zu)\n", all - (double)shown, listed);
}

static FALLIBLE enum err find_tensor(struct client *c, const char *ref, const char *fqn, json_t **out)
{
	CLEANUP(buf_free) struct buf path = BUF_INIT(32768);
	CLEANUP(jval_drop) json_t *all = json_array();
	json_t *item;
	size_t i;

	TRY(look_path(&path, ref, "/tensors"));
	path.len--; /* its NUL */
	client_put(&path, "?prefix=%", fqn);
	TRY(client_end(&path));
	TRY(look_all(c, (char *)path.p, "tensors", all));
	json_array_foreach(all, i, item)
		if (strcmp(show_text(item, "fqn"), fqn) == 0) {
			*out = json_incref(item);
			return OK;
		}
	return ERR(NOT_FOUND, "%s has no tensor \"%.200s\": dcpctl tree %s shows those that there are", ref, fqn, ref);
}

int plot_show(const struct command *, struct client *c, const struct args *a)
{
	static const char *const columns[] = { "RANK=rank", "OFFSETS=offsets:dims", "SIZES=sizes:dims", "FILE=file", "OFFSET=offset",
					       "LENGTH=length:bytes", NULL };
	CLEANUP(jval_drop) json_t *tensor = NULL;
	enum err e = find_tensor(c, a->words[0], a->words[1], &tensor);

	if (e)
		return follow_failed(c, e);
	if (show_form() == SHOW_JSON)
		show_json(tensor);
	else if (show_form() == SHOW_TABLE)
		print_plot(tensor);
	else
		show_table(json_object_get(tensor, "chunks"), columns);
	return EXIT_DONE;
}
