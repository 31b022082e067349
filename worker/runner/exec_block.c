/* exec_block.c: dst-driven tasks: fetch what some blocks of target files need, hash it, write it (or, for a diff, compare it).
 *
 * A block is ready when all its parts are in memory. Parts of large items count down `parts_left` of their item: whoever brings it to
 * zero writes the archive's head and tail, because only then the payload's CRC32 is known. Files count blocks and heads; whoever brings
 * a file's count to zero fsyncs it. */
#include <stdlib.h>

#include "base/num.h"
#include "format/torch_item.h"
#include "io/digest.h"
#include "io/tensor_sum.h"
#include "runner/exec_impl.h"
#include "runner/sums.h"
#include "tensor/average.h"
#include "tensor/cast.h"
#include "tensor/linear.h"
#include "tensor/quant.h"
#include "tensor/stats.h"

enum { PAGE = 4096, ITEM_ALIGN = 4096, ITEM_ALIGN_SMALL = 64 };

static const struct run_block *block_of(const struct slot *s, uint64_t i)
{
	return &s->x->run->blocks[s->blocks.v[i].block];
}

/* Offset of a part's bytes in its block. */
static uint64_t part_at(const struct run *run, const struct run_block *b, const struct run_part *p)
{
	const struct run_dst *d = &run->dsts[p->dst];

	return d->offset + d->payload_off + p->begin - b->offset;
}

static struct run_part *part_of(const struct run *run, const struct run_block *b, uint32_t i)
{
	return &run->parts[run->block_parts[b->first_part + i]];
}

/* The only part of a block whose bytes lie in a row in a segment, on a page boundary? Then they are written from there. */
static FALLIBLE enum err try_in_segment(struct slot *s, const struct run_block *b, struct slot_block *sb)
{
	const struct run *run = s->x->run;
	const struct run_part *p = b->part_count == 1 ? part_of(run, b, 0) : NULL;
	const struct run_dst *d = p ? &run->dsts[p->dst] : NULL;
	int64_t rel[NDIM_MAX];
	uint64_t first;

	if (!p || d->kind != RUN_DST_TENSOR || d->small || d->bare || d->piece_count != 1)
		return OK;
	const struct run_src *src = &run->srcs[run->pieces[d->first_piece]];
	const struct run_file *f = &run->files[src->file];
	if (f->kind != RUN_FILE_SEGMENT || src->kind != RUN_SRC_PLAIN || src->dtype != d->dtype || src->view_of || src->zeros)
		return OK;
	const int64_t *so = run->dims + src->dims_at, *to = run->dims + d->dims_at;
	for (uint32_t i = 0; i < d->ndim; i++) {
		rel[i] = to[i] - so[i];
		if (rel[i] < 0 || rel[i] + to[d->ndim + i] > so[d->ndim + i])
			return OK;
	}
	if (!linear_is_run(d->ndim, so + d->ndim, rel, to + d->ndim, &first))
		return OK;
	uint64_t at = src->offset + first * dtype_bytes((enum dtype)d->dtype) + p->begin;
	if (run->files[d->file].direct && at % PAGE)
		return OK;
	TRY(files_at(&s->x->files, src->file, at, &sb->data));
	sb->in_segment = true;
	seg_populate(sb->data, p->end - p->begin, false);
	return OK;
}

static unsigned char *take_out(struct slot *s, uint64_t bytes)
{
	unsigned char *p = s->out + s->out_used;
	uint64_t task = s->x->run->head->opts.task_bytes;

	must(s->out_used + bytes <= task + task / 4);
	s->out_used += bytes;
	return p;
}

static uint64_t elements(const struct run *run, const struct run_part *p)
{
	return (p->end - p->begin) / dtype_bytes((enum dtype)run->dsts[p->dst].dtype);
}

static uint64_t leg_bytes(const struct run *run, const struct run_part *p)
{
	const struct run_dst *d = &run->dsts[p->dst];

	return d->first_leg ? (elements(run, p) * dtype_bytes((enum dtype)run->dsts[d->first_leg].dtype) + 15) & ~15ull : 0;
}

