/* jscan.c: see jscan.h. One state (what may come next) and one bit per level (object or array) are all it remembers. */
#include "format/jscan.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/jtext.h"


struct jscan jscan_of(struct str text, enum err code)
{
	return (struct jscan){ .text = text, .code = code, .want = JSCAN_WANT_VALUE };
}

enum err jscan_bad(const struct jscan *js, const char *what)
{
	err_record(js->code, 0, ERR_PLACE, "%s at byte %zu of the JSON text", what, js->at);
	return js->code;
}

static int peek(const struct jscan *js)
{
	return js->at < js->text.n ? (unsigned char)js->text.p[js->at] : -1;
}

static void skip_space(struct jscan *js)
{
	for (int c = peek(js); c == ' ' || c == '\n' || c == '\t' || c == '\r'; c = peek(js))
		js->at++;
}

static bool in_object(const struct jscan *js)
{
	return js->depth && (js->is_object >> (js->depth - 1) & 1);
}

static void after_value(struct jscan *js)
{
	js->want = JSCAN_WANT_MORE;
}

static FALLIBLE enum err open_level(struct jscan *js, bool object, struct jscan_token *t)
{
	if (js->depth == JSCAN_DEPTH_MAX)
		return jscan_bad(js, "nested too deeply");
	js->is_object &= ~(1ull << js->depth);
	js->is_object |= (uint64_t)object << js->depth;
	js->depth++;
	js->at++;
	js->want = JSCAN_WANT_FIRST;
	t->kind = object ? JSCAN_OBJECT : JSCAN_ARRAY;
	return OK;
}

static FALLIBLE enum err close_level(struct jscan *js, struct jscan_token *t)
{
	bool object = in_object(js);

	if (js->depth == 0 || peek(js) != (object ? '}' : ']'))
		return jscan_bad(js, "a bracket too many");
	js->depth--;
	js->at++;
	after_value(js);
	t->kind = object ? JSCAN_OBJECT_END : JSCAN_ARRAY_END;
	return OK;
}

/* The four hex digits at an offset of a string; -1: there are none. */
static int64_t hex4(struct str s, size_t at)
{
	return at > s.n ? -1 : str_hex((struct str){ s.p + at, s.n - at }, 4);
}

static FALLIBLE enum err scan_string(struct jscan *js, struct jscan_token *t)
{
	size_t from = ++js->at;

	for (;; js->at++) {
		int c = peek(js);
		if (c < 0)
			return jscan_bad(js, "a string does not end");
		if (c == '"')
			break;
		if (c < 0x20)
			return jscan_bad(js, "a control character in a string");
		if (c != '\\')
			continue;
		t->escaped = true;
		js->at++;
		c = peek(js);
		if (c == 'u' && hex4(js->text, js->at + 1) >= 0)
			js->at += 4;
		else if (c <= 0 || !strchr("\"\\/bfnrt", c))
			return jscan_bad(js, "a wrong escape in a string");
	}
	t->raw = (struct str){ js->text.p + from, js->at - from };
	js->at++;
	if (!str_utf8(t->raw))
		return jscan_bad(js, "a string that is not UTF-8");
	return OK;
}

static bool digits(struct jscan *js)
{
	size_t from = js->at;

	while (peek(js) >= '0' && peek(js) <= '9')
		js->at++;
	return js->at > from;
}

static FALLIBLE enum err scan_number(struct jscan *js, struct jscan_token *t)
{
	size_t from = js->at;
	bool good;

	t->integer = true;
	if (peek(js) == '-')
		js->at++;
	if (peek(js) == '0') {
		js->at++;
		good = true;
	} else {
		good = digits(js);
	}
	if (good && peek(js) == '.') {
		js->at++;
		t->integer = false;
		good = digits(js);
	}
	if (good && (peek(js) == 'e' || peek(js) == 'E')) {
		js->at++;
		t->integer = false;
		if (peek(js) == '+' || peek(js) == '-')
			js->at++;
		good = digits(js);
	}
	if (!good)
		return jscan_bad(js, "a wrong number");
	t->raw = (struct str){ js->text.p + from, js->at - from };
	t->kind = JSCAN_NUMBER;
	return OK;
}

