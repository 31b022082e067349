/* torch_item_value.c: values between Python and JSON. A value becomes JSON only if the way back gives an equal one; everything else
 * stays what it was, an opaque blob, and is only named. Python objects are made from JSON with the few opcodes that every reader
 * allows; int and float stay apart by how the number is written (1, 1.0). */
#include "format/torch_item_graph.h"

#include <math.h>

#include "base/map.h"
#include "base/num.h"
#include "format/jscan.h"

enum { VALUE_TEXT_MIN = 64 << 20, VALUE_TEXT_MAX = ITEM_VALUE_PICKLE_MAX, DIGITS_MAX = 600 };

void item_value_free(struct item_value *v)
{
	buf_free(&v->text);
}

/* *exact turns false at the first thing that JSON cannot say; the walk then ends. */
struct walk {
	const struct pickle *pk;
	struct buf *b;
	bool exact;
};

static FALLIBLE enum err put_node(struct walk *w, pnode n, int depth);

static FALLIBLE enum err put_list(struct walk *w, pnode n, int depth)
{
	struct pickle_iter it = pickle_iter(w->pk, n);
	bool first = true;
	pnode item;

	buf_putc(w->b, '[');
	while (w->exact && pickle_next(w->pk, &it, &item)) {
		if (!first)
			buf_putc(w->b, ',');
		first = false;
		TRY(put_node(w, item, depth + 1));
	}
	buf_putc(w->b, ']');
	return OK;
}

static FALLIBLE enum err put_dict(struct walk *w, pnode n, int depth)
{
	CLEANUP(map_free) struct map keys = { 0 };
	struct pickle_iter it = pickle_iter(w->pk, n);
	pnode key, value;

	buf_putc(w->b, '{');
	while (w->exact && pickle_next(w->pk, &it, &key) && pickle_next(w->pk, &it, &value)) {
		struct str k = pickle_str(w->pk, key);
		uint32_t i = keys.raw.count, found;
		TRY(map_intern(&keys, k, i, &found));
		/* A NUL in a key is JSON, but jansson has no keys with it. */
		if (pickle_kind(w->pk, key) != PK_STR || found != i || !str_utf8(k) || (k.n && memchr(k.p, 0, k.n))) {
			w->exact = false;
			break;
		}
		if (i)
			buf_putc(w->b, ',');
		TRY(jscan_put_str(w->b, k));
		buf_putc(w->b, ':');
		TRY(put_node(w, value, depth + 1));
	}
	buf_putc(w->b, '}');
	return OK;
}

/* Shared nodes are written each time they are met: the buffer's maximum ends what would not end by itself. */
static FALLIBLE enum err put_node(struct walk *w, pnode n, int depth)
{
	struct str s = pickle_str(w->pk, n);
	int64_t i;
	double f;

	if (depth == PICKLE_DEPTH_MAX / 2) {
		w->exact = false;
		return OK;
	}
	TRY(buf_status(w->b));
	switch (pickle_kind(w->pk, n)) {
	case PK_NONE:
		buf_puts(w->b, "null");
		return OK;
	case PK_BOOL:
		buf_puts(w->b, pickle_is_true(w->pk, n) ? "true" : "false");
		return OK;
	case PK_INT:
		if (pickle_int(w->pk, n, &i))
			buf_printf(w->b, "%jd", (intmax_t)i);
		return OK;
	case PK_FLOAT:
		w->exact = pickle_float(w->pk, n, &f) && isfinite(f);
		if (w->exact)
			jscan_put_double(w->b, f);
		return OK;
	case PK_STR:
		w->exact = str_utf8(s);
		return w->exact ? jscan_put_str(w->b, s) : OK;
	case PK_LIST:
		return put_list(w, n, depth);
	case PK_DICT:
		return put_dict(w, n, depth);
	default:
		w->exact = false;
		return OK;
	}
}

static void put_class(const struct pickle *pk, pnode n, struct buf *b)
{
	char name[256];
	struct str callee = pickle_name(pk, n);

	if (pickle_kind(pk, n) == PK_OBJECT && str_is(pickle_module(pk, n), "torch._utils") &&
	    str_starts(callee, "_rebuild_"))
		buf_puts(b, str_starts(callee, "_rebuild_parameter") ? "torch.nn.parameter.Parameter"
								     : "torch.Tensor");
	else
		buf_puts(b, pickle_class_name(pk, n, name, sizeof name));
}