/* Room for the sums of all parts of the task, and for one leg of each: reads point into it. */
static FALLIBLE enum err reserve_legs(struct slot *s)
{
	const struct run *run = s->x->run;
	const struct run_task *t = &run->tasks[s->task];
	uint64_t bytes = 0;

	s->legs.n = s->leg_used = s->leg = 0;
	for (uint32_t i = 0; run->head->opts.leg_count && i < t->count; i++) {
		const struct run_block *b = &run->blocks[t->first + i];
		for (uint32_t k = 0; k < b->part_count; k++)
			bytes += 2 * leg_bytes(run, part_of(run, b, k));
	}
	if (bytes <= s->leg_bytes)
		return OK;
	mem_free(s->leg_room);
	s->leg_bytes = bytes;
	s->leg_room = mem_alloc(bytes);
	return s->leg_room ? OK : ERR(NO_MEMORY, "no memory for %ju bytes to average", (uintmax_t)bytes);
}

/* The part's elements of one checkpoint, cast to the dtype that they are added up in. */
static FALLIBLE enum err read_leg(struct slot *s, const struct slot_legs *l, uint32_t leg)
{
	const struct run *run = s->x->run;
	const struct run_part *p = l->part;
	const struct run_dst *d = &run->dsts[p->dst];
	uint32_t item = dtype_bytes((enum dtype)run->dsts[d->first_leg].dtype), own = dtype_bytes((enum dtype)d->dtype);
	unsigned char *into = leg ? l->next : l->sum;

	if (!exec_is_all_read(run, &run->dsts[d->first_leg + leg]))
		memset(into, 0, (p->end - p->begin) / own * item);
	return read_plan_add(&s->reads, d->first_leg + leg, p->begin / own * item, p->end / own * item, into);
}

static FALLIBLE enum err add_legs(struct slot *s, const struct run_part *p, unsigned char *to)
{
	uint64_t bytes = leg_bytes(s->x->run, p);
	unsigned char *room = s->leg_room + s->leg_used;
	struct slot_legs *l;

	TRY(vec_push(&s->legs, &l));
	*l = (struct slot_legs){ p, to, room, room + bytes };
	s->leg_used += 2 * bytes;
	return read_leg(s, l, 0);
}

/* A part in blocks of Q8_0 is read as float32 into memory of its own: all elements of the blocks that the part touches. */
static FALLIBLE enum err add_blocks(struct slot *s, const struct run_part *p, unsigned char *at)
{
	struct slot_quant *q;

	TRY(vec_push(&s->quants, &q));
	*q = (struct slot_quant){ .at = at, .skip = (uint32_t)(p->begin % QUANT_Q8_0_BYTES), .bytes = p->end - p->begin };
	q->blocks = num_div_up(q->skip + q->bytes, QUANT_Q8_0_BYTES);
	q->floats = mem_alloc(q->blocks * QUANT_Q8_0_FLOATS * sizeof(float));
	NEED(q->floats, "no memory for %ju blocks of float32", (uintmax_t)q->blocks);
	uint64_t first = p->begin / QUANT_Q8_0_BYTES * QUANT_Q8_0_FLOATS * sizeof(float);
	return read_plan_add(&s->reads, p->dst, first, first + q->blocks * QUANT_Q8_0_FLOATS * sizeof(float), (unsigned char *)q->floats);
}

void exec_block_drop(struct slot *s)
{
	for (uint64_t i = 0; i < s->quants.n; i++)
		mem_free(s->quants.v[i].floats);
	s->quants.n = 0;
}

bool exec_is_all_read(const struct run *run, const struct run_dst *d)
{
	for (uint32_t i = 0; i < d->piece_count; i++)
		if (run->srcs[run->pieces[d->first_piece + i]].zeros)
			return false;
	return true;
}