static FALLIBLE enum err scan_word(struct jscan *js, struct jscan_token *t)
{
	static const struct { const char *word; enum jscan_kind kind; } words[] = {
		{ "true", JSCAN_TRUE }, { "false", JSCAN_FALSE }, { "null", JSCAN_NULL },
	};
	struct str rest = { js->text.p + js->at, js->text.n - js->at };

	for (size_t i = 0; i < sizeof words / sizeof *words; i++) {
		if (!str_starts(rest, words[i].word))
			continue;
		t->kind = words[i].kind;
		t->raw = (struct str){ rest.p, strlen(words[i].word) };
		js->at += t->raw.n;
		return OK;
	}
	return jscan_bad(js, peek(js) < 0 ? "the text ends too early" : "an unexpected character");
}

static FALLIBLE enum err scan_value(struct jscan *js, struct jscan_token *t)
{
	int c = peek(js);

	if (c == '{' || c == '[')
		return open_level(js, c == '{', t);
	if (c == '"') {
		t->kind = JSCAN_STRING;
		TRY(scan_string(js, t));
	} else if (c == '-' || (c >= '0' && c <= '9')) {
		TRY(scan_number(js, t));
	} else {
		TRY(scan_word(js, t));
	}
	after_value(js);
	return OK;
}

static FALLIBLE enum err scan_key(struct jscan *js, struct jscan_token *t)
{
	if (peek(js) != '"')
		return jscan_bad(js, "a key is missing");
	t->kind = JSCAN_KEY;
	TRY(scan_string(js, t));
	skip_space(js);
	if (peek(js) != ':')
		return jscan_bad(js, "a colon is missing");
	js->at++;
	js->want = JSCAN_WANT_VALUE;
	return OK;
}

enum err jscan_next(struct jscan *js, struct jscan_token *t)
{
	*t = (struct jscan_token){ .kind = JSCAN_END };
	skip_space(js);
	if (js->want == JSCAN_WANT_MORE) {
		int c = peek(js);
		if (js->depth == 0)
			return c < 0 ? OK : jscan_bad(js, "something behind the value");
		if (c == '}' || c == ']')
			return close_level(js, t);
		if (c != ',')
			return jscan_bad(js, c < 0 ? "the text ends too early" : "a comma is missing");
		js->at++;
		js->want = JSCAN_WANT_MEMBER;
		skip_space(js);
	} else if (js->want == JSCAN_WANT_FIRST && (peek(js) == '}' || peek(js) == ']')) {
		return close_level(js, t);
	}
	if (js->want != JSCAN_WANT_VALUE && in_object(js))
		return scan_key(js, t);
	return scan_value(js, t);
}

enum err jscan_expect(struct jscan *js, enum jscan_kind kind, struct jscan_token *out)
{
	static const char *const missing[] = {
		[JSCAN_END] = "something behind the value", [JSCAN_OBJECT] = "not the object that must be here",
		[JSCAN_OBJECT_END] = "a key too many", [JSCAN_ARRAY] = "not the array that must be here",
		[JSCAN_ARRAY_END] = "an element too many", [JSCAN_KEY] = "a key is missing",
		[JSCAN_STRING] = "not the string that must be here", [JSCAN_NUMBER] = "not the number that must be here",
		[JSCAN_TRUE] = "not true", [JSCAN_FALSE] = "not false", [JSCAN_NULL] = "not null",
	};
	struct jscan_token t;

	TRY(jscan_next(js, &t));
	if (t.kind != kind)
		return jscan_bad(js, missing[kind]);
	*out = t;
	return OK;
}

enum err jscan_skip(struct jscan *js, const struct jscan_token *first, struct str *span_out)
{
	const char *from = first->raw.p;
	struct jscan_token t = *first;

	if (first->kind == JSCAN_STRING)
		from--;
	else if (first->kind == JSCAN_OBJECT || first->kind == JSCAN_ARRAY)
		from = js->text.p + js->at - 1;
	must(from);
	if (first->kind == JSCAN_OBJECT || first->kind == JSCAN_ARRAY)
		for (uint32_t outer = js->depth - 1; js->depth > outer;)
			TRY(jscan_next(js, &t));
	*span_out = (struct str){ from, (size_t)(js->text.p + js->at - from) };
	return OK;
}

