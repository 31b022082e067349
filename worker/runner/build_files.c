/* build_files.c: what the target files of a run look like before a byte is written: every item's place, and the blocks that fill them
 * (see build.h). Sizes are known, so any worker can write any block of any file at once. */
#include <stdio.h>
#include <stdlib.h>

#include "base/num.h"
#include "format/safetensors.h"
#include "format/torch_item.h"
#include "runner/build.h"

enum { PAGE = 4096, ITEM_ALIGN_SMALL = 64, EDGE_MAX = 1 << 20 };

/* One item on its way to a file: a chunk or a value. */
struct item {
	bool is_value, small, bare;
	uint32_t index;                /* into sd->chunks or sd->values */
	uint32_t dst;
	uint64_t bytes;                /* payload */
	struct item_layout layout;
};

struct blockref {
	uint64_t first;
	uint32_t count, rank;
	bool scan;
};

struct builder {
	struct run_build *b;
	struct build_target *t;
	struct vec(struct item) items;         /* of the rank in hand */
	struct vec(struct blockref) tasks;     /* blocks are consecutive in each */
	uint32_t *chunk_dst;                   /* dst of each chunk, for groups */
	uint64_t scan_bytes;                   /* in the latest scan task */
};

static uint64_t task_bytes_of(const struct run_build *b)
{
	return b->opts.task_bytes;
}

static FALLIBLE enum err chunk_bytes(const struct sdict *sd, const struct sd_chunk *c, uint64_t *out)
{
	const struct sd_tensor *t = &sd->tensors[c->tensor];
	uint64_t numel;

	TRY(box_numel(t->ndim, sd_sizes(c, t->ndim), &numel));
	return num_mul(numel, dtype_bytes(t->dtype), out);
}

/* ------------------------------------------------------------------------------------------------------- dsts */

static FALLIBLE enum err add_chunk_dst(struct builder *bd, struct item *it, uint32_t file, uint64_t offset)
{
	const struct sdict *sd = bd->t->sd;
	const struct sd_chunk *c = &sd->chunks[it->index];
	const struct sd_tensor *t = &sd->tensors[c->tensor];
	const struct load_plan *p = bd->t->pieces;
	struct run_dst *d;

	it->dst = (uint32_t)bd->b->dsts.n;
	TRY(vec_push(&bd->b->dsts, &d));
	*d = (struct run_dst){ .kind = RUN_DST_TENSOR, .dtype = (uint8_t)t->dtype, .small = it->small, .bare = it->bare,
			       .file = file, .ndim = t->ndim, .rank = c->rank, .offset = offset,
			       .payload_off = it->layout.payload_off, .payload_bytes = it->bytes,
			       .tail_off = it->layout.tail_off, .length = it->layout.length,
			       .fqn_len = (uint32_t)t->fqn.n, .first_piece = bd->b->pieces.n,
			       .piece_count = (uint32_t)(p->first[it->index + 1] - p->first[it->index]) };
	TRY(run_add_string(bd->b, t->fqn, &d->fqn_at));
	TRY(run_add_dims(bd->b, c->dims, t->ndim, &d->dims_at));
	TRY(vec_reserve(&bd->b->pieces, d->piece_count));
	for (uint64_t k = p->first[it->index]; k < p->first[it->index + 1]; k++)
		bd->b->pieces.v[bd->b->pieces.n++] = bd->t->first_src + p->sources[k];
	bd->chunk_dst[it->index] = it->dst;
	bd->t->chunk_places[it->index] = (struct build_place){ file, it->dst, offset, it->layout.length };
	return OK;
}