/* Zeros around parts, and where a part has zeros in itself. */
static void clear_gaps(const struct run *run, const struct run_block *b, unsigned char *data)
{
	uint64_t end = 0;

	for (uint32_t i = 0; i < b->part_count; i++) {
		const struct run_part *p = part_of(run, b, i);
		uint64_t at = part_at(run, b, p);
		if (at < end || !exec_is_all_read(run, &run->dsts[p->dst]))
			continue;
		memset(data + end, 0, at - end);
		end = at + (p->end - p->begin);
	}
	memset(data + end, 0, b->bytes - end);
}

static FALLIBLE enum err add_parts(struct slot *s, const struct run_block *b, unsigned char *data)
{
	const struct run *run = s->x->run;

	for (uint32_t i = 0; i < b->part_count; i++) {
		const struct run_part *p = part_of(run, b, i), *last = p;
		const struct run_dst *d = &run->dsts[p->dst];
		unsigned char *at = data + part_at(run, b, p);
		while (d->kind == RUN_DST_TENSOR && !d->first_leg && i + 1 < b->part_count && part_of(run, b, i + 1)->dst == p->dst)
			last = part_of(run, b, ++i); /* the parts of a target are in a row: read as one */
		if (d->first_leg)
			TRY(add_legs(s, p, at));
		else if (d->q8_0)
			TRY(add_blocks(s, p, at));
		else if (d->kind == RUN_DST_TENSOR)
			TRY(read_plan_add(&s->reads, p->dst, p->begin, last->end, at));
		else if (d->inline_len)
			memcpy(at, run->strings + d->inline_at + p->begin, p->end - p->begin);
	}
	return OK;
}

static FALLIBLE enum err begin(struct slot *s, uint64_t first, uint32_t count)
{
	const struct run *run = s->x->run;
	struct slot_block *sb;

	read_plan_begin(&s->reads);
	s->blocks.n = s->out_used = s->next_raw = 0;
	for (uint32_t i = 0; i < count; i++) {
		TRY(vec_push(&s->blocks, &sb));
		*sb = (struct slot_block){ .block = first + i };
		const struct run_block *b = block_of(s, i);
		TRY(try_in_segment(s, b, sb));
		if (sb->in_segment) {
			const struct run_part *p = part_of(run, b, 0);
			sb->page = (p->end - p->begin) % PAGE ? take_out(s, PAGE) : NULL;
			continue;
		}
		sb->data = take_out(s, (b->bytes + PAGE - 1) & ~(uint64_t)(PAGE - 1));
		clear_gaps(run, b, sb->data);
		TRY(add_parts(s, b, sb->data));
	}
	s->phase = SLOT_FETCH;
	return OK;
}

enum err exec_block_begin(struct slot *s)
{
	const struct run_task *t = &s->x->run->tasks[s->task];

	TRY(reserve_legs(s));
	return begin(s, t->first, t->count);
}

/* ------------------------------------------------------------------------------------------------------- fetch */

/* BYTE_IO items that are copied from a stored one: read straight into the block. */
static FALLIBLE enum err fill_raw(struct slot *s, bool *full_out)
{
	const struct run *run = s->x->run;
	uint64_t seen = 0;

	*full_out = false;
	for (uint64_t i = 0; i < s->blocks.n; i++) {
		const struct run_block *b = block_of(s, i);
		for (uint32_t k = 0; k < b->part_count; k++) {
			const struct run_part *p = part_of(run, b, k);
			const struct run_dst *d = &run->dsts[p->dst];
			if (d->kind != RUN_DST_RAW || d->inline_len || p->end == p->begin || seen++ < s->next_raw)
				continue;
			const struct run_src *src = &run->srcs[run->pieces[d->first_piece]];
			uint32_t read;
			TRY(wave_add(&s->wave, src->file, src->offset + p->begin, p->end - p->begin,
				     s->blocks.v[i].data + part_at(run, b, p), &read, full_out));
			if (*full_out)
				return OK;
			s->next_raw++;
		}
	}
	return OK;
}

static FALLIBLE enum err fill(struct slot *s)
{
	bool full;

	wave_begin(&s->wave, s->in, s->x->in_bytes);
	TRY(fill_raw(s, &full));
	return full ? OK : read_plan_fill(&s->reads, &s->wave);
}

