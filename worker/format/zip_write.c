/* zip_write.c: stored records, with CRC and sizes in the local headers and no data descriptors: everything is known before the first
 * byte is written, and a reader that stops in the middle knows what it has. */
#include "format/zip.h"

#include "base/num.h"

enum { LOCAL_BYTES = 30, FB_BYTES = 4, WIDE_BYTES = 20, UTF8_FLAG = 0x0800 };
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
static void put_common(struct buf *b, const char *name, uint64_t bytes, uint32_t crc32)
{
	buf_le16(b, wide(bytes) ? 45 : 0);
	buf_le16(b, UTF8_FLAG);
	buf_fill(b, 0, 6);
	buf_le32(b, crc32);
	buf_le32(b, narrow(bytes));
	buf_le32(b, narrow(bytes));
	buf_le16(b, (uint16_t)strlen(name));
}

static void put_wide(struct buf *b, uint64_t bytes)
{
	buf_le16(b, 1);
	buf_le16(b, 16);
	buf_le64(b, bytes);
	buf_le64(b, bytes);
}

void zip_put_local(struct zip_writer *w, struct buf *b, uint64_t at, const char *name, uint64_t bytes, uint32_t crc32,
		   uint32_t align)
{
	must(w->count < ZIP_OUT_MAX && at < SATURATED && align && (align & (align - 1)) == 0 && align <= 32768);
	uint64_t fixed = LOCAL_BYTES + strlen(name) + (wide(bytes) ? WIDE_BYTES : 0);
	uint64_t fb = align > 1 ? FB_BYTES + ((align - (at + fixed + FB_BYTES) % align) % align) : 0;

	w->out[w->count].name = name;
	w->out[w->count].header_off = at;
	w->out[w->count].bytes = bytes;
	w->out[w->count++].crc32 = crc32;
	buf_le32(b, 0x04034b50);
	put_common(b, name, bytes, crc32);
	buf_le16(b, (uint16_t)((wide(bytes) ? WIDE_BYTES : 0) + fb));
	buf_puts(b, name);
	if (wide(bytes))
		put_wide(b, bytes);
	if (fb) {
		buf_puts(b, "FB");
		buf_le16(b, (uint16_t)(fb - FB_BYTES));
		buf_fill(b, 'Z', fb - FB_BYTES);
	}
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

void zip_put_tail(const struct zip_writer *w, struct buf *b, uint64_t at)
{
	size_t start = b->len;

	for (uint32_t i = 0; i < w->count; i++) {
		bool big = wide(w->out[i].bytes);
		buf_le32(b, 0x02014b50);
		buf_le16(b, 0);
		put_common(b, w->out[i].name, w->out[i].bytes, w->out[i].crc32);
		buf_le16(b, big ? WIDE_BYTES : 0);
		buf_fill(b, 0, 10); /* comment, disk, attributes */
		buf_le32(b, (uint32_t)w->out[i].header_off);
		buf_puts(b, w->out[i].name);
		if (big)
			put_wide(b, w->out[i].bytes);
	}
	uint64_t bytes = b->len - start;
	if (wide(at))
		put_end64(b, w->count, bytes, at);
	buf_le32(b, 0x06054b50);
	buf_le32(b, 0);
	buf_le16(b, (uint16_t)w->count);
	buf_le16(b, (uint16_t)w->count);
	buf_le32(b, (uint32_t)bytes);
	buf_le32(b, narrow(at));
	buf_le16(b, 0);
}