static FALLIBLE enum err add_value_dst(struct builder *bd, struct item *it, uint32_t file, uint64_t offset)
{
	const struct sd_value *v = &bd->t->sd->values[it->index];
	uint32_t src = bd->t->value_src[it->index];
	struct run_dst *d;
	uint32_t *piece;

	it->dst = (uint32_t)bd->b->dsts.n;
	TRY(vec_push(&bd->b->dsts, &d));
	*d = (struct run_dst){ .kind = RUN_DST_RAW, .small = it->small, .bare = true, .file = file, .rank = v->rank,
			       .offset = offset, .payload_bytes = it->bytes, .tail_off = it->bytes, .length = it->bytes,
			       .fqn_len = (uint32_t)v->fqn.n, .first_piece = bd->b->pieces.n };
	TRY(run_add_string(bd->b, v->fqn, &d->fqn_at));
	if (src == UINT32_MAX) {
		TRY(run_add_string(bd->b, v->bytes, &d->inline_at));
		d->inline_len = v->bytes.n;
	} else {
		TRY(vec_push(&bd->b->pieces, &piece));
		*piece = src;
		d->piece_count = 1;
	}
	bd->t->value_places[it->index] = (struct build_place){ file, it->dst, offset, it->bytes };
	return OK;
}

static FALLIBLE enum err add_dst(struct builder *bd, struct item *it, uint32_t file, uint64_t offset)
{
	return it->is_value ? add_value_dst(bd, it, file, offset) : add_chunk_dst(bd, it, file, offset);
}

/* ------------------------------------------------------------------------------------------------------ blocks */

static FALLIBLE enum err add_part(struct run_build *b, uint32_t dst, uint64_t begin, uint64_t end)
{
	struct run_part *p;
	struct run_dst *d = &b->dsts.v[dst];

	if (d->part_count == 0)
		d->first_part = b->parts.n;
	d->part_count++;
	atomic_store(&d->parts_left, (uint32_t)d->part_count);
	TRY(vec_push(&b->parts, &p));
	*p = (struct run_part){ .dst = dst, .begin = begin, .end = end };
	return OK;
}

/* A block of `file`; its parts are added with block_part(). */
static FALLIBLE enum err add_block(struct run_build *b, uint32_t file, uint64_t offset, uint64_t bytes)
{
	struct run_block *k;

	TRY(vec_push(&b->blocks, &k));
	*k = (struct run_block){ .file = file, .offset = offset, .bytes = bytes, .first_part = b->block_parts.n };
	atomic_fetch_add(&b->files.v[file].blocks_left, 1);
	return OK;
}

static FALLIBLE enum err block_part(struct run_build *b, uint64_t part)
{
	uint64_t *at;

	TRY(vec_push(&b->block_parts, &at));
	*at = part;
	b->blocks.v[b->blocks.n - 1].part_count++;
	return OK;
}

static FALLIBLE enum err add_task(struct builder *bd, uint64_t first_block, uint32_t rank)
{
	struct blockref *ref;

	TRY(vec_push(&bd->tasks, &ref));
	*ref = (struct blockref){ first_block, (uint32_t)(bd->b->blocks.n - first_block), rank, false };
	return OK;
}

/* Scans of one source as tasks of `rank`; small ones join the scan task before them. */
static FALLIBLE enum err scan_source(struct builder *bd, uint32_t src, uint32_t rank)
{
	struct run_build *b = bd->b;
	uint64_t first = b->scans.n;
	struct blockref *ref;

	TRY(build_scans(b, src));
	for (uint64_t i = first; i < b->scans.n; i++) {
		uint64_t bytes = b->scans.v[i].end - b->scans.v[i].begin + 8192;
		ref = bd->tasks.n ? &bd->tasks.v[bd->tasks.n - 1] : NULL;
		if (ref && ref->scan && ref->rank == rank && ref->first + ref->count == i &&
		    bd->scan_bytes + bytes <= task_bytes_of(b)) {
			ref->count++;
			bd->scan_bytes += bytes;
			continue;
		}
		TRY(vec_push(&bd->tasks, &ref));
		*ref = (struct blockref){ i, 1, rank, true };
		bd->scan_bytes = bytes;
	}
	return OK;
}

/* The sources of a tensor's chunks, just before they are copied: what is checked is still in the page cache then. */
static FALLIBLE enum err scan_tensor(struct builder *bd, const struct sd_tensor *t)
{
	const struct load_plan *p = bd->t->pieces;

	for (uint64_t c = t->first_chunk; bd->t->check_sources && c < t->first_chunk + t->chunk_count; c++)
		for (uint64_t k = p->first[c]; k < p->first[c + 1]; k++)
			TRY(scan_source(bd, bd->t->first_src + p->sources[k], bd->t->sd->chunks[c].rank));
	return OK;
}

