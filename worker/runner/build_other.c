/* build_other.c: the tables of a run that writes safetensors files, and of one that compares two state dicts (see build.h).
 *
 * safetensors allows no holes, so a file is one stream: blocks are cut at fixed positions and hold parts of several tensors. Tensors go
 * by element size, largest first, so that every payload begins at a multiple of its element. */
#include <stdio.h>
#include <stdlib.h>

#include "base/num.h"
#include "format/safetensors.h"
#include "runner/build.h"

enum { PAGE = 4096, DIFF_HALF = BUILD_TASK_BYTES / 2 };

struct whole {
	uint32_t chunk, file_index, dst;
	uint64_t bytes;
};

struct stream {
	struct run_build *b;
	struct build_target *t;
	struct whole *wholes;
	uint64_t n;
};

static FALLIBLE enum err check_name(const struct sd_tensor *t)
{
	if (!dtype_safetensors_name(t->dtype))
		return err_at_fqn(ERR(DTYPE_UNSUPPORTED, "safetensors has no dtype %s", dtype_name(t->dtype)), t->fqn.p,
				  t->fqn.n);
	if (str_is(t->fqn, "__metadata__") || !str_utf8(t->fqn))
		return err_at_fqn(ERR(NAME_INVALID, "safetensors has no place for a tensor of this name"), t->fqn.p,
				  t->fqn.n);
	return OK;
}

static FALLIBLE enum err collect(struct stream *s)
{
	const struct sdict *sd = s->t->sd;

	s->wholes = mem_zalloc(sd->tensor_count, sizeof *s->wholes);
	s->n = sd->tensor_count;
	if (!s->wholes)
		return ERR(NO_MEMORY, "no memory for %ju tensors", (uintmax_t)s->n);
	for (uint64_t i = 0; i < s->n; i++) {
		const struct sd_tensor *t = &sd->tensors[i];
		uint64_t numel;
		must(t->chunk_count == 1);
		TRY(check_name(t));
		TRY(box_numel(t->ndim, t->shape, &numel));
		s->wholes[i].chunk = (uint32_t)t->first_chunk;
		TRY(num_mul(numel, dtype_bytes(t->dtype), &s->wholes[i].bytes));
	}
	return OK;
}

/* In the order given, a new file when the next tensor would make it too large. */
static uint32_t split_files(struct stream *s, uint64_t max_file_bytes)
{
	uint32_t files = 0;
	uint64_t filled = 0;

	for (uint64_t i = 0; i < s->n; i++) {
		if (i > 0 && s->wholes[i].bytes > max_file_bytes - num_min(filled, max_file_bytes)) {
			files++;
			filled = 0;
		}
		filled += s->wholes[i].bytes;
		s->wholes[i].file_index = files;
	}
	return files + 1;
}

static int by_element_size(const void *a, const void *b, void *user)
{
	const struct sdict *sd = user;
	const struct whole *x = a, *y = b;

	if (x->file_index != y->file_index)
		return x->file_index < y->file_index ? -1 : 1;
	uint32_t dx = dtype_bytes(sd->tensors[sd->chunks[x->chunk].tensor].dtype);
	uint32_t dy = dtype_bytes(sd->tensors[sd->chunks[y->chunk].tensor].dtype);
	if (dx != dy)
		return dx > dy ? -1 : 1;
	return x->chunk < y->chunk ? -1 : x->chunk > y->chunk;
}

