/* pickle_text.c: strings and numbers that a stream spells out: the text opcodes of protocol 0, and
 * bytes that travel as a str of latin-1 characters up to protocol 2. Decoded text goes to pk->text. */
#include "format/pickle_impl.h"

#include <stdlib.h>

static FALLIBLE enum err text_room(struct pickle *pk, uint64_t n)
{
	pk->text.max = pk->text.cap + (pk->memory_max - pickle_memory(pk));
	if (n > pk->text.max - pk->text.len)
		return BAD(pk, "the strings of the pickle need more than %ju bytes of memory", (uintmax_t)pk->memory_max);
	return OK;
}

/* Decimal digits with an optional sign, as int() takes them. */
static bool is_decimal(struct str s)
{
	size_t i = s.n && (s.p[0] == '-' || s.p[0] == '+');

	if (i == s.n)
		return false;
	for (; i < s.n; i++)
		if (s.p[i] < '0' || s.p[i] > '9')
			return false;
	return true;
}

enum err text_int(struct pickle *pk, const struct pickle_op *op, pnode *out)
{
	struct str s = { (const char *)op->data, op->len };
	char copy[32];

	if (op->code == 'I' && (str_is(s, "00") || str_is(s, "01"))) {
		*out = s.p[1] == '1' ? N_TRUE : N_FALSE;
		return OK;
	}
	if (op->code == 'L' && s.n && s.p[s.n - 1] == 'L')
		s.n--;
	if (!is_decimal(s))
		return BAD(pk, "not a number");
	if (s.n < sizeof copy) {
		memcpy(copy, s.p, s.n);
		copy[s.n] = 0;
		errno = 0;
		long long v = strtoll(copy, NULL, 10);
		if (errno == 0)
			return node_int(pk, v, out);
	}
	TRY(node_ref(pk, PK_BIGINT, op->data, s.n, out));
	pk->cells.p[*out] |= 1u << HEAD_SHIFT;
	return OK;
}

enum err text_float(struct pickle *pk, const struct pickle_op *op, pnode *out)
{
	char copy[64], *end;

	if (op->len == 0 || op->len >= sizeof copy)
		return BAD(pk, "not a floating-point number");
	for (uint64_t i = 0; i < op->len; i++) {
		if (!memchr("0123456789+-.eEinfaINFA", op->data[i], 23))
			return BAD(pk, "not a floating-point number");
		copy[i] = (char)op->data[i];
	}
	copy[op->len] = 0;
	double v = strtod(copy, &end);
	if (*end)
		return BAD(pk, "not a floating-point number");
	return node_double(pk, v, out);
}

/* The hex digits at p; -1 if they are not there. */
static int64_t hex(const unsigned char *p, const unsigned char *end, unsigned digits)
{
	return str_hex((struct str){ (const char *)p, (size_t)(end - p) }, digits);
}

static void put_utf8(struct buf *b, uint32_t c)
{
	char utf8[4];

	buf_put(b, utf8, str_put_utf8(utf8, c));
}

/* One escape after a backslash of a quoted byte string. */
static FALLIBLE enum err unescape(struct pickle *pk, const unsigned char **at, const unsigned char *end)
{
	static const char from[] = "\\'\"abfnrtv", to[] = "\\'\"\a\b\f\n\r\t\v";
	unsigned char c = *(*at)++;
	const char *simple = c ? strchr(from, c) : NULL;

	if (simple) {
		buf_putc(&pk->text, (unsigned char)to[simple - from]);
	} else if (c == 'x') {
		int64_t v = hex(*at, end, 2);
		if (v < 0)
			return BAD(pk, "a damaged escape in a string");
		buf_putc(&pk->text, (unsigned char)v);
		*at += 2;
	} else if (c >= '0' && c <= '7') {
		unsigned v = c - '0';
		for (int i = 0; i < 2 && *at < end && **at >= '0' && **at <= '7'; i++)
			v = v * 8 + (unsigned)(*(*at)++ - '0');
		buf_putc(&pk->text, (unsigned char)v);
	} else {
		buf_putc(&pk->text, '\\');
		buf_putc(&pk->text, c);
	}
	return OK;
}

/* Python 2 had one type for text and bytes. */
static enum pickle_kind py2_kind(const unsigned char *p, uint64_t n)
{
	for (uint64_t i = 0; i < n; i++)
		if (p[i] >= 0x80)
			return PK_BYTES;
	return PK_STR;
}

enum err text_string(struct pickle *pk, const struct pickle_op *op, pnode *out)
{
	const unsigned char *p = op->data, *end = p + op->len;
	uint64_t from = pk->text.len;

	if (op->code != 'S')
		return node_ref(pk, py2_kind(p, op->len), p, op->len, out);
	while (end > p && (end[-1] == ' ' || end[-1] == '\r' || end[-1] == '\t'))
		end--;
	if (end - p < 2 || (*p != '\'' && *p != '"') || end[-1] != *p)
		return BAD(pk, "a string without its quotes");
	TRY(text_room(pk, op->len));
	p++;
	end--;
	while (p < end) {
		if (*p != '\\') {
			buf_putc(&pk->text, *p++);
			continue;
		}
		if (++p == end)
			return BAD(pk, "a damaged escape in a string");
		TRY(unescape(pk, &p, end));
	}
	TRY(buf_status(&pk->text));
	return node_text(pk, pk->text.len > from ? py2_kind(pk->text.p + from, pk->text.len - from) : PK_STR, from, out);
}

/* raw-unicode-escape: \uXXXX and \UXXXXXXXX, every other byte is a latin-1 character. */
enum err text_unicode(struct pickle *pk, const struct pickle_op *op, pnode *out)
{
	const unsigned char *p = op->data, *end = p + op->len;
	uint64_t from = pk->text.len;

	TRY(text_room(pk, op->len * 2));
	while (p < end) {
		unsigned digits = 0;
		if (*p == '\\' && end - p > 1)
			digits = p[1] == 'u' ? 4 : p[1] == 'U' ? 8 : 0;
		if (digits) {
			int64_t c = hex(p + 2, end, digits);
			if (c < 0 || c > 0x10FFFF)
				return BAD(pk, "a damaged escape in a string");
			put_utf8(&pk->text, (uint32_t)c);
			p += 2 + digits;
		} else if (*p == '\\' && end - p > 1 && p[1] == '\\') {
			buf_put(&pk->text, p, 2); /* a pair of them escapes nothing */
			p += 2;
		} else {
			put_utf8(&pk->text, *p++);
		}
	}
	return node_text(pk, PK_STR, from, out);
}

enum err text_latin1(struct pickle *pk, enum pickle_kind kind, pnode utf8, pnode *out)
{
	uint64_t from = pk->text.len;
	unsigned char *to;

	TRY(text_room(pk, pickle_str(pk, utf8).n));
	TRY(buf_reserve(&pk->text, pickle_str(pk, utf8).n, &to));
	struct str s = pickle_str(pk, utf8); /* only now: it may lie in the buffer that just grew */
	for (size_t i = 0; i < s.n; i++) {
		unsigned char c = (unsigned char)s.p[i];
		if (c >= 0xC2 && c <= 0xC3 && i + 1 < s.n)
			c = (unsigned char)((c & 3) << 6 | ((unsigned char)s.p[++i] & 63));
		else if (c >= 0x80)
			return BAD(pk, "bytes spelled with a character beyond latin-1");
		*to++ = c;
	}
	pk->text.len = (size_t)(to - pk->text.p);
	return node_text(pk, kind, from, out);
}

bool pickle_utf8(struct str s)
{
	return str_utf8_surrogates(s);
}