static FALLIBLE enum err scan_others(struct builder *bd)
{
	const struct build_target *t = bd->t;

	for (uint64_t i = 0; t->check_sources && i < t->sd->value_count; i++)
		if (t->value_src[i] != UINT32_MAX)
			TRY(scan_source(bd, t->value_src[i], t->sd->values[i].rank));
	for (uint32_t i = 0; i < t->replica_count; i++) {
		uint32_t src = t->first_replica + i;
		TRY(scan_source(bd, src, bd->b->srcs.v[src].rank));
	}
	return OK;
}

static uint64_t page_up(uint64_t n)
{
	return (n + PAGE - 1) & ~(uint64_t)(PAGE - 1);
}

/* A part and a block of its own for each piece of a large payload. */
static FALLIBLE enum err cut_large(struct builder *bd, uint32_t dst, uint32_t rank)
{
	struct run_build *b = bd->b;
	uint64_t bytes = b->dsts.v[dst].payload_bytes;

	TRY(build_room(b->parts.n, bytes / task_bytes_of(b) + 1));
	for (uint64_t at = 0; at < bytes; at += task_bytes_of(b)) {
		uint64_t end = num_min(at + task_bytes_of(b), bytes), first = b->blocks.n;
		const struct run_dst *d = &b->dsts.v[dst];
		TRY(add_block(b, d->file, d->offset + d->payload_off + at, page_up(end - at)));
		TRY(block_part(b, b->parts.n));
		TRY(add_part(b, dst, at, end));
		TRY(add_task(bd, first, rank));
	}
	return OK;
}

/* ------------------------------------------------------------------------------------------------------- groups */

static uint64_t row_bytes(const struct run_build *b, const struct run_dst *d)
{
	int64_t rows = b->dims.v[d->dims_at + d->ndim];

	return d->payload_bytes / (uint64_t)rows;
}

/* Target chunks [first, first + n) of one tensor that hold the same rows: filled side by side, a few rows at a time, so that the
 * sources are read once. Cuts are moved down to page boundaries of each payload. */
static FALLIBLE enum err cut_group(struct builder *bd, const uint32_t *dsts, uint32_t n, uint32_t rank)
{
	struct run_build *b = bd->b;
	uint64_t all_row = 0, rows = (uint64_t)b->dims.v[b->dsts.v[dsts[0]].dims_at + b->dsts.v[dsts[0]].ndim];

	for (uint32_t i = 0; i < n; i++)
		all_row += row_bytes(b, &b->dsts.v[dsts[i]]);
	uint64_t step = num_max(task_bytes_of(b) / all_row, 1), steps = num_div_up(rows, step);
	TRY(build_room(b->parts.n, steps));
	for (uint32_t i = 0; i < n; i++) {
		uint64_t row = row_bytes(b, &b->dsts.v[dsts[i]]), at = 0;
		for (uint64_t k = 1; k <= steps; k++) {
			uint64_t bytes = b->dsts.v[dsts[i]].payload_bytes;
			uint64_t end = k == steps ? bytes : (k * step * row) & ~(uint64_t)(PAGE - 1);
			TRY(add_part(b, dsts[i], at, end));
			at = end;
		}
	}
	for (uint64_t k = 0; k < steps; k++) {
		uint64_t first = b->blocks.n;
		for (uint32_t i = 0; i < n; i++) {
			const struct run_dst *d = &b->dsts.v[dsts[i]];
			const struct run_part *p = &b->parts.v[d->first_part + k];
			TRY(add_block(b, d->file, d->offset + d->payload_off + p->begin, page_up(p->end - p->begin)));
			TRY(block_part(b, d->first_part + k));
		}
		TRY(add_task(bd, first, rank));
	}
	return OK;
}

