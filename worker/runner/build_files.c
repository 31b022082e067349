/* build_files.c: a plan of target files (format/file_plan.h) as a run's tables: targets, and the blocks that fill them. */
#include <stdlib.h>

#include "base/num.h"
#include "io/tensor_sum.h"
#include "runner/build.h"

enum { PAGE = FILE_PLAN_PAGE };

struct blockref {
	uint64_t first;
	uint32_t count, rank;
	bool scan;
};

struct builder {
	struct run_build *b;
	struct build_target *t;
	struct file_plan plan;
	struct vec(struct blockref) tasks;     /* blocks are consecutive in each */
	uint32_t *chunk_dst;                   /* dst of each chunk, for groups */
	uint64_t *shape_at;                    /* per tensor: as in its dsts, once the first of them is there */
	uint64_t scan_bytes;                   /* in the latest scan task */
};

/* Of a block. */
static uint64_t task_bytes_of(const struct run_build *b)
{
	return b->opts.task_bytes;
}

/* Of a part, which has a digest of its own: readers check digests of no more bytes than a task of theirs has. */
static uint64_t part_bytes_of(const struct run_build *b)
{
	return num_min(b->opts.task_bytes, BUILD_TASK_BYTES);
}

/* ------------------------------------------------------------------------------------------------------- dsts */

/* Gives the dst its tensor's shape, so that the content of what is written to it is summed up; not where that is no tensor's (a delta,
 * blocks of a GGUF file) or is known later (items of a client's: content_want_items), nor where it would be dear. */
static FALLIBLE enum err add_shape(struct builder *bd, const struct sd_chunk *c, struct run_dst *d)
{
	const struct sd_tensor *t = &bd->t->sd->tensors[c->tensor];
	struct run_build *b = bd->b;
	uint64_t *at = &bd->shape_at[c->tensor];

	if (bd->t->delta || bd->t->given || d->q8_0 || t->blocks ||
	    !tensor_sum_is_cheap(t->ndim, c->dims, t->shape, dtype_bytes(t->dtype)))
		return OK;
	if (!*at) {
		TRY(vec_reserve(&b->dims, t->ndim));
		*at = 1 + b->dims.n;
		if (t->ndim)
			memcpy(b->dims.v + b->dims.n, t->shape, t->ndim * sizeof *t->shape);
		b->dims.n += t->ndim;
	}
	d->shape_at = *at;
	d->box_at = d->dims_at;
	return OK;
}

/* Takes its sources from the plan of the load. */
static FALLIBLE enum err add_chunk_dst(struct builder *bd, const struct file_plan_item *it, struct run_dst *d)
{
	const struct sdict *sd = bd->t->sd;
	const struct sd_chunk *c = &sd->chunks[it->index];
	const struct sd_tensor *t = &sd->tensors[c->tensor];
	const struct load_plan *p = bd->t->pieces;
	struct run_build *b = bd->b;

	d->kind = RUN_DST_TENSOR;
	d->dtype = (uint8_t)t->dtype;
	d->q8_0 = it->q8_0;
	d->ndim = t->ndim;
	d->rank = c->rank;
	d->fqn_len = (uint32_t)t->fqn.n;
	d->piece_count = (uint32_t)(p->first[it->index + 1] - p->first[it->index]);
	TRY(run_add_string(b, t->fqn, &d->fqn_at));
	TRY(run_add_dims(b, c->dims, t->ndim, &d->dims_at));
	TRY(add_shape(bd, c, d));
	TRY(vec_reserve(&b->pieces, d->piece_count));
	for (uint64_t k = p->first[it->index]; k < p->first[it->index + 1]; k++)
		b->pieces.v[b->pieces.n++] = bd->t->first_src + p->sources[k];
	bd->chunk_dst[it->index] = (uint32_t)(d - b->dsts.v);
	return OK;
}

/* ------------------------------------------------------------------------------------------------------- legs */

static enum dtype leg_dtype(const struct build_merge *m, enum dtype d)
{
	bool wide = m->wide || d == DT_FLOAT64 || d == DT_COMPLEX128;

	if (dtype_is_complex(d))
		return wide ? DT_COMPLEX128 : DT_COMPLEX64;
	return wide ? DT_FLOAT64 : DT_FLOAT32;
}