uint32_t jscan_escape(struct str raw, size_t *i)
{
	static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t";
	char c = raw.p[*i + 1];

	*i += 2;
	if (c != 'u')
		return (uint32_t)to[strchr(from, c) - from];
	int64_t high = hex4(raw, *i), low = high >= 0xD800 && high < 0xDC00 ? hex4(raw, *i + 6) : -1;
	*i += 4;
	if (low >= 0xDC00 && low < 0xE000 && raw.p[*i] == '\\' && raw.p[*i + 1] == 'u') {
		*i += 6;
		return (uint32_t)(0x10000 + ((high - 0xD800) << 10) + (low - 0xDC00));
	}
	return (uint32_t)high;
}

enum err jscan_str(const struct jscan *, const struct jscan_token *t, struct arena *a, struct str *out)
{
	char *p;
	size_t n = 0;

	must(t->kind == JSCAN_STRING || t->kind == JSCAN_KEY);
	if (!t->escaped) {
		*out = t->raw;
		return OK;
	}
	TRY(arena_alloc(a, t->raw.n, 1, &p)); /* an escape is never shorter than what it stands for */
	for (size_t i = 0; i < t->raw.n;) {
		if (t->raw.p[i] == '\\')
			n += str_put_utf8(p + n, jscan_escape(t->raw, &i));
		else
			p[n++] = t->raw.p[i++];
	}
	*out = (struct str){ p, n };
	return OK;
}

bool jscan_i64(const struct jscan_token *t, int64_t *out)
{
	uint64_t v;

	if (t->kind != JSCAN_NUMBER || !t->integer)
		return false;
	bool minus = t->raw.p[0] == '-';
	struct str magnitude = { t->raw.p + minus, t->raw.n - minus };
	if (!str_to_u64(magnitude, &v) || v > (uint64_t)INT64_MAX + minus)
		return false;
	*out = minus ? (int64_t)(0 - v) : (int64_t)v;
	return true;
}

/* glibc's strtod rounds correctly but wants a NUL; a number that does not fit the copy is one that no writer makes. */
bool jscan_double(const struct jscan_token *t, double *out)
{
	char text[1200];

	if (t->kind != JSCAN_NUMBER || t->raw.n >= sizeof text)
		return false;
	memcpy(text, t->raw.p, t->raw.n);
	text[t->raw.n] = 0;
	double v = strtod(text, NULL);
	if (!isfinite(v))
		return false;
	*out = v;
	return true;
}

/* A lone surrogate in UTF-8's form: ED A0..BF xx. */
static bool is_surrogate(struct str s, size_t i)
{
	return s.n - i >= 3 && (unsigned char)s.p[i] == 0xED && (unsigned char)s.p[i + 1] >= 0xA0 &&
	       ((unsigned char)s.p[i + 1] & 0xC0) == 0x80 && ((unsigned char)s.p[i + 2] & 0xC0) == 0x80;
}

enum err jscan_put_str(struct buf *b, struct str s)
{
	size_t from = 0;

	buf_putc(b, '"');
	for (size_t i = 0; i <= s.n; i++) {
		bool lone = i < s.n && is_surrogate(s, i);
		unsigned char c = i < s.n ? (unsigned char)s.p[i] : 0;
		if (i < s.n && !lone && c >= 0x20 && c != '"' && c != '\\')
			continue;
		struct str run = { s.p + from, i - from };
		if (!str_utf8(run))
			return ERR(FORMAT_IMAGE, "a string that is not UTF-8 cannot be said in JSON");
		buf_put(b, run.p, run.n);
		if (lone) {
			unsigned high = (unsigned char)s.p[i + 1] & 0x3F, low = (unsigned char)s.p[i + 2] & 0x3F;
			buf_printf(b, "\\u%04x", 0xD000u | high << 6 | low);
			i += 2;
		} else if (i < s.n && c < 0x20) {
			buf_printf(b, "\\u%04x", c);
		} else if (i < s.n) {
			buf_putc(b, '\\');
			buf_putc(b, c);
		}
		from = i + 1;
	}
	buf_putc(b, '"');
	return buf_status(b);
}

void jscan_put_double(struct buf *b, double v)
{
	jtext_put_double(b, v);
}
