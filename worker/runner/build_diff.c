/* build_diff.c: the tables of a run that compares two state dicts (see build.h). */
#include "base/num.h"
#include "runner/build.h"
#include "tensor/cast.h"

enum { DIFF_HALF = BUILD_TASK_BYTES / 2 };

struct pairs {
	struct run_build *b;
	const struct sdict *a;
	const struct load_plan *b_plan;
	uint32_t first_a, first_b;
	uint64_t cursor;               /* in the pack being made */
	bool open;
};

static uint64_t source_count(const struct pairs *p, uint64_t chunk)
{
	return p->b_plan->first[chunk + 1] - p->b_plan->first[chunk];
}

/* Run sources of B for a chunk of A. */
static uint32_t source_of(const struct pairs *p, uint64_t chunk, uint64_t k)
{
	return p->first_b + p->b_plan->sources[p->b_plan->first[chunk] + k];
}

/* The dtype in which both sides' elements are compared: where theirs differ, one that holds both. */
static FALLIBLE enum err compared_dtype(const struct pairs *p, uint64_t chunk, enum dtype *out)
{
	enum dtype a = (enum dtype)p->b->srcs.v[p->first_a + chunk].dtype;
	enum dtype b = source_count(p, chunk) ? (enum dtype)p->b->srcs.v[source_of(p, chunk, 0)].dtype : a;

	*out = a == b ? a : dtype_is_complex(a) || dtype_is_complex(b) ? DT_COMPLEX128 : DT_FLOAT64;
	TRY(cast_check(*out, a));
	return cast_check(*out, b);
}

static FALLIBLE enum err add_side(struct pairs *p, uint64_t chunk, enum dtype dtype, uint64_t bytes, uint64_t offset, bool second)
{
	const struct sd_chunk *c = &p->a->chunks[chunk];
	const struct run_src *src = &p->b->srcs.v[p->first_a + chunk];
	uint64_t n = second ? source_count(p, chunk) : 1;
	struct run_dst *d;

	TRY(vec_push(&p->b->dsts, &d));
	*d = (struct run_dst){ .kind = RUN_DST_TENSOR, .dtype = (uint8_t)dtype, .bare = true, .small = true,
			       .file = src->file, .ndim = src->ndim, .rank = c->rank, .offset = offset,
			       .payload_bytes = bytes, .length = bytes, .fqn_at = src->fqn_at, .fqn_len = src->fqn_len,
			       .dims_at = src->dims_at, .first_piece = p->b->pieces.n, .piece_count = (uint32_t)n };
	TRY(vec_reserve(&p->b->pieces, n));
	for (uint64_t k = 0; k < n; k++)
		p->b->pieces.v[p->b->pieces.n++] = second ? source_of(p, chunk, k) : (uint32_t)(p->first_a + chunk);
	return OK;
}

static FALLIBLE enum err add_pair_parts(struct pairs *p, uint32_t dst_a, uint64_t begin, uint64_t end)
{
	struct stats_diff *diff;
	struct run_part *part;
	uint64_t *at;

	for (uint32_t side = 0; side < 2; side++) {
		TRY(vec_push(&p->b->block_parts, &at));
		*at = p->b->parts.n;
		p->b->blocks.v[p->b->blocks.n - 1].part_count++;
		TRY(vec_push(&p->b->parts, &part));
		*part = (struct run_part){ .dst = dst_a + side, .begin = begin, .end = end };
	}
	TRY(vec_push(&p->b->diffs, &diff));
	*diff = (struct stats_diff){ 0 };
	p->b->ranks.v[0].bytes_total += end - begin;
	return OK;
}

static FALLIBLE enum err open_block(struct pairs *p, uint32_t file, uint64_t offset, uint64_t bytes)
{
	struct run_block *k;
	struct run_task *task;

	TRY(vec_push(&p->b->tasks, &task));
	*task = (struct run_task){ .first = p->b->blocks.n, .count = 1 };
	TRY(vec_push(&p->b->blocks, &k));
	*k = (struct run_block){ .file = file, .offset = offset, .bytes = bytes, .first_part = p->b->block_parts.n };
	return OK;
}

/* ------------------------------------------------------------------------------------------------------- checks */

/* All that is compared is checked: a damaged byte is no difference. Most sources are checked as they are compared; the others, just before,
 * so that they are in the page cache then. Segments need no check. */
static FALLIBLE enum err scan_source(struct run_build *b, uint32_t src)
{
	const struct run_src *s = &b->srcs.v[src];
	uint64_t first = b->scans.n;
	struct run_task *task;

	if (!b->opts.verify || b->files.v[s->file].kind == RUN_FILE_SEGMENT || !build_needs_scans(s))
		return OK;
	TRY(build_scans(b, src));
	for (uint64_t i = first; i < b->scans.n; i++) {
		TRY(vec_push(&b->tasks, &task));
		*task = (struct run_task){ .first = i, .count = 1, .scan = true };
	}
	return OK;
}