static enum err copy(struct slot *s)
{
	return read_plan_copy(&s->reads, &s->wave);
}

/* ------------------------------------------------------------------------------------------------------- ready */

static void add_to_sum(void *user, const void *p, size_t n)
{
	tensor_sum_add(user, p, n);
}

static void digest_part(const struct run *run, struct run_part *p, const unsigned char *bytes)
{
	struct run_dst *d = &run->dsts[p->dst];
	struct digest digest;

	if (d->kind == RUN_DST_TENSOR && d->shape_at) {
		struct tensor_sum sum;
		bool fits = tensor_sum_begin(&sum, d->ndim, run->dims + d->box_at, run->dims + d->shape_at - 1,
					     dtype_bytes((enum dtype)d->dtype), p->begin);
		must(fits); /* tensors that are written have sizes that were checked */
		digest_block_also(bytes, p->end - p->begin, &digest, add_to_sum, &sum);
		p->content = tensor_sum_end(&sum);
	} else {
		digest_block(bytes, p->end - p->begin, &digest);
	}
	p->crc32 = digest.crc32;
	memcpy(p->xxh3_128, digest.xxh3_128, sizeof p->xxh3_128);
	if (d->part_count == 1) {
		d->crc32 = digest.crc32;
		memcpy(d->xxh3_128, digest.xxh3_128, sizeof d->xxh3_128);
	}
}

/* The digest of all bytes of an item but its payload: its head, zeros, its tail. */
static void digest_edges(struct run_dst *d, const unsigned char *head, const unsigned char *tail)
{
	static const unsigned char zeros[PAGE];
	struct digest_stream s;
	struct digest digest;

	digest_begin_one(&s, DIGEST_XXH3);
	digest_add(&s, head, d->payload_off);
	digest_add(&s, zeros, d->tail_off - d->payload_off - d->payload_bytes);
	digest_add(&s, tail, d->length - d->tail_off);
	digest_end(&s, &digest);
	memcpy(d->edges_xxh3, digest.xxh3_128, sizeof d->edges_xxh3);
}

/* A small item's archive around its payload. */
static FALLIBLE enum err wrap_small(const struct run *run, const struct run_part *p, unsigned char *payload)
{
	struct run_dst *d = &run->dsts[p->dst];
	const int64_t *sizes = run->dims + d->dims_at + d->ndim;
	CLEANUP(buf_free) struct buf b = BUF_INIT(1 << 20);

	TRY(item_put_head(&b, (enum dtype)d->dtype, d->ndim, sizes, ITEM_ALIGN_SMALL, p->crc32));
	must(b.len == d->payload_off);
	memcpy(payload - b.len, b.p, b.len);
	TRY(item_put_tail(&b, (enum dtype)d->dtype, d->ndim, sizes, ITEM_ALIGN_SMALL, p->crc32));
	must(b.len == d->payload_off + d->length - d->tail_off);
	memcpy(payload - d->payload_off + d->tail_off, b.p + d->payload_off, b.len - d->payload_off);
	digest_edges(d, b.p, b.p + d->payload_off);
	return OK;
}

/* Averages: added up in the order of the checkpoints, one after the other, rounded once. */
static FALLIBLE enum err average(struct slot *s)
{
	const struct run *run = s->x->run;
	uint32_t leg = s->leg++;

	if (s->legs.n)
		read_plan_begin(&s->reads);
	each(l, s->legs.v, s->legs.n) {
		const struct run_dst *d = &run->dsts[l->part->dst];
		enum dtype wide = (enum dtype)run->dsts[d->first_leg].dtype;
		uint64_t n = elements(run, l->part);
		average_add(l->sum, leg ? l->next : l->sum, wide, n, run->head->opts.weights[leg], leg == 0);
		if (s->leg < run->head->opts.leg_count)
			TRY(read_leg(s, l, s->leg));
		else
			TRY(cast_run(l->to, (enum dtype)d->dtype, l->sum, wide, n));
	}
	return OK;
}

static enum err hash_blocks(struct slot *s)
{
	const struct run *run = s->x->run;

