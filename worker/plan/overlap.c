/* overlap.c: the tree walk behind every question about overlapping boxes that form no grid (see overlap.h, grid.h).
 *
 * A tree is implicit: its records are ordered so that the node over [lo, hi) has children over [lo, mid) and [mid, hi), and only
 * bounding boxes are stored, in heap order. A record is (start, end) per dim that matters, then the id. */
#include "plan/overlap.h"

#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "base/num.h"
#include "base/table.h"
#include "plan/grid.h"
#include "tensor/box.h"

enum {
	LEAF = 8,
	SAMPLE = 61,                     /* an odd stride does not keep step with a grid */
	ROUNDS = 64,
	STEPS_FREE = 1 << 20,            /* node pairs looked at … */
	STEPS_PER_BOX = 256,             /* … and more for every box, and for every pair that was found */
	STEPS_PER_PAIR = 64,
};

struct tree {
	uint32_t k;                      /* dims that matter */
	uint32_t stride;                 /* of a record, in int64 */
	uint64_t n;
	int64_t *recs, *bounds;          /* bounds: k (start, end) pairs per node */
};

struct node {
	uint64_t at, lo, hi;
};

struct walk {
	const struct tree *a, *b;
	overlap_visit *visit;
	void *ctx;
	uint64_t steps_left;
};

static void tree_free(struct tree *t)
{
	mem_free(t->recs);
	mem_free(t->bounds);
}

/* Dims in which all boxes of both sets are alike cannot keep any two apart. */
static uint32_t dims_that_matter(uint32_t ndim, const struct overlap_box *a, uint64_t a_count,
				 const struct overlap_box *b, uint64_t b_count, uint32_t *dims_out)
{
	uint32_t k = 0;

	for (uint32_t d = 0; d < ndim; d++) {
		int64_t off = a[0].dims[d], size = a[0].dims[ndim + d];
		bool alike = true;

		for (uint64_t i = 1; i < a_count && alike; i++)
			alike = a[i].dims[d] == off && a[i].dims[ndim + d] == size;
		for (uint64_t i = 0; i < b_count && alike; i++)
			alike = b[i].dims[d] == off && b[i].dims[ndim + d] == size;
		if (!alike)
			dims_out[k++] = d;
	}
	return k;
}

static inline int64_t *rec(const struct tree *t, uint64_t i)
{
	return t->recs + i * t->stride;
}

static void swap_recs(const struct tree *t, uint64_t i, uint64_t j)
{
	int64_t *a = rec(t, i), *b = rec(t, j);

	for (uint32_t w = 0; w < t->stride; w++) {
		int64_t tmp = a[w];
		a[w] = b[w];
		b[w] = tmp;
	}
}

static int by_start(const void *a, const void *b, void *word)
{
	int64_t x = ((const int64_t *)a)[*(uint32_t *)word], y = ((const int64_t *)b)[*(uint32_t *)word];

	return (x > y) - (x < y);
}

static int64_t median3(int64_t a, int64_t b, int64_t c)
{
	if (a > b) {
		int64_t t = a;
		a = b;
		b = t;
	}
	return c < a ? a : c > b ? b : c;
}

/* Puts the records with the smallest starts (in word w) of [lo, hi) before mid. Input made to defeat the choice of pivots
 * is sorted instead. */
static void select_mid(const struct tree *t, uint64_t lo, uint64_t mid, uint64_t hi, uint32_t w)
{
	for (int rounds = 0; hi - lo > 1; rounds++) {
		if (rounds > ROUNDS) {
			qsort_r(rec(t, lo), hi - lo, t->stride * sizeof(int64_t), by_start, &w);
			return;
		}
		int64_t pivot = median3(rec(t, lo)[w], rec(t, mid)[w], rec(t, hi - 1)[w]);
		uint64_t i = lo, j = hi; /* [lo, i) <= pivot <= [j, hi) */
		while (i < j) {
			while (rec(t, i)[w] < pivot)
				i++;
			while (rec(t, j - 1)[w] > pivot)
				j--;
			if (i + 1 < j)
				swap_recs(t, i, j - 1);
			if (i < j) {
				i++;
				j--;
			}
		}
		if (mid < j)
			hi = j;
		else if (mid >= i)
			lo = i;
		else
			return;
	}
}

/* The dim along which the boxes of [lo, hi) lie in most places, by a sample: the spread of starts over the mean size. */
static uint32_t split_word(const struct tree *t, uint64_t lo, uint64_t hi)
{
	uint64_t step = num_div_up(hi - lo, SAMPLE);
	double best = -1;
	uint32_t word = 0;

	for (uint32_t d = 0; d < t->k; d++) {
		int64_t min = INT64_MAX, max = 0;
		double sum = 0;

		for (uint64_t i = lo; i < hi; i += step) {
			const int64_t *r = rec(t, i) + (size_t)d * 2;
			min = r[0] < min ? r[0] : min;
			max = r[0] > max ? r[0] : max;
			sum += (double)(r[1] - r[0]);
		}
		double score = (double)(max - min) / sum;
		if (score > best) {
			best = score;
			word = d * 2;
		}
	}
	return word;
}

