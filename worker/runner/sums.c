/* sums.c: see sums.h. */
#include "runner/sums.h"

#include <stdio.h>

#include "tensor/box.h"

static FALLIBLE enum err wrong(struct sources *s, uint32_t src, const struct src_info *info)
{
	const struct run_src *rs = &s->run->srcs[src];
	char want[16], got[16];

	if (rs->by_blocks)
		TRY(sources_check_blocks(s, src, info));
	snprintf(want, sizeof want, "%08x", rs->crc_wanted);
	snprintf(got, sizeof got, "%08x", atomic_load(&rs->sum_crc32));
	return sources_at(s->run, src, err_expected(ERR(DIGEST_MISMATCH, "the payload's CRC32 is wrong"), want, got));
}

/* All of the payload was copied. The CRC32 of a deflated record, or of a storage that is larger than the item, is of other bytes. */
static FALLIBLE enum err compare(struct sources *s, uint32_t src)
{
	struct run_src *rs = &s->run->srcs[src];
	struct src_info *info;

	TRY(sources_info(s, src, &info));
	bool known = info->dense && atomic_load(&rs->crc_state) == RUN_CRC_KNOWN;
	if (known && atomic_load(&rs->sum_crc32) != rs->crc_wanted)
		return wrong(s, src, info);
	if (!known && !rs->by_blocks)
		return sources_check_all(s, src);
	if (!known)
		TRY(sources_check_blocks(s, src, info));
	atomic_fetch_add(&s->run->head->verified_bytes, info->payload_bytes);
	return OK;
}

/* behind: bytes of the payload behind these. */
static FALLIBLE enum err add_to(struct sources *s, uint32_t src, uint64_t bytes, uint32_t crc32, uint64_t behind)
{
	struct run_src *rs = &s->run->srcs[src];

	atomic_fetch_xor(&rs->sum_crc32, digest_crc32_move(crc32, digest_crc32_behind(behind)));
	uint64_t left = atomic_fetch_sub(&rs->sum_left, bytes);
	if (left < bytes)
		return sources_at(s->run, src, ERR(INTERNAL, "more was copied than there is"));
	return left == bytes ? compare(s, src) : OK;
}

static FALLIBLE enum err add(struct sources *s, uint32_t src, uint64_t bytes, uint32_t crc32, uint64_t behind)
{
	const struct run_src *rs = &s->run->srcs[src], *record = rs->record ? &s->run->srcs[rs->record - 1] : NULL;

	if (rs->twin)
		TRY(add_to(s, rs->twin - 1, bytes, crc32, behind));
	if (!record)
		return add_to(s, src, bytes, crc32, behind);
	return add_to(s, rs->record - 1, bytes, crc32, behind + record->offset + record->length - rs->offset - rs->length);
}

struct box_sum {
	const struct src_info *info;
	const int64_t *sizes;
	uint32_t ndim, dense;          /* dims order[dense] and further lie in a row */
	uint64_t row;                  /* … of so many bytes */
	uint32_t behind[NDIM_MAX];     /* digest_crc32_behind of a step along order[k] */
};

/* The CRC32 of the box's elements and of zeros between them. */
static uint32_t crc_of(const struct box_sum *b, uint32_t k, const unsigned char *from)
{
	uint32_t crc = 0;

	if (k == b->dense)
		return digest_crc32(0, from, b->row);
	uint8_t d = b->info->order[k];
	uint64_t pitch = (uint64_t)b->info->strides[d] * dtype_bytes((enum dtype)b->info->dtype);
	for (int64_t i = 0; i < b->sizes[d]; i++)
		crc = digest_crc32_move(crc, b->behind[k]) ^ crc_of(b, k + 1, from + (uint64_t)i * pitch);
	return crc;
}

static uint32_t box_crc(const struct src_info *info, uint32_t n, const int64_t *sizes, const unsigned char *from)
{
	struct box_sum b = { .info = info, .sizes = sizes, .ndim = n, .dense = n, .row = dtype_bytes((enum dtype)info->dtype) };

	for (; b.dense > 0; b.dense--) {
		uint8_t d = info->order[b.dense - 1];
		if (sizes[d] != 1 && (uint64_t)info->strides[d] * dtype_bytes((enum dtype)info->dtype) != b.row)
			break;
		b.row *= (uint64_t)sizes[d];
	}
	for (uint32_t k = 0; k < b.dense; k++)
		b.behind[k] = digest_crc32_behind((uint64_t)info->strides[info->order[k]] * dtype_bytes((enum dtype)info->dtype));
	return crc_of(&b, 0, from);
}

enum err sums_add(struct sources *s, uint32_t src, const int64_t *offsets, const int64_t *sizes, const unsigned char *from)
{
	const struct run_src *rs = &s->run->srcs[src];
	uint32_t base = run_src_base(rs, src), n = rs->ndim;
	struct src_info *info;

	if (!s->run->srcs[base].summed || (s->run->head->opts.mode == RUN_FILL_SEGMENTS && s->run->srcs[base].scan_count)) /* scans add */
		return OK;
	TRY(sources_info(s, src, &info));
	uint64_t item = dtype_bytes((enum dtype)info->dtype), bytes = box_volume(n, sizes) * item;
	if (info->deflated)
		return add(s, base, bytes, 0, 0);
	uint64_t end = info->storage_offset * item + sources_span(info, n, sizes, 0);
	for (uint32_t d = 0; d < n; d++)
		end += (uint64_t)offsets[d] * (uint64_t)info->strides[d] * item;
	return add(s, base, bytes, box_crc(info, n, sizes, from), info->payload_bytes - end);
}

enum err sums_add_bytes(struct sources *s, uint32_t src, uint64_t at, uint64_t bytes, uint32_t crc32)
{
	const struct run_src *rs = &s->run->srcs[src];

	return rs->summed ? add(s, src, bytes, crc32, rs->length - at - bytes) : OK;
}

enum err sums_done(const struct run *run)
{
	for (uint64_t i = 0; i < run->srcs_n; i++)
		if (run->srcs[i].summed && !run->srcs[i].record && atomic_load(&run->srcs[i].sum_left))
			return sources_at(run, (uint32_t)i, ERR(INTERNAL, "not all of it was copied"));
	return OK;
}