/* One checkpoint's elements of a chunk, as they are added up: in no file. */
static FALLIBLE enum err add_leg(struct builder *bd, uint32_t dst, uint32_t chunk, uint32_t leg)
{
	const struct build_merge *m = bd->t->merge;
	const struct load_plan *p = &m->plans[leg];
	struct run_build *b = bd->b;
	struct run_dst *d;

	TRY(vec_push(&b->dsts, &d));
	*d = b->dsts.v[dst];
	d->dtype = (uint8_t)leg_dtype(m, (enum dtype)d->dtype);
	d->file = UINT32_MAX;
	d->first_leg = d->small = 0;
	d->first_piece = b->pieces.n;
	d->piece_count = (uint32_t)(p->first[chunk + 1] - p->first[chunk]);
	TRY(vec_reserve(&b->pieces, d->piece_count));
	for (uint64_t k = p->first[chunk]; k < p->first[chunk + 1]; k++)
		b->pieces.v[b->pieces.n++] = m->first_src[leg] + p->sources[k];
	return OK;
}

static FALLIBLE enum err add_legs(struct builder *bd)
{
	const struct build_merge *m = bd->t->merge;
	struct run_build *b = bd->b;

	must(m->count <= RUN_LEGS_MAX);
	b->opts.leg_count = m->count;
	memcpy(b->opts.weights, m->weights, m->count * sizeof *m->weights);
	for (uint64_t c = 0; c < bd->t->sd->chunk_count; c++) {
		uint32_t dst = bd->chunk_dst[c], first = (uint32_t)b->dsts.n;
		if (m->chunk[c] == UINT32_MAX)
			continue;
		for (uint32_t i = 0; i < m->count; i++)
			TRY(add_leg(bd, dst, m->chunk[c], i));
		b->dsts.v[dst].first_leg = first;
		b->dsts.v[dst].piece_count = 0;
	}
	return OK;
}

static FALLIBLE enum err add_value_dst(struct builder *bd, const struct file_plan_item *it, struct run_dst *d)
{
	const struct sd_value *v = &bd->t->sd->values[it->index];
	uint32_t src = bd->t->value_src[it->index];
	uint32_t *piece;

	d->rank = v->rank;
	d->fqn_len = (uint32_t)v->fqn.n;
	TRY(run_add_string(bd->b, v->fqn, &d->fqn_at));
	if (src == UINT32_MAX) {
		d->inline_len = v->bytes.n;
		return run_add_string(bd->b, v->bytes, &d->inline_at);
	}
	TRY(vec_push(&bd->b->pieces, &piece));
	*piece = src;
	d->piece_count = 1;
	return OK;
}

static FALLIBLE enum err add_other_dst(struct builder *bd, const struct build_other *other, struct run_dst *d)
{
	uint32_t *piece;

	TRY(vec_push(&bd->b->pieces, &piece));
	*piece = other->src;
	d->piece_count = 1;
	return OK;
}

