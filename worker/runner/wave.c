/* wave.c: see wave.h. */
#include "runner/wave.h"

#include <stdlib.h>

#include "base/num.h"

void wave_begin(struct wave *w, unsigned char *memory, uint64_t bytes)
{
	w->memory = memory;
	w->bytes = bytes;
	w->pages = false;
	w->used = w->range_count = 0;
	w->reads.n = w->order.n = w->ops.n = w->digests.n = 0;
}

void wave_free(struct wave *w)
{
	vec_free(&w->reads);
	vec_free(&w->order);
	vec_free(&w->ops);
	vec_free(&w->digests);
}

/* The range that the read is a part of, or continues. NULL: none of the latest. */
static struct wave_range *range_at(struct wave *w, uint32_t file, uint64_t offset, uint64_t end)
{
	for (uint32_t i = 0; i < WAVE_RANGES && i < w->range_count; i++) {
		struct wave_range *r = &w->ranges[(w->range_count - 1 - i) % WAVE_RANGES];
		if (r->file == file && offset <= r->end + WAVE_GAP && r->begin <= end + WAVE_GAP)
			return r;
	}
	return NULL;
}

/* The memory that the read takes at most: a merged read may hold the gap in front of each of its parts, too. */
static uint64_t cost_of(const struct wave *w, const struct wave_range *r, uint64_t offset, uint64_t end)
{
	if (!r)
		return end - offset + (w->reads.n ? WAVE_GAP : 0);
	return (offset < r->begin ? r->begin - offset : 0) + (end > r->end ? end - r->end : 0);
}

static void note_range(struct wave *w, struct wave_range *r, uint32_t file, uint64_t offset, uint64_t end)
{
	if (!r) {
		w->ranges[w->range_count++ % WAVE_RANGES] = (struct wave_range){ file, offset, end };
		return;
	}
	r->begin = num_min(r->begin, offset);
	r->end = num_max(r->end, end);
}

enum err wave_add(struct wave *w, uint32_t file, uint64_t offset, uint64_t bytes, unsigned char *into,
		  uint32_t *index_out, bool *full_out)
{
	struct wave_read *r;
	uint16_t skip = 0, slack = 0;

	if (w->pages && !into) {
		skip = (uint16_t)(offset % WAVE_PAGE);
		slack = (uint16_t)(-(offset + bytes) % WAVE_PAGE);
		offset -= skip;
		bytes += (uint64_t)skip + slack;
	}
	struct wave_range *range = into ? NULL : range_at(w, file, offset, offset + bytes);
	uint64_t cost = into ? 0 : cost_of(w, range, offset, offset + bytes);

	*full_out = w->reads.n >= wave_reads_max(w->bytes) || cost > w->bytes - w->used;
	if (*full_out)
		return w->reads.n ? OK : ERR(INTERNAL, "a read of %ju bytes does not fit", (uintmax_t)bytes);
	w->used += cost;
	if (!into)
		note_range(w, range, file, offset, offset + bytes);
	*index_out = (uint32_t)w->reads.n;
	TRY(vec_push(&w->reads, &r));
	*r = (struct wave_read){ .file = file, .offset = offset, .bytes = bytes, .skip = skip, .slack = slack, .into = into };
	return OK;
}

static int by_place(const void *a, const void *b, void *reads)
{
	const struct wave_read *x = (struct wave_read *)reads + *(const uint32_t *)a;
	const struct wave_read *y = (struct wave_read *)reads + *(const uint32_t *)b;

	if (!x->into != !y->into)
		return x->into ? -1 : 1; /* reads with a place of their own are not merged: they go first */
	return num_order(x->file, y->file) ?: num_order(x->offset, y->offset);
}

static FALLIBLE enum err start_op(struct wave *w, const struct wave_read *r, uint64_t at, void *user)
{
	struct wave_op *op;

	TRY(vec_push(&w->ops, &op));
	op->file = r->file;
	op->which = r->into ? r->which : 0;
	op->io = (struct io_op){ .kind = IO_READ, .offset = r->offset, .bytes = r->bytes, .slack = r->slack, .user = user,
				 .buf = r->into ? r->into : w->memory + at };
	return OK;
}

enum err wave_plan(struct wave *w, void *user)
{
	uint64_t at = 0;

	if (w->reads.n == 0)
		return OK;
	TRY(vec_reserve(&w->order, w->reads.n));
	w->order.n = w->reads.n;
	for (uint32_t i = 0; i < w->reads.n; i++)
		w->order.v[i] = i;
	qsort_r(w->order.v, w->order.n, sizeof *w->order.v, by_place, w->reads.v);
	for (uint64_t i = 0; i < w->order.n; i++) {
		struct wave_read *r = &w->reads.v[w->order.v[i]];
		struct wave_op *op = w->ops.n ? &w->ops.v[w->ops.n - 1] : NULL;
		uint64_t end = op ? op->io.offset + op->io.bytes : 0;
		bool joins = op && !r->into && op->file == r->file && i > 0 &&
			     !w->reads.v[w->order.v[i - 1]].into && r->offset <= end + WAVE_GAP;
		if (!joins) {
			TRY(start_op(w, r, at, user));
			op = &w->ops.v[w->ops.n - 1];
		} else if (r->offset + r->bytes > end) {
			op->io.bytes = r->offset + r->bytes - op->io.offset;
			op->io.slack = r->slack;
		} else if (r->offset + r->bytes == end) {
			op->io.slack = r->slack < op->io.slack ? r->slack : op->io.slack;
		}
		r->op = (uint32_t)w->ops.n - 1;
		if (!r->into)
			at = (uint64_t)((unsigned char *)op->io.buf - w->memory) + op->io.bytes;
	}
	must(at <= w->bytes);
	for (uint64_t i = 0; i < w->ops.n; i++)
		w->read_bytes += w->ops.v[i].io.bytes - w->ops.v[i].io.slack;
	return OK;
}

enum err wave_hash(struct wave *w, struct wave_op *op)
{
	uint64_t most = wave_digests_max(w->bytes);
	struct digest *d;

	if (w->digests.n == 0)
		TRY(vec_reserve(&w->digests, most)); /* all at once: it must not move while reads are under way */
	if (w->digests.n == most)
		return OK;
	TRY(vec_push(&w->digests, &d));
	op->digest = (uint16_t)w->digests.n;
	return OK;
}

unsigned char *wave_data(struct wave *w, uint32_t index)
{
	const struct wave_read *r = &w->reads.v[index];

	const struct io_op *io = &w->ops.v[r->op].io;

	return (unsigned char *)io->buf + (r->offset - io->offset) + r->skip;
}