enum err item_read_value(const struct item_source *src, struct item_value *out)
{
	CLEANUP(item_close) struct item it = { .pickle = BUF_INIT(0) };
	CLEANUP(buf_free) struct buf text = BUF_INIT(VALUE_TEXT_MAX);
	enum item_value_kind kind = ITEM_VALUE_JSON;

	TRY(item_open(src, ITEM_VALUE_PICKLE_MAX, &it));
	text.max = num_min(VALUE_TEXT_MAX, it.pickle.len + VALUE_TEXT_MIN);
	pnode root = pickle_root(it.pk);
	struct walk w = { it.pk, &text, true };
	if (pickle_kind(it.pk, root) == PK_BYTES) {
		struct str s = pickle_bytes(it.pk, root);
		kind = ITEM_VALUE_BYTES;
		buf_put(&text, s.p, s.n);
	} else {
		enum err e = put_node(&w, root, 0);
		/* A small stream of shared lists may be endless as text; then it stays opaque too. */
		if (e == ERR_LIMIT_EXCEEDED || (!e && text.failed == ERR_LIMIT_EXCEEDED)) {
			w.exact = false;
			text.failed = OK;
			e = OK;
		}
		TRY(e);
	}
	if (!w.exact) {
		kind = ITEM_VALUE_OPAQUE;
		text.len = 0;
		put_class(it.pk, root, &text);
	}
	TRY(buf_status(&text));
	out->kind = kind;
	out->text = text;
	text = BUF_INIT(0);
	return OK;
}

/* One pickle for one object: no memo, one protocol. */
static FALLIBLE enum err put_canonical(const struct item_source *src, struct buf *out)
{
	CLEANUP(item_close) struct item it = { .pickle = BUF_INIT(0) };

	TRY(item_open(src, ITEM_VALUE_PICKLE_MAX, &it));
	return pickle_put(it.pk, pickle_root(it.pk), out);
}

bool item_same_value(const struct item_source *a, const struct item_source *b)
{
	CLEANUP(buf_free) struct buf x = BUF_INIT(VALUE_TEXT_MAX), y = BUF_INIT(VALUE_TEXT_MAX);

	if (put_canonical(a, &x) || put_canonical(b, &y)) {
		err_clear();
		return false;
	}
	return x.len == y.len && memcmp(x.p, y.p, x.len) == 0;
}

/* Decimal digits → LONG1, little-endian two's complement. */
static FALLIBLE enum err put_big_int(struct buf *b, struct str digits, bool minus)
{
	unsigned char v[DIGITS_MAX / 2] = { 0 };
	size_t n = 0;

	if (digits.n > DIGITS_MAX)
		return ERR(LIMIT_EXCEEDED, "an integer of %zu digits", digits.n);
	for (size_t i = 0; i < digits.n; i++) {
		unsigned carry = (unsigned)(digits.p[i] - '0');
		for (size_t k = 0; k < n || carry; k++) {
			unsigned x = v[k] * 10u + carry;
			v[k] = (unsigned char)x;
			carry = x >> 8;
			n = k >= n ? k + 1 : n;
		}
	}
	unsigned carry = 1;
	for (size_t k = 0; minus && k <= n; k++) {
		unsigned x = (unsigned char)~v[k] + carry;
		v[k] = (unsigned char)x;
		carry = x >> 8;
	}
	n++; /* room for the sign; a byte more than needed is legal */
	if (n > 255)
		return ERR(LIMIT_EXCEEDED, "an integer of %zu digits", digits.n);
	buf_putc(b, 0x8a);
	buf_putc(b, (unsigned char)n);
	buf_put(b, v, n);
	return OK;
}