static FALLIBLE enum err add_dst(struct builder *bd, const struct file_plan_item *it, uint32_t file)
{
	struct run_build *b = bd->b;
	uint32_t dst = (uint32_t)b->dsts.n;
	const struct build_place place = { file, dst, it->offset, it->at.length };
	struct run_dst *d;

	TRY(vec_push(&b->dsts, &d));
	*d = (struct run_dst){ .kind = RUN_DST_RAW, .small = it->small, .bare = it->bare, .file = file, .offset = it->offset,
			       .rank = b->files.v[file].rank, .payload_off = it->at.payload_off,
			       .payload_bytes = it->at.payload_bytes, .tail_off = it->at.tail_off, .length = it->at.length,
			       .first_piece = b->pieces.n };
	switch (it->kind) {
	case FILE_PLAN_CHUNK:
		bd->t->chunk_places[it->index] = place;
		return add_chunk_dst(bd, it, d);
	case FILE_PLAN_VALUE:
		bd->t->value_places[it->index] = place;
		return add_value_dst(bd, it, d);
	case FILE_PLAN_OTHER:
		return add_other_dst(bd, &bd->t->others[it->index], d);
	default:
		d->inline_len = bd->plan.texts.v[it->index].n;
		return run_add_string(b, bd->plan.texts.v[it->index], &d->inline_at);
	}
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

/* A range of a payload as parts of the latest block: one at least. */
static FALLIBLE enum err add_range(struct run_build *b, uint32_t dst, uint64_t begin, uint64_t end)
{
	do {
		uint64_t stop = num_min(begin + part_bytes_of(b), end);
		TRY(block_part(b, b->parts.n));
		TRY(add_part(b, dst, begin, stop));
		begin = stop;
	} while (begin < end);
	return OK;
}

static FALLIBLE enum err add_task(struct builder *bd, uint64_t first_block, uint32_t rank)
{
	struct blockref *ref;

	TRY(vec_push(&bd->tasks, &ref));
	*ref = (struct blockref){ first_block, (uint32_t)(bd->b->blocks.n - first_block), rank, false };
	return OK;
}

/* May scan `i` be of one task with `first`? Where sources come through rings, both must be there at once. */
static bool is_near(const struct builder *bd, uint64_t first, uint64_t i)
{
	const struct run_scan *a = &bd->b->scans.v[first], *b = &bd->b->scans.v[i];
	const struct run_src *from = &bd->b->srcs.v[a->src], *to = &bd->b->srcs.v[b->src];

	return !bd->t->span_bytes || (from->file == to->file && to->offset + b->begin >= from->offset + a->begin &&
				      to->offset + b->end - from->offset - a->begin <= bd->t->span_bytes);
}

/* Scans of one source as tasks of `rank`; small ones join the scan task before them. */
static FALLIBLE enum err scan_source(struct builder *bd, uint32_t src, uint32_t rank)
{
	struct run_build *b = bd->b;
	uint64_t first = b->scans.n;
	struct blockref *ref;

	src = run_src_base(&b->srcs.v[src], src);
	if (!build_needs_scans(&b->srcs.v[src]))
		return OK;
	TRY(build_scans(b, src));
	for (uint64_t i = first; i < b->scans.n; i++) {
		uint64_t bytes = b->scans.v[i].end - b->scans.v[i].begin + 8192;
		ref = bd->tasks.n ? &bd->tasks.v[bd->tasks.n - 1] : NULL;
		if (ref && ref->scan && ref->rank == rank && ref->first + ref->count == i &&
		    bd->scan_bytes + bytes <= task_bytes_of(b) && is_near(bd, ref->first, i)) {
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

static FALLIBLE enum err sum_chunk(struct builder *bd, struct build_sums *s, uint64_t chunk)
{
	const struct build_merge *m = bd->t->merge;
	bool is_average = m && m->chunk[chunk] != UINT32_MAX;
	uint64_t at = is_average ? m->chunk[chunk] : chunk;

	for (uint32_t i = 0; i < (is_average ? m->count : 1); i++) {
		const struct load_plan *p = is_average ? &m->plans[i] : bd->t->pieces;
		uint32_t first = is_average ? m->first_src[i] : bd->t->first_src;
		for (uint64_t k = p->first[at]; k < p->first[at + 1]; k++)
			TRY(build_sums_add(bd->b, s, first + p->sources[k], bd->t->sd->chunks[chunk].dims));
	}
	return OK;
}

static FALLIBLE enum err sum_item(struct builder *bd, struct build_sums *s, const struct file_plan_item *it)
{
	if (it->kind == FILE_PLAN_CHUNK && !it->q8_0) /* parts of Q8_0 read elements twice */
		return sum_chunk(bd, s, it->index);
	if (it->kind == FILE_PLAN_VALUE && bd->t->value_src[it->index] != UINT32_MAX)
		build_sums_add_raw(bd->b, s, bd->t->value_src[it->index]);
	return OK;
}

/* Finds the sources that are compared as they are copied. None where blocks take columns of the source, element by element, nor where
 * other hosts take parts. */
static FALLIBLE enum err sum_sources(struct builder *bd)
{
	const struct build_target *t = bd->t;
	struct build_sums s;

	if (!t->check_sources || t->local || t->is_wide)
		return OK;
	enum err e = build_sums_begin(bd->b, &s);
	for (uint64_t i = 0; !e && i < bd->plan.items.n; i++)
		e = sum_item(bd, &s, &bd->plan.items.v[i]);
	e = e ?: build_sums_end(bd->b, &s);
	build_sums_free(&s);
	return e;
}

/* Of a chunk that is an average: the sources of all checkpoints. */
static FALLIBLE enum err scan_legs(struct builder *bd, uint64_t chunk)
{
	const struct build_merge *m = bd->t->merge;

	for (uint32_t i = 0; i < m->count; i++)
		for (uint64_t k = m->plans[i].first[m->chunk[chunk]]; k < m->plans[i].first[m->chunk[chunk] + 1]; k++)
			TRY(scan_source(bd, m->first_src[i] + m->plans[i].sources[k], bd->t->sd->chunks[chunk].rank));
	return OK;
}

/* The sources of a tensor's chunks, unless it is written as another one. */
static FALLIBLE enum err scan_tensor(struct builder *bd, const struct sd_tensor *t)
{
	const struct load_plan *p = bd->t->pieces;

	for (uint64_t c = t->first_chunk; bd->t->check_sources && !t->tied_to && c < t->first_chunk + t->chunk_count; c++) {
		if (bd->t->merge && bd->t->merge->chunk[c] != UINT32_MAX) {
			TRY(scan_legs(bd, c));
			continue;
		}
		for (uint64_t k = p->first[c]; k < p->first[c + 1]; k++)
			TRY(scan_source(bd, bd->t->first_src + p->sources[k], bd->t->sd->chunks[c].rank));
	}
	return OK;
}

static FALLIBLE enum err scan_others(struct builder *bd)
{
	const struct build_target *t = bd->t;

	for (uint64_t i = 0; t->check_sources && i < t->sd->value_count; i++)
		if (t->value_src[i] != UINT32_MAX)
			TRY(scan_source(bd, t->value_src[i], t->sd->values[i].rank));
	for (uint64_t i = 0; t->check_sources && i < t->other_count; i++)
		if (bd->b->srcs.v[t->others[i].src].digest_count)
			TRY(scan_source(bd, t->others[i].src, 0));
	for (uint64_t i = 0; i < bd->b->srcs.n; i++)
		if (build_is_rest(&bd->b->srcs.v[i]))
			TRY(scan_source(bd, (uint32_t)i, 0));
	for (uint32_t i = 0; i < t->replica_count; i++) {
		uint32_t src = t->first_replica + i;
		TRY(scan_source(bd, src, bd->b->srcs.v[src].rank));
	}
	return OK;
}

/* Blocks of their own for the pieces of a large payload. */
static FALLIBLE enum err cut_large(struct builder *bd, uint32_t dst, uint32_t rank)
{
	struct run_build *b = bd->b;
	uint64_t bytes = b->dsts.v[dst].payload_bytes;

	TRY(build_room(b->parts.n, bytes / part_bytes_of(b) + 1));
	for (uint64_t at = 0; at < bytes; at += task_bytes_of(b)) {
		uint64_t end = num_min(at + task_bytes_of(b), bytes), first = b->blocks.n;
		const struct run_dst *d = &b->dsts.v[dst];
		TRY(add_block(b, d->file, d->offset + d->payload_off + at, file_plan_page_up(end - at)));
		TRY(add_range(b, dst, at, end));
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
	uint64_t step = num_max(part_bytes_of(b) / all_row, 1), steps = num_div_up(rows, step);
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
			TRY(add_block(b, d->file, d->offset + d->payload_off + p->begin, file_plan_page_up(p->end - p->begin)));
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

	return num_order(x->offset, y->offset) ?: num_order(x->size, y->size) ?: num_order(x->chunk, y->chunk);
}

/* Every member of a group may need a page more than its share. */
static uint32_t group_max(const struct run_build *b)
{
	return (uint32_t)num_min(BUILD_GROUP_MAX, part_bytes_of(b) / (8 * PAGE));
}

/* Cuts all large chunks of a tensor: those with the same rows in groups if their rows fit a task, others one by one. */
static FALLIBLE enum err cut_tensor(struct builder *bd, const struct sd_tensor *t)
{
	const struct sdict *sd = bd->t->sd;
	const struct run_build *b = bd->b;
	uint64_t n = 0;
	CLEANUP(mem_free_ptr) struct by_row *rows = mem_zalloc(t->chunk_count, sizeof *rows);
	uint32_t group[BUILD_GROUP_MAX];

	NEED(rows, "no memory for %ju chunks", (uintmax_t)t->chunk_count);
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
		bool of_one = bd->t->local || bd->t->span_bytes; /* a task is of one host, and of one ring */
		if (m > 1 && all_row <= part_bytes_of(b) && !of_one && !bd->t->is_wide)
			TRY(cut_group(bd, group, m, rank));
		else
			for (uint32_t k = 0; k < m; k++)
				TRY(cut_large(bd, group[k], b->dsts.v[group[k]].rank));
		i += m;
	}
	return OK;
}

/* ------------------------------------------------------------------------------------------------------- files */

static FALLIBLE enum err end_block(struct builder *bd, uint64_t block, uint64_t end, uint32_t rank)
{
	struct run_block *k = &bd->b->blocks.v[block];

	k->bytes = file_plan_page_up(end - k->offset);
	return add_task(bd, block, rank);
}

/* Small items share the block that the first of them opens. */
static FALLIBLE enum err fill_small(struct builder *bd, const struct file_plan_file *f, uint32_t file, uint32_t first_dst)
{
	struct run_build *b = bd->b;
	uint64_t block = UINT64_MAX, end = 0;

	for (uint64_t i = 0; i < f->item_count; i++) {
		const struct file_plan_item *it = &bd->plan.items.v[f->first_item + i];
		if (!it->small)
			continue;
		if (it->opens && block != UINT64_MAX)
			TRY(end_block(bd, block, end, f->rank));
		if (it->opens) {
			block = b->blocks.n;
			TRY(add_block(b, file, it->offset, 0));
		}
		TRY(block_part(b, b->parts.n));
		TRY(add_part(b, first_dst + (uint32_t)i, 0, it->at.payload_bytes));
		end = it->offset + it->at.length;
	}
	return block != UINT64_MAX ? end_block(bd, block, end, f->rank) : OK;
}

/* The blocks of large chunks come later (cut_tensor), those of values at once. */
static FALLIBLE enum err fill_large(struct builder *bd, const struct file_plan_file *f, uint32_t file, uint32_t first_dst)
{
	for (uint64_t i = 0; i < f->item_count; i++) {
		const struct file_plan_item *it = &bd->plan.items.v[f->first_item + i];
		if (it->small)
			continue;
		if (it->kind != FILE_PLAN_CHUNK)
			TRY(cut_large(bd, first_dst + (uint32_t)i, f->rank));
		else if (!it->bare)
			atomic_fetch_add(&bd->b->files.v[file].blocks_left, 1); /* its head and tail */
	}
	return OK;
}

/* Blocks of a task's size over the whole file, each with the parts of the targets that it touches. */
static FALLIBLE enum err fill_stream(struct builder *bd, const struct file_plan_file *f, uint32_t file, uint32_t first_dst)
{
	struct run_build *b = bd->b;
	uint32_t dst = first_dst, end = (uint32_t)b->dsts.n;

	TRY(build_room(b->parts.n, f->bytes / part_bytes_of(b) + 1));
	for (uint64_t off = 0; off < f->bytes; off += task_bytes_of(b)) {
		uint64_t stop = num_min(off + task_bytes_of(b), f->bytes), block = b->blocks.n;
		TRY(add_block(b, file, off, b->files.v[file].direct ? file_plan_page_up(stop - off) : stop - off));
		for (; dst < end && b->dsts.v[dst].offset < stop; dst++) {
			const struct run_dst *d = &b->dsts.v[dst];
			uint64_t begin = num_max(off, d->offset) - d->offset, last = num_min(stop - d->offset, d->payload_bytes);
			bool ends = last == d->payload_bytes;
			TRY(add_range(b, dst, begin, last));
			if (!ends)
				break;
		}
		TRY(add_task(bd, block, f->rank));
	}
	return OK;
}

static FALLIBLE enum err add_file(struct builder *bd, const struct file_plan_file *f)
{
	struct run_build *b = bd->b;
	uint32_t file, first_dst = (uint32_t)b->dsts.n;

	TRY(run_add_file(b, RUN_FILE_TARGET, bd->t->dir, f->name, f->bytes, &file));
	b->files.v[file].rank = f->rank;
	b->files.v[file].direct = bd->t->direct;
	b->files.v[file].in_memory = bd->t->in_memory;
	TRY(num_add(bd->t->bytes, f->bytes, &bd->t->bytes));
	for (uint64_t i = 0; i < f->item_count; i++)
		TRY(add_dst(bd, &bd->plan.items.v[f->first_item + i], file));
	if (bd->plan.stream)
		return fill_stream(bd, f, file, first_dst);
	TRY(fill_small(bd, f, file, first_dst));
	return fill_large(bd, f, file, first_dst);
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
	each(ref, bd->tasks.v, bd->tasks.n) {
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
	bd->shape_at = mem_zalloc(t->sd->tensor_count, sizeof *bd->shape_at);
	if (!bd->chunk_dst || !bd->shape_at || !t->chunk_places || !t->value_places)
		return ERR(NO_MEMORY, "no memory for %ju chunks", (uintmax_t)t->sd->chunk_count);
	return OK;
}

static void close_builder(struct builder *bd)
{
	file_plan_free(&bd->plan);
	vec_free(&bd->tasks);
	mem_free(bd->chunk_dst);
	mem_free(bd->shape_at);
}

static FALLIBLE enum err add_files(struct builder *bd)
{
	uint32_t file = (uint32_t)bd->b->files.n, dst = (uint32_t)bd->b->dsts.n;
	struct build_crc *crc;

	for (uint64_t i = 0; i < bd->plan.files.n; i++)
		TRY(add_file(bd, &bd->plan.files.v[i]));
	if (bd->plan.crcs.n)
		bd->b->files.v[file].late = true;
	for (uint64_t i = 0; i < bd->plan.crcs.n; i++) { /* the first file's items are targets in their order */
		const struct file_plan_crc *c = &bd->plan.crcs.v[i];
		TRY(vec_push(&bd->t->crcs, &crc));
		*crc = (struct build_crc){ c->offset, file, dst + c->item, c->leading_crc32 };
	}
	return OK;
}

/* Files that no format knows, behind those of the format: rank 0 copies them. */
static FALLIBLE enum err plan_others(struct builder *bd)
{
	struct file_plan *p = &bd->plan;
	struct file_plan_file *file;
	struct file_plan_item *it;

	for (uint64_t i = 0; i < bd->t->other_count; i++) {
		const struct build_other *o = &bd->t->others[i];
		bool small = o->bytes <= BUILD_SMALL_BYTES;
		TRY(vec_push(&p->files, &file));
		*file = (struct file_plan_file){ .name = o->name, .bytes = o->bytes, .first_item = p->items.n, .item_count = o->bytes > 0 };
		if (!o->bytes)
			continue;
		TRY(vec_push(&p->items, &it));
		*it = (struct file_plan_item){ .kind = FILE_PLAN_OTHER, .bare = true, .small = small, .opens = small, .index = (uint32_t)i,
					       .at = { 0, o->bytes, o->bytes, o->bytes } };
	}
	return OK;
}

/* Sources that scans check are checked just before they are copied: they are still in the page cache then. In a stream the copies of a
 * tensor have no task of their own: all scans come first. */
static FALLIBLE enum err fill(struct builder *bd)
{
	const struct sdict *sd = bd->t->sd;

	TRY(sum_sources(bd));
	if (!bd->plan.stream)
		TRY(add_files(bd));
	for (uint64_t i = 0; i < sd->tensor_count; i++) {
		TRY(scan_tensor(bd, &sd->tensors[i]));
		if (sd->tensors[i].ndim > 0 && !bd->plan.stream)
			TRY(cut_tensor(bd, &sd->tensors[i]));
	}
	TRY(scan_others(bd));
	if (bd->plan.stream)
		TRY(add_files(bd));
	TRY(bd->t->merge ? add_legs(bd) : OK);
	return make_tasks(bd);
}

enum err build_target_files(struct run_build *b, struct build_target *t)
{
	const struct file_plan_target target = { .sd = t->sd, .world_size = t->world_size, .files_per_rank = t->files_per_rank,
						 .number = t->number, .cut = t->cut,
						 .block_bytes = (uint32_t)num_min(t->task_bytes, BUILD_TASK_BYTES),
						 .span_bytes = t->span_bytes, .max_file_bytes = t->max_file_bytes,
						 .file_name = t->file_name, .given = t->given, .gguf = t->gguf, .delta = t->delta,
						 .meta = t->meta, .meta_count = t->meta_count };
	struct builder bd;
	enum err e = open_builder(&bd, b, t);

	b->opts.mode = RUN_WRITE_FILES;
	b->opts.task_bytes = t->task_bytes;
	e = e ?: format_plan_files(t->format, &target, &bd.plan);
	e = e ?: plan_others(&bd);
	e = e ?: fill(&bd);
	close_builder(&bd);
	return e;
}