static FALLIBLE enum err note_sums(struct pairs *p, struct build_sums *s)
{
	for (uint64_t i = 0; i < p->a->chunk_count; i++) {
		const int64_t *dims = p->a->chunks[i].dims;
		TRY(build_sums_add(p->b, s, (uint32_t)(p->first_a + i), dims));
		for (uint64_t k = 0; k < source_count(p, i); k++)
			TRY(build_sums_add(p->b, s, source_of(p, i, k), dims));
	}
	return build_sums_end(p->b, s);
}

static FALLIBLE enum err sum_sources(struct pairs *p)
{
	struct build_sums s;

	enum err e = build_sums_begin(p->b, &s);
	e = e ?: note_sums(p, &s);
	build_sums_free(&s);
	return e;
}

/* ------------------------------------------------------------------------------------------------------- pairs */

static FALLIBLE enum err add_large(struct pairs *p, uint64_t chunk, enum dtype dtype, uint64_t bytes)
{
	uint32_t dst = (uint32_t)p->b->dsts.n;
	uint64_t blocks = num_div_up(bytes, DIFF_HALF);

	TRY(add_side(p, chunk, dtype, bytes, 0, false));
	TRY(add_side(p, chunk, dtype, bytes, DIFF_HALF, true));
	for (uint64_t i = 0; i < blocks; i++) {
		TRY(open_block(p, p->b->dsts.v[dst].file, i * DIFF_HALF, BUILD_TASK_BYTES));
		TRY(add_pair_parts(p, dst, i * DIFF_HALF, num_min((i + 1) * DIFF_HALF, bytes)));
	}
	p->open = false;
	return OK;
}

static FALLIBLE enum err add_small(struct pairs *p, uint64_t chunk, enum dtype dtype, uint64_t bytes)
{
	uint32_t dst = (uint32_t)p->b->dsts.n;
	uint64_t padded;

	TRY(num_align(bytes, 16, &padded));
	if (!p->open || p->cursor + 2 * padded > BUILD_TASK_BYTES) {
		TRY(open_block(p, p->b->srcs.v[p->first_a + chunk].file, 0, BUILD_TASK_BYTES));
		p->open = true;
		p->cursor = 0;
	}
	TRY(add_side(p, chunk, dtype, bytes, p->cursor, false));
	TRY(add_side(p, chunk, dtype, bytes, p->cursor + padded, true));
	p->cursor += 2 * padded;
	return add_pair_parts(p, dst, 0, bytes);
}

static FALLIBLE enum err add_pair(struct pairs *p, uint64_t chunk)
{
	const struct run_src *src = &p->b->srcs.v[p->first_a + chunk];
	uint64_t numel, bytes, first = p->b->parts.n;
	enum dtype dtype;

	TRY(compared_dtype(p, chunk, &dtype));
	TRY(box_numel(src->ndim, p->b->dims.v + src->dims_at + src->ndim, &numel));
	TRY(num_mul(numel, dtype_bytes(dtype), &bytes));
	TRY(build_room(p->b->parts.n, 2 * (bytes / DIFF_HALF + 1)));
	TRY(scan_source(p->b, (uint32_t)(p->first_a + chunk)));
	for (uint64_t k = 0; k < source_count(p, chunk); k++)
		TRY(scan_source(p->b, source_of(p, chunk, k)));
	TRY(bytes > BUILD_SMALL_BYTES ? add_large(p, chunk, dtype, bytes) : add_small(p, chunk, dtype, bytes));
	p->b->dsts.v[2 * chunk].first_part = first;
	p->b->dsts.v[2 * chunk].part_count = p->b->parts.n - first;
	return OK;
}

enum err build_diff(struct run_build *b, const struct sdict *a, uint32_t first_a, uint32_t first_b,
		    const struct load_plan *b_plan)
{
	struct pairs p = { .b = b, .a = a, .b_plan = b_plan, .first_a = first_a, .first_b = first_b };
	struct run_rank *rank;

	b->opts.mode = RUN_DIFF;
	b->opts.task_bytes = BUILD_TASK_BYTES;
	TRY(vec_push(&b->ranks, &rank));
	if (b->opts.verify)
		TRY(sum_sources(&p));
	for (uint64_t i = 0; i < a->chunk_count; i++)
		TRY(add_pair(&p, i));
	for (uint64_t i = 0; i < b->srcs.n; i++)
		if (build_is_rest(&b->srcs.v[i]))
			TRY(scan_source(b, (uint32_t)i));
	rank = &b->ranks.v[0];
	rank->task_count = b->tasks.n;
	return OK;
}
