/* grid.c: finding the cuts of a grid, and the cells that a box meets (see grid.h).
 *
 * Boxes mostly come in an order in which the next one begins, in each dim, as many cuts further as the last one did. So that place is
 * looked at before anything is searched. */
#include "plan/grid.h"

#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "base/num.h"

#define NONE UINT32_MAX
enum { MOVES_PER_BOX = 16 };        /* while cuts are inserted; then all are sorted */

void grid_free(struct grid *g)
{
	for (uint32_t d = 0; d < g->k; d++)
		mem_free(g->cuts[d]);
	mem_free(g->cells);
	*g = (struct grid){ 0 };
}

/* The first cut that begins at v or later. */
static uint64_t first_from(const struct grid_cut *cuts, uint64_t n, int64_t v)
{
	uint64_t lo = 0, hi = n;

	while (lo < hi) {
		uint64_t mid = lo + (hi - lo) / 2;
		if (cuts[mid].start < v)
			lo = mid + 1;
		else
			hi = mid;
	}
	return lo;
}

/* Place of the last box, and its distance from the one before. */
struct cursor {
	uint64_t at, step;
};

/* Index of the cut that begins at v, or its insertion point. */
static uint64_t find(const struct grid_cut *cuts, uint64_t n, struct cursor *c, int64_t v)
{
	uint64_t guess = c->at + c->step;

	if (guess >= n)
		guess -= n;
	if (guess < n && cuts[guess].start == v)
		return c->at = guess;
	if (c->at < n && cuts[c->at].start == v)
		return c->at;
	if (n == 0 || cuts[n - 1].start < v)
		return c->at = n;
	guess = first_from(cuts, n, v);
	c->step = guess < c->at ? guess + n - c->at : guess - c->at;
	return c->at = guess;
}

static int by_place(const void *a, const void *b)
{
	const struct grid_cut *x = a, *y = b;

	return num_order(x->start, y->start) ?: num_order(x->end, y->end);
}

static struct grid_cut cut_of(const struct grid *g, uint64_t i, uint32_t d)
{
	const int64_t *b = g->boxes[i].dims + g->dims[d];

	return (struct grid_cut){ b[0], b[0] + b[g->ndim] };
}

/* All starts, sorted, each once. They may be more than a grid can have. */
static FALLIBLE enum err sort_cuts(struct grid *g, uint32_t d, uint64_t count)
{
	struct grid_cut *cuts = mem_alloc(count * sizeof *cuts);
	uint64_t n = 0;

	NEED(cuts, "no memory to compare %ju chunks", (uintmax_t)count);
	for (uint64_t i = 0; i < count; i++)
		cuts[i] = cut_of(g, i, d);
	qsort(cuts, count, sizeof *cuts, by_place);
	for (uint64_t i = 0; i < count; i++)
		if (n == 0 || by_place(&cuts[n - 1], &cuts[i]) != 0)
			cuts[n++] = cuts[i];
	mem_free(g->cuts[d]);
	g->cuts[d] = cuts;
	g->counts[d] = n;
	return OK;
}

static FALLIBLE enum err insert(struct grid *g, uint32_t d, uint64_t at, struct grid_cut c, uint64_t *cap)
{
	uint64_t n = g->counts[d]++;

	if (n == *cap) {
		*cap = *cap ? *cap * 2 : 64;
		struct grid_cut *p = mem_grow(g->cuts[d], *cap, sizeof *p);
		NEED(p, "no memory to compare %ju chunks", (uintmax_t)n);
		g->cuts[d] = p;
	}
	memmove(g->cuts[d] + at + 1, g->cuts[d] + at, (n - at) * sizeof c);
	g->cuts[d][at] = c;
	return OK;
}

/* The cuts of one dim as the boxes name them. *fits_out: there may be a grid of `most` cuts or less in this dim. */
static FALLIBLE enum err collect(struct grid *g, uint32_t d, uint64_t count, uint64_t most, bool *fits_out)
{
	struct cursor last = { 0 };
	uint64_t cap = 0, moved = 0;

	*fits_out = false;
	for (uint64_t i = 0; i < count; i++) {
		struct grid_cut c = cut_of(g, i, d);
		uint64_t at = find(g->cuts[d], g->counts[d], &last, c.start);
		if (at < g->counts[d] && g->cuts[d][at].start == c.start) {
			if (g->cuts[d][at].end != c.end)
				return OK;
			continue;
		}
		if (g->counts[d] == most)
			return OK;
		moved += g->counts[d] - at;
		if (moved > count * MOVES_PER_BOX) {
			TRY(sort_cuts(g, d, count));
			break;
		}
		TRY(insert(g, d, at, c, &cap));
	}
	*fits_out = g->counts[d] <= most;
	for (uint64_t i = 1; i < g->counts[d] && *fits_out; i++)
		*fits_out = g->cuts[d][i - 1].end <= g->cuts[d][i].start;
	return OK;
}