static bool same_rows(const struct sdict *sd, uint64_t a, uint64_t b)
{
	uint32_t n = sd->tensors[sd->chunks[a].tensor].ndim;

	return sd->chunks[a].dims[0] == sd->chunks[b].dims[0] && sd->chunks[a].dims[n] == sd->chunks[b].dims[n];
}

struct by_row {
	int64_t offset, size;
	uint32_t chunk;
};

static int compare_rows(const void *a, const void *b)
{
	const struct by_row *x = a, *y = b;

	if (x->offset != y->offset)
		return x->offset < y->offset ? -1 : 1;
	if (x->size != y->size)
		return x->size < y->size ? -1 : 1;
	return x->chunk < y->chunk ? -1 : 1;
}

/* Every member of a group may need a page more than its share. */
static uint32_t group_max(const struct run_build *b)
{
	return (uint32_t)num_min(BUILD_GROUP_MAX, task_bytes_of(b) / (8 * PAGE));
}

/* Cuts all large chunks of a tensor: those with the same rows in groups if their rows fit a task, others one by one. */
static FALLIBLE enum err cut_tensor(struct builder *bd, const struct sd_tensor *t)
{
	const struct sdict *sd = bd->t->sd;
	const struct run_build *b = bd->b;
	uint64_t n = 0;
	CLEANUP(mem_free_ptr) struct by_row *rows = mem_zalloc(t->chunk_count, sizeof *rows);
	uint32_t group[BUILD_GROUP_MAX];

	if (!rows)
		return ERR(NO_MEMORY, "no memory for %ju chunks", (uintmax_t)t->chunk_count);
	for (uint64_t c = t->first_chunk; c < t->first_chunk + t->chunk_count; c++)
		if (!b->dsts.v[bd->chunk_dst[c]].small)
			rows[n++] = (struct by_row){ sd->chunks[c].dims[0], sd->chunks[c].dims[t->ndim], (uint32_t)c };
	qsort(rows, n, sizeof *rows, compare_rows);
	for (uint64_t i = 0; i < n;) {
		uint32_t m = 0, rank = sd->chunks[rows[i].chunk].rank;
		uint64_t all_row = 0;
		do {
			uint32_t dst = bd->chunk_dst[rows[i + m].chunk];
			group[m++] = dst;
			all_row += row_bytes(b, &b->dsts.v[dst]);
		} while (i + m < n && m < group_max(b) && same_rows(sd, rows[i].chunk, rows[i + m].chunk));
		if (m > 1 && all_row <= task_bytes_of(b) && !bd->t->local) /* a task is of one host */
			TRY(cut_group(bd, group, m, rank));
		else
			for (uint32_t k = 0; k < m; k++)
				TRY(cut_large(bd, group[k], b->dsts.v[group[k]].rank));
		i += m;
	}
	return OK;
}

/* ---------------------------------------------------------------------------------------------------------- dcp */

static FALLIBLE enum err lay_out(const struct build_target *target, struct item *it)
{
	const struct sdict *sd = target->sd;

	if (it->is_value) {
		const struct sd_value *v = &sd->values[it->index];
		it->bytes = v->kind == SD_VALUE_INLINE ? v->bytes.n : v->loc.length;
		it->small = it->bytes <= BUILD_SMALL_BYTES;
		it->layout = (struct item_layout){ 0, it->bytes, it->bytes, it->bytes };
		return OK;
	}
	const struct sd_chunk *c = &sd->chunks[it->index];
	const struct sd_tensor *t = &sd->tensors[c->tensor];
	TRY(chunk_bytes(sd, c, &it->bytes));
	it->small = it->bytes <= BUILD_SMALL_BYTES;
	it->bare = target->planned && target->planned->chunk_raw[it->index];
	it->layout = (struct item_layout){ 0, it->bytes, it->bytes, it->bytes };
	if (it->bare)
		return OK;
	enum err e = item_layout_tensor(t->dtype, t->ndim, sd_sizes(c, t->ndim), it->small ? ITEM_ALIGN_SMALL : PAGE,
					&it->layout);
	return err_at_fqn(e, t->fqn.p, t->fqn.n);
}