	for (uint64_t i = 0; i < s->blocks.n; i++) {
		const struct run_block *b = block_of(s, i);
		struct slot_block *sb = &s->blocks.v[i];
		for (uint32_t k = 0; k < b->part_count; k++) {
			struct run_part *p = part_of(run, b, k);
			const struct run_dst *d = &run->dsts[p->dst];
			unsigned char *at = sb->in_segment ? sb->data : sb->data + part_at(run, b, p);
			if (!s->redo)
				digest_part(run, p, at);
			if (d->kind == RUN_DST_RAW && d->piece_count)
				TRY(sums_add_bytes(&s->x->sources, run->pieces[d->first_piece], p->begin, p->end - p->begin, p->crc32));
			if (d->kind == RUN_DST_TENSOR && d->small && !d->bare)
				TRY(wrap_small(run, p, at));
		}
		if (sb->in_segment && sb->page) { /* the bytes behind the last whole page, and zeros */
			const struct run_part *p = part_of(run, b, 0);
			uint64_t whole = (p->end - p->begin) & ~(uint64_t)(PAGE - 1);
			memset(sb->page, 0, PAGE);
			memcpy(sb->page, sb->data + whole, p->end - p->begin - whole);
		}
	}
	return OK;
}

enum err exec_push_write(struct slot *s, uint32_t file, unsigned char *p, uint64_t bytes, uint64_t offset)
{
	struct wave_op *op;

	const struct run_file *f = &s->x->run->files[file];
	if (!f->direct) /* blocks are padded for O_DIRECT's sake */
		bytes = num_min(bytes, f->bytes - offset);
	if (bytes == 0)
		return OK;
	if (f->in_memory) {
		struct store_at *at;
		TRY(files_pin(&s->x->files, file, &at));
		enum err e = at->store->ops->write(*at, p, bytes, offset, "");
		files_unpin(&s->x->files, file);
		return e;
	}
	must(s->writes.n < s->writes.cap); /* reserved: the engine holds pointers into it */
	TRY(vec_push(&s->writes, &op));
	op->file = file;
	op->io = (struct io_op){ .kind = IO_WRITE, .buf = p, .bytes = bytes, .offset = offset };
	return exec_queue(s, op);
}

static FALLIBLE enum err write_blocks(struct slot *s)
{
	const struct run *run = s->x->run;

	s->writes.n = 0;
	TRY(vec_reserve(&s->writes, 2 * s->blocks.n));
	for (uint64_t i = 0; i < s->blocks.n; i++) {
		const struct run_block *b = block_of(s, i);
		struct slot_block *sb = &s->blocks.v[i];
		uint64_t whole = b->bytes;
		TRY(exec_share_block(s, sb));
		if (sb->shared)
			continue;
		if (sb->in_segment) {
			const struct run_part *p = part_of(run, b, 0);
			whole = (p->end - p->begin) & ~(uint64_t)(PAGE - 1);
		}
		TRY(exec_push_write(s, b->file, sb->data, whole, b->offset));
		if (sb->in_segment && whole < b->bytes)
			TRY(exec_push_write(s, b->file, sb->page, b->bytes - whole, b->offset + whole));
	}
	s->phase = SLOT_WRITE;
	return OK;
}

/* ------------------------------------------------------------------------------------------------------- diff */

static void compare_blocks(struct slot *s)
{
	struct run *run = s->x->run;

	for (uint64_t i = 0; i < s->blocks.n; i++) {
		const struct run_block *b = block_of(s, i);
		for (uint32_t k = 0; k + 1 < b->part_count; k += 2) {
			const struct run_part *pa = part_of(run, b, k), *pb = part_of(run, b, k + 1);
			const struct run_dst *d = &run->dsts[pa->dst];
			uint32_t item = dtype_bytes((enum dtype)d->dtype);
			const unsigned char *a = s->blocks.v[i].data + part_at(run, b, pa);
			const unsigned char *c = s->blocks.v[i].data + part_at(run, b, pb);
			stats_compare((enum dtype)d->dtype, a, c, (pa->end - pa->begin) / item, &run->head->opts.near, pa->begin / item,
				      &run->diffs[(pa - run->parts) / 2]);
			atomic_fetch_add(&run->ranks[run->tasks[s->task].rank_index].bytes_done, pa->end - pa->begin);
		}
	}
	s->phase = SLOT_IDLE;
}

