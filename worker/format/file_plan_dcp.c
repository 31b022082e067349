/* file_plan_dcp.c: the files of a DCP checkpoint: small items first, packed, then large ones, each with its payload on a page, then the
 * index (dcp_index.h). */
#include "format/file_plan.h"

#include <stdlib.h>

#include "base/arena.h"
#include "base/num.h"
#include "format/dcp_index.h"
#include "format/format.h"

enum { ALIGN_SMALL = 64 };

struct planner {
	const struct file_plan_target *t;
	struct file_plan *p;
	struct vec(struct file_plan_item) items;       /* of the rank in hand; of all ranks if they are given */
	struct buf index;              /* of the file in hand */
};

static FALLIBLE enum err chunk_bytes(const struct sdict *sd, const struct sd_chunk *c, uint64_t *out)
{
	const struct sd_tensor *t = &sd->tensors[c->tensor];
	uint64_t numel;

	TRY(box_numel(t->ndim, sd_sizes(c, t->ndim), &numel));
	return num_mul(numel, dtype_bytes(t->dtype), out);
}

static void lay_bare(struct file_plan_item *it, uint64_t bytes)
{
	it->bare = true;
	it->small = bytes <= FILE_PLAN_SMALL;
	it->at = (struct item_layout){ 0, bytes, bytes, bytes };
}

static FALLIBLE enum err push_chunk(struct planner *pl, uint64_t index)
{
	const struct sdict *sd = pl->t->sd;
	const struct sd_chunk *c = &sd->chunks[index];
	const struct sd_tensor *t = &sd->tensors[c->tensor];
	struct file_plan_item *it;
	uint64_t bytes;

	TRY(vec_push(&pl->items, &it));
	it->kind = FILE_PLAN_CHUNK;
	it->index = (uint32_t)index;
	TRY(chunk_bytes(sd, c, &bytes));
	lay_bare(it, bytes);
	if (pl->t->given && pl->t->given->chunk_raw[index])
		return OK;
	it->bare = false;
	enum err e = item_layout_tensor(t->dtype, t->ndim, sd_sizes(c, t->ndim), it->small ? ALIGN_SMALL : FILE_PLAN_PAGE, &it->at);
	return err_at_fqn(e, t->fqn.p, t->fqn.n);
}

static FALLIBLE enum err push_value(struct planner *pl, uint64_t index)
{
	const struct sd_value *v = &pl->t->sd->values[index];
	struct file_plan_item *it;

	TRY(vec_push(&pl->items, &it));
	it->kind = FILE_PLAN_VALUE;
	it->index = (uint32_t)index;
	lay_bare(it, v->kind == SD_VALUE_INLINE ? v->bytes.n : v->loc.length);
	return OK;
}

static FALLIBLE enum err place(struct planner *pl, const struct file_plan_item *it, uint64_t offset, bool opens)
{
	struct file_plan_item *placed;

	TRY(vec_push(&pl->p->items, &placed));
	*placed = *it;
	placed->offset = offset;
	placed->opens = opens;
	return OK;
}

/* May an item join the block that `first` opened? Both come from one segment then, and not from far apart. */
static bool is_near(const struct planner *pl, const struct file_plan_item *first, const struct file_plan_item *it)
{
	const struct sdict *sd = pl->t->sd;

	if (!pl->t->span_bytes || it->kind != FILE_PLAN_CHUNK || first->kind != FILE_PLAN_CHUNK)
		return true;
	const struct sd_loc *a = &sd->chunks[first->index].loc, *b = &sd->chunks[it->index].loc;
	return a->file == b->file && b->offset >= a->offset && b->offset + b->length - a->offset <= pl->t->span_bytes;
}

/* Small items one behind the other, in blocks that are whole pages. */
static FALLIBLE enum err place_small(struct planner *pl, struct file_plan_item **items, uint64_t n, uint64_t *cursor)
{
	uint64_t begin = *cursor, at = *cursor;
	const struct file_plan_item *first = NULL;     /* of the open block */

	for (uint64_t i = 0; i < n; i++) {
		uint64_t length = items[i]->at.length;
		if (!items[i]->small)
			continue;
		bool opens = !first || at + length - begin > pl->t->block_bytes || !is_near(pl, first, items[i]);
		if (opens)
			begin = at = file_plan_page_up(at);
		if (opens || first->kind != FILE_PLAN_CHUNK)
			first = items[i];
		TRY(place(pl, items[i], at, opens));
		at = (at + length + ALIGN_SMALL - 1) & ~(uint64_t)(ALIGN_SMALL - 1);
	}
	*cursor = file_plan_page_up(at);
	return OK;
}

static FALLIBLE enum err place_large(struct planner *pl, struct file_plan_item **items, uint64_t n, uint64_t *cursor)
{
	for (uint64_t i = 0; i < n; i++) {
		if (items[i]->small)
			continue;
		TRY(place(pl, items[i], *cursor, false));
		TRY(num_add(*cursor, file_plan_page_up(items[i]->at.length), cursor));
	}
	return OK;
}