static FALLIBLE enum err add_header(struct stream *s, uint64_t first, uint64_t count, const struct str (*meta)[2],
				    uint64_t meta_count, uint32_t file, uint64_t *data_off)
{
	const struct sdict *sd = s->t->sd;
	CLEANUP(mem_free_ptr) struct sft_entry *entries = mem_zalloc(count, sizeof *entries);
	CLEANUP(buf_free) struct buf b = BUF_INIT(SFT_HEADER_MAX + PAGE);
	uint64_t at = 0;
	struct run_dst *d;

	if (!entries)
		return ERR(NO_MEMORY, "no memory for %ju tensors", (uintmax_t)count);
	for (uint64_t i = 0; i < count; i++) {
		const struct whole *w = &s->wholes[first + i];
		const struct sd_tensor *t = &sd->tensors[sd->chunks[w->chunk].tensor];
		entries[i] = (struct sft_entry){ t->fqn, t->dtype, t->ndim, t->shape, at, at + w->bytes };
		TRY(num_add(at, w->bytes, &at));
	}
	TRY(sft_put_header(&b, entries, count, meta, meta_count, PAGE));
	*data_off = b.len;
	TRY(vec_push(&s->b->dsts, &d));
	*d = (struct run_dst){ .kind = RUN_DST_RAW, .bare = true, .file = file, .payload_bytes = b.len, .length = b.len,
			       .inline_len = b.len };
	return run_add_string(s->b, (struct str){ (char *)b.p, b.len }, &d->inline_at);
}

static FALLIBLE enum err add_tensor(struct stream *s, struct whole *w, uint32_t file, uint64_t offset)
{
	const struct sdict *sd = s->t->sd;
	const struct sd_chunk *c = &sd->chunks[w->chunk];
	const struct sd_tensor *t = &sd->tensors[c->tensor];
	const struct load_plan *p = s->t->pieces;
	struct run_dst *d;

	w->dst = (uint32_t)s->b->dsts.n;
	TRY(vec_push(&s->b->dsts, &d));
	*d = (struct run_dst){ .kind = RUN_DST_TENSOR, .dtype = (uint8_t)t->dtype, .bare = true, .file = file,
			       .ndim = t->ndim, .offset = offset, .payload_bytes = w->bytes, .length = w->bytes,
			       .fqn_len = (uint32_t)t->fqn.n, .first_piece = s->b->pieces.n,
			       .piece_count = (uint32_t)(p->first[w->chunk + 1] - p->first[w->chunk]) };
	TRY(run_add_string(s->b, t->fqn, &d->fqn_at));
	TRY(run_add_dims(s->b, c->dims, t->ndim, &d->dims_at));
	TRY(vec_reserve(&s->b->pieces, d->piece_count));
	for (uint64_t k = p->first[w->chunk]; k < p->first[w->chunk + 1]; k++)
		s->b->pieces.v[s->b->pieces.n++] = s->t->first_src + p->sources[k];
	s->t->chunk_places[w->chunk] = (struct build_place){ file, w->dst, offset, w->bytes };
	return OK;
}

/* Blocks of a task's size over the whole file, each with the parts of the dsts [first, end) that it touches. */
static FALLIBLE enum err cut_stream(struct run_build *b, uint32_t file, uint32_t first, uint64_t bytes)
{
	uint32_t dst = first, end = (uint32_t)b->dsts.n;
	struct run_block *k;
	struct run_task *task;
	struct run_part *p;
	uint64_t *at;

	TRY(build_room(b->parts.n, bytes / b->opts.task_bytes + 1));
	for (uint64_t off = 0; off < bytes; off += b->opts.task_bytes) {
		uint64_t stop = num_min(off + b->opts.task_bytes, bytes);
		TRY(vec_push(&b->tasks, &task));
		*task = (struct run_task){ .first = b->blocks.n, .count = 1 };
		TRY(vec_push(&b->blocks, &k));
		*k = (struct run_block){ .file = file, .offset = off, .first_part = b->block_parts.n };
		k->bytes = b->files.v[file].direct ? (stop - off + PAGE - 1) & ~(uint64_t)(PAGE - 1) : stop - off;
		atomic_fetch_add(&b->files.v[file].blocks_left, 1);
		for (; dst < end && b->dsts.v[dst].offset < stop; dst++) {
			struct run_dst *d = &b->dsts.v[dst];
			uint64_t begin = num_max(off, d->offset) - d->offset;
			uint64_t last = num_min(stop - d->offset, d->payload_bytes);
			if (d->part_count == 0)
				d->first_part = b->parts.n;
			atomic_store(&d->parts_left, (uint32_t)++d->part_count);
			TRY(vec_push(&b->block_parts, &at));
			*at = b->parts.n;
			k->part_count++;
			TRY(vec_push(&b->parts, &p));
			*p = (struct run_part){ .dst = dst, .begin = begin, .end = last };
			b->ranks.v[0].bytes_total += last - begin;
			if (last < d->payload_bytes)
				break;
		}
	}
	return OK;
}

