/* build_records.c: records that are read in parts (see build.h). The CRC32 of a flat tensor of DeepSpeed's, or of a storage that tensors
 * share, is of all its bytes: it is compared if the sources that a run takes are nearly all of them. Their CRC32s are put together
 * (sums.h), and the bytes between them, such as paddings, are read for that alone. A source that has the same bytes as the one before (a
 * shared parameter) is compared with that one instead: their CRC32s are equal, or one was read wrong. */
#include <stdlib.h>

#include "base/num.h"
#include "runner/build.h"

/* Bytes that are read for the comparison alone: none of them at most, but for small records. */
enum { REST_SHARE = 8, REST_BYTES = 64 << 10 };

static int by_place(const void *a, const void *b)
{
	const struct run_record_part *x = a, *y = b;

	return num_order(x->file, y->file) ?: num_order(x->offset, y->offset) ?: num_order(x->begin, y->begin) ?:
	       num_order(x->end, y->end) ?: num_order(x->src, y->src);
}

/* The parts of one record. */
struct record {
	struct run_build *b;
	const struct run_record_part *parts;
	uint64_t count;
	uint8_t *taken;
};

/* Finds the parts that are put together: apart from each other, or equal. Returns the bytes that none of them has. */
static uint64_t choose(struct record *r)
{
	uint64_t end = 0, before = UINT64_MAX, rest = r->parts[0].length;

	each(p, r->parts, r->count) {
		if (r->b->srcs.v[p->src].digest_count) /* which it is compared with */
			r->taken[p->src] = BUILD_NOT_TAKEN;
		if (r->taken[p->src] != BUILD_TAKEN_WHOLE)
			continue;
		if (p->begin >= end) {
			rest -= p->end - p->begin;
			end = p->end;
			before = p->begin;
		} else if (p->begin != before || p->end != end) {
			r->taken[p->src] = BUILD_TAKEN;
		}
	}
	return rest;
}

/* Adds a source of bytes of the record, named after its first part. */
static FALLIBLE enum err add_range(struct record *r, uint64_t begin, uint64_t end, uint32_t record, uint32_t *src_out)
{
	const struct run_record_part *p = &r->parts[0];
	struct run_src *s;

	*src_out = (uint32_t)r->b->srcs.n;
	TRY(vec_push(&r->b->srcs, &s));
	const struct run_src *first = &r->b->srcs.v[p->src];
	*s = (struct run_src){ .kind = RUN_SRC_RAW, .file = p->file, .named_file = p->file, .rank = first->rank, .fqn_at = first->fqn_at,
			       .fqn_len = first->fqn_len, .offset = p->offset + begin, .named_at = p->offset + begin,
			       .length = end - begin, .record = record, .summed = true };
	atomic_store(&s->crc_state, RUN_CRC_KNOWN);
	return OK;
}

/* The sum of what has the bytes twice is 0. */
static void set_twin(struct run_src *before, struct run_src *s, uint32_t index)
{
	before->twin = index + 1;
	s->summed = true;
	s->crc_wanted = 0;
	atomic_store(&s->crc_state, RUN_CRC_KNOWN);
	atomic_store(&s->sum_left, 2 * s->length);
}

static FALLIBLE enum err compare(struct record *r)
{
	uint64_t end = 0, length = r->parts[0].length;
	uint32_t record, gap, last = 0;

	TRY(add_range(r, 0, length, 0, &record));
	r->b->srcs.v[record].crc_wanted = r->parts[0].crc32;
	atomic_store(&r->b->srcs.v[record].sum_left, length);
	each(p, r->parts, r->count) {
		if (r->taken[p->src] == BUILD_NOT_TAKEN)
			continue;
		atomic_store(&r->b->srcs.v[p->src].unverified, 0);
		bool whole = r->taken[p->src] == BUILD_TAKEN_WHOLE, twin = whole && p->begin < end;
		if (whole && !twin && p->begin > end)
			TRY(add_range(r, end, p->begin, record + 1, &gap));
		struct run_src *s = &r->b->srcs.v[p->src];
		if (twin) {
			set_twin(&r->b->srcs.v[last], s, p->src);
		} else {
			s->record = record + 1;
			s->summed = whole;
		}
		if (whole) {
			last = p->src;
			end = p->end;
		}
	}
	return end < length ? add_range(r, end, length, record + 1, &gap) : OK;
}

enum err build_record_sums(struct run_build *b, uint8_t *taken)
{
	struct record r = { .b = b, .parts = b->record_parts.v, .taken = taken };

	if (b->record_parts.n == 0)
		return OK;
	const struct run_record_part *end = r.parts + b->record_parts.n;
	qsort(b->record_parts.v, b->record_parts.n, sizeof *b->record_parts.v, by_place);
	for (; r.parts < end; r.parts += r.count) {
		for (r.count = 1; r.parts + r.count < end && r.parts[r.count].file == r.parts->file &&
		     r.parts[r.count].offset == r.parts->offset;)
			r.count++;
		uint64_t rest = choose(&r);
		if (rest < r.parts->length && rest <= num_max(r.parts->length / REST_SHARE, num_min(REST_BYTES, r.parts->length - 1)))
			TRY(compare(&r));
	}
	return OK;
}
