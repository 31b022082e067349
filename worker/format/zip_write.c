/* zip_write.c: stored records, with CRC and sizes in the local headers and no data descriptors: a reader that stops in the middle knows
 * what it has. */
#include "format/zip.h"


enum { LOCAL_BYTES = 30, FB_BYTES = 4, WIDE_HEAD = 4, UTF8_FLAG = 0x0800 };
#define SATURATED 0xFFFFFFFFu

static bool wide(uint64_t v)
{
	return v >= SATURATED;
}

static uint32_t narrow(uint64_t v)
{
	return wide(v) ? SATURATED : (uint32_t)v;
}

/* version needed, flags, method, time and date, CRC, both sizes, length of the name */
static void put_common(struct buf *b, const struct zip_entry *e, bool needs_wide)
{
	buf_le16(b, needs_wide ? 45 : 0);
	buf_le16(b, UTF8_FLAG);
	buf_fill(b, 0, 6);
	buf_le32(b, e->crc32);
	buf_le32(b, narrow(e->bytes));
	buf_le32(b, narrow(e->bytes));
	buf_le16(b, (uint16_t)e->name.n);
}

/* The zip64 field: what is saturated elsewhere, in this order. The local header always has both sizes. */
static uint32_t wide_bytes(const struct zip_entry *e, bool central)
{
	uint32_t n = (wide(e->bytes) ? 16 : 0) + (central && wide(e->header_off) ? 8 : 0);

	return n ? n + WIDE_HEAD : 0;
}

static void put_wide(struct buf *b, const struct zip_entry *e, bool central)
{
	uint32_t n = wide_bytes(e, central);

	if (!n)
		return;
	buf_le16(b, 1);
	buf_le16(b, (uint16_t)(n - WIDE_HEAD));
	if (wide(e->bytes)) {
		buf_le64(b, e->bytes);
		buf_le64(b, e->bytes);
	}
	if (central && wide(e->header_off))
		buf_le64(b, e->header_off);
}

void zip_put_local_entry(struct buf *b, uint64_t at, struct zip_entry *e, uint32_t align)
{
	must(e->name.n <= ZIP_NAME_MAX && align && (align & (align - 1)) == 0 && align <= 32768);
	uint64_t fixed = LOCAL_BYTES + e->name.n + wide_bytes(e, false);
	uint64_t fb = align > 1 ? FB_BYTES + ((align - (at + fixed + FB_BYTES) % align) % align) : 0;

	e->header_off = at;
	buf_le32(b, 0x04034b50);
	put_common(b, e, wide(e->bytes));
	buf_le16(b, (uint16_t)(wide_bytes(e, false) + fb));
	buf_put(b, e->name.p, e->name.n);
	put_wide(b, e, false);
	if (fb) {
		buf_puts(b, "FB");
		buf_le16(b, (uint16_t)(fb - FB_BYTES));
		buf_fill(b, 'Z', fb - FB_BYTES);
	}
}

void zip_put_central_entry(struct buf *b, const struct zip_entry *e)
{
	must(e->comment.n <= UINT16_MAX);
	buf_le32(b, 0x02014b50);
	buf_le16(b, 0);
	put_common(b, e, wide_bytes(e, true));
	buf_le16(b, (uint16_t)wide_bytes(e, true));
	buf_le16(b, (uint16_t)e->comment.n);
	buf_fill(b, 0, 8); /* disk, attributes */
	buf_le32(b, narrow(e->header_off));
	buf_put(b, e->name.p, e->name.n);
	put_wide(b, e, true);
	if (e->comment.n)
		buf_put(b, e->comment.p, e->comment.n);
}

static void put_end64(struct buf *b, uint64_t count, uint64_t bytes, uint64_t at)
{
	buf_le32(b, 0x06064b50);
	buf_le64(b, 44);
	buf_le16(b, 45);
	buf_le16(b, 45);
	buf_le64(b, 0);
	buf_le64(b, count);
	buf_le64(b, count);
	buf_le64(b, bytes);
	buf_le64(b, at);
	buf_le32(b, 0x07064b50);
	buf_le32(b, 0);
	buf_le64(b, at + bytes);
	buf_le32(b, 1);
}

void zip_put_end(struct buf *b, uint64_t count, uint64_t bytes, uint64_t at)
{
	uint16_t narrow_count = count < UINT16_MAX ? (uint16_t)count : UINT16_MAX;

	if (wide(at) || wide(bytes) || count >= UINT16_MAX)
		put_end64(b, count, bytes, at);
	buf_le32(b, 0x06054b50);
	buf_le32(b, 0);
	buf_le16(b, narrow_count);
	buf_le16(b, narrow_count);
	buf_le32(b, narrow(bytes));
	buf_le32(b, narrow(at));
	buf_le16(b, 0);
}

void zip_put_local(struct zip_writer *w, struct buf *b, uint64_t at, const char *name, uint64_t bytes, uint32_t crc32,
		   uint32_t align)
{
	must(w->count < ZIP_OUT_MAX);
	w->out[w->count] = (struct zip_entry){ .name = str_of(name), .bytes = bytes, .crc32 = crc32 };
	zip_put_local_entry(b, at, &w->out[w->count++], align);
}

void zip_put_tail(const struct zip_writer *w, struct buf *b, uint64_t at)
{
	size_t start = b->len;

	for (uint32_t i = 0; i < w->count; i++)
		zip_put_central_entry(b, &w->out[i]);
	zip_put_end(b, w->count, b->len - start, at);
}