/* Plans the index of the file, for a repair. A client's own files have none: its metadata may call their bytes what it likes. */
static FALLIBLE enum err place_index(struct planner *pl, uint64_t first_item, uint64_t *cursor)
{
	struct file_plan *p = pl->p;
	struct file_plan_item it = { .kind = FILE_PLAN_TEXT, .index = (uint32_t)p->texts.n };
	struct str *text;

	if (pl->t->given || p->items.n == first_item)
		return OK;
	pl->index.len = 0;
	TRY(dcp_index_put(&pl->index, pl->t->sd, p->items.v + first_item, p->items.n - first_item));
	lay_bare(&it, pl->index.len);
	TRY(vec_push(&p->texts, &text));
	TRY(arena_str(p->arena, (struct str){ (char *)pl->index.p, pl->index.len }, text));
	TRY(place(pl, &it, *cursor, it.small));
	return num_add(*cursor, it.at.length, cursor);
}

static FALLIBLE enum err place_file(struct planner *pl, struct file_plan_item **items, uint64_t n, uint32_t rank, struct str name,
				    bool exact)
{
	struct file_plan *p = pl->p;
	struct file_plan_file *f;
	uint64_t cursor = 0;

	TRY(vec_push(&p->files, &f));
	*f = (struct file_plan_file){ .rank = rank, .first_item = p->items.n };
	TRY(arena_str(p->arena, name, &f->name));
	TRY(place_small(pl, items, n, &cursor));
	TRY(place_large(pl, items, n, &cursor));
	for (uint64_t i = f->first_item; exact && i < p->items.n; i++) { /* nothing is behind the last one */
		uint64_t end = p->items.v[i].offset + p->items.v[i].at.length;
		if (file_plan_page_up(end) == cursor)
			cursor = end;
	}
	TRY(place_index(pl, f->first_item, &cursor));
	f->item_count = p->items.n - f->first_item;
	f->bytes = cursor;
	return OK;
}

static int larger_first(const void *a, const void *b)
{
	const struct file_plan_item *x = *(struct file_plan_item *const *)a, *y = *(struct file_plan_item *const *)b;

	if (x->kind != y->kind)
		return x->kind == FILE_PLAN_VALUE ? -1 : 1;
	return num_order(y->at.payload_bytes, x->at.payload_bytes) ?: num_order(x->index, y->index);
}

/* Calls place_file for each group of the rank's items, which come in their order; without `place` counts them only. A group is all
 * values, a chunk of `unit` bytes, or smaller ones that have as many together. */
static FALLIBLE enum err cut(struct planner *pl, uint64_t unit, struct file_plan_item **group, uint32_t rank, bool place,
			     uint64_t *files_out)
{
	uint64_t n = pl->items.n, m = 0, bytes = 0, files = 0;
	char name[FORMAT_FILE_MAX];

	for (int large = 0; large < 2; large++) {
		for (uint64_t i = 0; i <= n; i++) {
			struct file_plan_item *it = i < n ? &pl->items.v[i] : NULL;
			bool is_large = it && it->kind == FILE_PLAN_CHUNK && it->at.payload_bytes >= unit;
			if (it && is_large != (large == 1))
				continue;
			bool ends = m && (!it || is_large || bytes >= unit || group[m - 1]->kind != it->kind);
			if (ends) {
				format_dcp_payload(rank, pl->t->number + (uint64_t)files++, name);
				TRY(place ? place_file(pl, group, m, rank, str_of(name), false) : OK);
				m = bytes = 0;
			}
			if (it) {
				group[m++] = it;
				bytes += it->kind == FILE_PLAN_CHUNK ? it->at.payload_bytes : 0;
			}
		}
	}
	*files_out = files;
	return OK;
}

static FALLIBLE enum err place_cut(struct planner *pl, uint32_t rank)
{
	CLEANUP(mem_free_ptr) struct file_plan_item **group = mem_zalloc(pl->items.n + 1, sizeof *group);
	uint64_t unit = FILE_PLAN_CUT_BYTES, files;
	char name[FORMAT_FILE_MAX];

	NEED(group, "no memory for %ju items", (uintmax_t)pl->items.n);
	TRY(cut(pl, unit, group, rank, false, &files));
	while (files > FILE_PLAN_CUT_MAX) {
		unit *= 2;
		TRY(cut(pl, unit, group, rank, false, &files));
	}
	if (files)
		return cut(pl, unit, group, rank, true, &files);
	format_dcp_payload(rank, pl->t->number, name);
	return place_file(pl, group, 0, rank, str_of(name), false);
}