static FALLIBLE enum err push_item(struct builder *bd, bool is_value, uint64_t index)
{
	struct item *it;

	TRY(vec_push(&bd->items, &it));
	it->is_value = is_value;
	it->index = (uint32_t)index;
	return lay_out(bd->t, it);
}

/* Small items one behind the other, in blocks that are whole pages. */
static FALLIBLE enum err place_small(struct builder *bd, struct item **items, uint64_t n, uint32_t file, uint32_t rank,
				     uint64_t *cursor)
{
	struct run_build *b = bd->b;
	uint64_t begin = *cursor, at = *cursor, first = 0;
	bool open = false;

	for (uint64_t i = 0; i < n; i++) {
		struct item *it = items[i];
		uint64_t length = it->layout.length;
		if (!it->small)
			continue;
		if (open && at + length - begin > task_bytes_of(b)) {
			b->blocks.v[first].bytes = page_up(at - begin);
			TRY(add_task(bd, first, rank));
			begin = at = page_up(at);
			open = false;
		}
		if (!open) {
			first = b->blocks.n;
			TRY(add_block(b, file, begin, 0));
			open = true;
		}
		TRY(add_dst(bd, it, file, at));
		TRY(block_part(b, b->parts.n));
		TRY(add_part(b, it->dst, 0, it->bytes));
		at = (at + length + ITEM_ALIGN_SMALL - 1) & ~(uint64_t)(ITEM_ALIGN_SMALL - 1);
	}
	if (open) {
		b->blocks.v[first].bytes = page_up(at - begin);
		TRY(add_task(bd, first, rank));
		at = page_up(at);
	}
	*cursor = at;
	return OK;
}

/* Large items each from a page on. Their blocks come later (cut_tensor), values' at once. */
static FALLIBLE enum err place_large(struct builder *bd, struct item **items, uint64_t n, uint32_t file, uint32_t rank,
				     uint64_t *cursor)
{
	for (uint64_t i = 0; i < n; i++) {
		struct item *it = items[i];
		uint64_t end;
		if (it->small)
			continue;
		TRY(add_dst(bd, it, file, *cursor));
		TRY(num_add(*cursor, page_up(it->layout.length), &end));
		*cursor = end;
		if (it->is_value)
			TRY(cut_large(bd, it->dst, rank));
		else if (!it->bare)
			atomic_fetch_add(&bd->b->files.v[file].blocks_left, 1); /* its head and tail */
	}
	return OK;
}

static uint64_t item_end(const struct builder *bd, const struct item *it)
{
	const struct run_dst *d = &bd->b->dsts.v[it->dst];

	return d->offset + d->length;
}

static FALLIBLE enum err place_file(struct builder *bd, struct item **items, uint64_t n, uint32_t rank, struct str name, bool exact)
{
	uint32_t file;
	uint64_t cursor = 0;

	TRY(run_add_file(bd->b, RUN_FILE_TARGET, bd->t->dir, name, 0, &file));
	bd->b->files.v[file].rank = rank;
	bd->b->files.v[file].direct = bd->t->direct;
	bd->b->files.v[file].in_memory = bd->t->in_memory;
	TRY(place_small(bd, items, n, file, rank, &cursor));
	TRY(place_large(bd, items, n, file, rank, &cursor));
	for (uint64_t i = 0; exact && i < n; i++) /* the last one's padding is cut off in the end */
		if (page_up(item_end(bd, items[i])) == cursor)
			cursor = item_end(bd, items[i]);
	bd->b->files.v[file].bytes = cursor;
	return num_add(bd->t->bytes, cursor, &bd->t->bytes);
}

static int larger_first(const void *a, const void *b)
{
	const struct item *x = *(struct item *const *)a, *y = *(struct item *const *)b;

	if (x->is_value != y->is_value)
		return x->is_value ? -1 : 1;
	if (x->bytes != y->bytes)
		return x->bytes > y->bytes ? -1 : 1;
	return x->index < y->index ? -1 : x->index > y->index;
}