static void bounds_of_recs(const struct tree *t, uint64_t lo, uint64_t hi, int64_t *out)
{
	memcpy(out, rec(t, lo), t->k * 2 * sizeof *out);
	for (uint64_t i = lo + 1; i < hi; i++) {
		const int64_t *r = rec(t, i);
		for (uint32_t d = 0; d < t->k * 2; d += 2) {
			out[d] = r[d] < out[d] ? r[d] : out[d];
			out[d + 1] = r[d + 1] > out[d + 1] ? r[d + 1] : out[d + 1];
		}
	}
}

static inline int64_t *node_bounds(const struct tree *t, uint64_t at)
{
	return t->bounds + at * t->k * 2;
}

static inline struct node child(struct node n, bool right)
{
	uint64_t mid = n.lo + (n.hi - n.lo) / 2;

	return right ? (struct node){ n.at * 2 + 2, mid, n.hi } : (struct node){ n.at * 2 + 1, n.lo, mid };
}

/* As deep as the logarithm of the count. */
static void tree_build(const struct tree *t, struct node n, bool sorted)
{
	int64_t *out = node_bounds(t, n.at);

	if (n.hi - n.lo <= LEAF) {
		bounds_of_recs(t, n.lo, n.hi, out);
		return;
	}
	struct node l = child(n, false), r = child(n, true);
	if (!sorted)
		select_mid(t, n.lo, r.lo, n.hi, split_word(t, n.lo, n.hi));
	tree_build(t, l, sorted);
	tree_build(t, r, sorted);
	const int64_t *a = node_bounds(t, l.at), *b = node_bounds(t, r.at);
	for (uint32_t d = 0; d < t->k * 2; d += 2) {
		out[d] = a[d] < b[d] ? a[d] : b[d];
		out[d + 1] = a[d + 1] > b[d + 1] ? a[d + 1] : b[d + 1];
	}
}

/* Along one dim the order of starts is the tree; it is usually given already. */
static bool sort_line(const struct tree *t)
{
	uint32_t w = 0;
	uint64_t i = 1;

	if (t->k > 1)
		return false;
	while (i < t->n && t->k == 1 && rec(t, i - 1)[0] <= rec(t, i)[0])
		i++;
	if (i < t->n && t->k == 1)
		qsort_r(t->recs, t->n, t->stride * sizeof(int64_t), by_start, &w);
	return true;
}

static FALLIBLE enum err tree_make(uint32_t ndim, const struct overlap_box *boxes, uint64_t count,
				   const uint32_t *dims, uint32_t k, struct tree *t)
{
	uint64_t nodes = 1;

	for (uint64_t size = count; size > LEAF; size = num_div_up(size, 2))
		nodes = nodes * 2 + 1;
	*t = (struct tree){ .k = k, .stride = k * 2 + 1, .n = count };
	t->recs = mem_zalloc(count, t->stride * sizeof(int64_t));
	t->bounds = mem_zalloc(nodes, (k ? k : 1) * 2 * sizeof(int64_t));
	if (!t->recs || !t->bounds) {
		tree_free(t);
		return ERR(NO_MEMORY, "no memory to compare %ju chunks", (uintmax_t)count);
	}
	for (uint64_t i = 0; i < count; i++) {
		int64_t *r = rec(t, i);
		for (uint32_t d = 0; d < k; d++) {
			r[d * 2] = boxes[i].dims[dims[d]];
			r[d * 2 + 1] = boxes[i].dims[dims[d]] + boxes[i].dims[ndim + dims[d]];
		}
		r[k * 2] = boxes[i].id;
	}
	tree_build(t, (struct node){ 0, 0, count }, sort_line(t));
	return OK;
}

static inline bool meet(uint32_t k, const int64_t *a, const int64_t *b)
{
	for (uint32_t d = 0; d < k * 2; d += 2)
		if (a[d] >= b[d + 1] || b[d] >= a[d + 1])
			return false;
	return true;
}

static FALLIBLE enum err found(struct walk *w, const int64_t *a, const int64_t *b)
{
	w->steps_left += STEPS_PER_PAIR;
	return w->visit(w->ctx, (uint32_t)a[w->a->k * 2], (uint32_t)b[w->b->k * 2]);
}