/* Every cell has one box? */
static FALLIBLE enum err fill(struct grid *g, uint64_t count, bool *all_out)
{
	struct cursor last[NDIM_MAX] = { 0 };

	*all_out = false;
	g->cells = mem_alloc(count * sizeof *g->cells);
	NEED(g->cells, "no memory to compare %ju chunks", (uintmax_t)count);
	memset(g->cells, 0xff, count * sizeof *g->cells);
	for (uint64_t i = 0; i < count; i++) {
		uint64_t cell = 0;
		for (uint32_t d = 0; d < g->k; d++) {
			struct grid_cut c = cut_of(g, i, d);
			uint64_t at = find(g->cuts[d], g->counts[d], &last[d], c.start);
			if (g->cuts[d][at].end != c.end)
				return OK;
			cell = cell * g->counts[d] + at;
		}
		if (g->cells[cell] != NONE)
			return OK;
		g->cells[cell] = (uint32_t)i;
	}
	*all_out = true;
	return OK;
}

static FALLIBLE enum err make(struct grid *g, uint64_t count, bool *is_grid_out)
{
	uint64_t cells = 1;

	for (uint32_t d = 0; d < g->k; d++) {
		bool fits;
		TRY(collect(g, d, count, count / cells, &fits));
		if (!fits)
			return OK;
		cells *= g->counts[d];
	}
	return cells == count ? fill(g, count, is_grid_out) : OK;
}

enum err grid_make(uint32_t ndim, uint32_t k, const uint32_t *dims, const struct overlap_box *boxes, uint64_t count,
		   struct grid *out, bool *is_grid_out)
{
	*is_grid_out = false;
	*out = (struct grid){ .ndim = ndim, .k = k, .boxes = boxes };
	if (count >= NONE)
		return OK;
	memcpy(out->dims, dims, k * sizeof *dims);
	enum err e = make(out, count, is_grid_out);
	if (!*is_grid_out)
		grid_free(out);
	return e;
}

/* The cuts first..last-1 that [start, end) meets. */
static bool meets(const struct grid_cut *cuts, uint64_t n, int64_t start, int64_t end, struct cursor *c, uint64_t *first,
		  uint64_t *last)
{
	uint64_t i = find(cuts, n, c, start);

	if (i > 0 && cuts[i - 1].end > start)
		i--;
	*first = i;
	while (i < n && cuts[i].start < end)
		i++;
	*last = i;
	return i > *first;
}

/* All cells of the box of cuts from..to. */
static FALLIBLE enum err visit_cells(const struct grid *g, const uint64_t *from, const uint64_t *to, uint32_t id, bool swapped,
				     overlap_visit *visit, void *ctx)
{
	uint64_t at[NDIM_MAX];
	uint32_t d = g->k;

	memcpy(at, from, g->k * sizeof *at);
	for (;;) {
		uint64_t cell = 0;
		for (d = 0; d + 1 < g->k; d++)
			cell = (cell + at[d]) * g->counts[d + 1];
		for (uint64_t i = g->k ? from[d] : 0; i < (g->k ? to[d] : 1); i++) {
			uint32_t other = g->boxes[g->cells[cell + i]].id;
			TRY(swapped ? visit(ctx, other, id) : visit(ctx, id, other));
		}
		while (d-- > 0) {
			if (++at[d] < to[d])
				break;
			at[d] = from[d];
		}
		if (d == UINT32_MAX)
			return OK;
	}
}

enum err grid_join(const struct grid *g, const struct overlap_box *boxes, uint64_t count, bool swapped, overlap_visit *visit,
		   void *ctx)
{
	struct cursor last[NDIM_MAX] = { 0 };
	uint64_t from[NDIM_MAX] = { 0 }, to[NDIM_MAX] = { 0 };

	for (uint64_t i = 0; i < count; i++) {
		uint32_t d = 0;
		for (; d < g->k; d++) {
			int64_t start = boxes[i].dims[g->dims[d]], end = start + boxes[i].dims[g->ndim + g->dims[d]];
			if (!meets(g->cuts[d], g->counts[d], start, end, &last[d], &from[d], &to[d]))
				break;
		}
		if (d == g->k)
			TRY(visit_cells(g, from, to, boxes[i].id, swapped, visit, ctx));
	}
	return OK;
}