/* Splits a rank's items over its files: largest first, each to the file with the least bytes so far. */
static FALLIBLE enum err place_rank(struct builder *bd, uint32_t rank)
{
	uint64_t n = bd->items.n;
	uint32_t files = bd->t->files_per_rank;
	CLEANUP(mem_free_ptr) struct item **sorted = mem_zalloc(n, sizeof *sorted);
	CLEANUP(mem_free_ptr) struct item **bucket = mem_zalloc(n, sizeof *bucket);
	CLEANUP(mem_free_ptr) uint64_t *sums = mem_zalloc(files, sizeof *sums);
	CLEANUP(mem_free_ptr) uint32_t *choice = mem_zalloc(n, sizeof *choice);

	if (!sorted || !bucket || !sums || !choice)
		return ERR(NO_MEMORY, "no memory for %ju items", (uintmax_t)n);
	for (uint64_t i = 0; i < n; i++)
		sorted[i] = &bd->items.v[i];
	if (files > 1)
		qsort(sorted, n, sizeof *sorted, larger_first);
	for (uint64_t i = 0; i < n; i++) {
		uint32_t best = 0;
		for (uint32_t f = 1; f < files; f++)
			if (sums[f] < sums[best])
				best = f;
		sums[best] += sorted[i]->bytes + 1;
		choice[i] = best;
	}
	for (uint32_t f = 0; f < files; f++) {
		uint64_t m = 0;
		for (uint64_t i = 0; i < n; i++)
			if (choice[i] == f)
				bucket[m++] = sorted[i];
		char name[FORMAT_FILE_MAX];
		format_dcp_payload(rank, f, name);
		TRY(place_file(bd, bucket, m, rank, str_of(name), false));
	}
	return OK;
}