/* ------------------------------------------------------------------------------------------------------ finish */

enum err exec_count_file(struct slot *s, uint32_t file)
{
	uint32_t *due;

	struct run_file *f = &s->x->run->files[file];
	if (atomic_fetch_sub(&f->blocks_left, 1) != 1 || f->late)
		return OK;
	if (f->base && atomic_load(&f->differs) == RUN_UNDECIDED)
		return exec_share_file(s, file);
	TRY(vec_push(&s->sync, &due));
	*due = file;
	return OK;
}

static FALLIBLE enum err count_part(struct slot *s, const struct run_part *p)
{
	struct run *run = s->x->run;
	struct run_dst *d = &run->dsts[p->dst];
	uint32_t *due;

	atomic_fetch_add(&run->ranks[d->rank % run->ranks_n].bytes_done, p->end - p->begin);
	if (atomic_fetch_sub(&d->parts_left, 1) != 1)
		return OK;
	if (d->part_count > 1) { /* the digest of the digests, the CRC32 of all */
		CLEANUP(buf_free) struct buf all = BUF_INIT(1u << 31);
		const struct run_part *parts = &run->parts[d->first_part];
		struct digest whole;
		d->crc32 = parts[0].crc32;
		for (uint64_t i = 0; i < d->part_count; i++) {
			if (i)
				d->crc32 = digest_crc32_combine(d->crc32, parts[i].crc32,
								parts[i].end - parts[i].begin);
			buf_put(&all, parts[i].xxh3_128, sizeof parts[i].xxh3_128);
		}
		TRY(buf_status(&all));
		digest_block(all.p, all.len, &whole);
		memcpy(d->xxh3_128, whole.xxh3_128, sizeof d->xxh3_128);
	}
	if (d->small || d->bare || d->kind == RUN_DST_RAW)
		return OK;
	TRY(vec_push(&s->finish, &due));
	*due = p->dst;
	return OK;
}

/* Head and tail of every large item that is complete now; `edges` holds them, each on pages of its own. */
static FALLIBLE enum err write_edges(struct slot *s)
{
	const struct run *run = s->x->run;
	uint64_t bytes = 0, at = 0;

	s->writes.n = 0;
	TRY(vec_reserve(&s->writes, 2 * s->finish.n));
	for (uint64_t i = 0; i < s->finish.n; i++) {
		const struct run_dst *d = &run->dsts[s->finish.v[i]];
		bytes += d->payload_off + (((d->length - d->tail_off) + PAGE - 1) & ~(uint64_t)(PAGE - 1));
	}
	mem_free(s->edges);
	s->edges = aligned_alloc(PAGE, bytes ? bytes : PAGE);
	NEED(s->edges, "no memory for archive headers");
	memset(s->edges, 0, bytes);
	for (uint64_t i = 0; i < s->finish.n; i++) {
		struct run_dst *d = &run->dsts[s->finish.v[i]];
		const int64_t *sizes = run->dims + d->dims_at + d->ndim;
		CLEANUP(buf_free) struct buf b = BUF_INIT(1 << 20);
		bool shared;
		TRY(item_put_head(&b, (enum dtype)d->dtype, d->ndim, sizes, ITEM_ALIGN, d->crc32));
		must(b.len == d->payload_off);
		memcpy(s->edges + at, b.p, b.len);
		unsigned char *head = s->edges + at;
		at += d->payload_off;
		TRY(item_put_tail(&b, (enum dtype)d->dtype, d->ndim, sizes, ITEM_ALIGN, d->crc32));
		uint64_t tail = b.len - d->payload_off, padded = (tail + PAGE - 1) & ~(uint64_t)(PAGE - 1);
		memcpy(s->edges + at, b.p + d->payload_off, tail);
		at += padded;
		digest_edges(d, b.p, b.p + d->payload_off);
		TRY(exec_share_edges(s, s->finish.v[i], &shared));
		if (shared)
			continue;
		TRY(exec_push_write(s, d->file, head, d->payload_off, d->offset));
		TRY(exec_push_write(s, d->file, head + d->payload_off, padded, d->offset + d->tail_off));
	}
	s->phase = SLOT_FINISH;
	return OK;
}