static FALLIBLE enum err cross(struct walk *w, struct node a, struct node b)
{
	uint32_t k = w->a->k;

	if (w->steps_left-- == 0)
		return ERR(LIMIT_EXCEEDED, "the chunks of a tensor lie in a way that takes too long to compare");
	if (!meet(k, node_bounds(w->a, a.at), node_bounds(w->b, b.at)))
		return OK;
	bool a_leaf = a.hi - a.lo <= LEAF, b_leaf = b.hi - b.lo <= LEAF;
	if (!a_leaf && (b_leaf || a.hi - a.lo >= b.hi - b.lo)) {
		TRY(cross(w, child(a, false), b));
		return cross(w, child(a, true), b);
	}
	if (!b_leaf) {
		TRY(cross(w, a, child(b, false)));
		return cross(w, a, child(b, true));
	}
	for (uint64_t i = a.lo; i < a.hi; i++) {
		const int64_t *r = rec(w->a, i);
		if (!meet(k, r, node_bounds(w->b, b.at)))
			continue;
		for (uint64_t j = b.lo; j < b.hi; j++)
			if (meet(k, r, rec(w->b, j)))
				TRY(found(w, r, rec(w->b, j)));
	}
	return OK;
}

static FALLIBLE enum err within(struct walk *w, struct node n)
{
	if (n.hi - n.lo > LEAF) {
		TRY(within(w, child(n, false)));
		TRY(within(w, child(n, true)));
		return cross(w, child(n, false), child(n, true));
	}
	for (uint64_t i = n.lo; i < n.hi; i++)
		for (uint64_t j = i + 1; j < n.hi; j++)
			if (meet(w->a->k, rec(w->a, i), rec(w->a, j)))
				TRY(found(w, rec(w->a, i), rec(w->a, j)));
	return OK;
}

static FALLIBLE enum err join_trees(uint32_t ndim, const struct overlap_box *a, uint64_t a_count, const struct overlap_box *b,
				    uint64_t b_count, const uint32_t *dims, uint32_t k, overlap_visit *visit, void *ctx)
{
	struct tree ta, tb;

	TRY(tree_make(ndim, a, a_count, dims, k, &ta));
	enum err e = tree_make(ndim, b, b_count, dims, k, &tb);
	if (!e) {
		struct walk w = { &ta, &tb, visit, ctx, STEPS_FREE + STEPS_PER_BOX * (a_count + b_count) };
		e = cross(&w, (struct node){ 0, 0, a_count }, (struct node){ 0, 0, b_count });
		tree_free(&tb);
	}
	tree_free(&ta);
	return e;
}

enum err overlap_join(uint32_t ndim, const struct overlap_box *a, uint64_t a_count,
		      const struct overlap_box *b, uint64_t b_count, overlap_visit *visit, void *ctx)
{
	CLEANUP(grid_free) struct grid g = { 0 };
	uint32_t dims[NDIM_MAX];
	bool is_grid;

	must(ndim <= NDIM_MAX);
	if (a_count == 0 || b_count == 0)
		return OK;
	uint32_t k = dims_that_matter(ndim, a, a_count, b, b_count, dims);
	TRY(grid_make(ndim, k, dims, b, b_count, &g, &is_grid));
	if (is_grid)
		return grid_join(&g, a, a_count, false, visit, ctx);
	TRY(grid_make(ndim, k, dims, a, a_count, &g, &is_grid));
	if (is_grid)
		return grid_join(&g, b, b_count, true, visit, ctx);
	return join_trees(ndim, a, a_count, b, b_count, dims, k, visit, ctx);
}

enum err overlap_self(uint32_t ndim, const struct overlap_box *boxes, uint64_t count,
		      overlap_visit *visit, void *ctx)
{
	CLEANUP(grid_free) struct grid g = { 0 };
	uint32_t dims[NDIM_MAX];
	struct tree t;
	bool is_grid;

	must(ndim <= NDIM_MAX);
	if (count < 2)
		return OK;
	uint32_t k = dims_that_matter(ndim, boxes, count, NULL, 0, dims);
	TRY(grid_make(ndim, k, dims, boxes, count, &g, &is_grid));
	if (is_grid)
		return OK;
	TRY(tree_make(ndim, boxes, count, dims, k, &t));
	struct walk w = { &t, &t, visit, ctx, STEPS_FREE + STEPS_PER_BOX * count };
	enum err e = within(&w, (struct node){ 0, 0, count });
	tree_free(&t);
	return e;
}

enum err overlap_drop_equal(uint32_t ndim, struct overlap_box *boxes, uint64_t *count)
{
	struct table(struct table_item) seen = { 0 };
	struct table_item *same;
	uint64_t kept = 0;

	enum err e = table_reserve(&seen, *count);
	for (uint64_t i = 0; i < *count && !e; i++) {
		const int64_t *d = boxes[i].dims;
		uint32_t hash = table_hash((struct str){ (const char *)d, ndim * 2 * sizeof *d });
		table_find(&seen, hash, same, box_equal(ndim, boxes[same->item].dims, boxes[same->item].dims + ndim, d, d + ndim));
		if (same)
			continue;
		e = table_add(&seen, hash, &same);
		if (!e) {
			same->item = (uint32_t)kept;
			boxes[kept++] = boxes[i];
		}
	}
	table_free(&seen);
	*count = kept;
	return e;
}