static FALLIBLE enum err sort_by_rank(const struct build_target *t, uint64_t **order_out, uint64_t **first_out)
{
	const struct sdict *sd = t->sd;
	uint64_t n = sd->value_count + sd->chunk_count, w = t->world_size;
	uint64_t *first = mem_zalloc(w + 2, sizeof *first), *order = mem_zalloc(n, sizeof *order);

	*first_out = first;
	*order_out = order;
	if (!first || !order)
		return ERR(NO_MEMORY, "no memory for %ju items", (uintmax_t)n);
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

/* Tasks of ranks that are elsewhere are done there. */
static void drop_tasks(struct builder *bd)
{
	uint64_t n = 0;

	for (uint64_t i = 0; i < bd->tasks.n; i++)
		if (bd->t->local[bd->tasks.v[i].rank])
			bd->tasks.v[n++] = bd->tasks.v[i];
	bd->tasks.n = n;
}

static bool is_local(const struct build_target *t, uint32_t rank)
{
	return !t->local || t->local[rank];
}

static FALLIBLE enum err make_tasks(struct builder *bd)
{
	struct run_build *b = bd->b;
	uint32_t w = bd->t->world_size;
	struct run_task *task;

	if (bd->t->local)
		drop_tasks(bd);

	TRY(vec_reserve(&b->ranks, w));
	memset(b->ranks.v, 0, w * sizeof *b->ranks.v);
	b->ranks.n = w;
	for (uint64_t i = 0; i < bd->tasks.n; i++)
		b->ranks.v[bd->tasks.v[i].rank].task_count++;
	uint64_t at = 0;
	for (uint32_t r = 0; r < w; r++) {
		b->ranks.v[r].rank = r;
		b->ranks.v[r].first_task = at;
		at += b->ranks.v[r].task_count;
		b->ranks.v[r].task_count = 0;
	}
	for (uint64_t i = 0; i < bd->tasks.n; i++)
		TRY(vec_push(&b->tasks, &task));
	for (uint64_t i = 0; i < bd->tasks.n; i++) {
		const struct blockref *ref = &bd->tasks.v[i];
		struct run_rank *k = &b->ranks.v[ref->rank];
		b->tasks.v[k->first_task + k->task_count++] = (struct run_task){
			.first = ref->first, .count = ref->count, .rank_index = ref->rank, .scan = ref->scan };
	}
	for (uint64_t i = 0; i < b->parts.n; i++) {
		uint32_t rank = b->dsts.v[b->parts.v[i].dst].rank;
		if (is_local(bd->t, rank))
			b->ranks.v[rank].bytes_total += b->parts.v[i].end - b->parts.v[i].begin;
	}
	return OK;
}

static FALLIBLE enum err open_builder(struct builder *bd, struct run_build *b, struct build_target *t)
{
	*bd = (struct builder){ .b = b, .t = t };
	bd->chunk_dst = mem_zalloc(t->sd->chunk_count, sizeof *bd->chunk_dst);
	t->chunk_places = mem_zalloc(t->sd->chunk_count, sizeof *t->chunk_places);
	t->value_places = mem_zalloc(t->sd->value_count, sizeof *t->value_places);
	if (!bd->chunk_dst || !t->chunk_places || !t->value_places)
		return ERR(NO_MEMORY, "no memory for %ju chunks", (uintmax_t)t->sd->chunk_count);
	return OK;
}

static void close_builder(struct builder *bd)
{
	vec_free(&bd->items);
	vec_free(&bd->tasks);
	mem_free(bd->chunk_dst);
}

/* Every item in the file that was chosen for it, in the order in which they are listed. */
static FALLIBLE enum err place_planned(struct builder *bd)
{
	const struct build_planned *l = bd->t->planned;
	uint64_t n = bd->t->sd->chunk_count;
	CLEANUP(mem_free_ptr) struct item **bucket = mem_zalloc(n, sizeof *bucket);
	CLEANUP(mem_free_ptr) uint64_t *first = mem_zalloc((uint64_t)l->file_count + 2, sizeof *first);

	if (!bucket || !first)
		return ERR(NO_MEMORY, "no memory for %ju items", (uintmax_t)n);
	for (uint64_t i = 0; i < n; i++) {
		TRY(push_item(bd, false, i));
		first[l->chunk_file[i] + 2]++;
	}
	for (uint32_t f = 2; f < l->file_count + 2; f++)
		first[f] += first[f - 1];
	for (uint64_t i = 0; i < n; i++)
		bucket[first[l->chunk_file[i] + 1]++] = &bd->items.v[i];
	for (uint32_t f = 0; f < l->file_count; f++)
		TRY(place_file(bd, bucket + first[f], first[f + 1] - first[f], l->ranks[f], l->names[f], l->exact[f]));
	return OK;
}

static FALLIBLE enum err place_ranks(struct builder *bd)
{
	struct build_target *t = bd->t;
	CLEANUP(mem_free_ptr) uint64_t *order = NULL;
	CLEANUP(mem_free_ptr) uint64_t *first = NULL;

	TRY(sort_by_rank(t, &order, &first));
	for (uint32_t r = 0; r < t->world_size; r++) {
		bd->items.n = 0;
		for (uint64_t i = first[r]; i < first[r + 1]; i++) {
			bool is_value = order[i] < t->sd->value_count;
			TRY(push_item(bd, is_value, is_value ? order[i] : order[i] - t->sd->value_count));
		}
		TRY(place_rank(bd, r));
	}
	return OK;
}

static FALLIBLE enum err fill_dcp(struct builder *bd)
{
	struct build_target *t = bd->t;

	TRY(t->planned ? place_planned(bd) : place_ranks(bd));
	for (uint64_t i = 0; i < t->sd->tensor_count; i++) {
		TRY(scan_tensor(bd, &t->sd->tensors[i]));
		if (t->sd->tensors[i].ndim > 0)
			TRY(cut_tensor(bd, &t->sd->tensors[i]));
	}
	TRY(scan_others(bd));
	return make_tasks(bd);
}

enum err build_dcp(struct run_build *b, struct build_target *t)
{
	struct builder bd;
	enum err e = open_builder(&bd, b, t);

	b->opts.mode = RUN_WRITE_FILES;
	b->opts.task_bytes = t->task_bytes;
	if (!e)
		e = fill_dcp(&bd);
	close_builder(&bd);
	return e;
}