static FALLIBLE enum err place_rank(struct planner *pl, uint32_t rank)
{
	uint64_t n = pl->items.n;
	uint32_t files = pl->t->files_per_rank;
	CLEANUP(mem_free_ptr) struct file_plan_item **sorted = mem_zalloc(n, sizeof *sorted);
	CLEANUP(mem_free_ptr) struct file_plan_item **bucket = mem_zalloc(n, sizeof *bucket);
	CLEANUP(mem_free_ptr) uint64_t *sums = mem_zalloc(files, sizeof *sums);
	CLEANUP(mem_free_ptr) uint32_t *choice = mem_zalloc(n, sizeof *choice);
	char name[FORMAT_FILE_MAX];

	NEED(sorted && bucket && sums && choice, "no memory for %ju items", (uintmax_t)n);
	for (uint64_t i = 0; i < n; i++)
		sorted[i] = &pl->items.v[i];
	if (files > 1)
		qsort(sorted, n, sizeof *sorted, larger_first);
	for (uint64_t i = 0; i < n; i++) {
		uint32_t best = 0;
		for (uint32_t f = 1; f < files; f++)
			if (sums[f] < sums[best])
				best = f;
		sums[best] += sorted[i]->at.payload_bytes + 1;
		choice[i] = best;
	}
	for (uint32_t f = 0; f < files; f++) {
		uint64_t m = 0;
		for (uint64_t i = 0; i < n; i++)
			if (choice[i] == f)
				bucket[m++] = sorted[i];
		format_dcp_payload(rank, pl->t->number + f, name);
		TRY(place_file(pl, bucket, m, rank, str_of(name), false));
	}
	return OK;
}

static FALLIBLE enum err sort_by_rank(const struct file_plan_target *t, uint64_t **order_out, uint64_t **first_out)
{
	const struct sdict *sd = t->sd;
	uint64_t n = sd->value_count + sd->chunk_count, w = t->world_size;
	uint64_t *first = mem_zalloc(w + 2, sizeof *first), *order = mem_zalloc(n, sizeof *order);

	*first_out = first;
	*order_out = order;
	NEED(first && order, "no memory for %ju items", (uintmax_t)n);
	for (uint64_t i = 0; i < n; i++) {
		uint64_t r = i < sd->value_count ? sd->values[i].rank : sd->chunks[i - sd->value_count].rank;
		if (r >= w)
			return ERR(INTERNAL, "rank %ju in a world of %ju", (uintmax_t)r, (uintmax_t)w);
		first[r + 2]++;
	}
	for (uint64_t r = 2; r < w + 2; r++)
		first[r] += first[r - 1];
	for (uint64_t i = 0; i < n; i++) {
		uint64_t r = i < sd->value_count ? sd->values[i].rank : sd->chunks[i - sd->value_count].rank;
		order[first[r + 1]++] = i;
	}
	return OK;
}

static FALLIBLE enum err place_ranks(struct planner *pl)
{
	uint64_t values = pl->t->sd->value_count;
	CLEANUP(mem_free_ptr) uint64_t *order = NULL;
	CLEANUP(mem_free_ptr) uint64_t *first = NULL;

	TRY(sort_by_rank(pl->t, &order, &first));
	for (uint32_t r = 0; r < pl->t->world_size; r++) {
		pl->items.n = 0;
		for (uint64_t i = first[r]; i < first[r + 1]; i++)
			TRY(order[i] < values ? push_value(pl, order[i]) : push_chunk(pl, order[i] - values));
		TRY(pl->t->cut ? place_cut(pl, r) : place_rank(pl, r));
	}
	return OK;
}

/* Every item in the file that was chosen for it, in the order in which they are given. */
static FALLIBLE enum err place_given(struct planner *pl)
{
	const struct file_plan_given *g = pl->t->given;
	uint64_t n = pl->t->sd->chunk_count;
	CLEANUP(mem_free_ptr) struct file_plan_item **bucket = mem_zalloc(n, sizeof *bucket);
	CLEANUP(mem_free_ptr) uint64_t *first = mem_zalloc((uint64_t)g->file_count + 2, sizeof *first);

	NEED(bucket && first, "no memory for %ju items", (uintmax_t)n);
	for (uint64_t i = 0; i < n; i++) {
		TRY(push_chunk(pl, i));
		first[g->chunk_file[i] + 2]++;
	}
	for (uint32_t f = 2; f < g->file_count + 2; f++)
		first[f] += first[f - 1];
	for (uint64_t i = 0; i < n; i++)
		bucket[first[g->chunk_file[i] + 1]++] = &pl->items.v[i];
	for (uint32_t f = 0; f < g->file_count; f++)
		TRY(place_file(pl, bucket + first[f], first[f + 1] - first[f], g->ranks[f], g->names[f], g->exact[f]));
	return OK;
}

enum err file_plan_dcp(const struct file_plan_target *t, struct file_plan *out)
{
	struct planner pl = { .t = t, .p = out, .index = BUF_INIT(DCP_INDEX_MAX) };

	enum err e = t->given ? place_given(&pl) : place_ranks(&pl);
	vec_free(&pl.items);
	buf_free(&pl.index);
	return e;
}
