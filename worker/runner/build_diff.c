/* build_diff.c: the tables of a run that compares two state dicts (see build.h). */
#include "base/num.h"
#include "runner/build.h"

enum { DIFF_HALF = BUILD_TASK_BYTES / 2 };

struct pairs {
	struct run_build *b;
	const struct sdict *a;
	const struct load_plan *b_plan;
	uint32_t first_a, first_b;
	uint64_t cursor;               /* in the pack being made */
	bool open;
};

static FALLIBLE enum err add_side(struct pairs *p, uint64_t chunk, uint64_t bytes, uint64_t offset, bool second)
{
	const struct sd_chunk *c = &p->a->chunks[chunk];
	const struct sd_tensor *t = &p->a->tensors[c->tensor];
	const struct run_src *src = &p->b->srcs.v[p->first_a + chunk];
	uint64_t first = second ? p->b_plan->first[chunk] : 0, n = second ? p->b_plan->first[chunk + 1] - first : 1;
	struct run_dst *d;

	TRY(vec_push(&p->b->dsts, &d));
	*d = (struct run_dst){ .kind = RUN_DST_TENSOR, .dtype = (uint8_t)t->dtype, .bare = true, .small = true,
			       .file = src->file, .ndim = t->ndim, .rank = c->rank, .offset = offset,
			       .payload_bytes = bytes, .length = bytes, .fqn_at = src->fqn_at, .fqn_len = src->fqn_len,
			       .dims_at = src->dims_at, .first_piece = p->b->pieces.n, .piece_count = (uint32_t)n };
	TRY(vec_reserve(&p->b->pieces, n));
	for (uint64_t k = 0; k < n; k++)
		p->b->pieces.v[p->b->pieces.n++] = second ? p->first_b + p->b_plan->sources[first + k]
							  : (uint32_t)(p->first_a + chunk);
	return OK;
}

static FALLIBLE enum err add_pair_parts(struct pairs *p, uint32_t dst_a, uint64_t begin, uint64_t end)
{
	struct run_part *part;
	uint64_t *at;

	for (uint32_t side = 0; side < 2; side++) {
		TRY(vec_push(&p->b->block_parts, &at));
		*at = p->b->parts.n;
		p->b->blocks.v[p->b->blocks.n - 1].part_count++;
		TRY(vec_push(&p->b->parts, &part));
		*part = (struct run_part){ .dst = dst_a + side, .begin = begin, .end = end };
	}
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

static FALLIBLE enum err add_pair(struct pairs *p, uint64_t chunk)
{
	const struct run_src *src = &p->b->srcs.v[p->first_a + chunk];
	uint32_t dst = (uint32_t)p->b->dsts.n;
	uint64_t numel, bytes, padded;

	TRY(box_numel(src->ndim, p->b->dims.v + src->dims_at + src->ndim, &numel));
	TRY(num_mul(numel, dtype_bytes((enum dtype)src->dtype), &bytes));
	TRY(build_room(p->b->parts.n, 2 * (bytes / DIFF_HALF + 1)));
	if (bytes > BUILD_SMALL_BYTES) {
		TRY(add_side(p, chunk, bytes, 0, false));
		TRY(add_side(p, chunk, bytes, DIFF_HALF, true));
		for (uint64_t at = 0; at < bytes; at += DIFF_HALF) {
			TRY(open_block(p, p->b->dsts.v[dst].file, at, BUILD_TASK_BYTES));
			TRY(add_pair_parts(p, dst, at, num_min(at + DIFF_HALF, bytes)));
		}
		p->open = false;
		return OK;
	}
	TRY(num_align(bytes, 16, &padded));
	if (!p->open || p->cursor + 2 * padded > BUILD_TASK_BYTES) {
		TRY(open_block(p, src->file, 0, BUILD_TASK_BYTES));
		p->open = true;
		p->cursor = 0;
	}
	TRY(add_side(p, chunk, bytes, p->cursor, false));
	TRY(add_side(p, chunk, bytes, p->cursor + padded, true));
	p->cursor += 2 * padded;
	return add_pair_parts(p, dst, 0, bytes);
}

/* All that is compared is checked first: a damaged byte is no difference. Sources in segments have nothing to be compared with. */
static FALLIBLE enum err scan_side(struct run_build *b, uint32_t src)
{
	uint64_t first = b->scans.n;
	struct run_task *task;

	const struct run_src *s = &b->srcs.v[src];

	if (!b->opts.verify || (s->kind != RUN_SRC_ITEM && atomic_load(&s->crc_state) != RUN_CRC_KNOWN))
		return OK;
	TRY(build_scans(b, src));
	for (uint64_t i = first; i < b->scans.n; i++) {
		TRY(vec_push(&b->tasks, &task));
		*task = (struct run_task){ .first = i, .count = 1, .scan = true };
	}
	return OK;
}

static FALLIBLE enum err scan_sides(struct pairs *p)
{
	for (uint64_t i = 0; i < p->a->chunk_count; i++) {
		TRY(scan_side(p->b, p->first_a + (uint32_t)i));
		for (uint64_t k = p->b_plan->first[i]; k < p->b_plan->first[i + 1]; k++)
			TRY(scan_side(p->b, p->first_b + p->b_plan->sources[k]));
	}
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
	TRY(scan_sides(&p));
	for (uint64_t i = 0; i < a->chunk_count; i++)
		TRY(add_pair(&p, i));
	rank = &b->ranks.v[0];
	rank->task_count = b->tasks.n;
	return OK;
}