static FALLIBLE enum err put_number(struct buf *b, const struct jscan *js, const struct jscan_token *t)
{
	int64_t i;
	double f;

	if (jscan_i64(t, &i)) {
		if (i >= 0 && i < 256) {
			buf_putc(b, 'K');
			buf_putc(b, (unsigned char)i);
		} else if (i >= INT32_MIN && i <= INT32_MAX) {
			buf_putc(b, 'J');
			buf_le32(b, (uint32_t)(int32_t)i);
		} else {
			buf_puts(b, "\x8a\x08");
			buf_le64(b, (uint64_t)i);
		}
		return OK;
	}
	if (t->integer) {
		bool minus = t->raw.p[0] == '-';
		return put_big_int(b, (struct str){ t->raw.p + minus, t->raw.n - minus }, minus);
	}
	if (!jscan_double(t, &f))
		return jscan_bad(js, "a number that is no finite double");
	uint64_t bits;
	memcpy(&bits, &f, sizeof bits);
	buf_putc(b, 'G');
	for (int k = 64; k > 0; k -= 8)
		buf_putc(b, (unsigned char)(bits >> (k - 8)));
	return OK;
}

static FALLIBLE enum err put_text(struct buf *b, struct str s)
{
	if (s.n > UINT32_MAX)
		return ERR(LIMIT_EXCEEDED, "a string of %zu bytes", s.n);
	buf_putc(b, 'X');
	buf_le32(b, (uint32_t)s.n);
	buf_put(b, s.p, s.n);
	return OK;
}

/* A token is one opcode or two: containers are opened with a mark and filled when they end. */
static FALLIBLE enum err put_token(struct buf *b, const struct jscan *js, const struct jscan_token *t, struct arena *a)
{
	struct str s;

	switch (t->kind) {
	case JSCAN_OBJECT:
		buf_puts(b, "}(");
		return OK;
	case JSCAN_OBJECT_END:
		buf_putc(b, 'u');
		return OK;
	case JSCAN_ARRAY:
		buf_puts(b, "](");
		return OK;
	case JSCAN_ARRAY_END:
		buf_putc(b, 'e');
		return OK;
	case JSCAN_KEY:
	case JSCAN_STRING:
		TRY(jscan_str(js, t, a, &s));
		return put_text(b, s);
	case JSCAN_NUMBER:
		return put_number(b, js, t);
	case JSCAN_TRUE:
	case JSCAN_FALSE:
		buf_putc(b, t->kind == JSCAN_TRUE ? 0x88 : 0x89);
		return OK;
	default:
		buf_putc(b, 'N');
		return OK;
	}
}

enum err item_put_value_json(struct buf *b, struct str json)
{
	CLEANUP(buf_free) struct buf pickle = BUF_INIT(b->max);
	struct arena *a CLEANUP(arena_free_ptr) = arena_new(json.n * 2 + (1 << 20));
	struct jscan js = jscan_of(json, ERR_FORMAT_IMAGE);
	struct jscan_token t;

	NEED(a, "no memory for a value");
	buf_puts(&pickle, "\x80\x02");
	do {
		TRY(jscan_next(&js, &t));
		TRY(put_token(&pickle, &js, &t, a));
	} while (js.depth > 0);
	TRY(jscan_expect(&js, JSCAN_END, &t));
	buf_putc(&pickle, '.');
	TRY(buf_status(&pickle));
	return item_put_value_pickle(b, pickle.p, pickle.len);
}

/* Protocol 2 has no bytes: _codecs.encode(text, 'latin1'), as Python writes it. */
enum err item_put_value_bytes(struct buf *b, const void *bytes, size_t n)
{
	CLEANUP(buf_free) struct buf pickle = BUF_INIT(b->max);
	const unsigned char *p = bytes;
	uint64_t text_bytes = n;

	for (size_t i = 0; i < n; i++)
		text_bytes += p[i] >> 7;
	if (text_bytes > UINT32_MAX)
		return ERR(LIMIT_EXCEEDED, "a bytes value of %zu bytes", n);
	buf_puts(&pickle, "\x80\x02" "c_codecs\nencode\nX");
	buf_le32(&pickle, (uint32_t)text_bytes);
	for (size_t i = 0; i < n; i++) {
		if (p[i] >= 0x80)
			buf_putc(&pickle, (unsigned char)(0xC0 | p[i] >> 6));
		buf_putc(&pickle, p[i] < 0x80 ? p[i] : (unsigned char)(0x80 | (p[i] & 0x3F)));
	}
	TRY(put_text(&pickle, STR("latin1")));
	buf_puts(&pickle, "\x86R.");
	TRY(buf_status(&pickle));
	return item_put_value_pickle(b, pickle.p, pickle.len);
}
