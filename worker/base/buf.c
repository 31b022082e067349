/* buf.c: see buf.h. */
#include "base/buf.h"

#include <stdarg.h>
#include <stdio.h>

#include "base/mem.h"

void buf_free(struct buf *b)
{
	mem_free(b->p);
	*b = BUF_INIT(b->max);
}

static bool make_room(struct buf *b, size_t more)
{
	if (b->failed)
		return false;
	if (more > b->max - b->len) {
		b->failed = ERR(LIMIT_EXCEEDED, "more than %zu bytes", b->max);
		return false;
	}
	if (more <= b->cap - b->len)
		return true;
	size_t cap = b->cap < 256 ? 256 : b->cap;
	while (cap - b->len < more)
		cap = cap > b->max / 2 ? b->max : cap * 2;
	unsigned char *p = mem_grow(b->p, cap, 1);
	if (!p) {
		b->failed = ERR(NO_MEMORY, "no memory for %zu bytes", cap);
		return false;
	}
	b->p = p;
	b->cap = cap;
	return true;
}

enum err buf_reserve(struct buf *b, size_t more, unsigned char **at_out)
{
	if (!make_room(b, more))
		return b->failed;
	*at_out = b->p ? b->p + b->len : NULL; /* NULL: no bytes of an empty buffer */
	b->len += more;
	return OK;
}

void buf_put(struct buf *b, const void *p, size_t n)
{
	if (n && make_room(b, n)) {
		memcpy(b->p + b->len, p, n);
		b->len += n;
	}
}

void buf_puts(struct buf *b, const char *z)
{
	buf_put(b, z, strlen(z));
}

void buf_putc(struct buf *b, unsigned char c)
{
	buf_put(b, &c, 1);
}

void buf_fill(struct buf *b, unsigned char c, size_t n)
{
	if (n && make_room(b, n)) {
		memset(b->p + b->len, c, n);
		b->len += n;
	}
}

static void put_le(struct buf *b, uint64_t v, size_t n)
{
	unsigned char bytes[8];

	for (size_t i = 0; i < n; i++)
		bytes[i] = (unsigned char)(v >> (8 * i));
	buf_put(b, bytes, n);
}

void buf_le16(struct buf *b, uint16_t v) { put_le(b, v, 2); }
void buf_le32(struct buf *b, uint32_t v) { put_le(b, v, 4); }
void buf_le64(struct buf *b, uint64_t v) { put_le(b, v, 8); }

void buf_printf(struct buf *b, const char *fmt, ...)
{
	char small[512];
	va_list ap;

	va_start(ap, fmt);
	int n = vsnprintf(small, sizeof small, fmt, ap);
	va_end(ap);
	if (n < 0 || (size_t)n < sizeof small) {
		buf_put(b, small, n < 0 ? 0 : (size_t)n);
		return;
	}
	if (!make_room(b, (size_t)n + 1))
		return;
	va_start(ap, fmt);
	vsnprintf((char *)b->p + b->len, (size_t)n + 1, fmt, ap);
	va_end(ap);
	b->len += (size_t)n;
}

/* Length of the well-formed UTF-8 sequence at p, 0 if there is none. */
static size_t utf8_len(const char *p, size_t n)
{
	for (size_t k = 1; k <= 4 && k <= n; k++)
		if (str_utf8((struct str){ p, k }))
			return k;
	return 0;
}

void buf_json_member(struct buf *b, const char *key, struct str s)
{
	buf_puts(b, key);
	buf_json_str(b, s);
}

void buf_json_str(struct buf *b, struct str s)
{
	size_t i = 0, plain = 0;

	buf_putc(b, '"');
	while (i < s.n) {
		unsigned char c = (unsigned char)s.p[i];
		size_t len = c < 0x80 ? 1 : utf8_len(s.p + i, s.n - i);
		if (len && c >= 0x20 && c != '"' && c != '\\' && c != 0x7F) {
			i += len;
			continue;
		}
		buf_put(b, s.p + plain, i - plain);
		if (len == 0)
			buf_puts(b, "\xEF\xBF\xBD");
		else if (c == '"' || c == '\\')
			buf_put(b, (unsigned char[]){ '\\', c }, 2);
		else
			buf_printf(b, "\\u%04x", c);
		plain = ++i;
	}
	buf_put(b, s.p + plain, i - plain);
	buf_putc(b, '"');
}

enum err buf_status(const struct buf *b)
{
	return b->failed;
}