static FALLIBLE enum err written(struct slot *s)
{
	s->finish.n = s->sync.n = 0;
	for (uint64_t i = 0; i < s->blocks.n; i++) {
		const struct run_block *b = block_of(s, i);
		for (uint32_t k = 0; k < b->part_count && !s->redo; k++)
			TRY(count_part(s, part_of(s->x->run, b, k)));
		TRY(exec_count_file(s, b->file));
	}
	if (s->x->gated && !s->redo)
		TRY(gate_done(&s->x->gate, s->task));
	return write_edges(s);
}

enum err exec_block_redo(struct slot *s, const struct slot_redo *r)
{
	uint32_t *due;

	s->task = r->task;
	if (!r->edges)
		return begin(s, r->index, 1);
	s->blocks.n = s->finish.n = s->sync.n = 0;
	TRY(vec_push(&s->finish, &due));
	*due = (uint32_t)r->index;
	return write_edges(s);
}

enum err exec_end_files(struct slot *s)
{
	const struct run *run = s->x->run;
	struct store_at *at;
	struct wave_op *op;
	s->writes.n = 0;
	TRY(vec_reserve(&s->writes, s->sync.n));
	for (uint64_t i = 0; i < s->sync.n; i++) {
		const struct run_file *f = &run->files[s->sync.v[i]];
		TRY(files_pin(&s->x->files, s->sync.v[i], &at));
		bool has_fd = store_fd(*at) >= 0;
		enum err e = f->direct && f->bytes % PAGE ? at->store->ops->resize(*at, f->bytes, "") : OK;
		files_unpin(&s->x->files, s->sync.v[i]);
		TRY(e);
		if (has_fd && run->head->opts.no_sync)
			continue;
		TRY(vec_push(&s->writes, &op));
		op->file = s->sync.v[i];
		op->io = (struct io_op){ .kind = IO_FSYNC };
		TRY(exec_queue(s, op));
	}
	s->phase = SLOT_SYNC;
	return OK;
}

static FALLIBLE enum err finished(struct slot *s)
{
	for (uint64_t i = 0; i < s->finish.n; i++)
		TRY(exec_count_file(s, s->x->run->dsts[s->finish.v[i]].file));
	return exec_end_files(s);
}

static FALLIBLE enum err fetched(struct slot *s)
{
	if (s->wave.ops.n) {
		TRY(exec_guarded(s, copy));
		s->wave.ops.n = 0;
	}
	TRY(exec_guarded(s, fill));
	if (s->wave.reads.n)
		return exec_queue_wave(s);
	if (read_plan_more(&s->reads))
		return OK;
	if (s->x->run->head->opts.mode == RUN_DIFF) {
		compare_blocks(s);
		return OK;
	}
	TRY(average(s));
	if (read_plan_more(&s->reads))
		return OK;
	/* Quantises the float32 values that were read to their place in blocks. */
	each(q, s->quants.v, s->quants.n)
		quant_q8_0_part(q->at, q->floats, q->skip, q->bytes);
	exec_block_drop(s);
	TRY(exec_guarded(s, hash_blocks));
	return write_blocks(s);
}

enum err exec_block_advance(struct slot *s)
{
	switch (s->phase) {
	case SLOT_FETCH:
		return fetched(s);
	case SLOT_WRITE:
		return written(s);
	case SLOT_FINISH:
		return finished(s);
	case SLOT_SYNC:
	case SLOT_IDLE:
		s->phase = SLOT_IDLE;
		return OK;
	}
	return ERR(INTERNAL, "a slot in phase %d", (int)s->phase);
}