static FALLIBLE enum err place_stream(struct stream *s, uint32_t index, uint32_t files, uint64_t first, uint64_t count,
				      const struct str (*meta)[2], uint64_t meta_count)
{
	char name[FORMAT_FILE_MAX];
	uint32_t file, first_dst = (uint32_t)s->b->dsts.n;
	uint64_t at;

	format_hf_payload(index, files, name);
	TRY(run_add_file(s->b, RUN_FILE_TARGET, s->t->dir, str_of(name), 0, &file));
	TRY(add_header(s, first, count, meta, meta_count, file, &at));
	for (uint64_t i = first; i < first + count; i++) {
		TRY(add_tensor(s, &s->wholes[i], file, at));
		TRY(num_add(at, s->wholes[i].bytes, &at));
	}
	s->b->files.v[file].bytes = at;
	s->b->files.v[file].in_memory = s->t->in_memory;
	s->b->files.v[file].direct = s->t->direct;   /* the last block is padded; the file is cut afterwards */
	TRY(num_add(s->t->bytes, at, &s->t->bytes));
	return cut_stream(s->b, file, first_dst, at);
}

/* Every source that is needed, once. */
static FALLIBLE enum err scan_all(struct stream *s)
{
	const struct load_plan *p = s->t->pieces;
	struct run_task *task;

	for (uint64_t k = 0; s->t->check_sources && k < p->source_count; k++) {
		uint64_t first = s->b->scans.n;
		TRY(build_scans(s->b, s->t->first_src + p->sources[k]));
		for (uint64_t i = first; i < s->b->scans.n; i++) {
			TRY(vec_push(&s->b->tasks, &task));
			*task = (struct run_task){ .first = i, .count = 1, .scan = true };
		}
	}
	return OK;
}

static FALLIBLE enum err fill_streams(struct stream *s, uint64_t max_file_bytes, const struct str (*meta)[2],
				      uint64_t meta_count)
{
	struct run_rank *rank;

	TRY(collect(s));
	uint32_t files = split_files(s, max_file_bytes);
	qsort_r(s->wholes, s->n, sizeof *s->wholes, by_element_size, s->t->sd);
	TRY(vec_push(&s->b->ranks, &rank));
	uint64_t first = 0;
	TRY(scan_all(s));
	for (uint32_t f = 0; f < files; f++) {
		uint64_t count = 0;
		while (first + count < s->n && s->wholes[first + count].file_index == f)
			count++;
		TRY(place_stream(s, f, files, first, count, meta, meta_count));
		first += count;
	}
	s->b->ranks.v[0].task_count = s->b->tasks.n;
	return OK;
}

enum err build_safetensors(struct run_build *b, struct build_target *t, uint64_t max_file_bytes,
			   const struct str (*meta)[2], uint64_t meta_count)
{
	struct stream s = { .b = b, .t = t };

	b->opts.mode = RUN_WRITE_FILES;
	b->opts.task_bytes = t->task_bytes;
	t->chunk_places = mem_zalloc(t->sd->chunk_count, sizeof *t->chunk_places);
	t->value_places = mem_zalloc(t->sd->value_count, sizeof *t->value_places);
	enum err e = t->chunk_places && t->value_places ? fill_streams(&s, max_file_bytes, meta, meta_count)
							: ERR(NO_MEMORY, "no memory for the plan");
	mem_free(s.wholes);
	return e;
}

/* -------------------------------------------------------------------------------------------------------- diff */

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

	if (!b->opts.verify || b->srcs.v[src].kind != RUN_SRC_ITEM)
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
